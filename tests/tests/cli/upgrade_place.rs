//! The place of a process that `ctl upgrade` starts: the rights, limits and namespaces of the old
//! process, whoever runs `ctl`.

use std::fs;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, ringhaul, ringhaul_under, run};
use ringhaul_kit::server::ringhaul_binary;
use ringhaul_kit::system::can_change_system;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, PidfdFlags, Signal, getegid, geteuid, pidfd_open, pidfd_send_signal};
use serde_json::{Value, json};

use super::control::Client;
use super::test_folders;

/// A user without rights.
const NOBODY: u32 = 65534;

/// The fields of `/proc/PID/status` that a new process must share with the old one.
const FIELDS: [&str; 8] =
    ["Umask", "Uid", "Gid", "Groups", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs"];

/// Runs a daemon in namespaces of its own, with other limits, as another user.
const START: &str = "
    umask 027
    ulimit -c 0
    ulimit -n 3000
    echo 500 > /proc/self/oom_score_adj
    mount -t tmpfs none /mnt
    touch /mnt/place
    exec setpriv --reuid 65534 --regid 65534 --groups 65534,12345 --no-new-privs \\
        --bounding-set -all,+chown,+net_admin --inh-caps -all,+chown --ambient-caps -all,+chown \\
        nice -n 3 taskset -c 0 \"$@\"";

/// The place of a process, as far as it may differ from that of `ctl`.
fn place(process: u32) -> Result<Vec<String>> {
    let folder = PathBuf::from(format!("/proc/{process}"));
    let status = fs::read_to_string(folder.join("status"))?;
    let is_shared = |line: &&str| {
        line.split_once(':')
            .is_some_and(|(name, _)| FIELDS.contains(&name) || name == "Cpus_allowed_list")
    };
    let mut place: Vec<String> = status.lines().filter(is_shared).map(str::to_owned).collect();
    for file in ["limits", "cgroup", "oom_score_adj"] {
        place.push(fs::read_to_string(folder.join(file))?);
    }
    for name in ["mnt", "uts", "ipc", "net", "cgroup"] {
        place.push(fs::read_link(folder.join("ns").join(name))?.display().to_string());
    }
    let stat = fs::read_to_string(folder.join("stat"))?;
    let (_, stat) = stat.rsplit_once(')').context("no name in stat")?;
    let nice = stat.split_whitespace().nth(16).context("no priority in stat")?;
    place.push(format!("nice {nice}"));
    place.push(format!("{}", folder.join("root/mnt/place").exists()));
    Ok(place)
}

/// Ends the daemon when the test ends early.
struct End<'a>(&'a Path);

impl Drop for End<'_> {
    fn drop(&mut self) {
        // The request fails if the test has already ended the daemon.
        let _ = Client::new(self.0).and_then(|mut client| client.call("shutdown", &json!({})));
    }
}

/// The process that serves a control socket.
fn process(control: &Path) -> Result<u32> {
    let shown: Value = Client::new(control)?.call("process", &json!({}))?;
    shown["result"]["process"].as_u64().and_then(|id| id.try_into().ok()).context("no process")
}

#[test]
fn a_successor_takes_the_place_of_the_daemon() -> Result<()> {
    if !can_change_system("the user of a daemon") {
        return Ok(());
    }
    let folders = test_folders()?;
    let control = folders.socket("control");
    let folder = control.parent().context("a socket has a folder")?;
    rustix::fs::chown(folder, Some(rustix::fs::Uid::from_raw(NOBODY)), None)?;
    let unshare = ["unshare", "--mount", "--uts", "--ipc", "--net", "sh", "-c", START, "sh"];
    let mut command = ringhaul_under(&unshare)?;
    command.args(["serve", "--device", "scsi", "--lun", "0,null=1M", "--socket-path"]);
    command.arg(folders.socket("vm.sock"));
    // A sandbox rules out new privileges by itself.
    command.args(["--sandbox", "off"]);
    command.arg("--control").arg(&control).env("RINGHAUL_PLACE", "of the daemon");
    command.env("GCONV_PATH", "/nowhere");
    let daemon = Running::serve(&mut command)?;
    let _end = End(&control);
    let old = process(&control)?;
    let expected = place(old)?;
    let own = place(std::process::id())?;
    let shared = own.iter().filter(|part| expected.contains(part)).count();
    // Only the control groups are shared.
    ensure!(shared <= 3, "the test shows little: {own:#?} {expected:#?}");
    let mut ctl = ringhaul()?;
    ctl.env("CALLER", "of ctl").args(["ctl", "--control"]).arg(&control).arg("upgrade");
    run(ctl.args(["--sandbox", "off"]).arg(ringhaul_binary()?))?.expect_code(0)?;
    let new = process(&control)?;
    ensure!(new != old, "it has not been replaced");
    let found = place(new)?;
    for (found, expected) in found.iter().zip(&expected) {
        ensure!(found == expected, "{found}\ninstead of {expected}");
    }
    let environment = fs::read(format!("/proc/{new}/environ"))?;
    let environment = String::from_utf8_lossy(&environment);
    ensure!(environment.contains("RINGHAUL_PLACE=of the daemon"), "{environment}");
    ensure!(!environment.contains("GCONV_PATH"), "{environment}");
    ensure!(!environment.contains("CALLER"), "{environment}");
    let session = rustix::process::getsid(rustix::process::Pid::from_raw(new.try_into()?))?;
    ensure!(session.as_raw_pid() == i32::try_from(new)?, "the session is that of ctl");
    rustix::process::kill_process(session, Signal::TERM)?;
    // The new process writes to the pipe of the old one.
    let log = daemon.finish()?.expect_code(0)?.stderr;
    ensure!(log.contains("finishing requests, then ending"), "{log}");
    Ok(())
}

