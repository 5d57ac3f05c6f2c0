//! Task management of a virtio-scsi device whose rings stop.

use std::sync::Arc;

use device::scsi::config::ScsiOptions;
use device::scsi::unit::UnitOptions;
use device::unit_address::UnitAddress;
use virtqueue::driver::{Desc, Driver};
use virtqueue::{GuestMemory, QueueConfig};

use super::*;

/// Entries of each ring.
const SIZE: u16 = 128;
const UNIT: UnitAddress = UnitAddress { target: 0, lun: 1 };
const LUN: [u8; 8] = [1, 0, 0x40, 1, 0, 0, 0, 0];
/// Addresses of the buffers of commands and functions.
const COMMAND: u64 = GUEST_ADDR + 0x4_0000;
const FUNCTION: u64 = GUEST_ADDR + 0x5_0000;
/// More than a queue pops in a run.
const COMMANDS: usize = 60;

fn scsi() -> Device {
    let device = Device::scsi(ScsiOptions::default(), Arc::new(LogEvents::new("test")));
    let Device::Scsi(scsi) = &device else { unreachable!() };
    let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
    let options = UnitOptions::new([0x30; 8], [0x31; 8]);
    scsi.add_unit(UNIT, source, options).unwrap();
    device
}

/// Makes the driver of a ring of `scene`.
fn driver(scene: &Scene, ring: u64) -> Driver<Arc<GuestMemory>> {
    let at = GUEST_ADDR + 0x4000 * ring;
    let config = QueueConfig {
        size: SIZE,
        desc_table: at,
        avail_ring: at + 0x1000,
        used_ring: at + 0x2000,
        event_idx: false,
        indirect: false,
        next_avail: 0,
    };
    Driver::new(Arc::clone(&scene.connection.memory.map), config)
}

/// Otherwise the driver would escalate. The function covers all commands that the driver has made
/// available, also unpopped ones at the time of the stop.
#[test]
fn a_function_succeeds_whose_ring_stops_with_the_others() {
    for how in ["pause", "message", "end"] {
        let mut scene = Scene::with_device(scsi(), PROTOCOL_FEATURES & !protocol_feature::CONFIG);
        scene.start_with(SIZE.into());
        let memory = Arc::clone(&scene.connection.memory.map);
        let (mut functions, mut commands) = (driver(&scene, 0), driver(&scene, 2));
        memory.write(COMMAND, &LUN).unwrap();
        for _ in 0..COMMANDS {
            commands
                .add(&[Desc::readable(COMMAND, 51), Desc::writable(COMMAND + 0x100, 108)], None);
        }
        commands.publish();
        // ABORT TASK SET.
        memory.write(FUNCTION, &[0, 0, 0, 0, 1, 0, 0, 0]).unwrap();
        memory.write(FUNCTION + 8, &LUN).unwrap();
        memory.write(FUNCTION + 0x100, &[0xee]).unwrap();
        functions.add(&[Desc::readable(FUNCTION, 24), Desc::writable(FUNCTION + 0x100, 1)], None);
        functions.publish();
        match how {
            "pause" => {
                scene.connection.begin_pause();
                scene.settle().unwrap();
            }
            "message" => {
                let features = Request::SetFeatures(F_PROTOCOL_FEATURES | 1 << 32);
                assert_eq!(scene.send(&features, vec![]), Ended::Done);
            }
            _ => {
                while !scene.connection.stop_for_good(false) {
                    scene.io.turn(Wait::Never).unwrap();
                }
            }
        }
        assert!(functions.take_used().is_some(), "{how}");
        let mut response = [0xff];
        memory.read(FUNCTION + 0x100, &mut response).unwrap();
        assert_eq!(response, [0], "{how}: it is not COMPLETE");
        drop((functions, commands, memory));
        scene.end();
    }
}
