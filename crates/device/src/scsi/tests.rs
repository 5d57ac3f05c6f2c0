//! Commands from the driver's side of a queue.

use std::sync::Arc;

use blockio::{DiskOptions, DiskSource};
use tempfile::NamedTempFile;
use virtqueue::driver::{Desc, Used};

use super::config::ScsiOptions;
use super::unit::{Identifiers, UnitOptions};
use super::{ScsiDevice, UnitError};
use crate::access::DiskAccess;
use crate::device::Device;
use crate::queue::QueueHandle;
use crate::testing::{DATA, Scene, split_features};
use crate::unit_address::UnitAddress;

mod bad_blocks;
mod blk_guests;
mod blocks;
mod config;
mod conflicts;
mod durable;
mod events;
mod faults;
mod fields;
mod functions;
mod hand_over;
mod hand_over_state;
mod held;
mod limits;
mod medium;
mod moved_state;
mod no_kicks;
mod pages;
mod recovered;
mod reports;
mod sharing;

const BLOCKS: u64 = 2048;
const BLOCK: usize = 512;
const UNIT: UnitAddress = UnitAddress { target: 0, lun: 1 };
const REQUEST_BYTES: usize = 51;
const RESPONSE_BYTES: u32 = 108;
/// The address of the response, followed by data.
const RESPONSE: u64 = DATA + 0x2_0000;

struct Initiator {
    scene: Scene,
    device: Device,
    disk: Arc<NamedTempFile>,
    queue: Option<QueueHandle>,
    /// A command was answered, and its answer was not read.
    used: Option<Used>,
}

/// The outcome of a command.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    response: u8,
    status: u8,
    /// Key, additional code and qualifier.
    sense: [u8; 3],
    specific: [u8; 3],
    residual: u32,
    data: Vec<u8>,
}

fn options() -> UnitOptions {
    UnitOptions {
        vendor: "Vendor".into(),
        product: "Product".into(),
        revision: "1.0".into(),
        serial: "serial".into(),
        ..UnitOptions::new([0x30, 1, 2, 3, 4, 5, 6, 7], [0x30, 0, 0, 0, 0, 0, 0, 1])
    }
}

impl Initiator {
    fn new() -> Self {
        Self::with(&DiskOptions::default())
    }

    fn with(disk_options: &DiskOptions) -> Self {
        let disk = NamedTempFile::new().unwrap();
        disk.as_file().set_len(BLOCKS * BLOCK as u64).unwrap();
        Self::on(Arc::new(disk), disk_options, options())
    }

    /// Creates another initiator of the same disk.
    fn beside(&self, options: &UnitOptions) -> Self {
        let disk_options = DiskOptions { no_lock: true, ..DiskOptions::default() };
        let mut port = options.port;
        port[7] += 1;
        let options = UnitOptions { port, ..options.clone() };
        Self::on(Arc::clone(&self.disk), &disk_options, options)
    }

    fn on(disk: Arc<NamedTempFile>, disk_options: &DiskOptions, options: UnitOptions) -> Self {
        let scene = Scene::new();
        let device = Device::scsi(ScsiOptions::default(), scene.events.clone());
        let source = DiskSource::file(disk.path(), disk_options).unwrap();
        Self::scsi(&device).add_unit(UNIT, source, options).unwrap();
        device.set_features(split_features(&device)).unwrap();
        let queue = scene.start_queue_of(&device, 2);
        let mut initiator = Self { scene, device, disk, queue: Some(queue), used: None };
        let heard = initiator.run(&[0; 6], &[], 0);
        assert_eq!(heard.sense, [6, 0x29, 0], "the first command learns of the power-on");
        initiator
    }

    fn scsi(device: &Device) -> &ScsiDevice {
        match device {
            Device::Scsi(scsi) => scsi,
            Device::Blk(_) => unreachable!(),
        }
    }

    fn take_queue(&mut self) -> QueueHandle {
        self.queue.take().expect("it runs")
    }

    /// Sends a command to the unit, with data for it and room for data from it.
    fn run(&mut self, cdb: &[u8], out: &[u8], room: u32) -> Answer {
        self.run_at(UNIT.bytes(), cdb, out, room)
    }

