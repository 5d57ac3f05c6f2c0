//! Servers that do not answer, in the log and in the state of the disk.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockio::IoThread;
use blockio::disk::{DiskState, Extent};
use blockio::driver::Line;
use blockio::testing::{remote_ops, set_recently};
use iomem::Buffers;

use super::super::answer::Failure;
use super::super::channel::Channel;
use super::super::client::Client;
use super::super::connect::connect;
use super::super::connection_task::check_not_less;
use super::super::handshake::{Facts, can};
use super::super::options::NbdOptions;
use super::super::requests::{IssuedRequest, State};
use super::super::shared::{Condition, SharedExport};
use super::super::wire::{Command, Framing, Request};
use super::scripted::{READ, Server};
use super::{FLAGS, MIB, Running, new_thread, open, wait_a_turn};

const SECOND: Duration = Duration::from_secs(1);

fn shared(server: &Server) -> Arc<SharedExport> {
    let (connected, _) = connect(&server.options()).unwrap();
    Arc::new(SharedExport::new(server.options(), false, 20 * SECOND, connected))
}

/// The connections of an IoThread, which carry nothing.
fn client_of(thread: &IoThread, shared: &Arc<SharedExport>, links: usize) -> Rc<Client> {
    let number = shared.add_client(&thread.io().remote());
    let client = Client::new(thread.io(), shared, number, links);
    (0..links).for_each(|index| client.link_is_up(index, &shared.facts));
    client
}

/// A disk is used with the offer of the server from when it was opened.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn each_reduced_offer_is_refused() {
    let of_changes = [can::FUA, can::TRIM, can::WRITE_ZEROES, can::FAST_ZERO];
    let server = Server::start(MIB, of_changes.iter().fold(FLAGS, |all, flag| all | flag));
    server.change(|state| state.is_extended = true);
    let shared = shared(&server);
    let then = shared.facts;
    let (block, payload, flags) = (then.block_bytes_min, then.payload_bytes_max, then.flags);
    for (now, is_less) in [
        (then, false),
        (Facts { block_bytes_min: 2 * block, ..then }, true),
        (Facts { block_bytes_min: block / 2, ..then }, false),
        (Facts { payload_bytes_max: payload - block, ..then }, true),
        (Facts { payload_bytes_max: payload + block, ..then }, false),
        (Facts { framing: Framing::Simple, ..then }, true),
        (Facts { flags: flags | can::READ_ONLY, ..then }, true),
        (Facts { flags: flags & !can::FLUSH, ..then }, true),
        (Facts { flags: flags & !can::MULTI_CONN, ..then }, true),
        (Facts { flags: flags | 1 << 15, ..then }, false),
        (Facts { size_bytes: then.size_bytes / 2, ..then }, false),
    ] {
        assert_eq!(check_not_less(&shared, &now).is_err(), is_less, "{now:?}");
    }
    for flag in of_changes {
        let now = Facts { flags: flags & !flag, ..then };
        assert!(check_not_less(&shared, &now).is_err(), "{flag:#x}");
    }
}

/// The flush that began later covers more, even if its answer comes first.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn answers_to_flushes_may_come_in_any_order() {
    let server = Server::start(MIB, FLAGS);
    let shared = shared(&server);
    let covers = [(); 2].map(|()| {
        shared.count_change();
        shared.changes()
    });
    shared.record_flush(covers[0]);
    assert!(!shared.is_flushed(), "the second change came later");
    shared.record_flush(covers[1]);
    shared.record_flush(covers[0]);
    assert!(shared.is_flushed(), "an older answer counts");
}

/// A loss stays, whatever else a process takes over.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_inherited_loss_is_never_taken_back() {
    let server = Server::start(MIB, FLAGS);
    let shared = shared(&server);
    shared.inherit(false, true);
    assert_eq!(
        (shared.is_lost(), shared.is_flushed(), shared.needs_own_flush()),
        (false, true, false)
    );
    shared.inherit(false, false);
    assert_eq!((shared.is_lost(), shared.is_flushed()), (false, false));
    shared.inherit(true, true);
    shared.inherit(false, true);
    assert_eq!((shared.is_lost(), shared.disk_state()), (true, DiskState::Lost));
    assert!(!shared.needs_own_flush(), "no flush succeeds any more");
}

