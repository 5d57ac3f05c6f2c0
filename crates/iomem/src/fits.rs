//! Checked conversion between types of integers.

use std::fmt::Display;

/// Converts `value` to a type of integer in which it must fit. `what` names the value, and thereby
/// the reason why it fits. A value that does not fit is a fault of the program, which must not go
/// on with a wrong number.
///
/// # Panics
///
/// If `value` does not fit.
#[inline]
#[track_caller]
pub fn fits<T: Copy + Display, U: TryFrom<T>>(value: T, what: &str) -> U {
    U::try_from(value).unwrap_or_else(|_| does_not_fit(&value, what))
}

#[cold]
#[track_caller]
fn does_not_fit(value: &dyn Display, what: &str) -> ! {
    panic!("{what} is {value}, which cannot be")
}

#[cfg(test)]
mod tests {
    use super::fits;

    #[test]
    fn a_number_that_fits_is_the_same() {
        assert_eq!(fits::<u64, u8>(255, "a byte"), 255u8);
        assert_eq!(fits::<i64, usize>(7, "a length"), 7usize);
    }

    #[test]
    #[should_panic(expected = "a byte is 256, which cannot be")]
    fn a_number_that_does_not_fit_panics() {
        fits::<u64, u8>(256, "a byte");
    }
}
