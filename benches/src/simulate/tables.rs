//! Tables of a traced join: sizes and statistics without rows.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema};
use dovetail::Result;
use dovetail::catalog::{ColumnStatistics, Table};
use dovetail::planner::{JoinSpec, KeyPair};
use dovetail::scheduler::{DeviceRequest, JobOptions, TracedJob, TracedTable};

/// Returns the join of a trace, over tables that have no rows to read.
///
/// # Errors
/// [`Error::Invalid`](dovetail::Error::Invalid) for an unknown kind of join.
pub fn spec_of(job: &TracedJob) -> Result<JoinSpec> {
    let widths = job.left.key_bytes.iter().zip(&job.right.key_bytes).map(|(left, right)| left.max(*right));
    let keys: Vec<f64> = widths.collect();
    let on = (0..keys.len()).map(|at| KeyPair::new(&format!("k{at}"), &format!("k{at}"))).collect();
    let (left, right) = (Arc::new(table("left", &job.left, &keys)?), Arc::new(table("right", &job.right, &keys)?));
    Ok(JoinSpec { how: job.how.parse()?, count: job.count, ..JoinSpec::inner(left, right, on) })
}

/// Returns the options that a traced join asks for, without its priority.
///
/// # Errors
/// [`Error::Invalid`](dovetail::Error::Invalid) for an unknown distribution.
pub fn options_of(job: &TracedJob) -> Result<JobOptions> {
    let distribution = job.distribution.as_deref().map(str::parse).transpose()?;
    Ok(JobOptions { devices: devices_of(job), distribution, ..JobOptions::default() })
}

/// Returns the devices that a traced join asks for. The GPUs of the server that wrote the trace are
/// the topology's devices of the same numbers.
pub fn devices_of(job: &TracedJob) -> DeviceRequest {
    match DeviceRequest::from(&job.devices) {
        DeviceRequest::Named(names) => {
            DeviceRequest::Named(names.iter().map(|name| name.replace("cuda:", "host:")).collect())
        }
        request => request,
    }
}

fn table(name: &str, of: &TracedTable, keys: &[f64]) -> Result<Table> {
    let field = |prefix: &str, at: usize, bytes: f64| Field::new(format!("{prefix}{at}"), type_of(bytes), false);
    let key_fields = keys.iter().enumerate().map(|(at, &bytes)| field("k", at, bytes));
    let payload = of.payload_bytes.iter().enumerate().map(|(at, &bytes)| field(&name[..1], at, bytes));
    let fields: Vec<Field> = key_fields.chain(payload).collect();
    let columns = fields.len();
    let mut table = Table::from_batches(name, Arc::new(Schema::new(fields)), Vec::new())?;
    table.rows = of.rows;
    table.bytes = (of.rows as f64 * keys.iter().chain(&of.payload_bytes).sum::<f64>()) as u64;
    let known = |distinct: f64| ColumnStatistics {
        distinct: Some(distinct),
        heaviest_share: 1.0 / distinct.max(1.0),
        ..ColumnStatistics::default()
    };
    let of_key = of.distinct.map_or_else(ColumnStatistics::default, known);
    table.statistics = (0..columns).map(|at| if at < keys.len() { of_key.clone() } else { known(1e6) }).collect();
    Ok(table)
}

/// Returns a type whose values take that many bytes. Other widths are those of text.
fn type_of(bytes: f64) -> DataType {
    match bytes {
        1.0 => DataType::Int8,
        2.0 => DataType::Int16,
        4.0 => DataType::Int32,
        8.0 => DataType::Int64,
        16.0 => DataType::Decimal128(38, 0),
        _ => DataType::Utf8,
    }
}
