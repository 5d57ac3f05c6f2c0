//! The control socket, driven by an independent program: lines of JSON that `socat` passes on.

use std::fs;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{READY, Running, TestFolders, bench, ringhaul, run};
use ringhaul_kit::daemon::SECTOR_BYTES;
use ringhaul_kit::frontend::{Frontend, Setup, blk};
use ringhaul_kit::fuse::{Fuse, opcode};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::socat::{self, Socat};
use super::{DISK_BYTES, test_folders};

/// Error codes.
const NO_JSON: i32 = -32700;
pub(super) const NO_REQUEST: i32 = -32600;
const NO_METHOD: i32 = -32601;
const PARAMS: i32 = -32602;
const UNKNOWN: i32 = 2;
const UNFINISHED: i32 = 8;

/// A load that is long enough to overlap with other requests.
const VERIFIED: &str = "--rw randrw --iodepth 8 --number_ios 2000 --size 4m --verify";

/// Starts a daemon with these options and a control socket.
fn serve(folders: &TestFolders, options: &[&str]) -> Result<Running> {
    let mut command = ringhaul()?;
    command.arg("serve").args(options).arg("--socket-path").arg(folders.socket("vm.sock"));
    Running::serve(command.arg("--control").arg(folders.socket("control")))
}

/// Starts a daemon and connects a client. `None` if socat is not installed.
pub(super) fn begin(options: &[&str]) -> Result<Option<(TestFolders, Running, Socat)>> {
    if !socat::is_installed() {
        return Ok(None);
    }
    let folders = test_folders()?;
    let daemon = serve(&folders, options)?;
    let client = Socat::connect(&folders.socket("control"))?;
    Ok(Some((folders, daemon, client)))
}

/// Ends the daemon by request, and returns its stderr.
pub(super) fn shut_down(mut client: Socat, daemon: Running) -> Result<String> {
    ensure!(client.call("shutdown", &json!({}))? == json!({}), "not what the page says");
    ensure!(client.next_line()?.is_none(), "the connection stays");
    Ok(daemon.finish()?.expect_code(0)?.stderr)
}

#[test]
fn an_export_is_added_used_and_removed() -> Result<()> {
    let Some((folders, daemon, mut client)) = begin(&["--disk", "null,size=1M", "--name", "vm1"])?
    else {
        return Ok(());
    };
    let version = client.call("ping", &json!({}))?;
    ensure!(version["version"] == env!("CARGO_PKG_VERSION"), "{version}");
    let (disk, socket) = (folders.disk("disk.img", DISK_BYTES)?, folders.socket("vm2.sock"));
    let mut spec = json!({ "name": "vm2", "endpoint": { "path": socket } });
    spec["device"] = json!({ "blk": { "file": disk } });
    ensure!(client.call("export.add", &spec)? == json!({}), "not what the page says");
    let list = client.call("export.list", &json!({}))?;
    let names = list.as_array().context("no list")?.iter().map(|export| &export["name"]);
    ensure!(names.eq([&json!("vm1"), &json!("vm2")]), "{list}");
    run(&mut bench(&socket, VERIFIED)?)?.expect_code(0)?;

    let vm2 = json!({ "export": "vm2" });
    let mut frontend = Frontend::attach(&socket, &Setup::default())?;
    frontend.write(0, 0, &[7; SECTOR_BYTES])?;
    let shown = client.call("export.show", &vm2)?;
    let features = shown["front-end"]["features"].as_array().context("no features")?;
    ensure!(features.contains(&json!("version-1")), "{shown}");
    ensure!(shown["front-end"]["peer"]["pid"] == std::process::id(), "{shown}");
    ensure!(shown["front-end"]["memory"]["bytes"].as_u64() > Some(0), "{shown}");
    ensure!(shown["front-end"]["queues"][0]["state"] == "running", "{shown}");
    let disk_0 = &shown["disks"][0];
    ensure!(disk_0["engine"].is_string() && disk_0["engine-reason"].is_string(), "{shown}");

    let grown = json!({ "export": "vm2", "size-bytes": 2 * DISK_BYTES });
    let resized = client.call("disk.resize", &grown)?;
    ensure!(resized["size-bytes"] == 2 * DISK_BYTES, "{resized}");
    ensure!(disk.metadata()?.len() == 2 * DISK_BYTES, "the file is as long as before");
    let capacity = frontend.config(0, 8)?.try_into().ok().map(u64::from_le_bytes);
    ensure!(capacity == Some(2 * DISK_BYTES / SECTOR_BYTES as u64), "{capacity:?}");
    frontend.write(0, DISK_BYTES / SECTOR_BYTES as u64, &[8; SECTOR_BYTES])?;
    let stats = client.call("stats", &json!({}))?;
    let exports = stats["exports"].as_array().context("no exports")?;
    let served = exports.iter().find(|export| export["name"] == "vm2").context("no vm2")?;
    ensure!(served["served"]["writes"]["requests"].as_u64() > Some(2), "{stats}");
    ensure!(stats["iothreads"][0]["turns"].as_u64() > Some(0), "{stats}");

    let removed = client.call("export.remove", &vm2)?;
    ensure!(removed["name"] == "vm2" && !socket.exists(), "{removed}");
    ensure!(frontend.config(0, 8).is_err(), "it is still served");
    let message = client.call_refused("export.show", &vm2, UNKNOWN)?;
    ensure!(message.contains("there is no export vm2"), "{message}");
    shut_down(client, daemon).map(drop)
}

