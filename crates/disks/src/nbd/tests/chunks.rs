//! Replies in chunks, as most servers send them.

use std::rc::Rc;
use std::sync::Arc;

use blockio::disk::{Extent, ExtentKind};
use blockio::{Disk, IoThread};
use iomem::Buffers;

use super::super::SILENCE;
use super::super::channel::Channel;
use super::super::client::Client;
use super::super::connect::connect;
use super::super::options::NbdOptions;
use super::super::requests::{IssuedRequest, State};
use super::super::shared::SharedExport;
use super::super::wire::{Command, Request};
use super::scripted::{Event, READ, Server, WRITE};
use super::{FLAGS, MIB, Running, filled, new_thread, open, read, wait_a_turn, wait_for};

const NONE: u16 = 0;
const DATA: u16 = 1;
const HOLE: u16 = 2;
const STATUS: u16 = 6;
const ERROR: u16 = 0x8001;

/// A part of the reply to a request.
fn chunk(cookie: [u8; 8], is_last: bool, kind: u16, payload: &[&[u8]]) -> Vec<u8> {
    let payload = payload.concat();
    let head = [&[0x6e, 0x8a, 0x27, 0x8c, 0, u8::from(is_last)][..], &kind.to_be_bytes(), &cookie];
    let len = (payload.len() as u64).to_be_bytes();
    [&head.concat()[..], &[0; 8], &len, &payload].concat()
}

fn hole(offset: u64, bytes: u32) -> Vec<u8> {
    [&offset.to_be_bytes()[..], &bytes.to_be_bytes()].concat()
}

/// A read, and its memory.
fn start_read(thread: &IoThread, disk: &Rc<Disk>, offset: u64, bytes: usize) -> (Running, Buffers) {
    let memory = filled(0xee, bytes);
    let (view, disk) = (memory.duplicate(), Rc::clone(disk));
    let read = Running::start(thread.io(), async move {
        let read = disk.read(offset, memory).await;
        read.map_err(|unfinished| unfinished.error().raw_os_error())
    });
    (read, view)
}

/// The parts come in any order, and each changes its own bytes alone.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_parts_of_a_read_are_put_in_their_places() {
    const AT: u64 = 4096;
    // A long read goes directly into its memory.
    for quarter in [1024, 32_768] {
        let server = Server::start(MIB, FLAGS);
        server.change(|state| (state.is_extended, state.holds) = (true, (READ, 1)));
        let (thread, source) = (new_thread(), open(server.options()));
        let disk = Rc::new(source.attach(thread.io()));
        let (read, view) = start_read(&thread, &disk, AT, 4 * quarter);
        wait_for(&thread, &server, Event::Request(0, READ));
        let cookie = server.take_held()[0];
        let place = |index| AT + (index * quarter) as u64;
        let data = |index: usize, byte| {
            let offset = place(index).to_be_bytes();
            chunk(cookie, false, DATA, &[&offset[..], &vec![byte; quarter]])
        };
        let empty = hole(place(0), u32::try_from(quarter).unwrap());
        let parts = [
            data(3, 3),
            chunk(cookie, false, HOLE, &[&empty]),
            data(2, 2),
            data(1, 1),
            chunk(cookie, true, NONE, &[]),
        ];
        server.send(0, &parts.concat());
        assert_eq!(read.end(&thread), None);
        let expected: Vec<u8> = (0..4).flat_map(|byte| vec![byte; quarter]).collect();
        assert!(view.to_vec() == expected, "{quarter}");
        assert_eq!(server.state().connections, 1, "it is not understood");
    }
}

/// The requests go to another connection, whose answers count.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_connection_with_a_reply_against_the_protocol_is_replaced() {
    const AT: u64 = 4096;
    type Wrong = fn([u8; 8]) -> Vec<u8>;
    let data = |offset: u64, bytes: usize| [&offset.to_be_bytes()[..], &vec![9; bytes]].concat();
    let wrongs: [Wrong; 9] = [
        |cookie| chunk(cookie, true, DATA, &[&(AT - 1).to_be_bytes(), &[9; 4096]]),
        |cookie| chunk(cookie, true, DATA, &[&AT.to_be_bytes(), &[9; 4097]]),
        |cookie| chunk(cookie, true, DATA, &[&AT.to_be_bytes(), &[9; 4095]]),
        |cookie| chunk(cookie, true, HOLE, &[&hole(AT, 8192)]),
        |cookie| chunk(cookie, true, NONE, &[]),
        |cookie| chunk(cookie, true, STATUS, &[&[0; 7], &[1], &[1; 16]]),
        |cookie| chunk(cookie, true, 7, &[]),
        |cookie| chunk(cookie.map(|byte| !byte), true, NONE, &[]),
        |cookie| [&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0][..], &cookie, &[9; 4096]].concat(),
    ];
    let twice = data(AT, 2048);
    for index in 0..=wrongs.len() {
        let server = Server::start(MIB, FLAGS);
        server.change(|state| (state.is_extended, state.holds) = (true, (READ, 1)));
        let (thread, source) = (new_thread(), open(server.options()));
        let disk = Rc::new(source.attach(thread.io()));
        let (read, view) = start_read(&thread, &disk, AT, 4096);
        wait_for(&thread, &server, Event::Request(0, READ));
        let cookie = server.take_held()[0];
        let wrong = match wrongs.get(index) {
            Some(wrong) => wrong(cookie),
            None => [false, true].map(|end| chunk(cookie, end, DATA, &[&twice])).concat(),
        };
        server.send(0, &wrong);
        assert_eq!(read.end(&thread), None);
        assert!(view.to_vec() == [0; 4096], "reply {index}");
        assert_eq!(server.state().connections, 2, "reply {index} is understood");
    }
}

