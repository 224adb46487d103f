//! The axes along which synthetic joins vary, with their text form on the command line and in
//! results.

use std::fmt;
use std::str::FromStr;

use dovetail::memory::parse_bytes;

/// Maximum rows of one side, exclusive.
const ROWS_MAX: u64 = 1 << 32;

/// Maximum payload columns of one side.
const COLUMNS_MAX: usize = 64;

/// Distribution of the keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Keys {
    /// 0 to n - 1, shuffled. If only some probe rows match, the range also has the keys that the
    /// build side lacks.
    Dense,
    /// Distinct, hashed over the whole range of the type.
    Sparse,
    /// Multiples of 2^16, shuffled. The low bits, by which a naive radix would partition, are all
    /// zero.
    Multiples,
    /// Text of 20 bytes.
    Text,
}

/// Distribution by which the probe side draws the build side's keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ProbeKeys {
    /// Every key equally often, shuffled.
    Each,
    /// Independently, with equal probability.
    Uniform,
    /// Independently, by Zipf's law with this exponent.
    Zipf(f64),
}

/// Rows of both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    pub build: u64,
    /// `None`: a multiple of the build side's.
    pub probe: Option<u64>,
}

/// Payload columns of both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payloads {
    pub build: Columns,
    pub probe: Columns,
}

/// Payload columns of one side, in this order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Columns {
    /// Columns as wide as a key column.
    pub as_key: usize,
    pub of_4: usize,
    pub of_8: usize,
}

impl ProbeKeys {
    /// Returns the exponent of Zipf's law. 0 is uniform.
    pub fn zipf(self) -> f64 {
        match self {
            Self::Zipf(exponent) => exponent,
            Self::Each | Self::Uniform => 0.0,
        }
    }
}

impl Rows {
    /// Sets the build rows. The probe rows are a multiple of them.
    pub const fn build(build: u64) -> Self {
        Self { build, probe: None }
    }

    /// Sets the rows of both sides.
    pub const fn both(build: u64, probe: u64) -> Self {
        Self { build, probe: Some(probe) }
    }

    /// Multiplies the rows by `scale`, but keeps at least `ROWS_MIN` rows, or all rows of a smaller
    /// side.
    pub fn scaled(self, scale: f64) -> Self {
        let scaled = |rows: u64| ((rows as f64 * scale).round() as u64).max(ROWS_MIN.min(rows));
        Self { build: scaled(self.build), probe: self.probe.map(scaled) }
    }
}

/// Minimum rows after scaling, so that every share of a side has some rows.
const ROWS_MIN: u64 = 64;

impl Payloads {
    /// Sets the same columns on both sides.
    pub const fn both(columns: Columns) -> Self {
        Self { build: columns, probe: columns }
    }

    /// Sets `count` columns on both sides, as wide as the key.
    pub const fn as_key(count: usize) -> Self {
        Self::both(Columns { as_key: count, of_4: 0, of_8: 0 })
    }

    /// Replaces columns as wide as the key by columns of `key_bytes` bytes.
    pub fn resolved(self, key_bytes: usize) -> Self {
        Self { build: self.build.resolved(key_bytes), probe: self.probe.resolved(key_bytes) }
    }

    /// Returns the column count of the side with more columns.
    pub fn count_max(self) -> usize {
        self.build.count().max(self.probe.count())
    }
}

impl Columns {
    /// Returns the number of columns.
    pub fn count(self) -> usize {
        self.as_key + self.of_4 + self.of_8
    }

    /// Returns the bytes of each column, in order.
    pub fn widths(self, key_bytes: usize) -> Vec<usize> {
        let Self { as_key, of_4, of_8 } = self;
        [(key_bytes, as_key), (4, of_4), (8, of_8)]
            .into_iter()
            .flat_map(|(width, count)| std::iter::repeat_n(width, count))
            .collect()
    }

    fn resolved(self, key_bytes: usize) -> Self {
        let of = |width: usize, own: usize| own + if key_bytes == width { self.as_key } else { 0 };
        Self { as_key: 0, of_4: of(4, self.of_4), of_8: of(8, self.of_8) }
    }
}

impl FromStr for Keys {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "dense" => Ok(Self::Dense),
            "sparse" => Ok(Self::Sparse),
            "multiples" => Ok(Self::Multiples),
            "text" => Ok(Self::Text),
            _ => Err("write dense, sparse, multiples or text".into()),
        }
    }
}

impl fmt::Display for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dense => "dense",
            Self::Sparse => "sparse",
            Self::Multiples => "multiples",
            Self::Text => "text",
        })
    }
}

impl FromStr for ProbeKeys {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("zipf:")) {
            ("each", _) => Ok(Self::Each),
            ("uniform", _) => Ok(Self::Uniform),
            (_, Some(exponent)) => match exponent.parse() {
                Ok(exponent) if (0.0..=10.0).contains(&exponent) => Ok(Self::Zipf(exponent)),
                _ => Err(format!("{exponent:?} is not an exponent from 0 to 10")),
            },
            _ => Err("write each, uniform or zipf:EXPONENT".into()),
        }
    }
}

impl fmt::Display for ProbeKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Each => f.write_str("each"),
            Self::Uniform => f.write_str("uniform"),
            Self::Zipf(exponent) => write!(f, "zipf:{exponent}"),
        }
    }
}

