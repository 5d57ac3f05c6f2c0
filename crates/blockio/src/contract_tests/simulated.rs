//! The contract of futures on a simulated kernel.

use std::os::fd::{OwnedFd, RawFd};
use std::time::Instant;

use super::*;
use crate::disk::DiskInfo;
use crate::engine::kernel::sim::{KernelOp, RingSetup, SqThread, World, install};
use crate::op::OpKind;
use crate::thread::foreign_op::ForeignCompleter;

mod lacking;
mod limits;
mod stable;
mod waiting;

/// A kernel that answers reads and flushes in any order, at any time.
struct Kernel {
    now: Cell<Instant>,
    ops: RefCell<Vec<KernelOp>>,
    foreign: RefCell<Vec<ForeignCompleter>>,
    seed: Cell<u64>,
}

impl Kernel {
    fn below(&self, bound: usize) -> usize {
        // Knuth's MMIX generator.
        let next = self.seed.get().wrapping_mul(6_364_136_223_846_793_005);
        self.seed.set(next.wrapping_add(1_442_695_040_888_963_407));
        usize::try_from(self.seed.get() >> 33).unwrap() % bound
    }

    fn answer_one(&self) -> bool {
        let (ops, foreign) = (self.ops.borrow().len(), self.foreign.borrow().len());
        if ops + foreign == 0 {
            return false;
        }
        let place = self.below(ops + foreign);
        if place >= ops {
            let completer = self.foreign.borrow_mut().swap_remove(place - ops);
            return completer.complete(Ok(BLOCK));
        }
        let op = self.ops.borrow_mut().swap_remove(place);
        let bytes = op.buffers().bytes();
        if op.kind() == OpKind::Read {
            let start = usize::try_from(op.offset()).unwrap();
            let content: Vec<u8> =
                (start..start + bytes).map(|at| content_of(at / BLOCK)).collect();
            op.buffers().copy_from(0, &content);
        }
        op.answer(i64::try_from(bytes).unwrap()).send();
        true
    }
}

impl World for Kernel {
    fn now(&self) -> Instant {
        self.now.get()
    }

    fn preempt(&self) {
        if self.below(4) == 0 {
            self.answer_one();
        }
    }

    fn ring(&self, depth: u32) -> RingSetup {
        RingSetup {
            events: depth + 1,
            is_known: true,
            has_fdsync: true,
            defers: self.below(2) == 0,
            has_uring_cmd: true,
            submits_all: true,
            sq_entries: None,
        }
    }

    fn admit(&self, _: RawFd, count: usize, room: usize) -> Result<usize, libc::c_int> {
        Ok(1 + self.below(count.min(room)))
    }

    fn ends_poll(&self) -> bool {
        self.below(8) == 0
    }

    fn start(&self, op: KernelOp) -> bool {
        self.ops.borrow_mut().push(op);
        if self.below(4) == 0 {
            self.answer_one();
        }
        true
    }

    fn spin(&self) {
        self.now.set(self.now.get() + Duration::from_micros(1));
        self.preempt();
    }

    fn sleep(&self, deadline: Option<Instant>, is_over: &dyn Fn() -> bool) {
        while !is_over() {
            if !self.answer_one() {
                let when = deadline.expect("the loop sleeps and nothing will wake it");
                return self.now.set(self.now.get().max(when));
            }
        }
    }
}

fn simulated_file(file: &tempfile::NamedTempFile, is_block_device: bool) -> DiskSource {
    let info = DiskInfo {
        size_bytes: BYTES as u64,
        logical_block_bytes: 512,
        physical_block_bytes: 512,
        read_only: false,
        direct: true,
    };
    let descriptor = OwnedFd::from(file.reopen().unwrap());
    DiskSource::simulated(descriptor, info, is_block_device, 512, 512)
}

fn scene(engine: EngineKind, seed: u64) -> Scene {
    let kernel = Rc::new(Kernel {
        now: Cell::new(Instant::now()),
        ops: RefCell::default(),
        foreign: RefCell::default(),
        seed: Cell::new(seed),
    });
    let installed = install(Rc::<Kernel>::clone(&kernel));
    let file = tempfile::NamedTempFile::new().unwrap();
    let thread = thread(engine);
    let disk = simulated_file(&file, false).attach(thread.io());
    let complete: CompleteForeign =
        Rc::new(move |completer| kernel.foreign.borrow_mut().push(completer));
    let disk = Rc::new(disk);
    Scene { disk, thread, complete, _file: file, _installed: Some(installed) }
}

#[test]
fn futures_keep_their_contract_in_a_simulation() {
    for seed in 0..40 {
        for engine in ENGINES {
            check(&scene(engine, seed));
        }
    }
}