/// While data of a long read may come next, the heads of replies are received by themselves.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_error_with_a_long_text_is_received_beside_a_long_read() {
    let server = Server::start(MIB, FLAGS);
    server.change(|state| (state.is_extended, state.holds) = (true, (READ, 1)));
    let (thread, source) = (new_thread(), open(server.options()));
    let disk = Rc::new(source.attach(thread.io()));
    let (read, _) = start_read(&thread, &disk, 0, 65_536);
    wait_for(&thread, &server, Event::Request(0, READ));
    let cookie = server.take_held()[0];
    let text = [b'a'; 300];
    let len = u16::try_from(text.len()).unwrap().to_be_bytes();
    server.send(0, &chunk(cookie, true, ERROR, &[&28u32.to_be_bytes(), &len, &text]));
    assert_eq!(read.end(&thread), Some(libc::ENOSPC));
    assert_eq!(server.state().connections, 1, "it is not understood");
}

/// The server of the other connection may have come back without the data.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_answer_by_another_connection_is_no_answer() {
    for command in [READ, WRITE] {
        let server = Server::start(MIB, FLAGS);
        let options = NbdOptions { connections: 2, ..server.options() };
        let (thread, source) = (new_thread(), open(options));
        let disk = Rc::new(source.attach(thread.io()));
        while source.remark().is_none_or(|remark| !remark.ends_with(" 2")) {
            wait_a_turn(&thread);
        }
        server.change(|state| state.holds = (command, 1));
        let request = Running::start_one(&thread, &disk, command);
        wait_for(&thread, &server, Event::Request(0, command));
        server.answer_held_by(1);
        while server.state().connections < 3 && request.0.get().is_none() {
            wait_a_turn(&thread);
        }
        assert!(request.0.get().is_none(), "{command} is answered");
        server.hang_up();
        assert_eq!(request.end(&thread), None);
    }
}

/// A reply of some bytes may stand for a hole of a MiB, and other tasks would wait.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_call_zeroes_a_mib_of_holes() {
    const READS: u64 = 4;
    let server = Server::start(8 * MIB, FLAGS);
    let holds = (READ, usize::try_from(READS).unwrap());
    server.change(|state| (state.is_extended, state.holds) = (true, holds));
    let (thread, options) = (new_thread(), server.options());
    let (connected, _) = connect(&options).unwrap();
    let (of_disk, _) = connect(&options).unwrap();
    let shared = Arc::new(SharedExport::new(options, false, SILENCE, of_disk));
    let client = Client::new(thread.io(), &shared, shared.add_client(&thread.io().remote()), 1);
    client.link_is_up(0, &shared.facts);
    let reads = Vec::from_iter((0..READS).map(|index| {
        let (offset, len) = (index * MIB as u64, MIB as u64);
        let request = Request { command: Command::Read, flags: 0, offset, len };
        client.ticket(IssuedRequest::new(thread.io(), request), filled(0xee, MIB))
    }));
    let mut channel = Channel::new(0, connected);
    channel.send(&mut client.requests.borrow_mut()).unwrap();
    while server.state().seen.len() < holds.1 {
        std::thread::yield_now();
    }
    let cookies = server.take_held();
    let holes = cookies.iter().zip(0..).map(|(cookie, index)| {
        let empty = hole(index * MIB as u64, u32::try_from(MIB).unwrap());
        chunk(*cookie, true, HOLE, &[&empty])
    });
    server.send(0, &Vec::from_iter(holes).concat());
    let has_ended = |state: &State| matches!(state, State::Done(Ok(_)));
    let mut ended = 0;
    while ended < reads.len() {
        channel.may_receive();
        channel.receive(&mut client.requests.borrow_mut(), &shared).unwrap();
        let states = Vec::from_iter(client.requests.borrow().slots.iter().map(|slot| slot.state));
        let now = states.iter().filter(|state| has_ended(state)).count();
        assert!(now <= ended + 1, "{} MiB at once", now - ended);
        ended = now;
    }
    for read in reads {
        let (result, memory) = thread.block_on(read.wait()).unwrap();
        assert!(result.unwrap().is_ok() && memory.to_vec().iter().all(|byte| *byte == 0));
    }
}

/// The older of the two forms of chunks.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn data_and_holes_come_in_structured_replies() {
    let server = Server::start(MIB, FLAGS);
    server.change(|state| state.is_structured = true);
    let (thread, source) = (new_thread(), open(server.options()));
    let disk = Rc::new(source.attach(thread.io()));
    assert_eq!(Running::write(&thread, &disk, 4096, 7).end(&thread), None);
    assert_eq!([0, 4096].map(|offset| read(&thread, &disk, offset)), [0, 7]);
    let (all, hole) = (MIB as u64, MIB as u64 / 2);
    for (offset, bytes, expected) in [
        (0, all, Extent::data(hole)),
        (hole - 4096, 8192, Extent::data(4096)),
        (hole, 4096, Extent { bytes: 4096, kind: ExtentKind::Hole }),
    ] {
        let found = thread.block_on(disk.block_status(offset, bytes)).unwrap().unwrap();
        assert_eq!(found, expected, "{offset} {bytes}");
    }
    server.change(|state| state.fails = Some((READ, 28)));
    assert_eq!(Running::start_one(&thread, &disk, READ).end(&thread), Some(libc::ENOSPC));
    assert_eq!(server.state().connections, 1, "a reply is not understood");
}
