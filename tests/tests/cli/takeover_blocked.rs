//! Takeovers while disks do not answer, rings have no memory, or no descriptors are left.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{LIMIT, Running, TestFolders, bench, ringhaul, run, serve};
use ringhaul_kit::control::taking_over;
use ringhaul_kit::daemon::SECTOR_BYTES;
use ringhaul_kit::frontend::message::Message;
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, Setup, blk};
use ringhaul_kit::fuse::{Fuse, opcode};
use ringhaul_kit::server::ringhaul_binary;
use ringhaul_tools::process::retry;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use serde_json::json;

use crate::takeover::{Client, TAKEN, begin, check};
use crate::test_folders;

/// The exit status of an upgrade that may succeed a moment later.
const TRY_AGAIN: i32 = 4;

/// The size in bytes of a read that is not small.
const LONG_BYTES: u32 = 512 << 10;

/// A hung disk fails the takeover of all exports, and the healthy export stays in service.
#[test]
fn a_disk_that_hangs_keeps_the_old_process() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let hung = folders.socket("hung.sock");
    let mut command = begin(&folders)?;
    // Submits of this engine do not block, so the healthy export is served.
    command.args(["--engine", "threads"]);
    command.arg("--export").arg(format!(
        "socket-path={},blk-file={},read-only=on,lock=off",
        hung.display(),
        fuse.file().display()
    ));
    let daemon = Running::serve(&mut command)?;
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    check(&mut frontend, 1)?;
    fuse.withhold(daemon.pid(), &[opcode::READ]);
    let load = bench(&hung, "--rw randread --iodepth 4 --number_ios 100");
    let load = Running::start(&mut load?)?;
    fuse.wait_for(opcode::READ)?;
    let refused = taking_over(&folders).and_then(|mut command| run(&mut command));
    let served = check(&mut frontend, 2);
    // Released even after a failure: the kernel keeps a process with hung reads.
    fuse.release();
    let refused = refused?.expect_code(2)?.stderr;
    ensure!(refused.contains("requests were not finished in time"), "{refused}");
    served?;
    load.finish()?.expect_code(0)?;
    // The disk counts as hung until its next check.
    let mut next = Running::start(&mut taking_over(&folders)?)?;
    while let Err(error) = next.wait_for("took over 2 exports") {
        ensure!(error.to_string().contains("its queues cannot stop"), "{error}");
        next = Running::start(&mut taking_over(&folders)?)?;
    }
    daemon.finish()?.expect_code(0)?;
    check(&mut frontend, 3)
}

/// A daemon with a control socket and a disk on `fuse`, and its front-end.
fn serve_slow_disk(folders: &TestFolders, fuse: &Fuse) -> Result<(Running, Frontend)> {
    let mut command = serve(&folders.socket("vm.sock"), &fuse.file())?;
    command.args(["--read-only", "--lock", "off", "--engine", "threads"]);
    let daemon = Running::serve(command.arg("--control").arg(folders.socket("control")))?;
    let frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    Ok((daemon, frontend))
}

/// Submits a read that is not small on the first ring.
fn submit_long_read(frontend: &mut Frontend) -> Result<()> {
    let (header, status) = frontend.put_header(0, 0, blk::IN, 5)?;
    let data = Desc::writable(DATA + 0x2000, LONG_BYTES);
    frontend.rings[0].put_chain(0, &[Desc::readable(header, 16), data, Desc::writable(status, 1)]);
    frontend.rings[0].submit(0)
}

