//! Clients of an image, and its locks.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{LIMIT, Running, run};
use ringhaul_kit::daemon::pattern;
use ringhaul_kit::frontend::{Frontend, Setup, blk};
use ringhaul_kit::system::Stopped;
use ringhaul_tools::process::retry;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::Scene;

/// A user with a key in a separate file, and an image in a namespace. The key appears in no output.
pub(super) fn users(scene: &mut Scene) -> Result<()> {
    scene.cluster.tool("rbd", &["namespace", "create", "rbd/tenant"])?;
    scene.cluster.tool("rbd", &["create", "rbd/tenant/own", "--size", "16M"])?;
    let keyring = scene.cluster.vm_keyring();
    let conf = scene.cluster.conf();
    let disk = format!(
        "rbd,namespace=tenant,image=own,id=vm,keyring={},conf={}",
        keyring.display(),
        conf.display()
    );
    let served = scene.serve("tenant", &disk, &["--log", "debug"])?;
    let mut front_end = served.connect()?;
    let data = pattern(3, 4096);
    front_end.write(0, 0, &data)?;
    ensure!(front_end.read(0, 0, 4096)? == data, "it reads otherwise");
    drop(front_end);
    let keys = std::fs::read_to_string(&keyring)?;
    let key = keys.lines().find_map(|line| line.trim().strip_prefix("key = ")).unwrap_or_default();
    ensure!(key.len() > 20, "no key in {keys}");
    let all = format!("{}{}", served.show()?, served.daemon.stderr());
    ensure!(!all.contains(key), "the key is shown:\n{all}");
    served.end()?;
    let wrong = format!("rbd:written,id=admin,keyring={}", keyring.display());
    run(&mut scene.ringhaul(&["disk", "info", &wrong])?)?
        .expect_refusal(&["as client.admin", "check"])
}

/// A single thread of librados begins and ends operations, unless the configuration sets another
/// number.
pub(super) fn threads(scene: &mut Scene) -> Result<()> {
    scene.image("threads")?;
    let conf = scene.cluster.conf();
    let usual = std::fs::read_to_string(&conf).context("reading the configuration")?;
    for (wish, expected) in [("", 1), ("librados thread count = 3\n", 3)] {
        let own = scene.cluster.path("threads.conf");
        std::fs::write(&own, format!("{usual}{wish}")).context("writing a configuration")?;
        let disk = format!("rbd,image=threads,conf={}", own.display());
        let served = scene.serve("threads", &disk, &[])?;
        let tasks = format!("/proc/{}/task", served.daemon.pid().as_raw_nonzero());
        // A list can lack some threads while other threads end, so it is read again.
        retry(LIMIT, || {
            let mut count = 0;
            for task in std::fs::read_dir(&tasks).context("listing threads")? {
                let name = std::fs::read_to_string(task?.path().join("comm")).unwrap_or_default();
                count += u32::from(name.trim_end() == "io_context_pool");
            }
            ensure!(count == expected, "{wish:?}: {count} threads");
            Ok(())
        })?;
        served.end()?;
    }
    Ok(())
}

/// librbd acquires the lock with the first write, and passes it on to a client that requests it.
pub(super) fn lock_is_passed_on(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("shared")?;
    let [one, two] = ["one", "two"].map(|name| scene.serve(name, &disk, &[]));
    let (one, two) = (one?, two?);
    let (mut first, mut second) = (one.connect()?, two.connect()?);
    let lock = || scene.cluster.tool("rbd", &["lock", "ls", "shared"]);
    ensure!(lock()?.is_empty(), "nobody has written");
    let mut owners = Vec::new();
    for round in 0..3 {
        let [ours, theirs] = [10, 20].map(|seed| pattern(seed + round, 4096));
        first.write(0, 0, &ours)?;
        owners.push(lock()?);
        ensure!(second.read(0, 0, 4096)? == ours, "the other one has not seen a write");
        second.write(0, 8, &theirs)?;
        owners.push(lock()?);
        ensure!(first.read(0, 8, 4096)? == theirs, "a write was not seen");
    }
    ensure!(owners.iter().all(|owner| owner.contains("There is 1 exclusive lock")), "{owners:?}");
    ensure!(owners[0] != owners[1] && owners[1] != owners[2], "it was not passed on: {owners:?}");
    drop((first, second));
    one.end()?;
    two.end()
}

