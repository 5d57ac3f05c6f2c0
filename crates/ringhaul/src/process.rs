//! The process: its features, limits, descriptors, and the service manager.

pub(crate) mod bell;
pub mod limits;
pub(crate) mod service_manager;

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
