//! NBD: an export of a server, over sockets that the loop watches.
//!
//! - `wire.rs`, `answer.rs` and `handshake.rs` are the protocol, and touch no socket;
//! - `connect.rs` makes a connection on a thread that may wait, with TLS by `tls.rs`;
//!   `resolver.rs` finds the addresses of servers;
//! - `channel.rs` moves bytes over a connection, `transport.rs` has the system calls;
//! - `connection_task.rs` finds the connections of an IoThread, is the task of each, and reports a
//!   server that does not answer, with `retry.rs` and `socket_source.rs`; `drain.rs` drains an
//!   abandoned connection, and `abandoned.rs` keeps its requests;
//! - `client.rs` has the requests of an IoThread, `requests.rs` the state of each, and `shared.rs`
//!   the state common to all IoThreads;
//! - `disk.rs` turns requests to a disk into requests to the server. Another IoThread may carry one
//!   out: `loaned_op.rs` lends it the memory, and `borrower.rs` returns the result.
//!
//! If the server reports that its connections agree with each other, each IoThread has its own
//! connection. Otherwise one connection carries all requests, on the IoThread that came first.

mod abandoned;
mod answer;
mod borrower;
mod channel;
mod client;
mod connect;
mod connection_task;
mod disk;
mod drain;
mod handshake;
mod loaned_op;
mod options;
mod requests;
mod resolver;
mod retry;
mod shared;
mod socket_source;
#[cfg(test)]
mod tests;
#[cfg(feature = "nbd-tls")]
mod tls;
mod transport;
mod wire;
mod write_fence;

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use blockio::disk::{Abilities, DiskInfo, DiskState, LATE_LOCK_PATIENCE, Link, SizeProbe};
use blockio::driver::{Driver, DriverSource};
use blockio::{
    DiskOptions, DiskSource, EngineConfig, EngineKind, Error, Io, IoThread, IoThreadConfig, Remote,
    oneshot,
};
use iomem::Buffers;

use answer::Failure;
use client::{Client, record_size};
use connection_task::{Handle, check_not_less};
use disk::NbdDisk;
use drain::release_closed_orphans;
use handshake::{Facts, can};
pub use options::{NbdAddress, NbdOptions, NbdTls};
use requests::IssuedRequest;
use shared::SharedExport;
use wire::Request;

/// A server with a machine that is silent for this long counts as gone.
const SILENCE: Duration = Duration::from_secs(20);

/// The pause between two checks of a connection that has broken.
const PAUSE: Duration = Duration::from_millis(10);

/// Opens the export of an NBD server. Waits for the server, for ten seconds at most.
///
/// # Errors
///
/// If the server cannot be reached or has no such export; if the export is read-only and the
/// options are not; if its size or its blocks do not fit the options.
pub fn open(nbd: NbdOptions, options: &DiskOptions) -> Result<DiskSource, Error> {
    open_with_silence(nbd, options, SILENCE)
}

fn open_with_silence(
    nbd: NbdOptions,
    options: &DiskOptions,
    silence: Duration,
) -> Result<DiskSource, Error> {
    let name = nbd.to_string();
    let refused = |reason| Error::Disk { disk: name.clone(), reason };
    let (connected, _) = connect::connect(&nbd).map_err(refused)?;
    let info = info(&connected.facts, options).map_err(refused)?;
    if !info.read_only && !connected.facts.can(can::FLUSH) {
        tracing::warn!(
            "{name}: the server does not support flushes; a power failure there may lose answered \
             writes"
        );
    }
    let shared = Arc::new(SharedExport::new(nbd, options.read_only, silence, connected));
    let (handle, taken) = (Arc::new(Handle { shared }), AtomicU64::new(info.size_bytes));
    let source = NbdSource { handle, name, info, taken };
    Ok(DiskSource::from_driver(info, Arc::new(source)))
}

