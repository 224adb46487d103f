//! Runs the built binary, and a server of it on a free port.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// Returns the binary's command, without the settings of the user who runs the tests.
pub fn command() -> Command {
    without_settings(Command::new(binary()))
}

/// Returns the binary's command in a shell that closes file descriptors, such as `2>&-`.
pub fn command_closing(closed: &str) -> Command {
    let mut command = without_settings(Command::new("sh"));
    command.args(["-c", &format!("exec \"$0\" \"$@\" {closed}")]).arg(binary());
    command
}

/// Returns the path of the binary under test. `DOVETAIL_TEST_BINARY` names one that was built
/// elsewhere.
fn binary() -> std::ffi::OsString {
    std::env::var_os("DOVETAIL_TEST_BINARY").unwrap_or_else(|| env!("CARGO_BIN_EXE_dovetail").into())
}

fn without_settings(mut command: Command) -> Command {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("DOVETAIL_") {
            command.env_remove(name);
        }
    }
    command.env("COLUMNS", "100").env("NO_COLOR", "1");
    // The cache of the tests' servers is separate from the user's.
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

/// Runs a command line to its end.
pub fn run(arguments: &[&str]) -> Output {
    command().args(arguments).output().unwrap()
}

/// Starts a command line in a folder, and does not wait for its end.
pub fn begin(folder: &Path, arguments: &[&str]) -> Child {
    let mut command = command();
    command.args(arguments).current_dir(folder).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Sends the signal of Ctrl-C.
pub fn send_interrupt(child: &Child) {
    send(child, "-INT");
}

fn send(child: &Child, signal: &str) {
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
}

/// Waits until a condition holds, with a generous limit because the machine may be busy.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(60), "waited for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub fn names_in(folder: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().to_string_lossy().into_owned();
    std::fs::read_dir(folder).unwrap().map(name).collect()
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Parses the JSON values on the lines of stdout.
pub fn json_lines(output: &Output) -> Vec<Value> {
    stdout(output)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("not JSON: {line}")))
        .collect()
}

/// A server, killed when dropped.
pub struct Server {
    child: Child,
    pub folder: TempDir,
    pub flight: String,
    pub admin: Option<String>,
}

impl Server {
    pub fn start(arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let mut command = command();
        command.stdout(Stdio::null()).stderr(log);
        Self::start_as(command, folder, arguments)
    }

    /// Starts a server by `command`, whose standard output and standard error the caller has set.
    pub fn start_as(mut command: Command, folder: TempDir, arguments: &[&str]) -> Self {
        let ready = folder.path().join("ready.json");
        let child = command
            .args(["serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"])
            .args(if arguments.contains(&"--host-memory") { &[][..] } else { &["--host-memory", "1GiB"] })
            .arg("--ready-file")
            .arg(&ready)
            .args(arguments)
            .spawn()
            .unwrap();
        // Dropping `command` closes its copies of the server's outputs.
        drop(command);
        let mut server = Self { child, folder, flight: String::new(), admin: None };
        // The limit is generous, because a machine that runs other tests may be slow to start a
        // process.
        let start = Instant::now();
        while !ready.exists() {
            let ended = server.child.try_wait().unwrap();
            assert!(ended.is_none(), "the server ended at once: {}", server.log());
            assert!(start.elapsed() < Duration::from_secs(60), "the server is not ready: {}", server.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        let addresses: Value = serde_json::from_str(&std::fs::read_to_string(&ready).unwrap()).unwrap();
        let scheme = if arguments.contains(&"--tls-cert") { "https" } else { "http" };
        server.flight = format!("{scheme}://{}", addresses["flight"].as_str().unwrap());
        server.admin = addresses["admin"].as_str().map(str::to_owned);
        server
    }

    /// Returns the server's process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Runs a client command line against this server, in its folder.
    pub fn run(&self, arguments: &[&str]) -> Output {
        command().env("DOVETAIL_SERVER", &self.flight).current_dir(&self.folder).args(arguments).output().unwrap()
    }

    /// Like [`Server::run`], for a line that must succeed. Returns its stdout.
    pub fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
        stdout(&output)
    }

    /// Like [`Server::ok`], with `--json`. Returns the values.
    pub fn json(&self, arguments: &[&str]) -> Vec<Value> {
        let arguments: Vec<&str> = arguments.iter().copied().chain(["--json"]).collect();
        let output = self.run(&arguments);
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
        json_lines(&output)
    }

    /// Like [`Server::run`], for a line that must fail. Returns its message.
    pub fn fails(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {}", stdout(&output));
        stderr(&output)
    }

    /// Returns what the server has logged to the file `log` so far. Empty if it logs elsewhere.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path().join("log")).unwrap_or_default()
    }

    /// Waits for `count` lines of the log that `chosen` accepts, and returns them. The server
    /// writes a call's line after the call's last byte, perhaps after the client is done.
    pub fn log_lines(&self, count: usize, chosen: impl Fn(&str) -> bool) -> Vec<String> {
        let start = Instant::now();
        loop {
            let lines: Vec<String> = self.log().lines().filter(|line| chosen(line)).map(str::to_owned).collect();
            if lines.len() >= count {
                return lines;
            }
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "{count} such lines are not in the log:\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Reads a metric from the admin port.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.admin("/metrics");
        let line = text.lines().find(|line| line.starts_with(name));
        let line = line.unwrap_or_else(|| panic!("no {name} in {text:?}; the server's log: {}", self.log()));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Returns the admin port's response.
    pub fn admin(&self, path: &str) -> String {
        let mut admin = TcpStream::connect(self.admin.as_ref().unwrap()).unwrap();
        admin.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        admin.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).unwrap();
        let mut text = String::new();
        admin.read_to_string(&mut text).unwrap();
        text
    }

    /// Kills the server, like a crash.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Asks the server to end, like an operator, and waits for its end.
    pub fn terminate(mut self) -> ExitStatus {
        self.send("-TERM");
        let status = self.wait();
        assert!(!self.path().join("ready.json").exists(), "a server that has ended is not ready");
        status
    }

    /// Sends the server a signal.
    pub fn send(&self, signal: &str) {
        send(&self.child, signal);
    }

    /// Waits for the server's end.
    pub fn wait(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "the server does not end: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
