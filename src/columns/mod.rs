//! Arrow to device columns and back: key normalisation, validity, row numbers, and the assembly of
//! results.
//!
//! ```text
//!   record batches ── Rows ──► fixed-width columns ── copy_in ──► device
//!        │                                                         ▲
//!        └─ key columns ── KeyLayout: 32, 64 or 128 bits, or a hash to compare later ── SideKeys
//!
//!   device ── gather_to_host, gather_bytes_to_host ──► fixed_array, bytes_array ──┐
//!   record batches ── gather_on_host ─────────────────────────────────────────────┴──► result
//! ```
//!
//! Where batches of a table share no dictionary, the result gets new dictionaries.
//!
//! This room knows of devices and memory, and nothing of tables, strategies or the wire.

mod dictionary;
mod host_gather;
mod host_keys;
mod key;
mod layout;
mod lists;
mod reader;
mod rows;
mod types;

pub use dictionary::{decoded_bytes, encode, encode_again, encoded_type, with_wanted_keys};
pub(crate) use host_gather::bytes_array;
pub use host_gather::{RowNumber, fixed_array, gather_on_host};
pub use key::{KeyClass, key_class};
pub use layout::{CopiedColumns, DEVICE_BYTES_MAX, KeyColumns, KeyFacts, KeyLayout, Role, SideKeys};
pub use lists::{list_array, list_view_array};
pub use rows::{BatchSlice, Movable, Rows, are_bytes, fixed_width, is_stored_by_row, movable, rows_max, value_bytes};
pub use types::{any_part, children, map_leaves};
