//! A value of an ordered type.

use std::cmp::Ordering;

/// A value of an ordered type, for minima and maxima, in total order. Numbers compare as numbers:
/// NaN is greatest and equal to itself, -0 equals 0. Bytes compare as bytes. Values of different
/// kinds never meet in one column.
#[derive(Clone, Debug)]
pub enum Value {
    /// Integers of any width, booleans, dates, times, timestamps, durations, and decimals that fit
    /// 128 bits. All compare by their stored number.
    Integer(i128),
    Float(f64),
    /// Strings and binaries.
    Bytes(Vec<u8>),
}

impl Ord for Value {
    fn cmp(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Integer(a), Self::Integer(b)) => a.cmp(b),
            (Self::Float(a), Self::Float(b)) => a.partial_cmp(b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan())),
            (Self::Bytes(a), Self::Bytes(b)) => a.cmp(b),
            _ => self.kind().cmp(&other.kind()),
        }
    }
}

impl Value {
    fn kind(&self) -> u8 {
        match self {
            Self::Integer(_) => 0,
            Self::Float(_) => 1,
            Self::Bytes(_) => 2,
        }
    }
}

impl PartialOrd for Value {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Value {}