#[test]
fn a_unit_is_added_used_and_removed() -> Result<()> {
    let options = ["--device", "scsi", "--lun", "0,null=1M", "--name", "vm"];
    let Some((folders, daemon, mut client)) = begin(&options)? else { return Ok(()) };
    let disk = folders.disk("disk.img", DISK_BYTES)?;
    let place = json!({ "export": "vm", "target": 0, "lun": 3 });
    let unit = json!({ "target": 0, "lun": 3, "disk": { "file": disk } });
    let added = client.call("lun.add", &json!({ "export": "vm", "unit": unit }))?;
    ensure!(added == json!({}), "{added}");
    let options = format!("--device scsi --lun 3 {VERIFIED}");
    run(&mut bench(&folders.socket("vm.sock"), &options)?)?.expect_code(0)?;
    let shown = client.call("export.show", &json!({ "export": "vm" }))?;
    ensure!(shown["size-bytes"] == DISK_BYTES + (1 << 20), "{shown}");
    ensure!(client.call("lun.remove", &place)? == json!({}), "not what the page says");
    let message = client.call_refused("lun.remove", &place, UNKNOWN)?;
    ensure!(message.contains("vm has no unit 0:3"), "{message}");
    run(&mut bench(&folders.socket("vm.sock"), &options)?)?.expect_code(2)?;
    shut_down(client, daemon).map(drop)
}

#[test]
fn changed_settings_are_logged() -> Result<()> {
    let Some((folders, daemon, mut client)) = begin(&["--disk", "null,size=1M", "--log", "info"])?
    else {
        return Ok(());
    };
    let before = client.call("set", &json!({}))?;
    ensure!(before["log"] == "info" && before["poll-budget"].is_u64(), "{before}");
    let change = json!({ "poll-max-us": 7, "poll-budget": 3, "log": "ringhaul=info" });
    let changed = client.call("set", &change)?;
    ensure!(changed == change, "{changed}");
    let message = client.call_refused("set", &json!({ "log": "ringhaul=loud" }), PARAMS)?;
    ensure!(message.contains("cannot change the filter of the log: 'ringhaul=loud'"), "{message}");
    ensure!(client.call("set", &json!({}))? == changed, "what was refused has changed something");
    let limits = json!({ "export": folders.socket("vm.sock"), "limits": { "iops-total": 500 } });
    let set = client.call("disk.set", &limits)?;
    ensure!(set["limits"]["iops-total"] == 500, "{set}");
    let log = shut_down(client, daemon)?;
    let line = "settings: poll-max-us 7, poll-budget 3, log ringhaul=info\n";
    ensure!(log.matches("settings: ").count() == 1 && log.contains(line), "{log}");
    Ok(())
}

