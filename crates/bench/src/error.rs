//! Errors that end a run without a result.

#![forbid(unsafe_code)]

/// A run that could not start or finish.
///
/// Failed I/O and blocks that did not verify are not errors in this sense: the
/// [`Report`](crate::Report) counts them.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The options contradict each other or do not fit the disk.
    #[error("{0}")]
    Usage(String),
    /// The server could not be reached, or failed in the vhost-user handshake.
    #[error("{0}")]
    Connect(String),
    /// The run began and could not be finished, for example because the server went away.
    #[error("{0}")]
    Run(String),
}

impl BenchError {
    /// Exit status for bad options and for a server that cannot be reached.
    pub(crate) const USAGE_EXIT: u8 = 2;
    /// Exit status for a run that failed after it had begun.
    pub(crate) const RUN_EXIT: u8 = 1;

    /// Returns the exit status for a command that ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::Connect(_) => Self::USAGE_EXIT,
            Self::Run(_) => Self::RUN_EXIT,
        }
    }
}
