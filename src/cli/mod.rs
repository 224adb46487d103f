//! The command line: all operations of Dovetail from a shell, through the interfaces of any client.
//!
//! ```text
//!   dovetail serve ── settings (flags > environment > file > defaults) ──► service::Server
//!   dovetail put, get, join, tables, ... ── client (Flight over TCP) ────► any server
//!   dovetail demo ── both, in one process, over loopback
//! ```
//!
//! Results go to stdout, in a form for people or, with `--json`, as one JSON value per line.
//! Progress, logs and errors go to stderr. The exit status is 0 for success, 1 for a failure, and 2
//! for a wrong command line or configuration. It is 130 for work that Ctrl-C interrupted, and 3 or
//! 4 for findings of `doctor`.
//!
//! The client commands know only the wire protocol: any Flight client can do the same.

mod arena_tmpfs;
mod client;
mod demo;
mod describe;
mod device_process;
mod doctor;
mod files;
mod get;
mod interrupt;
mod jobs;
mod join;
mod keys;
mod logging;
mod manual;
mod names;
pub mod output;
pub mod progress;
mod put;
mod rows;
mod serve;
mod settings;
mod signals;
mod tables;
#[cfg(test)]
mod tests;
mod then;
mod times;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::{Error, Result, lines, panics};

/// Commit that the crate was built from.
pub const COMMIT: &str = env!("DOVETAIL_COMMIT");

/// Version of the crate, with the commit that it was built from.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("DOVETAIL_COMMIT"), ")");

/// clap id of `--config`, which names a file of settings and is not a setting.
const CONFIG_ID: &str = "config";

/// Time limit, after a failure, for the threads that read and write files.
const CLEANUP_MAX: Duration = Duration::from_secs(2);

/// Exit status for a wrong command line or configuration.
const EXIT_USAGE: u8 = 2;

/// An Arrow Flight server that joins large tables, and its client.
#[derive(Debug, Parser)]
#[command(name = "dovetail", version = VERSION, max_term_width = 120, propagate_version = true)]
struct Cli {
    /// Print JSON, one value per line
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the server
    Serve(Box<serve::ServeArgs>),
    /// Run the main job on generated TPC-H tables: start a server, upload, join and check
    Demo(demo::DemoArgs),
    /// Upload files or standard input (Parquet, Arrow IPC, CSV) as tables
    Put(put::PutArgs),
    /// Fetch a table or the result of a job into a file, or print it
    Get(get::GetArgs),
    /// Join two tables
    Join(join::JoinArgs),
    /// Show the plan of a join, its predicted cost and the reasons, without running the join
    Explain(join::ExplainArgs),
    /// List tables and kept results
    Tables(tables::TablesArgs),
    /// List jobs, or show one job
    Jobs(jobs::JobsArgs),
    /// Stop a job and release its result
    Cancel(jobs::CancelArgs),
    /// Drop tables
    Drop(tables::DropArgs),
    /// Show the devices of a server and the links between them
    Topology(tables::TopologyArgs),
    /// Check this host for a server, and say what to change
    Doctor(doctor::DoctorArgs),
    /// Print the completions of a shell, to be read by the shell at its start
    Completions(manual::CompletionsArgs),
    /// Write the manual as man pages into a folder, one page per command
    Man(manual::ManArgs),
    /// Run the joins of one device. The server starts this command
    #[command(hide = true)]
    DeviceProcess(device_process::DeviceProcessArgs),
    /// Mount a tmpfs for the host memory of a server. The server starts this command
    #[command(hide = true)]
    ArenaTmpfs(arena_tmpfs::ArenaTmpfsArgs),
}

/// Runs the command line and returns the process's exit status.
pub fn main() -> ExitCode {
    let words = connection_behind_command(std::env::args_os().collect());
    let (cli, matches) = match read::<Cli>(command(), words) {
        Ok(read) => read,
        Err(status) => return status,
    };
    // For a command that asks no server, an invalid value is in the command line or the
    // configuration.
    let asks_a_server = asks_a_server(&cli.command);
    // Keep the writer of lines until the last error is printed.
    let _flush = match outlives_readers(&cli.command).then(lines::start).transpose() {
        Ok(flush) => flush,
        Err(error) => {
            output::error(&error);
            return ExitCode::FAILURE;
        }
    };
    if asks_a_server {
        panics::tell(output::error);
    }
    let outcome = match cli.command {
        Command::Serve(args) => {
            let matches = matches.subcommand_matches("serve").unwrap_or(&matches);
            settings::layer(matches, args.config.as_deref()).and_then(|layered| serve::run(&args, &layered))
        }
        Command::Demo(args) => block_on(demo::run(args)),
        Command::Put(args) => block_on(put::run(args)),
        Command::Get(args) => block_on(get::run(args)),
        Command::Join(args) => block_on(join::run(args)),
        Command::Explain(args) => block_on(join::run_explain(args)),
        Command::Tables(args) => block_on(tables::run_tables(args)),
        Command::Jobs(args) => block_on(jobs::run_jobs(args)),
        Command::Cancel(args) => block_on(jobs::run_cancel(args)),
        Command::Drop(args) => block_on(tables::run_drop(args)),
        Command::Topology(args) => block_on(tables::run_topology(args)),
        Command::Doctor(args) => {
            return doctor::run(&args).unwrap_or_else(|error| status_of(Err(error), asks_a_server));
        }
        Command::Completions(args) => manual::run_completions(&args),
        Command::Man(args) => manual::run_man(&args),
        Command::DeviceProcess(args) => device_process::run(&args),
        Command::ArenaTmpfs(args) => arena_tmpfs::run(&args),
    };
    status_of(outcome, asks_a_server)
}

