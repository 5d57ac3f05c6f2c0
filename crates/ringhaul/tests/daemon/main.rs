//! The daemon as a whole, in this process: exports come and go by commands while exports serve.

mod scene;

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result, bail, ensure};
use ringhaul::socket::Endpoint;
use ringhaul::spec::command::{
    Command, CommandError, DiskState, EndCause, ExportState, ExportStatus, Removal, Reply,
};
use ringhaul::spec::{
    DeviceSpec, DiskSpec, EndpointSpec, ExportSettings, ExportSpec, UnitSettings, UnitSpec,
};
use ringhaul::threads::shutdown::Outcome;
use ringhaul_kit::daemon::pattern;
use ringhaul_kit::frontend::{Frontend, Setup};
use ringhaul_kit::fuse::{Fuse, opcode};
use vhost_user::{QueueState, SessionDetails};

use scene::Scene;

const SECTORS: u64 = 2048;

/// Writes and reads back until it is told to stop, and counts how often.
fn load(frontend: &mut Frontend, rounds: &AtomicU64, stop: &AtomicBool) -> Result<()> {
    for round in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let (sector, data) = (round * 8 % SECTORS, pattern(round, 4096));
        frontend.write(0, sector, &data)?;
        ensure!(frontend.read(0, sector, 4096)? == data, "round {round} reads something else");
        rounds.store(round + 1, Ordering::Relaxed);
    }
    Ok(())
}

