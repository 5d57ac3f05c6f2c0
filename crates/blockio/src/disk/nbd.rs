//! NBD: an export of a server, over sockets that the loop watches.
//!
//! - `wire.rs`, `answer.rs` and `handshake.rs` are the protocol, and touch no socket;
//! - `connect.rs` makes a connection, with TLS by `tls.rs`, which takes a thread for that long;
//! - `flow.rs` moves bytes over one, `transport.rs` has the system calls;
//! - `link.rs` is the task of a connection, `pipe.rs` has the requests of an IoThread, `remains.rs`
//!   those that a connection leaves behind, and `shared.rs` what all IoThreads know.
//!
//! Where the server says that its connections agree with each other, each IoThread has its own.
//! Where it does not, one connection carries all requests, on the IoThread that came first.

mod answer;
mod connect;
mod flow;
mod handshake;
mod held;
mod lent;
mod link;
mod pipe;
mod remains;
#[cfg(test)]
mod scripted;
mod shared;
mod target;
#[cfg(test)]
mod tests;
mod tls;
mod transport;
mod wire;

use std::fmt;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use iomem::Buffers;

use super::info::{
    Abilities, DiskInfo, DiskOptions, DiskState, Extent, Link, Unfinished, check_logical_block,
};
use super::outside::Outside;
use super::seam::{OtherDisk, OtherSource, Request as Answer};
use super::source::FileSource;
use super::{DiskSource, SourceKind};
use crate::config::EngineKind;
use crate::error::Error;
use crate::io::Io;
use crate::remote::Remote;
use handshake::{Facts, can};
use lent::{Lent, decode};
use pipe::{Pipe, Ticket, key_of};
use shared::Shared;
pub use target::{NbdAddress, NbdOptions, NbdTls};
use wire::{Command, FLAG_FAST_ZERO, FLAG_FUA, FLAG_NO_HOLE, FLAG_ONE_EXTENT, Framing, Request};

/// The longest range of one request that moves no data, where lengths have 32 bits.
const RANGE_BYTES_MAX: u64 = 1 << 31;

/// Zeroes that are written at once where the server knows no other way.
const ZEROES_BYTES: u64 = 1 << 20;

impl DiskSource {
    /// The export of an NBD server. This waits for the server, for ten seconds at most.
    ///
    /// # Errors
    ///
    /// When the server cannot be reached or does not have it, when it is read-only and the options
    /// are not, or has a size or blocks that do not fit them.
    pub fn nbd(nbd: NbdOptions, options: &DiskOptions) -> Result<Self, Error> {
        let name = nbd.to_string();
        let refused = |reason| Error::Disk { disk: name.clone(), reason };
        let connected = connect::connect(&nbd).map_err(refused)?;
        let info = info(&connected.facts, options).map_err(refused)?;
        if !info.read_only && !connected.facts.can(can::FLUSH) {
            tracing::warn!(
                "{name}: the server cannot flush; what it has answered may be lost with its power"
            );
        }
        let shared = Arc::new(Shared::new(nbd, connected));
        let source = NbdSource { handle: Arc::new(Handle { shared }), name, info };
        Ok(Self::new(info, SourceKind::Other(Arc::new(source))))
    }
}

fn info(facts: &Facts, options: &DiskOptions) -> Result<DiskInfo, String> {
    if facts.can(can::READ_ONLY) && !options.read_only {
        return Err("the export is read-only; open it read-only".to_owned());
    }
    let least = facts.block_bytes_min.max(512);
    let logical = options.logical_block_bytes.unwrap_or(least);
    let logical_block_bytes = check_logical_block(logical).map_err(|error| error.to_string())?;
    if logical_block_bytes < least {
        return Err(format!(
            "the server takes blocks of at least {least} bytes, and a logical block of \
             {logical_block_bytes} was asked for; choose a larger one"
        ));
    }
    check_size(facts.size_bytes, logical_block_bytes)?;
    let preferred = facts.block_bytes_preferred.clamp(logical_block_bytes, 65_536);
    Ok(DiskInfo {
        size_bytes: facts.size_bytes,
        logical_block_bytes,
        physical_block_bytes: preferred,
        read_only: options.read_only,
        direct: false,
    })
}

