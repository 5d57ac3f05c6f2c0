//! Impossible options, and options that take effect.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{READY, Refusals, Running, bench, ringhaul, ringhaul_under, run, serve};
use ringhaul_kit::frontend::message::{Message, code};
use ringhaul_kit::frontend::{Frontend, Setup};
use rustix::process::Signal;
use virtqueue::QueueConfig;

use crate::{DISK_BYTES, test_folders, thread_file};

/// Options that make the daemon log the operations of its IoThreads.
const COUNTERS: [&str; 2] = ["--log", "info,ringhaul::threads::engines=debug"];

#[test]
fn impossible_options_are_refused() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let socket = folders.socket("refused.sock");
    let mut refusals = Refusals::default();
    let with = |option: &str, value: &str| -> Result<Command> {
        let mut command = serve(&socket, &file)?;
        command.args([option, value]);
        Ok(command)
    };
    for (option, value, allowed) in [
        ("--queue-size", "3", "power of two from 4 to 1024"),
        ("--queue-size", "2048", "power of two from 4 to 1024"),
        ("--queue-size", "many", "power of two from 4 to 1024"),
        ("--num-queues", "0", "1..=256"),
        ("--num-queues", "257", "1..=256"),
        ("--iothreads", "0", "1..=256"),
        ("--iothreads", "99999", "1..=256"),
        ("--slice-us", "99", "0, or a number from 100 to 100000"),
        ("--slice-us", "100001", "0, or a number from 100 to 100000"),
        ("--run-max", "0", "a number from 1 to 1024"),
        ("--run-max", "1025", "a number from 1 to 1024"),
        ("--run-max", "all", "a number from 1 to 1024"),
        ("--max-guest-memory", "0", "no front-end can be served without memory"),
        ("--max-mapped-memory", "0", "no front-end can be served without memory"),
        ("--name", "", "characters, without control characters"),
        ("--serial", "123456789012345678901", "20 bytes"),
        ("--serial", "größe", "printable ASCII"),
        ("--engine", "fast", "auto, io_uring, aio, threads"),
        ("--cache", "unsafe", "none, directsync, writeback, writethrough"),
    ] {
        let named = format!("'{value}' for '{option} ");
        refusals.check(&named, with(option, value), &[&named, allowed]);
    }
    for (option, value, words) in [
        ("--logical-block-size", "100", ["100 bytes", "power of two from 512 to 65536"]),
        ("--logical-block-size", "1048576", ["1048576 bytes", "power of two from 512 to 65536"]),
        ("--nonsense", "1", ["--nonsense", "unexpected argument"]),
        ("--disk", "null,size=1G", ["--disk", "--blk-file"]),
        ("--fd", "0", ["--fd", "--socket-path"]),
    ] {
        refusals.check(option, with(option, value), &words);
    }
    for option in ["--sqpoll", "--iopoll", "--fixed-buffers"] {
        let mut command = with("--engine", "aio")?;
        command.arg(option);
        refusals.check(option, Ok(command), &[option, "engine io_uring, not aio"]);
    }
    refusals.finish()
}

#[test]
fn impossible_disks_are_refused() -> Result<()> {
    let folders = test_folders()?;
    let socket = folders.socket("refused.sock");
    let mut refusals = Refusals::default();
    for (disk, words) in [
        ("null", ["needs a size", "null,size=64G"]),
        ("null,size=", ["null,size=", "size has no value"]),
        ("null,size=1X", ["unknown size suffix 'X'", "K, M, G, T"]),
        ("null,size=-1", ["null,size=-1", "'-1' is not a size"]),
        ("null,size=0", ["0 bytes", "not zero"]),
        ("null,size=100", ["100 bytes", "multiple"]),
        ("null,size=99999999999T", ["99999999999T", "not a size"]),
        ("null,path=x", ["unknown key 'path' of disk kind null", "expected: size"]),
        ("null,size", ["'size'", "not of the form KEY=VALUE"]),
        ("file", ["needs a path", "file,path=disk.img"]),
        ("file,path=", ["file,path=", "path has no value"]),
        ("file,path=/nonexistent", ["/nonexistent", "No such file"]),
        ("file,size=1G", ["unknown key 'size' of disk kind file", "expected: path"]),
        ("vhdx,path=x", ["unknown disk kind 'vhdx'", "expected: file, null,"]),
        ("tape", ["unknown disk kind 'tape'", "that begins with /, ./ or ../"]),
    ] {
        let command = ringhaul().map(|mut command| {
            command.arg("serve").arg("--socket-path").arg(&socket).args(["--disk", disk]);
            command
        });
        refusals.check(disk, command, &words);
    }
    let command = ringhaul().map(|mut command| {
        command.arg("serve").arg("--socket-path").arg(&socket);
        command
    });
    refusals.check("none", command, &["no disk is given", "--blk-file", "--disk"]);
    for (words, advice) in [
        (&["--device", "scsi", "--serial", "a", "--lun", "0,null=1M"][..], "use --lun 0,serial="),
        (
            &["--export", "socket-path=/a,device=scsi,serial=a,lun=0,null=1M"],
            "put serial= after its lun=",
        ),
    ] {
        let command = ringhaul().map(|mut command| {
            command.arg("serve").args(words);
            if words[0] != "--export" {
                command.arg("--socket-path").arg(&socket);
            }
            command
        });
        refusals.check(advice, command, &["a serial number belongs to a unit", advice]);
    }
    let command = ringhaul().map(|mut command| {
        command.arg("export");
        command
    });
    refusals.check("no such command", command, &["export", "unrecognized"]);
    refusals.finish()
}

