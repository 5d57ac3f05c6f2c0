//! The load generator as the driver of a SCSI device, against a back-end that answers as a test
//! demands, even as no good device does.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod back_end;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use clap::Parser;
use ringhaul_bench::{BenchArgs, BenchError, Report, measure};

use back_end::{
    Answer, BackEnd, Command, EVENT_IDX, MQ, PROTOCOL_FEATURES, REPLY_ACK, Script, VERSION_1,
};

const BLOCK_BYTES: usize = 512;
const UNIT_BYTES: usize = 4 << 20;
const CHECK_CONDITION: u8 = 2;
const BAD_TARGET: u8 = 3;

/// A change to an answer before the device sends it.
type Change = fn(&Command, Answer) -> Answer;

/// Units of one target that store written data.
struct Disks {
    /// Units by LUN; a unit without data is a CD drive.
    units: Vec<(u8, Mutex<Vec<u8>>)>,
    /// Number of unit attentions that precede answers to commands of a probe.
    attentions: AtomicUsize,
    target: u8,
    only_well_known: bool,
    /// Reads of any unit return data of the first unit.
    confused: bool,
    change: Change,
    queues_seen: Mutex<BTreeSet<u32>>,
    opcodes_seen: Mutex<BTreeSet<u8>>,
}

impl Disks {
    fn new(luns: &[u8]) -> Self {
        Self {
            units: luns.iter().map(|lun| (*lun, Mutex::new(vec![0; UNIT_BYTES]))).collect(),
            attentions: AtomicUsize::new(3),
            target: 0,
            only_well_known: false,
            confused: false,
            change: |_, answer| answer,
            queues_seen: Mutex::default(),
            opcodes_seen: Mutex::default(),
        }
    }

    fn unit(&self, lun: [u8; 8]) -> Option<&Mutex<Vec<u8>>> {
        let [1, target, 0x40, number, 0, 0, 0, 0] = lun else { return None };
        let mut units = self.units.iter().filter(|_| target == self.target);
        units.find(|(lun, _)| *lun == number).map(|(_, unit)| unit)
    }

    fn report_luns(&self) -> Answer {
        let mut data = u32::try_from(8 * self.units.len()).unwrap().to_be_bytes().to_vec();
        data.extend([0; 4]);
        self.units.iter().for_each(|(lun, _)| data.extend([0, *lun, 0, 0, 0, 0, 0, 0]));
        Answer { data, ..Answer::default() }
    }

    fn execute(&self, command: &Command) -> Answer {
        let [first, target, ..] = command.lun;
        let is_asked = if self.only_well_known { first == 0xc1 } else { target == self.target };
        if command.cdb[0] == 0xa0 && is_asked {
            return self.report_luns();
        }
        let Some(mut unit) = self.unit(command.lun) else {
            return Answer { response: BAD_TARGET, ..Answer::default() };
        };
        if self.confused && is_read(command) {
            unit = &self.units[0].1;
        }
        let mut bytes = unit.lock().unwrap();
        let pending = self
            .attentions
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if command.cdb[0] != 0x12 && pending.is_ok() {
            return check(6, 0x29, 0);
        }
        let field = |at: usize| u32::from_be_bytes(command.cdb[at..at + 4].try_into().unwrap());
        let (first, count) = match command.cdb[0] {
            0x28 | 0x2a => (field(2), u32::from(command.cdb[7]) << 8 | u32::from(command.cdb[8])),
            _ => (field(6), field(10)),
        };
        let start = usize::try_from(first).unwrap() * BLOCK_BYTES;
        let range = start..start + usize::try_from(count).unwrap() * BLOCK_BYTES;
        match command.cdb[0] {
            0x00 | 0x35 | 0x91 => Answer::default(),
            0x12 => {
                let kind = if bytes.is_empty() { 5 } else { 0 };
                Answer { data: vec![kind; 36], ..Answer::default() }
            }
            0x9e => {
                let last = u64::try_from(bytes.len() / BLOCK_BYTES - 1).unwrap();
                let mut data = last.to_be_bytes().to_vec();
                data.extend(u32::try_from(BLOCK_BYTES).unwrap().to_be_bytes());
                data.resize(32, 0);
                Answer { data, ..Answer::default() }
            }
            0x28 | 0x88 => {
                assert_eq!(command.room, range.len());
                Answer { data: bytes[range].to_vec(), ..Answer::default() }
            }
            0x2a | 0x8a => {
                bytes[range].copy_from_slice(&command.data_out);
                Answer::default()
            }
            0x5a => {
                // MODE SENSE ends the probe, so these unit attentions come before the next command.
                self.attentions.store(2, Ordering::SeqCst);
                check(5, 0x20, 0)
            }
            _ => check(5, 0x20, 0),
        }
    }
}

