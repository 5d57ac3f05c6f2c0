//! Chains that have a fault, such as a buffer that is not in guest memory.

use virtqueue::driver::WRITE;

use super::sharing::{Control, FAILURE};
use super::*;

/// An address without memory.
const NOWHERE: u64 = 1 << 40;

/// Offers the chain of a read, after `change` has broken a part of it.
fn offer_read(initiator: &mut Initiator, change: impl FnOnce(&mut Vec<Desc>)) {
    let mut chain = initiator.put(UNIT.bytes(), &cdb10(0x28, 0, 0, 1), &[], 0);
    chain.push(Desc::writable(RESPONSE + 0x1000, 512));
    change(&mut chain);
    initiator.scene.offer(&chain);
}

fn nowhere(desc: &mut Desc) {
    desc.addr = NOWHERE;
}

#[test]
fn a_command_whose_buffers_are_not_in_memory_fails_alone() {
    let order = "a device-readable descriptor follows a device-writable one";
    type Case<'a> = (fn(&mut Vec<Desc>), &'a str);
    let cases: [Case<'_>; 5] = [
        (|chain| nowhere(&mut chain[3]), "is not mapped"),
        (|chain| nowhere(&mut chain[0]), "is not mapped"),
        (|chain| chain.insert(0, Desc::readable(NOWHERE, 9)), "is not mapped"),
        (|chain| chain.push(Desc::readable(DATA, 9)), order),
        (|chain| chain[3].flags &= !WRITE, order),
    ];
    let mut initiator = Initiator::new();
    for (change, why) in cases {
        offer_read(&mut initiator, change);
        let used = initiator.scene.answer();
        assert_eq!(used.bytes, RESPONSE_BYTES, "{why}");
        let mut response = [0xee; RESPONSE_BYTES as usize];
        initiator.scene.memory.read(RESPONSE, &mut response).unwrap();
        let mut expected = [0; RESPONSE_BYTES as usize];
        expected[11] = FAILURE;
        // The amount of data is unknown.
        response[4..8].fill(0);
        assert_eq!(response, expected, "{why}");
        let [told] = &initiator.scene.events.take()[..] else { panic!("{why}: not told once") };
        assert!(told.contains(why), "{told}");
        initiator.good(&cdb10(0x28, 0, 0, 1), &[], 512);
    }
}

#[test]
fn a_queue_stops_if_the_fault_is_where_the_response_belongs() {
    let cases: [fn(&mut Vec<Desc>); 3] = [
        |chain| nowhere(&mut chain[1]),
        |chain| nowhere(&mut chain[2]),
        |chain| chain.insert(1, Desc::writable(NOWHERE, 9)),
    ];
    for change in cases {
        let mut initiator = Initiator::new();
        offer_read(&mut initiator, change);
        assert_eq!(initiator.scene.answer().bytes, 0);
        let [told] = &initiator.scene.events.take()[..] else { panic!("it is not told once") };
        assert!(told.contains("its queue stops") && told.contains("is not mapped"), "{told}");
    }
}

#[test]
fn a_function_whose_buffers_are_not_in_memory_fails_alone() {
    let initiator = Initiator::new();
    let mut control = Control::start(&initiator.device);
    let unmapped = Desc::readable(NOWHERE, 24);
    assert_eq!(control.answer_to(&[unmapped, Desc::writable(RESPONSE, 1)]), [FAILURE, 0xee]);
    let order = [Desc::readable(DATA, 24), Desc::writable(RESPONSE, 1), Desc::readable(DATA, 1)];
    assert_eq!(control.answer_to(&order), [FAILURE, 0xee]);
    // A request about notifications: the result follows the events.
    let answer = control.answer_to(&[unmapped, Desc::writable(RESPONSE, 5)]);
    assert_eq!(answer, [FAILURE, 0, 0, 0, FAILURE]);
    assert_eq!(control.send(&[&initiator.scene], 7), 0);
}
