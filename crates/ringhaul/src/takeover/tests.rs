//! Takeovers between two daemons of this process: everything is handed over, or nothing changes.

mod commands;
mod own_process;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::{Args, FromArgMatches};
use ringhaul_kit::frontend::{Frontend, Setup};
use serde_json::{Value, json};

use super::new_process::Predecessor;
use super::old_process::{OPEN_MAX, TAKE_MAX, hand_over, parse_request};
use super::wait;
use crate::daemon::format::{BEGIN, FORMATS, GIVE_UP, PAUSE, ProcessOptions, TAKE};
use crate::daemon::saved_state::SavedState;
use crate::daemon::saved_state::file::StateFile;
use crate::daemon::{Daemon, Shutdown};
use crate::options::ServeArgs;
use crate::process::fd_messages::FDS_MAX;
use crate::socket::inherited::InheritedSockets;
use crate::spec::ExportSpec;
use crate::spec::command::{Command, CommandError, Removal, StatsReader};
use crate::spec::process::SuccessorProgress;
use crate::spec::settings::{Settings, SettingsChange};
use crate::spec::stats::DaemonStats;
use crate::spec::status::{ExportDetails, ExportStatus, Served};
use crate::testing::wait_until;

/// A command that waits for the end of a hand-over in vain takes longer.
const LIMIT: Duration = Duration::from_secs(25);

/// A debt of a limit that outlasts a takeover.
const DEBT_NS: u64 = 600_000_000_000;

/// Starts a daemon without exports.
fn daemon() -> (Arc<Daemon>, Shutdown) {
    let serve = ServeArgs::augment_args(clap::Command::new("serve"));
    let args = serve.get_matches_from(["serve", "--engine", "threads"]);
    let (daemon, ending) =
        Daemon::start(ServeArgs::from_arg_matches(&args).unwrap(), InheritedSockets::default())
            .unwrap();
    (Arc::new(daemon), ending)
}

/// A daemon that serves a busy front-end, a virtio-scsi device, and a state file.
struct Old {
    folder: tempfile::TempDir,
    daemon: Arc<Daemon>,
    _ending: Shutdown,
    frontend: Frontend,
}

/// The new process of a takeover, which sends any messages.
struct Taker {
    lines: BufReader<UnixStream>,
}

impl Taker {
    fn send(&mut self, method: &str, params: &Value) {
        let line = json!({ "jsonrpc": "2.0", "id": method, "method": method, "params": params });
        self.send_line(&line.to_string());
    }

    fn send_line(&mut self, line: &str) {
        writeln!(self.lines.get_mut(), "{line}").unwrap();
    }

    /// The next answer. Its descriptors, which come with empty lines, are closed.
    fn answer(&mut self) -> Value {
        let mut line = String::new();
        assert_ne!(self.lines.read_line(&mut line).unwrap(), 0, "it has hung up");
        let answer: Value = serde_json::from_str(&line).unwrap();
        let descriptors = answer["result"]["descriptors"].as_array().map_or(0, Vec::len);
        for _ in 0..descriptors.div_ceil(FDS_MAX) {
            self.lines.read_line(&mut line).unwrap();
        }
        answer
    }

    fn begin(&mut self) -> Value {
        let version = virtqueue::InflightRegion::VERSION;
        let params = json!({ "formats": FORMATS, "inflight-versions": [version], "version": "x" });
        self.send(BEGIN, &params);
        self.answer()
    }

    fn pause(&mut self) -> Value {
        self.send(PAUSE, &Value::Null);
        self.answer()
    }
}

