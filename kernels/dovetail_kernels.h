// The whole interface of the kernels. Generated from src/device/cuda/abi.rs, where it is documented; do not edit.
// `cargo test the_header` says when it is out of date, and `DOVETAIL_BLESS=1 cargo test the_header` renews it.

#pragma once

#include <stdint.h>

/// The most key fields that one call packs, and bitmaps that one call combines.
#define DOVETAIL_FIELDS_MAX 8

/// The most columns that one call moves.
#define DOVETAIL_MOVES_MAX 64

/// The most parts of a build side that pairs are divided by.
#define DOVETAIL_PARTS_MAX 32

/// The most words that one call writes.
#define DOVETAIL_WORDS_MAX 32

/// The most lists that one call puts together.
#define DOVETAIL_LISTS_MAX 64

/// The most rows that one selection looks at. CUB up to 3.0 writes out of bounds where nearly all of 2^31 - 1 rows are selected: its places
/// in the last tile are numbers of 32 bits, and wrap around (NVIDIA/cccl, issue 6584).
#define DOVETAIL_SELECT_ROWS_MAX (1 << 30)

/// The most bits that one partition pass resolves.
#define DOVETAIL_PASS_BITS_MAX 8

/// The most distinct build keys of a partition whose table is built in one round.
#define DOVETAIL_TABLE_ROWS 4096

/// The most build rows of a partition that are joined in one round.
#define DOVETAIL_JOIN_ROWS 2560

/// The bytes of shared memory that every kernel fits in. GPUs of compute capability 8.6, 8.9 and 12.0 have no more for a block. A
/// kernel that would use more asks for the GPU's limit first.
#define DOVETAIL_SHARED_BYTES_MAX (99 << 10)

/// A run of equal keys that is longer is listed, and marked by a whole block.
#define DOVETAIL_LONG_RUN 256

/// Bits as they are, zero-extended.
#define DOVETAIL_UNSIGNED 0

/// A two's-complement integer, minus the minimum.
#define DOVETAIL_SIGNED 1

/// An unsigned integer, minus the minimum.
#define DOVETAIL_OFFSET 2

/// IEEE 754, mapped so that order is kept.
#define DOVETAIL_FLOAT 3

/// Select rows whose flag is set.
#define DOVETAIL_FLAG_SET 0

/// Select rows whose flag is not set.
#define DOVETAIL_FLAG_CLEAR 1

/// Select rows with a match.
#define DOVETAIL_MATCHED 2

/// Select rows without one.
#define DOVETAIL_UNMATCHED 3

/// Select rows that are valid in all bitmaps.
#define DOVETAIL_VALID 4

/// Select rows that are not valid in one of the bitmaps.
#define DOVETAIL_INVALID 6

/// Select rows whose key passes a filter.
#define DOVETAIL_PASSES_FILTER 7

/// Select rows whose key differs from the one before: heads of runs.
#define DOVETAIL_RUN_HEADS 5

/// One key column and its place in the packed key.
struct DovetailKeyField {
  /// Values.
  const void *data;
  /// A bit per row, or null when all rows are valid.
  const uint8_t *validity;
  /// The minimum that is taken off, as 128 bits.
  uint64_t min_low;
  /// Its upper half.
  uint64_t min_high;
  /// Bytes per value.
  uint32_t width;
  /// `DOVETAIL_UNSIGNED` and so on.
  uint32_t encoding;
  /// Where the lowest bit goes.
  uint32_t shift;
  /// Bits that the encoded value takes; may be 0.
  uint32_t bits;
  /// The bit that a null sets, or -1.
  int32_t null_bit;
};

/// Packs key columns into keys.
struct DovetailPackKeys {
  /// Inputs: the key columns.
  struct DovetailKeyField fields[DOVETAIL_FIELDS_MAX];
  /// How many there are.
  uint32_t field_count;
  /// Bytes per key: 4, 8 or 16.
  uint32_t key_bytes;
  /// Rows that have a key; null when all have.
  const uint32_t *kept;
  /// Number of keys.
  uint64_t rows;
  /// Whether the fields are added to what the keys hold already.
  uint32_t accumulate;
  /// Output: `rows` keys.
  void *keys;
};

