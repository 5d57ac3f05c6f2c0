//! Commands of an initiator that another one excludes by a reservation.

use super::*;
use crate::scsi::cdb::{COMMANDS, Op};

const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const CONFLICT: u8 = 0x18;
const WRITE_EXCLUSIVE: u8 = 1;
const EXCLUSIVE_ACCESS: u8 = 3;

/// The types of reservations that exclude a command, by the tables of SPC-4 and SBC-4.
fn excluding(op: Op) -> &'static [u8] {
    match op {
        Op::Write
        | Op::WriteAndVerify
        | Op::WriteSame
        | Op::CompareAndWrite
        | Op::Unmap
        | Op::SynchronizeCache
        | Op::ModeSelect
        | Op::StartStopUnit => &[WRITE_EXCLUSIVE, EXCLUSIVE_ACCESS],
        Op::Read
        | Op::Verify
        | Op::GetLbaStatus
        | Op::ModeSense
        | Op::ReportOpcodes
        | Op::ReportTaskManagement => &[EXCLUSIVE_ACCESS],
        Op::TestUnitReady
        | Op::RequestSense
        | Op::Inquiry
        | Op::LogSense
        | Op::PreventAllow
        | Op::ReadCapacity10
        | Op::ReadCapacity16
        | Op::ReportLuns
        | Op::ReserveIn
        | Op::ReserveOut => &[],
    }
}

#[test]
fn a_reservation_excludes_each_command_of_its_class() {
    let disk_options = DiskOptions { no_lock: true, ..DiskOptions::default() };
    for kind in [WRITE_EXCLUSIVE, EXCLUSIVE_ACCESS] {
        let options = options();
        let disk = NamedTempFile::new().unwrap();
        disk.as_file().set_len(BLOCKS * BLOCK as u64).unwrap();
        let mut holder = Initiator::on(Arc::new(disk), &disk_options, options.clone());
        let mut other = holder.beside(&options);
        for (action, keys) in [(REGISTER, [0, 1]), (RESERVE, [1, 0])] {
            let (cdb, list) = reserve_out(action, kind, keys);
            assert_eq!(holder.run(&cdb, &list, 0).status, 0);
        }
        for command in COMMANDS {
            let mut cdb = vec![0; command.usage.len()];
            cdb[0] = command.usage[0];
            if command.has_service_action {
                cdb[1] = command.usage[1] & 0x1f;
            }
            let is_excluded = excluding(command.op).contains(&kind);
            let answer = other.run(&cdb, &[], 0);
            // Register without a key is no conflict; the list is too short for any.
            assert_eq!(answer.status == CONFLICT, is_excluded, "{kind} {cdb:x?} {answer:x?}");
            if is_excluded {
                assert_ne!(holder.run(&cdb, &[], 0).status, CONFLICT, "{cdb:x?}");
            }
        }
        // A unit may be started and its removal allowed, but nothing else of that.
        for (cdb, is_excluded) in [
            ([0x1b, 0, 0, 0, 0x01, 0], false),
            ([0x1b, 0, 0, 0, 0x11, 0], true),
            ([0x1b, 0, 0, 0, 0x02, 0], true),
            ([0x1e, 0, 0, 0, 0, 0], false),
            ([0x1e, 0, 0, 0, 1, 0], true),
            ([0x1e, 0, 0, 0, 2, 0], true),
        ] {
            let status = other.run(&cdb, &[], 0).status;
            assert_eq!(status == CONFLICT, is_excluded, "{kind} {cdb:x?}");
        }
    }
}
