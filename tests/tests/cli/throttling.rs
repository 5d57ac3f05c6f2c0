//! Limits of disks and groups, and the error policy of disks, set by request.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, ringhaul, run};
use ringhaul_kit::control::taking_over;
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, Setup, blk};
use ringhaul_kit::fuse::{Fuse, opcode};
use ringhaul_kit::system::{Tmpfs, can_change_system};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::control::Client;
use super::test_folders;

const MIB: u64 = 1 << 20;
const PIECE: u32 = 64 << 10;

pub(super) fn serve(folders: &TestFolders, words: &[&str]) -> Result<(Running, Client)> {
    let control = folders.socket("control");
    let mut command = ringhaul()?;
    command.arg("serve").arg("--control").arg(&control).args(words);
    let daemon = Running::serve(&mut command)?;
    Ok((daemon, Client::new(&control)?))
}

/// Runs `ringhaul ctl` and returns its stdout.
pub(super) fn ctl(folders: &TestFolders, words: &[&str]) -> Result<String> {
    let mut command = ringhaul()?;
    command.arg("ctl").arg("--control").arg(folders.socket("control")).args(words);
    Ok(run(&mut command)?.expect_code(0)?.stdout)
}

pub(super) fn shown(client: &mut Client, export: &str) -> Result<Value> {
    Ok(client.call("export.show", &json!({ "export": export }))?["result"].clone())
}

/// Makes writes of 64 KiB to adjacent places available, and returns without waiting.
pub(super) fn begin_writes(frontend: &mut Frontend, count: u16) -> Result<()> {
    for slot in 0..count {
        let sector = u64::from(slot) * u64::from(PIECE / 512);
        let (header, status) = frontend.put_header(0, slot, blk::OUT, sector)?;
        let data = Desc::readable(DATA, PIECE);
        let chain = [Desc::readable(header, 16), data, Desc::writable(status, 1)];
        frontend.rings[0].put_chain(4 * slot, &chain);
        frontend.rings[0].submit(4 * slot)?;
    }
    Ok(())
}

/// Waits until these writes succeed, in any order.
pub(super) fn end_writes(frontend: &mut Frontend, slots: std::ops::Range<u16>) -> Result<()> {
    let mut left: Vec<u16> = slots.collect();
    while !left.is_empty() {
        let used = frontend.rings[0].wait_used()?;
        let place = left.iter().position(|slot| used.head == u32::from(4 * slot));
        let place = place.with_context(|| format!("{used:?} came, and slots {left:?} are left"))?;
        let slot = left.swap_remove(place);
        let status = frontend.status(0, slot);
        ensure!(status == Some(blk::OK), "write {slot} ended with status {status:?}");
    }
    Ok(())
}