/// A CUDA stream, as the driver and the runtime both know it.
typedef void *DovetailStream;

/// Says where values of variable length begin, of the offsets that each part of a column came with.
struct DovetailValueBegins {
  /// Inputs: the offsets of all parts, one more than rows of each.
  const void *offsets;
  /// Bytes per offset: 4 or 8.
  uint32_t offset_bytes;
  /// How many parts, at least one; none of them is empty.
  uint32_t parts;
  /// The first row of each part.
  const uint64_t *part_rows;
  /// What is added to the offsets of each part, wrapping.
  const uint64_t *part_bases;
  /// Rows of all parts.
  uint64_t rows;
  /// Output: `rows + 1` numbers.
  uint64_t *begins;
};

/// Makes numbers of short values of variable length: the first byte on top, and below the last of `bytes_max` the length.
struct DovetailShortValues {
  /// Inputs: the bytes of all values, one after the other, at a multiple of 8 bytes and in whole words of 8 bytes.
  const void *data;
  /// Where each value begins and, one more entry than rows, the last one ends.
  const uint64_t *begins;
  /// Number of values.
  uint64_t rows;
  /// What no value is longer than: 15 at the most. What is longer, under a null, becomes zero.
  uint32_t bytes_max;
  /// Bits for the length.
  uint32_t length_bits;
  /// Bytes per number: 4, 8 or 16.
  uint32_t number_bytes;
  /// Output: `rows` numbers.
  void *numbers;
};

/// One key column that is too wide, or beside one that is, and so is hashed and compared.
struct DovetailValueField {
  /// Values of fixed width; or the bytes of values of variable length, one after the other, at a multiple of 8 bytes and in whole words
  /// of 8 bytes.
  const void *data;
  /// Where each value begins and, one more entry than rows, the last one ends; null for values of fixed width.
  const uint64_t *begins;
  /// A bit per row, or null when all rows are valid.
  const uint8_t *validity;
  /// Bytes per value of fixed width.
  uint32_t width;
  /// `DOVETAIL_UNSIGNED` and so on, with nothing taken off.
  uint32_t encoding;
  /// Whether null is equal to null.
  uint32_t nulls_equal;
};

/// Hashes key columns to keys of 16 bytes.
struct DovetailHashKeys {
  /// Inputs: the key columns.
  struct DovetailValueField fields[DOVETAIL_FIELDS_MAX];
  /// How many there are.
  uint32_t field_count;
  /// Rows that have a key; null when all have.
  const uint32_t *kept;
  /// Number of keys.
  uint64_t rows;
  /// Of the hash.
  uint64_t seed;
  /// Which bits of the hash are kept; the lower half.
  uint64_t mask_low;
  /// The upper half.
  uint64_t mask_high;
  /// Output: `rows` keys.
  void *keys;
};

/// Counts pairs of rows whose values differ, and flags them.
struct DovetailCompareValues {
  /// Inputs: the key columns of one row of each pair.
  struct DovetailValueField a[DOVETAIL_FIELDS_MAX];
  /// Those of the other, of the same kinds.
  struct DovetailValueField b[DOVETAIL_FIELDS_MAX];
  /// How many there are.
  uint32_t field_count;
  /// One row of each pair, or null for consecutive rows. `NO_ROW` is equal to everything.
  const uint32_t *a_rows;
  /// The first of consecutive rows.
  uint32_t a_start;
  /// The other one, or null.
  const uint32_t *b_rows;
  /// The first of consecutive rows.
  uint32_t b_start;
  /// Keys of 16 bytes, one more than pairs, or null: a pair counts only if its key is the next one's.
  const void *keys;
  /// How many pairs.
  uint64_t pairs;
  /// Output: a byte for each pair; may be null.
  uint8_t *flags;
  /// Output: how many differ, added to what is there.
  uint32_t *differing;
};

