//! Sessions, step by step.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use blockio::Wait;
use rustix::event::PollFlags;
use vhost_user::message::{Config, Header, Region, Request, RingAddresses, code};
use vhost_user::{End, PROTOCOL_FEATURES, SessionProgress, serve};

use crate::scene::{Frontend, Scene, bytes_of, descriptors_of, new_eventfd, region, wait_until};

/// The limits of the session.
const MESSAGE_LIMIT: Duration = Duration::from_secs(10);
const SILENCE_LIMIT: Duration = Duration::from_secs(60);
const MOMENT: Duration = Duration::from_millis(1);

const ACK: [u8; 8] = [0; 8];
const NACK: [u8; 8] = 1_u64.to_ne_bytes();

fn number(body: &[u8]) -> u64 {
    u64::from_ne_bytes(body.try_into().unwrap())
}

fn is_dropped(end: Option<&End>, reason: &str) -> bool {
    matches!(end, Some(End::Dropped(text)) if text.contains(reason))
}

/// The base of a ring, in the answer to GET_VRING_BASE.
fn get_base(index: u32) -> Request {
    Request::GetVringBase { index }
}

#[test]
fn messages_may_arrive_byte_by_byte() {
    let mut scene = Scene::new();
    let (mut session, mut frontend) = scene.attach();
    let kick = new_eventfd();
    for (request, fds) in [
        (Request::SetProtocolFeatures(PROTOCOL_FEATURES), vec![]),
        (Request::SetFeatures(1 << 32 | 1 << 30), vec![]),
        (Request::SetVringKick { index: 1, has_fd: true }, vec![&kick]),
        (Request::SetVringNum { index: 1, size: 64 }, vec![]),
    ] {
        let bytes = bytes_of(&request, true);
        for (at, byte) in bytes.iter().enumerate() {
            // Descriptors come with the first byte.
            frontend.send_bytes(&[*byte], if at == 0 { &fds } else { &[] });
            assert_eq!(scene.drive_all(&mut session), None);
            let answer = frontend.receive();
            assert_eq!(answer.is_some(), at + 1 == bytes.len(), "{request:?} after byte {at}");
            assert!(answer.is_none_or(|(_, body)| body == ACK), "{request:?}");
        }
    }
}

#[test]
fn many_messages_in_one_piece() {
    let mut scene = Scene::new();
    let (mut session, mut frontend) = scene.attach();
    scene.negotiate(&mut session, &mut frontend);
    let sizes = [16, 3, 32, 0, 64];
    let bytes: Vec<u8> = sizes
        .iter()
        .flat_map(|&size| bytes_of(&Request::SetVringNum { index: 0, size }, true))
        .collect();
    frontend.send_bytes(&bytes, &[]);
    scene.drive_all(&mut session);
    let answers = sizes.map(|_| number(&frontend.receive().unwrap().1));
    assert_eq!(answers, [0, 1, 0, 1, 0]);
}

#[test]
fn half_a_message_has_a_time_limit() {
    let request = bytes_of(&Request::SetFeatures(0), false);
    for cut in [1, 11, 12, 19] {
        let mut scene = Scene::new();
        let (mut session, mut frontend) = scene.attach();
        scene.negotiate(&mut session, &mut frontend);
        assert_eq!(session.deadline(), None, "after the first message it may be silent");
        frontend.send_bytes(&request[..cut], &[]);
        assert_eq!(scene.drive(&mut session), None);
        assert_eq!(session.deadline(), Some(scene.now + MESSAGE_LIMIT));
        scene.now += MESSAGE_LIMIT - MOMENT;
        assert_eq!(scene.drive(&mut session), None);
        scene.now += MOMENT;
        assert!(is_dropped(scene.drive(&mut session).as_ref(), "the rest of a message"));
        assert!(frontend.is_closed());
    }
}

#[test]
fn a_silent_front_end_has_a_time_limit_unless_disabled() {
    let mut scene = Scene::new();
    let (mut session, _frontend) = scene.attach();
    scene.now += SILENCE_LIMIT - MOMENT;
    assert_eq!(scene.drive(&mut session), None);
    scene.now += MOMENT;
    assert!(is_dropped(scene.drive(&mut session).as_ref(), "it has sent no message"));

    let (session, _frontend) = scene.attach();
    let mut session = session.without_silence_limit();
    scene.now += 1000 * SILENCE_LIMIT;
    assert_eq!((scene.drive(&mut session), session.deadline()), (None, None));
}

