//! What a connection leaves behind that the client has given up: requests whose answers nobody
//! waits for, and which say what the server does not change any more.

use std::ops::Range;
use std::sync::Arc;

use super::connect::Connected;
use super::pipe::{Pipe, key_of};
use super::requests::Requests;
use super::shared::{Orphan, Shared};

/// The requests of a connection that was given up.
pub(super) struct Remains {
    pub(super) requests: Requests,
    /// How many changes were held last, and by whom.
    changes: usize,
    holder: u64,
    /// So many connections were given up that all changes have to wait.
    holds_all: bool,
}

/// How many connections may be waited for that were given up, for each that is in use, until no
/// change is sent any more: then there will be no more of them.
const LEAVING_MAX: usize = 2;

/// All that any change may touch.
const ALL: Range<u64> = 0..u64::MAX;

impl Remains {
    /// How many changes the server may still make.
    pub(super) fn changes(&self) -> usize {
        self.changes
    }

    /// What is left of them for another IoThread, which understands no answers.
    pub(super) fn orphan(self, connected: Connected, is_heard: bool) -> Orphan {
        Orphan { connected, is_heard, holder: self.holder }
    }

    /// All of them are held until the connection has ended.
    pub(super) fn adopt(orphan: Orphan) -> (Self, Connected) {
        let Orphan { connected, holder, .. } = orphan;
        (Self { requests: Requests::default(), changes: 1, holder, holds_all: false }, connected)
    }
}

/// The holder holds only these from now on: others may be changed.
pub(super) fn let_go(shared: &Arc<Shared>, holder: u64, left: Vec<Range<u64>>) {
    shared.held.replace(holder, left);
    let key = key_of(shared);
    shared.on_pipes(move |io| {
        if let Some(pipe) = io.kept::<Pipe>(key) {
            pipe.try_waiting();
        }
    });
}

impl Pipe {
    /// Holds what the server may still change because of a link that was given up. To be called
    /// before the link is down. `None`: nothing.
    pub(super) fn leave_behind(&self, index: usize) -> Option<Remains> {
        let requests = self.requests.borrow_mut().left_by(index);
        let mut ranges = requests.changed_ranges();
        let changes = ranges.len();
        if changes == 0 {
            return None;
        }
        let holds_all = self.leaving.borrow().len() + 1 >= LEAVING_MAX * self.links();
        if holds_all {
            ranges.push(ALL);
        }
        let holder = self.shared.held.add(ranges);
        Some(Remains { requests, changes, holder, holds_all })
    }

    /// Holds no longer what the server has answered since. True: nothing is left.
    pub(super) fn release_answered(&self, remains: &mut Remains) -> bool {
        remains.requests.forget_done();
        let mut ranges = remains.requests.changed_ranges();
        if ranges.len() == remains.changes {
            return false;
        }
        remains.changes = ranges.len();
        if remains.holds_all && remains.changes > 0 {
            ranges.push(ALL);
        }
        let_go(&self.shared, remains.holder, ranges);
        remains.changes == 0
    }

    /// Holds nothing any more: the connection has ended.
    pub(super) fn release_all(&self, remains: &mut Remains) {
        remains.requests = Requests::default();
        self.release_answered(remains);
    }
}