impl Script for Disks {
    fn answer(&self, command: &Command) -> Answer {
        self.queues_seen.lock().unwrap().insert(command.queue);
        self.opcodes_seen.lock().unwrap().insert(command.cdb[0]);
        (self.change)(command, self.execute(command))
    }
}

fn check(key: u8, asc: u8, ascq: u8) -> Answer {
    let sense = vec![0x70, 0, key, 0, 0, 0, 0, 10, 0, 0, 0, 0, asc, ascq, 0, 0, 0, 0];
    Answer { status: CHECK_CONDITION, sense, ..Answer::default() }
}

fn is_read(command: &Command) -> bool {
    command.cdb[0] == 0x28
}

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: BenchArgs,
}

const ALL: u64 = VERSION_1 | EVENT_IDX | PROTOCOL_FEATURES;

fn run_on(back_end: &BackEnd, options: &str) -> Result<Report, BenchError> {
    let socket = back_end.socket.to_str().unwrap();
    let fixed = ["bench", "--eta=never", "--device=scsi", "--socket-path", socket];
    measure(&Cli::parse_from(fixed.into_iter().chain(options.split_whitespace())).args)
}

fn run(disks: Disks, options: &str) -> Result<Report, BenchError> {
    run_on(&BackEnd::start(ALL, MQ | REPLY_ACK, Arc::new(disks)), options)
}

#[test]
fn written_data_is_read_back() {
    let mix = "--bssplit=512/20:4k/60:64k/20";
    for (features, protocol_features) in
        [(ALL, MQ | REPLY_ACK), (ALL, MQ), (VERSION_1 | PROTOCOL_FEATURES, MQ | REPLY_ACK)]
    {
        for options in [
            format!("--rw=randrw {mix} --iodepth=32 --numjobs=3 --number_ios=300 --fsync=10"),
            format!("--rw=randrw {mix} --numjobs=2 --iodepth=4 --number_ios=200 --threads"),
            "--rw=randread --iodepth=8 --number_ios=200 --busy-poll --size=1m".to_owned(),
            "--rw=rw --bs=64k --seg-size=4k --iodepth=8 --number_ios=100".to_owned(),
            "--rw=write --rate_iops=5000 --number_ios=100 --iodepth=2".to_owned(),
            "--rw=randread --size=64k --number_ios=20 --wake-delay=100".to_owned(),
        ] {
            let disks = Arc::new(Disks::new(&[0]));
            let back_end = BackEnd::start(features, protocol_features, Arc::clone(&disks) as _);
            let report = run_on(&back_end, &format!("{options} --verify")).unwrap();
            assert!(!report.failed(), "{options}: {report:?}");
            assert!(report.verified_blocks > 0, "{options}: {report:?}");
            assert_eq!((report.device, report.unit.as_deref()), (Some("scsi"), Some("0:0")));
            let queues = disks.queues_seen.lock().unwrap().len();
            assert_eq!(queues, usize::try_from(report.numjobs).unwrap(), "{options}");
            let opcodes = disks.opcodes_seen.lock().unwrap();
            assert!(opcodes.contains(&0x2a), "WRITE(10) is enough for this unit: {opcodes:x?}");
            assert!(!opcodes.contains(&0x8a), "WRITE(10) is enough for this unit: {opcodes:x?}");
        }
    }
}

