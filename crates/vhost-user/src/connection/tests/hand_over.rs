//! Sessions that are handed over from one process to another.

use std::collections::BTreeMap;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use device::scsi::config::ScsiOptions;
use rustix::event::PollFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::super::super::channel::{Channel, MESSAGE_LIMIT};
use super::super::super::session::{End, Session, SessionProgress};
use super::super::super::session_state::SessionState;
use super::inflight::SECOND_VERSION;
use super::*;
use crate::passed_fds::PassedFds;

/// Takes the session of `scene` over in another process, with a disk of `disk_bytes`.
fn take_over(scene: &mut Scene, disk_bytes: u64) -> (Scene, Session, UnixStream) {
    let source = DiskSource::null(disk_bytes, &DiskOptions::default()).unwrap();
    let options = BlkOptions { num_queues: QUEUES, ..BlkOptions::default() };
    take_over_with(scene, Device::blk(source, options, Arc::new(LogEvents::new("test"))))
}

/// Takes the session of `scene` over in another process, which has this device.
fn take_over_with(scene: &mut Scene, device: Device) -> (Scene, Session, UnixStream) {
    scene.connection.begin_pause();
    scene.settle().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut channel = Channel::new(ours, Arc::clone(&scene.examiner));
    // The old process leaves it lent.
    channel.lend(true);
    let mut fds = PassedFds::default();
    let state = SessionState::new(&channel, &scene.connection, true, &mut fds).unwrap();
    let other = Scene::with_device(device, 0);
    let setup = other.connection.setup.clone();
    let session = Session::take_over(state, setup, &mut fds, Instant::now()).unwrap();
    (other, session, theirs)
}

/// Resumes the session, and returns its first progress.
fn resume(scene: &mut Scene, session: &mut Session) -> SessionProgress {
    session.begin_resume();
    loop {
        match session.progress(Instant::now()) {
            SessionProgress::Waiting => scene.await_wake(),
            other => return other,
        }
        assert!(!session.has_resumed() || session.is_ending(), "it has not said so");
    }
}

fn end(mut scene: Scene, mut session: Session) {
    session.begin_end();
    while !matches!(session.progress(Instant::now()), SessionProgress::Ended(_)) {
        scene.await_wake();
    }
}

/// An earlier notification would make the front-end query a process that does not serve yet.
#[test]
fn another_size_is_told_when_the_queues_continue() {
    for (bytes, is_told) in [(1 << 20, false), (2 << 20, true)] {
        let mut scene = Scene::new(PROTOCOL_FEATURES);
        let (ours, mut news) = UnixStream::pair().unwrap();
        news.set_nonblocking(true).unwrap();
        assert_eq!(scene.send(&Request::SetBackendReqFd, vec![ours.into()]), Ended::Done);
        scene.start();
        let (mut other, mut session, _front_end) = take_over(&mut scene, bytes);
        let nothing = news.read(&mut [0; 64]).unwrap_err();
        assert_eq!(nothing.kind(), ErrorKind::WouldBlock);
        assert_eq!(resume(&mut other, &mut session), SessionProgress::Handled);
        assert_eq!(news.read(&mut [0; 64]).is_ok_and(|bytes| bytes == 12), is_told);
        end(other, session);
        scene.end();
    }
}

/// virtio_uml sends a socket in place of an eventfd.
#[test]
fn calls_reach_a_socket_before_and_after() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    let (mut calls, theirs) = UnixStream::pair().unwrap();
    let set_call = Request::SetVringCall { index: 1, has_fd: true };
    assert_eq!(scene.send(&set_call, vec![theirs.into()]), Ended::Done);
    // A queue makes a call when it starts.
    scene.start();
    scene.io.turn(Wait::Never).unwrap();
    read_call(&mut calls);
    let (mut other, mut session, _front_end) = take_over(&mut scene, 1 << 20);
    scene.end();
    assert_eq!(resume(&mut other, &mut session), SessionProgress::Handled);
    other.io.turn(Wait::Never).unwrap();
    read_call(&mut calls);
    end(other, session);
    // Both processes have closed the socket.
    while calls.read(&mut [0; 8]).unwrap() > 0 {}
}

/// Reads a call, which a thread may deliver late.
fn read_call(calls: &mut UnixStream) {
    calls.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    calls.read_exact(&mut [0; 8]).unwrap();
}