/// With a limit of one byte per second one write begins at once, and the next one after 18 hours.
#[test]
fn limits_change_while_requests_wait_for_them() -> Result<()> {
    let folders = test_folders()?;
    let (vm, disk) = (folders.socket("vm"), folders.disk("disk.img", MIB)?);
    let export = format!(
        "socket-path={},name=vm,bps-write=1,group=slow,blk-file={}",
        vm.display(),
        disk.display()
    );
    let other =
        format!("socket-path={},name=other,group=slow,null=1M", folders.socket("b").display());
    let (daemon, mut client) = serve(&folders, &["--export", &export, "--export", &other])?;
    let limits = |client: &mut Client, export: &str| -> Result<Value> {
        Ok(shown(client, export)?["disks"][0]["limits"].clone())
    };
    let slow = json!({ "group": "slow", "bps-write": 1 });
    ensure!(limits(&mut client, "vm")? == slow && limits(&mut client, "other")? == slow);

    // Waiting writes end by a change of the group, by a change of the disk, and by the end of the
    // queue.
    let mut frontend = Frontend::attach(&vm, &Setup::default())?;
    begin_writes(&mut frontend, 4)?;
    end_writes(&mut frontend, 0..1)?;
    while shown(&mut client, "vm")?["unfinished"] != 3 {}
    ctl(&folders, &["set-disk", "other", "bps-write=0"])?;
    end_writes(&mut frontend, 1..4)?;
    ensure!(limits(&mut client, "vm")? == json!({ "group": "slow" }));

    ctl(&folders, &["set-disk", "vm", "group=", "iops-write=1", "iops-write-max=1"])?;
    ensure!(limits(&mut client, "other")? == json!({ "group": "slow" }));
    ctl(&folders, &["set-disk", "vm", "bps-write=1"])?;
    begin_writes(&mut frontend, 3)?;
    end_writes(&mut frontend, 0..1)?;
    ctl(&folders, &["set-disk", "vm", "bps-write=0", "iops-write=0"])?;
    end_writes(&mut frontend, 1..3)?;

    ctl(&folders, &["set-disk", "vm", "bps-write=1"])?;
    begin_writes(&mut frontend, 3)?;
    end_writes(&mut frontend, 0..1)?;
    while shown(&mut client, "vm")?["unfinished"] != 2 {}
    let _ = frontend.stop_queue(0)?;
    end_writes(&mut frontend, 1..3)?;
    drop(frontend);
    let ended = client.call("shutdown", &json!({}))?;
    ensure!(ended["result"] == json!({}), "{ended}");
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// The last of 16 writes begins when the earlier ones are paid for, except for the tenth of a
/// second that may come at once. A busy machine only makes it later.
#[test]
fn requests_begin_at_the_rate_of_the_limit() -> Result<()> {
    let folders = test_folders()?;
    let vm = folders.socket("vm");
    let path = vm.display().to_string();
    let words = ["--socket-path", &path, "--name", "vm", "--limits", "iops-write=32"];
    let (_daemon, mut client) = serve(&folders, &[&words[..], &["--disk", "null:2M"]].concat())?;
    let mut frontend = Frontend::attach(&vm, &Setup::default())?;
    let least = Duration::from_secs(15) / 32 - Duration::from_millis(100);
    // The same rate in requests, in bytes, and as a limit of a group.
    for (change, all) in [
        (&["iops-write=32"][..], 16),
        (&["iops-write=0", "bps-total=2M"], 32),
        (&["group=gold", "iops-total=32"], 48),
    ] {
        ctl(&folders, &[&["set-disk", "vm"], change].concat())?;
        let start = Instant::now();
        begin_writes(&mut frontend, 16)?;
        end_writes(&mut frontend, 0..16)?;
        let took = start.elapsed();
        ensure!(took >= least, "{change:?}: 16 writes took {took:?}, and {least:?} is the least");
        while shown(&mut client, "vm")?["served"]["writes"]["requests"] != all {}
    }
    Ok(())
}

/// An added disk changes a limit of its group only if the disk names that limit and is served.
#[test]
fn added_disks_change_only_the_group_limits_that_they_name() -> Result<()> {
    let folders = test_folders()?;
    let vm = folders.socket("vm").display().to_string();
    let usual = ["--limits", "group=gold,iops-total=100,bps-total=1M"];
    let words = ["--socket-path", &vm, "--name", "vm", "--device", "scsi", "--lun", "0,null=1M"];
    let (_daemon, mut client) = serve(&folders, &[&words[..], &usual].concat())?;
    let mut gold = |expected: Value, when: &str| -> Result<()> {
        let limits = shown(&mut client, "vm")?["disks"][0]["limits"].clone();
        ensure!(limits == expected, "{when}: {limits}");
        Ok(())
    };
    let all = |iops: u64| json!({ "group": "gold", "iops-total": iops, "bps-total": MIB });
    gold(all(100), "at the start")?;
    ctl(&folders, &["set-disk", "vm", "0", "iops-total=200"])?;
    ctl(&folders, &["add-lun", "vm", "1,null=1M"])?;
    gold(all(200), "a unit that names nothing has come")?;
    ctl(&folders, &["add-lun", "vm", "2,iops-total=300,null=1M"])?;
    gold(all(300), "a unit that names one limit has come")?;

    // Exports and units that fail to start change no limit.
    let control = folders.socket("control");
    let fails = |words: &[&str]| -> Result<()> {
        let mut command = ringhaul()?;
        command.arg("ctl").arg("--control").arg(&control).args(words);
        let ended = run(&mut command)?;
        ensure!(!ended.status.success(), "{words:?} succeeded");
        Ok(())
    };
    let (path, bad) = (folders.socket("other"), folders.path("reservations"));
    fs::write(&bad, "bad")?;
    let (path, bad) = (path.display(), format!("reservations={},null=1M", bad.display()));
    let export = format!("socket-path={path},device=scsi,group=gold,iops-total=5,lun=0,{bad}");
    fails(&["add", "--export", &export])?;
    fails(&["add-lun", "vm", &format!("3,iops-total=5,{bad}")])?;
    gold(all(300), "others could not come")?;
    let export = format!("socket-path={path},group=gold,iops-total=5,null=1M");
    ctl(&folders, &["add", "--export", &export])?;
    gold(json!({ "group": "gold", "iops-total": 5 }), "another export has come")
}

/// The change of limits comes after the request that opens the disk.
#[test]
fn limits_that_were_changed_while_a_disk_was_opened_stay() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let [vm, late] = ["vm", "late"].map(|name| folders.socket(name).display().to_string());
    let words = ["--engine", "threads", "--limits", "group=gold,iops-total=100"];
    let export = format!("socket-path={vm},name=vm,device=scsi,lun=0,null=1M");
    let words = [&words[..], &["--export", &export]].concat();
    let (daemon, mut client) = serve(&folders, &words)?;
    // `ctl add` would open the file itself.
    let disk = json!({ "file": fuse.file() });
    let mut settings = json!({ "read-only": true, "no-lock": true,
        "limits": { "iops-total": 5 } });
    let unit = json!({ "lun": 1, "disk": disk, "settings": settings });
    settings["limits"]["group"] = json!("gold");
    settings["endpoint"] = json!({ "path": late });
    settings["device"] = json!({ "blk": disk });
    let unit = json!({ "export": "vm", "unit": unit });
    let comes = [("export.add", settings), ("lun.add", unit)];
    for ((method, params), rate) in comes.into_iter().zip([9, 11]) {
        fuse.withhold(daemon.pid(), &[opcode::OPEN]);
        let mut command = ringhaul()?;
        command.arg("ctl").arg("--control").arg(folders.socket("control"));
        command.args(["call", method]).arg(params.to_string());
        let coming = Running::start(&mut command)?;
        let waits = fuse.wait_for(opcode::OPEN);
        let set = ctl(&folders, &["set-disk", "vm", "0", &format!("iops-total={rate}")]);
        fuse.release();
        waits.and(set)?;
        coming.finish()?.expect_code(0)?;
        let limits = shown(&mut client, "vm")?["disks"][0]["limits"].clone();
        ensure!(limits == json!({ "group": "gold", "iops-total": rate }), "{method}: {limits}");
    }
    Ok(())
}

