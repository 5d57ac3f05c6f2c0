//! Commands that wait while another one has the medium to itself.

use super::sharing::{hold, three, turn_until, write};
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
