//! `dovetail join` and `dovetail explain`.

use std::path::{Path, PathBuf};
use std::time::Instant;

use arrow_flight::FlightInfo;
use clap::{Args, FromArgMatches};
use futures::{StreamExt, TryStreamExt};
use serde_json::{Value, json};

use super::client::{Client, ConnectArgs, command_descriptor};
use super::files::{ADVICE_FOR_CSV, CsvArgs, Source};
use super::get::{self, Destination, OutputArgs};
use super::interrupt::{interrupted, unless_interrupted};
use super::keys::KeyArgs;
use super::names::Names;
use super::progress::Progress;
use super::then::ThenArg;
use super::{describe, jobs, output};
use crate::catalog::TEMPORARY_SECONDS_MAX;
use crate::{Error, Result};

/// Arguments of `dovetail join`.
#[derive(Debug, clap::Args)]
pub struct JoinArgs {
    #[command(flatten)]
    spec: SpecArgs,

    /// Keep the result on the server as a table of this name
    #[arg(
        long,
        value_name = "TABLE",
        value_parser = clap::builder::NonEmptyStringValueParser::new(),
        conflicts_with_all = ["limit", "count"]
    )]
    into: Option<String>,

    /// Action if a table of that name exists: create (the default) fails, replace replaces it when
    /// the result is complete
    #[arg(long, value_name = "MODE", value_parser = ["create", "replace"])]
    into_mode: Option<String>,

    /// Seconds after which the server drops the table of --into, 1 to 86400, counted from its
    /// appearance. By default, the table stays
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=TEMPORARY_SECONDS_MAX as i64))]
    temporary_seconds: Option<u32>,

    /// Priority of the job, -100 to 100. Jobs of higher priority start first
    #[arg(long, default_value_t = 0, allow_negative_numbers = true, value_parser = clap::value_parser!(i32).range(-100..=100))]
    priority: i32,

    /// Seconds that the server keeps the result after its last read, for `dovetail get --job`. With
    /// 0, the server keeps no rows, and the result may be larger than its memory. By default, the
    /// server releases the result when it has arrived
    #[arg(long, value_name = "SECONDS")]
    retain_seconds: Option<u32>,

    /// Maximum number of rows per batch of the result
    #[arg(long, value_name = "ROWS", value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "count")]
    batch_rows: Option<u32>,

    /// Join the rows of a file while they are read, instead of a table: Parquet, Arrow IPC or CSV, or
    /// "-" for an Arrow IPC stream on standard input. They are the right side, and RIGHT is only
    /// their name. The server keeps none of them
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["into", "count", "retain_seconds", "distribution"]
    )]
    probe: Option<PathBuf>,

    /// Join the rows of --probe with a further table in the same pass: "TABLE on COLUMNS", with
    /// COLUMNS as in --on, such as "parts on id=part". "how KIND" at the end sets the kind of join,
    /// inner by default. "TABLE as NAME" gives the table another name, for a table that is joined
    /// twice. Repeat the option for each table. --columns has names such as "parts.price" then
    #[arg(long, value_name = "JOIN")]
    then: Vec<ThenArg>,

    /// Show the plan, with predicted and measured times, after the rows
    #[arg(long)]
    explain: bool,

    #[command(flatten)]
    to: OutputArgs,

    #[command(flatten)]
    connect: ConnectArgs,
}

/// Arguments of `dovetail explain`.
#[derive(Debug, clap::Args)]
pub struct ExplainArgs {
    #[command(flatten)]
    spec: SpecArgs,

    /// Explain a join of rows that arrive, and that are joined with a further table in the same
    /// pass, as with join --probe --then. RIGHT is a table with the columns of these rows
    #[arg(long, value_name = "JOIN")]
    then: Vec<ThenArg>,

    #[command(flatten)]
    connect: ConnectArgs,
}

/// What is joined, and how.
#[derive(Clone, Debug, clap::Args)]
struct SpecArgs {
    /// Left table
    left: String,

    /// Right table
    right: String,