impl FromStr for Rows {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rows = |text: &str| {
            let rows = parse_bytes(text).ok().filter(|rows| (1..ROWS_MAX).contains(rows));
            rows.ok_or_else(|| {
                "write a number of rows below 4G, such as 500000 or 16M, or of both sides: 16M:64M".to_owned()
            })
        };
        match text.split_once(':') {
            None => Ok(Self::build(rows(text)?)),
            Some((build, probe)) => Ok(Self::both(rows(build)?, rows(probe)?)),
        }
    }
}

impl FromStr for Payloads {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            None => Ok(Self::both(text.parse()?)),
            Some((build, probe)) => Ok(Self { build: build.parse()?, probe: probe.parse()? }),
        }
    }
}

impl fmt::Display for Payloads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.build == self.probe {
            true => self.build.fmt(f),
            false => write!(f, "{}/{}", self.build, self.probe),
        }
    }
}

impl FromStr for Columns {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is not a list of payload columns; write a number (2), numbers with bytes (2x4+1x8), or \
                 both sides with / between them"
            )
        };
        let mut columns = Self::default();
        for part in text.split('+') {
            let (count, width) = part.split_once('x').map_or((part, None), |(count, width)| (count, Some(width)));
            let count: usize = count.parse().map_err(|_| wrong())?;
            match width {
                None => columns.as_key += count,
                Some("4") => columns.of_4 += count,
                Some("8") => columns.of_8 += count,
                Some(_) => return Err(wrong()),
            }
        }
        let fits = columns.count() <= COLUMNS_MAX;
        fits.then_some(columns).ok_or_else(|| format!("a side has at most {COLUMNS_MAX} payload columns"))
    }
}

impl fmt::Display for Columns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = (self.as_key > 0).then(|| self.as_key.to_string());
        let wide = |count: usize, width: usize| (count > 0).then(|| format!("{count}x{width}"));
        let parts: Vec<String> = [own, wide(self.of_4, 4), wide(self.of_8, 8)].into_iter().flatten().collect();
        f.write_str(if parts.is_empty() { "0" } else { "" })?;
        f.write_str(&parts.join("+"))
    }
}

/// Parses a scale: `1/16`, or `0.25`.
pub fn parse_scale(text: &str) -> Result<f64, String> {
    let number = |text: &str| text.trim().parse::<f64>().ok();
    let scale = match text.split_once('/') {
        None => number(text),
        Some((above, below)) => number(above).zip(number(below)).map(|(above, below)| above / below),
    };
    let sound = scale.filter(|scale| scale.is_finite() && *scale > 0.0 && *scale <= 16.0);
    sound.ok_or_else(|| "write a fraction such as 1/16, or a number above 0 and at most 16".into())
}

/// Formats a scale as a person would write it.
pub fn show_scale(scale: f64) -> String {
    let below = (1.0 / scale).round();
    match scale < 1.0 && (1.0 / below - scale).abs() < 1e-9 * scale {
        true => format!("1/{below}"),
        false => scale.to_string(),
    }
}

/// Parses the width of key columns.
pub fn parse_key_bytes(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|bytes| matches!(bytes, 4 | 8)).ok_or_else(|| "write 4 or 8".into())
}

/// Parses a number of key columns.
pub fn parse_key_columns(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| (1..=8).contains(count)).ok_or_else(|| "write a number from 1 to 8".into())
}

/// Parses a share of rows.
pub fn parse_share(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|share| (0.0..=1.0).contains(share)).ok_or_else(|| "write a number from 0 to 1".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axis_values_parse_back_from_their_text() {
        for text in ["dense", "sparse", "multiples", "text"] {
            assert_eq!(text.parse::<Keys>().unwrap().to_string(), text);
        }
        for text in ["each", "uniform", "zipf:1.25"] {
            assert_eq!(text.parse::<ProbeKeys>().unwrap().to_string(), text);
        }
        for text in ["0", "2", "2x4", "1+3x8", "2x4+1x8/7x8", "0/1"] {
            assert_eq!(text.parse::<Payloads>().unwrap().to_string(), text);
        }
        assert_eq!("16M:1K".parse(), Ok(Rows::both(16 << 20, 1 << 10)));
    }

    #[test]
    fn invalid_axis_values_are_refused() {
        for wrong in ["zipf:-1", "zipf:", "random"] {
            assert!(wrong.parse::<ProbeKeys>().is_err(), "{wrong:?} was accepted");
        }
        for wrong in ["", "x", "2x", "2x16", "65", "1/2/3"] {
            assert!(wrong.parse::<Payloads>().is_err(), "{wrong:?} was accepted");
        }
        for wrong in ["0", "1:0", "8G"] {
            assert!(wrong.parse::<Rows>().is_err(), "{wrong:?} was accepted");
        }
        for wrong in ["0", "1/0", "-1", "17", "half"] {
            assert!(parse_scale(wrong).is_err(), "{wrong:?} was accepted");
        }
    }

    #[test]
    fn payload_widths_default_to_the_key_width() {
        let columns: Columns = "1+1x4+2x8".parse().unwrap();
        assert_eq!(columns.widths(8), [8, 4, 8, 8]);
        assert_eq!(Payloads::both(columns).resolved(8).to_string(), "1x4+3x8");
        assert_eq!(Payloads::as_key(2).resolved(4), "2x4".parse().unwrap());
    }

    #[test]
    fn scales_are_shown_as_fractions() {
        for text in ["1/16", "1/3", "1", "0.75", "2"] {
            assert_eq!(show_scale(parse_scale(text).unwrap()), text);
        }
    }
}
