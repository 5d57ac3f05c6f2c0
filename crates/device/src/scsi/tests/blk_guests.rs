//! Guests with a virtio-blk device on the disk of initiators.

use std::task::{Context, Poll, Waker};

use blockio::disk::Limits;

use super::sharing::{hold, three, turn_until};
use super::*;
use crate::access::task_set::TaskId;
use crate::blk::config::BlkOptions;
use crate::stats::{ErrorCause, RequestKind};

/// A guest with a virtio-blk device on the disk of initiators.
pub(super) struct BlkGuest {
    pub(super) scene: Scene,
    source: DiskSource,
    device: Device,
    queue: Option<QueueHandle>,
}

const BLK_IN: u32 = 0;
pub(super) const BLK_OUT: u32 = 1;
const BLK_FLUSH: u32 = 4;
/// Bytes in the room for the data of a read.
const OLD: u8 = 0xdd;
const BLK_OK: u8 = 0;
pub(super) const BLK_ERROR: u8 = 1;

impl BlkGuest {
    pub(super) fn beside(initiator: &Initiator) -> Self {
        let disk_options = DiskOptions { no_lock: true, ..DiskOptions::default() };
        let source = DiskSource::file(initiator.disk.path(), &disk_options).unwrap();
        let (scene, access) = (Scene::new(), initiator.access());
        let events = scene.events.clone();
        let device = Device::blk_with_access(source.clone(), BlkOptions::default(), access, events);
        device.set_features(split_features(&device)).unwrap();
        let queue = scene.start_queue_of(&device, 0);
        Self { scene, source, device, queue: Some(queue) }
    }

    /// Failed requests with these causes.
    pub(super) fn errors<const N: usize>(&self, causes: [ErrorCause; N]) -> [u64; N] {
        let totals = self.device.totals();
        causes.map(|cause| RequestKind::ALL.map(|kind| totals[kind].errors_of(cause)).iter().sum())
    }

    pub(super) fn take_queue(&mut self) -> QueueHandle {
        self.queue.take().expect("it runs")
    }

    pub(super) fn limit(&self, limits: &Limits) {
        self.source.set_limits(limits).unwrap();
    }

    pub(super) fn begin(&mut self, request: u32, value: u8) {
        self.begin_at(request, 0, value);
    }

    fn begin_at(&mut self, request: u32, sector: u64, value: u8) {
        let mut header = request.to_le_bytes().to_vec();
        header.resize(8, 0);
        header.extend(sector.to_le_bytes());
        header.extend([value; BLOCK]);
        self.scene.memory.write(DATA, &header).unwrap();
        let before = if request == BLK_IN { OLD } else { 0 };
        self.scene.memory.write(RESPONSE, &[before; BLOCK]).unwrap();
        let data = match request {
            BLK_IN => Desc::writable(RESPONSE, 512),
            BLK_OUT => Desc::readable(DATA + 16, 512),
            _ => Desc::readable(DATA + 16, 0),
        };
        let status = Desc::writable(RESPONSE + 512, 1);
        let (header, length) = (Desc::readable(DATA, 16), data.len);
        let chain = if length > 0 { vec![header, data, status] } else { vec![header, status] };
        self.scene.offer(&chain);
    }

    pub(super) fn end(&mut self) -> u8 {
        self.scene.answer();
        let mut data = [0; BLOCK];
        self.scene.memory.read(RESPONSE, &mut data).unwrap();
        assert_ne!(data, [OLD; BLOCK], "a read is answered with old bytes");
        let mut status = [0xee];
        self.scene.memory.read(RESPONSE + 512, &mut status).unwrap();
        status[0]
    }

    pub(super) fn run(&mut self, request: u32, value: u8) -> u8 {
        self.begin(request, value);
        self.end()
    }

    fn run_at(&mut self, request: u32, sector: u64) -> u8 {
        self.begin_at(request, sector, 0);
        self.end()
    }
}

#[test]
fn guests_of_virtio_blk_heed_reservations() {
    const REGISTER: u8 = 0;
    const RESERVE: u8 = 1;
    const RELEASE: u8 = 2;
    let mut all = three();
    let mut guest = BlkGuest::beside(&all[0]);
    let change = |all: &mut [Initiator], guest: &BlkGuest, action, kind, keys| {
        let (cdb, list) = reserve_out(action, kind, keys);
        all[0].begin(UNIT.bytes(), &cdb, &list, 0);
        turn_until(all, |all| {
            guest.scene.turn(1);
            all[0].has_answer()
        });
        assert_eq!(all[0].end().status, 0);
    };
    let seen = |guest: &mut BlkGuest| [BLK_IN, BLK_OUT, BLK_FLUSH].map(|kind| guest.run(kind, 7));
    change(&mut all, &guest, REGISTER, 0, [0, 1]);
    assert_eq!(seen(&mut guest), [BLK_OK; 3]);
    for (kind, expected) in
        [(1, [BLK_OK, BLK_ERROR, BLK_OK]), (3, [BLK_ERROR, BLK_ERROR, BLK_OK]), (6, [1, 1, 0])]
    {
        change(&mut all, &guest, RESERVE, kind, [1, 0]);
        assert_eq!(seen(&mut guest), expected, "type {kind}");
        // A device that comes later.
        assert_eq!(seen(&mut BlkGuest::beside(&all[0])), expected, "type {kind}");
        change(&mut all, &guest, RELEASE, kind, [1, 0]);
        assert_eq!(seen(&mut guest), [BLK_OK; 3], "type {kind}");
    }
}