#[test]
fn exports_are_added_and_removed_beside_a_busy_export() -> Result<()> {
    let mut scene = Scene::new(&["--iothreads", "2"])?;
    let (busy, other) = (scene.export("busy", SECTORS)?, scene.export("other", SECTORS)?);
    scene.add(&[&busy])?;
    let mut loaded = Frontend::attach(&scene.socket("busy"), &Setup::default())?;
    let (rounds, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let visit = |turn: u64| -> Result<()> {
        let before = rounds.load(Ordering::Relaxed);
        scene.add(&[&other])?;
        let mut frontend = Frontend::attach(&scene.socket("other"), &Setup::default())?;
        if let Some(before) = turn.checked_sub(1) {
            let data = frontend.read(0, 8, 4096)?;
            ensure!(data == pattern(before, 4096), "what was written has gone");
        }
        frontend.write(0, 8, &pattern(turn, 4096))?;
        let Reply::Removed(status) = scene.handle(Command::Remove(Removal::new(other.name())))?
        else {
            bail!("another answer");
        };
        let served = status.served;
        ensure!(served.writes.requests == 1 && served.writes.bytes == 4096, "{served}");
        ensure!((status.sessions, status.connected) == (1, false), "{status:?}");
        frontend.channel.wait_closed()?;
        ensure!(!scene.socket("other").exists(), "the socket is left behind");
        scene.wait_until(|| rounds.load(Ordering::Relaxed) > before + 20)
    };
    std::thread::scope(|threads| -> Result<()> {
        let load = threads.spawn(|| load(&mut loaded, &rounds, &stop));
        let visited = (0..5).try_for_each(visit);
        stop.store(true, Ordering::Relaxed);
        load.join().expect("the load does not panic").and(visited)
    })?;
    // The driver sees an answer before the end of the run, at which requests are counted.
    let is_idle = |exports: &[ExportStatus]| exports.iter().all(|export| export.unfinished == 0);
    scene.wait_until(|| scene.show().is_ok_and(|exports| is_idle(&exports)))?;
    let exports = scene.show()?;
    let [status] = &exports[..] else { bail!("{exports:?}") };
    let expected = (busy.name(), ExportState::Serving, true, 1, 0);
    let seen = (&status.name(), status.state, status.connected, status.sessions, status.unfinished);
    ensure!(seen == (&expected.0, expected.1, expected.2, expected.3, expected.4), "{status:?}");
    let count = rounds.load(Ordering::Relaxed);
    let (reads, writes) = (status.served.reads, status.served.writes);
    ensure!((reads.requests, writes.requests) == (count, count), "{status:?} after {count}");
    ensure!(status.spec == busy.named() && status.size_bytes == SECTORS * 512, "{status:?}");
    ensure!(status.disk_state == DiskState::Ready, "{status:?}");
    ensure!(scene.end() == Outcome::Clean, "it did not end cleanly");
    loaded.channel.wait_closed()
}

#[test]
fn a_daemon_keeps_running_without_exports() -> Result<()> {
    let mut scene = Scene::new(&[])?;
    let export = scene.export("disk", SECTORS)?;
    for _ in 0..2 {
        ensure!(scene.show()?.is_empty(), "something is left");
        scene.add(&[&export])?;
        scene.handle(Command::Remove(Removal::new(export.name())))?;
    }
    ensure!(scene.end() == Outcome::Clean, "it did not end cleanly");
    let late = scene.daemon.handle(Command::Add(vec![export]));
    ensure!(matches!(late, Err(CommandError::Ending)), "{late:?}");
    Ok(())
}

/// A failure leaves nothing behind: no socket, no name, no lock on a disk.
#[test]
fn exports_are_added_all_or_none() -> Result<()> {
    let mut scene = Scene::new(&[])?;
    let (good, other) = (scene.export("good", SECTORS)?, scene.export("other", SECTORS)?);
    let device = DeviceSpec::Blk(DiskSpec::File(scene.path("absent.img")));
    let missing = ExportSpec { device, ..scene.export("missing", SECTORS)? };
    let endpoint = EndpointSpec::Path(scene.path("no folder/socket"));
    let nowhere = ExportSpec { endpoint, ..scene.export("nowhere", SECTORS)? };
    let settings = ExportSettings { iothread: Some(7), ..ExportSettings::default() };
    let misplaced = ExportSpec { settings, ..scene.export("misplaced", SECTORS)? };
    for (bad, words) in [
        (&missing, "absent.img"),
        (&nowhere, "no folder"),
        (&misplaced, "IoThread 7"),
        (&good, "another export"),
    ] {
        let added = scene.daemon.handle(Command::Add(vec![good.clone(), bad.clone()]));
        let error = added.err().context("it was added")?.to_string();
        ensure!(error.contains(words), "{error}");
        ensure!(!scene.socket("good").exists(), "{words}: a socket is left behind");
        ensure!(scene.show()?.is_empty(), "{words}: an export is left behind");
    }
    scene.add(&[&good])?;
    let added = scene.daemon.handle(Command::Add(vec![other.clone(), good.clone()]));
    ensure!(matches!(&added, Err(CommandError::Exists(name)) if *name == good.name()), "{added:?}");
    let removed = scene.daemon.handle(Command::Remove(Removal::new(other.name())));
    ensure!(matches!(removed, Err(CommandError::Unknown(_))), "{removed:?}");
    scene.add(&[&other])?;
    let names: Vec<String> = scene.show()?.into_iter().map(|status| status.name()).collect();
    ensure!(names == [good.name(), other.name()], "{names:?}");
    Frontend::attach(&scene.socket("good"), &Setup::default())?.write(0, 0, &[1; 512])?;
    ensure!(scene.end() == Outcome::Clean, "it did not end cleanly");
    Ok(())
}

#[test]
fn an_inherited_descriptor_is_kept_until_it_is_served() -> Result<()> {
    let (ours, theirs) = UnixStream::pair()?;
    let mut scene = Scene::with(&[], (7, Endpoint::Connection(ours)).into())?;
    let on = |fd| -> Result<ExportSpec> {
        Ok(ExportSpec { endpoint: EndpointSpec::Fd(fd), ..scene.export("disk", SECTORS)? })
    };
    let endpoint = EndpointSpec::Path(scene.path("no folder/socket"));
    let nowhere = ExportSpec { endpoint, ..scene.export("nowhere", SECTORS)? };
    for (specs, words) in
        [(vec![on(8)?], "descriptor 8 was not inherited"), (vec![on(7)?, nowhere], "no folder")]
    {
        let error = scene.daemon.handle(Command::Add(specs)).err().context("it was added")?;
        ensure!(error.to_string().contains(words), "{error}");
    }
    scene.add(&[&on(7)?])?;
    drop(theirs);
    ensure!(scene.end() == Outcome::Clean, "it did not end cleanly");
    Ok(())
}

/// A disk on a file system that does not answer delays only the command that needs it.
#[test]
fn opening_a_hung_disk_delays_no_other_export() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let mut scene = Scene::new(&[])?;
    let (hung, other) = (scene.on_fuse("hung", &fuse), scene.export("other", SECTORS)?);
    fuse.withhold(rustix::process::getpid(), &[opcode::OPEN]);
    std::thread::scope(|threads| -> Result<()> {
        let added = threads.spawn(|| scene.daemon.handle(Command::Add(vec![hung.clone()])));
        fuse.wait_for(opcode::OPEN)?;
        let serves_other = || -> Result<()> {
            scene.add(&[&other])?;
            Frontend::attach(&scene.socket("other"), &Setup::default())?.write(0, 0, &[1; 512])?;
            let exports = scene.show()?;
            let states: Vec<_> = exports.iter().map(|export| export.state).collect();
            ensure!(states == [ExportState::Serving, ExportState::Opening], "{exports:?}");
            let removal = Removal { deadline_ms: Some(0), ..Removal::new(hung.name()) };
            let removed = scene.daemon.handle(Command::Remove(removal));
            ensure!(matches!(removed, Err(CommandError::NotEnded(..))), "{removed:?}");
            let again = scene.daemon.handle(Command::Add(vec![hung.clone()]));
            ensure!(matches!(again, Err(CommandError::Exists(_))), "{again:?}");
            Ok(())
        };
        let served = serves_other();
        fuse.release();
        let added = added.join().expect("no panic");
        served?;
        ensure!(matches!(added, Err(CommandError::Cancelled(_))), "{added:?}");
        Ok(())
    })?;
    scene.add(&[&hung])?;
    Frontend::attach(&scene.socket("hung"), &Setup::default())?.read(0, 0, 512)?;
    ensure!(scene.end() == Outcome::Clean, "it did not end cleanly");
    Ok(())
}

