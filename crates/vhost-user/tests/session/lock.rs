//! The lock of a session: queues run only while the session holds it.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use blockio::disk::LateLock;
use blockio::disk::hand_over::DiskHandOver;
use blockio::{DiskOptions, DiskSource};
use vhost_user::message::{Request, RingAddresses};
use vhost_user::{PassedFds, RunLock, Session};

use crate::scene::{Frontend, QUEUE_SIZE, Scene, USER_ADDR, new_eventfd};

struct DiskLock(LateLock);

impl RunLock for DiskLock {
    fn take(&self, turn: u64) -> io::Result<()> {
        self.0.take(turn).map_err(io::Error::other)
    }

    fn release(&self, turn: u64) -> io::Result<()> {
        self.0.release(turn)
    }
}

/// A lock that another program keeps.
struct Kept;

impl RunLock for Kept {
    fn take(&self, _: u64) -> io::Result<()> {
        Err(io::Error::other("another program keeps it"))
    }

    fn release(&self, _: u64) -> io::Result<()> {
        Ok(())
    }
}

fn late(disk: &Path) -> LateLock {
    let options = DiskOptions { no_lock: true, ..DiskOptions::default() };
    DiskSource::file(disk, &options).unwrap().late_lock().unwrap()
}

fn is_free(disk: &Path) -> bool {
    let options = DiskOptions { at_once: true, ..DiskOptions::default() };
    DiskSource::file(disk, &options).is_ok()
}

/// A session with this lock, whose first queue starts with the next message.
fn attach(scene: &mut Scene, lock: Arc<dyn RunLock>) -> (Session, Frontend) {
    scene.run_lock = Some(lock);
    let (mut session, mut frontend) = scene.attach();
    scene.negotiate(&mut session, &mut frontend);
    scene.share_memory(&mut session, &mut frontend);
    let addresses = RingAddresses {
        desc_table: USER_ADDR,
        avail_ring: USER_ADDR + 0x1000,
        used_ring: USER_ADDR + 0x2000,
    };
    let kick = new_eventfd();
    for (request, fds) in [
        (Request::SetVringNum { index: 0, size: QUEUE_SIZE.into() }, &[][..]),
        (Request::SetVringAddr { index: 0, addresses, log: None }, &[]),
        (Request::SetVringKick { index: 0, has_fd: true }, &[&kick]),
    ] {
        scene.send_checked(&mut session, &mut frontend, &request, fds);
    }
    (session, frontend)
}

/// Waits for the answer, which depends on another thread.
fn await_answer(scene: &mut Scene, session: &mut Session, frontend: &mut Frontend) {
    loop {
        assert_eq!(scene.drive_all(session), None);
        if frontend.receive().is_some() {
            return;
        }
        scene.await_due(session);
    }
}

const START: Request = Request::SetVringEnable { index: 0, value: 1 };

#[test]
fn a_queue_waits_for_the_lock_and_releases_it_before_its_stop_is_answered() {
    let disk = tempfile::NamedTempFile::new().unwrap();
    disk.as_file().set_len(1 << 20).unwrap();
    let other = late(disk.path());
    other.take(1).unwrap();
    let mut scene = Scene::new();
    let (mut session, mut frontend) = attach(&mut scene, Arc::new(DiskLock(late(disk.path()))));
    frontend.send(&START, true, &[]);
    assert_eq!(scene.drive_all(&mut session), None);
    assert_eq!(scene.io.io().tasks(), 0, "another program has the lock");
    assert!(frontend.receive().is_none());
    other.release(1).unwrap();
    await_answer(&mut scene, &mut session, &mut frontend);
    assert_eq!(scene.io.io().tasks(), 1, "the queue runs");
    assert!(!is_free(disk.path()));

    frontend.send(&Request::GetVringBase { index: 0 }, false, &[]);
    await_answer(&mut scene, &mut session, &mut frontend);
    assert!(is_free(disk.path()), "the next program may write after the answer");
}

/// A lock that is free at once.
struct Free;

