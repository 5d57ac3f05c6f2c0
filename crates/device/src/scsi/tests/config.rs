//! Features, and the configuration space with its two writable fields.

use std::sync::atomic::Ordering;

use super::*;

const SENSE_SIZE: usize = 20;
const CDB_SIZE: usize = 24;
const FAILURE: u8 = 9;

#[test]
fn features_are_offered() {
    // HOTPLUG, CHANGE, ANY_LAYOUT, INDIRECT_DESC, EVENT_IDX, VERSION_1, RING_PACKED.
    let expected = [1, 2, 27, 28, 29, 32, 34].iter().fold(0, |all, bit| all | 1 << bit);
    assert_eq!(Initiator::new().device.features(), expected);
}

#[test]
fn the_configuration_space_is_as_the_specification_has_it() {
    let options = ScsiOptions { num_queues: 3, queue_size: 256, ..ScsiOptions::default() };
    let device = Device::scsi(options, Scene::new().events.clone());
    let expected = [
        // num_queues, seg_max, max_sectors, cmd_per_lun.
        [3, 0, 0, 0],
        [254, 0, 0, 0],
        [0xff, 0xff, 0x7f, 0],
        [0, 1, 0, 0],
        // event_info_size, sense_size, cdb_size.
        [16, 0, 0, 0],
        [96, 0, 0, 0],
        [32, 0, 0, 0],
        // max_channel and max_target, max_lun.
        [0, 0, 255, 0],
        [0xff, 0x3f, 0, 0],
    ];
    assert_eq!(device.config_space(), expected.concat());
}

impl Initiator {
    fn set_sizes(&self, [sense_size, cdb_size]: [u32; 2]) {
        self.device.write_config(SENSE_SIZE, &sense_size.to_le_bytes()).unwrap();
        self.device.write_config(CDB_SIZE, &cdb_size.to_le_bytes()).unwrap();
    }

    /// Sends a request, with bytes of room for a response and for data. Returns all written bytes.
    fn send_sized(&mut self, request: &[u8], response_bytes: u32, room: u32) -> Vec<u8> {
        let memory = &self.scene.memory;
        memory.write(DATA, request).unwrap();
        memory.write(RESPONSE, &vec![0xee; (response_bytes + room) as usize]).unwrap();
        let request = Desc::readable(DATA, u32::try_from(request.len()).unwrap());
        self.scene.offer(&[request, Desc::writable(RESPONSE, response_bytes + room)]);
        let used = self.scene.answer();
        assert!(used.bytes >= response_bytes, "{used:?}");
        let mut seen = vec![0; used.bytes as usize];
        self.scene.memory.read(RESPONSE, &mut seen).unwrap();
        seen
    }
}

fn sizes_of(device: &Device) -> [u32; 2] {
    let space = device.config_space();
    [SENSE_SIZE, CDB_SIZE].map(|at| u32::from_le_bytes(*space[at..].first_chunk().unwrap()))
}

#[test]
fn requests_have_the_sizes_that_the_driver_writes() {
    let mut initiator = Initiator::new();
    let mut value = 0;
    for sense_size in [0, 12, 17, 96, 252, 260] {
        for cdb_size in [0, 6, 15, 16, 17, 32, 260] {
            let sizes = [sense_size, cdb_size];
            initiator.set_sizes(sizes);
            assert_eq!(sizes_of(&initiator.device), sizes);
            let whole = 12 + sense_size;
            let request = |cdb: &[u8]| {
                let mut request = [&UNIT.bytes()[..], &[0; 11]].concat();
                request.extend(cdb);
                request.resize(19 + cdb_size as usize, 0);
                request
            };
            let short = &request(&[])[1..];
            assert_eq!(initiator.send_sized(short, whole, 0)[11], FAILURE, "{sizes:?}");
            // No command fits into zero bytes.
            let refused = initiator.send_sized(&request(&[0xff]), whole, 0);
            let kept = sense_size.min(18);
            assert_eq!(refused[..4], kept.to_le_bytes(), "{sizes:?}");
            let mut sense = [0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0].to_vec();
            sense.resize(260, 0);
            assert_eq!((refused[10], &refused[12..]), (2, &sense[..sense_size as usize]));
            if cdb_size == 0 {
                continue;
            }
            let ready = initiator.send_sized(&request(&[]), whole, 0);
            assert_eq!(ready, vec![0; whole as usize], "{sizes:?}");
            value += 1;
            let write = [request(&[0x0a, 0, 0, 7, 1, 0]), vec![value; BLOCK]].concat();
            initiator.send_sized(&write, whole, 0);
            let read = initiator.send_sized(&request(&[0x08, 0, 0, 7, 1, 0]), whole, 512);
            assert_eq!(read[whole as usize..], [value; BLOCK], "{sizes:?}");
            assert_eq!(initiator.on_disk(7), [value; BLOCK], "{sizes:?}");
        }
    }
}

#[test]
fn sizes_are_the_drivers_choice_for_as_long_as_it_is_there() {
    let initiator = Initiator::new();
    initiator.set_sizes([252, 16]);
    for at in [SENSE_SIZE, CDB_SIZE] {
        assert!(initiator.device.write_config(at, &261_u32.to_le_bytes()).is_err());
        assert!(initiator.device.write_config(at, &[1, 0]).is_err(), "a part");
    }
    assert!(initiator.device.write_config(0, &1_u32.to_le_bytes()).is_err(), "another field");
    assert_eq!(sizes_of(&initiator.device), [252, 16]);
    let negotiated = initiator.device.negotiated();
    initiator.device.reset();
    assert_eq!(sizes_of(&initiator.device), [96, 32]);
    initiator.device.restore(&negotiated);
    assert_eq!(sizes_of(&initiator.device), [252, 16]);
    let other = Device::scsi(ScsiOptions::default(), initiator.scene.events.clone());
    assert!(!other.take_over(&negotiated).unwrap());
    assert_eq!(sizes_of(&other), [252, 16]);
}

/// There may be many queues and units.
#[test]
fn a_queue_has_the_units_alone_that_it_had_commands_for() {
    let mut initiator = Initiator::new();
    let device = initiator.device.clone();
    let scsi = Initiator::scsi(&device);
    let [first, other] = [9, 10].map(|lun| UnitAddress { target: 3, lun });
    for unit in [first, other] {
        let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
        let access = Arc::default();
        let naa = [0x30, 0, 0, 0, 0, 0, 0, unit.lun.to_le_bytes()[0]];
        scsi.add_unit(unit, source, UnitOptions { naa, access, ..options() }).unwrap();
    }
    let attached = |initiator: &Initiator| {
        let attached = scsi.queues().attached();
        initiator.scene.turn(5);
        attached.load(Ordering::Relaxed)
    };
    initiator.good(&[0; 6], &[], 0);
    assert_eq!(attached(&initiator), 1);
    // The second unit was added later, which this one reports.
    for sense in [[6, 0x29, 0], [6, 0x3f, 0x0e], [0; 3]] {
        assert_eq!(initiator.run_at(first.bytes(), &[0; 6], &[], 0).sense, sense);
    }
    assert_eq!(attached(&initiator), 2);
    initiator.good(&[0; 6], &[], 0);
    assert!(scsi.remove_unit(first).is_some());
    assert_eq!(attached(&initiator), 1);
    assert_eq!(initiator.run_at(first.bytes(), &[0; 6], &[], 0).sense, [5, 0x25, 0]);
    initiator.good(&[0; 6], &[], 0);
}
