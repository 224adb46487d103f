//! Host memory: budgets, reservations, and the arena that stores tables and results.
//!
//! ```text
//!   Budget ("host memory", --host-memory)  Arena
//!     ├─ Reservation  promised, unused       └─ slabs, free list ─► ArenaBuffer ─► arrow Buffer
//!     └─ ReservedPool  a job's bytes ◄── drawn by, and given back by, the pieces of its arena
//! ```
//!
//! A budget is a named number of bytes. A reservation is a share of it that is given back when
//! dropped. Code that takes memory reserves it first. A request for too much memory is therefore an
//! [`Error::Exhausted`](crate::Error::Exhausted) before any work is done, and never an abort during
//! the work. A job reserves all that it is predicted to take before it runs, and draws pieces from
//! that reservation. The arena hands out aligned pieces of large slabs. A device driver can
//! register a slab once, and the system can back it with huge pages. If the slab has a file,
//! another Dovetail process can map it.
//!
//! This room knows nothing of tables, devices or the wire.

#[allow(unsafe_code)]
mod arena;
mod bounds;
mod budget;
mod free_list;
mod interrupt;
mod limits;
mod pool;
mod schema_bytes;

pub(crate) use arena::of_whole_values;
pub use arena::{
    ALIGNMENT, Arena, ArenaBuffer, ArenaReservation, ArrayParts, BackgroundGrowth, Backing, Borrower, Lender, Loans,
    Pin, Place, SharedCounters, SharedWindow, SlabViews, Span, check_choice_of_node, describe, holding,
    mount_tmpfs_in_namespace, restore,
};
pub use bounds::{Bounds, CountedBytes, Held};
pub use budget::{Budget, Holders, Reclaim, Reservation};
pub use interrupt::Interrupt;
pub use limits::{
    ControlGroup, control_groups, machine_memory_bytes, memory_free, memory_limit, parse_memory_setting,
    process_memory_limit,
};
pub use pool::ReservedPool;
pub use schema_bytes::schema_bytes;

/// Formats bytes with the unit that a person would choose: `512 B`, `64.0 MiB`, `1.5 GiB`.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// Reads a size with its unit: `64MiB`, `1.5 GiB`, `2G`, `4096`. Units are binary; a bare number is
/// bytes.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) names the accepted forms.
pub fn parse_bytes(text: &str) -> crate::Result<u64> {
    let trimmed = text.trim();
    let digits_end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits_end);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(not_a_size(text)),
    };
    let value: f64 = number.parse().map_err(|_| not_a_size(text))?;
    let bytes = value * (1u64 << shift) as f64;
    if !bytes.is_finite() || bytes >= u64::MAX as f64 {
        return Err(not_a_size(text));
    }
    Ok(bytes as u64)
}

/// Refuses a size that is too small to be useful, such as a size whose unit was forgotten.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) names the size, and suggests the same number with a
/// unit.
pub fn check_at_least(text: &str, bytes: u64, least: u64) -> crate::Result<()> {
    if bytes >= least {
        return Ok(());
    }
    let number = text.trim();
    let hint = match number.parse::<f64>() {
        Ok(value) if value > 0.0 => format!("; a number without a unit is bytes: did you mean {number}GiB?"),
        _ => String::new(),
    };
    let (given, least) = (human_bytes(bytes), human_bytes(least));
    Err(crate::Error::Invalid(format!("{number:?} is {given}, and must not be less than {least}{hint}")))
}

fn not_a_size(text: &str) -> crate::Error {
    crate::Error::Invalid(format!("{text:?} is not a size; write a number with B, KiB, MiB, GiB or TiB, such as 64MiB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_from_common_notations() {
        assert_eq!(parse_bytes("64MiB").unwrap(), 64 << 20);
        assert_eq!(parse_bytes(" 1.5 GiB ").unwrap(), 3 << 29);
        assert_eq!(parse_bytes("4096").unwrap(), 4096);
        assert_eq!(parse_bytes("2g").unwrap(), 2 << 30);
        for wrong in ["", "MiB", "12 parsecs", "1.2.3", "-4", "1e999"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong:?} was accepted as a size");
        }
    }

    #[test]
    fn a_size_that_is_too_small_is_refused_with_a_hint_at_a_missing_unit() {
        assert_eq!(check_at_least("64KiB", 64 << 10, 64 << 10), Ok(()));
        let bare = check_at_least(" 4 ", 4, 1 << 20).unwrap_err();
        for words in ["\"4\" is 4 B", "less than 1.0 MiB", "without a unit is bytes", "4GiB"] {
            assert!(bare.message().contains(words), "{bare}");
        }
        let with_unit = check_at_least("4KiB", 4 << 10, 1 << 20).unwrap_err();
        assert!(with_unit.message().contains("4.0 KiB") && !with_unit.message().contains("GiB"), "{with_unit}");
    }

    #[test]
    fn sizes_are_written_in_a_readable_unit() {
        assert_eq!(human_bytes(0), "0 B");
        assert_eq!(human_bytes(1023), "1023 B");
        assert_eq!(human_bytes(64 << 20), "64.0 MiB");
        assert_eq!(human_bytes(3 << 29), "1.5 GiB");
    }
}
