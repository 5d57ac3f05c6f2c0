//! The specification of an image in a Ceph cluster.

use std::fmt;
use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use serde::{Deserialize, Serialize};

/// The pool that Ceph's own tools use if none is named.
const POOL: &str = "rbd";

/// An image in a Ceph cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[serde(expecting = "the keys of this kind of disk and their values")]
pub struct RbdSpec {
    /// The pool.
    #[serde(default = "pool")]
    pub pool: String,
    /// A namespace of the pool. `None`: the default one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The name of the image.
    pub image: String,
    /// A snapshot of the image, to be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// The configuration of the cluster. `None`: the file that `CEPH_CONF` names, or
    /// /etc/ceph/ceph.conf.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conf: Option<PathBuf>,
    /// The user. `None`: admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The file with the user's key. `None`: the file that the configuration names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keyring: Option<PathBuf>,
    /// True if the exclusive lock is acquired when the image is opened, and kept.
    // Otherwise librbd acquires it with the first write, and passes it on to other clients.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub exclusive: bool,
}

fn pool() -> String {
    POOL.to_owned()
}

/// The keys and values that the name of an image in Ceph's tools stands for, such as
/// `pool/namespace/image@snapshot`. The pool, the namespace and the snapshot may be left out.
///
/// # Errors
///
/// When it is no such name.
pub(super) fn parts_of_image(text: &str) -> Result<Vec<String>> {
    // The form of QEMU. Its options would be part of the name, and messages would repeat them.
    ensure!(
        !text.split_once(':').is_some_and(|(_, rest)| rest.contains('=')),
        "write the options of an image after commas, as in rbd:vms/vm1,id=vms; name the file with \
         its key in keyring=PATH"
    );
    let (path, snapshot) = match text.split_once('@') {
        Some((path, snapshot)) => (path, Some(snapshot)),
        None => (text, None),
    };
    let names: Vec<&str> = path.split('/').collect();
    ensure!(
        names.iter().chain(&snapshot).all(|name| !name.is_empty()),
        "'{text}' has an empty part; an image is [POOL/[NAMESPACE/]]IMAGE[@SNAPSHOT]"
    );
    let mut parts = match names[..] {
        [image] => vec![format!("pool={POOL}"), format!("image={image}")],
        [pool, image] => vec![format!("pool={pool}"), format!("image={image}")],
        [pool, namespace, image] => {
            vec![format!("pool={pool}"), format!("namespace={namespace}"), format!("image={image}")]
        }
        _ => bail!("'{text}' has too many parts; an image is [POOL/[NAMESPACE/]]IMAGE[@SNAPSHOT]"),
    };
    parts.extend(snapshot.map(|snapshot| format!("snapshot={snapshot}")));
    Ok(parts)
}

impl fmt::Display for RbdSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/", self.pool)?;
        self.namespace.iter().try_for_each(|namespace| write!(f, "{namespace}/"))?;
        f.write_str(&self.image)?;
        self.snapshot.iter().try_for_each(|snapshot| write!(f, "@{snapshot}"))
    }
}
