//! Devices that continue in another process.

use super::*;
use crate::blk::config::BlkOptions;

/// Initiators see no event that would not have happened anyway.
#[test]
fn a_device_resumes_with_the_state_of_its_initiators() {
    let before = Initiator::new();
    let awaited = UnitOptions { access: Arc::new(DiskAccess::for_hand_over()), ..options() };
    let mut after = before.beside(&awaited);
    let scsi = Initiator::scsi(&before.device);
    scsi.access(UNIT).unwrap().refresh();
    before.access().set_cache_off(true);
    let (state, files) = before.device.hand_over().unwrap();
    assert_eq!(files.len(), 1);
    let text = serde_json::to_string(&state).unwrap();
    after.device.resume(serde_json::from_str(&text).unwrap(), files).unwrap();
    assert_eq!(after.device.hand_over().unwrap().0, state);
    assert!(awaited.access.cache_is_off());
    assert_eq!(after.run(&[0; 6], &[], 0).sense, [6, 0x2a, 9], "what was not heard yet");
    assert_eq!(after.run(&[0; 6], &[], 0).sense, [0; 3], "the device did not begin anew");

    let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
    let blk = Device::blk(source, BlkOptions::default(), before.scene.events.clone());
    assert!(blk.resume(state.clone(), Vec::new()).is_err());
    let empty = Device::scsi(ScsiOptions::default(), before.scene.events.clone());
    assert!(empty.resume(state.clone(), Vec::new()).is_err(), "it has no such unit");
    let awaited = UnitOptions { access: Arc::new(DiskAccess::for_hand_over()), ..options() };
    let more = before.beside(&awaited);
    let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
    let other = UnitAddress { lun: UNIT.lun + 1, ..UNIT };
    let another = UnitOptions { serial: "other".into(), naa: [0x31; 8], ..options() };
    Initiator::scsi(&more.device).add_unit(other, source, another).unwrap();
    assert!(more.device.resume(state, Vec::new()).is_err(), "one unit has no state");
}