#[test]
fn unread_answers_have_a_time_limit() {
    let mut scene = Scene::new();
    let (mut session, mut frontend) = scene.attach();
    scene.negotiate(&mut session, &mut frontend);
    let question = bytes_of(&Request::GetFeatures, false);
    // Until an answer finds no room, and then a question.
    while rustix::io::write(&frontend.socket, &question).is_ok() {
        assert_eq!(scene.drive(&mut session), None);
    }
    assert_eq!(session.interest(), Some(PollFlags::OUT));
    assert_eq!(session.deadline(), Some(scene.now + MESSAGE_LIMIT));
    // Reading a part of it starts the time again.
    assert!(frontend.receive().is_some());
    assert_eq!(scene.drive(&mut session), None);
    scene.now += MESSAGE_LIMIT;
    let end = scene.drive(&mut session);
    assert!(is_dropped(end.as_ref(), "does not read its answer"), "{end:?}");
}

#[test]
fn unknown_messages_are_refused_or_ignored() {
    let mut scene = Scene::new();
    let (mut session, mut frontend) = scene.attach();
    scene.negotiate(&mut session, &mut frontend);
    for code in [0, 19, 23, 30, 35, 41, 44, 46, 1000, u32::MAX] {
        let body = vec![0x55; 300];
        let header = Header::new(code, body.len());
        frontend.send_bytes(&[&header.encode()[..], &body].concat(), &[]);
        assert_eq!(scene.drive_all(&mut session), None, "message {code}");
        assert!(frontend.receive().is_none(), "message {code} was answered");
        assert!(scene.refused.pop().is_some_and(|text| text.contains("not offered")));
        let header = header.with_need_reply();
        frontend.send_bytes(&[&header.encode()[..], &body].concat(), &[]);
        scene.drive_all(&mut session);
        assert_eq!(frontend.receive().map(|(_, body)| body), Some(NACK.to_vec()), "{code}");
    }
    // Without REPLY_ACK the flag has no meaning.
    scene.send_checked(&mut session, &mut frontend, &Request::SetProtocolFeatures(1 << 3), &[]);
    frontend.send(&Request::SetProtocolFeatures(0), true, &[]);
    frontend.send_bytes(&Header::new(44, 0).with_need_reply().encode(), &[]);
    assert_eq!(scene.drive_all(&mut session), None);
    assert!(frontend.receive().is_none());
}

#[test]
fn acknowledged_refusals_do_not_end_the_connection() {
    let mut scene = Scene::new();
    let (mut session, mut frontend) = scene.attach();
    scene.negotiate(&mut session, &mut frontend);
    let bad = Request::SetVringNum { index: 0, size: 3 };
    assert_eq!(scene.exchange(&mut session, &mut frontend, &bad, &[]), NACK);
    assert!(scene.refused.pop().is_some_and(|text| text.contains("3 entries")));
    // A guest can cause these, so they are harmless even without an acknowledgement.
    let config = |offset, flags, data: &[u8]| Config { offset, flags, data: data.to_vec() };
    for config in [config(0, 0, &[1; 8]), config(32, 2, &[1]), config(4000, 0, &[0; 200])] {
        frontend.send(&Request::SetConfig(config), false, &[]);
        assert_eq!(scene.drive_all(&mut session), None);
        assert!(scene.refused.pop().is_some(), "it was taken");
    }
    scene.send_checked(
        &mut session,
        &mut frontend,
        &Request::SetVringNum { index: 0, size: 4 },
        &[],
    );
    // This refusal is not harmless: the front-end would think that the ring is larger.
    frontend.send(&bad, false, &[]);
    assert!(is_dropped(scene.drive_all(&mut session).as_ref(), "3 entries"));
}

