//! Takeovers and the end of the daemon while a guest has many long requests: neither waits until
//! all data is moved.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{LIMIT, Running, TestFolders};
use ringhaul_kit::control::taking_over;
use ringhaul_kit::frontend::memory::memfd;
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{BORDER, Frontend, MEMORY_END, SCRATCH, Setup, blk};
use ringhaul_tools::process::retry;
use rustix::process::Signal;

use super::control::Client;
use super::held_writes;
use super::throttling::{serve, shown};
use crate::takeover::TAKEN;
use crate::test_folders;

const MIB: u64 = 1 << 20;
const QUEUE_SIZE: u16 = 256;

/// Queues of a virtio-scsi device; the first two take no commands.
const QUEUES: u16 = 6;
const COMMAND_QUEUES: std::ops::Range<usize> = 2..6;
const HEADER: u64 = SCRATCH;
const HEADER_BYTES: u32 = 51;
const RESPONSE: u64 = SCRATCH + 0x1000;
const RESPONSE_BYTES: u32 = 108;
const BUSY: u8 = 8;
/// A status that no device writes.
const NO_STATUS: u8 = 0xee;

fn daemon(
    folders: &TestFolders,
    socket: &Path,
    kind: &str,
    disk: &Path,
) -> Result<(Running, Client)> {
    let (socket, disk) = (socket.display(), disk.display());
    let export = format!("name=vm,socket-path={socket},{kind},blk-file={disk}");
    serve(folders, &["--export", &export])
}

/// Waits until the daemon has taken at least this number of requests.
fn wait_taken(folders: &TestFolders, least: u64) -> Result<()> {
    let mut client = Client::new(&folders.socket("control"))?;
    retry(LIMIT, || {
        let unfinished = shown(&mut client, "vm")?["unfinished"].as_u64();
        ensure!(unfinished >= Some(least), "{unfinished:?} are taken");
        Ok(())
    })
}

/// Starts a process that must take over at the first try, and waits for the end of the old one.
fn upgrade(folders: &TestFolders, daemon: Running) -> Result<Running> {
    let mut next = Running::start(&mut taking_over(folders)?)?;
    next.wait_for(TAKEN)?;
    daemon.finish()?.expect_code(0)?;
    Ok(next)
}

fn put_command(frontend: &Frontend, cdb: &[u8]) -> Result<[Desc; 2]> {
    let mut header = vec![0; HEADER_BYTES as usize];
    header[0] = 1;
    header[19..19 + cdb.len()].copy_from_slice(cdb);
    frontend.memory.write(HEADER, &header)?;
    frontend.memory.write(RESPONSE, &[0xee; RESPONSE_BYTES as usize])?;
    Ok([Desc::readable(HEADER, HEADER_BYTES), Desc::writable(RESPONSE, RESPONSE_BYTES)])
}

/// Attaches a front-end to a unit and clears its unit attentions.
fn attach_unit(socket: &Path) -> Result<Frontend> {
    let setup = Setup { queues: QUEUES, queue_size: QUEUE_SIZE, ..Setup::default() };
    let mut frontend = Frontend::attach(socket, &setup)?;
    test_unit(&mut frontend)?;
    Ok(frontend)
}

fn test_unit(frontend: &mut Frontend) -> Result<()> {
    loop {
        let chain = put_command(frontend, &[0; 6])?;
        frontend.execute(COMMAND_QUEUES.start, &chain)?;
        let response = frontend.memory.read(RESPONSE, 15)?;
        match (response[10], response[14]) {
            (0, _) => return Ok(()),
            (2, 6) => {}
            other => anyhow::bail!("TEST UNIT READY ended with {other:?}"),
        }
    }
}

/// Sends 336 VERIFYs of 256 MiB each, over four queues.
fn verify(frontend: &mut Frontend) -> Result<()> {
    let mut cdb = [0; 16];
    cdb[0] = 0x8f;
    cdb[10..14].copy_from_slice(&u32::try_from(256 * MIB / 512)?.to_be_bytes());
    let chain = put_command(frontend, &cdb)?;
    for queue in COMMAND_QUEUES {
        let ring = &mut frontend.rings[queue];
        for command in 0..84 {
            ring.put_chain(2 * command, &chain);
            ring.offer(2 * command);
        }
        ring.kick()?;
    }
    Ok(())
}