/// A user that is not root needs no rights where nothing differs, and changes nothing elsewhere.
#[test]
fn the_user_of_the_daemon_may_upgrade_it_in_its_own_place() -> Result<()> {
    if !can_change_system("the user of a daemon") {
        return Ok(());
    }
    let as_user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"];
    for (above, code) in [(&[][..], 0), (&["nice", "-n", "-1"], 5)] {
        let folders = test_folders()?;
        let control = folders.socket("control");
        let folder = control.parent().context("a socket has a folder")?;
        rustix::fs::chown(folder, Some(rustix::fs::Uid::from_raw(NOBODY)), None)?;
        let mut command = ringhaul_under(&[above, &as_user].concat())?;
        command.args(["serve", "--device", "scsi", "--lun", "0,null=1M", "--socket-path"]);
        command.arg(folders.socket("vm.sock")).arg("--control").arg(&control);
        let daemon = Running::serve(&mut command)?;
        let _end = End(&control);
        let old = process(&control)?;
        let mut ctl = ringhaul_under(&as_user)?;
        ctl.args(["ctl", "--control"]).arg(&control).arg("upgrade").arg(ringhaul_binary()?);
        let done = run(&mut ctl)?.expect_code(code)?;
        if code != 0 {
            ensure!(done.stderr.contains("run this command as root"), "{}", done.stderr);
        }
        ensure!((process(&control)? == old) == (code != 0), "another process serves: {above:?}");
        Client::new(&control)?.call("shutdown", &json!({}))?;
        daemon.finish()?.expect_code(0)?;
    }
    Ok(())
}

/// The takeover does not depend on the process that has started it.
#[test]
fn a_successor_outlives_a_killed_caller() -> Result<()> {
    let folders = test_folders()?;
    let control = folders.socket("control");
    let mut command = ringhaul()?;
    command.args(["serve", "--device", "scsi", "--lun", "0,null=1M", "--socket-path"]);
    command.arg(folders.socket("vm.sock")).arg("--control").arg(&control);
    let mut daemon = Running::serve(&mut command)?;
    let _end = End(&control);
    let old = process(&control)?;
    let script = folders.path("kill.sh");
    let text = "#!/bin/sh\nkill -9 $PPID\nexec \"$BINARY\" \"$@\"\n";
    fs::write(&script, text.replace("$BINARY", &ringhaul_binary()?.display().to_string()))?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    let mut ctl = ringhaul()?;
    let ended = run(ctl.args(["ctl", "--control"]).arg(&control).arg("upgrade").arg(&script));
    ensure!(ended?.expect_code(0).is_err(), "the caller was not killed");
    daemon.wait_for("queues stood still")?;
    ensure!(process(&control)? != old, "the old process serves");
    Client::new(&control)?.call("shutdown", &json!({}))?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn a_successor_does_not_outlive_its_test() -> Result<()> {
    let folders = test_folders()?;
    let control = folders.socket("control");
    let mut command = ringhaul()?;
    command.args(["serve", "--device", "scsi", "--lun", "0,null=1M", "--socket-path"]);
    command.arg(folders.socket("vm.sock")).arg("--control").arg(&control);
    let daemon = Running::serve(&mut command)?;
    let end = End(&control);
    let mut ctl = ringhaul()?;
    ctl.args(["ctl", "--control"]).arg(&control).arg("upgrade").arg(ringhaul_binary()?);
    run(&mut ctl)?.expect_code(0)?;
    let successor = Pid::from_raw(process(&control)?.try_into()?).context("no process")?;
    let successor = pidfd_open(successor, PidfdFlags::empty())?;
    // The end of a test that fails.
    std::mem::forget(end);
    drop((daemon, folders));
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let ended = poll(&mut [PollFd::new(&successor, PollFlags::IN)], Some(&at_once));
    let _ = pidfd_send_signal(&successor, Signal::KILL);
    ensure!(ended == Ok(1), "it was still there");
    Ok(())
}

/// Another process, with other rights, may have the id of a daemon that has ended.
#[test]
fn the_place_of_a_daemon_that_has_ended_is_not_taken() -> Result<()> {
    let mut ended = Command::new("true").spawn()?;
    let daemon = pidfd_open(Pid::from_child(&ended), PidfdFlags::empty())?;
    ended.wait()?;
    let (mut ours, theirs) = UnixStream::pair()?;
    let mut successor = {
        let mut command = Command::new(ringhaul_binary()?);
        // The command keeps the end of the child open.
        command.arg("become-successor").stdin(OwnedFd::from(theirs)).spawn()?
    };
    let start = json!({ "process": 1, "control": "/", "directory": "/", "log-options": [],
        "environment": {} });
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    let instructions = json!({ "daemon": std::process::id(), "user": user, "group": group,
        "program": "/bin/false", "start": start, "caller": { "variables": {} },
        "in_unit": false });
    let null = fs::File::open("/dev/null")?;
    let fds = [daemon.as_fd(), null.as_fd(), null.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    ensure!(control.push(SendAncillaryMessage::ScmRights(&fds)), "there is room");
    let line = format!("{instructions}\n");
    sendmsg(&ours, &[IoSlice::new(line.as_bytes())], &mut control, SendFlags::empty())?;
    let mut error = String::new();
    ours.read_to_string(&mut error)?;
    successor.wait()?;
    ensure!(error.contains("the daemon has ended"), "it has begun a program: {error}");
    Ok(())
}
