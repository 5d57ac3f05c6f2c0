//! An export on one IoThread: requests of the disk become requests to the server.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use blockio::Io;
use blockio::disk::{Extent, TransferError};
use blockio::driver::{Driver, ForeignOp, Request as Answer};
use iomem::Buffers;

use super::answer::Failure;
use super::borrower::{Borrower, decode};
use super::client::{Client, Ticket};
use super::connection_task::{ConnectionChoice, Handle};
use super::handshake::{Facts, can};
use super::loaned_op::LoanedMemory;
use super::requests::IssuedRequest;
use super::wire::{Command, FLAG_FAST_ZERO, FLAG_FUA, FLAG_NO_HOLE, FLAG_ONE_EXTENT, Request};

/// Zeroes that are written at once to a server without a command for them.
const ZEROES_BYTES: u64 = 1 << 20;

/// The kind of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TransferKind {
    command: Command,
    flags: u16,
    /// See [`IssuedRequest`].
    is_flushed: bool,
}

impl TransferKind {
    const READ: Self = Self { command: Command::Read, flags: 0, is_flushed: false };
    const WRITE: Self = Self { command: Command::Write, flags: 0, is_flushed: false };
    const DURABLE: Self = Self { flags: FLAG_FUA, ..Self::WRITE };
    /// A durable write, for a server without FUA.
    const FLUSHED: Self = Self { is_flushed: true, ..Self::WRITE };

    fn part(self, io: &Io, offset: u64, bytes: usize) -> IssuedRequest {
        let Self { command, flags, is_flushed } = self;
        let request = Request { command, flags, offset, len: bytes as u64 };
        IssuedRequest { is_flushed, ..IssuedRequest::new(io, request) }
    }
}

/// An export on one IoThread.
pub(super) struct NbdDisk {
    handle: Arc<Handle>,
    io: Rc<Io>,
    reach: RefCell<ConnectionChoice>,
    facts: Facts,
}

/// A request that was started.
enum Started {
    Local(Ticket, IssuedRequest),
    /// Carried out by the IoThread that has the client with this number.
    Remote(ForeignOp, u64, IssuedRequest),
}

impl Started {
    async fn wait(mut self, disk: &NbdDisk) -> (Result<Extent, Failure>, Buffers) {
        loop {
            self = match self {
                Self::Local(ticket, made) => match ticket.wait().await {
                    (Some(result), buffers) => return (result, buffers),
                    (None, buffers) => disk.start_made(made, buffers),
                },
                Self::Remote(op, number, made) => {
                    let completion = op.await;
                    if let Some(result) = decode(completion.result) {
                        return (result, completion.buffers);
                    }
                    disk.choose_again(number);
                    disk.start_made(made, completion.buffers)
                }
            };
        }
    }
}

impl NbdDisk {
    pub(super) fn new(handle: &Arc<Handle>, io: &Rc<Io>) -> Self {
        let shared = &handle.shared;
        let reach = RefCell::new(ConnectionChoice::find(io, shared));
        let facts = shared.facts;
        Self { handle: Arc::clone(handle), io: Rc::clone(io), reach, facts }
    }

    fn start(&self, request: Request, buffers: Buffers) -> Started {
        self.start_made(IssuedRequest::new(&self.io, request), buffers)
    }

    fn start_made(&self, made: IssuedRequest, buffers: Buffers) -> Started {
        let (reach, shared) = (self.reach.borrow(), &self.handle.shared);
        let other;
        let (number, remote) = match &*reach {
            ConnectionChoice::Local(client) => {
                other = if client.is_up() { None } else { shared.another_client(client.number) };
                match &other {
                    Some((number, remote)) => (*number, remote),
                    None => return Started::Local(client.ticket(made, buffers), made),
                }
            }
            ConnectionChoice::Remote(number, remote) => (*number, remote),
        };
        let lent = LoanedMemory::new(&buffers);
        let (op, completer) = self.io.foreign_op(buffers);
        let borrower = Borrower::new(completer);
        // If that IoThread has ended, the call is dropped with its arguments.
        Client::run_on(remote, shared, move |client| client.start_for(made, lent, borrower));
        Started::Remote(op, number, made)
    }

    /// Finds another way, because the IoThread of the client with this number has ended.
    fn choose_again(&self, number: u64) {
        let shared = &self.handle.shared;
        let mut reach = self.reach.borrow_mut();
        if matches!(&*reach, ConnectionChoice::Remote(other, _) if *other == number) {
            shared.remove_client(number);
            *reach = ConnectionChoice::find(&self.io, shared);
        }
    }

    /// Moves data, in as many requests as it takes.
    async fn transfer(
        &self,
        way: TransferKind,
        offset: u64,
        mut buffers: Buffers,
    ) -> Result<(), TransferError> {
        let most = self.facts.payload_bytes_max as usize;
        if buffers.bytes() <= most {
            let made = way.part(&self.io, offset, buffers.bytes());
            let (result, rest) = self.start_made(made, buffers).wait(self).await;
            return unfinished(result, rest);
        }
        let (mut left, mut at) = (buffers.duplicate(), offset);
        let mut started = Vec::new();
        while !left.is_empty() {
            let mut part = left.duplicate();
            part.truncate(most);
            left.advance(most);
            let bytes = part.bytes();
            started.push(self.start_made(way.part(&self.io, at, bytes), part));
            at += bytes as u64;
        }
        // All parts have to end: the memory of parts behind a failed one is in use, too.
        let mut failed = Ok(());
        for part in started {
            let (result, memory) = part.wait(self).await;
            let is_of_flush = matches!(result, Err(Failure { is_of_flush: true, .. }));
            if failed.is_ok() && result.is_ok() {
                buffers.advance(most);
            }
            if failed.is_ok() || is_of_flush {
                failed = result.map(|_| ());
            }
            drop(memory);
        }
        unfinished(failed, buffers)
    }

