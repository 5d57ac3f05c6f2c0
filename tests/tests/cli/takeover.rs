//! A process that takes over from another, while front-ends stay connected.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{
    Finished, LIMIT, Running, TestFolders, bench, ringhaul, ringhaul_under, run, serve,
};
use ringhaul_kit::control::taking_over;
use ringhaul_kit::daemon::{SECTOR_BYTES, pattern};
use ringhaul_kit::frontend::message::{Message, code};
use ringhaul_kit::frontend::{Frontend, Setup};
use ringhaul_kit::fuse::Fuse;
use ringhaul_kit::server::ringhaul_binary;
use ringhaul_kit::service_manager::ServiceManager;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{DISK_BYTES, test_folders};

/// The number of takeovers at depth 64.
const TAKEOVERS: usize = 9;

/// The format between two processes of this version.
const FORMAT: u32 = 9;

/// A message of the new process when it serves.
pub(super) const TAKEN: &str = "took over 1 export from process";

/// A daemon with a new disk and a control socket.
pub(super) fn begin(folders: &TestFolders) -> Result<Command> {
    folders.disk("disk.img", DISK_BYTES)?;
    begin_again(folders)
}

/// Like [`begin`], with the existing disk.
fn begin_again(folders: &TestFolders) -> Result<Command> {
    let mut command = serve(&folders.socket("vm.sock"), &folders.path("disk.img"))?;
    command.arg("--control").arg(folders.socket("control"));
    Ok(command)
}

/// The first message of a process with this format and this inflight version.
fn first_message(format: u32, inflight_version: u16) -> Value {
    json!({ "formats": [format], "inflight-versions": [inflight_version], "version": "test" })
}

/// A client that plays the new process, step by step.
pub(super) struct Client(BufReader<UnixStream>);

impl Client {
    pub(super) fn new(folders: &TestFolders) -> Result<Self> {
        let stream = UnixStream::connect(folders.socket("control"))?;
        // An answer that never comes fails the test.
        stream.set_read_timeout(Some(LIMIT))?;
        Ok(Self(BufReader::new(stream)))
    }

    pub(super) fn call(&mut self, method: &str, params: &Value) -> Result<Value> {
        self.send(method, params)?;
        self.answer()
    }

    /// Describes itself as a process that could take over.
    pub(super) fn begin(&mut self) -> Result<Value> {
        self.begin_in(FORMAT)
    }

    /// Describes itself as a process that understands this format alone.
    pub(super) fn begin_in(&mut self, format: u32) -> Result<Value> {
        self.call("takeover", &first_message(format, 1))
    }

    pub(super) fn send(&mut self, method: &str, params: &Value) -> Result<()> {
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        Ok(self.0.get_mut().write_all(format!("{request}\n").as_bytes())?)
    }

    /// The daemon cannot send anything more.
    pub(super) fn stop_reading(&self) -> Result<()> {
        Ok(self.0.get_ref().shutdown(std::net::Shutdown::Read)?)
    }

    pub(super) fn answer(&mut self) -> Result<Value> {
        let mut line = String::new();
        // Descriptors arrive with empty lines, and are lost here.
        while line.trim().is_empty() {
            line.clear();
            ensure!(self.0.read_line(&mut line)? > 0, "the daemon has hung up");
        }
        Ok(serde_json::from_str(&line)?)
    }
}

/// Writes a new sector, and reads it and all earlier ones.
pub(super) fn check(frontend: &mut Frontend, seed: u64) -> Result<()> {
    let data = |seed| pattern(seed, SECTOR_BYTES);
    frontend.write(0, seed, &data(seed))?;
    for sector in 1..=seed {
        let found = frontend.read(1, sector, SECTOR_BYTES)?;
        ensure!(found == data(sector), "sector {sector} is not what was written");
    }
    Ok(())
}

#[test]
fn a_load_on_virtio_blk_continues_over_three_takeovers() -> Result<()> {
    let folders = test_folders()?;
    check_load_over_takeovers(&folders, begin(&folders)?, "blk")
}

#[test]
fn a_load_on_virtio_scsi_continues_over_three_takeovers() -> Result<()> {
    let folders = test_folders()?;
    let disk = folders.disk("disk.img", DISK_BYTES)?;
    let mut command = ringhaul()?;
    command.arg("serve").arg("--socket-path").arg(folders.socket("vm.sock"));
    command.args(["--device", "scsi", "--lun"]).arg(format!("0,blk-file={}", disk.display()));
    command.arg("--control").arg(folders.socket("control"));
    check_load_over_takeovers(&folders, command, "scsi")
}

