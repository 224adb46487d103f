//! Joins partitions in one step, composed of the step-by-step primitives. A probe batch of
//! partitions stays in cache from step to step, so strategies on the CPU do not use this. It is the
//! reference for GPUs, and the implementation of emulated GPUs.

use std::ops::Range;

use crate::Result;
use crate::device::{
    Column, Device, JoinedPartitions, JoinedRows, Keys, PartitionMatches, Partitions, Positions, Stream, Unmatched,
    Wanted,
};

pub(super) fn join(
    device: &dyn Device,
    build: &Partitions,
    probe: &Partitions,
    partitions: Range<usize>,
    wanted: Wanted,
    stream: &Stream,
) -> Result<Option<JoinedPartitions>> {
    let grouped;
    let (build, matches) = match device.match_partitions(build, probe, partitions.clone(), stream)? {
        PartitionMatches::Matched(matches) => (build, matches),
        PartitionMatches::RepeatedBuildKeys => {
            grouped = device.group_partitions(build.clone(), stream)?;
            match device.match_partitions(&grouped, probe, partitions, stream)? {
                PartitionMatches::Matched(matches) => (&grouped, matches),
                PartitionMatches::RepeatedBuildKeys => unreachable!("grouped keys are adjacent"),
            }
        }
    };
    let pairs = matches.total;
    let Wanted::Rows { room, keys } = wanted else { return Ok(Some(JoinedPartitions { pairs, rows: None })) };
    if pairs > room as u64 {
        return Ok(Some(JoinedPartitions { pairs, rows: None }));
    }
    let positions = device.expand(&matches, 0..pairs, Unmatched::Skip, stream)?;
    let gather = |columns: &[Column], positions: &Positions| -> Result<Vec<Column>> {
        columns.iter().map(|column| device.gather(column, positions, stream)).collect()
    };
    let keys = match keys {
        true => gather(&[probe.keys.as_column()], &positions.probe)?.pop(),
        false => None,
    };
    let keys = keys.map(|column| Keys { data: column.data, width: probe.keys.width, rows: column.rows });
    let (build, probe) = (gather(&build.payload, &positions.build)?, gather(&probe.payload, &positions.probe)?);
    let rows = JoinedRows { keys, build, probe };
    Ok(Some(JoinedPartitions { pairs, rows: Some(rows) }))
}
