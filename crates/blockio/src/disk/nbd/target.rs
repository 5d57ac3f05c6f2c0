//! Where an NBD export is, and how its user wants it to be.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// An NBD export, and how it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdOptions {
    /// Where the server is.
    pub address: NbdAddress,
    /// The name of the export; the server may have one without a name.
    pub export: String,
    /// Connections of each IoThread, at least one. A server that cannot have several connections
    /// agree has one, for all IoThreads.
    pub connections: u32,
    /// Requests that have no answer after this time fail. `None`: they wait for ever.
    pub deadline: Option<Duration>,
    /// What was written and not flushed when a connection broke counts as lost: then flushes fail.
    /// Otherwise the server is trusted to have kept it.
    pub distrust: bool,
}

/// Where an NBD server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NbdAddress {
    /// A socket in the file system.
    Unix(PathBuf),
    /// A name or an address of a machine.
    Tcp {
        /// Without brackets.
        host: String,
        /// Usually 10809.
        port: u16,
    },
}

impl fmt::Display for NbdOptions {
    /// As a URI.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let export = &self.export;
        match &self.address {
            NbdAddress::Unix(path) => write!(f, "nbd+unix:///{export}?socket={}", path.display()),
            NbdAddress::Tcp { host, port } if host.contains(':') => {
                write!(f, "nbd://[{host}]:{port}/{export}")
            }
            NbdAddress::Tcp { host, port } => write!(f, "nbd://{host}:{port}/{export}"),
        }
    }
}
