//! Sockets that front-ends connect to, and the permissions of all sockets.

pub mod inherited;
pub(crate) mod permissions;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use blockio::executor::Lock;
use disks::open::inherit;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, fcntl_getfl};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use serde::{Deserialize, Serialize};
use vhost_user::{FdIndex, PassedFds};

use crate::process::peer::Peer;
use crate::sandbox::{self, helper};
use permissions::SocketGroups;

/// A source of front-ends.
pub enum Endpoint {
    /// A socket in the file system, created by this process and removed at the end.
    Listener(OwnSocket),
    /// A listening socket that the parent process created.
    InheritedListener(InheritedSocket),
    /// A single connection, made by the parent process. The export ends with it.
    Connection(UnixStream),
}

/// A listening socket that other processes may share. It is non-blocking while the daemon holds it.
pub struct InheritedSocket {
    listener: UnixListener,
    /// `None`: it has no place in the file system.
    path: Option<PathBuf>,
    was_blocking: bool,
    /// Like that of [`OwnSocket`].
    is_lent: bool,
}

impl Drop for InheritedSocket {
    fn drop(&mut self) {
        if self.was_blocking && !self.is_lent {
            // Restored for other users of the socket. If this fails, they have changed the socket
            // themselves.
            let _ = self.listener.set_nonblocking(false);
        }
    }
}

/// Held while a socket is created, from the check of its path until it listens.
static BINDING: Lock<()> = Lock::new(());

/// The time for which a socket may be in use before it is refused: a killed process listens until
/// its last thread has ended.
const KILLED_MAX: Duration = Duration::from_secs(2);

/// The pause between two checks of a socket in use.
const KILLED_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The longest socket path in bytes: the kernel has 108 bytes, one of which is the terminator
/// (unix(7)).
const SOCKET_PATH_BYTES: usize = 107;

/// A listening socket and its place in the file system.
pub struct OwnSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode, so that no other file is removed in its place.
    identity: (u64, u64),
    /// True while the socket still belongs to the process that hands it over, which also removes
    /// it.
    is_lent: bool,
}

/// The state that another process needs to take over an endpoint.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum EndpointState {
    /// A socket created by the daemon, with the device and inode of its path.
    Own(FdIndex, PathBuf, (u64, u64)),
    /// A listening socket that was inherited.
    #[serde(rename_all = "kebab-case")]
    Inherited { socket: FdIndex, was_blocking: bool },
    /// A connection without a session.
    Connection(FdIndex),
}

impl Endpoint {
    /// Listens on `path`, which `option` names. A socket without a listener is replaced.
    ///
    /// # Errors
    ///
    /// When a program listens there, something else exists there, or it cannot be created.
    pub fn bind(path: &Path, option: &str) -> Result<Self> {
        Self::bind_with(path, option, |path| UnixListener::bind(path))
    }

    /// Like [`bind`](Self::bind), but only this user may connect from the moment the socket exists;
    /// afterwards the members of `groups`, if there are any, may too.
    ///
    /// # Errors
    ///
    /// Like [`bind`](Self::bind); and when strangers can write to the folder, see
    /// [`permissions`].
    pub(crate) fn bind_private(path: &Path, option: &str, groups: SocketGroups) -> Result<Self> {
        permissions::check_private_folder(path, groups.owner)
            .with_context(|| format!("cannot use {option} {}", path.display()))?;
        let endpoint = Self::bind_with(path, option, private_listener)?;
        if let Self::Listener(socket) = &endpoint {
            permissions::give_to(path, socket.identity, groups)?;
        }
        Ok(endpoint)
    }

