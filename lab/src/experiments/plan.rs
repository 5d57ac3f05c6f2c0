//! The plan: for each measurement the step that is off and on, the disk, the path to it and the
//! load.

use std::fmt;

use serde::{Serialize, Serializer};

use super::sample::Clock;
use crate::rig::targets::Target;

/// The path between the load and the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Through {
    /// `ringhaul bench --filename`: an engine alone, one IoThread for each job.
    Engine,
    /// `ringhaul serve`: virtqueues on one IoThread.
    Daemon,
    /// `ringhaul serve` without any load.
    IdleDaemon,
}

/// The options of the load generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) name: &'static str,
    /// Options without depth and jobs.
    pub(super) options: &'static [&'static str],
    pub(super) depth: u32,
    pub(super) jobs: u32,
}

/// Options that set the steps.
type Switches = &'static [&'static str];

/// A measurement with a step off and on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cell {
    pub(super) experiment: usize,
    pub(super) target: Target,
    pub(super) through: Through,
    pub(super) engine: &'static str,
    pub(super) load: Load,
    pub(super) off: Switches,
    pub(super) on: Switches,
}

impl Cell {
    /// The name, such as `2/zram/daemon/aio/randread-4k-128-in-flight`.
    pub(super) fn name(&self) -> String {
        let load = self.load_and_option().replace(", ", "-").replace(' ', "-");
        let Self { experiment, target, through, engine, .. } = self;
        let through = through.to_string().replace(' ', "-");
        format!("{experiment}/{target}/{through}/{engine}/{load}")
    }
}

impl Cell {
    /// The definition of latency in this cell.
    pub(super) fn clock(&self) -> Clock {
        match (self.through, self.off) {
            // From the submit on, the wait of an op for its batch would not count.
            (Through::Engine, SUBMIT_OFF) => Clock::QueuedToFound,
            (Through::Engine, _) => Clock::SubmitToHarvest,
            _ => Clock::QueuedToFound,
        }
    }

    /// A name for pictures and lists.
    pub(super) fn short_name(&self) -> String {
        let load = match (self.load == FILE_SERVER, self.load.depth, self.load.jobs) {
            (true, ..) => "file server".to_owned(),
            (_, depth, 1) => format!("depth {depth}"),
            (_, depth, jobs) => format!("{jobs} \u{d7} {depth}"),
        };
        let through = match (self.through, self.target) {
            (Through::Engine, _) => format!("{} alone", self.engine),
            (_, Target::Null) => "daemon".to_owned(),
            _ => format!("daemon {}", self.engine),
        };
        format!("{}, {through}, {load}{}", self.target, self.option())
    }

    /// The load, with the option if an experiment covers several.
    pub(super) fn load_and_option(&self) -> String {
        format!("{}{}", self.load.name, self.option())
    }

    fn option(&self) -> &'static str {
        match self.off {
            POLL_OFF => ", busy-poll",
            SUBMIT_OFF => ", submit",
            PACING_OFF => ", pacing",
            GRACE_OFF => ", grace",
            _ => "",
        }
    }
}

impl fmt::Display for Through {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Engine => "engine alone",
            Self::Daemon => "daemon",
            Self::IdleDaemon => "idle daemon",
        })
    }
}

