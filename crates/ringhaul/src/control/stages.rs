//! The stages of exports: opening, ready, served.
//!
//! One record has the names, the sockets and the stages of all exports. The thread that opens an
//! export claims it there when its disks are open, and the control thread serves it. So the opener
//! asks the control thread once. Dropping an export, in any stage, frees its name and its socket.

use std::sync::{Arc, Condvar, MutexGuard};
use std::time::Instant;

use blockio::executor::Lock;
use device::oneshot;
use disks::open::CancelToken;

use crate::spec::ExportSpec;
use crate::spec::command::{CommandError, ExportState, ExportStatus};

/// The wait of an export that is removed while its disk is being opened.
const NOT_OPEN: &str = "its disk is being opened";

/// A request that waits for the end of an export.
pub(super) type RemovalWaiter = oneshot::Sender<Result<ExportStatus, CommandError>>;

/// The record of all exports with their stages.
#[derive(Default)]
pub(super) struct Stages {
    record: Lock<Record>,
    /// Wakes openers when a hand-over has ended.
    hand_over_ended: Condvar,
}

#[derive(Default)]
struct Record {
    /// In the order of their requests.
    entries: Vec<Entry>,
    next_id: u64,
    /// True once an export was served.
    has_served: bool,
    /// Incremented by each change.
    generation: u64,
    phase: Phase,
}

/// The phase of the daemon, which decides if exports change their stages.
#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum Phase {
    #[default]
    Open,
    /// Another process may be taking over. New exports and claims wait for the outcome.
    HandingOver,
    /// The daemon ends.
    Ending,
    /// The process with this id has taken over.
    HandedOver(u32),
}

struct Entry {
    id: u64,
    request: Arc<ExportRequest>,
    stage: Stage,
}

/// The request for an export.
struct ExportRequest {
    spec: ExportSpec,
    since: Instant,
    cancel_token: CancelToken,
}

enum Stage {
    /// Its disks are being opened. If `follows_hand_over`, a process that takes over opens them
    /// too. Otherwise the request for the export fails.
    Opening { removal_waiters: Vec<RemovalWaiter>, follows_hand_over: bool },
    /// Its socket and its device are being made. No other process takes over before it is served.
    Ready { removal_waiters: Vec<RemovalWaiter> },
    /// The control thread serves it, or closes its disks.
    Served,
}

impl Entry {
    fn is_served(&self) -> bool {
        matches!(self.stage, Stage::Served)
    }

    /// The status of an export that is not served yet.
    fn status(&self) -> ExportStatus {
        let status = ExportStatus::opening(self.request.spec.clone());
        if self.request.cancel_token.is_active() {
            return status;
        }
        let waits_for = Some(NOT_OPEN.to_owned());
        ExportStatus { state: ExportState::Stopping, waits_for, ..status }
    }
}

impl Record {
    fn entry(&mut self, id: u64) -> &mut Entry {
        let entry = self.entries.iter_mut().find(|entry| entry.id == id);
        entry.expect("the registration keeps it")
    }

    /// The exports that are not served yet.
    fn pending(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| !entry.is_served())
    }
}

impl Stages {
    /// Takes the names and the sockets of exports that the caller is about to open.
    ///
    /// # Errors
    ///
    /// When a name or a socket is taken, or no export may begin.
    pub(super) fn begin(
        self: &Arc<Self>,
        specs: Vec<ExportSpec>,
        follows_hand_over: bool,
    ) -> Result<Vec<OpeningExport>, CommandError> {
        let mut record = self.changeable()?;
        for (index, spec) in specs.iter().enumerate() {
            let mut others =
                record.entries.iter().map(|entry| &entry.request.spec).chain(&specs[..index]);
            if let Some(name) = others.find_map(|other| spec.clashes_with(other)) {
                return Err(CommandError::Exists(name));
            }
        }
        record.generation += 1;
        let since = Instant::now();
        let begin = |spec: ExportSpec| {
            let id = record.next_id;
            record.next_id += 1;
            let cancel_token = CancelToken::default();
            let request = Arc::new(ExportRequest { spec, since, cancel_token });
            let stage = Stage::Opening { removal_waiters: Vec::new(), follows_hand_over };
            record.entries.push(Entry { id, request: Arc::clone(&request), stage });
            OpeningExport { request, registration: Registration { stages: Arc::clone(self), id } }
        };
        Ok(specs.into_iter().map(begin).collect())
    }

