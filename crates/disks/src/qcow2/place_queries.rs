//! Queries of one IoThread to the owner of an image: is there space for first writes? Requests
//! that begin in one round of the loop share a query. Requests for the same clusters wait for
//! its answer, instead of asking as well.

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;
use std::rc::Rc;

use blockio::Io;
use tokio::sync::Notify;

#[derive(Debug, Default)]
pub(super) struct PlaceQueries(RefCell<Vec<Rc<PlaceQuery>>>);

#[derive(Debug, Default)]
struct PlaceQuery {
    ranges: RefCell<Vec<Range<u64>>>,
    /// The clusters that each of these ranges touches.
    clusters: RefCell<Vec<Range<u64>>>,
    /// True until the owner is asked.
    is_open: Cell<bool>,
    /// A byte for each range, 0 without space. Empty without an answer.
    answers: RefCell<Vec<u8>>,
    answered: Notify,
}

impl PlaceQuery {
    fn add(&self, range: Range<u64>, clusters: Range<u64>) -> usize {
        self.clusters.borrow_mut().push(clusters);
        self.ranges.borrow_mut().push(range);
        self.ranges.borrow().len() - 1
    }

    fn touches(&self, byte: u64) -> bool {
        self.clusters.borrow().iter().any(|clusters| clusters.contains(&byte))
    }
}

/// Ends a query, even if its request is dropped.
struct QueryGuard<'a>(&'a PlaceQueries, Rc<PlaceQuery>);

impl Drop for QueryGuard<'_> {
    fn drop(&mut self) {
        self.0.0.borrow_mut().retain(|other| !Rc::ptr_eq(other, &self.1));
        self.1.answered.notify_waiters();
    }
}

impl PlaceQueries {
    /// Returns true if a range has space. `ask` is called once for all ranges of a round, and
    /// yields a byte for each. True may be wrong if another request has asked: the caller looks the
    /// range up, and asks again if it has no place.
    pub(super) async fn query(
        &self,
        io: &Io,
        (range, clusters): (Range<u64>, Range<u64>),
        ask: impl AsyncFnOnce(Vec<Range<u64>>) -> io::Result<Vec<u8>>,
    ) -> io::Result<bool> {
        let find = |test: &dyn Fn(&PlaceQuery) -> bool| {
            self.0.borrow().iter().find(|query| test(query)).cloned()
        };
        if let Some(query) = find(&|query| query.touches(range.start)) {
            query.answered.notified().await;
            return Ok(true);
        }
        if let Some(query) = find(&|query| query.is_open.get()) {
            let index = query.add(range, clusters);
            query.answered.notified().await;
            let answer = query.answers.borrow().get(index).copied();
            return Ok(answer.is_none_or(|answer| answer != 0));
        }
        let query = Rc::new(PlaceQuery::default());
        query.is_open.set(true);
        query.add(range, clusters);
        self.0.borrow_mut().push(Rc::clone(&query));
        let guard = QueryGuard(self, Rc::clone(&query));
        io.next_round().await;
        query.is_open.set(false);
        let answers = ask(query.ranges.take()).await?;
        let is_placed = answers.first().is_some_and(|answer| *answer != 0);
        *query.answers.borrow_mut() = answers;
        drop(guard);
        Ok(is_placed)
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use blockio::{IoThread, IoThreadConfig};
    use futures_util::future::{join_all, poll_immediate};

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn requests_of_one_round_share_a_query() {
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let (queries, asked) = (PlaceQueries::default(), RefCell::new(Vec::new()));
        let place = |at: u64| {
            let range = (at..at + 1, at / 10 * 10..at / 10 * 10 + 10);
            queries.query(thread.io(), range, async |ranges: Vec<Range<u64>>| {
                let answers = ranges.iter().map(|range| u8::from(range.start < 50)).collect();
                asked.borrow_mut().push(ranges);
                Ok(answers)
            })
        };
        let placed = thread.block_on(join_all([10, 20, 21, 60].map(place))).unwrap();
        let placed: Vec<_> = placed.into_iter().map(Result::unwrap).collect();
        assert_eq!(placed, [true, true, true, false]);
        assert_eq!(asked.take(), [vec![10..11, 20..21, 60..61]]);
        assert!(thread.block_on(place(30)).unwrap().unwrap());
        assert_eq!(asked.take(), [vec![30..31; 1]]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn requests_query_again_when_the_shared_query_fails_or_is_dropped() {
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let queries = PlaceQueries::default();
        let place = |at: u64| {
            queries.query(thread.io(), (at..at + 1, at..at + 1), async |_| {
                Err(io::Error::from_raw_os_error(libc::EIO))
            })
        };
        let mut placed = thread.block_on(join_all([1, 2].map(place))).unwrap().into_iter();
        assert!(placed.next().unwrap().is_err());
        assert!(placed.next().unwrap().unwrap(), "it looks, and asks itself");
        let mut first = Box::pin(place(1));
        let mut second = Box::pin(place(2));
        let begun = async {
            assert!(poll_immediate(&mut first).await.is_none());
            assert!(poll_immediate(&mut second).await.is_none());
        };
        thread.block_on(begun).unwrap();
        drop(first);
        let mut context = Context::from_waker(Waker::noop());
        let second = second.as_mut().poll(&mut context);
        assert!(matches!(second, Poll::Ready(Ok(true))));
    }
}
