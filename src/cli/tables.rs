//! `dovetail tables`, `dovetail drop` and `dovetail topology`.

use arrow::datatypes::FieldRef;
use arrow_flight::FlightInfo;
use serde_json::{Value, json};

use super::client::{Client, ConnectArgs};
use super::output::{self, Align};
use super::{describe, jobs};
use crate::human::{quoted, type_name};
use crate::memory::human_bytes;
use crate::topology::Topology;
use crate::{Error, Result};

/// Arguments of `dovetail tables`.
#[derive(Debug, clap::Args)]
pub struct TablesArgs {
    /// Table whose columns and sort order to show
    table: Option<String>,

    #[command(flatten)]
    connect: ConnectArgs,
}

/// Arguments of `dovetail drop`.
#[derive(Debug, clap::Args)]
pub struct DropArgs {
    /// Names of the tables. If a table does not exist, the others are still dropped
    #[arg(required = true)]
    tables: Vec<String>,

    #[command(flatten)]
    connect: ConnectArgs,
}

/// Arguments of `dovetail topology`.
#[derive(Debug, clap::Args)]
pub struct TopologyArgs {
    /// Print a picture of the devices and links in SVG, as the admin port serves it at /topology.svg
    #[arg(long, conflicts_with = "json")]
    svg: bool,

    #[command(flatten)]
    connect: ConnectArgs,
}

/// Lists tables and kept results, or shows one table.
///
/// # Errors
/// The server's.
pub async fn run_tables(args: TablesArgs) -> Result<()> {
    let client = Client::connect(&args.connect).await?;
    if let Some(table) = &args.table {
        let info = client.info(super::client::table_descriptor(table)).await?;
        return show_one(&info);
    }
    let flights = client.list().await?;
    let (results, tables): (Vec<_>, Vec<_>) = flights.into_iter().partition(|info| said(info)["job"].is_u64());
    if output::is_json() {
        tables.iter().for_each(|info| output::json(&to_json(info)));
        results.iter().for_each(|info| output::json(&said(info)));
        return Ok(());
    }
    match tables.is_empty() {
        true => output::line("no tables; `dovetail put FILE` uploads one"),
        false => output::line(render_tables(&tables)),
    }
    if !results.is_empty() {
        output::line(format!("\n{}", render_results(&results)));
    }
    Ok(())
}

fn render_tables(tables: &[FlightInfo]) -> String {
    let row = |info: &FlightInfo| {
        let columns = info.clone().try_decode_schema().map(|schema| schema.fields().len()).unwrap_or(0);
        let sorted = join_names(&said(info)["sorted_by"]);
        vec![name_of(info), count(info.total_records), bytes(info.total_bytes), columns.to_string(), sorted]
    };
    let columns = [
        ("table", Align::Left),
        ("rows", Align::Right),
        ("in memory", Align::Right),
        ("columns", Align::Right),
        ("sorted by", Align::Left),
    ];
    output::table(&columns, &tables.iter().map(row).collect::<Vec<_>>())
}

fn render_results(results: &[FlightInfo]) -> String {
    let row = |info: &FlightInfo| {
        let job = said(info);
        let text = |key: &str| job[key].as_str().unwrap_or("").to_owned();
        vec![
            job["job"].to_string(),
            text("state"),
            job["rows"].as_u64().map(output::count).unwrap_or_default(),
            bytes(info.total_bytes),
            jobs::what(&job),
        ]
    };
    let columns = [
        ("job", Align::Right),
        ("state", Align::Left),
        ("rows", Align::Right),
        ("size", Align::Right),
        ("result of", Align::Left),
    ];
    output::table(&columns, &results.iter().map(row).collect::<Vec<_>>())
}

fn show_one(info: &FlightInfo) -> Result<()> {
    if output::is_json() {
        output::json(&to_json(info));
        return Ok(());
    }
    let schema = info.clone().try_decode_schema()?;
    output::line(format!("{}: {}, {} in memory", name_of(info), rows(info.total_records), bytes(info.total_bytes)));
    let said = said(info);
    let sorted = join_names(&said["sorted_by"]);
    if !sorted.is_empty() {
        output::line(format!("sorted by {sorted}"));
    }
    for set in said["unique"].as_array().into_iter().flatten() {
        output::line(format!("declared unique: {}", join_names(set)));
    }
    let row = |field: &FieldRef| {
        vec![field.name().clone(), type_name(field.data_type()), if field.is_nullable() { "yes" } else { "" }.into()]
    };
    let columns = [("column", Align::Left), ("type", Align::Left), ("nulls", Align::Left)];
    output::line(output::table(&columns, &schema.fields().iter().map(row).collect::<Vec<_>>()));
    Ok(())
}

