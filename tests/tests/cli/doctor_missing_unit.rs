//! The finding about a logical unit that does not come back after its daemon was killed.

use std::sync::Arc;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{LIMIT, TestFolders};
use ringhaul_kit::frontend::memory::memfd;
use ringhaul_kit::frontend::message::{Channel, Message};
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, SCRATCH, Setup, protocol_feature};
use ringhaul_tools::process::retry;
use rustix::fd::OwnedFd;
use rustix::process::Signal;
use serde_json::json;

use super::doctor::findings;
use super::throttling::{ctl, serve};
use crate::test_folders;

/// The control queue, the event queue, and one for requests.
const QUEUES: u16 = 3;
const REQUESTS: usize = 2;
const QUEUE_SIZE: u16 = 64;
const REGION_BYTES: u64 = 1088 * QUEUES as u64;

/// The command READ(10) of one sector.
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
/// Bytes of the parts of a request that the driver and the device write.
const REQUEST_BYTES: usize = 51;
const RESPONSE_BYTES: u32 = 108;

fn setup() -> Setup {
    let usual = Setup { queues: QUEUES, queue_size: QUEUE_SIZE, ..Setup::default() };
    let region = protocol_feature::INFLIGHT_SHMFD;
    Setup { protocol_features: usual.protocol_features.map(|all| all | region), ..usual }
}

/// Starts all queues of a front-end, after the used elements that they have.
fn start(frontend: &mut Frontend, region: &Arc<OwnedFd>) -> Result<()> {
    frontend.negotiate()?;
    frontend.share_memory()?;
    let message = Message::inflight_region(region, REGION_BYTES, QUEUES, QUEUE_SIZE);
    frontend.send_checked(message)?;
    for queue in 0..QUEUES.into() {
        let base = frontend.rings[queue].used_idx();
        frontend.start_queue(queue, base)?;
        frontend.enable_queue(queue, true)?;
    }
    Ok(())
}

/// Makes a read of unit 1 available.
fn begin_read(frontend: &mut Frontend, slot: u16) -> Result<()> {
    let mut request = [0; REQUEST_BYTES];
    request[..4].copy_from_slice(&[1, 0, 0x40, 1]);
    request[19..19 + READ.len()].copy_from_slice(&READ);
    let place = SCRATCH + 0x200 * u64::from(slot);
    frontend.memory.write(place, &request)?;
    let chain = [
        Desc::readable(place, request.len().try_into()?),
        Desc::writable(place + 0x100, RESPONSE_BYTES),
        Desc::writable(DATA, 512),
    ];
    let ring = &mut frontend.rings[REQUESTS];
    ring.put_chain(4 * slot, &chain);
    ring.submit(4 * slot)
}

#[test]
fn requests_for_a_unit_that_does_not_come_back_are_a_finding() -> Result<()> {
    let folders: TestFolders = test_folders()?;
    let socket = folders.socket("vm.sock");
    let path = socket.display().to_string();
    let words = ["--name", "vm", "--socket-path", &path, "--device", "scsi", "--lun", "0,null=1M"];
    // One read begins at once, and the next one after minutes.
    let unit = ["--lun", "1,bps-total=1,null=1M"];
    let (mut daemon, mut client) = serve(&folders, &[&words[..], &unit].concat())?;
    let region = Arc::new(memfd(REGION_BYTES)?);
    let mut frontend = Frontend::connect(&socket, &setup())?;
    start(&mut frontend, &region)?;
    // The first one reports that the unit is new.
    (0..3).try_for_each(|slot| begin_read(&mut frontend, slot))?;
    frontend.rings[REQUESTS].poll_used(2)?;
    retry(LIMIT, || {
        let stats = client.call("stats", &json!({}))?;
        ensure!(stats["result"]["exports"][0]["depth"] == 1, "{stats}");
        Ok(())
    })?;
    daemon.signal(Signal::KILL)?;
    daemon.finish()?;

    let (_daemon, _client) = serve(&folders, &words)?;
    frontend.channel = Channel::connect(&socket)?;
    start(&mut frontend, &region)?;
    retry(LIMIT, || {
        let found = findings(&folders, Some("vm"))?;
        let unit = found.iter().find(|finding| finding["finding"] == "missing-unit");
        let figure = unit.and_then(|finding| finding["figure"].as_str()).unwrap_or_default();
        let is_it = figure.starts_with("1 requests of a killed process wait") && unit.is_some();
        ensure!(is_it && unit.is_some_and(|unit| unit["level"] == "harmful"), "{found:#?}");
        Ok(())
    })?;
    // Its remedy.
    ctl(&folders, &["add-lun", "vm", "1,null=1M"])?;
    frontend.rings[REQUESTS].poll_used(3)?;
    let found = findings(&folders, Some("vm"))?;
    ensure!(found.iter().all(|finding| finding["finding"] != "missing-unit"), "{found:#?}");
    Ok(())
}
