//! Lanes: the ops of each disk on an IoThread, and the number of them that the engine may have.
//!
//! All disks of an engine share its room, and a disk that hangs gives nothing back. So each has a
//! lane. An op goes to the engine at once if its lane has room. Otherwise it waits in the lane's
//! backlog until an op of its own disk has completed. The room of a lane is
//!
//! * a number of ops of its own, regardless of other lanes;
//! * beyond that, a part of the common rest: four times as much as stays free, so that a disk alone
//!   gets most of it, and one that comes later still finds some;
//! * for ops that need a kernel worker or a pool thread in any case, [`NON_TRANSFER_MAX`] of them;
//! * below its pacing's limit, and the device's number of requests, beyond which a submit waits;
//! * a number of bytes, and all lanes together a number of bytes in each round of the loop.
//!
//! A lane without ops in the engine always has room for one. So a backlog waits only for
//! completions of its own disk or of disks on the same device, or for the next round. However busy
//! other disks are, an op goes to the engine at the latest when the earlier ops of its lane have
//! completed, with as many flushes and the like in between. Lanes of one device take turns.

mod backlog;
mod bytes;
mod devices;
mod idle;
mod shares;

use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Instant;

use crate::config::{ByteLimits, EngineKind, PacingConfig};
use crate::file::device_queue::RequestLimits;
use crate::file::io_file::{FileRef, IoFile, Retired};
use crate::file::op_kind::OpKind;
use crate::file::open_file::OpenFile;
use crate::file::pacing::Pacing;
use backlog::Backlog;
use bytes::RoundBytes;
use devices::{Devices, NO_DEVICE};
use iomem::fits;
use shares::{ByEngine, Shares};

/// The most ops of a lane in the engine that are neither reads nor writes.
const NON_TRANSFER_MAX: u32 = 16;
/// The most ops in the engine of a lane whose ops block submits: each holds a pool thread.
const BLOCKING_MAX: u32 = 16;
/// The most ops in the engine of a regular file: if it hangs, each write holds a kernel worker.
const FILE_MAX: u32 = 256;

/// The pool threads of an IoThread with `lanes` disks: enough for the ops that lanes admit.
pub(crate) fn pool_threads(lanes: usize) -> usize {
    64 + lanes * (NON_TRANSFER_MAX + BLOCKING_MAX) as usize
}

/// A mark in the units of an op that takes no room of its device: a pool thread waits for the
/// device in place of a submit.
const IN_POOL: u32 = 1 << 31;

struct Lane {
    file: Arc<OpenFile>,
    handle: Weak<IoFile>,
    /// The index among the devices.
    device: u32,
    engine: EngineKind,
    /// The limits that turn an op into several requests of the device; `None`: each op is one unit.
    limits: Option<RequestLimits>,
    /// The most units in the engine, however much is free.
    cap: u32,
    /// The units that the lane may have in the engine regardless of other lanes.
    guaranteed: u32,
    /// An op enters without further checks below this many units in the engine; 0: never.
    fast_path: u32,
    /// The units in the engine.
    units: u32,
    /// The units in the engine minus the ops there: some ops count as several.
    extra_units: u32,
    /// Counted bytes of the ops in the engine (see [`RoundBytes`]).
    bytes: usize,
    /// The ops in the engine that are neither reads nor writes.
    non_transfers: u32,
    /// Ops that have completed since the last [`Lanes::after_harvest`].
    completed: u32,
    /// True if ops went to the engine since then.
    has_submitted: bool,
    is_touched: bool,
    is_waiting: bool,
    backlog: Backlog,
    pacing: Pacing,
    /// The most ops that pacing allows.
    pacing_cap: u32,
}

pub(crate) struct Lanes {
    lanes: Vec<Option<Lane>>,
    devices: Devices,
    bytes: RoundBytes,
    /// The ops that each kernel engine takes; the pool takes one for each of its threads.
    depth: u32,
    pacing: PacingConfig,
    shares: ByEngine<Shares>,
    /// Lanes with a backlog, in the order of their turns.
    waiting: VecDeque<u32>,
    touched: Vec<u32>,
    retired: Rc<Retired>,
    is_closed: bool,
}

/// The decision about an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    /// The engine takes it, and it counts as this many units.
    Now(u32),
    /// The op waits in its lane.
    Later,
    /// The IoThread has ended.
    Never,
}

/// The memory and the units of ops, by slot.
pub(crate) trait OpTable {
    /// The memory of the op in a slot.
    fn ranges(&self, slot: u32) -> &[libc::iovec];
    /// The bytes of that memory.
    fn bytes(&self, slot: u32) -> usize;
    /// Stores the units of the op in a slot.
    fn set(&mut self, slot: u32, units: u32);
}

impl Lanes {
    pub(crate) fn new(depth: u32) -> Self {
        Self {
            lanes: Vec::new(),
            devices: Devices::default(),
            bytes: RoundBytes::new(ByteLimits::default()),
            depth,
            pacing: PacingConfig::default(),
            shares: ByEngine::default(),
            waiting: VecDeque::new(),
            touched: Vec::new(),
            retired: Rc::default(),
            is_closed: false,
        }
    }