/// Returns the server's description of a table, with its columns.
fn to_json(info: &FlightInfo) -> Value {
    let mut table = said(info);
    if !table.is_object() {
        table = json!({});
    }
    table["table"] = name_of(info).into();
    table["rows"] = info.total_records.into();
    table["bytes"] = info.total_bytes.into();
    if let Ok(schema) = info.clone().try_decode_schema() {
        let field = |field: &FieldRef| json!({ "name": field.name(), "type": type_name(field.data_type()), "nullable": field.is_nullable() });
        table["columns"] = schema.fields().iter().map(field).collect();
    }
    table
}

fn said(info: &FlightInfo) -> Value {
    serde_json::from_slice(&info.app_metadata).unwrap_or(Value::Null)
}

fn name_of(info: &FlightInfo) -> String {
    info.flight_descriptor.as_ref().map(|descriptor| descriptor.path.join(".")).unwrap_or_default()
}

fn join_names(names: &Value) -> String {
    let names = names.as_array().into_iter().flatten().filter_map(Value::as_str);
    names.map(quoted).collect::<Vec<_>>().join(", ")
}

/// Formats a count. Flight writes -1 for an unknown number.
fn count(number: i64) -> String {
    u64::try_from(number).map(output::count).unwrap_or_default()
}

fn rows(number: i64) -> String {
    u64::try_from(number).map_or_else(|_| "unknown number of rows".into(), |rows| output::counted(rows, "row"))
}

fn bytes(number: i64) -> String {
    u64::try_from(number).map(human_bytes).unwrap_or_default()
}

/// Drops tables.
///
/// # Errors
/// The server's. A missing table does not prevent the drop of the others.
pub async fn run_drop(args: DropArgs) -> Result<()> {
    let client = Client::connect(&args.connect).await?;
    let mut missing = None;
    for table in args.tables {
        let answers = match client.action("drop_table", &json!({ "name": table })).await {
            Ok(answers) => answers,
            Err(error @ Error::NotFound(_)) => {
                if let Some(earlier) = missing.replace(error) {
                    output::error(&earlier);
                }
                continue;
            }
            Err(error) => {
                missing.iter().for_each(output::error);
                return Err(error);
            }
        };
        let dropped = answers.into_iter().next().unwrap_or_else(|| json!({ "table": table }));
        match output::is_json() {
            true => output::json(&dropped),
            false => output::line(match dropped["rows"].as_u64() {
                Some(rows) => format!("dropped {table} ({})", output::counted(rows, "row")),
                None => format!("dropped {table}"),
            }),
        }
    }
    missing.map_or(Ok(()), Err)
}

/// Shows the devices.
///
/// # Errors
/// The server's.
pub async fn run_topology(args: TopologyArgs) -> Result<()> {
    let client = Client::connect(&args.connect).await?;
    for answer in client.action("topology", &Value::Null).await? {
        match output::is_json() {
            true => output::json(&answer),
            false if args.svg => output::line(picture(&answer)?.trim_end()),
            false => show_topology(&answer),
        }
    }
    Ok(())
}

/// Draws the topology of an answer.
fn picture(answer: &Value) -> Result<String> {
    let described = serde_json::from_value::<Topology>(answer["topology"].clone()).ok().filter(Topology::is_whole);
    let topology = described.ok_or_else(|| {
        Error::Unsupported(
            "the server describes its topology in another form; use the server's version of dovetail".into(),
        )
    })?;
    Ok(topology.to_svg())
}

/// Prints the server's picture of the topology if it has one, and the description of each device.
fn show_topology(answer: &Value) {
    match answer["text"].as_str() {
        Some(text) => output::line(format!("{}\n", text.trim_end())),
        None => output::line(describe::value(&json!({ "topology": answer["topology"] }))),
    }
    output::line(describe::value(&json!({ "devices": answer["devices"], "pairs": answer["pairs"] })));
}
