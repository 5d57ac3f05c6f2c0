//! Requests to an image.
//!
//! The memory of a request is never given to librbd, which cannot cancel an operation, and may
//! still fill memory after the request was answered, because the image was abandoned. So data goes
//! through our own memory, which librbd keeps for as long as it needs it.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use blockio::Io;
use blockio::disk::{Extent, TransferError};
use blockio::driver::{BounceShare, CopyTurns, Driver, ForeignOp, Request, in_parts};
use iomem::{Buffers, LentBlock, fits};

use super::shared::SharedImage;

/// The most objects of an image in a piece of a discard. librbd makes an operation for each at
/// once, and other requests would have to wait for all of them.
const DISCARD_OBJECTS: u64 = 16;

/// The most bytes of such a piece.
const DISCARD_MAX: u64 = 1 << 30;

/// The most bytes of one read or write. Larger ones would hold up the loop, which copies them.
const TRANSFER_MAX: usize = 1 << 20;

/// An image on one IoThread.
pub(super) struct RbdDisk {
    shared: Arc<SharedImage>,
    share: Rc<BounceShare>,
    copies: Rc<CopyTurns>,
    io: Rc<Io>,
}

/// A part of a transfer, in our own memory.
struct Piece {
    memory: LentBlock,
    /// A list of the memory.
    buffers: Buffers,
}

impl RbdDisk {
    pub(super) fn new(shared: &Arc<SharedImage>, io: &Rc<Io>) -> Self {
        let share = io.bounce_share(shared);
        let copies = CopyTurns::for_disk(io, shared);
        Self { shared: Arc::clone(shared), share, copies, io: Rc::clone(io) }
    }

    /// Allocates memory for as much of `left` bytes as goes at once.
    async fn piece(&self, left: usize) -> io::Result<Piece> {
        let bytes = left.min(self.share.part_bytes(TRANSFER_MAX));
        let permit = self.share.take(bytes).await;
        let piece = LentBlock::try_new(bytes).and_then(|memory| {
            let buffers = memory.buffers(permit)?;
            Ok(Piece { memory, buffers })
        });
        piece.inspect_err(|_| self.io.stats().bounce.failed.add(1))
    }

    /// Reads the first part of `buffers`, and returns its length.
    async fn read_piece(&self, offset: u64, buffers: &Buffers) -> io::Result<usize> {
        let Piece { memory, buffers: ours } = self.piece(buffers.bytes()).await?;
        let bytes = ours.bytes();
        let done = self.shared.image.read(&self.io, offset, memory, ours).await;
        let moved = match done.result {
            Ok(moved) => moved,
            // An image that was made smaller ends before this range.
            Err(error) if is_invalid(&error) => {
                if offset < self.size().await? {
                    return Err(error);
                }
                0
            }
            Err(error) => return Err(self.seen(error)),
        };
        // The image may end within the range, too. Zeroes complete the last sector, and would be
        // wrong beyond.
        let end = offset + moved as u64;
        if offset + bytes as u64 > end.next_multiple_of(512) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.copies.turn(bytes).await;
        done.buffers.zero_from(moved);
        buffers.copy_from_buffers(&done.buffers, bytes);
        Ok(bytes)
    }