/// Closing a disk may take as long as its file system likes.
#[test]
fn closing_a_hung_disk_delays_no_other_export() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let mut scene = Scene::new(&["--engine", "threads"])?;
    let (hung, other) = (scene.on_fuse("hung", &fuse), scene.export("other", SECTORS)?);
    scene.add(&[&hung, &other])?;
    fuse.withhold(rustix::process::getpid(), &[opcode::FLUSH]);
    std::thread::scope(|threads| -> Result<()> {
        let removed =
            threads.spawn(|| scene.daemon.handle(Command::Remove(Removal::new(hung.name()))));
        let serves_other = || -> Result<()> {
            fuse.wait_for(opcode::FLUSH)?;
            Frontend::attach(&scene.socket("other"), &Setup::default())?.write(0, 0, &[1; 512])?;
            let exports = scene.show()?;
            let states: Vec<_> = exports.iter().map(|export| export.state).collect();
            ensure!(states == [ExportState::Serving, ExportState::Stopping], "{exports:?}");
            ensure!(!removed.is_finished(), "it was removed before its disk was closed");
            let again = scene.daemon.handle(Command::Add(vec![hung.clone()]));
            ensure!(matches!(again, Err(CommandError::Exists(_))), "{again:?}");
            Ok(())
        };
        let served = serves_other();
        fuse.release();
        let removed = removed.join().expect("no panic");
        served?;
        ensure!(matches!(removed, Ok(Reply::Removed(_))), "{removed:?}");
        Ok(())
    })?;
    scene.add(&[&hung])?;
    ensure!(scene.end() == Outcome::Clean, "it did not end cleanly");
    Ok(())
}

#[test]
fn a_second_signal_does_not_wait_for_a_disk_to_close() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let mut scene = Scene::new(&["--engine", "threads"])?;
    scene.add(&[&scene.on_fuse("hung", &fuse)])?;
    fuse.withhold(rustix::process::getpid(), &[opcode::FLUSH]);
    scene.begin_end(EndCause::Sigterm);
    let closes = fuse.wait_for(opcode::FLUSH);
    scene.begin_end(EndCause::Sigint);
    let outcome = scene.end();
    fuse.release();
    closes?;
    ensure!(outcome == Outcome::Abandoned, "{outcome:?}");
    Ok(())
}

