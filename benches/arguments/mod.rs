//! What benchmarks take on their command lines.

use dovetail::memory::parse_bytes;

/// Rows with a binary unit: 16M is 2^24.
pub fn count(text: &str) -> Result<usize, String> {
    parse_bytes(text).map(|number| number as usize).map_err(|error| error.to_string())
}
