//! The address of an NBD export, and its options.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// An NBD export, and its options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdOptions {
    /// The address of the server.
    pub address: NbdAddress,
    /// The name of the export; the server may have one without a name.
    pub export: String,
    /// Connections of each IoThread, at least one. A server that cannot keep several connections
    /// consistent, or is not trusted, has one for all IoThreads.
    pub connections: u32,
    /// Requests without an answer after this time fail. `None`: they wait forever. A request that
    /// has to be made in parts, one after another, has this time for each of them.
    pub deadline: Option<Duration>,
    /// If true, changes that were not flushed when a connection broke count as lost: then flushes
    /// fail. Otherwise the server is trusted to have kept them.
    pub distrust: bool,
    /// `None`: without TLS.
    pub tls: Option<NbdTls>,
}

/// A client's credentials and demands for an encrypted connection.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct NbdTls {
    /// A folder with `ca-cert.pem`, the authorities that may vouch for the server. If the server
    /// demands that, also with `client-cert.pem` and `client-key.pem`. `None`: the authorities that
    /// this machine trusts.
    pub certificates: Option<PathBuf>,
    /// The name in the certificate of the server. `None`: the name of its machine.
    pub hostname: Option<String>,
}

/// The address of an NBD server.
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
    /// Writes the options as a URI.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let export = &self.export;
        let scheme = if self.tls.is_some() { "nbds" } else { "nbd" };
        match &self.address {
            NbdAddress::Unix(path) => {
                write!(f, "{scheme}+unix:///{export}?socket={}", path.display())
            }
            NbdAddress::Tcp { host, port } if host.contains(':') => {
                write!(f, "{scheme}://[{host}]:{port}/{export}")
            }
            NbdAddress::Tcp { host, port } => write!(f, "{scheme}://{host}:{port}/{export}"),
        }
    }
}
