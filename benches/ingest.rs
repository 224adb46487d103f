//! Server cost of an upload: CPU seconds per GB of Arrow body, for each way of handling DoPut.
//!
//! ```sh
//! cargo bench -p dovetail-bench --bench ingest -- --gigabytes 2 --rounds 5
//! ```
//!
//! | way | what the server does |
//! |---|---|
//! | `discard` | reads HTTP/2 frames and drops them: the lower bound of any server |
//! | `copy` | copies each frame into existing memory: the lower bound if bytes are kept |
//! | `one-copy` | `DoPutLayer`: scatters frames into the arena and validates |
//! | `ordinary` | tonic's decoder, then the arena and validation: the fallback |
//! | `stock` | tonic's decoder, arrow-flight's decoder, and each buffer copied into the arena |
//!
//! The server is a separate process of this program, so that its CPU time is counted alone. The
//! client repeats the same encoded messages on one connection, aligned to 8 bytes as in C++ and
//! Python. The ways take turns in each round. Prints one JSON line per way, columns and message
//! size, with the median and minimum of the rounds.

use std::io::{BufRead, BufReader, Read};
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use arrow::array::{Array, ArrayData, ArrayRef, Float64Array, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::SchemaRef;
use arrow::ipc::MetadataVersion;
use arrow::ipc::writer::{DictionaryTracker, IpcDataGenerator, IpcWriteContext, IpcWriteOptions};
use arrow_flight::decode::FlightRecordBatchStream;
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::flight_service_server::{FlightService, FlightServiceServer};
use arrow_flight::{
    Action, ActionType, Criteria, Empty, FlightData, FlightDescriptor, FlightInfo, HandshakeRequest, HandshakeResponse,
    PollInfo, PutResult, SchemaResult, Ticket,
};
use bytes::Bytes;
use clap::Parser;
use dovetail::Result;
use dovetail::memory::{Arena, Budget, Interrupt};
use dovetail::service::cpu_work::CpuWork;
use dovetail::service::ingest::{Ack, DoPutLayer, Limits, UploadHandler, UploadSink, upload_messages};
use futures::{Stream, StreamExt, TryStreamExt};
use http::{Extensions, Request, Response};
use http_body_util::BodyExt;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::transport::{Channel, Server};
use tonic::{Status, Streaming};
use tower::{Layer, Service};

mod record;
use record::Recorder;

#[derive(Parser)]
struct Options {
    /// Gigabytes (10^9 bytes) of Arrow bodies in each run
    #[arg(long, default_value_t = 2.0)]
    gigabytes: f64,
    /// Number of rounds. Each way runs once per round
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Message sizes in MiB
    #[arg(long, value_delimiter = ',', default_value = "2,16")]
    message_mib: Vec<usize>,
    /// Ways to measure
    #[arg(long, value_delimiter = ',', default_values_t = WAYS.map(String::from))]
    ways: Vec<String>,
    /// Append the measurements to benches/results
    #[arg(long)]
    record: bool,
    /// Run as the server, in this way. The benchmark starts this itself
    #[arg(long, hide = true)]
    serve: Option<String>,
    /// Option that cargo passes; no effect
    #[arg(long, hide = true)]
    bench: bool,
}

const WAYS: [&str; 5] = ["discard", "copy", "one-copy", "ordinary", "stock"];
const LIMITS: Limits = Limits { message_bytes: 256 << 20, idle: Duration::from_secs(60) };

fn main() {
    let options = Options::parse();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    match &options.serve {
        Some(way) => runtime.block_on(serve(way)),
        None => runtime.block_on(measure(&options)),
    }
}

// ---- Client ------------------------------------------------------------------------------------

async fn measure(options: &Options) {
    let mut recorder = Recorder::new("ingest", options.record);
    let ways = &options.ways;
    for columns in ["fixed", "strings"] {
        for mib in &options.message_mib {
            let messages = messages(columns, mib << 20);
            let body_bytes = messages[1].data_body.len();
            let count = (options.gigabytes * 1e9 / body_bytes as f64).ceil() as usize;
            let mut runs = vec![Vec::new(); ways.len()];
            for _ in 0..options.rounds {
                for (way, runs) in ways.iter().zip(&mut runs) {
                    runs.push(run(way, &messages, count).await);
                }
            }
            let gigabytes = (body_bytes * count) as f64 / 1e9;
            let median = |runs: &[Run], of: fn(&Run) -> f64| {
                let mut values: Vec<_> = runs.iter().map(of).collect();
                values.sort_by(f64::total_cmp);
                (values[values.len() / 2], values[0])
            };
            let (floor, _) = median(&runs[0], |run| run.cpu_seconds);
            for (way, runs) in ways.iter().zip(&runs) {
                let (cpu, cpu_min) = median(runs, |run| run.cpu_seconds);
                let (wall, _) = median(runs, |run| run.wall_seconds);
                let line = json!({
                    "rounds": options.rounds, "way": way, "columns": columns, "message_mib": mib, "gigabytes": gigabytes,
                    "server_cpu_seconds_per_gb": round(cpu / gigabytes),
                    "server_cpu_seconds_per_gb_min": round(cpu_min / gigabytes),
                    "times_first_way": round(cpu / floor),
                    "gb_per_second": round(gigabytes / wall),
                });
                recorder.write(line);
            }
        }
    }
}

fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[derive(Clone, Copy, Debug)]
struct Run {
    cpu_seconds: f64,
    wall_seconds: f64,
}

async fn run(way: &str, messages: &[FlightData], count: usize) -> Run {
    let server = ServerProcess::start(way);
    let channel = Channel::from_shared(format!("http://{}", server.address)).expect("an address");
    let channel = channel.http2_adaptive_window(false).connect().await.expect("a connection");
    // The first upload faults in the arena's pages, which a server does once and not per upload.
    put(channel.clone(), messages, count.div_ceil(10)).await;
    let (before, started) = (server.cpu_seconds(), Instant::now());
    put(channel, messages, count).await;
    Run { cpu_seconds: server.cpu_seconds() - before, wall_seconds: started.elapsed().as_secs_f64() }
}

async fn put(channel: Channel, messages: &[FlightData], count: usize) {
    let (schema, batch) = (messages[0].clone(), messages[1].clone());
    let sent = futures::stream::iter([schema]).chain(futures::stream::iter(std::iter::repeat_n(batch, count)));
    let mut client = FlightServiceClient::new(channel);
    let results = client.do_put(sent).await.expect("an upload").into_inner();
    results.try_for_each(|_| async { Ok(()) }).await.expect("an upload");
}

/// Makes a schema message and one batch with a body of about `bytes`.
fn messages(columns: &str, bytes: usize) -> [FlightData; 2] {
    let batch = match columns {
        "fixed" => {
            let rows = bytes / 64;
            let ints = |seed: i64| Arc::new(Int64Array::from_iter_values((0..rows as i64).map(|row| row * seed)));
            let floats = |seed: f64| Arc::new(Float64Array::from_iter_values((0..rows).map(|row| row as f64 * seed)));
            let columns = (0..8).map(|column| {
                let array: ArrayRef = if column % 2 == 0 { ints(column + 1) } else { floats(column as f64) };
                (format!("c{column}"), array)
            });
            RecordBatch::try_from_iter(columns)
        }
        _ => {
            let rows = bytes / 32;
            let text = StringArray::from_iter_values((0..rows).map(|row| format!("some text, row {row:05}")));
            let keys = Int64Array::from_iter_values(0..rows as i64);
            RecordBatch::try_from_iter([("k", Arc::new(keys) as ArrayRef), ("s", Arc::new(text))])
        }
    };
    let batch = batch.expect("columns of one length");
    let options = IpcWriteOptions::try_new(8, false, MetadataVersion::V5).expect("what C++ sends");
    let (generator, mut tracker) = (IpcDataGenerator::default(), DictionaryTracker::new(false));
    let schema = generator.schema_to_bytes_with_dictionary_tracker(&batch.schema(), &mut tracker, &options);
    let mut context = IpcWriteContext::default();
    let (_, encoded) = generator.encode(&batch, &mut tracker, &options, &mut context).expect("a batch");
    [
        FlightData::new()
            .with_descriptor(FlightDescriptor::new_path(vec!["t".into()]))
            .with_data_header(schema.ipc_message),
        FlightData::new().with_data_header(encoded.ipc_message).with_data_body(encoded.arrow_data),
    ]
}

struct ServerProcess {
    child: Child,
    address: String,
}

impl ServerProcess {
    fn start(way: &str) -> Self {
        let program = std::env::current_exe().expect("this program");
        let mut command = Command::new(program);
        command.args(["--serve", way]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a server process");
        let mut address = String::new();
        let mut output = BufReader::new(child.stdout.take().expect("its output is piped"));
        output.read_line(&mut address).expect("its address");
        Self { child, address: address.trim().into() }
    }

    /// Returns the CPU time of all threads, user and system: fields 14 and 15 of `/proc/PID/stat`,
    /// in ticks of 10 ms.
    fn cpu_seconds(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).expect("a live process");
        let (_, after_name) = stat.rsplit_once(')').expect("a name in parentheses");
        let fields: Vec<&str> = after_name.split_whitespace().collect();
        let ticks = |field: usize| fields[field - 3].parse::<f64>().expect("a number of ticks");
        (ticks(14) + ticks(15)) / 100.0
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// ---- Server ------------------------------------------------------------------------------------

async fn serve(way: &str) {
    let arena = Arena::new(Budget::new("host memory", "--host-memory", 4 << 30));
    let handler: Arc<dyn UploadHandler> = Arc::new(Counter);
    let behind = Behind { stock: way == "stock", handler: handler.clone(), arena: arena.clone() };
    let behind = FlightServiceServer::new(behind).max_decoding_message_size(LIMITS.message_bytes);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    println!("{}", listener.local_addr().expect("its address"));
    // The real server's settings for clients of the same host.
    let mut builder = Server::builder()
        .max_frame_size(1 << 20)
        .initial_stream_window_size(2 << 20)
        .initial_connection_window_size(64 << 20);
    let incoming = TcpListenerStream::new(listener);
    // The benchmark holds the other end of standard input. The server exits when it closes.
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    });
    let served = match way {
        "discard" => builder.add_service(Discard { copy: false }).serve_with_incoming(incoming).await,
        "copy" => builder.add_service(Discard { copy: true }).serve_with_incoming(incoming).await,
        "one-copy" => {
            let service = DoPutLayer::new(handler, arena, LIMITS, CpuWork::new()).layer(behind);
            builder.add_service(service).serve_with_incoming(incoming).await
        }
        "ordinary" | "stock" => builder.add_service(behind).serve_with_incoming(incoming).await,
        other => panic!("{other:?} is not a way; write one of {WAYS:?}"),
    };
    served.expect("a server");
}

/// Drops all batches, so that the arena's pages are reused.
struct Counter;

struct CounterSink(Ack);

#[tonic::async_trait]
impl UploadHandler for Counter {
    async fn begin(&self, _: &Extensions, _: FlightDescriptor, _: SchemaRef, _: Bytes) -> Result<Box<dyn UploadSink>> {
        Ok(Box::new(CounterSink(Ack::default())))
    }
}

#[tonic::async_trait]
impl UploadSink for CounterSink {
    fn append(&mut self, batch: RecordBatch, _: &Interrupt) -> Result<Ack> {
        self.0.rows += batch.num_rows() as u64;
        Ok(self.0)
    }

    async fn finish(self: Box<Self>) -> Result<Ack> {
        Ok(self.0)
    }
}

/// Reads and drops requests. `copy`: copies each frame once first.
#[derive(Clone)]
struct Discard {
    copy: bool,
}

impl NamedService for Discard {
    const NAME: &'static str = "arrow.flight.protocol.FlightService";
}

impl Service<Request<Body>> for Discard {
    type Response = Response<Body>;
    type Error = std::convert::Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        /// Far more than caches hold, so that the bytes reach memory like a table's.
        const MEMORY_BYTES: usize = 256 << 20;
        let copy = self.copy;
        Box::pin(async move {
            let mut body = request.into_body();
            let mut memory = vec![1u8; if copy { MEMORY_BYTES } else { 0 }];
            let mut at = 0;
            while let Some(Ok(frame)) = body.frame().await {
                if let (true, Some(data)) = (copy, frame.data_ref()) {
                    if at + data.len() > memory.len() {
                        at = 0;
                    }
                    memory[at..at + data.len()].copy_from_slice(data);
                    at += data.len();
                }
            }
            std::hint::black_box(&memory);
            Ok(Status::ok("").into_http())
        })
    }
}

