//! Flushes that are in the kernel together.

use super::*;
use crate::config::{EngineKind, IoThreadConfig};
use crate::op::OpKind;
use crate::thread::IoThread;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

/// A flush waits for an earlier flush of another IoThread, which may receive the report of a loss.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_flush_waits_for_the_report_of_another_flush() {
    for engine in [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads] {
        for errno in [0, libc::EIO] {
            let file = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
            file.as_file().set_len(4096).unwrap();
            let source = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
            let SourceKind::File(inner) = &source.kind else { panic!("not a file") };
            let loss = inner.file.loss();
            let other = loss.begin(OpKind::Flush);
            let config =
                IoThreadConfig { engine: engine.into(), depth: 64, ..IoThreadConfig::default() };
            let thread = IoThread::new(&config).unwrap();
            let disk = source.attach(thread.io());
            let stats = Arc::clone(thread.io().stats());
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while stats.flush.ops.get() == 0 {
                        std::thread::yield_now();
                    }
                    loss.end_op(other, OpKind::Flush, errno, std::time::Instant::now());
                });
                let result = thread.block_on(disk.flush()).unwrap();
                assert_eq!(
                    result.map_err(|error| error.raw_os_error()),
                    match errno {
                        0 => Ok(()),
                        errno => Err(Some(errno)),
                    },
                    "invariant 11: {engine}"
                );
            });
        }
    }
}

/// Starts a durable write of a file on the pool, records a loss while the write is in the kernel if
/// `is_lost`, and returns the errno of the write and the number of flushes.
fn write_durably(has_dsync: bool, is_lost: bool) -> (Option<i32>, u64) {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(8192).unwrap();
    let source = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
    let config = IoThreadConfig { engine: EngineKind::Threads.into(), ..IoThreadConfig::default() };
    let thread = IoThread::new(&config).unwrap();
    let disk = source.attach(thread.io());
    if !has_dsync {
        disk.forget_dsync();
    }
    let write = async {
        let mut write = pin!(disk.write(0, Buffers::aligned(4096, 4096), true));
        let begun = std::future::poll_fn(|cx| Poll::Ready(write.as_mut().poll(cx))).await;
        assert!(begun.is_pending(), "the pool answers in another round");
        if is_lost {
            source.hand_over().inherit(Some(libc::EIO), false);
        }
        write.await
    };
    let result = thread.block_on(write).unwrap();
    let errno = result.err().and_then(|unfinished| unfinished.error().raw_os_error());
    (errno, thread.io().stats().flush.ops.get())
}

/// The report of the loss may be about the data of this write.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_durable_write_fails_if_data_is_lost_while_it_is_in_the_kernel() {
    assert_eq!(write_durably(true, false), (None, 0));
    assert_eq!(write_durably(true, true), (Some(libc::EIO), 0), "invariant 11");
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_durable_write_flushes_on_a_file_system_without_durable_writes() {
    assert_eq!(write_durably(false, false), (None, 1), "invariant 11");
    assert_eq!(write_durably(false, true), (Some(libc::EIO), 0), "invariant 11");
}

/// No later try could make good what was lost. With the policy alone it would be tried for ever.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_durable_write_is_not_tried_again_once_data_is_lost() {
    for (is_part, is_limited) in [(false, false), (false, true), (true, false), (true, true)] {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let source = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
        let source = if is_part { DiskSource::raw(source, 0, None).unwrap() } else { source };
        if is_limited {
            // Far above the write, which then goes another way.
            let total = Some(Rate { per_second: 1 << 40, burst: None });
            let bytes = Rates { total, ..Rates::default() };
            source.set_limits(&Limits { bytes, ..Limits::default() }).unwrap();
        }
        source.set_error_policy(ErrorPolicy { write: ErrorAction::Retry, ..Default::default() });
        source.hand_over().inherit(Some(libc::EIO), false);
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let disk = source.attach(thread.io());
        let begun = async {
            let mut write = pin!(disk.write(0, Buffers::aligned(4096, 4096), true));
            std::future::poll_fn(|cx| Poll::Ready(write.as_mut().poll(cx))).await
        };
        let Poll::Ready(Err(unfinished)) = thread.block_on(begun).unwrap() else {
            panic!("it waits for a second try: {is_part}, {is_limited}");
        };
        assert_eq!(unfinished.error().raw_os_error(), Some(libc::EIO));
        assert_eq!(source.retry_totals(), (0, None), "{is_part}, {is_limited}");
        assert_eq!(thread.io().stats().write.ops.get(), 0, "the data is written in vain");
    }
}
