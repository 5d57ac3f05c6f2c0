//! Front-ends of a killed daemon, whose descriptors a service manager passes to the next process.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{READY, Running, TestFolders, ringhaul, run};
use ringhaul_kit::control::taking_over;
use ringhaul_kit::daemon::pattern;
use ringhaul_kit::frontend::{Frontend, Setup};
use ringhaul_kit::server::ringhaul_binary;
use ringhaul_kit::service_manager::ServiceManager;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::control::Client;
use super::takeover::Client as Successor;
use super::{DISK_BYTES, test_folders};

/// A daemon under a manager, with the export `vm`. A command adds `late`, so that the next process
/// goes on without it.
fn complete(folders: &TestFolders, command: &mut Command) -> Result<()> {
    command.args(["--keep-connections", "on", "--engine", "threads", "--name", "vm"]);
    command.arg("--socket-path").arg(folders.socket("vm.sock"));
    command.arg("--blk-file").arg(folders.path("vm.img"));
    command.arg("--control").arg(folders.socket("control"));
    Ok(())
}

fn forgets(messages: &[String], name: &str) -> bool {
    messages.iter().any(|text| *text == format!("FDSTOREREMOVE=1\nFDNAME={name}\n"))
}

/// Two front-ends whose daemon was killed, and the next process, which serves the first one and
/// cannot open the disk of the second one.
struct Killed {
    manager: ServiceManager,
    next: Running,
    served: Frontend,
    left: Frontend,
}

impl Killed {
    fn new(folders: &TestFolders) -> Result<Self> {
        folders.disk("vm.img", DISK_BYTES)?;
        let late = folders.disk("late.img", DISK_BYTES)?;
        let (control, manager) = (folders.socket("control"), folders.socket("manager"));
        let mut command = ringhaul()?;
        let path = manager;
        let manager = ServiceManager::listen(&path, &mut command)?;
        complete(folders, command.arg("serve"))?;
        let mut daemon = Running::serve(&mut command)?;
        let mut served = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
        served.write(0, 8, &[5; 4096])?;
        manager.wait_stored(&["rh-0"])?;
        let socket = folders.socket("late.sock");
        let spec = json!({ "name": "late", "endpoint": { "path": socket },
            "device": { "blk": { "file": late } } });
        let added = Client::new(&control)?.call("export.add", &spec)?;
        ensure!(added["error"].is_null(), "{added}");
        let left = Frontend::attach(&socket, &Setup::default())?;
        manager.wait_stored(&["rh-0", "rh-1"])?;
        daemon.signal(Signal::KILL)?;
        daemon.finish()?;
        std::fs::remove_file(late)?;
        let mut next = manager.start_with_stored(&path, |command| complete(folders, command))?;
        next.wait_for_each(&["late: cannot be restored", READY])?;
        // The next process continues what is stored.
        manager.wait_stored(&["rh-0", "rh-1"])?;
        let _ = manager.arrived();
        ensure!(served.read(0, 8, 4096)? == [5; 4096], "its queues have not resumed");
        Ok(Self { manager, next, served, left })
    }
}

fn begin(successor: &mut Successor, format: u32, takes_stashes: bool) -> Result<()> {
    let message = json!({ "formats": [format], "inflight-versions": [1], "version": "test",
        "takes-stashes": takes_stashes });
    let described = successor.call("takeover", &message)?;
    ensure!(described["error"].is_null(), "{described}");
    Ok(())
}

fn ctl(control: &Path, words: &[&str]) -> Result<String> {
    let done = run(ringhaul()?.args(["ctl", "--control"]).arg(control).args(words))?;
    Ok(done.expect_code(0)?.stdout)
}