/// A unit inherits each limit that it does not name from its export.
#[test]
fn limits_of_units_are_merged_with_those_of_their_export() -> Result<()> {
    let folders = test_folders()?;
    let vm = folders.socket("vm").display().to_string();
    let units = ["--lun", "0,iops-total=500,null=1M", "--lun", "1,bps-total=0,null=1M"];
    let usual = ["--limits", "bps-total=100M", "--device", "scsi"];
    let words = ["--socket-path", &vm, "--name", "vm"];
    let (_daemon, mut client) = serve(&folders, &[&words[..], &usual, &units].concat())?;
    let mut check = |expected: [Value; 2]| -> Result<()> {
        let disks = shown(&mut client, "vm")?["disks"].clone();
        let seen = [&disks[0]["limits"], &disks[1]["limits"]];
        ensure!(seen == [&expected[0], &expected[1]], "{seen:?}");
        Ok(())
    };
    let bytes = 100 * MIB;
    check([json!({ "iops-total": 500, "bps-total": bytes }), json!({})])?;
    // A limit that is set to none does not fall back to that of the export.
    ctl(&folders, &["set-disk", "vm", "0", "bps-total=0"])?;
    ctl(&folders, &["set-disk", "vm", "1", "iops-read=7"])?;
    check([json!({ "iops-total": 500 }), json!({ "iops-read": 7 })])
}

#[test]
fn invalid_limits_are_refused() -> Result<()> {
    let folders = test_folders()?;
    let vm = folders.socket("vm");
    let unit = "0,iops-read=7,null=1M";
    let words = ["--socket-path", &vm.display().to_string(), "--name", "vm"];
    let more = ["--device", "scsi", "--lun", unit, "--limits", "iops-total=9", "--rerror", "retry"];
    let (_daemon, mut client) = serve(&folders, &[&words[..], &more].concat())?;
    let disk = shown(&mut client, "vm")?["disks"][0].clone();
    ensure!(disk["limits"] == json!({ "iops-total": 9, "iops-read": 7 }), "{disk}");
    ensure!(disk["rerror"] == "retry" && disk["werror"] == "hold-briefly", "{disk}");
    for (params, code, words) in [
        (json!({ "export": "vm" }), 5, "name one of its logical units"),
        (json!({ "export": "vm", "lun": 1 }), 2, "has no unit 0:1"),
        (json!({ "export": "vm", "lun": 0, "rerror": "hold" }), -32602, "only writes lack space"),
        (json!({ "export": "vm", "lun": 0, "limits": { "iops-read-max": 3 } }), -32602, "at least"),
        (json!({ "export": "vm", "lun": 0, "limits": { "iops": 3 } }), -32602, "unknown field"),
    ] {
        let answer = client.call("disk.set", &params)?;
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        ensure!(answer["error"]["code"] == code && message.contains(words), "{params}: {answer}");
    }
    let same = shown(&mut client, "vm")?["disks"][0].clone();
    ensure!(same == disk, "{same}");
    let resumed = client.call("disk.resume", &json!({ "export": "vm" }))?;
    ensure!(resumed["result"] == json!({}), "{resumed}");
    Ok(())
}

