//! Each finding of `ringhaul ctl doctor`, with its cause: a host, a disk or a front-end with that
//! fault.

use std::any::Any;
use std::collections::BTreeSet;
use std::fs;
use std::io::PipeReader;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{
    LIMIT, READY, Running, TestFolders, bench, ringhaul, ringhaul_under, run, serve,
};
use ringhaul_kit::control::taking_over;
use ringhaul_kit::frontend::{Frontend, Setup, blk, feature};
use ringhaul_kit::fuse::Fuse;
use ringhaul_kit::nbd_server::NbdServer;
use ringhaul_kit::system::{
    LoopDevice, MemoryCgroup, Tmpfs, can_change_system, is_installed, print_skipped, thread_id,
};
use ringhaul_tools::process::retry;
use rustix::process::Pid;
use serde_json::{Value, json};

use crate::doctor::{findings, healthy};
use crate::takeover::{Client, TAKEN};
use crate::throttling::begin_writes;
use crate::{DISK_BYTES, test_folders};

/// The programs and devices of a condition, which last until this is dropped.
type Scene = Vec<Box<dyn Any>>;

/// A condition and its findings.
struct Case {
    /// `None`: it cannot be made here.
    make: fn(&TestFolders) -> Result<Option<Scene>>,
    /// The names, the levels and words of the figures.
    found: &'static [(&'static str, &'static str, &'static str)],
}

const CASES: &[Case] = &[
    Case {
        make: no_shared_memory,
        found: &[("memory-not-shared", "harmful", "shares 0 regions of memory")],
    },
    Case {
        make: poor_front_end,
        found: &[
            ("no-inflight-region", "warning", "keeps no inflight region"),
            ("no-event-idx", "note", "without event-idx"),
            ("small-queue", "note", "a queue has 16 entries"),
            ("page-cache", "note", "(cache=writeback)"),
            ("sandbox", "warning", "--sandbox off"),
            ("failed-requests", "note", "the disk has failed 1 requests"),
        ],
    },
    Case {
        make: qemu_on_the_cpu_of_the_daemon,
        found: &[
            ("no-reconnect", "warning", "qemu-system-x86_64 has -chardev socket,id=c,path="),
            ("shared-cpus", "warning", "may run on CPUs 0 only, and 1 vCPUs are pinned to them"),
            ("guest-memory-above-limit", "warning", "is limited to 64 MiB"),
        ],
    },
    Case { make: gone_front_end, found: &[("no-front-end", "note", "after 1 so far")] },
    Case {
        make: denied_rings,
        found: &[("engine-fallback", "warning", "engine aio: cannot set up io_uring: ")],
    },
    Case {
        make: denied_rings_before_a_takeover,
        found: &[(
            "engine-fallback",
            "warning",
            "engine aio: as in the previous process: cannot set up io_uring: ",
        )],
    },
    Case {
        make: file_system_without_direct_io,
        found: &[("direct-io-refused", "warning", "refuses direct I/O (O_DIRECT)")],
    },
    Case {
        make: low_limits,
        found: &[
            ("open-files", "warning", "of 22 descriptors are open"),
            ("locked-memory", "warning", "may lock 64 KiB of memory"),
        ],
    },
    Case { make: busy_cpu, found: &[("busy-host", "warning", "it may run on CPUs 0")] },
    Case {
        make: requests_after_pauses,
        found: &[("useless-polling", "warning", "poll-budget=100")],
    },
    Case { make: limits, found: &[("throttled", "warning", "limits: bps-total=262144")] },
    Case { make: slow_block_device, found: &[("disk-saturated", "warning", "of the time: ")] },
    Case { make: unread_log, found: &[("dropped-log-lines", "warning", "lines of the log")] },
    Case { make: full_file_system, found: &[("disk-state", "harmful", "has no space left")] },
    Case { make: silent_server, found: &[("not-served", "harmful", "still being opened")] },
    Case { make: unnamed_format, found: &[("disk-content", "warning", "qcow2")] },
];

/// Findings of more special conditions: a setting of the whole machine (`system_settings.rs`), and
/// a killed daemon whose logical unit does not come back (`doctor_missing_unit.rs`).
const ELSEWHERE: [&str; 2] = ["aio-operations", "missing-unit"];

#[test]
fn each_finding_has_a_condition() -> Result<()> {
    for Case { make, found } in CASES {
        let folders = test_folders()?;
        let Some(scene) = make(&folders).with_context(|| format!("making {found:?}"))? else {
            continue;
        };
        let seen = retry(LIMIT, || {
            let all = [findings(&folders, Some("vm"))?, findings(&folders, None)?].concat();
            for (name, level, words) in *found {
                let is_it = |it: &Value| {
                    let figure = it["figure"].as_str().unwrap_or_default();
                    it["finding"] == *name && it["level"] == *level && figure.contains(words)
                };
                ensure!(all.iter().any(is_it), "no {level} {name}, {words:?}, in {all:#?}");
            }
            Ok(())
        });
        seen?;
        drop(scene);
    }
    Ok(())
}