    fn run_at(&mut self, lun: [u8; 8], cdb: &[u8], out: &[u8], room: u32) -> Answer {
        self.begin(lun, cdb, out, room);
        self.end()
    }

    /// Makes a command available.
    fn begin(&mut self, lun: [u8; 8], cdb: &[u8], out: &[u8], room: u32) {
        let chain = self.put(lun, cdb, out, room);
        self.scene.offer(&chain);
    }

    /// Writes a command, and returns its chain.
    fn put(&mut self, lun: [u8; 8], cdb: &[u8], out: &[u8], room: u32) -> Vec<Desc> {
        self.put_at(DATA, lun, cdb, out, room)
    }

    /// Like [`put`](Self::put), at a place of memory.
    fn put_at(&mut self, place: u64, lun: [u8; 8], cdb: &[u8], out: &[u8], room: u32) -> Vec<Desc> {
        let mut request = vec![0; REQUEST_BYTES];
        request[..8].copy_from_slice(&lun);
        request[19..19 + cdb.len()].copy_from_slice(cdb);
        request.extend(out);
        let memory = &self.scene.memory;
        memory.write(place, &request).unwrap();
        memory.write(RESPONSE, &vec![0xee; (RESPONSE_BYTES + room) as usize]).unwrap();
        let mut chain = vec![Desc::readable(place, u32::try_from(request.len()).unwrap())];
        // The response is cut in two.
        chain.push(Desc::writable(RESPONSE, 11));
        chain.push(Desc::writable(RESPONSE + 11, RESPONSE_BYTES - 11 + room));
        chain
    }

    /// True if the command is answered, as far as found without a turn.
    fn has_answer(&mut self) -> bool {
        self.used = self.used.take().or_else(|| self.scene.driver.take_used());
        self.used.is_some()
    }

    /// Waits for the answer to the command.
    fn end(&mut self) -> Answer {
        let used = self.used.take().unwrap_or_else(|| self.scene.answer());
        let mut seen = vec![0; used.bytes as usize];
        self.scene.memory.read(RESPONSE, &mut seen).unwrap();
        let sense = &seen[12..];
        Answer {
            response: seen[11],
            status: seen[10],
            sense: [sense[2] & 0xf, sense[12], sense[13]],
            specific: [sense[15], sense[16], sense[17]],
            residual: u32::from_le_bytes([seen[4], seen[5], seen[6], seen[7]]),
            data: seen[RESPONSE_BYTES as usize..].to_vec(),
        }
    }

    /// Like [`run`](Self::run), for a command that must succeed.
    fn good(&mut self, cdb: &[u8], out: &[u8], room: u32) -> Vec<u8> {
        let answer = self.run(cdb, out, room);
        assert_eq!((answer.response, answer.status), (0, 0), "{cdb:x?}: {answer:x?}");
        answer.data
    }

    fn sense(&mut self, cdb: &[u8], out: &[u8], room: u32) -> [u8; 3] {
        let answer = self.run(cdb, out, room);
        assert_eq!((answer.response, answer.status), (0, 2), "{cdb:x?}: {answer:x?}");
        answer.sense
    }

    /// The sense data of the last command.
    fn raw_sense(&self) -> Vec<u8> {
        let mut length = [0; 4];
        self.scene.memory.read(RESPONSE, &mut length).unwrap();
        let mut sense = vec![0; u32::from_le_bytes(length) as usize];
        self.scene.memory.read(RESPONSE + 12, &mut sense).unwrap();
        sense
    }

    fn on_disk(&self, block: usize) -> Vec<u8> {
        std::fs::read(self.disk.path()).unwrap()[block * BLOCK..][..BLOCK].to_vec()
    }
}

fn cdb10(opcode: u8, flags: u8, lba: u32, blocks: u16) -> Vec<u8> {
    let mut cdb = vec![opcode, flags];
    cdb.extend(lba.to_be_bytes());
    cdb.push(0);
    cdb.extend(blocks.to_be_bytes());
    cdb.push(0);
    cdb
}

