//! Commands that wait while another one has the medium to itself.

use super::sharing::{hold, three, turn_until, write};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

const RESERVATION_CONFLICT: u8 = 0x18;

/// What was allowed when a command came may not be any more when it is carried out.
#[test]
fn a_reservation_holds_for_commands_that_wait_for_the_medium() {
    let compare_and_write = {
        let mut cdb = vec![0x89];
        cdb.resize(16, 0);
        cdb[13] = 1;
        cdb
    };
    // The write cache is switched off, so others must not write meanwhile.
    let mode_select = [0x15, 0x10, 0, 0, 24, 0].to_vec();
    let mut caching = vec![0; 24];
    caching[4..6].copy_from_slice(&[0x08, 18]);
    for (cdb, data) in
        [(write(), vec![0; BLOCK]), (compare_and_write, vec![0; 2 * BLOCK]), (mode_select, caching)]
    {
        let mut all = three();
        let (register, list) = reserve_out(0, 0, [0, 1]);
        all[0].good(&register, &list, 0);
        let held = hold(&mut all);
        all[1].begin(UNIT.bytes(), &cdb, &data, 0);
        all[1].scene.turn(10);
        let (reserve, list) = reserve_out(1, 1, [1, 0]);
        all[0].begin(UNIT.bytes(), &reserve, &list, 0);
        turn_until(&mut all, |all| all[0].has_answer());
        assert_eq!(all[0].end().status, 0);
        assert!(!all[1].has_answer(), "it waits");
        drop(held);
        turn_until(&mut all, |all| all[1].has_answer());
        assert_eq!(all[1].end().status, RESERVATION_CONFLICT, "{cdb:02x?}");
    }
}

/// One that has begun when another takes the medium is what the other waits for.
#[test]
fn commands_on_two_threads_do_not_wait_for_each_other() {
    const COMMANDS: u32 = 10_000;
    let disk = NamedTempFile::new().unwrap();
    disk.as_file().set_len(BLOCKS * BLOCK as u64).unwrap();
    let (disk, common) = (Arc::new(disk), options());
    let disk_options = DiskOptions { no_lock: true, ..DiskOptions::default() };
    let mut compare = cdb16(0x89, 0, 0, 0);
    compare[13] = 1;
    let unmap = vec![0x42, 0, 0, 0, 0, 0, 0, 0, 8, 0];
    let kinds = [(compare, vec![0; 2 * BLOCK]), (unmap, vec![0, 6, 0, 0, 0, 0, 0, 0])];
    // A thread that ends would be waited for: it takes turns until all have sent their commands.
    let busy = AtomicUsize::new(kinds.len());
    let drive = |place: u8, cdb: &[u8], data: &[u8]| {
        let mut options = common.clone();
        options.port[6] = place;
        let mut initiator = Initiator::on(Arc::clone(&disk), &disk_options, options);
        for _ in 0..COMMANDS {
            initiator.good(cdb, data, 0);
        }
        busy.fetch_sub(1, Ordering::Relaxed);
        while busy.load(Ordering::Relaxed) > 0 {
            initiator.scene.turn(1);
            std::thread::yield_now();
        }
    };
    std::thread::scope(|scope| {
        let drive = &drive;
        for (place, (cdb, data)) in (0..).zip(&kinds) {
            scope.spawn(move || drive(place, cdb, data));
        }
    });
}