fn check_load_over_takeovers(
    folders: &TestFolders,
    mut command: Command,
    device: &str,
) -> Result<()> {
    let mut daemon = Running::serve(&mut command)?;
    let options = format!(
        "--device {device} --rw randrw --iodepth 16 --numjobs 2 --number_ios 40000 --verify"
    );
    let load = Running::start(&mut bench(&folders.socket("vm.sock"), &options)?)?;
    daemon.wait_for("a front-end has connected")?;
    for _ in 0..3 {
        let mut next = Running::start(&mut taking_over(folders)?)?;
        next.wait_for(TAKEN)?;
        daemon.finish()?.expect_code(0)?;
        daemon = next;
    }
    let finished = load.finish()?.expect_code(0)?;
    ensure!(finished.stdout.contains("errors: 0; verify: "), "{}", finished.stdout);
    ensure!(finished.stdout.contains(" 0 reads with wrong data"), "{}", finished.stdout);
    // The last process has the lock, the listener and the control socket of the first.
    let mut other = serve(&folders.socket("other.sock"), &folders.path("disk.img"))?;
    run(&mut other)?.expect_refusal(&["locked"])?;
    let again = format!("--device {device} --rw randread --number_ios 100");
    run(&mut bench(&folders.socket("vm.sock"), &again)?)?.expect_code(0)?;
    let mut ctl = ringhaul()?;
    ctl.args(["ctl", "--control"]).arg(folders.socket("control")).arg("shutdown");
    run(&mut ctl)?.expect_code(0)?;
    daemon.finish()?.expect_code(0)?;
    for name in ["vm.sock", "control"] {
        ensure!(!folders.socket(name).exists(), "{name} is left behind");
    }
    Ok(())
}

/// The front-end keeps its connection and its negotiated state. Requests in the disk must finish
/// first, so the output shows how long queues stand still. `docs/guide/crash-and-upgrade.md` has
/// figures.
#[test]
fn a_disk_that_answers_in_a_millisecond_is_taken_over_at_depth_64() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let mut command = serve(&folders.socket("vm.sock"), &fuse.file())?;
    command.args(["--read-only", "--lock", "off", "--engine", "threads"]);
    let mut daemon = Running::serve(command.arg("--control").arg(folders.socket("control")))?;
    fuse.slow_down(Duration::from_millis(1));
    let options = "--rw randread --iodepth 64 --number_ios 100000";
    let load = Running::start(&mut bench(&folders.socket("vm.sock"), options)?)?;
    daemon.wait_for("a front-end has connected")?;
    let mut still = Vec::new();
    for takeover in 0..TAKEOVERS {
        let mut next = Running::start(&mut taking_over(&folders)?)?;
        let line = next.wait_for(TAKEN)?;
        let (_, ms) = line.split_once("stood still for ").context("no time is told")?;
        still.push(ms.trim_end_matches(" ms").parse::<f64>()?);
        let output = daemon.finish()?.expect_code(0)?.stderr;
        let connected = output.matches("a front-end has connected").count();
        ensure!(connected == usize::from(takeover == 0), "it has connected again:\n{output}");
        ensure!(!output.contains("has disconnected"), "{output}");
        daemon = next;
    }
    let finished = load.finish()?.expect_code(0)?;
    ensure!(finished.stdout.contains("errors: 0"), "{}", finished.stdout);
    still.sort_by(f64::total_cmp);
    let (median, slowest) = (still[TAKEOVERS / 2], still[TAKEOVERS - 1]);
    eprintln!("queues stood still for {} to {slowest} ms, median {median} ms", still[0]);
    Ok(())
}

/// The front-end keeps its connection, rings and memory.
#[test]
fn a_front_end_is_not_disconnected() -> Result<()> {
    let folders = test_folders()?;
    let mut daemon = Running::serve(&mut begin(&folders)?)?;
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    check(&mut frontend, 1)?;
    let question = Message::new(code::GET_FEATURES, Vec::new());
    let question_bytes = question.bytes();
    for (seed, sent) in (2..).zip([0, 1, 5, 11, 12]) {
        // Part of a message, which the next process must read to its end.
        let (sent, rest) = question_bytes.split_at(sent);
        frontend.channel.send_bytes(sent, &[])?;
        let mut next = Running::start(&mut taking_over(&folders)?)?;
        next.wait_for(TAKEN)?;
        daemon.finish()?.expect_code(0)?;
        daemon = next;
        frontend.channel.send_bytes(rest, &[])?;
        let answer = frontend.channel.receive()?.context("the connection is closed")?;
        ensure!(answer.number()? & frontend.features == frontend.features, "{answer:?}");
        check(&mut frontend, seed)?;
        ensure!(frontend.config(0, 8)? == (DISK_BYTES / 512).to_le_bytes(), "another disk");
        let base = frontend.stop_queue(1)?;
        frontend.start_queue(1, base)?;
    }
    Ok(())
}