impl Old {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (daemon, ending) = daemon();
        let (file, changes, _) = StateFile::open(&folder.path().join("state")).unwrap();
        let base = Settings { log: None, poll_max_us: 32, poll_budget: 20 };
        let (state, _) = SavedState::begin(file, changes, Vec::new(), base).unwrap();
        daemon.set_saved_state(state);
        let changes = SettingsChange::default();
        let options = ProcessOptions { directory: "/".into(), arguments: vec![], changes };
        daemon.set_process_options(options, None);
        let at = |name: &str| folder.path().join(name);
        for name in ["disk", "zero", "five"] {
            std::fs::write(at(name), [7; 1 << 20]).unwrap();
        }
        let limits = json!({ "group": "g", "iops-total": 100_000 });
        let vm = json!({
            "name": "vm", "endpoint": { "path": at("vm") }, "limits": limits,
            "device": { "blk": { "file": at("disk") } }, "werror": "retry",
        });
        let unit = |lun: u16, name: &str, settings: Value| {
            let disk = json!({ "file": at(name) });
            json!({ "lun": lun, "disk": disk, "settings": settings })
        };
        let units = [unit(0, "zero", json!({})), unit(5, "five", json!({ "read-only": true }))];
        let scsi = json!({ "endpoint": { "path": at("scsi") }, "device": { "scsi": units } });
        let idle = json!({
            "name": "idle", "endpoint": { "path": at("idle") },
            "limits": { "group": "idle", "iops-total": 10 },
            "device": { "blk": { "null": { "size-bytes": 512 } } },
        });
        let specs = [vm, scsi, idle];
        let specs = specs.map(|spec| serde_json::from_value::<ExportSpec>(spec).unwrap());
        daemon.handle(Command::Add(specs.to_vec())).unwrap();
        drop(Frontend::attach(&at("vm"), &Setup::default()).unwrap());
        let mut frontend = Frontend::attach(&at("vm"), &Setup::default()).unwrap();
        frontend.write(1, 8, &[1; 4096]).unwrap();
        let old = Self { folder, daemon, _ending: ending, frontend };
        old.set_limit(&old.daemon, 5000);
        let change = SettingsChange { poll_max_us: Some(7), ..SettingsChange::default() };
        old.daemon.handle(Command::Set(change)).unwrap();
        old
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Changes a limit of unit 5.
    fn set_limit(&self, daemon: &Daemon, iops: u64) {
        let change = serde_json::from_value(json!({ "limits": { "iops-total": iops } })).unwrap();
        let place = serde_json::from_value(json!({ "target": 0, "lun": 5 })).unwrap();
        let export = self.path("scsi").display().to_string();
        daemon.handle(Command::SetDisk(export, Some(place), Box::new(change))).unwrap();
    }

    /// Runs `script` against this daemon. Returns the error of the hand-over.
    fn take(&self, script: impl FnOnce(&mut Taker, &UnixStream)) -> Option<String> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let socket = ours.try_clone().unwrap();
        std::thread::scope(|scope| {
            let daemon = &self.daemon;
            let handing_over = scope.spawn(move || serve_taker(daemon, ours));
            let mut taker = Taker { lines: BufReader::new(theirs) };
            script(&mut taker, &socket);
            drop(taker);
            handing_over.join().unwrap()
        })
    }
}

/// Hands over to the process at the far end, like the control socket. Returns its error.
fn serve_taker(daemon: &Arc<Daemon>, stream: UnixStream) -> Option<String> {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut line = Vec::new();
    reader.read_until(b'\n', &mut line).unwrap();
    let request = parse_request(&line).expect("it begins a takeover");
    hand_over(daemon, request, &mut reader, &stream).err().map(|error| format!("{error:#}"))
}

/// All exports in detail, without the parts that a takeover changes.
fn details(daemon: &Daemon) -> Vec<ExportDetails> {
    let detail = |status: ExportStatus| daemon.details(status.name()).unwrap();
    let mut all: Vec<ExportDetails> = daemon.exports().unwrap().into_iter().map(detail).collect();
    for export in &mut all {
        export.status.served = Served::default();
        export.front_end.iter_mut().for_each(|front_end| front_end.connected_seconds = 0);
    }
    all
}

fn stats(daemon: &Daemon) -> DaemonStats {
    daemon.stats(StatsReader::Control).unwrap()
}

fn settings(daemon: &Daemon) -> Settings {
    daemon.settings().unwrap()
}

