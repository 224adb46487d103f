//! One server for one test, and clients for it.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema};
use arrow_flight::decode::FlightRecordBatchStream;
use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::{Action, FlightDescriptor, FlightInfo, PutResult, Ticket};
use clap::{CommandFactory, FromArgMatches, Parser};
use dovetail::service::{Server, Settings};
use futures::{StreamExt, TryStreamExt, stream};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

/// The tests' client: Flight's generated one, so that a test controls every byte of a request.
pub type Client = FlightServiceClient<Channel>;

/// See [`TestServer::client_without_deadlines`].
pub type ClientWithoutDeadlines = FlightServiceClient<HttpClient<HttpConnector, tonic::body::Body>>;

/// How long a test waits for an event that must come.
pub const WAIT_LIMIT: Duration = Duration::from_secs(60);

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    settings: Settings,
}

/// Makes settings from flags, on free ports and with little memory.
pub fn settings(flags: &[&str]) -> Settings {
    let defaults = [
        ("--listen", "127.0.0.1:0"),
        ("--admin-listen", "127.0.0.1:0"),
        ("--host-memory", "256MiB"),
        ("--devices", "host:2"),
        ("--device-memory", "32MiB"),
        // The user's saved rates stay untouched.
        ("--rates-file", "none"),
    ];
    let mut arguments = vec!["dovetail"];
    let is_given = |flag: &str| flags.iter().any(|given| given.split('=').next() == Some(flag));
    for (flag, value) in defaults {
        // A server with a topology file of devices refuses `--devices`.
        let is_told = is_given(flag) || flag == "--devices" && is_given("--topology");
        if !is_told {
            arguments.extend([flag, value]);
        }
    }
    arguments.extend(flags);
    let command = without_environment(Arguments::command());
    let matches = command.get_matches_from(arguments);
    Arguments::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()).settings
}

/// Removes the user's settings from the command: no argument reads a DOVETAIL_* variable.
fn without_environment(command: clap::Command) -> clap::Command {
    command.mut_args(|argument| argument.env(None::<&str>))
}

/// Writes a topology file to `folder` with `count` devices of one thread each, which move
/// `bytes_per_second`. Joins take a time in proportion to their results, on any machine.
pub fn slow_devices(folder: &Path, count: usize, bytes_per_second: u64) -> String {
    let mut text = "name = \"slow\"\n[[socket]]\nname = \"cpu0\"\n".to_string();
    for device in 0..count {
        text += &format!("[[device]]\nname = \"host:{device}\"\nthreads = 1\n");
        text += &format!("[[link]]\nbetween = [\"cpu0\", \"host:{device}\"]\nrate = \"{bytes_per_second}B/s\"\n");
    }
    let file = folder.join("slow.toml");
    std::fs::write(&file, text).unwrap();
    format!("--topology={}", file.display())
}

/// Writes a topology file to `folder` with `count` devices of one thread each. Each has other
/// memory, so that a join is planned once for each of them.
pub fn unlike_devices(folder: &Path, count: usize) -> String {
    let mut text = "name = \"unlike\"\n[[socket]]\nname = \"cpu0\"\n".to_string();
    for device in 0..count {
        let memory = 4 + device;
        text += &format!(
            "[[device]]\nname = \"host:{device}\"\nthreads = 1\nmemory = \"{memory}MiB\"\nsocket = \"cpu0\"\n"
        );
    }
    let file = folder.join("unlike.toml");
    std::fs::write(&file, text).unwrap();
    format!("--topology={}", file.display())
}

/// Waits until a condition holds, with a generous limit because the machine may be busy.
pub async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < WAIT_LIMIT, "waited {WAIT_LIMIT:?}, and still not: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A running server.
pub struct TestServer {
    pub address: String,
    pub admin: String,
    pub shared: Arc<dovetail::service::Shared>,
    drain: Option<oneshot::Sender<()>>,
    end: Option<oneshot::Sender<()>>,
    serving: Option<JoinHandle<dovetail::Result<()>>>,
}

impl TestServer {
    pub async fn start(flags: &[&str]) -> Self {
        let server = Server::start(&settings(flags)).await.expect("the server starts");
        let address = format!("http://{}", server.flight_address());
        let admin = server.admin_address().map(|address| address.to_string()).unwrap_or_default();
        let shared = server.shared().clone();
        let (drain, draining) = oneshot::channel();
        let (end, ending) = oneshot::channel();
        let serving = server.serve_until(async { drop(draining.await) }, async { drop(ending.await) });
        Self { address, admin, shared, drain: Some(drain), end: Some(end), serving: Some(tokio::spawn(serving)) }
    }

    pub async fn client(&self) -> Client {
        connect(Endpoint::from_shared(self.address.clone()).unwrap()).await
    }

    /// Makes a client that ends no call at its deadline, so that only the server does. tonic's own
    /// client ends calls, too, and could be first.
    pub fn client_without_deadlines(&self) -> ClientWithoutDeadlines {
        let connections = HttpClient::builder(TokioExecutor::new()).http2_only(true).build_http();
        let client = FlightServiceClient::with_origin(connections, self.address.parse().unwrap());
        client.max_decoding_message_size(usize::MAX)
    }

    /// Opens a connection for services other than Flight's.
    pub async fn channel(&self) -> Channel {
        Endpoint::from_shared(self.address.clone()).unwrap().connect().await.unwrap()
    }

    /// Returns the arena's bytes in use. The value is stable after all work has ended.
    pub async fn used_bytes(&self) -> u64 {
        self.shared.catalog.arena().budget().used_bytes()
    }