    /// Makes a durable write to a server that cannot flush, or one without data.
    async fn write_and_flush(&self, offset: u64, buffers: Buffers) -> Result<(), TransferError> {
        if !buffers.is_empty() {
            self.transfer(TransferKind::WRITE, offset, buffers).await?;
        }
        self.flush().await.map_err(TransferError::lost)
    }

    /// Applies a command to a range of the disk, in as many requests as it takes.
    async fn apply_range(
        &self,
        command: Command,
        flags: u16,
        mut offset: u64,
        mut len: u64,
    ) -> io::Result<()> {
        let most = self.facts.framing.range_bytes_max();
        while len > 0 {
            let part = len.min(most);
            let request = Request { command, flags, offset, len: part };
            let (result, _) = self.start(request, Buffers::empty()).wait(self).await;
            result?;
            (offset, len) = (offset + part, len - part);
        }
        Ok(())
    }

    async fn write_zero_bytes(&self, mut offset: u64, mut len: u64) -> io::Result<()> {
        while len > 0 {
            let part = len.min(ZEROES_BYTES);
            let bytes = usize::try_from(part).unwrap_or(usize::MAX);
            let zeroes = self.io.zeroes(bytes)?;
            self.transfer(TransferKind::WRITE, offset, zeroes).await?;
            (offset, len) = (offset + part, len - part);
        }
        Ok(())
    }
}

fn unfinished<T>(result: Result<T, Failure>, rest: Buffers) -> Result<(), TransferError> {
    match result {
        Ok(_) => Ok(()),
        Err(failure) if failure.is_of_flush => Err(TransferError::lost(failure.into())),
        Err(failure) => Err(TransferError::new(failure.into(), rest)),
    }
}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> Self {
        Self::from_raw_os_error(failure.errno)
    }
}

impl Driver for NbdDisk {
    fn read(&self, offset: u64, buffers: Buffers) -> Answer<'_, Result<(), TransferError>> {
        if buffers.is_empty() {
            return Box::pin(std::future::ready(Ok(())));
        }
        Box::pin(self.transfer(TransferKind::READ, offset, buffers))
    }

    fn write(
        &self,
        offset: u64,
        buffers: Buffers,
        fua: bool,
    ) -> Answer<'_, Result<(), TransferError>> {
        let (has_fua, has_flush) = (self.facts.can(can::FUA), self.facts.can(can::FLUSH));
        let way = match (fua, buffers.is_empty()) {
            (false, true) => return Box::pin(std::future::ready(Ok(()))),
            (false, false) => TransferKind::WRITE,
            (true, false) if has_fua => TransferKind::DURABLE,
            (true, false) if has_flush => TransferKind::FLUSHED,
            (true, _) => return Box::pin(self.write_and_flush(offset, buffers)),
        };
        Box::pin(self.transfer(way, offset, buffers))
    }

    fn flush(&self) -> Answer<'_, io::Result<()>> {
        if !self.facts.can(can::FLUSH) {
            let is_lost = self.handle.shared.is_lost();
            let lost = io::Error::from_raw_os_error(libc::EIO);
            return Box::pin(std::future::ready(if is_lost { Err(lost) } else { Ok(()) }));
        }
        Box::pin(async {
            let (result, _) = self.start(Request::FLUSH, Buffers::empty()).wait(self).await;
            Ok(result.map(|_| ())?)
        })
    }

    fn discard(&self, offset: u64, len: u64) -> Answer<'_, io::Result<()>> {
        if self.facts.can(can::TRIM) {
            return Box::pin(self.apply_range(Command::Trim, 0, offset, len));
        }
        if !self.facts.can(can::FAST_ZERO) {
            return Box::pin(std::future::ready(Ok(())));
        }
        // A server that is not faster with zeroes than with data refuses, and nothing is done.
        Box::pin(async move {
            match self.apply_range(Command::WriteZeroes, FLAG_FAST_ZERO, offset, len).await {
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
                result => result,
            }
        })
    }

    fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> Answer<'_, io::Result<()>> {
        if !self.facts.can(can::WRITE_ZEROES) {
            return Box::pin(self.write_zero_bytes(offset, len));
        }
        let flags = if may_unmap { 0 } else { FLAG_NO_HOLE };
        Box::pin(self.apply_range(Command::WriteZeroes, flags, offset, len))
    }

    fn block_status(&self, offset: u64, len: u64) -> Answer<'_, io::Result<Extent>> {
        if self.facts.context.is_none() {
            return Box::pin(std::future::ready(Ok(Extent::data(len))));
        }
        let len = len.min(self.facts.framing.range_bytes_max());
        let (command, flags) = (Command::BlockStatus, FLAG_ONE_EXTENT);
        Box::pin(async move {
            let request = Request { command, flags, offset, len };
            let (result, _) = self.start(request, Buffers::empty()).wait(self).await;
            Ok(result?)
        })
    }
}