#[test]
fn guests_of_virtio_blk_wait_while_an_initiator_has_the_disk_to_itself() {
    let mut all = three();
    let mut guest = BlkGuest::beside(&all[0]);
    let access = all[0].access();
    for value in 1..20 {
        // The request may have begun when the disk is taken: then it ends before.
        guest.begin(BLK_OUT, value);
        let mut exclude = Box::pin(access.take_medium_anyway(TaskId::NONE));
        let mut cx = Context::from_waker(Waker::noop());
        let mut exclusive = None;
        turn_until(&mut all, |_| {
            if let Poll::Ready(held) = exclude.as_mut().poll(&mut cx) {
                exclusive = Some(held);
            }
            guest.scene.turn(1);
            exclusive.is_some()
        });
        let before = all[0].on_disk(0);
        guest.scene.turn(20);
        assert_eq!(all[0].on_disk(0), before, "somebody else has the disk");
        drop((exclude, exclusive));
        assert_eq!(guest.end(), BLK_OK);
        assert_eq!(all[0].on_disk(0), [value; BLOCK]);
        assert_eq!(guest.run(BLK_IN, 0), BLK_OK);
    }
}

/// Each device has opened the disk by itself.
#[test]
fn a_cut_off_end_is_used_by_no_device_on_the_disk() {
    let mut all = three();
    let last = cdb10(0x28, 0, u32::try_from(BLOCKS).unwrap() - 1, 1);
    let held = hold(&mut all);
    let mut guest = BlkGuest::beside(&all[0]);
    for initiator in &mut all[..2] {
        initiator.begin(UNIT.bytes(), &last, &[], 512);
        initiator.scene.turn(10);
    }
    let access = all[0].access();
    let shorter = (BLOCKS - 8) * BLOCK as u64;
    let cut_off = std::thread::spawn(move || access.cut_off(shorter));
    for _ in 0..20 {
        all.iter().for_each(|initiator| initiator.scene.turn(1));
        guest.scene.turn(1);
    }
    assert!(!cut_off.is_finished(), "requests have begun beyond the new end");
    drop(held);
    turn_until(&mut all, |_| {
        guest.scene.turn(1);
        cut_off.is_finished()
    });
    cut_off.join().unwrap();
    assert!(all[..2].iter_mut().all(Initiator::has_answer), "they have not ended");
    let _ = [0, 1].map(|place| all[place].end());
    for initiator in &mut all {
        assert_eq!(initiator.sense(&last, &[], 512), [5, 0x21, 0]);
    }
    assert_eq!(guest.run_at(BLK_IN, BLOCKS - 1), BLK_ERROR);
    // The file was not shortened after all.
    all[0].access().refresh();
    for initiator in &mut all {
        assert_eq!(initiator.sense(&[0; 6], &[], 0), [6, 0x2a, 9]);
        initiator.good(&last, &[], 512);
    }
    assert_eq!(guest.run_at(BLK_IN, BLOCKS - 1), BLK_OK);
}

/// A removed unit is reached until its disk is closed.
#[test]
fn a_shrink_of_a_removed_unit_spares_its_successor() {
    let mut all = [Initiator::new()];
    let access = all[0].access();
    let scsi = Initiator::scsi(&all[0].device);
    let removed = scsi.remove_unit(UNIT).unwrap();
    let source = DiskSource::null(BLOCKS * BLOCK as u64, &DiskOptions::default()).unwrap();
    let naa = [0x30, 0, 0, 0, 0, 0, 0, 9];
    scsi.add_unit(UNIT, source, UnitOptions { naa, access: Arc::default(), ..options() }).unwrap();
    let cut_off = std::thread::spawn(move || access.cut_off(0));
    turn_until(&mut all, |_| cut_off.is_finished());
    cut_off.join().unwrap();
    while all[0].run(&[0; 6], &[], 0).sense[0] == 6 {}
    all[0].good(&cdb10(0x28, 0, 0, 1), &[], 512);
    drop(removed);
}
