//! The process: its features, limits, descriptors, peers, and the service manager.

pub(crate) mod fd_messages;
pub mod limits;
pub mod peer;
pub(crate) mod service_manager;
pub(crate) mod thread_guard;
pub(crate) mod wake_fd;

use std::path::Path;

/// The features of this build.
pub const FEATURES: &[&str] = &[
    #[cfg(feature = "jemalloc")]
    "jemalloc",
    #[cfg(feature = "luks")]
    "luks",
    #[cfg(feature = "nbd-tls")]
    "nbd-tls",
    #[cfg(feature = "qcow2")]
    "qcow2",
];

/// The folder of a file.
pub(crate) fn folder_of(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new(if path.has_root() { "/" } else { "." }))
}