/// A request that hangs blocks no other ring, and the next takeover is refused before any queue
/// stops.
#[test]
fn a_request_that_hangs_blocks_no_other_ring() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let (mut daemon, mut frontend) = serve_slow_disk(&folders, &fuse)?;
    fuse.withhold(daemon.pid(), &[opcode::READ]);
    submit_long_read(&mut frontend)?;
    fuse.wait_for(opcode::READ)?;
    let hangs = (|| {
        let mut upgrade = ringhaul()?;
        upgrade.args(["ctl", "--control"]).arg(folders.socket("control")).arg("upgrade");
        let refused = run(upgrade.arg(ringhaul_binary()?))?.expect_code(TRY_AGAIN)?.stderr;
        let vm = folders.socket("vm.sock");
        let message = format!(
            "requests were not finished in time ({}: queue 0: 1 request is not answered, of 1 MiB; \
             its disk has not answered yet); try again when the disk answers",
            vm.display()
        );
        ensure!(refused.contains(&message), "{refused}");
        let id = frontend.request(1, blk::GET_ID, 0, &[], 20)?;
        ensure!(id.status == blk::OK, "{id:?}");
        // The ring of the hung read is served too, and messages are answered.
        let (header, status) = frontend.put_header(0, 8, blk::GET_ID, 0)?;
        let data = Desc::writable(DATA + 0x1000, 20);
        let get_id = [Desc::readable(header, 16), data, Desc::writable(status, 1)];
        frontend.rings[0].put_chain(8, &get_id);
        frontend.rings[0].submit(8)?;
        let used = frontend.rings[0].wait_used()?;
        ensure!(used.head == 8, "{used:?}");
        frontend.config(0, 8)?;
        daemon.wait_for("a read has not been answered for")?;
        let refused = run(&mut taking_over(&folders)?)?.expect_code(2)?.stderr;
        ensure!(refused.contains("its queues cannot stop"), "{refused}");
        Ok(())
    })();
    // Released even after a failure: the kernel keeps a process with hung reads.
    fuse.release();
    hangs?;
    ensure!(frontend.rings[0].wait_used()?.bytes == LONG_BYTES + 1, "the read has failed");
    frontend.read(0, 6, SECTOR_BYTES)?;
    Ok(())
}

/// The disk has answered until the new process asks for the pause. After the refusal nothing waits
/// for a takeover.
#[test]
fn a_disk_that_hangs_during_a_takeover_blocks_no_later_command() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let (mut daemon, mut frontend) = serve_slow_disk(&folders, &fuse)?;
    let mut successor = Client::new(&folders)?;
    let described = successor.begin()?;
    fuse.withhold(daemon.pid(), &[opcode::READ]);
    submit_long_read(&mut frontend)?;
    fuse.wait_for(opcode::READ)?;
    let hangs = (|| {
        ensure!(described["error"].is_null(), "{described}");
        daemon.wait_for("a read has not been answered for")?;
        let refused = successor.call("takeover.pause", &json!({}))?.to_string();
        ensure!(refused.contains("its queues cannot stop"), "{refused}");
        let endpoint = json!({ "path": folders.socket("other.sock") });
        let device = json!({ "blk": { "null": { "size-bytes": 1 << 20 } } });
        let add = json!({ "endpoint": endpoint, "device": device });
        let added = Client::new(&folders)?.call("export.add", &add)?;
        ensure!(added["error"].is_null(), "{added}");
        Ok(())
    })();
    // Released even after a failure: the kernel keeps a process with hung reads.
    fuse.release();
    hangs?;
    ensure!(frontend.rings[0].wait_used()?.bytes == LONG_BYTES + 1, "the read has failed");
    Ok(())
}

/// A unit that is not yet added is not handed over.
#[test]
fn a_unit_that_hangs_while_it_is_added_blocks_no_takeover() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let vm = folders.socket("vm.sock");
    let mut command = ringhaul()?;
    command.arg("serve").arg("--socket-path").arg(&vm).args(["--device", "scsi"]);
    command.args(["--lun", "0,null=1M", "--control"]).arg(folders.socket("control"));
    let daemon = Running::serve(&mut command)?;
    let mut client = Client::new(&folders)?;
    fuse.withhold(daemon.pid(), &[opcode::OPEN]);
    let settings = json!({ "read-only": true, "no-lock": true });
    let unit = json!({ "lun": 1, "disk": { "file": fuse.file() }, "settings": settings });
    client.send("lun.add", &json!({ "export": vm, "unit": unit }))?;
    fuse.wait_for(opcode::OPEN)?;
    let taken = Running::start(&mut taking_over(&folders)?).and_then(|mut next| {
        next.wait_for(TAKEN)?;
        Ok(next)
    });
    // Released even after a failure: the kernel keeps a process with hung calls.
    fuse.release();
    let _next = taken?;
    daemon.finish()?.expect_code(0)?;
    // The unit can be added to the new process.
    let added = Client::new(&folders)?.call("lun.add", &json!({ "export": vm, "unit": unit }))?;
    ensure!(added["error"].is_null(), "{added}");
    run(&mut bench(&vm, "--device scsi --lun 1 --rw read --number_ios 16")?)?.expect_code(0)?;
    Ok(())
}

