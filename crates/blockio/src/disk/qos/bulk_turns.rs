//! Commands that move much data by themselves: a short request makes the disk verify, fill or zero
//! a long range.
//!
//! All such commands of one disk on an IoThread take turns, a piece at a time. So a round of the
//! loop moves 1 MiB, or one larger piece, regardless of the number of commands.

use std::cell::Cell;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use super::SharedState;
use crate::executor::semaphore::{FairSemaphore, Ticket};
use crate::thread::io::Io;

/// The most bytes that such commands of a disk move in one round of the loop, unless one piece is
/// larger. Applies even if the disk never waits.
const ROUND_BYTES: u64 = 1 << 20;

/// The line in which the pieces of a disk wait for their turn.
pub(crate) struct BulkTurns {
    turns: Rc<FairSemaphore>,
    /// Bytes of the pieces in this round.
    moved: Cell<u64>,
}

/// The turn of a piece. Another piece may begin once this is dropped.
pub(crate) type BulkTurn = Ticket<Rc<FairSemaphore>>;

impl Default for BulkTurns {
    fn default() -> Self {
        Self { turns: Rc::new(FairSemaphore::new(1)), moved: Cell::new(0) }
    }
}

impl BulkTurns {
    /// The line of a disk on this IoThread, which all of its queues share.
    pub(crate) fn for_disk(io: &Io, disk: &Arc<SharedState>) -> Rc<Self> {
        let key = Arc::as_ptr(disk).addr();
        io.shared(key).unwrap_or_else(|| {
            let line = Rc::<Self>::default();
            io.share(key, &line);
            line
        })
    }

    /// Waits for the turn of a piece of this many bytes.
    pub(crate) async fn turn(&self, bytes: u64) -> BulkTurn {
        let turn = Ticket::new(Rc::clone(&self.turns));
        turn.ready().await;
        let moved = self.moved.get() + bytes;
        if moved <= ROUND_BYTES {
            self.moved.set(moved);
        } else {
            self.moved.set(bytes);
            next_round().await;
        }
        turn
    }
}

/// Continues in the next round.
async fn next_round() {
    let mut has_waited = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut has_waited, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::io;
    use std::pin::{Pin, pin};
    use std::task::{Context, Waker};

    use iomem::Buffers;

    use super::*;
    use crate::disk::qos::throttle::NoRequester;
    use crate::disk::{Direction, ErrorAction, ErrorPolicy, Requester};
    use crate::{DiskOptions, DiskSource, IoThread, IoThreadConfig, Wait};

    const MIB: u64 = 1 << 20;

    fn thread() -> IoThread {
        IoThread::new(&IoThreadConfig::default()).unwrap()
    }

    fn null() -> DiskSource {
        DiskSource::null(1 << 40, &DiskOptions::default()).unwrap()
    }

    /// Reads of parts, zeroes and pieces by two queues of a disk.
    #[test]
    fn a_round_moves_a_bounded_number_of_bytes_for_any_number_of_commands() {
        const COMMANDS: u64 = 40;
        let thread = thread();
        let source = null();
        let disks = [(); 2].map(|()| Rc::new(source.attach(thread.io())));
        let moved = Rc::new(Cell::new(0));
        let io = Rc::clone(thread.io());
        for command in 0..COMMANDS {
            let disk = Rc::clone(&disks[(command % 2) as usize]);
            let moved = Rc::clone(&moved);
            io.spawn(async move {
                for _ in 0..32 {
                    let bytes = match command % 3 {
                        0 => disk.read_part(0, MIB).await.unwrap().bytes() as u64,
                        1 => {
                            disk.write_zeroes(0, MIB, true).await.unwrap();
                            MIB
                        }
                        _ => {
                            let zeroes = Buffers::aligned(64 << 10, 512);
                            disk.without_requester().write_piece(0, zeroes).await.unwrap();
                            64 << 10
                        }
                    };
                    moved.set(moved.get() + bytes);
                }
            });
        }
        let mut most = 0;
        while io.tasks() > 0 {
            let (before, turns) = (moved.get(), io.stats().turns.get());
            thread.turn(Wait::Never).unwrap();
            assert_eq!(io.stats().turns.get(), turns + 1);
            most = most.max(moved.get() - before);
        }
        let rounds = u64::from(crate::thread::ROUNDS_UNTIL_SERVED);
        assert!(most <= (rounds + 1) * ROUND_BYTES, "{most} bytes in a turn");
        assert!(moved.get() > 8 * most, "it shows nothing: {most} of {}", moved.get());
    }

    /// The number of polls until a piece of so many bytes has its turn: one more in the next round.
    fn polls(bulk: &BulkTurns, bytes: u64) -> u32 {
        let (mut turn, mut polls) = (pin!(bulk.turn(bytes)), 1);
        while turn.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            polls += 1;
        }
        polls
    }

    #[test]
    fn the_first_piece_of_each_round_counts_as_much_as_later_ones() {
        let bulk = BulkTurns::default();
        for round in 1..4 {
            let pieces = [MIB, MIB / 2, MIB / 4, MIB / 4, 512, MIB / 2, MIB / 2 - 512];
            let seen = pieces.map(|bytes| polls(&bulk, bytes));
            let first = if round == 1 { 1 } else { 2 };
            assert_eq!(seen, [first, 2, 1, 1, 2, 1, 1], "round {round}");
        }
    }

    /// A command that ends after this many pieces.
    struct Ends(Cell<u32>);

    impl Requester for Ends {
        fn check(&self) -> io::Result<()> {
            NoRequester.check()
        }

        fn on_resume(&self, to: Direction) -> Pin<Box<dyn Future<Output = io::Result<()>> + '_>> {
            NoRequester.on_resume(to)
        }

        fn check_piece(&self) -> io::Result<()> {
            let Some(left) = self.0.get().checked_sub(1) else {
                return Err(io::Error::from_raw_os_error(libc::EBUSY));
            };
            self.0.set(left);
            Ok(())
        }
    }

    /// Failed requests are retried, but not this command.
    #[test]
    fn a_command_ends_at_its_next_piece() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(64 * MIB).unwrap();
        let thread = thread();
        for source in [null(), DiskSource::file(file.path(), &DiskOptions::default()).unwrap()] {
            let hold = ErrorAction::Retry;
            source.shared.set_errors(ErrorPolicy { read: hold, write: hold });
            let disk = source.attach(thread.io());
            let is_busy = |error: io::Error| error.raw_os_error() == Some(libc::EBUSY);
            let ends = Ends(Cell::new(3));
            let zeroed = disk.with_requester(&ends).write_zeroes(MIB, 40 * MIB, false);
            assert!(is_busy(thread.block_on(zeroed).unwrap().unwrap_err()));
            let read = disk.with_requester(&ends).read_part(0, MIB);
            assert!(is_busy(thread.block_on(read).unwrap().unwrap_err()));
            let write = disk.with_requester(&ends).write_piece(0, Buffers::aligned(4096, 4096));
            let (error, rest) = thread.block_on(write).unwrap().unwrap_err().into_parts();
            assert!(is_busy(error) && rest.bytes() == 4096);
            // The next command gets its turn.
            let part = disk.read_part(0, MIB);
            assert!(thread.block_on(part).unwrap().is_ok_and(|part| !part.is_empty()));
        }
        let written = std::fs::metadata(file.path()).map(|file| file.len()).unwrap();
        assert_eq!(written, 64 * MIB);
    }
}
