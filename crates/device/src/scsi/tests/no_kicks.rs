//! Drivers that make chains available and never kick.

use super::sharing::{
    ABORT_TASK_SET, ABORTED, CLEAR_TASK_SET, Control, NEXUS_RESET, OK, RESET, UNIT_RESET, read,
    three,
};
use super::*;

/// Other initiators do not wait for them, nor does their own driver.
#[test]
fn chains_without_a_kick_hold_up_no_task_management() {
    for function in [UNIT_RESET, CLEAR_TASK_SET, ABORT_TASK_SET, NEXUS_RESET] {
        let mut all = three();
        for initiator in &mut all {
            initiator.scene.turn(10);
            let chain = initiator.put(UNIT.bytes(), &read(), &[], 512);
            initiator.scene.offer_without_kick(&chain);
            initiator.scene.turn(10);
            assert!(!initiator.has_answer(), "nobody has told the device");
        }
        let mut control = Control::start(&all[0].device);
        let scenes: Vec<&Scene> = all.iter().map(|initiator| &initiator.scene).collect();
        assert_eq!(control.send(&scenes, function), OK);
        let response = if matches!(function, UNIT_RESET | NEXUS_RESET) { RESET } else { ABORTED };
        assert_eq!(all[0].end().response, response, "it was there before");
        assert!(!all[1].has_answer() && !all[2].has_answer());
    }
}
