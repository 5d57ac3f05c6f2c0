//! The sandbox of a daemon: all of its threads are restricted further than the thread that starts
//! them. Files that it may use do not take space for ever.

use std::collections::BTreeMap;
use std::fs::{self, File};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{LIMIT, Running, bench, ringhaul, run, serve};
use ringhaul_kit::system::{Tmpfs, can_change_system};
use ringhaul_tools::process::retry;
use rustix::fs::statvfs;
use rustix::process::{Pid, Signal};
use serde_json::json;

use crate::control::Client;
use crate::{DISK_BYTES, test_folders};

/// The threads without a table: the one that starts the others, which passes its denials on.
const WITHOUT_TABLE: [&str; 1] = ["ringhaul-starts"];

/// Kinds of threads that the daemon of the test has, as far as the kernel keeps their names.
const KINDS: [&str; 13] = [
    "iothread-0",
    "iothread-1",
    "ringhaul",
    "ringhaul-client",
    "ringhaul-contro",
    "ringhaul-denied",
    "ringhaul-events",
    "ringhaul-log",
    "ringhaul-metric",
    "ringhaul-pool",
    "ringhaul-rpc",
    "ringhaul-signal",
    "ringhaul-watch",
];

/// The numbers of filters of system calls that threads have, by the names of the threads.
fn filters(process: Pid) -> Result<BTreeMap<String, u32>> {
    let mut filters = BTreeMap::new();
    for task in fs::read_dir(format!("/proc/{}/task", process.as_raw_nonzero()))? {
        // A thread may have ended since the listing.
        let Ok(status) = fs::read_to_string(task?.path().join("status")) else { continue };
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.map(|text| text.trim_start_matches(':').trim().to_owned())
        };
        let name = field("Name").context("no name")?;
        // The kernel's own threads, which work for a ring, make no system calls.
        if name.starts_with("iou-") {
            continue;
        }
        let count = field("Seccomp_filters").context("Linux before 5.9")?.parse()?;
        let least: &mut u32 = filters.entry(name).or_insert(count);
        *least = count.min(*least);
    }
    Ok(filters)
}

#[test]
fn every_thread_has_a_table_of_system_calls() -> Result<()> {
    let folders = test_folders()?;
    folders.disk("disk.img", DISK_BYTES)?;
    let mut command = serve(&folders.socket("vm.sock"), &folders.path("disk.img"))?;
    command.args(["--engine", "threads", "--iothreads", "2", "--num-queues", "2"]);
    command.arg("--control").arg(folders.socket("control"));
    command.arg("--metrics").arg(format!("unix:{}", folders.socket("metrics").display()));
    let mut daemon = Running::serve(&mut command)?;
    let mut subscriber = Client::new(&folders.socket("control"))?;
    ensure!(subscriber.call("subscribe", &json!({}))?["result"] == json!({}), "no subscription");
    let options = "--rw randread --number_ios 64";
    run(&mut bench(&folders.socket("vm.sock"), options)?)?.expect_code(0)?;
    let filters = filters(daemon.pid())?;
    let inherited = filters[WITHOUT_TABLE[0]];
    for (name, count) in &filters {
        let has_table = *count > inherited;
        ensure!(has_table != WITHOUT_TABLE.contains(&&**name), "{name}: {filters:?}");
    }
    for kind in KINDS {
        ensure!(filters.contains_key(kind), "no thread {kind}: {filters:?}");
    }
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// The sandbox holds the files that are named at the start. docs/internals/security.md has the
/// remedy.
#[test]
fn the_space_of_a_removed_disk_is_free_at_once() -> Result<()> {
    if !can_change_system("mounts") {
        return Ok(());
    }
    let (folders, disks) = (test_folders()?, Tmpfs::mount(4 * DISK_BYTES)?);
    let [named, passed] = ["named", "passed"].map(|name| disks.path().join(name));
    for path in [&named, &passed] {
        fs::write(path, vec![7; usize::try_from(DISK_BYTES)?])?;
    }
    let control = folders.socket("control");
    let mut command = serve(&folders.socket("named.sock"), &named)?;
    let mut daemon = Running::serve(command.args(["--name", "named", "--control"]).arg(&control))?;
    let mut add = ringhaul()?;
    add.args(["ctl", "--control"]).arg(&control).args(["add", "--name", "passed"]);
    add.arg("--socket-path").arg(folders.socket("passed.sock")).arg("--blk-file").arg(&passed);
    run(&mut add)?.expect_code(0)?;

    let free = || statvfs(disks.path()).map(|found| found.f_bfree * found.f_frsize);
    for (name, path, is_named) in [("passed", &passed, false), ("named", &named, true)] {
        let start = free()?;
        let mut remove = ringhaul()?;
        remove.args(["ctl", "--control"]).arg(&control).args(["remove", name]);
        run(&mut remove)?.expect_code(0)?;
        if is_named {
            File::options().write(true).open(path)?.set_len(0)?;
        }
        fs::remove_file(path)?;
        retry(LIMIT, || {
            let freed = free()? - start;
            ensure!(freed >= DISK_BYTES, "{name}: {freed} bytes are free");
            Ok(())
        })?;
    }
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}