fn cdb16(opcode: u8, flags: u8, lba: u64, blocks: u32) -> Vec<u8> {
    let mut cdb = vec![opcode, flags];
    cdb.extend(lba.to_be_bytes());
    cdb.extend(blocks.to_be_bytes());
    cdb.extend([0, 0]);
    cdb
}

#[test]
fn blocks_are_written_and_read_by_commands_of_each_length() {
    let mut initiator = Initiator::new();
    let last = u32::try_from(BLOCKS).unwrap() - 1;
    let cdb12 = |opcode, lba: u32| {
        let mut cdb = vec![opcode, 0];
        cdb.extend(lba.to_be_bytes());
        cdb.extend([0, 0, 0, 1, 0, 0]);
        cdb
    };
    let pairs = [
        (vec![0x0a, 0, 0, 7, 1, 0], vec![0x08, 0, 0, 7, 1, 0]),
        (cdb10(0x2a, 0x08, last, 1), cdb10(0x28, 0x10, last, 1)),
        (cdb12(0xaa, 9), cdb12(0xa8, 9)),
        (cdb16(0x8a, 0x18, 11, 1), cdb16(0x88, 0, 11, 1)),
    ];
    for (value, (write, read)) in (1..).zip(pairs) {
        initiator.good(&write, &[value; BLOCK], 0);
        assert_eq!(initiator.good(&read, &[], 512), [value; BLOCK]);
    }
    assert_eq!(initiator.on_disk(7), [1; BLOCK]);
    // No blocks at all.
    initiator.good(&cdb10(0x28, 0, last + 1, 0), &[], 0);
}

#[test]
fn a_read_of_the_medium_flushes_the_cache_first() {
    let mut initiator = Initiator::new();
    let flushes = |initiator: &Initiator| initiator.scene.thread.io().stats().flush.ops.get();
    initiator.good(&cdb10(0x2a, 0, 0, 1), &[7; BLOCK], 0);
    for (cdb, expected) in [
        (cdb10(0x28, 0, 0, 1), 0),
        (cdb10(0x28, 0x10, 0, 1), 0),
        (cdb10(0x28, 0x08, 0, 1), 1),
        (cdb16(0x88, 0x18, 0, 1), 2),
    ] {
        assert_eq!(initiator.good(&cdb, &[], 512), [7; BLOCK]);
        assert_eq!(flushes(&initiator), expected, "{cdb:02x?}");
    }
}

#[test]
fn data_that_does_not_fit_is_told_by_residuals_and_overruns() {
    let mut initiator = Initiator::new();
    let answer = initiator.run(&cdb10(0x28, 0, 0, 1), &[], 1000);
    assert_eq!((answer.status, answer.residual, answer.data.len()), (0, 488, 512));
    let answer = initiator.run(&cdb10(0x28, 0, 0, 2), &[], 1000);
    assert_eq!((answer.response, answer.residual), (1, 1000));
    let answer = initiator.run(&cdb10(0x2a, 0, 0, 1), &[1; 700], 0);
    assert_eq!((answer.status, answer.residual), (0, 188));
    let answer = initiator.run(&cdb10(0x2a, 0, 0, 2), &[1; 700], 0);
    assert_eq!(answer.response, 1);
    assert_eq!(initiator.on_disk(1), [0; BLOCK], "a command that overruns writes nothing");
    // Data in both directions.
    let answer = initiator.run(&cdb10(0x28, 0, 0, 1), &[1; 512], 512);
    assert_eq!(answer.response, 9);
}

