//! `dovetail put`: uploads files as tables.

use std::path::{Path, PathBuf};
use std::time::Instant;

use arrow::datatypes::{DataType, FieldRef, Schema, TimeUnit};
use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use futures::{StreamExt, TryStreamExt};
use serde_json::json;

use super::client::{Client, ConnectArgs, PutOptions, Uploaded, table_descriptor};
use super::files::{CsvArgs, Format, Piece, READABLE, STDIN, Source, folder, without_gz};
use super::interrupt::interrupted;
use super::names::{self, Names};
use super::output;
use super::progress::Progress;
use crate::catalog::check_name;
use crate::human::{first_of, quoted, type_name};
use crate::{Context, Error, Result};

/// Arguments of `dovetail put`.
#[derive(Debug, clap::Args)]
pub struct PutArgs {
    /// Files to upload: Parquet, Arrow IPC, CSV, or CSV compressed by gzip. Each file becomes a
    /// table with its name. With --table, all files go into that table, in this order, and must
    /// have the same columns. "-" is standard input: an Arrow IPC stream, Parquet, or CSV with
    /// --format csv
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Name of the table that receives all files
    #[arg(long, short)]
    table: Option<String>,

    /// Action if a table of that name exists: create fails, replace replaces it when the upload is
    /// complete, append and create_if_missing add the rows. append fails if the table does not
    /// exist
    #[arg(long, default_value = "create", value_parser = ["create", "replace", "append", "create_if_missing"])]
    mode: String,

    /// Parallel streams, each over its own connection. With more than one, the order of the rows is
    /// lost
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    streams: u16,

    /// Columns by which the rows are sorted, ascending, nulls first. The server checks the order. A
    /// name with a comma needs double quotes: "a,b"
    #[arg(long, value_name = "COLUMNS")]
    sorted_by: Vec<Names>,

    /// Columns whose values are distinct together, written as for --sorted-by. Repeat the option
    /// for further sets. The planner predicts with it. The server does not check it, and results
    /// are correct even if it is wrong
    #[arg(long, value_name = "COLUMNS")]
    unique: Vec<Names>,

    /// Format of the files, if their names and contents do not show it
    #[arg(long, value_parser = readable())]
    format: Option<Format>,

    #[command(flatten)]
    csv: CsvArgs,

    #[command(flatten)]
    connect: ConnectArgs,
}

/// Parses the formats that can be read.
fn readable() -> impl TypedValueParser<Value = Format> {
    PossibleValuesParser::new(READABLE.iter().filter_map(ValueEnum::to_possible_value))
        .try_map(|word| Format::from_str(&word, false))
}

/// Uploads the files.
///
/// # Errors
/// The errors of the files and of the server. Tables before the failed one stay on the server.
pub async fn run(args: PutArgs) -> Result<()> {
    let uploads = plan(&args)?;
    if args.streams > 1 && !args.sorted_by.is_empty() {
        return Err(Error::Invalid(
            "--sorted-by needs one stream, because several --streams do not keep the order of the rows; remove one \
             of the two options"
                .into(),
        ));
    }
    // Open all files before sending anything, so that a wrong name among them leaves no trace.
    let adds = ["append", "create_if_missing"].contains(&args.mode.as_str());
    let asks_for_types = |sources: &[Source]| adds && sources.iter().any(Source::has_untyped_columns);
    let mut opened = Vec::with_capacity(uploads.len());
    for (table, files) in uploads {
        let open = |file: &PathBuf| Source::open(file, args.format, &args.csv);
        let sources: Vec<Source> = files.iter().map(open).collect::<Result<_>>()?;
        if !asks_for_types(&sources) {
            check_schemas(&sources, &files)?;
        }
        opened.push((table, files, sources));
    }
    let client = Client::connect(&args.connect).await?;
    let options = PutOptions {
        mode: Some(args.mode.clone()),
        sorted_by: Names::together(&args.sorted_by),
        unique: args.unique.iter().map(|set| set.list().to_vec()).collect(),
        streams: args.streams.into(),
    };
    for (table, files, sources) in opened.iter_mut().filter(|(.., sources)| asks_for_types(sources)) {
        take_types(&client, table, sources).await?;
        check_schemas(sources, files)?;
    }
    for (table, _, sources) in opened {
        let inferred = sources.iter().any(|source| source.is_inferred).then(|| sources[0].schema.clone());
        let start = Instant::now();
        let file_bytes = sources.iter().map(|source| source.file_bytes).sum();
        let progress = Progress::of(&format!("uploading {table}"), Some(file_bytes));
        let uploaded = upload(&client, &table, &options, sources, &progress).await?;
        progress.finish();
        report(&table, uploaded, start.elapsed().as_secs_f64(), inferred.as_deref());
    }
    Ok(())
}

/// Sets the types of CSV columns without a value. The types come from the same columns of the table
/// to which the rows are added.
async fn take_types(client: &Client, table: &str, sources: &mut [Source]) -> Result<()> {
    let schema = match client.info(table_descriptor(table)).await {
        Ok(info) => info.try_decode_schema()?,
        // This upload may create the table. If the mode requires the table, the server reports the
        // error.
        Err(Error::NotFound(_)) => return Ok(()),
        Err(error) => return Err(error),
    };
    sources.iter_mut().for_each(|source| source.take_types(&schema));
    Ok(())
}

