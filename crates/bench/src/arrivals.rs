//! The times at which an open loop makes its requests, regardless of the server.

#![forbid(unsafe_code)]

use std::time::Duration;

use iomem::fits;

/// The distribution of the starts of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RateProcess {
    /// At even distances.
    Linear,
    /// Independently of each other, as from many users: the intervals are distributed
    /// exponentially.
    Poisson,
}

impl RateProcess {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Poisson => "poisson",
        }
    }
}

/// The start times of a job's requests, in order.
#[derive(Debug, Clone)]
pub(crate) struct Arrivals {
    interval: Duration,
    process: RateProcess,
    rng: fastrand::Rng,
    next: Duration,
}

impl Arrivals {
    /// `per_second` requests, with starts drawn from `seed`.
    pub(crate) fn new(per_second: u32, process: RateProcess, seed: u64) -> Self {
        let interval = Duration::from_secs(1) / per_second;
        let rng = fastrand::Rng::with_seed(seed);
        Self { interval, process, rng, next: Duration::ZERO }
    }

    /// Starts the schedule at `now_ns`: the first request is due one interval later.
    pub(crate) fn begin(&mut self, now_ns: u64) {
        self.next = Duration::from_nanos(now_ns);
        self.advance();
    }

    /// The time at which the next request is due, in nanoseconds.
    pub(crate) fn next_ns(&self) -> u64 {
        fits(self.next.as_nanos(), "a time in nanoseconds")
    }

    /// Moves on to the request after the next one.
    pub(crate) fn advance(&mut self) {
        self.next += match self.process {
            RateProcess::Linear => self.interval,
            // Above 0 and at most 1, so that the logarithm is a number.
            RateProcess::Poisson => self.interval.mul_f64(-(1.0 - self.rng.f64()).ln()),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PER_SECOND: u32 = 50_000;
    const MANY: u32 = 200_000;

    fn distances(process: RateProcess) -> Vec<f64> {
        let mut arrivals = Arrivals::new(PER_SECOND, process, 7);
        arrivals.begin(1_000_000);
        let mut before = 1_000_000;
        let mut distances = Vec::new();
        for _ in 0..MANY {
            let next = arrivals.next_ns();
            assert!(next >= before, "it goes back in time");
            distances.push((next - before) as f64);
            before = next;
            arrivals.advance();
        }
        distances
    }

    fn mean(values: &[f64]) -> f64 {
        values.iter().sum::<f64>() / f64::from(MANY)
    }

    #[test]
    fn arrivals_have_the_requested_rate() {
        for (process, slack) in [(RateProcess::Linear, 1.0), (RateProcess::Poisson, 200.0)] {
            let mean = mean(&distances(process));
            assert!((mean - 20_000.0).abs() < slack, "{process:?}: {mean} ns apart");
        }
    }

    /// The standard deviation of an exponential distribution is its mean.
    #[test]
    fn a_poisson_process_has_exponential_distances() {
        let distances = distances(RateProcess::Poisson);
        let mean = mean(&distances);
        let squares = distances.iter().map(|distance| (distance - mean).powi(2)).sum::<f64>();
        let deviation = (squares / f64::from(MANY)).sqrt();
        assert!((deviation / mean - 1.0).abs() < 0.02, "{deviation} for a mean of {mean}");
        let short = distances.iter().filter(|&&distance| distance < mean).count();
        let share = short as f64 / f64::from(MANY);
        assert!((share - 0.632).abs() < 0.01, "{share} of them are shorter than the mean");
    }
}
