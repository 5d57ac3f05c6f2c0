//! The count of large reads. While it is not 0, the header of each reply takes a call of its own.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockio::driver::Driver as _;

use super::super::client::Client;
use super::super::connect::connect;
use super::super::connection_task::Handle;
use super::super::disk::NbdDisk;
use super::super::requests::LARGE_BYTES;
use super::super::shared::SharedExport;
use super::scripted::{Event, READ, Server};
use super::{FLAGS, MIB, Outcome, Running, filled, new_thread, wait_for};

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_large_read_counts_from_its_request_to_its_answer_or_the_end_of_its_connection() {
    let server = Server::start(MIB, FLAGS);
    let (connected, _) = connect(&server.options()).unwrap();
    let shared = SharedExport::new(server.options(), false, Duration::from_secs(60), connected);
    let (thread, shared) = (new_thread(), Arc::new(shared));
    let handle = Arc::new(Handle { shared: Arc::clone(&shared) });
    let disk = Rc::new(NbdDisk::new(&handle, thread.io()));
    let client = Client::find(thread.io(), &shared).unwrap();
    let count = || client.requests.borrow().links[0].large_reads;
    let read = |bytes: u64| {
        let (disk, memory) = (Rc::clone(&disk), filled(0, usize::try_from(bytes).unwrap()));
        Running::start(thread.io(), async move {
            let read: Outcome = disk.read(0, memory).await.map_err(|_| None);
            read
        })
    };
    assert_eq!(read(LARGE_BYTES).end(&thread), None);
    assert_eq!(count(), 0, "it is answered");
    for (connection, breaks) in [(0, false), (0, true), (1, false)] {
        server.change(|state| {
            state.events.clear();
            state.holds = (READ, 2);
        });
        let reads = [LARGE_BYTES, LARGE_BYTES - 1].map(read);
        while server.state().events.len() < 2 {
            wait_for(&thread, &server, Event::Request(connection, READ));
        }
        assert_eq!(count(), 1, "one of them is large");
        match breaks {
            true => server.hang_up(),
            false => server.answer_held(),
        }
        for read in reads {
            assert_eq!(read.end(&thread), None);
        }
        assert_eq!(count(), 0, "a break: {breaks}");
    }
    drop(client);
}