/// All exports begin to end, even if the first one hangs.
#[test]
fn exports_on_hung_disks_end_side_by_side() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let mut scene = Scene::new(&["--engine", "threads"])?;
    let exports = ["one", "two", "three"].map(|name| scene.on_fuse(name, &fuse));
    scene.add(&exports.iter().collect::<Vec<_>>())?;
    let mut frontends: Vec<Frontend> = Vec::new();
    for name in ["one", "two", "three"] {
        frontends.push(Frontend::attach(&scene.socket(name), &Setup::default())?);
    }
    fuse.withhold(rustix::process::getpid(), &[opcode::READ]);
    for frontend in &mut frontends {
        scene::begin_read(frontend)?;
    }
    scene.wait_until(|| {
        scene.show().is_ok_and(|exports| exports.iter().all(|export| export.unfinished == 1))
    })?;
    let [first, ..] = &exports;
    std::thread::scope(|threads| -> Result<()> {
        let removed =
            threads.spawn(|| scene.daemon.handle(Command::Remove(Removal::new(first.name()))));
        let states = || -> Vec<ExportState> {
            scene.show().unwrap_or_default().iter().map(|export| export.state).collect()
        };
        use ExportState::{Serving, Stopping};
        let stop_all = || -> Result<()> {
            scene.wait_until(|| states() == [Stopping, Serving, Serving])?;
            // Its IoThread may not know of the end yet.
            scene.wait_until(|| {
                let again = Removal { deadline_ms: Some(0), ..Removal::new(first.name()) };
                let again = scene.daemon.handle(Command::Remove(again));
                again.is_err_and(|error| {
                    error.to_string().contains("has not ended: queue 0: 1 request is not answered")
                })
            })?;
            scene.begin_end(EndCause::Sigterm);
            scene.wait_until(|| states() == [Stopping; 3])?;
            let device = DeviceSpec::Blk(DiskSpec::File(scene.path("absent.img")));
            let late = ExportSpec { device, ..scene.export("late", SECTORS)? };
            let late = scene.daemon.handle(Command::Add(vec![late]));
            ensure!(matches!(late, Err(CommandError::Ending)), "its disk was opened: {late:?}");
            for frontend in &frontends {
                ensure!(!frontend.channel.is_closed()?, "a front-end saw the end too early");
            }
            Ok(())
        };
        let stopped = stop_all();
        fuse.release();
        let removed = removed.join().expect("no panic");
        stopped?;
        ensure!(matches!(removed, Ok(Reply::Removed(_))), "{removed:?}");
        Ok(())
    })?;
    ensure!(scene.end() == Outcome::Clean, "it did not end cleanly");
    for frontend in &mut frontends {
        frontend.channel.wait_closed()?;
        frontend.rings[0].wait_used().context("a request was not answered")?;
    }
    Ok(())
}

/// The front-end goes at once, and its request is finished anyway.
#[test]
fn a_forced_removal_finishes_requests_in_progress() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let mut scene = Scene::new(&["--engine", "threads"])?;
    let export = scene.on_fuse("hung", &fuse);
    scene.add(&[&export])?;
    let mut frontend = Frontend::attach(&scene.socket("hung"), &Setup::default())?;
    fuse.withhold(rustix::process::getpid(), &[opcode::READ]);
    scene::begin_read(&mut frontend)?;
    scene.wait_until(|| scene.show().is_ok_and(|exports| exports[0].unfinished == 1))?;
    let removal = |force| Removal { deadline_ms: Some(0), force, ..Removal::new(export.name()) };
    let mut cut_off = || -> Result<()> {
        for force in [false, true] {
            ensure!(!frontend.channel.is_closed()?, "the front-end saw the end too early");
            let removed = scene.daemon.handle(Command::Remove(removal(force)));
            ensure!(matches!(removed, Err(CommandError::NotEnded(..))), "{removed:?}");
        }
        frontend.channel.wait_closed()?;
        // Its IoThread may not know of the end yet.
        let left = "queue 0: 1 request is not answered, of at most 128 KiB; its disk has not \
                    answered yet";
        scene.wait_until(|| {
            scene.show().is_ok_and(|exports| exports[0].waits_for.as_deref() == Some(left))
        })?;
        let again = scene.daemon.handle(Command::Add(vec![export.clone()]));
        ensure!(matches!(again, Err(CommandError::Exists(_))), "{again:?}");
        Ok(())
    };
    let cut_off = cut_off();
    fuse.release();
    cut_off?;
    frontend.rings[0].wait_used().context("the request was not answered")?;
    let removed = scene.daemon.handle(Command::Remove(Removal::new(export.name())));
    // The export may have ended already.
    ensure!(matches!(removed, Ok(_) | Err(CommandError::Unknown(_))), "{removed:?}");
    ensure!(scene.show()?.is_empty(), "it is still there");
    scene.add(&[&export])?;
    ensure!(scene.end() == Outcome::Clean, "it did not end cleanly");
    Ok(())
}

