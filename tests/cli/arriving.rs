//! `dovetail join --probe -`: rows that arrive on standard input, and joined rows that leave at once.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Output, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use arrow::ipc::reader::StreamReader;
use arrow::ipc::writer::StreamWriter;

use super::harness::{Server, command, json_lines, stderr, stdout};

const JOIN: &[&str] = &["join", "orders", "lines", "--on", "key=order", "--probe", "-"];

/// A server with a table of two orders.
fn server() -> Server {
    let server = Server::start(&[]);
    fs::write(server.path().join("orders.csv"), "key,name\n1,ann\n2,bob\n").unwrap();
    server.ok(&["put", "orders.csv"]);
    server
}

fn batch(orders: &[i64]) -> RecordBatch {
    let column: ArrayRef = Arc::new(Int64Array::from_iter_values(orders.iter().copied()));
    RecordBatch::try_from_iter([("order", column)]).unwrap()
}

fn stream(orders: &[i64]) -> Vec<u8> {
    let batch = batch(orders);
    let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    writer.into_inner().unwrap()
}

fn begin(server: &Server, arguments: &[&str]) -> Child {
    let mut line = command();
    line.env("DOVETAIL_SERVER", &server.flight).current_dir(server.path()).args(arguments);
    line.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs a command that reads `input`.
fn run(server: &Server, arguments: &[&str], input: &[u8]) -> Output {
    let mut child = begin(server, arguments);
    // The command may end before it has read all.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

/// Sends what `read` returns, once for each call, so that the test can wait for it with a limit.
fn read_beside<T: Send + 'static>(mut read: impl FnMut() -> Option<T> + Send + 'static) -> Receiver<T> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        while let Some(next) = read() {
            if sender.send(next).is_err() {
                break;
            }
        }
    });
    receiver
}

fn next<T>(received: &Receiver<T>) -> T {
    received.recv_timeout(Duration::from_secs(120)).expect("joined rows come before further rows are sent")
}

/// Sends a batch for each of `answers`, and checks that its joined rows come before the next batch is
/// sent.
fn asks<T>(stdin: ChildStdin, answers: &[(i64, T)], mut check: impl FnMut(&T)) {
    let mut writer = StreamWriter::try_new(stdin, &batch(&[]).schema()).unwrap();
    for (order, answer) in answers {
        writer.write(&batch(&[*order])).unwrap();
        writer.get_mut().flush().unwrap();
        check(answer);
    }
    writer.finish().unwrap();
}

#[test]
fn joined_rows_leave_as_an_arrow_stream_before_further_rows_come() {
    let server = server();
    let mut child = begin(&server, &[JOIN, &["-o", "-"]].concat());
    let (stdin, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut reader = None;
    let mut output = Some(output);
    let batches = read_beside(move || {
        let reader = reader.get_or_insert_with(|| StreamReader::try_new(output.take().unwrap(), None).unwrap());
        Some(reader.next()?.unwrap().num_rows())
    });
    asks(stdin, &[(1, 1), (2, 1), (1, 1)], |rows| assert_eq!(next(&batches), *rows));
    assert!(child.wait().unwrap().success());
}

#[test]
fn joined_rows_leave_as_text_before_further_rows_come() {
    for (format, expected) in [
        (&["-o", "-", "--format", "json"][..], [r#"{"key":1,"name":"ann"}"#, r#"{"key":2,"name":"bob"}"#].as_slice()),
        (&["-o", "-", "--format", "csv"], &["1,ann", "2,bob"]),
        // A table on the terminal.
        (&[], &["  1  ann", "  2  bob"]),
    ] {
        let server = server();
        let mut child = begin(&server, &[JOIN, format].concat());
        let (stdin, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut output = BufReader::new(output).lines();
        let lines = read_beside(move || output.next()?.ok());
        let mut is_headed = format.contains(&"json");
        asks(stdin, &[(1, expected[0]), (2, expected[1])], |line| {
            if !std::mem::replace(&mut is_headed, true) {
                assert!(next(&lines).starts_with("key"), "{format:?}");
            }
            assert_eq!(next(&lines), *line, "{format:?}");
        });
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn a_second_stream_on_standard_input_is_an_error_and_not_left_out() {
    let server = server();
    let two = [stream(&[1]), stream(&[2])].concat();
    for arguments in [&[JOIN, &["-o", "j.csv"]].concat()[..], &["put", "-", "--table", "t"]] {
        let refused = run(&server, arguments, &two);
        let said = stderr(&refused);
        assert_eq!(refused.status.code(), Some(1), "{arguments:?}: {said}");
        assert!(said.contains("reading standard input: there is data after the end of the Arrow IPC stream"), "{said}");
        assert!(run(&server, arguments, &stream(&[1])).status.success(), "{arguments:?}");
    }
    // A file, too.
    fs::write(server.path().join("two.arrows"), &two).unwrap();
    let said = server.fails(&["put", "two.arrows"]);
    assert!(said.contains("two.arrows: there is data after the end"), "{said}");
}

#[test]
fn the_error_about_csv_on_standard_input_says_what_works() {
    let server = server();
    let refused = run(&server, JOIN, b"order\n1\n");
    assert!(stderr(&refused).contains("give CSV as a file, as in --probe rows.csv"), "{}", stderr(&refused));
    let refused = run(&server, &["put", "-", "--table", "t"], b"order\n1\n");
    assert!(stderr(&refused).contains("if it is CSV, add --format csv"), "{}", stderr(&refused));
}

#[test]
fn the_report_of_rows_that_were_joined_while_they_came_names_the_job() {
    let server = server();
    let joined = run(&server, &[JOIN, &["-o", "j.csv", "--json"]].concat(), &stream(&[1, 2, 3]));
    let said = json_lines(&joined);
    let job = said[0]["job"].as_u64().unwrap_or_else(|| panic!("{}", stdout(&joined)));
    assert!(server.json(&["jobs"]).iter().any(|known| known["job"] == job), "{job}");
}