/// The table of the guide names the same findings.
#[test]
fn each_documented_finding_is_caused() -> Result<()> {
    let page =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guide/monitoring.md"))?;
    let rows = page.lines().skip_while(|line| !line.starts_with("| finding |")).skip(2);
    let rows = rows.take_while(|line| line.starts_with('|'));
    let documented: BTreeSet<&str> = rows.filter_map(|row| row.split('`').nth(1)).collect();
    let caused = CASES.iter().flat_map(|case| case.found).map(|(name, ..)| *name);
    let caused: BTreeSet<&str> = caused.chain(ELSEWHERE).collect();
    ensure!(documented == caused, "{documented:?} are documented, and {caused:?} are caused");
    Ok(())
}

/// A daemon with the export `vm` of a new disk.
fn daemon(folders: &TestFolders, options: &[&str]) -> Result<Running> {
    under(folders, &[] as &[&str], options)
}

/// Like [`daemon`], below the program that these words start.
fn under<S: AsRef<std::ffi::OsStr>>(
    folders: &TestFolders,
    words: &[S],
    options: &[&str],
) -> Result<Running> {
    let disk = folders.disk("disk.img", DISK_BYTES)?;
    let mut command = command_under(folders, words)?;
    Running::serve(command.arg("--blk-file").arg(disk).args(options))
}

fn command_under<S: AsRef<std::ffi::OsStr>>(folders: &TestFolders, words: &[S]) -> Result<Command> {
    let mut command = if words.is_empty() { ringhaul()? } else { ringhaul_under(words)? };
    command.args(["serve", "--name", "vm", "--socket-path"]).arg(folders.socket("vm.sock"));
    command.arg("--control").arg(folders.socket("control"));
    Ok(command)
}

fn attach(folders: &TestFolders, setup: &Setup) -> Result<Frontend> {
    Frontend::attach(&folders.socket("vm.sock"), setup)
}

/// A load that lasts longer than any test.
fn load(folders: &TestFolders, options: &str) -> Result<Running> {
    let options = format!("{options} --runtime 600 --eta never");
    Running::start(&mut bench(&folders.socket("vm.sock"), &options)?)
}

fn no_shared_memory(folders: &TestFolders) -> Result<Option<Scene>> {
    let daemon = daemon(folders, &[])?;
    let mut frontend = Frontend::connect(&folders.socket("vm.sock"), &Setup::default())?;
    frontend.negotiate()?;
    frontend.start_queue(0, 0)?;
    frontend.enable_queue(0, true)?;
    Ok(Some(vec![Box::new(frontend), Box::new(daemon)]))
}

/// A driver without features and with a small queue, and a disk that has shrunk.
fn poor_front_end(folders: &TestFolders) -> Result<Option<Scene>> {
    let daemon = daemon(folders, &["--cache", "writeback", "--sandbox", "off"])?;
    let setup = Setup { queue_size: 16, ..Setup::default() }.without(feature::EVENT_IDX);
    let mut frontend = attach(folders, &setup)?;
    fs::File::options().write(true).open(folders.path("disk.img"))?.set_len(1 << 20)?;
    let answer = frontend.request(0, blk::IN, (2 << 20) / 512, &[], 512)?;
    ensure!(answer.status == blk::IOERR, "{answer:?}");
    Ok(Some(vec![Box::new(frontend), Box::new(daemon)]))
}

/// The firmware of a virtual machine reads the first sector of its disk, and stays in its driver.
fn qemu_on_the_cpu_of_the_daemon(folders: &TestFolders) -> Result<Option<Scene>> {
    const QEMU: &str = "qemu-system-x86_64";
    if !is_installed(QEMU) {
        print_skipped("there is no QEMU");
        return Ok(None);
    }
    let Some(cgroup) = MemoryCgroup::new(64 << 20)? else { return Ok(None) };
    let pin = ["taskset", "--cpu-list", "0"].map(str::to_owned);
    let daemon = under(folders, &[&cgroup.wrapper()[..], &pin].concat(), &[])?;
    let socket = format!("socket,id=c,path={}", folders.socket("vm.sock").display());
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", QEMU, "-nodefaults", "-display", "none"]);
    command.args(["-name", "vm,debug-threads=on", "-accel", "tcg", "-m", "128"]);
    command.args(["-object", "memory-backend-memfd,id=m,size=128M,share=on"]);
    command.args(["-machine", "pc,memory-backend=m", "-chardev", &socket]);
    command.args(["-device", "vhost-user-blk-pci,chardev=c,num-queues=1"]);
    let qemu = Killed(command.stdin(Stdio::null()).spawn().context("starting QEMU")?);
    let process = Pid::from_child(&qemu.0);
    let vcpu = thread_id(process, "CPU 0/TCG")?.as_raw_nonzero().to_string();
    run(Command::new("taskset").args(["--pid", "--cpu-list", "0", &vcpu]))?.expect_code(0)?;
    Ok(Some(vec![Box::new(qemu), Box::new(daemon), Box::new(cgroup)]))
}

