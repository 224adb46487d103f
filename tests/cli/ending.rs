//! Signals that end a server whose processors are busy with clients' requests.

use std::fs::File;
use std::path::Path;
use std::process::Child;
use std::sync::Arc;

use arrow::array::{ArrayRef, Int32Array, RecordBatch, StringViewArray};
use arrow::ipc::writer::FileWriter;
use arrow_flight::FlightDescriptor;
use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::flight_service_client::FlightServiceClient;
use futures::{StreamExt, TryStreamExt, stream};
use tonic::transport::Endpoint;

use super::harness::{Server, begin, stderr, wait_until};

/// Columns of a table whose self-join takes seconds to plan for several unlike devices.
const COLUMNS: usize = 50_000;

fn write_wide(path: &Path) {
    let values: ArrayRef = Arc::new(Int32Array::from(vec![1, 2, 3]));
    let batch = RecordBatch::try_from_iter((0..COLUMNS).map(|column| (format!("c{column}"), values.clone()))).unwrap();
    let mut writer = FileWriter::try_new(File::create(path).unwrap(), &batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    writer.finish().unwrap();
}

/// Returns a topology of devices with other memory each, so that a join is planned once for each.
fn unlike_devices(count: usize) -> String {
    let device = |index: usize| {
        let memory = 16 + index;
        format!("[[device]]\nname = \"host:{index}\"\nthreads = 1\nmemory = \"{memory}MiB\"\nsocket = \"cpu0\"\n")
    };
    let devices: String = (0..count).map(device).collect();
    format!("name = \"unlike\"\n[[socket]]\nname = \"cpu0\"\n{devices}")
}

/// Starts a server that plans as many joins as it can at once, with one more that waits. Returns
/// the server and the commands.
fn busy(arguments: &[&str]) -> (Server, Vec<Child>) {
    let topology = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&topology, unlike_devices(8)).unwrap();
    let server = Server::start(&[&["--topology", topology.path().to_str().unwrap()], arguments].concat());
    write_wide(&server.path().join("wide.arrow"));
    server.ok(&["put", "wide.arrow"]);
    let slots = std::thread::available_parallelism().unwrap().get();
    let explain = ["explain", "wide", "wide", "--on", "c0", "--server", &server.flight];
    let commands = (0..=slots).map(|_| begin(server.path(), &explain)).collect();
    let is_busy = || server.metric("dovetail_cpu_work{kind=\"slots_taken\"}") == slots as f64;
    wait_until("all slots to be taken", is_busy);
    (server, commands)
}

/// Waits for the commands, which must fail.
fn expect_failures(commands: Vec<Child>) {
    for command in commands {
        let output = command.wait_with_output().unwrap();
        assert!(!output.status.success() && stderr(&output).starts_with("error: "), "{}", stderr(&output));
    }
}

#[test]
fn two_signals_end_a_server_that_plans_as_many_joins_as_it_can() {
    let (mut server, commands) = busy(&["--drain-seconds", "3600"]);
    // The server still answers a small request.
    server.ok(&["topology"]);
    server.send("-TERM");
    wait_until("the drain", || server.log().contains("draining: "));
    server.send("-INT");
    // The server ends normally. On a machine that is too busy, the thread "last resort" ends it.
    let status = server.wait().code();
    assert!(matches!(status, Some(0 | 130)), "{status:?}: {}", server.log());
    expect_failures(commands);
}

#[test]
fn the_limit_of_the_drain_ends_a_server_that_plans_as_many_joins_as_it_can() {
    let (mut server, commands) = busy(&["--drain-seconds", "0"]);
    server.send("-TERM");
    let status = server.wait().code();
    assert!(matches!(status, Some(0 | 143)), "{status:?}: {}", server.log());
    expect_failures(commands);
}

#[test]
fn planning_stops_when_the_command_that_requested_it_is_killed() {
    let (server, commands) = busy(&[]);
    for mut command in commands {
        command.kill().unwrap();
        command.wait().unwrap();
    }
    let work = |kind: &str| server.metric(&format!("dovetail_cpu_work{{kind=\"{kind}\"}}"));
    wait_until("all slots to be free", || work("slots_taken") == 0.0 && work("calls") == 0.0);
    assert!(server.metric("dovetail_cpu_work_interrupted_total") >= 1.0, "none was planned to its end");
    assert_eq!(server.terminate().code(), Some(0));
}

/// Makes a batch of 3000 views that all refer to one text of 64 KiB: 112 KiB are sent, and the
/// statistics are those of 188 MiB.
fn views() -> RecordBatch {
    let text = StringViewArray::from_iter_values(["x".repeat(64 << 10)]);
    let (views, texts, _) = text.into_parts();
    let views = std::iter::repeat_n(views[0], 3000).collect();
    let column: ArrayRef = Arc::new(StringViewArray::try_new(views, texts, None).unwrap());
    RecordBatch::try_from_iter([("v", column)]).unwrap()
}

/// Uploads such batches for ever, or until the server ends.
async fn upload_views(address: String, table: String) {
    let Ok(channel) = Endpoint::from_shared(address).unwrap().connect().await else { return };
    let mut client = FlightServiceClient::new(channel);
    let encoder = FlightDataEncoderBuilder::new()
        .with_flight_descriptor(Some(FlightDescriptor::new_path(vec![table])))
        .with_max_flight_data_size(usize::MAX)
        .build(stream::repeat_with(|| Ok(views())));
    let messages = encoder.map(Result::unwrap);
    let Ok(acks) = client.do_put(messages).await else { return };
    acks.into_inner().try_collect::<Vec<_>>().await.expect_err("the server ends the call");
}

/// Regression test: the work on such uploads outlived its client, and kept threads from serving
/// others.
#[test]
fn uploads_of_views_delay_neither_other_calls_nor_the_end() {
    let mut server = Server::start(&["--drain-seconds", "3600"]);
    let work = |server: &Server, kind: &str| server.metric(&format!("dovetail_cpu_work{{kind=\"{kind}\"}}"));
    // Uploads leave a slot to other calls.
    let processors = std::thread::available_parallelism().unwrap().get();
    let slots = (processors - 1).max(1);
    let start = |server: &Server| {
        let clients = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        (0..2 * processors).for_each(|at| drop(clients.spawn(upload_views(server.flight.clone(), format!("t{at}")))));
        clients
    };
    let clients = start(&server);
    wait_until("all slots to be taken", || work(&server, "slots_taken") == slots as f64);
    assert!(server.admin("/healthz").contains("200 OK"));
    // Their sockets close like those of a killed process.
    clients.shutdown_background();
    wait_until("the work to end with its clients", || {
        work(&server, "calls") == 0.0 && work(&server, "slots_taken") == 0.0
    });
    let clients = start(&server);
    wait_until("all slots to be taken again", || work(&server, "slots_taken") == slots as f64);
    server.send("-TERM");
    wait_until("the drain", || server.log().contains("draining: "));
    server.send("-INT");
    let status = server.wait().code();
    assert!(matches!(status, Some(0 | 130)), "{status:?}: {}", server.log());
    clients.shutdown_background();
}