#[test]
fn requests_without_a_refusal_close_the_connection() {
    let mut scene = Scene::new();
    let (mut session, mut frontend) = scene.attach();
    scene.negotiate(&mut session, &mut frontend);
    // An answer without data refuses a read of the configuration.
    let config = Config { offset: 0, flags: 0xff, data: vec![0; 8] };
    let body = scene.exchange(&mut session, &mut frontend, &Request::GetConfig(config), &[]);
    assert!(body.is_empty(), "{body:?}");
    // A number would be taken for the base of a ring.
    frontend.send(&get_base(7), true, &[]);
    assert!(is_dropped(scene.drive_all(&mut session).as_ref(), "queue 7"));
    assert!(frontend.is_closed());
}

#[test]
fn messages_with_the_maximum_of_descriptors() {
    let mut scene = Scene::new();
    let (mut session, mut frontend) = scene.attach();
    scene.negotiate(&mut session, &mut frontend);
    let (file, event) = (tempfile::NamedTempFile::new().unwrap(), new_eventfd());
    let path = file.path().to_owned();
    let odd = file.as_file().try_clone().unwrap().into();
    for fd in [&odd, &event] {
        let many: Vec<&OwnedFd> = vec![fd; 253];
        for request in [Request::SetVringCall { index: 0, has_fd: true }, Request::SetOwner] {
            assert_eq!(scene.exchange(&mut session, &mut frontend, &request, &many), NACK);
        }
        // Unknown descriptors are closed on another thread, and too many delay the next message.
        wait_until(|| descriptors_of(&path) == 2);
    }
    // The stream is in step, and each descriptor belongs to its message.
    let call = Request::SetVringCall { index: 0, has_fd: true };
    let no_call = Request::SetVringCall { index: 1, has_fd: false };
    frontend.send(&no_call, true, &[]);
    frontend.send(&call, true, &[&event]);
    frontend.send(&no_call, true, &[]);
    scene.drive_all(&mut session);
    for _ in 0..3 {
        assert_eq!(frontend.receive().unwrap().1, ACK, "{:?}", scene.refused);
    }
}

#[test]
fn a_kick_must_be_an_eventfd_too() {
    let mut scene = Scene::new();
    let (mut session, mut frontend) = scene.attach();
    scene.set_up(&mut session, &mut frontend);
    let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
    let kick = Request::SetVringKick { index: 0, has_fd: true };
    let call = Request::SetVringCall { index: 0, has_fd: true };
    let error = Request::SetVringErr { index: 0, has_fd: true };
    let socket = socket.into();
    // A call may be one end of a socket pair, which is written to without waiting.
    let bad =
        [(&kick, &null), (&kick, &socket), (&call, &null), (&error, &null), (&error, &socket)];
    for (request, fd) in bad {
        assert_eq!(scene.exchange(&mut session, &mut frontend, request, &[fd]), NACK);
        let text = scene.refused.pop().unwrap_or_default();
        assert!(text.contains("eventfd"), "{request:?}: {text}");
    }
    assert_eq!(scene.exchange(&mut session, &mut frontend, &call, &[&socket]), ACK);
}

/// Messages that wait for queues delay no other session, and a hang-up is seen in the meantime.
#[test]
fn a_message_that_waits_for_a_queue() {
    for request in [
        get_base(0),
        Request::SetVringEnable { index: 0, value: 0 },
        Request::SetFeatures(1 << 30 | 1 << 32),
        Request::RemMemReg(region()),
        Request::ResetDevice,
        Request::SetStatus(0),
    ] {
        let mut scene = Scene::new();
        let (mut session, mut frontend) = scene.attach();
        scene.set_up(&mut session, &mut frontend);
        frontend.send(&request, true, &[]);
        // The IoThread is busy.
        assert_eq!(session.progress(scene.now), SessionProgress::Waiting);
        assert_eq!((session.interest(), session.deadline()), (Some(PollFlags::empty()), None));
        assert!(!session.load().has_taken_commands);
        // Further messages wait for their turn.
        frontend.send(&Request::GetFeatures, false, &[]);
        scene.now += SILENCE_LIMIT;
        assert_eq!(scene.drive(&mut session), None);
        assert!(frontend.receive().is_none(), "{request:?} was answered too early");
        let (mut other, mut neighbour) = scene.attach();
        neighbour.send(&Request::GetFeatures, false, &[]);
        assert_eq!(scene.drive(&mut other), None);
        assert!(neighbour.receive().is_some(), "the neighbour waits too");
        scene.io.turn(Wait::Never).unwrap();
        assert_eq!(scene.drive_all(&mut session), None);
        let answers = [frontend.receive(), frontend.receive()].map(|answer| answer.unwrap().0.code);
        assert_eq!(answers, [request.encode().0, code::GET_FEATURES]);
    }
}

