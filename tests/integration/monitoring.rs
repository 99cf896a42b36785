//! `deploy/grafana` and `deploy/prometheus`, by a real Prometheus: every panel shows something, every alert is right.

use std::{fs, path::Path, process::Command};

use serde_json::Value;

use crate::{
    outbox::{Outbox, PATIENCE},
    services::{
        http,
        kafka::Kafka,
        postgres::{Postgres, Settings, Version},
        process::Process,
        run, wait_for, wait_until,
    },
};

const DASHBOARD: &str = include_str!("../../deploy/grafana/walpost.json");
const ALERTS: &str = include_str!("../../deploy/prometheus/alerts.yml");
const RUNBOOK: &str = include_str!("../../docs/runbook.md");

fn promtool(args: &[&str]) {
    let mut command = Command::new(run::fetched("prometheus").join("promtool"));
    let output = command.args(args).current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("promtool starts");
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{args:?}: {}{}", said(&output.stdout), said(&output.stderr));
}

#[test]
fn every_alert_fires_when_it_should_and_only_then() {
    promtool(&["check", "rules", "deploy/prometheus/alerts.yml"]);
    promtool(&["test", "rules", "tests/alerts/alerts_test.yml"]);
    let tested = include_str!("../alerts/alerts_test.yml");
    for alert in ALERTS.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        let fires = format!("alertname: {alert}\n        exp_alerts:");
        assert!(tested.contains(&fires), "no test sees {alert} fire");
    }
}

#[test]
fn every_alert_names_a_section_of_the_runbook_that_exists() {
    let anchor = |heading: &str| heading.to_lowercase().replace(' ', "-");
    let headings: Vec<_> = RUNBOOK.lines().filter_map(|line| line.strip_prefix("## ")).map(anchor).collect();
    let alerts = ALERTS.matches("- alert: ").count();
    let links: Vec<_> =
        ALERTS.lines().filter_map(|line| line.trim().strip_prefix("runbook_url: docs/runbook.md#")).collect();
    assert_eq!(links.len(), alerts, "an alert without a section");
    for link in links {
        assert!(headings.iter().any(|heading| heading == link), "{link} is none of {headings:?}");
    }
}

/// A Prometheus of the test's own that scrapes one address several times a second.
struct Prometheus {
    _process: Process,
    port: u16,
}

impl Prometheus {
    fn scraping(target: u16) -> Self {
        let (folder, port) = (run::folder("prometheus"), run::free_port());
        let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/prometheus/alerts.yml");
        let config = format!(
            "global: {{ scrape_interval: 500ms, evaluation_interval: 1s }}\nrule_files: ['{}']\nscrape_configs:\n  - \
             {{ job_name: walpost, static_configs: [{{ targets: ['127.0.0.1:{target}'] }}] }}\n",
            rules.display()
        );
        fs::write(folder.join("prometheus.yml"), config).expect("our own folder");
        let mut command = Command::new(run::fetched("prometheus").join("prometheus"));
        command.args(["--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn"]);
        command.arg(format!("--web.listen-address=127.0.0.1:{port}"));
        Self { _process: Process::start("prometheus", &folder, &mut command), port }
    }

    /// The series that a query finds.
    fn query(&self, query: &str) -> Vec<Value> {
        let encoded = query.bytes().map(|byte| format!("%{byte:02x}")).collect::<Vec<_>>().concat();
        let Ok(answer) = http::get(self.port, &format!("/api/v1/query?query={encoded}")) else { return Vec::new() };
        let answer: Value = serde_json::from_str(&answer.body).unwrap_or_default();
        assert_ne!(answer["status"], "error", "{query}: {answer}");
        answer["data"]["result"].as_array().cloned().unwrap_or_default()
    }
}

/// (panel, query) of the dashboard, its variables filled in.
fn panels() -> Vec<(String, String)> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("the dashboard is JSON");
    let panels = dashboard["panels"].as_array().expect("panels").iter();
    let queries = panels.flat_map(|panel| {
        let title = panel["title"].as_str().expect("a title").to_owned();
        let targets = panel["targets"].as_array().expect("targets").iter();
        targets.map(move |target| (title.clone(), target["expr"].as_str().expect("a query").to_owned()))
    });
    let filled =
        |query: String| query.replace("$job", ".*").replace("$__rate_interval", "30s").replace("$__range", "1h");
    queries.map(|(title, query)| (title, filled(query))).collect()
}

#[test]
fn every_panel_of_the_dashboard_shows_something() {
    let server = Postgres::start(Version::NEWEST, &Settings::default().set("max_slot_wal_keep_size", "1GB"));
    let outbox = Outbox::new(&server, Kafka::shared());
    for event_type in ["t", "small", "letters"] {
        outbox.topic(event_type, 1);
    }
    let small = outbox.topic_name("tiny");
    outbox.kafka.create_topic(&small, 1, &[("max.message.bytes", "2000")]);
    let env = [
        ("WALPOST_KAFKA_DEAD_LETTER_TOPIC", &*outbox.topic_name("letters")),
        ("WALPOST_RETENTION_KEEP", "1h"),
        ("WALPOST_RETENTION_INTERVAL", "1s"),
        ("WALPOST_KAFKA_PROPERTIES_STATISTICS_INTERVAL_MS", "5000"),
    ];
    let walpost = outbox.relay(&env);
    let prometheus = Prometheus::scraping(walpost.http_port());
    wait_until(PATIENCE, "Prometheus answers", || !prometheus.query("walpost_streaming == 1").is_empty());
    outbox.execute("INSERT INTO outbox (event_type, payload) SELECT 't', to_json(n) FROM generate_series(1, 100) n");
    let noise = "(SELECT to_json(string_agg(md5(n::text), '')) FROM generate_series(1, 200) n)";
    outbox.execute(&format!("INSERT INTO outbox (event_type, payload) SELECT 'tiny', {noise}"));
    outbox.wait_until_confirmed();
    outbox.execute("INSERT INTO outbox (event_type) VALUES ('no-such-topic')");
    for (title, query) in panels() {
        wait_for(PATIENCE, &format!("panel {title}: {query}"), || {
            let series = prometheus.query(&query);
            let is_number = |series: &Value| series["value"][1].as_str().is_some_and(|value| value != "NaN");
            (!series.is_empty() && series.iter().any(is_number)).then_some(())
        });
    }
    let fires = |alert: &str| !prometheus.query(&format!("ALERTS{{alertname=\"{alert}\"}}")).is_empty();
    wait_until(PATIENCE, "the dead letter is told", || fires("WalpostDeadLetters"));
    // a scrape may come late on a busy machine: what counts is that they are not told for long
    wait_until(PATIENCE, "nothing else is told", || {
        !["WalpostDown", "WalpostNotStreaming", "WalpostSlotLost"].iter().any(|alert| fires(alert))
    });
}
