//! The moment at which an image is read, for builds with and without images.

/// The time at which the content of an image is read, apart from its headers.
#[derive(Debug, Clone, Copy)]
pub(super) enum ReadTime {
    /// While the image is opened.
    Now,
    /// At the first request: another process writes to the image until then.
    FirstRequest,
    /// At each begin of a use: further processes write to the image while they have its lock.
    Locked,
}