    /// Columns that must be equal: LEFT=RIGHT, or a name that both tables have; separate several
    /// with commas. A name with a comma or an equals sign needs double quotes, and a quote within
    /// it is doubled, as in '"a,b"="c=d"'. The suffix ":nulls_equal" or ":nulls_distinct", as in
    /// "a=b,c=d:nulls_equal", sets for one pair whether nulls match. It overrides --nulls-equal
    #[arg(long, required = true, value_name = "COLUMNS")]
    on: Vec<KeyArgs>,

    /// Kind of join: inner, left, right, full, left_semi, left_anti, right_semi, right_anti
    #[arg(long, default_value = "inner", value_name = "KIND")]
    how: String,

    /// Columns of the result, in this order. The prefixes "left." and "right." distinguish equal
    /// names. A name with a comma needs double quotes, as in 'k,left."a,b"'
    #[arg(long, value_name = "COLUMNS")]
    columns: Vec<Names>,

    /// Count the rows of the result instead of making them. The server then reads the key columns
    /// only
    #[arg(long, conflicts_with = "columns")]
    count: bool,

    /// Strategy: hash, radix-hash, radix-hash-gfur, sort-merge, sort-merge-gfur, or auto for the
    /// choice of the planner
    #[arg(long, default_value = "auto")]
    strategy: String,

    /// Division of the join among several devices: broadcast, hash, or auto for the choice of the
    /// planner. With broadcast, each device has the whole build side. With hash, each device joins
    /// all rows of its own keys
    #[arg(long)]
    distribution: Option<String>,

    /// Match null keys with null keys, in each pair of --on without a suffix
    #[arg(long)]
    nulls_equal: bool,

    /// Devices that run the join together: a number, names such as host:0,host:1, or "all". By
    /// default, the server chooses one, or several that end the join sooner
    #[arg(long)]
    devices: Vec<Names>,
}

impl SpecArgs {
    /// Converts the join to the JSON form of the wire. Omits options that were not given.
    fn to_json(&self) -> Value {
        let mut join = json!({
            "left": self.left,
            "right": self.right,
            "on": KeyArgs::json(&self.on),
            // Accept hyphens, which are usual on a command line.
            "how": self.how.replace('-', "_"),
            "strategy": self.strategy,
        });
        if let Some(distribution) = &self.distribution {
            join["distribution"] = distribution.as_str().into();
        }
        if !self.columns.is_empty() {
            join["columns"] = Names::together(&self.columns).into();
        }
        if self.count {
            join["count"] = true.into();
        }
        if self.nulls_equal {
            join["nulls_equal"] = true.into();
        }
        match Names::together(&self.devices).as_slice() {
            [] => {}
            [count] if count.parse::<u32>().is_ok() => join["devices"] = count.parse::<u32>().unwrap_or(1).into(),
            [name] => join["devices"] = name.as_str().into(),
            names => join["devices"] = names.into(),
        }
        join
    }
}

impl JoinArgs {
    fn command(&self) -> Value {
        let mut join = self.spec.to_json();
        if let Some(into) = &self.into {
            join["into"] = into.clone().into();
            if let Some(mode) = &self.into_mode {
                join["into_mode"] = mode.clone().into();
            }
        }
        if let Some(seconds) = self.temporary_seconds {
            join["temporary_seconds"] = seconds.into();
        }
        if !self.then.is_empty() {
            join["then"] = self.then.iter().map(ThenArg::to_json).collect();
        }
        if self.priority != 0 {
            join["priority"] = self.priority.into();
        }
        if let Some(seconds) = self.retain_seconds() {
            join["retain_seconds"] = seconds.into();
        }
        if let Some(rows) = self.batch_rows {
            join["batch_rows"] = rows.into();
        }
        json!({ "join": join })
    }

