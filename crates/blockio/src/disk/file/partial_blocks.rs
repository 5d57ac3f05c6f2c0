//! Writes to parts of blocks, on files with direct I/O for whole blocks only.
//!
//! The rest of the block is read first and written back with the new part. A write to that rest in
//! between would be lost. So on such a file every change of data first claims the blocks that it
//! touches, across all IoThreads.

use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;
use std::thread::panicking;

use crate::executor::notify::Notify;
use crate::executor::sync::Lock;

/// The blocks of a file that are being written or waited for.
#[derive(Debug)]
pub(crate) struct Blocks {
    /// Bytes of a block: a power of two.
    bytes: u64,
    claims: Lock<Claims>,
    /// Wakes claims that wait, by their ranges, when a claim that they overlap ends.
    ended: Notify<Range<u64>>,
}

#[derive(Debug, Default)]
struct Claims {
    /// In order of arrival: a claim waits for earlier claims that it overlaps.
    list: Vec<Claim>,
    next_id: u64,
}

#[derive(Debug)]
struct Claim {
    id: u64,
    range: Range<u64>,
}

/// Blocks to which no other task writes until this is dropped.
#[derive(Debug)]
pub(crate) struct Claimed {
    blocks: Arc<Blocks>,
    id: u64,
}

impl Blocks {
    pub(crate) fn new(bytes: u32) -> Self {
        Self { bytes: u64::from(bytes), claims: Lock::default(), ended: Notify::default() }
    }

    /// Claims the blocks that `len` bytes from `offset` touch. Waits for earlier claims that
    /// overlap.
    pub(crate) async fn claim(self: &Arc<Self>, offset: u64, len: u64) -> Claimed {
        let start = offset & !(self.bytes - 1);
        // The end is on the disk, which is made of whole blocks.
        let end = (offset + len).next_multiple_of(self.bytes);
        let (id, is_first) = self.claims.lock().add(start..end);
        let claimed = Claimed { blocks: Arc::clone(self), id };
        if !is_first {
            let listener = self.ended.listener_with(start..end);
            poll_fn(|cx| {
                listener.listen(cx);
                if self.claims.lock().is_first(id) { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        }
        claimed
    }
}

impl Claims {
    /// Adds a claim at the end. Returns its id, and true if it need not wait.
    fn add(&mut self, range: Range<u64>) -> (u64, bool) {
        self.next_id += 1;
        self.list.push(Claim { id: self.next_id, range });
        (self.next_id, self.is_first(self.next_id))
    }

    fn is_first(&self, id: u64) -> bool {
        let before = self.list.iter().take_while(|claim| claim.id != id);
        let of_id = self.list.iter().find(|claim| claim.id == id);
        of_id.is_some_and(|own| before.into_iter().all(|other| !other.overlaps(&own.range)))
    }

    /// Removes a claim. Returns it if later claims may wait for it.
    fn remove(&mut self, id: u64) -> Option<Claim> {
        let index = self.list.iter().position(|claim| claim.id == id)?;
        let gone = self.list.remove(index);
        (index < self.list.len()).then_some(gone)
    }
}

impl Claim {
    fn overlaps(&self, range: &Range<u64>) -> bool {
        self.range.start < range.end && range.start < self.range.end
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        debug_assert!(self.list.is_empty() || panicking(), "{:?} have no owner", self.list);
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        let gone = self.blocks.claims.lock().remove(self.id);
        if let Some(gone) = gone {
            self.blocks.ended.notify_where(|waiting| gone.overlaps(waiting));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::Pin;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake, Waker};

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    type ClaimFuture<'a> = Pin<Box<dyn Future<Output = Claimed> + 'a>>;

    fn poll(future: &mut ClaimFuture<'_>, wakes: &Arc<Wakes>) -> Option<Claimed> {
        let waker = Waker::from(Arc::clone(wakes));
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(claimed) => Some(claimed),
            Poll::Pending => None,
        }
    }

    #[test]
    fn writes_to_the_same_block_wait_in_order() {
        let (blocks, wakes) = (Arc::new(Blocks::new(4096)), Arc::new(Wakes::default()));
        let claim = |offset, len| -> ClaimFuture<'_> { Box::pin(blocks.claim(offset, len)) };
        let first = poll(&mut claim(512, 512), &wakes).unwrap();
        let apart = poll(&mut claim(4096, 512), &wakes).expect("another block is free");
        let (mut both, mut behind) = (claim(3584, 1024), claim(0, 512));
        assert!(poll(&mut both, &wakes).is_none() && poll(&mut behind, &wakes).is_none());
        drop(apart);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1, "one waits for both blocks");
        assert!(poll(&mut both, &wakes).is_none());
        drop(first);
        let both = poll(&mut both, &wakes).unwrap();
        assert!(poll(&mut behind, &wakes).is_none(), "it came later");
        drop(both);
        assert!(poll(&mut behind, &wakes).is_some());
        assert!(blocks.claims.lock().list.is_empty());
    }

    #[test]
    fn a_dropped_write_is_not_waited_for() {
        let (blocks, wakes) = (Arc::new(Blocks::new(4096)), Arc::new(Wakes::default()));
        let first = poll(&mut (Box::pin(blocks.claim(0, 512)) as ClaimFuture<'_>), &wakes).unwrap();
        let mut gone: ClaimFuture<'_> = Box::pin(blocks.claim(0, 8192));
        let mut last: ClaimFuture<'_> = Box::pin(blocks.claim(4096, 4096));
        assert!(poll(&mut gone, &wakes).is_none() && poll(&mut last, &wakes).is_none());
        drop(gone);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        assert!(poll(&mut last, &wakes).is_some());
        drop(first);
    }
}
