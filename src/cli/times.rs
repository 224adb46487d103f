//! Text of dates, times and durations, also of values for which Arrow has none: values beyond its
//! calendar, and times in unknown zones.

use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use arrow::array::{Array, ArrayRef, AsArray, Int32Array, Int64Array, make_array};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, TimeUnit};
use arrow::error::ArrowError;
use arrow::util::display::{ArrayFormatter, ArrayFormatterFactory, DisplayIndex, FormatOptions, FormatResult};

/// Arrow's text for a duration that is too long for it.
const NO_DURATION: &str = "<invalid>";

/// Makes formatters for arrays that contain values without text.
#[derive(Debug)]
pub(super) enum Times {
    /// Writes a value beyond the calendar as its number and unit, and a time in an unknown zone in
    /// UTC.
    Shown,
    /// Refuses values without text.
    Checked {
        /// True if an array may contain one.
        found: AtomicBool,
    },
}

impl Times {
    pub(super) fn checked() -> Self {
        Self::Checked { found: AtomicBool::new(false) }
    }

    /// True if a column of [`Times::formatter`] may contain a value without text.
    pub(super) fn may_lack_text(&self) -> bool {
        matches!(self, Self::Checked { found } if found.load(Ordering::Relaxed))
    }

    /// Returns a formatter for a column.
    ///
    /// # Errors
    /// Arrow's, for a type that has no text.
    pub(super) fn formatter<'a>(
        &'a self,
        column: &'a dyn Array,
        options: &FormatOptions<'a>,
    ) -> Result<ArrayFormatter<'a>, ArrowError> {
        let options = options.clone().with_formatter_factory(Some(self));
        match self.create_array_formatter(column, &options, None)? {
            Some(formatter) => Ok(formatter),
            None => ArrayFormatter::try_new(column, &options),
        }
    }
}

impl ArrayFormatterFactory for Times {
    fn create_array_formatter<'a>(
        &self,
        array: &'a dyn Array,
        options: &FormatOptions<'a>,
        _field: Option<&'a Field>,
    ) -> Result<Option<ArrayFormatter<'a>>, ArrowError> {
        // Arrow asks for no formatter of a dictionary's values.
        let values = array.as_any_dictionary_opt().map_or(array, |dictionary| dictionary.values().as_ref());
        if unit(values.data_type()).is_none() || all_have_text(values) {
            return Ok(None);
        }
        let values = cast(&array.slice(0, array.len()), values.data_type())?;
        let is_shown = match self {
            Self::Shown => true,
            Self::Checked { found } => {
                found.store(true, Ordering::Relaxed);
                false
            }
        };
        let null = options.null().to_owned();
        Ok(Some(ArrayFormatter::new(Box::new(Odd { values: in_known_zone(values)?, null, is_shown }), options.safe())))
    }
}

/// Values, some without text.
struct Odd {
    values: ArrayRef,
    null: String,
    /// True if values without text are written as numbers.
    is_shown: bool,
}

impl DisplayIndex for Odd {
    fn write(&self, row: usize, to: &mut dyn Write) -> FormatResult {
        if self.values.is_null(row) {
            return Ok(to.write_str(&self.null)?);
        }
        match text(&ArrayFormatter::try_new(&self.values, &FormatOptions::default())?, row) {
            Some(text) => to.write_str(&text)?,
            None if self.is_shown => {
                let unit = unit(self.values.data_type()).unwrap_or_default();
                write!(to, "{} {unit}", numbers(&self.values)?.value(row))?;
            }
            None => return Err(ArrowError::CastError("a value has no text".into()).into()),
        }
        Ok(())
    }
}

/// Returns the unit of the numbers that stand for dates, times or durations; `None` for other types.
fn unit(data_type: &DataType) -> Option<&'static str> {
    Some(match data_type {
        DataType::Date32 => "days",
        DataType::Date64 => "ms",
        DataType::Timestamp(unit, _) | DataType::Time32(unit) | DataType::Time64(unit) | DataType::Duration(unit) => {
            match unit {
                TimeUnit::Second => "s",
                TimeUnit::Millisecond => "ms",
                TimeUnit::Microsecond => "us",
                TimeUnit::Nanosecond => "ns",
            }
        }
        _ => return None,
    })
}

/// True if all values have text. It is enough to look at the least and the greatest.
fn all_have_text(values: &dyn Array) -> bool {
    let Ok(formatter) = ArrayFormatter::try_new(values, &FormatOptions::default()) else { return false };
    let Ok(numbers) = numbers(values) else { return false };
    let valid = || (0..numbers.len()).filter(|row| numbers.is_valid(*row));
    let ends = [valid().min_by_key(|row| numbers.value(*row)), valid().max_by_key(|row| numbers.value(*row))];
    ends.into_iter().flatten().all(|row| text(&formatter, row).is_some())
}

fn text(formatter: &ArrayFormatter<'_>, row: usize) -> Option<String> {
    formatter.value(row).try_to_string().ok().filter(|text| text != NO_DURATION)
}

/// Returns the numbers that stand for dates, times or durations.
fn numbers(values: &dyn Array) -> Result<Int64Array, ArrowError> {
    let as_type = |data_type| values.to_data().into_builder().data_type(data_type).build();
    match values.data_type().primitive_width() {
        Some(4) => Ok(cast(&Int32Array::from(as_type(DataType::Int32)?), &DataType::Int64)?.as_primitive().clone()),
        _ => Ok(Int64Array::from(as_type(DataType::Int64)?)),
    }
}

/// Returns times of an unknown zone as times of UTC, and other values as they are.
fn in_known_zone(values: ArrayRef) -> Result<ArrayRef, ArrowError> {
    match values.data_type() {
        DataType::Timestamp(unit, Some(_)) if ArrayFormatter::try_new(&values, &FormatOptions::default()).is_err() => {
            let utc = DataType::Timestamp(*unit, Some("UTC".into()));
            Ok(make_array(values.to_data().into_builder().data_type(utc).build()?))
        }
        _ => Ok(values),
    }
}
