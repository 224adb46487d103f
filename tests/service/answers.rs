//! Answers of actions, compared with their messages in `proto/dovetail.proto`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use arrow_flight::FlightInfo;
use dovetail::scheduler::JobId;
use dovetail::service::proto;
use prost::Message;
use prost_types::field_descriptor_proto::Type;
use prost_types::{DescriptorProto, FileDescriptorSet};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::exchange;
use crate::harness::*;

/// Two devices, each with its own link to a shared switch.
const TOPOLOGY: &str = r#"
name = "two behind a switch"
[[socket]]
name = "cpu0"
memory = "1GiB"
[[switch]]
name = "plx"
[[device]]
name = "host:0"
threads = 1
memory = "32MiB"
[[device]]
name = "host:1"
threads = 1
memory = "32MiB"
[[link]]
between = ["cpu0", "plx"]
rate = "4GB/s"
[[link]]
between = ["plx", "host:0"]
rate = "4GB/s"
[[link]]
between = ["plx", "host:1"]
rate = "4GB/s"
"#;

/// The messages of the proto by name, and the messages that were compared with an answer.
struct Messages {
    all: BTreeMap<String, DescriptorProto>,
    seen: BTreeSet<String>,
}

impl Messages {
    fn new() -> Self {
        let files = FileDescriptorSet::decode(proto::DESCRIPTOR_SET).unwrap().file;
        let ours = files.into_iter().filter(|file| file.package() == "dovetail.v1");
        let all = ours.flat_map(|file| file.message_type).map(|message| (message.name().to_owned(), message));
        Self { all: all.collect(), seen: BTreeSet::new() }
    }

    /// Checks that an answer has exactly the fields of the message, and that generated code reads
    /// it.
    fn compare<T: DeserializeOwned>(&mut self, name: &str, answer: &Value) {
        self.compare_fields(name, answer);
        let read: Result<T, _> = serde_json::from_value(answer.clone());
        assert!(read.is_ok(), "{name}: {} in {answer:#}", read.err().unwrap());
    }

    fn compare_fields(&mut self, name: &str, answer: &Value) {
        self.seen.insert(name.to_owned());
        let fields = self.all[name].field.clone();
        let answer = answer.as_object().unwrap_or_else(|| panic!("{name} is no object: {answer}"));
        let described: BTreeSet<&str> = fields.iter().map(|field| field.name()).collect();
        let answered: BTreeSet<&str> = answer.keys().map(String::as_str).collect();
        assert_eq!(answered, described, "fields of {name}, on the left as answered");
        for field in &fields {
            let value = &answer[field.name()];
            let values = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
            for value in values {
                let fits = match field.r#type() {
                    Type::String => value.is_string(),
                    Type::Bool => value.is_boolean(),
                    Type::Double => value.is_number(),
                    Type::Uint64 | Type::Uint32 => value.is_u64(),
                    Type::Int32 => value.is_i64(),
                    Type::Message => value.is_object() || value.is_array(),
                    other => panic!("no answer has a {other:?} yet"),
                };
                let is_unknown = value.is_null() && field.proto3_optional();
                assert!(fits || is_unknown, "{name}.{} is {value}", field.name());
                if let (Some(inner), true) = (field.type_name().strip_prefix(".dovetail.v1."), value.is_object()) {
                    self.compare_fields(inner, value);
                }
            }
        }
    }
}

async fn ask(client: &mut Client, action: &str, body: &str) -> Value {
    serde_json::from_str(&act(client, action, body).await.unwrap()[0]).unwrap()
}

/// Makes a batch of 30,000 rows with the columns.
fn batch_of(columns: &[(&str, &dyn Fn(i64) -> i64)]) -> RecordBatch {
    let column = |of: &dyn Fn(i64) -> i64| Arc::new(Int64Array::from_iter_values((0..30_000).map(of))) as ArrayRef;
    RecordBatch::try_from_iter(columns.iter().map(|(name, of)| (*name, column(*of)))).unwrap()
}

