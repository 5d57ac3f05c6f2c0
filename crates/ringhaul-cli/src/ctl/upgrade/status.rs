//! The state of a process in the files `status` and `limits` of `/proc`.

use anyhow::{Context, Result};
use rustix::process::{Pid, Resource, Rlimit};

/// The names of limits in `/proc/PID/limits`.
const LIMITS: [(&str, Resource); 16] = [
    ("Max cpu time", Resource::Cpu),
    ("Max file size", Resource::Fsize),
    ("Max data size", Resource::Data),
    ("Max stack size", Resource::Stack),
    ("Max core file size", Resource::Core),
    ("Max resident set", Resource::Rss),
    ("Max processes", Resource::Nproc),
    ("Max open files", Resource::Nofile),
    ("Max locked memory", Resource::Memlock),
    ("Max address space", Resource::As),
    ("Max file locks", Resource::Locks),
    ("Max pending signals", Resource::Sigpending),
    ("Max msgqueue size", Resource::Msgqueue),
    ("Max nice priority", Resource::Nice),
    ("Max realtime priority", Resource::Rtprio),
    ("Max realtime timeout", Resource::Rttime),
];

/// The column of the soft limits.
const SOFT_AT: usize = 26;

/// The rights of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Status {
    /// The real, effective and saved user.
    pub(super) users: [u32; 3],
    /// The real, effective and saved group.
    pub(super) groups: [u32; 3],
    pub(super) more_groups: Vec<u32>,
    pub(super) umask: u32,
    pub(super) no_new_privileges: bool,
    /// The bits of capabilities that programs can get, and that all of them get.
    pub(super) bounding: u64,
    pub(super) ambient: u64,
}

impl Status {
    pub(super) fn read(process: Pid) -> Result<Self> {
        let path = format!("/proc/{}/status", process.as_raw_pid());
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        Self::parse(&text).with_context(|| format!("cannot understand {path}"))
    }

    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
        };
        let ids = |name| -> Option<Vec<u32>> {
            field(name)?.split_whitespace().map(|id| id.parse().ok()).collect()
        };
        let three = |name| ids(name)?.get(..3)?.try_into().ok();
        let bits = |name| u64::from_str_radix(field(name)?, 16).ok();
        let mut more_groups = ids("Groups")?;
        more_groups.sort_unstable();
        Some(Self {
            users: three("Uid")?,
            groups: three("Gid")?,
            more_groups,
            umask: u32::from_str_radix(field("Umask")?, 8).ok()?,
            no_new_privileges: field("NoNewPrivs")? == "1",
            bounding: bits("CapBnd")?,
            ambient: bits("CapAmb")?,
        })
    }
}

/// The limits of a process.
pub(super) fn limits(process: Pid) -> Result<Vec<(&'static str, Resource, Rlimit)>> {
    let path = format!("/proc/{}/limits", process.as_raw_pid());
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    parse_limits(&text).with_context(|| format!("cannot understand {path}"))
}

fn parse_limits(text: &str) -> Option<Vec<(&'static str, Resource, Rlimit)>> {
    let value = |word: &str| match word {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    };
    let parse = |(name, resource): (&'static str, Resource)| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        let mut words = line.get(SOFT_AT..)?.split_whitespace();
        let (current, maximum) = (value(words.next()?)?, value(words.next()?)?);
        Some((name, resource, Rlimit { current, maximum }))
    };
    LIMITS.into_iter().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use rustix::process::{getpid, getrlimit};

    use super::*;

    #[test]
    fn this_process_has_its_own_state() {
        let status = Status::read(getpid()).unwrap();
        assert_eq!(status.users[1], rustix::process::geteuid().as_raw());
        assert_eq!(status.groups[1], rustix::process::getegid().as_raw());
        let limits = limits(getpid()).unwrap();
        assert_eq!(limits.len(), LIMITS.len());
        for (name, resource, limit) in limits {
            assert_eq!(limit, getrlimit(resource), "{name}");
        }
    }

    #[test]
    fn rights_are_read() {
        let text = "Name:\tx\nUmask:\t0027\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nGroups:\t9 3 \n\
                    CapBnd:\t00000000000000c0\nCapAmb:\t0000000000000400\nNoNewPrivs:\t1\n";
        let expected = Status {
            users: [1, 2, 3],
            groups: [5, 6, 7],
            more_groups: vec![3, 9],
            umask: 0o27,
            no_new_privileges: true,
            bounding: 0xc0,
            ambient: 0x400,
        };
        assert_eq!(Status::parse(text), Some(expected));
        assert_eq!(Status::parse("Umask:\t0027\n"), None);
        assert!(parse_limits("Max cpu time              unlimited\n").is_none());
    }
}
