//! Renders JSON for people: names with values, and lists of similar objects as tables.
//!
//! The server's descriptions of jobs, plans and devices grow from version to version. This module
//! shows all fields without knowing their meaning. Units are in the names: a name that ends in
//! `seconds` or `bytes` selects the format of its number.

use serde_json::{Map, Value};

use super::output::{self, Align};
use crate::memory::human_bytes;

/// Renders the value as indented text. Omits nulls, empty texts and empty lists.
pub fn value(value: &Value) -> String {
    let mut lines = Vec::new();
    match value {
        Value::Object(fields) => object(fields, 0, &mut lines),
        other => lines.push(scalar("", other)),
    }
    lines.join("\n")
}

fn object(fields: &Map<String, Value>, indent: usize, lines: &mut Vec<String>) {
    let said = || fields.iter().filter(|(_, value)| !is_nothing(value));
    let width = said().filter(|(_, value)| is_scalar(value)).map(|(key, _)| title(key).len()).max().unwrap_or(0);
    let margin = " ".repeat(indent);
    for (key, value) in said() {
        match value {
            Value::Object(inner) => {
                lines.push(format!("{margin}{}", title(key)));
                object(inner, indent + 2, lines);
            }
            Value::Array(items) if items.iter().all(Value::is_object) => {
                lines.push(format!("{margin}{}", title(key)));
                let table = table(items);
                lines.extend(table.lines().map(|line| format!("{margin}  {line}")));
            }
            Value::Array(items) => lines.push(format!("{margin}{:width$}  {}", title(key), list(key, items))),
            Value::String(text) if text.contains('\n') => {
                lines.push(format!("{margin}{}", title(key)));
                lines.extend(text.lines().map(|line| format!("{margin}  {line}")));
            }
            scalar_value => lines.push(format!("{margin}{:width$}  {}", title(key), scalar(key, scalar_value))),
        }
    }
}

/// Renders objects that share keys as a table, with a column for each key that has a short value in
/// any object.
fn table(items: &[Value]) -> String {
    let mut keys: Vec<&String> = Vec::new();
    for (key, value) in items.iter().filter_map(Value::as_object).flatten() {
        if !keys.contains(&key) && !is_nothing(value) {
            keys.push(key);
        }
    }
    let is_number = |key: &str| items.iter().all(|item| item[key].is_number() || item[key].is_null());
    let titles: Vec<String> = keys.iter().map(|key| title(key)).collect();
    let columns: Vec<(&str, Align)> = keys
        .iter()
        .zip(&titles)
        .map(|(key, title)| (title.as_str(), if is_number(key) { Align::Right } else { Align::Left }))
        .collect();
    let cell = |item: &Value, key: &str| match &item[key] {
        Value::Array(inner) => list(key, inner),
        // Omit nested parts, which would not fit a cell; `--json` prints them.
        Value::Object(inner) => inner
            .iter()
            .filter(|(_, value)| is_scalar(value) && !is_nothing(value))
            .map(|(key, value)| format!("{} {}", title(key), scalar(key, value)))
            .collect::<Vec<_>>()
            .join(", "),
        other => scalar(key, other),
    };
    let rows = items.iter().map(|item| keys.iter().map(|key| cell(item, key)).collect()).collect::<Vec<Vec<String>>>();
    output::table(&columns, &rows)
}

fn list(key: &str, items: &[Value]) -> String {
    items.iter().map(|item| scalar(key, item)).collect::<Vec<_>>().join(", ")
}

fn scalar(key: &str, value: &Value) -> String {
    let ends_with = |unit: &str| key == unit || key.ends_with(&format!("_{unit}"));
    match value {
        Value::Null => String::new(),
        Value::Bool(true) => "yes".into(),
        Value::Bool(false) => "no".into(),
        Value::String(text) => text.clone(),
        Value::Number(number) => match (number.as_u64(), number.as_f64()) {
            (Some(bytes), _) if key.contains("bytes") => human_bytes(bytes),
            (_, Some(seconds)) if ends_with("seconds") => output::seconds(seconds),
            (_, Some(share)) if ends_with("progress") || ends_with("share") => format!("{:.0} %", share * 100.0),
            (Some(count), _) if ends_with("rows") => output::count(count),
            (None, Some(float)) => format!("{float:.4}").trim_end_matches('0').trim_end_matches('.').to_owned(),
            _ => number.to_string(),
        },
        nested => nested.to_string(),
    }
}

/// Returns the name in words, without its unit, because the rendered number has its own unit.
fn title(key: &str) -> String {
    let bytes = if key.contains("memory") { "" } else { "size" };
    let words = key.split('_').map(|word| match word {
        "seconds" => "time",
        "bytes" => bytes,
        word => word,
    });
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

fn is_scalar(value: &Value) -> bool {
    match value {
        Value::Object(_) => false,
        Value::Array(items) => !items.iter().all(Value::is_object),
        _ => true,
    }
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_job_is_described_by_names_values_and_a_table_of_phases() {
        let job = json!({
            "job": 7, "state": "running", "progress": 0.5, "queue_position": null, "rows": 1200000,
            "owner": "",
            "phases": [{"name": "partition", "seconds": 0.25, "bytes": 1048576}, {"name": "match", "seconds": 2.0, "bytes": 0}],
            "tables": ["a", "b"],
        });
        let expected = "\
job       7
state     running
progress  50 %
rows      1,200,000
phases
  name           time     size
  partition  250.0 ms  1.0 MiB
  match        2.00 s      0 B
tables    a, b";
        assert_eq!(value(&job), expected);
        let devices =
            json!({"devices": [{"device": "host:0", "rates": {"origin": "kept", "file": null, "values": {"a": 1.5}}}]});
        assert_eq!(value(&devices), "devices\n  device  rates\n  host:0  origin kept");
        let device = json!({"memory_used_bytes_max": 2048, "predicted_seconds": 1.5});
        assert_eq!(value(&device), "memory used max  2.0 KiB\npredicted time   1.50 s");
    }
}
