//! Sockets that cannot be used, left-over sockets, and sockets of other programs.

use std::fs::{self, File, Permissions, set_permissions};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{
    READY, Refusals, Running, TestFolders, bench, ringhaul, ringhaul_under, run, serve,
};
use ringhaul_kit::service_manager::ServiceManager;
use rustix::net::{AddressFamily, SocketType};
use rustix::process::Signal;
use vhost::VhostBackend;
use vhost::vhost_user::Frontend;

use crate::{DISK_BYTES, is_root, test_folders, thread_file};

/// The number of the inherited descriptor.
const FD: &str = "5";

/// The name of the control thread, cut off by the kernel after 15 bytes.
const CONTROL_THREAD: &str = "ringhaul-contro";

/// Only a hang takes this long.
const LIMIT: Duration = Duration::from_secs(60);

/// Some I/O that takes a moment.
const SOME_IO: &str = "--rw randrw --number_ios 200 --iodepth 8 --size 4m --verify";

/// A command for `ringhaul serve` of a new disk that inherits `descriptor` as [`FD`].
fn serve_fd(folders: &TestFolders, descriptor: OwnedFd) -> Result<Command> {
    let file = folders.disk("inherited.img", DISK_BYTES)?;
    let mut command =
        ringhaul_under(&["sh", "-c", &format!("exec \"$@\" {FD}<&0 </dev/null"), "sh"])?;
    command.args(["serve", "--fd", FD, "--blk-file"]).arg(file).stdin(Stdio::from(descriptor));
    Ok(command)
}

#[test]
fn socket_paths_that_do_not_work_are_refused() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let mut refusals = Refusals::default();

    let regular = folders.socket("regular");
    fs::write(&regular, "precious")?;
    let words = [&*regular.to_string_lossy(), "not a socket", "choose another --socket-path"];
    refusals.check("regular file", serve(&regular, &file), &words);
    ensure!(fs::read(&regular)? == b"precious", "the file was touched");

    let folder = folders.socket("");
    refusals.check("folder", serve(&folder, &file), &["not a socket", "--socket-path"]);

    let astray = folders.socket("missing/disk.sock");
    let words = [&*astray.to_string_lossy(), "does not exist", "mkdir -p"];
    refusals.check("missing folder", serve(&astray, &file), &words);

    // sun_path has 108 bytes, one of which is the terminator.
    let long = folders.socket(&"x".repeat(108));
    refusals.check("long", serve(&long, &file), &["too long", "107", "--socket-path"]);

    let mut nowhere = ringhaul()?;
    nowhere.arg("serve").arg("--blk-file").arg(&file);
    refusals.check("none", Ok(nowhere), &["no socket is given", "--socket-path", "--fd"]);
    refusals.finish()
}

#[test]
fn a_folder_that_may_not_be_written_is_refused() -> Result<()> {
    let folders = test_folders()?;
    let folder = folders.socket("locked");
    fs::create_dir(&folder)?;
    set_permissions(&folder, Permissions::from_mode(0o555))?;
    let without_override: &[&str] =
        if is_root() { &["setpriv", "--bounding-set", "-dac_override"] } else { &[] };
    let mut command = ringhaul_under(without_override)?;
    command.arg("--socket-path").arg(folder.join("disk.sock")).args(["--disk", "null,size=1G"]);
    run(&mut command)?.expect_refusal(&["disk.sock", "Permission denied", "--socket-path"])
}