#[test]
fn an_export_is_shown_with_its_front_end() -> Result<()> {
    let mut scene = Scene::new(&["--engine", "threads"])?;
    let export = ExportSpec { name: Some("vm".into()), ..scene.export("disk", SECTORS)? };
    scene.add(&[&export])?;
    let show = || scene.daemon.details("vm".into());
    let before = show()?;
    ensure!(before.status == scene.show()?[0] && before.front_end.is_none(), "{before:?}");
    let [disk] = &before.disks[..] else { bail!("{before:?}") };
    ensure!(disk.place.is_none() && disk.size_bytes == SECTORS * 512, "{disk:?}");
    ensure!(disk.engine.as_deref() == Some("threads"), "{disk:?}");
    ensure!(disk.engine_reason.as_deref() == Some("as requested"), "{disk:?}");
    let mut frontend = Frontend::attach(&scene.socket("disk"), &Setup::default())?;
    for _ in 0..3 {
        frontend.write(0, 0, &[1; 512])?;
    }
    let is_idle = || scene.show().is_ok_and(|exports| exports[0].unfinished == 0);
    scene.wait_until(is_idle)?;
    let front_end = show()?.front_end.context("no front-end is shown")?;
    let own = Some(std::process::id());
    ensure!(front_end.peer.as_ref().and_then(|peer| peer.pid) == own, "{front_end:?}");
    let SessionDetails { features, protocol_features, queues, memory } = front_end.session;
    ensure!(features.iter().any(|name| name == "version-1"), "{features:?}");
    ensure!(protocol_features.iter().all(|name| !name.contains("bit")), "{protocol_features:?}");
    let first = &queues[0];
    ensure!((first.index, first.state) == (0, QueueState::Running), "{queues:?}");
    ensure!((first.next_avail, first.requests) == (Some(3), 0), "{queues:?}");
    ensure!(first.size.is_power_of_two() && memory.bytes > 0 && memory.regions > 0, "{memory:?}");
    drop(frontend);
    scene.wait_until(|| show().is_ok_and(|details| details.front_end.is_none()))?;
    ensure!(scene.daemon.details("disk".into()).is_err(), "there is no such");
    ensure!(scene.end() == Outcome::Clean, "it did not end cleanly");
    Ok(())
}

#[test]
fn exports_of_a_disk_agree_on_its_reservations_file() -> Result<()> {
    let mut scene = Scene::new(&[])?;
    let unit = |name: &str, reservations: Option<&str>| -> Result<ExportSpec> {
        let mut export = scene.export(name, SECTORS)?;
        let disk = DiskSpec::File(scene.path("one.img"));
        let reservations = reservations.map(|name| scene.path(name));
        let settings = UnitSettings { reservations, ..UnitSettings::default() };
        export.device = DeviceSpec::Scsi(vec![UnitSpec { target: 0, lun: 0, disk, settings }]);
        export.settings.no_lock = true;
        Ok(export)
    };
    scene.add(&[&unit("one", Some("a"))?, &unit("two", None)?, &unit("three", Some("./a"))?])?;
    let Err(error) = scene.add(&[&unit("four", Some("b"))?]) else { bail!("it was added") };
    let text = format!("{error:#}");
    ensure!(text.contains("other exports of the disk use"), "{text}");
    ensure!(scene.end() == Outcome::Clean);
    Ok(())
}
