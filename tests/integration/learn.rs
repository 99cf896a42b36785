//! What the pages tell people to type is typed here, against real servers, and what they link to is there.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use crate::services::{
    kafka::Kafka,
    postgres::{Postgres, Settings, Version},
    run,
};

/// A fenced block of a page.
struct Block {
    language: String,
    text: String,
    /// The module that runs it in another way: `<!-- tested by module -->` stands before it.
    elsewhere: Option<String>,
}

fn project() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn page(name: &str) -> String {
    fs::read_to_string(project().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut elsewhere = None;
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if let Some(module) = line.strip_prefix("<!-- tested by ") {
            elsewhere = module.strip_suffix(" -->").map(str::to_owned);
        } else if let Some(language) = line.strip_prefix("```") {
            let text: Vec<_> = lines.by_ref().take_while(|line| *line != "```").collect();
            blocks.push(Block { language: language.to_owned(), text: text.join("\n"), elsewhere: elsewhere.take() });
        }
    }
    blocks
}

/// A server, and a folder of commands that a reader has on the path.
struct Desk {
    server: Postgres,
    commands: PathBuf,
}

impl Desk {
    fn new() -> Self {
        // that of the machine, since psql comes with it
        let server = Postgres::start(Version::System, &Settings::default());
        let commands = run::folder("commands");
        let psql = server.program("psql");
        let write = |name: &str, text: String| {
            let path = commands.join(name);
            fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("a file of our own");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("our own file");
        };
        write("psql", format!("exec {} -X -v ON_ERROR_STOP=1 \"$@\"", psql.display()));
        write("walpost", format!("exec {} \"$@\"", env!("CARGO_BIN_EXE_walpost")));
        // the brokers of the tests come without the tools: this one only tells what it was asked for
        write("kafka-console-consumer.sh", "echo consumer asked: \"$@\"".to_owned());
        Self { server, commands }
    }

    /// Types the blocks of a page, one after the other in one shell. Returns what was printed.
    fn types(&self, blocks: &[Block], slot: Option<&str>) -> String {
        let database = self.server.database();
        database
            .execute("CREATE TABLE orders (id bigint PRIMARY KEY, state text); INSERT INTO orders VALUES (42, 'new')");
        let mut script = "set -eu\ntrap 'kill $(jobs -p) 2>/dev/null; wait' EXIT\n".to_owned();
        for block in blocks.iter().filter(|block| block.elsewhere.is_none()) {
            match block.language.as_str() {
                "sh" => script += &in_the_background(&block.text),
                "sql" => script.extend(["psql \"$WALPOST_POSTGRES_URL\" <<'SQL'\n", &block.text, "\nSQL"]),
                _ => {}
            }
            script.push('\n');
        }
        script += &until_confirmed(slot.unwrap_or("walpost"));
        let script = script
            .replace("postgres://owner@localhost:5432/app", &database.url())
            .replace("localhost:9092", &Kafka::shared().brokers());
        let mut command = Command::new("bash");
        command.args(["-c", &script]).current_dir(run::folder("reader")).env_clear();
        command.env("PATH", format!("{}:{}", self.commands.display(), std::env::var("PATH").unwrap_or_default()));
        command.env("WALPOST_HTTP_LISTEN", format!("127.0.0.1:{}", run::free_port()));
        command.envs(slot.map(|slot| ("WALPOST_POSTGRES_SLOT", slot)));
        let output = command.output().expect("bash runs");
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{script}\n\n{said}");
        said
    }
}

