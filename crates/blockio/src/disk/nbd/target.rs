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
    /// agree, or that is not trusted, has one, for all IoThreads.
    pub connections: u32,
    /// Requests that have no answer after this time fail. `None`: they wait for ever. One that has
    /// to be made in parts, one after the other, has this time for each of them.
    pub deadline: Option<Duration>,
    /// What was written and not flushed when a connection broke counts as lost: then flushes fail.
    /// Otherwise the server is trusted to have kept it.
    pub distrust: bool,
    /// `None`: without TLS.
    pub tls: Option<NbdTls>,
}

/// What a client shows and demands where a connection is encrypted.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct NbdTls {
    /// A folder with `ca-cert.pem`, the authorities that may vouch for the server, and, where the
    /// server demands that, `client-cert.pem` and `client-key.pem`. `None`: the authorities that
    /// this machine trusts.
    pub certificates: Option<PathBuf>,
    /// The name in the certificate of the server. `None`: that of its machine.
    pub hostname: Option<String>,
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
