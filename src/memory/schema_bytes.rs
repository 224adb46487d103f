//! Heap memory of schemas, which may have megabytes of names and metadata.

use std::collections::HashMap;

use arrow::datatypes::{DataType, Field, Schema};

/// Returns about the heap memory of a schema, in bytes: its columns at any depth, with their names,
/// types and metadata, and its own metadata.
pub fn schema_bytes(schema: &Schema) -> u64 {
    let fields = schema.flattened_fields().into_iter().map(field_bytes);
    (fields.sum::<usize>() + metadata_bytes(schema.metadata())) as u64
}

fn field_bytes(field: &Field) -> usize {
    let zone = match field.data_type() {
        DataType::Timestamp(_, Some(zone)) => zone.len(),
        _ => 0,
    };
    size_of::<Field>() + field.name().len() + zone + metadata_bytes(field.metadata())
}

fn metadata_bytes(metadata: &HashMap<String, String>) -> usize {
    /// Memory of an entry in addition to its text.
    const ENTRY_BYTES: usize = 64;
    metadata.iter().map(|(key, value)| key.len() + value.len() + ENTRY_BYTES).sum()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::datatypes::TimeUnit;

    use super::*;

    #[test]
    fn every_text_of_a_schema_counts_at_any_depth() {
        let long = "x".repeat(10_000);
        let text: HashMap<_, _> = [(long.clone(), long.clone())].into();
        let number = |name: &str| Field::new(name, DataType::Int8, true);
        let zone = DataType::Timestamp(TimeUnit::Second, Some(long.as_str().into()));
        let of = |fields: Vec<Field>| schema_bytes(&Schema::new(fields)) as usize;
        let plain = of(vec![number("k")]);
        assert!((1..1000).contains(&plain), "{plain} B");
        for (fields, texts) in [
            (vec![number(&long)], 1),
            (vec![number("k").with_metadata(text.clone())], 2),
            (vec![Field::new("t", zone, true)], 1),
            (vec![Field::new_list("l", Arc::new(number(&long).with_metadata(text.clone())), true)], 3),
            (vec![Field::new_struct("s", vec![number(&long), number("k")], true)], 1),
        ] {
            let bytes = of(fields.clone());
            assert!((texts * 10_000..texts * 10_000 + 1000).contains(&bytes), "{bytes} B for {texts} texts");
        }
        let with_metadata = Schema::new_with_metadata(vec![number("k")], text);
        assert!(schema_bytes(&with_metadata) as usize >= 20_000 + plain);
    }
}
