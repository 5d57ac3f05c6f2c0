//! Code in the place of the daemon tries to leave its sandbox. Each attempt is made in a process of
//! its own, which has entered the sandbox as `ringhaul serve` does, and must fail there with an
//! errno of a denial. For root, the same attempt must succeed with `--sandbox off`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod attempts;
mod unlisted;

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use attempts::{ATTEMPTS, Scene};
use blockio::{EngineKind, IoThreadConfig};
use clap::{Args, FromArgMatches};
use ringhaul::options::ServeArgs;
use ringhaul::serve;
use ringhaul::threads::IoThreads;

/// The status of a process whose attempt has succeeded.
const SUCCEEDED: u8 = 10;
/// The status of a process whose attempt was denied.
const DENIED: u8 = 11;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    if let [_, attempt, mode, folder, port] = &words[..]
        && let Some(name) = attempt.strip_prefix("--attempt=")
    {
        return attempt_in_sandbox(name, mode, Path::new(folder), port.parse().unwrap());
    }
    if let [_, thread, mode, folder] = &words[..]
        && let Some(name) = thread.strip_prefix("--thread=")
    {
        return unlisted::call_on_thread(name, mode, Path::new(folder));
    }
    attempts::hold_signal();
    let is_root = rustix::process::geteuid().is_root();
    // The first mode comes first: a signal of the second one waits for the rest of the test.
    let modes = &[("strict", DENIED), ("off", SUCCEEDED)][..if is_root { 2 } else { 1 }];
    let mut failed = 0;
    for (name, _) in ATTEMPTS {
        for (mode, expected) in modes.iter().copied() {
            let status = run(name, mode);
            let is_right = status == Some(expected.into());
            println!("{name}, sandbox {mode}: {}", if is_right { "ok" } else { "FAILED" });
            failed += u32::from(!is_right);
        }
    }
    println!("{} attempts, {failed} failed", modes.len() * ATTEMPTS.len());
    failed += unlisted::test_all();
    ExitCode::from(u8::from(failed > 0))
}

/// Makes an attempt in a new process. Returns its status.
fn run(name: &str, mode: &str) -> Option<i32> {
    let folder = tempfile::tempdir().unwrap();
    for made in ["mine", "others"] {
        std::fs::create_dir(folder.path().join(made)).unwrap();
    }
    for disk in ["mine/disk", "mine/neighbour", "others/disk"] {
        std::fs::write(folder.path().join(disk), [0; 1 << 16]).unwrap();
    }
    let _unix = UnixListener::bind(folder.path().join("others/server")).unwrap();
    let scene = Scene { folder: folder.path(), port: 0 };
    let _datagrams =
        UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(scene.name()).unwrap()).unwrap();
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = tcp.local_addr().unwrap().port().to_string();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg(format!("--attempt={name}")).arg(mode).arg(folder.path()).arg(port);
    command.status().unwrap().code()
}

/// Waits until the only child, the helper of the sandbox, has given up all rights except for those
/// to see files of other processes.
fn await_few_rights_of_helper() {
    const SEES_FILES: u64 = 1 << 2 | 1 << 19;
    let thread = rustix::thread::gettid().as_raw_pid();
    let children = std::fs::read_to_string(format!("/proc/self/task/{thread}/children")).unwrap();
    let start = Instant::now();
    loop {
        let status = format!("/proc/{}/status", children.trim());
        let status = std::fs::read_to_string(status).unwrap();
        let rights = ["CapPrm:", "CapEff:", "CapInh:"].map(|set| {
            let bits = status.lines().find_map(|line| line.strip_prefix(set)).unwrap();
            u64::from_str_radix(bits.trim(), 16).unwrap()
        });
        if rights.iter().all(|rights| rights & !SEES_FILES == 0) {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "the helper keeps its rights: {status}");
        std::thread::yield_now();
    }
}

/// Enters the sandbox of a daemon with the disk and the socket in the folder `mine`.
fn enter_sandbox(mode: &str, folder: &Path) {
    let disk = format!("--blk-file={}", folder.join("mine/disk").display());
    let socket = format!("--socket-path={}", folder.join("mine/socket").display());
    let is_entered = !matches!(mode, "off" | "log");
    let mode = format!("--sandbox={mode}");
    let serve = ServeArgs::augment_args(clap::Command::new("serve"));
    let args =
        ServeArgs::from_arg_matches(&serve.get_matches_from(["serve", &disk, &socket, &mode]));
    let args = args.unwrap();
    serve::enter_sandbox(&args, None, &args.exports().unwrap()).unwrap();
    if is_entered {
        await_few_rights_of_helper();
    }
}

fn attempt_in_sandbox(name: &str, mode: &str, folder: &Path, port: u16) -> ExitCode {
    enter_sandbox(mode, folder);
    // The daemon itself can work.
    let disk = std::fs::File::options().read(true).write(true).open(folder.join("mine/disk"));
    disk.unwrap().set_len(1 << 17).unwrap();
    UnixListener::bind(folder.join("mine/socket")).unwrap();
    std::fs::remove_file(folder.join("mine/socket")).unwrap();
    let config = IoThreadConfig { engine: EngineKind::IoUring.into(), ..Default::default() };
    drop(IoThreads::start(1, &config, &Arc::new(|| ())).unwrap());
    let (_, attempt) = ATTEMPTS.iter().find(|(known, _)| *known == name).unwrap();
    let folder = folder.to_owned();
    let attempted = std::thread::spawn(move || attempt(&Scene { folder: &folder, port }));
    match attempted.join().unwrap() {
        Ok(()) => ExitCode::from(SUCCEEDED),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM)) => {
            ExitCode::from(DENIED)
        }
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}