fn check_size(size_bytes: u64, logical_block_bytes: u32) -> Result<(), String> {
    if size_bytes == 0 {
        return Err("its size is zero; give it one on the server".to_owned());
    }
    if !size_bytes.is_multiple_of(logical_block_bytes.into()) {
        return Err(format!(
            "its size of {size_bytes} bytes is not a multiple of the logical block of \
             {logical_block_bytes}; extend it on the server"
        ));
    }
    Ok(())
}

/// Ends the connections when nobody has the disk any more.
struct Handle {
    shared: Arc<Shared>,
}

impl Handle {
    /// Has all connections look at what has become of the disk.
    fn wake(&self) {
        let key = key_of(&self.shared);
        self.shared.on_pipes(move |io| {
            if let Some(pipe) = io.kept::<Pipe>(key) {
                pipe.wake_links();
            }
        });
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.end();
        self.wake();
    }
}

struct NbdSource {
    handle: Arc<Handle>,
    name: String,
    info: DiskInfo,
}

impl fmt::Debug for NbdSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NbdSource({})", self.name)
    }
}

impl NbdSource {
    fn shared(&self) -> &Arc<Shared> {
        &self.handle.shared
    }

    fn refused(&self, reason: String) -> Error {
        Error::Disk { disk: self.name.clone(), reason }
    }

    fn may_have_many(&self) -> bool {
        let facts = &self.shared().facts;
        facts.can(can::MULTI_CONN) || facts.can(can::READ_ONLY)
    }
}

impl OtherSource for NbdSource {
    fn attach(&self, io: &Rc<Io>, _: Option<EngineKind>) -> Box<dyn OtherDisk> {
        let shared = self.shared();
        let here = io.kept::<Pipe>(key_of(shared));
        let reach = match here {
            Some(pipe) => Reach::Here(pipe),
            None if self.may_have_many() => {
                let number = shared.add_pipe(&io.remote());
                let links = shared.options.connections.max(1) as usize;
                Reach::Here(link::start(io, shared, number, links))
            }
            None => match shared.home(&io.remote()) {
                (_, Some(number)) => Reach::Here(link::start(io, shared, number, 1)),
                (remote, None) => Reach::There(remote),
            },
        };
        let facts = shared.facts;
        Box::new(NbdDisk { handle: Arc::clone(&self.handle), io: Rc::clone(io), reach, facts })
    }

    fn chain(&self) -> Vec<Link> {
        vec![Link { kind: "nbd", place: self.name.clone() }]
    }

    fn identity(&self) -> &str {
        &self.name
    }

    fn abilities(&self) -> Abilities {
        let facts = &self.shared().facts;
        Abilities {
            flush: facts.can(can::FLUSH),
            discard: self.discard_bytes().is_some(),
            zeroes: facts.can(can::WRITE_ZEROES),
            ..Abilities::default()
        }
    }

    fn discard_bytes(&self) -> Option<u32> {
        let facts = &self.shared().facts;
        let can_discard = facts.can(can::TRIM) || facts.can(can::FAST_ZERO);
        can_discard.then_some(self.info.physical_block_bytes)
    }

    fn optimal_bytes(&self) -> Option<u32> {
        // Smaller ones are the physical block.
        let preferred = self.shared().facts.block_bytes_preferred;
        (preferred > self.info.physical_block_bytes).then_some(preferred)
    }

    fn local(&self) -> Option<&FileSource> {
        None
    }

    fn state(&self) -> DiskState {
        self.shared().disk_state()
    }

    fn remark(&self) -> Option<String> {
        Some(self.shared().remark())
    }

    fn inherit(&self, loss: Option<i32>, is_flushed: bool) {
        self.shared().inherit(loss.is_some(), is_flushed);
    }

    fn is_flushed(&self) -> bool {
        self.shared().is_flushed()
    }

    fn may_still_change(&self) -> bool {
        self.shared().held.has_any()
    }