#[test]
fn ranges_and_commands_that_are_refused_have_their_sense() {
    let mut initiator = Initiator::new();
    let end = u32::try_from(BLOCKS).unwrap();
    for cdb in [
        cdb10(0x28, 0, end, 1),
        cdb10(0x28, 0, end + 1, 0),
        cdb16(0x88, 0, u64::MAX, 1),
        cdb10(0x2f, 0, end - 1, 2),
        cdb10(0x35, 0, end, 1),
    ] {
        assert_eq!(initiator.sense(&cdb, &[], 1024), [5, 0x21, 0], "{cdb:x?}");
    }
    assert_eq!(initiator.sense(&[0xff], &[], 0), [5, 0x20, 0]);
    let answer = initiator.run(&cdb10(0x28, 0x20, 0, 1), &[], 512);
    assert_eq!((answer.sense, answer.specific), ([5, 0x24, 0], [0xc8 | 7, 0, 1]));
    let read_only = DiskOptions { read_only: true, ..DiskOptions::default() };
    let mut initiator = Initiator::with(&read_only);
    for cdb in [cdb10(0x2a, 0, 0, 1), cdb10(0x41, 0, 0, 1), cdb10(0x42, 0, 0, 24 << 8)] {
        assert_eq!(initiator.sense(&cdb, &[0; 512], 0), [7, 0x27, 0], "{cdb:x?}");
    }
    assert_eq!(initiator.good(&[0x1a, 0, 0x3f, 0, 255, 0], &[], 255)[2] & 0x80, 0x80);
}

