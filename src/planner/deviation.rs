//! Explains in words why the measured time of a join is far from the predicted time.

use crate::human;
use crate::join::{ChainReport, PhaseRecord, RankReport};
use crate::memory::human_bytes;

/// Measurements of a job that runs or has run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    pub phases: Vec<PhaseRecord>,
    /// Empty for a join on one device.
    pub ranks: Vec<RankReport>,
    /// Rows that passed through the joins of a chain. Empty for any other join.
    pub chain: ChainReport,
    /// True if rows arrive while the join runs. Its time is then up to its caller.
    pub rows_arrive: bool,
    pub seconds: f64,
    pub rows: u64,
    /// False for a job that still runs, or that stopped before its end.
    pub is_complete: bool,
    /// Host memory that the server took from the system while the job ran, for any purpose.
    pub new_memory_bytes: u64,
}

/// Predicted and measured time of a phase.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PhaseTimes {
    pub name: &'static str,
    pub predicted_seconds: f64,
    pub measured_seconds: f64,
    /// Bytes that were not copied to the device.
    pub saved_bytes: u64,
}

/// Ratio of a measured and a predicted time that needs an explanation.
const RATIO_MIN: f64 = 2.0;

/// Difference that needs an explanation, in seconds. The fixed costs of a short join are as large.
const DIFFERENCE_MIN: f64 = 1e-3;

/// Maximum number of phases that are named.
const NAMED_MAX: usize = 3;

/// Share of the difference from which a phase is named.
const NAMED_SHARE: f64 = 0.1;

/// Name of the work that belongs to no phase: waiting for memory, starting, and passing rows on.
const OTHER: &str = "other work";

/// Returns the explanation; `None` if the two times are close, or if the join has not come far
/// enough to compare them.
pub(super) fn deviation(predicted_seconds: f64, phases: &[PhaseTimes], measured: &Measured) -> Option<String> {
    let difference = measured.seconds - predicted_seconds;
    let (shorter, longer) = (measured.seconds.min(predicted_seconds), measured.seconds.max(predicted_seconds));
    let is_slow = difference > 0.0;
    if measured.rows_arrive {
        return None;
    }
    if longer < RATIO_MIN * shorter || difference.abs() < DIFFERENCE_MIN || !(is_slow || measured.is_complete) {
        return None;
    }
    let (took, so_far) = if measured.is_complete { ("took", "") } else { ("has taken", " so far") };
    let (seconds, predicted) = (human::seconds(measured.seconds), human::seconds(predicted_seconds));
    let mut text = match is_slow {
        true if shorter > 0.0 => format!(
            "The join {took} {} times as long as predicted{so_far}: {seconds} instead of {predicted}.",
            ratio(longer / shorter)
        ),
        _ => format!("The join {took} {seconds}{so_far} instead of the predicted {predicted}."),
    };
    text += " Predictions assume the rates that the device had on an idle machine, and memory that was in use before.";
    let named = named(predicted_seconds, phases, measured);
    if !named.is_empty() {
        text += &format!(" {} than predicted: {}.", if is_slow { "Longer" } else { "Shorter" }, named.join(", "));
    }
    if is_slow && measured.new_memory_bytes > 0 {
        let bytes = human_bytes(measured.new_memory_bytes);
        text += &format!(" During the join, the server took {bytes} of new memory from the system.");
    }
    if is_slow && cfg!(debug_assertions) {
        text += " The server is a debug build.";
    }
    Some(text)
}

/// Writes a ratio with two digits.
fn ratio(ratio: f64) -> String {
    if ratio < 9.95 { format!("{ratio:.1}") } else { human::count(ratio.round().min(1e15) as u64) }
}