    /// Waits until exactly `bytes` of the arena are in use. A request may free its memory shortly
    /// after its answer.
    pub async fn expect_used_bytes(&self, bytes: u64) {
        let start = Instant::now();
        loop {
            let used = self.used_bytes().await;
            if used == bytes {
                return;
            }
            assert!(start.elapsed() < WAIT_LIMIT, "{used} bytes of the arena are in use, {bytes} were expected");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Acts like the first signal.
    pub fn drain(&mut self) {
        let _ = self.drain.take().expect("drained once").send(());
    }

    /// Acts like the second signal.
    pub fn end(&mut self) {
        let _ = self.end.take().expect("ended once").send(());
    }

    /// Waits until the server has ended.
    pub async fn join(&mut self) -> dovetail::Result<()> {
        self.serving.take().expect("joined once").await.expect("the server does not panic")
    }

    pub async fn http_get(&self, path: &str) -> (u16, String) {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut stream = tokio::net::TcpStream::connect(&self.admin).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        let status = text.split(' ').nth(1).unwrap().parse().unwrap();
        (status, text.split_once("\r\n\r\n").unwrap().1.to_owned())
    }
}

pub async fn connect(endpoint: Endpoint) -> Client {
    let channel = endpoint.connect().await.expect("the server takes connections");
    FlightServiceClient::new(channel).max_decoding_message_size(usize::MAX)
}

/// Makes a table of keys `0..rows`, each with a name, in batches of `batch_rows`.
pub fn keyed(rows: i64, batch_rows: usize) -> Vec<RecordBatch> {
    let schema =
        Arc::new(Schema::new(vec![Field::new("k", DataType::Int64, false), Field::new("name", DataType::Utf8, true)]));
    let keys: Vec<i64> = (0..rows).collect();
    let batch = |keys: &[i64]| {
        let names = keys.iter().map(|key| (key % 5 != 0).then(|| format!("name of {key}")));
        let columns: Vec<ArrayRef> =
            vec![Arc::new(Int64Array::from_iter_values(keys.iter().copied())), Arc::new(StringArray::from_iter(names))];
        RecordBatch::try_new(schema.clone(), columns).unwrap()
    };
    match rows {
        0 => vec![RecordBatch::new_empty(schema.clone())],
        _ => keys.chunks(batch_rows).map(batch).collect(),
    }
}

/// Makes one batch of `rows` rows and three distinct keys. Its self-join has about
/// `rows * rows / 3` rows.
pub fn few_keys(rows: i64) -> RecordBatch {
    let keys = Int64Array::from_iter_values((0..rows).map(|row| row % 3));
    RecordBatch::try_from_iter([("k", Arc::new(keys) as ArrayRef)]).unwrap()
}

pub async fn put(client: &mut Client, name: &str, batches: Vec<RecordBatch>) -> Result<Vec<PutResult>, Status> {
    put_with(client, name, batches, "").await
}

pub async fn put_with(
    client: &mut Client,
    name: &str,
    batches: Vec<RecordBatch>,
    options: &str,
) -> Result<Vec<PutResult>, Status> {
    let messages = FlightDataEncoderBuilder::new()
        .with_flight_descriptor(Some(path(name)))
        .with_metadata(options.to_owned().into())
        .with_schema(batches[0].schema())
        .with_dictionary_handling(arrow_flight::encode::DictionaryHandling::Resend)
        .build(stream::iter(batches).map(Ok));
    let messages: Vec<_> = messages.try_collect().await.unwrap();
    client.do_put(stream::iter(messages)).await?.into_inner().try_collect().await
}

pub fn path(name: &str) -> FlightDescriptor {
    FlightDescriptor::new_path(vec![name.into()])
}

pub fn command(json: &str) -> FlightDescriptor {
    FlightDescriptor::new_cmd(json.to_owned())
}

/// Reads the rows of one ticket.
pub async fn read(client: &mut Client, ticket: Ticket) -> Result<Vec<RecordBatch>, Status> {
    let messages = client.do_get(ticket).await?.into_inner();
    let batches = FlightRecordBatchStream::new_from_flight_data(messages.map_err(FlightError::from));
    batches.try_collect().await.map_err(|error| match error {
        FlightError::Tonic(status) => *status,
        other => panic!("the server sent what cannot be decoded: {other}"),
    })
}

/// Reads the rows of all endpoints, in order.
pub async fn read_all(client: &mut Client, info: &FlightInfo) -> Result<Vec<RecordBatch>, Status> {
    let mut batches = Vec::new();
    for endpoint in &info.endpoint {
        batches.extend(read(client, endpoint.ticket.clone().unwrap()).await?);
    }
    Ok(batches)
}

pub async fn get(client: &mut Client, descriptor: FlightDescriptor) -> Result<Vec<RecordBatch>, Status> {
    let info = client.get_flight_info(descriptor).await?.into_inner();
    read_all(client, &info).await
}

/// Calls an action. Returns its results as text.
pub async fn act(client: &mut Client, name: &str, body: &str) -> Result<Vec<String>, Status> {
    let results: Vec<_> =
        client.do_action(Action::new(name, body.to_owned())).await?.into_inner().try_collect().await?;
    Ok(results.iter().map(|result| String::from_utf8(result.body.to_vec()).unwrap()).collect())
}

/// Checks that the call was refused with `code`, and that the message contains `words`.
#[track_caller]
pub fn refused<T: std::fmt::Debug>(outcome: Result<T, Status>, code: Code, words: &str) {
    let status = outcome.expect_err("it should have been refused");
    assert_eq!(status.code(), code, "{status}");
    assert!(status.message().contains(words), "{words:?} is not in {:?}", status.message());
}

pub fn rows(batches: &[RecordBatch]) -> usize {
    batches.iter().map(RecordBatch::num_rows).sum()
}
