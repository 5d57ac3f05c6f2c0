//! The model guest: it makes requests on all its queues, sleeps until a call, and checks answers.

mod answers;
mod command;
pub(crate) mod copy;
mod outcomes;
pub(crate) mod ring;
mod rush;
mod scsi;
mod snapshot;

use std::cell::{Cell, OnceCell, RefCell};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::{Rc, Weak};

use blockio::engine::kernel::sim::is_readable;
use device::Ring;
use iomem::fits;
use rustix::event::{EventfdFlags, eventfd};
use virtqueue::driver::{Desc, Used};

use crate::chain_request::ChainRequest;
use crate::disk::Disk;
use crate::failure::Failure;
use crate::layout::{AREA_BYTES, Layout, TABLE_OFFSET};
use crate::log::Log;
use crate::plan::Plan;
use crate::ram::Ram;
use crate::request::Request;
use crate::rng::Rng;
use crate::scsi::{CONTROL_QUEUE, EVENT_QUEUE};
use crate::world::World;
use copy::MemoryCopy;
use ring::GuestRing;
use scsi::Scsi;
use snapshot::Survivors;

/// The guest's attention to used elements of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attention {
    /// Checks the used ring.
    Awake,
    /// Asked for a call, and must check once more.
    Armed,
    /// Waits for the call.
    Asleep,
}

/// A request that is out.
struct Outstanding {
    request: ChainRequest,
    pieces: Vec<Desc>,
    area: u64,
    /// The area after the guest has written it.
    image: Vec<u8>,
    begin: u64,
    /// Its place in the ring.
    entry: u16,
    /// The time at which the device was seen to have taken the request.
    popped: Option<u64>,
}

pub(crate) struct GuestQueue {
    ring: Ring,
    driver: GuestRing,
    pub(crate) kick: Option<OwnedFd>,
    pub(crate) call: Option<OwnedFd>,
    attention: Attention,
    /// The place of the first published chain for which the kick is not yet decided.
    published_from: Option<u16>,
    outstanding: Vec<Option<Outstanding>>,
    /// By head: the area at the answer to its last request. It must not change until the next one.
    answered_areas: Vec<Option<Vec<u8>>>,
}

struct State {
    rng: Rng,
    queues: Vec<GuestQueue>,
    requests_left: u64,
    /// Task management functions to come.
    functions_left: u64,
    scsi: Scsi,
    /// Extra requests of the first queue, made one by one without a pause.
    rush_left: u64,
    survivors: Survivors,
    failure: Option<Failure>,
}

pub(crate) struct Guest {
    /// The plan of the guest's device.
    plan: Plan,
    /// Number of the device.
    device: usize,
    /// The guest's own disk, or all disks with virtio-scsi.
    disks: Vec<Rc<Disk>>,
    /// All guests, which share their disks with virtio-scsi.
    pub(crate) peers: OnceCell<Vec<Weak<Self>>>,
    world: Rc<World>,
    layout: Layout,
    ram: Rc<Ram>,
    /// The migration in progress.
    copy: RefCell<Option<MemoryCopy>>,
    copy_rng: RefCell<Rng>,
    /// Chooses the steps between stores of the device.
    store_rng: RefCell<Rng>,
    /// Logs that the device has dropped.
    retired: RefCell<Vec<Log>>,
    /// The CPUs have stopped.
    is_paused: Cell<bool>,
    next_id: Cell<u64>,
    state: RefCell<State>,
}

pub(crate) fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .expect("the simulation has too many files open")
}

pub(crate) fn duplicate(fd: Option<&OwnedFd>) -> Option<OwnedFd> {
    fd.map(|fd| fd.try_clone().expect("the simulation has too many files open"))
}

impl Guest {
    /// The guest of device number `device` with its plan.
    pub(crate) fn new(plan: &Plan, world: &Rc<World>, device: usize, disks: &[Rc<Disk>]) -> Self {
        let layout = Layout::new(plan);
        let ram = Rc::new(Ram::new(layout.map()));
        let state = State {
            rng: Rng::new(plan.seed ^ plan.schedule << 40, 3 + 100 * device as u64),
            queues: Vec::new(),
            requests_left: plan.requests,
            functions_left: if plan.scsi > 0 { plan.functions } else { 0 },
            scsi: Scsi::default(),
            rush_left: plan.rush,
            survivors: Survivors::default(),
            failure: None,
        };
        let guest = Self {
            plan: plan.clone(),
            device,
            disks: disks.to_vec(),
            peers: OnceCell::new(),
            world: Rc::clone(world),
            layout,
            ram,
            copy: RefCell::default(),
            copy_rng: RefCell::new(Rng::new(plan.seed ^ plan.schedule << 40, 600 + device as u64)),
            store_rng: RefCell::new(Rng::new(plan.seed ^ plan.schedule << 40, 700 + device as u64)),
            retired: RefCell::default(),
            is_paused: Cell::default(),
            // Numbers of writes are unique across all disks.
            next_id: Cell::new(100 + device as u64 * 1_000_000),
            state: RefCell::new(state),
        };
        guest.reboot();
        guest
    }