/// A kill at any moment of an upgrade must find the session in the store. The manager refuses
/// messages of the old process once it knows the new one.
#[test]
fn an_upgrade_leaves_the_descriptors_of_a_session_stored() -> Result<()> {
    let folders = test_folders()?;
    let Killed { manager, next, mut served, mut left } = Killed::new(&folders)?;
    let control = folders.socket("control");
    let upgraded = ctl(&control, &["upgrade", &ringhaul_binary()?.display().to_string()])?;
    let mut messages = manager.wait_for("MAINPID=")?;
    ensure!(forgets(&messages, "rh-1"), "rh-1 is stored for ever: {messages:?}");
    manager.wait_stored(&["rh-0"])?;
    ensure!(served.read(0, 8, 4096)? == [5; 4096], "its queues have not resumed");
    ensure!(left.channel.receive()?.is_none(), "no process serves this front-end");
    messages.extend(manager.arrived());
    ensure!(!messages.iter().any(|text| text.contains("rh-0")), "{messages:?}");
    // A new front-end has a name of its own, and a kill loses neither.
    let socket = folders.socket("new.sock");
    let spec = json!({ "name": "new", "endpoint": { "path": socket },
        "device": { "blk": { "null": { "size-bytes": DISK_BYTES } } } });
    let added = Client::new(&control)?.call("export.add", &spec)?;
    ensure!(added["error"].is_null(), "{added}");
    let mut new = Frontend::attach(&socket, &Setup::default())?;
    manager.wait_stored(&["rh-0", "rh-1"])?;
    served.write(0, 16, &[6; 4096])?;
    let process = serde_json::from_str::<Value>(&upgraded)?["process"].as_i64();
    let process = process.and_then(|id| Pid::from_raw(id.try_into().ok()?));
    kill_process(process.context("the upgrade names no process")?, Signal::KILL)?;
    // Both processes write to its standard error.
    next.finish()?.expect_code(0)?;
    let path = folders.socket("manager");
    let mut last = manager.start_with_stored(&path, |command| complete(&folders, command))?;
    last.wait_for_each(&[READY, READY])?;
    ensure!(served.read(0, 16, 4096)? == [6; 4096], "a write is lost");
    new.read(0, 0, 4096)?;
    manager.wait_stored(&["rh-0", "rh-1"])?;
    last.signal(Signal::TERM)?;
    last.finish()?.expect_code(0)?;
    manager.wait_stored(&[])
}

/// A new process of an earlier format stores the descriptors again, under the same names. One
/// without a service manager could not have them forgotten.
#[test]
fn only_a_new_process_with_the_stash_leaves_it_stored() -> Result<()> {
    for (format, takes_stashes, stored) in
        [(8, true, &[][..]), (9, false, &[]), (9, true, &["rh-0"])]
    {
        let folders = test_folders()?;
        folders.disk("vm.img", DISK_BYTES)?;
        let mut command = ringhaul()?;
        let manager = ServiceManager::listen(&folders.socket("manager"), &mut command)?;
        complete(&folders, command.arg("serve"))?;
        let daemon = Running::serve(&mut command)?;
        let _frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
        manager.wait_stored(&["rh-0"])?;
        let mut successor = Successor::new(&folders)?;
        begin(&mut successor, format, takes_stashes)?;
        let paused = successor.call("takeover.pause", &json!({}))?;
        let stash = &paused["result"]["says"]["exports"][0]["stash"]["name"];
        ensure!(stored.first().map_or(stash.is_null(), |name| stash == name), "{paused}");
        let taken = successor.call("takeover.take", &json!({}))?;
        ensure!(taken["error"].is_null(), "{taken}");
        let messages = manager.wait_for("MAINPID=")?;
        ensure!(forgets(&messages, "rh-0") == stored.is_empty(), "{format}: {messages:?}");
        daemon.finish()?.expect_code(0)?;
        manager.wait_stored(stored)?;
    }
    Ok(())
}