    fn give_up(&self) {
        self.shared().give_up();
        self.handle.wake();
    }

    fn outside(&self) -> Option<Arc<Outside>> {
        let shared = Arc::clone(self.shared());
        // What each new connection is told. A server that is asked every second would have to have
        // room for one more connection.
        let look = move || Ok(Some(shared.size_bytes.load(Ordering::Relaxed)));
        Some(Arc::new(Outside::other(look)))
    }

    fn find_size(&self) -> Result<u64, Error> {
        let shared = self.shared();
        let facts = connect::ask(&shared.options).map_err(|reason| self.refused(reason))?;
        let checked = check_size(facts.size_bytes, self.info.logical_block_bytes);
        checked.map_err(|reason| self.refused(reason))?;
        shared.size_bytes.store(facts.size_bytes, Ordering::Relaxed);
        Ok(facts.size_bytes)
    }

    fn check_new_size(&self, _: u64) -> Result<(), Error> {
        let reason =
            "an NBD export is resized on its server; do that, and ask again without a size";
        Err(self.refused(reason.to_owned()))
    }

    fn set_size(&self, size_bytes: u64) -> Result<(), Error> {
        self.check_new_size(size_bytes)
    }

    fn adopt_size(&self, _: u64) {}
}

/// Where the connections are that an IoThread uses.
enum Reach {
    Here(Rc<Pipe>),
    There(Remote),
}

struct NbdDisk {
    handle: Arc<Handle>,
    io: Rc<Io>,
    reach: Reach,
    facts: Facts,
}

/// A request that was started.
enum Started {
    Here(Ticket),
    There(crate::foreign_op::ForeignOp),
}

impl Started {
    async fn wait(self) -> (Result<Extent, i32>, Buffers) {
        match self {
            Self::Here(ticket) => ticket.wait().await,
            Self::There(op) => {
                let completion = op.await;
                (decode(completion.result), completion.buffers)
            }
        }
    }
}

impl NbdDisk {
    fn start(&self, request: Request, buffers: Buffers) -> Started {
        let remote = match &self.reach {
            Reach::Here(pipe) => return Started::Here(pipe.ticket(request, buffers)),
            Reach::There(remote) => remote,
        };
        let (lent, key) = (Lent::new(&buffers), key_of(&self.handle.shared));
        let (op, completer) = self.io.foreign_op(buffers);
        remote.post(move |io| {
            if let Some(pipe) = io.kept::<Pipe>(key) {
                pipe.start_for(request, lent, completer);
            }
        });
        Started::There(op)
    }

    /// Moves data, in as many requests as it takes.
    async fn transfer(
        &self,
        command: Command,
        flags: u16,
        offset: u64,
        mut buffers: Buffers,
    ) -> Result<(), Unfinished> {
        let most = self.facts.payload_bytes_max as usize;
        if buffers.bytes() <= most {
            let request = Request { command, flags, offset, len: buffers.bytes() as u64 };
            let (result, rest) = self.start(request, buffers).wait().await;
            return unfinished(result, rest);
        }
        let (mut left, mut at) = (buffers.again(), offset);
        let mut started = Vec::new();
        while !left.is_empty() {
            let mut part = left.again();
            part.truncate(most);
            left.advance(most);
            let len = part.bytes() as u64;
            started.push(self.start(Request { command, flags, offset: at, len }, part));
            at += len;
        }
        // All of them have to end: the memory of those behind one that fails is in use, too.
        let mut failed = Ok(());
        for part in started {
            let (result, memory) = part.wait().await;
            if failed.is_ok() {
                failed = result.map(|_| ());
                if failed.is_ok() {
                    buffers.advance(most);
                }
            }
            drop(memory);
        }
        failed.map_err(|errno| Unfinished::new(io::Error::from_raw_os_error(errno), buffers))
    }