fn info(facts: &Facts, options: &DiskOptions) -> Result<DiskInfo, String> {
    if facts.can(can::READ_ONLY) && !options.read_only {
        return Err(
            "the export is read-only; open it with --read-only, or drive it with `disk bench --rw \
             read`"
                .to_owned(),
        );
    }
    let least = facts.block_bytes_min.max(512);
    let logical = options.logical_block_bytes.unwrap_or(least);
    let logical_block_bytes =
        DiskOptions::check_logical_block(logical).map_err(|error| error.to_string())?;
    if logical_block_bytes < least {
        return Err(format!(
            "the server takes blocks of at least {least} bytes, and the logical block has \
             {logical_block_bytes}; choose a larger logical block"
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
        return Err("its size is zero; set one on the server".to_owned());
    }
    if i64::try_from(size_bytes).is_err() {
        return Err(format!(
            "its size of {size_bytes} bytes exceeds the limit of 2^63 - 1; correct it on the server"
        ));
    }
    if !size_bytes.is_multiple_of(logical_block_bytes.into()) {
        return Err(format!(
            "its size of {size_bytes} bytes is not a multiple of the logical block of \
             {logical_block_bytes}; extend it on the server"
        ));
    }
    Ok(())
}

struct NbdSource {
    handle: Arc<Handle>,
    name: String,
    info: DiskInfo,
    /// The size that the disk has taken over last.
    taken: AtomicU64,
}

impl fmt::Debug for NbdSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NbdSource({})", self.name)
    }
}

impl NbdSource {
    fn shared(&self) -> &Arc<SharedExport> {
        &self.handle.shared
    }

    fn refused(&self, reason: String) -> Error {
        Error::Disk { disk: self.name.clone(), reason }
    }

    /// Flushes on the IoThread that has the only connection. `None` if that thread no longer has
    /// it.
    fn flush_at(&self, home: &Remote) -> Option<Result<(), i32>> {
        let (answer, pending) = oneshot::channel();
        Client::run_on(home, self.shared(), move |client| {
            let io = &client.io;
            let flush = client.ticket(IssuedRequest::new(io, Request::FLUSH), Buffers::empty());
            let nowhere = Err(Failure { errno: libc::EIO, is_of_flush: false });
            io.spawn(async move { answer.send(flush.wait().await.0.unwrap_or(nowhere)) });
        });
        Some(pending.wait()?.map(|_| ()).map_err(|failure| failure.errno))
    }

    /// Flushes on the connection that no IoThread serves, by a loop of this thread.
    fn flush_spare(&self) -> Result<Result<(), i32>, Error> {
        let config = IoThreadConfig { engine: EngineConfig::Threads, ..IoThreadConfig::default() };
        let thread = IoThread::new(&config)?;
        let disk = NbdDisk::new(&self.handle, thread.io());
        let flushed = thread.block_on(disk.flush())?;
        Ok(flushed.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO)))
    }

    /// The size that a connection received last, unless it was taken over already or no disk can
    /// have it.
    fn announced_size(&self) -> Option<u64> {
        let size = self.shared().size_bytes();
        check_size(size, self.info.logical_block_bytes).ok()?;
        (self.taken.swap(size, Ordering::Relaxed) != size).then_some(size)
    }
}

impl DriverSource for NbdSource {
    fn attach(&self, io: &Rc<Io>, _: Option<EngineKind>) -> Box<dyn Driver> {
        Box::new(NbdDisk::new(&self.handle, io))
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
        // A smaller one is the physical block.
        let preferred = self.shared().facts.block_bytes_preferred;
        (preferred > self.info.physical_block_bytes).then_some(preferred)
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
        release_closed_orphans(self.shared());
        self.shared().held.has_any()
    }

    fn abandon(&self) {
        self.shared().abandon();
        self.handle.wake();
    }

    /// Flushes for the next process: without multi-conn, none of its flushes covers writes made
    /// here.
    fn write_back(&self) -> Result<(), Error> {
        let shared = self.shared();
        while !self.info.read_only && shared.needs_own_flush() {
            let flushed = match shared.home_remote() {
                Some((number, home)) => match self.flush_at(&home) {
                    Some(flushed) => flushed,
                    None => {
                        // The IoThread has ended, or has left its connection because that was idle.
                        shared.remove_client(number);
                        continue;
                    }
                },
                None if shared.has_spare() => self.flush_spare()?,
                // Without a connection there is nothing that could be flushed.
                None => return Ok(()),
            };
            return flushed.map_err(|errno| {
                let error = std::io::Error::from_raw_os_error(errno);
                self.refused(format!("written data cannot be flushed: {error}"))
            });
        }
        Ok(())
    }