impl RunLock for Free {
    fn take(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn release(&self, _: u64) -> io::Result<()> {
        Ok(())
    }
}

/// The thread of the lock may answer before the session awaits the answer.
#[test]
fn a_lock_that_is_taken_at_once_starts_the_queue() {
    for _ in 0..500 {
        let mut scene = Scene::new();
        let (mut session, mut frontend) = attach(&mut scene, Arc::new(Free));
        frontend.send(&START, true, &[]);
        await_answer(&mut scene, &mut session, &mut frontend);
        drop(frontend);
        while scene.drive_all(&mut session).is_none() {
            scene.await_due(&session);
        }
    }
}

/// Another process may serve the disk next, which this process must not unlock then.
#[test]
fn the_end_of_a_session_waits_for_the_release() {
    let disk = tempfile::NamedTempFile::new().unwrap();
    disk.as_file().set_len(1 << 20).unwrap();
    let mut scene = Scene::new();
    let (mut session, mut frontend) = attach(&mut scene, Arc::new(DiskLock(late(disk.path()))));
    frontend.send(&START, true, &[]);
    await_answer(&mut scene, &mut session, &mut frontend);
    drop(frontend);
    while scene.drive_all(&mut session).is_none() {
        scene.await_due(&session);
    }
    assert!(is_free(disk.path()), "the end was too early");
}

/// The end of a session, which depends on another thread.
fn await_end(scene: &mut Scene, session: &mut Session) -> String {
    loop {
        match scene.drive_all(session) {
            Some(end) => return format!("{end:?}"),
            None => scene.await_due(session),
        }
    }
}

#[test]
fn a_session_without_its_lock_ends_with_the_reason() {
    let mut scene = Scene::new();
    let (mut session, frontend) = attach(&mut scene, Arc::new(Kept));
    frontend.send(&START, true, &[]);
    let end = await_end(&mut scene, &mut session);
    assert!(
        end.contains(
            "its queues cannot run without the lock of the disk: another program keeps it"
        ),
        "{end}"
    );
    assert_eq!(scene.io.io().tasks(), 0);
}

/// A lock of a disk that cannot write its caches.
struct Lossy;

impl RunLock for Lossy {
    fn take(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn release(&self, _: u64) -> io::Result<()> {
        Err(io::Error::other("written data may be lost"))
    }
}

/// The disk may have no lock that keeps another host away. The host begins after the answer.
#[test]
fn the_stop_of_a_queue_is_not_answered_after_a_loss() {
    let mut scene = Scene::new();
    let (mut session, mut frontend) = attach(&mut scene, Arc::new(Lossy));
    frontend.send(&START, true, &[]);
    await_answer(&mut scene, &mut session, &mut frontend);
    frontend.send(&Request::GetVringBase { index: 0 }, false, &[]);
    let end = await_end(&mut scene, &mut session);
    let expected = "must not continue on another host: written data may be lost";
    assert!(end.contains(expected), "{end}");
    assert!(frontend.receive().is_none(), "it is answered");
}

/// The lock of the process that has the disk now.
struct Present(Mutex<DiskLock>);

impl RunLock for Present {
    fn take(&self, turn: u64) -> io::Result<()> {
        self.0.lock().unwrap().take(turn)
    }

    fn release(&self, turn: u64) -> io::Result<()> {
        self.0.lock().unwrap().release(turn)
    }
}

/// The lock comes with the open file, and the next process has to release it.
#[test]
fn a_session_that_is_taken_over_releases_its_lock() {
    for (is_disabled, leaves) in [(true, true), (false, true), (true, false), (false, false)] {
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().set_len(1 << 20).unwrap();
        let options = DiskOptions { no_lock: true, ..DiskOptions::default() };
        let source = DiskSource::file(disk.path(), &options).unwrap();
        let file = source.hand_over().descriptor().unwrap().try_clone_to_owned().unwrap();
        let lock = Arc::new(Present(Mutex::new(DiskLock(source.late_lock().unwrap()))));
        drop(source);
        let mut scene = Scene::new();
        let (mut old, mut frontend) = attach(&mut scene, lock.clone());
        frontend.send(&START, true, &[]);
        await_answer(&mut scene, &mut old, &mut frontend);
        if is_disabled {
            let request = Request::SetVringEnable { index: 0, value: 0 };
            scene.send_checked(&mut old, &mut frontend, &request, &[]);
        }
        old.begin_pause();
        assert_eq!(scene.drive_all(&mut old), None);
        let mut fds = PassedFds::default();
        let state = serde_json::to_string(&old.hand_over(&mut fds).unwrap()).unwrap();
        let source = DiskHandOver::open(File::from(file), disk.path(), &options).unwrap();
        *lock.0.lock().unwrap() = DiskLock(source.late_lock().unwrap());
        let state = serde_json::from_str(&state).unwrap();
        let session = Session::take_over(state, scene.setup(), &mut fds, scene.now);
        let mut session = session.unwrap();
        assert_eq!(scene.drive_all(&mut session), None);
        assert!(!is_free(disk.path()), "the file has brought its lock");
        if leaves {
            drop(frontend);
            session.begin_resume();
            await_end(&mut scene, &mut session);
        } else {
            session.begin_resume();
            frontend.send(&Request::GetVringBase { index: 0 }, false, &[]);
            await_answer(&mut scene, &mut session, &mut frontend);
        }
        assert!(is_free(disk.path()), "disabled: {is_disabled}, hangs up: {leaves}");
    }
}