    fn bind_with(
        path: &Path,
        option: &str,
        listen: fn(&Path) -> io::Result<UnixListener>,
    ) -> Result<Self> {
        let shown = path.display();
        Self::check_length(path, option)?;
        permissions::check_folder(path).map_err(|error| {
            anyhow!("cannot listen on {shown}: {error:#}; or choose another {option}")
        })?;
        wait_for_killed_listener(path, Instant::now() + KILLED_MAX).map_err(|error| {
            match sandbox::advice_on_socket(path) {
                Some(advice) => anyhow!("cannot listen on {shown}: {error:#}; {advice}"),
                None => error,
            }
        })?;
        // Two threads may name one place by two paths, and a socket between bind and listen looks
        // like a left-over one.
        let _alone = BINDING.lock();
        clear_socket_path(path, option)?;
        let listener = listen(path).map_err(|error| {
            if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) {
                return anyhow::Error::new(error).context(format!("cannot listen on {shown}"));
            }
            let is_denied = error.kind() == io::ErrorKind::PermissionDenied;
            let advice = is_denied.then(|| sandbox::advice_on_socket(path)).flatten();
            let advice = advice.unwrap_or_else(|| format!("choose another {option}"));
            anyhow!("cannot listen on {shown}: {error}; {advice}")
        })?;
        listener
            .set_nonblocking(true)
            .with_context(|| format!("cannot set up the new socket {shown}"))?;
        let metadata = std::fs::symlink_metadata(path)
            .with_context(|| format!("cannot examine the new socket {shown}"))?;
        let identity = (metadata.dev(), metadata.ino());
        let path = path.to_owned();
        Ok(Self::Listener(OwnSocket { listener, path, identity, is_lent: false }))
    }

    /// Checks the length of a socket's path.
    ///
    /// # Errors
    ///
    /// When the path is too long.
    pub(crate) fn check_length(path: &Path, option: &str) -> Result<()> {
        let (shown, bytes) = (path.display(), path.as_os_str().len());
        if bytes > SOCKET_PATH_BYTES {
            bail!(
                "cannot listen on {shown}: the path is too long for a socket ({bytes} bytes, at \
                 most {SOCKET_PATH_BYTES}); choose another {option}"
            );
        }
        Ok(())
    }

    /// Checks that no program listens at `path`, and removes a left-over socket. Waits until
    /// [`patience`](Self::patience) is over for a process that may be dying.
    ///
    /// # Errors
    ///
    /// When a program listens there, or something else exists there.
    pub(crate) fn check_free(path: &Path, option: &str, patience: Instant) -> Result<()> {
        wait_for_killed_listener(path, patience)?;
        let _alone = BINDING.lock();
        clear_socket_path(path, option)
    }

    /// The moment after which sockets that are in use now are refused.
    pub(crate) fn patience() -> Instant {
        Instant::now() + KILLED_MAX
    }

    /// Takes over descriptor `fd`, a listening or a connected Unix socket that the parent process
    /// left open for this program. The number is closed at the end of the export.
    ///
    /// # Errors
    ///
    /// When it is not open, not such a socket, or was opened by this program itself.
    pub fn inherit(fd: i32) -> Result<Self> {
        let what = || format!("cannot use --fd {fd}; it must be an open Unix stream socket");
        let socket = inherit::take_over(fd).with_context(what)?;
        if sockopt::socket_domain(&socket).with_context(what)? != AddressFamily::UNIX
            || sockopt::socket_type(&socket).with_context(what)? != SocketType::STREAM
        {
            bail!("{}", what());
        }
        if sockopt::socket_acceptconn(&socket).with_context(what)? {
            return Self::inherit_listener(socket).with_context(what);
        }
        // Fails if there is no peer.
        rustix::net::getpeername(&socket).with_context(what)?;
        Ok(Self::Connection(UnixStream::from(socket)))
    }

    fn inherit_listener(socket: OwnedFd) -> io::Result<Self> {
        let was_blocking = !fcntl_getfl(&socket)?.contains(OFlags::NONBLOCK);
        let listener = UnixListener::from(socket);
        listener.set_nonblocking(true)?;
        let path = path_of(&listener)?;
        let socket = InheritedSocket { listener, path, was_blocking, is_lent: false };
        Ok(Self::InheritedListener(socket))
    }

    /// Returns the state that another process needs to take over this endpoint.
    ///
    /// # Errors
    ///
    /// When no descriptor is left.
    pub(crate) fn hand_over(&self, fds: &mut PassedFds) -> io::Result<EndpointState> {
        Ok(match self {
            Self::Listener(OwnSocket { listener, path, identity, .. }) => {
                let socket = fds.put(path.display().to_string(), listener)?;
                EndpointState::Own(socket, path.clone(), *identity)
            }
            Self::InheritedListener(InheritedSocket { listener, was_blocking, .. }) => {
                let socket = fds.put("inherited socket", listener)?;
                EndpointState::Inherited { socket, was_blocking: *was_blocking }
            }
            Self::Connection(socket) => {
                EndpointState::Connection(fds.put("inherited connection", socket)?)
            }
        })
    }

    /// Creates the endpoint of another process, which still owns it until this process
    /// [keeps](Self::keep) it.
    ///
    /// # Errors
    ///
    /// When its descriptor was not received.
    pub(crate) fn take_over(state: EndpointState, fds: &mut PassedFds) -> io::Result<Self> {
        Ok(match state {
            EndpointState::Own(socket, path, identity) => {
                let listener = fds.take(socket)?.into();
                Self::Listener(OwnSocket { listener, path, identity, is_lent: true })
            }
            EndpointState::Inherited { socket, was_blocking } => {
                let listener = fds.take(socket)?.into();
                let path = path_of(&listener)?;
                let socket = InheritedSocket { listener, path, was_blocking, is_lent: true };
                Self::InheritedListener(socket)
            }
            EndpointState::Connection(socket) => Self::Connection(fds.take(socket)?.into()),
        })
    }

    /// The path of a listening socket.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::Listener(socket) => Some(&socket.path),
            Self::InheritedListener(socket) => socket.path.as_deref(),
            Self::Connection(_) => None,
        }
    }

    /// Makes this process the owner, which removes or restores the socket at the end.
    pub(crate) fn keep(&mut self) {
        match self {
            Self::Listener(socket) => socket.is_lent = false,
            Self::InheritedListener(socket) => socket.is_lent = false,
            Self::Connection(_) => {}
        }
    }

    /// The listening socket, if more than one front-end can connect.
    pub(crate) fn listener(&self) -> Option<&UnixListener> {
        match self {
            Self::Listener(socket) => Some(&socket.listener),
            Self::InheritedListener(socket) => Some(&socket.listener),
            Self::Connection(_) => None,
        }
    }

    /// Accepts the next front-end of a listener. A process that shares the listener may have made
    /// it blocking or may accept first. This blocks only if both happen after the line below.
    pub(crate) fn accept(&self) -> Option<io::Result<UnixStream>> {
        if let Self::InheritedListener(socket) = self
            && let Err(error) = socket.listener.set_nonblocking(true)
        {
            return Some(Err(error));
        }
        self.listener().map(|listener| listener.accept().map(|(socket, _)| socket))
    }
}