/// The answer names the unfinished request. `force` does not end an operation in the kernel.
#[test]
fn a_removal_names_the_unfinished_requests() -> Result<()> {
    if !socat::is_installed() {
        return Ok(());
    }
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let file = fuse.file().display().to_string();
    let reads = ["--read-only", "--lock", "off", "--engine", "threads", "--name", "vm"];
    let daemon = serve(&folders, &[&reads[..], &["--blk-file", &file]].concat())?;
    let control = folders.socket("control");
    let (mut client, mut events) = (Socat::connect(&control)?, Socat::connect(&control)?);
    fuse.withhold(daemon.pid(), &[opcode::READ]);
    let mut load = Running::start(&mut bench(&folders.socket("vm.sock"), "--number_ios 4")?)?;
    let hangs = (|| {
        fuse.wait_for(opcode::READ)?;
        events.call("subscribe", &json!({ "events": ["gone", "removed"] }))?;
        let remove = json!({ "export": "vm", "deadline-ms": 50 });
        let message = client.call_refused("export.remove", &remove, UNFINISHED)?;
        ensure!(message.contains("vm has not ended: queue 0: 1 request"), "{message}");
        // Without `force` the load stays connected and waits for its answer.
        ensure!(events.call("ping", &json!({}))?.is_object(), "an event has come");
        let force = json!({ "export": "vm", "deadline-ms": 50, "force": true });
        let message = client.call_refused("export.remove", &force, UNFINISHED)?;
        ensure!(message.contains("vm has not ended: queue 0: 1 request"), "{message}");
        load.wait_for("it has closed the connection")?;
        // The front-end counts as gone only after its last request ends.
        ensure!(events.call("ping", &json!({}))?.is_object(), "an event has come");
        let shown = client.call("export.show", &json!({ "export": "vm" }))?;
        let waits = shown["waits-for"].as_str().unwrap_or_default();
        ensure!(shown["state"] == "stopping" && waits.starts_with("queue 0: 1 request"), "{shown}");
        client.send_request("export.remove", &json!({ "export": "vm", "force": true }))
    })();
    // Released even after a failure: the kernel keeps a process with hung reads.
    fuse.release();
    let removed = client.answer(hangs?)?;
    // The read, and the export with it, may end before the daemon reads that request.
    let has_gone = removed["error"]["code"] == UNKNOWN;
    ensure!(has_gone || removed["result"]["name"] == "vm", "{removed}");
    ensure!(events.event("gone")?["export"] == "vm", "another has gone");
    ensure!(events.event("removed")?["export"] == "vm", "another has gone");
    load.finish()?.expect_code(1)?;
    ensure!(client.call("export.list", &json!({}))? == json!([]), "it is still there");
    shut_down(client, daemon).map(drop)
}

#[test]
fn events_follow_the_state_of_exports() -> Result<()> {
    if !socat::is_installed() {
        return Ok(());
    }
    let folders = test_folders()?;
    let options = ["--disk", "null,size=1M", "--name", "vm"];
    let daemon = serve(&folders, &options)?;
    let control = folders.socket("control");
    let (mut client, mut events) = (Socat::connect(&control)?, Socat::connect(&control)?);
    ensure!(events.call("subscribe", &json!({}))? == json!({}), "no subscription");
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    let attached = events.event("attached")?;
    ensure!(attached["peer"]["pid"] == std::process::id(), "{attached}");
    client.call("disk.resize", &json!({ "export": "vm", "size-bytes": 3 << 20 }))?;
    let resized = json!({ "export": "vm", "event": "resized", "size-bytes": 3 << 20 });
    ensure!(events.event("resized")? == resized);
    // A read beyond the end of the disk.
    ensure!(frontend.request(0, blk::IN, u64::MAX >> 9, &[], 512)?.status != blk::OK);
    let error = events.event("error")?;
    ensure!(error["export"] == "vm" && error["message"].is_string(), "{error}");
    drop(frontend);
    ensure!(events.event("gone")?["export"] == "vm", "another has gone");
    // `socat` as a front-end that sends nonsense.
    let mut nonsense = Socat::connect(&folders.socket("vm.sock"))?;
    nonsense.send_text(&"nonsense".repeat(8))?;
    ensure!(events.event("attached")?["peer"]["pid"] != std::process::id(), "it is the old one");
    let gone = events.event("gone")?;
    let reason = gone["reason"].as_str().unwrap_or_default();
    ensure!(reason.starts_with("disconnected: message"), "{gone}");
    client.call("export.remove", &json!({ "export": "vm" }))?;
    events.event("removed")?;
    shut_down(client, daemon)?;
    ensure!(events.next_line()?.is_none(), "more events come");
    Ok(())
}