/// A child that is killed when this is dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn gone_front_end(folders: &TestFolders) -> Result<Option<Scene>> {
    let daemon = daemon(folders, &[])?;
    drop(attach(folders, &healthy())?);
    Ok(Some(vec![Box::new(daemon)]))
}

/// A program that starts the command behind it without the system call `io_uring_setup`, which has
/// the same number on all machines.
fn without_rings() -> Option<[String; 3]> {
    let seccomp = match std::env::consts::ARCH {
        "x86_64" => 317,
        "aarch64" => 277,
        _ => return None,
    };
    // The filter loads the number of the call, and answers 425 by EPERM.
    let script = format!(
        "my $filter = pack('SCCL' x 4, 0x20,0,0,0, 0x15,0,1,425, 6,0,0,0x50001, 6,0,0,0x7fff0000);
         syscall({seccomp}, 1, 0, pack('Sx6P', 4, $filter)) == 0 or die \"no filter: $!\";
         exec @ARGV or die"
    );
    if !can_change_system("the system calls of a process") {
        return None;
    }
    Some(["perl".to_owned(), "-e".to_owned(), script])
}

fn denied_rings(folders: &TestFolders) -> Result<Option<Scene>> {
    let Some(words) = without_rings() else { return Ok(None) };
    Ok(Some(vec![Box::new(under(folders, &words, &[])?)]))
}

/// The next process could set up rings, and keeps the engine and the reason.
fn denied_rings_before_a_takeover(folders: &TestFolders) -> Result<Option<Scene>> {
    let Some(words) = without_rings() else { return Ok(None) };
    let mut old = under(folders, &words, &[])?;
    for _ in 0..2 {
        let mut next = Running::start(&mut taking_over(folders)?)?;
        next.wait_for(TAKEN)?;
        std::mem::replace(&mut old, next).finish()?.expect_code(0)?;
    }
    Ok(Some(vec![Box::new(old)]))
}

fn file_system_without_direct_io(folders: &TestFolders) -> Result<Option<Scene>> {
    if !can_change_system("mounts") {
        return Ok(None);
    }
    let ramfs = Tmpfs::mount_without_direct_io()?;
    let disk = ramfs.path().join("disk.img");
    fs::write(&disk, vec![0; 1 << 20])?;
    let daemon =
        Running::serve(command_under(folders, &[] as &[&str])?.arg("--blk-file").arg(disk))?;
    Ok(Some(vec![Box::new(daemon), Box::new(ramfs)]))
}

/// Few more descriptors than the daemon has open, and less lockable memory than rings take.
fn low_limits(folders: &TestFolders) -> Result<Option<Scene>> {
    let words =
        ["prlimit", "--nofile=22", "--memlock=65536", "setpriv", "--bounding-set=-ipc_lock"];
    Ok(Some(vec![Box::new(under(folders, &words, &[])?)]))
}

/// Two busy loops on the one CPU of the daemon, which has work.
fn busy_cpu(folders: &TestFolders) -> Result<Option<Scene>> {
    let pin = ["taskset", "--cpu-list", "0"];
    let daemon = under(folders, &pin, &[])?;
    let mut scene: Scene = vec![Box::new(load(folders, "--rw randread --iodepth 8")?)];
    for _ in 0..2 {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).args(pin).args(["sh", "-c", "while :; do :; done"]);
        scene.push(Box::new(Killed(command.spawn().context("starting a busy loop")?)));
    }
    scene.push(Box::new(daemon));
    Ok(Some(scene))
}

/// Pauses around the longest busy-poll. Without priority, busy programs decide when the daemon and
/// its client run: then pauses are too long for any busy-poll, or end within one.
fn requests_after_pauses(folders: &TestFolders) -> Result<Option<Scene>> {
    let daemon = daemon(folders, &["--poll-max-us", "1000", "--poll-budget", "100"])?;
    let load = load(folders, "--rw randread --iodepth 1 --rate_iops 1500 --rate_process poisson")?;
    if can_change_system("the scheduling of processes") {
        [&daemon, &load].into_iter().try_for_each(raise_priority)?;
    }
    Ok(Some(vec![Box::new(load), Box::new(daemon)]))
}

