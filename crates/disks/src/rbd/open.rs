//! Opens images, and explains failures.

use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use blockio::disk::DiskInfo;
use blockio::executor::start_thread;
use blockio::file::open_regular;
use blockio::{DiskOptions, Error};
use tracing::Span;

use super::image::{Cluster, Image, Pool, c_text};
use crate::spec::RbdSpec;

/// The time limit for a cluster. Monitors get less, since their error tells more.
const PATIENCE: Duration = Duration::from_secs(30);

/// The additional time for the exclusive lock: its owner may have been killed, and counts as alive
/// for 30 seconds (`osd_client_watch_timeout`).
const LOCK_PATIENCE: Duration = Duration::from_secs(60);
const MONITORS_PATIENCE: &str = "20";

/// The unit in which OSDs keep data, except for old ones with rotating disks.
const PHYSICAL_BLOCK_BYTES: u32 = 4096;

/// The option with the number of threads of a handle that begin and end operations, and its
/// default.
const WORKERS: &CStr = c"librados_thread_count";
const LIBRARY_WORKERS: &str = "2";

/// The properties of an image, found when it is opened.
pub(super) struct ImageProperties {
    pub(super) identity: String,
    pub(super) discard_bytes: u32,
    pub(super) optimal_bytes: Option<u32>,
    /// The number of bytes that lie together in one object, or in neighbours over which they are
    /// spread.
    pub(super) object_bytes: u64,
}

/// Opens an image on a thread of its own: if a cluster does not answer, no call of its library
/// returns. An image that is opened too late is closed by that thread.
pub(super) fn open(
    name: &RbdSpec,
    options: &DiskOptions,
) -> Result<(Image, DiskInfo, ImageProperties), Error> {
    let refused = |reason| Error::Disk { disk: format!("rbd {name}"), reason };
    let logical_block_bytes =
        DiskOptions::check_logical_block(options.logical_block_bytes.unwrap_or(512))?;
    if name.snapshot.is_some() && !options.read_only {
        return Err(refused("a snapshot can only be read; open it read-only".to_owned()));
    }
    let info = DiskInfo {
        size_bytes: 0,
        logical_block_bytes,
        physical_block_bytes: PHYSICAL_BLOCK_BYTES.max(logical_block_bytes),
        read_only: options.read_only,
        direct: options.direct,
    };
    // A late lock is taken before the first request.
    let locks = name.exclusive && !options.read_only && !options.late_lock;
    let (opened, opening) = mpsc::channel();
    let (of_thread, span) = (name.clone(), Span::current());
    let work = move || {
        let _span = span.enter();
        let result = open_patiently(&of_thread, info, locks);
        // The caller has left if it took too long. Dropping it closes it, here.
        drop(opened.send(result));
    };
    let started = start_thread("ringhaul-rbd", work);
    started.map_err(|error| refused(format!("cannot start the thread that opens it: {error}")))?;
    let patience = if locks { PATIENCE + LOCK_PATIENCE } else { PATIENCE };
    let no_answer = |_: RecvTimeoutError| {
        let seconds = patience.as_secs();
        Err(format!(
            "the cluster has not answered for {seconds} s; check that its OSDs are up (`ceph -s`), \
             and that no other program holds the lock of the image (`rbd lock ls`)"
        ))
    };
    opening.recv_timeout(patience).unwrap_or_else(no_answer).map_err(refused)
}

fn open_patiently(
    name: &RbdSpec,
    info: DiskInfo,
    locks: bool,
) -> Result<(Image, DiskInfo, ImageProperties), String> {
    let text = |text: &str| {
        c_text(text).map_err(|_| format!("{text:?} contains a zero byte; leave it out"))
    };
    let cluster = connect(name, info.direct)?;
    let namespace = name.namespace.as_deref().unwrap_or_default();
    let [pool_name, in_pool, image_name] = [&name.pool, namespace, &name.image].map(text);
    let query_failed =
        |error: io::Error| format!("cannot query its properties from the cluster: {error}");
    let cluster_id = cluster.id().map_err(query_failed)?;
    let discard_bytes = discard_bytes(&cluster, info.logical_block_bytes);
    let pool =
        Pool::open(cluster, &pool_name?, &in_pool?).map_err(|error| no_pool(name, &error))?;
    let pool_number = pool.number();
    let snapshot = name.snapshot.as_deref().map(text).transpose()?;
    let image = Image::open(pool, &image_name?, snapshot.as_deref(), info.read_only)
        .map_err(|error| no_image(name, &error))?;
    if locks {
        image.lock().map_err(|error| no_lock(&error))?;
    }
    let size_bytes = image.size_bytes().map_err(query_failed)?;
    check_size(size_bytes, info.logical_block_bytes)?;
    let id = format!("{pool_number}/{namespace}/{}", image.id().map_err(query_failed)?);
    let snapshot = name.snapshot.as_ref().map_or(String::new(), |name| format!("@{name}"));
    let (unit, count) =
        (image.stripe_unit().map_err(query_failed)?, image.stripe_count().map_err(query_failed)?);
    let object_bytes = unit.checked_mul(count).filter(|bytes| *bytes > 0).ok_or_else(|| {
        format!("its striping of {count} times {unit} bytes is invalid; check it (`rbd info`)")
    })?;
    let facts = ImageProperties {
        identity: format!("Ceph {cluster_id}, image {id}{snapshot}"),
        discard_bytes,
        // A size beyond `u32` is more than any write has.
        optimal_bytes: u32::try_from(object_bytes)
            .ok()
            .filter(|bytes| bytes.is_multiple_of(info.physical_block_bytes)),
        object_bytes,
    };
    Ok((image, DiskInfo { size_bytes, ..info }, facts))
}

