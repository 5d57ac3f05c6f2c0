//! Requests that do not go straight to a file: they wait for limits, have failed, are refused, or
//! are for a disk of another kind.

use std::future::{Future, ready};
use std::io;

use iomem::Buffers;

use super::driver::Request;
use super::info::TransferError;
use super::qos::bulk_turns::BulkTurn;
use super::qos::error_policy::RetryState;
use super::qos::limits::Direction;
use super::qos::throttle::{REST_BYTES, STEP_BYTES, WaitMode};
use super::{Disk, Kind, Requests};

/// Steps begin at multiples of this, as far as ranges of the list allow.
const STEP_UNIT: usize = 64 << 10;

impl Disk {
    /// Sets the treatment of requests that would wait, from now on. May be reverted.
    pub fn set_wait_mode(&self, mode: WaitMode) {
        self.gate.set_wait_mode(mode);
    }

    /// Returns true if the queue of the disk stops, whether its requests wait or not.
    pub fn is_stopping(&self) -> bool {
        self.gate.wait_mode() != WaitMode::All
    }

    /// Returns true if the queue of the disk stops, and its requests do not wait.
    pub fn is_stopping_for_good(&self) -> bool {
        self.gate.wait_mode() == WaitMode::Never
    }

    /// Makes all requests that wait for limits or a retry [check](super::Requester::check) if they
    /// are still to be done.
    pub fn recheck_waiting(&self) {
        self.shared.changed.notify_all();
    }
}

impl<'a> Requests<'a> {
    /// Waits until limits let a request of this many bytes begin. Its requester is
    /// [past](super::Requester::is_past_limits) them then.
    ///
    /// # Errors
    ///
    /// The error with which the requester ends the request.
    pub async fn pass_limits(self, direction: Direction, bytes: u64) -> io::Result<()> {
        self.disk.gate.pass(self.requester, direction, bytes).await
    }