/// Runs another program with the command line, errors and exit status of `dovetail`. The program's
/// arguments need a flag `json`, and the program asks no server.
pub fn run_program<A: CommandFactory + FromArgMatches>(run: impl FnOnce(&A, &ArgMatches) -> Result<()>) -> ExitCode {
    let command = A::command().mut_args(with_negative_numbers);
    match read(command, std::env::args_os().collect()) {
        Ok((args, matches)) => status_of(run(&args, &matches), false),
        Err(status) => status,
    }
}

/// Parses a command line. For a wrong command line or a request for help, prints the answer and
/// returns the exit status.
fn read<A: FromArgMatches>(mut command: clap::Command, words: Vec<OsString>) -> Result<(A, ArgMatches), ExitCode> {
    let given: Vec<String> = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let matches = command.try_get_matches_from_mut(words);
    let read = matches.and_then(|matches| Ok((A::from_arg_matches(&matches)?, matches)));
    let error = match read {
        Ok((args, matches)) => {
            output::set_json(matches.get_flag("json"));
            return Ok((args, matches));
        }
        Err(error) => error.format(&mut command),
    };
    let error = with_variable(without_misleading_tips(error), &given, |name| std::env::var(name).ok());
    let error = with_what_numbers_it_takes(error);
    // Parsing failed, so look for `--json` in the words. Help and version come this way too, with
    // status 0.
    output::set_json(error.use_stderr() && given.iter().any(|word| word == "--json"));
    if output::is_json() {
        output::error(&Error::Invalid(settings::sentence(&error)));
    } else {
        // If printing fails, the status still shows the error.
        let _ = error.print();
    }
    Err(ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(EXIT_USAGE)))
}

/// Prints an error, and returns the exit status.
fn status_of(outcome: Result<()>, asks_a_server: bool) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) if output::reader_left() => ExitCode::SUCCESS,
        Err(error) => {
            output::error(&error);
            match error {
                Error::Invalid(_) if !asks_a_server => ExitCode::from(EXIT_USAGE),
                _ => interrupt::exit_code().unwrap_or(ExitCode::FAILURE),
            }
        }
    }
}

/// True for a command that is a client of a server.
fn asks_a_server(command: &Command) -> bool {
    !matches!(
        command,
        Command::Serve(_)
            | Command::Doctor(_)
            | Command::Completions(_)
            | Command::Man(_)
            | Command::DeviceProcess(_)
            | Command::ArenaTmpfs(_)
    )
}

/// True for a command that continues even if writing to standard error or standard output fails.
fn outlives_readers(command: &Command) -> bool {
    match command {
        Command::Serve(args) => args.runs(),
        command => matches!(command, Command::DeviceProcess(_)),
    }
}

/// Moves connection options that precede the command behind it. Commands that ask a server have
/// these options, and others (`serve`) do not.
fn connection_behind_command(words: Vec<OsString>) -> Vec<OsString> {
    let connection = client::ConnectArgs::augment_args(clap::Command::new("connection"));
    let flags: Vec<String> =
        connection.get_arguments().filter_map(|arg| Some(format!("--{}", arg.get_long()?))).collect();
    let (mut before, mut moved, mut rest) = (Vec::new(), Vec::new(), words.into_iter());
    before.extend(rest.next());
    while let Some(word) = rest.next() {
        let text = word.to_string_lossy().into_owned();
        let (flag, value) = text.split_once('=').map_or((text.as_str(), None), |(flag, value)| (flag, Some(value)));
        if flags.iter().any(|known| known == flag) {
            moved.push(word);
            if value.is_none() {
                moved.extend(rest.next());
            }
            continue;
        }
        before.push(word);
        if !text.starts_with('-') {
            break;
        }
    }
    before.into_iter().chain(moved).chain(rest).collect()
}

