//! Lists of names on a command line. Commas separate the names. Double quotes surround names that
//! contain a comma or an equals sign, as in SQL.
//!
//! ```text
//!   a, b          "a" and "b"
//!   "a,b"="c=d"   "a,b" and "c=d", a pair
//!   left."a,b"    "left.a,b"
//!   "say ""x"""   "say "x"", in which the quotes are doubled
//! ```
//!
//! A quote opens a name only where the name begins; elsewhere it is an ordinary character. Quotes
//! hide separators and nothing else, so the server receives the same text for `"left.a"` and
//! `left.a`. The server reads `left.a` as the column of that name if a table has one, and otherwise
//! as column `a` of the left table. `left."left.a"` is the left table's column named `left.a`.

use std::str::FromStr;

use crate::human::quoted;

/// Prefixes that select a column's table.
const SIDES: [&str; 2] = ["left.", "right."];

/// List of names, separated by commas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names(Vec<String>);

impl FromStr for Names {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Err("it has no names; give at least one, or remove the option".into());
        }
        let (mut rest, mut names) = (Words::new(text), Vec::new());
        loop {
            names.push(rest.name(&[','], "a name is missing next to a comma")?.text);
            if !rest.next_is(',')? {
                return Ok(Self(names));
            }
        }
    }
}

impl Names {
    /// Returns the names.
    pub fn list(&self) -> &[String] {
        &self.0
    }

    /// Concatenates the names of several lists.
    pub fn together(lists: &[Self]) -> Vec<String> {
        lists.iter().flat_map(|names| &names.0).cloned().collect()
    }
}

/// Name, with the way it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// Name without quotes.
    pub text: String,
    /// True if the name was quoted. In a quoted name no character is a separator or the start of a
    /// suffix.
    pub is_quoted: bool,
}

/// Unread rest of an argument.
#[derive(Clone, Debug)]
pub struct Words<'a> {
    rest: &'a str,
    /// True if separators between parentheses do not count.
    has_parentheses: bool,
}

impl<'a> Words<'a> {
    /// Starts at the beginning of an argument.
    pub fn new(text: &'a str) -> Self {
        Self { rest: text, has_parentheses: false }
    }

    /// Starts at the beginning of an argument in which separators between parentheses do not count:
    /// `decimal(15,2)`.
    pub fn with_parentheses(text: &'a str) -> Self {
        Self { rest: text, has_parentheses: true }
    }

    /// Reads the next name: the text between quotes, or else all text before one of `ends`, without
    /// spaces around it.
    ///
    /// # Errors
    /// `missing` if there is no name; a message if a quote is not closed.
    pub fn name(&mut self, ends: &[char], missing: &str) -> Result<Name, String> {
        self.rest = self.rest.trim_start();
        let side = SIDES.iter().find(|side| self.rest.strip_prefix(**side).is_some_and(|name| name.starts_with('"')));
        let side = side.copied().unwrap_or_default();
        let Some(quoted) = self.rest[side.len()..].strip_prefix('"') else {
            let name = self.before(ends).trim();
            return match name {
                "" => Err(missing.into()),
                name => Ok(Name { text: name.into(), is_quoted: false }),
            };
        };
        let (mut text, mut rest) = (side.to_owned(), quoted);
        loop {
            let Some((inside, behind)) = rest.split_once('"') else {
                return Err(format!(
                    "the quote before {quoted:?} opens a name and is not closed; close it, and double a quote within \
                     a name"
                ));
            };
            text.push_str(inside);
            match behind.strip_prefix('"') {
                Some(more) => {
                    text.push('"');
                    rest = more;
                }
                None => {
                    self.rest = behind.trim_start();
                    break;
                }
            }
        }
        match text.len() == side.len() {
            true => Err("there is no name between the quotes".into()),
            false => Ok(Name { text, is_quoted: true }),
        }
    }