/// Uploads files, at least one, into one table. The steps of `progress` are the bytes of the files.
pub(super) async fn upload(
    client: &Client,
    table: &str,
    options: &PutOptions,
    sources: Vec<Source>,
    progress: &Progress,
) -> Result<Uploaded> {
    let schema = sources[0].schema.clone();
    let (reading, sending) = (progress.clone(), progress.clone());
    let batches = futures::stream::iter(sources.into_iter().map(Source::into_stream)).flatten();
    let batches = batches.map_ok(move |Piece { batch, file_bytes }| {
        reading.advance(file_bytes);
        batch
    });
    let stop = async {
        let how = interrupted().await;
        Error::Cancelled(format!("{how}; table {table:?} is as it was before"))
    };
    client.put(table, options, schema, batches.boxed(), move |bytes| sending.moved(bytes), stop).await
}

/// Reports an upload. `inferred` has the columns if their types were inferred from CSV. They are
/// printed, because a wrong guess would show only in the first join.
fn report(table: &str, uploaded: Uploaded, seconds: f64, inferred: Option<&Schema>) {
    if output::is_json() {
        let Uploaded { rows, bytes } = uploaded;
        let mut said = json!({ "table": table, "rows": rows, "bytes": bytes, "seconds": seconds });
        if let Some(schema) = inferred {
            let column = |field: &FieldRef| json!({ "name": field.name(), "type": type_name(field.data_type()) });
            said["columns"] = schema.fields().iter().map(column).collect();
        }
        output::json(&said);
    } else {
        output::line(output::transfer(table, uploaded.rows, uploaded.bytes, "sent in", seconds));
        if let Some(schema) = inferred {
            let column = |field: &FieldRef| format!("{}: {}", quoted(field.name()), type_name(field.data_type()));
            output::line(format!("  {}", first_of(schema.fields().iter().map(column))));
        }
    }
}

/// Assigns the files to tables, in the given order.
fn plan(args: &PutArgs) -> Result<Vec<(String, Vec<PathBuf>)>> {
    if args.files.iter().filter(|file| *file == Path::new(STDIN)).count() > 1 {
        return Err(Error::Invalid("standard input can be read only once; write - once".into()));
    }
    if let Some(table) = &args.table {
        check_name(table).context(|| "--table")?;
        return Ok(vec![(table.clone(), args.files.clone())]);
    }
    let mut uploads: Vec<(String, Vec<PathBuf>)> = Vec::new();
    for file in &args.files {
        let table = stem(file)?;
        if let Some((_, others)) = uploads.iter().find(|(name, _)| *name == table) {
            return Err(Error::Invalid(format!(
                "{} and {} would both become table {table:?}; use --table to upload both into one table",
                others[0].display(),
                file.display()
            )));
        }
        uploads.push((table, vec![file.clone()]));
    }
    Ok(uploads)
}

fn stem(file: &Path) -> Result<String> {
    if file == Path::new(STDIN) {
        return Err(Error::Invalid("standard input needs a table name; set it with --table".into()));
    }
    let stem = without_gz(file).file_stem();
    let stem = stem.ok_or_else(|| match file.is_dir() {
        true => folder().context(format_args!("reading {}", file.display())),
        false => Error::Invalid(format!("{} is not the name of a file", file.display())),
    })?;
    let no_name = |why: &str| Error::Invalid(format!("{file:?} cannot name a table: {why}; set a name with --table"));
    let stem = stem.to_str().ok_or_else(|| no_name("the name is not UTF-8"))?;
    check_name(stem).map_err(|error| no_name(error.message()))?;
    Ok(stem.to_owned())
}

/// Checks that files for one table have the same columns, including the types guessed for CSV.
fn check_schemas(sources: &[Source], files: &[PathBuf]) -> Result<()> {
    for (source, file) in sources.iter().zip(files).skip(1) {
        let (first, fields) = (sources[0].schema.fields(), source.schema.fields());
        if first == fields {
            continue;
        }
        let difference = first.iter().zip(fields).enumerate().find(|(_, (a, b))| a != b);
        let what = match difference {
            Some((at, (a, b))) if a.name() != b.name() => {
                format!("column {} is {:?} there, {:?} here", at + 1, a.name(), b.name())
            }
            Some((_, (a, b))) if a.data_type() != b.data_type() => {
                let advice = match source.is_inferred && sources[0].is_inferred {
                    true => {
                        let said = names::assignment(a.name(), wider(a.data_type(), b.data_type()));
                        format!("; use --types {said} for both files")
                    }
                    false => String::new(),
                };
                let (there, here) = (type_name(a.data_type()), type_name(b.data_type()));
                format!("{:?} is {there} there, {here} here{advice}", a.name())
            }
            Some((_, (a, _))) => {
                format!("{:?} differs in its metadata or nullability", a.name())
            }
            None => format!("{} there, {} here", output::counted(first.len() as u64, "column"), fields.len()),
        };
        return Err(Error::Invalid(format!(
            "{} does not have the columns of {}: {what}",
            file.display(),
            files[0].display()
        )));
    }
    Ok(())
}

/// Returns a column type of CSV that fits the values of both types.
fn wider(one: &DataType, other: &DataType) -> &'static str {
    match (one, other) {
        (DataType::Int64, DataType::Float64) | (DataType::Float64, DataType::Int64) => "float64",
        (DataType::Date32, DataType::Timestamp(TimeUnit::Microsecond, None))
        | (DataType::Timestamp(TimeUnit::Microsecond, None), DataType::Date32) => "timestamp",
        _ => "string",
    }
}