/// Requests without a connection, and their slots, whatever becomes of them.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn requests_that_wait_end_by_deadline_by_loss_or_by_a_connection() {
    let server = Server::start(MIB, FLAGS);
    let deadline = 10 * SECOND;
    let (connected, _) = connect(&server.options()).unwrap();
    let options = NbdOptions { deadline: Some(deadline), ..server.options() };
    let shared = Arc::new(SharedExport::new(options, false, 20 * SECOND, connected));
    let thread = new_thread();
    let (client, io) = (client_of(&thread, &shared, 1), thread.io());
    let issue = |command| {
        let request = Request { command, flags: 0, offset: 0, len: 512 };
        client.ticket(IssuedRequest::new(io, request), Buffers::aligned(512, 512))
    };
    let states = || Vec::from_iter(client.requests.borrow().slots.iter().map(|slot| slot.state));
    let begun = io.recently();
    let first = issue(Command::Write);
    assert_eq!(states(), [State::Queued(0)]);
    assert_eq!(client.link_is_down(0), 1);
    set_recently(io, begun + deadline / 2);
    let (second, dropped) = (issue(Command::Read), issue(Command::Read));
    assert_eq!(states(), [State::Waiting; 3]);
    assert_eq!(client.oldest_waiting(), Some(begun));
    drop(dropped);
    // The first request is past its deadline, and the connection is back.
    set_recently(io, begun + deadline);
    client.link_is_up(0, &shared.facts);
    let late = Err(Failure { errno: libc::ETIMEDOUT, is_of_flush: false });
    assert_eq!(states(), [State::Done(late), State::Queued(0), State::Queued(0)]);
    assert_eq!(remote_ops(io), 2, "a request that has failed counts");
    assert_eq!((client.oldest_waiting(), client.requests.borrow().waiting.len()), (None, 0));
    assert_eq!(thread.block_on(first.wait()).unwrap().0, Some(late));
    // A slot that is free again is not in any line.
    set_recently(io, begun + deadline);
    let third = issue(Command::Write);
    assert_eq!(states()[0], State::Queued(0));
    assert_eq!(client.link_is_down(0), 3);
    client.fail(libc::EIO, Some(begun + deadline / 2));
    let failed = Err(Failure { errno: libc::EIO, is_of_flush: false });
    assert_eq!(states(), [State::Waiting, State::Done(failed), State::Free]);
    assert_eq!(client.requests.borrow().waiting, [0]);
    assert_eq!(thread.block_on(second.wait()).unwrap().0, Some(failed));
    client.fail(libc::EIO, None);
    assert_eq!(thread.block_on(third.wait()).unwrap().0, Some(failed));
    assert_eq!(states(), [State::Free; 3]);
    assert_eq!(remote_ops(io), 0, "an op that has ended counts");
}

