//! How an image is named.

use std::fmt;
use std::path::PathBuf;

use super::api::api;

/// Which image, and how its cluster is reached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RbdImage {
    /// The pool.
    pub pool: String,
    /// A namespace of the pool. Empty: the default one.
    pub namespace: String,
    /// The name of the image.
    pub image: String,
    /// One of its snapshots, to be read.
    pub snapshot: Option<String>,
    /// The configuration of the cluster. `None`: what `CEPH_CONF` names, or the usual one.
    pub conf: Option<PathBuf>,
    /// The user, such as `admin`. `None`: that one.
    pub id: Option<String>,
    /// The file with the user's key. `None`: what the configuration names.
    pub keyring: Option<PathBuf>,
    /// The exclusive lock is acquired when the image is opened and kept. Otherwise librbd acquires
    /// it with the first write and passes it on to others who want to write.
    pub exclusive: bool,
    /// The threads of librbd stay where the scheduler puts them. Otherwise, while that is faster,
    /// they and the thread that uses the image, if there is one only, keep to one CPU.
    pub free_threads: bool,
}

impl RbdImage {
    /// Whether the library of Ceph can be used here.
    ///
    /// # Errors
    ///
    /// Why it cannot.
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