    /// Sets the pacing of disks that are attached from now on.
    pub(crate) fn set_pacing(&mut self, pacing: PacingConfig) {
        self.pacing = pacing;
    }

    /// Sets the bounds on bytes of ops.
    pub(crate) fn set_bytes(&mut self, limits: ByteLimits) {
        self.bytes = RoundBytes::new(limits);
    }

    /// Begins a round of the loop. Returns the counted bytes of the last round.
    #[inline]
    pub(crate) fn begin_round(&mut self) -> usize {
        self.bytes.begin()
    }

    /// True once a lane has kept an op for the next round.
    #[inline]
    pub(crate) fn keeps_for_next_round(&self) -> bool {
        self.bytes.is_full()
    }

    /// True while disks have work for longer than a wake-up takes.
    pub(crate) fn are_busy_with_bytes(&self) -> bool {
        self.bytes.is_busy()
    }

    /// The number of lanes.
    pub(crate) fn len(&self) -> usize {
        self.lanes.iter().flatten().count()
    }

    /// Returns true if ops wait in lanes.
    #[inline]
    pub(crate) fn has_backlog(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns true if the IoThread has ended.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Ends admission: no op is admitted from now on.
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
        self.lanes.iter_mut().flatten().for_each(|lane| lane.fast_path = 0);
    }

    /// Returns the handle of `file`: the existing one, or a new one for `engine` with a lane. True
    /// if it is new.
    pub(crate) fn attach(&mut self, file: &Arc<OpenFile>, engine: EngineKind) -> (FileRef, bool) {
        let known = self.lanes.iter().flatten().find(|lane| Arc::ptr_eq(&lane.file, file));
        if let Some(handle) = known.and_then(|lane| lane.handle.upgrade()) {
            return (handle, false);
        }
        let index = self.lanes.iter().position(Option::is_none).unwrap_or_else(|| {
            self.lanes.push(None);
            self.lanes.len() - 1
        });
        let number = fits(index, "a count of disks");
        let handle = IoFile::new(Arc::clone(file), engine, number, Rc::clone(&self.retired));
        let device = file.device().filter(|_| engine != EngineKind::Threads);
        let is_regular = engine == EngineKind::IoUring && !file.is_block_device();
        self.lanes[index] = Some(Lane {
            engine,
            file: Arc::clone(file),
            handle: Rc::downgrade(&handle),
            limits: device.map(|device| device.limits()),
            device: device.map_or(NO_DEVICE, |device| self.devices.attach(device)),
            cap: if is_regular { FILE_MAX } else { u32::MAX },
            guaranteed: 0,
            fast_path: 0,
            units: 0,
            extra_units: 0,
            bytes: 0,
            non_transfers: 0,
            completed: 0,
            has_submitted: false,
            is_touched: false,
            is_waiting: false,
            backlog: Backlog::default(),
            pacing: Pacing::new(self.pacing),
            pacing_cap: u32::MAX,
        });
        self.share_out();
        (handle, true)
    }

    /// Returns true if handles were dropped, which [`take_retired`](Self::take_retired) finds.
    #[inline]
    pub(crate) fn has_retired(&self) -> bool {
        !self.retired.is_empty()
    }

    /// Removes a lane whose handle is gone, and thus all of its ops. Returns the index of the
    /// file's registration with the kernel, and the file. Unregister the index before closing the
    /// file.
    pub(crate) fn take_retired(&mut self) -> Option<(i32, Arc<OpenFile>)> {
        let (number, registered) = self.retired.take()?;
        let lane = self.lanes.get_mut(number as usize)?.take()?;
        self.devices.detach(lane.device, number);
        self.touched.retain(|&other| other != number);
        self.share_out();
        Some((registered, lane.file))
    }

    /// Computes the shares of all lanes again.
    fn share_out(&mut self) {
        for engine in [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads] {
            let count = self.lanes.iter().flatten().filter(|lane| lane.engine == engine).count();
            let capacity = match engine {
                EngineKind::Threads => fits(pool_threads(count), "a count of threads"),
                _ => self.depth,
            };
            self.shares[engine] = Shares::new(capacity, count);
        }
        for lane in self.lanes.iter_mut().flatten() {
            let shares = &mut self.shares[lane.engine];
            shares.taken += shares.common_part(lane.units);
            lane.guaranteed = shares.guaranteed;
            lane.set_fast_path(self.is_closed);
        }
    }

    /// Admits an op to the engine if it may go now. Otherwise the op is in a backlog, or must be
    /// cancelled.
    #[inline]
    pub(crate) fn admit(
        &mut self,
        lane: u32,
        slot: u32,
        (kind, bytes): (OpKind, usize),
        ops: &impl OpTable,
    ) -> Admission {
        let is_transfer = kind.is_transfer();
        if let Some(Some(place)) = self.lanes.get_mut(lane as usize)
            && is_transfer
            && place.units < place.fast_path
            && !self.bytes.counts(bytes)
        {
            place.units += 1;
            place.has_submitted = true;
            if !place.is_touched {
                place.is_touched = true;
                self.touched.push(lane);
            }
            return Admission::Now(1);
        }
        self.admit_slowly(lane, slot, is_transfer, ops)
    }