#[test]
fn a_hang_up_is_seen_while_a_queue_stops() {
    let mut scene = Scene::new();
    let (mut session, mut frontend) = scene.attach();
    scene.set_up(&mut session, &mut frontend);
    frontend.send(&get_base(0), false, &[]);
    assert_eq!(session.progress(scene.now), SessionProgress::Waiting);
    drop(frontend);
    assert_eq!(session.progress(scene.now), SessionProgress::Waiting);
    // The socket is polled no longer, and all queues stop, not just the one.
    assert_eq!(session.interest(), None);
    assert_eq!(scene.drive_all(&mut session), Some(End::Gone(None)));
    assert_eq!(scene.io.io().tasks(), 0);
}

#[test]
fn the_end_of_a_session_waits_for_its_queues() {
    let mut scene = Scene::new();
    let (mut session, mut frontend) = scene.attach();
    scene.set_up(&mut session, &mut frontend);
    // In the middle of a start.
    frontend.send(&get_base(1), false, &[]);
    scene.drive_all(&mut session);
    frontend.send(&Request::SetVringKick { index: 1, has_fd: true }, false, &[&new_eventfd()]);
    assert_eq!(session.progress(scene.now), SessionProgress::Waiting);
    session.begin_end();
    assert_eq!(scene.drive(&mut session), None);
    frontend.receive();
    assert!(!frontend.is_closed(), "it sees the end before its requests are answered");
    assert_eq!(scene.drive_all(&mut session), Some(End::Asked));
    assert!(frontend.is_closed());
    assert_eq!(scene.io.io().tasks(), 0);
    assert_eq!(scene.drive(&mut session), None, "it ends once");
}

/// A hang-up after an error, or the end of an export, does not hide the error.
#[test]
fn the_first_reason_of_an_end_stays() {
    let mut scene = Scene::new();
    let (mut session, mut frontend) = scene.attach();
    scene.set_up(&mut session, &mut frontend);
    frontend.send(&Request::SetVringNum { index: 0, size: 3 }, false, &[]);
    assert_eq!(session.progress(scene.now), SessionProgress::Waiting);
    assert!(session.is_ending());
    session.begin_end();
    drop(frontend);
    let end = scene.drive_all(&mut session);
    assert!(is_dropped(end.as_ref(), "3 entries"), "{end:?}");
}

#[test]
fn a_session_does_not_wait_for_an_ended_io_thread() {
    let mut scene = Scene::new();
    let (mut session, mut frontend) = scene.attach();
    scene.set_up(&mut session, &mut frontend);
    let Scene { io, .. } = std::mem::replace(&mut scene, Scene::new());
    drop(io);
    frontend.send(&Request::SetVringEnable { index: 0, value: 0 }, true, &[]);
    assert_eq!(scene.drive(&mut session), None);
    assert_eq!(frontend.receive().unwrap().1, NACK);
    session.begin_end();
    assert_eq!(scene.drive(&mut session), Some(End::Asked));
}

