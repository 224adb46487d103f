//! `dovetail serve`: the server, from settings to the last drained stream.

use std::fs::File;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::settings::{Layered, unknown_variables};
use super::signals::{END_WITHIN, EndSignals};
use super::{logging, output};
use crate::human::file_failure;
use crate::service::settings::Settings;
use crate::service::{Server, Shared};
use crate::{Context, Error, Result, lines};

/// Arguments of `dovetail serve`.
#[derive(Debug, clap::Args)]
pub struct ServeArgs {
    #[command(flatten)]
    settings: Settings,

    /// File of settings (TOML), with one "flag-name = value" per line
    #[arg(long, env = "DOVETAIL_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Check the settings and the files that they name, print the settings as a configuration file
    /// with the source of each value, and exit
    #[arg(long)]
    print_config: bool,

    /// Check the settings and the files that they name, and exit
    #[arg(long, conflicts_with = "print_config")]
    check_config: bool,

    /// File to create when the server listens, with its addresses as one line of JSON: {"flight":
    /// "IP:PORT", "admin": "IP:PORT"}. The server removes the file when it ends
    #[arg(long, value_name = "FILE")]
    ready_file: Option<PathBuf>,
}

impl ServeArgs {
    /// True if the command runs a server, which must outlive the readers of its output.
    pub fn runs(&self) -> bool {
        !self.print_config && !self.check_config
    }
}

/// Runs the server until a signal stops it.
///
/// # Errors
/// The errors of starting or running the server.
pub fn run(args: &ServeArgs, layered: &Layered) -> Result<()> {
    serve(args, layered).map_err(|error| layered.attributed(error))
}

fn serve(args: &ServeArgs, layered: &Layered) -> Result<()> {
    let settings = &layered.settings;
    check_files(settings)?;
    if !args.runs() {
        unknown_variables().iter().for_each(output::remark);
        if args.check_config {
            // Dropping the result removes the file again.
            args.ready_file.as_deref().map(ReadyFile::create).transpose()?;
        }
        raise_file_limit();
        Server::check(settings)?.iter().for_each(output::remark);
    }
    if args.print_config {
        match output::is_json() {
            true => output::json(&layered.to_json()),
            false => output::line(layered.to_toml().trim_end()),
        }
        return Ok(());
    }
    if args.check_config {
        match output::is_json() {
            true => output::json(&serde_json::json!({ "ok": true })),
            false => output::line("the configuration is valid"),
        }
        return Ok(());
    }
    let ready = args.ready_file.as_deref().map(ReadyFile::create).transpose()?;
    if let Some(ready) = &ready {
        ready.remove_last()?;
    }
    logging::start(settings)?;
    unknown_variables().iter().for_each(|remark| tracing::warn!("{remark}"));
    raise_file_limit();
    let runtime = super::runtime()?;
    let outcome = runtime.block_on(async {
        logging::outlive_full_files()?;
        // Listened to before the server starts, so that a reload asked for early does not end it.
        let hang_ups = signal(SignalKind::hangup()).context(|| "listening for SIGHUP")?;
        let server = Server::start(settings).await?;
        tokio::spawn(reload_at(hang_ups, server.shared().clone()));
        let signals = EndSignals::listen(Duration::from_secs(settings.drain_seconds))?;
        let (flight, admin) = (server.flight_address(), server.admin_address());
        announce(settings, flight, admin);
        // Keep the file until the server has stopped.
        let _ready = ready.map(|ready| ready.write(flight, admin)).transpose()?;
        server.serve_until(signals.nth(1), signals.nth(2)).await
    });
    // Abandoned work must not keep the process alive.
    runtime.shutdown_timeout(END_WITHIN);
    outcome
}

/// Reads tokens and certificates again at each signal.
async fn reload_at(mut signals: Signal, shared: Arc<Shared>) {
    while signals.recv().await.is_some() {
        let shared = shared.clone();
        // The outcome is logged, and so is a panic.
        let _ = tokio::task::spawn_blocking(move || shared.reload("SIGHUP").map(drop)).await;
    }
}

/// Raises the limit of open files to the system's maximum, which is often above the initial limit.
/// Each connection takes a file, and so may each slab of host memory.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    if let Err(error) = raised {
        tracing::warn!("the limit of open files stays {:?}: {error}", limit.current);
    }
}

