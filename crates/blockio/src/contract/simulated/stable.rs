//! Ops of durable writes, each of which is durable itself.

use std::time::Instant;

use super::waiting::simulated_file;
use super::*;
use crate::config::ByteLimits;

/// The most bytes of an op.
const OP_BYTES: usize = 8192;

/// A kernel that notes ops, and moves no more than so many bytes with each.
struct Notes {
    now: Cell<Instant>,
    most: Cell<usize>,
    ops: RefCell<Vec<(OpKind, usize)>>,
}

impl World for Notes {
    fn now(&self) -> Instant {
        self.now.get()
    }

    fn preempt(&self) {}

    fn ring(&self, _: u32) -> RingSetup {
        unreachable!("its engine has threads")
    }

    fn admit(&self, _: RawFd, count: usize, _: usize) -> Result<usize, libc::c_int> {
        Ok(count)
    }

    fn ends_poll(&self) -> bool {
        false
    }

    fn start(&self, op: KernelOp) -> bool {
        let bytes = op.buffers().bytes();
        self.ops.borrow_mut().push((op.kind(), bytes));
        op.answer(i64::try_from(bytes.min(self.most.get())).unwrap()).send();
        true
    }

    fn spin(&self) {
        self.now.set(self.now.get() + Duration::from_micros(1));
    }

    fn run_sq_thread(&self, _: SqThread) {
        unreachable!("no ring has a submission thread");
    }

    fn run_thread(&self, work: Box<dyn FnOnce()>) {
        work();
    }

    fn sleep(&self, deadline: Option<Instant>, is_over: &dyn Fn() -> bool) {
        if !is_over() {
            let when = deadline.expect("the loop sleeps and nothing will wake it");
            self.now.set(self.now.get().max(when));
        }
    }
}

/// A write of several ops, one by way of other memory, and ones whose ops come back short.
#[test]
fn each_op_of_a_durable_write_is_durable_and_of_no_other() {
    let world = Rc::new(Notes {
        now: Cell::new(Instant::now()),
        most: Cell::default(),
        ops: RefCell::default(),
    });
    let _installed = install(Rc::<Notes>::clone(&world));
    let bytes = ByteLimits { op: OP_BYTES, ..ByteLimits::default() };
    let engine = EngineKind::Threads.into();
    let thread =
        IoThread::new(&IoThreadConfig { engine, bytes, ..IoThreadConfig::default() }).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let disk = simulated_file(&file).attach(thread.io());
    for (skew, most) in [(0, OP_BYTES), (0, 4096), (1, OP_BYTES), (1, 512)] {
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
