//! Findings about the process of the daemon, its IoThreads, and the host.

use std::collections::{BTreeMap, BTreeSet};

use ringhaul::spec::process::ProcessStatus;
use ringhaul::spec::status::QueueState;

use super::facts::{ExportFacts, Facts, ThreadFacts};
use super::finding::{Finding, Level};
use super::system::cpu_set;

/// Locked memory in bytes that io_uring takes for an IoThread.
const LOCKED_EACH: u64 = 128 << 10;

/// The share of a limit that may be used before it is a finding.
const USED_PERCENT: u64 = 80;

/// The share of the time for which an IoThread may wait for a CPU.
const RUN_DELAY_PERCENT: u64 = 10;

/// The share of the time that useless polling may take.
const POLL_PERCENT: u64 = 20;

/// Findings about the host and the whole daemon. `ms` is the time between the two looks.
pub(super) fn findings(facts: &Facts, ms: u64) -> Vec<Finding> {
    let process = &facts.process;
    let mut found: Vec<Finding> = Vec::new();
    found.extend(guest_memory(process));
    found.extend(open_files(process));
    found.extend(locked_memory(facts));
    found.extend(aio_operations(facts));
    found.extend(sandbox(process));
    found.extend(dropped_lines(process));
    found.extend(facts.threads.iter().filter_map(|thread| busy_host(thread, ms)));
    found.extend(facts.threads.iter().filter_map(|thread| shared_cpus(facts, thread)));
    found.extend(facts.threads.iter().filter_map(|thread| useless_polling(facts, thread, ms)));
    found
}

/// Pages of guest memory that the daemon touches first count as the daemon's, and may end it.
fn guest_memory(process: &ProcessStatus) -> Option<Finding> {
    let (mapped, limit) = (process.mapped_memory_bytes, process.cgroup_memory_max_bytes?);
    if mapped <= limit {
        return None;
    }
    Some(Finding::new(
        Level::Warning,
        "guest-memory-above-limit",
        format!(
            "front-ends share {} MiB, and the cgroup of the daemon is limited to {} MiB, so the \
             kernel may kill the daemon",
            mapped >> 20,
            limit >> 20
        ),
        "MemoryMax=infinity, or a limit above the memory of all guests; or prealloc=on of QEMU's \
         memory backend, so that the pages count as QEMU's",
    ))
}

/// Returns true if nearly all of a limit is used.
fn is_used_up(used: u64, limit: u64) -> bool {
    used.saturating_mul(100) >= limit.saturating_mul(USED_PERCENT)
}

fn open_files(process: &ProcessStatus) -> Option<Finding> {
    let (open, limit) = (process.open_files, process.open_files_max?);
    if !is_used_up(open, limit) {
        return None;
    }
    Some(Finding::new(
        Level::Warning,
        "open-files",
        format!("{open} of {limit} descriptors are open, and a queue takes six"),
        "raise LimitNOFILE= or `ulimit -n`, for example to 65536",
    ))
}

/// Too little locked memory for rings that could not be set up, or for guest memory that is
/// registered.
fn locked_memory(facts: &Facts) -> Option<Finding> {
    let limit = facts.process.locked_memory_max_bytes?;
    let threads = facts.threads.len() as u64;
    let rings = if facts.exports.iter().any(lacks_io_uring) { LOCKED_EACH * threads } else { 0 };
    let registered = facts.exports.iter().map(|export| registered_memory(export, threads));
    let registered = registered.fold(0, u64::saturating_add);
    let needed = rings.saturating_add(registered);
    if limit >= needed {
        return None;
    }
    Some(Finding::new(
        Level::Warning,
        "locked-memory",
        format!(
            "the daemon may lock {} KiB of memory; io_uring takes {} KiB for the IoThreads, and \
             fixed buffers {} KiB",
            limit >> 10,
            rings >> 10,
            registered >> 10
        ),
        "raise LimitMEMLOCK= or `ulimit -l`, then restart the daemon",
    ))
}

/// Returns true if io_uring could not be set up for one of the disks.
fn lacks_io_uring(export: &ExportFacts) -> bool {
    let mut reasons = export.details.disks.iter().filter_map(|disk| disk.engine_reason.as_ref());
    reasons.any(|reason| reason.contains("cannot set up io_uring"))
}

/// The bytes of guest memory that fixed buffers lock: each IoThread with a queue registers all
/// memory of the guest.
fn registered_memory(export: &ExportFacts, threads: u64) -> u64 {
    let settings = &export.details.status.spec.settings;
    let Some(front_end) = export.details.front_end.as_ref().filter(|_| settings.fixed_buffers)
    else {
        return 0;
    };
    let session = &front_end.session;
    let running = session.queues.iter().filter(|queue| queue.state == QueueState::Running);
    let thread_of = |index: u16| match settings.iothread {
        Some(_) => 0,
        None => u64::from(index) % threads.max(1),
    };
    let users: BTreeSet<u64> = running.map(|queue| thread_of(queue.index)).collect();
    session.memory.bytes.saturating_mul(users.len() as u64)
}

