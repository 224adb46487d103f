//! Names in a sentence: quoting, shortening, and suggestions for misspelt ones.

use std::fmt;

/// Formats a name for a list of names. Adds quotes if the name is empty or contains white space or
/// one of `,=()"`, because a reader would not recognize it as one name. The command line reads this
/// form, and the Python client writes it.
pub fn quoted(name: &str) -> String {
    let is_plain = !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || ",=()\"".contains(c));
    if is_plain { name.to_owned() } else { format!("\"{}\"", name.replace('"', "\"\"")) }
}

/// Formats a requested name in quotes. Cuts a name longer than 255 bytes, because megabytes make no
/// readable message.
pub fn asked(name: &str) -> String {
    const BYTES_MAX: usize = 255;
    const SHOWN_CHARS: usize = 40;
    if name.len() <= BYTES_MAX {
        return format!("{name:?}");
    }
    let start: String = name.chars().take(SHOWN_CHARS).collect();
    format!("{:?} ({} bytes)", format!("{start}..."), super::count(name.len() as u64))
}

/// Lists the first of some names, for a sentence.
pub fn listed<T: AsRef<str>>(names: impl ExactSizeIterator<Item = T>) -> String {
    first_of(names.map(|name| quoted(name.as_ref())))
}

/// Lists the first of some things, without quotes. A table may have thousands of columns, and a
/// person reads the message.
pub fn first_of<T: fmt::Display>(things: impl ExactSizeIterator<Item = T>) -> String {
    const LISTED_MAX: usize = 20;
    let more = things.len().saturating_sub(LISTED_MAX);
    let things: Vec<String> = things.take(LISTED_MAX).map(|thing| thing.to_string()).collect();
    match more {
        0 => things.join(", "),
        _ => format!("{} and {more} more", things.join(", ")),
    }
}

/// Returns `; did you mean "orders"?` for the end of a sentence, if exactly one known name is close
/// to the unknown one. Close means equal except for case, or at most two letters away. The
/// differing letters may be at most a third of the name, or one letter of a name of two. Otherwise,
/// or if comparing all known names would take long, returns an empty string. So it does if the name
/// itself is known, because it appeared after it was looked for.
pub fn did_you_mean<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    const DISTANCE_MAX: usize = 2;
    /// Maximum bytes of a compared name. Comparing takes the product of both lengths, and an
    /// unknown name may have any length.
    const LENGTH_MAX: usize = 255;
    /// Maximum letter comparisons. They take a few hundredths of a second.
    const COMPARED_MAX: usize = 16 << 20;
    if name.len() > LENGTH_MAX {
        return String::new();
    }
    let lower = name.to_lowercase();
    let length = lower.chars().count();
    let (mut compared, mut is_known) = (0, false);
    let near = known.into_iter().filter_map(|other| {
        is_known |= other == name;
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
        _ if is_known || compared > COMPARED_MAX => String::new(),
        ([(_, only)], _) | ([], [(_, only)]) => format!("; did you mean {only:?}?"),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_a_list_are_quoted_if_they_would_be_ambiguous() {
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
    fn the_only_similar_name_is_suggested() {
        for (name, known, meant) in [
            ("orders", &["order", "lineitem"][..], "; did you mean \"order\"?"),
            ("odrers", &["orders"], "; did you mean \"orders\"?"),
            ("G", &["a", "g"], "; did you mean \"g\"?"),
            // A name equal except for case wins over one with other letters.
            ("L_Tax", &["l_tax", "l_tag"], "; did you mean \"l_tax\"?"),
            // Either of two names could be meant.
            ("keys", &["key", "keyz"], ""),
            ("q", &["a", "b"], ""),
            ("q", &["a"], ""),
            ("id", &["k"], ""),
            ("orders", &[], ""),
            // The name has appeared since it was looked for.
            ("x", &["x", "X"], ""),
            ("orders", &["order", "orders"], ""),
            ("größe", &["grösse", "GRÖSSE2"], ""),
            ("größe", &["grösse"], ""),
            ("gröse", &["größe"], "; did you mean \"größe\"?"),
        ] {
            assert_eq!(did_you_mean(name, known.iter().copied()), meant, "{name}");
        }
        // A suggestion that would take seconds to find is not looked for.
        let others: Vec<String> = (0..20_000).map(|number| format!("{number:x>100}")).collect();
        let (name, near) = ("a".repeat(101), "a".repeat(100));
        let among = |others: &[String]| {
            did_you_mean(&name, others.iter().map(String::as_str).chain([near.as_str()])).is_empty()
        };
        assert_eq!((among(&others[..100]), among(&others)), (false, true));
        // A name of megabytes gets no suggestion.
        let long = "a".repeat(256);
        assert_eq!(did_you_mean(&long, [long.as_str()]), "");
    }
}