#[test]
fn addresses_without_a_unit_are_told_apart() {
    let mut initiator = Initiator::new();
    let inquiry = [0x12, 0, 0, 0, 36, 0];
    let at = |target, lun| UnitAddress { target, lun }.bytes();
    assert_eq!(initiator.run_at(at(1, 0), &inquiry, &[], 36).response, 3);
    assert_eq!(initiator.run_at([0; 8], &inquiry, &[], 36).response, 3);
    let answer = initiator.run_at(at(0, 0), &inquiry, &[], 36);
    assert_eq!((answer.status, answer.data[0]), (0, 0x7f));
    assert_eq!(initiator.run_at(at(0, 0), &[0; 6], &[], 0).sense, [5, 0x25, 0]);
    let luns = [0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0];
    let reserved = [[0x12, 0, 0, 0x80, 36, 4], [0x03, 0, 0x80, 0, 18, 0]];
    for (cdb, specific) in reserved.into_iter().zip([[0xc8 | 2, 0, 5], [0xc0, 0, 2]]) {
        let answer = initiator.run_at(at(0, 0), &cdb, &[], 36);
        assert_eq!((answer.sense, answer.specific), ([5, 0x24, 0], specific), "{cdb:x?}");
    }
    let expected = [0, 0, 0, 8, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for lun in [at(0, 0), UNIT.bytes(), [0xc1, 1, 0, 0, 0, 0, 0, 0]] {
        let answer = initiator.run_at(lun, &luns, &[], 32);
        assert_eq!((answer.status, &answer.data[..]), (0, &expected[..]));
    }
}

#[test]
fn the_write_cache_is_switched_by_mode_select() {
    let mut initiator = Initiator::new();
    let sense = [0x1a, 8, 0x08, 0, 255, 0];
    let mut list = initiator.good(&sense, &[], 255);
    assert_eq!(list[6] & 4, 4);
    list[0] = 0;
    list[2] = 0;
    list[6] &= !4;
    let length = u8::try_from(list.len()).unwrap();
    let select = [0x15, 0x10, 0, 0, length, 0];
    initiator.good(&select, &list, 0);
    assert_eq!(initiator.good(&sense, &[], 255)[6] & 4, 0);
    list[7] = 1;
    let answer = initiator.run(&select, &list, 0);
    assert_eq!((answer.sense, answer.specific), ([5, 0x26, 0], [0x88 | 3, 0, 7]));
    assert_eq!(initiator.sense(&[0x1a, 0, 0xc8, 0, 255, 0], &[], 255), [5, 0x39, 0]);
    initiator.device.reset();
    assert_eq!(initiator.sense(&[0; 6], &[], 0), [6, 0x29, 0]);
    assert_eq!(initiator.good(&sense, &[], 255)[6] & 4, 4, "a reset restores it");
}

#[test]
fn a_stopped_unit_refuses_the_medium_until_it_is_started() {
    let mut initiator = Initiator::new();
    initiator.good(&[0x1b, 0, 0, 0, 0, 0], &[], 0);
    assert_eq!(initiator.sense(&cdb10(0x28, 0, 0, 1), &[], 512), [2, 4, 2]);
    assert_eq!(initiator.sense(&[0; 6], &[], 0), [2, 4, 2]);
    initiator.good(&[0x12, 0, 0, 0, 36, 0], &[], 36);
    initiator.good(&[0x1b, 0, 0, 0, 1, 0], &[], 0);
    initiator.good(&cdb10(0x28, 0, 0, 1), &[], 512);
}

/// Other guests may use the disk, and Linux does not start it by itself.
#[test]
fn a_stop_that_is_not_obeyed_and_an_eject_take_no_disk_away() {
    let stop = [0x1b, 0, 0, 0, 0, 0];
    let eject_and_load = [[0x1b, 0, 0, 0, 2, 0], [0x1b, 0, 0, 0, 3, 0]];
    for obeys_stop in [false, true] {
        let disk = NamedTempFile::new().unwrap();
        disk.as_file().set_len(BLOCKS * BLOCK as u64).unwrap();
        let options = UnitOptions { obeys_stop, ..options() };
        let mut initiator = Initiator::on(Arc::new(disk), &DiskOptions::default(), options);
        for cdb in eject_and_load {
            initiator.good(&cdb, &[], 0);
            initiator.good(&cdb10(0x28, 0, 0, 1), &[], 512);
        }
        let flushes = |initiator: &Initiator| initiator.device.queue_stats(2).unwrap().totals();
        let before = format!("{:?}", flushes(&initiator));
        initiator.good(&stop, &[], 0);
        assert_ne!(format!("{:?}", flushes(&initiator)), before, "it is counted");
        if obeys_stop {
            // A load does not start a unit that was stopped.
            initiator.good(&eject_and_load[1], &[], 0);
            assert_eq!(initiator.sense(&cdb10(0x28, 0, 0, 1), &[], 512), [2, 4, 2]);
        } else {
            initiator.good(&cdb10(0x28, 0, 0, 1), &[], 512);
            initiator.good(&[0; 6], &[], 0);
        }
    }
}

/// Guests name disks by identifiers. Each list ends with the relative target port.
#[test]
fn identifiers_are_the_chosen_ones() {
    let naa = [&[1, 3, 0, 8][..], &options().naa].concat();
    let t10 = [&[2, 1, 0, 14][..], b"Vendor  serial"].concat();
    let vendor_specific = [&[2, 0, 0, 6][..], b"serial"].concat();
    for (identifiers, expected) in [
        (Identifiers::Standard, [naa.clone(), t10].concat()),
        (Identifiers::VendorSpecific, vendor_specific.clone()),
        (Identifiers::VendorSpecificAndNaa, [naa, vendor_specific].concat()),
    ] {
        let disk = NamedTempFile::new().unwrap();
        disk.as_file().set_len(BLOCKS * BLOCK as u64).unwrap();
        let options = UnitOptions { identifiers, ..options() };
        let mut initiator = Initiator::on(Arc::new(disk), &DiskOptions::default(), options);
        let page = initiator.good(&[0x12, 1, 0x83, 0, 255, 0], &[], 255);
        let length = u16::from_be_bytes([page[2], page[3]]);
        assert_eq!((page[1], usize::from(length)), (0x83, page.len() - 4));
        let port = [0x01, 0x14, 0, 4, 0, 0, 0, 1];
        assert_eq!(page[4..], [&expected[..], &port].concat(), "{identifiers:?}");
    }
}

#[test]
fn units_that_come_and_go_are_told_by_the_others() {
    let mut initiator = Initiator::new();
    let added = UnitAddress { target: 0, lun: 9 };
    let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
    let device = initiator.device.clone();
    let scsi = Initiator::scsi(&device);
    let taken = scsi.add_unit(added, source.clone(), options()).unwrap_err();
    assert!(matches!(taken, UnitError::SameName(UNIT)), "{taken}");
    let other = UnitOptions { naa: [0x30, 0, 0, 0, 0, 0, 0, 9], ..options() };
    scsi.add_unit(added, source.clone(), other.clone()).unwrap();
    assert!(scsi.add_unit(added, source, other).is_err());
    assert_eq!(initiator.sense(&[0; 6], &[], 0), [6, 0x3f, 0x0e]);
    assert_eq!(initiator.run_at(added.bytes(), &[0; 6], &[], 0).sense, [6, 0x29, 0]);
    assert_eq!(initiator.run_at(added.bytes(), &[0; 6], &[], 0).status, 0);
    assert!(scsi.remove_unit(added).is_some() && scsi.remove_unit(added).is_none());
    assert_eq!(initiator.sense(&[0; 6], &[], 0), [6, 0x3f, 0x0e]);
    assert_eq!(initiator.run_at(added.bytes(), &[0; 6], &[], 0).sense, [5, 0x25, 0]);
    // A report of the LUNs of one target does not inform about other targets.
    let elsewhere = UnitAddress { target: 3, lun: 9 };
    let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
    let other = UnitOptions { naa: [0x30, 0, 0, 0, 0, 0, 0, 9], ..options() };
    scsi.add_unit(elsewhere, source, other).unwrap();
    initiator.good(&[0; 6], &[], 0);
    assert!(scsi.remove_unit(elsewhere).is_some());
    initiator.good(&[0; 6], &[], 0);
}

#[test]
fn a_request_without_room_for_a_response_stops_its_queue() {
    let mut initiator = Initiator::new();
    initiator.scene.offer(&[Desc::readable(DATA, 51), Desc::writable(RESPONSE, 107)]);
    assert_eq!(initiator.scene.answer().bytes, 0);
    assert!(initiator.scene.events.take()[0].contains("its queue stops"));
}

fn reserve_out(action: u8, kind: u8, keys: [u64; 2]) -> (Vec<u8>, Vec<u8>) {
    let cdb = vec![0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0];
    let mut list = keys.map(u64::to_be_bytes).concat();
    list.extend([0; 8]);
    (cdb, list)
}

/// Two exports of one disk, as in a cluster with failover.
#[test]
fn a_reservation_keeps_the_others_out_until_it_is_released() {
    const REGISTER: u8 = 0;
    const RESERVE: u8 = 1;
    const RELEASE: u8 = 2;
    const WRITE_EXCLUSIVE: u8 = 1;
    let options = options();
    let disk_options = DiskOptions { no_lock: true, ..DiskOptions::default() };
    let disk = NamedTempFile::new().unwrap();
    disk.as_file().set_len(BLOCKS * BLOCK as u64).unwrap();
    let mut one = Initiator::on(Arc::new(disk), &disk_options, options.clone());
    let mut other = one.beside(&options);
    let send = |to: &mut Initiator, action, kind, keys| {
        let (cdb, list) = reserve_out(action, kind, keys);
        to.run(&cdb, &list, 0).status
    };
    assert_eq!(send(&mut one, RESERVE, WRITE_EXCLUSIVE, [1, 0]), 0x18, "it is not registered");
    assert_eq!(send(&mut one, REGISTER, 0, [0, 1]), 0);
    assert_eq!(send(&mut one, RESERVE, WRITE_EXCLUSIVE, [1, 0]), 0);
    let (write, read) = (cdb10(0x2a, 0, 0, 1), cdb10(0x28, 0, 0, 1));
    assert_eq!(other.run(&write, &[1; 512], 0).status, 0x18);
    other.good(&read, &[], 512);
    one.good(&write, &[2; 512], 0);
    assert_eq!(one.on_disk(0), [2; BLOCK]);
    let keys = other.good(&[0x5e, 0, 0, 0, 0, 0, 0, 0, 255, 0], &[], 255);
    assert_eq!(keys[4..], [0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 1]);
    assert_eq!(send(&mut one, RELEASE, WRITE_EXCLUSIVE, [1, 0]), 0);
    other.good(&write, &[1; 512], 0);
    let answer = one.run(&reserve_out(REGISTER, 0, [1, 0]).0, &[0; 23], 0);
    assert_eq!(answer.response, 1, "the list is shorter than the CDB says");
}