    fn admit_slowly(
        &mut self,
        lane: u32,
        slot: u32,
        is_transfer: bool,
        ops: &impl OpTable,
    ) -> Admission {
        let Some(Some(place)) = self.lanes.get(lane as usize) else { return Admission::Never };
        if self.is_closed {
            return Admission::Never;
        }
        let is_first = !place.backlog.has_transfers() && !place.has_non_transfer_to_go();
        let size = self.size_of(place, slot, ops);
        if is_first && self.may_enter(lane, size, is_transfer) {
            return Admission::Now(self.take_room(lane, size, is_transfer));
        }
        let Some(Some(place)) = self.lanes.get_mut(lane as usize) else { return Admission::Never };
        place.backlog.push(slot, is_transfer);
        place.fast_path = if is_transfer { 0 } else { place.fast_path };
        if !place.is_waiting {
            place.is_waiting = true;
            self.waiting.push_back(lane);
        }
        Admission::Later
    }

    fn size_of(&self, lane: &Lane, slot: u32, ops: &impl OpTable) -> Size {
        let units = lane.limits.map_or(1, |limits| limits.requests_of(ops.ranges(slot)));
        Size { units, bytes: self.bytes.counted(ops.bytes(slot)) }
    }

    fn may_enter(&self, number: u32, size: Size, is_transfer: bool) -> bool {
        let Some(Some(lane)) = self.lanes.get(number as usize) else { return false };
        let Size { units, bytes } = size;
        let after = lane.units.saturating_add(units);
        let blocks = if lane.file.blocks_submits() { BLOCKING_MAX } else { u32::MAX };
        if !is_transfer && lane.non_transfers >= NON_TRANSFER_MAX {
            return false;
        }
        let fits = lane.units == 0
            || (after <= lane.cap.min(blocks)
                && lane.ops() < lane.pacing_cap
                && self.bytes.disk_has_room(lane.engine, lane.bytes, bytes)
                && self.shares[lane.engine].have_room(lane.units, after));
        fits && self.device_has_room(lane, number, units) && self.bytes.has_room(bytes)
    }

    /// Returns true if the device of a lane has room for the op and no other lane is ahead of it.
    fn device_has_room(&self, lane: &Lane, number: u32, units: u32) -> bool {
        let used = self.devices.get(lane.device).filter(|_| !lane.file.blocks_submits());
        used.is_none_or(|used| used.has_room(number, units))
    }

    /// Puts the lane of a waiting op next in line at its device, if the op waits for room there and
    /// no lane is next.
    fn set_next_lane(&mut self, number: u32, units: u32) {
        let Some(Some(lane)) = self.lanes.get(number as usize) else { return };
        let (has_room, blocks) =
            (self.device_has_room(lane, number, units), lane.file.blocks_submits());
        let Some(used) = self.devices.get_mut(lane.device) else { return };
        if blocks {
            used.clear_next(number);
        } else if !has_room {
            used.set_next(number);
        }
    }

    /// Returns the units of the op, perhaps with a mark.
    fn take_room(&mut self, lane: u32, Size { units, bytes }: Size, is_transfer: bool) -> u32 {
        let Some(Some(place)) = self.lanes.get_mut(lane as usize) else { return units };
        let before = place.units;
        place.units += units;
        place.extra_units += units - 1;
        place.bytes += bytes;
        self.bytes.charge(bytes);
        place.non_transfers += u32::from(!is_transfer);
        place.has_submitted = true;
        if !place.is_touched {
            place.is_touched = true;
            self.touched.push(lane);
        }
        self.shares[place.engine].charge(before, place.units);
        let Some(used) = self.devices.get_mut(place.device) else { return units };
        used.clear_next(lane);
        if place.file.blocks_submits() {
            return units | IN_POOL;
        }
        used.units += units;
        units
    }

    /// Gives back the room of a completed op, which counted as `units`.
    #[inline]
    pub(crate) fn release(&mut self, lane: u32, mut units: u32, (kind, bytes): (OpKind, usize)) {
        let Some(Some(place)) = self.lanes.get_mut(lane as usize) else { return };
        if place.device != NO_DEVICE
            && let Some(used) = self.devices.get_mut(place.device)
        {
            used.units -= if units & IN_POOL == 0 { units } else { 0 };
            units &= !IN_POOL;
            place.extra_units -= units - 1;
        }
        let before = place.units;
        place.units -= units;
        let counted = self.bytes.counted(bytes);
        if counted > 0 {
            place.bytes -= counted;
            self.bytes.release(counted);
        }
        place.completed += 1;
        if !place.is_touched {
            place.is_touched = true;
            self.touched.push(lane);
        }
        if before > place.guaranteed {
            self.shares[place.engine].release(before, place.units);
        }
        if !kind.is_transfer() {
            place.non_transfers -= 1;
        }
    }

