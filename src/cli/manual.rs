//! `dovetail completions` and `dovetail man`: the command line's own description, for shells and as
//! man pages.

use std::path::{Path, PathBuf};

use clap_complete::{Generator, Shell};
use clap_mangen::Man;
use serde_json::json;

use super::output;
use crate::human::file_failure;
use crate::{Context, Error, Result};

/// Arguments of `dovetail completions`.
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// Shell that reads the completions
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

/// Arguments of `dovetail man`.
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Folder of the man pages. It is made if there is none, and pages of these names are replaced
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Prints the completions of a shell.
///
/// # Errors
/// [`Error::Exhausted`] if standard output takes no more.
pub fn run_completions(args: &CompletionsArgs) -> Result<()> {
    let text = completions(args.shell)?;
    match output::is_json() {
        true => output::write_line(json!({ "shell": args.shell.to_string(), "completions": text }).to_string()),
        false => output::write_line(text.trim_end()),
    }
}

/// Writes the man pages.
///
/// # Errors
/// [`Error::Invalid`] if the folder or a page cannot be written.
pub fn run_man(args: &ManArgs) -> Result<()> {
    let refused = |path: &Path, error: &std::io::Error| Error::Invalid(file_failure(path, error));
    std::fs::create_dir_all(&args.folder)
        .map_err(|error| refused(&args.folder, &error))
        .context(|| "creating the folder of man pages")?;
    for (name, page) in pages()? {
        let path = args.folder.join(name);
        std::fs::write(&path, page).map_err(|error| refused(&path, &error)).context(|| "writing a man page")?;
        match output::is_json() {
            true => output::json(&json!({ "page": path })),
            false => output::line(path.display().to_string()),
        }
    }
    Ok(())
}

/// Returns the command line as people see it. A copy, because clap cannot remove the commands that
/// only the server starts.
fn visible() -> clap::Command {
    let whole = super::command();
    let shown: Vec<clap::Command> = whole.get_subcommands().filter(|command| !command.is_hide_set()).cloned().collect();
    let mut copy = clap::Command::new("dovetail")
        .about(whole.get_about().cloned().unwrap_or_default())
        .version(super::VERSION)
        .propagate_version(true)
        .disable_help_subcommand(true)
        .args(whole.get_arguments().cloned())
        .subcommands(shown);
    copy.build();
    copy
}

fn completions(shell: Shell) -> Result<String> {
    let mut command = visible();
    command.set_bin_name("dovetail");
    let mut text = Vec::new();
    shell
        .try_generate(&command, &mut text)
        .map_err(|error| Error::Internal(format!("generating the completions of {shell}: {error}")))?;
    String::from_utf8(text).map_err(|error| Error::Internal(error.to_string()))
}

/// Returns the man pages, by the name of their file.
fn pages() -> Result<Vec<(String, Vec<u8>)>> {
    let whole = visible();
    let commands = std::iter::once(&whole).chain(whole.get_subcommands());
    let page = |command: &clap::Command| {
        let page = Man::new(command.clone()).source(concat!("dovetail ", env!("CARGO_PKG_VERSION")));
        let name = page.get_filename();
        let mut text = Vec::new();
        page.render(&mut text).map_err(|error| Error::Internal(format!("the man page {name}: {error}")))?;
        Ok((name, text))
    };
    commands.map(page).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    fn names() -> Vec<String> {
        let command = super::super::command();
        let shown = command.get_subcommands().filter(|command| !command.is_hide_set());
        shown.map(|command| command.get_name().to_owned()).collect()
    }

    #[test]
    fn every_shell_completes_every_command_and_option_and_nothing_hidden() {
        for &shell in Shell::value_variants() {
            let text = completions(shell).unwrap();
            for name in names() {
                assert!(text.contains(&name), "{shell}: {name}");
            }
            for option in ["host-memory", "connect-timeout", "retain-seconds"] {
                assert!(text.contains(option), "{shell}: {option}");
            }
            for hidden in ["device-process ", "arena-tmpfs"] {
                assert!(!text.contains(hidden), "{shell}: {hidden}");
            }
        }
    }

    #[test]
    fn every_command_has_a_page_with_its_options() {
        let pages = pages().unwrap();
        let found: Vec<&str> = pages.iter().map(|(name, _)| name.as_str()).collect();
        let expected: Vec<String> = std::iter::once("dovetail.1".to_owned())
            .chain(names().iter().map(|name| format!("dovetail-{name}.1")))
            .collect();
        assert_eq!(found, expected);
        let command = super::super::command();
        for (name, page) in &pages {
            let page = String::from_utf8(page.clone()).unwrap().replace("\\-", "-");
            assert!(page.contains(&format!(".TH {}", name.trim_end_matches(".1"))), "{name}: {page}");
            let Some(command) = name.strip_prefix("dovetail-").and_then(|name| name.strip_suffix(".1")) else {
                continue;
            };
            let command = super::super::command().find_subcommand(command).cloned().unwrap();
            for option in command.get_arguments().filter(|arg| !arg.is_hide_set()).filter_map(clap::Arg::get_long) {
                assert!(page.contains(&format!("--{option}")), "{name} has no word on --{option}");
            }
        }
        let whole = String::from_utf8(pages[0].1.clone()).unwrap();
        for command in command.get_subcommands() {
            assert_eq!(
                whole.contains(&format!("dovetail\\-{}", command.get_name().replace('-', "\\-"))),
                !command.is_hide_set(),
                "{}",
                command.get_name()
            );
        }
    }
}
