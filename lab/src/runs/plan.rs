//! The plan: the settings, the cells, and the order of a round.

use std::fmt;

use crate::rig::targets::Target;

/// The rule by which a server decides how many requests it takes from a queue at once and when it
/// calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Setting {
    /// Decides by its measurements while the queue runs: the default.
    Adaptive,
    /// Always decides in the same way.
    Fixed { run_max: u16, notify_batch: bool },
}

/// All settings, the adaptive one first. Everywhere else a setting is an index into this list.
pub(super) const SETTINGS: [Setting; 9] = [
    Setting::Adaptive,
    fixed(1, true),
    fixed(1, false),
    fixed(4, true),
    fixed(4, false),
    fixed(16, true),
    fixed(16, false),
    fixed(64, true),
    fixed(64, false),
];

/// The index of the adaptive setting.
pub(super) const ADAPTIVE: usize = 0;

/// The index of the setting that serves each request on its own at once.
pub(super) const ALONE: usize = 2;

const fn fixed(run_max: u16, notify_batch: bool) -> Setting {
    Setting::Fixed { run_max, notify_batch }
}

impl Setting {
    /// Returns the options of `ringhaul serve`.
    pub(super) fn options(self) -> Vec<String> {
        let Self::Fixed { run_max, notify_batch } = self else { return Vec::new() };
        let switch = if notify_batch { "on" } else { "off" };
        let words = ["--run-max", &run_max.to_string(), "--notify-batch", switch];
        words.map(str::to_owned).to_vec()
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Adaptive => out.write_str("adaptive"),
            Self::Fixed { .. } => out.write_str(&self.options().join(" ").replace("--", "")),
        }
    }
}

/// The behaviour of the driver between two checks of the used ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Driver {
    Sleeping,
    /// Sleeps, and checks the ring this many microseconds after a call.
    Delayed(u32),
    Polling,
}

impl Driver {
    pub(super) const ALL: [Self; 4] =
        [Self::Sleeping, Self::Delayed(10), Self::Delayed(50), Self::Polling];

    fn options(self) -> Vec<String> {
        match self {
            Self::Sleeping => Vec::new(),
            Self::Delayed(us) => vec!["--wake-delay".to_owned(), us.to_string()],
            Self::Polling => vec!["--busy-poll".to_owned()],
        }
    }
}

impl fmt::Display for Driver {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sleeping => out.write_str("sleeping"),
            Self::Delayed(us) => write!(out, "delay-{us}"),
            Self::Polling => out.write_str("polling"),
        }
    }
}

/// The requests that the driver makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    Reads,
    Mixed,
}

impl Load {
    pub(super) const ALL: [Self; 2] = [Self::Reads, Self::Mixed];

    /// Returns the options of the load generator.
    pub(super) fn options(self) -> &'static [&'static str] {
        match self {
            Self::Reads => &["--rw", "randread", "--bs", "4k"],
            Self::Mixed => &["--rw", "randrw", "--rwmixread", "70", "--bs", "4k"],
        }
    }
}

impl fmt::Display for Load {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Reads => "randread",
            Self::Mixed => "randrw",
        })
    }
}

/// Requests in flight.
pub(super) const DEPTHS: [u32; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

/// A measurement of all settings, with a constant number of requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) target: Target,
    pub(super) load: Load,
    pub(super) driver: Driver,
    pub(super) depth: u32,
}

impl Cell {
    /// The cell whose rate is the reference for the open loop on `target`.
    pub(super) fn reference(target: Target) -> Self {
        Self { target, load: Load::Reads, driver: Driver::Sleeping, depth: 32 }
    }

    /// Returns the options of the load generator.
    pub(super) fn options(&self) -> Vec<String> {
        let depth = ["--iodepth".to_owned(), self.depth.to_string()];
        let load = self.load.options().iter().map(|word| (*word).to_owned());
        load.chain(depth).chain(self.driver.options()).collect()
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { target, load, driver, depth } = self;
        write!(out, "{target}/{load}-depth-{depth}-{driver}")
    }
}

/// Shares of the highest rate, in percent.
const SHARES: [u32; 3] = [10, 30, 60];

/// A measurement of two settings, with requests at random times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OpenCell {
    pub(super) target: Target,
    /// The share of the highest rate, in percent.
    pub(super) share: u32,
}

impl OpenCell {
    /// The requests per second, if the most are `highest`.
    pub(super) fn rate(&self, highest: f64) -> f64 {
        (highest * f64::from(self.share) / 100.0).round().max(1.0)
    }

    /// Returns the options of the load generator for `rate` requests per second.
    pub(super) fn options(rate: f64) -> Vec<String> {
        let load = Load::Reads.options().iter().copied();
        let rate = format!("{rate:.0}");
        let process = ["--iodepth", "128", "--rate_iops", &rate, "--rate_process", "poisson"];
        load.chain(process).map(str::to_owned).collect()
    }
}

impl fmt::Display for OpenCell {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/open-loop-{}-percent", self.target, self.share)
    }
}

/// The measurements on one disk.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) target: Target,
    pub(super) cells: Vec<Cell>,
    pub(super) open: Vec<OpenCell>,
}

