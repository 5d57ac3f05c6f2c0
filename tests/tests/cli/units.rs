//! Errors about impossible logical units, and the memory that many units take.

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Refusals, Running, bench, ringhaul, run};
use rustix::process::Signal;

use crate::{DISK_BYTES, test_folders};

/// Keys of a unit, each wrong by itself, and words of the error.
const WRONG_KEYS: [(&str, [&str; 2]); 23] = [
    ("vendor=Nine Byte", ["vendor: it must be", "at most 8 bytes of printable ASCII"]),
    ("vendor=größe", ["vendor: it must be", "at most 8 bytes of printable ASCII"]),
    ("product=seventeen letters", ["product: it must be", "at most 16 bytes"]),
    ("revision=1.2.3", ["revision: it must be", "at most 4 bytes"]),
    ("revision=", ["'revision='", "KEY=VALUE"]),
    ("serial=1234567890123456789012345678901234567", ["serial: it must be", "at most 36 bytes"]),
    ("serial=a\tb", ["serial: it must be", "at most 36 bytes of printable ASCII"]),
    ("wwn=12", ["'12' is not a WWN", "16 hexadecimal digits"]),
    ("wwn=f000000000000001", ["'f000000000000001' is not a WWN", "the first 2, 3 or 5"]),
    ("wwn=500000000000000g", ["'500000000000000g' is not a WWN", "16 hexadecimal digits"]),
    ("wwn=+000000000000001", ["'+000000000000001' is not a WWN", "16 hexadecimal digits"]),
    ("rotational=yes", ["rotational=yes", "expected: on, off"]),
    ("discard=maybe", ["discard=maybe", "expected: on, off"]),
    ("read-only=true", ["read-only=true", "expected: on, off"]),
    ("cache=unsafe", ["cache=unsafe", "expected: none, directsync, writeback, writethrough"]),
    ("logical-block-size=100", ["100 bytes", "power of two from 512 to 65536"]),
    ("vendor=A,vendor=B", ["vendor", "given twice"]),
    ("colour=red", ["unknown key 'colour'", "vendor, product, revision"]),
    ("like=vmware", ["like=vmware", "expected: qemu"]),
    ("names=serials", ["names=serials", "expected: wwn, serial"]),
    ("stop=on", ["stop=on", "expected: ignore, obey"]),
    ("null=1M", ["null is given twice", "leave one of them out"]),
    ("blk-file=/x", ["more than one disk", "disk, blk-file or null"]),
];

/// Impossible values of `--lun`, alone or together, and words of the error.
const WRONG_UNITS: [(&[&str], [&str; 2]); 9] = [
    (&[""], ["begins with a LUN", "0 to 16383"]),
    (&["null=1M"], ["begins with a LUN", "0 to 16383"]),
    (&["16384,null=1M"], ["begins with a LUN", "0 to 16383"]),
    (&["256:0,null=1M"], ["target", "0 to 255"]),
    (&["0:0:0,null=1M"], ["begins with a LUN", "TARGET:LUN"]),
    (&["0"], ["blk-file=PATH", "null=SIZE"]),
    (&["0,null=0"], ["0 bytes", "not zero"]),
    (&["0,blk-file=/nonexistent"], ["/nonexistent", "No such file"]),
    (&["3,null=1M", "0:3,null=1M"], ["two units have the address 0:3", "another number"]),
];

#[test]
fn impossible_units_are_refused() -> Result<()> {
    let folders = test_folders()?;
    let socket = folders.socket("refused.sock");
    let mut refusals = Refusals::default();
    let mut refuse = |units: &[String], words: &[&str]| {
        let command = ringhaul().map(|mut command| {
            // Some errors are found only after disks are open, which the log reports at level info.
            command.args(["serve", "--log", "warn", "--device", "scsi", "--socket-path"]);
            command.arg(&socket);
            units.iter().for_each(|unit| _ = command.args(["--lun", unit]));
            command
        });
        refusals.check(&units.join(" "), command, words);
    };
    for (keys, words) in WRONG_KEYS {
        refuse(&[format!("5,null=1M,{keys}")], &words);
    }
    for (units, words) in WRONG_UNITS {
        refuse(&units.iter().map(|unit| (*unit).to_owned()).collect::<Vec<_>>(), &words);
    }
    // Initiators take two disks of one name for two paths to one disk.
    let named = |lun: u8| -> Result<String> {
        let file = folders.disk(&format!("{lun}.img"), DISK_BYTES)?;
        Ok(format!("{lun},blk-file={},wwn=5000c5000000abcd", file.display()))
    };
    refuse(
        &[named(0)?, named(1)?],
        &["0:1", "unit 0:0 has the same WWN on another disk", "the same WWN"],
    );
    for (option, disk, instead) in [
        ("--disk", "null:1M", "use --lun 0,disk=DISK"),
        ("--blk-file", "/a", "use --lun 0,blk-file=PATH"),
    ] {
        let command = ringhaul().map(|mut command| {
            command.args(["serve", "--device", "scsi", option, disk, "--socket-path"]);
            command.arg(&socket);
            command
        });
        refusals.check(option, command, &["a virtio-scsi device has units", instead]);
    }
    refusals.finish()
}

/// The memory in KiB of a daemon with `units` units on files, after each unit was used on each
/// queue. Requests take memory as well, so each queue has one at a time.
fn memory_kib(engine: &str, queues: u16, units: u64) -> Result<u64> {
    let folders = test_folders()?;
    let socket = folders.socket("units.sock");
    let mut command = ringhaul()?;
    command.args(["serve", "--device", "scsi", "--engine", engine, "--socket-path"]).arg(&socket);
    command.args(["--num-queues", &queues.to_string()]);
    for lun in 0..units {
        let file = folders.disk(&format!("{lun}.img"), DISK_BYTES)?;
        command.args(["--lun", &format!("{lun},blk-file={}", file.display())]);
    }
    let mut daemon = Running::serve(&mut command)?;
    // Requests go to the units in turn.
    let load = "--device scsi --lun all --rw randrw --bs 4k --number_ios 512 --numjobs";
    run(&mut bench(&socket, &format!("{load} {queues}"))?)?.expect_code(0)?;
    let status = format!("/proc/{}/status", daemon.pid().as_raw_nonzero());
    let status = std::fs::read_to_string(&status).context("reading the status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next()).context("no VmRSS")?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    number.parse().context("VmRSS is no number")
}

#[test]
fn a_unit_costs_less_than_64_kib() -> Result<()> {
    const UNITS: u64 = 256;
    for (engine, queues) in [("io_uring", 1), ("aio", 1), ("threads", 1), ("aio", 64)] {
        let memory_kib = |units| memory_kib(engine, queues, units);
        let (one, many) = (memory_kib(1)?, memory_kib(UNITS)?);
        let each = many.saturating_sub(one) / (UNITS - 1);
        let seen = format!("{engine}, {queues} queues: {one} KiB with 1 unit, {many} with {UNITS}");
        eprintln!("{seen}: {each} KiB each");
        ensure!(each < 64, "{seen}");
    }
    Ok(())
}