/// A stopped subscriber slows neither requests nor other subscribers.
#[test]
fn a_stopped_subscriber_delays_no_request() -> Result<()> {
    /// More events than the subscriber's queue and socket can hold.
    const EVENTS: u64 = 2048;
    if !socat::is_installed() {
        return Ok(());
    }
    let folders = test_folders()?;
    let file = format!("1,blk-file={}", folders.disk("disk.img", DISK_BYTES)?.display());
    let options = ["--name", "vm", "--device", "scsi", "--lun", "0,null=1M", "--lun", &file];
    let mut daemon = serve(&folders, &options)?;
    let control = folders.socket("control");
    let connect = || Socat::connect(&control);
    let (mut client, mut stuck, mut events) = (connect()?, connect()?, connect()?);
    for subscriber in [&mut stuck, &mut events] {
        subscriber.call("subscribe", &json!({ "events": ["resized"] }))?;
    }
    stuck.signal(Signal::STOP)?;
    let options = format!("--device scsi --lun 1 {VERIFIED}");
    let load = Running::start(&mut bench(&folders.socket("vm.sock"), &options)?)?;
    for number in 0..EVENTS {
        let size = (number % 7 + 2) << 20;
        let resize = json!({ "export": "vm", "lun": 0, "size-bytes": size, "shrink": true });
        client.call("disk.resize", &resize)?;
        let event = events.event("resized")?;
        ensure!(event["lun"] == 0 && event["size-bytes"] == size, "{number}: {event}");
    }
    load.finish()?.expect_code(0)?;
    let line = daemon.wait_for("dropped a subscriber")?;
    let process = format!("a subscriber to events (process {}, user ", stuck.process());
    ensure!(line.contains(&process) && line.contains("must read events"), "{line}");
    run(&mut bench(&folders.socket("vm.sock"), &options)?)?.expect_code(0)?;
    stuck.signal(Signal::CONT)?;
    let mut seen = 0;
    while stuck.next_line()?.is_some() {
        seen += 1;
    }
    ensure!(seen < EVENTS, "it has got all of them");
    let log = shut_down(client, daemon)?;
    ensure!(log.matches("dropped a subscriber").count() == 1, "{log}");
    Ok(())
}

#[test]
fn refusals_contain_advice() -> Result<()> {
    let Some((_scene, daemon, mut client)) = begin(&["--disk", "null,size=1M", "--name", "vm"])?
    else {
        return Ok(());
    };
    for (method, params, code, words) in [
        ("export.shew", json!({}), NO_METHOD, &["export.shew", "export.show"][..]),
        ("export.show", json!({}), PARAMS, &["missing field `export`"]),
        ("export.show", json!({ "export": 3 }), PARAMS, &["export: ", "expected text"]),
        ("export.show", json!([1]), PARAMS, &["object"]),
        (
            "export.show",
            json!({ "export": "nobody" }),
            UNKNOWN,
            &["nobody", "by its name or its socket"],
        ),
        (
            "export.remove",
            json!({ "export": "vm", "deadline": 3 }),
            PARAMS,
            &["unknown field `deadline`", "`deadline-ms`"],
        ),
        (
            "disk.resize",
            json!({ "export": "vm", "size-bytes": "3M" }),
            PARAMS,
            &["size-bytes: ", "expected a whole number", "not the text \"3M\""],
        ),
        ("disk.resize", json!({ "export": "vm", "size-bytes": 512 }), 1, &["shrink"]),
    ] {
        let message = client.call_refused(method, &params, code)?;
        for word in words {
            ensure!(message.contains(word), "no {word:?}: {method} {params}: {message}");
        }
    }
    let shown = client.call("export.show", &json!({ "export": "vm" }))?;
    ensure!(shown["size-bytes"] == 1 << 20 && shown["state"] == "serving", "{shown}");
    shut_down(client, daemon).map(drop)
}

