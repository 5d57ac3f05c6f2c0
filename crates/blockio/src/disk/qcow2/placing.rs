//! Ranges that one IoThread has asked the owner of an image to find space for. Requests for the
//! same clusters wait for that, instead of asking as well.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use tokio::sync::Notify;

#[derive(Debug, Default)]
pub(super) struct Placing(RefCell<Vec<(Range<u64>, Rc<Notify>)>>);

/// A range that the owner was asked for, until the answer has come.
pub(super) struct Asked<'a> {
    placing: &'a Placing,
    answered: Rc<Notify>,
}

impl Placing {
    /// Waits for the answer about this byte. False: no request has asked.
    pub(super) async fn join(&self, at: u64) -> bool {
        let asked = self.0.borrow().iter().find(|(range, _)| range.contains(&at)).cloned();
        let Some((_, answered)) = asked else { return false };
        answered.notified().await;
        true
    }

    pub(super) fn begin(&self, range: Range<u64>) -> Asked<'_> {
        let answered = Rc::new(Notify::new());
        self.0.borrow_mut().push((range, Rc::clone(&answered)));
        Asked { placing: self, answered }
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.placing.0.borrow_mut().retain(|(_, other)| !Rc::ptr_eq(other, &self.answered));
        self.answered.notify_waiters();
    }
}