#[test]
fn a_ring_outside_the_memory_stops_alone() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    scene.start();
    let nowhere = addresses(USER_ADDR + MEMORY_BYTES);
    scene.connection.rings[1].settings.addresses = Some(nowhere);
    let (mut other, mut session, _front_end) = take_over(&mut scene, 1 << 20);
    let lost = resume(&mut other, &mut session);
    assert!(
        matches!(&lost, SessionProgress::RingLost(why) if why.contains("not in its memory")),
        "{lost:?}"
    );
    assert_eq!(session.next_avail(0), Some(0));
    assert_eq!(states(&session), ["Running", "Stopped"]);
    end(other, session);
    scene.end();
}

/// Otherwise the guest would hang for ever; a front-end that connects again receives the reason.
#[test]
fn a_ring_whose_inflight_region_makes_no_sense_ends_the_connection() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    let made = scene.send(&Request::GetInflightFd(inflight_area()), vec![]);
    let Ended::Answer(body) = made else { panic!("it was refused: {made:?}") };
    let (area, file) = (InflightArea::decode(&body).unwrap(), scene.peer_fd.take().unwrap());
    let brought = file.try_clone().unwrap();
    assert_eq!(scene.send(&Request::SetInflightFd(area), vec![brought]), Ended::Done);
    scene.start();
    let (mut other, mut session, _front_end) = take_over(&mut scene, 1 << 20);
    rustix::io::pwrite(&file, &[77, 0], SECOND_VERSION).unwrap();
    let ended = resume(&mut other, &mut session);
    assert!(
        matches!(&ended, SessionProgress::Ended(End::Dropped(why)) if why.contains("version 77")),
        "{ended:?}"
    );
    assert_eq!((other.io.io().ops(), other.io.io().tasks()), (0, 0));
    scene.end();
}

/// Makes a device without units.
fn scsi() -> Device {
    let options = ScsiOptions { num_queues: QUEUES, ..ScsiOptions::default() };
    Device::scsi(options, Arc::new(LogEvents::new("test")))
}

fn states(session: &Session) -> Vec<String> {
    let queues = session.describe().queues.into_iter();
    queues.map(|queue| format!("{:?}", queue.state)).collect()
}

/// An IoThread may be busy for a long time.
#[test]
fn a_hang_up_is_seen_before_all_rings_continue() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    scene.start();
    let (other, mut session, front_end) = take_over(&mut scene, 1 << 20);
    session.begin_resume();
    assert_eq!(session.progress(Instant::now()), SessionProgress::Waiting);
    assert_eq!(session.interest(), Some(PollFlags::empty()));
    drop(front_end);
    assert_eq!(session.progress(Instant::now()), SessionProgress::Waiting);
    assert!(session.is_ending());
    end(other, session);
    scene.end();
}

/// The guest may already be served by another process.
#[test]
fn a_hang_up_stops_all_rings_though_the_one_for_control_has_not() {
    for is_end in [false, true] {
        let mut scene = Scene::with_device(scsi(), PROTOCOL_FEATURES & !protocol_feature::CONFIG);
        scene.start();
        let (mut other, mut session, front_end) = take_over_with(&mut scene, scsi());
        assert_eq!(resume(&mut other, &mut session), SessionProgress::Handled);
        let begin = if is_end { Session::begin_end } else { Session::begin_pause };
        begin(&mut session);
        assert_eq!(session.progress(Instant::now()), SessionProgress::Waiting);
        assert_eq!(states(&session), ["Stopping", "Running", "Running", "Running"]);
        assert_eq!(session.interest(), Some(PollFlags::empty()), "nobody would see the hang-up");
        drop(front_end);
        assert_eq!(session.progress(Instant::now()), SessionProgress::Waiting);
        assert_eq!(states(&session), ["Stopping"; 4]);
        assert_eq!(session.interest(), None, "it would be seen again and again");
        while !(is_end || session.is_paused()) {
            other.io.turn(Wait::Never).unwrap();
            assert_eq!(session.progress(Instant::now()), SessionProgress::Waiting);
        }
        if !is_end {
            // No ring may start again, not even for a moment.
            session.begin_resume();
            assert!(matches!(session.progress(Instant::now()), SessionProgress::Ended(_)));
        }
        end(other, session);
        scene.end();
    }
}

