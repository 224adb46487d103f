//! `dovetail doctor`: checks the host and the limits of this process, and says what to change.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;

use super::output::{self, Style, styled};
use super::settings;
use crate::doctor::{Facts, Finding, Verdict, verdict};
use crate::human::{counted, counted_as};
use crate::memory::{Arena, Budget};
use crate::{Result, engine};

/// Arguments of `dovetail doctor`.
#[derive(Debug, clap::Args)]
#[command(
    long_about = "Check this host for a server: driver, GPUs, links, memory, CPUs, limits of the container. Prints what \
                  was found, what it means, and what to change.\n\nThe exit status is 0 if nothing is to be changed, 3 \
                  if something deserves attention, and 4 if something that the host has cannot be used"
)]
pub struct DoctorArgs {
    /// File with the measured rates of devices and links, as for serve
    #[arg(long, env = "DOVETAIL_RATES_FILE", default_value = "auto", value_name = "FILE")]
    rates_file: String,

    /// Measure the devices and the links between them now, as the first start of a server does, and
    /// save the rates
    #[arg(long)]
    measure: bool,

    /// Folder that stands for / of the system's files
    #[arg(long, hide = true, default_value = "/")]
    root: PathBuf,
}

/// Checks the host, prints the findings, and returns the exit status of the verdict.
///
/// # Errors
/// [`Error::Exhausted`](crate::Error::Exhausted) if standard output takes no more. Errors of opening
/// the devices, with `--measure`.
pub fn run(args: &DoctorArgs) -> Result<ExitCode> {
    if args.measure {
        measure(args)?;
    }
    let rates_file = engine::rates_file(&args.rates_file);
    let findings = Facts::gather(&args.root, rates_file.as_deref(), engine::check_own_tmpfs(), true).findings();
    let verdict = verdict(&findings);
    if output::is_json() {
        for finding in &findings {
            output::write_line(json!(finding).to_string())?;
        }
        output::write_line(json!({ "verdict": verdict }).to_string())?;
    } else {
        output::write_line(table(&findings))?;
        output::write_line(conclusion(&findings))?;
    }
    Ok(ExitCode::from(status(verdict)))
}

/// Measures the devices that a server uses by default, and saves their rates.
fn measure(args: &DoctorArgs) -> Result<()> {
    let defaults = settings::defaults()?;
    let mut settings = defaults.of_devices();
    (settings.rates_file, settings.recalibrate) = (args.rates_file.clone(), true);
    let topology = engine::topology(&settings)?;
    // As much as a server has, because a slice of the CPU has a share of it, and its rates depend
    // on that.
    let bytes = engine::host_memory_bytes(&defaults.host_memory)?;
    let budget = Budget::new("host memory", "60% of the memory of this process", bytes);
    let arena = Arena::with_backing(budget, engine::arena_backing(&settings, &topology, bytes)?);
    let mut devices = engine::open_devices(&settings, &topology, &arena)?;
    engine::set_rates(&settings, &topology, &mut devices, &|_| {});
    Ok(())
}

/// Returns the exit status of a verdict. 1 and 2 are those of a command that failed.
fn status(verdict: Verdict) -> u8 {
    match verdict {
        Verdict::Good => 0,
        Verdict::Attention => 3,
        Verdict::Fault => 4,
    }
}

/// Lays out the findings: a line with what was found and what it means, and under it what to
/// change.
fn table(findings: &[Finding]) -> String {
    let width = |text: fn(&Finding) -> &str| findings.iter().map(|finding| text(finding).chars().count()).max();
    let (checks, found) = (width(|finding| finding.check), width(|finding| &finding.found));
    let (checks, found) = (checks.unwrap_or(0), found.unwrap_or(0).min(FOUND_WIDTH_MAX));
    let mut lines = Vec::new();
    for finding in findings {
        let mark = mark(finding.verdict);
        lines.push(format!("{mark}  {:checks$}  {:found$}  {}", finding.check, finding.found, finding.means));
        if !finding.change.is_empty() {
            lines.push(format!("{:MARK_WIDTH$}  {:checks$}  → {}", "", "", finding.change));
        }
    }
    lines.join("\n")
}

/// Width up to which the second column is aligned.
const FOUND_WIDTH_MAX: usize = 48;

const MARK_WIDTH: usize = 9;

fn mark(verdict: Verdict) -> String {
    let (word, style) = match verdict {
        Verdict::Good => ("good", Style::Good),
        Verdict::Attention => ("attention", Style::Heading),
        Verdict::Fault => ("fault", Style::Error),
    };
    styled(&format!("{word:MARK_WIDTH$}"), style)
}

fn conclusion(findings: &[Finding]) -> String {
    let of = |verdict: Verdict| findings.iter().filter(|finding| finding.verdict == verdict).count() as u64;
    match (of(Verdict::Fault), of(Verdict::Attention)) {
        (0, 0) => "nothing to change".into(),
        (0, attention) => {
            format!("{} attention", counted_as(attention, "line deserves", "lines deserve"))
        }
        (fault, 0) => counted(fault, "fault"),
        (fault, attention) => format!("{}, and {attention} to look at", counted(fault, "fault")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_stand_under_what_was_found() {
        let finding = |check, verdict, change: &str| Finding {
            check,
            verdict,
            found: "1 GiB".into(),
            means: "little".into(),
            change: change.into(),
        };
        let findings = [finding("memory", Verdict::Attention, "give more"), finding("cpus", Verdict::Good, "")];
        let text = table(&findings);
        assert_eq!(
            text,
            "attention  memory  1 GiB  little\n                   → give more\ngood       cpus    1 GiB  little"
        );
        assert_eq!(conclusion(&findings), "1 line deserves attention");
        assert_eq!([Verdict::Good, Verdict::Attention, Verdict::Fault].map(status), [0, 3, 4]);
    }
}