    /// Restarts the guest: no request is out, and the rings are empty.
    pub(crate) fn reboot(&self) {
        self.forget_migration();
        let queues = fits(self.plan.queue_count(), "a number of queues");
        let queue = |index| {
            let ring = self.layout.ring(index, ring::first_place(&self.plan));
            let memory = Rc::clone(&self.ram);
            let driver = GuestRing::new(&self.plan, memory, ring);
            GuestQueue {
                ring,
                driver,
                kick: (self.plan.no_kick == 0).then(new_eventfd),
                call: (self.plan.no_call == 0).then(new_eventfd),
                attention: Attention::Awake,
                published_from: None,
                outstanding: (0..ring.size).map(|_| None).collect(),
                answered_areas: vec![None; ring.size.into()],
            }
        };
        let state = &mut *self.state.borrow_mut();
        state.queues = (0..queues).map(queue).collect();
        state.scsi = self.new_scsi();
        state.survivors = Survivors::default();
    }

    fn trace(&self, what: impl FnOnce() -> String) {
        self.world.trace(|| format!("guest {}: {}", self.device, what()));
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn queues(&self) -> usize {
        self.state.borrow().queues.len()
    }

    pub(crate) fn eventfds(&self, queue: usize) -> (Option<OwnedFd>, Option<OwnedFd>) {
        let GuestQueue { kick, call, .. } = &self.state.borrow().queues[queue];
        (duplicate(kick.as_ref()), duplicate(call.as_ref()))
    }

    /// Replaces the eventfd for calls. The old one may still be written for a while.
    pub(crate) fn replace_call(&self, queue: usize) -> Option<OwnedFd> {
        let queue = &mut self.state.borrow_mut().queues[queue];
        queue.call = queue.call.take().map(|_| new_eventfd());
        duplicate(queue.call.as_ref())
    }

    /// Replaces the eventfd for kicks.
    pub(crate) fn replace_kick(&self, queue: usize) -> Option<OwnedFd> {
        let queue = &mut self.state.borrow_mut().queues[queue];
        queue.kick = queue.kick.take().map(|_| new_eventfd());
        duplicate(queue.kick.as_ref())
    }

    /// The place of a queue's ring, for a device that begins at this base.
    pub(crate) fn ring(&self, queue: usize, base: u32) -> Ring {
        ring::at_base(&self.plan, self.state.borrow().queues[queue].ring, base)
    }

    /// The base of a queue whose device has left no request, or these heads in its region.
    pub(crate) fn base(&self, queue: usize, left: &[usize]) -> u32 {
        self.state.borrow().queues[queue].driver.base(&self.plan, left)
    }

    /// Moves the ring of a queue that does not run to its other place.
    pub(crate) fn move_rings(&self, queue: usize) {
        let queue = &mut self.state.borrow_mut().queues[queue];
        queue.ring = Layout::moved(queue.ring);
        queue.driver.move_to(&self.plan, queue.ring);
    }

    /// The begin of the request at `next`, if a device that takes that chain now has to take it by
    /// itself: it was kicked for the chain, or has asked for no kick.
    pub(crate) fn announced(&self, queue: usize, next: u16) -> Option<u64> {
        let queue = &self.state.borrow().queues[queue];
        let end = queue.published_from.unwrap_or(queue.driver.end());
        let out = queue.outstanding.iter().flatten();
        // Requests that stay out for a lap of a packed ring had the same place.
        let begins = out.filter(|out| out.entry == next).map(|out| out.begin);
        queue.driver.has_more(next, end).then(|| begins.max().unwrap_or(0))
    }

    /// The place of the next used element.
    pub(crate) fn used_place(&self, queue: usize) -> u16 {
        self.state.borrow().queues[queue].driver.used_place()
    }

    pub(crate) fn failure(&self) -> Option<Failure> {
        self.state.borrow().failure.clone()
    }

    /// True if all requests were made and answered, and all events reported.
    pub(crate) fn is_done(&self) -> bool {
        let state = self.state.borrow();
        let queues = state.queues.iter().enumerate();
        // Buffers for events stay out for ever.
        let mut queues = queues.filter(|(index, _)| !self.is_for_events(*index));
        state.requests_left == 0
            && state.functions_left == 0
            && !(self.plan.events > 0 && state.scsi.events.is_due())
            && queues.all(|(_, queue)| queue.outstanding.iter().all(Option::is_none))
    }

    fn is_for_events(&self, queue: usize) -> bool {
        self.plan.scsi > 0 && queue == EVENT_QUEUE
    }

    pub(crate) fn describe_outstanding(&self) -> String {
        let state = self.state.borrow();
        let mut text =
            format!("\n  guest {}: {} requests to come", self.device, state.requests_left);
        for (index, queue) in state.queues.iter().enumerate() {
            for outstanding in queue.outstanding.iter().flatten() {
                let Outstanding { request, begin, .. } = outstanding;
                text += &format!("\n  queue {index}: {request}, out since {begin}");
            }
            text += &format!(
                "\n  queue {index}: guest {:?}, avail {:#x}, used {:#x}, checked {}",
                queue.attention,
                queue.driver.end(),
                queue.driver.used_place(),
                !queue.driver.has_used(),
            );
        }
        text
    }

    /// True if the guest's CPU has something to do for a queue.
    pub(crate) fn can_step(&self, queue: usize) -> bool {
        if self.is_paused.get() {
            return false;
        }
        let state = self.state.borrow();
        let wants = self.wants(&state, queue);
        let queue = &state.queues[queue];
        queue.published_from.is_some() || queue.attends() || (wants && queue.can_submit())
    }

    /// True if there is something to request on a queue.
    fn wants(&self, state: &State, index: usize) -> bool {
        match index {
            _ if self.plan.scsi == 0 => state.requests_left > 0,
            CONTROL_QUEUE => self.is_function_due(state),
            EVENT_QUEUE => {
                let out = state.queues[index].outstanding.iter().flatten().count();
                (out as u64) < self.plan.events
            }
            _ => state.requests_left > 0,
        }
    }

    /// Takes a step of the guest's CPU on some queue, at a point within a turn of an IoThread.
    pub(crate) fn act(&self) {
        let queue = {
            let Ok(mut state) = self.state.try_borrow_mut() else { return };
            let queues = state.queues.len();
            state.rng.index(queues)
        };
        if self.can_step(queue) {
            self.step(queue);
        }
    }

    pub(crate) fn step(&self, index: usize) {
        let state = &mut *self.state.borrow_mut();
        let queue = &state.queues[index];
        let mut steps: Vec<fn(&Self, &mut State, usize)> = Vec::new();
        if queue.published_from.is_some() {
            steps.push(Self::decide_kick);
        } else if queue.can_submit() && self.wants(state, index) {
            steps.push(Self::submit);
        }
        if queue.attends() || state.rng.chance(self.plan.polls) {
            steps.push(Self::attend);
        }
        if !steps.is_empty() {
            state.rng.pick(&steps)(self, state, index);
        }
    }

    fn submit(&self, state: &mut State, index: usize) {
        let batch = state.rng.between(1, self.plan.batch.max(1));
        let mut added = 0;
        for _ in 0..batch {
            if self.wants(state, index) && self.add(state, index) {
                match index {
                    _ if self.plan.scsi == 0 => state.requests_left -= 1,
                    CONTROL_QUEUE => state.functions_left -= 1,
                    EVENT_QUEUE => {}
                    _ => state.requests_left -= 1,
                }
                added += 1;
            }
        }
        let queue = &mut state.queues[index];
        if added > 0 {
            queue.published_from = Some(queue.driver.publish());
            self.trace(|| format!("queue {index}: {added} chains published"));
        }
    }

    /// Makes one request into a chain. Returns false if it does not fit now.
    fn add(&self, state: &mut State, index: usize) -> bool {
        let Some(head) = state.queues[index].driver.next_head() else { return false };
        let request = self.draw(state, index);
        let State { rng, queues, failure, scsi, .. } = state;
        let queue = &mut queues[index];
        let area = self.layout.area(index, head);
        if let Err(text) = self.check_unchanged(&mut queue.answered_areas[usize::from(head)], area)
        {
            failure.get_or_insert(Failure::new("late write", text));
        }
        let mut image = vec![0; fits(AREA_BYTES, "the size of an area")];
        let fill = rng.next().to_le_bytes()[0] | 1;
        image.fill(fill);
        let indirect = self.plan.indirect > 0 && rng.chance(600);
        let room = if indirect { 60 } else { queue.driver.room() };
        let pieces = request.message().lay_out(&self.plan, rng, area, &mut image, room);
        let Some(pieces) = pieces else { return false };
        self.ram.write(area, &image).expect("areas are mapped");
        let begin = self.world.tick();
        let entry = queue.driver.next_place();
        queue.driver.add(&pieces, indirect.then_some(area + TABLE_OFFSET));
        // The device may not change the table either.
        self.ram.read(area, &mut image).expect("areas are mapped");
        match &request {
            ChainRequest::Blk(request) => self.disks[0].begin(&request.disk_effect(), begin),
            request => self.begin_scsi(scsi, request, begin),
        }
        self.trace(|| format!("queue {index}: {request}, {} buffers", pieces.len()));
        let outstanding = Outstanding { request, pieces, area, image, begin, entry, popped: None };
        queue.outstanding[usize::from(head)] = Some(outstanding);
        true
    }

    fn draw(&self, state: &mut State, index: usize) -> ChainRequest {
        if self.plan.scsi > 0 {
            return self.draw_scsi(state, index);
        }
        let disk = &self.disks[0];
        let is_free =
            |first: u64, count: u64| self.plan.no_overlap == 0 || disk.is_free(first, count);
        let request = Request::draw(&self.plan, &mut state.rng, self.next_id.get(), &is_free);
        self.next_id.set(self.next_id.get() + 1);
        ChainRequest::Blk(request)
    }

    fn decide_kick(&self, state: &mut State, index: usize) {
        let queue = &mut state.queues[index];
        let Some(from) = queue.published_from.take() else { return };
        let wanted = queue.driver.needs_kick(from);
        self.trace(|| format!("queue {index}: kick: {wanted}"));
        if let Some(kick) = queue.kick.as_ref().filter(|_| wanted) {
            write_eventfd(kick);
        }
    }

    /// Checks for used elements.
    fn attend(&self, state: &mut State, index: usize) {
        let queue = &mut state.queues[index];
        if queue.attention == Attention::Asleep {
            if let Some(call) = &queue.call {
                // Calls that came together count as one. There may be none if the guest only polls.
                let _ = rustix::io::read(call, &mut [0; 8]);
            }
            self.trace(|| format!("queue {index}: wakes up"));
            queue.attention = Attention::Awake;
        }
        let ring = &queue.driver;
        if queue.attention == Attention::Awake {
            ring.disable_calls();
        }
        if ring.has_used() {
            queue.attention = Attention::Awake;
            self.take_answer(state, index);
        } else if queue.attention == Attention::Awake {
            ring.enable_calls();
            queue.attention = Attention::Armed;
        } else {
            queue.attention = Attention::Asleep;
        }
    }

    fn take_answer(&self, state: &mut State, index: usize) {
        let device = self.device;
        let queue = &mut state.queues[index];
        let Some(Used { head: id, bytes: len }) = queue.driver.take_used() else { return };
        let slot = usize::try_from(id).ok().and_then(|id| queue.outstanding.get_mut(id));
        let Some(outstanding) = slot.and_then(Option::take) else {
            let text = format!(
                "device {device}, queue {index}: a used element for head {id}, which is not out"
            );
            state.failure.get_or_insert(Failure::new("bad answer", text));
            return;
        };
        let end = self.world.tick();
        match self.check_answer(state, &outstanding, len, end) {
            Ok(found) => {
                state.queues[index].answered_areas[fits::<_, usize>(id, "a head")] = Some(found)
            }
            Err(text) => {
                let request = &outstanding.request;
                let text = format!("device {device}, queue {index}: {request}: {text}");
                state.failure.get_or_insert(Failure::new("bad answer", text));
            }
        }
    }
}

impl GuestQueue {
    fn attends(&self) -> bool {
        match self.attention {
            Attention::Awake | Attention::Armed => true,
            // A guest without a call keeps checking the ring. Only checks that find
            // something count as steps, or a hang would never show.
            Attention::Asleep => match &self.call {
                Some(call) => is_readable(call.as_fd()),
                None => self.driver.has_used(),
            },
        }
    }

    fn can_submit(&self) -> bool {
        self.published_from.is_none() && self.driver.room() >= 2
    }

    /// True if the device has answered the chain with this head, and the guest has not seen it.
    fn is_answered(&self, head: usize) -> bool {
        self.driver.unseen().into_iter().any(|used| usize::try_from(used) == Ok(head))
    }
}

fn write_eventfd(fd: &OwnedFd) {
    // The counter cannot overflow in the life of a simulation.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}