/// Submits a self-join of a table, with `more` fields, and waits for its end. Returns its endpoints,
/// and the answer of the action `job`.
async fn join(server: &TestServer, client: &mut Client, table: &str, on: &str, more: &str) -> (FlightInfo, Value) {
    let join = format!(r#"{{"join": {{"left": "{table}", "right": "{table}", "on": [{on}]{more}}}}}"#);
    let info = client.get_flight_info(command(&join)).await.unwrap().into_inner();
    let told: Value = serde_json::from_slice(&info.app_metadata).unwrap();
    let job = server.shared.scheduler.job(JobId(told["job"].as_u64().unwrap())).unwrap();
    eventually("the job ends", async || job.status().state.is_final()).await;
    let answer = ask(client, "job", &format!(r#"{{"job": {}}}"#, told["job"])).await;
    (info, answer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_match_the_messages_of_the_proto() {
    let folder = tempfile::tempdir().unwrap();
    let topology = folder.path().join("topology.toml");
    std::fs::write(&topology, TOPOLOGY).unwrap();
    let server = TestServer::start(&[&format!("--topology={}", topology.display()), "--host-memory=96MiB"]).await;
    let mut client = server.client().await;
    let mut messages = Messages::new();

    // A third of the rows share one key.
    let skewed = batch_of(&[("k", &|row| if row % 3 == 0 { 7 } else { row })]);
    put_with(&mut client, "skewed", vec![skewed], r#"{"upload": "id", "unique": [["k"]]}"#).await.unwrap();
    let table = ask(&mut client, "commit_upload", r#"{"upload": "id"}"#).await;
    messages.compare::<proto::TableInfo>("TableInfo", &table);
    put(&mut client, "plain", vec![batch_of(&[("k", &|row| row)])]).await.unwrap();
    // The self-join has 16 million rows, which do not fit in host memory.
    put(&mut client, "few", vec![batch_of(&[("k", &|row| row % 55), ("v", &|row| row)])]).await.unwrap();

    messages.compare::<proto::ServerInfo>("ServerInfo", &ask(&mut client, "server_info", "").await);
    messages.compare::<proto::TopologyInfo>("TopologyInfo", &ask(&mut client, "topology", "").await);

    let pair = |name: &str| format!(r#"{{"left": "{name}", "right": "{name}"}}"#);
    let (result, complete) = join(&server, &mut client, "plain", &pair("k"), "").await;
    assert_eq!(complete["state"], "complete", "{complete}");
    messages.compare::<proto::JobStatus>("JobStatus", &complete);
    assert_eq!(rows(&read_all(&mut client, &result).await.unwrap()), 30_000);
    let explained = ask(&mut client, "explain", &format!(r#"{{"job": {}}}"#, complete["job"])).await;
    messages.compare::<proto::Explanation>("Explanation", &explained);
    let (_, failed) = join(&server, &mut client, "few", &pair("k"), "").await;
    assert_eq!(failed["error"]["code"], "RESOURCE_EXHAUSTED", "{failed}");
    messages.compare::<proto::JobStatus>("JobStatus", &failed);
    for listed in act(&mut client, "list_jobs", "").await.unwrap() {
        messages.compare::<proto::JobStatus>("JobStatus", &serde_json::from_str(&listed).unwrap());
    }
    // A join that has not run has no measurements. This one has most kinds of predictions.
    let body = format!(r#"{{"join": {{"left": "skewed", "right": "plain", "on": [{}]}}}}"#, pair("k"));
    let planned = ask(&mut client, "explain", &body).await;
    messages.compare::<proto::Explanation>("Explanation", &planned);
    let streamed = format!(
        r#"{{"join": {{"left": "plain", "right": "sent", "on": [{}], "stream": "right", "keep_seconds": 60}}}}"#,
        pair("k")
    );
    let star = format!(
        r#"{{"join": {{"left": "plain", "right": "skewed", "on": [{on}], "stream": "right", "keep_seconds": 60,
            "then": [{{"table": "few", "on": [{on}], "how": "right_semi"}}]}}}}"#,
        on = pair("k")
    );
    let planned = ask(&mut client, "explain", &star).await;
    messages.compare::<proto::Explanation>("Explanation", &planned);
    assert_eq!(planned["chain"].as_array().map(Vec::len), Some(2), "{planned}");
    for is_kept in [false, true] {
        let sent = exchange::messages(&star, &[batch_of(&[("k", &|row| row)])]).await;
        assert_eq!(rows(&exchange::exchange(&mut client, sent).await.unwrap()), 55);
        let jobs = act(&mut client, "list_jobs", "").await.unwrap();
        let last: Value = serde_json::from_str(jobs.last().unwrap()).unwrap();
        let explained = ask(&mut client, "explain", &format!(r#"{{"job": {}}}"#, last["job"])).await;
        messages.compare::<proto::Explanation>("Explanation", &explained);
        assert_eq!(explained["prepared"].is_null(), !is_kept, "{explained}");
        assert_eq!(last["prepared"], explained["prepared"]);
    }
    let chain = ask(&mut client, "list_prepared", "").await;
    messages.compare::<proto::PreparedBuild>("PreparedBuild", &chain);
    ask(&mut client, "release_prepared", &format!(r#"{{"prepared": {}}}"#, chain["prepared"])).await;
    let sent = exchange::messages(&streamed, &[batch_of(&[("k", &|row| row)])]).await;
    assert_eq!(rows(&exchange::exchange(&mut client, sent).await.unwrap()), 30_000);
    let kept = ask(&mut client, "list_prepared", "").await;
    messages.compare::<proto::PreparedBuild>("PreparedBuild", &kept);
    let released = ask(&mut client, "release_prepared", &format!(r#"{{"prepared": {}}}"#, kept["prepared"])).await;
    messages.compare::<proto::PreparedBuild>("PreparedBuild", &released);

    // Devices behind emulated links exchange no rows.
    let server = TestServer::start(&["--devices=host:2", "--host-memory=96MiB"]).await;
    let mut client = server.client().await;
    put(&mut client, "plain", vec![batch_of(&[("k", &|row| row)])]).await.unwrap();
    let on_both = r#", "distribution": "hash", "devices": 2"#;
    let (_, gang) = join(&server, &mut client, "plain", &pair("k"), on_both).await;
    assert_eq!((gang["state"].as_str(), gang["distribution"].as_str()), (Some("complete"), Some("hash")), "{gang}");
    messages.compare::<proto::JobStatus>("JobStatus", &gang);
    let explained = ask(&mut client, "explain", &format!(r#"{{"job": {}}}"#, gang["job"])).await;
    messages.compare::<proto::Explanation>("Explanation", &explained);

    let every = messages.all.keys().filter(|name| !["Command", "Join", "Then", "KeyPair"].contains(&name.as_str()));
    let unseen: Vec<&String> = every.filter(|name| !messages.seen.contains(*name)).collect();
    assert_eq!(unseen, [""; 0], "messages that no answer has");
}