#[test]
fn a_device_is_reset_and_set_up_again() {
    let mut scene = Scene::new();
    let (mut session, mut frontend) = scene.attach();
    scene.set_up(&mut session, &mut frontend);
    let features = scene.device.features() & !(1 << 34) | 1 << 30;
    for reset in [Request::ResetDevice, Request::SetStatus(0)] {
        scene.send_checked(&mut session, &mut frontend, &Request::SetStatus(15), &[]);
        let status = scene.exchange(&mut session, &mut frontend, &Request::GetStatus, &[]);
        assert_eq!(number(&status), 15);
        let base = Request::SetVringBase { index: 0, base: 5 };
        scene.send_checked(&mut session, &mut frontend, &base, &[]);
        let off = Config { offset: 32, flags: 0, data: vec![0] };
        scene.send_checked(&mut session, &mut frontend, &Request::SetConfig(off.clone()), &[]);
        scene.send_checked(&mut session, &mut frontend, &reset, &[]);
        let status = scene.exchange(&mut session, &mut frontend, &Request::GetStatus, &[]);
        assert_eq!(number(&status), 0);
        assert_eq!(scene.io.io().tasks(), 0, "a queue runs after {reset:?}");
        let base = scene.exchange(&mut session, &mut frontend, &get_base(0), &[]);
        assert_eq!(base, [0; 8]);
        // A front-end that pauses its guest sends the status, and the driver keeps its choice.
        let now = scene.exchange(&mut session, &mut frontend, &Request::GetConfig(off), &[]);
        assert_eq!(now[12] == 0, reset == Request::SetStatus(0));
        scene.send_checked(&mut session, &mut frontend, &Request::SetFeatures(features), &[]);
        // Memory is the front-end's, and still there.
        (0..2).for_each(|index| scene.start(&mut session, &mut frontend, index));
        assert_eq!(scene.io.io().tasks(), 2);
    }
    let bad = Request::SetStatus(0x100);
    assert_eq!(scene.exchange(&mut session, &mut frontend, &bad, &[]), NACK);
}

#[test]
fn the_configuration_is_written_by_drivers_and_migrations() {
    let mut scene = Scene::new();
    let (mut session, mut frontend) = scene.attach();
    scene.negotiate(&mut session, &mut frontend);
    let whole = Config { offset: 0, flags: 0, data: vec![0; 60] };
    let answer = scene.exchange(&mut session, &mut frontend, &Request::GetConfig(whole), &[]);
    let present = answer[12..].to_vec();
    assert_eq!(present[32], 1);
    let mut write = |offset, flags, data: Vec<u8>| {
        let request = Request::SetConfig(Config { offset, flags, data });
        let taken = scene.exchange(&mut session, &mut frontend, &request, &[]) == ACK;
        let read = Request::GetConfig(Config { offset: 32, flags: 0, data: vec![0] });
        (taken, scene.exchange(&mut session, &mut frontend, &read, &[])[12])
    };
    assert_eq!(write(32, 0, vec![0]), (true, 0));
    assert_eq!(write(32, 0, vec![7]), (true, 1), "any value but 0 is 1");
    assert_eq!(write(0x120, 0, vec![0]), (true, 0), "some count from elsewhere");
    assert_eq!(write(0x220, 0, vec![1]), (false, 0), "and nobody from there");
    // A migration sends all fields, which must equal the device's.
    assert_eq!(write(0, 1, present.clone()), (true, 1));
    let mut other = present.clone();
    (other[0], other[32]) = (other[0] ^ 1, 0);
    assert_eq!(write(0, 1, other), (false, 1));
    assert_eq!(write(0, 0, present), (false, 1), "a driver may not");
    for flags in [2, 3, 4, u32::MAX] {
        assert_eq!(write(32, flags, vec![0]), (false, 1), "flags {flags:#x}");
    }
}

/// Addresses of a ring at `place`, as [`Scene::start`] lays it out.
fn addresses(place: u64) -> RingAddresses {
    let (avail_ring, used_ring) = (place + 0x1000, place + 0x2000);
    RingAddresses { desc_table: place, avail_ring, used_ring }
}

