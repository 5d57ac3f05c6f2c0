//! Task management functions that a driver sends without waiting for the answers.

use std::sync::atomic::Ordering;

use super::sharing::{
    ABORT_TASK_SET, ABORTED, Control, NEXUS_RESET, OK, UNIT_RESET, hold, read, three,
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
    assert_eq!(awaited.load(Ordering::Relaxed), FUNCTIONS_MAX);
    drop(held);
    for function in functions {
        assert_eq!(control.end(&scenes), OK, "{function}");
    }
    assert_eq!(all[0].end().response, ABORTED, "the first function ended it");
}
