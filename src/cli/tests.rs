//! Tests of the command line as a whole, and of progress bars during uploads and fetches.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{Int64Array, RecordBatch};
use serde_json::json;

use super::client::{Client, ConnectArgs, PutOptions, command_descriptor, table_descriptor};
use super::files::{CsvArgs, Source, Target};
use super::progress::Progress;
use super::{
    command, connection_behind_command, get, jobs, put, settings, with_variable, with_what_numbers_it_takes,
    without_misleading_tips,
};
use crate::service::Server;

/// Generous, because the machine may be busy.
const WAIT_MAX: Duration = Duration::from_secs(60);

#[test]
fn the_command_line_is_consistent() {
    command().debug_assert();
}

#[test]
fn connection_options_may_precede_the_command() {
    let moved = |line: &str| {
        let words = connection_behind_command(line.split(' ').map(Into::into).collect());
        words.into_iter().map(|word| word.into_string().unwrap()).collect::<Vec<_>>().join(" ")
    };
    for (line, expected) in [
        ("dovetail --server h:1 tables t", "dovetail tables --server h:1 t"),
        ("dovetail --json --server=h:1 --token x put a.csv", "dovetail --json put --server=h:1 --token x a.csv"),
        ("dovetail put --server h:1 a.csv", "dovetail put --server h:1 a.csv"),
        ("dovetail --help", "dovetail --help"),
        ("dovetail --server", "dovetail --server"),
        ("dovetail", "dovetail"),
    ] {
        assert_eq!(moved(line), expected);
    }
    assert!(
        command()
            .try_get_matches_from(connection_behind_command(["d", "--server", "h", "serve"].map(Into::into).into()))
            .is_err()
    );
}

#[test]
fn tips_are_given_for_typos_only() {
    let tip = |line: &str| {
        let words = ["dovetail"].into_iter().chain(line.split(' '));
        let error = without_misleading_tips(command().try_get_matches_from(words).unwrap_err());
        let text = error.to_string();
        text.lines().find_map(|line| line.trim().strip_prefix("tip: ").map(str::to_owned))
    };
    let similar = |name: &str| Some(format!("a similar argument exists: '{name}'"));
    assert_eq!(tip("tables --sever x"), similar("--server"));
    assert_eq!(tip("put a.csv --delimeter ;"), similar("--delimiter"));
    assert_eq!(tip("join a b --on k --retain 5"), similar("--retain-seconds"));
    for line in ["put a.csv --sep ;", "put a.csv --append", "get t --json-lines", "serve --port 1"] {
        assert_eq!(tip(line), None, "{line}");
    }
}

#[test]
fn a_wrong_number_is_refused_with_the_accepted_range() {
    let refused = |line: &str| {
        let words = ["dovetail"].into_iter().chain(line.split(' '));
        with_what_numbers_it_takes(command().try_get_matches_from(words).unwrap_err()).to_string()
    };
    for (line, expected) in [
        ("get t --limit -3", "invalid value '-3' for '--limit <ROWS>': it takes a whole number, 0 or more"),
        ("put a.csv --infer-rows -3", "for '--infer-rows <ROWS>': it takes a whole number, 0 or more"),
        ("put a.csv --infer-rows many", "invalid value 'many' for '--infer-rows <ROWS>': it takes a whole number"),
        ("put a.csv --streams -3", "it takes a whole number from 1 to 64"),
        ("join a b --on k --retain-seconds -3", "for '--retain-seconds <SECONDS>': it takes a whole number, 0 or more"),
        ("join a b --on k --priority -300", "it takes a whole number from -100 to 100"),
        ("join a b --on k --batch-rows 0", "it takes a whole number, 1 or more"),
        ("join a b --on k --retain-seconds 5000000000", "it takes a whole number from 0 to 4294967295"),
        ("put a.csv --streams 1000", "it takes a whole number from 1 to 64"),
        ("cancel -3", "it takes a whole number, 0 or more"),
        ("demo --scale -3", "write a number from 0.001 to 1000"),
        ("serve --queue-limit -3", "-3"),
        ("tables --connect-timeout -3", "write a number of seconds"),
    ] {
        let said = refused(line);
        assert!(said.contains(expected) && !said.contains("unexpected argument"), "{line}: {said}");
    }
    let words = "dovetail join a b --on k --priority -3".split(' ');
    assert!(command().try_get_matches_from(words).is_ok());
}

