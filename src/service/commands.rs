//! Commands: from the bytes in a FlightDescriptor to the forms of the planner and the scheduler.
//!
//! A command comes in two forms with the same meaning, and the first byte tells them apart. It is a
//! JSON object (`{`), or a protobuf `Any` (whose first byte is the tag of its type URL). Both forms
//! refuse unknown fields: a misspelt option that is silently ignored gives a wrong result that
//! looks right.

use std::collections::HashSet;
use std::fmt;
use std::ops::RangeInclusive;

use pbjson_types::Any;
use pbjson_types::value::Kind;
use prost::Message;
use prost::bytes::Buf;
use prost::encoding::{DecodeContext, decode_key, decode_varint, skip_field};

use super::proto;
use crate::catalog::{IntoMode, TEMPORARY_SECONDS_MAX, temporary_life};
use crate::human::asked;
use crate::memory::human_bytes;
use crate::planner::{JoinKind, JoinSpec, KeyPair, Side, ThenSpec};
use crate::scheduler::{DeviceRequest, JobOptions};
use crate::{Context, Error, Result};

/// Largest command, in bytes. A list of a hundred thousand columns fits. Decoded, a command may
/// take sixteen times as much.
pub const COMMAND_BYTES_MAX: usize = 2 << 20;

/// Example of a command, for error messages.
const EXAMPLE: &str =
    r#"{"join": {"left": "orders", "right": "lineitem", "on": [{"left": "o_orderkey", "right": "l_orderkey"}]}}"#;

const ON_EXAMPLE: &str = r#"{"left": "o_orderkey", "right": "l_orderkey"}"#;

const THEN_EXAMPLE: &str = r#"{"table": "part", "on": [{"left": "p_partkey", "right": "l_partkey"}]}"#;

/// Maximum number of joins of a chain. Each takes device memory for its row numbers.
const CHAIN_JOINS_MAX: usize = 16;

/// Valid priorities of a job.
const PRIORITIES: RangeInclusive<i32> = -100..=100;

/// Longest time for which a build side is kept without a stream, in seconds: a day.
const KEEP_SECONDS_MAX: u32 = 24 * 60 * 60;

/// Package of Flight SQL's messages in a type URL.
const FLIGHT_SQL: &str = "arrow.flight.protocol.sql.";

/// Defaults for joins that omit an option: a session's options.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Defaults {
    pub strategy: Option<String>,
    pub nulls_equal: Option<bool>,
    pub priority: Option<i32>,
    pub retain_seconds: Option<u32>,
}

/// Command to join two tables.
#[derive(Clone, Debug, PartialEq)]
pub struct JoinCommand {
    pub spec: JoinSpec,
    pub options: JobOptions,
}

impl JoinCommand {
    /// Returns the command, if both sides are tables.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the rows of one side arrive in the call.
    pub fn of_tables(self) -> Result<Self> {
        match self.options.streamed {
            None => Ok(self),
            Some(_) => Err(Error::Invalid(
                "\"stream\" says that rows of the join arrive in the call; send this command to DoExchange, with the rows"
                    .into(),
            )),
        }
    }
}

/// Describes the command for a line of the log.
impl fmt::Display for JoinCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { spec, options } = self;
        let what = if spec.count { "count" } else { "join" };
        write!(f, "{what} {} {}", spec.left.name(), spec.right.name())?;
        spec.then.iter().try_for_each(|then| write!(f, " {}", then.table.name()))?;
        options.into.iter().try_for_each(|table| write!(f, " into {table}"))
    }
}

/// Reads a command.
///
/// # Errors
/// [`Error::Invalid`] for bytes that are neither JSON nor a protobuf `Any`, for unknown fields and
/// for values out of range; [`Error::Unsupported`] for Flight SQL.
pub fn decode(command: &[u8], defaults: &Defaults) -> Result<JoinCommand> {
    if command.len() > COMMAND_BYTES_MAX {
        return Err(Error::Exhausted(format!(
            "the command has {}, over the limit of {}; name fewer columns",
            human_bytes(command.len() as u64),
            human_bytes(COMMAND_BYTES_MAX as u64)
        )));
    }
    let message = match command.trim_ascii_start().first() {
        None => return Err(Error::Invalid(format!("the command is empty; send a join such as {EXAMPLE}"))),
        Some(b'{') => decode_json(command)?,
        Some(_) => decode_any(command)?,
    };
    match message.command {
        Some(proto::command::Command::Join(join)) => join_command(join, defaults).context(|| "the join command"),
        None => Err(Error::Invalid(format!("the command names nothing to do; send a join such as {EXAMPLE}"))),
    }
}

