//! Changes that a server may still execute hold later ones back.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockio::IoThread;
use iomem::Buffers;

use super::super::client::{Client, Ticket};
use super::super::connect::connect;
use super::super::drain::release_closed_orphans;
use super::super::handshake::can;
use super::super::options::NbdOptions;
use super::super::requests::{IssuedRequest, State};
use super::super::shared::{Condition, Orphan, SharedExport};
use super::super::wire::{Command, Request};
use super::scripted::Server;
use super::{FLAGS, MIB, new_thread};

/// A connection of an IoThread, which carries nothing.
struct Scene {
    client: Rc<Client>,
    thread: IoThread,
    server: Server,
}

impl Scene {
    fn new() -> Self {
        let (server, thread) = (Server::start(MIB, FLAGS), new_thread());
        let (connected, _) = connect(&server.options()).unwrap();
        let silence = Duration::from_secs(20);
        let shared = Arc::new(SharedExport::new(server.options(), false, silence, connected));
        let number = shared.add_client(&thread.io().remote());
        let client = Client::new(thread.io(), &shared, number, 1);
        client.link_is_up(0, &shared.facts);
        Self { client, thread, server }
    }

    fn write(&self, offset: u64) -> Ticket {
        let request = Request { command: Command::Write, flags: 0, offset, len: 512 };
        let made = IssuedRequest::new(self.thread.io(), request);
        self.client.ticket(made, Buffers::aligned(512, 512))
    }

    /// The server gets all requests in line.
    fn send(&self) {
        let requests = &mut *self.client.requests.borrow_mut();
        for slot in std::mem::take(&mut requests.links[0].sending) {
            requests.slots[slot as usize].state = State::Sent(0);
            requests.links[0].sent += 1;
        }
    }

    fn holds(&self, range: Range<u64>) -> bool {
        self.client.shared.held.has(&range)
    }
}

/// A server that breaks off again and again keeps a bounded number of connections.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn too_many_abandoned_connections_hold_all_changes_until_the_last_answer() {
    let scene = Scene::new();
    let (client, io) = (&scene.client, Rc::clone(scene.thread.io()));
    let tickets = [0, 4096].map(|offset| scene.write(offset));
    scene.send();
    let few = client.abandon_link(0).unwrap();
    assert_eq!((few.changes(), scene.holds(0..512), scene.holds(8192..8704)), (2, true, false));
    // Another connection is waited for.
    let task = scene.thread.block_on(async move { io.current_task() }).unwrap();
    client.draining.borrow_mut().push(task);
    let mut many = client.abandon_link(0).unwrap();
    assert!(scene.holds(8192..8704), "one more connection would be abandoned");
    for (slot, is_last) in [(0, false), (1, true)] {
        many.requests.finish(slot, Err(libc::EIO), &client.shared);
        assert_eq!(client.release_answered(&mut many), is_last);
        assert_eq!(scene.holds(8192..8704), !is_last, "answer {slot}");
    }
    client.draining.borrow_mut().clear();
    assert_eq!(client.link_is_down(0), 2);
    client.fail(libc::EIO, None);
    drop(tickets);
}

/// A flush over one connection would not cover the writes over another one.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn requests_go_to_another_connection_only_if_flushes_cover_all() {
    for (flags, distrust, read_only, is_found) in [
        (FLAGS, false, false, true),
        (FLAGS, true, false, false),
        (FLAGS, true, true, true),
        (FLAGS & !can::MULTI_CONN, false, false, false),
        (FLAGS & !can::MULTI_CONN, false, true, false),
    ] {
        let (server, thread) = (Server::start(MIB, flags), new_thread());
        let options = NbdOptions { distrust, ..server.options() };
        let (connected, _) = connect(&options).unwrap();
        let shared = SharedExport::new(options, read_only, Duration::from_secs(20), connected);
        let [one, two] = [(); 2].map(|()| shared.add_client(&thread.io().remote()));
        [one, two].iter().for_each(|client| shared.set_condition(*client, Condition::Up(1)));
        let found = shared.another_client(one).map(|(number, _)| number);
        assert_eq!(found, is_found.then_some(two), "{flags:#x}, {distrust}, {read_only}");
    }
}

/// A slot says nothing about the age of its request.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn requests_are_sent_again_in_the_order_in_which_they_came() {
    let scene = Scene::new();
    let requests = || scene.client.requests.borrow_mut();
    let (first, second) = (scene.write(0), scene.write(4096));
    requests().finish(0, Err(libc::EIO), &scene.client.shared);
    scene.thread.block_on(first.wait()).unwrap();
    requests().links[0].sending.clear();
    // It has the slot of the first one.
    let third = scene.write(8192);
    for _ in 0..3 {
        assert_eq!(scene.client.link_is_down(0), 2);
        assert_eq!(requests().waiting, [1, 0]);
        scene.client.link_is_up(0, &scene.client.shared.facts);
        assert_eq!(requests().links[0].sending, [1, 0]);
    }
    assert_eq!(scene.client.link_is_down(0), 2);
    scene.client.fail(libc::EIO, None);
    drop((second, third));
}

/// A connection that this machine has cut may have reached a server that still writes.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn only_a_close_that_shows_the_end_of_changes_releases_them() {
    for close_is_visible in [false, true] {
        let scene = Scene::new();
        let shared = &scene.client.shared;
        let (connected, _) = connect(&scene.server.options()).unwrap();
        let holder = shared.held.add(vec![0..4096, 8192..12288]);
        shared.put_orphan(Orphan { connected, close_is_visible, holder });
        release_closed_orphans(shared);
        assert!(scene.holds(0..512), "the server has not closed it");
        scene.server.hang_up();
        release_closed_orphans(shared);
        assert_eq!(scene.holds(0..512), !close_is_visible);
        assert_eq!(shared.take_orphans().len(), usize::from(!close_is_visible));
    }
}