/// Lists rows that satisfy a condition, in ascending order.
struct DovetailSelect {
  /// `DOVETAIL_FLAG_SET` and so on.
  uint32_t condition;
  /// What is added to every row that is listed.
  uint32_t base;
  /// The first row to look at.
  uint32_t start;
  /// How many rows to look at: [`DOVETAIL_SELECT_ROWS_MAX`] at the most.
  uint64_t rows;
  /// Inputs, one kind of which each condition reads. A byte per row.
  const uint8_t *flags;
  /// Matches: `NO_ROW` where there is none.
  const uint32_t *first;
  /// Bitmaps.
  const uint8_t *bitmaps[DOVETAIL_FIELDS_MAX];
  /// How many there are.
  uint32_t bitmap_count;
  /// Bytes per key.
  uint32_t key_bytes;
  /// Keys; for heads of runs, equal ones adjacent.
  const void *keys;
  /// A filter.
  const uint64_t *filter_words;
  /// Its words less one.
  uint64_t filter_mask;
  /// State.
  void *scratch;
  /// Its size.
  uint64_t scratch_bytes;
  /// Outputs: room for `rows` positions.
  uint32_t *positions;
  /// How many were selected.
  uint64_t *selected;
};

/// A column that moves with the keys.
struct DovetailMove {
  /// Where from; null for the number of the row itself.
  const void *from;
  /// Where to.
  void *to;
  /// Bytes per value.
  uint32_t width;
};

/// Partitions rows, each parent partition on its own, by bits of the mixed key.
struct DovetailPartition {
  /// Inputs: keys.
  const void *keys;
  /// Where each parent starts, and at the end the number of rows.
  const uint32_t *parent_bounds;
  /// Number of keys.
  uint64_t rows;
  /// Bytes per key.
  uint32_t key_bytes;
  /// Number of parents.
  uint32_t parents;
  /// Bits of the mixed key that are passed over.
  uint32_t skip;
  /// Bits of this pass, 1 to `DOVETAIL_PASS_BITS_MAX`.
  uint32_t bits;
  /// Whether `bounds` are there already: 1, or 0.
  uint32_t is_counted;
  /// Tiles that a block has on average, from which on a first pass writes nothing but whole sectors.
  uint32_t combined_tiles_min;
  /// What moves. The first is that of the keys.
  struct DovetailMove moves[DOVETAIL_MOVES_MAX];
  /// How many columns move.
  uint32_t move_count;
  /// State.
  void *scratch;
  /// Its size.
  uint64_t scratch_bytes;
  /// Outputs: where each of `parents << bits` partitions starts, and at the end the number of rows.
  uint32_t *bounds;
  /// The number of rows of the largest partition; null where nobody asks.
  uint32_t *largest;
};

/// Counts what two passes of partitioning find.
struct DovetailCountPartitions {
  /// Inputs: keys.
  const void *keys;
  /// Number of keys.
  uint64_t rows;
  /// Bytes per key.
  uint32_t key_bytes;
  /// Bits of the mixed key that are passed over.
  uint32_t skip;
  /// Bits of both passes, 1 to `2 * DOVETAIL_PASS_BITS_MAX`.
  uint32_t bits;
  /// Bits of the first pass.
  uint32_t coarse_bits;
  /// State.
  void *scratch;
  /// Its size.
  uint64_t scratch_bytes;
  /// Outputs: where each of `1 << bits` partitions starts, and at the end the number of rows.
  uint32_t *bounds;
  /// The same of the first pass.
  uint32_t *coarse_bounds;
};

/// Sorts unsigned integers and the row numbers beside them by some of their bits. Stable.
struct DovetailSort {
  /// Inputs: keys of `width` bytes.
  const void *keys_in;
  /// Row numbers.
  const uint32_t *values_in;
  /// Number of keys.
  uint64_t rows;
  /// 4 or 8.
  uint32_t width;
  /// The lowest bit that counts.
  uint32_t begin_bit;
  /// The bit after the highest that counts.
  uint32_t end_bit;
  /// State.
  void *scratch;
  /// Its size.
  uint64_t scratch_bytes;
  /// Outputs: sorted keys.
  void *keys_out;
  /// Their row numbers.
  uint32_t *values_out;
};

