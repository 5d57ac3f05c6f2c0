//! How fast a neighbour is while another export misbehaves, against how fast it is in quiet.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use ringhaul_tests::cli::{bench, run};
use ringhaul_tests::daemon::DaemonOptions;
use ringhaul_tests::frontend::message::{Message, code};
use ringhaul_tests::frontend::ring::Desc;
use ringhaul_tests::frontend::{DATA, Frontend, Setup, blk};
use ringhaul_tests::fuse::{Fuse, opcode};
use ringhaul_tests::guest::{Cache, Engine};
use ringhaul_tests::system::{FileSystem, LoopDevice, may_change};

use crate::scene::{Scene, Stuck, disks};
use crate::slow_disks::{ext4, learn};

const MIB: u64 = 1 << 20;
/// Quiet and disturbed spans, one after the other.
const ROUNDS: usize = 7;
const BENCH: &str =
    "--rw randread --bs 4k --iodepth 8 --runtime 0.4 --ramp_time 0.1 --output-format json";

/// I/Os per second of a neighbour.
fn measure(socket: &Path) -> Result<f64> {
    let finished = run(&mut bench(socket, BENCH)?)?.expect_code(0)?;
    let report: serde_json::Value = serde_json::from_str(&finished.stdout)?;
    find_iops(&report).with_context(|| format!("no IOPS in {}", finished.stdout))
}

fn find_iops(value: &serde_json::Value) -> Option<f64> {
    let map = value.as_object()?;
    let own = map.get("iops").or_else(|| map.get("read_iops")).and_then(|iops| iops.as_f64());
    own.or_else(|| map.values().find_map(find_iops))
}

/// Measures in turn, quiet and disturbed, and prints a row of the table.
fn compare(
    name: &str,
    engine: Engine,
    socket: &Path,
    mut disturb: impl FnMut() -> Result<Box<dyn FnOnce() -> Result<()>>>,
) -> Result<()> {
    let (mut ratios, mut quiet_iops) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let quiet = measure(socket)?;
        let settle = disturb()?;
        let disturbed = measure(socket);
        settle()?;
        ratios.push(disturbed? / quiet);
        quiet_iops.push(quiet);
    }
    ratios.sort_by(f64::total_cmp);
    quiet_iops.sort_by(f64::total_cmp);
    println!(
        "| {name} | {engine} | {:.0} | {:.2} | {:.2} to {:.2} |",
        quiet_iops[ROUNDS / 2] / 1000.0,
        ratios[ROUNDS / 2],
        ratios[0],
        ratios[ROUNDS - 1]
    );
    Ok(())
}

fn hung_writes(name: &str, engine: Engine, is_loop: bool, misaligned: bool) -> Result<()> {
    let file_system = std::rc::Rc::new(ext4(64 * MIB)?);
    let mut options = DaemonOptions { cache: Cache::None, ..DaemonOptions::new(engine) };
    let device = if is_loop { Some(loop_device(&file_system)?) } else { None };
    if let Some(device) = &device {
        options = options.with("--disk", &format!("file,path={}", device.path().display()));
    }
    let home = if is_loop { disks() } else { file_system.path() };
    let scene = Scene::start(home, &options)?;
    learn(engine, &scene, &file_system)?;
    let Scene { daemon, file, null, sockets, _folders } = scene;
    drop(file);
    let bad = daemon.socket().to_owned();
    let result = compare(name, engine, &sockets[0], || {
        let mut stuck = Stuck::attach(&bad)?;
        let frozen = file_system.freeze()?;
        if misaligned {
            for number in 0..2040 {
                let data = Desc::readable(DATA + 1, u32::try_from(MIB)?);
                stuck.put(number, blk::OUT, 0, Some(data))?;
            }
            stuck.kick()?;
        } else {
            stuck.write(300, 2)?;
        }
        Ok(Box::new(move || {
            drop(frozen);
            stuck.finish()
        }))
    });
    result.with_context(|| daemon.messages())?;
    drop(null);
    daemon.terminate()?;
    Ok(())
}

fn loop_device(file_system: &FileSystem) -> Result<LoopDevice> {
    let backing = file_system.path().join("backing.img");
    std::fs::File::create(&backing).and_then(|file| file.set_len(16 * MIB))?;
    LoopDevice::attach(&backing)
}

/// A descriptor that hangs while it is closed.
fn hung_descriptor(engine: Engine) -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let Scene { daemon, file, null, sockets, _folders } = Scene::of(engine)?;
    drop(file);
    let fuse = std::rc::Rc::new(fuse);
    compare("a FUSE file that hangs while it is closed", engine, &sockets[0], || {
        let mut bad = Frontend::connect(daemon.socket(), &Setup::default())?;
        bad.negotiate()?;
        fuse.withhold(daemon.pid(), &[opcode::FLUSH, opcode::POLL]);
        let message = Message::ring_fd(code::SET_VRING_KICK, 0, Some(&fuse.open()?));
        bad.channel.send(&message.needs_reply())?;
        fuse.wait_for(opcode::FLUSH)?;
        let fuse = std::rc::Rc::clone(&fuse);
        Ok(Box::new(move || {
            fuse.release();
            drop(bad);
            Ok(())
        }))
    })?;
    drop(null);
    daemon.terminate()?;
    ensure!(!sockets[0].exists(), "a socket is left behind");
    Ok(())
}

/// `cargo xtask neighbours` runs this: it takes minutes, and what it says is about the machine too.
#[test]
#[ignore = "a measurement, and no test"]
fn report() -> Result<()> {
    if !may_change("mounts") {
        return Ok(());
    }
    println!("| the other export | engine | thousand IOPS in quiet | times as many | from, to |");
    println!("|---|---|---|---|---|");
    for engine in [Engine::IoUring, Engine::Aio, Engine::Threads] {
        hung_writes("300 writes to a frozen file system", engine, false, false)?;
        hung_writes("300 writes to a loop device on one", engine, true, false)?;
        hung_writes("2,040 misaligned writes of 1 MiB to one", engine, false, true)?;
        hung_descriptor(engine)?;
    }
    Ok(())
}
