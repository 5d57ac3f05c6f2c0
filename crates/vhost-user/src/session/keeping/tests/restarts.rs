//! Messages that stop a ring which runs and start it again, and kills in between.

use std::fs::File;

use device::blk::config::{F_FLUSH, F_RING_PACKED};
use virtqueue::driver::{Desc, PackedDriver};
use virtqueue::{GuestMemory, QueueConfig};

use super::*;
use crate::message::{F_LOG_ALL, LogArea};

const PACKED_FEATURES: u64 = F_PROTOCOL_FEATURES | 1 << 32 | 1 << F_RING_PACKED;
/// The places of a packed ring that is new.
const START: u32 = 0x8000_8000;
const REQUESTS: u32 = 3;

/// A guest with a packed ring, its front-end, and the process that serves it.
struct Guest {
    memory: Arc<GuestMemory>,
    driver: PackedDriver<Arc<GuestMemory>>,
    kick: OwnedFd,
    socket: UnixStream,
    kept: Arc<Mutex<Kept>>,
    process: Process,
    session: Session,
}

impl Process {
    fn turn(&self, turns: usize) {
        for _ in 0..turns {
            let _ = self.io.turn(Wait::Never).unwrap();
        }
    }
}

impl Guest {
    /// Starts a ring, which has answered some requests.
    fn new() -> Self {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, MEMORY_BYTES).unwrap();
        let [call, kick] = [0; 2].map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let (ours, socket) = UnixStream::pair().unwrap();
        socket.set_nonblocking(true).unwrap();
        let process = Process::new();
        let mut session = Session::new(ours, process.setup.clone(), Instant::now());
        let kept = Arc::<Mutex<Kept>>::default();
        session.keep_with(mortal(&kept, NEVER));
        let events = [call, kick.try_clone().unwrap()];
        for (request, fds, _) in script(&file, &events).into_iter().take(13) {
            let request = match request {
                Request::SetFeatures(_) => Request::SetFeatures(PACKED_FEATURES),
                Request::SetVringBase { index, .. } => Request::SetVringBase { index, base: START },
                other => other,
            };
            send(&socket, &request, &fds, false);
            assert!(process.drive(&mut session));
        }
        let memory = Arc::clone(&session.connection.memory.map);
        let driver = new_driver(&memory);
        let mut guest = Self { memory, driver, kick, socket, kept, process, session };
        while guest.socket.read(&mut [0; 64]).is_ok() {}
        assert_eq!(guest.session.describe().queues[0].state, QueueState::Running);
        guest.offer();
        guest.await_answers("before the message");
        guest
    }

    /// Offers requests for the serial number, and kicks.
    fn offer(&mut self) {
        for number in 0..REQUESTS {
            let request = GUEST_ADDR + 0x4_0000 + u64::from(number) * 0x100;
            self.memory.write(request, &[8, 0, 0, 0]).unwrap();
            self.driver.add(&[Desc::readable(request, 16), Desc::writable(request + 16, 21)], None);
        }
        self.driver.publish();
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Lets the driver set up its ring again, at the same addresses. With its first requests the
    /// ring looks like one that is as far as the old one was.
    fn replace_driver(&mut self) {
        self.memory.write(GUEST_ADDR, &[0; 0x3000]).unwrap();
        self.driver = new_driver(&self.memory);
        self.offer();
    }

    fn await_answers(&mut self, when: &str) {
        for number in 0..REQUESTS {
            let is_answered = (0..1000).any(|_| {
                self.process.io.turn(Wait::Never).unwrap();
                self.driver.take_used().is_some()
            });
            assert!(is_answered, "request {number} {when}");
        }
        self.process.turn(10);
        assert!(!self.driver.has_used(), "a request is answered twice {when}");
    }

    /// Carries the message out in steps of the session and of the IoThread, which makes this number
    /// of turns in each. The process dies after some steps, or at a moment of its keeper. The
    /// driver offers requests when the ring starts, or before if the ring is new. Returns true if
    /// the process has carried the message out.
    fn carry_out(&mut self, message: &Request, steps: usize, turns: usize) -> bool {
        let mut has_offered = matches!(message, Request::SetVringBase { base: START, .. });
        if has_offered {
            self.replace_driver();
        }
        send(&self.socket, message, &[], true);
        let mut is_done = false;
        for step in 0..steps {
            let progress = || self.session.progress(Instant::now());
            match step % 2 {
                0 => match catch_unwind(AssertUnwindSafe(progress)) {
                    Ok(SessionProgress::Waiting) => {}
                    Ok(SessionProgress::Handled) => is_done = true,
                    Ok(other) => panic!("{other:?}"),
                    Err(_) => break,
                },
                _ => self.process.turn(turns),
            }
            let state = self.session.describe().queues[0].state;
            if state == QueueState::Starting && !has_offered {
                self.offer();
                has_offered = true;
            }
            if is_done {
                break;
            }
        }
        if !is_done {
            self.continue_elsewhere(message);
        }
        if !has_offered {
            self.offer();
        }
        is_done
    }

    /// Lets the next process continue.
    fn continue_elsewhere(&mut self, message: &Request) {
        let (next, going_on) = next_process(&self.kept, true);
        // The dead process closes nothing: its queues would stop.
        std::mem::forget(std::mem::replace(&mut self.session, going_on));
        std::mem::forget(std::mem::replace(&mut self.process, next));
        let ring = &self.session.connection.rings[0];
        if let Request::SetVringBase { base, .. } = *message {
            let is_new = account_version(&self.session) == [0; 2];
            assert!(!is_new || ring.base == base, "it would start at {:#x}", ring.base);
        }
        self.session.keep_with(mortal(&self.kept, NEVER));
        self.session.begin_resume();
        assert!(self.process.drive(&mut self.session), "it died again");
    }

    /// Checks that all requests have one answer, and so has the message.
    fn check_and_end(mut self, when: &str) {
        self.await_answers(when);
        self.offer();
        self.await_answers(when);
        assert_eq!(read_answer(&mut self.socket), [0; 8], "{when}");
        assert!(self.socket.read(&mut [0]).is_err(), "an answer came twice {when}");
        end(self.process, self.session);
    }
}

