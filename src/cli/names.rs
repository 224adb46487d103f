//! Names in a list, as a command line writes them: with commas between them, and double quotes around those that have a comma or
//! an equals sign of their own, as SQL has them.
//!
//! ```text
//!   a, b          "a" and "b"
//!   "a,b"="c=d"   "a,b" and "c=d", a pair
//!   left."a,b"    "left.a,b"
//!   "say ""x"""   "say "x"", in which the quotes are doubled
//! ```
//!
//! A quote opens a name where the name begins; elsewhere it is a character like others. Quotes take the meaning from what divides
//! names, and from nothing else: the server is sent `"left.a"` and `left.a` alike, and takes either for the column of that name if
//! a table has one, and else for the left table's `a`. `left."left.a"` says that a column named `left.a` is the left table's.

use std::str::FromStr;

use crate::human::quoted;

/// What stands before the name of a column to say of which table it is.
const SIDES: [&str; 2] = ["left.", "right."];

/// A list of names with commas between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names(Vec<String>);

impl FromStr for Names {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Err("it has no names; give some, or leave the option out".into());
        }
        let (mut rest, mut names) = (Words::new(text), Vec::new());
        loop {
            names.push(rest.name(&[','], "a name is missing beside a comma")?.text);
            if !rest.next_is(',')? {
                return Ok(Self(names));
            }
        }
    }
}

impl Names {
    /// The names of this list.
    pub fn list(&self) -> &[String] {
        &self.0
    }

    /// The names of several lists, which are one.
    pub fn together(lists: &[Self]) -> Vec<String> {
        lists.iter().flat_map(|names| &names.0).cloned().collect()
    }
}

/// A name, and how it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// The name itself.
    pub text: String,
    /// Whether it stood between quotes, where no character ends it or says something of it.
    pub is_quoted: bool,
}

/// What is left of an argument that is read from its start to its end.
#[derive(Clone, Debug)]
pub struct Words<'a> {
    rest: &'a str,
    /// Whether nothing ends between a parenthesis and the one that closes it.
    has_parentheses: bool,
}

impl<'a> Words<'a> {
    /// All of an argument.
    pub fn new(text: &'a str) -> Self {
        Self { rest: text, has_parentheses: false }
    }

    /// As [`Words::new`], of an argument in which what stands between parentheses belongs together: `decimal(15,2)`.
    pub fn with_parentheses(text: &'a str) -> Self {
        Self { rest: text, has_parentheses: true }
    }

    /// The name that comes next: what is between quotes, or else all before one of `ends`, without the spaces around it.
    ///
    /// # Errors
    /// `missing` when there is none; and a quote that is not closed.
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
                    "the quote before {quoted:?} opens a name and is not closed; a quote within a name is doubled"
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

    /// All before one of `ends`, or up to the end.
    pub fn before(&mut self, ends: &[char]) -> &'a str {
        // A parenthesis without its other one is a character like others.
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

    /// Whether this character comes next, which is then passed over, or nothing does.
    ///
    /// # Errors
    /// What stands there, behind the quote that closes a name.
    pub fn next_is(&mut self, separator: char) -> Result<bool, String> {
        match self.rest.strip_prefix(separator) {
            Some(rest) => {
                self.rest = rest;
                Ok(true)
            }
            None if self.rest.is_empty() => Ok(false),
            None => Err(format!(
                "{:?} stands behind the quote that closes a name; a quote within a name is doubled",
                self.rest
            )),
        }
    }

    /// Passes over a character if it comes next.
    pub fn pass(&mut self, separator: char) -> bool {
        let rest = self.rest.strip_prefix(separator);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }
}

/// Where the parenthesis is closed that this text begins with.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0;
    text.find(|c: char| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        depth == 0
    })
}

/// `NAME=VALUE` as a shell takes it for an argument, and [`Words`] for a name and what belongs to it.
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
    fn names_stand_between_commas_or_quotes() {
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
            (r#""a"b,c"#, "\"b,c\" stands behind the quote"),
            (r#""""#, "no name between the quotes"),
            (r#"left."""#, "no name between the quotes"),
        ] {
            let error = names(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn a_list_of_names_is_read_as_it_is_told() {
        let names = ["k", "größe", "it's", "a,b", "c d", "e=f", "f(x", "5\" disk"];
        assert_eq!(listed(names.iter()).parse::<Names>().unwrap().list(), &names);
    }

    #[test]
    fn what_is_advised_is_read_again() {
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
            // What the shell makes of it.
            let word = said.trim_matches('\'').replace(r"'\''", "'");
            assert_eq!(Words::new(&word).name(&['='], "missing").unwrap().text, name);
        }
        assert_eq!(assignment("k", "decimal(9,2)"), "'k=decimal(9,2)'");
    }
}