/// The process that takes over has the lock at once, under a verified load.
pub(super) fn lock_is_handed_over(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("left")?;
    let mut served = scene.serve("left", &disk, &[])?;
    let load = served.load("--runtime 15 --numjobs 1")?;
    served.daemon.wait_for("a front-end has connected")?;
    let mut owners = Vec::new();
    let mut has_another_owner = || {
        let locks = scene.cluster.tool("rbd", &["lock", "ls", "left"])?;
        ensure!(locks.contains("There is 1 exclusive lock"), "nobody has the lock: {locks}");
        ensure!(!owners.contains(&locks), "one that has gone has the lock: {locks}");
        owners.push(locks);
        Ok(())
    };
    retry(LIMIT, &mut has_another_owner)?;
    for _ in 0..2 {
        let mut command = scene.ringhaul(&["serve", "--takeover"])?;
        let mut next = Running::start(command.arg(&served.control))?;
        next.wait_for("took over 1 export from process")?;
        std::mem::replace(&mut served.daemon, next).finish()?.expect_code(0)?;
        retry(LIMIT, &mut has_another_owner)?;
    }
    let load = load.finish()?.expect_code(0)?;
    ensure!(load.stdout.contains("errors: 0;"), "{}", load.stdout);
    ensure!(load.stdout.contains("0 reads with wrong data"), "{}", load.stdout);
    served.daemon.signal(Signal::TERM)?;
    let end = served.daemon.finish()?.expect_code(0)?;
    // The cluster also takes the lock from a dead client, but only after 30 s.
    let waits = end.stderr.lines().filter_map(|line| line.split("answers again, after ").nth(1));
    let seconds = waits.filter_map(|wait| wait.split(' ').next()?.parse::<u64>().ok()).max();
    ensure!(seconds.is_none_or(|seconds| seconds < 25), "{}", end.stderr);
    Ok(())
}

/// Written data is in the cluster before another process serves, although librbd writes its cache
/// only when flushed. While that is impossible, the old process stays.
pub(super) fn cache_is_handed_over(scene: &mut Scene) -> Result<()> {
    hand_over_cache(scene, "cached", "writeback")?;
    // The configuration of an image takes precedence.
    hand_over_cache(scene, "uncached", "none")
}

fn hand_over_cache(scene: &Scene, name: &str, cache: &str) -> Result<()> {
    let create = ["create", name, "--size", "16M", "--image-feature", "layering"];
    scene.cluster.tool("rbd", &create)?;
    let image = format!("rbd/{name}");
    scene.cluster.tool("rbd", &["config", "image", "set", &image, "rbd_cache", "true"])?;
    let conf = scene.sockets.path().join(format!("{name}.conf"));
    let mut text = std::fs::read_to_string(scene.cluster.conf())?;
    text += "\n[client]\nrbd_cache_policy = writeback\nrbd_cache_max_dirty_age = 600\n\
             rbd_cache_writethrough_until_flush = false\n";
    std::fs::write(&conf, text)?;
    let disk = format!("rbd:{name},conf={}", conf.display());
    let mut served = scene.serve(name, &disk, &["--cache", cache])?;
    let mut front_end = served.connect()?;
    let [first, second] = [1, 2].map(|seed| pattern(seed, 4096));
    front_end.write(0, 0, &first)?;

    let mut control = BufReader::new(UnixStream::connect(&served.control)?);
    let begin = begin_takeover();
    let answer = call(&mut control, "takeover", &begin)?;
    ensure!(answer["error"].is_null(), "{answer:#}");
    let stopped = Stopped::new(scene.cluster.osd()?)?;
    let answer = call(&mut control, "takeover.pause", &json!(null))?;
    let message = answer["error"]["message"].as_str().unwrap_or_default();
    ensure!(message.contains("the cache of a disk is not flushed"), "{answer:#}");
    drop((stopped, control));
    front_end.write(0, 8, &second)?;

    let mut command = scene.ringhaul(&["serve", "--takeover"])?;
    let mut next = Running::start(command.arg(&served.control))?;
    next.wait_for("took over 1 export from process")?;
    std::mem::replace(&mut served.daemon, next).finish()?.expect_code(0)?;
    for (sector, data) in [(0, &first), (8, &second)] {
        ensure!(front_end.read(0, sector, 4096)? == *data, "old data at sector {sector}");
    }
    drop(front_end);
    served.end()
}

