//! The progress of a request while parts of its reply come in: replies that it may have, and the
//! places of their data. Nothing here reads or writes a socket.

use blockio::disk::{Extent, ExtentKind};

use super::wire::{Command, Framing, Reply, ReplyContent, Request, Violation, errno};

/// The most pieces of a read that is not complete: a bound for the memory that a server can claim.
const PIECES_MAX: usize = 4096;

const STATE_HOLE: u64 = 1 << 0;
const STATE_ZERO: u64 = 1 << 1;

/// The received part of the reply to a request.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// The received parts of a read, as offsets within it, in order and apart.
    pieces: Vec<(u64, u64)>,
    errno: Option<i32>,
    extent: Option<Extent>,
}

/// The failure of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) errno: i32,
    /// True if the server has failed the flush after a write. The next flush may succeed and hide
    /// the loss, so this must not be tried again.
    pub(super) is_of_flush: bool,
}

/// The action that a part of a reply needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Nothing,
    /// `len` bytes follow, which belong at byte `at` of the request.
    Receive {
        at: u64,
        len: u64,
    },
    /// `len` zeroes belong at byte `at` of the request.
    Zero {
        at: u64,
        len: u64,
    },
}

impl Progress {
    /// Takes in a part of the reply to `request`. `context` is the one of the states of blocks.
    ///
    /// # Errors
    ///
    /// If this request cannot have that reply.
    pub(super) fn record(
        &mut self,
        request: &Request,
        reply: &Reply,
        framing: Framing,
        context: Option<u32>,
    ) -> Result<Action, Violation> {
        let is_read = request.command == Command::Read;
        match reply.content {
            ReplyContent::Nothing => Ok(Action::Nothing),
            ReplyContent::Error(error) => {
                self.errno.get_or_insert(errno(error));
                Ok(Action::Nothing)
            }
            ReplyContent::Simple if !is_read => Ok(Action::Nothing),
            ReplyContent::Simple if framing == Framing::Simple => {
                self.cover(0, request.len)?;
                Ok(Action::Receive { at: 0, len: request.len })
            }
            ReplyContent::Data { offset, len } if is_read => {
                let at = self.place(request, offset, len)?;
                Ok(Action::Receive { at, len })
            }
            ReplyContent::Hole { offset, len } if is_read => {
                let at = self.place(request, offset, len)?;
                Ok(Action::Zero { at, len })
            }
            ReplyContent::Status { context: received, len, flags }
                if request.command == Command::BlockStatus =>
            {
                if Some(received) == context {
                    self.extent = Some(extent(len.min(request.len), flags)?);
                }
                Ok(Action::Nothing)
            }
            _ => Err(Violation("it sent a reply that does not fit the request")),
        }
    }

    /// Records a received part of the disk. Returns its place in the request.
    fn place(&mut self, request: &Request, offset: u64, len: u64) -> Result<u64, Violation> {
        let at = offset.checked_sub(request.offset);
        let fits = |at: &u64| at.checked_add(len).is_some_and(|end| end <= request.len);
        let Some(at) = at.filter(fits) else {
            return Err(Violation("it sent data that is outside of the request"));
        };
        self.cover(at, at + len)?;
        Ok(at)
    }

    fn cover(&mut self, start: u64, end: u64) -> Result<(), Violation> {
        let pieces = &mut self.pieces;
        let next = pieces.partition_point(|(from, _)| *from < start);
        let before = next.checked_sub(1).and_then(|index| pieces.get(index)).copied();
        let after = pieces.get(next).copied();
        if before.is_some_and(|(_, to)| to > start) || after.is_some_and(|(from, _)| from < end) {
            return Err(Violation("it sent the same part of the disk twice"));
        }
        let before = before.filter(|(_, to)| *to == start).map(|(from, _)| from);
        let after = after.filter(|(from, _)| *from == end).map(|(_, to)| to);
        let joined = (before.unwrap_or(start), after.unwrap_or(end));
        let replaced = next - usize::from(before.is_some())..next + usize::from(after.is_some());
        if replaced.is_empty() && pieces.len() >= PIECES_MAX {
            return Err(Violation("it sent the data of a read in too many pieces"));
        }
        pieces.splice(replaced, [joined]);
        Ok(())
    }

    /// Returns the result after the last part.
    ///
    /// # Errors
    ///
    /// If a part is missing.
    pub(super) fn finish(&self, request: &Request) -> Result<Result<Extent, i32>, Violation> {
        if let Some(errno) = self.errno {
            return Ok(Err(errno));
        }
        match request.command {
            Command::Read if self.pieces != [(0, request.len)] => {
                Err(Violation("it sent less data than the request asked for"))
            }
            // A server may report nothing for the context.
            Command::BlockStatus => Ok(Ok(self.extent.unwrap_or(Extent::data(request.len)))),
            _ => Ok(Ok(Extent::data(request.len))),
        }
    }
}

