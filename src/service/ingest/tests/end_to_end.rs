//! Tests of the layer in front of a real tonic server, over loopback, with the clients of
//! arrow-flight.

use std::pin::Pin;
use std::sync::atomic::Ordering;

use arrow::datatypes::Int32Type;
use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::flight_service_server::{FlightService, FlightServiceServer};
use arrow_flight::{
    Action, ActionType, Criteria, Empty, FlightClient, FlightInfo, HandshakeRequest, HandshakeResponse, PollInfo,
    PutResult, SchemaResult, Ticket,
};
use futures::{Stream, StreamExt, TryStreamExt};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::codec::CompressionEncoding;
use tonic::transport::{Channel, Server};
use tonic::{Code, Request, Response, Status, Streaming};
use tower::Layer;

use super::uploads::KeeperHandler;
use super::*;
use crate::service::ingest::{DoPutLayer, upload_messages};
use crate::testing::wait_in_task_until;

/// Service behind the layer. It takes uploads by the ordinary path, and commands, for which it
/// returns the number of messages.
#[derive(Clone)]
struct Behind {
    handler: KeeperHandler,
    arena: Arena,
}

type Answer<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn none<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("not part of this test"))
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

    async fn do_put(&self, request: Request<Streaming<FlightData>>) -> Result<Response<Self::DoPutStream>, Status> {
        let (_, extensions, mut messages) = request.into_parts();
        let first = messages.message().await?.ok_or_else(|| Status::invalid_argument("no message"))?;
        if first.flight_descriptor.as_ref().is_some_and(|descriptor| !descriptor.cmd.is_empty()) {
            let count = 1 + messages.try_fold(0, |count, _| async move { Ok(count + 1) }).await?;
            let result = PutResult { app_metadata: format!("{count} messages").into() };
            return Ok(Response::new(Box::pin(futures::stream::iter([Ok(result)]))));
        }
        let mut parts = http::Request::new(()).into_parts().0;
        parts.extensions = extensions;
        let messages = Box::pin(futures::stream::iter([Ok(first)]).chain(messages));
        let acks = upload_messages(
            Arc::new(self.handler.clone()),
            parts,
            messages,
            self.arena.clone(),
            LIMITS,
            CpuWork::new(),
        );
        let results = acks.map_ok(|ack| PutResult { app_metadata: ack.to_json().into() }).map_err(Status::from);
        Ok(Response::new(Box::pin(results)))
    }

    async fn list_actions(&self, _: Request<Empty>) -> Result<Response<Self::ListActionsStream>, Status> {
        let action = ActionType { r#type: "behind".into(), description: String::new() };
        Ok(Response::new(Box::pin(futures::stream::iter([Ok(action)]))))
    }

    async fn handshake(
        &self,
        _: Request<Streaming<HandshakeRequest>>,
    ) -> Result<Response<Self::HandshakeStream>, Status> {
        none()
    }

    async fn list_flights(&self, _: Request<Criteria>) -> Result<Response<Self::ListFlightsStream>, Status> {
        none()
    }

    async fn get_flight_info(&self, _: Request<FlightDescriptor>) -> Result<Response<FlightInfo>, Status> {
        none()
    }

    async fn poll_flight_info(&self, _: Request<FlightDescriptor>) -> Result<Response<PollInfo>, Status> {
        none()
    }

    async fn get_schema(&self, _: Request<FlightDescriptor>) -> Result<Response<SchemaResult>, Status> {
        none()
    }

    async fn do_get(&self, _: Request<Ticket>) -> Result<Response<Self::DoGetStream>, Status> {
        none()
    }

    async fn do_exchange(&self, _: Request<Streaming<FlightData>>) -> Result<Response<Self::DoExchangeStream>, Status> {
        none()
    }

    async fn do_action(&self, _: Request<Action>) -> Result<Response<Self::DoActionStream>, Status> {
        none()
    }
}

struct Fixture {
    handler: KeeperHandler,
    arena: Arena,
    uri: String,
    channel: Channel,
    _server: AbortOnDropHandle<()>,
}