    /// Reads all text before one of `ends`, or up to the end.
    pub fn before(&mut self, ends: &[char]) -> &'a str {
        // A parenthesis without a partner is an ordinary character.
        let mut closed = 0;
        let end = self.rest.char_indices().find(|&(at, c)| {
            if self.has_parentheses && at >= closed && c == '(' {
                closed = at + closing(&self.rest[at..]).unwrap_or(0);
            }
            at >= closed && ends.contains(&c)
        });
        let (before, rest) = self.rest.split_at(end.map_or(self.rest.len(), |(at, _)| at));
        self.rest = rest;
        before
    }

    /// Passes over `separator` and returns true if it comes next. Returns false at the end of the
    /// argument.
    ///
    /// # Errors
    /// A message with the text, if other text follows the closing quote of a name.
    pub fn next_is(&mut self, separator: char) -> Result<bool, String> {
        match self.rest.strip_prefix(separator) {
            Some(rest) => {
                self.rest = rest;
                Ok(true)
            }
            None if self.rest.is_empty() => Ok(false),
            None => Err(format!("{:?} follows the quote that closes a name; double a quote within a name", self.rest)),
        }
    }

    /// Passes over `separator` if it comes next, and returns true.
    pub fn pass(&mut self, separator: char) -> bool {
        let rest = self.rest.strip_prefix(separator);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }
}

/// Returns the index of the parenthesis that closes the first one of the text.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0;
    text.find(|c: char| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        depth == 0
    })
}

/// Writes `NAME=VALUE` so that a shell passes it as one argument and [`Words`] reads the name and
/// its value.
pub fn assignment(name: &str, value: &str) -> String {
    let word = format!("{}={value}", quoted(name));
    match word.chars().all(|c| c.is_alphanumeric() || "_-.:/=,+@%".contains(c)) {
        true => word,
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::human::listed;

    fn names(text: &str) -> Result<Vec<String>, String> {
        text.parse::<Names>().map(|names| names.0)
    }

    #[test]
    fn names_are_separated_by_commas_and_may_be_quoted() {
        for (text, expected) in [
            ("a", &["a"][..]),
            (" a ,left.b\t", &["a", "left.b"]),
            ("a b,c=d,5\" disk,f(x,y", &["a b", "c=d", "5\" disk", "f(x", "y"]),
            (r#""a,b" , "c=d",e"#, &["a,b", "c=d", "e"]),
            (r#"left."a,b",right."""""#, &["left.a,b", "right.\""]),
            (r#"" a ","say ""x"", y""#, &[" a ", "say \"x\", y"]),
            ("\"left.a\",é", &["left.a", "é"]),
        ] {
            assert_eq!(names(text).unwrap(), expected, "{text}");
        }
        for (text, words) in [
            ("", "it has no names"),
            ("a,", "a name is missing"),
            (",a", "a name is missing"),
            ("a, ,b", "a name is missing"),
            (r#""a"#, "is not closed"),
            (r#"a,"b"""#, "is not closed"),
            (r#""a"b,c"#, "\"b,c\" follows the quote"),
            (r#""""#, "no name between the quotes"),
            (r#"left."""#, "no name between the quotes"),
        ] {
            let error = names(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn a_displayed_list_of_names_parses_back() {
        let names = ["k", "größe", "it's", "a,b", "c d", "e=f", "f(x", "5\" disk"];
        assert_eq!(listed(names.iter()).parse::<Names>().unwrap().list(), &names);
    }

    #[test]
    fn an_advised_assignment_parses_back() {
        for (name, expected) in [
            ("k", "k=string"),
            ("größe", "größe=string"),
            ("a b", "'\"a b\"=string'"),
            ("5\" disk", "'\"5\"\" disk\"=string'"),
            ("a=b", "'\"a=b\"=string'"),
            ("it's", r"'it'\''s=string'"),
            ("\"x\"", "'\"\"\"x\"\"\"=string'"),
        ] {
            let said = assignment(name, "string");
            assert_eq!(said, expected);
            // Undo the shell's quotes.
            let word = said.trim_matches('\'').replace(r"'\''", "'");
            assert_eq!(Words::new(&word).name(&['='], "missing").unwrap().text, name);
        }
        assert_eq!(assignment("k", "decimal(9,2)"), "'k=decimal(9,2)'");
    }
}
