//! A thread of each kind makes a system call that no thread needs, and none that the sandbox denies
//! to all. It fails there, with a line that names call and thread, and the thread goes on.

use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use blockio::executor::start_thread;
use blockio::{EngineKind, IoThreadConfig};
use ringhaul::log::{self, LogFormat};
use ringhaul::threads::IoThreads;

use crate::{DENIED, SUCCEEDED, enter_sandbox};

/// The status of a process that an unlisted call has ended.
const ENDED: u8 = 5;

/// The call in the log.
const CALL: &str = "the system call times,";

/// The longest wait for the line in the log.
const LINE_MAX: Duration = Duration::from_secs(30);

/// Threads with a table of their own.
const THREADS: &[&str] = &[
    "iothread-7",
    "nbd-connect",
    "qcow2",
    "ringhaul-call",
    "ringhaul-client",
    "ringhaul-close",
    "ringhaul-config",
    "ringhaul-control",
    "ringhaul-denied",
    "ringhaul-events",
    "ringhaul-heir",
    "ringhaul-log",
    "ringhaul-lock",
    "ringhaul-map",
    "ringhaul-metric",
    "ringhaul-notify",
    "ringhaul-open",
    "ringhaul-patience",
    "ringhaul-reload",
    "ringhaul-reserve",
    "ringhaul-restore",
    "ringhaul-rings",
    "ringhaul-rpc",
    "ringhaul-side",
    "ringhaul-signal",
    "ringhaul-size",
    "ringhaul-sizes",
    "ringhaul-store",
    "ringhaul-unmap",
    "ringhaul-watch",
];

/// An IoThread that the daemon has started, and a thread of its pool.
const OF_DAEMON: &[&str] = &["iothread-0", "ringhaul-pool"];

/// Threads that run libraries of the system.
const WITHOUT_TABLE: &[&str] = &["nbd-resolve", "ringhaul-rbd"];

/// Makes all calls. Returns the number that had an unexpected result.
pub(crate) fn test_all() -> u32 {
    let strict = ["ringhaul-events", "iothread-0", "ringhaul-denied"];
    let all = [THREADS, OF_DAEMON].concat();
    let cases = all.iter().map(|thread| ("on", *thread, DENIED, true));
    let cases = cases.chain(strict.iter().map(|thread| ("strict", *thread, ENDED, true)));
    let cases = cases.chain(WITHOUT_TABLE.iter().map(|thread| ("on", *thread, SUCCEEDED, false)));
    let free = ["log", "off"].into_iter();
    let cases = cases.chain(free.map(|mode| (mode, "iothread-0", SUCCEEDED, false)));
    let mut failed = 0;
    for (mode, thread, status, has_line) in cases {
        let (got, log) = run(thread, mode, has_line);
        // The kernel has 15 letters of each name.
        let name: String = thread.chars().take(15).collect();
        let line = log.lines().find(|line| line.contains(CALL));
        let is_named = line.is_some_and(|line| line.contains(&format!("thread {name} ")));
        // The thread that writes the lines is the one that ends.
        let has_no_writer = mode == "strict" && thread == "ringhaul-denied";
        let is_right = got == Some(status.into())
            && (has_no_writer || is_named == has_line && line.is_some() == has_line);
        let result = if is_right { "ok" } else { "FAILED" };
        println!("unlisted call of {thread}, sandbox {mode}: {result}");
        if !is_right {
            println!("status {got:?}, log:\n{log}");
        }
        failed += u32::from(!is_right);
    }
    failed
}

/// Makes the call in a new process. Returns its status and its log. The process waits for the line
/// in its log, unless it has none.
fn run(thread: &str, mode: &str, has_line: bool) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("mine")).unwrap();
    std::fs::write(folder.path().join("mine/disk"), [0; 1 << 16]).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg(format!("--thread={thread}")).arg(mode).arg(folder.path());
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (lines, log) = mpsc::channel();
    let errors = BufReader::new(child.stderr.take().unwrap());
    let reader = std::thread::spawn(move || {
        errors.lines().for_each(|line| lines.send(line.unwrap()).unwrap());
    });
    let mut seen = Vec::new();
    let deadline = Instant::now() + LINE_MAX;
    while has_line && !seen.iter().any(|line: &String| line.contains(CALL)) {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok(line) = log.recv_timeout(left) else { break };
        seen.push(line);
    }
    drop(child.stdin.take());
    let status = child.wait().unwrap().code();
    seen.extend(log);
    reader.join().unwrap();
    (status, seen.join("\n"))
}

/// Makes the call on a thread of this name.
pub(crate) fn call_on_thread(name: &str, mode: &str, folder: &Path) -> ExitCode {
    log::start(LogFormat::Text, None);
    enter_sandbox(mode, folder);
    let (result, called) = mpsc::channel();
    // Twice, because the thread goes on after the first.
    let call = move || result.send([times(), times()]).unwrap();
    let config = IoThreadConfig { engine: EngineKind::Threads.into(), ..Default::default() };
    let iothreads = IoThreads::start(1, &config, &Arc::new(|| ())).unwrap();
    let remote = &iothreads.remotes()[0];
    match name {
        "iothread-0" => drop(remote.call(move |_| call())),
        "ringhaul-pool" => {
            let start = std::thread::Builder::new().name(name.to_owned());
            remote.call(move |_| start.spawn(call).unwrap().join().unwrap()).unwrap();
        }
        _ => drop(start_thread(name, call).unwrap()),
    }
    let results = called.recv().unwrap();
    // The caller has seen the line.
    io::stdin().read_to_end(&mut Vec::new()).unwrap();
    log::flush();
    match results {
        [None, None] => ExitCode::from(SUCCEEDED),
        [Some(libc::EPERM), Some(libc::EPERM)] => ExitCode::from(DENIED),
        other => {
            eprintln!("{other:?}");
            ExitCode::FAILURE
        }
    }
}

/// The call: it has no effect, and no kind of thread needs it. Returns its errno.
fn times() -> Option<i32> {
    // SAFETY: a null pointer means that only the result is wanted.
    let result = unsafe { libc::syscall(libc::SYS_times, std::ptr::null::<libc::tms>()) };
    (result == -1).then(|| io::Error::last_os_error().raw_os_error()).flatten()
}