/// tonic's Flight service, with uploads only.
struct Behind {
    stock: bool,
    handler: Arc<dyn UploadHandler>,
    arena: Arena,
}

type Answer<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn none<T>() -> Result<tonic::Response<T>, Status> {
    Err(Status::unimplemented("not part of this benchmark"))
}

#[tonic::async_trait]
impl FlightService for Behind {
    type HandshakeStream = Answer<HandshakeResponse>;
    type ListFlightsStream = Answer<FlightInfo>;
    type DoGetStream = Answer<FlightData>;
    type DoPutStream = Answer<PutResult>;
    type DoExchangeStream = Answer<FlightData>;
    type DoActionStream = Answer<arrow_flight::Result>;
    type ListActionsStream = Answer<ActionType>;

    async fn do_put(
        &self,
        request: tonic::Request<Streaming<FlightData>>,
    ) -> Result<tonic::Response<Self::DoPutStream>, Status> {
        let arena = self.arena.clone();
        if self.stock {
            let messages = request.into_inner().map_err(FlightError::from);
            let mut batches = FlightRecordBatchStream::new_from_flight_data(messages);
            while let Some(batch) = batches.try_next().await? {
                for column in batch.columns() {
                    copy(&column.to_data(), &arena)?;
                }
            }
            return Ok(tonic::Response::new(Box::pin(futures::stream::empty())));
        }
        let (_, extensions, messages) = request.into_parts();
        let mut parts = Request::new(()).into_parts().0;
        parts.extensions = extensions;
        let acks = upload_messages(self.handler.clone(), parts, messages, arena, LIMITS, CpuWork::new());
        let results = acks.map_ok(|ack| PutResult { app_metadata: ack.to_json().into() }).map_err(Status::from);
        Ok(tonic::Response::new(Box::pin(results)))
    }

