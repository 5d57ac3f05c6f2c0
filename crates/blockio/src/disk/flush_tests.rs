//! Flushes that are in the kernel together.

use super::*;
use crate::config::{EngineKind, IoThreadConfig};
use crate::op::OpKind;
use crate::thread::IoThread;
use std::sync::Arc;

/// A flush waits for an earlier flush of another IoThread, which may receive the report of a loss.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_flush_waits_for_the_report_of_another_flush() {
    for engine in [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads] {
        for errno in [0, libc::EIO] {
            let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
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
