//! The load generator against a real server, qemu-storage-daemon, where it is installed.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use ringhaul_bench::{BenchArgs, BenchError, Report, measure, run};
use tempfile::TempDir;

const PROGRAM: &str = "qemu-storage-daemon";
const DISK_BYTES: u64 = 32 << 20;

/// A running server; ended when dropped.
struct Server {
    child: Child,
    dir: TempDir,
}

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: BenchArgs,
}

impl Server {
    /// Starts a server with these block nodes, and exports node `d`. `DISK` in them stands for the
    /// path of a file. `None` if the server is not installed.
    fn start(nodes: &[&str], export_options: &str) -> Option<Self> {
        let version = Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).status();
        if version.is_err() {
            eprintln!("skipped: {PROGRAM} is not installed");
            return None;
        }
        let dir = TempDir::new().unwrap();
        let disk = dir.path().join("disk");
        File::create(&disk).unwrap().set_len(DISK_BYTES).unwrap();
        let mut command = Command::new(PROGRAM);
        for node in nodes {
            command.arg("--blockdev").arg(node.replace("DISK", disk.to_str().unwrap()));
        }
        let pid_file = dir.path().join("pid");
        let socket = dir.path().join("socket");
        let export = format!(
            "type=vhost-user-blk,id=e,node-name=d,num-queues=4,addr.type=unix,addr.path={},{}",
            socket.display(),
            export_options
        );
        command.arg("--export").arg(export).arg("--pidfile").arg(&pid_file);
        let mut server = Self { child: command.spawn().unwrap(), dir };
        // The file appears together with the export.
        while !pid_file.exists() {
            let ended = server.child.try_wait().unwrap();
            assert!(ended.is_none(), "{PROGRAM} did not start: {ended:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(server)
    }

    /// Starts a server for a file through the page cache, which works on every file system.
    fn for_file() -> Option<Self> {
        Self::start(
            &["driver=file,filename=DISK,node-name=f", "driver=raw,file=f,node-name=d"],
            "writable=on",
        )
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn args(&self, options: &str) -> BenchArgs {
        let socket = self.path("socket");
        let fixed = ["bench", "--eta=never", "--socket-path", socket.to_str().unwrap()];
        Cli::parse_from(fixed.into_iter().chain(options.split_whitespace())).args
    }

    fn measure(&self, options: &str) -> Result<Report, BenchError> {
        measure(&self.args(options))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail if the server has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn written_data_is_read_back() {
    let Some(server) = Server::for_file() else { return };
    let mix = "--bssplit=512/20:1k/20:3k/20:4k/20:64k/20";
    for options in [
        format!("--rw=randrw {mix} --iodepth=32 --numjobs=4 --number_ios=500 --fsync=50"),
        format!("--rw=randrw {mix} --iodepth=8 --numjobs=4 --number_ios=200 --threads --size=1m"),
        "--rw=randwrite --size=64k --iodepth=32 --numjobs=3 --number_ios=500".to_owned(),
        "--rw=randread --iodepth=16 --numjobs=2 --number_ios=500 --busy-poll".to_owned(),
        "--rw=rw --bs=128k --seg-size=4k --iodepth=8 --number_ios=200".to_owned(),
        "--rw=read --bs=8k --offset=1m --size=3m --number_ios=300 --threads --busy-poll".to_owned(),
    ] {
        let report = server.measure(&format!("{options} --verify")).unwrap();
        assert!(!report.failed(), "{options}: {report:?}");
        assert!(report.verified_blocks > 0, "{options}: {report:?}");
        let expected = report.numjobs * if options.contains("=200") { 200 } else { 0 };
        assert!(report.total.ios >= u64::from(expected), "{options}: {report:?}");
        assert_eq!(report.total.ios, report.read.ios + report.write.ios);
    }
}

#[test]
fn the_figures_are_consistent() {
    let Some(server) =
        Server::start(&["driver=null-co,size=1073741824,node-name=d"], "writable=on")
    else {
        return;
    };
    let report = server.measure("--rw=randread --iodepth=16 --number_ios=20000").unwrap();
    assert_eq!(report.read.ios, 20_000);
    assert_eq!(report.read.bytes, 20_000 * 4096);
    assert_eq!(report.server_pid, Some(server.child.id()));
    assert!(report.server_cpu_us.is_some_and(|us| us > 0.0), "{report:?}");
    assert!(report.runtime_s > 0.0 && report.calls > 0 && report.kicks > 0, "{report:?}");
    assert!(report.kicks <= 20_000 && report.calls <= 20_000, "{report:?}");
    let latency = report.read.latency.as_ref().unwrap();
    assert!(latency.min_us > 0.0 && latency.min_us <= latency.mean_us);
    assert!(latency.mean_us <= latency.max_us);
    // Little's law: on average at most 16 requests are in flight.
    let in_flight = report.read.iops * latency.mean_us / 1e6;
    assert!(in_flight <= 16.1, "{in_flight}: {report:?}");

    let timed = server.measure("--rw=randread --runtime=200ms --ramp_time=100ms").unwrap();
    assert!(timed.read.ios > 0 && timed.completions_per_call.is_some(), "{timed:?}");
}

#[test]
fn a_server_that_drops_writes_fails_verification() {
    let null = "driver=null-co,size=33554432,node-name=d,read-zeroes=on";
    let Some(server) = Server::start(&[null], "writable=on") else { return };
    for rw in ["randread", "randwrite", "randrw", "write"] {
        let options = format!("--rw={rw} --size=1m --iodepth=8 --number_ios=300 --verify");
        let report = server.measure(&options).unwrap();
        assert!(report.verify_mismatches > 0 && report.failed(), "{rw}: {report:?}");
    }
}

#[test]
fn a_server_that_transfers_no_data_fails_verification() {
    let null = "driver=null-co,size=33554432,node-name=d";
    let Some(server) = Server::start(&[null], "writable=on") else { return };
    // One block, so that its data is still in the memory that the write used.
    let report = server.measure("--rw=rw --size=4k --number_ios=50 --verify").unwrap();
    assert!(report.verify_mismatches > 0, "{report:?}");
    assert_eq!(report.verified_blocks, 0, "{report:?}");
}

#[test]
fn io_errors_are_counted_and_fail_the_run() {
    let Some(server) = Server::start(
        &[
            "driver=file,filename=DISK,node-name=f",
            "driver=blkdebug,image=f,node-name=d,inject-error.0.event=none,\
             inject-error.0.iotype=write,inject-error.0.errno=5,inject-error.0.once=off,\
             inject-error.0.sector=8",
        ],
        "writable=on",
    ) else {
        return;
    };
    let report = server.measure("--rw=write --size=64k --number_ios=32 --verify").unwrap();
    assert_eq!(report.write.errors, 2, "{report:?}");
    assert_eq!(report.write.ios, 30, "{report:?}");
    assert_eq!(report.verify_mismatches, 0, "a failed write promises nothing: {report:?}");
    assert!(report.failed());
}

#[test]
fn a_server_that_dies_ends_the_run() {
    for mode in ["", "--busy-poll", "--threads --numjobs=2"] {
        let Some(mut server) = Server::for_file() else { return };
        let args = server.args(&format!("--rw=randwrite --iodepth=4 --runtime=1h {mode}"));
        let disk = server.path("disk");
        std::thread::scope(|scope| {
            let bench = scope.spawn(|| measure(&args));
            // Blocks appear in the file during the run.
            while std::fs::metadata(&disk).unwrap().blocks() == 0 && !bench.is_finished() {
                std::thread::sleep(Duration::from_millis(5));
            }
            server.child.kill().unwrap();
            let error = bench.join().unwrap().unwrap_err();
            assert_eq!(error.exit_code(), 1, "{error}");
            assert!(error.to_string().contains("closed the connection"), "{error}");
        });
    }
}

#[test]
fn a_server_that_hangs_ends_the_run() {
    for mode in ["", "--busy-poll"] {
        let Some(server) = Server::for_file() else { return };
        let args = server.args(&format!("--rw=randwrite --runtime=1h --timeout=1 {mode}"));
        let disk = server.path("disk");
        std::thread::scope(|scope| {
            let bench = scope.spawn(|| measure(&args));
            while std::fs::metadata(&disk).unwrap().blocks() == 0 && !bench.is_finished() {
                std::thread::sleep(Duration::from_millis(5));
            }
            let pid = rustix::process::Pid::from_child(&server.child);
            rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
            let stopped = Instant::now();
            while !bench.is_finished() && stopped.elapsed() < Duration::from_secs(60) {
                std::thread::sleep(Duration::from_millis(5));
            }
            // Ends a wait that still lasts, but with a different message.
            drop(server);
            let error = bench.join().unwrap().unwrap_err();
            assert_eq!(error.exit_code(), 1, "{error}");
            assert!(error.to_string().contains("completed nothing"), "{error}");
        });
    }
}

#[test]
fn the_wait_for_a_busy_server_is_limited() {
    let Some(server) = Server::for_file() else { return };
    let first = server.args("--rw=randwrite --iodepth=4 --runtime=1h");
    let disk = server.path("disk");
    std::thread::scope(|scope| {
        let bench = scope.spawn(|| measure(&first));
        while std::fs::metadata(&disk).unwrap().blocks() == 0 && !bench.is_finished() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let error = server.measure("--timeout=100ms").unwrap_err();
        assert_eq!(error.exit_code(), 2, "{error}");
        assert!(error.to_string().contains("another client"), "{error}");
        drop(server);
        assert!(bench.join().unwrap().is_err());
    });
}

#[test]
fn options_beyond_the_server_are_refused() {
    let Some(server) = Server::start(
        &["driver=null-co,size=33554432,node-name=d"],
        "writable=off,logical-block-size=4096",
    ) else {
        return;
    };
    for (options, word) in [
        ("--rw=write", "read-only"),
        ("--bs=512", "4096"),
        ("--numjobs=5", "has 4"),
        ("--size=33m", "not inside the disk"),
    ] {
        let error = server.measure(options).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{options}: {error}");
        assert!(error.to_string().contains(word), "{options}: {error}");
    }
    let mut args = server.args("");
    args.socket_path = Some(server.path("nothing"));
    let error = measure(&args).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().contains("no such socket"), "{error}");
    args.socket_path = Some(server.path("disk"));
    let error = measure(&args).unwrap_err();
    assert!(error.to_string().contains("no server listens"), "{error}");
}

#[test]
fn the_command_writes_json_and_sets_the_exit_status() {
    let null = "driver=null-co,size=33554432,node-name=d,read-zeroes=on";
    let Some(server) = Server::start(&[null], "writable=on") else { return };
    let file = server.path("result.json");
    let output = format!("--output-format=json --output={}", file.display());
    let options = format!("--rw=randread --number_ios=100 {output}");
    assert_eq!(run(&server.args(&options)).unwrap(), ExitCode::SUCCESS);
    let json: serde_json::Value = serde_json::from_reader(File::open(&file).unwrap()).unwrap();
    assert_eq!(json["read_ios"], 100);
    assert_eq!(json["format_version"], 1);

    let options = format!("--rw=randwrite --number_ios=100 --verify {output}");
    assert_eq!(run(&server.args(&options)).unwrap(), ExitCode::from(1));
    let nowhere = format!("--output={}", server.path("no/such/directory").display());
    for options in ["--numjobs=5", &nowhere] {
        let error = run(&server.args(options)).unwrap_err();
        let status = error.downcast_ref().map(BenchError::exit_code);
        assert_eq!(status, Some(2), "{options}: {error:#}");
    }
}
