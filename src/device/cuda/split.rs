//! Splits pairs by the part of the build side that they refer to.

use std::sync::Arc;

use super::abi;
use super::buffer::pointer_of;
use super::gather::list;
use super::work::Work;
use crate::Result;
use crate::device::{PARTS_MAX, Pairs, Positions};

pub(super) fn split_pairs(work: &Work<'_>, pairs: &Pairs, part_bits: u32, parts: usize) -> Result<(Pairs, Vec<usize>)> {
    const PURPOSE: &str = "dividing pairs by build rows";
    const COUNTS_BYTES: usize = PARTS_MAX * size_of::<u32>();
    const _: () = assert!(PARTS_MAX == abi::DOVETAIL_PARTS_MAX, "the kernels have room for PARTS_MAX parts");
    let rows = pairs.build.len();
    assert!(parts <= PARTS_MAX && pairs.probe.len() == rows, "{parts} parts, {rows} and {} rows", pairs.probe.len());
    let Positions::List { data: build, nullable: false, .. } = &pairs.build else {
        unreachable!("each pair has a build row, in the list that the match wrote")
    };
    let (probe, probe_start) = list(&pairs.probe);
    let [taken, counts] = [0; 2].map(|zero| work.filled(COUNTS_BYTES, zero, PURPOSE));
    let (taken, counts) = (taken?, counts?);
    let [build_split, probe_split] = [(); 2].map(|()| work.values::<u32>(rows, PURPOSE));
    let (build_split, probe_split) = (build_split?, probe_split?);
    let args = abi::DovetailSplit {
        build: pointer_of(build, rows),
        probe,
        probe_start,
        pairs: rows as u64,
        part_bits,
        taken: taken.as_mut_ptr(),
        counts: counts.as_mut_ptr(),
        build_split: build_split.as_mut_ptr(),
        probe_split: probe_split.as_mut_ptr(),
    };
    work.launch(PURPOSE, abi::dovetail_split, &args)?;
    let counts: [u32; PARTS_MAX] = work.read(&counts, PURPOSE)?;
    let ends = counts[..parts].iter().scan(0, |end, &count| {
        *end += count as usize;
        Some(*end)
    });
    let bounds: Vec<usize> = std::iter::once(0).chain(ends).collect();
    assert_eq!(bounds[parts], rows, "build rows are in {parts} parts of 2^{part_bits}");
    let listed = |data| Positions::List { data: Arc::new(data), rows, nullable: false };
    Ok((Pairs { build: listed(build_split), probe: listed(probe_split) }, bounds))
}