impl Serialize for Through {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// An experiment, in words.
pub(super) struct Experiment {
    pub(super) number: usize,
    pub(super) title: &'static str,
    /// The tested question.
    pub(super) tests: &'static str,
    /// The first description of the idea.
    pub(super) credit: &'static str,
    /// The meaning of "off" and "on".
    pub(super) sides: &'static str,
}

pub(super) const EXPERIMENTS: [Experiment; 6] = [
    Experiment {
        number: 1,
        title: "The completion ring read in userspace",
        tests: "Linux AIO's completions lie in a ring that is mapped into the process. Does \
                reading it there, instead of asking the kernel with io_getevents, pay?",
        credit: "Roman Pen, \u{201c}linux-aio: consume events in userspace instead of calling \
                 io_getevents\u{201d}, patch to QEMU, 2016.",
        sides: "off: --completion-ring getevents; on: --completion-ring userspace; both without \
                busy-polling, which would find completions too",
    },
    Experiment {
        number: 2,
        title: "Completions harvested right after submitting",
        tests: "A fast device has finished requests by the time that their submit returns. Does \
                looking for completions there, rather than when the eventfd wakes the loop, make \
                latencies shorter and batches smaller?",
        credit: "Roman Pen, \u{201c}linux-aio: process completions from ioq_submit()\u{201d}, \
                 patch to QEMU, 2016. Its message has the same table of completions found at once.",
        sides: "off: --harvest-on-submit off; on: --harvest-on-submit on; both without \
                busy-polling, which would find completions too",
    },
    Experiment {
        number: 3,
        title: "One call for many completed requests",
        tests: "Every call to the driver is a write to an eventfd. Does putting it off to the end \
                of a run, so that many completed requests share one, make more of them possible, \
                and does it cost anything when there is only one?",
        credit: "Stefan Hajnoczi, \u{201c}virtio: use blk_io_plug_call() in \
                 virtio_irqfd_notify()\u{201d}, patch to QEMU, 2023. Its message names 9% more \
                 IOPS with 8 jobs at depth 64, and 1% less, perhaps noise, at depth 1.",
        sides: "off: --notify-batch off; on: --notify-batch on",
    },
    Experiment {
        number: 4,
        title: "Many operations in one submit, and busy-polling",
        tests: "Does one system call for all operations of a run pay? Does looking at the rings \
                for a while before sleeping make single requests faster, and does it leave an idle \
                daemon idle?",
        credit: "QEMU's blk_io_plug(), by which submits are put off; Stefan Hajnoczi's patch of \
                 the third experiment uses it for calls.",
        sides: "off: --submit-batch off, or --poll-max-us 0; on: --submit-batch on, or \
                --poll-max-us 64",
    },
    Experiment {
        number: 5,
        title: "Ops kept back, completions that gather, and eventfds left out",
        tests: "A loop device completes many operations together. Does keeping some back, or \
                letting completions gather before a system call posts them, make it faster? \
                Does a disk that completes within the submit gain without eventfd writes?",
        credit: "Ringhaul.",
        sides: "off: --pacing off, --grace off, or --omit-announcements off; on: the default",
    },
    Experiment {
        number: 6,
        title: "Everything off against everything on",
        tests: "What do all of these do together, in the daemon?",
        credit: "All of the above.",
        sides: "off: --completion-ring getevents --harvest-on-submit off --submit-batch off \
                --notify-batch off --prefetch off --poll-max-us 0 --pacing off --grace off \
                --omit-announcements off; on: none of these options",
    },
];

const RANDREAD: &[&str] = &["--rw", "randread", "--bs", "4k"];

const fn randread(name: &'static str, depth: u32, jobs: u32) -> Load {
    Load { name, options: RANDREAD, depth, jobs }
}

pub(super) const DEPTH_1: Load = randread("randread 4k, depth 1", 1, 1);
pub(super) const DEPTH_64: Load = randread("randread 4k, depth 64", 64, 1);
pub(super) const DEPTH_64_JOBS_8: Load = randread("randread 4k, 8 jobs, depth 64", 64, 8);
/// For the daemon, which decides by itself how many requests it submits at once.
pub(super) const FLIGHT_128: Load = randread("randread 4k, 128 in flight", 128, 1);
/// For an engine alone.
pub(super) const FLIGHT_128_BY_16: Load = Load {
    name: "randread 4k, 128 in flight, submits of 16",
    options: &["--rw", "randread", "--bs", "4k", "--iodepth-batch", "16"],
    depth: 128,
    jobs: 1,
};
/// Reads and writes.
pub(super) const FILE_SERVER: Load = Load {
    name: "file server pattern, 8 jobs, depth 16",
    options: &["--profile", "file-server"],
    depth: 16,
    jobs: 8,
};
pub(super) const IDLE: Load = Load { name: "no load", options: &[], depth: 1, jobs: 1 };

const REAL: [Target; 3] = [Target::Zram, Target::Loop, Target::File];
const ENGINES: [&str; 3] = ["aio", "io_uring", "threads"];

// Busy-polling reads the ring in userspace. If one side must not read it there, busy-polling is off
// on both sides, or its effect would count as that of the step.
const GETEVENTS: Switches = &["--completion-ring", "getevents", "--poll-max-us", "0"];
const USERSPACE: Switches = &["--completion-ring", "userspace", "--poll-max-us", "0"];
const HARVEST_OFF: Switches = &["--harvest-on-submit", "off", "--poll-max-us", "0"];
const HARVEST_ON: Switches = &["--harvest-on-submit", "on", "--poll-max-us", "0"];
const NOTIFY_OFF: Switches = &["--notify-batch", "off"];
const NOTIFY_ON: Switches = &["--notify-batch", "on"];
const SUBMIT_OFF: Switches = &["--submit-batch", "off"];
const SUBMIT_ON: Switches = &["--submit-batch", "on"];
const POLL_OFF: Switches = &["--poll-max-us", "0"];
const POLL_ON: Switches = &["--poll-max-us", "64"];
const PACING_OFF: Switches = &["--pacing", "off"];
const GRACE_OFF: Switches = &["--grace", "off"];
const ANNOUNCEMENTS_ON: Switches = &["--omit-announcements", "off"];
const ALL_OFF: Switches = &[
    "--completion-ring",
    "getevents",
    "--harvest-on-submit",
    "off",
    "--submit-batch",
    "off",
    "--notify-batch",
    "off",
    "--prefetch",
    "off",
    "--poll-max-us",
    "0",
    "--pacing",
    "off",
    "--grace",
    "off",
    "--omit-announcements",
    "off",
];
const ALL_ON: Switches = &[];

/// The engine of experiments about other steps. Not `auto`, which may choose differently in each
/// round.
pub(super) fn plain_engine(target: Target) -> &'static str {
    // A null disk has no operations, so no engine matters.
    if target == Target::Null { "auto" } else { "aio" }
}

