//! Further joins of rows that are read while they are joined: `parts on id=part how right_semi`.
//!
//! ```text
//!   TABLE [as NAME] on COLUMNS [how KIND]
//! ```
//!
//! The words `as`, `on` and `how` separate the parts where spaces surround them. Double quotes
//! surround names that contain such a word.

use std::str::FromStr;

use serde_json::{Value, json};

use super::keys::KeyArgs;
use super::names::Words;
use crate::human::listed;
use crate::planner::JoinKind;

/// Form of the argument, for errors.
const FORM: &str =
    "write \"TABLE on COLUMNS\", such as \"parts on id=part\" or \"parts as spares on id=part how right_semi\"";

/// Further table that rows are joined with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThenArg {
    table: String,
    label: Option<String>,
    on: KeyArgs,
    how: Option<JoinKind>,
}

impl ThenArg {
    /// Returns the name of the table.
    pub fn table(&self) -> &String {
        &self.table
    }

    /// Converts the join to the JSON form of the wire. Omits parts that were not given.
    pub fn to_json(&self) -> Value {
        let mut join = json!({ "table": self.table, "on": KeyArgs::json([&self.on]) });
        if let Some(how) = self.how {
            join["how"] = how.name().into();
        }
        if let Some(label) = &self.label {
            join["label"] = label.as_str().into();
        }
        join
    }
}

impl FromStr for ThenArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((input, joined)) = split_at_word(text, "on") else {
            name(text)?;
            return Err(format!("it does not say which columns must be equal; {FORM}"));
        };
        let (columns, kind) = match split_at_word(joined, "how") {
            Some((columns, kind)) => (columns, Some(kind)),
            None => (joined, None),
        };
        let (table, label) = match split_at_word(input, "as") {
            Some((table, label)) => (table, Some(label)),
            None => (input, None),
        };
        Ok(Self {
            table: name(table)?,
            label: label.map(name).transpose()?,
            on: columns.trim().parse()?,
            how: kind.map(kind_of).transpose()?,
        })
    }
}

/// Reads one name, perhaps quoted.
fn name(text: &str) -> Result<String, String> {
    let mut rest = Words::new(text);
    let name = rest.name(&[], &format!("the name of a table is missing; {FORM}"))?;
    rest.next_is(',')?;
    Ok(name.text)
}

fn kind_of(text: &str) -> Result<JoinKind, String> {
    // Accept hyphens, which are usual on a command line.
    let kind = text.trim().replace('-', "_");
    match kind.as_str() {
        "" => Err(format!(
            "\"how\" names no kind of join; write one of {} behind it",
            listed(JoinKind::ALL.iter().map(|kind| kind.name()))
        )),
        kind => kind.parse().map_err(|error: crate::Error| error.message().to_string()),
    }
}

/// Splits a text at the first place of a word that stands alone and outside of quotes, if it has
/// one. A word next to a comma or an equals sign is the name of a column.
fn split_at_word<'a>(text: &'a str, word: &str) -> Option<(&'a str, &'a str)> {
    let separates = |c: char| matches!(c, ',' | '=');
    let mut quoted_until = 0;
    for (at, c) in text.char_indices() {
        if at < quoted_until {
            continue;
        }
        let (before, from) = text.split_at(at);
        if c == '"' && before.chars().next_back().is_none_or(|c| c.is_whitespace() || separates(c)) {
            // A doubled quote closes one name and opens another, which are skipped as well. A quote
            // that is not closed is reported by the reader of the name.
            quoted_until = at + 1 + from[1..].find('"')? + 1;
            while text[quoted_until..].starts_with('"') {
                quoted_until += 1 + text[quoted_until + 1..].find('"')? + 1;
            }
            continue;
        }
        let Some(behind) = from.strip_prefix(word) else { continue };
        let stands_alone =
            before.ends_with(char::is_whitespace) && (behind.is_empty() || behind.starts_with(char::is_whitespace));
        let is_name = before.trim_end().ends_with(separates) || behind.trim_start().starts_with(separates);
        if stands_alone && !is_name && !before.trim().is_empty() {
            return Some((before, behind));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json_of(text: &str) -> Value {
        text.parse::<ThenArg>().unwrap().to_json()
    }

    #[test]
    fn a_further_join_has_a_table_columns_and_perhaps_a_kind_and_a_name() {
        for (text, expected) in [
            ("parts on id=part", json!({"table": "parts", "on": [{"left": "id", "right": "part"}]})),
            (
                " parts  as spares on a = b ,k how right-semi ",
                json!({"table": "parts", "label": "spares", "how": "right_semi",
                       "on": [{"left": "a", "right": "b"}, {"left": "k", "right": "k"}]}),
            ),
            (
                "t on a=b:nulls_equal how inner",
                json!({"table": "t", "how": "inner", "on": [{"left": "a", "right": "b", "nulls_equal": true}]}),
            ),
            // Names that look like words of the form.
            (
                r#""as on" as "how" on how = on , as,"x how y"="a ""on"" b""#,
                json!({"table": "as on", "label": "how",
                       "on": [{"left": "how", "right": "on"}, {"left": "as", "right": "as"},
                              {"left": "x how y", "right": "a \"on\" b"}]}),
            ),
            ("on on how", json!({"table": "on", "on": [{"left": "how", "right": "how"}]})),
            ("monthly sales on shop", json!({"table": "monthly sales", "on": [{"left": "shop", "right": "shop"}]})),
        ] {
            assert_eq!(json_of(text), expected, "{text}");
        }
    }

    #[test]
    fn a_wrong_further_join_is_refused_with_the_right_form() {
        for (text, words) in [
            ("", "the name of a table is missing; write \"TABLE on COLUMNS\""),
            ("parts", "which columns must be equal; write \"TABLE on COLUMNS\""),
            ("parts:id=part", "such as \"parts on id=part\""),
            ("on id=part", "which columns must be equal"),
            ("parts on", "write LEFT=RIGHT"),
            ("parts on id=", "write LEFT=RIGHT"),
            ("parts as on id=part", "the name of a table is missing"),
            ("\"parts\" x on id", "follows the quote"),
            ("\"parts on id=part", "is not closed"),
            ("parts on id=part how", "\"how\" names no kind of join; write one of inner, left"),
            ("parts on id=part how outer", "did you mean \"full\"?"),
            ("parts on id=b:null", "write \":nulls_equal\""),
        ] {
            let said = text.parse::<ThenArg>().unwrap_err();
            assert!(said.contains(words), "{text}: {said}");
        }
    }
}