#[test]
fn a_wrong_value_in_the_environment_is_reported_with_its_variable() {
    // Give the variable's value as a flag here, because tests share the environment.
    let refused = |line: &str, given: &str, variable: (&str, &str)| {
        let words = ["dovetail"].into_iter().chain(line.split(' '));
        let error = command().try_get_matches_from(words).unwrap_err();
        let given: Vec<String> = given.split(' ').map(str::to_owned).collect();
        let value = |name: &str| (name == variable.0).then(|| variable.1.to_owned());
        with_what_numbers_it_takes(with_variable(error, &given, value)).to_string()
    };
    for (line, variable, value) in [
        ("serve --listen nowhere", "DOVETAIL_LISTEN", "nowhere"),
        ("serve --endpoints many", "DOVETAIL_ENDPOINTS", "many"),
        ("serve --insecure=maybe", "DOVETAIL_INSECURE", "maybe"),
        ("serve --log-format xml", "DOVETAIL_LOG_FORMAT", "xml"),
        ("tables --connect-timeout soon", "DOVETAIL_CONNECT_TIMEOUT", "soon"),
    ] {
        let command = line.split(' ').next().unwrap();
        let said = refused(line, command, (variable, value));
        assert!(said.contains(&format!("invalid value '{value}' for '{variable}'")), "{line}: {said}");
        // A flag overrides the environment.
        let said = refused(line, line, (variable, value));
        assert!(said.contains(&format!("invalid value '{value}' for '--")), "{line}: {said}");
    }
}

/// Starts a server in this process, with a client.
async fn server() -> (Server, Client) {
    let mut settings = settings::defaults().unwrap();
    settings.listen = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    settings.admin_listen = "off".into();
    settings.host_memory = "256MiB".into();
    settings.devices = "host:1".into();
    let server = Server::start(&settings).await.unwrap();
    let uri = format!("http://{}", server.flight_address());
    (server, Client::connect(&ConnectArgs::to(uri)).await.unwrap())
}

const ROWS: i64 = 300_000;

fn numbers() -> RecordBatch {
    let numbers = || Arc::new(Int64Array::from_iter_values(0..ROWS)) as _;
    RecordBatch::try_from_iter([("k", numbers()), ("v", numbers())]).unwrap()
}

fn write(folder: &Path, name: &str) -> PathBuf {
    let (path, batch) = (folder.join(name), numbers());
    let mut sink = Target::create(&path, None).unwrap().begin(&batch.schema()).unwrap();
    sink.write(&batch).unwrap();
    sink.finish().unwrap();
    path
}

/// Uploads a file as a table, and returns its progress.
async fn upload(client: &Client, table: &str, path: &Path, streams: usize) -> Progress {
    let source = Source::open(path, None, &CsvArgs::default()).unwrap();
    let progress = Progress::of("uploading", Some(source.file_bytes));
    let options = PutOptions { streams, ..PutOptions::default() };
    let uploaded = put::upload(client, table, &options, vec![source], &progress).await.unwrap();
    assert_eq!(uploaded.rows, ROWS as u64);
    assert_eq!(progress.moved_bytes(), uploaded.bytes);
    progress
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_shows_the_uploaded_share_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, client) = server().await;
    for (name, streams) in [("a.parquet", 1), ("b.csv", 1), ("c.arrows", 3)] {
        let path = write(folder.path(), name);
        let progress = upload(&client, &name[..1], &path, streams).await;
        assert!(progress.done().unwrap() > 0.999, "{name}: {progress:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_shows_the_fetched_share_of_the_table() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, client) = server().await;
    upload(&client, "t", &write(folder.path(), "t.parquet"), 1).await;
    let info = client.info(table_descriptor("t")).await.unwrap();
    let progress = get::progress_of("t", &info);
    assert_eq!(progress.done(), Some(0.0));
    let target = Target::create(&folder.path().join("again.parquet"), None).unwrap();
    let received = get::to_file(client.fetch(&info).unwrap(), target, Instant::now(), &progress).await.unwrap();
    assert_eq!((received.rows, progress.moved_bytes()), (ROWS as u64, received.bytes));
    assert!(progress.done().unwrap() > 0.999, "{progress:?}");
}

/// Checks that the bar shows the running join's progress, and then the received share of the
/// result.
#[tokio::test(flavor = "multi_thread")]
async fn a_join_shows_its_progress_and_then_the_fetched_share_of_the_result() {
    let folder = tempfile::tempdir().unwrap();
    let (_server, client) = server().await;
    upload(&client, "t", &write(folder.path(), "t.parquet"), 1).await;
    let join = json!({ "join": { "left": "t", "right": "t", "on": [{ "left": "k", "right": "k" }] } });
    let info = client.info(command_descriptor(&join)).await.unwrap();
    let (job, progress) = (jobs::id_of(&info).unwrap(), get::progress_of("t", &info));
    let running = json!({ "state": "running", "progress": 0.25 });
    jobs::show(&progress, "t", &running);
    assert_eq!(progress.done(), Some(0.25));

    let target = Target::create(&folder.path().join("joined.parquet"), None).unwrap();
    let fetched = async {
        let received = get::to_file(client.fetch(&info).unwrap(), target, Instant::now(), &progress).await.unwrap();
        // All rows may arrive before the job's status is polled again.
        while progress.done() < Some(1.0) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        received
    };
    let received = tokio::select! {
        received = tokio::time::timeout(WAIT_MAX, fetched) => received.expect("the bar gets to its end"),
        never = get::follow(&client, "t", &info, &progress) => match never {},
    };
    let done = jobs::wait(&client, job, "t").await.unwrap();
    assert_eq!((Some(received.rows), Some(received.bytes)), (done["rows"].as_u64(), done["bytes"].as_u64()));
}
