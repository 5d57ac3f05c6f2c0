//! Medians with their spread, and their text form.

use serde::Serialize;

/// The median, the least and the greatest of some measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// Returns `None` if there are no values.
    pub(crate) fn from_values(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = match values.len() % 2 {
            0 => f64::midpoint(values[middle - 1], values[middle]),
            _ => values[middle],
        };
        Some(Self { median, min, max })
    }

    /// `median (min–max)`; the median alone if there is no spread.
    pub(crate) fn show(&self) -> String {
        let [median, min, max] = [self.median, self.min, self.max].map(number);
        match min == max {
            true => median,
            false => format!("{median} ({min}–{max})"),
        }
    }
}

/// A cell of a table, for a value that may be missing.
pub(crate) fn show(value: Option<Spread>) -> String {
    value.map_or_else(|| "–".to_owned(), |spread| spread.show())
}

/// Three significant digits, thousands as k.
pub(crate) fn number(value: f64) -> String {
    match value {
        value if value >= 100_000.0 => format!("{:.0}k", value / 1e3),
        value if value >= 10_000.0 => format!("{:.1}k", value / 1e3),
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value if value >= 0.1 => format!("{value:.2}"),
        value => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(Spread::from_values([]), None);
        assert_eq!(Spread::from_values([2.0]).unwrap().median, 2.0);
        let odd = Spread::from_values([5.0, 1.0, 3.0]).unwrap();
        assert_eq!(odd, Spread { median: 3.0, min: 1.0, max: 5.0 });
        assert_eq!(Spread::from_values([4.0, 1.0, 2.0, 9.0]).unwrap().median, 3.0);
    }

    #[test]
    fn numbers_have_three_digits() {
        let shown = [1_234_567.0, 12_345.0, 1234.0, 12.34, 1.234, 0.0123, 0.0].map(number);
        assert_eq!(shown, ["1235k", "12.3k", "1234", "12.3", "1.23", "0.012", "0.000"]);
    }

    #[test]
    fn a_spread_is_shown_if_there_is_one() {
        assert_eq!(Spread::from_values([2.0, 2.0]).unwrap().show(), "2.00");
        assert_eq!(Spread::from_values([1.0, 2.0, 4.0]).unwrap().show(), "2.00 (1.00–4.00)");
        assert_eq!(show(None), "–");
    }
}
