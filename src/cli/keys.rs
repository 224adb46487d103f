//! Pairs of key columns on a command line: `a=b,k,x=y:nulls_equal`.

use std::str::FromStr;

use serde_json::{Value, json};

use super::names::Words;

/// Pairs of columns, separated by commas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyArgs(Vec<KeyArg>);

/// Pair of columns that must be equal.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KeyArg {
    left: String,
    right: String,
    /// Null equality of this pair; `None` if the pair has no suffix.
    nulls_equal: Option<bool>,
}

/// Suffixes of a pair of columns. SQL calls nulls that match no null distinct.
const NULLS: [(&str, bool); 2] = [(":nulls_equal", true), (":nulls_distinct", false)];

/// Returns the null equality that a suffix selects. Accepts hyphens, which are usual on a command
/// line.
fn nulls_of(suffix: &str) -> Option<bool> {
    let suffix = suffix.trim().replace('-', "_");
    NULLS.iter().find_map(|(known, equal)| (suffix == *known).then_some(*equal))
}

/// Returns the error for a misspelt suffix of [`NULLS`], or `None` if the text may belong to the
/// name.
fn misspelt(suffix: &str) -> Option<String> {
    const TYPOS_MAX: usize = 3;
    let written = suffix.trim().replace('-', "_").to_lowercase();
    let is_near = NULLS.iter().any(|(known, _)| strsim::osa_distance(&written, known) <= TYPOS_MAX);
    // A prefix of a known suffix is an error too: it was cut short or abbreviated.
    let is_cut = written.starts_with(":null") && NULLS.iter().any(|(known, _)| known.starts_with(&written));
    (is_near || is_cut).then(|| {
        format!(
            "{:?} is not a valid suffix of a pair of columns; write \":nulls_equal\" or \":nulls_distinct\", or put \
             double quotes around the name if the text belongs to it",
            suffix.trim()
        )
    })
}

impl FromStr for KeyArgs {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut rest, mut pairs) = (Words::new(text), Vec::new());
        loop {
            pairs.push(KeyArg::read(&mut rest)?);
            if !rest.next_is(',')? {
                return Ok(Self(pairs));
            }
        }
    }
}

impl KeyArgs {
    /// Returns the pairs of several lists in the JSON form of the wire.
    pub fn json<'a>(lists: impl IntoIterator<Item = &'a Self>) -> Vec<Value> {
        lists.into_iter().flat_map(|pairs| &pairs.0).map(KeyArg::to_json).collect()
    }
}

impl KeyArg {
    fn to_json(&self) -> Value {
        let mut pair = json!({ "left": self.left, "right": self.right });
        if let Some(equal) = self.nulls_equal {
            pair["nulls_equal"] = equal.into();
        }
        pair
    }

    fn read(rest: &mut Words<'_>) -> Result<Self, String> {
        const WRITE: &str = "write LEFT=RIGHT, or the name of a column that both tables have";
        let mut left = rest.name(&['=', ','], WRITE)?;
        let mut right = if rest.pass('=') { Some(rest.name(&[','], WRITE)?) } else { None };
        let last = right.as_mut().unwrap_or(&mut left);
        let mut nulls_equal = None;
        if last.is_quoted {
            let mut behind = rest.clone();
            let suffix = behind.before(&[',']);
            nulls_equal = nulls_of(suffix);
            if let (None, Some(refusal)) = (nulls_equal, misspelt(suffix)) {
                return Err(refusal);
            }
            if nulls_equal.is_some() {
                *rest = behind;
            }
        } else if let Some(at) = last.text.rfind(':') {
            let (name, suffix) = last.text.split_at(at);
            nulls_equal = nulls_of(suffix);
            match (nulls_equal, misspelt(suffix), name.trim()) {
                (Some(_), _, "") => return Err(WRITE.into()),
                (Some(_), _, name) => last.text = name.to_owned(),
                (None, Some(refusal), _) => return Err(refusal),
                (None, None, _) => {}
            }
        }
        let right = right.map_or_else(|| left.text.clone(), |right| right.text);
        Ok(Self { left: left.text, right, nulls_equal })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_of_columns_may_set_whether_its_nulls_match() {
        let on = |text: &str| Value::from(KeyArgs::json([&text.parse().unwrap()]));
        assert_eq!(
            on("k,x=y:nulls_equal,z:nulls-distinct"),
            json!([{"left": "k", "right": "k"}, {"left": "x", "right": "y", "nulls_equal": true},
                   {"left": "z", "right": "z", "nulls_equal": false}])
        );
        // Names may contain colons.
        assert_eq!(on("a:b=ü:nullable"), json!([{"left": "a:b", "right": "ü:nullable"}]));
        assert!(":nulls_equal".parse::<KeyArgs>().is_err());
        for wrong in [
            "id:nulls",
            "id=b:nulls-",
            "id:nulls_equals",
            "id=b:null_equal",
            "\"id\":Nulls-Distinkt",
            "k,id:NULLS_EQUAL",
        ] {
            let said = wrong.parse::<KeyArgs>().unwrap_err();
            assert!(said.contains("write \":nulls_equal\" or \":nulls_distinct\""), "{wrong}: {said}");
        }
        assert_eq!(on("\"id:nulls_equals\""), json!([{"left": "id:nulls_equals", "right": "id:nulls_equals"}]));
    }

    #[test]
    fn a_key_without_a_name_is_refused() {
        for wrong in ["=b", "a=", "="] {
            assert!(wrong.parse::<KeyArgs>().is_err(), "{wrong}");
        }
    }
}
