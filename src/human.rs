//! Numbers as people read them, in one form wherever one is shown. Bytes are in [`memory`](crate::memory::human_bytes).

/// A whole number with thousands apart: `6,001,215`.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev();
    groups.map(|group| std::str::from_utf8(group).unwrap_or_default()).collect::<Vec<_>>().join(",")
}

/// A number of things: `1 partition`, `4,096 partitions`.
pub fn counted(number: u64, thing: &str) -> String {
    counted_as(number, thing, &format!("{thing}s"))
}

/// As [`counted`], of things whose plural is not made with an s at the end: `1 job that runs`, `2 jobs that run`.
pub fn counted_as(number: u64, one: &str, many: &str) -> String {
    format!("{} {}", count(number), if number == 1 { one } else { many })
}

/// `; did you mean "orders"?` where exactly one of the known names is close to one that is not known: equal but for case, or two
/// letters away at most, and no more than a third of them (or one of two). It goes to the end of a sentence, and is empty otherwise.
pub fn did_you_mean<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let lower = name.to_lowercase();
    let distance = |other: &str| strsim::osa_distance(&lower, &other.to_lowercase());
    let length = name.chars().count();
    let near = known.into_iter().map(|other| (distance(other), other));
    let is_near =
        |distance: usize| distance == 0 || (distance <= 2 && distance < length && 3 * distance <= length.max(3));
    let near: Vec<_> = near.filter(|&(distance, _)| is_near(distance)).collect();
    // Another spelling of the same name is closer than anything else.
    let same: Vec<_> = near.iter().filter(|(distance, _)| *distance == 0).collect();
    match (same.as_slice(), near.as_slice()) {
        ([(_, only)], _) | ([], [(_, only)]) => format!("; did you mean {only:?}?"),
        _ => String::new(),
    }
}

/// Why the system refuses a file, in plain words and without its numbers.
pub fn file_failure(path: &std::path::Path, error: &std::io::Error) -> String {
    use std::io::ErrorKind as K;
    let above = || path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty());
    match error.kind() {
        K::NotFound => match above().filter(|above| !above.exists()).last() {
            Some(missing) => format!("there is no such folder as {}", missing.display()),
            None => "there is no such file".into(),
        },
        K::NotADirectory => match above().find(|above| above.is_file()) {
            Some(file) => format!("{} is a file, and no folder", file.display()),
            None => "what should be a folder is none".into(),
        },
        K::IsADirectory => "it is a folder, and a file is needed".into(),
        K::PermissionDenied => "whoever runs this may not do that to it".into(),
        K::StorageFull => "the disk is full".into(),
        K::ReadOnlyFilesystem => "it is on a file system that is read only".into(),
        K::InvalidData => "it is not UTF-8 text".into(),
        _ => system_words(error),
    }
}

/// What the system says, without the number by which it knows it.
pub fn system_words(error: impl std::fmt::Display) -> String {
    let said = error.to_string();
    said.split_once(" (os error ").map_or(said.as_str(), |(words, _)| words).to_owned()
}

/// A span of time in the unit a person would choose: `850 µs`, `12.3 ms`, `4.56 s`, `3 min 20 s`.
pub fn seconds(seconds: f64) -> String {
    match seconds {
        s if s <= 0.0 => "0 s".into(),
        s if s < 0.999_5e-3 => format!("{:.0} µs", (s * 1e6).max(1.0)),
        s if s < 0.999_5 => format!("{:.1} ms", s * 1e3),
        s if s < 99.5 => format!("{s:.2} s"),
        s if s.is_finite() => whole_seconds(s as u64),
        _ => "forever".into(),
    }
}

/// A span of time that is not known better than to the second: `7 s`, `3 min 20 s`, `2 h 5 min`.
pub fn whole_seconds(seconds: u64) -> String {
    match seconds {
        s if s < 60 => format!("{s} s"),
        s if s < 3600 => format!("{} min {} s", s / 60, s % 60),
        s => format!("{} h {} min", count(s / 3600), s % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_their_thousands_apart() {
        let counts = [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (6_001_215, "6,001,215"),
            (u64::MAX, "18,446,744,073,709,551,615"),
        ];
        for (number, text) in counts {
            assert_eq!(count(number), text);
        }
        assert_eq!(counted(1, "row"), "1 row");
        assert_eq!(counted(0, "row"), "0 rows");
        assert_eq!(counted(1200, "row"), "1,200 rows");
        assert_eq!(counted_as(1, "job that runs", "jobs that run"), "1 job that runs");
        assert_eq!(counted_as(2, "job that runs", "jobs that run"), "2 jobs that run");
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
        ] {
            assert_eq!(did_you_mean(name, known.iter().copied()), meant, "{name}");
        }
    }

    #[test]
    fn what_the_system_has_against_a_file_is_said_without_its_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("file"), [0xff, 0xfe]).unwrap();
        let read = |name: &str| file_failure(&at(name), &std::fs::read_to_string(at(name)).unwrap_err());
        assert_eq!(read("none"), "there is no such file");
        assert_eq!(read("no/such/file"), format!("there is no such folder as {}", at("no").display()));
        assert_eq!(read("file/x"), format!("{} is a file, and no folder", at("file").display()));
        assert_eq!(read(""), "it is a folder, and a file is needed");
        assert_eq!(read("file"), "it is not UTF-8 text");
        assert_eq!(system_words(std::io::Error::from_raw_os_error(4)), "Interrupted system call");
    }

    #[test]
    fn spans_are_in_the_unit_a_person_would_choose() {
        let spans = [
            (0.0, "0 s"),
            (1e-9, "1 µs"),
            (850e-6, "850 µs"),
            (0.0123, "12.3 ms"),
            (4.56, "4.56 s"),
            (99.6, "1 min 39 s"),
            (200.0, "3 min 20 s"),
            (7500.0, "2 h 5 min"),
            (f64::INFINITY, "forever"),
        ];
        for (number, text) in spans {
            assert_eq!(seconds(number), text);
        }
        assert_eq!(whole_seconds(7), "7 s");
    }
}