#[test]
fn hundreds_of_verifies_delay_neither_an_upgrade_nor_the_end() -> Result<()> {
    let folders = test_folders()?;
    let disk = folders.disk("disk.img", 1024 * MIB)?;
    let socket = folders.socket("vm");
    let (daemon, client) = daemon(&folders, &socket, "device=scsi,lun=0", &disk)?;
    drop(client);
    let mut frontend = attach_unit(&socket)?;
    verify(&mut frontend)?;
    wait_taken(&folders, 336)?;
    let mut next = upgrade(&folders, daemon)?;
    for queue in COMMAND_QUEUES {
        let ring = &mut frontend.rings[queue];
        ring.poll_used(84)?;
        while ring.take_used().is_some() {}
    }
    let status = frontend.memory.read(RESPONSE + 10, 1)?;
    ensure!(status == [BUSY], "a driver would not send it again: {status:?}");
    test_unit(&mut frontend)?;
    verify(&mut frontend)?;
    wait_taken(&folders, 336)?;
    next.signal(Signal::TERM)?;
    next.finish()?.expect_code(0)?;
    Ok(())
}

/// Sends 30 reads of 2016 MiB each into the same memory. Returns the address of their status.
fn read(frontend: &mut Frontend) -> Result<u64> {
    let (header, status) = frontend.put_header(0, 0, blk::IN, 0)?;
    frontend.memory.write(status, &[NO_STATUS])?;
    let piece = Desc::writable(BORDER, u32::try_from(MEMORY_END - BORDER)?);
    let pieces = 2016 * MIB / u64::from(piece.len);
    let mut chain = vec![Desc::readable(header, 16)];
    chain.extend(std::iter::repeat_n(piece, usize::try_from(pieces)?));
    chain.push(Desc::writable(status, 1));
    let ring = &mut frontend.rings[0];
    for head in 0..30 {
        ring.put_indirect(head, SCRATCH, &chain);
        ring.offer(head);
    }
    ring.kick()?;
    Ok(status)
}

#[test]
fn reads_of_gigabytes_delay_neither_an_upgrade_nor_the_end() -> Result<()> {
    let folders = test_folders()?;
    let disk = folders.disk("disk.img", 4096 * MIB)?;
    let socket = folders.socket("vm");
    let (daemon, client) = daemon(&folders, &socket, "cache=writeback", &disk)?;
    drop(client);
    let mut frontend = held_writes::attach(&socket, &Arc::new(memfd(held_writes::REGION_BYTES)?))?;
    let status = read(&mut frontend)?;
    wait_taken(&folders, 1)?;
    let mut next = upgrade(&folders, daemon)?;
    // The new process restarts the requests from the inflight region.
    wait_taken(&folders, 1)?;
    next.signal(Signal::TERM)?;
    next.finish()?.expect_code(0)?;
    let status = frontend.memory.read(status, 1)?[0];
    ensure!(status != blk::IOERR, "what is left in the region has failed");
    Ok(())
}

/// Without a region the next process cannot know of the request, so the guest gets an error.
#[test]
fn the_end_abandons_a_read_of_gigabytes_without_a_region() -> Result<()> {
    let folders = test_folders()?;
    let disk = folders.disk("disk.img", 4096 * MIB)?;
    let socket = folders.socket("vm");
    let (mut daemon, client) = daemon(&folders, &socket, "cache=writeback", &disk)?;
    drop(client);
    let mut frontend = Frontend::attach(&socket, &Setup::default())?;
    let status = read(&mut frontend)?;
    wait_taken(&folders, 1)?;
    daemon.signal(Signal::TERM)?;
    let log = daemon.finish()?.expect_code(0)?.stderr;
    ensure!(log.contains("the rest of the request is too large to wait for"), "{log}");
    // All requests share one status byte.
    let status = frontend.memory.read(status, 1)?[0];
    ensure!(status == blk::IOERR, "the status is {status}");
    let answered = frontend.rings[0].used_idx();
    ensure!((1..30).contains(&answered), "{answered} requests are answered");
    Ok(())
}