/// JSON-RPC without batches, which are refused.
#[test]
fn requests_may_arrive_in_pieces() -> Result<()> {
    let Some((folders, daemon, mut client)) = begin(&["--disk", "null,size=1M"])? else {
        return Ok(());
    };
    let control = folders.socket("control");
    let ping = |id: &str| format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"ping"}}"#);
    let receive = |client: &Socat| client.next_line()?.context("the daemon has hung up");
    client.send_text(&format!("{}\n{}\n", ping("1"), ping(r#""two""#)))?;
    for id in [json!(1), json!("two")] {
        let answer = receive(&client)?;
        ensure!(answer["id"] == id && answer["result"].is_object(), "{answer}");
    }
    let cut = ping("3");
    let (first, second) = cut.split_at(cut.len() / 2);
    client.send_piece(first)?;
    // Other clients are answered while the request is incomplete.
    Socat::connect(&control)?.call("ping", &json!({}))?;
    client.send_piece(second)?;
    client.send_text("\n")?;
    ensure!(receive(&client)?["id"] == 3, "a request that was cut");
    for (line, code) in [
        (format!("[{},{}]", ping("4"), ping("5")), NO_REQUEST),
        ("[]".into(), NO_REQUEST),
        (ping("6").replace(r#""jsonrpc":"2.0","#, ""), NO_REQUEST),
        (ping("[7]"), NO_REQUEST),
        (first.into(), NO_JSON),
    ] {
        client.send_text(&format!("{line}\n"))?;
        let answer = receive(&client)?;
        let error = &answer["error"];
        ensure!(error["code"] == code && error["message"].is_string(), "{line}: {answer}");
        ensure!(answer["jsonrpc"] == "2.0" && answer.get("id").is_some(), "{line}: {answer}");
    }
    // Notifications are carried out without an answer.
    client
        .send_text("{\"jsonrpc\":\"2.0\",\"method\":\"set\",\"params\":{\"poll-max-us\":9}}\n")?;
    client.send_text("{\"jsonrpc\":\"2.0\",\"method\":\"no such method\"}\n")?;
    ensure!(client.call("set", &json!({}))?["poll-max-us"] == 9, "it was not carried out");
    shut_down(client, daemon).map(drop)
}

#[test]
fn changes_by_a_reload_can_be_queried() -> Result<()> {
    if !socat::is_installed() {
        return Ok(());
    }
    let folders = test_folders()?;
    let export = |name: &str| {
        let path = folders.socket(name);
        let head = format!("[[export]]\nname = \"{name}\"\nendpoint.path = \"{}\"", path.display());
        format!("{head}\ndevice.blk = \"null:1M\"\n")
    };
    let control = folders.socket("control");
    let options = |us: u32| format!("control = \"{}\"\npoll-max-us = {us}\n", control.display());
    let file = folders.path("ringhaul.toml");
    let [stays, goes, comes] = ["stays", "goes", "comes"].map(export);
    fs::write(&file, [&options(5), &*stays, &goes].concat())?;
    let mut command = ringhaul()?;
    let mut daemon = Running::serve(command.arg("serve").arg("--config").arg(&file))?;
    daemon.wait_for(READY)?;
    let mut client = Socat::connect(&control)?;
    let mut events = Socat::connect(&control)?;
    events.call("subscribe", &json!({ "events": ["added", "removed"] }))?;
    let mut names = || -> Result<Value> {
        let list = client.call("export.list", &json!({}))?;
        let mut list = list.as_array().context("no list")?.clone();
        list.sort_by_key(|export| export["name"].to_string());
        Ok(list.iter().map(|export| export["name"].clone()).collect())
    };
    let mut frontend = Frontend::attach(&folders.socket("stays"), &Setup::default())?;
    ensure!(names()? == json!(["goes", "stays"]));
    // An invalid file changes nothing.
    fs::write(&file, [&options(6), &*comes, "serial = 3\n"].concat())?;
    daemon.signal(Signal::HUP)?;
    daemon.wait_for("cannot reload the configuration, so nothing changes")?;
    ensure!(names()? == json!(["goes", "stays"]));
    fs::write(&file, [&options(7), &*stays, &comes].concat())?;
    daemon.signal(Signal::HUP)?;
    daemon.wait_for("applied the configuration")?;
    ensure!(names()? == json!(["comes", "stays"]));
    let mut events_of_reload = [events.next_line()?, events.next_line()?].map(|event| {
        let event = &event.unwrap_or_default()["params"];
        format!("{} {}", event["event"], event["export"])
    });
    events_of_reload.sort();
    ensure!(
        events_of_reload == [r#""added" "comes""#, r#""removed" "goes""#],
        "{events_of_reload:?}"
    );
    ensure!(client.call("set", &json!({}))?["poll-max-us"] == 7, "another setting");
    // The front-end of an unchanged export stays connected.
    frontend.write(0, 0, &[1; SECTOR_BYTES])?;
    run(&mut bench(&folders.socket("comes"), "--number_ios 4")?)?.expect_code(0)?;
    shut_down(client, daemon).map(drop)
}
