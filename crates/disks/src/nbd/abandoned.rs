//! Requests of a connection that the client has abandoned. No task waits for their answers, which
//! only show the changes that the server has ended.

use std::ops::Range;
use std::sync::Arc;

use super::client::Client;
use super::connect::Connected;
use super::requests::Requests;
use super::shared::{Orphan, SharedExport};

/// The requests of an abandoned connection.
pub(super) struct AbandonedRequests {
    pub(super) requests: Requests,
    /// The number of changes that were held last, and their holder.
    changes: usize,
    holder: u64,
    /// True if all changes have to wait, because too many connections were abandoned.
    holds_all: bool,
}

/// The number of abandoned connections, for each one in use, at which no change is sent. So there
/// will be no further ones.
const ABANDONED_MAX: usize = 2;

/// A range that overlaps any change.
const ALL: Range<u64> = 0..u64::MAX;

impl AbandonedRequests {
    /// The number of changes that the server may still make.
    pub(super) fn changes(&self) -> usize {
        self.changes
    }

    /// Prepares the rest for another IoThread, which does not read answers.
    pub(super) fn orphan(self, connected: Connected, close_is_visible: bool) -> Orphan {
        Orphan { connected, close_is_visible, holder: self.holder }
    }

    /// Holds all changes until the connection has ended.
    pub(super) fn adopt(orphan: Orphan) -> (Self, Connected) {
        let Orphan { connected, holder, .. } = orphan;
        (Self { requests: Requests::default(), changes: 1, holder, holds_all: false }, connected)
    }
}

/// Reduces the ranges of a holder to `remaining`, and tries waiting requests again.
pub(super) fn release_except(shared: &Arc<SharedExport>, holder: u64, remaining: Vec<Range<u64>>) {
    shared.held.replace(holder, remaining);
    Client::run_on_each(shared, |client| client.try_waiting());
}

impl Client {
    /// Holds the changes that the server may still make for an abandoned link; `None` if there are
    /// none. To be called before the link is down.
    pub(super) fn abandon_link(&self, index: usize) -> Option<AbandonedRequests> {
        let requests = self.requests.borrow_mut().sent_by(index);
        let mut ranges = requests.changed_ranges();
        let changes = ranges.len();
        if changes == 0 {
            return None;
        }
        let holds_all = self.draining.borrow().len() + 1 >= ABANDONED_MAX * self.links();
        if holds_all {
            ranges.push(ALL);
        }
        let holder = self.shared.held.add(ranges);
        Some(AbandonedRequests { requests, changes, holder, holds_all })
    }

    /// Releases the changes that the server has answered since the last call. Returns true if none
    /// is left.
    pub(super) fn release_answered(&self, abandoned: &mut AbandonedRequests) -> bool {
        abandoned.requests.forget_done();
        let mut ranges = abandoned.requests.changed_ranges();
        if ranges.len() == abandoned.changes {
            return false;
        }
        abandoned.changes = ranges.len();
        if abandoned.holds_all && abandoned.changes > 0 {
            ranges.push(ALL);
        }
        release_except(&self.shared, abandoned.holder, ranges);
        abandoned.changes == 0
    }

    /// Releases all changes: the connection has ended.
    pub(super) fn release_all(&self, abandoned: &mut AbandonedRequests) {
        abandoned.requests = Requests::default();
        self.release_answered(abandoned);
    }
}