impl Fixture {
    async fn start() -> Self {
        let (handler, arena) = (KeeperHandler::default(), arena());
        let behind = FlightServiceServer::new(Behind { handler: handler.clone(), arena: arena.clone() })
            .accept_compressed(CompressionEncoding::Zstd);
        let service = DoPutLayer::new(Arc::new(handler.clone()), arena.clone(), LIMITS, CpuWork::new()).layer(behind);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Server::builder().add_service(service).serve_with_incoming(TcpListenerStream::new(listener));
        let server = tokio::spawn(async move { server.await.unwrap() });
        let uri = format!("http://{address}");
        let channel = Channel::from_shared(uri.clone()).unwrap().connect().await.unwrap();
        Self { handler, arena, uri, channel, _server: AbortOnDropHandle::new(server) }
    }

    async fn put(&self, messages: impl Stream<Item = FlightData> + Send + 'static) -> Result<Vec<String>, Status> {
        let mut client = FlightServiceClient::new(self.channel.clone());
        let results = client.do_put(messages).await?.into_inner();
        results.map_ok(|result| String::from_utf8(result.app_metadata.to_vec()).unwrap()).try_collect().await
    }

    /// Drops the stored tables, and waits until no upload is under way and no memory is held. The
    /// wait is at least a minute, so that a slow machine is no failure.
    async fn assert_nothing_left(&self) {
        for _ in 0..60_000 {
            self.handler.0.tables.lock().clear();
            if self.handler.0.sinks.load(Ordering::SeqCst) == 0 && self.arena.budget().used_bytes() == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("an upload lives on, with {} bytes", self.arena.budget().used_bytes());
    }
}

fn good() -> Vec<FlightData> {
    let batch = small_batch();
    messages(&batch.schema(), &[batch.clone(), batch], &like_pyarrow())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flight_client_uploads_through_the_layer() {
    let fixture = Fixture::start().await;
    let batch = small_batch();
    let sent = [batch.clone(), batch.slice(2, 3)];
    let encoder = FlightDataEncoderBuilder::new()
        .with_flight_descriptor(Some(FlightDescriptor::new_path(vec!["orders".into()])))
        .with_dictionary_handling(arrow_flight::encode::DictionaryHandling::Resend)
        .build(futures::stream::iter(sent.clone().map(Ok)));
    let mut client = FlightClient::new(fixture.channel.clone());
    let acks: Vec<_> = client.do_put(encoder).await.unwrap().try_collect().await.unwrap();
    assert_eq!(acks.len(), 3);
    let last: serde_json::Value = serde_json::from_slice(&acks[2].app_metadata).unwrap();
    assert_eq!(last["rows"], 8);
    {
        let tables = fixture.handler.0.tables.lock();
        let (name, came) = &tables[0];
        assert_eq!(name, "orders");
        assert_eq!(came[..], sent);
        came.iter().for_each(|batch| assert_in_arena(batch, &fixture.arena));
        assert!(came[0].column(3).as_any().is::<DictionaryArray<Int32Type>>());
    }
    fixture.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_and_other_calls_are_passed_on_unchanged() {
    let fixture = Fixture::start().await;
    let mut messages = good();
    let count = messages.len();
    messages[0].flight_descriptor = Some(FlightDescriptor::new_cmd("a command"));
    assert_eq!(fixture.put(futures::stream::iter(messages)).await.unwrap(), [format!("{count} messages")]);
    let mut client = FlightClient::new(fixture.channel.clone());
    let actions: Vec<_> = client.list_actions().await.unwrap().try_collect().await.unwrap();
    assert_eq!(actions[0].r#type, "behind");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_compressed_by_grpc_take_the_ordinary_path() {
    let fixture = Fixture::start().await;
    let mut client = FlightServiceClient::new(fixture.channel.clone()).send_compressed(CompressionEncoding::Zstd);
    let results = client.do_put(futures::stream::iter(good())).await.unwrap().into_inner();
    let results: Vec<_> = results.try_collect().await.unwrap();
    assert_eq!(results.len(), 3);
    assert_eq!(fixture.handler.0.tables.lock()[0].1, [small_batch(), small_batch()]);
    fixture.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_reach_the_client_in_words_and_the_next_upload_is_served() {
    let fixture = Fixture::start().await;
    let mut refused = good();
    refused[0].app_metadata = "refuse".into();
    let mut corrupt = good();
    corrupt[2].data_header = vec![1; 30].into();
    let mut over = good();
    over[2].data_body = vec![0; LIMITS.message_bytes + 1].into();
    let mut without_descriptor = good();
    without_descriptor[0].flight_descriptor = None;
    for (messages, code, part) in [
        (refused, Code::AlreadyExists, "„größer“ gibt es schon: 100 %"),
        (corrupt, Code::InvalidArgument, "not an Arrow IPC flatbuffer"),
        (over, Code::ResourceExhausted, "--message-limit"),
        (without_descriptor, Code::InvalidArgument, "no flight descriptor"),
        (Vec::new(), Code::InvalidArgument, "before its first message"),
    ] {
        // The client goes on sending until it receives the error, as real clients do.
        let refusal = fixture.put(futures::stream::iter(messages)).await.expect_err(part);
        assert_eq!(refusal.code(), code, "{refusal:?}");
        assert!(refusal.message().contains(part), "{refusal:?}");
        fixture.assert_nothing_left().await;
        assert_eq!(fixture.put(futures::stream::iter(good())).await.unwrap().len(), 3);
        fixture.assert_nothing_left().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_disconnects_leaves_nothing() {
    let fixture = Fixture::start().await;
    let uri = fixture.uri.clone();
    // The client has a runtime of its own, so that it can die as a process does: its connection
    // closes in mid-upload.
    let client = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut client = FlightServiceClient::new(Channel::from_shared(uri).unwrap().connect().await.unwrap());
            let messages = futures::stream::iter(good()).chain(futures::stream::pending());
            let mut results = client.do_put(messages).await.unwrap().into_inner();
            results.message().await.unwrap().unwrap();
        });
        runtime
    });
    let runtime = client.await.unwrap();
    assert_eq!(fixture.handler.0.sinks.load(Ordering::SeqCst), 1);
    runtime.shutdown_background();
    wait_in_task_until("the upload to be forgotten", || fixture.handler.0.sinks.load(Ordering::SeqCst) == 0).await;
    assert!(fixture.handler.0.tables.lock().is_empty());
    fixture.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_reads_acknowledgements_last_is_not_blocked() {
    const BATCHES: usize = 4000;
    let fixture = Fixture::start().await;
    let messages = good();
    let batch = messages.last().unwrap().clone();
    let head = messages[..messages.len() - 2].to_vec();
    let (done, all_sent) = tokio::sync::oneshot::channel();
    let mut done = Some(done);
    let sent = futures::stream::iter(head.into_iter().chain(std::iter::repeat_n(batch, BATCHES)).collect::<Vec<_>>())
        .chain(futures::stream::once(async move {
            // The stream is polled here once all earlier messages went into the connection.
            done.take().unwrap().send(()).unwrap();
            FlightData::new()
        }));
    let mut client = FlightServiceClient::new(fixture.channel.clone());
    let results = client.do_put(sent).await.unwrap().into_inner();
    all_sent.await.unwrap();
    let results: Vec<_> = results.try_collect().await.unwrap();
    let last: serde_json::Value = serde_json::from_slice(&results.last().unwrap().app_metadata).unwrap();
    assert_eq!(last["rows"], 5 * BATCHES);
    fixture.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_messages_in_many_frames_are_decoded_whole() {
    let fixture = Fixture::start().await;
    let column: ArrayRef = Arc::new(Int64Array::from_iter_values(0..900_000));
    let batch = RecordBatch::try_from_iter([("n", column)]).unwrap();
    let sent = messages(&batch.schema(), &[batch.clone(), batch.slice(1, 899_999)], &like_pyarrow());
    assert_eq!(fixture.put(futures::stream::iter(sent)).await.unwrap().len(), 3);
    assert_eq!(fixture.handler.0.tables.lock()[0].1, [batch.clone(), batch.slice(1, 899_999)]);
    fixture.assert_nothing_left().await;
}
