//! The tasks of one request queue, and those who wait for some of them to end.
//!
//! A request that the kernel has cannot be taken back. So a task that is aborted goes on, and is
//! answered as one that was aborted when it is done: until then its buffers are in use. Whoever
//! aborts tasks waits for that. Tasks that the driver has made available, and that nobody has
//! popped yet, are meant too (virtio 1.3, section 5.6.6.2).
//!
//! Whoever waits costs a queue one entry, which counts its tasks, however many these are: a driver
//! may fill its control queue with functions, and each is to be about what came before it.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};

use super::address::{UnitAddress, UnitNumber};
pub(crate) use super::awaited::{Left, Waiting};
use super::uses::{NOT, Uses};

/// How a task ends that somebody has aborted: a response of virtio-scsi.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Abort {
    /// By ABORT TASK and what is like it, which its initiator has asked for.
    Aborted,
    /// By a reset, or by another initiator: drivers then begin it again.
    Reset,
}

/// What is done with tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// They are counted.
    Look,
    /// They end like this, and are waited for.
    Abort(Abort),
    /// The same of those that have begun. Commands that abort others ask for this: a queue may pop
    /// no chain before the command has ended that waits for it.
    AbortBegun(Abort),
    /// Those that have the medium are waited for.
    Drain,
    /// Those that have begun are waited for, unless they wait for their disk's limits, or for it to
    /// carry out what it has failed: they look at it again before they go on.
    Settle,
    /// Those that have begun are waited for, whatever they wait for.
    Finish,
}

/// Which tasks are meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    /// As initiators name them: by tag, unit or target.
    Task(UnitAddress, u64),
    At(UnitAddress),
    Target(u8),
    /// All of a unit, and of none that comes to its address after it.
    Unit(UnitNumber),
    /// All of a unit but this one.
    Others(UnitNumber, TaskId),
}

/// A task, among those of all queues. Drivers may give a tag to several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TaskId {
    queue: u64,
    number: u16,
}

impl TaskId {
    /// For a test that is no task.
    #[cfg(test)]
    pub(crate) const NONE: Self = Self { queue: 0, number: 0 };
}

/// Numbers of queues, in the whole process.
static LAST_QUEUE: AtomicU64 = AtomicU64::new(0);

impl Which {
    fn covers(self, task: &Task, id: TaskId) -> bool {
        match self {
            Self::Task(address, tag) => task.address == address && task.tag == tag,
            Self::At(address) => task.address == address,
            Self::Target(target) => task.address.target == target,
            Self::Unit(unit) => task.unit == Some(unit),
            Self::Others(unit, own) => task.unit == Some(unit) && id != own,
        }
    }
}

/// The place of a task, which others have after it. It is written field by field: one that is made
/// elsewhere and moved is read by words that no processor can take from the stores before.
struct Task {
    /// Whether there is one.
    is_open: bool,
    address: UnitAddress,
    /// The unit that is there when it begins.
    unit: Option<UnitNumber>,
    tag: u64,
    /// How many chains of its queue were popped by then, with its own.
    place: u64,
    uses: Uses,
    abort: Option<Abort>,
}

impl Task {
    const NONE: Self = Self {
        is_open: false,
        address: UnitAddress { target: 0, lun: 0 },
        unit: None,
        tag: 0,
        place: 0,
        uses: Uses::medium_since(NOT),
        abort: None,
    };

    #[inline(always)]
    fn begin(
        &mut self,
        (address, unit): (UnitAddress, Option<UnitNumber>),
        tag: u64,
        place: u64,
        medium_since: u64,
    ) {
        self.is_open = true;
        self.address = address;
        self.unit = unit;
        self.tag = tag;
        self.place = place;
        self.uses = Uses::medium_since(medium_since);
        self.abort = None;
    }
}

/// Tasks that are meant, as long as some are to be popped or to end.
struct Cover {
    which: Which,
    how: How,
    /// The place of the last that may be meant.
    until: u64,
    /// How many covers came before it.
    before: u64,
    /// The last of them was popped.
    is_passed: bool,
    /// Those that were found, are waited for and have not ended.
    open: usize,
    left: Left,
}