/// Removes misleading tips. One suggests an option that is hardly similar to the given one
/// (`--help` for `--sep`). Another explains how to write a table or file name that begins with
/// hyphens.
fn without_misleading_tips(mut error: clap::Error) -> clap::Error {
    let Some(ContextValue::String(written)) = error.get(ContextKind::InvalidArg) else { return error };
    let written = written.clone();
    if let Some(ContextValue::String(tip)) = error.get(ContextKind::SuggestedArg) {
        let is_typo = 3 * strsim::osa_distance(&written, tip) <= written.trim_start_matches('-').len();
        if !is_typo && !tip.starts_with(&written) {
            error.remove(ContextKind::SuggestedArg);
        }
    }
    if let Some(ContextValue::StyledStrs(mut tips)) = error.remove(ContextKind::Suggested) {
        tips.retain(|tip| !tip.to_string().starts_with("to pass "));
        if !tips.is_empty() {
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
        }
    }
    error
}

/// Replaces the option in clap's error by the environment variable, if the refused value came from
/// there. `given` has the words of the command line, and `variable` returns the values of the
/// environment.
fn with_variable(mut error: clap::Error, given: &[String], variable: impl Fn(&str) -> Option<String>) -> clap::Error {
    let Some(flag) = settings::flag_of(&error) else { return error };
    let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue) else { return error };
    let is_given = |word: &String| word.strip_prefix("--").is_some_and(|word| word.split('=').next() == Some(&*flag));
    if given.iter().any(is_given) {
        return error;
    }
    let command = command();
    let args = command.get_subcommands().flat_map(clap::Command::get_arguments);
    let args = args.filter(|arg| arg.get_long() == Some(&*flag));
    let mut names = args.filter_map(|arg| Some(arg.get_env()?.to_string_lossy().into_owned()));
    // The refused value may be one of a list.
    let holds = |name: &String| variable(name).is_some_and(|text| text.contains(value));
    if let Some(name) = names.find(holds) {
        error.insert(ContextKind::InvalidArg, ContextValue::String(name));
    }
    error
}

/// Adds the accepted numbers to the error for a wrong number, because clap only has the parser's
/// message.
fn with_what_numbers_it_takes(error: clap::Error) -> clap::Error {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let (Some(option), Some(value)) = (context(ContextKind::InvalidArg), context(ContextKind::InvalidValue)) else {
        return error;
    };
    if error.kind() != ErrorKind::ValueValidation {
        return error;
    }
    let words = error.to_string();
    let range = words.lines().find_map(|line| range_in_words(line.rsplit_once(" is not in ")?.1, value));
    let takes = match range {
        Some(range) => range,
        None if !words.contains("invalid digit found in string") => return error,
        None if value.starts_with('-') => ", 0 or more".into(),
        None => String::new(),
    };
    let said = format!(
        "invalid value '{value}' for '{option}': it takes a whole number{takes}\n\nFor more information, try \
         '--help'.\n"
    );
    clap::Error::raw(ErrorKind::ValueValidation, said)
}

/// Returns the words after "a whole number" for a range in Rust's syntax: ` from 1 to 64` for
/// `1..=64`. Omits an upper end that only the type sets, unless `value` exceeds it.
fn range_in_words(range: &str, value: &str) -> Option<String> {
    let (least, most) = range.trim().split_once("..")?;
    let least: i64 = least.parse().ok()?;
    let most = most.trim_start_matches('=').parse::<u64>().ok();
    let is_told = |most: &u64| *most < u64::from(u32::MAX) || value.parse::<u64>().is_ok_and(|value| value > *most);
    Some(match most.filter(is_told) {
        Some(most) => format!(" from {least} to {most}"),
        None => format!(", {least} or more"),
    })
}

/// Returns the whole command line, in which `serve`'s switches take optional values.
fn command() -> clap::Command {
    Cli::command()
        .mut_subcommand("serve", settings::with_valued_switches)
        .mut_subcommands(|command| command.mut_args(with_negative_numbers))
}

/// Accepts negative numbers as values. Otherwise clap would report an unknown option instead of the
/// accepted numbers.
fn with_negative_numbers(arg: clap::Arg) -> clap::Arg {
    match arg.get_action().takes_values() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.map_err(|error| Error::Unavailable(format!("starting the threads for network work: {error}")))
}

fn block_on(work: impl Future<Output = Result<()>>) -> Result<()> {
    let runtime = runtime()?;
    let outcome = panics::as_error(|_| "the command ended early".into(), || runtime.block_on(work));
    // An abandoned blocking read must not keep the process alive. After a failure, a thread that
    // writes a file gets time to remove it.
    runtime.shutdown_timeout(if outcome.is_err() { CLEANUP_MAX } else { Duration::ZERO });
    outcome
}