impl Plan {
    /// Selects the cells on `target` with `pattern` in their name.
    pub(super) fn of(target: Target, pattern: &str) -> Self {
        let wanted = |name: String| name.contains(pattern);
        let mut cells = Vec::new();
        for load in Load::ALL {
            for driver in Driver::ALL {
                cells.extend(DEPTHS.map(|depth| Cell { target, load, driver, depth }));
            }
        }
        cells.retain(|cell| wanted(cell.to_string()));
        let open = SHARES.map(|share| OpenCell { target, share }).into_iter();
        let open = open.filter(|cell| wanted(cell.to_string())).collect();
        Self { target, cells, open }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.cells.is_empty() && self.open.is_empty()
    }

    /// The names of all cells.
    pub(super) fn names(&self) -> Vec<String> {
        let cells = self.cells.iter().map(Cell::to_string);
        cells.chain(self.open.iter().map(OpenCell::to_string)).collect()
    }

    /// True if the open loop needs a rate that no planned cell measures.
    pub(super) fn lacks_reference(&self) -> bool {
        !self.open.is_empty() && !self.cells.contains(&Cell::reference(self.target))
    }

    /// The numbers of measurements with requests in flight and in the open loop.
    pub(super) fn measurements(&self, rounds: usize) -> (usize, usize) {
        let reference = usize::from(self.lacks_reference());
        let closed = (self.cells.len() * SETTINGS.len() + reference) * rounds;
        (closed, self.open.len() * 2 * rounds)
    }
}

/// The order of `count` settings in a round.
///
/// Rounds come in pairs, the second in reverse order, so that a machine that gets faster or slower
/// affects each setting alike. Each pair starts with a different setting.
pub(super) fn order(round: usize, count: usize) -> Vec<usize> {
    let start = round / 2 * (count / 3).max(1);
    let forward = (0..count).map(|turn| (start + turn) % count);
    if round.is_multiple_of(2) { forward.collect() } else { forward.rev().collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_the_default_and_eight_fixed_ones() {
        assert!(SETTINGS[ADAPTIVE].options().is_empty());
        let alone = ["--run-max", "1", "--notify-batch", "off"];
        assert_eq!(SETTINGS[ALONE].options(), alone);
        assert_eq!(SETTINGS[ALONE].to_string(), "run-max 1 notify-batch off");
        for run_max in [1, 4, 16, 64] {
            for notify_batch in [true, false] {
                assert!(SETTINGS.contains(&Setting::Fixed { run_max, notify_batch }));
            }
        }
    }

    #[test]
    fn all_disks_have_256_cells_with_names_of_their_own() {
        let plans = Target::ALL.map(|target| Plan::of(target, ""));
        assert_eq!(plans.iter().map(|plan| plan.cells.len()).sum::<usize>(), 256);
        assert_eq!(plans.iter().map(|plan| plan.open.len()).sum::<usize>(), 12);
        let mut names: Vec<_> = plans.iter().flat_map(Plan::names).collect();
        for name in ["zram/randread-depth-8-sleeping", "file/randrw-depth-128-delay-50"] {
            assert!(names.iter().any(|one| one == name), "{name}");
        }
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 268);
    }

    #[test]
    fn a_plan_counts_what_it_measures() {
        assert_eq!(Plan::of(Target::Zram, "").measurements(5), (64 * 9 * 5, 3 * 2 * 5));
        let open = Plan::of(Target::Zram, "zram/open-loop");
        assert!(open.lacks_reference() && open.cells.is_empty());
        assert_eq!(open.measurements(5), (5, 30));
        let one = Plan::of(Target::Zram, "zram/randread-depth-8-polling");
        assert_eq!(one.measurements(2), (18, 0));
        assert!(Plan::of(Target::Null, "zram/").is_empty());
    }

    #[test]
    fn loads_are_as_one_would_type_them() {
        let cell = Plan::of(Target::Loop, "randrw-depth-4-delay-10").cells[0];
        let expected = "--rw randrw --rwmixread 70 --bs 4k --iodepth 4 --wake-delay 10";
        assert_eq!(cell.options().join(" "), expected);
        let cell = Plan::of(Target::Loop, "randread-depth-128-polling").cells[0];
        let expected = "--rw randread --bs 4k --iodepth 128 --busy-poll";
        assert_eq!(cell.options().join(" "), expected);
        let expected =
            "--rw randread --bs 4k --iodepth 128 --rate_iops 3000 --rate_process poisson";
        let open = OpenCell { target: Target::Loop, share: 30 };
        assert_eq!(OpenCell::options(open.rate(9999.0)).join(" "), expected);
        assert_eq!(open.rate(0.0), 1.0, "a rate of zero is refused");
    }

    #[test]
    fn each_round_has_every_setting_once_and_another_first() {
        let rounds: Vec<_> = (0..5).map(|round| order(round, 9)).collect();
        for order in &rounds {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..9).collect::<Vec<_>>());
        }
        let firsts: std::collections::BTreeSet<_> = rounds.iter().map(|order| order[0]).collect();
        assert_eq!(firsts.len(), 5, "{rounds:?}");
        assert_eq!((0..4).map(|round| order(round, 2)[0]).collect::<Vec<_>>(), [0, 1, 1, 0]);
    }

    #[test]
    fn a_pair_of_rounds_gives_each_setting_the_same_time_on_average() {
        for pair in [[0, 1], [2, 3]] {
            let [forward, back] = pair.map(|round| order(round, 9));
            let turn = |order: &[usize], setting| order.iter().position(|one| *one == setting);
            for setting in 0..9 {
                let turns = turn(&forward, setting).unwrap() + turn(&back, setting).unwrap();
                assert_eq!(turns, 8);
            }
        }
    }
}