/// The cells with `pattern` in their name, in the order of the report.
pub(super) fn wanted(pattern: &str) -> Vec<Cell> {
    let mut cells = Vec::new();
    let mut add = |experiment, target, through, engine, load, (off, on)| {
        cells.push(Cell { experiment, target, through, engine, load, off, on });
    };
    for target in REAL {
        for load in [DEPTH_1, DEPTH_64] {
            add(1, target, Through::Engine, "aio", load, (GETEVENTS, USERSPACE));
        }
        for engine in ENGINES {
            let sides = (HARVEST_OFF, HARVEST_ON);
            add(2, target, Through::Engine, engine, FLIGHT_128_BY_16, sides);
            add(2, target, Through::Daemon, engine, FLIGHT_128, sides);
            add(2, target, Through::Daemon, engine, FILE_SERVER, sides);
            add(4, target, Through::Engine, engine, DEPTH_64, (SUBMIT_OFF, SUBMIT_ON));
        }
    }
    for target in Target::ALL {
        for load in [DEPTH_64_JOBS_8, DEPTH_1] {
            let sides = (NOTIFY_OFF, NOTIFY_ON);
            add(3, target, Through::Daemon, plain_engine(target), load, sides);
        }
        add(4, target, Through::Daemon, plain_engine(target), DEPTH_1, (POLL_OFF, POLL_ON));
        let engines: &[_] = if target == Target::Null { &["auto"] } else { &ENGINES };
        for engine in engines {
            for load in [DEPTH_64, DEPTH_1] {
                add(6, target, Through::Daemon, engine, load, (ALL_OFF, ALL_ON));
            }
        }
    }
    for (target, engine, off) in [
        (Target::Loop, "aio", PACING_OFF),
        (Target::File, "aio", PACING_OFF),
        (Target::Loop, "io_uring", PACING_OFF),
        (Target::Loop, "io_uring", GRACE_OFF),
        (Target::File, "io_uring", GRACE_OFF),
        (Target::Zram, "aio", ANNOUNCEMENTS_ON),
    ] {
        add(5, target, Through::Daemon, engine, DEPTH_64, (off, ALL_ON));
    }
    add(4, Target::Null, Through::IdleDaemon, "auto", IDLE, (POLL_OFF, POLL_ON));
    cells.retain(|cell| cell.name().contains(pattern));
    cells.sort_by_key(|cell| cell.experiment);
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_choose() {
        let mut names: Vec<_> = wanted("").iter().map(Cell::name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(wanted("1/").iter().all(|cell| cell.experiment == 1));
        assert_eq!(wanted("2/zram/engine-alone/aio").len(), 1);
        assert!(wanted("nothing").is_empty());
    }

    #[test]
    fn every_experiment_has_cells_and_both_sides_differ() {
        for experiment in &EXPERIMENTS {
            assert!(wanted("").iter().any(|cell| cell.experiment == experiment.number));
        }
        assert!(wanted("").iter().all(|cell| cell.off != cell.on));
    }
}