    /// Paces the lanes that had completions, after a harvest. `submitted`: a submit came right
    /// before it.
    pub(crate) fn after_harvest(&mut self, submitted: bool, now: Instant) {
        for number in self.touched.drain(..) {
            let Some(Some(lane)) = self.lanes.get_mut(number as usize) else { continue };
            lane.is_touched = false;
            let (completed, has_submitted) =
                (std::mem::take(&mut lane.completed), lane.has_submitted && submitted);
            lane.has_submitted = false;
            let in_kernel = lane.ops() + completed;
            let demand = in_kernel as usize + lane.backlog.len();
            lane.pacing.after_harvest(u64::from(completed), in_kernel as usize, has_submitted, now);
            lane.pacing_cap = u32::try_from(lane.pacing.limit(demand)).unwrap_or(u32::MAX);
            lane.set_fast_path(self.is_closed);
        }
    }

    /// Takes an op that has room now out of its backlog. Lanes take turns.
    pub(crate) fn next(&mut self, ops: &mut impl OpTable) -> Option<u32> {
        for _ in 0..self.waiting.len() {
            let number = self.waiting.pop_front()?;
            let Some(Some(lane)) = self.lanes.get(number as usize) else { continue };
            let Some((slot, is_transfer)) =
                lane.backlog.first(lane.non_transfers < NON_TRANSFER_MAX)
            else {
                self.waiting.push_back(number);
                continue;
            };
            let size = self.size_of(lane, slot, ops);
            let enters = self.may_enter(number, size, is_transfer);
            if enters {
                ops.set(slot, self.take_room(number, size, is_transfer));
            } else {
                self.set_next_lane(number, size.units);
            }
            let Some(Some(lane)) = self.lanes.get_mut(number as usize) else { continue };
            if enters {
                lane.backlog.take(is_transfer);
            }
            lane.is_waiting = !lane.backlog.is_empty();
            lane.set_fast_path(self.is_closed);
            if lane.is_waiting {
                self.waiting.push_back(number);
            }
            if enters {
                return Some(slot);
            }
        }
        None
    }
}

/// The room that an op takes.
#[derive(Clone, Copy)]
struct Size {
    units: u32,
    /// Counted bytes (see [`RoundBytes`]).
    bytes: usize,
}

impl Lane {
    /// Returns true if an op waits that is neither a read nor a write, and [`NON_TRANSFER_MAX`]
    /// permits it.
    fn has_non_transfer_to_go(&self) -> bool {
        self.backlog.has_non_transfers() && self.non_transfers < NON_TRANSFER_MAX
    }

    /// The number of ops in the engine.
    fn ops(&self) -> u32 {
        self.units - self.extra_units
    }