/// The driver can still end its tasks in the remaining rings.
#[test]
fn task_management_continues_without_a_ring_that_is_lost() {
    // The second one begins in the memory, so that only its IoThread refuses it.
    for place in [MEMORY_BYTES, MEMORY_BYTES - 0x2000 - 16] {
        let mut scene = Scene::with_device(scsi(), PROTOCOL_FEATURES & !protocol_feature::CONFIG);
        scene.start();
        scene.connection.rings[3].settings.addresses = Some(addresses(USER_ADDR + place));
        let (mut other, mut session, _front_end) = take_over_with(&mut scene, scsi());
        let lost = resume(&mut other, &mut session);
        assert!(matches!(lost, SessionProgress::RingLost(_)), "{lost:?}");
        assert_eq!(states(&session), ["Running", "Running", "Running", "Stopped"]);
        end(other, session);
        scene.end();
    }
}

/// Task management concerns the requests in all other rings, so it begins last and ends first.
#[test]
fn a_pause_that_is_given_up_stops_no_ring_of_requests() {
    let mut scene = Scene::with_device(scsi(), PROTOCOL_FEATURES & !protocol_feature::CONFIG);
    scene.start();
    let (mut other, mut session, _front_end) = take_over_with(&mut scene, scsi());
    session.begin_resume();
    assert_eq!(session.progress(Instant::now()), SessionProgress::Waiting);
    assert_eq!(states(&session), ["Stopped", "Starting", "Starting", "Starting"]);
    assert_eq!(resume(&mut other, &mut session), SessionProgress::Handled);
    session.begin_pause();
    assert_eq!(session.progress(Instant::now()), SessionProgress::Waiting);
    assert_eq!(states(&session), ["Stopping", "Running", "Running", "Running"]);
    session.begin_resume();
    while session.progress(Instant::now()) == SessionProgress::Waiting {
        assert_eq!(states(&session)[1..], ["Running"; 3]);
        other.await_wake();
    }
    assert!(session.has_resumed());
    assert_eq!(states(&session), ["Running"; 4]);
    end(other, session);
    scene.end();
}

/// Hands an idle session over to another process, where it resumes.
fn hand_over(session: &mut Session, now: Instant) -> (Scene, Session) {
    session.begin_pause();
    while !session.is_paused() {
        let _ = session.progress(now);
    }
    let mut fds = PassedFds::default();
    let state = session.hand_over(&mut fds).unwrap();
    // The state is serialised, as between processes.
    let state = serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap();
    let other = Scene::new(PROTOCOL_FEATURES);
    let setup = other.connection.setup.clone();
    let mut next = Session::take_over(state, setup, &mut fds, now).unwrap();
    next.begin_resume();
    while !next.has_resumed() {
        let _ = next.progress(now);
    }
    (other, next)
}

/// The time that has passed in the old process does not count.
#[test]
fn the_rest_of_a_message_must_come_soon_after_a_takeover() {
    let (old, now) = (Scene::new(PROTOCOL_FEATURES), Instant::now());
    let (ours, mut front_end) = UnixStream::pair().unwrap();
    let setup = old.connection.setup.clone();
    let mut session = Session::new(ours, setup, now).without_silence_limit();
    front_end.write_all(&[1, 0, 0]).unwrap();
    assert_eq!(session.progress(now), SessionProgress::Waiting);
    let later = now + MESSAGE_LIMIT - Duration::from_secs(1);
    let (_other, mut next) = hand_over(&mut session, later);
    let end = later + MESSAGE_LIMIT;
    assert_eq!(next.deadline(), Some(end));
    assert_eq!(next.progress(end - Duration::from_secs(1)), SessionProgress::Waiting);
    let late = next.progress(end);
    assert!(matches!(late, SessionProgress::Ended(End::Dropped(_))), "{late:?}");
    old.end();
}

/// Front-ends may be silent for days, and must not lose their connection a minute after an upgrade.
#[test]
fn only_a_front_end_that_has_said_nothing_yet_must_speak_soon() {
    for has_spoken in [false, true] {
        let (old, now) = (Scene::new(PROTOCOL_FEATURES), Instant::now());
        let (ours, mut front_end) = UnixStream::pair().unwrap();
        let mut session = Session::new(ours, old.connection.setup.clone(), now);
        assert!(session.deadline().is_some());
        if has_spoken {
            let (code, body) = Request::GetFeatures.encode();
            let header = Header::new(code, body.len()).encode();
            front_end.write_all(&[&header[..], &body].concat()).unwrap();
        }
        let expected = if has_spoken { SessionProgress::Handled } else { SessionProgress::Waiting };
        assert_eq!(session.progress(now), expected);
        assert_eq!(session.deadline().is_none(), has_spoken);
        let (other, mut next) = hand_over(&mut session, now);
        assert_eq!(next.deadline().is_none(), has_spoken);
        let later = next.progress(now + Duration::from_secs(3600));
        let is_over = matches!(later, SessionProgress::Ended(End::Dropped(_)));
        assert_eq!(is_over, !has_spoken, "{later:?}");
        if has_spoken {
            end(other, next);
        }
        old.end();
    }
}

