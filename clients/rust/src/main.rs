//! Uploads two tables to a Dovetail server, joins them there, and checks every row that comes back.
//!
//! ```sh
//! cargo run -- grpc://127.0.0.1:8815
//! ```
//!
//! This client uses the `arrow-flight` crate and no code of Dovetail, as any other program would.

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::Int64Type;
use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::{FlightClient, FlightDescriptor, FlightInfo, Ticket};
use futures::TryStreamExt;
use tonic::transport::{ClientTlsConfig, Endpoint};

const ORDERS: &str = "example_orders";
const LINES: &str = "example_lineitem";
const ORDER_COUNT: i64 = 10_000;
const LINE_COUNT: i64 = 100_000;

/// Sums over the rows of a join. The order of the rows does not matter.
#[derive(Debug, Default, PartialEq)]
struct Totals {
    rows: u64,
    checksum: i64,
}

impl Totals {
    fn add(&mut self, orderkey: i64, quantity: i64) {
        self.rows += 1;
        self.checksum += orderkey * quantity;
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [uri] = &arguments[..] else {
        eprintln!("usage: join URI, such as: join grpc://127.0.0.1:8815");
        return ExitCode::from(2);
    };
    match join(uri).await {
        Ok(Totals { rows, checksum }) => {
            println!("rows={rows} checksum={checksum}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("join: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn join(uri: &str) -> Result<Totals, Box<dyn Error>> {
    let mut client = connect(uri).await.map_err(while_doing("connecting to", uri))?;
    let (orders, lines, expected) = tables()?;
    upload(&mut client, ORDERS, orders).await.map_err(while_doing("uploading", ORDERS))?;
    upload(&mut client, LINES, lines).await.map_err(while_doing("uploading", LINES))?;

    // A command is a JSON object with one key; proto/dovetail.proto lists its fields.
    let command = serde_json::json!({"join": {
        "left": ORDERS, "right": LINES, "on": [{"left": "o_orderkey", "right": "l_orderkey"}],
        "how": "inner", "columns": ["o_orderkey", "o_orderpriority", "l_quantity"],
    }});
    let info = run_join(&mut client, FlightDescriptor::new_cmd(command.to_string())).await;
    let info = info.map_err(while_doing("running the join at", uri))?;
    let mut got = Totals::default();
    // The endpoints are parts of one result. This client reads them one by one. Tasks could read
    // them in parallel.
    for endpoint in info.endpoint {
        let ticket = endpoint.ticket.ok_or("an endpoint of the join has no ticket")?;
        fetch(&mut client, ticket, &mut got).await.map_err(while_doing("reading the join from", uri))?;
    }
    if got == expected { Ok(got) } else { Err(format!("the join has {got:?}; {expected:?} were expected").into()) }
}

/// Connects to a URI such as `grpc://HOST:PORT` or `grpc+tls://HOST:PORT`.
async fn connect(uri: &str) -> Result<FlightClient, Box<dyn Error>> {
    let endpoint = match uri.split_once("://") {
        Some(("grpc" | "grpc+tcp", address)) => Endpoint::new(format!("http://{address}"))?,
        Some(("grpc+tls", address)) => {
            Endpoint::new(format!("https://{address}"))?.tls_config(ClientTlsConfig::new().with_native_roots())?
        }
        _ => return Err("the scheme is not grpc, grpc+tcp or grpc+tls; write such as grpc://127.0.0.1:8815".into()),
    };
    // tonic's default limit is 4 MiB a message, which a batch with a single large value may exceed.
    let service = FlightServiceClient::new(endpoint.connect().await?).max_decoding_message_size(usize::MAX);
    Ok(FlightClient::new_from_inner(service))
}

/// Uploads a table, and replaces an earlier table of that name. The table appears when the stream
/// ends without an error.
async fn upload(client: &mut FlightClient, table: &str, batch: RecordBatch) -> Result<(), Box<dyn Error>> {
    let messages = FlightDataEncoderBuilder::new()
        .with_flight_descriptor(Some(FlightDescriptor::new_path(vec![table.into()])))
        .with_metadata(r#"{"mode": "replace"}"#.into())
        .build(futures::stream::iter([Ok(batch)]));
    // Acknowledgements say how many rows the server has taken so far. Only the end of the stream
    // says that it has taken all.
    Ok(client.do_put(messages).await?.try_for_each(|_| async { Ok(()) }).await?)
}

/// Starts a join and waits for its end. The server answers a poll as soon as the join ends, or after
/// a moment. A program that reads rows while they are made calls `get_flight_info` instead, and its
/// `do_get` waits for the rows.
async fn run_join(client: &mut FlightClient, command: FlightDescriptor) -> Result<FlightInfo, Box<dyn Error>> {
    let mut poll = client.poll_flight_info(command).await?;
    // There is a descriptor for the next poll until the join is complete.
    while let Some(descriptor) = poll.flight_descriptor {
        poll = client.poll_flight_info(descriptor).await?;
    }
    Ok(poll.info.ok_or("the server described no result")?)
}

/// Reads one endpoint, checks its rows and adds them to the totals.
async fn fetch(client: &mut FlightClient, ticket: Ticket, totals: &mut Totals) -> Result<(), Box<dyn Error>> {
    let mut batches = client.do_get(ticket).await?;
    while let Some(batch) = batches.try_next().await? {
        let keys = batch.column(0).as_primitive_opt::<Int64Type>().ok_or("o_orderkey is not int64")?;
        let priorities = batch.column(1).as_string_opt::<i32>().ok_or("o_orderpriority is not utf8")?;
        let quantities = batch.column(2).as_primitive_opt::<Int64Type>().ok_or("l_quantity is not int64")?;
        for row in 0..batch.num_rows() {
            let (key, got) = (keys.value(row), priorities.value(row));
            if got != priority(key) {
                return Err(format!("order {key} came back with {got:?}; {:?} was uploaded", priority(key)).into());
            }
            totals.add(key, quantities.value(row));
        }
    }
    Ok(())
}

/// Returns both tables, and the totals of a correct join. Some orders have no line, and some lines
/// no order.
fn tables() -> Result<(RecordBatch, RecordBatch, Totals), Box<dyn Error>> {
    let order_keys = Int64Array::from_iter_values(0..ORDER_COUNT);
    let priorities = StringArray::from_iter_values((0..ORDER_COUNT).map(priority));
    let line_keys = Int64Array::from_iter_values((0..LINE_COUNT).map(|line| line * 8_111 % 12_000));
    let quantities = Int64Array::from_iter_values((0..LINE_COUNT).map(|line| line % 50 + 1));
    let mut expected = Totals::default();
    for (&key, &quantity) in line_keys.values().iter().zip(quantities.values()) {
        if key < ORDER_COUNT {
            expected.add(key, quantity);
        }
    }
    let orders = [("o_orderkey", Arc::new(order_keys) as ArrayRef), ("o_orderpriority", Arc::new(priorities))];
    let lines = [("l_orderkey", Arc::new(line_keys) as ArrayRef), ("l_quantity", Arc::new(quantities))];
    Ok((RecordBatch::try_from_iter(orders)?, RecordBatch::try_from_iter(lines)?, expected))
}

fn priority(orderkey: i64) -> String {
    format!("priority {}", orderkey % 5 + 1)
}

/// Describes an error: what the client attempted, then the server's message and code, or another
/// error with its causes.
fn while_doing<E: Into<Box<dyn Error>>>(attempt: &str, target: &str) -> impl FnOnce(E) -> String {
    move |error| {
        let error: Box<dyn Error> = error.into();
        let mut said = format!("{attempt} {target}");
        if let Some(FlightError::Tonic(status)) = error.downcast_ref() {
            return format!("{said}: {} ({:?})", status.message(), status.code());
        }
        let mut cause: Option<&dyn Error> = Some(&*error);
        while let Some(error) = cause {
            said = format!("{said}: {error}");
            cause = error.source();
        }
        said
    }
}
