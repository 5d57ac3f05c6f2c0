//! Changes by control commands outlive the process, however it ends.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, ringhaul, run};
use ringhaul_kit::control::taking_over;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::control::Client;
use super::{DISK_BYTES, test_folders};

/// A daemon with a control socket, a virtio-scsi export `vm` and an export `null`.
fn command(folders: &TestFolders, more: &[&str]) -> Result<Command> {
    let disk = folders.path("first.img");
    if !disk.exists() {
        folders.disk("first.img", DISK_BYTES)?;
    }
    let mut command = ringhaul()?;
    command.args(["serve", "--export"]);
    let (socket, disk) = (folders.socket("vm.sock"), disk.display());
    let socket = socket.display();
    command.arg(format!("name=vm,socket-path={socket},device=scsi,lun=0,blk-file={disk}"));
    let null = folders.socket("null.sock");
    command.arg("--export").arg(format!("name=null,socket-path={},null=1M", null.display()));
    command.arg("--control").arg(folders.socket("control")).args(more);
    Ok(command)
}

/// Ends the daemon by a signal and starts it again with these options.
fn start_again(
    folders: &TestFolders,
    mut daemon: Running,
    signal: Signal,
    more: &[&str],
) -> Result<(Running, Client)> {
    daemon.signal(signal)?;
    daemon.finish()?;
    start(folders, more)
}

fn start(folders: &TestFolders, more: &[&str]) -> Result<(Running, Client)> {
    let daemon = Running::serve(&mut command(folders, more)?)?;
    let client = Client::new(&folders.socket("control"))?;
    Ok((daemon, client))
}

/// Calls methods and fails if one is refused.
fn change(client: &mut Client, calls: &[(&str, Value)]) -> Result<()> {
    for (method, params) in calls {
        let answer = client.call(method, params)?;
        ensure!(answer.get("error").is_none(), "{method} {params}: {answer}");
    }
    Ok(())
}

/// Waits for at least `count` exports that are served, and returns their names, sorted.
fn names(client: &mut Client, count: usize) -> Result<Vec<String>> {
    loop {
        let listed = client.call("export.list", &json!({}))?;
        let all = listed["result"].as_array().cloned().unwrap_or_default();
        let mut names: Vec<String> = all
            .iter()
            .filter(|export| export["state"] == "serving")
            .map(|export| export["name"].as_str().unwrap_or_default().to_owned())
            .collect();
        if names.len() >= count {
            names.sort_unstable();
            return Ok(names);
        }
        std::thread::yield_now();
    }
}

fn luns(client: &mut Client) -> Result<Vec<u64>> {
    let shown = client.call("export.show", &json!({ "export": "vm" }))?;
    let units = shown["result"]["device"]["scsi"].as_array().cloned().unwrap_or_default();
    let mut luns: Vec<u64> = units.iter().filter_map(|unit| unit["lun"].as_u64()).collect();
    luns.sort_unstable();
    Ok(luns)
}

/// Adds a unit and an export, removes an export, and sets limits, policies and settings.
fn change_all(folders: &TestFolders, client: &mut Client) -> Result<()> {
    let [unit, disk] = ["unit.img", "added.img"].map(|name| folders.disk(name, DISK_BYTES));
    let unit = json!({ "lun": 5, "disk": { "file": unit? } });
    let added = json!({
        "name": "added",
        "endpoint": { "path": folders.socket("added.sock") },
        "device": { "blk": { "file": disk? } },
    });
    let (limits, more) = (json!({ "iops-total": 77 }), json!({ "bps-total": 1 << 30 }));
    change(
        client,
        &[
            ("lun.add", json!({ "export": "vm", "unit": unit })),
            ("export.add", added),
            ("disk.set", json!({ "export": "vm", "lun": 0, "limits": limits, "werror": "hold" })),
            ("disk.set", json!({ "export": "vm", "lun": 5, "limits": more })),
            ("disk.set", json!({ "export": "added", "rerror": "retry" })),
            ("set", json!({ "poll-max-us": 7 })),
            ("export.remove", json!({ "export": "null" })),
        ],
    )
}

