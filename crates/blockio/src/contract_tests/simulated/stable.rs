//! Ops of durable writes, each of which is durable itself.

use std::time::Instant;

use super::*;
use crate::config::ByteLimits;

/// The most bytes of an op.
const OP_BYTES: usize = 8192;

/// A kernel that notes ops, and moves no more than so many bytes with each.
struct Notes {
    now: Cell<Instant>,
    most: Cell<usize>,
    /// The bytes that writes can still move. Later ones fail.
    left: Cell<usize>,
    ops: RefCell<Vec<(OpKind, usize)>>,
}

impl World for Notes {
    fn now(&self) -> Instant {
        self.now.get()
    }

    fn ring(&self, depth: u32) -> RingSetup {
        RingSetup {
            events: depth + 1,
            is_known: true,
            has_fdsync: true,
            defers: false,
            has_uring_cmd: true,
            submits_all: true,
            sq_entries: None,
        }
    }

    fn start(&self, op: KernelOp) -> bool {
        let bytes = op.buffers().bytes();
        let at = usize::try_from(op.offset()).unwrap();
        assert!((at | bytes).is_multiple_of(512), "{bytes} bytes at {at} are no direct I/O");
        self.ops.borrow_mut().push((op.kind(), bytes));
        let moved = bytes.min(self.most.get());
        let is_write = op.kind() != OpKind::Read;
        let moved = if is_write { moved.min(self.left.get()) } else { moved };
        self.left.set(self.left.get() - if is_write { moved } else { 0 });
        let result = if moved == 0 { -i64::from(libc::EIO) } else { i64::try_from(moved).unwrap() };
        op.answer(result).send();
        true
    }

    fn spin(&self) {
        self.now.set(self.now.get() + Duration::from_micros(1));
    }

    fn sleep(&self, deadline: Option<Instant>, is_over: &dyn Fn() -> bool) {
        if !is_over() {
            let when = deadline.expect("the loop sleeps and nothing will wake it");
            self.now.set(self.now.get().max(when));
        }
    }
}

fn new_world() -> Rc<Notes> {
    Rc::new(Notes {
        now: Cell::new(Instant::now()),
        most: Cell::new(usize::MAX),
        left: Cell::new(usize::MAX),
        ops: RefCell::default(),
    })
}

/// A write of several ops, one by way of other memory, and ones whose ops come back short.
#[test]
fn each_op_of_a_durable_write_is_durable_and_of_no_other() {
    for engine in ENGINES {
        check_durable_writes(engine);
    }
}

fn check_durable_writes(engine: EngineKind) {
    let world = new_world();
    let _installed = install(Rc::<Notes>::clone(&world));
    let bytes = ByteLimits { op: OP_BYTES, ..ByteLimits::default() };
    let engine = engine.into();
    let thread =
        IoThread::new(&IoThreadConfig { engine, bytes, ..IoThreadConfig::default() }).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let disk = simulated_file(&file, false).attach(thread.io());
    for (skew, most) in [(0, OP_BYTES), (0, 4096), (0, 1000), (1, OP_BYTES), (1, 512)] {
        for fua in [true, false] {
            world.most.set(most);
            let mut memory = Buffers::aligned(BYTES + skew, 4096);
            memory.advance(skew);
            thread.block_on(disk.write(0, memory, fua)).unwrap().unwrap();
            let ops = world.ops.take();
            assert!(ops.len() >= BYTES / most, "{skew} {most}: {ops:?}");
            let is_right = |(kind, bytes): &(OpKind, usize)| {
                *kind == (OpKind::Write { fua }) && *bytes <= OP_BYTES
            };
            assert!(ops.iter().all(is_right), "{skew} {most}: {ops:?}");
        }
    }
}

/// The blocks around it are written as well, and count for nothing.
#[test]
fn a_write_of_parts_of_blocks_that_fails_has_all_left_that_was_not_written() {
    let world = new_world();
    let _installed = install(Rc::<Notes>::clone(&world));
    let engine = EngineKind::Threads.into();
    let thread = IoThread::new(&IoThreadConfig { engine, ..IoThreadConfig::default() }).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let info = DiskInfo {
        size_bytes: BYTES as u64,
        logical_block_bytes: 512,
        physical_block_bytes: 4096,
        read_only: false,
        direct: true,
    };
    let descriptor = OwnedFd::from(file.reopen().unwrap());
    let disk = DiskSource::simulated(descriptor, info, false, 512, 4096).attach(thread.io());
    for (offset, written, left) in
        [(0, 0, 8192), (0, 4096, 4096), (512, 0, 8192), (512, 4096, 4608), (3584, 4096, 7680)]
    {
        world.left.set(written);
        let write = disk.write(offset, Buffers::aligned(8192, 512), false);
        let unfinished = thread.block_on(write).unwrap().unwrap_err();
        assert_eq!(unfinished.error().raw_os_error(), Some(libc::EIO), "{offset} {written}");
        assert_eq!(unfinished.rest().bytes(), left, "{offset} {written}");
        world.left.set(usize::MAX);
    }
}