#[test]
fn every_visible_part_of_an_export_is_taken_over() {
    let mut old = Old::new();
    let is_idle = || details(&old.daemon)[0].status.unfinished == 0;
    wait_until(is_idle);
    let (exports, set) = (details(&old.daemon), settings(&old.daemon));
    assert!(exports[0].front_end.is_some() && exports[0].status.sessions == 2, "{exports:?}");
    let debts = BTreeMap::from([("idle".to_owned(), vec![DEBT_NS])]);
    old.daemon.add_group_debts(&debts);
    old.daemon.set_start_time(1000);
    old.daemon.failed_takeovers.store(3, Ordering::Relaxed);
    let before = stats(&old.daemon);
    let of_file = vec![exports[1].status.spec.clone()];
    let list = of_file.clone();
    old.daemon.set_config_exports(move || list.clone());
    let listener = UnixListener::bind(old.path("control")).unwrap();
    let (new, _ending) = daemon();
    let resumed = std::thread::scope(|scope| {
        let daemon = &old.daemon;
        let handing_over = scope.spawn(move || serve_taker(daemon, listener.accept().unwrap().0));
        let predecessor = Predecessor::ask(&old.path("control")).unwrap();
        let changes = predecessor.options.changes.clone();
        super::new_process::set(&new, &changes).unwrap();
        let before_the_end = || {
            assert!(old.daemon.ownership().wait_transferred(Duration::ZERO).is_none());
            Ok(())
        };
        let (taken, ()) = predecessor.take(&new, before_the_end).unwrap();
        assert_eq!(handing_over.join().unwrap(), None);
        assert_eq!((&taken.of_file, &taken.opening), (&Some(of_file), &vec![]));
        taken.resume(&new)
    });
    assert_eq!((details(&new), settings(&new)), (exports, set));
    // A client that has started a third process learns of the second one's takeover.
    let process = std::process::id();
    let taken = SuccessorProgress { has_asked: true, has_taken_over: true };
    assert_eq!(wait(&old.daemon, process, Duration::ZERO).unwrap(), taken);
    let lost = wait(&old.daemon, process + 1, Duration::ZERO).unwrap_err();
    assert!(matches!(lost, CommandError::HandedOver(owner) if owner == process), "{lost:?}");
    let debt = new.group_debts()["idle"][0];
    assert!(debt > 0 && debt <= DEBT_NS, "{debt} ns");
    let after = stats(&new);
    assert_eq!((after.start_time_seconds, after.failed_takeovers), (1000, 3));
    for (before, after) in before.iothreads.iter().zip(&after.iothreads) {
        assert!(before.turns > 0 && after.turns >= before.turns, "{before:?} {after:?}");
    }
    let queues = |stats: &DaemonStats| stats.exports[0].queues.iter().map(|q| q.served).collect();
    let (before, after): (Vec<_>, Vec<_>) = (queues(&before), queues(&after));
    assert_eq!(before, after, "the old process had started these");
    assert!(old.frontend.read(0, 8, 4096).unwrap() == [1; 4096]);
    // The old process no longer writes the state file, and refuses commands.
    assert!(old.daemon.handle(Command::Set(SettingsChange::default())).is_err());
    let kept = std::fs::read(old.path("state")).unwrap();
    let late = SettingsChange { poll_max_us: Some(9), ..SettingsChange::default() };
    old.daemon.saved_state().unwrap().record_all(&[], &late).unwrap();
    assert!(std::fs::read(old.path("state")).unwrap() == kept);
    old.set_limit(&new, 6000);
    drop(resumed);
    assert!(old.path("vm").exists() && old.path("scsi").exists());
    new.handle(Command::Remove(Removal::new("vm"))).unwrap();
    assert!(!old.path("vm").exists(), "the new process owns the socket");
}

/// Its disk answers only after the takeover, which does not wait for it.
#[test]
fn an_export_that_is_being_opened_is_opened_by_the_new_process() {
    let old = Old::new();
    let server = UnixListener::bind(old.path("nbd")).unwrap();
    let late: ExportSpec = serde_json::from_value(json!({
        "name": "late", "endpoint": { "path": old.path("late") },
        "device": { "blk": { "nbd": { "socket": old.path("nbd"), "export": "" } } },
    }))
    .unwrap();
    old.daemon.begin_add(vec![late.clone()]).unwrap();
    let _asked = server.accept().unwrap();
    let listener = UnixListener::bind(old.path("control")).unwrap();
    let (new, _ending) = daemon();
    std::thread::scope(|scope| {
        let daemon = &old.daemon;
        let handing_over = scope.spawn(move || serve_taker(daemon, listener.accept().unwrap().0));
        let predecessor = Predecessor::ask(&old.path("control")).unwrap();
        let (taken, ()) = predecessor.take(&new, || Ok(())).unwrap();
        assert_eq!(handing_over.join().unwrap(), None);
        assert_eq!(taken.opening, [late]);
        taken.resume(&new);
    });
    drop(server);
}