/// A reader looks at Kafka before he stops walpost.
fn until_confirmed(slot: &str) -> String {
    format!(
        "ask() {{ psql -qAt \"$WALPOST_POSTGRES_URL\" -c \"SELECT $1\"; }}
        end=$(ask 'pg_current_wal_insert_lsn()')
        until [ \"$(ask \"confirmed_flush_lsn >= '$end' FROM pg_replication_slots WHERE slot_name = '{slot}'\")\" = t ]; do
            sleep 0.1
        done\n"
    )
}

/// `walpost run` is typed in a terminal of its own; the next block is typed once it streams.
fn in_the_background(text: &str) -> String {
    let wait = "walpost run &\nuntil walpost status --probe ready >/dev/null 2>&1; do sleep 0.1; done";
    text.lines().map(|line| if line == "walpost run" { wait } else { line }).collect::<Vec<_>>().join("\n") + "\n"
}

#[test]
fn every_command_of_readme_and_getting_started_does_what_it_says() {
    let desk = Desk::new();
    let readme = desk.types(&blocks(&page("README.md")), Some("readme"));
    assert!(readme.contains("COMMIT"), "{readme}");
    let record =
        Kafka::shared().read_until(&["outbox.order.paid"], crate::outbox::PATIENCE, |records| !records.is_empty());
    assert_eq!(record[0].key.as_deref(), Some(&b"42"[..]));
    let started = desk.types(&blocks(&page("docs/getting-started.md")), None);
    let asked =
        format!("consumer asked: --bootstrap-server {} --topic outbox.order.shipped", Kafka::shared().brokers());
    for said in ["logical", &asked, "\"topic\":\"outbox.order.shipped\"", "\"topic\":\"shop.signed-up\"", "acme"] {
        assert!(started.contains(said), "{said} is not in {started}");
    }
    let record =
        Kafka::shared().read_until(&["outbox.order.shipped"], crate::outbox::PATIENCE, |records| !records.is_empty());
    assert_eq!(record[0].value.as_deref(), Some(&b"{\"order\": 42}"[..]));
}

#[test]
fn every_other_command_is_tested_where_the_page_says() {
    let modules = include_str!("main.rs");
    let mut elsewhere = 0;
    for name in ["README.md", "docs/getting-started.md", "docs/install.md"] {
        for block in blocks(&page(name)).iter().filter(|block| block.language == "sh") {
            let Some(module) = &block.elsewhere else {
                assert_ne!(name, "docs/install.md", "nobody tests: {}", block.text);
                continue;
            };
            assert!(modules.contains(&format!("mod {module};")), "{name}: there is no module {module}");
            elsewhere += 1;
        }
    }
    assert!(elsewhere >= 4, "{elsewhere}");
    let makefile = page("Makefile");
    for line in page("README.md").lines().filter_map(|line| line.strip_prefix("make ")) {
        let target = line.split(' ').next().expect("a target");
        assert!(makefile.contains(&format!("\n{target}: ")), "make {target}");
    }
}

#[test]
fn every_link_leads_somewhere() {
    let mut pages: Vec<_> =
        fs::read_dir(project().join("docs")).expect("docs").map(|entry| entry.unwrap().path()).collect();
    pages.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages.extend([project().join("README.md"), project().join("CHANGELOG.md")]);
    let mut broken = BTreeSet::new();
    for path in pages {
        let text = fs::read_to_string(&path).expect("a page");
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.starts_with("http") {
                continue;
            }
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { path.clone() } else { path.with_file_name(file) };
            let found = target.exists() && (heading.is_empty() || anchors(&target).contains(heading));
            if !found {
                broken.insert(format!("{}: {link}", path.file_name().unwrap().to_string_lossy()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

/// The names of headings, as GitHub makes them.
fn anchors(page: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(page).unwrap_or_default();
    let headings = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let kept = |letter: &char| letter.is_alphanumeric() || ['-', '_', ' '].contains(letter);
    headings.map(|heading| heading.to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")).collect()
}

#[test]
fn the_readme_is_short_and_every_page_is_in_the_index() {
    assert!(page("README.md").lines().count() < 200);
    let index = page("docs/README.md");
    for entry in fs::read_dir(project().join("docs")).expect("docs") {
        let name = entry.unwrap().file_name().into_string().expect("UTF-8");
        assert!(name == "README.md" || name == "picture.svg" || index.contains(&format!("({name})")), "{name}");
    }
}
