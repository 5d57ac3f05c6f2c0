//! Lines of the log about servers that break off, fail and come back.

use std::rc::Rc;
use std::time::{Duration, Instant};

use blockio::IoThread;

use super::super::handshake::can;
use super::super::options::NbdOptions;
use super::super::shared::UnflushedChanges;
use super::rerouting::end;
use super::scripted::{Event, READ, Server, WRITE};
use super::{FLAGS, MIB, Running, new_thread, open, read, wait_a_turn, wait_for};
use crate::test_log::{keep_log, log_of};

/// The name of a server, which no other test has.
fn name(server: &Server) -> String {
    keep_log();
    server.options().to_string()
}

/// Runs the IoThreads until the log has a line with this text.
fn wait_for_line(threads: &[&IoThread], name: &str, text: &str) {
    let hopeless = Instant::now() + Duration::from_secs(60);
    while !log_of(name).iter().any(|line| line.contains(text)) {
        assert!(Instant::now() < hopeless, "no {text:?} in {:?}", log_of(name));
        threads.iter().for_each(|thread| wait_a_turn(thread));
    }
}

/// Asserts that these are all lines about a server.
fn assert_lines(name: &str, expected: &[(&str, &str)]) {
    let lines = log_of(name);
    let is_expected = |(line, (level, text)): (&String, &(&str, &str))| {
        line.starts_with(level) && line.contains(text)
    };
    let fits = lines.len() == expected.len() && lines.iter().zip(expected).all(is_expected);
    assert!(fits, "{lines:?} in place of {expected:?}");
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_break_an_absence_and_a_return_have_a_line_each() {
    for (is_flushed, distrust) in [(false, false), (true, false), (false, true)] {
        let server = Server::start(MIB, FLAGS);
        let name = name(&server);
        let source = open(NbdOptions { distrust, ..server.options() });
        let thread = new_thread();
        let disk = Rc::new(source.attach(thread.io()));
        assert_eq!(Running::write(&thread, &disk, 0, 1).end(&thread), None);
        if is_flushed {
            assert_eq!(Running::flush(&thread, &disk).end(&thread), None);
        }
        server.change(|state| (state.is_full, state.holds) = (true, (READ, 2)));
        let _reads = [(); 2].map(|()| Running::start_one(&thread, &disk, READ));
        wait_for(&thread, &server, Event::Request(0, READ));
        while server.state().seen.iter().filter(|seen| seen.0 == READ).count() < 2 {
            wait_a_turn(&thread);
        }
        server.hang_up();
        wait_for_line(&[&thread], &name, "is away: ");
        server.change(|state| (state.is_full, state.holds) = (false, (0, 0)));
        wait_for_line(&[&thread], &name, "is back after ");
        let loss = match (is_flushed, distrust) {
            (true, _) => None,
            (_, true) => Some(("ERROR", "unflushed writes may be lost")),
            (_, false) => Some(("WARN", "unflushed writes are lost if the server's machine has")),
        };
        let broke = (
            "WARN",
            "a connection broke: the server has closed the connection; requests \
                              to be sent again: 2",
        );
        let away = ("WARN", "requests wait until a new connection succeeds");
        let mut expected = vec![broke];
        expected.extend(loss);
        expected.extend([away, ("INFO", "is back after ")]);
        assert_lines(&name, &expected);
    }
}

/// Lines about breaks have a limit, and a loss is logged in any case.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_loss_has_a_line_however_many_breaks_were_logged() {
    let server = Server::start(MIB, FLAGS);
    let name = name(&server);
    let thread = new_thread();
    let source = open(NbdOptions { distrust: true, ..server.options() });
    let disk = Rc::new(source.attach(thread.io()));
    let breaks = 23;
    for number in 1..=breaks {
        assert_eq!(read(&thread, &disk, 0), 0);
        if number == breaks {
            assert_eq!(Running::write(&thread, &disk, 0, 1).end(&thread), None);
        }
        server.hang_up();
        while source.remark().as_deref() == Some("connections: 1") {
            wait_a_turn(&thread);
        }
    }
    let lines = log_of(&name);
    let with = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
    assert_eq!(with("unflushed writes may be lost"), 1, "{lines:?}");
    assert!(with("is back after") <= with("a connection broke"), "{lines:?}");
    assert_eq!(lines.last().map(|line| line.starts_with("ERROR")), Some(true), "{lines:?}");
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn changes_that_a_server_may_still_make_are_logged() {
    let server = Server::start(MIB, FLAGS);
    let name = name(&server);
    let (thread, source) = (new_thread(), open(server.options()));
    let disk = Rc::new(source.attach(thread.io()));
    server.change(|state| (state.holds, state.lingers) = ((WRITE, 1), true));
    let _write = Running::write(&thread, &disk, 0, 1);
    wait_for(&thread, &server, Event::Request(0, WRITE));
    server.send_garbage();
    wait_for_line(&[&thread], &name, "may still execute unanswered writes (1)");
    assert_lines(
        &name,
        &[("WARN", "the server violates the NBD protocol"), ("WARN", "may still execute")],
    );
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_iothread_that_a_server_refuses_is_not_a_server_that_is_away() {
    let server = Server::start(MIB, FLAGS);
    let name = name(&server);
    let (source, first, second) = (open(server.options()), new_thread(), new_thread());
    let disk = Rc::new(source.attach(first.io()));
    assert_eq!(read(&first, &disk, 0), 0);
    server.change(|state| state.is_full = true);
    let late = Rc::new(source.attach(second.io()));
    wait_for_line(&[&first, &second], &name, "refuses the connection of an IoThread");
    let write = Running::start_one(&second, &late, WRITE);
    assert_eq!(end(&write, [&first, &second]), None);
    assert_lines(&name, &[("WARN", "its requests use connections of other IoThreads")]);
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_failed_flush_and_a_server_without_flushes_have_a_line() {
    let server = Server::start(MIB, FLAGS);
    let failing = name(&server);
    server.change(|state| state.failing_flushes = 2);
    let (thread, source) = (new_thread(), open(server.options()));
    let disk = Rc::new(source.attach(thread.io()));
    assert_eq!(Running::write(&thread, &disk, 0, 1).end(&thread), None);
    for _ in 0..3 {
        assert_eq!(Running::flush(&thread, &disk).end(&thread), Some(libc::EIO));
    }
    assert_lines(&failing, &[("ERROR", "the server has failed a flush: Input/output error")]);
    let without = Server::start(MIB, FLAGS & !can::FLUSH);
    let name = name(&without);
    let _source = open(without.options());
    assert_lines(&name, &[("WARN", "the server does not support flushes")]);
}

/// A new process takes over changes that no flush has covered.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_break_tells_of_unflushed_changes_once() {
    for (distrust, first, second) in [
        (false, UnflushedChanges::Trusted, UnflushedChanges::Trusted),
        (true, UnflushedChanges::Lost, UnflushedChanges::Nothing),
    ] {
        let server = Server::start(MIB, FLAGS);
        let options = NbdOptions { distrust, ..server.options() };
        let (connected, _) = super::super::connect::connect(&options).unwrap();
        let silence = Duration::from_secs(20);
        let shared = super::super::shared::SharedExport::new(options, false, silence, connected);
        assert_eq!(shared.on_break(), UnflushedChanges::Nothing);
        shared.inherit(false, false);
        assert_eq!((shared.on_break(), shared.on_break()), (first, second));
    }
}