fn decode_json(command: &[u8]) -> Result<proto::Command> {
    let message = serde_json::from_slice(command);
    let slip = || slip(&serde_json::from_slice::<serde_json::Value>(command).ok()?["join"]);
    match message {
        // The JSON reader also accepts numbers in place of enum names, as protobuf's JSON does.
        // Without this check, `"how": 5` would mean some kind of join.
        Ok(message) => slip().map_or(Ok(message), Err),
        Err(error) => Err(slip().unwrap_or_else(|| {
            Error::Invalid(format!("the JSON command cannot be read: {error}; a join looks like {EXAMPLE}"))
        })),
    }
}

/// Type of value that a field takes in JSON.
#[derive(Clone, Copy)]
enum Takes {
    Text,
    Flag,
    Names,
    Whole { least: i64, most: i64 },
}

/// Fields of a join whose values are checked here, because the JSON reader's error does not name
/// the field.
const JOIN_FIELDS: [(&str, Takes); 16] = [
    ("left", Takes::Text),
    ("right", Takes::Text),
    ("how", Takes::Text),
    ("columns", Takes::Names),
    ("count", Takes::Flag),
    ("strategy", Takes::Text),
    ("distribution", Takes::Text),
    ("nulls_equal", Takes::Flag),
    ("batch_rows", Takes::Whole { least: 1, most: u32::MAX as i64 }),
    ("priority", Takes::Whole { least: *PRIORITIES.start() as i64, most: *PRIORITIES.end() as i64 }),
    ("retain_seconds", Takes::Whole { least: 0, most: u32::MAX as i64 }),
    ("into", Takes::Text),
    ("into_mode", Takes::Text),
    ("temporary_seconds", Takes::Whole { least: 1, most: TEMPORARY_SECONDS_MAX as i64 }),
    ("stream", Takes::Text),
    ("keep_seconds", Takes::Whole { least: 0, most: KEEP_SECONDS_MAX as i64 }),
];

impl Takes {
    fn accepts(self, value: &serde_json::Value) -> bool {
        match self {
            Self::Text => value.is_string(),
            Self::Flag => value.is_boolean(),
            Self::Names => value.as_array().is_some_and(|names| names.iter().all(serde_json::Value::is_string)),
            // Protobuf's JSON also writes whole numbers as text.
            Self::Whole { least, most } => {
                let number = value.as_f64().or_else(|| value.as_str()?.parse().ok());
                number.is_some_and(|number| number.fract() == 0.0 && (least as f64..=most as f64).contains(&number))
            }
        }
    }
}

impl fmt::Display for Takes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text => out.write_str("a string"),
            Self::Flag => out.write_str("true or false"),
            Self::Names => out.write_str("a list of names"),
            Self::Whole { least, most } => write!(out, "a whole number from {least} to {most}"),
        }
    }
}

/// Returns the error for the first field of a join with an unacceptable value. Kinds of join that
/// only other systems have, such as "outer", are errors too.
fn slip(join: &serde_json::Value) -> Option<Error> {
    let given = |field: &str| join.get(field).filter(|value| !value.is_null());
    let wrong = JOIN_FIELDS.iter().find_map(|(field, takes)| {
        let value = given(field).filter(|value| !takes.accepts(value))?;
        let shown = match value.as_str() {
            Some(text) => asked(text),
            None => value.to_string(),
        };
        Some(Error::Invalid(format!("{field:?} is {shown}, and takes {takes}")))
    });
    // An empty list looks like the absence of columns, and protobuf reads it as the absence of a
    // list, which stands for all columns.
    let no_columns = || {
        given("columns")?.as_array()?.is_empty().then(|| {
            Error::Invalid("\"columns\" is empty; name at least one column, or leave it out for all columns".into())
        })
    };
    let kind = |join: &serde_json::Value| join.get("how")?.as_str()?.parse::<JoinKind>().err();
    let refused = wrong
        .or_else(no_columns)
        .or_else(|| kind(join))
        .or_else(|| join.get("then")?.as_array()?.iter().find_map(kind))?;
    Some(refused.context("the join command"))
}