    /// Refuses options that have no effect in combination with others.
    fn check(&self) -> Result<()> {
        self.to.check()?;
        let refuse = |sentence: &str| Err(Error::Invalid(sentence.into()));
        // clap does not require --into if an option that conflicts with --into is given.
        if self.into_mode.is_some() && self.into.is_none() {
            return refuse("--into-mode needs --into, which names the table; add --into TABLE, or remove --into-mode");
        }
        if self.temporary_seconds.is_some() && self.into.is_none() {
            return refuse(
                "--temporary-seconds needs --into, which names the table; add --into TABLE, or keep a result without a table \
                 with --retain-seconds",
            );
        }
        if !self.then.is_empty() && self.probe.is_none() {
            return refuse(
                "--then joins the rows of --probe with a further table; add --probe FILE, or keep the result of one join \
                 with --into TABLE, and join that table",
            );
        }
        if self.spec.count && self.to.limit.is_some() {
            return refuse("--limit limits the printed rows, and --count makes no rows; remove one of the two options");
        }
        if self.into.is_some() && self.to.output.is_none() && self.batch_rows.is_some() {
            return refuse(
                "--batch-rows applies to rows that are sent to the client, and with --into they stay on the server; \
                 remove one of the two options, or also write the rows with -o FILE",
            );
        }
        Ok(())
    }

    /// Tells where the result can be fetched again, if the user asked to keep the result and did
    /// not make it a table.
    fn kept(&self, job: u64) -> Option<String> {
        let seconds = self.retain_seconds.filter(|seconds| *seconds > 0 && self.into.is_none())?;
        let seconds = output::counted(seconds.into(), "second");
        Some(format!(
            "the server keeps the result for {seconds} after its last read; fetch it with dovetail get --job {job}"
        ))
    }

    /// Returns the lease to ask for. A join that ends with the first rows needs no server memory
    /// for the other rows.
    fn retain_seconds(&self) -> Option<u32> {
        let ends_early = self.into.is_none() && self.to.limit.is_some_and(|limit| limit > 0);
        self.retain_seconds.or(ends_early.then_some(0))
    }
}

/// Parses the arguments of `dovetail join` into a command.
///
/// # Errors
/// [`Error::Invalid`] if clap refuses the arguments.
pub(super) fn command_of(words: &str) -> Result<Value> {
    let command = JoinArgs::augment_args(clap::Command::new("join").no_binary_name(true));
    let matches = command.try_get_matches_from(words.split(' '));
    let args = matches.and_then(|matches| JoinArgs::from_arg_matches(&matches));
    args.map(|args| args.command()).map_err(|error| Error::Invalid(error.to_string()))
}

/// Runs `dovetail join`.
///
/// # Errors
/// The server's, and the errors of the file that the result goes to.
pub async fn run(args: JoinArgs) -> Result<()> {
    // If the result is kept as a table, fetch rows only into a file.
    args.check()?;
    let to = match (&args.into, &args.to.output) {
        (Some(_), None) => None,
        _ => Some(args.to.open()?),
    };
    let to = match (&args.probe, to) {
        (Some(file), Some(to)) => return unless_interrupted(join_file(&args, file, to)).await,
        (_, to) => to,
    };
    let start = Instant::now();
    let (client, info) = unless_interrupted(async {
        let client = Client::connect(&args.connect).await?;
        let info = client.info(command_descriptor(&args.command())).await?;
        Ok((client, info))
    })
    .await?;
    let job = jobs::id_of(&info)?;
    tokio::select! {
        outcome = finish(&client, &args, &info, to, job, start) => {
            // Release the result also after an error, because the user was not told the job's
            // number. A table made of the result stays.
            if args.retain_seconds.is_none() {
                release(&client, &args, job).await;
            }
            outcome
        },
        how = interrupted() => {
            // An interrupted command cancels its job too.
            let outcome = match client.action("cancel_job", &json!({ "job": job })).await {
                Ok(answers) if answers.first().is_some_and(|job| job["state"] == "complete") => match args.into {
                    Some(_) => "was already complete, and its table stays",
                    None => "was already complete, and its result is released",
                },
                Ok(_) => "was cancelled",
                Err(_) => "could not be cancelled and may continue",
            };
            Err(Error::Cancelled(format!("{how}; job {job} {outcome}")))
        }
    }
}

