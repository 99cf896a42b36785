//! `walpost generate`: man pages and completions, out of the definition that parses the command line.

use std::{fs, io, path::Path};

use clap::CommandFactory as _;
use clap_complete::aot::{Shell, generate_to};
use clap_mangen::Man;

use crate::cli::Cli;

/// Shells that packages bring completions for.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// Writes `walpost.1` and a page for each command that is not hidden.
pub fn man(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    pages(&command, folder)
}

/// Writes completions; only what is shown by `--help` is completed.
pub fn completions(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    for shell in SHELLS {
        generate_to(shell, &mut Cli::command(), "walpost", folder)?;
    }
    Ok(())
}

fn pages(command: &clap::Command, folder: &Path) -> io::Result<()> {
    for part in command.get_subcommands().filter(|part| !part.is_hide_set()) {
        pages(part, folder)?;
    }
    let page = page(command)?;
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    fs::write(folder.join(format!("{name}.1")), page)
}

fn page(command: &clap::Command) -> io::Result<Vec<u8>> {
    let man =
        Man::new(command.clone()).manual("walpost").date("").source(concat!("walpost ", env!("CARGO_PKG_VERSION")));
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.get_subcommands().any(|part| !part.is_hide_set()) {
        man.render_subcommands_section(&mut page)?;
    }
    if let Some(text) = command.get_after_help() {
        page.extend(verbatim(&text.to_string()).into_bytes());
    }
    Ok(page)
}

/// The examples keep their lines, which the ready-made section would join.
fn verbatim(text: &str) -> String {
    let mut page = ".SH EXAMPLE\n.nf\n".to_owned();
    for line in text.strip_prefix("Example:\n").unwrap_or(text).lines() {
        // a dot or a quote at the start of a line would be a request
        let guard = if line.starts_with(['.', '\'']) { "\\&" } else { "" };
        page.push_str(guard);
        page.push_str(&line.replace('\\', "\\e").replace('-', "\\-"));
        page.push('\n');
    }
    page + ".fi\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_keep_their_lines_and_their_signs() {
        let page = verbatim("Example:\n  walpost a --b\n.c \\d");
        assert_eq!(page, ".SH EXAMPLE\n.nf\n  walpost a \\-\\-b\n\\&.c \\ed\n.fi\n");
    }
}