/// Prints a line with the addresses to connect to.
fn announce(settings: &Settings, flight: SocketAddr, admin: Option<SocketAddr>) {
    let scheme = if settings.tls_cert.is_some() { "grpc+tls" } else { "grpc" };
    let (flight, admin) = (format!("{scheme}://{flight}"), admin.map(|address| format!("http://{address}")));
    if output::is_json() {
        lines::print(serde_json::json!({ "event": "ready", "flight": flight, "admin": admin }));
    } else {
        let admin = admin.map(|admin| format!(", metrics and health on {admin}")).unwrap_or_default();
        lines::print(format_args!("listening on {flight}{admin}"));
    }
}

/// Ready file, written aside and renamed, so that a reader never sees half of it. Creating it shows
/// that the file can be written before the server starts. The file exists only while the server
/// runs.
struct ReadyFile<'a> {
    path: &'a Path,
    aside: PathBuf,
    /// Contents of the written file.
    text: String,
}

/// Time limit for connecting to a running server, which is on the same host or near.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);

impl<'a> ReadyFile<'a> {
    fn create(path: &'a Path) -> Result<Self> {
        let aside = path.with_extension(format!("{}.part", std::process::id()));
        let ready = Self { path, aside, text: String::new() };
        let refuse = |what: &str| Err(Error::Invalid(format!("it is {what}; give the name of a file")));
        let created = match path.metadata() {
            Ok(there) if there.is_dir() => refuse("a folder"),
            // A read of a pipe would wait for a writer.
            Ok(there) if !there.is_file() => refuse("a pipe or a device"),
            _ => File::create(&ready.aside).map_err(|error| Error::Invalid(file_failure(path, &error))),
        };
        created.context(|| ready.attempt())?;
        Ok(ready)
    }

    fn attempt(&self) -> String {
        format!("writing the file of --ready-file, {}", self.path.display())
    }

    /// Removes the ready file of a killed server, whose addresses do not answer.
    fn remove_last(&self) -> Result<()> {
        let text = std::fs::read_to_string(self.path).unwrap_or_default();
        let last = serde_json::from_str::<serde_json::Value>(&text).unwrap_or_default();
        let address = last["flight"].as_str().and_then(|address| address.parse::<SocketAddr>().ok());
        let answers = |address| TcpStream::connect_timeout(&address, ANSWERS_WITHIN).is_ok();
        if address.is_some_and(|address| !answers(address)) {
            let removed = std::fs::remove_file(self.path);
            return removed.map_err(|error| Error::Invalid(file_failure(self.path, &error))).context(|| self.attempt());
        }
        Ok(())
    }

    fn write(mut self, flight: SocketAddr, admin: Option<SocketAddr>) -> Result<Self> {
        let admin = admin.map(|address| address.to_string());
        self.text = format!("{}\n", serde_json::json!({ "flight": flight.to_string(), "admin": admin }));
        let written = std::fs::write(&self.aside, &self.text);
        written.and_then(|()| std::fs::rename(&self.aside, self.path)).context(|| self.attempt())?;
        Ok(self)
    }
}

impl Drop for ReadyFile<'_> {
    fn drop(&mut self) {
        // If the server did not start, only the temporary file exists.
        let _ = std::fs::remove_file(&self.aside);
        // Another server may have replaced the file with its own.
        let is_ours = !self.text.is_empty() && std::fs::read_to_string(self.path).is_ok_and(|text| text == self.text);
        if is_ours {
            let _ = std::fs::remove_file(self.path);
        }
    }
}

/// Checks that every file that a setting names is readable now, and not only when the first client
/// needs it.
fn check_files(settings: &Settings) -> Result<()> {
    let files = [
        ("--tls-cert", &settings.tls_cert),
        ("--tls-key", &settings.tls_key),
        ("--tls-client-ca", &settings.tls_client_ca),
        ("--token-file", &settings.token_file),
        ("--topology", &settings.topology),
    ];
    for (flag, path) in files {
        let Some(path) = path else { continue };
        can_be_read(path).map_err(|error| {
            let why = file_failure(path, &error);
            Error::Invalid(format!("{flag} names {}, which cannot be read: {why}", path.display()))
        })?;
    }
    Ok(())
}

/// Checks that a file can be read. Does not open pipes: a read would consume data, and closing the
/// pipe would fail its writer.
fn can_be_read(path: &Path) -> std::io::Result<()> {
    let kind = path.metadata()?.file_type();
    match (kind.is_dir(), kind.is_file()) {
        // A folder can be opened, but not read.
        (true, _) => Err(ErrorKind::IsADirectory.into()),
        (_, true) => File::open(path).map(drop),
        _ => Ok(()),
    }
}