/// The new process has the socket, too.
#[test]
fn only_the_process_that_continues_a_session_closes_its_connection() {
    for has_resumed in [false, true] {
        let mut scene = Scene::new(PROTOCOL_FEATURES);
        scene.start();
        scene.connection.begin_pause();
        scene.settle().unwrap();
        let (ours, mut front_end) = UnixStream::pair().unwrap();
        front_end.set_nonblocking(true).unwrap();
        let mut old = Channel::new(ours, Arc::clone(&scene.examiner));
        old.lend(true);
        let mut fds = PassedFds::default();
        let state = SessionState::new(&old, &scene.connection, true, &mut fds).unwrap();
        let mut other = Scene::new(PROTOCOL_FEATURES);
        let setup = other.connection.setup.clone();
        let mut session = Session::take_over(state, setup, &mut fds, Instant::now()).unwrap();
        if has_resumed {
            assert_eq!(resume(&mut other, &mut session), SessionProgress::Handled);
            end(other, session);
        } else {
            drop(session);
        }
        let is_closed = matches!(front_end.read(&mut [0; 1]), Ok(0));
        assert_eq!(is_closed, has_resumed);
        scene.end();
    }
}

/// The front-end would use features that the new device does not carry out.
#[test]
fn a_session_with_features_that_are_not_offered_is_refused() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    scene.connection.begin_pause();
    scene.settle().unwrap();
    let mut channel = Channel::new(UnixStream::pair().unwrap().0, Arc::clone(&scene.examiner));
    channel.lend(true);
    let mut fds = PassedFds::default();
    let state = SessionState::new(&channel, &scene.connection, true, &mut fds).unwrap();
    // This device has no configuration space that a driver changes.
    let other = Scene::with_device(scsi(), 0);
    let setup = other.connection.setup.clone();
    let refused = Session::take_over(state, setup, &mut fds, Instant::now());
    let error = refused.map(drop).unwrap_err().to_string();
    assert!(error.contains("this version does not offer"), "{error}");
    other.end();
    scene.end();
}

/// Queues beyond the device's number would be forgotten.
#[test]
fn a_session_with_another_number_of_queues_is_refused() {
    for queues in [1, QUEUES + 1] {
        let mut scene = Scene::new(PROTOCOL_FEATURES);
        scene.connection.begin_pause();
        scene.settle().unwrap();
        let socket = UnixStream::pair().unwrap().0;
        let mut channel = Channel::new(socket, Arc::clone(&scene.examiner));
        channel.lend(true);
        let mut fds = PassedFds::default();
        let state = SessionState::new(&channel, &scene.connection, true, &mut fds).unwrap();
        let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
        let options = BlkOptions { num_queues: queues, ..BlkOptions::default() };
        let device = Device::blk(source, options, Arc::new(LogEvents::new("test")));
        let other = Scene::with_device(device, 0);
        let setup = other.connection.setup.clone();
        let refused = Session::take_over(state, setup, &mut fds, Instant::now());
        let error = refused.map(drop).unwrap_err().to_string();
        assert_eq!(error, format!("the device has {queues} queues, not {QUEUES}"));
        other.end();
        scene.end();
    }
}

