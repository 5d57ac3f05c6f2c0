//! The name of an image, and the access to its cluster.

use std::fmt;
use std::path::PathBuf;

use super::api::api;

/// An image, and the access to its cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RbdImage {
    /// The pool.
    pub pool: String,
    /// A namespace of the pool. Empty for the default one.
    pub namespace: String,
    /// The name of the image.
    pub image: String,
    /// The snapshot to read.
    pub snapshot: Option<String>,
    /// The configuration of the cluster. `None`: the file in `CEPH_CONF`, or the usual one.
    pub conf: Option<PathBuf>,
    /// The user. `None` for `admin`.
    pub id: Option<String>,
    /// The file with the user's key. `None`: as configured.
    pub keyring: Option<PathBuf>,
    /// True if the exclusive lock is acquired when the image is opened, and kept. Otherwise librbd
    /// acquires it with the first write, and passes it on to other clients that want to write.
    pub exclusive: bool,
}

impl RbdImage {
    /// Checks that the library of Ceph can be used here.
    ///
    /// # Errors
    ///
    /// The reason why it cannot.
    pub fn library() -> Result<(), String> {
        api().map(drop)
    }
}

impl fmt::Display for RbdImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/", self.pool)?;
        if !self.namespace.is_empty() {
            write!(f, "{}/", self.namespace)?;
        }
        f.write_str(&self.image)?;
        self.snapshot.iter().try_for_each(|snapshot| write!(f, "@{snapshot}"))
    }
}