/// Makes of each key the integer that it is sorted by.
struct DovetailSortImage {
  /// Inputs: keys.
  const void *keys;
  /// The row whose image goes to each place; null when they are the same.
  const uint32_t *order;
  /// Number of keys.
  uint64_t rows;
  /// Bytes per key.
  uint32_t key_bytes;
  /// Whether the key is mixed first, and turned left by `skip` bits.
  uint32_t mixed;
  /// See `mixed`.
  uint32_t skip;
  /// For keys of 16 bytes: whether the upper half is wanted.
  uint32_t upper;
  /// Output: images of 4 bytes for keys of 4, else of 8.
  void *images;
};

/// Whether keys ascend.
struct DovetailIsSorted {
  /// Inputs: keys.
  const void *keys;
  /// Number of keys.
  uint64_t rows;
  /// Bytes per key.
  uint32_t key_bytes;
  /// Output: set to 1 when a key is smaller than the one before.
  uint32_t *unsorted;
};

/// What matching counts, added to what is there.
struct DovetailMatchTotals {
  /// The sum of all run lengths.
  uint64_t total;
  /// Rows with a match.
  uint64_t matched_rows;
  /// The longest run.
  uint32_t longest;
  /// Set to 1 when a build key repeats that must not, or lies outside its range.
  uint32_t unsound;
};

/// Enters keys into one hash table.
struct DovetailTableInsert {
  /// Inputs: build keys, in the order of `heads`.
  const void *keys;
  /// Where each run of equal keys starts; null when every key is a run.
  const uint32_t *heads;
  /// The first run that is entered.
  uint64_t first;
  /// How many are.
  uint64_t runs;
  /// Bytes per key.
  uint32_t key_bytes;
  /// Slots less one; their number is a power of two.
  uint64_t slot_mask;
  /// Outputs: slots, all bits set where empty.
  uint64_t *slots;
  /// `unsound` when a key repeats.
  struct DovetailMatchTotals *totals;
};

/// Looks keys up in a hash table.
struct DovetailTableProbe {
  /// Inputs: the table.
  const uint64_t *slots;
  /// Its slots less one.
  uint64_t slot_mask;
  /// Its keys.
  const void *build_keys;
  /// Where each of its runs starts, and at the end the number of rows; null when every key is a run.
  const uint32_t *heads;
  /// Probe keys.
  const void *probe_keys;
  /// How many.
  uint64_t rows;
  /// Bytes per key.
  uint32_t key_bytes;
  /// Outputs: a position per probe row.
  uint32_t *first;
  /// Run lengths; null without `heads`.
  uint32_t *count;
  /// Totals.
  struct DovetailMatchTotals *totals;
};

/// Enters distinct keys of a dense range into an array.
struct DovetailDenseInsert {
  /// Inputs: build keys.
  const void *keys;
  /// The first row that is entered.
  uint64_t first;
  /// How many are.
  uint64_t rows;
  /// The smallest key, as 128 bits.
  uint64_t min_low;
  /// Its upper half.
  uint64_t min_high;
  /// Length of the array.
  uint64_t span;
  /// Bytes per key.
  uint32_t key_bytes;
  /// The row of each key; null when they are as they lie.
  const uint32_t *row_numbers;
  /// Outputs: the position of each key, `NO_ROW` before the call.
  uint32_t *positions;
  /// `unsound` when a key repeats or lies outside.
  struct DovetailMatchTotals *totals;
};

/// Looks keys up in an array.
struct DovetailDenseProbe {
  /// Inputs: the array.
  const uint32_t *positions;
  /// Its length.
  uint64_t span;
  /// The smallest key, as 128 bits.
  uint64_t min_low;
  /// Its upper half.
  uint64_t min_high;
  /// Probe keys.
  const void *probe_keys;
  /// How many.
  uint64_t rows;
  /// Bytes per key.
  uint32_t key_bytes;
  /// Outputs: a position per probe row.
  uint32_t *first;
  /// Totals.
  struct DovetailMatchTotals *totals;
};