/// A refused message changes nothing: running queues continue as they were, and stopped ones stay
/// stopped.
#[test]
fn a_refused_message_changes_nothing() {
    let kick = new_eventfd();
    let outside = addresses(region().user_addr - 0x10_0000);
    let odd = addresses(region().user_addr + 0x8001);
    // A table of 16 entries fits there, a longer one does not; nor does a used ring with an event.
    let end = region().user_addr + region().size;
    let tight = RingAddresses { used_ring: end - 4 - 8 * 16, ..addresses(end - 0x8000) };
    let at_end = RingAddresses { desc_table: end - 16 * 16, ..addresses(end - 0x8000) };
    let set_addresses = |addresses| Request::SetVringAddr { index: 1, addresses, log: None };
    let set_kick = Request::SetVringKick { index: 1, has_fd: true };
    let enable = Request::SetVringEnable { index: 1, value: 1 };
    let set_size = |size| Request::SetVringNum { index: 1, size };
    // Earlier messages, the refused message, and the number of queues that run after it.
    let table: [(&[Request], Request, usize); 9] = [
        (&[], set_addresses(outside), 2),
        (&[], set_addresses(odd), 2),
        (&[], set_size(3), 2),
        (&[set_addresses(at_end)], set_size(32), 2),
        (&[set_addresses(tight)], Request::SetFeatures(1 << 32 | 1 << 30 | 1 << 29), 2),
        (&[set_addresses(tight)], Request::SetFeatures(1 << 32 | 1 << 29), 2),
        (&[get_base(1), set_addresses(outside)], set_kick.clone(), 1),
        (&[Request::SetVringEnable { index: 1, value: 0 }, set_addresses(outside)], enable, 1),
        (&[get_base(1), set_addresses(odd)], set_kick.clone(), 1),
    ];
    for (before, refused, running) in table {
        let mut scene = Scene::new();
        let (mut session, mut frontend) = scene.attach();
        scene.set_up(&mut session, &mut frontend);
        // Without event idx, which one of the messages wants.
        let plain = Request::SetFeatures(1 << 32 | 1 << 30);
        scene.send_checked(&mut session, &mut frontend, &plain, &[]);
        for request in before {
            let answer = scene.exchange(&mut session, &mut frontend, request, &[]);
            assert!(answer == ACK || *request == get_base(1), "{request:?}");
        }
        let fds: &[&OwnedFd] = if refused == set_kick { &[&kick] } else { &[] };
        assert_eq!(scene.exchange(&mut session, &mut frontend, &refused, fds), NACK, "{refused:?}");
        assert_eq!(scene.io.io().tasks(), running, "queues after {refused:?}");
        // The addresses and the size of the ring are unchanged, so it runs whenever it is started.
        if running == 1 {
            let good = addresses(region().user_addr + 0x8000);
            scene.send_checked(&mut session, &mut frontend, &set_addresses(good), &[]);
            assert_eq!(scene.io.io().tasks(), 1, "half of {refused:?} was kept");
        }
        scene.exchange(&mut session, &mut frontend, &get_base(1), &[]);
        scene.send_checked(&mut session, &mut frontend, &set_kick, &[&kick]);
        let enable = Request::SetVringEnable { index: 1, value: 1 };
        scene.send_checked(&mut session, &mut frontend, &enable, &[]);
        assert_eq!(scene.io.io().tasks(), 2, "queues at the end, after {refused:?}");
    }
}

#[test]
fn a_refused_base_is_not_kept() {
    let mut scene = Scene::new();
    let (mut session, mut frontend) = scene.attach();
    scene.set_up(&mut session, &mut frontend);
    let base = |base| Request::SetVringBase { index: 1, base };
    scene.send_checked(&mut session, &mut frontend, &base(3), &[]);
    // Other memory takes the place of the ring's.
    let other = Region { guest_addr: 0, user_addr: 0x1000, size: 0x1000, file_offset: 0 };
    let memory = rustix::fs::memfd_create("other", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, 0x1000).unwrap();
    scene.send_checked(&mut session, &mut frontend, &Request::AddMemReg(other), &[&memory]);
    scene.send_checked(&mut session, &mut frontend, &Request::RemMemReg(region()), &[]);
    assert_eq!(scene.exchange(&mut session, &mut frontend, &base(7), &[]), NACK);
    let answer = scene.exchange(&mut session, &mut frontend, &get_base(1), &[]);
    assert_eq!(number(&answer) >> 32, 3);
}

/// A session that its own thread drives.
#[test]
fn a_thread_serves_one_front_end_until_it_disconnects() {
    let scene = Scene::new();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (device, threads) = (scene.device.clone(), vec![scene.io.remote()]);
    let server = std::thread::spawn(move || serve(ours, device, threads).unwrap());
    let mut frontend = Frontend::new(theirs);
    for _ in 0..2 {
        frontend.send(&Request::GetFeatures, false, &[]);
        let (_, body) = frontend.receive().unwrap();
        let features = u64::from_ne_bytes(body.try_into().unwrap());
        assert_eq!(features & scene.device.features(), scene.device.features());
    }
    drop(frontend);
    assert_eq!(server.join().unwrap(), End::Gone(None));
}