/// Returns the refusal of a message or an action of Flight SQL.
pub fn no_flight_sql(name: &str) -> Error {
    Error::Unsupported(format!(
        "this server does not speak Flight SQL ({name}) yet; use its command line (dovetail put, dovetail join) or its \
         Python client (import dovetail), or call GetFlightInfo with a join command such as {EXAMPLE}"
    ))
}

/// Returns the refusal of a wrapped message of Flight SQL, if `bytes` has one.
pub fn flight_sql_refusal(bytes: &[u8]) -> Option<Error> {
    let any = Any::decode(bytes).ok()?;
    let (_, name) = any.type_url.rsplit_once('/')?;
    name.starts_with(FLIGHT_SQL).then(|| no_flight_sql(name))
}

fn decode_any(command: &[u8]) -> Result<proto::Command> {
    let neither = || {
        Error::Invalid(format!(
            "the command is neither a JSON object nor a protobuf Any of a message of dovetail.v1; send a join such as {EXAMPLE}"
        ))
    };
    let any = Any::decode(command).map_err(|_| neither())?;
    let (_, name) = any.type_url.rsplit_once('/').ok_or_else(neither)?;
    if name.starts_with(FLIGHT_SQL) {
        return Err(no_flight_sql(name));
    }
    let unreadable = |error| Error::Invalid(format!("the {name} in the command cannot be read: {error}"));
    match name {
        "dovetail.v1.Join" => {
            refuse_unknown_fields(&any.value, &JOIN)?;
            let join = proto::Join::decode(&*any.value).map_err(unreadable)?;
            Ok(proto::Command { command: Some(proto::command::Command::Join(join)) })
        }
        "dovetail.v1.Command" => {
            refuse_unknown_fields(&any.value, &COMMAND)?;
            proto::Command::decode(&*any.value).map_err(unreadable)
        }
        _ => Err(Error::Invalid(format!(
            "the command is a {name}, which is unknown here; send a dovetail.v1.Join or dovetail.v1.Command"
        ))),
    }
}

/// Fields of a message: the highest tag, and the nested messages whose fields are checked too.
struct Fields {
    name: &'static str,
    tag_max: u32,
    inside: &'static [(u32, &'static Fields)],
}

static COMMAND: Fields = Fields { name: "dovetail.v1.Command", tag_max: 1, inside: &[(1, &JOIN)] };
static JOIN: Fields = Fields { name: "dovetail.v1.Join", tag_max: 19, inside: &[(3, &KEY_PAIR), (18, &THEN)] };
static THEN: Fields = Fields { name: "dovetail.v1.Then", tag_max: 4, inside: &[(2, &KEY_PAIR)] };
static KEY_PAIR: Fields = Fields { name: "dovetail.v1.KeyPair", tag_max: 3, inside: &[] };

/// Refuses fields that are unknown. The protobuf decoder skips them; here they are the caller's
/// mistake.
fn refuse_unknown_fields(mut message: &[u8], fields: &Fields) -> Result<()> {
    let unreadable = |error| Error::Invalid(format!("the {} in the command cannot be read: {error}", fields.name));
    while message.has_remaining() {
        let (tag, wire_type) = decode_key(&mut message).map_err(unreadable)?;
        if tag > fields.tag_max {
            return Err(Error::Invalid(format!(
                "the {} in the command has a field number {tag}, which this server does not know; it knows 1 to {}",
                fields.name, fields.tag_max
            )));
        }
        let inside = fields.inside.iter().find(|(number, _)| *number == tag);
        match inside {
            Some((_, inside)) if wire_type == prost::encoding::WireType::LengthDelimited => {
                let len = decode_varint(&mut message).map_err(unreadable)?;
                if len > message.len() as u64 {
                    return Err(Error::Invalid(format!("the {} in the command is cut short", fields.name)));
                }
                let (part, rest) = message.split_at(len as usize);
                refuse_unknown_fields(part, inside)?;
                message = rest;
            }
            _ => skip_field(wire_type, tag, &mut message, DecodeContext::default()).map_err(unreadable)?,
        }
    }
    Ok(())
}