/// Probe rows of one partition that one block matches.
struct DovetailMatchUnit {
  /// The partition.
  uint32_t partition;
  /// The first probe row.
  uint32_t start;
  /// The end of the probe rows.
  uint32_t end;
};

/// Lists what blocks do that match or join partitions: each partition has a block, or one for so many of its probe rows.
struct DovetailListUnits {
  /// Inputs: where the probe rows of each partition start, and at the end where they end.
  const uint32_t *probe_bounds;
  /// How many partitions.
  uint32_t partitions;
  /// Probe rows of a partition that a block has to itself, at the most; no fewer than the next.
  uint32_t whole_rows;
  /// Probe rows of a block of partitions that have more.
  uint32_t unit_rows;
  /// State.
  void *scratch;
  /// Its size, at least [`dovetail_list_units_scratch_bytes`].
  uint64_t scratch_bytes;
  /// Output: units by partition, and after the last those that do nothing.
  struct DovetailMatchUnit *units;
  /// Room for units: at least as many as there are.
  uint32_t unit_count;
};

/// Matches partitions, each with a table in shared memory.
struct DovetailMatchPartitions {
  /// Inputs: build keys by partition.
  const void *build_keys;
  /// Where each run of equal keys starts, and at the end the number of rows; null when every key is a run.
  const uint32_t *heads;
  /// Where the runs of each partition start: in runs.
  const uint32_t *build_bounds;
  /// Probe keys by partition.
  const void *probe_keys;
  /// What each block does; nothing where a unit has no rows.
  const struct DovetailMatchUnit *units;
  /// How many blocks.
  uint32_t unit_count;
  /// Bytes per key.
  uint32_t key_bytes;
  /// The probe row whose match comes first in the outputs.
  uint32_t first_row;
  /// Outputs: a position per probe row.
  uint32_t *first;
  /// Run lengths; null without `heads`.
  uint32_t *count;
  /// Totals; `unsound` when a key repeats.
  struct DovetailMatchTotals *totals;
};

/// A column of joined rows.
struct DovetailJoinColumn {
  /// Values of a side's rows by partition; null for the numbers of the rows themselves, 32 bits each.
  const void *from;
  /// Values of the joined rows.
  void *to;
  /// Bytes per value: 1, 2, 4, 8, 16 or 32.
  uint32_t width;
  /// Whether it is the probe side's: 1, or 0 for the build side's.
  uint32_t of_probe;
};

/// What a join of partitions found.
struct DovetailJoinTotals {
  /// Pairs. Those beyond the room are counted and not written.
  uint64_t pairs;
  /// Not zero when so many build rows share a bucket that the rest means nothing.
  uint64_t long_chains;
  /// Units that a direct call left over.
  uint64_t left_over;
};

/// Joins partitions, each with a table in shared memory, and writes the joined rows.
struct DovetailJoinPartitions {
  /// Inputs: build keys by partition.
  const void *build_keys;
  /// Where the build rows of each partition start, and at the end where they end.
  const uint32_t *build_bounds;
  /// Probe keys by partition.
  const void *probe_keys;
  /// Where the probe rows of each partition start, and at the end where they end; null with `units`.
  const uint32_t *probe_bounds;
  /// What each block does; null when each has a partition.
  const struct DovetailMatchUnit *units;
  /// How many blocks.
  uint32_t unit_count;
  /// Bytes per key.
  uint32_t key_bytes;
  /// What is written.
  struct DovetailJoinColumn columns[DOVETAIL_MOVES_MAX];
  /// How many; with none, pairs are counted.
  uint32_t column_count;
  /// Rows for which there is room in the columns.
  uint64_t room;
  /// Whether to join what is simple, and leave the rest over: 1, or 0. Of columns of 4 bytes there may be two of each side then, of 8 one,
  /// and no others; keys come first, then the build side's.
  uint32_t is_direct;
  /// State, of a direct call: room for `unit_count` units, the `left_over` first of which are to be done by another call.
  struct DovetailMatchUnit *left_over;
  /// Output: added to what is there.
  struct DovetailJoinTotals *totals;
};