    fn set_fast_path(&mut self, is_closed: bool) {
        let is_simple = !is_closed
            && self.device == NO_DEVICE
            && !self.backlog.has_transfers()
            && !self.file.blocks_submits();
        self.fast_path =
            if is_simple { self.guaranteed.min(self.cap).min(self.pacing_cap) } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::device_queue::Device;
    use std::os::fd::OwnedFd;

    /// Ops by number: true for a read, its memory, and its units.
    #[derive(Default)]
    struct Ops(Vec<(bool, Vec<libc::iovec>, u32)>);

    impl OpTable for Ops {
        fn ranges(&self, slot: u32) -> &[libc::iovec] {
            &self.0[slot as usize].1
        }

        fn bytes(&self, slot: u32) -> usize {
            self.0[slot as usize].1.iter().map(|range| range.iov_len).sum()
        }

        fn set(&mut self, slot: u32, units: u32) {
            self.0[slot as usize].2 = units;
        }
    }

    struct Bench {
        default: EngineKind,
        lanes: Lanes,
        ops: Ops,
        files: Vec<FileRef>,
        /// The disk of each op.
        disks: Vec<usize>,
        /// The ops in the engine, in order: the disk and the op.
        engine: Vec<(usize, u32)>,
    }

    impl Bench {
        fn new(engine: EngineKind, depth: u32) -> Self {
            let mut lanes = Lanes::new(depth);
            lanes.set_bytes(ByteLimits { op: 1 << 20, round: usize::MAX, disk: usize::MAX });
            let (files, disks) = (Vec::new(), Vec::new());
            Self { default: engine, lanes, ops: Ops::default(), files, disks, engine: Vec::new() }
        }

        fn attach(&mut self, device: Option<&Arc<Device>>) -> usize {
            self.attach_with(self.default, device)
        }

        fn attach_with(&mut self, engine: EngineKind, device: Option<&Arc<Device>>) -> usize {
            let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
            let file = Arc::new(OpenFile::on_device(file, device.cloned()));
            let (handle, is_new) = self.lanes.attach(&file, engine);
            assert!(is_new && Rc::ptr_eq(&handle, &self.lanes.attach(&file, engine).0));
            self.files.push(handle);
            self.files.len() - 1
        }

        fn start(&mut self, disk: usize, kind: OpKind, bytes: usize) -> Admission {
            self.start_with(disk, kind, &[bytes])
        }

        fn start_with(&mut self, disk: usize, kind: OpKind, ranges: &[usize]) -> Admission {
            let slot = u32::try_from(self.ops.0.len()).unwrap();
            self.disks.push(disk);
            let iov_base = std::ptr::null_mut();
            let ranges = ranges.iter().map(|&iov_len| libc::iovec { iov_base, iov_len });
            self.ops.0.push((kind.is_transfer(), ranges.collect(), 0));
            let what = (kind, self.ops.bytes(slot));
            let admission = self.lanes.admit(self.files[disk].lane(), slot, what, &self.ops);
            if let Admission::Now(units) = admission {
                self.ops.set(slot, units);
                self.engine.push((disk, slot));
            }
            admission
        }

        /// Starts reads until one must wait. Returns the number of ops of that disk in the engine.
        fn fill(&mut self, disk: usize) -> usize {
            while self.start(disk, OpKind::Read, 4096) != Admission::Later {}
            self.engine.iter().filter(|(of, _)| *of == disk).count()
        }

        /// Completes the oldest op of a disk. Returns the ops that have room after that.
        fn complete(&mut self, disk: usize) -> Vec<(usize, u32)> {
            self.release(disk);
            self.lanes.after_harvest(true, Instant::now());
            self.take_in()
        }

        /// Completes the oldest op of a disk in the engine, and looks for no waiting ops.
        fn release(&mut self, disk: usize) {
            let place = self.engine.iter().position(|(of, _)| *of == disk).unwrap();
            let (_, slot) = self.engine.remove(place);
            let &(is_transfer, _, units) = &self.ops.0[slot as usize];
            let kind = if is_transfer { OpKind::Read } else { OpKind::Flush };
            let what = (kind, self.ops.bytes(slot));
            self.lanes.release(self.files[disk].lane(), units, what);
        }

        /// Gives the engine the ops that have room now.
        fn take_in(&mut self) -> Vec<(usize, u32)> {
            let mut begun = Vec::new();
            while let Some(slot) = self.lanes.next(&mut self.ops) {
                self.engine.push((self.disks[slot as usize], slot));
                begun.push((self.disks[slot as usize], slot));
            }
            begun
        }
    }

    impl Drop for Bench {
        /// Completes all ops: in the end nothing is counted, whatever a test has done.
        fn drop(&mut self) {
            if std::thread::panicking() {
                return;
            }
            while let Some((disk, _)) = self.engine.first().copied() {
                self.lanes.begin_round();
                self.complete(disk);
            }
            assert!(!self.lanes.has_backlog(), "ops wait for an empty engine");
            self.lanes.assert_idle();
        }
    }

    #[test]
    fn a_closed_lane_admits_no_op() {
        let mut bench = Bench::new(EngineKind::Aio, 64);
        let disk = bench.attach(None);
        assert_eq!(bench.start(disk, OpKind::Read, 4096), Admission::Now(1));
        bench.lanes.close();
        assert_eq!(bench.start(disk, OpKind::Read, 4096), Admission::Never);
        bench.complete(disk);
        assert_eq!(bench.start(disk, OpKind::Read, 4096), Admission::Never, "after a harvest");
        let other = bench.attach(None);
        for disk in [disk, other] {
            assert_eq!(bench.start(disk, OpKind::Flush, 0), Admission::Never);
            assert_eq!(bench.start(disk, OpKind::Read, 4096), Admission::Never, "with a new disk");
        }
    }

    #[test]
    fn a_disk_alone_has_most_of_the_engine_and_hanging_disks_leave_a_share() {
        for (engine, depth) in [(EngineKind::Aio, 1024), (EngineKind::Threads, 0)] {
            let mut bench = Bench::new(engine, depth);
            let all = if depth > 0 { depth as usize } else { pool_threads(1) };
            let alone = bench.attach(None);
            let had = bench.fill(alone);
            assert!(had * 10 >= all * 6 && had < all, "{engine}: {had} of {all}");
            // This disk hangs from now on, and so do all later ones.
            for _ in 0..20 {
                let next = bench.attach(None);
                let had = bench.fill(next);
                assert!(had >= 8, "{engine}: {had} of {all} for a new disk");
            }
        }
    }

    #[test]
    fn each_disk_adds_pool_threads_for_the_ops_that_its_lane_admits() {
        assert_eq!([0, 1, 3].map(pool_threads), [64, 96, 160]);
    }

    #[test]
    fn a_flush_that_waits_for_room_goes_before_a_later_read() {
        let mut bench = Bench::new(EngineKind::Aio, 64);
        let disk = bench.attach(None);
        let mut other = Bench::new(EngineKind::Aio, 64);
        let twin = other.attach(None);
        for _ in 0..other.fill(twin) {
            assert_eq!(bench.start(disk, OpKind::Read, 4096), Admission::Now(1));
        }
        let flush = u32::try_from(bench.ops.0.len()).unwrap();
        assert_eq!(bench.start(disk, OpKind::Flush, 0), Admission::Later);
        // A read ends, and the loop has not looked for waiting ops yet.
        bench.release(disk);
        assert_eq!(bench.start(disk, OpKind::Read, 4096), Admission::Later);
        assert_eq!(bench.take_in(), [(disk, flush)]);
    }

    #[test]
    fn a_disk_takes_no_room_of_another_engine() {
        let all = [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads];
        let alone = all.map(|engine| {
            let mut bench = Bench::new(engine, 1024);
            let disk = bench.attach(None);
            bench.fill(disk)
        });
        for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
            let mut bench = Bench::new(EngineKind::Threads, 1024);
            let disks = order.map(|index| bench.attach_with(all[index], None));
            for (index, disk) in order.into_iter().zip(disks) {
                assert_eq!(bench.fill(disk), alone[index], "{} in {order:?}", all[index]);
            }
        }
    }

