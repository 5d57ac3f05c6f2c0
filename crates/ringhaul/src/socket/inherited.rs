//! Sockets that another program has opened for this process: the descriptor of `--fd`, and
//! listening sockets that a service manager passes with names (sd_listen_fds(3)).

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use blockio::executor::Lock;
use disks::open::inherit;
use rustix::net::{AddressFamily, SocketType, sockopt};
use vhost_user::PassedFds;

use crate::process::service_manager::STORED_PREFIX;
use crate::socket::{Endpoint, EndpointState, InheritedSocket};

/// Variables of a service manager that passes sockets: the process that they are for, their number,
/// and their names with colons between them.
pub(crate) const VARIABLES: [&str; 3] = ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"];

/// The first descriptor that a service manager passes.
const FIRST: i32 = 3;

/// The length of the queue of a passed socket, which the kernel may shorten.
const BACKLOG: i32 = 4096;

/// The name of the control socket.
const CONTROL: &str = "control";

/// The sockets that were open when this program started.
#[derive(Default)]
pub struct InheritedSockets {
    /// The socket of `--fd` with its number, until it is served.
    numbered: Lock<Option<(i32, Endpoint)>>,
    /// The sockets of a service manager. They stay open, because an export may end and be added
    /// again.
    named: Lock<Vec<NamedSocket>>,
    /// Descriptors that a killed process has stored with the service manager, with their names.
    stored: Lock<Vec<(String, OwnedFd)>>,
}

/// A listening socket of a service manager.
struct NamedSocket {
    name: String,
    path: PathBuf,
    listener: UnixListener,
}

/// A socket with the number of its descriptor.
impl From<(i32, Endpoint)> for InheritedSockets {
    fn from(numbered: (i32, Endpoint)) -> Self {
        Self {
            numbered: Lock::new(Some(numbered)),
            named: Lock::default(),
            stored: Lock::default(),
        }
    }
}

impl InheritedSockets {
    /// Takes over descriptor `fd`, and the sockets that a service manager passes to this process.
    ///
    /// # Errors
    ///
    /// When a descriptor is no socket of the expected kind, or two sockets have one name.
    pub fn take_over(fd: Option<i32>) -> Result<Self> {
        let numbered = fd.map(|fd| Endpoint::inherit(fd).map(|socket| (fd, socket))).transpose()?;
        let [process, count, names] = VARIABLES.map(|variable| std::env::var(variable).ok());
        let is_ours = process.is_some_and(|process| process == std::process::id().to_string());
        let count = count.filter(|_| is_ours).map_or(Ok(0), |count| count.parse::<u16>());
        let count = count.context("cannot understand LISTEN_FDS of the service manager")?;
        let names = names.unwrap_or_default();
        let mut names = names.split(':');
        let (mut named, mut stored): (Vec<NamedSocket>, _) = (Vec::new(), Vec::new());
        for number in (FIRST..).take(count.into()) {
            let name = names.next().unwrap_or_default();
            if fd == Some(number) {
                continue;
            }
            if name.starts_with(STORED_PREFIX) {
                let taken = inherit::take_over(number);
                let what = || format!("cannot use the stored descriptor {number} ('{name}')");
                stored.push((name.to_owned(), taken.with_context(what)?));
                continue;
            }
            let socket = NamedSocket::take_over(number, name)?;
            if let Some(other) = named.iter().find(|other| other.name == name && !name.is_empty()) {
                bail!(
                    "the service manager passes {} and {} under the name '{name}'; give each \
                     socket a unit of its own, with FileDescriptorName=",
                    other.path.display(),
                    socket.path.display()
                );
            }
            named.push(socket);
        }
        let (numbered, named) = (Lock::new(numbered), Lock::new(named));
        Ok(Self { numbered, named, stored: Lock::new(stored) })
    }

    /// Returns true if `fd` was inherited and no export has taken it.
    pub(crate) fn has(&self, fd: i32) -> bool {
        self.numbered.lock().as_ref().is_some_and(|(number, _)| *number == fd)
    }