/// An export without a listener ends with its front-end, even after takeovers.
#[test]
fn an_inherited_connection_is_taken_over() -> Result<()> {
    let folders = test_folders()?;
    let path = folders.socket("vm.sock");
    let listener = UnixListener::bind(&path)?;
    let mut frontend = Frontend::connect(&path, &Setup::default())?;
    let (connection, _) = listener.accept()?;
    let mut command = ringhaul_under(&["sh", "-c", "exec \"$@\" 5<&0 </dev/null", "sh"])?;
    command.args(["serve", "--fd", "5", "--blk-file"]).arg(folders.disk("disk.img", DISK_BYTES)?);
    command.arg("--control").arg(folders.socket("control")).stdin(OwnedFd::from(connection));
    let mut daemon = Running::serve(&mut command)?;
    frontend.negotiate()?;
    frontend.share_memory()?;
    for queue in 0..frontend.rings.len() {
        frontend.start_queue(queue, 0)?;
        frontend.enable_queue(queue, true)?;
    }
    for seed in 1..4 {
        check(&mut frontend, seed)?;
        let mut next = Running::start(&mut taking_over(&folders)?)?;
        next.wait_for(TAKEN)?;
        daemon.finish()?.expect_code(0)?;
        daemon = next;
    }
    check(&mut frontend, 4)?;
    drop(frontend);
    daemon.finish()?.expect_code(0)?;
    ensure!(!folders.socket("control").exists(), "the control socket is left behind");
    Ok(())
}

#[test]
fn a_failed_takeover_does_not_change_the_old_process() -> Result<()> {
    let folders = test_folders()?;
    let mut daemon = Running::serve(&mut begin(&folders)?)?;
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    check(&mut frontend, 1)?;
    for (unknown, advice) in [
        (first_message(77, 1), "restart the daemon instead"),
        (first_message(FORMAT, 77), "inflight regions of version 1"),
    ] {
        let refused = Client::new(&folders)?.call("takeover", &unknown)?;
        let message = refused["error"]["message"].as_str().context("it was not refused")?;
        ensure!(message.contains("reads only [77]") && message.contains(advice), "{message}");
        daemon.wait_for("does not take over")?;
        check(&mut frontend, 2)?;
    }

    // The new process dies before it is ready or after the pause, or reports that it cannot take
    // over.
    for (step, methods) in [
        (3, &[][..]),
        (4, &["takeover.pause"]),
        (5, &["takeover.give-up"]),
        (6, &["takeover.pause", "takeover.give-up"]),
        (7, &["takeover.take"]),
        (8, &["takeover.pause", "nonsense"]),
    ] {
        let mut client = Client::new(&folders)?;
        let described = client.begin()?;
        ensure!(described["result"]["says"]["exports"][0].is_object(), "{described}");
        for method in methods {
            let output = client.call(method, &json!({ "why": "it is a test" }))?;
            ensure!(output["error"].is_null() == (*method == "takeover.pause"), "{output}");
        }
        drop(client);
        daemon.wait_for("does not take over")?;
        check(&mut frontend, step)?;
    }
    // The kill of a new process looks the same to the daemon: its connection closes.
    let mut next = Running::start(&mut taking_over(&folders)?)?;
    next.wait_for(TAKEN)?;
    daemon.finish()?.expect_code(0)?;
    check(&mut frontend, 9)
}