    /// Returns true if no export was ever served, and none is pending except `own`. New exports are
    /// refused from then on, because the daemon is to end.
    pub(super) fn cancel_start(&self, own: &[u64]) -> bool {
        let mut record = self.decided();
        let is_alone = record.pending().all(|entry| own.contains(&entry.id));
        let is_over = matches!(record.phase, Phase::HandedOver(_));
        if record.has_served || is_over || !is_alone {
            return false;
        }
        record.generation += 1;
        record.phase = Phase::Ending;
        true
    }

    /// Cancels the opening of an export, and returns its name. The waiter is answered when the
    /// opening has ended or, if it is too late for that, when the export has ended.
    ///
    /// # Errors
    ///
    /// The waiter, when no export with this name is being opened.
    pub(super) fn remove(
        &self,
        name: &str,
        waiter: RemovalWaiter,
    ) -> Result<String, RemovalWaiter> {
        let mut record = self.record.lock();
        let entry = record.entries.iter_mut().find(|entry| entry.request.spec.is_called(name));
        let Some(Entry { request, stage, .. }) = entry else { return Err(waiter) };
        match stage {
            Stage::Opening { removal_waiters, .. } | Stage::Ready { removal_waiters } => {
                removal_waiters.push(waiter);
                request.cancel_token.cancel();
                Ok(request.spec.name())
            }
            Stage::Served => Err(waiter),
        }
    }

    /// The states of exports that are not served yet.
    pub(super) fn statuses(&self) -> Vec<ExportStatus> {
        self.record.lock().pending().map(Entry::status).collect()
    }

    /// The names of exports that are not served yet, with the times of their requests.
    pub(super) fn unserved(&self) -> Vec<(String, Instant)> {
        self.record
            .lock()
            .pending()
            .map(|entry| (entry.request.spec.name(), entry.request.since))
            .collect()
    }

    /// Describes the exports that another process is to open too, with the times of their requests.
    /// Returns them with the generation of the record.
    ///
    /// # Errors
    ///
    /// When an export is about to be served, or the daemon is about to end.
    pub(super) fn describe(&self) -> Result<(Vec<(ExportSpec, Instant)>, u64), CommandError> {
        let record = self.record.lock();
        if record.phase == Phase::Ending {
            return Err(CommandError::Ending);
        }
        let is_ready = |entry: &&Entry| matches!(entry.stage, Stage::Ready { .. });
        if let Some(ready) = record.entries.iter().find(is_ready) {
            return Err(CommandError::Busy(ready.request.spec.name(), ExportState::Opening));
        }
        let follows = |entry: &&Entry| {
            matches!(entry.stage, Stage::Opening { follows_hand_over: true, .. })
                && entry.request.cancel_token.is_active()
        };
        let following = record.entries.iter().filter(follows).map(|entry| &entry.request);
        let following = following.map(|request| (request.spec.clone(), request.since));
        Ok((following.collect(), record.generation))
    }

    /// Lets new exports and claims wait until the hand-over ends, if `is_current` accepts the
    /// generation of the record. Returns false if the hand-over does not begin.
    pub(super) fn begin_hand_over(&self, is_current: impl FnOnce(u64) -> bool) -> bool {
        let mut record = self.record.lock();
        let begins = record.phase == Phase::Open && is_current(record.generation);
        if begins {
            record.phase = Phase::HandingOver;
        }
        begins
    }

    /// Continues after a hand-over, in the process that owns the exports.
    pub(super) fn resume(&self) {
        self.end_hand_over(Phase::Open);
    }

    /// Refuses new exports and claims: the daemon ends, or `new_owner` has taken over. The first
    /// reason stays.
    pub(super) fn close(&self, new_owner: Option<u32>) {
        self.end_hand_over(new_owner.map_or(Phase::Ending, Phase::HandedOver));
        if new_owner.is_some() {
            self.record.lock().pending().for_each(|entry| entry.request.cancel_token.cancel());
        }
    }

    fn end_hand_over(&self, next: Phase) {
        let mut record = self.record.lock();
        if let Phase::Open | Phase::HandingOver = record.phase {
            record.phase = next;
        }
        drop(record);
        self.hand_over_ended.notify_all();
    }

    /// The reason that exports can no longer change.
    pub(super) fn end_reason(&self) -> CommandError {
        match self.record.lock().phase {
            Phase::HandedOver(process) => CommandError::HandedOver(process),
            Phase::Open | Phase::HandingOver | Phase::Ending => CommandError::Ending,
        }
    }

    /// Waits for the end of a hand-over, and returns the record for a change.
    fn changeable(&self) -> Result<MutexGuard<'_, Record>, CommandError> {
        let record = self.decided();
        if record.phase == Phase::Open {
            return Ok(record);
        }
        drop(record);
        Err(self.end_reason())
    }

    /// Waits for the end of a hand-over.
    fn decided(&self) -> MutexGuard<'_, Record> {
        let is_undecided = |record: &mut Record| record.phase == Phase::HandingOver;
        self.record.wait_while(&self.hand_over_ended, is_undecided)
    }
}