/// The old process serves, obeys and saves as before, whenever and however the new one fails.
#[test]
fn a_takeover_that_fails_at_any_step_changes_nothing() {
    type Script = fn(&mut Taker, &UnixStream);
    let before_pause: [(Script, &str); 5] = [
        (|_, _| (), "closed the connection"),
        (|taker, _| taker.send(TAKE, &Value::Null), "it sent takeover.take instead of"),
        (|taker, _| taker.send(GIVE_UP, &json!({ "why": "no reason" })), "no reason"),
        (|taker, _| taker.send(GIVE_UP, &Value::Null), "without a reason"),
        (|taker, _| taker.send_line("nonsense"), "cannot understand its message"),
    ];
    let before_take: [(Script, &str); 4] = [
        (|_, _| (), "closed the connection"),
        (|taker, _| taker.send(PAUSE, &Value::Null), "it sent takeover.pause instead of"),
        (|taker, _| taker.send(GIVE_UP, &json!({ "why": "no reason" })), "no reason"),
        (|taker, _| taker.send_line("{}"), "cannot understand its message"),
    ];
    let mut old = Old::new();
    let rounds = before_pause.map(|round| (false, round)).into_iter();
    for (number, (pauses, (script, expected))) in
        (1_u8..).zip(rounds.chain(before_take.map(|round| (true, round))))
    {
        let name = format!("{expected:?}, paused: {pauses}");
        wait_until(|| details(&old.daemon)[0].status.unfinished == 0);
        let before = (details(&old.daemon), settings(&old.daemon));
        let error = old.take(|taker, socket| {
            assert!(taker.begin()["result"].is_object(), "{name}");
            wait_until(|| socket.read_timeout().unwrap() == Some(OPEN_MAX));
            if pauses {
                assert!(taker.pause()["result"].is_object(), "{name}");
                wait_until(|| socket.read_timeout().unwrap() == Some(TAKE_MAX));
            }
            script(taker, socket);
        });
        assert!(error.unwrap().contains(expected), "{name}");
        assert_eq!((details(&old.daemon), settings(&old.daemon)), before, "{name}");
        assert_eq!(stats(&old.daemon).failed_takeovers, u64::from(number), "{name}");
        let start = Instant::now();
        old.frontend.write(0, 8, &[number; 4096]).unwrap();
        assert!(old.frontend.read(1, 8, 4096).unwrap() == [number; 4096], "{name}");
        let iops = 1_000_000 + u64::from(number);
        old.set_limit(&old.daemon, iops);
        let state = std::fs::read_to_string(old.path("state")).unwrap();
        assert!(state.contains(&iops.to_string()), "{name}: {state}");
        let added = json!({
            "endpoint": { "path": old.path(&format!("added-{number}")) },
            "device": { "blk": { "null": { "size-bytes": 512 } } },
        });
        let added = serde_json::from_value(added).unwrap();
        old.daemon.handle(Command::Add(vec![added])).unwrap();
        assert!(start.elapsed() < LIMIT, "{name}: commands waited for the hand-over");
    }
}

