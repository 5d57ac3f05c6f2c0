//! Errors in the set-up of a disk or an IoThread.

use std::io;
use std::path::PathBuf;

/// An error of set-up. Each text names the action, its object, the cause, and a remedy if there is
/// one. It includes the kernel's error, which therefore is no `source`. Errors of single operations
/// are [`io::Error`]s.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed while an IoThread was set up or waited.
    #[error("cannot {action}: {error}")]
    System {
        /// The action, as a verb phrase.
        action: &'static str,
        /// The kernel's error.
        error: io::Error,
    },
    /// The kernel has no room for another Linux AIO context.
    #[error(
        "cannot set up Linux AIO for {requested} operations: the system-wide limit is used up \
         (fs.aio-nr of fs.aio-max-nr); raise it with `sysctl fs.aio-max-nr=1048576`, or use \
         the engine `threads`"
    )]
    AioExhausted {
        /// The number of operations requested.
        requested: u32,
    },
    /// The kernel, or a sandbox around this process, offers no Linux AIO.
    #[error("cannot set up Linux AIO: {error}; use the engine `threads`")]
    AioUnavailable {
        /// The kernel's error.
        error: io::Error,
    },
    /// The kernel, a sysctl, or a sandbox around this process offers no adequate io_uring.
    #[error(
        "cannot set up io_uring: {error}; it needs Linux 5.13, kernel.io_uring_disabled=0 (see \
         sysctl) and some locked memory (ulimit -l); or use the engine `aio`"
    )]
    IoUringUnavailable {
        /// The kernel's error.
        error: io::Error,
    },
    /// A disk cannot be opened.
    #[error("cannot open {}: {error}{advice}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
        /// The remedy; starts with a separator, or is empty.
        advice: &'static str,
    },
    /// A file that was opened cannot serve as a disk.
    #[error("cannot use {} as a disk: {reason}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// The fault, and the remedy.
        reason: String,
    },
    /// A file cannot be resized.
    #[error("cannot give {} the length of {size_bytes} bytes: {error}", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// The new length in bytes.
        size_bytes: u64,
        /// The kernel's error.
        error: io::Error,
    },
    /// The disk is in use by another program.
    #[error("cannot use {} as a disk: {reason}", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
        /// The user, as far as it can be found out, and the remedy.
        reason: String,
        /// True if the user is known. Otherwise it may be operations of a killed process; the disk
        /// can be opened when they have ended.
        is_user_known: bool,
    },
    /// A disk that is no file, or a layer over another disk, cannot be opened.
    #[error("cannot use {disk}: {reason}")]
    Disk {
        /// The kind and name of the disk.
        disk: String,
        /// The fault, and the remedy.
        reason: String,
    },
    /// Options that exclude each other or are out of range.
    #[error("{0}")]
    Options(String),
}

impl Error {
    /// The kernel's error, if the kernel refused.
    pub fn system_error(&self) -> Option<&io::Error> {
        match self {
            Self::System { error, .. }
            | Self::AioUnavailable { error }
            | Self::IoUringUnavailable { error }
            | Self::Open { error, .. }
            | Self::Length { error, .. } => Some(error),
            Self::AioExhausted { .. }
            | Self::Unusable { .. }
            | Self::InUse { .. }
            | Self::Disk { .. }
            | Self::Options(_) => None,
        }
    }

    /// Wraps the errno of a system call with the action.
    pub(crate) fn system(action: &'static str) -> impl Fn(rustix::io::Errno) -> Self {
        move |errno| Self::System { action, error: errno.into() }
    }
}
