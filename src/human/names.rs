//! Names in a sentence: told apart from each other and from the words around them, and what a misspelt one was meant to be.

use std::fmt;

/// A name as it is written among others: with quotes around it where it would be taken for several, for none, or for more than a
/// name. The command line reads it so, and the Python client writes it so.
pub fn quoted(name: &str) -> String {
    let is_plain = !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || ",=()\"".contains(c));
    if is_plain { name.to_owned() } else { format!("\"{}\"", name.replace('"', "\"\"")) }
}

/// A name that somebody asked for, between quotes: cut where it is longer than names are, since nobody reads a message of megabytes.
pub fn asked(name: &str) -> String {
    const BYTES_MAX: usize = 255;
    const SHOWN_CHARS: usize = 40;
    if name.len() <= BYTES_MAX {
        return format!("{name:?}");
    }
    let start: String = name.chars().take(SHOWN_CHARS).collect();
    format!("{:?} ({} bytes)", format!("{start}..."), super::count(name.len() as u64))
}

/// The first of some names, for a sentence.
pub fn listed<T: AsRef<str>>(names: impl ExactSizeIterator<Item = T>) -> String {
    first_of(names.map(|name| quoted(name.as_ref())))
}

/// The first of some things, as they are: a table may have thousands of columns, and a message is read by a person.
pub fn first_of<T: fmt::Display>(things: impl ExactSizeIterator<Item = T>) -> String {
    const LISTED_MAX: usize = 20;
    let more = things.len().saturating_sub(LISTED_MAX);
    let things: Vec<String> = things.take(LISTED_MAX).map(|thing| thing.to_string()).collect();
    match more {
        0 => things.join(", "),
        _ => format!("{} and {more} more", things.join(", ")),
    }
}

/// `; did you mean "orders"?` where exactly one of the known names is close to one that is not known: equal but for case, or two
/// letters away at most, and no more than a third of them (or one of two). It goes to the end of a sentence, and is empty otherwise.
/// It is also empty if comparing the name with all known names would take long.
pub fn did_you_mean<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    const DISTANCE_MAX: usize = 2;
    /// Comparing takes the product of both lengths, and a name that is not there may be of any.
    const LENGTH_MAX: usize = 255;
    /// Letters that are compared with letters: some hundredths of a second.
    const COMPARED_MAX: usize = 16 << 20;
    if name.len() > LENGTH_MAX {
        return String::new();
    }
    let lower = name.to_lowercase();
    let length = lower.chars().count();
    let mut compared = 0;
    let near = known.into_iter().filter_map(|other| {
        let other_lower = other.to_lowercase();
        let other_length = other_lower.chars().count();
        let may_be = other_length.abs_diff(length) <= DISTANCE_MAX;
        compared += if may_be { length * other_length } else { 0 };
        (may_be && compared <= COMPARED_MAX).then(|| (strsim::osa_distance(&lower, &other_lower), other))
    });
    let is_near = |distance: usize| {
        distance == 0 || (distance <= DISTANCE_MAX && distance < length && 3 * distance <= length.max(3))
    };
    let near: Vec<_> = near.filter(|&(distance, _)| is_near(distance)).collect();
    // Another spelling of the same name is closer than anything else.
    let same: Vec<_> = near.iter().filter(|(distance, _)| *distance == 0).collect();
    match (same.as_slice(), near.as_slice()) {
        _ if compared > COMPARED_MAX => String::new(),
        ([(_, only)], _) | ([], [(_, only)]) => format!("; did you mean {only:?}?"),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_a_list_are_told_apart() {
        let names = ["k", "größe", "it's", "a,b", "c d", "e=f", "f(x", "5\" disk", ""];
        let expected = r#"k, größe, it's, "a,b", "c d", "e=f", "f(x", "5"" disk", """#;
        assert_eq!(listed(names.iter()), expected);
        assert_eq!(first_of(["a b: int32", "c: date"].iter()), "a b: int32, c: date");
    }

    #[test]
    fn long_names_are_cut() {
        assert_eq!(asked("a \"b\""), r#""a \"b\"""#);
        let longest = "x".repeat(255);
        assert_eq!(asked(&longest), format!("{longest:?}"));
        assert_eq!(asked(&"ü".repeat(2000)), format!("\"{}...\" (4,000 bytes)", "ü".repeat(40)));
    }

    #[test]
    fn long_lists_are_cut() {
        let many = first_of(0..1000);
        assert!(many.starts_with("0, 1, ") && many.ends_with("18, 19 and 980 more"), "{many}");
        let names: Vec<String> = (0..21).map(|number| format!("c {number}")).collect();
        assert!(listed(names.iter()).ends_with("\"c 19\" and 1 more"));
    }

    #[test]
    fn one_name_that_is_close_is_meant() {
        for (name, known, meant) in [
            ("orders", &["order", "lineitem"][..], "; did you mean \"order\"?"),
            ("odrers", &["orders"], "; did you mean \"orders\"?"),
            ("G", &["a", "g"], "; did you mean \"g\"?"),
            // The same but for case counts before what has other letters.
            ("L_Tax", &["l_tax", "l_tag"], "; did you mean \"l_tax\"?"),
            // Which of two is meant, nobody knows.
            ("keys", &["key", "keyz"], ""),
            ("q", &["a", "b"], ""),
            ("q", &["a"], ""),
            ("id", &["k"], ""),
            ("orders", &[], ""),
            ("größe", &["grösse", "GRÖSSE2"], ""),
            ("größe", &["grösse"], ""),
            ("gröse", &["größe"], "; did you mean \"größe\"?"),
        ] {
            assert_eq!(did_you_mean(name, known.iter().copied()), meant, "{name}");
        }
        // What would take seconds to find is not looked for.
        let others: Vec<String> = (0..20_000).map(|number| format!("{number:x>100}")).collect();
        let (name, near) = ("a".repeat(101), "a".repeat(100));
        let among = |others: &[String]| {
            did_you_mean(&name, others.iter().map(String::as_str).chain([near.as_str()])).is_empty()
        };
        assert_eq!((among(&others[..100]), among(&others)), (false, true));
        // Whoever sends names of megabytes is not helped.
        let long = "a".repeat(256);
        assert_eq!(did_you_mean(&long, [long.as_str()]), "");
    }
}