/// Writes to a full file system. Without an inflight region the writes cannot be left for another
/// process, so a takeover is refused.
#[test]
fn writes_without_space_are_held_until_there_is_space() -> Result<()> {
    if !can_change_system("mounts") {
        return Ok(());
    }
    let (folders, space) = (test_folders()?, Tmpfs::mount(MIB)?);
    let disk = space.path().join("disk.img");
    fs::File::create(&disk)?.set_len(MIB)?;
    let filler = space.path().join("filler");
    fs::write(&filler, vec![1; 1 << 20]).ok();
    let vm = folders.socket("vm").display().to_string();
    let disk = disk.display().to_string();
    let words = ["--socket-path", &vm, "--name", "vm", "--blk-file", &disk, "--werror", "hold"];
    let (mut daemon, mut client) = serve(&folders, &words)?;
    let mut frontend = Frontend::attach(Path::new(&vm), &Setup::default())?;
    begin_writes(&mut frontend, 4)?;
    let is_held = |client: &mut Client| -> Result<bool> {
        let shown = shown(client, "vm")?;
        Ok(shown["disk-state"] == "held" && shown["disks"][0]["waited"] == 4)
    };
    while !is_held(&mut client)? {}
    let taker = Running::start(&mut taking_over(&folders)?)?;
    let wait = json!({ "process": taker.pid().as_raw_pid(), "deadline-ms": 60_000 });
    let refused = client.call("upgrade.wait", &wait)?;
    ensure!(refused["error"]["code"] == 10, "{refused}");
    taker.finish()?.expect_code(2)?;
    daemon.wait_for("wait for their retry")?;
    ctl(&folders, &["resume", "vm"])?;
    ensure!(is_held(&mut client)?, "there is no space yet");
    fs::remove_file(&filler)?;
    let mut answered = Vec::new();
    while answered.len() < 4 {
        answered.push(frontend.rings[0].wait_used()?.head / 4);
    }
    answered.sort_unstable();
    ensure!(answered == [0, 1, 2, 3], "{answered:?}");
    let statuses: Vec<_> = (0..4).map(|slot| frontend.status(0, slot)).collect();
    ensure!(statuses == [Some(blk::OK); 4], "{statuses:?}");
    ensure!(shown(&mut client, "vm")?["disk-state"] == "ready");

    // A queue that stops must answer its requests, even with an error.
    fs::write(&filler, vec![1; 1 << 20]).ok();
    let full = u64::from(PIECE) * 8 / 512;
    let (header, status) = frontend.put_header(0, 0, blk::OUT, full)?;
    let chain =
        [Desc::readable(header, 16), Desc::readable(DATA, PIECE), Desc::writable(status, 1)];
    frontend.rings[0].put_chain(0, &chain);
    frontend.rings[0].submit(0)?;
    while shown(&mut client, "vm")?["disk-state"] != "held" {}
    let _ = frontend.stop_queue(0)?;
    ensure!(frontend.status(0, 0) == Some(blk::IOERR), "it was not told");
    drop(frontend);
    client.call("shutdown", &json!({}))?;
    let finished = daemon.finish()?.expect_code(0)?;
    ensure!(finished.stderr.contains("No space left on device"), "{}", finished.stderr);
    Ok(())
}

#[test]
fn a_file_changes_limits_while_the_daemon_runs() -> Result<()> {
    let folders = test_folders()?;
    let (vm, file) = (folders.socket("vm"), folders.path("ringhaul.toml"));
    let write = |more: &str| {
        let text = format!(
            "[[export]]\nname = \"vm\"\nendpoint = {{ path = \"{}\" }}\n\
             device = {{ blk = {{ null = {{ size-bytes = 1048576 }} }} }}\n{more}\n",
            vm.display()
        );
        fs::write(&file, text)
    };
    write("limits = { iops-total = 100, bps-read = 4096 }\nwerror = \"retry\"")?;
    let (mut daemon, mut client) = serve(&folders, &["--config", &file.display().to_string()])?;
    let mut check = |daemon: &mut Running, limits: Value, werror: &str| -> Result<()> {
        daemon.signal(Signal::HUP)?;
        daemon.wait_for("applied the configuration")?;
        let disk = shown(&mut client, "vm")?["disks"][0].clone();
        ensure!(disk["limits"] == limits && disk["werror"] == werror, "{disk}");
        Ok(())
    };
    check(&mut daemon, json!({ "iops-total": 100, "bps-read": 4096 }), "retry")?;
    // Limits that a command set stay until the file changes them.
    ctl(&folders, &["set-disk", "vm", "iops-total=7"])?;
    check(&mut daemon, json!({ "iops-total": 7, "bps-read": 4096 }), "retry")?;
    write("limits = { iops-total = 100, bps-read = 4096 }\nwerror = \"report\"")?;
    check(&mut daemon, json!({ "iops-total": 7, "bps-read": 4096 }), "report")?;
    write("limits = { iops-write = 3 }")?;
    check(&mut daemon, json!({ "iops-write": 3 }), "hold-briefly")?;
    write("")?;
    check(&mut daemon, json!({}), "hold-briefly")
}