#[test]
fn a_socket_in_use_is_refused() -> Result<()> {
    let folders = test_folders()?;
    let (file, other) = (folders.disk("a.img", DISK_BYTES)?, folders.disk("b.img", DISK_BYTES)?);
    let socket = folders.socket("disk.sock");
    let mut daemon = Running::serve(&mut serve(&socket, &file)?)?;
    let words = ["disk.sock", "another program listens", "choose another --socket-path"];
    let mut refusals = Refusals::default();
    refusals.check("in use", serve(&socket, &other), &words);
    refusals.finish()?;
    run(&mut bench(&socket, SOME_IO)?)?.expect_code(0)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// A killed process listens until its last thread has ended. A supervisor that is not its parent
/// cannot wait for that.
#[test]
fn a_start_right_after_a_kill_waits_for_the_sockets_of_the_dying_process() -> Result<()> {
    let folders = test_folders()?;
    let (file, socket) = (folders.disk("disk.img", DISK_BYTES)?, folders.socket("disk.sock"));
    let start = || -> Result<Running> {
        let mut command = serve(&socket, &file)?;
        Running::serve(command.arg("--control").arg(folders.socket("control")))
    };
    let mut daemon = start()?;
    for _ in 0..6 {
        daemon.signal(Signal::KILL)?;
        let next = start()?;
        daemon.finish()?;
        daemon = next;
    }
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn a_left_over_socket_is_replaced() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let socket = folders.socket("disk.sock");
    let relative = Path::new("disk.sock");
    for (given, folder) in [(&*socket, None), (relative, socket.parent())] {
        let command = || -> Result<Command> {
            let mut command = serve(given, &file)?;
            folder.into_iter().for_each(|folder| _ = command.current_dir(folder));
            Ok(command)
        };
        let mut killed = Running::serve(&mut command()?)?;
        killed.signal(Signal::KILL)?;
        killed.finish()?;
        ensure!(socket.exists(), "there is no socket left over");

        let mut daemon = Running::start(&mut command()?)?;
        let line = daemon.wait_for("replacing it")?;
        ensure!(line.contains("disk.sock"), "{line}");
        daemon.wait_for(READY)?;
        run(&mut bench(&socket, SOME_IO)?)?.expect_code(0)?;
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0)?;
        ensure!(!socket.exists(), "the socket was left behind");
    }
    Ok(())
}

#[test]
fn a_socket_of_another_program_is_not_removed() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let socket = folders.socket("disk.sock");
    let mut daemon = Running::serve(&mut serve(&socket, &file)?)?;
    fs::rename(&socket, folders.socket("moved.sock"))?;
    let _listener = UnixListener::bind(&socket).context("listening")?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    ensure!(socket.exists(), "the socket of another program was removed");
    Ok(())
}

#[test]
fn descriptors_that_are_no_sockets_are_refused() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let mut refusals = Refusals::default();
    let by_number = |number: &str| -> Result<Command> {
        let mut command = ringhaul()?;
        command.args(["serve", "--fd", number, "--blk-file"]).arg(&file);
        Ok(command)
    };
    let words = ["--fd", "must be an open Unix stream socket"];
    refusals.check("closed", by_number("77"), &["--fd 77", "Bad file descriptor", words[1]]);
    refusals.check("stdin", by_number("0"), &words);
    refusals.check("no number", by_number("socket"), &["--fd", "socket"]);
    refusals.check("negative", by_number("-1"), &["--fd -1", words[1]]);

    let stream = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None)?;
    let tcp = TcpListener::bind(("127.0.0.1", 0)).context("listening")?;
    for (what, descriptor) in [
        ("regular file", OwnedFd::from(File::open(&file)?)),
        ("TCP", tcp.into()),
        ("datagrams", UnixDatagram::pair()?.0.into()),
        ("neither connected nor listening", stream),
    ] {
        refusals.check(what, serve_fd(&folders, descriptor), &words);
    }
    refusals.finish()
}