/// Finds in a list of ascending positions the first that is not below each bound.
struct DovetailLowerBounds {
  /// Inputs: ascending positions.
  const uint32_t *positions;
  /// How many.
  uint64_t position_count;
  /// Bounds.
  const uint32_t *bounds;
  /// How many.
  uint64_t bound_count;
  /// Output: an index per bound.
  uint32_t *indices;
};

/// Matches sorted probe keys against sorted build keys.
struct DovetailMatchSorted {
  /// Inputs: build keys, ascending.
  const void *build_keys;
  /// How many.
  uint64_t build_rows;
  /// Probe keys, ascending.
  const void *probe_keys;
  /// How many.
  uint64_t rows;
  /// Bytes per key.
  uint32_t key_bytes;
  /// Outputs: a position per probe row.
  uint32_t *first;
  /// Run lengths.
  uint32_t *count;
  /// Totals.
  struct DovetailMatchTotals *totals;
};

/// Counts the pairs before each probe row.
struct DovetailPairStarts {
  /// Inputs: matches.
  const uint32_t *first;
  /// Run lengths; null when none is longer than one.
  const uint32_t *count;
  /// Probe rows.
  uint64_t rows;
  /// Whether a row without a match gives a pair.
  uint32_t emit_unmatched;
  /// State.
  void *scratch;
  /// Its size.
  uint64_t scratch_bytes;
  /// Output: `rows` numbers of pairs.
  uint64_t *starts;
};

/// Lists pairs.
struct DovetailExpand {
  /// Inputs: matches.
  const uint32_t *first;
  /// Pairs before each probe row.
  const uint64_t *starts;
  /// Probe rows.
  uint64_t rows;
  /// The position of the first probe row.
  uint32_t first_row;
  /// The first pair.
  uint64_t first_pair;
  /// How many pairs.
  uint64_t pairs;
  /// Outputs: build positions.
  uint32_t *build;
  /// Probe positions.
  uint32_t *probe;
};

/// Sets the flags of all build rows that matches refer to.
struct DovetailMarkRuns {
  /// Inputs: matches.
  const uint32_t *first;
  /// Run lengths; null when none is longer than one.
  const uint32_t *count;
  /// Probe rows.
  uint64_t rows;
  /// State: room for long runs, two numbers each.
  uint32_t *long_runs;
  /// How many there are; zero before the call.
  uint32_t *long_run_count;
  /// Output: a byte per build row, in a buffer of whole words.
  uint8_t *flags;
};

/// Sets the flags at positions.
struct DovetailMark {
  /// Inputs: positions, `NO_ROW` among them; null for consecutive ones.
  const uint32_t *positions;
  /// The first of consecutive ones.
  uint32_t start;
  /// How many.
  uint64_t rows;
  /// Output: a byte per row, in a buffer of whole words.
  uint8_t *flags;
};

/// Divides pairs by the part of the build side that they refer to.
struct DovetailSplit {
  /// Inputs: build positions, none of them `NO_ROW`.
  const uint32_t *build;
  /// Probe positions; null for consecutive ones.
  const uint32_t *probe;
  /// The first of consecutive ones.
  uint32_t probe_start;
  /// Number of pairs, less than 2^32.
  uint64_t pairs;
  /// A part is so many bits of consecutive build positions; there are `DOVETAIL_PARTS_MAX` of them at most.
  uint32_t part_bits;
  /// State: how many pairs of each of `DOVETAIL_PARTS_MAX` parts have a place, which starts as zeros.
  uint32_t *taken;
  /// Outputs: how many pairs each of `DOVETAIL_PARTS_MAX` parts has, which starts as zeros.
  uint32_t *counts;
  /// Build positions, part by part, each from the start of its part.
  uint32_t *build_split;
  /// Probe positions beside them.
  uint32_t *probe_split;
};

