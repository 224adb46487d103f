//! Standard error and standard output that accept no data: the server keeps working, reports what
//! it dropped, and ends as always.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, PipeReader, Read, Write, pipe};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use arrow_flight::Empty;
use arrow_flight::flight_service_client::FlightServiceClient;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use serde_json::Value;
use tonic::transport::Endpoint;

use super::harness::{Server, command, command_closing, wait_until};

/// Devices with child processes, which write to the same standard error.
const PROCESSES: &[&str] = &["--devices", "host:2", "--device-processes", "on", "--device-memory", "64MiB"];

const DROPPED: &str = "dovetail_log_lines_dropped_total{process=\"server\"}";

/// Log level at which the calls of a test fill a pipe and the server's queue of lines.
const MUCH: &[&str] = &["--log", "trace"];

fn full_device() -> File {
    OpenOptions::new().write(true).open("/dev/full").unwrap()
}

/// Makes a full pipe. Returns its reading end and its writing end.
fn full_pipe() -> (PipeReader, OwnedFd) {
    let (reader, mut writer) = pipe().unwrap();
    // The standard library offers non-blocking mode for sockets only, but the system call works for
    // any file.
    let told = UnixStream::from(OwnedFd::from(writer.try_clone().unwrap()));
    told.set_nonblocking(true).unwrap();
    while writer.write(&[b'.'; 4096]).is_ok() {}
    assert_eq!(writer.write(b".").unwrap_err().kind(), ErrorKind::WouldBlock);
    told.set_nonblocking(false).unwrap();
    (reader, writer.into())
}

fn pipe_without_reader() -> OwnedFd {
    pipe().unwrap().1.into()
}

fn start(command: Command, arguments: &[&str]) -> Server {
    Server::start_as(command, tempfile::tempdir().unwrap(), arguments)
}

fn start_logging_to(log: impl Into<Stdio>, arguments: &[&str]) -> Server {
    let mut command = command();
    command.stdout(Stdio::null()).stderr(log);
    start(command, arguments)
}

/// Makes 500 calls. The server logs a line for each.
fn call_often(server: &Server) {
    let calls = async {
        let channel = Endpoint::from_shared(server.flight.clone()).unwrap().connect().await.unwrap();
        let mut client = FlightServiceClient::new(channel);
        for _ in 0..500 {
            client.list_actions(Empty {}).await.unwrap();
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // The limit is generous, because the machine may be busy.
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(120), calls).await.unwrap() });
}

/// Uploads a table and uses it.
fn serve_a_lot(server: &Server) {
    put(server);
    use_table(server);
}

fn put(server: &Server) {
    std::fs::write(server.path().join("t.csv"), "k\n1\n2\n3\n").unwrap();
    server.ok(&["put", "t.csv"]);
}

/// Makes calls and joins. They must work even if the log is not read.
fn use_table(server: &Server) {
    call_often(server);
    assert!(server.admin("/healthz").starts_with("HTTP/1.0 200"), "{}", server.admin("/healthz"));
    let joined = server.ok(&["join", "t", "t", "--on", "k", "-o", "-", "--format", "csv"]);
    assert_eq!(joined.lines().count(), 4, "{joined}");
    let tables = server.json(&["tables"]);
    assert!(tables.iter().any(|table| table["table"] == "t" && table["rows"] == 3), "{tables:?}");
}

fn end(server: Server) {
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn a_log_that_cannot_be_written_is_dropped_and_counted() {
    for more in [&[][..], PROCESSES] {
        for log in [Stdio::from(full_device()), pipe_without_reader().into()] {
            let server = start_logging_to(log, more);
            serve_a_lot(&server);
            assert!(server.metric(DROPPED) > 500.0);
            end(server);
        }
    }
}

/// A device's child process counts its own dropped lines.
#[test]
fn lines_dropped_by_the_process_of_a_device_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = command();
    // Without saved rates, the child process measures its device and logs this.
    command.env("XDG_CACHE_HOME", folder.path()).stdout(Stdio::null()).stderr(full_device());
    let server = Server::start_as(command, folder, PROCESSES);
    let dropped = || server.metric("dovetail_log_lines_dropped_total{process=\"host:0\"}");
    wait_until("the line to be counted", || dropped() > 0.0);
    end(server);
}

#[test]
fn a_closed_log_does_not_affect_the_server() {
    for more in [&[][..], PROCESSES] {
        let server = start(command_closing("2>&-"), more);
        serve_a_lot(&server);
        end(server);
    }
}