/// The next process knows its connection, and which rings the driver has started.
#[test]
fn a_session_continues_with_its_connection_and_its_stopped_rings() {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    scene.start();
    let stop = Request::GetVringBase { index: 1 };
    assert!(matches!(scene.send(&stop, vec![]), Ended::Answer(_)));
    let (mut other, mut session, front_end) = take_over(&mut scene, 1 << 20);
    assert_eq!(resume(&mut other, &mut session), SessionProgress::Handled);
    assert_eq!(states(&session), ["Running", "Stopped"]);
    // The end of the back-end, as its own channel for messages.
    let (code, body) = Request::SetBackendReqFd.encode();
    let message = Header::new(code, body.len()).encode();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [session.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let flags = SendFlags::empty();
    sendmsg(&front_end, &[IoSlice::new(&message)], &mut control, flags).unwrap();
    let ended = loop {
        match session.progress(Instant::now()) {
            SessionProgress::Waiting => other.await_wake(),
            progress => break format!("{progress:?}"),
        }
    };
    assert!(ended.contains("the front-end's own connection"), "{ended}");
    drop(other);
    scene.end();
}

/// A session in use. None of its fields has the value that it has in a new session.
fn in_use() -> (Scene, Channel) {
    let mut scene = Scene::new(PROTOCOL_FEATURES);
    let Ended::Answer(body) = scene.send(&Request::GetInflightFd(inflight_area()), vec![]) else {
        panic!("it was refused");
    };
    let (area, file) = (InflightArea::decode(&body).unwrap(), scene.peer_fd.take().unwrap());
    let news = UnixStream::pair().unwrap().0;
    let set = [(Request::SetInflightFd(area), file), (Request::SetBackendReqFd, news.into())];
    for (request, fd) in set {
        assert_eq!(scene.send(&request, vec![fd]), Ended::Done, "{request:?}");
    }
    scene.start();
    scene.begin_log();
    for (request, has_fd) in [
        (Request::SetStatus(15), false),
        (Request::SetConfig(config(WRITEBACK_OFFSET, &[0])), false),
        (Request::SetVringCall { index: 0, has_fd: true }, true),
        (Request::SetVringErr { index: 0, has_fd: true }, true),
        (Request::SetVringEnable { index: 1, value: 0 }, false),
        (Request::SetVringBase { index: 1, base: 7 }, false),
    ] {
        let fds = has_fd.then(new_eventfd).into_iter().collect();
        assert_eq!(scene.send(&request, fds), Ended::Done, "{request:?}");
    }
    scene.connection.begin_pause();
    scene.settle().unwrap();
    // The channel is in the middle of a message, and of an answer.
    let mut channel = Channel::new(UnixStream::pair().unwrap().0, Arc::clone(&scene.examiner));
    channel.lend(true);
    channel.input = vec![1, 2, 3];
    channel.fds.push(PeerFd::new(new_eventfd(), Arc::clone(&scene.examiner)));
    channel.lost_fds = Some("no descriptor was left".to_owned());
    channel.output = vec![4, 5];
    channel.output_fd = Some(new_eventfd());
    (scene, channel)
}

/// Collects each field of a session, by its path. Elements of a list share a path.
fn fields(value: &serde_json::Value, path: &str, all: &mut BTreeMap<String, Vec<String>>) {
    match value {
        serde_json::Value::Object(object) => {
            for (name, value) in object {
                fields(value, &format!("{path}/{name}"), all);
            }
        }
        serde_json::Value::Array(list) if list.iter().any(serde_json::Value::is_object) => {
            list.iter().for_each(|value| fields(value, path, all));
        }
        value => all.entry(path.to_owned()).or_default().push(value.to_string()),
    }
}

/// State that is not handed over is lost.
#[test]
fn no_field_of_a_session_is_lost_on_its_way() {
    let (scene, channel) = in_use();
    let mut fds = PassedFds::default();
    let state = SessionState::new(&channel, &scene.connection, true, &mut fds).unwrap();
    let (first, names) = (serde_json::to_value(&state).unwrap(), fds.names());

    // A field with the value of a new session would prove nothing.
    let new = Scene::new(0);
    let channel = Channel::new(UnixStream::pair().unwrap().0, Arc::clone(&new.examiner));
    let of_new = SessionState::new(&channel, &new.connection, false, &mut PassedFds::default());
    let of_new = serde_json::to_value(of_new.unwrap()).unwrap();
    let (mut used, mut unused) = (BTreeMap::new(), BTreeMap::new());
    fields(&first, "", &mut used);
    fields(&of_new, "", &mut unused);
    for (path, value) in used.iter().filter(|(path, _)| *path != "/channel/socket") {
        assert_ne!(Some(value), unused.get(path), "{path} shows nothing");
    }

    let other = Scene::new(0);
    let setup = other.connection.setup.clone();
    let session = Session::take_over(state, setup, &mut fds, Instant::now()).unwrap();
    let mut next = PassedFds::default();
    let second = serde_json::to_value(session.hand_over(&mut next).unwrap()).unwrap();
    assert_eq!(second, first);
    assert_eq!(next.names(), names);
    end(other, session);
    new.end();
    scene.end();
}