/// A terminal may be the parent of the new process. A stash that stays would keep the connection
/// open without a process.
#[test]
fn a_new_process_that_keeps_no_session_leaves_none_stored() -> Result<()> {
    for has_manager in [false, true] {
        let folders = test_folders()?;
        let disk = folders.disk("vm.img", DISK_BYTES)?;
        let (mut command, path) = (ringhaul()?, folders.socket("manager"));
        let manager = ServiceManager::listen(&path, &mut command)?;
        command.env("FDSTORE", "8").args(["serve", "--engine", "threads", "--name", "vm"]);
        command.arg("--socket-path").arg(folders.socket("vm.sock")).arg("--blk-file").arg(disk);
        command.arg("--control").arg(folders.socket("control"));
        let old = Running::serve(&mut command)?;
        let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
        frontend.write(0, 8, &[5; 4096])?;
        manager.wait_stored(&["rh-0"])?;
        let mut command = taking_over(&folders)?;
        command.env_remove("FDSTORE").env_remove("NOTIFY_SOCKET");
        if has_manager {
            // It states no limit, so that the daemon stores nothing.
            command.env("NOTIFY_SOCKET", &path);
        }
        let mut new = Running::start(&mut command)?;
        new.wait_for("took over")?;
        old.finish()?.expect_code(0)?;
        manager.wait_stored(&[])?;
        ensure!(frontend.read(0, 8, 4096)? == [5; 4096], "its queues have not resumed");
        new.signal(Signal::TERM)?;
        new.finish()?.expect_code(0)?;
    }
    Ok(())
}

/// The old process stores a session again when it resumes, and the next takeover must know of that.
#[test]
fn a_takeover_that_fails_leaves_one_stash_to_the_next_one() -> Result<()> {
    let folders = test_folders()?;
    folders.disk("vm.img", DISK_BYTES)?;
    let mut command = ringhaul()?;
    let manager = ServiceManager::listen(&folders.socket("manager"), &mut command)?;
    complete(&folders, command.arg("serve"))?;
    let mut daemon = Running::serve(&mut command)?;
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    manager.wait_stored(&["rh-0"])?;
    let pause = |name: &str| {
        let mut successor = Successor::new(&folders)?;
        begin(&mut successor, 9, true)?;
        let paused = successor.call("takeover.pause", &json!({}))?;
        let stash = &paused["result"]["says"]["exports"][0]["stash"]["name"];
        ensure!(stash == name, "{paused}");
        Ok(successor)
    };
    drop(pause("rh-0")?);
    daemon.wait_for("does not take over")?;
    frontend.write(0, 8, &[5; 4096])?;
    manager.wait_stored(&["rh-1"])?;
    let taken = pause("rh-1")?.call("takeover.take", &json!({}))?;
    ensure!(taken["error"].is_null(), "{taken}");
    daemon.finish()?.expect_code(0)?;
    manager.wait_stored(&["rh-1"])
}

/// The next process refuses a session whose unit had another disk. The unit gets its new disk by a
/// command, or by the next command line.
#[test]
fn the_stored_session_has_the_present_units() -> Result<()> {
    for adds_by_command in [true, false] {
        let folders = test_folders()?;
        let [first, before, now] = ["a.img", "b.img", "c.img"]
            .map(|name| folders.disk(name, DISK_BYTES).map(|path| path.display().to_string()));
        let (first, before, now) = (first?, before?, now?);
        let path = folders.socket("manager");
        let complete = |command: &mut Command, more: &[&str]| {
            command.args(["--keep-connections", "on", "--name", "vm", "--device", "scsi"]);
            command.arg("--lun").arg(format!("0,blk-file={first}")).args(more);
            command.arg("--socket-path").arg(folders.socket("vm.sock"));
            command.arg("--control").arg(folders.socket("control"));
        };
        let mut command = ringhaul()?;
        let manager = ServiceManager::listen(&path, &mut command)?;
        complete(command.arg("serve"), &[]);
        let mut daemon = Running::serve(&mut command)?;
        let call = |method: &str, params: &Value| -> Result<()> {
            let done = Client::new(&folders.socket("control"))?.call(method, params)?;
            ensure!(done["error"].is_null(), "{done}");
            Ok(())
        };
        let unit =
            |disk: &str| json!({ "export": "vm", "unit": { "lun": 1, "disk": { "file": disk } } });
        call("lun.add", &unit(&before))?;
        let _frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
        manager.wait_stored(&["rh-0"])?;
        call("lun.remove", &json!({ "export": "vm", "lun": 1 }))?;
        let mut more = Vec::new();
        let of_next = format!("1,blk-file={now}");
        if adds_by_command {
            call("lun.add", &unit(&now))?;
        } else {
            more = vec!["--lun", &of_next];
        }
        daemon.signal(Signal::KILL)?;
        daemon.finish()?;
        manager.wait_stored(&["rh-0"])?;
        let mut next = manager.start_with_stored(&path, |command| {
            complete(command, &more);
            Ok(())
        })?;
        next.wait_for("continues with the front-end of the killed daemon")?;
        next.signal(Signal::TERM)?;
        next.finish()?.expect_code(0)?;
    }
    Ok(())
}