#[test]
fn auto_logs_its_choice_and_the_reason() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?.display().to_string();
    let socket = folders.socket("disk.sock");
    let file_options = ["--blk-file", file.as_str()];
    for (options, expected) in [
        (&["--cache", "none"][..], ": a trial of 256 reads of 4 KiB took "),
        (&["--cache", "directsync"], ": a trial of 256 reads of 4 KiB took "),
        (&["--cache", "writeback"], "engine io_uring: asynchronous with the page cache too"),
        (&["--cache", "writethrough"], "engine io_uring: asynchronous with the page cache"),
        (&["--engine", "io_uring"], "engine io_uring: as requested"),
        (&["--engine", "threads"], "engine threads: as requested"),
        (&["--engine", "aio"], "engine aio: as requested"),
        (
            &["--engine", "aio", "--cache", "writeback"],
            "engine aio: as requested; with the page cache its submits wait",
        ),
    ] {
        let mut command = ringhaul()?;
        command.arg("serve").arg("--socket-path").arg(&socket).args(file_options).args(options);
        let mut daemon = Running::start(&mut command)?;
        daemon.wait_for(expected).with_context(|| format!("{options:?}"))?;
        daemon.wait_for(READY)?;
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0)?;
    }
    Ok(())
}

#[test]
fn queues_are_spread_over_iothreads() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let socket = folders.socket("disk.sock");
    let mut command = serve(&socket, &file)?;
    let mut daemon =
        Running::serve(command.args(["--iothreads", "2", "--num-queues", "4"]).args(COUNTERS))?;
    let options = "--rw randread --numjobs 4 --number_ios 100 --iodepth 4";
    run(&mut bench(&socket, options)?)?.expect_code(0)?;
    daemon.signal(Signal::TERM)?;
    let ended = daemon.finish()?.expect_code(0)?;
    for thread in ["iothread-0: operations: 200 reads", "iothread-1: operations: 200 reads"] {
        ensure!(ended.stderr.contains(thread), "no {thread:?}:\n{}", ended.stderr);
    }
    Ok(())
}

