//! Text for people, in one form wherever it is shown. Numbers are here; types, names and file
//! errors are in the modules below. Bytes are in [`memory`](crate::memory::human_bytes).

mod files;
mod names;
mod types;

pub use self::files::{file_failure, readable_by_others, system_words};
pub use self::names::{asked, did_you_mean, first_of, listed, quoted};
pub use self::types::type_name;

/// Formats a whole number with separated thousands: `6,001,215`.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev();
    groups.map(|group| std::str::from_utf8(group).unwrap_or_default()).collect::<Vec<_>>().join(",")
}

/// Formats a number of things: `1 partition`, `4,096 partitions`.
pub fn counted(number: u64, thing: &str) -> String {
    counted_as(number, thing, &format!("{thing}s"))
}

/// Formats as [`counted`] does, with the given plural: `1 job that runs`, `2 jobs that run`.
pub fn counted_as(number: u64, one: &str, many: &str) -> String {
    format!("{} {}", count(number), if number == 1 { one } else { many })
}

/// Formats a duration in the unit that fits: `850 µs`, `12.3 ms`, `4.56 s`, `3 min 20 s`.
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

/// Formats a duration known only to the second: `7 s`, `3 min 20 s`, `2 h 5 min`.
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
    fn counts_are_written_with_thousands_separators() {
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
    fn time_spans_are_written_in_a_readable_unit() {
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