/// Checks that the changes of [`change_all`] are in effect.
fn check_all(client: &mut Client) -> Result<()> {
    ensure!(names(client, 2)? == ["added", "vm"], "{:?}", names(client, 2)?);
    ensure!(luns(client)? == [0, 5], "{:?}", luns(client)?);
    let mut holds = |params: Value| client.call("disk.set", &params);
    let first = holds(json!({ "export": "vm", "lun": 0 }))?;
    let limits = json!({ "iops-total": 77 });
    ensure!(first["result"]["limits"] == limits && first["result"]["werror"] == "hold", "{first}");
    let unit = holds(json!({ "export": "vm", "lun": 5 }))?;
    ensure!(unit["result"]["limits"] == json!({ "bps-total": 1 << 30 }), "{unit}");
    let added = holds(json!({ "export": "added" }))?;
    ensure!(added["result"]["rerror"] == "retry", "{added}");
    let settings = client.call("set", &json!({}))?;
    ensure!(settings["result"]["poll-max-us"] == 7, "{settings}");
    Ok(())
}

#[test]
fn changes_by_command_survive_a_kill_and_a_clean_end() -> Result<()> {
    let folders = test_folders()?;
    let (mut daemon, mut client) = start(&folders, &[])?;
    change_all(&folders, &mut client)?;
    let mode = fs::metadata(folders.socket("control.state"))?.permissions().mode();
    ensure!(mode & 0o777 == 0o600, "{mode:o}");
    for signal in [Signal::KILL, Signal::TERM, Signal::KILL] {
        (daemon, client) = start_again(&folders, daemon, signal, &[])?;
        check_all(&mut client)?;
    }
    // `--state none` serves the command line alone, and leaves the state file as it is.
    (daemon, client) = start_again(&folders, daemon, Signal::KILL, &["--state", "none"])?;
    ensure!(names(&mut client, 2)? == ["null", "vm"] && luns(&mut client)? == [0], "not ignored");
    (daemon, client) = start_again(&folders, daemon, Signal::TERM, &[])?;
    check_all(&mut client)?;
    // When everything is undone, no change is left to store.
    let null = json!({
        "name": "null",
        "endpoint": { "path": folders.socket("null.sock") },
        "device": { "blk": { "null": { "size-bytes": 1 << 20 } } },
    });
    let undone = json!({ "iops-total": 0 });
    change(
        &mut client,
        &[
            ("lun.remove", json!({ "export": "vm", "lun": 5 })),
            ("export.remove", json!({ "export": "added" })),
            (
                "disk.set",
                json!({ "export": "vm", "lun": 0, "limits": undone, "werror": "hold-briefly" }),
            ),
            ("export.add", null),
        ],
    )?;
    (daemon, client) = start_again(&folders, daemon, Signal::KILL, &[])?;
    ensure!(names(&mut client, 2)? == ["null", "vm"] && luns(&mut client)? == [0], "not undone");
    change(&mut client, &[("shutdown", json!({}))])?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn a_takeover_keeps_the_state() -> Result<()> {
    let folders = test_folders()?;
    let (daemon, mut client) = start(&folders, &[])?;
    change_all(&folders, &mut client)?;
    let mut next = Running::start(taking_over(&folders)?.args(["--iothreads", "2"]))?;
    next.wait_for("took over")?;
    daemon.finish()?.expect_code(0)?;
    let mut client = Client::new(&folders.socket("control"))?;
    check_all(&mut client)?;
    let unit = json!({ "lun": 6, "disk": { "null": { "size-bytes": 1 << 20 } } });
    change(&mut client, &[("lun.add", json!({ "export": "vm", "unit": unit }))])?;
    next.signal(Signal::KILL)?;
    next.finish()?;
    // The supervisor restarts the old command line.
    let (mut last, mut client) = start(&folders, &[])?;
    ensure!(last.stderr().contains("using the options of an earlier upgrade: --iothreads 2"));
    ensure!(luns(&mut client)? == [0, 5, 6], "{:?}", luns(&mut client)?);
    change(&mut client, &[("lun.remove", json!({ "export": "vm", "lun": 6 }))])?;
    check_all(&mut client)?;
    let stats = client.call("stats", &json!({}))?;
    ensure!(stats["result"]["iothreads"].as_array().map(Vec::len) == Some(2), "{stats}");
    last.signal(Signal::TERM)?;
    last.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn lost_disks_are_reported_and_other_exports_are_restored() -> Result<()> {
    let folders = test_folders()?;
    let (mut daemon, mut client) = start(&folders, &[])?;
    change_all(&folders, &mut client)?;
    let (unit, added) = (folders.path("unit.img"), folders.path("added.img"));
    for path in [&unit, &added] {
        fs::rename(path, path.with_extension("away"))?;
    }
    (daemon, client) = start_again(&folders, daemon, Signal::KILL, &[])?;
    ensure!(names(&mut client, 1)? == ["vm"], "{:?}", names(&mut client, 1)?);
    let output = daemon.wait_for("added: cannot be restored")?;
    ensure!(output.contains("WARN") && output.contains("added.img"), "{output}");
    ensure!(luns(&mut client)? == [0], "{:?}", luns(&mut client)?);
    let output = daemon.stderr();
    ensure!(
        output.contains("vm: unit 0:5 cannot be restored") && output.contains("unit.img"),
        "{output}"
    );
    // Changes in between do not drop entries that could not be restored.
    let limits = json!({ "iops-total": 77 });
    change(&mut client, &[("disk.set", json!({ "export": "vm", "lun": 0, "limits": limits }))])?;
    for path in [&unit, &added] {
        fs::rename(path.with_extension("away"), path)?;
    }
    (daemon, client) = start_again(&folders, daemon, Signal::KILL, &[])?;
    check_all(&mut client)?;
    fs::remove_file(&added)?;
    (daemon, client) = start_again(&folders, daemon, Signal::KILL, &[])?;
    let forgotten = client.call("export.remove", &json!({ "export": "added" }))?;
    ensure!(
        forgotten["error"]["message"].to_string().contains("its saved entry is deleted"),
        "{forgotten}"
    );
    (daemon, client) = start_again(&folders, daemon, Signal::KILL, &[])?;
    names(&mut client, 1)?;
    ensure!(!daemon.stderr().contains("added"), "{}", daemon.stderr());
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn an_invalid_state_file_is_refused() -> Result<()> {
    let folders = test_folders()?;
    let state = folders.socket("control.state");
    let deep = "[".repeat(100_000);
    let export = r#"{"before": null, "now": null}"#;
    let nobody = format!(r#"{{"format": 1, "version": "x", "exports": [{export}]}}"#);
    for (text, mode, words) in [
        ("", 0o600, "cannot read the state file"),
        ("{", 0o600, "cannot read the state file"),
        ("\u{0}\u{1}", 0o600, "cannot read the state file"),
        (&*deep, 0o600, "cannot read the state file"),
        (r#"{"format": 2}"#, 0o600, "has format 2"),
        (r#"{"format": 1, "version": "x", "exports": 7}"#, 0o600, "cannot read the state file"),
        (&*nobody, 0o600, "never existed"),
        (r#"{"format": 1, "version": "x"}"#, 0o622, "can be written by other users"),
    ] {
        fs::write(&state, text)?;
        fs::set_permissions(&state, fs::Permissions::from_mode(mode))?;
        let words = ["control.state", words, "--state none"];
        run(&mut command(&folders, &[])?)?.expect_refusal(&words)?;
        ensure!(fs::read_to_string(&state)? == text, "the file was touched");
    }
    fs::remove_file(&state)?;
    fs::create_dir(&state)?;
    run(&mut command(&folders, &[])?)?.expect_refusal(&["not a regular file", "--state"])?;
    fs::remove_dir(&state)?;
    let (mut daemon, _client) = start(&folders, &[])?;
    let mut other = ringhaul()?;
    other.arg("serve").arg("--socket-path").arg(folders.socket("other.sock"));
    other.args(["--disk", "null,size=1M", "--state"]).arg(&state);
    run(&mut other)?.expect_refusal(&["another daemon uses the state file", "control.state"])?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    ensure!(!state.exists(), "a state without a change is left behind");
    Ok(())
}

/// Its users could replace the file, which names disks.
#[test]
fn a_state_file_in_a_folder_of_all_users_is_refused() -> Result<()> {
    let folders = test_folders()?;
    let folder = folders.path("open");
    fs::create_dir(&folder)?;
    let state = folder.join("state").display().to_string();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777))?;
    let refused = run(&mut command(&folders, &["--state", &state])?)?;
    refused.expect_refusal(&["state file", "open/state", "every user can replace files in"])?;
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o1777))?;
    let (mut daemon, _client) = start(&folders, &["--state", &state])?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn a_changed_command_line_overrides_the_state() -> Result<()> {
    let folders = test_folders()?;
    let (mut daemon, mut client) = start(&folders, &[])?;
    change_all(&folders, &mut client)?;
    // The export that the command added, with another disk, and another polling time.
    let added =
        format!("name=added,socket-path={},null=2M", folders.socket("added.sock").display());
    let more = ["--export", &added, "--poll-max-us", "9", "--werror", "report"];
    (daemon, client) = start_again(&folders, daemon, Signal::KILL, &more)?;
    ensure!(names(&mut client, 3)? == ["added", "null", "vm"], "{:?}", names(&mut client, 3)?);
    let settings = client.call("set", &json!({}))?;
    ensure!(settings["result"]["poll-max-us"] == 9, "{settings}");
    let output = daemon.stderr();
    for words in [
        "added: dropped the export that a control command added: the command line",
        "null: a control command removed it, but its entry on the command line",
        "settings of control commands are dropped",
        "vm: the entry of unit 0:0 on the command line or in the configuration file has changed",
    ] {
        ensure!(output.contains(words), "{words}: {output}");
    }
    ensure!(luns(&mut client)? == [0, 5], "a unit that it does not name stays");
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// A `ringhaul ctl` command for the daemon of the test.
fn ctl(folders: &TestFolders, words: &[&str]) -> Result<Command> {
    let mut command = ringhaul()?;
    command.args(["ctl", "--control"]).arg(folders.socket("control")).args(words);
    Ok(command)
}

#[test]
fn a_refused_upgrade_gives_the_reason_and_the_remedy() -> Result<()> {
    let folders = test_folders()?;
    let (mut daemon, mut client) = start(&folders, &[])?;
    // `/bin/true` never asks for the exports.
    let done = run(&mut ctl(&folders, &["upgrade", "/bin/true"])?)?.expect_code(5)?;
    ensure!(done.stderr.contains("before it asked for the exports"), "{}", done.stderr);
    // The new process refuses a combination of options.
    let script = folders.path("wrong.sh");
    let binary = ringhaul_kit::server::ringhaul_binary()?;
    let text = format!(
        "#!/bin/sh\nexec {} \"$@\" --iothreads 2 --engine aio --iopoll\n",
        binary.display()
    );
    fs::write(&script, text)?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    let script = script.display().to_string();
    let done = run(&mut ctl(&folders, &["upgrade", &script])?)?.expect_code(5)?;
    ensure!(done.stderr.contains("--iopoll"), "{}", done.stderr);
    // A client without `ctl` starts the program itself.
    let mut taker = || -> Result<Value> {
        let mut command = Command::new(&script);
        command.args(["serve", "--takeover"]).arg(folders.socket("control"));
        let taker = Running::start(&mut command)?;
        let wait = json!({ "process": taker.pid().as_raw_pid(), "deadline-ms": 60_000 });
        let answer = client.call("upgrade.wait", &wait)?;
        taker.finish()?.expect_code(2)?;
        Ok(answer)
    };
    let answer = taker()?;
    ensure!(answer["error"]["code"] == 11, "{answer}");
    // Another hand-over is in progress, and its process sends nothing more.
    let begin = json!({ "formats": [4, 5, 6, 7, 8, 9], "inflight-versions": [1], "version": "x" });
    let mut silent = Client::new(&folders.socket("control"))?;
    let described = silent.call("takeover", &begin)?;
    ensure!(described.get("error").is_none(), "{described}");
    let binary = binary.display().to_string();
    let done = run(&mut ctl(&folders, &["upgrade", &binary])?)?.expect_code(4)?;
    ensure!(done.stderr.contains("another process is taking over the exports"), "{}", done.stderr);
    let answer = taker()?;
    ensure!(answer["error"]["code"] == 10, "{answer}");
    // The upgrade succeeds in the end. A change in the meantime waits for the process that serves
    // then.
    let retries = Running::start(&mut ctl(&folders, &["upgrade", &binary, "--retry", "60"])?)?;
    daemon.wait_for("does not take over: another process")?;
    drop(silent);
    let unit = "8,null=1M";
    run(&mut ctl(&folders, &["add-lun", "vm", unit])?)?.expect_code(0)?;
    retries.finish()?.expect_code(0)?;
    let mut client = Client::new(&folders.socket("control"))?;
    ensure!(luns(&mut client)? == [0, 8], "{:?}", luns(&mut client)?);
    change(&mut client, &[("shutdown", json!({}))])?;
    // The new process writes to the same pipe.
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// The configuration file overrides commands in entries that changed in it. All other changes stay.
#[test]
fn changes_by_reload_and_command_survive_a_kill() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.path("ringhaul.toml");
    let export = |name: &str, limits: &str| {
        let socket = folders.socket(name);
        format!(
            "[[export]]\nname = \"{name}\"\nendpoint = {{ path = \"{}\" }}\n\
             device = {{ blk = \"null:1M\" }}\n{limits}\n",
            socket.display()
        )
    };
    let head = format!("control = \"{}\"\n", folders.socket("control").display());
    let write = |exports: &[String]| fs::write(&file, head.clone() + &exports.concat());
    let limited = |rate: u32| format!("limits = {{ iops-total = {rate} }}");
    write(&[export("changed", &limited(5)), export("kept", &limited(5)), export("gone", "")])?;
    let serve = || -> Result<(Running, Client)> {
        let daemon = Running::serve(ringhaul()?.args(["serve", "--config"]).arg(&file))?;
        let client = Client::new(&folders.socket("control"))?;
        Ok((daemon, client))
    };
    let (mut daemon, mut client) = serve()?;
    let added = json!({
        "name": "added",
        "endpoint": { "path": folders.socket("added") },
        "device": { "blk": { "null": { "size-bytes": 1 << 20 } } },
    });
    let set = |export: &str, rate: u32| {
        ("disk.set", json!({ "export": export, "limits": { "iops-total": rate } }))
    };
    change(&mut client, &[("export.add", added), set("changed", 7), set("kept", 7)])?;
    // The file changes an export that a command has changed, and adds and removes exports.
    write(&[export("changed", &limited(9)), export("kept", &limited(5)), export("new", "")])?;
    daemon.signal(Signal::HUP)?;
    daemon.wait_for("applied the configuration")?;
    // A command after the reload counts as well.
    change(&mut client, &[set("new", 11)])?;
    daemon.signal(Signal::KILL)?;
    daemon.finish()?;
    let (mut daemon, mut client) = serve()?;
    let expected = ["added", "changed", "kept", "new"];
    ensure!(names(&mut client, 4)? == expected, "{:?}", names(&mut client, 4)?);
    for (export, rate) in [("changed", 9), ("kept", 7), ("new", 11)] {
        let holds = client.call("disk.set", &json!({ "export": export }))?;
        ensure!(holds["result"]["limits"] == json!({ "iops-total": rate }), "{export}: {holds}");
    }
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}