    /// A small read would otherwise overtake a large one for ever.
    #[test]
    fn an_op_behind_one_that_waits_for_the_next_round_waits_too() {
        let mut bench = Bench::new(EngineKind::Aio, 64);
        let round = 1 << 20;
        bench.lanes.set_bytes(ByteLimits { op: round, round, disk: usize::MAX });
        let disk = bench.attach(None);
        // From its first completion on, the disk has the short way.
        bench.start(disk, OpKind::Read, 512);
        bench.complete(disk);
        assert_eq!(bench.start(disk, OpKind::Read, round), Admission::Now(1));
        assert_eq!(bench.start(disk, OpKind::Read, round), Admission::Later);
        assert_eq!(bench.start(disk, OpKind::Read, 512), Admission::Later, "it overtakes");
        bench.lanes.begin_round();
        assert_eq!(bench.take_in(), [(disk, 2), (disk, 3)]);
    }

    /// The share of a disk that is known to be fast becomes smaller with each further disk.
    #[test]
    fn a_disk_that_is_in_use_has_its_new_share_when_more_disks_come() {
        let mut bench = Bench::new(EngineKind::Aio, 64);
        let disk = bench.attach(None);
        bench.start(disk, OpKind::Read, 4096);
        bench.complete(disk);
        for _ in 0..20 {
            bench.attach(None);
        }
        let mut fresh = Bench::new(EngineKind::Aio, 64);
        let disks = [(); 21].map(|()| fresh.attach(None));
        assert_eq!(bench.fill(disk), fresh.fill(disks[0]));
        let twin = bench.attach(None);
        let beside = fresh.attach(None);
        assert_eq!(bench.fill(twin), fresh.fill(beside));
    }

    #[test]
    fn ops_wait_for_their_own_disk_and_continue_in_order() {
        let mut bench = Bench::new(EngineKind::Aio, 64);
        let (hung, well) = (bench.attach(None), bench.attach(None));
        bench.fill(hung);
        let had = bench.fill(well);
        let mut last = 0;
        for _ in 0..3 {
            bench.start(well, OpKind::Read, 4096);
        }
        for _ in 0..4 {
            let begun = bench.complete(well);
            assert_eq!(begun.len(), 1, "one has completed, so one has room");
            assert!(begun[0].1 > last, "out of order");
            last = begun[0].1;
        }
        assert!(bench.complete(well).is_empty() && !bench.lanes.waiting.contains(&1));
        assert_eq!(bench.engine.iter().filter(|(of, _)| *of == well).count(), had - 1);
    }

    #[test]
    fn a_flush_does_not_wait_for_reads_without_end() {
        let mut bench = Bench::new(EngineKind::Aio, 64);
        let disk = bench.attach(None);
        bench.fill(disk);
        assert_eq!(bench.start(disk, OpKind::Flush, 0), Admission::Later);
        let flush = u32::try_from(bench.ops.0.len() - 1).unwrap();
        // The backlog never ends: each completed read is replaced by a new one.
        let begun = (0..100).find(|_| {
            bench.start(disk, OpKind::Read, 4096);
            bench.complete(disk).contains(&(disk, flush))
        });
        assert_eq!(begun, Some(0), "reads that came later went first");
    }

    #[test]
    fn a_read_does_not_wait_for_flushes_without_end() {
        let mut bench = Bench::new(EngineKind::Aio, 64);
        let disk = bench.attach(None);
        bench.files[disk].set_blocks_submits(Instant::now());
        for _ in 0..3 * NON_TRANSFER_MAX {
            bench.start(disk, OpKind::Flush, 0);
        }
        assert_eq!(bench.start(disk, OpKind::Read, 512), Admission::Later);
        let read = u32::try_from(bench.ops.0.len() - 1).unwrap();
        let begun = (0..100).find(|_| {
            bench.start(disk, OpKind::Flush, 0);
            bench.complete(disk).contains(&(disk, read))
        });
        assert_eq!(begun, Some(1), "flushes that came later went first");
    }

    #[test]
    fn a_disk_that_blocks_submits_has_few_threads_of_the_pool() {
        let mut bench = Bench::new(EngineKind::Aio, 1024);
        let disk = bench.attach(None);
        bench.files[disk].set_blocks_submits(Instant::now());
        bench.start(disk, OpKind::Read, 4096);
        bench.complete(disk);
        assert_eq!(bench.fill(disk), BLOCKING_MAX as usize);
    }