fn new_driver(memory: &Arc<GuestMemory>) -> PackedDriver<Arc<GuestMemory>> {
    let config = QueueConfig {
        size: 16,
        desc_table: GUEST_ADDR,
        avail_ring: GUEST_ADDR + 0x1000,
        used_ring: GUEST_ADDR + 0x2000,
        event_idx: false,
        indirect: false,
        next_avail: 0x8000,
    };
    PackedDriver::new(Arc::clone(memory), config)
}

/// The places of a ring that has served the first requests.
fn place_of_next() -> u32 {
    let slot = 2 * REQUESTS;
    START | slot | slot << 16
}

/// A page that the next process writes without a mark would be lost with its guest's move.
#[test]
fn the_next_process_continues_with_the_log_of_written_pages() {
    let mut guest = Guest::new();
    guest.session.connection.protocol_features |= protocol_feature::LOG_SHMFD;
    let log = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    let area = LogArea { size: (GUEST_ADDR + MEMORY_BYTES) / 4096 / 8, file_offset: 0 };
    rustix::fs::ftruncate(&log, area.size).unwrap();
    let addresses = RingAddresses {
        desc_table: GUEST_ADDR,
        avail_ring: GUEST_ADDR + 0x1000,
        used_ring: GUEST_ADDR + 0x2000,
    };
    for (request, fds) in [
        (Request::SetLogBase(area), vec![log.try_clone().unwrap()]),
        (Request::SetVringAddr { index: 0, addresses, log: Some(GUEST_ADDR + 0x2000) }, vec![]),
        (Request::SetFeatures(PACKED_FEATURES | F_LOG_ALL), vec![]),
    ] {
        send(&guest.socket, &request, &fds, false);
        assert!(guest.process.drive(&mut guest.session));
    }
    let log = File::from(log);
    let take_marks = || {
        let mut marks = [0; 64];
        log.read_exact_at(&mut marks, 0).unwrap();
        log.write_all_at(&[0; 64], 0).unwrap();
        let pages = (0..512).filter(|page| marks[page / 8] & 1 << (page % 8) != 0);
        pages.map(|page| page as u64 * 4096).collect::<Vec<_>>()
    };
    let written = [GUEST_ADDR, GUEST_ADDR + 0x2000, GUEST_ADDR + 0x4_0000];
    take_marks();
    guest.offer();
    guest.await_answers("before the kill");
    assert_eq!(take_marks(), written);
    guest.offer();
    guest.continue_elsewhere(&Request::GetFeatures);
    guest.await_answers("after the kill");
    assert_eq!(take_marks(), written);
    end(guest.process, guest.session);
}

/// Changes of a ring that runs.
fn changes() -> [Request; 4] {
    [
        Request::SetVringBase { index: 0, base: place_of_next() },
        Request::SetVringBase { index: 0, base: START },
        Request::SetVringNum { index: 0, size: 16 },
        Request::SetFeatures(PACKED_FEATURES | 1 << F_FLUSH),
    ]
}

#[test]
fn no_request_is_lost_or_repeated_by_a_kill_after_any_step_of_a_restart() {
    for (change, turns) in changes().into_iter().flat_map(|it| [(it.clone(), 1), (it, 5)]) {
        for steps in 0.. {
            let mut guest = Guest::new();
            let is_done = guest.carry_out(&change, steps, turns);
            guest.check_and_end(&format!("of {change:?}, killed after {steps} steps of {turns}"));
            if is_done {
                assert!(steps > 4, "{steps}");
                break;
            }
        }
    }
}

#[test]
fn no_request_is_lost_or_repeated_by_a_kill_beside_any_state_of_a_restart() {
    for change in changes() {
        for moment in 0.. {
            let mut is_done = false;
            for is_kept in [false, true] {
                let mut guest = Guest::new();
                let moments = guest.kept.lock().unwrap().moments;
                guest.session.keep_with(mortal(&guest.kept, (moments + 1 + moment, is_kept)));
                is_done = guest.carry_out(&change, usize::MAX, 5);
                let death = format!("of {change:?} with a kill at state {moment}, {is_kept}");
                guest.check_and_end(&death);
            }
            if is_done {
                assert!(moment > 3, "{moment}");
                break;
            }
        }
    }
}