/// A unit that is being closed is already removed.
#[test]
fn a_unit_that_hangs_while_it_is_removed_blocks_no_takeover() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let vm = folders.socket("vm.sock");
    let mut command = ringhaul()?;
    command.arg("serve").arg("--socket-path").arg(&vm).args(["--device", "scsi"]);
    command.args(["--read-only", "--lock", "off", "--engine", "threads", "--lun", "0,null=1M"]);
    command.arg("--lun").arg(format!("1,blk-file={}", fuse.file().display()));
    let daemon = Running::serve(command.arg("--control").arg(folders.socket("control")))?;
    let mut client = Client::new(&folders)?;
    fuse.withhold(daemon.pid(), &[opcode::FLUSH]);
    client.send("lun.remove", &json!({ "export": vm, "lun": 1 }))?;
    let hangs = fuse.wait_for(opcode::FLUSH);
    let mut next = None;
    // A close counts as hung only after a while.
    let taken = hangs.and_then(|()| {
        retry(LIMIT, || {
            let process = next.insert(Running::start(&mut taking_over(&folders)?)?);
            process.wait_for(TAKEN).map(drop)
        })
    });
    // Released even after a failure: the kernel keeps a process with hung calls.
    fuse.release();
    taken?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// Rings without memory, which the front-end has removed, wait for it, across failed and successful
/// takeovers.
#[test]
fn rings_without_memory_wait_for_it() -> Result<()> {
    let folders = test_folders()?;
    let mut daemon = Running::serve(&mut begin(&folders)?)?;
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    check(&mut frontend, 1)?;
    let region = frontend.memory.regions[0].clone();
    for seed in 2..4 {
        frontend.send_checked(Message::remove_region(&region))?;
        let mut client = Client::new(&folders)?;
        client.begin()?;
        let paused = client.call("takeover.pause", &json!({}))?;
        ensure!(paused["error"].is_null(), "{paused}");
        drop(client);
        daemon.wait_for("does not take over")?;
        let mut next = Running::start(&mut taking_over(&folders)?)?;
        next.wait_for(TAKEN)?;
        daemon.finish()?.expect_code(0)?;
        daemon = next;
        frontend.send_checked(Message::add_region(&region))?;
        check(&mut frontend, seed)?;
    }
    Ok(())
}

/// The numbers of the open descriptors of a process.
fn open_fds(process: Pid) -> Result<BTreeSet<u64>> {
    let folder = format!("/proc/{}/fd", process.as_raw_nonzero());
    let entries = std::fs::read_dir(&folder).with_context(|| format!("looking at {folder}"))?;
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().parse()?)).collect()
}

/// A failed hand-over closes its descriptors, and the queues restart.
#[test]
fn a_daemon_without_free_descriptors_keeps_serving() -> Result<()> {
    let folders = test_folders()?;
    let daemon = Running::serve(&mut begin(&folders)?)?;
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    check(&mut frontend, 1)?;
    let process = daemon.pid();
    for seed in 2..5 {
        let before = open_fds(process)?.len();
        let mut client = Client::new(&folders)?;
        client.call("ping", &json!({}))?;
        // The limit applies to numbers, and the open numbers may have gaps.
        let open = open_fds(process)?;
        let limit = (0..).find(|number| !open.contains(number));
        let described = client.begin()?;
        ensure!(described["error"].is_null(), "{described}");
        let maximum = getrlimit(Resource::Nofile).maximum;
        let few = Rlimit { current: limit, maximum };
        let many = prlimit(Some(process), Resource::Nofile, few)?;
        let refused = client.call("takeover.pause", &json!({}))?;
        prlimit(Some(process), Resource::Nofile, many)?;
        let message = refused["error"]["message"].as_str().context("it was not refused")?;
        ensure!(message.contains("cannot hand over sessions: Too many open files"), "{message}");
        check(&mut frontend, seed)?;
        drop(client);
        // Once closed, it would leave a number for the next hand-over.
        retry(LIMIT, || {
            let open = open_fds(process)?.len();
            ensure!(open <= before, "{open} descriptors, and {before} before");
            Ok(())
        })?;
    }
    let mut next = Running::start(&mut taking_over(&folders)?)?;
    next.wait_for(TAKEN)?;
    daemon.finish()?.expect_code(0)?;
    check(&mut frontend, 5)
}