#[test]
fn a_back_end_without_any_protocol_features_is_driven() {
    let back_end = BackEnd::start(VERSION_1, 0, Arc::new(Disks::new(&[0])));
    let report = run_on(&back_end, "--rw=randrw --verify --number_ios=100").unwrap();
    assert!(!report.failed(), "{report:?}");
    let error = run_on(&back_end, "--numjobs=2").unwrap_err().to_string();
    assert!(error.contains("2 request queues, but the server has 1"), "{error}");
}

#[test]
fn all_units_get_the_same_share() {
    let mut disks = Disks::new(&[0, 1, 5, 9]);
    disks.units[2].1 = Mutex::default();
    let disks = Arc::new(disks);
    let back_end = BackEnd::start(ALL, MQ | REPLY_ACK, Arc::clone(&disks) as _);
    let options = "--lun=all --rw=randwrite --verify --numjobs=2 --iodepth=8 --number_ios=300";
    let report = run_on(&back_end, options).unwrap();
    assert!(!report.failed() && report.verified_blocks > 0, "{report:?}");
    assert_eq!((report.unit.as_deref(), report.units), (Some("all"), Some(3)));
    assert_eq!(report.disk_size_bytes, u64::try_from(3 * UNIT_BYTES).unwrap());
    for (lun, unit) in &disks.units {
        let unit = unit.lock().unwrap();
        let written = unit.chunks(4096).filter(|block| block.iter().any(|byte| *byte != 0)).count();
        let expected = if *lun == 5 { 0..1 } else { 150..201 };
        assert!(expected.contains(&written), "{written} blocks of unit {lun} were written");
    }
    let report = run_on(&back_end, "--lun=9 --rw=read --number_ios=10").unwrap();
    assert_eq!((report.unit.as_deref(), report.units), (Some("0:9"), Some(1)));
}

#[test]
fn data_of_another_unit_is_detected() {
    let disks = Disks { confused: true, ..Disks::new(&[0, 1]) };
    let report = run(disks, "--lun=all --rw=read --verify --number_ios=20 --size=64k").unwrap();
    assert_eq!((report.read.ios, report.verify_mismatches), (20, 10), "{report:?}");
}

#[test]
fn each_unit_is_flushed_after_its_own_writes() {
    for (luns, flushes) in [(vec![0], 12), (vec![0, 1, 2], 12), (vec![0, 1, 2, 3, 4, 5, 6], 7)] {
        let options = "--lun=all --rw=write --number_ios=120 --fsync=10 --iodepth=4";
        let report = run(Disks::new(&luns), options).unwrap();
        assert!(!report.failed(), "{report:?}");
        assert_eq!((report.write.ios, report.flush.ios), (120, flushes), "{luns:?}");
    }
}

#[test]
fn the_well_known_unit_is_queried_if_no_target_answers() {
    let disks = Disks { only_well_known: true, ..Disks::new(&[3, 4]) };
    let report = run(disks, "--lun=all --rw=read --number_ios=10").unwrap();
    assert_eq!(report.units, Some(2));
}

#[test]
fn units_of_any_target_are_found() {
    let disks = Disks { target: 255, ..Disks::new(&[3, 4]) };
    let report = run(disks, "--lun=all --rw=randrw --verify --number_ios=50").unwrap();
    assert!(!report.failed());
    assert_eq!(report.units, Some(2));
}

