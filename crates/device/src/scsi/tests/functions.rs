//! Task management functions that a driver sends without waiting for the answers.

use std::sync::atomic::Ordering;

use super::sharing::{
    ABORT_TASK_SET, ABORTED, BAD_TARGET, Control, NEXUS_RESET, OK, UNIT_RESET, hold, read, three,
};
use super::*;
use crate::scsi::control_queue::FUNCTIONS_MAX;

#[test]
fn however_many_functions_there_are_few_wait_for_tasks_at_a_time() {
    let mut all = three();
    let held = hold(&mut all);
    let chain = all[0].put(UNIT.bytes(), &read(), &[], 512);
    all[0].scene.offer(&chain);
    all[0].scene.turn(10);
    let mut control = Control::start(&all[0].device);
    let functions = [ABORT_TASK_SET, UNIT_RESET, NEXUS_RESET].repeat(FUNCTIONS_MAX);
    let scenes: Vec<&Scene> = all.iter().map(|initiator| &initiator.scene).collect();
    for function in &functions {
        control.begin(*function);
        for _ in 0..10 {
            assert_eq!(control.turn(&scenes), None, "a task has not ended");
        }
    }
    let awaited = Initiator::scsi(&all[0].device).queues().awaited();
    scenes.iter().for_each(|scene| scene.turn(10));
    // Those about the unit, and those about its target.
    assert_eq!(awaited.load(Ordering::Relaxed), 2 * FUNCTIONS_MAX);
    drop(held);
    for function in functions {
        assert_eq!(control.end(&scenes), OK, "{function}");
    }
    assert_eq!(all[0].end().response, ABORTED, "the first function ended it");
}

#[test]
fn functions_about_a_unit_that_hangs_hold_up_none_about_others() {
    const INCORRECT_LUN: u8 = 12;
    let mut all = three();
    let healthy = UnitAddress { target: 0, lun: 2 };
    let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
    let other = UnitOptions { naa: [0x30, 0, 0, 0, 0, 0, 0, 9], ..options() };
    Initiator::scsi(&all[0].device).add_unit(healthy, source, other).unwrap();
    assert_eq!(all[0].sense(&[0; 6], &[], 0), [6, 0x3f, 0x0e]);
    let held = hold(&mut all);
    let chain = all[0].put(UNIT.bytes(), &read(), &[], 512);
    all[0].scene.offer(&chain);
    all[0].scene.turn(10);
    let mut control = Control::start(&all[0].device);
    let scenes: Vec<&Scene> = all.iter().map(|initiator| &initiator.scene).collect();
    for _ in 0..=FUNCTIONS_MAX {
        control.begin(ABORT_TASK_SET);
        for _ in 0..10 {
            assert_eq!(control.turn(&scenes), None, "a task has not ended");
        }
    }
    let none = UnitAddress { target: 9, lun: 0 };
    let absent = UnitAddress { target: 0, lun: 3 };
    for (unit, response) in [(healthy, OK), (none, BAD_TARGET), (absent, INCORRECT_LUN)] {
        control.begin_at(unit, ABORT_TASK_SET);
        assert_eq!(control.end(&scenes), response, "{unit}");
    }
    drop(held);
    for _ in 0..=FUNCTIONS_MAX {
        assert_eq!(control.end(&scenes), OK);
    }
    assert_eq!(all[0].end().response, ABORTED);
}