/// The whole way, with two connections of each of two IoThreads.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_server_that_does_not_answer_is_late_until_each_connection_has_its_answers() {
    let server = Server::start(MIB, FLAGS);
    let source = open(NbdOptions { connections: 2, ..server.options() });
    let threads = [(); 2].map(|()| new_thread());
    let disks = threads.each_ref().map(|thread| Rc::new(source.attach(thread.io())));
    let wait_until = |remark: &str, is_late: bool| {
        let hopeless = Instant::now() + 60 * SECOND;
        while source.remark().as_deref() != Some(remark) {
            assert!(Instant::now() < hopeless, "not {remark}, but {:?}", source.remark());
            threads.iter().for_each(wait_a_turn);
            let state = source.state();
            assert!(!is_late || matches!(state, DiskState::Late(_)), "it looks {state:?}");
        }
    };
    wait_until("connections: 4", false);
    server.change(|state| state.holds = (READ, 4));
    let reads: Vec<_> = [0, 0, 1, 1]
        .into_iter()
        .map(|which| Running::start_one(&threads[which], &disks[which], READ))
        .collect();
    wait_until("connections: 4, late: 4", false);
    for (connection, remark) in [(0, "connections: 4, late: 3"), (2, "connections: 4, late: 2")] {
        server.answer_held_of(connection);
        wait_until(remark, true);
    }
    server.answer_held();
    wait_until("connections: 4", false);
    assert_eq!(source.state(), DiskState::Ready);
    for (read, which) in reads.into_iter().zip([0, 0, 1, 1]) {
        assert_eq!(read.end(&threads[which]), None);
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_answering_connection_does_not_hide_a_late_connection() {
    let server = Server::start(MIB, FLAGS);
    let (thread, shared) = (new_thread(), shared(&server));
    let (client, io) = (client_of(&thread, &shared, 2), thread.io());
    let begun = io.recently();
    let _flushes =
        [(); 2].map(|()| client.ticket(IssuedRequest::new(io, Request::FLUSH), Buffers::empty()));
    set_recently(io, begun + 5 * SECOND);
    client.check_stalled(0, begun, false);
    assert_eq!(shared.remark(), "connections: 2, late: 1");
    client.check_stalled(1, begun, false);
    assert_eq!(shared.remark(), "connections: 2, late: 2");
    client.requests.borrow_mut().finish(0, Ok(Extent::data(0)), &shared);
    client.check_stalled(0, begun, true);
    assert_eq!(shared.remark(), "connections: 2, late: 1");
    assert_eq!(shared.disk_state(), DiskState::Late(begun));
    // Neither does a connection that breaks.
    assert_eq!(client.link_is_down(0), 0);
    client.publish_condition(Some((begun, "it broke")));
    assert_eq!(shared.remark(), "connections: 1, late: 1");
    client.requests.borrow_mut().finish(1, Ok(Extent::data(0)), &shared);
    client.check_stalled(1, begun, true);
    assert_eq!(shared.remark(), "connections: 1");
    assert_eq!(shared.disk_state(), DiskState::Ready);
}

/// The log reports a server that answers again once, and a connection stays useful.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_answer_shows_at_the_next_check_alone() {
    let server = Server::start(MIB, FLAGS);
    let (thread, shared) = (new_thread(), shared(&server));
    let client = client_of(&thread, &shared, 1);
    let mut channel = Channel::new(0, connect(&server.options()).unwrap().0);
    let answers = |channel: &mut Channel| (channel.take_answered(), channel.was_answered());
    assert_eq!(answers(&mut channel), (false, false));
    let flush = client.ticket(IssuedRequest::new(thread.io(), Request::FLUSH), Buffers::empty());
    let hopeless = Instant::now() + 60 * SECOND;
    while channel.is_busy(&client.requests.borrow()) {
        assert!(Instant::now() < hopeless, "there is no answer");
        let requests = &mut *client.requests.borrow_mut();
        channel.send(requests).unwrap();
        channel.may_receive();
        channel.receive(requests, &shared).unwrap();
    }
    assert_eq!(answers(&mut channel), (true, true));
    assert_eq!(answers(&mut channel), (false, true));
    drop(flush);
}

/// Its request waits for a connection, and for no answer.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_server_without_a_connection_is_not_late() {
    let server = Server::start(MIB, FLAGS);
    let (thread, shared) = (new_thread(), shared(&server));
    let (client, io) = (client_of(&thread, &shared, 1), thread.io());
    let begun = io.recently();
    let _flush = client.ticket(IssuedRequest::new(io, Request::FLUSH), Buffers::empty());
    assert_eq!(client.link_is_down(0), 1);
    set_recently(io, begun + 60 * SECOND);
    client.publish_condition(None);
    assert_eq!(
        (shared.remark().as_str(), shared.disk_state()),
        ("connections: 0", DiskState::Ready)
    );
}