    /// Reads on the slow path. Not inlined, so that the straight path stays short.
    #[cold]
    #[inline(never)]
    pub(super) fn read_slow(
        self,
        offset: u64,
        buffers: Buffers,
    ) -> Request<'a, Result<(), TransferError>> {
        let bytes = buffers.bytes() as u64;
        if let Err(error) = self.disk.check(offset, bytes) {
            return Box::pin(ready(Err(TransferError::new(error, buffers))));
        }
        Box::pin(async move {
            if let Err(error) = self.pass(Direction::Read, (offset, bytes), bytes).await {
                return Err(TransferError::new(error, buffers));
            }
            let read = |offset, buffers| self.read_step(offset, buffers);
            self.in_steps(Direction::Read, offset, buffers, read).await
        })
    }

    async fn read_step(self, offset: u64, buffers: Buffers) -> Result<(), TransferError> {
        match &self.disk.kind {
            Kind::Null => {
                buffers.wrote(buffers.bytes());
                Ok(())
            }
            Kind::File(disk) => {
                let end = offset + buffers.bytes() as u64;
                match disk.read(offset, buffers).await {
                    Err(unfinished) => self.read_again(end, unfinished).await,
                    done => done,
                }
            }
            Kind::Driver(driver) => {
                let read = |buffers| driver.read(offset, buffers);
                self.with_retries(Direction::Read, offset, buffers, || false, read).await
            }
        }
    }

    /// Writes on the slow path, like [`read_slow`](Self::read_slow).
    #[cold]
    #[inline(never)]
    pub(super) fn write_slow(
        self,
        offset: u64,
        buffers: Buffers,
        fua: bool,
    ) -> Request<'a, Result<(), TransferError>> {
        let bytes = buffers.bytes() as u64;
        if let Err(error) = self.disk.check_write(offset, bytes) {
            return Box::pin(ready(Err(TransferError::new(error, buffers))));
        }
        Box::pin(async move {
            if let Err(error) = self.pass(Direction::Write, (offset, bytes), bytes).await {
                return Err(TransferError::new(error, buffers));
            }
            let write = |offset, buffers| self.write_step(offset, buffers, fua);
            self.in_steps(Direction::Write, offset, buffers, write).await
        })
    }

    async fn write_step(
        self,
        offset: u64,
        buffers: Buffers,
        fua: bool,
    ) -> Result<(), TransferError> {
        match &self.disk.kind {
            Kind::Null => Ok(()),
            Kind::File(disk) => {
                let end = offset + buffers.bytes() as u64;
                match disk.write(offset, buffers, fua).await {
                    Err(unfinished) => self.write_again(end, fua, unfinished).await,
                    done => done,
                }
            }
            Kind::Driver(driver) => {
                let write = |buffers| driver.disk.write(offset, buffers, fua);
                let is_vain = || fua && self.disk.may_have_lost();
                self.with_retries(Direction::Write, offset, buffers, is_vain, write).await
            }
        }
    }

    /// Transfers all of `buffers` from byte `offset`, a long list step by step. Nothing is in
    /// progress between two steps: there a stopping queue leaves the request, if it may, or fails
    /// it.
    async fn in_steps<F: Future<Output = Result<(), TransferError>>>(
        self,
        direction: Direction,
        mut offset: u64,
        mut buffers: Buffers,
        transfer: impl Fn(u64, Buffers) -> F,
    ) -> Result<(), TransferError> {
        while buffers.bytes() > STEP_BYTES {
            let has_much = buffers.bytes() > REST_BYTES && self.disk.gate.finishes();
            let checked = if has_much { self.requester.check_rest() } else { Ok(()) };
            let rested = match checked {
                Ok(()) => self.disk.gate.wait_while_shut(self.requester, direction).await,
                given_up => given_up,
            };
            if let Err(error) = rested {
                return Err(TransferError::new(error, buffers));
            }
            let mut step = buffers.prefix(STEP_BYTES, STEP_UNIT);
            let block = usize::try_from(self.disk.block_mask).unwrap_or(0);
            step.truncate(step.bytes() & !block);
            let bytes = step.bytes();
            if bytes == 0 {
                // The ranges are tiny: as many as fit one list make less than a block.
                break;
            }
            if let Err(unfinished) = transfer(offset, step).await {
                return Err(unfinished.within(buffers, bytes));
            }
            buffers.advance(bytes);
            offset += bytes as u64;
        }
        transfer(offset, buffers).await
    }

    /// Retries a read that was to end at byte `end`, for the bytes that it left.
    #[cold]
    #[inline(never)]
    pub(super) fn read_again(
        self,
        end: u64,
        mut unfinished: TransferError,
    ) -> Request<'a, Result<(), TransferError>> {
        Box::pin(async move {
            let mut tries = RetryState::new(&self.disk.shared.retry_stats);
            loop {
                let rest =
                    self.await_retry_of_rest(&mut tries, Direction::Read, end, unfinished).await?;
                let offset = end - rest.bytes() as u64;
                let result = match &self.disk.kind {
                    Kind::File(disk) => disk.read(offset, rest).await,
                    Kind::Null => unreachable!("a null disk reads nothing that could fail"),
                    Kind::Driver(driver) => driver.read(offset, rest).await,
                };
                match result {
                    Err(again) => unfinished = again,
                    done => return done,
                }
            }
        })
    }

    /// Retries a write that was to end at byte `end`, for the bytes that it left. Once data may be
    /// lost, no retry could repair that.
    #[cold]
    #[inline(never)]
    pub(super) fn write_again(
        self,
        end: u64,
        fua: bool,
        mut unfinished: TransferError,
    ) -> Request<'a, Result<(), TransferError>> {
        Box::pin(async move {
            let mut tries = RetryState::new(&self.disk.shared.retry_stats);
            let is_vain = || fua && self.disk.may_have_lost();
            while !unfinished.rest().is_empty() && !is_vain() {
                let rest =
                    self.await_retry_of_rest(&mut tries, Direction::Write, end, unfinished).await?;
                let offset = end - rest.bytes() as u64;
                let result = match &self.disk.kind {
                    Kind::File(disk) => disk.write(offset, rest, fua).await,
                    Kind::Null => unreachable!("a null disk writes nothing that could fail"),
                    Kind::Driver(driver) => driver.disk.write(offset, rest, fua).await,
                };
                match result {
                    Err(again) => unfinished = again,
                    done => return done,
                }
            }
            Err(unfinished)
        })
    }

    /// Waits until the rest of a transfer that was to end at byte `end` is to be retried. Fails if
    /// it is not.
    async fn await_retry_of_rest(
        self,
        tries: &mut RetryState<'_>,
        direction: Direction,
        end: u64,
        unfinished: TransferError,
    ) -> Result<Buffers, TransferError> {
        let bytes = unfinished.rest().bytes() as u64;
        let range = (end - bytes, bytes);
        match self.await_retry(tries, direction, range, unfinished.error()).await {
            Ok(true) => Ok(unfinished.into_parts().1),
            Ok(false) => Err(unfinished),
            Err(error) => Err(TransferError::new(error, unfinished.into_parts().1)),
        }
    }

    /// Transfers all of `buffers` on a disk of another kind, with retries unless they are in vain.
    async fn with_retries<F: Future<Output = Result<(), TransferError>>>(
        self,
        direction: Direction,
        offset: u64,
        buffers: Buffers,
        is_vain: impl Fn() -> bool,
        transfer: impl Fn(Buffers) -> F,
    ) -> Result<(), TransferError> {
        if !self.disk.gate.may_retry(direction) {
            return transfer(buffers).await;
        }
        let end = offset + buffers.bytes() as u64;
        let mut tries = RetryState::new(&self.disk.shared.retry_stats);
        loop {
            match transfer(buffers.duplicate()).await {
                Err(unfinished) if !unfinished.rest().is_empty() && !is_vain() => {
                    self.await_retry_of_rest(&mut tries, direction, end, unfinished).await?;
                }
                done => return done,
            }
        }
    }

    /// Writes all of `buffers` from byte `offset`, as a piece of a command that writes a longer
    /// range. Waits for its turn among such commands.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write), and the error with which the requester
    /// [ends](super::Requester::check_piece) the command.
    pub async fn write_piece(self, offset: u64, buffers: Buffers) -> Result<(), TransferError> {
        let bytes = buffers.bytes() as u64;
        let passed = match self.disk.check_write(offset, bytes) {
            Ok(()) => self.pass(Direction::Write, (offset, bytes), bytes).await,
            refused => refused,
        };
        if let Err(error) = passed {
            return Err(TransferError::new(error, buffers));
        }
        let write = |buffers: Buffers| -> Request<'_, Result<(), TransferError>> {
            Box::pin(async move {
                let _turn = match self.take_turn(bytes).await {
                    Ok(turn) => turn,
                    Err(error) => return Err(TransferError::new(error, buffers)),
                };
                match &self.disk.kind {
                    Kind::Null => Ok(()),
                    Kind::File(disk) => disk.write(offset, buffers, false).await,
                    Kind::Driver(driver) => driver.disk.write(offset, buffers, false).await,
                }
            })
        };
        let is_vain = || self.requester.check_piece().is_err();
        self.with_retries(Direction::Write, offset, buffers, is_vain, write).await
    }

    /// Waits for the turn of a piece. Fails if the requester ends the command.
    async fn take_turn(self, bytes: u64) -> io::Result<BulkTurn> {
        let turn = self.disk.bulk.turn(bytes).await;
        self.requester.check_piece().map(|()| turn)
    }

    /// Makes a request for a piece of a command that moves much data, in its turn and with retries.
    /// Limits must have been passed.
    pub(super) async fn in_turn<T, F: Future<Output = io::Result<T>>>(
        self,
        direction: Direction,
        range: (u64, u64),
        bytes: u64,
        request: impl Fn(BulkTurn) -> F,
    ) -> io::Result<T> {
        let mut tries = RetryState::new(&self.disk.shared.retry_stats);
        loop {
            let turn = self.take_turn(bytes).await?;
            match request(turn).await {
                Err(error) if self.await_retry(&mut tries, direction, range, &error).await? => {}
                done => return done,
            }
        }
    }

    /// Makes a request that is no plain transfer: waits for limits, and retries.
    pub(super) async fn govern<T, F: Future<Output = io::Result<T>>>(
        self,
        direction: Direction,
        range: (u64, u64),
        bytes: u64,
        request: impl Fn() -> F,
    ) -> io::Result<T> {
        self.pass(direction, range, bytes).await?;
        let mut tries = RetryState::new(&self.disk.shared.retry_stats);
        loop {
            match request().await {
                Err(error) if self.await_retry(&mut tries, direction, range, &error).await? => {}
                done => return done,
            }
        }
    }

    /// Waits until limits let a request of this many bytes begin, and checks `range` again, since
    /// the disk may have shrunk.
    pub(super) async fn pass(
        self,
        direction: Direction,
        range: (u64, u64),
        bytes: u64,
    ) -> io::Result<()> {
        if !self.requester.is_past_limits() {
            self.pass_limits(direction, bytes).await?;
        }
        self.disk.check(range.0, range.1)
    }

    /// Waits until a failed request is to be retried. Returns false if it is to be reported.
    async fn await_retry(
        self,
        tries: &mut RetryState<'_>,
        direction: Direction,
        range: (u64, u64),
        error: &io::Error,
    ) -> io::Result<bool> {
        let gate = &self.disk.gate;
        let again = Box::pin(gate.await_retry(self.requester, tries, direction, error)).await?;
        if again && !self.disk.contains(range) {
            // The disk has shrunk while the request waited.
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Ok(again)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::{Pin, pin};
    use std::task::Poll;

    use iomem::RepeatedBlock;

    use super::*;
    use crate::disk::qos::throttle::NoRequester;
    use crate::disk::{DiskOptions, DiskSource, Limits, Rate, Rates, Requester};
    use crate::testing::{Event, RemoteStub};
    use crate::{IoThread, IoThreadConfig};

    const MIB: usize = 1 << 20;

    fn thread() -> IoThread {
        IoThread::new(&IoThreadConfig::default()).unwrap()
    }

    /// A requester that refuses the rest of each transfer, and has passed limits.
    struct Stops;

    impl Requester for Stops {
        fn check(&self) -> io::Result<()> {
            NoRequester.check()
        }

        fn on_resume(&self, to: Direction) -> Pin<Box<dyn Future<Output = io::Result<()>> + '_>> {
            NoRequester.on_resume(to)
        }

        fn check_rest(&self) -> io::Result<()> {
            Err(io::Error::from_raw_os_error(libc::ECANCELED))
        }

        fn is_past_limits(&self) -> bool {
            true
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn only_a_queue_that_stops_refuses_the_rest_of_a_long_transfer() {
        let thread = thread();
        let source = DiskSource::null(1 << 30, &DiskOptions::default()).unwrap();
        let memory = RepeatedBlock::zeroes(MIB, 4096).unwrap();
        for (mode, is_refused) in
            [(WaitMode::All, false), (WaitMode::RetriesOnly, true), (WaitMode::Never, true)]
        {
            for (bytes, is_long) in [(REST_BYTES, false), (REST_BYTES + MIB, true)] {
                let disk = source.attach(thread.io());
                disk.set_wait_mode(mode);
                let data = || memory.buffers(bytes, ()).unwrap();
                let requests = disk.with_requester(&Stops);
                let transfers = async {
                    let written = requests.write(0, data(), false).await.is_err();
                    (requests.read(0, data()).await.is_err(), written)
                };
                let refused = thread.block_on(transfers).unwrap();
                let expected = is_refused && is_long;
                assert_eq!(refused, (expected, expected), "{mode:?}, {bytes} bytes");
            }
        }
    }

    /// A requester that refuses each request that has waited.
    struct Refuses;

    impl Requester for Refuses {
        fn check(&self) -> io::Result<()> {
            NoRequester.check()
        }

        fn on_resume(&self, _: Direction) -> Pin<Box<dyn Future<Output = io::Result<()>> + '_>> {
            Box::pin(ready(Err(io::Error::from_raw_os_error(libc::EBADE))))
        }
    }

    /// The next process makes it. Nothing is in progress between two steps. If the queue goes on
    /// here, the memory of the request may be gone.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_long_transfer_of_a_frozen_queue_makes_no_step_and_asks_before_it_continues() {
        let thread = thread();
        let source = DiskSource::null(1 << 30, &DiskOptions::default()).unwrap();
        let memory = RepeatedBlock::zeroes(MIB, 4096).unwrap();
        let data = |bytes| memory.buffers(bytes, ()).unwrap();
        let disk = source.attach(thread.io());
        let requesters: [(&dyn Requester, Option<i32>); 2] =
            [(&NoRequester, None), (&Refuses, Some(libc::EBADE))];
        for (requester, refusal) in requesters {
            disk.set_wait_mode(WaitMode::Frozen);
            let requests = disk.with_requester(requester);
            let transfers = async {
                let mut write = pin!(requests.write(0, data(2 * STEP_BYTES), false));
                let mut read = pin!(requests.read(0, data(2 * STEP_BYTES)));
                let are_done = poll_fn(|cx| {
                    Poll::Ready([
                        write.as_mut().poll(cx).is_ready(),
                        read.as_mut().poll(cx).is_ready(),
                    ])
                });
                assert_eq!(are_done.await, [false; 2]);
                disk.set_wait_mode(WaitMode::All);
                [write.await, read.await]
            };
            for result in thread.block_on(transfers).unwrap() {
                let errno = result.err().and_then(|unfinished| unfinished.error().raw_os_error());
                assert_eq!(errno, refusal);
            }
        }
    }

    /// Commands that move much data pass limits once for all of their pieces.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_request_that_has_passed_limits_does_not_wait_for_them() {
        let (thread, source) =
            (thread(), DiskSource::null(1 << 30, &DiskOptions::default()).unwrap());
        let slow = Rates { total: Some(Rate { per_second: 1, burst: None }), ..Rates::default() };
        source.set_limits(&Limits { bytes: slow, ..Limits::default() }).unwrap();
        let disk = source.attach(thread.io());
        let data = || Buffers::aligned(4096, 512);
        let begins = async {
            // The first request empties the bucket.
            disk.write(0, data(), false).await.unwrap();
            let mut past = pin!(disk.with_requester(&Stops).write(0, data(), false));
            let mut waits = pin!(disk.write(0, data(), false));
            let is_past = poll_fn(|cx| Poll::Ready(past.as_mut().poll(cx).is_ready())).await;
            (is_past, poll_fn(|cx| Poll::Ready(waits.as_mut().poll(cx).is_ready())).await)
        };
        assert_eq!(thread.block_on(begins).unwrap(), (true, false));
    }

    /// Ranges of a list may end anywhere.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn each_step_of_a_long_write_has_whole_blocks() {
        let bytes = 2 * STEP_BYTES;
        let end = RemoteStub::new(&vec![1; bytes]);
        let (thread, source) = (thread(), end.clone().source());
        let disk = source.attach(thread.io());
        for range_bytes in [1000, 4100, 65_536 + 8] {
            let before = end.events();
            let memory = RepeatedBlock::zeroes(range_bytes, 8).unwrap();
            let data = memory.buffers(bytes, ()).unwrap();
            thread.block_on(disk.write(0, data, false)).unwrap().unwrap();
            let mut at = 0;
            for event in &end.journal()[before..] {
                let Event::Write(offset, data) = event else { panic!("{event:?}") };
                assert_eq!(*offset, at, "{range_bytes}: a gap");
                assert!(data.len().is_multiple_of(512), "{range_bytes}: {} bytes", data.len());
                at += data.len() as u64;
            }
            assert_eq!(at, bytes as u64);
            assert!(end.events() - before > 2, "{range_bytes}: the list was not cut");
        }
    }

    /// A device with large blocks would otherwise have each of them zeroed in two parts.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn long_zeroes_are_cut_where_pieces_of_the_disk_begin() {
        let end = RemoteStub::new(&vec![1; 12 * MIB]);
        let (thread, source) = (thread(), end.clone().source());
        let disk = source.attach(thread.io());
        let mib = |count: usize| (count * MIB) as u64;
        thread.block_on(disk.write_zeroes(mib(1), mib(9), true)).unwrap().unwrap();
        let pieces: Vec<(u64, usize)> = end
            .journal()
            .iter()
            .map(|event| match event {
                Event::Write(offset, data) => (*offset, data.len()),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(pieces, [(mib(1), 3 * MIB), (mib(4), 4 * MIB), (mib(8), 2 * MIB)]);
    }
}