/// Messages with eventfds carry the queue number in eight bits, so there is no queue 256.
#[test]
fn an_export_has_up_to_256_queues() -> Result<()> {
    let folders = test_folders()?;
    let socket = folders.socket("disk.sock");
    let mut command = serve(&socket, &folders.disk("disk.img", DISK_BYTES)?)?;
    let mut daemon = Running::serve(&mut command)?;
    let mut frontend = Frontend::connect(&socket, &Setup::default())?;
    frontend.negotiate()?;
    let query = Message::new(code::GET_QUEUE_NUM, Vec::new());
    ensure!(frontend.exchange_number(&query)? == 256);
    ensure!(frontend.config(34, 2)? == 256_u16.to_le_bytes());
    frontend.share_memory()?;
    // The last queue serves like the first.
    let last = 255;
    let QueueConfig { desc_table, avail_ring, used_ring, size, .. } = frontend.rings[1].config;
    let [desc_table, used_ring, avail_ring] =
        [desc_table, used_ring, avail_ring].map(|addr| frontend.memory.user_addr(addr));
    let addresses = Message::ring_addresses(last.into(), desc_table?, used_ring?, avail_ring?);
    let [call, kick] = [&frontend.rings[1].call, &frontend.rings[1].kick].map(Arc::clone);
    for message in [
        Message::ring_state(code::SET_VRING_NUM, last.into(), size.into()),
        addresses,
        Message::ring_fd(code::SET_VRING_CALL, last, Some(&call)),
        Message::ring_fd(code::SET_VRING_KICK, last, Some(&kick)),
        Message::ring_state(code::SET_VRING_ENABLE, last.into(), 1),
    ] {
        frontend.send_checked(message)?;
    }
    ensure!(frontend.read(1, 0, 512)? == [0; 512]);
    frontend.expect_refused(Message::ring_state(code::SET_VRING_NUM, 256, size.into()))?;
    drop(frontend);
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// Many disks of one daemon, each on its own socket, are served side by side. An idle daemon uses
/// no CPU time for them.
#[test]
fn a_daemon_serves_many_disks_and_sleeps_when_idle() -> Result<()> {
    const DISKS: usize = 64;
    let folders = test_folders()?;
    let mut command = ringhaul()?;
    command.arg("serve").args(["--iothreads", "2", "--num-queues", "2"]).args(COUNTERS);
    let mut sockets = Vec::new();
    for number in 0..DISKS {
        let file = folders.disk(&format!("disk{number}.img"), 1 << 20)?;
        let socket = folders.socket(&format!("disk{number}.sock"));
        let export = format!("socket-path={},blk-file={}", socket.display(), file.display());
        command.args(["--export", &export]);
        sockets.push(socket);
    }
    // An export with a different engine shares the same threads.
    let null = folders.socket("null.sock");
    command.args(["--export", &format!("socket-path={},null=1M", null.display())]);
    sockets.push(null);
    let mut daemon = Running::start(&mut command)?;
    for _ in 0..sockets.len() {
        daemon.wait_for(READY)?;
    }
    for socket in [&sockets[0], &sockets[1], &sockets[DISKS - 1]] {
        let options = "--rw randrw --number_ios 200 --iodepth 8 --verify";
        run(&mut bench(socket, options)?)?.expect_code(0)?;
    }
    let options = "--rw randrw --number_ios 200 --iodepth 8";
    run(&mut bench(&sockets[DISKS], options)?)?.expect_code(0)?;
    // Front-ends are attached and idle: the queues are armed, and no thread runs.
    let clients = sockets.iter().map(|socket| Frontend::attach(socket, &Setup::default()));
    let clients = clients.collect::<Result<Vec<_>>>()?;
    let mut before = times_run(&daemon)?;
    loop {
        std::thread::sleep(Duration::from_millis(100));
        let now = times_run(&daemon)?;
        if now == before {
            break;
        }
        before = now;
    }
    // A fixed span of time is observed, so this sleep waits for no event.
    std::thread::sleep(Duration::from_secs(1));
    ensure!(times_run(&daemon)? == before, "an IoThread runs though nobody asks for anything");
    drop(clients);
    daemon.signal(Signal::TERM)?;
    let output = daemon.finish()?.expect_code(0)?.stderr;
    for (name, lines) in [("iothread-0", 1), ("iothread-1", 1), ("iothread-2", 0)] {
        let summaries = output.lines().filter(|line| line.contains(&format!("{name}: operations")));
        ensure!(summaries.count() == lines, "not {lines} of {name}: {output}");
    }
    for socket in &sockets {
        ensure!(!socket.exists(), "{} is still there", socket.display());
    }
    Ok(())
}

/// The number of times that each IoThread was scheduled.
fn times_run(daemon: &Running) -> Result<Vec<u64>> {
    let times = ["iothread-0", "iothread-1"].map(|name| {
        let statistics = std::fs::read_to_string(thread_file(daemon, name, "schedstat")?)?;
        let third = statistics.split_whitespace().nth(2).context("schedstat has no slices")?;
        Ok(third.parse()?)
    });
    times.into_iter().collect()
}

/// The kernel reports the time slice of the daemon's threads.
#[test]
fn the_option_sets_the_time_slice_of_an_iothread() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("slice.img", DISK_BYTES)?;
    let of_kernel = slice("/proc/self/sched")?;
    for (options, expected) in [
        (&[][..], Some("300000")),
        (&["--slice-us", "700"], Some("700000")),
        (&["--slice-us", "0"], of_kernel.as_deref()),
    ] {
        let socket = folders.socket("slice.sock");
        let mut daemon = Running::serve(serve(&socket, &file)?.args(options))?;
        let found = slice(thread_file(&daemon, "iothread-0", "sched")?)?;
        // Kernels before 6.12, and kernels without debugging of the scheduler, do not report it.
        let expected = of_kernel.as_ref().and(expected).map(str::to_owned);
        ensure!(found == expected, "{options:?}: {found:?}");
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0)?;
    }
    Ok(())
}

/// The time slice of a thread, read from its file `sched`.
fn slice(sched: impl AsRef<std::path::Path>) -> Result<Option<String>> {
    let text = std::fs::read_to_string(sched).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("se.slice"));
    Ok(line.map(|line| line.trim_start_matches([' ', ':']).to_owned()))
}