/// Gathers values.
struct DovetailGather {
  /// Inputs: values; null for consecutive numbers of 4 bytes from `data_start` on.
  const void *data;
  /// See `data`.
  uint32_t data_start;
  /// Bytes per value.
  uint32_t width;
  /// Positions, `NO_ROW` among them; null for consecutive ones.
  const uint32_t *positions;
  /// The first of consecutive ones.
  uint32_t start;
  /// How many.
  uint64_t rows;
  /// Places for values, of which those behind so many of `data` become zero.
  uint64_t places;
  /// The byte that fills the place of a missing row.
  uint8_t missing;
  /// Output: values.
  void *out;
};

/// Gathers validity.
struct DovetailGatherBits {
  /// Inputs: a bit per row; null when all are set.
  const uint8_t *bits;
  /// Positions, `NO_ROW` among them; null for consecutive ones.
  const uint32_t *positions;
  /// The first of consecutive ones.
  uint32_t start;
  /// How many.
  uint64_t rows;
  /// Outputs: a bit per position, in whole words.
  uint32_t *out;
  /// Bits that are not set, added to what is there.
  uint64_t *cleared;
};

/// Says where values of variable length begin that are gathered, one after the other.
struct DovetailGatheredBegins {
  /// Inputs: where each value of the column begins and, one more entry than rows, the last one ends.
  const uint64_t *begins;
  /// A bit per row of the column; null when all are valid.
  const uint8_t *validity;
  /// Positions, `NO_ROW` among them; null for consecutive ones.
  const uint32_t *positions;
  /// The first of consecutive ones.
  uint32_t start;
  /// How many.
  uint64_t rows;
  /// State: scratch memory.
  void *scratch;
  /// Its size.
  uint64_t scratch_bytes;
  /// Output: `rows + 1` numbers, the last of them how many bytes there are in all. Missing rows and nulls have none.
  uint64_t *gathered;
};

/// Gathers values of variable length.
struct DovetailGatherBytes {
  /// Inputs: the bytes of all values, one after the other, at a multiple of 8 bytes and in whole words of 8 bytes.
  const void *data;
  /// Where each begins.
  const uint64_t *begins;
  /// Positions, of which `NO_ROW` has no bytes; null for consecutive ones.
  const uint32_t *positions;
  /// The first of consecutive ones.
  uint32_t start;
  /// How many.
  uint64_t rows;
  /// Where each begins among those that are gathered, and the last one ends.
  const uint64_t *gathered;
  /// How many bytes these are.
  uint64_t bytes;
  /// Outputs: `gathered` in 32 bits each; null where that is not wanted.
  uint32_t *offsets;
  /// Values, one after the other, in whole words of 8 bytes, with zeros beyond the last.
  uint64_t *out;
};

/// Enters keys into a filter.
struct DovetailFilterBuild {
  /// Inputs: keys.
  const void *keys;
  /// How many.
  uint64_t rows;
  /// Words of the filter less one; their number is a power of two.
  uint64_t word_mask;
  /// Bytes per key.
  uint32_t key_bytes;
  /// Output: the filter's words, zero before the call.
  uint64_t *words;
};

/// Reads a few bytes back.
struct DovetailReadBack {
  /// Input: bytes.
  const void *from;
  /// How many.
  uint64_t bytes;
  /// Output: the same in host memory that is pinned.
  void *to;
};

/// Writes a few words that come with the call.
struct DovetailWriteWords {
  /// Inputs: words.
  uint32_t words[DOVETAIL_WORDS_MAX];
  /// How many.
  uint32_t count;
  /// Output: where.
  uint32_t *to;
};

/// Some of the entries of a list.
struct DovetailList {
  /// The first.
  const uint32_t *from;
  /// How many.
  uint64_t count;
  /// Where they begin among those of all lists.
  uint64_t start;
};

/// Puts lists together.
struct DovetailConcat {
  /// Inputs: lists.
  struct DovetailList lists[DOVETAIL_LISTS_MAX];
  /// How many.
  uint32_t list_count;
  /// Output: their entries.
  uint32_t *to;
};