/// Joins a table with the rows of a file while they are read.
async fn join_file(args: &JoinArgs, file: &Path, mut to: Destination) -> Result<()> {
    let source = Source::open(file, None, &CsvArgs::default()).map_err(|error| match error {
        // The option --format is about the output here.
        Error::Invalid(text) => Error::Invalid(text.replace(
            ADVICE_FOR_CSV,
            "give CSV as a file, as in --probe rows.csv, or convert it to an Arrow IPC stream",
        )),
        error => error,
    })?;
    if let Destination::Terminal { as_they_come, .. } = &mut to {
        *as_they_come = true;
    }
    let start = Instant::now();
    let client = Client::connect(&args.connect).await?;
    let mut command = args.command();
    command["join"]["stream"] = "right".into();
    let schema = source.schema.clone();
    let tables = [&args.spec.left, &args.spec.right].into_iter().chain(args.then.iter().map(ThenArg::table));
    let what = tables.map(String::as_str).collect::<Vec<_>>().join(" ⋈ ");
    let batches = source.into_stream().map_ok(|piece| piece.batch).boxed();
    let (job, joined) = client.exchange(&command, schema, batches).await?;
    let progress = Progress::transfer(&format!("joining {what}"), None);
    let is_printed = args.to.output.is_none();
    let received = get::deliver(&what, job, joined, to, start, &progress).await?;
    if is_printed && !output::is_json() {
        let rows = output::counted(received.rows, "row");
        output::remark(format!("{what}: {rows} in {}", output::seconds(received.seconds)));
    }
    match job.filter(|_| args.explain) {
        Some(job) => show_plan_of(&client, args, job).await,
        None => Ok(()),
    }
}

/// Releases a result that has arrived completely, or that is not wanted. Otherwise the server would
/// store the result until its lease ends, and a loop of joins would fill the memory. A failed
/// release is harmless, because the result is freed when its lease ends.
async fn release(client: &Client, args: &JoinArgs, job: u64) {
    let body = json!({ "job": job });
    let _ = tokio::time::timeout(args.connect.connect_timeout, client.action("cancel_job", &body)).await;
}

/// Runs everything from the submitted job to the report.
async fn finish(
    client: &Client,
    args: &JoinArgs,
    info: &FlightInfo,
    to: Option<Destination>,
    job: u64,
    start: Instant,
) -> Result<()> {
    let what = format!("{} ⋈ {}", args.spec.left, args.spec.right);
    if let Some(to) = to {
        let is_kept = args.retain_seconds() != Some(0);
        if is_kept {
            // Ask for the status once, so that the server does not consider the job abandoned if
            // its remaining rows stay unread.
            jobs::status(client, job).await?;
        }
        let received = get::receive(client, &what, info, &[], to, start).await?;
        // If the lease is 0, reading only a part of the result ends the job. Do not wait for the
        // job then.
        if args.to.output.is_none() && (is_kept || received.whole) {
            let done = jobs::wait(client, job, &what).await?;
            report(&what, &done, start, args)?;
        } else if let Some(table) = &args.into {
            if is_kept {
                jobs::wait(client, job, &what).await?;
            }
            if !args.to.is_stdout() && !output::is_json() {
                output::write_line(format!("the server also keeps the rows as table {table}"))?;
            }
        } else if !received.whole {
            output::remark("the join ended after these rows");
        } else if let Some(kept) = args.kept(job) {
            output::remark(kept);
        }
    } else {
        let done = jobs::wait(client, job, &what).await?;
        report(&what, &done, start, args)?;
    }
    if args.explain {
        show_plan_of(client, args, job).await?;
    }
    Ok(())
}

/// Prints the plan of a job that has run. It does not go among rows on standard output.
async fn show_plan_of(client: &Client, args: &JoinArgs, job: u64) -> Result<()> {
    let plan = client.action("explain", &json!({ "job": job })).await?;
    match args.to.is_stdout() {
        true => plan.iter().filter_map(|plan| plan["text"].as_str()).for_each(|text| output::remark(text.trim_end())),
        false => plan.iter().try_for_each(show_plan)?,
    }
    Ok(())
}

fn report(what: &str, job: &Value, start: Instant, args: &JoinArgs) -> Result<()> {
    let into = args.into.as_deref();
    if output::is_json() {
        // With a table kept on the server, no rows were printed. Otherwise the output already has
        // the rows.
        return if into.is_some() { output::write_line(job.to_string()) } else { Ok(()) };
    }
    let rows = job["rows"].as_u64().unwrap_or(0);
    let kept = into.map(|table| format!(" -> table {table}")).unwrap_or_default();
    let devices = jobs::devices(job);
    let on = if devices.is_empty() { String::new() } else { format!(" on {devices}") };
    let text = format!(
        "{what}: {} in {} (job {}, {}{on}){kept}",
        // The job of a count has one row, which holds the number.
        if args.spec.count { "counted".into() } else { output::counted(rows, "row") },
        output::seconds(start.elapsed().as_secs_f64()),
        job["job"],
        job["strategy"].as_str().unwrap_or("?"),
    );
    match into {
        Some(_) => output::write_line(text),
        None => {
            output::remark(text);
            Ok(())
        }
    }
}

/// Runs `dovetail explain`.
///
/// # Errors
/// The server's.
pub async fn run_explain(args: ExplainArgs) -> Result<()> {
    let client = Client::connect(&args.connect).await?;
    let mut join = args.spec.to_json();
    if !args.then.is_empty() {
        join["stream"] = "right".into();
        join["then"] = args.then.iter().map(ThenArg::to_json).collect();
    }
    let plan = client.action("explain", &json!({ "join": join })).await?;
    plan.iter().try_for_each(show_plan)
}

/// Prints a plan: the server's text if available, or else each field.
fn show_plan(plan: &Value) -> Result<()> {
    match plan["text"].as_str() {
        _ if output::is_json() => output::write_line(plan.to_string()),
        Some(text) => output::write_line(text.trim_end()),
        None => output::write_line(describe::value(plan)),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::planner::{Distribution, JoinKind, Strategy};

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        join: JoinArgs,
    }

    fn command(words: &str) -> Value {
        command_of(words).unwrap()
    }

    #[test]
    fn a_short_command_line_becomes_a_minimal_command() {
        assert_eq!(
            command("orders lineitem --on o_orderkey=l_orderkey"),
            json!({"join": {"left": "orders", "right": "lineitem", "how": "inner", "strategy": "auto",
                            "on": [{"left": "o_orderkey", "right": "l_orderkey"}]}})
        );
    }

    #[test]
    fn every_option_is_sent_in_the_command() {
        let words = "a b --on x,y=z --how left-anti --columns x,left.q --strategy hash --nulls-equal --devices 2 \
                     --distribution broadcast --into c --into-mode replace --temporary-seconds 60 --priority -5 --retain-seconds 0 --batch-rows 1000 -o c.csv";
        assert_eq!(
            command(words),
            json!({"join": {"left": "a", "right": "b", "how": "left_anti", "strategy": "hash", "nulls_equal": true,
                            "on": [{"left": "x", "right": "x"}, {"left": "y", "right": "z"}],
                            "columns": ["x", "left.q"], "devices": 2, "distribution": "broadcast", "into": "c", "into_mode": "replace",
                            "temporary_seconds": 60, "priority": -5,
                            "retain_seconds": 0, "batch_rows": 1000}})
        );
        assert_eq!(command("a b --on x --devices host:0,host:1")["join"]["devices"], json!(["host:0", "host:1"]));
        assert_eq!(command("a b --on x --count")["join"]["count"], json!(true));
        // Rows that will not be printed are not kept.
        let retained = |words: &str| command(&format!("a b --on x {words}"))["join"]["retain_seconds"].clone();
        assert_eq!(retained("--limit 3"), json!(0));
        for words in ["--limit 0", "--into c", "-o c.csv"] {
            assert_eq!(retained(words), Value::Null, "{words}");
        }
        assert_eq!(retained("--limit 3 --retain-seconds 60"), json!(60));
        let words = ["join", "a", "b", "--on", "x, y = z", "--columns", "x, left.q ", "--columns", "\ty"];
        let join = Line::try_parse_from(words).unwrap().join.command()["join"].clone();
        assert_eq!(join["columns"], json!(["x", "left.q", "y"]));
        assert_eq!(join["on"], json!([{"left": "x", "right": "x"}, {"left": "y", "right": "z"}]));
        let nothing = Line::try_parse_from(["join", "a", "b", "--on", "x", "--columns", "x,"]).unwrap_err();
        assert!(nothing.to_string().contains("a name is missing"), "{nothing}");
        let empty = Line::try_parse_from(["join", "a", "b", "--on", "x", "--columns", ""]).unwrap_err();
        assert!(empty.to_string().contains("it has no names; give at least one, or remove the option"), "{empty}");
    }

    #[test]
    fn an_empty_name_for_the_result_table_is_refused() {
        let words = ["join", "a", "b", "--on", "x", "--into", ""];
        assert!(Line::try_parse_from(words).is_err());
    }

    #[test]
    fn quoted_names_may_contain_separators() {
        let join = |on: &str, columns: &str| {
            let words = ["join", "a", "b", "--on", on, "--columns", columns];
            Line::try_parse_from(words).map(|line| line.join.command()["join"].clone())
        };
        let said = join(r#""a=b"="c,d", e = "say ""f""":nulls-equal,"g:nulls_equal""#, r#"left."a,b",k"#).unwrap();
        assert_eq!(
            said["on"],
            json!([{"left": "a=b", "right": "c,d"}, {"left": "e", "right": "say \"f\"", "nulls_equal": true},
                   {"left": "g:nulls_equal", "right": "g:nulls_equal"}])
        );
        assert_eq!(said["columns"], json!(["left.a,b", "k"]));
        // Without quotes, only the first equals sign separates the names.
        assert_eq!(join("a=b=c", "k").unwrap()["on"], json!([{"left": "a", "right": "b=c"}]));
        for wrong in ["\"a\"b=c", "\"a\":nulls=b", "\"a\"=", "\"\"=b"] {
            assert!(join(wrong, "k").is_err(), "{wrong}");
        }
        let said = join("k", "a,\"b").unwrap_err();
        assert!(said.to_string().contains("is not closed"), "{said}");
    }

    #[test]
    fn options_without_effect_are_refused_by_name() {
        let refused = |words: &str| {
            let words = ["join", "a", "b", "--on", "k"].into_iter().chain(words.split(' '));
            match Line::try_parse_from(words) {
                Ok(line) => line.join.check().err().map(|error| error.to_string()),
                Err(error) => Some(error.to_string()),
            }
        };
        for (words, flags) in [
            ("--into c --limit 3", ["--into", "--limit"]),
            ("--then c\u{a0}on\u{a0}k", ["--then", "--probe FILE"]),
            ("--into c --batch-rows 7", ["--into", "--batch-rows"]),
            ("--into c --count", ["--into", "--count"]),
            ("--count --limit 3", ["--count", "--limit"]),
            ("--count --batch-rows 7", ["--count", "--batch-rows"]),
            ("--into-mode replace", ["--into-mode", "--into TABLE"]),
            ("--into-mode create -o c.csv", ["--into-mode", "--into TABLE"]),
            ("--into-mode replace --limit 3", ["--into-mode", "--into TABLE"]),
            ("--into-mode replace --count", ["--into-mode", "--into TABLE"]),
            ("--batch-rows 0", ["--batch-rows", "0 is not in 1.."]),
            ("--temporary-seconds 9", ["--temporary-seconds", "--into TABLE"]),
            ("--into c --temporary-seconds 0", ["--temporary-seconds", "0 is not in 1..=86400"]),
        ] {
            let said = refused(words).unwrap_or_else(|| panic!("{words}"));
            assert!(flags.iter().all(|flag| said.contains(flag)), "{words}: {said}");
        }
        for words in [
            "--into c --into-mode create",
            "--into c --batch-rows 7 -o c.csv",
            "--count -o c.json",
            "--limit 3 --batch-rows 7",
        ] {
            assert_eq!(refused(words), None, "{words}");
        }
    }

    #[test]
    fn the_help_names_every_kind_strategy_and_distribution() {
        use clap::CommandFactory;
        let help = Line::command().render_long_help().to_string();
        let names = JoinKind::ALL.map(JoinKind::name).into_iter().chain(Strategy::ALL.map(Strategy::name));
        for name in names.chain(Distribution::ALL.map(Distribution::name)) {
            assert!(help.contains(name), "{name} is not in the help");
        }
    }
}