/// The entry of an export in the record. Dropping it frees the name and the socket, and answers the
/// requests that wait for the end of an export that was never served.
pub(super) struct Registration {
    stages: Arc<Stages>,
    id: u64,
}

impl Registration {
    /// The number of the export, never reused by the daemon.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    fn claim(&self) -> Result<(), CommandError> {
        let mut record = self.stages.changeable()?;
        record.generation += 1;
        let Entry { request, stage, .. } = record.entry(self.id);
        match stage {
            Stage::Opening { removal_waiters, .. } if request.cancel_token.is_active() => {
                *stage = Stage::Ready { removal_waiters: std::mem::take(removal_waiters) };
                Ok(())
            }
            _ => Err(CommandError::Cancelled(request.spec.name())),
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut record = self.stages.record.lock();
        record.generation += 1;
        let index = record.entries.iter().position(|entry| entry.id == self.id);
        let Some(entry) = index.map(|index| record.entries.remove(index)) else { return };
        drop(record);
        let ended = ExportStatus { waits_for: None, ..entry.status() };
        if let Stage::Opening { removal_waiters, .. } | Stage::Ready { removal_waiters } =
            entry.stage
        {
            removal_waiters.into_iter().for_each(|waiter| waiter.send(Ok(ended.clone())));
        }
    }
}

/// An export with disks that are being opened.
pub struct OpeningExport {
    request: Arc<ExportRequest>,
    registration: Registration,
}

impl OpeningExport {
    /// The requested export.
    pub(crate) fn spec(&self) -> &ExportSpec {
        &self.request.spec
    }

    /// The number of the export.
    pub(crate) fn id(&self) -> u64 {
        self.registration.id
    }

    /// The cancellation token of its disks.
    pub(crate) fn cancel_token(&self) -> CancelToken {
        self.request.cancel_token.clone()
    }

