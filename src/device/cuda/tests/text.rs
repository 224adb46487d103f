//! Values of variable length, gathered to host memory.

use super::*;
use crate::device::HostBytes;

/// Copies in values in several parts, with offsets of the given width, and their validity if there
/// are nulls.
fn put(gpu: &Side, values: &Text, offset_width: Width, random: &mut StdRng) -> BytesColumn {
    let bytes = gpu.put_text(values, offset_width, random);
    let validity = values.iter().any(Option::is_none).then(|| gpu.put_bits(values.iter().map(Option::is_some)));
    BytesColumn { validity, ..bytes }
}

/// Returns the gathered values, according to their offsets and validity.
fn values_of(found: &HostBytes, offset_width: Width) -> Text {
    let offsets: Vec<usize> = match offset_width {
        Width::W4 => {
            bytemuck::pod_collect_to_vec::<u8, u32>(&found.offsets).into_iter().map(|at| at as usize).collect()
        }
        _ => bytemuck::pod_collect_to_vec::<u8, u64>(&found.offsets).into_iter().map(|at| at as usize).collect(),
    };
    assert_eq!((offsets.len(), offsets[0], offsets[found.rows]), (found.rows + 1, 0, found.data.len()));
    let is_valid = |row: usize| found.validity.as_ref().is_none_or(|(bits, _)| bits[row / 8] >> (row % 8) & 1 == 1);
    let value = |row: usize| is_valid(row).then(|| found.data[offsets[row]..offsets[row + 1]].to_vec());
    let values: Text = (0..found.rows).map(value).collect();
    let nulls = values.iter().filter(|value| value.is_none()).count();
    assert_eq!(found.validity.as_ref().map_or(0, |&(_, nulls)| nulls), nulls);
    values
}

#[test]
fn text_of_any_length_and_position_is_gathered() {
    let Some(gpu) = gpu_with(1 << 30) else { return };
    let mut random = random(911);
    for (at, rows) in sizes().enumerate() {
        // Most values are empty, or have one or several words. One value is longer than a block
        // writes.
        for bytes_max in [0, 1, 7, 30] {
            let with_nulls = random.random();
            let mut value = |row: usize| {
                let length = match random.random_range(0..10) {
                    0..3 => 0,
                    _ if row == rows / 2 && at % 3 == 0 => 20_000,
                    _ => random.random_range(0..=bytes_max),
                };
                let is_null = with_nulls && random.random_bool(0.2);
                (!is_null).then(|| (0..length).map(|_| random.random()).collect::<Vec<u8>>())
            };
            let values: Text = (0..rows).map(&mut value).collect();
            for offset_width in [Width::W4, Width::W8] {
                let column = put(&gpu, &values, offset_width, &mut random);
                let nullable = random.random();
                let mut position = || match random.random_bool(0.1) {
                    true if nullable => NO_ROW,
                    _ => random.random_range(0..rows.max(1)) as u32,
                };
                let listed: Vec<u32> = (0..if rows == 0 { 0 } else { rows + 3 }).map(|_| position()).collect();
                let some = some_range(rows, &mut random);
                let ranged: Vec<u32> = some.clone().map(|row| row as u32).collect();
                for (positions, rows_of) in [(gpu.list(&listed, nullable), &listed), (Positions::Range(some), &ranged)]
                {
                    let (arena, stream) = (&gpu.arena, &gpu.stream);
                    let found = strings(&*gpu.device)
                        .gather_bytes_to_host(&column, &positions, offset_width, u64::MAX, arena, stream)
                        .unwrap();
                    gpu.device.synchronize(stream).unwrap();
                    let expected: Text =
                        rows_of.iter().map(|&row| values.get(row as usize).cloned().flatten()).collect();
                    let story = format!("{rows} rows of up to {bytes_max} bytes, {offset_width:?}");
                    assert!(values_of(&found, offset_width) == expected, "{story}");
                }
            }
        }
    }
}

/// Tests that a thread that finds no byte in a value jumps to the next nonempty one, instead of
/// visiting each.
#[test]
fn text_after_any_number_of_empty_values_is_gathered() {
    let Some(gpu) = gpu_with(1 << 30) else { return };
    let rows = rows_max().clamp(100, 1_000_000);
    let mut values: Text = vec![Some(Vec::new()); rows];
    for (row, text) in [(0, "first"), (rows / 2, "in the middle"), (rows - 2, "last but one")] {
        values[row] = Some(text.into());
    }
    let column = put(&gpu, &values, Width::W4, &mut random(912));
    let found = strings(&*gpu.device).gather_bytes_to_host(
        &column,
        &Positions::Range(0..rows),
        Width::W4,
        u64::MAX,
        &gpu.arena,
        &gpu.stream,
    );
    gpu.device.synchronize(&gpu.stream).unwrap();
    assert!(values_of(&found.unwrap(), Width::W4) == values);
}

#[test]
fn text_too_long_for_the_offsets_of_its_type_is_refused_and_uses_no_memory() {
    let Some(gpu) = gpu_with(1 << 30) else { return };
    let values: Text = vec![Some(vec![b'x'; 1 << 20])];
    let column = put(&gpu, &values, Width::W4, &mut random(913));
    let before = gpu.device.memory().used_bytes();
    let positions = gpu.list(&[0; 2048], false);
    let refused = strings(&*gpu.device)
        .gather_bytes_to_host(&column, &positions, Width::W4, u64::MAX, &gpu.arena, &gpu.stream)
        .unwrap_err();
    assert!(matches!(&refused, Error::TooLong(text) if text.contains("batch_rows")), "{refused}");
    // The same happens if a piece exceeds its limit, whatever its offsets can address.
    let fits = strings(&*gpu.device).gather_bytes_to_host(
        &column,
        &gpu.list(&[0, 0], false),
        Width::W8,
        2 << 20,
        &gpu.arena,
        &gpu.stream,
    );
    assert_eq!(fits.unwrap().data.len(), 2 << 20);
    let too_large = strings(&*gpu.device).gather_bytes_to_host(
        &column,
        &gpu.list(&[0, 0], false),
        Width::W8,
        (2 << 20) - 1,
        &gpu.arena,
        &gpu.stream,
    );
    assert!(matches!(too_large, Err(Error::TooLong(_))));
    gpu.device.synchronize(&gpu.stream).unwrap();
    drop(positions);
    assert_eq!((gpu.device.memory().used_bytes(), gpu.arena.budget().used_bytes()), (before, 0));
}