    /// Two disks on one queue: partitions, one of them with a frozen file system.
    #[test]
    fn a_disk_that_hangs_in_the_pool_has_no_room_of_a_device_that_does_not() {
        for in_kernel in [0, 20] {
            let device = Device::with(64, 4096);
            let mut bench = Bench::new(EngineKind::Aio, 1024);
            let (hung, well) = (bench.attach(Some(&device)), bench.attach(Some(&device)));
            for _ in 0..in_kernel {
                bench.start(hung, OpKind::Read, 4096);
            }
            bench.fill(well);
            // The hung disk is next in line when its submits are found to block.
            assert_eq!(bench.start(hung, OpKind::Read, 40 * 4096), Admission::Later);
            bench.complete(well);
            bench.files[hung].set_blocks_submits(Instant::now());
            for _ in 0..100 {
                bench.start(hung, OpKind::Write { fua: false }, 4096);
            }
            for _ in 0..1000 {
                bench.start(well, OpKind::Read, 4096);
                bench.complete(well);
            }
            let had = bench.engine.iter().filter(|(of, _)| *of == well).count();
            assert_eq!(had, 48 - in_kernel);
            // The hung disk answers after all.
            while bench.engine.iter().any(|(of, _)| *of == hung) {
                bench.complete(hung);
            }
            let used = bench.lanes.devices.get(0).unwrap();
            assert_eq!(used.units as usize, bench.engine.len());
            assert_eq!(bench.lanes.lanes[0].as_ref().unwrap().units, 0);
        }
    }