fn join_command(join: proto::Join, defaults: &Defaults) -> Result<JoinCommand> {
    for (field, value) in [("left", &join.left), ("right", &join.right)] {
        if value.is_empty() {
            return Err(Error::Invalid(format!("\"{field}\" is missing: the name of the {field} table")));
        }
    }
    if !join.then.is_empty() && join.stream.is_none() {
        return Err(Error::Invalid(
            "\"then\" joins rows that arrive with further tables, and the command has no \"stream\"; keep the result of one \
             join as a table with \"into\", and join that"
                .into(),
        ));
    }
    if join.then.len() >= CHAIN_JOINS_MAX {
        return Err(Error::Invalid(format!(
            "\"then\" makes {} joins, and the limit is {CHAIN_JOINS_MAX}",
            join.then.len() + 1
        )));
    }
    if join.then.iter().any(|then| then.table.is_empty()) {
        return Err(Error::Invalid(format!("a join of \"then\" lacks \"table\"; it looks like {THEN_EXAMPLE}")));
    }
    for pair in join.on.iter().chain(join.then.iter().flat_map(|then| &then.on)) {
        for (side, column) in [("left", &pair.left), ("right", &pair.right)] {
            if column.is_empty() {
                return Err(Error::Invalid(format!(
                    "a pair of \"on\" lacks \"{side}\", the column of the {side} table; it looks like {ON_EXAMPLE}"
                )));
            }
        }
    }
    let twice = |on: &[proto::KeyPair]| {
        let mut pairs = HashSet::new();
        on.iter().find(|pair| !pairs.insert((pair.left.clone(), pair.right.clone()))).cloned()
    };
    if let Some(pair) = std::iter::once(&join.on).chain(join.then.iter().map(|then| &then.on)).find_map(|on| twice(on))
    {
        return Err(Error::Invalid(format!(
            "\"on\" has the pair of {:?} and {:?} twice; list each pair once",
            pair.left, pair.right
        )));
    }
    let priority = join.priority.or(defaults.priority).unwrap_or(0);
    if !PRIORITIES.contains(&priority) {
        let (least, most) = PRIORITIES.into_inner();
        return Err(Error::Invalid(format!("\"priority\" is {priority}; it must be from {least} to {most}")));
    }
    let how = proto::JoinKind::try_from(join.how)
        .map_err(|_| Error::Invalid(format!("\"how\" is number {}, which is no kind of join", join.how)))?;
    let strategy = match join.strategy.as_deref().or(defaults.strategy.as_deref()) {
        None | Some("auto") => None,
        Some(name) => Some(name.parse()?),
    };
    let distribution = match join.distribution.as_deref() {
        None | Some("auto") => None,
        Some(name) => Some(name.parse()?),
    };
    let into_mode = proto::join::IntoMode::try_from(join.into_mode)
        .map_err(|_| Error::Invalid(format!("\"into_mode\" is number {}, which is no mode", join.into_mode)))?;
    if join.into.as_deref() == Some("") {
        return Err(Error::Invalid(
            "\"into\" is empty; write the name of the table to keep the result as, or leave \"into\" out".into(),
        ));
    }
    if into_mode == proto::join::IntoMode::Replace && join.into.is_none() {
        return Err(Error::Invalid("\"into_mode\" is replace, and \"into\" names no table to replace".into()));
    }
    let into_life = join.temporary_seconds.map(temporary_life).transpose()?;
    if into_life.is_some() && join.into.is_none() {
        return Err(Error::Invalid(
            "\"temporary_seconds\" is the life of a table, and \"into\" names none; write \"into\", or keep a result \
             without a table with \"retain_seconds\""
                .into(),
        ));
    }
    if join.count && !join.columns.is_empty() {
        return Err(Error::Invalid(
            "\"count\" asks for the number of rows, and \"columns\" for values of them; leave one of them out".into(),
        ));
    }
    if let (true, Some(table)) = (join.count, &join.into) {
        return Err(Error::Invalid(format!(
            "\"count\" asks for the number of rows and makes none, so there is nothing to keep as table {table:?}; leave \"into\" out"
        )));
    }
    let streamed = match join.stream.as_deref() {
        None => None,
        Some("left") => Some(Side::Left),
        Some("right") => Some(Side::Right),
        Some(other) => {
            return Err(Error::Invalid(format!(
                "\"stream\" is {}; it names the side whose rows arrive in the call, \"left\" or \"right\"",
                asked(other)
            )));
        }
    };
    let keep_seconds = join.keep_seconds.unwrap_or(0);
    if keep_seconds > KEEP_SECONDS_MAX {
        return Err(Error::Invalid(format!("\"keep_seconds\" is {keep_seconds}, and the limit is {KEEP_SECONDS_MAX}")));
    }
    if keep_seconds > 0 && streamed.is_none() {
        return Err(Error::Invalid(
            "\"keep_seconds\" keeps the build side of a join with \"stream\", and the command has none; keep a result with \
             \"retain_seconds\""
                .into(),
        ));
    }
    let pair = |pair: proto::KeyPair| KeyPair { left: pair.left, right: pair.right, nulls_equal: pair.nulls_equal };
    let then = |then: proto::Then| -> Result<ThenSpec> {
        let how = proto::JoinKind::try_from(then.how)
            .map_err(|_| Error::Invalid(format!("\"how\" is number {}, which is no kind of join", then.how)))?;
        let (table, on) = (then.table.into(), then.on.into_iter().map(pair).collect());
        Ok(ThenSpec { table, label: then.label, on, how: join_kind(how) })
    };
    let then = join.then.into_iter().map(then).collect::<Result<_>>()?;
    let spec = JoinSpec {
        then,
        left: join.left.into(),
        right: join.right.into(),
        on: join.on.into_iter().map(pair).collect(),
        how: join_kind(how),
        columns: join.columns,
        count: join.count,
        nulls_equal: join.nulls_equal.or(defaults.nulls_equal).unwrap_or(false),
        batch_rows: (join.batch_rows > 0).then_some(join.batch_rows as usize),
    };
    let options = JobOptions {
        strategy,
        distribution,
        devices: devices(join.devices.and_then(|value| value.kind))?,
        priority,
        retain_seconds: join.retain_seconds.or(defaults.retain_seconds),
        into: join.into,
        into_mode: match into_mode {
            proto::join::IntoMode::Create => IntoMode::Create,
            proto::join::IntoMode::Replace => IntoMode::Replace,
        },
        into_life,
        streamed,
        keep_seconds,
    };
    Ok(JoinCommand { spec, options })
}