fn path_of(listener: &UnixListener) -> io::Result<Option<PathBuf>> {
    Ok(listener.local_addr()?.as_pathname().map(Path::to_owned))
}

/// Listens at a socket that only its owner can connect to. The path gets the mode of the socket
/// less the umask, so it never shows another mode.
fn private_listener(path: &Path) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    // The kernel reduces the backlog to its own limit.
    rustix::net::listen(&socket, i32::MAX)?;
    Ok(socket.into())
}

/// Removes a left-over socket, and refuses anything else at the path.
fn clear_socket_path(path: &Path, option: &str) -> Result<()> {
    let shown = path.display();
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("cannot examine {shown}")),
    };
    if !metadata.file_type().is_socket() {
        bail!("{shown} exists and is not a socket; choose another {option}");
    }
    match listens(path) {
        Ok(false) => {
            tracing::info!("no program listens on the socket {shown}; replacing it");
            std::fs::remove_file(path)
                .with_context(|| format!("cannot remove the old socket {shown}"))
        }
        Ok(true) => {
            bail!(
                "another program listens on {shown}, or another export of this daemon; stop it or \
                 choose another {option}"
            )
        }
        Err(error) => Err(error).with_context(|| format!("cannot check for a listener on {shown}")),
    }
}

/// Waits while another process listens at `path`, until `patience` is over. A killed process closes
/// its sockets a moment later, and a supervisor may not wait for that.
fn wait_for_killed_listener(path: &Path, patience: Instant) -> Result<()> {
    let looking = || format!("cannot check for a listener on {}", path.display());
    if !std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket()) {
        return Ok(());
    }
    let mut is_logged = false;
    loop {
        let left = patience.saturating_duration_since(Instant::now());
        let Some((connected, listener)) = find_listener(path).with_context(looking)? else {
            return Ok(());
        };
        if left.is_zero() || listener == Some(std::process::id()) {
            return Ok(());
        }
        if !std::mem::replace(&mut is_logged, true) {
            tracing::debug!(
                "a program listens on {}; waiting up to {} s for its end, in case it was killed",
                path.display(),
                KILLED_MAX.as_secs()
            );
        }
        // A dying process hangs up when it closes its socket.
        let mut hung_up: Vec<PollFd<'_>> =
            connected.iter().map(|socket| PollFd::new(socket, PollFlags::RDHUP)).collect();
        let wait =
            Timespec::try_from(left.min(KILLED_CHECK_INTERVAL)).context("a time is too long")?;
        match poll(&mut hung_up, Some(&wait)) {
            // A living process hangs up on a stranger, too.
            Ok(1..) => std::thread::sleep(left.min(KILLED_CHECK_INTERVAL / 5)),
            Ok(0) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).with_context(looking),
        }
    }
}