    /// Disks that are busy without end, with ops of all sizes and kinds, in any order.
    #[test]
    fn an_op_waits_for_earlier_ops_and_one_turn_of_its_device() {
        let device = Device::with(64, 4096);
        let mut bench = Bench::new(EngineKind::Aio, 256);
        let disks: Vec<usize> =
            (0..8).map(|disk| bench.attach((disk < 3).then_some(&device))).collect();
        let mut state = 1u32;
        let mut random = |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % below
        };
        // Waiting ops, and the number of completions within which each must have begun.
        let mut waiting: Vec<(u32, usize)> = Vec::new();
        for _ in 0..5000 {
            let disk = disks[random(8) as usize];
            let of = |bench: &Bench, slot: u32| bench.disks[slot as usize];
            for _ in 0..random(4) {
                let waits = waiting.iter().filter(|(slot, _)| of(&bench, *slot) == disk).count();
                let before = waits + bench.engine.iter().filter(|(of, _)| *of == disk).count();
                if waits > 60 {
                    break;
                }
                let (is_flush, pages) = (random(4) == 0, 1 + random(16) as usize);
                let (kind, bytes) =
                    if is_flush { (OpKind::Flush, 0) } else { (OpKind::Read, pages * 4096) };
                if bench.start(disk, kind, bytes) == Admission::Later {
                    let slot = u32::try_from(bench.ops.0.len() - 1).unwrap();
                    // As many ops of the opposite kind may go first. On the device each op may wait
                    // for one op of each disk there, and each of these for the room of a large one.
                    let each = if disk < 3 { 3 * 16 } else { 1 };
                    waiting.push((slot, 2 * (before + 1) * each));
                }
            }
            if !bench.engine.iter().any(|(of, _)| *of == disk) {
                continue;
            }
            for (slot, left) in &mut waiting {
                if of(&bench, *slot) == disk || (of(&bench, *slot) < 3 && disk < 3) {
                    *left = left.checked_sub(1).expect("an op waits for what came after it");
                }
            }
            let begun = bench.complete(disk);
            waiting.retain(|(slot, _)| !begun.iter().any(|(_, other)| other == slot));
        }
        assert!(bench.ops.0.len() > 4000 && waiting.len() > 60, "they were not busy");
    }

    #[test]
    fn a_large_op_does_not_wait_for_small_ones_of_a_neighbour_without_end() {
        let device = Device::with(64, 4096);
        let mut bench = Bench::new(EngineKind::Aio, 1024);
        let (small, large) = (bench.attach(Some(&device)), bench.attach(Some(&device)));
        bench.fill(small);
        assert_eq!(bench.start(large, OpKind::Read, 40 * 4096), Admission::Later);
        let op = u32::try_from(bench.ops.0.len() - 1).unwrap();
        let begun = (0..1000).find(|_| {
            bench.start(small, OpKind::Read, 4096);
            bench.complete(small).iter().any(|&(_, slot)| slot == op)
        });
        assert!(begun.is_some_and(|tries| tries < 64), "begun after {begun:?}");
    }

    #[test]
    fn ops_that_need_a_thread_are_few_and_hold_no_read_back() {
        let mut bench = Bench::new(EngineKind::IoUring, 1024);
        let disk = bench.attach(None);
        for _ in 0..NON_TRANSFER_MAX {
            assert_eq!(bench.start(disk, OpKind::Flush, 0), Admission::Now(1));
        }
        for _ in 0..100 {
            assert_eq!(bench.start(disk, OpKind::Flush, 0), Admission::Later);
            assert_eq!(bench.start(disk, OpKind::Read, 512), Admission::Now(1));
        }
        assert_eq!(bench.complete(disk).len(), 1);
    }

    #[test]
    fn a_device_has_no_more_requests_than_it_takes() {
        let device = Device::with(128, 65_536);
        let mut bench = Bench::new(EngineKind::Aio, 1024);
        let (a, b) = (bench.attach(Some(&device)), bench.attach(Some(&device)));
        let elsewhere = bench.attach(None);
        assert_eq!(bench.start(a, OpKind::Read, 1 << 20), Admission::Now(16));
        let had = bench.fill(a) + bench.fill(b);
        assert_eq!(had, 1 + 96 - 16, "three quarters, and the large one counts for what it is");
        assert!(bench.fill(elsewhere) > 96, "another disk has nothing to do with it");
        // An op that is too large for the device goes alone.
        let small = Device::with(4, 4096);
        let c = bench.attach(Some(&small));
        assert_eq!(bench.start(c, OpKind::Read, 1 << 20), Admission::Now(256));
        assert_eq!(bench.start(c, OpKind::Read, 512), Admission::Later);
        assert_eq!(bench.complete(c).len(), 1);
    }

    #[test]
    fn an_op_of_many_ranges_counts_for_the_requests_that_are_made_of_it() {
        let device = Device::with_limits(128, RequestLimits::with_segments(32));
        let mut bench = Bench::new(EngineKind::Aio, 1024);
        let disk = bench.attach(Some(&device));
        assert_eq!(bench.start_with(disk, OpKind::Read, &[512; 128]), Admission::Now(4));
        assert_eq!(bench.fill(disk), 1 + 96 - 4);
    }

    #[test]
    fn the_limit_of_pacing_does_not_shrink_with_large_ops() {
        let device = Device::with(60_000, 65_536);
        let mut bench = Bench::new(EngineKind::Aio, 60_000);
        let disk = bench.attach(Some(&device));
        bench.lanes.lanes[0].as_mut().unwrap().pacing = Pacing::limited();
        for _ in 0..64 {
            bench.start(disk, OpKind::Read, 1 << 20);
        }
        // There are always 64 ops, so three quarters of them are with the engine.
        for _ in 0..1000 {
            bench.complete(disk);
            bench.start(disk, OpKind::Read, 1 << 20);
        }
        assert_eq!(bench.engine.len(), 48);
    }

    /// The bytes of a disk in the engine.
    fn bytes_of(bench: &Bench, disk: usize) -> usize {
        let ops = bench.engine.iter().filter(|(of, _)| *of == disk);
        ops.map(|&(_, op)| bench.ops.bytes(op)).sum()
    }

    #[test]
    fn a_round_takes_few_bytes_and_disks_take_turns() {
        let mut bench = Bench::new(EngineKind::IoUring, 1024);
        bench.lanes.set_bytes(ByteLimits::default());
        let (greedy, second) = (bench.attach(None), bench.attach(None));
        for disk in [greedy, second] {
            for _ in 0..50 {
                bench.start(disk, OpKind::Read, 1 << 20);
            }
        }
        assert_eq!(bytes_of(&bench, greedy), ByteLimits::ROUND, "it was there first");
        assert_eq!(bytes_of(&bench, second), 0);
        let small = bench.attach(None);
        assert_eq!(bench.start(small, OpKind::Read, 16 << 10), Admission::Now(1), "it is small");
        assert!(bench.lanes.keeps_for_next_round() && bench.take_in().is_empty());
        for round in 1..=3 {
            assert_eq!(bench.lanes.begin_round(), ByteLimits::ROUND);
            assert_eq!(bench.take_in().len() << 20, ByteLimits::ROUND, "round {round}");
            assert_eq!(bytes_of(&bench, second), round * ByteLimits::ROUND / 2);
        }
    }

    #[test]
    fn a_disk_has_a_bounded_number_of_bytes_in_its_engine() {
        for (engine, most) in [
            (EngineKind::IoUring, ByteLimits::DISK),
            (EngineKind::Aio, ByteLimits::DISK),
            (EngineKind::Threads, ByteLimits::DISK / 2),
        ] {
            let mut bench = Bench::new(engine, 1024);
            bench.lanes.set_bytes(ByteLimits::default());
            let disk = bench.attach(None);
            for _ in 0..200 {
                bench.start(disk, OpKind::Write { fua: false }, 1 << 20);
                bench.lanes.begin_round();
            }
            assert_eq!(bytes_of(&bench, disk), most, "{engine}");
            for _ in 0..50 {
                bench.lanes.begin_round();
                assert_eq!(bench.complete(disk).len(), 1, "{engine}: as much as has completed");
                assert_eq!(bytes_of(&bench, disk), most, "{engine}");
            }
        }
    }

    #[test]
    fn a_disk_gets_the_room_of_one_that_goes() {
        let mut other = Bench::new(EngineKind::Aio, 64);
        let alone = other.attach(None);
        let mut bench = Bench::new(EngineKind::Aio, 64);
        let (stays, _) = (bench.attach(None), bench.attach(None));
        bench.files.pop();
        assert!(bench.lanes.take_retired().is_some());
        assert_eq!(bench.fill(stays), other.fill(alone));
    }

    #[test]
    fn a_lane_that_goes_gives_everything_back() {
        let device = Device::with(128, 65_536);
        let mut bench = Bench::new(EngineKind::Aio, 1024);
        for _ in 0..3 {
            let disk = bench.attach(Some(&device));
            bench.start(disk, OpKind::Read, 4096);
            bench.complete(disk);
            bench.files.clear();
            assert!(bench.lanes.take_retired().is_some() && bench.lanes.take_retired().is_none());
            assert_eq!((bench.lanes.len(), bench.lanes.shares[EngineKind::Aio].taken), (0, 0));
            assert!(bench.lanes.devices.get(0).is_none());
        }
    }
}