    /// Writes the first part of `buffers`, and returns its length.
    async fn write_piece(&self, offset: u64, buffers: &Buffers) -> io::Result<usize> {
        let Piece { memory, buffers: ours } = self.piece(buffers.bytes()).await?;
        let bytes = ours.bytes();
        self.copies.turn(bytes).await;
        ours.copy_from_buffers(buffers, bytes);
        let done = self.shared.image.write(&self.io, offset, memory, ours).await;
        let is_beyond = done.result.as_ref().is_err_and(is_invalid);
        let result = done.result.map_err(|error| self.seen(error));
        // An image that was made smaller ends before the range, or within it: then librbd leaves
        // out the bytes beyond, and does not report it.
        let end = offset + bytes as u64;
        if (result.is_ok() || is_beyond) && self.size().await? < end {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        result.map(|_| bytes)
    }

    /// The present size in bytes.
    async fn size(&self) -> io::Result<u64> {
        if let Some(size) = self.shared.known_size() {
            return Ok(size);
        }
        // The query may take as long as the cluster does, or be abandoned.
        let (op, completer) = self.io.foreign_op(Buffers::empty());
        if let Some(number) = self.shared.image.pending_ops().begin(completer)
            && self.shared.await_size(number)
        {
            let shared = Arc::clone(&self.shared);
            let ask = move || shared.answer_all(|| shared.probe_size());
            if let Err(error) = Io::start_thread("ringhaul-rbd", ask) {
                let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
                self.shared.answer_all(|| Err(io::Error::from_raw_os_error(errno)));
            }
        }
        op.await.result.map(|size| size as u64)
    }

    /// Records a loss if the cluster has locked out this client, which is final. Returns the error.
    fn seen(&self, error: io::Error) -> io::Error {
        if error.raw_os_error() == Some(libc::ESHUTDOWN) {
            self.shared.record_loss(&error);
        }
        error
    }

    async fn all(&self, op: ForeignOp) -> io::Result<()> {
        op.await.result.map(|_| ()).map_err(|error| self.seen(error))
    }

    /// Discards a range, or makes it read as zeroes, in pieces, of which the disk has few at once.
    /// `begin` begins a piece.
    async fn clear(
        &self,
        mut offset: u64,
        len: u64,
        begin: impl Fn(u64, u64) -> ForeignOp,
    ) -> io::Result<()> {
        let mut end = offset + len;
        let most = (self.shared.object_bytes.saturating_mul(DISCARD_OBJECTS)).min(DISCARD_MAX);
        while offset < end {
            let _turn = self.shared.discards.acquire().await;
            // A piece removes the objects that it covers as a whole.
            let bytes = (most - offset % most).min(end - offset);
            match self.all(begin(offset, bytes)).await {
                Ok(()) => offset += bytes,
                Err(error) if is_invalid(&error) => {
                    // An image that was made smaller ends before the piece, or within it, and has
                    // nothing behind its end.
                    let size = self.size().await?;
                    if size >= offset + bytes {
                        return Err(error);
                    }
                    end = size;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn flush_all(&self) -> io::Result<()> {
        let image = &self.shared.image;
        let result = self.all(image.flush(&self.io)).await;
        if let Err(error) = &result
            && !image.pending_ops().was_abandoned()
        {
            self.shared.record_loss(error);
        }
        result.and_then(|()| self.shared.loss())
    }
}

/// Returns true for the error of a range that begins beyond the end. librbd uses it in further
/// cases.
fn is_invalid(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EINVAL)
}

impl Driver for RbdDisk {
    fn read(&self, offset: u64, rest: Buffers) -> Request<'_, Result<(), TransferError>> {
        let piece = async |offset, rest: &Buffers| self.read_piece(offset, rest).await;
        Box::pin(in_parts(offset, rest, piece))
    }

    fn write(
        &self,
        offset: u64,
        rest: Buffers,
        fua: bool,
    ) -> Request<'_, Result<(), TransferError>> {
        Box::pin(async move {
            let piece = async |offset, rest: &Buffers| self.write_piece(offset, rest).await;
            in_parts(offset, rest, piece).await?;
            match fua {
                true => self.flush_all().await.map_err(TransferError::lost),
                false => Ok(()),
            }
        })
    }

    fn flush(&self) -> Request<'_, io::Result<()>> {
        Box::pin(self.flush_all())
    }

    fn discard(&self, offset: u64, len: u64) -> Request<'_, io::Result<()>> {
        let begin = move |offset, bytes| self.shared.image.discard(&self.io, offset, bytes);
        Box::pin(self.clear(offset, len, begin))
    }

    fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> Request<'_, io::Result<()>> {
        let begin = move |offset, bytes| {
            let bytes = fits(bytes, "a part of a range");
            self.shared.image.write_zeroes(&self.io, offset, bytes, may_unmap)
        };
        Box::pin(self.clear(offset, len, begin))
    }

    fn block_status(&self, _: u64, len: u64) -> Request<'_, io::Result<Extent>> {
        Box::pin(async move { Ok(Extent::data(len)) })
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;

    use blockio::{IoThread, IoThreadConfig};
    use futures_util::future::join_all;

    use super::*;
    use crate::rbd::image::fake::{FakeImage, Op};

    const BYTES: usize = 256 << 10;
    const OBJECT_BYTES: u64 = 4096;
    /// The most bytes of a piece of a discard.
    const PIECE: u64 = DISCARD_OBJECTS * OBJECT_BYTES;

    struct Scene {
        thread: IoThread,
        fake: FakeImage,
        disk: RbdDisk,
    }

    impl Scene {
        fn new() -> Self {
            let fake = FakeImage::new(&[1; BYTES]);
            let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
            let shared =
                SharedImage::new(fake.open(), "image".to_owned(), BYTES as u64, OBJECT_BYTES);
            let disk = RbdDisk::new(&Arc::new(shared), thread.io());
            Self { thread, fake, disk }
        }

        /// Makes a request, and returns its errno and the bytes that it has left.
        fn transfer<'a>(
            &'a self,
            request: impl FnOnce(&'a RbdDisk) -> Request<'a, Result<(), TransferError>>,
        ) -> Result<(), (i32, usize)> {
            let done = self.thread.block_on(request(&self.disk)).unwrap();
            done.map_err(|error| {
                let (error, rest) = error.into_parts();
                (error.raw_os_error().unwrap(), rest.bytes())
            })
        }

        fn write(&self, offset: u64, bytes: usize, fua: bool) -> Result<(), (i32, usize)> {
            let data = Buffers::from_vec(vec![7; bytes]);
            self.transfer(|disk| disk.write(offset, data, fua))
        }

        fn read(&self, offset: u64, bytes: usize) -> Result<Vec<u8>, (i32, usize)> {
            let buffers = Buffers::from_vec(vec![9; bytes]);
            let read = buffers.duplicate();
            self.transfer(|disk| disk.read(offset, buffers))?;
            Ok(read.to_vec())
        }

        fn run<'a>(
            &'a self,
            request: impl FnOnce(&'a RbdDisk) -> Request<'a, io::Result<()>>,
        ) -> Result<(), i32> {
            let done = self.thread.block_on(request(&self.disk)).unwrap();
            done.map_err(|error| error.raw_os_error().unwrap())
        }
    }

    /// librbd reports success for a write that it cuts at the end of an image.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_write_fails_unless_the_image_has_its_whole_range() {
        let full = Err((libc::ENOSPC, 8192));
        for (size, offset, expected) in [
            (BYTES, 0, Ok(())),
            (BYTES - 4096, 0, Ok(())),
            (BYTES - 4096, BYTES - 12_288, Ok(())),
            (BYTES - 4096, BYTES - 8192, full),
            (BYTES - 1, BYTES - 8192, full),
            (BYTES - 8192, BYTES - 8192, full),
            (4096, BYTES - 8192, full),
        ] {
            let scene = Scene::new();
            scene.fake.resize(size);
            let written = scene.write(offset as u64, 8192, true);
            assert_eq!(written, expected, "{offset} of {size}");
            let flushes =
                scene.fake.take_ops().iter().filter(|(kind, ..)| *kind == "flush").count();
            assert_eq!(flushes, usize::from(expected.is_ok()));
            assert!(expected.is_err() || scene.fake.content()[offset..][..8192] == [7; 8192]);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_read_has_zeroes_in_the_last_sector_alone() {
        for (size, offset, expected) in [
            (BYTES, 4096, Ok(4096)),
            (8191, 4096, Ok(4095)),
            (7681, 4096, Ok(3585)),
            (7680, 4096, Err((libc::EIO, 4096))),
            (4096, 4096, Err((libc::EIO, 4096))),
            (512, 4096, Err((libc::EIO, 4096))),
        ] {
            let scene = Scene::new();
            scene.fake.resize(size);
            let read = scene.read(offset, 4096);
            let data = |bytes| [vec![1; bytes], vec![0; 4096 - bytes]].concat();
            assert_eq!(read, expected.map(data), "{offset} of {size}");
        }
    }

    /// `EINVAL` may stand for a range beyond the end. No other error does.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn errors_of_the_cluster_are_reported_and_a_lock_out_is_a_loss() {
        type Make = fn(&Scene) -> Result<(), i32>;
        let requests: [(Make, Result<(), i32>); 4] = [
            (|scene| scene.write(8192, 512, false).map_err(|failed| failed.0), Err(libc::ENOSPC)),
            (|scene| scene.read(8192, 512).map(drop).map_err(|failed| failed.0), Err(libc::EIO)),
            (|scene| scene.run(|disk| disk.discard(8192, 512)), Ok(())),
            (|scene| scene.run(|disk| disk.write_zeroes(8192, 512, true)), Ok(())),
        ];
        for (index, (make, beyond)) in requests.into_iter().enumerate() {
            for errno in [libc::EPERM, libc::EINVAL, libc::ESHUTDOWN] {
                for size in [BYTES, 8192 + 512, 4096] {
                    let scene = Scene::new();
                    scene.fake.resize(size);
                    scene.fake.fail_with(errno);
                    let is_beyond = size < 8192 && errno == libc::EINVAL;
                    let expected = if is_beyond { beyond } else { Err(errno) };
                    assert_eq!(make(&scene), expected, "request {index}: {errno} with {size}");
                    scene.fake.fail_with(0);
                    let is_lost = errno == libc::ESHUTDOWN;
                    let flushed = if is_lost { Err(errno) } else { Ok(()) };
                    assert_eq!(scene.run(|disk| disk.flush()), flushed, "request {index}");
                }
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_flush_that_fails_is_a_loss_for_all_later_ones() {
        let scene = Scene::new();
        assert_eq!(scene.write(0, 512, true), Ok(()));
        scene.fake.fail_with(libc::EIO);
        assert_eq!(scene.run(|disk| disk.flush()), Err(libc::EIO));
        scene.fake.fail_with(0);
        assert_eq!(scene.run(|disk| disk.flush()), Err(libc::EIO));
        assert_eq!(scene.write(0, 512, true), Err((libc::EIO, 0)));
        assert_eq!(scene.write(0, 512, false), Ok(()));
    }

    /// The cluster may still carry all of it out.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_flush_of_an_abandoned_image_fails_and_is_no_loss() {
        let scene = Scene::new();
        let (shared, ops) = (&scene.disk.shared, scene.disk.shared.image.pending_ops());
        scene.fake.hold();
        let mut held = pin!(scene.disk.discard(0, 512));
        let abandoned = poll_fn(|cx| {
            let polled = held.as_mut().poll(cx);
            if polled.is_pending() && !ops.was_abandoned() {
                ops.make_late();
                ops.abandon();
            }
            polled
        });
        let failed = scene.thread.block_on(abandoned).unwrap();
        assert_eq!(failed.unwrap_err().raw_os_error(), Some(libc::EIO));
        assert_eq!(scene.run(|disk| disk.flush()), Err(libc::EIO));
        shared.loss().unwrap();
        scene.fake.answer_held();
    }

    /// Pieces end where groups of objects do, and at the end of an image that has shrunk.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_long_range_is_cleared_in_pieces() {
        type Clear = fn(&RbdDisk, u64, u64) -> Request<'_, io::Result<()>>;
        let clears: [(&str, Clear); 3] = [
            ("discard", |disk, offset, len| disk.discard(offset, len)),
            ("unmap", |disk, offset, len| disk.write_zeroes(offset, len, true)),
            ("zero", |disk, offset, len| disk.write_zeroes(offset, len, false)),
        ];
        for (kind, clear) in clears {
            let scene = Scene::new();
            assert_eq!(scene.run(|disk| clear(disk, 4096, 2 * PIECE)), Ok(()));
            let pieces: Vec<Op> =
                vec![(kind, 4096, PIECE - 4096), (kind, PIECE, PIECE), (kind, 2 * PIECE, 4096)];
            assert_eq!(scene.fake.take_ops(), pieces);
            let end: usize = fits(4096 + 2 * PIECE, "an end");
            let content = scene.fake.content();
            assert!(content[..4096] == [1; 4096] && content[end..].iter().all(|byte| *byte == 1));
            assert!(content[4096..end].iter().all(|byte| *byte == 0));
            scene.fake.resize(fits(PIECE, "a size"));
            assert_eq!(scene.run(|disk| clear(disk, 0, 4 * PIECE)), Ok(()));
            assert_eq!(scene.fake.take_ops(), [(kind, 0, PIECE), (kind, PIECE, PIECE)]);
        }
    }

    /// Requests beside them would have to wait for all of them.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn the_cluster_has_few_pieces_of_discards_at_once() {
        let scene = Scene::new();
        scene.fake.hold();
        let discards = (0..10).map(|index| scene.disk.discard(index * PIECE / 4, 512));
        let mut all = pin!(join_all(discards));
        let mut begun = Vec::new();
        let done = poll_fn(|cx| {
            let polled = all.as_mut().poll(cx);
            begun.push(scene.fake.take_ops().len());
            scene.fake.answer_held();
            polled
        });
        let results = scene.thread.block_on(done).unwrap();
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        assert_eq!(begun.iter().max(), Some(&4), "{begun:?}");
        assert_eq!(begun.iter().sum::<usize>(), 10);
    }

    /// The query may have found the size before the change.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_size_is_unknown_if_it_changes_while_it_is_queried() {
        let scene = Scene::new();
        let shared = &scene.disk.shared;
        assert_eq!(shared.known_size(), Some(BYTES as u64));
        scene.fake.resize_during_query(4096);
        assert_eq!(shared.probe_size().unwrap(), BYTES as u64);
        assert_eq!(shared.known_size(), None);
        assert_eq!(scene.write(8192, 512, false), Err((libc::ENOSPC, 512)));
        assert_eq!(shared.known_size(), Some(4096));
    }
}