    /// Takes the socket of `--fd`.
    pub(crate) fn take(&self) -> Option<Endpoint> {
        self.numbered.lock().take().map(|(_, endpoint)| endpoint)
    }

    /// Stores the socket of `--fd` that another process has had.
    pub(crate) fn put(&self, fd: i32, endpoint: Endpoint) {
        *self.numbered.lock() = Some((fd, endpoint));
    }

    /// Takes the descriptors that a killed process has stored with the service manager.
    pub(crate) fn take_stored(&self) -> Vec<(String, OwnedFd)> {
        std::mem::take(&mut *self.stored.lock())
    }

    /// Makes this process the owner of the socket of `--fd`.
    pub(crate) fn keep(&self) {
        self.numbered.lock().iter_mut().for_each(|(_, socket)| socket.keep());
    }

    /// Hands over the socket of descriptor `fd`, if it is not served.
    ///
    /// # Errors
    ///
    /// When no descriptor is left.
    pub(crate) fn hand_over(
        &self,
        fd: i32,
        fds: &mut PassedFds,
    ) -> io::Result<Option<EndpointState>> {
        let numbered = self.numbered.lock();
        let socket = numbered.as_ref().filter(|(number, _)| *number == fd);
        socket.map(|(_, socket)| socket.hand_over(fds)).transpose()
    }

    /// Hands over the listening sockets of a service manager, with their names. Exports and the
    /// control socket may have some of them.
    ///
    /// # Errors
    ///
    /// When no descriptor is left.
    pub(crate) fn hand_over_named(
        &self,
        fds: &mut PassedFds,
    ) -> io::Result<Vec<(String, EndpointState)>> {
        let named = self.named.lock();
        let of_exports = named.iter().filter(|socket| socket.name != CONTROL);
        let hand_over = |NamedSocket { name, listener, .. }: &NamedSocket| {
            let socket = fds.put("inherited socket", listener)?;
            Ok((name.clone(), EndpointState::Inherited { socket, was_blocking: false }))
        };
        of_exports.map(hand_over).collect()
    }

    /// Keeps a listening socket for the next export of that name and path, if it is one that a
    /// service manager has passed to another process.
    ///
    /// # Errors
    ///
    /// When no descriptor is left.
    pub(crate) fn remember(&self, name: &str, endpoint: &Endpoint) -> Result<()> {
        let Endpoint::InheritedListener(InheritedSocket { listener, path: Some(path), .. }) =
            endpoint
        else {
            return Ok(());
        };
        let mut named = self.named.lock();
        // It may have come for its export, and among all passed sockets.
        if named.iter().any(|known| known.path == *path) {
            return Ok(());
        }
        let listener = listener.try_clone().context("cannot keep an inherited socket")?;
        named.push(NamedSocket { name: name.to_owned(), path: path.clone(), listener });
        Ok(())
    }

    /// Returns true if a service manager passes the socket of the export `name` at `path`.
    pub(crate) fn has_listener(&self, name: &str, path: &Path) -> bool {
        find(&self.named.lock(), name, path).is_some()
    }

    /// The socket that a service manager passes for the export `name` at `path`.
    ///
    /// # Errors
    ///
    /// When its socket has another path, or no descriptor is left.
    pub(crate) fn listener(&self, name: &str, path: &Path) -> Result<Option<Endpoint>> {
        endpoint(find(&self.named.lock(), name, path), name, path)
    }

    /// The control socket at `path`, if a service manager passes it.
    ///
    /// # Errors
    ///
    /// When its socket has another path or no option names it, or no descriptor is left.
    pub(crate) fn control(&self, path: Option<&Path>) -> Result<Option<Endpoint>> {
        let named = self.named.lock();
        let by_name = named.iter().find(|socket| socket.name == CONTROL);
        if let Some(path) = path {
            return endpoint(by_name.or_else(|| find(&named, CONTROL, path)), CONTROL, path);
        }
        match by_name {
            Some(NamedSocket { path, .. }) => {
                let path = path.display();
                bail!("the service manager passes the control socket {path}; add --control {path}")
            }
            None => Ok(None),
        }
    }