/// Checks the size of a disk.
pub(super) fn check_size(size_bytes: u64, logical_block_bytes: u32) -> Result<(), String> {
    if size_bytes == 0 {
        return Err("its size is zero; set one with `rbd resize`".to_owned());
    }
    if !size_bytes.is_multiple_of(logical_block_bytes.into()) {
        return Err(format!(
            "its size of {size_bytes} bytes is not a multiple of the logical block of \
             {logical_block_bytes}; resize it with `rbd resize`"
        ));
    }
    Ok(())
}

fn discard_bytes(cluster: &Cluster, logical_block_bytes: u32) -> u32 {
    let configured = cluster.get(c"rbd_discard_granularity_bytes").ok();
    let configured: u32 = configured.and_then(|configured| configured.parse().ok()).unwrap_or(0);
    if configured.is_power_of_two() {
        configured.max(logical_block_bytes)
    } else {
        logical_block_bytes
    }
}

/// A connected handle of the image's cluster. It is not shared: when another client takes over the
/// lock of an image, the cluster locks out the whole handle.
fn connect(access: &RbdSpec, direct: bool) -> Result<Cluster, String> {
    let cluster = configure(access, direct)?;
    cluster.connect().map_err(|error| not_connected(user_id(access), &error))?;
    Ok(cluster)
}

fn user_id(access: &RbdSpec) -> &str {
    access.id.as_deref().unwrap_or("admin")
}

/// Makes a handle with all its options, which is not connected.
fn configure(access: &RbdSpec, direct: bool) -> Result<Cluster, String> {
    let id = user_id(access);
    let user =
        c_text(&format!("client.{id}")).map_err(|error| format!("invalid id {id:?}: {error}"))?;
    let cluster =
        Cluster::new(&user)?.map_err(|error| format!("the Ceph library failed: {error}"))?;
    let conf = access.conf.as_deref().map(c_path).transpose()?;
    cluster.read_configuration(conf.as_deref()).map_err(|error| no_conf(access, &error))?;
    let mut options = vec![
        // Operations wait for the cluster. One that was abandoned could still be carried out, after
        // later ones. Operations that take over a lock ask the monitors.
        (c"rados_osd_op_timeout", c"0".to_owned()),
        (c"rados_mon_op_timeout", c"0".to_owned()),
        // The thread that begins operations also ends them: it must not wait for room. The number
        // of operations of a disk is bounded by its requests (`requests.rs`).
        (c"objecter_inflight_ops", c"0".to_owned()),
        (c"objecter_inflight_op_bytes", c"0".to_owned()),
        // IoThreads do not wait.
        (c"rbd_non_blocking_aio", c"true".to_owned()),
        (c"client_mount_timeout", c_text(MONITORS_PATIENCE).map_err(|error| error.to_string())?),
    ];
    if direct {
        options.push((c"rbd_cache", c"false".to_owned()));
    }
    if cluster.get(WORKERS).is_ok_and(|count| count == LIBRARY_WORKERS) {
        // Two threads wake each other for every answer, and wait for each other's locks, which
        // takes more than one thread alone.
        options.push((WORKERS, c"1".to_owned()));
    }
    if let Some(keyring) = &access.keyring {
        // librados reports only that access was refused.
        open_regular(keyring).map_err(|error| {
            format!("its keyring {} cannot be read: {error}; check keyring", keyring.display())
        })?;
        options.push((c"keyring", c_path(keyring)?));
    }
    for (option, value) in options {
        cluster
            .set(option, &value)
            .map_err(|error| format!("the Ceph library rejected its option {option:?}: {error}"))?;
    }
    Ok(cluster)
}

