//! A value and the times of its changes.

/// Values, each with the time from which it holds.
#[derive(Debug, Clone)]
pub(crate) struct Timeline<T>(Vec<(u64, T)>);

impl<T> Timeline<T> {
    /// Starts with a value that has always held.
    pub(crate) fn new(first: T) -> Self {
        Self(vec![(0, first)])
    }

    pub(crate) fn set(&mut self, now: u64, value: T) {
        self.0.push((now, value));
    }

    pub(crate) fn now(&self) -> &T {
        &self.0[self.0.len() - 1].1
    }

    /// The time since which the present value holds.
    pub(crate) fn since(&self) -> u64 {
        self.0[self.0.len() - 1].0
    }

    /// All values that held at some time from `begin` to `end`.
    pub(crate) fn during(&self, begin: u64, end: u64) -> impl Iterator<Item = &T> {
        let first = self.0.partition_point(|(since, _)| *since <= begin).max(1) - 1;
        self.0[first..].iter().take_while(move |(since, _)| *since <= end).map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_has_its_first_state_and_all_changes_until_its_end() {
        let mut line = Timeline::new('a');
        line.set(10, 'b');
        line.set(20, 'c');
        let during = |begin, end| line.during(begin, end).collect::<String>();
        assert_eq!(
            [during(1, 9), during(1, 10), during(12, 15), during(15, 99), during(5, 30)],
            ["a", "ab", "b", "bc", "abc"]
        );
    }
}
