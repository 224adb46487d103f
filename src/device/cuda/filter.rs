//! A blocked Bloom filter over build keys, and the probe keys that pass it.

use std::any::Any;
use std::sync::Arc;

use super::abi;
use super::buffer::{CudaBuffer, key_pointer};
use super::gather::{compose, gather};
use super::select;
use super::work::Work;
use crate::Result;
use crate::device::{DeviceMemory, Filter, Keys, PackedKeys, Positions};

/// Bits of the filter per build key. Each key sets four bits of one word. With more bits fewer keys
/// would pass, but the filter would outgrow the second-level cache sooner.
const BITS_PER_KEY: usize = 12;

#[derive(Debug)]
struct CudaFilter {
    words: CudaBuffer,
    word_mask: u64,
}

impl DeviceMemory for CudaFilter {
    fn size_bytes(&self) -> usize {
        self.words.size()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

pub(super) fn build(work: &Work<'_>, keys: &Keys) -> Result<Filter> {
    let words = (keys.rows * BITS_PER_KEY).div_ceil(64).next_power_of_two();
    let word_mask = words as u64 - 1;
    let words = work.filled(words * size_of::<u64>(), 0, "a filter of build keys")?;
    let args = abi::DovetailFilterBuild {
        keys: key_pointer(keys),
        rows: keys.rows as u64,
        word_mask,
        key_bytes: keys.width.bytes() as u32,
        words: words.as_mut_ptr(),
    };
    work.launch("building a filter", abi::dovetail_filter_build, &args)?;
    Ok(Filter { state: Arc::new(CudaFilter { words, word_mask }), rows: keys.rows })
}

pub(super) fn filter_keys(work: &Work<'_>, filter: &Filter, keys: &PackedKeys) -> Result<PackedKeys> {
    let filter: &CudaFilter = filter.state.as_any().downcast_ref().expect("a filter that a GPU gets is a GPU filter");
    let rows = keys.keys.rows;
    let mut args = select::rows_that(abi::DOVETAIL_PASSES_FILTER, rows);
    args.keys = key_pointer(&keys.keys);
    args.key_bytes = keys.keys.width.bytes() as u32;
    args.filter_words = filter.words.as_ptr();
    args.filter_mask = filter.word_mask;
    let (passed, count) = select::run(work, args, None)?;
    if count == rows {
        return Ok(keys.clone());
    }
    let passed = Positions::List { data: Arc::new(passed), rows: count, nullable: false };
    let data = gather(work, &keys.keys.as_column(), &passed)?.data;
    let rows_kept = match &keys.rows_kept {
        Some(kept) => compose(work, kept, &passed)?,
        None => passed,
    };
    Ok(PackedKeys { keys: Keys { data, rows: count, ..keys.keys }, rows_kept: Some(rows_kept) })
}