/// The server was away while the request waited, as the log has reported.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_server_that_is_back_is_not_late_with_resent_requests() {
    let server = Server::start(MIB, FLAGS);
    let (thread, shared) = (new_thread(), shared(&server));
    let (client, io) = (client_of(&thread, &shared, 1), thread.io());
    let begun = io.recently();
    assert!(client.requests.borrow().are_idle());
    let _flush = client.ticket(IssuedRequest::new(io, Request::FLUSH), Buffers::empty());
    assert!(!client.requests.borrow().are_idle());
    assert_eq!(client.link_is_down(0), 1);
    let back = begun + 60 * SECOND;
    set_recently(io, back);
    client.link_is_up(0, &shared.facts);
    for (seconds, state) in [(1, DiskState::Ready), (5, DiskState::Late(back))] {
        set_recently(io, back + seconds * SECOND);
        client.check_stalled(0, back, false);
        assert_eq!(shared.disk_state(), state, "after {seconds} s");
    }
}

/// A server that serves nothing breaks many connections.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn breaks_of_useful_connections_have_more_lines_than_breaks_of_useless_ones() {
    let (server, now) = (Server::start(MIB, FLAGS), Instant::now());
    for (was_useful, lines) in [(true, 20), (false, 1)] {
        let shared = shared(&server);
        for number in 0..30 {
            let expected = (number < lines).then_some(0);
            assert_eq!(shared.permit_break(was_useful, now), expected, "{was_useful} {number}");
        }
        // Lines about a server that is away have the limit of useless connections.
        assert_eq!(shared.permit_line(now), was_useful.then_some(0));
        let left_out = shared.permit_break(was_useful, now + 60 * SECOND);
        assert_eq!(left_out, Some(if was_useful { 10 } else { 30 }));
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_log_has_one_line_for_all_iothreads() {
    let server = Server::start(MIB, FLAGS);
    let (thread, shared, start) = (new_thread(), shared(&server), Instant::now());
    let [one, two] = [(); 2].map(|()| shared.add_client(&thread.io().remote()));
    let late = |client, second, up| {
        let since = start + second * SECOND;
        shared.set_condition(client, Condition::Late { since, up, late: 1 });
    };
    let look = |client, second, was_answered| {
        shared.check_stalled(client, start + second * SECOND, was_answered)
    };
    late(one, 1, 1);
    assert_eq!(look(one, 6, false), Some(Line::Waits(5 * SECOND)));
    late(two, 0, 1);
    assert_eq!((look(two, 7, false), look(one, 65, true)), (None, None), "it was told");
    assert_eq!(look(two, 66, false), Some(Line::Waits(66 * SECOND)), "a minute later");
    // The first connection breaks, and is made again.
    shared.set_condition(one, Condition::Away(start + 70 * SECOND, "it broke".into()));
    assert_eq!(look(one, 71, false), None, "the other one is late");
    assert_eq!(shared.remark(), "connections: 1, late: 1; some IoThreads have none: it broke");
    let of_other = || shared.another_client(one).map(|(number, _)| number);
    assert_eq!((of_other(), shared.disk_state()), (None, DiskState::Away(start + 70 * SECOND)));
    late(two, 0, 2);
    assert_eq!((of_other(), shared.disk_state()), (Some(two), DiskState::Late(start)));
    shared.set_condition(one, Condition::Up(1));
    shared.set_condition(two, Condition::Up(2));
    assert_eq!(look(two, 72, false), None, "nothing was answered");
    assert_eq!(look(two, 74, true), None, "nothing was answered to the other one");
    assert_eq!(look(one, 75, true), Some(Line::Answers(74 * SECOND)));
    assert_eq!((look(one, 76, true), look(two, 77, false)), (None, None));
    // A client whose requests have failed waits for nothing, and neither does a removed one.
    let forgets: [fn(&SharedExport, u64); 2] =
        [SharedExport::forget_stall, SharedExport::remove_client];
    for forget in forgets {
        late(two, 80, 2);
        assert_eq!(look(two, 86, false), Some(Line::Waits(6 * SECOND)));
        shared.set_condition(two, Condition::Up(2));
        assert_eq!(look(one, 87, true), None);
        forget(&shared, two);
        assert_eq!(look(one, 87, false), Some(Line::Answers(7 * SECOND)));
    }
}