/// A process that cannot take over all sessions disconnects none of them.
#[test]
fn a_takeover_is_all_or_nothing() -> Result<()> {
    let folders = test_folders()?;
    folders.disk("two.img", DISK_BYTES)?;
    let (socket, disk) = (folders.socket("two.sock"), folders.path("two.img"));
    let mut command = begin(&folders)?;
    let two = format!("socket-path={},blk-file={}", socket.display(), disk.display());
    let daemon = Running::serve(command.arg("--export").arg(two))?;
    let mut one = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    let mut other = Frontend::attach(&socket, &Setup::default())?;
    for seed in 1..4 {
        // The limit has room for the memory of one front-end.
        let mut command = taking_over(&folders)?;
        command.args(["--max-mapped-memory", "12M"]);
        let refused = run(&mut command)?.expect_code(2)?.stderr;
        ensure!(refused.contains("cannot continue with the front-end of"), "{refused}");
        check(&mut one, seed)?;
        check(&mut other, seed)?;
    }
    let mut next = Running::start(&mut taking_over(&folders)?)?;
    next.wait_for("took over 2 exports")?;
    daemon.finish()?.expect_code(0)?;
    check(&mut one, 4).and_then(|()| check(&mut other, 4))
}

/// Either the old process stays, or it has ended, and a new one starts as after a crash. The kills
/// are spread over the time that a takeover takes on this machine.
#[test]
fn a_new_process_may_be_killed_at_any_moment() -> Result<()> {
    let folders = test_folders()?;
    let old = Running::serve(&mut begin(&folders)?)?;
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    let began = Instant::now();
    let mut next = Running::start(&mut taking_over(&folders)?)?;
    next.wait_for(TAKEN)?;
    let step = began.elapsed() / 16;
    old.finish()?.expect_code(0)?;
    let mut daemon = next;
    let mut crashes = 0;
    for seed in 0..24 {
        kill_after(&folders, step * seed)?;
        let seed = seed.into();
        let is_served =
            Client::new(&folders).and_then(|mut client| client.call("ping", &json!({})));
        if is_served.is_err() || check(&mut frontend, seed).is_err() {
            crashes += 1;
            daemon.finish()?.expect_code(0)?;
            daemon = Running::serve(&mut begin_again(&folders)?)?;
            frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
            check(&mut frontend, seed)?;
        }
    }
    eprintln!("{crashes} of 24 were killed after they had taken over");
    Ok(())
}

/// Starts a takeover and kills the new process after this time. The daemon notices the end of the
/// previous one a moment later, and refuses a takeover until then.
fn kill_after(folders: &TestFolders, time: Duration) -> Result<()> {
    loop {
        let mut next = Running::start(&mut taking_over(folders)?)?;
        std::thread::sleep(time);
        let is_killed = next.signal(Signal::KILL).is_ok();
        let ended = next.finish()?;
        if is_killed {
            return Ok(());
        }
        ensure!(ended.stderr.contains("try again when the takeover"), "{}", ended.stderr);
    }
}

#[test]
fn exports_that_change_during_a_takeover_are_not_taken_over() -> Result<()> {
    let folders = test_folders()?;
    let mut daemon = Running::serve(&mut begin(&folders)?)?;
    let mut client = Client::new(&folders)?;
    client.begin()?;
    let disk = folders.disk("more.img", DISK_BYTES)?;
    let more = folders.socket("more.sock");
    let spec = json!({ "endpoint": { "path": more }, "device": { "blk": { "file": disk } } });
    let added = Client::new(&folders)?.call("export.add", &spec)?;
    ensure!(added["error"].is_null(), "{added}");
    let paused = client.call("takeover.pause", &json!({}))?;
    let message = paused["error"]["message"].as_str().context("it was not refused")?;
    ensure!(message.contains("changed"), "{message}");
    drop(client);
    daemon.wait_for("does not take over")?;
    let mut next = Running::start(&mut taking_over(&folders)?)?;
    next.wait_for("took over 2 exports")?;
    daemon.finish()?.expect_code(0)?;
    run(&mut bench(&more, "--rw randread --number_ios 100")?)?.expect_code(0)?;
    Ok(())
}

#[test]
fn a_takeover_without_a_daemon_is_refused() -> Result<()> {
    let folders = test_folders()?;
    let control = folders.socket("control");
    let words = ["cannot take over from the daemon at", &*control.to_string_lossy()];
    run(&mut taking_over(&folders)?)?.expect_refusal(&words)?;
    let daemon = Running::serve(&mut begin(&folders)?)?;
    let mut other = taking_over(&folders)?;
    other.args(["--log", "warn", "--engine", "threads", "--sqpoll"]);
    run(&mut other)?.expect_refusal(&["--sqpoll"])?;
    drop(daemon);
    Ok(())
}