fn join_kind(kind: proto::JoinKind) -> JoinKind {
    match kind {
        proto::JoinKind::Inner => JoinKind::Inner,
        proto::JoinKind::Left => JoinKind::Left,
        proto::JoinKind::Right => JoinKind::Right,
        proto::JoinKind::Full => JoinKind::Full,
        proto::JoinKind::LeftSemi => JoinKind::LeftSemi,
        proto::JoinKind::LeftAnti => JoinKind::LeftAnti,
        proto::JoinKind::RightSemi => JoinKind::RightSemi,
        proto::JoinKind::RightAnti => JoinKind::RightAnti,
    }
}

/// Reads the devices of a join: a count, a list of names, or `all`.
fn devices(value: Option<Kind>) -> Result<DeviceRequest> {
    let wrong = |what: String| {
        Err(Error::Invalid(format!(
            "\"devices\" is {what}; give the number of devices that run the join together, a list of them ([\"host:0\", \
             \"host:1\"]), or \"all\", or leave it out"
        )))
    };
    match value {
        None | Some(Kind::NullValue(_)) => Ok(DeviceRequest::Any),
        Some(Kind::NumberValue(count)) if count.fract() == 0.0 && (0.0..=65536.0).contains(&count) => {
            Ok(DeviceRequest::Count(count as usize))
        }
        Some(Kind::NumberValue(count)) => wrong(count.to_string()),
        Some(Kind::StringValue(name)) if name == "auto" => Ok(DeviceRequest::Any),
        Some(Kind::StringValue(name)) if name == "all" => Ok(DeviceRequest::All),
        Some(Kind::StringValue(name)) => Ok(DeviceRequest::Named(vec![name])),
        Some(Kind::ListValue(list)) => {
            let names: Option<Vec<String>> = list
                .values
                .into_iter()
                .map(|value| match value.kind {
                    Some(Kind::StringValue(name)) => Some(name),
                    _ => None,
                })
                .collect();
            match names {
                Some(names) => Ok(DeviceRequest::Named(names)),
                None => wrong("a list with values that are not names".into()),
            }
        }
        Some(Kind::BoolValue(value)) => wrong(value.to_string()),
        Some(Kind::StructValue(_)) => wrong("an object".into()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn decode(command: &[u8]) -> Result<JoinCommand> {
        super::decode(command, &Defaults::default())
    }
    use crate::planner::{Distribution, Strategy};

    const FULL: &str = r#"{"join": {"left": "a", "right": "b", "on": [{"left": "x", "right": "y", "nulls_equal": true}],
        "how": "left_anti", "columns": ["x"], "strategy": "sort-merge", "nulls_equal": true, "devices": ["host:0"],
        "distribution": "hash", "batch_rows": 10, "priority": -3, "retain_seconds": 0, "into": "c", "into_mode": "replace",
        "temporary_seconds": 60}}"#;

    fn any(name: &str, value: Vec<u8>) -> Vec<u8> {
        let type_url = format!("type.googleapis.com/{name}");
        Any { type_url, value: value.into() }.encode_to_vec()
    }

    fn refusal(command: &[u8]) -> String {
        match decode(command).unwrap_err() {
            Error::Invalid(message) => message,
            other => panic!("refused as {other:?}"),
        }
    }

    #[test]
    fn json_and_protobuf_of_the_same_join_decode_equally() {
        let count = br#"{"join": {"left": "a", "right": "b", "on": [{"left": "x", "right": "x"}], "count": true}}"#;
        let message: proto::Command = serde_json::from_slice(count).unwrap();
        assert!(decode(count).unwrap().spec.count);
        assert_eq!(decode(&any("dovetail.v1.Command", message.encode_to_vec())).unwrap(), decode(count).unwrap());

        let from_json = decode(FULL.as_bytes()).unwrap();
        let message: proto::Command = serde_json::from_str(FULL).unwrap();
        assert_eq!(decode(&any("dovetail.v1.Command", message.encode_to_vec())).unwrap(), from_json);
        let Some(proto::command::Command::Join(join)) = message.command else { panic!("not a join") };
        assert_eq!(decode(&any("dovetail.v1.Join", join.encode_to_vec())).unwrap(), from_json);
        assert_eq!(from_json.options.strategy, Some(Strategy::SortMerge));
        assert_eq!(from_json.options.distribution, Some(Distribution::Hash));
        assert_eq!(from_json.options.devices, DeviceRequest::Named(vec!["host:0".into()]));
        assert_eq!((from_json.spec.batch_rows, from_json.options.retain_seconds), (Some(10), Some(0)));
        assert_eq!((from_json.options.into.as_deref(), from_json.options.into_mode), (Some("c"), IntoMode::Replace));
        assert_eq!(from_json.options.into_life, Some(Duration::from_secs(60)));
    }

    #[test]
    fn further_joins_of_a_stream_decode_equally() {
        let then = r#"{"table": "c", "on": [{"left": "z", "right": "y"}], "how": "right_semi", "label": "d"}"#;
        let with = |then: &str, stream: &str| {
            format!(
                r#"{{"join": {{"left": "a", "right": "b", "on": [{{"left": "x", "right": "x"}}], {stream} "then": [{then}]}}}}"#
            )
        };
        let stream = r#""stream": "right", "keep_seconds": 9,"#;
        let json = with(then, stream);
        let from_json = decode(json.as_bytes()).unwrap();
        let message: proto::Command = serde_json::from_str(&json).unwrap();
        assert_eq!(decode(&any("dovetail.v1.Command", message.encode_to_vec())).unwrap(), from_json);
        let (table, label, on) = ("c".into(), Some("d".into()), vec![KeyPair::new("z", "y")]);
        assert_eq!(from_json.spec.then, [ThenSpec { table, label, on, how: JoinKind::RightSemi }]);
        assert!(refusal(with(then, "").as_bytes()).contains("no \"stream\""));
        let outer = with(r#"{"table": "c", "on": [{"left": "z", "right": "y"}], "how": "outer"}"#, stream);
        assert!(refusal(outer.as_bytes()).ends_with("did you mean \"full\"?"));
        assert!(refusal(with(r#"{"on": []}"#, stream).as_bytes()).contains("lacks \"table\""));
        assert!(
            refusal(with(r#"{"table": "c", "on": [{"left": "z"}]}"#, stream).as_bytes()).contains("lacks \"right\"")
        );
        let twice = r#"{"table": "c", "on": [{"left": "z", "right": "y"}, {"left": "z", "right": "y"}]}"#;
        assert!(refusal(with(twice, stream).as_bytes()).contains("twice"));
        assert!(refusal(with(&[then; 16].join(", "), stream).as_bytes()).contains("17 joins"));
    }

    #[test]
    fn omitted_fields_have_their_defaults() {
        let JoinCommand { spec, options } =
            decode(br#" {"join": {"left": "a", "right": "b", "on": [{"left": "x", "right": "x"}]}}"#).unwrap();
        assert_eq!(
            (spec.how, options.strategy, options.into, options.retain_seconds),
            (JoinKind::Inner, None, None, None)
        );
        assert_eq!((options.devices, options.distribution), (DeviceRequest::Any, None));
        assert_eq!(spec.batch_rows, None);
        assert_eq!(options.into_mode, IntoMode::Create);
    }

    #[test]
    fn devices_are_a_count_or_names() {
        let with = |devices: &str| {
            let json = format!(r#"{{"join": {{"left": "a", "right": "b", "devices": {devices}}}}}"#);
            decode(json.as_bytes()).map(|command| command.options.devices)
        };
        assert_eq!(with("2").unwrap(), DeviceRequest::Count(2));
        assert_eq!(with(r#""all""#).unwrap(), DeviceRequest::All);
        assert_eq!(
            with("[\"host:0\", \"host:1\"]").unwrap(),
            DeviceRequest::Named(vec!["host:0".into(), "host:1".into()])
        );
        // The scheduler knows the devices: it refuses 0 and the empty list, and names the devices.
        assert_eq!(with("0").unwrap(), DeviceRequest::Count(0));
        assert_eq!(with("[]").unwrap(), DeviceRequest::Named(vec![]));
        for wrong in ["-1", "1.5", "true", "{}", "[1]", "1e300"] {
            assert!(with(wrong).is_err(), "devices {wrong} was accepted");
        }
    }

    #[test]
    fn unknown_fields_are_refused_in_both_forms() {
        assert!(refusal(br#"{"join": {"left": "a", "right": "b", "hwo": "left"}}"#).contains("hwo"));
        assert!(refusal(br#"{"jion": {}}"#).contains("jion"));
        // Field 20 of a join, which does not exist, as a varint.
        assert!(refusal(&any("dovetail.v1.Join", vec![20 << 3 | 0x80, 1, 1])).contains("field number 20"));
        // A key pair (field 3) that contains an unknown field 4.
        assert!(refusal(&any("dovetail.v1.Join", vec![3 << 3 | 2, 2, 4 << 3, 1])).contains("field number 4"));
        // A key pair that claims more bytes than there are.
        assert!(refusal(&any("dovetail.v1.Join", vec![3 << 3 | 2, 200, 1])).contains("cut short"));
    }

    #[test]
    fn an_invalid_command_is_refused_with_an_example() {
        for wrong in [&b""[..], b"   ", b"SELECT 1", b"\xff\xff\xff", b"[]", b"{", b"{}", b"\x0a\x03abc"] {
            assert!(refusal(wrong).contains("\"join\""), "{wrong:?}");
        }
        assert!(refusal(&any("some.Message", vec![])).contains("some.Message"));
        let sql = any("arrow.flight.protocol.sql.CommandStatementQuery", vec![]);
        let Err(Error::Unsupported(text)) = decode(&sql) else { panic!("Flight SQL was not refused") };
        for way in ["CommandStatementQuery", "dovetail join", "import dovetail", "a join command such as"] {
            assert!(text.contains(way), "{way}: {text}");
        }
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        let with = |field: &str| refusal(format!(r#"{{"join": {{"left": "a", "right": "b", {field}}}}}"#).as_bytes());
        assert!(with(r#""priority": 101"#).contains("priority"));
        for (value, takes) in [
            (r#""priority": 1.5"#, "a whole number from -100 to 100"),
            (r#""batch_rows": -1"#, "a whole number from 1 to 4294967295"),
            (r#""batch_rows": 0"#, "a whole number from 1 to 4294967295"),
            (r#""retain_seconds": 1e30"#, "a whole number from 0 to 4294967295"),
            (r#""retain_seconds": "soon""#, "a whole number from 0 to 4294967295"),
            (r#""how": 5"#, "a string"),
            (r#""distribution": true"#, "a string"),
            (r#""into_mode": 1"#, "a string"),
            (r#""into": ["t"]"#, "a string"),
            (r#""temporary_seconds": 0"#, "a whole number from 1 to 86400"),
            (r#""columns": "x""#, "a list of names"),
            (r#""count": "yes""#, "true or false"),
        ] {
            let (field, given) = value.split_once(": ").unwrap();
            assert_eq!(
                with(value),
                format!("the join command: {field} is {given}, and takes {takes}").replace("1e30", "1e+30")
            );
        }
        assert!(with(r#""on": [{"left": "k"}]"#).contains("lacks \"right\""));
        let pairs =
            |second: &str| format!(r#""on": [{{"left": "k", "right": "x"}}, {{"left": "k", "right": {second}}}]"#);
        assert!(with(&pairs(r#""x", "nulls_equal": true"#)).contains("the pair of \"k\" and \"x\" twice"));
        assert!(decode(format!(r#"{{"join": {{"left": "a", "right": "b", {}}}}}"#, pairs("\"y\"")).as_bytes()).is_ok());
        assert!(with(r#""strategy": "quantum""#).contains("quantum"));
        assert!(with(r#""distribution": "Broad-Cast""#).contains("it is one of auto, broadcast, hash"));
        assert!(with(r#""distribution": "HASH""#).ends_with("did you mean \"hash\"?"));
        assert!(with(r#""into": "c", "into_mode": "append""#).contains("`create` or `replace`"));
        assert!(with(r#""into_mode": "replace""#).contains("names no table to replace"));
        assert!(with(r#""temporary_seconds": 9"#).contains("\"into\" names none"));
        assert!(with(r#""into": """#).contains("\"into\" is empty"));
        assert_eq!(
            with(r#""columns": []"#),
            "the join command: \"columns\" is empty; name at least one column, or leave it out for all columns"
        );
        assert!(with(r#""columns": [], "count": true"#).contains("\"columns\" is empty"));
        assert!(with(r#""strategy": """#).contains("unknown strategy \"\""), "{}", with(r#""strategy": """#));
        assert!(with(r#""distribution": """#).contains("it is one of auto, broadcast, hash"));
        assert!(with(r#""count": true, "into": "c""#).contains("nothing to keep as table \"c\""));
        let how = "the join command: unknown kind of join \"outer\"; it is one of inner, left, right, full, left_semi,";
        assert!(with(r#""how": "outer""#).starts_with(how), "{}", with(r#""how": "outer""#));
        assert!(with(r#""how": "outer""#).ends_with("did you mean \"full\"?"), "{}", with(r#""how": "outer""#));
        assert!(with(r#""strategy": "HASH""#).ends_with("did you mean \"hash\"?"), "{}", with(r#""strategy": "HASH""#));
        assert!(refusal(br#"{"join": {"right": "b"}}"#).contains("left"));
    }

    #[test]
    fn session_options_fill_only_omitted_fields() {
        let defaults = Defaults {
            strategy: Some("sort-merge".into()),
            nulls_equal: Some(true),
            priority: Some(7),
            retain_seconds: Some(9),
        };
        let with = |more: &str| {
            let json =
                format!(r#"{{"join": {{"left": "a", "right": "b", "on": [{{"left": "x", "right": "x"}}]{more}}}}}"#);
            let JoinCommand { spec, options } = super::decode(json.as_bytes(), &defaults).unwrap();
            (options.strategy, spec.nulls_equal, options.priority, options.retain_seconds)
        };
        assert_eq!(with(""), (Some(Strategy::SortMerge), true, 7, Some(9)));
        let said = r#", "strategy": "auto", "nulls_equal": false, "priority": 0, "retain_seconds": 0"#;
        assert_eq!(with(said), (None, false, 0, Some(0)));
    }
}