#[test]
fn bad_answers_are_errors() {
    let changes: [(&str, Change); 5] = [
        ("a residual", |command, answer| Answer {
            residual: if is_read(command) { 512 } else { 0 },
            ..answer
        }),
        ("sense", |command, answer| if is_read(command) { check(3, 0x11, 0) } else { answer }),
        ("a status", |command, answer| Answer {
            status: if is_read(command) { 0x18 } else { answer.status },
            ..answer
        }),
        ("a response", |command, answer| Answer {
            response: if is_read(command) { 9 } else { 0 },
            ..answer
        }),
        ("nothing", |command, answer| Answer { silent: is_read(command), ..answer }),
    ];
    for (what, change) in changes {
        let disks = Disks { change, ..Disks::new(&[0]) };
        let report = run(disks, "--rw=randrw --number_ios=50 --fsync=5").unwrap();
        assert!(report.failed(), "{what}: {report:?}");
        assert_eq!(report.read.errors + report.write.ios, 50, "{what}: {report:?}");
        assert!(report.write.ios > 0 && report.write.errors == 0, "{what}: {report:?}");
    }
}

/// A request has 3 descriptors, so these offsets name the middle of one request and the head of the
/// next.
#[test]
fn an_answer_without_a_request_ends_the_run() {
    let changes: [Change; 2] = [
        |command, answer| Answer { head_offset: u16::from(is_read(command)), ..answer },
        |command, answer| Answer { head_offset: 3 * u16::from(is_read(command)), ..answer },
    ];
    for change in changes {
        let disks = Disks { change, ..Disks::new(&[0]) };
        let error = run(disks, "--rw=read --number_ios=1 --iodepth=2").unwrap_err().to_string();
        assert!(error.contains("completed a request that was not in flight"), "{error}");
    }
}

#[test]
fn absent_units_and_other_devices_are_named() {
    let disks = || {
        let mut disks = Disks::new(&[0, 2]);
        disks.units[1].1 = Mutex::default();
        disks
    };
    for (options, words) in [
        ("--lun=1", ["no disk at unit 0:1", "0:0, 0:2"]),
        ("--lun=3:0", ["no such target", "scsi.sock"]),
        ("--lun=2", ["CD or DVD", "--lun"]),
        ("--numjobs=4", ["--numjobs=4", "the server has 3"]),
    ] {
        let error = run(disks(), options).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{options}: {error}");
    }
    let error = run(Disks::new(&[]), "--lun=all").unwrap_err().to_string();
    assert!(error.contains("reports no disks"), "{error}");
}

#[test]
fn the_wait_for_an_unready_unit_is_limited() {
    let attentions = AtomicUsize::new(usize::MAX);
    let disks = Disks { attentions, ..Disks::new(&[0]) };
    let error = run(disks, "").unwrap_err().to_string();
    assert!(error.contains("TEST UNIT READY") && error.contains("UNIT ATTENTION"), "{error}");
}

#[test]
fn a_write_protected_unit_is_read_only() {
    let mut disks = Disks::new(&[0]);
    disks.change = |command, answer| match command.cdb[0] {
        0x5a => Answer { data: vec![0, 6, 0, 0x80, 0, 0, 0, 0], ..Answer::default() },
        _ => answer,
    };
    let disks = Arc::new(disks);
    let back_end = BackEnd::start(ALL, MQ | REPLY_ACK, Arc::clone(&disks) as _);
    let error = run_on(&back_end, "--rw=write").unwrap_err().to_string();
    assert!(error.contains("unit 0:0 is read-only"), "{error}");
    assert!(run_on(&back_end, "--rw=read --number_ios=10").is_ok());
}

#[test]
fn an_error_hints_at_the_right_kind_of_device() {
    let back_end = BackEnd::start(ALL, MQ | REPLY_ACK, Arc::new(Disks::new(&[0])));
    let socket = back_end.socket.to_str().unwrap();
    let args = Cli::parse_from(["bench", "--eta=never", "--socket-path", socket]).args;
    let error = measure(&args).unwrap_err().to_string();
    assert!(error.contains("--device scsi") && error.contains("scsi.sock"), "{error}");
}