fn c_path(path: &Path) -> Result<CString, String> {
    let bytes = OsStr::as_encoded_bytes(path.as_os_str());
    CString::new(bytes).map_err(|_| format!("the path {} contains a zero byte", path.display()))
}

fn no_conf(access: &RbdSpec, error: &io::Error) -> String {
    let is_none = error.raw_os_error() == Some(libc::EINVAL);
    match &access.conf {
        Some(path) if is_none => format!(
            "{} is not a Ceph configuration: {error}; correct it, or name another file with conf",
            path.display()
        ),
        None if is_none => format!(
            "the file that $CEPH_CONF names, or /etc/ceph/ceph.conf, is not a Ceph configuration: \
             {error}; correct it, or name another file with conf=PATH"
        ),
        Some(path) => {
            format!("its configuration {} cannot be read: {error}; check conf", path.display())
        }
        None => format!(
            "no readable Ceph configuration was found ($CEPH_CONF, /etc/ceph/ceph.conf): {error}; \
             name one with conf=PATH"
        ),
    }
}

fn not_connected(id: &str, error: &io::Error) -> String {
    let advice = match error.raw_os_error() {
        Some(libc::ETIMEDOUT) => {
            "no monitor of the cluster has answered; check mon_host in its configuration, and the \
             network"
        }
        Some(libc::EACCES | libc::EPERM | libc::EINVAL) => {
            "the cluster rejected this user; check id and keyring"
        }
        Some(libc::ENOENT) => {
            "found neither a key of this user nor a monitor; check keyring, id, and mon_host in \
             the configuration"
        }
        _ => "check its configuration",
    };
    format!("the cluster cannot be reached as client.{id}: {error}; {advice}")
}

fn no_pool(name: &RbdSpec, error: &io::Error) -> String {
    let advice = match error.raw_os_error() {
        Some(libc::ENOENT) => "; `ceph osd pool ls` lists the existing pools",
        _ => "",
    };
    format!("its pool {} cannot be opened: {error}{advice}", name.pool)
}

fn no_image(name: &RbdSpec, error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOENT) => match &name.snapshot {
            Some(snapshot) => format!(
                "there is no such image, or it has no snapshot {snapshot}: {error}; `rbd ls` and \
                 `rbd snap ls` list the existing ones"
            ),
            None => format!("there is no such image: {error}; `rbd ls` lists the existing images"),
        },
        Some(libc::EACCES | libc::EPERM) => {
            format!("{error}; grant the user access (profile rbd), or open it read-only")
        }
        _ => format!("it cannot be opened: {error}"),
    }
}