impl Cover {
    /// Whether it is about a task.
    fn finds(&self, task: &Task, id: TaskId) -> bool {
        task.place <= self.until && self.which.covers(task, id)
    }

    /// Whether it waits for a task that it finds.
    fn awaits(&self, uses: Uses) -> bool {
        match self.how {
            How::Look => false,
            How::Drain => uses.medium_since <= self.before,
            How::Settle => uses.disk_since <= self.before,
            How::Abort(_) | How::AbortBegun(_) | How::Finish => true,
        }
    }

    /// A task is there that it finds, maybe.
    fn meet(&mut self, task: &mut Task, id: TaskId) {
        if !self.finds(task, id) {
            return;
        }
        self.left.find();
        if let How::Abort(abort) | How::AbortBegun(abort) = self.how {
            task.abort = task.abort.or(Some(abort));
        }
        self.open += usize::from(self.awaits(task.uses));
    }

    /// One of those that it has counted ends, or need not be waited for any more.
    fn leave(&mut self) {
        assert!(self.open > 0, "a task ends that nobody has counted");
        self.open -= 1;
    }

    fn is_done(&self) -> bool {
        self.is_passed && self.open == 0
    }
}

impl Drop for Cover {
    fn drop(&mut self) {
        if !self.is_passed {
            self.left.lose();
        }
    }
}

/// The tasks of one request queue, on its IoThread.
pub(crate) struct Tasks {
    queue: u64,
    /// By their numbers.
    tasks: RefCell<Vec<Task>>,
    /// How many chains were popped, as far as avail entries tell: they begin anew after 2^16.
    popped: Cell<u64>,
    covers: RefCell<Vec<Cover>>,
    has_covers: Cell<bool>,
    /// How many there ever were.
    covers_made: Cell<u64>,
    /// Tasks that use nothing, since they wait.
    outside: Cell<usize>,
}

impl Tasks {
    /// Of a queue that pops this avail entry next.
    pub(crate) fn new(next_avail: u16) -> Self {
        Self {
            queue: LAST_QUEUE.fetch_add(1, Ordering::Relaxed) + 1,
            tasks: RefCell::default(),
            popped: Cell::new(next_avail.into()),
            covers: RefCell::default(),
            has_covers: Cell::default(),
            covers_made: Cell::default(),
            outside: Cell::default(),
        }
    }

    /// A command has come with this head, whose chain was the one before avail entry `next_avail`:
    /// its task begins, and uses the medium unless it says otherwise. Returns its number: the head,
    /// unless the driver has given that to several chains at once. `publish` shows the driver what
    /// is pushed: those who wait answer on another queue, and tasks that have ended come first.
    ///
    /// # Errors
    ///
    /// The number, and how it is to end, if it was aborted before it came.
    #[inline(always)]
    pub(crate) fn begin(
        &self,
        head: u16,
        unit: (UnitAddress, Option<UnitNumber>),
        tag: u64,
        next_avail: u16,
        publish: impl FnOnce(),
    ) -> Result<u16, (u16, Abort)> {
        let place = self.count(next_avail);
        let tasks = &mut *self.tasks.borrow_mut();
        let (number, task) = match tasks.get_mut(usize::from(head)) {
            Some(task) if !task.is_open => (head, task),
            _ => add(tasks, head),
        };
        task.begin(unit, tag, place, self.covers_made.get());
        if !self.has_covers.get() {
            return Ok(number);
        }
        self.meet_covers(tasks, number, publish)
    }

    /// The chain before avail entry `next_avail` is no task of a unit. Drop the result when its
    /// answer is in the ring: its driver need not see it as we do.
    #[inline]
    pub(crate) fn skip(&self, next_avail: u16) -> Ended {
        let place = self.count(next_avail);
        let done = if self.has_covers.get() { self.pass(place) } else { Vec::new() };
        Ended { abort: None, waiting: boxed(done) }
    }

    /// A chain was popped. Returns its place.
    #[inline]
    fn count(&self, next_avail: u16) -> u64 {
        let popped = self.popped.get();
        let place = popped + u64::from(next_avail.wrapping_sub(low_half_of(popped)));
        self.popped.set(place);
        place
    }

    /// What has not been popped never will be: the ring is bad.
    pub(crate) fn forget_covers(&self) {
        let mut covers = self.covers.borrow_mut();
        for cover in covers.iter_mut().filter(|cover| !cover.is_passed) {
            cover.left.lose();
            cover.is_passed = true;
        }
        let done = self.take_done(&mut covers);
        drop(covers);
        drop(done);
    }

    #[cold]
    fn meet_covers(
        &self,
        tasks: &mut [Task],
        number: u16,
        publish: impl FnOnce(),
    ) -> Result<u16, (u16, Abort)> {
        let id = self.id(number);
        let task = &mut tasks[usize::from(number)];
        self.covers.borrow_mut().iter_mut().for_each(|cover| cover.meet(task, id));
        let done = self.pass(task.place);
        if !done.is_empty() {
            publish();
        }
        drop(done);
        task.abort.map_or(Ok(number), |abort| Err((number, abort)))
    }

    #[cold]
    fn pass(&self, place: u64) -> Vec<Cover> {
        let mut covers = self.covers.borrow_mut();
        for cover in covers.iter_mut().filter(|cover| cover.until <= place) {
            cover.is_passed = true;
        }
        self.take_done(&mut covers)
    }

    /// Those that nobody has to wait for any more.
    fn take_done(&self, covers: &mut Vec<Cover>) -> Vec<Cover> {
        let mut done = Vec::new();
        let mut at = 0;
        while let Some(cover) = covers.get(at) {
            if cover.is_done() {
                done.push(covers.swap_remove(at));
            } else {
                at += 1;
            }
        }
        self.has_covers.set(!covers.is_empty());
        done
    }

    /// The task with this number, for all queues.
    pub(crate) fn id(&self, number: u16) -> TaskId {
        TaskId { queue: self.queue, number }
    }

    /// Whether the task goes on.
    ///
    /// # Errors
    ///
    /// How it is to end, if it was aborted.
    #[inline]
    pub(crate) fn check(&self, number: u16) -> Result<(), Abort> {
        let tasks = self.tasks.borrow();
        tasks[usize::from(number)].abort.map_or(Ok(()), Err)
    }

    /// The task uses the medium from now on.
    #[cold]
    pub(crate) fn takes_medium(&self, number: u16) {
        let task = &mut self.tasks.borrow_mut()[usize::from(number)];
        task.uses.medium_since = task.uses.medium_since.min(self.covers_made.get());
    }

    /// The task that has begun does not use the medium, or not yet.
    #[cold]
    pub(crate) fn leaves_medium(&self, number: u16) {
        self.tasks.borrow_mut()[usize::from(number)].uses.medium_since = NOT;
    }

    /// The task waits, and uses nothing until it [steps in](Self::steps_in).
    #[cold]
    pub(crate) fn steps_out(&self, number: u16) {
        let tasks = &mut *self.tasks.borrow_mut();
        let task = &mut tasks[usize::from(number)];
        let before = task.uses;
        let had_medium = before.medium_since != NOT;
        task.uses = Uses { disk_since: NOT, medium_since: NOT, had_medium };
        self.outside.set(self.outside.get() + 1);
        let id = self.id(number);
        let mut covers = self.covers.borrow_mut();
        for cover in covers.iter_mut() {
            if cover.finds(task, id) && cover.awaits(before) && !cover.awaits(task.uses) {
                cover.leave();
            }
        }
        let done = self.take_done(&mut covers);
        drop(covers);
        drop(done);
    }

    /// Whether a task that has stepped out used the medium before.
    pub(crate) fn had_medium(&self, number: u16) -> bool {
        self.tasks.borrow()[usize::from(number)].uses.had_medium
    }

    /// The task uses again what it used. Those who wait already do not wait for it.
    #[cold]
    pub(crate) fn steps_in(&self, number: u16) {
        let now = self.covers_made.get();
        let task = &mut self.tasks.borrow_mut()[usize::from(number)];
        let medium_since = if task.uses.had_medium { now } else { NOT };
        task.uses = Uses { disk_since: now, medium_since, had_medium: false };
        self.ends_outside();
    }

    /// A task that has stepped out ends, and does not step in.
    pub(crate) fn ends_outside(&self) {
        self.outside.set(self.outside.get() - 1);
    }

    /// How many tasks wait that have stepped out.
    pub(crate) fn outside(&self) -> usize {
        self.outside.get()
    }

    /// A task is done, and nothing of it will be written any more but its answer. Drop the result
    /// when that is in the ring.
    #[inline]
    pub(crate) fn end(&self, number: u16) -> Ended {
        let tasks = &mut *self.tasks.borrow_mut();
        let task = &mut tasks[usize::from(number)];
        assert!(task.is_open, "a task ends once");
        let abort = task.abort;
        let has_covers = self.has_covers.get();
        let waiting = if has_covers { self.leave_covers(task, number) } else { None };
        task.is_open = false;
        Ended { abort, waiting }
    }

    #[cold]
    #[expect(clippy::box_collection, reason = "see `Ended`")]
    fn leave_covers(&self, task: &Task, number: u16) -> Option<Box<Vec<Cover>>> {
        let id = self.id(number);
        let mut covers = self.covers.borrow_mut();
        for cover in covers.iter_mut() {
            if cover.finds(task, id) && cover.awaits(task.uses) {
                cover.leave();
            }
        }
        boxed(self.take_done(&mut covers))
    }

    /// Does what `how` says with tasks, and has `left` wait for their end: those that have begun,
    /// and, if they are counted or all aborted, those of so many chains `ahead`; but for those of
    /// the last chains, if that is less than none. Returns whether it waits for chains.
    pub(crate) fn cover(&self, which: Which, how: How, ahead: i64, left: Left) -> bool {
        let popped = self.popped.get();
        let before = self.covers_made.replace(self.covers_made.get() + 1);
        let meant = matches!(how, How::Look | How::Abort(_));
        let until = popped.saturating_add_signed(if meant { ahead } else { 0 });
        let is_passed = until <= popped;
        let mut cover = Cover { which, how, until, before, is_passed, open: 0, left };
        for (number, task) in (0..).zip(self.tasks.borrow_mut().iter_mut()) {
            if task.is_open {
                cover.meet(task, self.id(number));
            }
        }
        if !cover.is_done() {
            self.covers.borrow_mut().push(cover);
            self.has_covers.set(true);
        }
        !is_passed
    }
}

/// As an [`Ended`] has them.
#[inline]
#[expect(clippy::box_collection, reason = "see `Ended`")]
fn boxed(covers: Vec<Cover>) -> Option<Box<Vec<Cover>>> {
    (!covers.is_empty()).then(|| Box::new(covers))
}

/// No task has had so high a number before, or another one has it. Returns one that is free.
#[cold]
fn add(tasks: &mut Vec<Task>, head: u16) -> (u16, &mut Task) {
    let at = usize::from(head);
    if tasks.len() <= at {
        tasks.resize_with(at + 1, || Task::NONE);
    }
    let number =
        if tasks[at].is_open { tasks.iter().position(|task| !task.is_open) } else { Some(at) };
    let number = number.unwrap_or_else(|| {
        tasks.push(Task::NONE);
        tasks.len() - 1
    });
    (iomem::fits(number, "a number of chains"), &mut tasks[number])
}

/// What avail entries have of a place.
#[inline]
fn low_half_of(place: u64) -> u16 {
    let [low, high, ..] = place.to_le_bytes();
    u16::from_le_bytes([low, high])
}

/// A task that has ended, or none. Those who wait for it hear that when this is dropped, at the
/// latest.
#[derive(Default)]
pub(crate) struct Ended {
    pub(crate) abort: Option<Abort>,
    /// One word, as every request has it.
    #[expect(clippy::box_collection, reason = "one word is less than three to hand on")]
    waiting: Option<Box<Vec<Cover>>>,
}