    /// Warns about passed sockets with the name and the path of none of these exports.
    pub(crate) fn warn_of_unused(&self, exports: &[(String, &Path)]) {
        let named = self.named.lock();
        let unused = named.iter().filter(|socket| {
            let is_of = |(name, path): &(String, &Path)| {
                *name == socket.name || is_same(&socket.path, path)
            };
            socket.name != CONTROL && !exports.iter().any(is_of)
        });
        for NamedSocket { name, path, .. } in unused {
            let path = path.display();
            tracing::warn!(
                "the service manager passes the socket {path} under the name '{name}', and no \
                 export has this path or this name: front-ends that connect there wait; correct \
                 ListenStream= or FileDescriptorName="
            );
        }
    }
}

/// The socket of the export with this name, else the one with this path: a unit without
/// FileDescriptorName= gives its own name. The name of the control socket is no export's.
fn find<'a>(sockets: &'a [NamedSocket], name: &str, path: &Path) -> Option<&'a NamedSocket> {
    let named = sockets.iter().find(|socket| socket.name == name && name != CONTROL);
    named.or_else(|| sockets.iter().find(|socket| is_same(&socket.path, path)))
}

/// A passed socket, for its user with this name and path.
fn endpoint(socket: Option<&NamedSocket>, name: &str, path: &Path) -> Result<Option<Endpoint>> {
    let Some(socket) = socket else { return Ok(None) };
    let shown = path.display();
    ensure!(
        is_same(&socket.path, path),
        "the service manager passes {} under the name '{name}', which belongs to {shown}; \
         write one path into ListenStream= and the options",
        socket.path.display()
    );
    let listener = socket.listener.try_clone();
    let listener = listener.and_then(|copy| Endpoint::inherit_listener(copy.into()));
    listener.map(Some).with_context(|| format!("cannot use the passed socket {shown}"))
}

impl NamedSocket {
    fn take_over(number: i32, name: &str) -> Result<Self> {
        let what = || {
            format!(
                "cannot use descriptor {number} ('{name}') of the service manager; it must be a \
                 listening Unix stream socket with a path (ListenStream=/..., Accept=no)"
            )
        };
        let socket = inherit::take_over(number).with_context(what)?;
        let is_listener = sockopt::socket_domain(&socket).with_context(what)?
            == AddressFamily::UNIX
            && sockopt::socket_type(&socket).with_context(what)? == SocketType::STREAM
            && sockopt::socket_acceptconn(&socket).with_context(what)?;
        ensure!(is_listener, "{}", what());
        // Clients learn this user from the kernel (SO_PEERCRED), not that of the service manager.
        rustix::net::listen(&socket, BACKLOG).with_context(what)?;
        let listener = UnixListener::from(socket);
        let address = listener.local_addr().with_context(what)?;
        let path = address.as_pathname().with_context(what)?.to_owned();
        Ok(Self { name: name.to_owned(), path, listener })
    }
}