pub(super) fn no_lock(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EROFS) => "another client holds its exclusive lock; find it with `rbd status` \
                              and `rbd lock ls`, and stop it first"
            .to_owned(),
        Some(libc::EINVAL) => format!(
            "it has no exclusive lock: {error}; enable it with `rbd feature enable IMAGE \
             exclusive-lock`"
        ),
        _ => format!("its exclusive lock cannot be acquired: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::api::api;
    use super::*;

    /// The name of an image with this configuration. `None` without the libraries of Ceph.
    fn image(conf: &Path, text: &str) -> Option<RbdSpec> {
        if let Err(error) = api() {
            eprintln!("skipped: {error}");
            return None;
        }
        std::fs::write(conf, text).unwrap();
        Some(RbdSpec { conf: Some(conf.to_owned()), ..RbdSpec::default() })
    }

    fn values<const N: usize>(image: &RbdSpec, direct: bool, names: [&CStr; N]) -> [String; N] {
        let cluster = configure(image, direct).unwrap_or_else(|error| panic!("{error}"));
        names.map(|name| cluster.get(name).unwrap())
    }

    /// An operation that was abandoned could be carried out after later ones, and an IoThread must
    /// not wait, whatever the configuration of the machine says.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn operations_of_an_image_neither_time_out_nor_wait_for_room() {
        let folder = tempfile::tempdir().unwrap();
        let text = "[global]\nrados_osd_op_timeout = 5\nrados_mon_op_timeout = 5\n\
                    objecter_inflight_ops = 7\nobjecter_inflight_op_bytes = 8192\n\
                    rbd_non_blocking_aio = false\nclient_mount_timeout = 300\n";
        let Some(image) = image(&folder.path().join("ceph.conf"), text) else { return };
        let names = [
            c"rados_osd_op_timeout",
            c"rados_mon_op_timeout",
            c"objecter_inflight_ops",
            c"objecter_inflight_op_bytes",
        ];
        let found = values(&image, false, names);
        assert!(found.iter().all(|value| value.parse() == Ok(0.0)), "{found:?}");
        let [waits, mount] =
            values(&image, false, [c"rbd_non_blocking_aio", c"client_mount_timeout"]);
        assert_eq!((waits.as_str(), mount.parse()), ("true", Ok(20.0)));
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn direct_access_switches_the_cache_off_and_otherwise_the_configuration_decides() {
        let folder = tempfile::tempdir().unwrap();
        let conf = folder.path().join("ceph.conf");
        for (text, direct, cache, workers) in [
            ("", false, "true", "1"),
            ("", true, "false", "1"),
            ("rbd_cache = false\nlibrados_thread_count = 5\n", false, "false", "5"),
        ] {
            let Some(image) = image(&conf, &format!("[global]\n{text}")) else { return };
            let found = values(&image, direct, [c"rbd_cache", WORKERS]);
            assert_eq!(found, [cache, workers], "{text:?}, {direct}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_user_has_the_key_in_the_file_that_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let [conf, keyring] = ["ceph.conf", "key"].map(|name| folder.path().join(name));
        let text = "[client.admin]\nkeyring = /a\n[client.backup]\nkeyring = /b\n";
        let Some(admin) = image(&conf, text) else { return };
        let backup = RbdSpec { id: Some("backup".to_owned()), ..admin.clone() };
        for (image, path) in [(&admin, "/a"), (&backup, "/b")] {
            assert_eq!(values(image, false, [c"keyring"]), [path]);
        }
        let missing = RbdSpec { keyring: Some(keyring.clone()), ..backup };
        let error = configure(&missing, false).map(drop).unwrap_err();
        let named = keyring.display().to_string();
        assert!(error.contains(&named) && error.contains("check keyring"), "{error}");
        std::fs::write(&keyring, "").unwrap();
        assert_eq!(values(&missing, false, [c"keyring"]), [named]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_configuration_is_refused_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ceph.conf");
        let Some(odd) = image(&path, "[global\nno configuration\n") else { return };
        let missing = RbdSpec { conf: Some(folder.path().join("none")), ..odd.clone() };
        let zero = RbdSpec { conf: Some(PathBuf::from("a\0b")), ..odd.clone() };
        let id = RbdSpec { id: Some("a\0b".to_owned()), ..odd.clone() };
        for (image, reason) in [
            (odd, "is not a Ceph configuration"),
            (missing, "cannot be read"),
            (zero, "contains a zero byte"),
            (id, "invalid id \"a\\0b\": Invalid argument"),
        ] {
            let error = configure(&image, false).map(drop).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
        // Without a path, the usual places count.
        let (none, errno) = (RbdSpec::default(), io::Error::from_raw_os_error);
        for (error, reason) in [(libc::EINVAL, "is not a Ceph"), (libc::ENOENT, "no readable Ceph")]
        {
            let error = no_conf(&none, &errno(error));
            assert!(error.contains(reason) && error.contains("conf=PATH"), "{error}");
        }
    }

    /// Each fault has its own remedy.
    #[test]
    fn failures_of_a_cluster_name_their_remedy() {
        let snapshot = RbdSpec { snapshot: Some("yesterday".to_owned()), ..RbdSpec::default() };
        let plain = RbdSpec::default();
        let errno = io::Error::from_raw_os_error;
        for (text, remedy) in [
            (not_connected("a", &errno(libc::ETIMEDOUT)), "mon_host"),
            (not_connected("a", &errno(libc::EACCES)), "check id and keyring"),
            (not_connected("a", &errno(libc::EPERM)), "check id and keyring"),
            (not_connected("a", &errno(libc::ENOENT)), "neither a key"),
            (not_connected("a", &errno(libc::EIO)), "check its configuration"),
            (no_pool(&plain, &errno(libc::ENOENT)), "ceph osd pool ls"),
            (no_image(&plain, &errno(libc::ENOENT)), "`rbd ls` lists the existing images"),
            (no_image(&snapshot, &errno(libc::ENOENT)), "no snapshot yesterday"),
            (no_image(&plain, &errno(libc::EPERM)), "profile rbd"),
            (no_image(&plain, &errno(libc::EIO)), "cannot be opened"),
            (no_lock(&errno(libc::EROFS)), "another client holds its exclusive lock"),
            (no_lock(&errno(libc::EINVAL)), "rbd feature enable"),
            (no_lock(&errno(libc::EIO)), "cannot be acquired"),
        ] {
            assert!(text.contains(remedy), "{text}");
        }
        assert!(!no_pool(&plain, &errno(libc::EIO)).contains("ceph osd"));
        assert_eq!(check_size(1024, 512), Ok(()));
        assert!(check_size(0, 512).unwrap_err().contains("its size is zero"));
        assert!(check_size(1024, 4096).unwrap_err().contains("not a multiple"));
    }
}