#[test]
fn lines_of_an_unread_log_are_dropped_and_reported_once_it_is_read() {
    for more in [&[][..], PROCESSES] {
        let (mut reader, writer) = pipe().unwrap();
        let server = start_logging_to(writer, &[MUCH, more, &["--log-format", "json"]].concat());
        serve_a_lot(&server);
        let dropped = server.metric(DROPPED);
        assert!(dropped > 0.0);
        let mut text = Vec::new();
        let mut part = vec![0; 1 << 16];
        let is_told = |text: &[u8]| String::from_utf8_lossy(text).contains(" lines of the log were dropped here\"");
        while !is_told(&text) {
            let taken = reader.read(&mut part).unwrap();
            assert!(taken > 0, "the log ended");
            text.extend(&part[..taken]);
        }
        std::thread::spawn(move || std::io::copy(&mut reader, &mut std::io::sink()));
        end(server);
        let text = String::from_utf8(text).unwrap();
        let mut lines = text.lines();
        let told = lines.find(|line| line.contains("dropped here")).unwrap();
        let told: Value = serde_json::from_str(told).expect(told);
        assert_eq!((&told["level"], &told["target"]), (&"WARN".into(), &"dovetail::lines".into()));
    }
}

#[test]
fn a_server_with_an_unread_log_ends_at_the_second_signal() {
    for more in [&[][..], PROCESSES] {
        let (_reader, writer) = full_pipe();
        let server = start_logging_to(writer, more);
        call_often(&server);
        // The drain waits for this upload.
        let mut put = command();
        let put = put.args(["put", "-", "--table", "t", "--format", "csv", "--server", &server.flight]);
        let mut put = put.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let mut input = put.stdin.take();
        wait_until("the upload to begin", || {
            input.as_mut().unwrap().write_all("1\n".repeat(10_000).as_bytes()).unwrap();
            server.metric("dovetail_uploads_under_way") > 0.0
        });
        server.send("-TERM");
        wait_until("the server to drain", || !server.admin("/readyz").starts_with("HTTP/1.0 200"));
        end(server);
        drop(input);
        put.wait().unwrap();
    }
}

/// Regression test: the server ended with status 0 on a closed pipe, and with 1 on a full device.
#[test]
fn a_server_with_a_blocked_standard_output_still_serves() {
    let (_reader, full) = full_pipe();
    let logging = |output: Stdio| {
        let folder = tempfile::tempdir().unwrap();
        let mut command = command();
        command.stdout(output).stderr(File::create(folder.path().join("log")).unwrap());
        Server::start_as(command, folder, &[])
    };
    for output in [Stdio::from(full_device()), pipe_without_reader().into(), full.into()] {
        let server = logging(output);
        serve_a_lot(&server);
        end(server);
    }
    let mut closing = command_closing(">&-");
    closing.stderr(Stdio::null());
    let server = start(closing, &[]);
    serve_a_lot(&server);
    end(server);
}

#[test]
fn a_line_that_standard_output_refuses_is_counted() {
    let mut command = command();
    command.stdout(full_device()).stderr(Stdio::null());
    let server = start(command, &[]);
    wait_until("the line to be counted", || server.metric(DROPPED) == 1.0);
    end(server);
}

/// The system kills a process that writes beyond its limit of file size, unless the process handles
/// the signal.
#[test]
fn logging_resumes_when_a_log_file_may_grow_again() {
    let server = Server::start(&[]);
    let limit = |bytes: Option<u64>| {
        let maximum = getrlimit(Resource::Fsize).maximum;
        let limit = Rlimit { current: bytes.or(maximum), maximum };
        prlimit(Pid::from_raw(server.id().try_into().unwrap()), Resource::Fsize, limit).unwrap();
    };
    put(&server);
    // The limit falls in the middle of a line.
    limit(Some(server.log().len() as u64 + 10));
    use_table(&server);
    assert!(server.metric(DROPPED) > 500.0);
    limit(None);
    server.ok(&["tables"]);
    let told = &server.log_lines(1, |line| line.contains(" of the log were dropped here"))[0];
    assert!(told.starts_with("20") && told.contains("Z  WARN dovetail::lines: "), "{told}");
    server.log_lines(1, |line| line.contains("ListFlights"));
    end(server);
}

#[test]
fn a_server_that_cannot_start_ends_even_if_its_error_is_not_read() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (_reader, writer) = full_pipe();
    let mut command = command();
    command.args(["serve", "--listen", &address, "--admin-listen", "off", "--host-memory", "64MiB"]);
    let mut child = command.stdout(Stdio::null()).stderr(writer).spawn().unwrap();
    wait_until("the server to end", || child.try_wait().unwrap().is_some());
    assert_eq!(child.wait().unwrap().code(), Some(1));
}