/// The descriptor is a connection: a management program has accepted the front-end.
#[test]
fn a_connection_is_served_and_the_daemon_ends_with_it() -> Result<()> {
    let folders = test_folders()?;
    let path = folders.socket("manager.sock");
    let listener = UnixListener::bind(&path).context("listening")?;
    let client = Running::start(&mut bench(&path, SOME_IO)?)?;
    let (connection, _) = listener.accept().context("accepting the load generator")?;
    let mut command = serve_fd(&folders, connection.into())?;
    let mut daemon = Running::start(&mut command)?;
    // `command` holds a copy of the descriptor, and the connection ends with the last copy.
    drop(command);
    client.finish()?.expect_code(0)?;
    daemon.wait_for("the front-end has disconnected")?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// The creator of the socket decides if it blocks, and may change that at any time.
#[test]
fn a_connection_may_be_non_blocking() -> Result<()> {
    let folders = test_folders()?;
    let (ours, theirs) = UnixStream::pair()?;
    theirs.set_nonblocking(true)?;
    let shared = theirs.try_clone()?;
    let mut command = serve_fd(&folders, theirs.into())?;
    let mut daemon = Running::serve(&mut command)?;
    drop(command);
    let frontend = Frontend::from_stream(ours.try_clone()?, 1);
    frontend.set_owner().context("SET_OWNER")?;
    // A message in two pieces, with a pause in between that lets the daemon fall asleep.
    let header = [2, 1, 8].map(u32::to_ne_bytes).concat();
    rustix::io::write(&ours, &header)?;
    wait_asleep(&daemon)?;
    rustix::io::write(&ours, &[0; 8])?;
    shared.set_nonblocking(false)?;
    ensure!(frontend.get_features().context("GET_FEATURES")? != 0, "nothing is offered");
    drop((frontend, ours));
    daemon.wait_for("the front-end has disconnected")?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// Waits until the control thread is found asleep a hundred times in a row.
fn wait_asleep(daemon: &Running) -> Result<()> {
    let control = thread_file(daemon, CONTROL_THREAD, "stat")?;
    let start = Instant::now();
    let mut asleep = 0;
    while asleep < 100 {
        ensure!(start.elapsed() < LIMIT, "the control thread does not sleep");
        let stat = fs::read_to_string(&control)?;
        asleep = if stat.contains(") S ") { asleep + 1 } else { 0 };
        std::thread::yield_now();
    }
    Ok(())
}

/// The inherited descriptor has no other copy, so the peer sees the end while other exports are
/// served.
#[test]
fn the_end_of_an_inherited_connection_is_seen() -> Result<()> {
    let folders = test_folders()?;
    let (mut ours, theirs) = UnixStream::pair()?;
    let (other, file) = (folders.socket("other.sock"), folders.disk("other.img", DISK_BYTES)?);
    let mut command = serve_fd(&folders, theirs.into())?;
    let export = format!("socket-path={},blk-file={}", other.display(), file.display());
    command.args(["--export", &export]);
    let mut daemon = Running::serve(&mut command)?;
    drop(command);
    ours.set_read_timeout(Some(LIMIT))?;
    ours.write_all(b"GET / HTTP/1.0\r\n")?;
    daemon.wait_for("disconnected the front-end")?;
    let mut rest = Vec::new();
    match ours.read_to_end(&mut rest) {
        Ok(0) => {}
        // The daemon did not read all bytes.
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        other => anyhow::bail!("the connection is open: {other:?}"),
    }
    run(&mut bench(&other, SOME_IO)?)?.expect_code(0)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// The service manager could keep its descriptors, but nothing reopens the connection.
#[test]
fn an_inherited_connection_is_not_kept_over_a_kill() -> Result<()> {
    let folders = test_folders()?;
    let (_ours, theirs) = UnixStream::pair()?;
    let mut command = serve_fd(&folders, theirs.into())?;
    command.args(["--keep-connections", "on"]);
    let manager = ServiceManager::listen(&folders.socket("manager"), &mut command)?;
    let mut daemon = Running::start(&mut command)?;
    daemon.wait_for(
        "the front-end does not survive a kill of the daemon: its connection is that of --fd",
    )?;
    daemon.signal(Signal::TERM)?;
    manager.wait_for("STOPPING=1\n").and_then(|messages| {
        ensure!(!messages.iter().any(|text| text.contains("FDSTORE=1")), "{messages:?}");
        Ok(())
    })?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn a_connection_that_closes_early_ends_the_daemon_too() -> Result<()> {
    let folders = test_folders()?;
    let (ours, theirs) = UnixStream::pair()?;
    let mut command = serve_fd(&folders, theirs.into())?;
    let daemon = Running::start(&mut command)?;
    drop(command);
    let frontend = Frontend::from_stream(ours, 1);
    frontend.set_owner().context("SET_OWNER")?;
    let features = frontend.get_features().context("GET_FEATURES")?;
    ensure!(features != 0, "the daemon offers nothing");
    drop(frontend);
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn sigterm_ends_a_daemon_on_a_connection() -> Result<()> {
    let folders = test_folders()?;
    let (_ours, theirs) = UnixStream::pair()?;
    let mut daemon = Running::serve(&mut serve_fd(&folders, theirs.into())?)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn a_listening_descriptor_serves_one_client_after_the_other() -> Result<()> {
    let folders = test_folders()?;
    let path = folders.socket("manager.sock");
    let listener = UnixListener::bind(&path).context("listening")?;
    let mut daemon = Running::serve(&mut serve_fd(&folders, listener.into())?)?;
    for client in 1..=2 {
        run(&mut bench(&path, SOME_IO)?)?
            .expect_code(0)
            .with_context(|| format!("client {client}"))?;
    }
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    ensure!(Path::new(&path).exists(), "a socket that the daemon did not make was removed");
    Ok(())
}