    async fn handshake(
        &self,
        _: tonic::Request<Streaming<HandshakeRequest>>,
    ) -> Result<tonic::Response<Self::HandshakeStream>, Status> {
        none()
    }

    async fn list_flights(
        &self,
        _: tonic::Request<Criteria>,
    ) -> Result<tonic::Response<Self::ListFlightsStream>, Status> {
        none()
    }

    async fn get_flight_info(
        &self,
        _: tonic::Request<FlightDescriptor>,
    ) -> Result<tonic::Response<FlightInfo>, Status> {
        none()
    }

    async fn poll_flight_info(&self, _: tonic::Request<FlightDescriptor>) -> Result<tonic::Response<PollInfo>, Status> {
        none()
    }

    async fn get_schema(&self, _: tonic::Request<FlightDescriptor>) -> Result<tonic::Response<SchemaResult>, Status> {
        none()
    }

    async fn do_get(&self, _: tonic::Request<Ticket>) -> Result<tonic::Response<Self::DoGetStream>, Status> {
        none()
    }

    async fn do_exchange(
        &self,
        _: tonic::Request<Streaming<FlightData>>,
    ) -> Result<tonic::Response<Self::DoExchangeStream>, Status> {
        none()
    }

    async fn do_action(&self, _: tonic::Request<Action>) -> Result<tonic::Response<Self::DoActionStream>, Status> {
        none()
    }

    async fn list_actions(&self, _: tonic::Request<Empty>) -> Result<tonic::Response<Self::ListActionsStream>, Status> {
        none()
    }
}

fn copy(data: &ArrayData, arena: &Arena) -> Result<()> {
    for buffer in data.buffers() {
        arena.allocate(buffer.len(), "a copy")?.copy_from_slice(buffer);
    }
    data.child_data().iter().try_for_each(|child| copy(child, arena))
}