/// The first message of a process that understands all formats.
fn begin_takeover() -> Value {
    let formats = (0..100).collect::<Vec<u32>>();
    json!({ "formats": formats, "inflight-versions": formats, "version": "test" })
}

/// The lock may take long to be released. Signals to the old process in that time are passed on at
/// once, however often they come.
pub(super) fn end_is_passed_on(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("slow")?;
    let mut served = scene.serve("slow", &disk, &[])?;
    let mut front_end = served.connect()?;
    front_end.write(0, 0, &pattern(1, 4096))?;
    let mut control = BufReader::new(UnixStream::connect(&served.control)?);
    let begin = begin_takeover();
    for (method, params) in [("takeover", begin), ("takeover.pause", json!(null))] {
        let answer = call(&mut control, method, &params)?;
        ensure!(answer["error"].is_null(), "{answer:#}");
    }
    let stopped = Stopped::new(scene.cluster.osd()?)?;
    let answer = call(&mut control, "takeover.take", &json!(null))?;
    ensure!(answer["error"].is_null(), "{answer:#}");
    for _ in 0..2 {
        served.daemon.signal(Signal::TERM)?;
        let line = next_line(&mut control)?;
        ensure!(line.contains("takeover.pass-on") && line.contains("\"end\""), "{line}");
    }
    drop(stopped);
    served.daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// Sends a request, and returns the daemon's answer.
fn call(control: &mut BufReader<UnixStream>, method: &str, params: &Value) -> Result<Value> {
    let line = json!({ "jsonrpc": "2.0", "id": method, "method": method, "params": params });
    control.get_mut().write_all(format!("{line}\n").as_bytes())?;
    Ok(serde_json::from_str(&next_line(control)?)?)
}

/// The next line that is not empty: empty lines come with descriptors.
fn next_line(control: &mut BufReader<UnixStream>) -> Result<String> {
    let mut line = String::new();
    while line.trim().is_empty() {
        line.clear();
        ensure!(control.read_line(&mut line)? > 0, "the daemon has hung up");
    }
    Ok(line)
}

/// With `exclusive=on` no other client can write, nor open the image in the same way.
pub(super) fn lock_is_kept(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("kept")? + ",exclusive=on";
    let kept = scene.serve("kept", &disk, &[])?;
    let mut front_end = kept.connect()?;
    let data = pattern(5, 4096);
    front_end.write(0, 0, &data)?;
    run(&mut scene.ringhaul(&["serve", "--socket-path", "x.sock", "--disk", &disk])?)?
        .expect_refusal(&["another client holds its exclusive lock", "rbd rbd/kept"])?;
    let write = ["bench", "rbd/kept", "--io-type", "write", "--io-total", "4K", "--io-size", "4K"];
    ensure!(scene.cluster.tool("rbd", &write).is_err(), "another client could write");
    ensure!(front_end.read(0, 0, 4096)? == data, "it was overwritten");
    drop(front_end);
    kept.end()?;
    scene.serve("kept", &disk, &[])?.end()
}

/// A daemon that follows a killed one waits until the cluster has noticed the death.
pub(super) fn lock_of_a_killed_daemon(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("dead")? + ",exclusive=on";
    let mut killed = scene.serve("dead", &disk, &[])?;
    killed.daemon.signal(Signal::KILL)?;
    killed.daemon.finish()?;
    std::fs::remove_file(&killed.socket).context("removing a socket")?;
    scene.serve("dead", &disk, &[])?.end()
}

/// A guest moves between two daemons that open the image early: the lock follows the queues that
/// run, and neither daemon writes beside the other.
pub(super) fn lock_moves_with_a_guest(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("moved")? + ",exclusive=on";
    let serve = |scene: &Scene, name| scene.serve(name, &disk, &["--lock", "late"]);
    let mut source = serve(scene, "moved-from")?;
    let mut target = serve(scene, "moved-to")?;
    let owner = || scene.cluster.tool("rbd", &["lock", "ls", "moved"]);
    ensure!(owner()?.is_empty(), "a daemon without a guest has the lock");
    let [first, second, third] = [1, 2, 3].map(|seed| pattern(seed, 4096));
    let mut guest = source.connect()?;
    guest.write(0, 0, &first)?;
    let of_source = owner()?;
    ensure!(of_source.contains("There is 1 exclusive lock"), "{of_source}");

    // The move is cancelled, or its target dies: the source still has the lock.
    ensure!(target.connect().is_err(), "two guests run");
    guest.write(0, 8, &second)?;
    ensure!(owner()? == of_source, "the lock has moved");
    target.daemon.signal(Signal::KILL)?;
    target.daemon.finish()?;
    std::fs::remove_file(&target.socket).context("removing a socket")?;
    guest.write(0, 16, &third)?;
    let target = serve(scene, "moved-to")?;

    drop(guest);
    let mut guest = target.connect()?;
    ensure!(owner()? != of_source, "the lock has not moved");
    for (sector, data) in [(0, &first), (8, &second), (16, &third)] {
        ensure!(guest.read(0, sector, 4096)? == *data, "old data at sector {sector}");
    }
    ensure!(source.connect().is_err(), "two guests run");
    guest.write(0, 0, &second)?;
    source.daemon.signal(Signal::KILL)?;
    source.daemon.finish()?;
    guest.write(0, 8, &third)?;
    ensure!(guest.read(0, 0, 4096)? == second, "another client has written");
    drop(guest);
    target.end()
}

/// A client that the cluster has locked out gets errors, never silence. Its flushes fail until it
/// opens the image again. Its other images are served as before.
pub(super) fn is_locked_out(scene: &mut Scene) -> Result<()> {
    let (disk, other) = (scene.image("fenced")?, scene.image("beside")?);
    let mut served = scene.serve("fenced", &disk, &[])?;
    let mut front_end = served.connect()?;
    let beside = scene.sockets.path().join("beside.sock");
    served.ctl(&["add", "--disk", &other, "--socket-path", &beside.to_string_lossy()])?;
    let mut beside = Frontend::attach(&beside, &Setup::default())?;
    beside.write(0, 0, &pattern(3, 4096))?;
    front_end.write(0, 0, &pattern(1, 4096))?;
    let status = scene.cluster.tool("rbd", &["status", "fenced"])?;
    let address = status.split_once("watcher=").and_then(|(_, rest)| rest.split_once(' '));
    let (address, _) = address.with_context(|| format!("no watcher in {status}"))?;
    scene.cluster.tool("ceph", &["osd", "blocklist", "add", address, "3600"])?;
    // The OSD gets the blocklist a moment later.
    retry(LIMIT, || {
        let answer = front_end.request(0, blk::OUT, 8, &pattern(2, 4096), 0)?;
        ensure!(answer.status == blk::IOERR, "a write from outside has ended with {answer:?}");
        Ok(())
    })?;
    served.daemon.wait_for("the cluster has blocked this process")?;
    let answer = front_end.request(0, blk::FLUSH, 0, &[], 0)?;
    ensure!(answer.status == blk::IOERR, "a flush has ended with {answer:?}");
    ensure!(served.show()?["disk-state"] == "lost", "{:#}", served.show()?);
    let write_and_flush = |front_end: &mut Frontend| {
        front_end.write(0, 8, &pattern(4, 4096))?;
        let answer = front_end.request(0, blk::FLUSH, 0, &[], 0)?;
        ensure!(answer.status == blk::OK, "a flush has ended with {answer:?}");
        Ok(())
    };
    write_and_flush(&mut beside).context("the image beside it")?;
    drop(front_end);
    let export = served.socket.to_string_lossy().into_owned();
    served.ctl(&["remove", &export])?;
    served.ctl(&["add", "--disk", &disk, "--socket-path", &export])?;
    let mut front_end = served.connect()?;
    write_and_flush(&mut front_end).context("the image once more")?;
    drop((front_end, beside));
    served.end()
}