    /// Blocks takeovers until the export is served or dropped, which must happen soon.
    ///
    /// # Errors
    ///
    /// When the export was cancelled, the daemon ends, or another process has taken over.
    pub fn claim(self) -> Result<ReadyExport, FailedExport> {
        match self.registration.claim() {
            Ok(()) => Ok(ReadyExport(self)),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// Notes the reason that the export is not served.
    pub(crate) fn fail(self, error: CommandError) -> FailedExport {
        FailedExport { export: self, error }
    }
}

/// An export with open disks. It is about to be served.
pub struct ReadyExport(OpeningExport);

impl ReadyExport {
    /// The requested export.
    pub(crate) fn spec(&self) -> &ExportSpec {
        self.0.spec()
    }

    /// The time of the request.
    pub(super) fn since(&self) -> Instant {
        self.0.request.since
    }

    /// Notes the reason that the export is not served.
    pub(crate) fn fail(self, error: CommandError) -> FailedExport {
        self.0.fail(error)
    }

    /// Begins to serve the export. Returns the requests that wait for its end, too.
    pub(super) fn serve(self) -> (ExportSpec, Registration, Vec<RemovalWaiter>) {
        let OpeningExport { request, registration } = self.0;
        let mut record = registration.stages.record.lock();
        record.generation += 1;
        record.has_served = true;
        let stage = std::mem::replace(&mut record.entry(registration.id).stage, Stage::Served);
        drop(record);
        let Stage::Ready { removal_waiters } = stage else { unreachable!("it was claimed") };
        (request.spec.clone(), registration, removal_waiters)
    }
}

/// An export that is not served, with the reason.
pub struct FailedExport {
    export: OpeningExport,
    error: CommandError,
}

impl FailedExport {
    /// Returns false if the export was removed before it was served.
    pub(crate) fn is_active(&self) -> bool {
        self.export.request.cancel_token.is_active()
    }

    /// Frees the name and the socket.
    pub(crate) fn release(self) -> (ExportSpec, CommandError) {
        (self.export.spec().clone(), self.error)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Poll, Wake, Waker};

    use super::*;
    use crate::testing::spawn_asleep;

    /// A removal whose client adds the export again as soon as it has the answer.
    pub(in crate::control) struct Removal {
        stages: Arc<Stages>,
        spec: ExportSpec,
        is_added_again: AtomicBool,
    }

    impl Wake for Removal {
        fn wake(self: Arc<Self>) {
            let added = self.stages.begin(vec![self.spec.clone()], false);
            self.is_added_again.store(added.is_ok(), Ordering::Relaxed);
        }
    }

    impl Removal {
        pub(in crate::control) fn new(stages: &Arc<Stages>, spec: &ExportSpec) -> Arc<Self> {
            let (stages, spec) = (Arc::clone(stages), spec.clone());
            Arc::new(Self { stages, spec, is_added_again: AtomicBool::new(false) })
        }

        /// Waits for the answer, and returns a waiter for the caller to answer.
        pub(in crate::control) fn waiter(self: &Arc<Self>) -> RemovalWaiter {
            let (waiter, answer) = oneshot::channel();
            answer.wake(&Waker::from(Arc::clone(self)));
            waiter
        }

        pub(in crate::control) fn is_added_again(&self) -> bool {
            self.is_added_again.load(Ordering::Relaxed)
        }
    }

    fn specs<const COUNT: usize>(names: [&str; COUNT]) -> Vec<ExportSpec> {
        let spec = |name: &str| {
            let device = r#"{"blk": {"file": "/disk"}}"#;
            let text = format!(r#"{{"endpoint": {{"path": "{name}"}}, "device": {device}}}"#);
            serde_json::from_str(&text).unwrap()
        };
        names.into_iter().map(spec).collect()
    }

    fn begin(stages: &Arc<Stages>, name: &str) -> Result<OpeningExport, CommandError> {
        Ok(stages.begin(specs([name]), true)?.remove(0))
    }

    fn claim(export: OpeningExport) -> Result<ReadyExport, CommandError> {
        export.claim().map_err(|failed| failed.release().1)
    }

    fn is_taken(stages: &Arc<Stages>, name: &str) -> bool {
        matches!(begin(stages, name), Err(CommandError::Exists(other)) if other == name)
    }

    #[test]
    fn a_name_is_taken_in_each_stage() {
        let stages = Arc::<Stages>::default();
        let opening = begin(&stages, "/a").unwrap();
        assert!(is_taken(&stages, "/a") && !is_taken(&stages, "/b"));
        let other = begin(&stages, "/c").unwrap();
        let statuses = stages.statuses();
        assert!(statuses.iter().map(ExportStatus::name).eq(["/a", "/c"]), "{statuses:?}");
        let unserved = stages.unserved();
        assert!(unserved.iter().map(|(name, _)| name).eq(["/a", "/c"]), "{unserved:?}");
        drop(other);
        let ready = claim(opening).unwrap();
        assert!(is_taken(&stages, "/a"));
        assert_eq!(stages.statuses().len(), 1);
        let (_, registration, waiters) = ready.serve();
        assert!(is_taken(&stages, "/a") && waiters.is_empty());
        assert!(stages.statuses().is_empty(), "the control thread shows it");
        drop(registration);
        assert!(!is_taken(&stages, "/a"));
        for names in [["/b", "/b"], ["/b", "/c"]] {
            let _held = begin(&stages, "/c").unwrap();
            assert!(matches!(stages.begin(specs(names), true), Err(CommandError::Exists(_))));
            assert!(!is_taken(&stages, "/b"), "all or none");
        }
    }

    #[test]
    fn an_export_that_is_removed_too_late_is_served_first() {
        for is_ready in [false, true] {
            let stages = Arc::<Stages>::default();
            let mut opening = Some(begin(&stages, "/a").unwrap());
            let ready = is_ready.then(|| claim(opening.take().unwrap()).unwrap());
            let (waiter, ended) = oneshot::channel();
            assert!(stages.remove("/b", oneshot::channel().0).is_err());
            assert_eq!(stages.remove("/a", waiter).ok().unwrap(), "/a");
            assert_eq!(stages.statuses()[0].state, ExportState::Stopping);
            if let Some(opening) = opening {
                assert!(matches!(claim(opening), Err(CommandError::Cancelled(_))));
                let Poll::Ready(Some(Ok(ended))) = ended.check() else { panic!("it has ended") };
                assert_eq!((ended.state, ended.waits_for), (ExportState::Stopping, None));
            } else {
                let (_, registration, waiters) = ready.unwrap().serve();
                assert_eq!(waiters.len(), 1, "its end is awaited");
                drop(registration);
            }
        }
    }

    #[test]
    fn a_name_is_free_when_the_removal_is_answered() {
        let stages = Arc::<Stages>::default();
        let opening = begin(&stages, "/a").unwrap();
        let removal = Removal::new(&stages, opening.spec());
        assert!(stages.remove("/a", removal.waiter()).is_ok());
        assert!(!removal.is_added_again());
        drop(opening);
        assert!(removal.is_added_again());
    }

    #[test]
    fn a_hand_over_knows_the_exports_that_are_being_opened() {
        let stages = Arc::<Stages>::default();
        let describe =
            || stages.describe().map(|(opening, generation)| (opening.len(), generation));
        let followed = begin(&stages, "/a").unwrap();
        let _not_followed = stages.begin(specs(["/b"]), false).unwrap();
        let cancelled = begin(&stages, "/c").unwrap();
        assert!(stages.remove("/c", oneshot::channel().0).is_ok());
        let (count, before) = describe().unwrap();
        assert_eq!(count, 1);
        let ready = claim(followed).unwrap();
        assert!(matches!(describe(), Err(CommandError::Busy(..))));
        assert!(!stages.begin_hand_over(|generation| generation == before));
        let _served = ready.serve();
        let (count, before) = describe().unwrap();
        assert_eq!(count, 0);
        drop(cancelled);
        assert!(!stages.begin_hand_over(|generation| generation == before), "one less");
    }

    /// The new process would open or serve other exports than the old one.
    #[test]
    fn every_change_of_the_record_outdates_its_description() {
        let stages = Arc::<Stages>::default();
        let mut last = None;
        let mut is_newer = || {
            let now = Some(stages.record.lock().generation);
            std::mem::replace(&mut last, now) < now
        };
        assert!(is_newer());
        let opening = begin(&stages, "/a").unwrap();
        assert!(is_newer(), "one more");
        let ready = claim(opening).unwrap();
        assert!(is_newer(), "it is about to be served");
        let (_, registration, _) = ready.serve();
        assert!(is_newer(), "it is served");
        drop(registration);
        assert!(is_newer(), "one less");
        assert!(!is_newer(), "nothing has changed");
    }

    /// Nothing else remains to be opened in the old process.
    #[test]
    fn a_takeover_cancels_what_is_being_opened() {
        for new_owner in [None, Some(7)] {
            let stages = Arc::<Stages>::default();
            let opening = begin(&stages, "/a").unwrap();
            stages.close(new_owner);
            assert_eq!(opening.cancel_token().is_active(), new_owner.is_none());
            // The first reason stays.
            stages.close(Some(8));
            stages.resume();
            let ended = matches!(begin(&stages, "/b"), Err(CommandError::Ending));
            assert_eq!(ended, new_owner.is_none());
            assert_eq!(matches!(stages.describe(), Err(CommandError::Ending)), ended);
        }
    }

    /// The process that takes over makes the same sockets.
    #[test]
    fn changes_wait_for_the_outcome_of_a_hand_over() {
        for new_owner in [None, Some(7)] {
            let stages = Arc::<Stages>::default();
            let opening = begin(&stages, "/a").unwrap();
            assert!(stages.begin_hand_over(|_| true));
            std::thread::scope(|scope| {
                let claims =
                    spawn_asleep(scope, || claim(opening).map(|ready| ready.spec().name()));
                let begins = spawn_asleep(scope, || begin(&stages, "/b").map(|export| export.id()));
                assert!(!claims.is_finished() && !begins.is_finished());
                match new_owner {
                    None => stages.resume(),
                    Some(_) => stages.close(new_owner),
                }
                let (claimed, begun) = (claims.join().unwrap(), begins.join().unwrap());
                let is_expected = |result: Result<(), CommandError>| match new_owner {
                    None => result.is_ok(),
                    Some(_) => matches!(result, Err(CommandError::HandedOver(7))),
                };
                assert!(is_expected(claimed.map(drop)) && is_expected(begun.map(drop)));
            });
        }
    }

    #[test]
    fn a_daemon_ends_when_nothing_else_was_begun() {
        let stages = Arc::<Stages>::default();
        let own = begin(&stages, "/a").unwrap();
        let other = begin(&stages, "/b").unwrap();
        assert!(!stages.cancel_start(&[own.id()]));
        drop(other);
        assert!(!stages.cancel_start(&[]) && stages.cancel_start(&[own.id()]));
        assert!(matches!(begin(&stages, "/b"), Err(CommandError::Ending)));
        assert!(matches!(claim(own), Err(CommandError::Ending)));

        let stages = Arc::<Stages>::default();
        drop(claim(begin(&stages, "/a").unwrap()).unwrap().serve());
        assert!(!stages.cancel_start(&[]), "it has served an export");
        stages.close(Some(7));
        assert!(
            !stages.cancel_start(&[]) && matches!(stages.end_reason(), CommandError::HandedOver(7))
        );

        let stages = Arc::<Stages>::default();
        let own = begin(&stages, "/a").unwrap();
        stages.close(Some(7));
        assert!(!stages.cancel_start(&[own.id()]), "the other process opens it");
    }
}