/// Returns true if a program listens there. Does not wait if its backlog is full.
fn listens(path: &Path) -> io::Result<bool> {
    Ok(find_listener(path)?.is_some())
}

/// Returns a connection to the program that listens at a socket, if this process may connect, and
/// the id of its process. A listener with a full backlog does not reveal its process. `None`: no
/// program listens there.
#[allow(clippy::type_complexity, reason = "a pair of two facts that may be unknown")]
fn find_listener(path: &Path) -> io::Result<Option<(Option<OwnedFd>, Option<u32>)>> {
    if let Some(found) = helper::find_listener(path) {
        return Ok(found?.map(|process| (None, process)));
    }
    let Some(connected) = helper::connect(path)? else { return Ok(None) };
    let process = connected.as_ref().and_then(|socket| Peer::from_socket(socket).ok()?.pid);
    Ok(Some((connected, process)))
}

impl Drop for OwnSocket {
    fn drop(&mut self) {
        if self.is_lent {
            return;
        }
        let ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.identity);
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!("cannot remove the socket {}: {error}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, mpsc};
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_place_is_taken_only_from_a_socket_without_a_listener() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("file"), "").unwrap();
        std::fs::create_dir(path("folder")).unwrap();
        drop(UnixListener::bind(path("left over")).unwrap());
        let _listener = UnixListener::bind(path("in use")).unwrap();
        for (place, refused) in [
            (path("new"), None),
            (path("left over"), None),
            (path("in use"), Some("another program listens on")),
            (path("file"), Some("is not a socket")),
            (path("folder"), Some("is not a socket")),
            (path("no folder/socket"), Some("choose another --there")),
            (path(&"x".repeat(SOCKET_PATH_BYTES)), Some("the path is too long")),
        ] {
            let there = std::fs::symlink_metadata(&place).map(|metadata| metadata.ino()).ok();
            let bound = Endpoint::bind(&place, "--there").map(|endpoint| {
                assert!(UnixStream::connect(&place).is_ok(), "{}", place.display());
                assert!(endpoint.accept().is_some_and(|accepted| accepted.is_ok()));
                drop(endpoint);
                assert!(!place.exists(), "{} is left behind", place.display());
            });
            let error = bound.err().map(|error| error.to_string());
            let is_expected = match refused {
                None => error.is_none(),
                Some(words) => error.as_ref().is_some_and(|error| error.contains(words)),
            };
            assert!(is_expected, "{}: {error:?}", place.display());
            if refused.is_some() {
                let now = std::fs::symlink_metadata(&place).map(|metadata| metadata.ino()).ok();
                assert_eq!(now, there, "{} has changed", place.display());
            }
        }
    }

    /// Threads compete for one socket, under different paths.
    #[test]
    fn one_of_two_threads_binds_a_socket() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("below")).unwrap();
        let [plain, other] = ["socket", "below/../socket"].map(|path| folder.path().join(path));
        for _ in 0..2000 {
            let start = Barrier::new(2);
            let bind = |path: &Path| {
                start.wait();
                Endpoint::bind(path, "--there").ok()
            };
            let bound = std::thread::scope(|threads| {
                let first = threads.spawn(|| bind(&plain));
                [bind(&other), first.join().unwrap()]
            });
            let [one] = &bound.iter().flatten().collect::<Vec<_>>()[..] else {
                panic!("not one has it");
            };
            assert!(UnixStream::connect(&plain).is_ok(), "its socket is gone");
            assert!(one.accept().is_some_and(|accepted| accepted.is_ok()));
        }
    }

    #[test]
    fn a_full_listener_delays_no_check() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        let connect = || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let (domain, kind) = (AddressFamily::UNIX, SocketType::STREAM);
            let socket = rustix::net::socket_with(domain, kind, flags, None).unwrap();
            let address = SocketAddrUnix::new(&path).unwrap();
            rustix::net::connect(&socket, &address).is_ok().then_some(socket)
        };
        let _full: Vec<OwnedFd> = std::iter::from_fn(connect).collect();
        let error = Endpoint::check_free(&path, "--there", Instant::now()).unwrap_err();
        assert!(error.to_string().contains("listens on"), "{error}");
    }

    #[test]
    fn a_socket_belongs_to_its_last_keeper() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let before = Endpoint::bind(&path, "").unwrap();
        let taken = || {
            let mut fds = PassedFds::default();
            let state = before.hand_over(&mut fds).unwrap();
            let state = serde_json::to_string(&state).unwrap();
            Endpoint::take_over(serde_json::from_str(&state).unwrap(), &mut fds).unwrap()
        };
        drop(taken());
        let _front_end = UnixStream::connect(&path).unwrap();
        let mut after = taken();
        assert!(after.accept().is_some_and(|accepted| accepted.is_ok()));
        after.keep();
        drop(after);
        assert!(!path.exists());
    }

    /// Its other users find it as they had made it, when the last daemon ends.
    #[test]
    fn an_inherited_listener_belongs_to_the_process_that_keeps_it() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        for was_blocking in [true, false] {
            listener.set_nonblocking(!was_blocking).unwrap();
            let ours = listener.try_clone().unwrap();
            let before = Endpoint::inherit_listener(ours.into()).unwrap();
            let is_blocking = || !fcntl_getfl(&listener).unwrap().contains(OFlags::NONBLOCK);
            let taken = || {
                let mut fds = PassedFds::default();
                let state = before.hand_over(&mut fds).unwrap();
                let state = serde_json::to_string(&state).unwrap();
                Endpoint::take_over(serde_json::from_str(&state).unwrap(), &mut fds).unwrap()
            };
            drop(taken());
            assert!(!is_blocking(), "the old process still uses it");
            let mut after = taken();
            after.keep();
            drop(after);
            assert_eq!(is_blocking(), was_blocking);
            std::mem::forget(before);
        }
    }

    #[test]
    fn a_path_has_the_length_of_a_socket_at_most() {
        let check = |bytes: usize| Endpoint::check_length(Path::new(&"x".repeat(bytes)), "--there");
        assert!(check(SOCKET_PATH_BYTES).is_ok() && check(SOCKET_PATH_BYTES + 1).is_err());
        assert!(SocketAddrUnix::new("x".repeat(SOCKET_PATH_BYTES)).is_ok());
    }

    #[test]
    fn a_private_socket_is_private_from_its_beginning() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mode = || std::fs::symlink_metadata(&path).unwrap().mode() & 0o777;
        let listener = private_listener(&path).unwrap();
        assert_eq!(mode(), 0o600);
        drop(listener);
        let endpoint = Endpoint::bind_private(&path, "", SocketGroups::default()).unwrap();
        assert_eq!(mode(), 0o600);
        drop(endpoint);
        let group = rustix::process::getegid().as_raw();
        let groups = SocketGroups { owner: Some(group), further: None };
        let _endpoint = Endpoint::bind_private(&path, "", groups).unwrap();
        assert_eq!(mode(), 0o660);
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn a_socket_of_another_process_in_the_same_place_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let endpoint = Endpoint::bind(&path, "").unwrap();
        std::fs::rename(&path, folder.path().join("moved")).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(endpoint);
        assert!(path.exists());
    }

    #[test]
    fn an_inherited_listener_blocks_again_if_it_did_before() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        for was_blocking in [true, false] {
            let theirs = listener.try_clone().unwrap();
            theirs.set_nonblocking(!was_blocking).unwrap();
            let ours = Endpoint::inherit_listener(listener.try_clone().unwrap().into()).unwrap();
            let is_blocking = || !fcntl_getfl(&theirs).unwrap().contains(OFlags::NONBLOCK);
            assert!(!is_blocking() && ours.listener().is_some());
            drop(ours);
            assert_eq!(is_blocking(), was_blocking);
        }
        assert!(folder.path().join("socket").exists(), "it is not ours to remove");
    }

    #[test]
    fn an_inherited_listener_that_others_make_blocking_does_not_block() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let theirs = listener.try_clone().unwrap();
        let ours = Endpoint::inherit_listener(listener.into()).unwrap();
        theirs.set_nonblocking(false).unwrap();
        let (sender, accepted) = mpsc::channel();
        std::thread::spawn(move || {
            sender.send(ours.accept().map(|accepted| accepted.map_err(|error| error.kind())))
        });
        let accepted = accepted.recv_timeout(Duration::from_secs(30)).expect("it waits");
        assert_eq!(accepted.unwrap().unwrap_err(), io::ErrorKind::WouldBlock);
    }
}