/// The file is in use for any other daemon after each takeover.
#[test]
fn reservations_in_a_file_are_taken_over() -> Result<()> {
    let folders = test_folders()?;
    let mut command = begin(&folders)?;
    let registration = json!({ "port": "3000000000000001", "key": "0000000000000007" });
    let kept = json!({
        "format": "ringhaul persistent reservations",
        "version": 1,
        "registrations": [registration],
        "reservation": { "type": "write-exclusive", "holder": "3000000000000001" },
    });
    std::fs::write(folders.path("disk.img.reservations"), kept.to_string())?;
    let mut daemon = Running::serve(&mut command)?;
    for _ in 0..2 {
        let mut next = Running::start(&mut taking_over(&folders)?)?;
        next.wait_for(TAKEN)?;
        daemon.finish()?.expect_code(0)?;
        daemon = next;
        let mut other = serve(&folders.socket("other.sock"), &folders.path("disk.img"))?;
        run(other.args(["--lock", "off", "--log", "error"]))?.expect_refusal(&["uses the file"])?;
        let write = bench(&folders.socket("vm.sock"), "--rw randwrite --number_ios 1");
        ensure!(run(&mut write?)?.status.code() != Some(0), "the reservation does not hold");
    }
    Ok(())
}

/// A daemon that was started by the daemon under test. Dropping this value shuts it down, even
/// after a failed test.
struct Successor<'a>(&'a TestFolders);

impl Drop for Successor<'_> {
    fn drop(&mut self) {
        // The request fails if the test has already ended the daemon.
        let _ = Client::new(self.0).and_then(|mut client| client.call("shutdown", &json!({})));
    }
}

/// `ctl` starts the successor in the place of the daemon.
#[test]
fn a_daemon_is_upgraded_by_request() -> Result<()> {
    let folders = test_folders()?;
    let mut command = begin(&folders)?;
    command.args(["--log", "info"]);
    let manager = ServiceManager::listen(&folders.socket("manager"), &mut command)?;
    let daemon = Running::start(&mut command)?;
    manager.wait_for("READY=1\n")?;
    ensure!(folders.socket("vm.sock").exists(), "it has started before its sockets are there");
    let _successor = Successor(&folders);
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    check(&mut frontend, 1)?;
    let ctl = |words: &[&str]| -> Result<Finished> {
        let mut ctl = ringhaul()?;
        run(ctl.args(["ctl", "--json", "--control"]).arg(folders.socket("control")).args(words))
    };
    // PATH is not searched, which has a program of this name.
    ctl(&["upgrade", "false"])?.expect_refusal(&["'false' is not a path", "give the path"])?;
    for (wrong, reason) in [("/nowhere", "cannot start /nowhere"), ("/bin/false", "exit status: 1")]
    {
        let output = ctl(&["upgrade", wrong])?.expect_code(5)?.stderr;
        ensure!(output.contains(reason), "{output}");
        check(&mut frontend, 2)?;
    }
    ctl(&["call", "set", r#"{"poll-max-us": 7}"#])?.expect_code(0)?;
    let binary = ringhaul_binary()?;
    let output = ctl(&["upgrade", &binary.to_string_lossy()])?.expect_code(0)?.stdout;
    let output: Value = serde_json::from_str(&output)?;
    manager.wait_for(&format!("MAINPID={}\n", output["process"]))?;
    // The new process reports only after that.
    manager.wait_for("READY=1\n")?;
    manager.wait_for("STATUS=1 export served, 1 with a front-end\n")?;
    let set: Value = serde_json::from_str(&ctl(&["call", "set"])?.expect_code(0)?.stdout)?;
    ensure!(set["poll-max-us"] == 7, "what was set is forgotten: {set}");
    // The new process knows the path of its control socket, so it can be replaced in turn.
    let output = ctl(&["upgrade", "--binary", &binary.to_string_lossy()])?.expect_code(0)?.stdout;
    ensure!(serde_json::from_str::<Value>(&output)?["process"].is_u64(), "{output}");
    // The last process writes to the standard error of the first, which is thus still open.
    check(&mut frontend, 3)?;
    ctl(&["shutdown"])?.expect_code(0)?;
    let log = daemon.finish()?.expect_code(0)?.stderr;
    for line in ["has taken over", TAKEN, "finishing requests, then ending"] {
        ensure!(log.contains(line), "no {line:?}:\n{log}");
    }
    ensure!(!folders.socket("control").exists(), "the control socket is left behind");
    Ok(())
}