/// Writes where no memory is.
struct DovetailIllegalAccess {
  /// Where.
  uint64_t address;
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

extern int dovetail_pack_keys(const struct DovetailPackKeys *args, DovetailStream stream);

extern int dovetail_value_begins(const struct DovetailValueBegins *args, DovetailStream stream);

extern int dovetail_short_values(const struct DovetailShortValues *args, DovetailStream stream);

extern int dovetail_hash_keys(const struct DovetailHashKeys *args, DovetailStream stream);

extern int dovetail_compare_values(const struct DovetailCompareValues *args, DovetailStream stream);

extern int dovetail_select(const struct DovetailSelect *args, DovetailStream stream);

extern uint64_t dovetail_select_scratch_bytes(uint64_t rows);

extern int dovetail_partition(const struct DovetailPartition *args, DovetailStream stream);

extern uint64_t dovetail_partition_scratch_bytes(uint32_t parents, uint32_t bits);

extern int dovetail_count_partitions(const struct DovetailCountPartitions *args, DovetailStream stream);

extern uint64_t dovetail_count_partitions_scratch_bytes(uint64_t rows, uint32_t bits);

extern int dovetail_sort(const struct DovetailSort *args, DovetailStream stream);

extern uint64_t dovetail_sort_scratch_bytes(uint32_t width, uint64_t rows);

extern int dovetail_sort_image(const struct DovetailSortImage *args, DovetailStream stream);

extern int dovetail_is_sorted(const struct DovetailIsSorted *args, DovetailStream stream);

extern int dovetail_table_insert(const struct DovetailTableInsert *args, DovetailStream stream);

extern int dovetail_table_probe(const struct DovetailTableProbe *args, DovetailStream stream);

extern int dovetail_dense_insert(const struct DovetailDenseInsert *args, DovetailStream stream);

extern int dovetail_dense_probe(const struct DovetailDenseProbe *args, DovetailStream stream);

extern int dovetail_list_units(const struct DovetailListUnits *args, DovetailStream stream);

extern uint64_t dovetail_list_units_scratch_bytes(uint32_t partitions);

extern int dovetail_match_partitions(const struct DovetailMatchPartitions *args, DovetailStream stream);

extern int dovetail_join_partitions(const struct DovetailJoinPartitions *args, DovetailStream stream);

extern int dovetail_lower_bounds(const struct DovetailLowerBounds *args, DovetailStream stream);

extern int dovetail_match_sorted(const struct DovetailMatchSorted *args, DovetailStream stream);

extern int dovetail_pair_starts(const struct DovetailPairStarts *args, DovetailStream stream);

extern uint64_t dovetail_pair_starts_scratch_bytes(uint64_t rows);

extern int dovetail_expand(const struct DovetailExpand *args, DovetailStream stream);

extern int dovetail_mark_runs(const struct DovetailMarkRuns *args, DovetailStream stream);

extern int dovetail_mark(const struct DovetailMark *args, DovetailStream stream);

extern int dovetail_split(const struct DovetailSplit *args, DovetailStream stream);

extern int dovetail_gather(const struct DovetailGather *args, DovetailStream stream);

extern int dovetail_gather_bits(const struct DovetailGatherBits *args, DovetailStream stream);

extern int dovetail_gathered_begins(const struct DovetailGatheredBegins *args, DovetailStream stream);

extern uint64_t dovetail_gathered_begins_scratch_bytes(uint64_t rows);

extern int dovetail_gather_bytes(const struct DovetailGatherBytes *args, DovetailStream stream);

extern int dovetail_filter_build(const struct DovetailFilterBuild *args, DovetailStream stream);

extern int dovetail_read_back(const struct DovetailReadBack *args, DovetailStream stream);

extern int dovetail_write_words(const struct DovetailWriteWords *args, DovetailStream stream);

extern int dovetail_concat(const struct DovetailConcat *args, DovetailStream stream);

extern int dovetail_illegal_access(const struct DovetailIllegalAccess *args, DovetailStream stream);

extern void dovetail_range_begin(const char *name);

extern void dovetail_range_end(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus
