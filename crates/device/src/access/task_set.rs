//! The tasks of one request queue, and the waits for some of them to end.
//!
//! A request in the kernel cannot be cancelled. An aborted task therefore continues, since its
//! buffers are in use, and is answered as aborted when it is done. An abort function waits for
//! that. It also covers tasks in chains that the driver has made available but the device has not
//! popped (virtio 1.3, section 5.6.6.2).
//!
//! Each wait costs a queue one entry, which counts its tasks, regardless of their number. A driver
//! may fill its control queue with functions, and each concerns the chains before it.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};

use super::medium::{NEVER, TaskResources};
pub(crate) use super::wait_group::{WaitGroup, WaitToken};
use crate::unit_address::{UnitAddress, UnitNumber};

/// The end of an aborted task: a response of virtio-scsi.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Abort {
    /// By ABORT TASK or a similar function of its own initiator.
    Aborted,
    /// By a reset or another initiator: drivers then start the task again.
    Reset,
}

/// The treatment of the selected tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Treatment {
    /// Counts them.
    Count,
    /// Aborts them with this response, and waits for them.
    Abort(Abort),
    /// Like `Abort`, for tasks that have begun. Commands that abort other tasks use this: a queue
    /// may pop no chain before the command that waits for it has ended.
    AbortBegun(Abort),
    /// Waits for tasks that use the medium.
    AwaitMedium,
    /// Waits for tasks that have begun, unless they wait for limits of their disk or for a retry.
    /// Such tasks check the disk again before they resume.
    AwaitActive,
    /// Waits for tasks that have begun, even if they wait for something themselves.
    AwaitAll,
}

/// A selection of tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TaskSelector {
    /// The task, unit or target that an initiator names.
    Task(UnitAddress, u64),
    At(UnitAddress),
    Target(u8),
    /// All tasks of a unit, and none of its successor at the same address.
    Unit(UnitNumber),
    /// All tasks of a unit but this one.
    AllBut(UnitNumber, TaskId),
}

/// A task, unique among all queues. Tags are not: drivers may give one tag to several tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TaskId {
    queue: u64,
    number: u16,
}

impl TaskId {
    /// For a test without a task.
    #[cfg(test)]
    pub(crate) const NONE: Self = Self { queue: 0, number: 0 };
}

/// The last queue number in this process.
static LAST_QUEUE: AtomicU64 = AtomicU64::new(0);

impl TaskSelector {
    fn covers(self, task: &TaskSlot, id: TaskId) -> bool {
        match self {
            Self::Task(address, tag) => task.address == address && task.tag == tag,
            Self::At(address) => task.address == address,
            Self::Target(target) => task.address.target == target,
            Self::Unit(unit) => task.unit == Some(unit),
            Self::AllBut(unit, own) => task.unit == Some(unit) && id != own,
        }
    }
}

/// The place of a task, which later tasks reuse. Fields are written one by one: a value that is
/// made elsewhere and moved is read in words that no processor can forward from the stores before.
struct TaskSlot {
    /// True if the place holds a task.
    is_open: bool,
    address: UnitAddress,
    /// The unit at the address when the task begins.
    unit: Option<UnitNumber>,
    tag: u64,
    /// The value of `popped` after its own chain.
    place: u64,
    resources: TaskResources,
    abort: Option<Abort>,
}

impl TaskSlot {
    const NONE: Self = Self {
        is_open: false,
        address: UnitAddress { target: 0, lun: 0 },
        unit: None,
        tag: 0,
        place: 0,
        resources: TaskResources::medium_since(NEVER),
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
        self.resources = TaskResources::medium_since(medium_since);
        self.abort = None;
    }
}

/// A selection of tasks, kept while some are still to be popped or to end.
struct Cover {
    selector: TaskSelector,
    treatment: Treatment,
    /// The place of the last task that may be covered.
    until: u64,
    /// The number of covers made before this one.
    before: u64,
    /// True if the chain at `until` was popped.
    is_passed: bool,
    /// Tasks that were found, are awaited and have not ended.
    open: usize,
    token: WaitToken,
}

impl Cover {
    /// True if the cover includes a task.
    fn finds(&self, task: &TaskSlot, id: TaskId) -> bool {
        task.place <= self.until && self.selector.covers(task, id)
    }

    /// True if the cover waits for a task that it includes.
    fn awaits(&self, resources: TaskResources) -> bool {
        match self.treatment {
            Treatment::Count => false,
            Treatment::AwaitMedium => resources.medium_since <= self.before,
            Treatment::AwaitActive => resources.disk_since <= self.before,
            Treatment::Abort(_) | Treatment::AbortBegun(_) | Treatment::AwaitAll => true,
        }
    }

    /// Counts, aborts or awaits a task, if the cover includes it.
    fn meet(&mut self, task: &mut TaskSlot, id: TaskId) {
        if !self.finds(task, id) {
            return;
        }
        self.token.count_found();
        if let Treatment::Abort(abort) | Treatment::AbortBegun(abort) = self.treatment {
            task.abort = task.abort.or(Some(abort));
        }
        self.open += usize::from(self.awaits(task.resources));
    }

    /// Removes a counted task that ends or need not be awaited any longer.
    fn remove(&mut self) {
        assert!(self.open > 0, "a task ends that was not counted");
        self.open -= 1;
    }

    fn is_done(&self) -> bool {
        self.is_passed && self.open == 0
    }
}

impl Drop for Cover {
    fn drop(&mut self) {
        if !self.is_passed {
            self.token.mark_lost();
        }
    }
}

/// The tasks of one request queue, on its IoThread.
pub(crate) struct Tasks {
    queue: u64,
    /// Indexed by task number.
    tasks: RefCell<Vec<TaskSlot>>,
    /// The avail index, extended to 64 bits: it advances by one per popped chain.
    popped: Cell<u64>,
    covers: RefCell<Vec<Cover>>,
    has_covers: Cell<bool>,
    /// The number of covers ever made.
    covers_made: Cell<u64>,
    /// Tasks that wait and use nothing.
    suspended: Cell<usize>,
}

impl Tasks {
    /// For a queue that pops the chain with number `next_chain` next.
    pub(crate) fn new(next_chain: u16) -> Self {
        Self {
            queue: LAST_QUEUE.fetch_add(1, Ordering::Relaxed) + 1,
            tasks: RefCell::default(),
            popped: Cell::new(next_chain.into()),
            covers: RefCell::default(),
            has_covers: Cell::default(),
            covers_made: Cell::default(),
            suspended: Cell::default(),
        }
    }

    /// Begins the task of the chain with this head, just before the one with number
    /// `next_chain`. The task
    /// uses the medium until [`Self::clear_medium_use`]. Returns its number: the head, unless the
    /// driver has given that to several chains at once. Before waits end, `publish` shows the
    /// driver the answers of ended tasks, since waits are answered on another queue.
    ///
    /// # Errors
    ///
    /// The number and the kind of abort, if the task was aborted before it began.
    #[inline(always)]
    pub(crate) fn begin(
        &self,
        head: u16,
        unit: (UnitAddress, Option<UnitNumber>),
        tag: u64,
        next_chain: u16,
        publish: impl FnOnce(),
    ) -> Result<u16, (u16, Abort)> {
        let place = self.count(next_chain);
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

    /// Counts the chain before the one with number `next_chain`, which is no task of a unit. Drop
    /// the result when the chain's answer is in the ring, since the driver may take the chain for a
    /// task.
    #[inline]
    pub(crate) fn skip(&self, next_chain: u16) -> Ended {
        let place = self.count(next_chain);
        let done = if self.has_covers.get() { self.pass(place) } else { Vec::new() };
        Ended { abort: None, waiting: boxed(done) }
    }

    /// Counts a popped chain. Returns its place.
    #[inline]
    fn count(&self, next_chain: u16) -> u64 {
        let popped = self.popped.get();
        let [low, high, ..] = popped.to_le_bytes();
        let place = popped + u64::from(next_chain.wrapping_sub(u16::from_le_bytes([low, high])));
        self.popped.set(place);
        place
    }

    /// Ends all waits for chains that are not popped: the ring is bad, so they never will be.
    pub(crate) fn drop_covers(&self) {
        let mut covers = self.covers.borrow_mut();
        for cover in covers.iter_mut().filter(|cover| !cover.is_passed) {
            cover.token.mark_lost();
            cover.is_passed = true;
        }
        let done = self.take_done(&mut covers);
        drop(covers);
        drop(done);
    }

    #[cold]
    fn meet_covers(
        &self,
        tasks: &mut [TaskSlot],
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

    /// Removes and returns completed covers.
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

    /// The task with this number, unique among all queues.
    pub(crate) fn id(&self, number: u16) -> TaskId {
        TaskId { queue: self.queue, number }
    }

    /// Checks that the task may continue.
    ///
    /// # Errors
    ///
    /// The kind of abort, if the task was aborted.
    #[inline]
    pub(crate) fn check(&self, number: u16) -> Result<(), Abort> {
        let tasks = self.tasks.borrow();
        tasks[usize::from(number)].abort.map_or(Ok(()), Err)
    }

    /// Marks that the task uses the medium from now on.
    #[cold]
    pub(crate) fn mark_medium_use(&self, number: u16) {
        let task = &mut self.tasks.borrow_mut()[usize::from(number)];
        task.resources.medium_since = task.resources.medium_since.min(self.covers_made.get());
    }

    /// Marks that the task, which has just begun, does not use the medium, or not yet.
    #[cold]
    pub(crate) fn clear_medium_use(&self, number: u16) {
        self.tasks.borrow_mut()[usize::from(number)].resources.medium_since = NEVER;
    }

    /// Marks that the task waits, and uses nothing until it [resumes](Self::resume).
    #[cold]
    pub(crate) fn suspend(&self, number: u16) {
        let tasks = &mut *self.tasks.borrow_mut();
        let task = &mut tasks[usize::from(number)];
        let before = task.resources;
        let had_medium = before.medium_since != NEVER;
        task.resources = TaskResources { disk_since: NEVER, medium_since: NEVER, had_medium };
        self.suspended.set(self.suspended.get() + 1);
        let id = self.id(number);
        let mut covers = self.covers.borrow_mut();
        for cover in covers.iter_mut() {
            if cover.finds(task, id) && cover.awaits(before) && !cover.awaits(task.resources) {
                cover.remove();
            }
        }
        let done = self.take_done(&mut covers);
        drop(covers);
        drop(done);
    }

    /// True if a suspended task used the medium before.
    pub(crate) fn had_medium(&self, number: u16) -> bool {
        self.tasks.borrow()[usize::from(number)].resources.had_medium
    }

    /// Marks that the task resumes its earlier uses. Covers that exist already do not wait for it.
    #[cold]
    pub(crate) fn resume(&self, number: u16) {
        let now = self.covers_made.get();
        let task = &mut self.tasks.borrow_mut()[usize::from(number)];
        let medium_since = if task.resources.had_medium { now } else { NEVER };
        task.resources = TaskResources { disk_since: now, medium_since, had_medium: false };
        self.end_suspended();
    }

    /// Ends a suspended task without resuming it.
    pub(crate) fn end_suspended(&self) {
        self.suspended.set(self.suspended.get() - 1);
    }

    /// The number of suspended tasks.
    pub(crate) fn suspended(&self) -> usize {
        self.suspended.get()
    }

    /// Ends a task that is done: only its answer is still to be written. Drop the result when the
    /// answer is in the ring.
    #[inline]
    pub(crate) fn end(&self, number: u16) -> Ended {
        let tasks = &mut *self.tasks.borrow_mut();
        let task = &mut tasks[usize::from(number)];
        assert!(task.is_open, "a task ends once");
        let abort = task.abort;
        let has_covers = self.has_covers.get();
        let waiting = if has_covers { self.remove_from_covers(task, number) } else { None };
        task.is_open = false;
        Ended { abort, waiting }
    }

    #[cold]
    #[expect(clippy::box_collection, reason = "see `Ended`")]
    fn remove_from_covers(&self, task: &TaskSlot, number: u16) -> Option<Box<Vec<Cover>>> {
        let id = self.id(number);
        let mut covers = self.covers.borrow_mut();
        for cover in covers.iter_mut() {
            if cover.finds(task, id) && cover.awaits(task.resources) {
                cover.remove();
            }
        }
        boxed(self.take_done(&mut covers))
    }

    /// Treats the selected tasks as `treatment` says, and holds `token` until the awaited ones have
    /// ended. Covers tasks that have begun. `Count` and `Abort` also cover the next `ahead` chains,
    /// or, if `ahead` is negative, exclude the last `-ahead` popped ones. Returns true if chains
    /// are still to be popped.
    pub(crate) fn cover(
        &self,
        selector: TaskSelector,
        treatment: Treatment,
        ahead: i64,
        token: WaitToken,
    ) -> bool {
        let popped = self.popped.get();
        let before = self.covers_made.replace(self.covers_made.get() + 1);
        let meant = matches!(treatment, Treatment::Count | Treatment::Abort(_));
        let until = popped.saturating_add_signed(if meant { ahead } else { 0 });
        let is_passed = until <= popped;
        let mut cover = Cover { selector, treatment, until, before, is_passed, open: 0, token };
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

/// Boxes covers for an [`Ended`].
#[inline]
#[expect(clippy::box_collection, reason = "see `Ended`")]
fn boxed(covers: Vec<Cover>) -> Option<Box<Vec<Cover>>> {
    (!covers.is_empty()).then(|| Box::new(covers))
}

/// Returns a free number for a head that is beyond all earlier ones, or in use.
#[cold]
fn add(tasks: &mut Vec<TaskSlot>, head: u16) -> (u16, &mut TaskSlot) {
    let at = usize::from(head);
    if tasks.len() <= at {
        tasks.resize_with(at + 1, || TaskSlot::NONE);
    }
    let number =
        if tasks[at].is_open { tasks.iter().position(|task| !task.is_open) } else { Some(at) };
    let number = number.unwrap_or_else(|| {
        tasks.push(TaskSlot::NONE);
        tasks.len() - 1
    });
    (iomem::fits(number, "a number of chains"), &mut tasks[number])
}

/// A task that has ended, or none. Waits for it are notified at the latest when this is dropped.
#[derive(Default)]
pub(crate) struct Ended {
    pub(crate) abort: Option<Abort>,
    /// A single word, since every request carries it.
    #[expect(clippy::box_collection, reason = "one word is less than three to hand on")]
    waiting: Option<Box<Vec<Cover>>>,
}

impl Ended {
    /// Ends the waits, after a call of `first` if there are any.
    #[inline]
    pub(crate) fn end_waits_after(self, first: impl FnOnce()) {
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
        /// The number of waits for tasks, or for chains that are not popped.
        pub(crate) fn awaited(&self) -> usize {
            self.covers.borrow().len()
        }
    }

    fn begin(tasks: &Tasks, tag: u64, next_chain: u16) -> u16 {
        begin_at(tasks, (UNIT, Some(*NUMBER)), tag, next_chain)
    }

    /// Begins a task with a free number.
    fn begin_at(
        tasks: &Tasks,
        unit: (UnitAddress, Option<UnitNumber>),
        tag: u64,
        next_chain: u16,
    ) -> u16 {
        let free = tasks.tasks.borrow().iter().take_while(|task| task.is_open).count();
        let head = free.try_into().unwrap();
        match tasks.begin(head, unit, tag, next_chain, || ()) {
            Ok(number) | Err((number, _)) => {
                assert_eq!(number, head);
                number
            }
        }
    }

    fn poll(waiting: &WaitGroup) -> Poll<usize> {
        waiting.poll(&Context::from_waker(Waker::noop()))
    }

    #[test]
    fn an_abort_waits_until_its_tasks_have_ended() {
        let tasks = Tasks::new(0);
        let [one, two, three] = [(UNIT, 1), (UNIT, 2), (OTHER, 1)]
            .map(|(unit, tag)| begin_at(&tasks, (unit, None), tag, 1));
        let (waiting, token) = WaitGroup::new();
        tasks.cover(TaskSelector::At(UNIT), Treatment::Abort(Abort::Aborted), 0, token);
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
        let (waiting, token) = WaitGroup::new();
        tasks.cover(TaskSelector::At(UNIT), Treatment::Abort(Abort::Aborted), 0, token);
        for number in numbers {
            assert_eq!(poll(&waiting), Poll::Pending);
            assert_eq!(tasks.end(number).abort, Some(Abort::Aborted));
        }
        assert_eq!(poll(&waiting), Poll::Ready(5));
    }

    #[test]
    fn unpopped_chains_are_covered_and_later_ones_are_not() {
        let tasks = Tasks::new(0xffff);
        let (waiting, token) = WaitGroup::new();
        tasks.cover(TaskSelector::Task(UNIT, 7), Treatment::Abort(Abort::Reset), 2, token);
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

    /// A notified wait may answer on another thread at once.
    #[test]
    fn an_ended_task_is_shown_before_its_waiters_are_notified() {
        let next_is_a_task = |tasks: &Tasks, publish: &dyn Fn()| {
            tasks.begin(1, (OTHER, None), 1, 2, publish).unwrap();
        };
        let next_is_none =
            |tasks: &Tasks, publish: &dyn Fn()| tasks.skip(2).end_waits_after(publish);
        type Pass<'a> = &'a dyn Fn(&Tasks, &dyn Fn());
        for pass in [&next_is_a_task as Pass<'_>, &next_is_none] {
            let tasks = Tasks::new(0);
            let one = begin(&tasks, 1, 1);
            let (waiting, token) = WaitGroup::new();
            tasks.cover(TaskSelector::At(UNIT), Treatment::Abort(Abort::Aborted), 1, token);
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
        // Tags identify tasks only if the driver keeps to the rules.
        let [one, two, own] = [3, 2, 3].map(|tag| begin(&tasks, tag, 1));
        let elsewhere = Tasks::new(0);
        let other = begin(&elsewhere, 3, 1);
        tasks.clear_medium_use(two);
        let (waiting, token) = WaitGroup::new();
        let selector = TaskSelector::AllBut(*NUMBER, tasks.id(own));
        tasks.cover(selector, Treatment::AwaitMedium, 8, token.clone());
        elsewhere.cover(selector, Treatment::AwaitMedium, 8, token);
        assert_eq!(poll(&waiting), Poll::Pending);
        assert_eq!(tasks.end(one).abort, None);
        assert_eq!(poll(&waiting), Poll::Pending);
        elsewhere.end(other);
        assert!(poll(&waiting).is_ready());
        assert_eq!([two, own].map(|number| tasks.check(number)), [Ok(()); 2]);
    }

    #[test]
    fn an_abort_of_a_unit_spares_the_tasks_of_its_successor() {
        let tasks = Tasks::new(0);
        let [before, after] = [*NUMBER, UnitNumber::next()].map(Some);
        let [one, two] = [before, after].map(|unit| begin_at(&tasks, (UNIT, unit), 1, 1));
        let (waiting, token) = WaitGroup::new();
        tasks.cover(TaskSelector::Unit(*NUMBER), Treatment::Abort(Abort::Reset), 1, token);
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
        let (waiting, token) = WaitGroup::new();
        let treatment = Treatment::AbortBegun(Abort::Reset);
        tasks.cover(TaskSelector::Unit(*NUMBER), treatment, 8, token);
        let later = begin(&tasks, 2, 2);
        let found = [begun, later].map(|number| tasks.check(number));
        assert_eq!(found, [Err(Abort::Reset), Ok(())]);
        assert_eq!(poll(&waiting), Poll::Pending);
        drop(tasks.end(begun));
        assert_eq!(poll(&waiting), Poll::Ready(1));
        assert!(!waiting.has_lost());
    }

    #[test]
    fn a_count_does_not_wait_and_an_ended_queue_is_not_waited_for() {
        let tasks = Tasks::new(0);
        begin(&tasks, 1, 1);
        let (waiting, token) = WaitGroup::new();
        tasks.cover(TaskSelector::Target(0), Treatment::Count, 0, token);
        assert_eq!(poll(&waiting), Poll::Ready(1));
        let (waiting, token) = WaitGroup::new();
        tasks.cover(TaskSelector::Target(0), Treatment::Abort(Abort::Reset), 8, token);
        assert!(!waiting.has_lost());
        drop(tasks);
        assert!(poll(&waiting).is_ready() && waiting.has_lost());
    }

    /// Tags and LUNs occur more than once.
    #[test]
    fn each_selection_finds_its_tasks_alone() {
        let far = UnitAddress { target: 1, lun: 1 };
        let units = [(UNIT, Some(*NUMBER)), (OTHER, Some(UnitNumber::next())), (far, None)];
        let tasks = Tasks::new(0);
        for unit in units {
            for tag in [7, 8] {
                begin_at(&tasks, unit, tag, 1);
            }
        }
        for (selector, found) in [
            (TaskSelector::Task(UNIT, 7), 1),
            (TaskSelector::Task(UNIT, 9), 0),
            (TaskSelector::At(UNIT), 2),
            (TaskSelector::Target(0), 4),
            (TaskSelector::Target(1), 2),
            (TaskSelector::Unit(*NUMBER), 2),
            (TaskSelector::AllBut(*NUMBER, tasks.id(1)), 1),
            (TaskSelector::AllBut(*NUMBER, tasks.id(2)), 2),
        ] {
            let (waiting, token) = WaitGroup::new();
            assert!(!tasks.cover(selector, Treatment::Count, 0, token));
            assert_eq!(poll(&waiting), Poll::Ready(found), "{selector:?}");
        }
    }

    /// The initiator that aborts a task knows of that, and a later reset does not change it.
    #[test]
    fn the_first_abort_of_a_task_decides_its_answer() {
        for (first, second) in [(Abort::Aborted, Abort::Reset), (Abort::Reset, Abort::Aborted)] {
            let tasks = Tasks::new(0);
            let task = begin(&tasks, 1, 1);
            for abort in [first, second] {
                tasks.cover(TaskSelector::At(UNIT), Treatment::Abort(abort), 0, WaitGroup::new().1);
            }
            assert_eq!(tasks.check(task), Err(first));
            assert_eq!(tasks.end(task).abort, Some(first));
        }
    }

    #[test]
    fn chains_of_a_broken_ring_are_lost_and_its_tasks_are_awaited() {
        let tasks = Tasks::new(0);
        let task = begin(&tasks, 1, 1);
        let cover = |ahead| {
            let (waiting, token) = WaitGroup::new();
            tasks.cover(TaskSelector::At(UNIT), Treatment::Abort(Abort::Aborted), ahead, token);
            waiting
        };
        let [all_popped, waits] = [cover(0), cover(8)];
        tasks.drop_covers();
        assert!(poll(&all_popped).is_pending() && poll(&waits).is_pending());
        drop(tasks.end(task));
        assert_eq!([&all_popped, &waits].map(poll), [Poll::Ready(1); 2]);
        assert_eq!([&all_popped, &waits].map(WaitGroup::has_lost), [false, true]);
    }

    /// A task that waits for limits must not hold up tasks that may wait for it in turn.
    #[test]
    fn a_suspended_task_uses_nothing_until_it_resumes() {
        for has_medium in [true, false] {
            let tasks = Tasks::new(0);
            let task = begin(&tasks, 1, 1);
            if !has_medium {
                tasks.clear_medium_use(task);
            }
            let cover = |treatment| {
                let (waiting, token) = WaitGroup::new();
                tasks.cover(TaskSelector::At(UNIT), treatment, 0, token);
                waiting
            };
            let cover_all =
                || [Treatment::AwaitMedium, Treatment::AwaitActive, Treatment::AwaitAll].map(cover);
            let await_it = |all: &[WaitGroup; 3]| all.each_ref().map(|one| poll(one).is_pending());
            let before = cover_all();
            assert_eq!(await_it(&before), [has_medium, true, true]);
            tasks.suspend(task);
            assert_eq!((tasks.suspended(), tasks.had_medium(task)), (1, has_medium));
            assert_eq!(await_it(&before), [false, false, true]);
            let during = cover_all();
            assert_eq!(await_it(&during), [false, false, true]);
            tasks.resume(task);
            assert_eq!(tasks.suspended(), 0);
            let after = cover_all();
            assert_eq!(await_it(&after), [has_medium, true, true]);
            // It resumes its uses once, and ends in all waits.
            tasks.suspend(task);
            assert_eq!(
                (tasks.had_medium(task), await_it(&after)),
                (has_medium, [false, false, true])
            );
            tasks.resume(task);
            drop(tasks.end(task));
            for all in [before, during, after] {
                assert_eq!(await_it(&all), [false; 3]);
            }
            assert_eq!(tasks.awaited(), 0);
        }
    }
}
