//! Requests that do not go straight to a file: that have to wait for limits, that have failed, that
//! are refused, or whose disk is of another kind.

use std::future::{Future, ready};
use std::io;

use iomem::Buffers;

use super::info::Unfinished;
use super::limits::Direction;
use super::seam::Request;
use super::trouble::Tries;
use super::{Disk, Kind};

impl Disk {
    /// With `ends`, nobody waits for limits, and errors are reported whatever the policy: for a
    /// queue that stops. It may be taken back.
    pub fn set_ending(&self, ends: bool) {
        self.gate.set_open(ends);
    }

    /// A read that does not go straight to a file: out of the way of all others.
    #[cold]
    #[inline(never)]
    pub(super) fn read_otherwise(
        &self,
        offset: u64,
        buffers: Buffers,
    ) -> Request<'_, Result<(), Unfinished>> {
        let bytes = buffers.bytes() as u64;
        if let Err(error) = self.check(offset, bytes) {
            return Box::pin(ready(Err(Unfinished::new(error, buffers))));
        }
        Box::pin(async move {
            self.gate.pass(Direction::Read, bytes).await;
            match &self.kind {
                Kind::Null => {
                    buffers.wrote(buffers.bytes());
                    Ok(())
                }
                Kind::File(disk) => match disk.read(offset, buffers).await {
                    Err(unfinished) => self.read_again(offset + bytes, unfinished).await,
                    done => done,
                },
                Kind::Other(other) => {
                    // Whatever has written to the memory, a library, a server or a thread, has not
                    // told the log of it.
                    let logged = buffers.again_if_logged();
                    let read = |buffers| other.disk.read(offset, buffers);
                    let result = self.until_done(Direction::Read, buffers, read).await;
                    if let Some(logged) = logged.filter(|_| result.is_ok()) {
                        logged.wrote(logged.bytes());
                    }
                    result
                }
            }
        })
    }

    /// As [`read_otherwise`](Self::read_otherwise).
    #[cold]
    #[inline(never)]
    pub(super) fn write_otherwise(
        &self,
        offset: u64,
        buffers: Buffers,
        fua: bool,
    ) -> Request<'_, Result<(), Unfinished>> {
        let bytes = buffers.bytes() as u64;
        if let Err(error) = self.check_write(offset, bytes) {
            return Box::pin(ready(Err(Unfinished::new(error, buffers))));
        }
        Box::pin(async move {
            self.gate.pass(Direction::Write, bytes).await;
            match &self.kind {
                Kind::Null => Ok(()),
                Kind::File(disk) => match disk.write(offset, buffers, fua).await {
                    Err(unfinished) => self.write_again(offset + bytes, fua, unfinished).await,
                    done => done,
                },
                Kind::Other(other) => {
                    let write = |buffers| other.disk.write(offset, buffers, fua);
                    self.until_done(Direction::Write, buffers, write).await
                }
            }
        })
    }

    /// Reads what a read of a file that was to end at byte `end` has left, if it is tried again.
    #[cold]
    #[inline(never)]
    pub(super) fn read_again(
        &self,
        end: u64,
        mut unfinished: Unfinished,
    ) -> Request<'_, Result<(), Unfinished>> {
        Box::pin(async move {
            let mut tries = Tries::new(&self.shared.troubles);
            while let Kind::File(disk) = &self.kind
                && self.tries_again(&mut tries, Direction::Read, unfinished.error()).await
            {
                let (_, rest) = unfinished.into_parts();
                match disk.read(end - rest.bytes() as u64, rest).await {
                    Err(again) => unfinished = again,
                    done => return done,
                }
            }
            Err(unfinished)
        })
    }

    /// The same for a write. Once data may be lost, no other try could make it good.
    #[cold]
    #[inline(never)]
    pub(super) fn write_again(
        &self,
        end: u64,
        fua: bool,
        mut unfinished: Unfinished,
    ) -> Request<'_, Result<(), Unfinished>> {
        Box::pin(async move {
            let mut tries = Tries::new(&self.shared.troubles);
            while let Kind::File(disk) = &self.kind
                && !unfinished.rest().is_empty()
                && !(fua && disk.may_have_lost())
                && self.tries_again(&mut tries, Direction::Write, unfinished.error()).await
            {
                let (_, rest) = unfinished.into_parts();
                match disk.write(end - rest.bytes() as u64, rest, fua).await {
                    Err(again) => unfinished = again,
                    done => return done,
                }
            }
            Err(unfinished)
        })
    }

    /// Has a disk of another kind transfer all of `buffers`, as often as it takes.
    async fn until_done<'a>(
        &self,
        direction: Direction,
        buffers: Buffers,
        transfer: impl Fn(Buffers) -> Request<'a, Result<(), Unfinished>>,
    ) -> Result<(), Unfinished> {
        if !self.gate.may_try_again(direction) {
            return transfer(buffers).await;
        }
        let mut tries = Tries::new(&self.shared.troubles);
        loop {
            match transfer(buffers.again()).await {
                Err(unfinished) if !unfinished.rest().is_empty() => {
                    if !self.tries_again(&mut tries, direction, unfinished.error()).await {
                        return Err(unfinished);
                    }
                }
                done => return done,
            }
        }
    }

    /// A request that is no plain transfer: it waits for limits, and is made as often as it takes.
    pub(super) async fn govern<T, F: Future<Output = io::Result<T>>>(
        &self,
        direction: Direction,
        bytes: u64,
        request: impl Fn() -> F,
    ) -> io::Result<T> {
        self.gate.pass(direction, bytes).await;
        let mut tries = Tries::new(&self.shared.troubles);
        loop {
            match request().await {
                Err(error) if self.tries_again(&mut tries, direction, &error).await => {}
                done => return done,
            }
        }
    }

    /// Waits until a request is tried again that has failed. False: it is to be reported.
    async fn tries_again(
        &self,
        tries: &mut Tries<'_>,
        direction: Direction,
        error: &io::Error,
    ) -> bool {
        Box::pin(self.gate.tries_again(tries, direction, error)).await
    }
}
