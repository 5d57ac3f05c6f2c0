//! What can go wrong while a disk or an IoThread is set up.

use std::io;
use std::path::PathBuf;

/// An error of set-up. Each text says what was being done, to what, what went wrong, and, where
/// there is one, the way out. It has what the kernel said too, so that is not a `source` besides.
/// Errors of single operations are [`io::Error`]s.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed while an IoThread was set up or waited.
    #[error("cannot {action}: {error}")]
    System {
        /// What was being done, as a verb phrase.
        action: &'static str,
        /// What the kernel said.
        error: io::Error,
    },
    /// The kernel has no room for another Linux AIO context.
    #[error(
        "cannot set up Linux AIO for {requested} operations: the system-wide limit is used up \
         (fs.aio-nr of fs.aio-max-nr); raise it with `sysctl fs.aio-max-nr=1048576`, or use \
         the engine `threads`"
    )]
    AioExhausted {
        /// Operations asked for.
        requested: u32,
    },
    /// The kernel, or a sandbox around this process, offers no Linux AIO.
    #[error("cannot set up Linux AIO: {error}; use the engine `threads`")]
    AioUnavailable {
        /// What the kernel said.
        error: io::Error,
    },
    /// The kernel, a sysctl, or a sandbox around this process offers no io_uring that is good
    /// enough.
    #[error(
        "cannot set up io_uring: {error}; it needs Linux 5.13, kernel.io_uring_disabled=0 (see \
         sysctl) and some locked memory (ulimit -l); or use the engine `aio`"
    )]
    IoUringUnavailable {
        /// What the kernel said.
        error: io::Error,
    },
    /// A disk cannot be opened.
    #[error("cannot open {}: {error}{advice}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        error: io::Error,
        /// What to do about it; starts with a separator, or is empty.
        advice: &'static str,
    },
    /// A file that was opened cannot serve as a disk.
    #[error("cannot use {} as a disk: {reason}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what to do about it.
        reason: String,
    },
    /// A file cannot be given another length.
    #[error("cannot give {} the length of {size_bytes} bytes: {error}", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// The length.
        size_bytes: u64,
        /// What the kernel said.
        error: io::Error,
    },
    /// Somebody else has the disk in use.
    #[error("cannot use {} as a disk: {reason}", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
        /// By whom, as far as that can be found out, and what to do about it.
        reason: String,
        /// Whether it can be seen who has it. Where it cannot, operations of a process that was
        /// killed may have it, so that it can be opened when they have ended.
        is_seen: bool,
    },
    /// A disk that is no file, or lies over another one, cannot be opened.
    #[error("cannot use {disk}: {reason}")]
    Disk {
        /// Its kind and which it is.
        disk: String,
        /// What is wrong with it, and what to do about it.
        reason: String,
    },
    /// Options that exclude each other or are out of range.
    #[error("{0}")]
    Options(String),
}

impl Error {
    /// What the kernel said, if it is the kernel that refused.
    #[must_use]
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

    /// Wraps the errno of a system call with what was being done.
    pub(crate) fn system(action: &'static str) -> impl Fn(rustix::io::Errno) -> Self {
        move |errno| Self::System { action, error: errno.into() }
    }
}