impl Ended {
    /// Tells those who wait, after `first`, which is done for them.
    #[inline]
    pub(crate) fn tell(self, first: impl FnOnce()) {
        if self.waiting.is_some() {
            first();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;
    use std::task::{Context, Poll, Waker};

    use super::*;

    const UNIT: UnitAddress = UnitAddress { target: 0, lun: 1 };
    const OTHER: UnitAddress = UnitAddress { target: 0, lun: 2 };

    static NUMBER: LazyLock<UnitNumber> = LazyLock::new(UnitNumber::next);

    impl Tasks {
        /// How many wait for tasks, or for chains that nobody has popped.
        pub(crate) fn awaited(&self) -> usize {
            self.covers.borrow().len()
        }
    }

    fn begin(tasks: &Tasks, tag: u64, next_avail: u16) -> u16 {
        begin_at(tasks, (UNIT, Some(*NUMBER)), tag, next_avail)
    }

    /// Begins a task with a number that is free.
    fn begin_at(
        tasks: &Tasks,
        unit: (UnitAddress, Option<UnitNumber>),
        tag: u64,
        next_avail: u16,
    ) -> u16 {
        let free = tasks.tasks.borrow().iter().take_while(|task| task.is_open).count();
        let head = free.try_into().unwrap();
        match tasks.begin(head, unit, tag, next_avail, || ()) {
            Ok(number) | Err((number, _)) => {
                assert_eq!(number, head);
                number
            }
        }
    }

    fn poll(waiting: &Waiting) -> Poll<usize> {
        waiting.poll(&Context::from_waker(Waker::noop()))
    }

    #[test]
    fn whoever_aborts_tasks_waits_until_they_have_ended() {
        let tasks = Tasks::new(0);
        let [one, two, three] = [(UNIT, 1), (UNIT, 2), (OTHER, 1)]
            .map(|(unit, tag)| begin_at(&tasks, (unit, None), tag, 1));
        let (waiting, left) = Waiting::new();
        tasks.cover(Which::At(UNIT), How::Abort(Abort::Aborted), 0, left);
        assert_eq!(poll(&waiting), Poll::Pending);
        assert_eq!(tasks.end(three).abort, None);
        assert_eq!(tasks.end(one).abort, Some(Abort::Aborted));
        assert_eq!(poll(&waiting), Poll::Pending);
        let ended = tasks.end(two);
        assert_eq!(poll(&waiting), Poll::Pending, "its answer is not in the ring");
        drop(ended);
        assert_eq!(poll(&waiting), Poll::Ready(2));
    }

    #[test]
    fn a_head_may_come_again_before_it_is_answered() {
        let tasks = Tasks::new(0);
        let unit = (UNIT, Some(*NUMBER));
        let numbers = [3, 3, 0, 3, 3].map(|head| tasks.begin(head, unit, 9, 1, || ()).unwrap());
        assert_eq!(numbers, [3, 0, 1, 2, 4]);
        let (waiting, left) = Waiting::new();
        tasks.cover(Which::At(UNIT), How::Abort(Abort::Aborted), 0, left);
        for number in numbers {
            assert_eq!(poll(&waiting), Poll::Pending);
            assert_eq!(tasks.end(number).abort, Some(Abort::Aborted));
        }
        assert_eq!(poll(&waiting), Poll::Ready(5));
    }

    #[test]
    fn chains_that_nobody_has_popped_are_meant_and_later_ones_are_not() {
        let tasks = Tasks::new(0xffff);
        let (waiting, left) = Waiting::new();
        tasks.cover(Which::Task(UNIT, 7), How::Abort(Abort::Reset), 2, left);
        assert_eq!(poll(&waiting), Poll::Pending);
        let other = begin(&tasks, 8, 0);
        let meant = begin(&tasks, 7, 1);
        let later = begin(&tasks, 7, 2);
        assert_eq!(
            [other, meant, later].map(|number| tasks.check(number)),
            [Ok(()), Err(Abort::Reset), Ok(())]
        );
        assert_eq!(poll(&waiting), Poll::Pending);
        drop(tasks.end(meant));
        assert_eq!(poll(&waiting), Poll::Ready(1));
        assert!(!waiting.has_lost());
    }

    /// Whoever waits may answer on another thread at once.
    #[test]
    fn what_has_ended_is_shown_before_those_are_told_who_wait_for_it() {
        let next_is_a_task = |tasks: &Tasks, publish: &dyn Fn()| {
            tasks.begin(1, (OTHER, None), 1, 2, publish).unwrap();
        };
        let next_is_none = |tasks: &Tasks, publish: &dyn Fn()| tasks.skip(2).tell(publish);
        type Pass<'a> = &'a dyn Fn(&Tasks, &dyn Fn());
        for pass in [&next_is_a_task as Pass<'_>, &next_is_none] {
            let tasks = Tasks::new(0);
            let one = begin(&tasks, 1, 1);
            let (waiting, left) = Waiting::new();
            tasks.cover(Which::At(UNIT), How::Abort(Abort::Aborted), 1, left);
            drop(tasks.end(one));
            let is_shown = Cell::new(false);
            pass(&tasks, &|| {
                assert_eq!(poll(&waiting), Poll::Pending, "its answer is not in the ring");
                is_shown.set(true);
            });
            assert!(is_shown.get());
            assert_eq!(poll(&waiting), Poll::Ready(1));
        }
    }

    #[test]
    fn only_tasks_that_have_the_medium_are_drained() {
        let tasks = Tasks::new(0);
        // A tag tells tasks apart only where a driver keeps to the rules.
        let [one, two, own] = [3, 2, 3].map(|tag| begin(&tasks, tag, 1));
        let elsewhere = Tasks::new(0);
        let other = begin(&elsewhere, 3, 1);
        tasks.leaves_medium(two);
        let (waiting, left) = Waiting::new();
        let which = Which::Others(*NUMBER, tasks.id(own));
        tasks.cover(which, How::Drain, 8, left.clone());
        elsewhere.cover(which, How::Drain, 8, left);
        assert_eq!(poll(&waiting), Poll::Pending);
        assert_eq!(tasks.end(one).abort, None);
        assert_eq!(poll(&waiting), Poll::Pending);
        elsewhere.end(other);
        assert!(poll(&waiting).is_ready());
        assert_eq!([two, own].map(|number| tasks.check(number)), [Ok(()); 2]);
    }

    #[test]
    fn what_is_done_with_tasks_of_a_unit_is_nothing_to_its_successor() {
        let tasks = Tasks::new(0);
        let [before, after] = [*NUMBER, UnitNumber::next()].map(Some);
        let [one, two] = [before, after].map(|unit| begin_at(&tasks, (UNIT, unit), 1, 1));
        let (waiting, left) = Waiting::new();
        tasks.cover(Which::Unit(*NUMBER), How::Abort(Abort::Reset), 1, left);
        let three = begin_at(&tasks, (UNIT, after), 1, 2);
        assert_eq!(tasks.check(one), Err(Abort::Reset));
        assert_eq!([two, three].map(|number| tasks.check(number)), [Ok(()); 2]);
        drop(tasks.end(one));
        assert_eq!(poll(&waiting), Poll::Ready(1));
    }

    #[test]
    fn a_command_aborts_tasks_that_have_begun() {
        let tasks = Tasks::new(0);
        let begun = begin(&tasks, 1, 1);
        let (waiting, left) = Waiting::new();
        let how = How::AbortBegun(Abort::Reset);
        tasks.cover(Which::Unit(*NUMBER), how, 8, left);
        let later = begin(&tasks, 2, 2);
        let found = [begun, later].map(|number| tasks.check(number));
        assert_eq!(found, [Err(Abort::Reset), Ok(())]);
        assert_eq!(poll(&waiting), Poll::Pending);
        drop(tasks.end(begun));
        assert_eq!(poll(&waiting), Poll::Ready(1));
        assert!(!waiting.has_lost());
    }

    #[test]
    fn who_only_asks_does_not_wait_and_a_queue_that_goes_is_not_waited_for() {
        let tasks = Tasks::new(0);
        begin(&tasks, 1, 1);
        let (waiting, left) = Waiting::new();
        tasks.cover(Which::Target(0), How::Look, 0, left);
        assert_eq!(poll(&waiting), Poll::Ready(1));
        let (waiting, left) = Waiting::new();
        tasks.cover(Which::Target(0), How::Abort(Abort::Reset), 8, left);
        assert!(!waiting.has_lost());
        drop(tasks);
        assert!(poll(&waiting).is_ready() && waiting.has_lost());
    }
}