/// Gives all threads of a process priority over threads without one. Tries again if a thread has
/// just ended.
fn raise_priority(process: &Running) -> Result<()> {
    let process = process.pid().as_raw_nonzero().to_string();
    retry(LIMIT, || {
        let mut chrt = Command::new("chrt");
        run(chrt.args(["--all-tasks", "--fifo", "--pid", "1", &process]))?.expect_code(0)?;
        Ok(())
    })
}

fn limits(folders: &TestFolders) -> Result<Option<Scene>> {
    let daemon = daemon(folders, &["--limits", "bps-total=256K"])?;
    let mut frontend = attach(folders, &healthy())?;
    begin_writes(&mut frontend, 8)?;
    Ok(Some(vec![Box::new(frontend), Box::new(daemon)]))
}

/// A block device whose every read takes some milliseconds.
fn slow_block_device(folders: &TestFolders) -> Result<Option<Scene>> {
    let Some(fuse) = Fuse::mount()? else { return Ok(None) };
    let device = LoopDevice::attach_with(&fuse.file(), &["--read-only", "--direct-io=on"])?;
    let mut command = command_under(folders, &[] as &[&str])?;
    let daemon = Running::serve(command.arg("--blk-file").arg(device.path()).arg("--read-only"))?;
    // The device has requests while the daemon and its client wait for a CPU.
    fuse.slow_down(Duration::from_millis(20));
    let load = load(folders, "--rw randread --iodepth 32")?;
    Ok(Some(vec![Box::new(load), Box::new(daemon), Box::new(device), Box::new(fuse)]))
}

/// The pipe of standard error is full, and so is the queue of lines.
fn unread_log(folders: &TestFolders) -> Result<Option<Scene>> {
    let (reader, writer): (PipeReader, _) = std::io::pipe()?;
    let disk = folders.disk("disk.img", DISK_BYTES)?;
    let mut command = command_under(folders, &[] as &[&str])?;
    let child = command.arg("--blk-file").arg(disk).stderr(writer).spawn()?;
    drop(command);
    let daemon = Killed(child);
    let until = Instant::now() + LIMIT;
    let mut client = loop {
        match Client::new(folders) {
            Ok(client) => break client,
            Err(error) => ensure!(Instant::now() < until, "no control socket: {error:#}"),
        }
    };
    loop {
        for us in 0..100 {
            client.call("set", &json!({ "poll-max-us": us }))?;
        }
        let process = client.call("process", &json!({}))?;
        if process["result"]["dropped-log-lines"].as_u64().context("no count")? > 0 {
            return Ok(Some(vec![Box::new(daemon), Box::new(reader)]));
        }
        ensure!(Instant::now() < until, "the log has room for all lines: {process}");
    }
}

fn full_file_system(folders: &TestFolders) -> Result<Option<Scene>> {
    if !can_change_system("mounts") {
        return Ok(None);
    }
    let tmpfs = Tmpfs::mount(1 << 20)?;
    let disk = tmpfs.path().join("disk.img");
    fs::File::create(&disk)?.set_len(DISK_BYTES)?;
    let mut command = command_under(folders, &[] as &[&str])?;
    let daemon = Running::serve(command.args(["--werror", "hold", "--blk-file"]).arg(disk))?;
    let load = load(folders, "--rw write --bs 64k --iodepth 4")?;
    Ok(Some(vec![Box::new(load), Box::new(daemon), Box::new(tmpfs)]))
}

/// A server that accepts connections and says nothing.
fn silent_server(folders: &TestFolders) -> Result<Option<Scene>> {
    if !is_installed("nbdkit") {
        print_skipped("there is no nbdkit");
        return Ok(None);
    }
    let server = NbdServer::start_nbdkit(folders, &["memory", "1M"])?;
    let stopped = server.stop()?;
    let mut command = command_under(folders, &[] as &[&str])?;
    let disk = format!("nbd,socket={}", folders.socket("nbd").display());
    let mut daemon = Running::start(command.args(["--disk", &disk]))?;
    daemon.wait_for("control socket")?;
    Ok(Some(vec![Box::new(stopped), Box::new(daemon), Box::new(server)]))
}

/// A raw disk with the header of an image.
fn unnamed_format(folders: &TestFolders) -> Result<Option<Scene>> {
    let disk = folders.disk("disk.img", DISK_BYTES)?;
    let header = [&b"QFI\xfb"[..], &3_u32.to_be_bytes(), &[0; 96]].concat();
    let file = fs::File::options().write(true).open(&disk)?;
    std::os::unix::fs::FileExt::write_all_at(&file, &header, 0)?;
    let mut command = serve(&folders.socket("vm.sock"), &disk)?;
    command.args(["--name", "vm", "--control"]).arg(folders.socket("control"));
    let mut daemon = Running::start(&mut command)?;
    daemon.wait_for(READY)?;
    Ok(Some(vec![Box::new(daemon)]))
}