/// Names the phases that have most of the difference, the largest first.
fn named(predicted_seconds: f64, phases: &[PhaseTimes], measured: &Measured) -> Vec<String> {
    let difference = measured.seconds - predicted_seconds;
    let of_phases = |seconds: fn(&PhaseTimes) -> f64| phases.iter().map(seconds).sum::<f64>();
    let other = PhaseTimes {
        name: OTHER,
        predicted_seconds: predicted_seconds - of_phases(|phase| phase.predicted_seconds),
        measured_seconds: measured.seconds - of_phases(|phase| phase.measured_seconds),
        saved_bytes: 0,
    };
    // Positive in the direction of the whole difference.
    let share = |phase: &PhaseTimes| (phase.measured_seconds - phase.predicted_seconds) / difference;
    let mut named: Vec<_> = phases.iter().chain([&other]).filter(|phase| share(phase) >= NAMED_SHARE).collect();
    named.sort_by(|one, other| share(other).total_cmp(&share(one)));
    let in_words = |phase: &PhaseTimes| {
        let saved = match phase.saved_bytes {
            bytes if bytes > 0 && difference < 0.0 => format!(" ({} not copied)", human_bytes(bytes)),
            _ => String::new(),
        };
        let by = human::seconds((phase.measured_seconds - phase.predicted_seconds).abs());
        format!("{} by {by}{saved}", phase.name)
    };
    named.into_iter().take(NAMED_MAX).map(in_words).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MATCH: PhaseTimes =
        PhaseTimes { name: "match", predicted_seconds: 0.010, measured_seconds: 0.012, saved_bytes: 0 };
    const GATHER: PhaseTimes =
        PhaseTimes { name: "gather", predicted_seconds: 0.005, measured_seconds: 0.130, saved_bytes: 0 };

    fn measured(seconds: f64) -> Measured {
        Measured { seconds, is_complete: true, ..Measured::default() }
    }

    #[test]
    fn a_join_that_takes_much_longer_than_predicted_is_explained() {
        let slow = Measured { new_memory_bytes: 3 << 29, ..measured(0.195) };
        let text = deviation(0.015, &[MATCH, GATHER], &slow).unwrap();
        assert!(
            text.starts_with("The join took 13 times as long as predicted: 195.0 ms instead of 15.0 ms."),
            "{text}"
        );
        // The phases explain 127 of 180 ms.
        assert!(text.contains(" Longer than predicted: gather by 125.0 ms, other work by 53.0 ms."), "{text}");
        assert!(text.contains(" took 1.5 GiB of new memory from the system."), "{text}");
        assert_eq!(text.ends_with("debug build."), cfg!(debug_assertions), "{text}");
        assert_eq!(deviation(0.015, &[MATCH, GATHER], &Measured { rows_arrive: true, ..slow }), None);
        let short = deviation(0.015, &[MATCH, GATHER], &measured(0.05)).unwrap();
        assert!(short.contains("3.3 times") && !short.contains("new memory"), "{short}");
    }

    #[test]
    fn a_join_near_its_prediction_is_not() {
        for (predicted, seconds) in [(0.015, 0.029), (0.029, 0.015), (0.0001, 0.001), (0.0, 0.0), (10.0, 10.0)] {
            assert_eq!(deviation(predicted, &[MATCH], &measured(seconds)), None, "{predicted} s, {seconds} s");
        }
    }

    #[test]
    fn a_join_that_takes_much_less_is_explained_at_its_end() {
        let copy = PhaseTimes { name: "copy in", predicted_seconds: 0.9, measured_seconds: 0.1, saved_bytes: 1 << 30 };
        let text = deviation(1.0, &[copy], &measured(0.2)).unwrap();
        assert!(text.starts_with("The join took 200.0 ms instead of the predicted 1.00 s."), "{text}");
        assert!(text.ends_with(" Shorter than predicted: copy in by 800.0 ms (1.0 GiB not copied)."), "{text}");
        assert_eq!(deviation(1.0, &[copy], &Measured { is_complete: false, ..measured(0.2) }), None);
    }

    #[test]
    fn a_running_join_is_explained_once_it_is_late() {
        let running = |seconds: f64| Measured { is_complete: false, ..measured(seconds) };
        assert_eq!(deviation(1.0, &[], &running(1.9)), None);
        let text = deviation(1.0, &[], &running(30.0)).unwrap();
        assert!(text.starts_with("The join has taken 30 times as long as predicted so far: 30.00 s"), "{text}");
        assert!(text.contains("other work by 29.00 s"), "{text}");
    }

    #[test]
    fn a_prediction_of_nothing_has_no_ratio_but_an_explanation() {
        let text = deviation(0.0, &[], &measured(0.5)).unwrap();
        assert!(text.starts_with("The join took 500.0 ms instead of the predicted 0 s."), "{text}");
    }
}
