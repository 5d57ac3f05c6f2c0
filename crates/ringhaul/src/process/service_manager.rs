//! Notifications to a service manager, if one listens: see sd_notify(3).

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The variable with the manager's socket; `@` stands for the zero byte that abstract names begin
/// with.
const VARIABLE: &str = "NOTIFY_SOCKET";

/// Reports that front-ends can connect: a unit of `Type=notify` has started.
pub(crate) fn ready() {
    tell("READY=1\n", "that the daemon is ready");
}

/// Reports that the daemon ends as requested.
pub(crate) fn stopping() {
    tell("STOPPING=1\n", "that the daemon ends");
}

/// Reports that the service continues in another process. Otherwise the manager takes the end of
/// this process for the end of the service.
pub(crate) fn main_process(process: u32) {
    tell(
        &format!("MAINPID={process}\n"),
        &format!("that the service continues in process {process}"),
    );
}

fn tell(text: &str, what: &str) {
    let Some(path) = std::env::var(VARIABLE).ok().filter(|path| !path.is_empty()) else { return };
    if let Err(error) = send(&path, text) {
        tracing::warn!("cannot notify the service manager at {path} {what}: {error}");
    }
}

fn send(path: &str, text: &str) -> io::Result<()> {
    let address = match path.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(path)?,
    };
    let socket = UnixDatagram::unbound()?;
    // A manager that does not read must not delay the end.
    socket.set_nonblocking(true)?;
    socket.send_to_addr(text.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_names_are_reached() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify").display().to_string();
        let name = format!("ringhaul-notify-test-{}", std::process::id());
        let by_name = SocketAddr::from_abstract_name(&name).unwrap();
        let sockets = [UnixDatagram::bind(&path), UnixDatagram::bind_addr(&by_name)];
        for (socket, path) in sockets.into_iter().zip([path, format!("@{name}")]) {
            send(&path, "MAINPID=7\n").unwrap();
            let mut buffer = [0; 64];
            let bytes = socket.unwrap().recv(&mut buffer).unwrap();
            assert_eq!(buffer[..bytes], *b"MAINPID=7\n");
        }
        assert!(send(&folder.path().display().to_string(), "").is_err());
    }
}