    fn changes_users(&self) -> bool {
        true
    }

    /// Flushes for the next process. A server has no locks: the next process must not begin before.
    fn end_use(&self) -> Result<(), Error> {
        self.write_back()?;
        let end = Instant::now() + LATE_LOCK_PATIENCE;
        while self.may_still_change() {
            if Instant::now() >= end {
                return Err(self.refused(
                    "the server may still carry out writes of a connection that has broken"
                        .to_owned(),
                ));
            }
            std::thread::sleep(PAUSE);
        }
        match self.state() {
            DiskState::Lost => Err(self.refused("written data may be lost".to_owned())),
            _ => Ok(()),
        }
    }

    fn size_probe(&self) -> Option<Arc<SizeProbe>> {
        let shared = Arc::clone(self.shared());
        // The size that each new connection receives. A server asked every second would need room
        // for one more connection.
        let look = move || Ok(Some(shared.size_bytes()));
        Some(Arc::new(SizeProbe::other(look)))
    }

    fn probe_size(&self) -> Result<u64, Error> {
        let shared = self.shared();
        let (facts, asked) = match connect::query_export(&shared.options) {
            Ok(answer) => answer,
            // A server that lets no further client in has sent the size to the present connection.
            Err(reason) => return self.announced_size().ok_or_else(|| self.refused(reason)),
        };
        let check = |size_bytes| check_size(size_bytes, self.info.logical_block_bytes);
        let checked = check_not_less(shared, &facts).and_then(|()| check(facts.size_bytes));
        checked.map_err(|reason| self.refused(reason))?;
        record_size(shared, facts.size_bytes, asked);
        // Another answer may be newer.
        let size_bytes = shared.size_bytes();
        check(size_bytes).map_err(|reason| self.refused(reason))?;
        self.taken.store(size_bytes, Ordering::Relaxed);
        Ok(size_bytes)
    }

    fn known_size(&self) -> Result<u64, Error> {
        Ok(self.shared().size_bytes())
    }

    fn check_new_size(&self, _: u64) -> Result<(), Error> {
        let reason = "an NBD export is resized on its server; resize it there, then repeat this \
                      command without a size";
        Err(self.refused(reason.to_owned()))
    }

    fn set_size(&self, size_bytes: u64) -> Result<(), Error> {
        self.check_new_size(size_bytes)
    }

    fn adopt_size(&self, _: u64) {}
}

/// The stand-in for TLS in builds without the feature `nbd-tls`.
#[cfg(not(feature = "nbd-tls"))]
mod tls {
    use std::io::{self, Read, Write};
    use std::os::fd::BorrowedFd;

    use super::handshake::Stream;
    use super::options::{NbdOptions, NbdTls};

    /// The TLS of a connection, which no connection has.
    pub(super) enum Tls {}

    /// Refuses the connection.
    ///
    /// # Errors
    ///
    /// Always.
    pub(super) fn agree<T>(
        _: &NbdOptions,
        _: &NbdTls,
        _: &mut (impl Read + Write),
        _: impl FnOnce(&mut dyn Stream) -> Result<T, String>,
    ) -> Result<(Tls, T), String> {
        Err("this program was built without TLS; build it with the feature nbd-tls".to_owned())
    }

    impl Tls {
        pub(super) fn has_unsent(&self) -> bool {
            match *self {}
        }

        pub(super) fn push(&mut self, _: BorrowedFd<'_>) -> io::Result<()> {
            match *self {}
        }

        pub(super) fn encrypt(&mut self, _: &[u8]) -> io::Result<()> {
            match *self {}
        }

        pub(super) fn pull(
            &mut self,
            _: BorrowedFd<'_>,
            _: impl FnMut(&[u8]) -> usize,
        ) -> io::Result<usize> {
            match *self {}
        }
    }
}