/// Returns true if both paths name one file, for example `/run` and `/var/run`.
fn is_same(one: &Path, other: &Path) -> bool {
    one == other || matches!((one.canonicalize(), other.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::LogCapture;

    fn passed(sockets: &[(&str, &Path)]) -> InheritedSockets {
        let listen = |(name, path): &(&str, &Path)| NamedSocket {
            name: (*name).to_owned(),
            path: (*path).to_owned(),
            listener: UnixListener::bind(path).unwrap(),
        };
        let named = Lock::new(sockets.iter().map(listen).collect());
        InheritedSockets { named, ..Default::default() }
    }

    #[test]
    fn a_socket_is_found_by_its_name_or_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b, c] = ["a", "b", "control"].map(|name| folder.path().join(name));
        let sockets = passed(&[("vm1", &a), ("ringhaul.socket", &b), ("control", &c)]);
        let listener = |name, path: &Path| sockets.listener(name, path);
        for (name, path) in [("vm1", &a), ("vm2", &b), ("vm3", &a)] {
            let found = listener(name, path).unwrap().unwrap();
            assert_eq!(found.path(), Some(&**path), "{name}");
        }
        // Another path through a link names the same socket.
        std::os::unix::fs::symlink(folder.path(), folder.path().join("link")).unwrap();
        assert!(listener("vm1", &folder.path().join("link/a")).unwrap().is_some());
        assert!(listener("vm2", &folder.path().join("d")).unwrap().is_none());
        assert!(!sockets.has_listener("vm2", &folder.path().join("d")));
        let refused = listener("vm1", &b).map(drop).unwrap_err().to_string();
        assert!(refused.contains("under the name 'vm1'"), "{refused}");
        // An export with the name of the control socket has a socket of its own.
        assert!(listener("control", &folder.path().join("d")).unwrap().is_none());
        assert!(sockets.control(Some(&c)).unwrap().is_some());
        assert!(sockets.control(Some(&a)).is_err(), "the control socket has another path");
        let refused = sockets.control(None).map(drop).unwrap_err().to_string();
        assert!(refused.contains(&format!("add --control {}", c.display())), "{refused}");
        assert!(InheritedSockets::default().control(None).unwrap().is_none());
    }

    /// The export may end, and be added again.
    #[test]
    fn a_passed_socket_serves_more_than_one_export() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let sockets = passed(&[("vm1", &path)]);
        for _ in 0..2 {
            let endpoint = sockets.listener("vm1", &path).unwrap().unwrap();
            let _front_end = std::os::unix::net::UnixStream::connect(&path).unwrap();
            assert!(endpoint.accept().is_some_and(|accepted| accepted.is_ok()));
        }
        drop(sockets);
        assert!(path.exists(), "the service manager's socket is removed");
    }

    /// A socket that is passed without a name has the name of its unit, or none.
    #[test]
    fn each_use_of_a_passed_socket_has_its_own_rule() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let sockets = passed(&[("vm1", &path("a")), ("unit", &path("b")), ("control", &path("c"))]);
        let exports = [("vm1".to_owned(), path("x")), ("vm2".to_owned(), path("b"))];
        let exports = exports.each_ref().map(|(name, path)| (name.clone(), path.as_path()));
        let lines = |exports: &[(String, &Path)]| {
            LogCapture::lines_of(|| sockets.warn_of_unused(exports)).len()
        };
        assert_eq!([lines(&exports), lines(&exports[1..]), lines(&[])], [0, 1, 2]);
        let unnamed = passed(&[("unit", &path("d"))]);
        assert!(unnamed.control(Some(&path("d"))).unwrap().is_some(), "found by its path");
        let handed = sockets.hand_over_named(&mut PassedFds::default()).unwrap();
        assert!(handed.iter().map(|(name, _)| name.as_str()).eq(["vm1", "unit"]), "{handed:?}");
        let is_right = |state: &EndpointState| {
            matches!(state, EndpointState::Inherited { was_blocking: false, .. })
        };
        assert!(handed.iter().all(|(_, state)| is_right(state)), "the manager set it so");
        let endpoint = sockets.listener("vm1", &path("a")).unwrap().unwrap();
        for _ in 0..2 {
            unnamed.remember("vm1", &endpoint).unwrap();
            assert_eq!(unnamed.named.lock().len(), 2, "once");
        }
    }

    #[test]
    fn the_socket_of_an_option_has_one_number() {
        let endpoint = || Endpoint::Connection(std::os::unix::net::UnixStream::pair().unwrap().0);
        let sockets = InheritedSockets::from((5, endpoint()));
        let handed = |fd| sockets.hand_over(fd, &mut PassedFds::default()).unwrap().is_some();
        for fd in 4..7 {
            assert_eq!((sockets.has(fd), handed(fd)), (fd == 5, fd == 5), "{fd}");
        }
        assert!(sockets.take().is_some() && !sockets.has(5) && sockets.take().is_none());
        sockets.put(7, endpoint());
        assert!(sockets.has(7) && sockets.take().is_some());
    }
}
