//! A server that is killed or never answers: the command soon reports this with a remedy, and
//! leaves no partial files.

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command};

use super::harness::{Server, begin, names_in, run, stderr, stdout, wait_until};

/// Uploads the table `many`, whose self-join has 400 million rows.
fn put_many(server: &Server) {
    fs::write(server.path().join("many.csv"), "k\n".to_owned() + &"1\n".repeat(20_000)).unwrap();
    server.ok(&["put", "many.csv"]);
}

/// Starts a self-join of the table `many`. The command writes its file until it is stopped.
fn begin_long_join(server: &Server, folder: &Path) -> Child {
    let line =
        ["join", "many", "many", "--on", "k", "--retain-seconds", "0", "-o", "all.csv", "--server", &server.flight];
    let child = begin(folder, &line);
    wait_until("the file to grow", || {
        names_in(folder).iter().any(|name| fs::metadata(folder.join(name)).is_ok_and(|file| file.len() > 0))
    });
    child
}

/// Returns the message of a command whose server was killed.
fn sentence_of(mut child: Child) -> String {
    wait_until("the command to give up", || child.try_wait().unwrap().is_some());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let said = stderr(&output);
    assert_eq!(said.lines().count(), 1, "{said}");
    said
}

const BROKE: [&str; 4] =
    ["error: the connection to the server broke: ", "either the server has ended", "or a proxy", "start again"];

#[test]
fn a_server_killed_during_an_upload_is_reported_as_gone() {
    for streams in ["1", "3"] {
        let mut server = Server::start(&[]);
        put_many(&server);
        server.ok(&["get", "many", "-o", "many.arrows"]);
        let written = fs::read(server.path().join("many.arrows")).unwrap();
        let pipe = server.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let line = [
            "put",
            "pipe",
            "--table",
            "t",
            "--format",
            "arrow-stream",
            "--streams",
            streams,
            "--server",
            &server.flight,
        ];
        let child = begin(server.path(), &line);
        // The pipe gets all rows but not the end of the stream, so the upload waits for more.
        let mut pipe = fs::File::options().write(true).open(&pipe).unwrap();
        pipe.write_all(&written[..written.len() - 8]).unwrap();
        wait_until("the upload to be under way", || server.metric("dovetail_uploads_under_way") == 1.0);
        server.kill();
        let said = sentence_of(child);
        assert!(BROKE.iter().all(|words| said.contains(words)), "{streams} streams: {said}");
    }
}

#[test]
fn a_server_killed_while_a_result_is_fetched_leaves_no_file() {
    let mut server = Server::start(&["--devices", "host:1"]);
    put_many(&server);
    let folder = tempfile::tempdir().unwrap();
    let child = begin_long_join(&server, folder.path());
    server.kill();
    let said = sentence_of(child);
    assert!(BROKE.iter().all(|words| said.contains(words)), "{said}");
    assert_eq!(names_in(folder.path()), [""; 0]);
}

#[test]
fn a_server_that_never_answers_is_given_up() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let uri = format!("http://{}", silent.local_addr().unwrap());
    let output = run(&["tables", "--server", &uri, "--connect-timeout", "0.5"]);
    assert_eq!(output.status.code(), Some(1));
    let said = stderr(&output);
    let expected = format!("error: no answer from {uri} within 500.0 ms: ");
    assert!(said.starts_with(&expected) && said.contains("--connect-timeout"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    for wrong in ["0", "-1", "soon", "inf"] {
        let output = run(&["tables", &format!("--connect-timeout={wrong}")]);
        assert_eq!(output.status.code(), Some(2), "{wrong}: {}", stdout(&output));
        assert!(stderr(&output).contains("write a number of seconds"), "{wrong}: {}", stderr(&output));
    }
}

#[test]
fn a_waiting_job_is_shown_with_the_reason() {
    // A device so slow that during the test the first join neither ends nor fills the memory.
    let folder = tempfile::tempdir().unwrap();
    let topology = folder.path().join("slow.toml");
    let devices = "[[device]]\nname = \"host:0\"\nthreads = 1\n";
    let links = "[[link]]\nbetween = [\"cpu0\", \"host:0\"]\nrate = \"4MB/s\"\n";
    fs::write(&topology, format!("name = \"slow\"\n[[socket]]\nname = \"cpu0\"\n{devices}{links}")).unwrap();
    let server = Server::start(&["--topology", topology.to_str().unwrap()]);
    put_many(&server);
    fs::write(server.path().join("few.csv"), "k\n1\n2\n3\n").unwrap();
    server.ok(&["put", "few.csv"]);
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let mut running = begin_long_join(&server, folders[0].path());
    let line = ["join", "few", "few", "--on", "k", "-o", "few.csv", "--server", &server.flight];
    let mut waiting = begin(folders[1].path(), &line);
    wait_until("the second job to wait", || server.json(&["jobs"]).len() == 2);
    let shown = server.ok(&["jobs"]);
    let lines: Vec<&str> = shown.lines().collect();
    assert!(lines[0].contains("behind") && lines[0].ends_with("starts in  waiting for"), "{shown}");
    let awaited = &lines[2][lines[0].find("waiting for").unwrap()..];
    assert!(lines[2].contains("queued") && awaited.contains("host:0"), "{shown}");
    let one = server.ok(&["jobs", &server.json(&["jobs"])[1]["job"].to_string()]);
    assert!(one.contains("waiting for") && one.contains("queue position") && one.contains("predicted start"), "{one}");
    for child in [&mut running, &mut waiting] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
