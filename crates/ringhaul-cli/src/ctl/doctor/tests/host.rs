//! Findings about the process of the daemon, its IoThreads, and the host.

use ringhaul::spec::status::QueueState;

use super::super::facts::Facts;
use super::super::finding::Level::{Note, Warning};
use super::{Case, check, disk, examine, front_end, healthy};

#[test]
fn the_host_has_findings() {
    let cases: &[Case] = &[
        (
            |facts| facts.process.mapped_memory_bytes = 3 << 20,
            Warning,
            "guest-memory-above-limit",
            &["share 3 MiB", "limited to 1 MiB"],
        ),
        (|facts| facts.process.open_files = 80, Warning, "open-files", &["80 of 100"]),
        (
            |facts| facts.exports[0].details.status.spec.settings.fixed_buffers = true,
            Warning,
            "locked-memory",
            &["lock 128 KiB", "takes 0 KiB", "buffers 4194304 KiB"],
        ),
        (|facts| facts.process.aio_operations = Some(80), Note, "aio-operations", &["80 of 100"]),
        (
            |facts| {
                facts.process.aio_operations = Some(80);
                disk(facts).engine = Some("aio".into());
            },
            Warning,
            "aio-operations",
            &["80 of 100"],
        ),
        (|facts| facts.process.sandbox = "off".into(), Warning, "sandbox", &["--sandbox off"]),
        (
            |facts| facts.process.sandbox_lacks = vec!["no Landlock".into()],
            Warning,
            "sandbox",
            &["no Landlock"],
        ),
        (|facts| facts.process.dropped_log_lines = 5, Warning, "dropped-log-lines", &["5 lines"]),
        (
            |facts| {
                facts.threads[0].stats[1].run_delay_ns = 200_000_000;
                facts.threads[0].stats[1].cpu_ns = 1_000_000_000;
            },
            Warning,
            "busy-host",
            &["iothread-0 waited", "10% of the time and ran for 50%", "CPUs 0-1"],
        ),
        (
            |facts| {
                facts.exports[0].vcpus[0].cpus = "0".into();
                facts.exports[0].vcpus[1].cpus = "1".into();
            },
            Warning,
            "shared-cpus",
            &["CPUs 0-1 only", "2 vCPUs"],
        ),
        (
            |facts| {
                facts.threads[0].stats[1].poll_useless_ns = 400_000_000;
                facts.threads[0].stats[1].poll_useful_ns = 400_000_000;
            },
            Warning,
            "useless-polling",
            &["polled for 20%", "for 20% with one", "poll-max-us=64"],
        ),
    ];
    check(cases, None);
}

#[test]
fn a_host_with_normal_figures_has_no_findings() {
    for change in [
        (|facts| facts.process.locked_memory_max_bytes = None) as fn(&mut Facts),
        |facts| facts.process.cgroup_memory_max_bytes = None,
        |facts| facts.process.aio_operations = None,
        |facts| facts.process.open_files_max = None,
        |facts| facts.threads[0].stats[1].run_delay_ns = 199_000_000,
        |facts| {
            facts.threads[0].stats[1].poll_useless_ns = 400_000_000;
            facts.threads[0].stats[1].poll_useful_ns = 420_000_000;
        },
        // vCPUs that may run everywhere are not pinned.
        |facts| facts.exports[0].vcpus[1].cpus = "0-3".into(),
        // A third CPU is left for the IoThread.
        |facts| facts.exports[0].vcpus[0].cpus = "0-2".into(),
        |facts| {
            // The same VMM has a second export.
            facts.exports.extend(healthy().exports);
            facts.exports.iter_mut().for_each(|export| export.vcpus[0].cpus = "0-2".into());
        },
        |facts| facts.threads[0].cpus = String::new(),
        // No ring needs locked memory if io_uring works.
        |facts| facts.process.locked_memory_max_bytes = Some(64 << 10),
        |facts| {
            facts.exports[0].details.status.spec.settings.fixed_buffers = true;
            facts.exports[0].details.front_end = None;
            facts.exports[0].details.status.sessions = 0;
        },
    ] {
        let mut facts = healthy();
        change(&mut facts);
        assert_eq!(examine(&facts), []);
    }
}

/// The figure of `locked-memory` among the findings.
fn locked_memory(facts: &Facts) -> Option<String> {
    let mut found = examine(facts).into_iter();
    found.find(|finding| finding.finding == "locked-memory").map(|finding| finding.figure)
}

#[test]
fn rings_need_locked_memory_if_they_could_not_be_set_up() {
    let mut facts = healthy();
    disk(&mut facts).engine_reason = Some("cannot set up io_uring: ENOMEM".into());
    assert_eq!(locked_memory(&facts), None, "the limit suffices");
    facts.process.locked_memory_max_bytes = Some(64 << 10);
    let figure = locked_memory(&facts).unwrap();
    for words in ["lock 64 KiB", "takes 128 KiB", "buffers 0 KiB"] {
        assert!(figure.contains(words), "no {words:?}: {figure}");
    }
}

/// Two queues on two IoThreads lock the memory twice. Memory of other exports does not count.
#[test]
fn each_io_thread_of_an_export_with_fixed_buffers_locks_its_memory() {
    let mut facts = healthy();
    facts.threads.extend(healthy().threads);
    facts.exports.extend(healthy().exports);
    facts.exports[0].details.status.spec.settings.fixed_buffers = true;
    front_end(&mut facts).session.queues[1].state = QueueState::Running;
    let ends_with = |facts: &Facts, end: &str| locked_memory(facts).unwrap().ends_with(end);
    assert!(ends_with(&facts, "buffers 8388608 KiB"), "{:?}", locked_memory(&facts));
    // The third queue shares the IoThread of the first.
    let mut third = front_end(&mut facts).session.queues[1].clone();
    third.index = 2;
    front_end(&mut facts).session.queues.push(third);
    assert!(ends_with(&facts, "buffers 8388608 KiB"), "{:?}", locked_memory(&facts));
    facts.exports[0].details.status.spec.settings.iothread = Some(1);
    assert!(ends_with(&facts, "buffers 4194304 KiB"), "{:?}", locked_memory(&facts));
}