    /// Has ranges of the disk treated, in as many requests as it takes.
    async fn treat(
        &self,
        command: Command,
        flags: u16,
        mut offset: u64,
        mut len: u64,
    ) -> io::Result<()> {
        let most = match self.facts.framing {
            Framing::Extended => u64::MAX,
            _ => RANGE_BYTES_MAX,
        };
        while len > 0 {
            let part = len.min(most);
            let request = Request { command, flags, offset, len: part };
            let (result, _) = self.start(request, Buffers::empty()).wait().await;
            result.map_err(io::Error::from_raw_os_error)?;
            (offset, len) = (offset + part, len - part);
        }
        Ok(())
    }

    async fn write_zero_bytes(&self, mut offset: u64, mut len: u64) -> io::Result<()> {
        while len > 0 {
            let part = len.min(ZEROES_BYTES);
            let bytes = usize::try_from(part).unwrap_or(usize::MAX);
            let zeroes = self.io.bounce_budget.zeroes(bytes, ())?;
            self.transfer(Command::Write, 0, offset, zeroes).await?;
            (offset, len) = (offset + part, len - part);
        }
        Ok(())
    }
}

fn unfinished(result: Result<Extent, i32>, rest: Buffers) -> Result<(), Unfinished> {
    match result {
        Ok(_) => Ok(()),
        Err(errno) => Err(Unfinished::new(io::Error::from_raw_os_error(errno), rest)),
    }
}

impl OtherDisk for NbdDisk {
    fn read(&self, offset: u64, buffers: Buffers) -> Answer<'_, Result<(), Unfinished>> {
        if buffers.is_empty() {
            return Box::pin(std::future::ready(Ok(())));
        }
        Box::pin(self.transfer(Command::Read, 0, offset, buffers))
    }

    fn write(
        &self,
        offset: u64,
        buffers: Buffers,
        fua: bool,
    ) -> Answer<'_, Result<(), Unfinished>> {
        if buffers.is_empty() && !fua {
            return Box::pin(std::future::ready(Ok(())));
        }
        let has_fua = self.facts.can(can::FUA);
        Box::pin(async move {
            if !buffers.is_empty() {
                let flags = if fua && has_fua { FLAG_FUA } else { 0 };
                self.transfer(Command::Write, flags, offset, buffers).await?;
            }
            match fua && !has_fua {
                true => {
                    let flushed = self.flush().await;
                    flushed.map_err(|error| Unfinished::new(error, Buffers::empty()))
                }
                false => Ok(()),
            }
        })
    }

    fn flush(&self) -> Answer<'_, io::Result<()>> {
        if !self.facts.can(can::FLUSH) {
            return Box::pin(std::future::ready(Ok(())));
        }
        Box::pin(async {
            let request = Request { command: Command::Flush, flags: 0, offset: 0, len: 0 };
            let (result, _) = self.start(request, Buffers::empty()).wait().await;
            result.map(|_| ()).map_err(io::Error::from_raw_os_error)
        })
    }

    fn discard(&self, offset: u64, len: u64) -> Answer<'_, io::Result<()>> {
        if self.facts.can(can::TRIM) {
            return Box::pin(self.treat(Command::Trim, 0, offset, len));
        }
        if !self.facts.can(can::FAST_ZERO) {
            return Box::pin(std::future::ready(Ok(())));
        }
        // A server that says that zeroes would take as long as writing them does nothing.
        Box::pin(async move {
            match self.treat(Command::WriteZeroes, FLAG_FAST_ZERO, offset, len).await {
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
        Box::pin(self.treat(Command::WriteZeroes, flags, offset, len))
    }

    fn block_status(&self, offset: u64, len: u64) -> Answer<'_, io::Result<Extent>> {
        if self.facts.context.is_none() {
            return Box::pin(std::future::ready(Ok(Extent::data(len))));
        }
        let len = match self.facts.framing {
            Framing::Extended => len,
            _ => len.min(RANGE_BYTES_MAX),
        };
        let (command, flags) = (Command::BlockStatus, FLAG_ONE_EXTENT);
        Box::pin(async move {
            let request = Request { command, flags, offset, len };
            let (result, _) = self.start(request, Buffers::empty()).wait().await;
            result.map_err(io::Error::from_raw_os_error)
        })
    }
}