/// The kills are spread over the time that a takeover takes.
#[test]
fn a_kill_of_both_processes_of_a_takeover_loses_no_session() -> Result<()> {
    let folders = test_folders()?;
    folders.disk("vm.img", DISK_BYTES)?;
    let mut command = ringhaul()?;
    let path = folders.socket("manager");
    let manager = ServiceManager::listen(&path, &mut command)?;
    complete(&folders, command.arg("serve"))?;
    let mut old = Running::serve(&mut command)?;
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    manager.wait_stored(&["rh-0"])?;
    for kill in 0..20 {
        frontend.write(0, kill, &pattern(kill, 512))?;
        let mut new = Running::start(taking_over(&folders)?.env("NOTIFY_SOCKET", &path))?;
        new.wait_for("ready to take over")?;
        std::thread::sleep(Duration::from_micros(200 * kill * kill));
        for mut process in [old, new] {
            // The old process may have ended.
            let _ = process.signal(Signal::KILL);
            process.finish()?;
        }
        manager.wait_stored(&["rh-0"])?;
        old = manager.start_with_stored(&path, |command| complete(&folders, command))?;
        old.wait_for("continues with the front-end of the killed daemon")?;
        ensure!(frontend.read(0, kill, 512)? == pattern(kill, 512), "a write is lost");
    }
    old.signal(Signal::TERM)?;
    old.finish()?.expect_code(0)?;
    manager.wait_stored(&[])
}

#[test]
fn the_end_of_the_service_forgets_all_stored_descriptors() -> Result<()> {
    let folders = test_folders()?;
    let Killed { manager, mut next, served, left } = Killed::new(&folders)?;
    next.signal(Signal::TERM)?;
    next.finish()?.expect_code(0)?;
    manager.wait_stored(&[])?;
    for mut frontend in [served, left] {
        ensure!(frontend.channel.receive()?.is_none(), "no process serves this front-end");
    }
    Ok(())
}

/// Its disk may be removed, and another one may take the place in the configuration.
#[test]
fn a_front_end_whose_export_is_gone_is_disconnected() -> Result<()> {
    let folders = test_folders()?;
    folders.disk("vm.img", DISK_BYTES)?;
    folders.disk("other.img", DISK_BYTES)?;
    let path = folders.socket("manager");
    let mut command = ringhaul()?;
    let manager = ServiceManager::listen(&path, &mut command)?;
    complete(&folders, command.arg("serve"))?;
    let mut daemon = Running::serve(&mut command)?;
    let mut front_end = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    manager.wait_stored(&["rh-0"])?;
    daemon.signal(Signal::KILL)?;
    daemon.finish()?;
    let mut next = manager.start_with_stored(&path, |command| {
        command.args(["--keep-connections", "on", "--engine", "threads", "--name", "other"]);
        command.arg("--socket-path").arg(folders.socket("other.sock"));
        command.arg("--blk-file").arg(folders.path("other.img"));
        Ok(())
    })?;
    next.wait_for_each(&["vm: the front-end of the killed daemon is disconnected", READY])?;
    manager.wait_stored(&[])?;
    ensure!(front_end.channel.receive()?.is_none(), "it waits for a daemon that will not answer");
    next.signal(Signal::TERM)?;
    next.finish()?.expect_code(0)?;
    Ok(())
}