fn extent(bytes: u64, flags: u64) -> Result<Extent, Violation> {
    if bytes == 0 {
        return Err(Violation("it sent a block status of zero bytes"));
    }
    let kind = match flags & (STATE_HOLE | STATE_ZERO) {
        STATE_ZERO => ExtentKind::Zero,
        0 | STATE_HOLE => ExtentKind::Data,
        _ => ExtentKind::Hole,
    };
    Ok(Extent { bytes, kind })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const READ: Request = Request { command: Command::Read, flags: 0, offset: 4096, len: 4096 };

    fn data(offset: u64, len: u64) -> Reply {
        Reply { cookie: 0, content: ReplyContent::Data { offset, len }, is_last: false }
    }

    fn take(
        progress: &mut Progress,
        request: &Request,
        content: ReplyContent,
    ) -> Result<Action, Violation> {
        let reply = Reply { cookie: 0, content, is_last: true };
        progress.record(request, &reply, Framing::Structured, Some(5))
    }

    #[test]
    fn a_read_is_complete_when_each_byte_has_come_once() {
        let mut progress = Progress::default();
        for (offset, at) in [(6144, 2048), (4096, 0), (5120, 1024), (7168, 3072)] {
            let action = progress.record(&READ, &data(offset, 1024), Framing::Structured, None);
            assert_eq!(action, Ok(Action::Receive { at, len: 1024 }));
            let is_done = offset == 7168;
            assert_eq!(progress.finish(&READ).is_ok(), is_done, "after {offset}");
        }
        let hole = ReplyContent::Hole { offset: 4096, len: 4096 };
        let mut progress = Progress::default();
        assert_eq!(take(&mut progress, &READ, hole), Ok(Action::Zero { at: 0, len: 4096 }));
        assert!(progress.finish(&READ).unwrap().is_ok());
    }

    #[test]
    fn an_answer_that_does_not_fit_its_request_is_a_violation() {
        let flush = Request { command: Command::Flush, flags: 0, offset: 0, len: 0 };
        let at = |offset, len| ReplyContent::Data { offset, len };
        for (request, content) in [
            (READ, at(4095, 1)),
            (READ, at(8192, 1)),
            (READ, at(4096, 4097)),
            (READ, at(u64::MAX, 2)),
            (READ, at(8000, u64::MAX)),
            (READ, ReplyContent::Simple),
            (READ, ReplyContent::Status { context: 5, len: 1, flags: 0 }),
            (flush, at(0, 1)),
            (flush, ReplyContent::Hole { offset: 0, len: 1 }),
        ] {
            assert!(take(&mut Progress::default(), &request, content).is_err(), "{content:?}");
        }
        let mut progress = Progress::default();
        assert!(take(&mut progress, &READ, at(4096, 2048)).is_ok());
        assert!(take(&mut progress, &READ, at(6143, 10)).is_err(), "a byte came twice");
        assert!(take(&mut progress, &READ, ReplyContent::Nothing).is_ok());
        assert!(progress.finish(&READ).is_err(), "a half is missing");
        assert!(take(&mut progress, &READ, ReplyContent::Error(28)).is_ok());
        assert_eq!(progress.finish(&READ), Ok(Err(libc::ENOSPC)));
    }

    #[test]
    fn states_of_blocks_are_parsed() {
        let asked = Request { command: Command::BlockStatus, flags: 0, offset: 0, len: 1000 };
        for (flags, kind) in [
            (0, ExtentKind::Data),
            (1, ExtentKind::Data),
            (2, ExtentKind::Zero),
            (3, ExtentKind::Hole),
        ] {
            let mut progress = Progress::default();
            let content = ReplyContent::Status { context: 5, len: 4000, flags };
            assert!(take(&mut progress, &asked, content).is_ok());
            assert_eq!(progress.finish(&asked), Ok(Ok(Extent { bytes: 1000, kind })));
        }
        let mut progress = Progress::default();
        let other = ReplyContent::Status { context: 6, len: 10, flags: 3 };
        assert!(take(&mut progress, &asked, other).is_ok());
        assert_eq!(progress.finish(&asked), Ok(Ok(Extent::data(1000))));
        let none = ReplyContent::Status { context: 5, len: 0, flags: 0 };
        assert!(take(&mut progress, &asked, none).is_err());
    }

    #[test]
    fn the_first_error_of_several_is_the_result() {
        let mut progress = Progress::default();
        for error in [28, 5] {
            assert_eq!(take(&mut progress, &READ, ReplyContent::Error(error)), Ok(Action::Nothing));
        }
        assert_eq!(progress.finish(&READ), Ok(Err(libc::ENOSPC)));
    }

    /// A server could claim much memory by single bytes that lie apart.
    #[test]
    fn a_read_comes_in_a_bounded_number_of_pieces() {
        let request = Request { offset: 0, len: 1 << 20, ..READ };
        let mut progress = Progress::default();
        let mut place =
            |offset| take(&mut progress, &request, ReplyContent::Data { offset, len: 1 });
        for piece in 0..PIECES_MAX as u64 {
            assert!(place(2 * piece).is_ok(), "{piece}");
        }
        assert!(place(2 * PIECES_MAX as u64).is_err());
        assert!(place(1).is_ok(), "it joins two pieces");
        assert!(place(2 * PIECES_MAX as u64).is_ok());
    }

    proptest! {
        /// In any order, of any sizes: a read is complete when each byte has come once, and a byte
        /// that comes twice is noticed.
        #[test]
        fn pieces_in_any_order(parts in prop::collection::vec((0u64..64, 1u64..16), 1..40)) {
            let request = Request { offset: 0, len: 80, ..READ };
            let (mut progress, mut seen) = (Progress::default(), [false; 80]);
            for (at, len) in parts {
                let range = usize::try_from(at).unwrap()..usize::try_from(at + len).unwrap();
                let is_new = !seen[range.clone()].iter().any(|seen| *seen);
                let taken = progress.record(&request, &data(at, len), Framing::Structured, None);
                prop_assert_eq!(taken.is_ok(), is_new);
                if !is_new {
                    break;
                }
                seen[range].fill(true);
                let is_done = seen.iter().all(|seen| *seen);
                prop_assert_eq!(progress.finish(&request).is_ok(), is_done);
            }
        }
    }
}