/// Switches for measurements change the way of working, not the results.
#[test]
fn switches_do_not_change_the_result() -> Result<()> {
    const ALL_OFF: &[&str] = &[
        "--harvest-on-submit",
        "off",
        "--submit-batch",
        "off",
        "--notify-batch",
        "off",
        "--prefetch",
        "off",
        "--completion-ring",
        "getevents",
        "--poll-max-us",
        "0",
    ];
    let folders = test_folders()?;
    for (engine, options) in [
        ("io_uring", ALL_OFF),
        ("aio", ALL_OFF),
        ("threads", ALL_OFF),
        ("io_uring", &["--sqpoll"]),
        ("io_uring", &["--iopoll"]),
        ("io_uring", &["--iopoll", "--fixed-buffers", "--harvest-on-submit", "off"]),
        ("io_uring", &["--iopoll", "--sqpoll", "--cache", "directsync"]),
        ("io_uring", &["--fixed-buffers", "--poll-budget", "10"]),
        ("io_uring", &["--harvest-on-submit", "off"]),
        ("aio", &["--harvest-on-submit", "off"]),
        ("aio", &["--completion-ring", "getevents"]),
    ] {
        let file = folders.disk("switched.img", DISK_BYTES)?;
        let socket = folders.socket("switched.sock");
        let mut command = serve(&socket, &file)?;
        let mut daemon = Running::serve(command.args(["--engine", engine]).args(options))?;
        let load = "--rw randrw --number_ios 500 --iodepth 16 --numjobs 2 --verify";
        run(&mut bench(&socket, load)?)
            .and_then(|finished| finished.expect_code(0))
            .with_context(|| format!("{engine} with {options:?}"))?;
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0)?;
    }
    Ok(())
}

#[test]
fn sqpoll_without_a_cpu_of_its_own_is_warned_of() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let socket = folders.socket("sqpoll.sock");
    let path = |path: &std::path::Path| path.display().to_string();
    let options = ["--socket-path", &path(&socket), "--blk-file", &path(&file), "--sqpoll"];
    let mut command = ringhaul_under(&["taskset", "--cpu-list", "0"])?;
    command.arg("serve").args(options).args(["--engine", "io_uring"]);
    let mut daemon = Running::serve(&mut command)?;
    daemon.signal(Signal::TERM)?;
    let messages = daemon.finish()?.expect_code(0)?.stderr;
    assert!(messages.contains("--sqpoll keeps 2 CPUs busy"), "{messages}");
    Ok(())
}

/// A disk without polled completions is still served; the log gives the reason, once.
#[test]
fn a_disk_that_cannot_be_polled_is_served_and_named() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("plain.img", DISK_BYTES)?;
    let socket = folders.socket("plain.sock");
    let mut command = serve(&socket, &file)?;
    // The page cache is never polled, even if the disks of the system have queues for polling.
    command.args(["--engine", "io_uring", "--iopoll", "--iothreads", "2", "--cache", "writeback"]);
    command.args(COUNTERS);
    let mut daemon = Running::serve(&mut command)?;
    for _ in 0..2 {
        let load = "--rw randrw --number_ios 100 --iodepth 16 --numjobs 2 --verify";
        run(&mut bench(&socket, load)?)?.expect_code(0)?;
    }
    daemon.signal(Signal::TERM)?;
    let text = daemon.finish()?.expect_code(0)?.stderr;
    let line = format!("{}: cannot poll for completions: polling needs direct", file.display());
    ensure!(text.matches(&line).count() == 1, "{text}");
    ensure!(text.matches("; 0 polled for;").count() == 2, "{text}");
    Ok(())
}

/// With `--engine auto` the daemon may choose an engine without a requested feature.
#[test]
fn an_option_without_effect_is_named() -> Result<()> {
    let folders = test_folders()?;
    let socket = folders.socket("null.sock");
    let mut command = ringhaul()?;
    command.arg("serve").arg("--socket-path").arg(&socket);
    command.args(["--disk", "null,size=1G", "--iopoll"]);
    let mut daemon = Running::serve(&mut command)?;
    daemon.signal(Signal::TERM)?;
    let text = daemon.finish()?.expect_code(0)?.stderr;
    ensure!(
        text.contains("--iopoll: no effect, because only engine io_uring supports it"),
        "{text}"
    );
    Ok(())
}

/// The heap reads its options before `main`, and misses options that the linker dropped.
#[test]
fn the_heap_has_two_arenas() -> Result<()> {
    let mut command = ringhaul()?;
    let output = run(command.arg("--version").env("MALLOC_CONF", "confirm_conf:true"))?;
    let output = output.expect_code(0)?.stderr;
    ensure!(output.contains("Set conf value: narenas:2"), "{output}");
    Ok(())
}