/// The system-wide contexts of Linux AIO.
fn aio_operations(facts: &Facts) -> Option<Finding> {
    let (used, limit) = (facts.process.aio_operations?, facts.process.aio_operations_max?);
    if !is_used_up(used, limit) {
        return None;
    }
    let mut disks = facts.exports.iter().flat_map(|export| &export.details.disks);
    let is_wanted = disks.any(|disk| disk.engine.as_deref().is_some_and(|it| it != "io_uring"));
    Some(Finding::new(
        if is_wanted { Level::Warning } else { Level::Note },
        "aio-operations",
        format!("{used} of {limit} operations of Linux AIO are reserved in the whole system"),
        "sysctl fs.aio-max-nr=1048576",
    ))
}

/// A daemon that code of a guest could use to reach other files.
fn sandbox(process: &ProcessStatus) -> Option<Finding> {
    let (fact, remedy) = match (&*process.sandbox, &process.sandbox_lacks[..]) {
        ("on" | "strict", []) => return None,
        ("on" | "strict", lacks) => (
            format!("the sandbox of the daemon is incomplete: {}", lacks.join("; ")),
            "use a kernel that has these parts: Linux 6.12 with CONFIG_SECURITY_LANDLOCK has all",
        ),
        (mode, _) => (
            format!("the daemon has no sandbox (--sandbox {mode})"),
            "restart it with --sandbox on",
        ),
    };
    Some(Finding::new(Level::Warning, "sandbox", fact, remedy))
}

fn dropped_lines(process: &ProcessStatus) -> Option<Finding> {
    let count = process.dropped_log_lines;
    if count == 0 {
        return None;
    }
    Some(Finding::new(
        Level::Warning,
        "dropped-log-lines",
        format!("{count} lines of the log were dropped, because standard error was not read"),
        "let a program read standard error, such as the journal",
    ))
}

/// The growth of a counter in nanoseconds, in percent of the time between the looks.
fn percent_of(growth: [u64; 2], ms: u64) -> u64 {
    let [before, after] = growth;
    after.saturating_sub(before) / 10_000 / ms.max(1)
}

fn busy_host(thread: &ThreadFacts, ms: u64) -> Option<Finding> {
    let [before, after] = &thread.stats;
    let waited = percent_of([before.run_delay_ns, after.run_delay_ns], ms);
    if waited < RUN_DELAY_PERCENT {
        return None;
    }
    let ran = percent_of([before.cpu_ns, after.cpu_ns], ms);
    Some(Finding::new(
        Level::Warning,
        "busy-host",
        format!(
            "{} waited for a CPU for {waited}% of the time and ran for {ran}%; it may run on CPUs \
             {}",
            after.name, thread.cpus
        ),
        "CPUWeight=1000 and Slice=-.slice, or CPUs of its own: CPUAffinity= (docs/guide/tuning.md)",
    ))
}

/// An IoThread that may only run on CPUs to which vCPUs are pinned. More CPUs than pinned vCPUs
/// leave one for the IoThread.
fn shared_cpus(facts: &Facts, thread: &ThreadFacts) -> Option<Finding> {
    let own = cpu_set(&thread.cpus);
    // A VMM may have several exports.
    let vmms: BTreeMap<_, _> =
        facts.exports.iter().map(|export| (export.peer, &export.vcpus)).collect();
    let vcpus = vmms.into_values().flatten();
    let pinned = vcpus.map(|vcpu| cpu_set(&vcpu.cpus)).filter(|set| *set != facts.online_cpus);
    let pinned: Vec<BTreeSet<u32>> = pinned.collect();
    let taken: BTreeSet<u32> = pinned.iter().flatten().copied().collect();
    let has_spare = taken.len() > pinned.len();
    if own.is_empty() || !own.is_subset(&taken) || has_spare {
        return None;
    }
    Some(Finding::new(
        Level::Warning,
        "shared-cpus",
        format!(
            "{} may run on CPUs {} only, and {} vCPUs are pinned to them",
            thread.stats[1].name,
            thread.cpus,
            pinned.len()
        ),
        "give the daemon CPUs without vCPUs: CPUAffinity= (docs/guide/tuning.md)",
    ))
}

fn useless_polling(facts: &Facts, thread: &ThreadFacts, ms: u64) -> Option<Finding> {
    let [before, after] = &thread.stats;
    let useless = percent_of([before.poll_useless_ns, after.poll_useless_ns], ms);
    let useful = percent_of([before.poll_useful_ns, after.poll_useful_ns], ms);
    if useless < POLL_PERCENT || useless < useful {
        return None;
    }
    let settings = &facts.settings;
    Some(Finding::new(
        Level::Warning,
        "useless-polling",
        format!(
            "{} polled for {useless}% of the time without an event, and for {useful}% with one; \
             poll-max-us={}, poll-budget={}",
            after.name, settings.poll_max_us, settings.poll_budget
        ),
        "`ringhaul ctl set poll-budget=1`, or poll-max-us=0 if the host is short of CPU",
    ))
}