/// The new process opens the image by itself, as at any start.
#[test]
#[cfg(feature = "qcow2")]
fn an_image_is_left_as_closed_for_the_new_process() {
    let old = Old::new();
    let (image, socket) = (old.path("image"), old.path("image-socket"));
    let mut create = std::process::Command::new("qemu-img");
    if create.args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("8M").status().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return;
    }
    let disk = format!("qcow2:{}", image.display());
    let export = json!({ "endpoint": { "path": socket }, "device": { "blk": disk } });
    let export = serde_json::from_value(export).unwrap();
    old.daemon.handle(Command::Add(vec![export])).unwrap();
    let mut front_end = Frontend::attach(&socket, &Setup::default()).unwrap();
    let is_marked = || std::fs::read(&image).unwrap()[79] & 1 != 0;
    for number in 1..3 {
        // Each write needs another cluster.
        front_end.write(0, 1024 * number, &[1; 4096]).unwrap();
        assert!(is_marked(), "it is in use");
        let error = old.take(|taker, _| {
            assert!(taker.begin()["result"].is_object());
            assert!(is_marked(), "requests go on");
            assert!(taker.pause()["result"].is_object());
            assert!(!is_marked(), "it is not as closed");
        });
        assert!(error.is_some());
    }
}

/// The new process learns the reason, and if another try may succeed.
#[test]
fn a_refused_takeover_has_its_reason_and_code() {
    let old = Old::new();
    let (version, process) = (virtqueue::InflightRegion::VERSION, std::process::id());
    for (params, expected) in [
        (json!({ "formats": [1], "inflight-versions": [version], "version": "x" }), "formats"),
        (json!({ "formats": FORMATS, "inflight-versions": [99], "version": "x" }), "inflight"),
        (json!({ "formats": "all" }), "invalid type"),
    ] {
        let error = old.take(|taker, _| {
            taker.send(BEGIN, &params);
            let refusal = &taker.answer()["error"];
            assert_eq!(refusal["code"], 1, "{refusal}");
            assert!(refusal["message"].as_str().unwrap().contains(expected), "{refusal}");
        });
        assert!(error.unwrap().contains(expected));
    }
    // The client that has started the program is told.
    let wait = |process| wait(&old.daemon, process, Duration::ZERO);
    for (formats, is_transient) in [(json!([1]), false), (json!(FORMATS), true)] {
        let _held = is_transient.then(|| old.daemon.ownership().begin_hand_over(0).unwrap());
        let params = json!({ "formats": formats, "inflight-versions": [version], "version": "x" });
        let error = old.take(|taker, _| {
            taker.send(BEGIN, &params);
            assert!(taker.answer()["error"].is_object());
        });
        let why = match wait(process).unwrap_err() {
            CommandError::UpgradeLater(why) if is_transient => why,
            CommandError::UpgradeRefused(why) if !is_transient => why,
            other => panic!("{other:?}"),
        };
        assert_eq!(why, error.unwrap());
    }
    let error = old.take(|taker, _| {
        taker.begin();
        let asked = SuccessorProgress { has_asked: true, has_taken_over: false };
        assert_eq!(wait(process).unwrap(), asked, "it may still take over");
        assert_eq!(wait(process + 1).unwrap(), SuccessorProgress { has_asked: false, ..asked });
    });
    assert!(error.is_some());
    // The exports change between the two steps.
    let disk = json!({ "null": { "size-bytes": 512 } });
    let late = json!({ "endpoint": { "path": old.path("late") }, "device": { "blk": disk } });
    let unit = serde_json::from_value(json!({ "lun": 7, "disk": disk })).unwrap();
    let add_unit = Command::AddUnit(old.path("scsi").display().to_string(), Box::new(unit));
    let changes: [&dyn Fn(); 2] = [
        &|| old.daemon.add_from_config(serde_json::from_value(late.clone()).unwrap()).unwrap(),
        &|| drop(old.daemon.handle_from_config(add_unit.clone()).unwrap()),
    ];
    for change in changes {
        let error = old.take(|taker, _| {
            taker.begin();
            change();
            let refusal = &taker.pause()["error"];
            assert_eq!(refusal["code"], 10, "{refusal}");
            assert!(refusal["message"].as_str().unwrap().contains("were added, changed"));
        });
        assert!(error.is_some());
    }
    let error = old.take(|taker, _| {
        taker.begin();
        let second = old.take(|taker, _| {
            let refusal = &taker.begin()["error"];
            assert_eq!(refusal["code"], 10, "{refusal}");
        });
        assert!(second.is_some());
        assert!(taker.pause()["result"].is_object(), "the first one continues");
    });
    assert!(error.is_some());
}
