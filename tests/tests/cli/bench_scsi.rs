//! `ringhaul bench --device scsi` against `ringhaul serve --device scsi`.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{EXIT_RUN, Refusals, Running, bench, ringhaul, run};
use serde_json::Value;

use crate::{DISK_BYTES, test_folders};

const PATTERNS: [&str; 6] = ["read", "write", "randread", "randwrite", "rw", "randrw"];

/// The command line of `ringhaul serve` with these units on `socket`.
fn serve_units(socket: &Path, units: &[String]) -> Result<Command> {
    let mut command = ringhaul()?;
    command.args(["serve", "--device", "scsi", "--socket-path"]).arg(socket);
    for unit in units {
        command.args(["--lun", unit]);
    }
    Ok(command)
}

/// The result of a run without failures.
fn measure(socket: &Path, options: &str) -> Result<Value> {
    let options = format!("--device scsi --output-format json {options}");
    let finished = run(&mut bench(socket, &options)?)?.expect_code(0)?;
    let report: Value = serde_json::from_str(&finished.stdout).context("reading the result")?;
    for key in ["errors", "flush_errors", "verify_mismatches"] {
        ensure!(report[key] == 0, "{options}: {key}: {}", report[key]);
    }
    Ok(report)
}

#[test]
fn every_pattern_verifies() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    for (index, engine) in ["io_uring", "aio", "threads"].into_iter().enumerate() {
        let socket = folders.socket(engine);
        let units = [format!("0,blk-file={}", file.display())];
        let mut command = serve_units(&socket, &units)?;
        command.args(["--engine", engine, "--iothreads", "2"]);
        let _daemon = Running::serve(&mut command)?;
        let layouts = ["", "--packed", "--indirect", "--packed --indirect"];
        for (pattern, rings) in PATTERNS.into_iter().zip(layouts.iter().cycle().skip(index)) {
            let report = measure(
                &socket,
                &format!(
                    "--rw {pattern} --bssplit 4k/60:512/20:64k/20 --size 4m --numjobs 2 \
                     --iodepth 8 --number_ios 200 --fsync 16 --verify --randseed {index} {rings}"
                ),
            )?;
            ensure!(report["ios"] == 400, "{} I/Os", report["ios"]);
            ensure!(report["verified_blocks"].as_u64() > Some(0), "no block was verified");
            let writes = !matches!(pattern, "read" | "randread");
            ensure!((report["flush_ios"].as_u64() > Some(0)) == writes, "{report}");
            ensure!(report["device"] == "scsi" && report["unit"] == "0:0", "{report}");
        }
    }
    Ok(())
}

/// Units on two targets, one with larger blocks, get equal numbers of requests.
#[test]
fn all_units_are_driven_evenly() -> Result<()> {
    const WRITES: usize = 1200;
    let folders = test_folders()?;
    let socket = folders.socket("scsi.sock");
    let mut files = Vec::new();
    let mut units = Vec::new();
    for (unit, keys) in [("0", ""), ("7", ",logical-block-size=4096"), ("3:300", "")] {
        let file = folders.disk(&format!("{}.img", files.len()), DISK_BYTES)?;
        units.push(format!("{unit},blk-file={}{keys}", file.display()));
        files.push(file);
    }
    let _daemon = Running::serve(&mut serve_units(&socket, &units)?)?;
    let options = "--rw randwrite --lun all --numjobs 2 --iodepth 32 --verify --fsync 10";
    let report = measure(&socket, &format!("{options} --number_ios {}", WRITES / 2))?;
    ensure!(report["unit"] == "all" && report["units"] == 3, "{report}");
    ensure!(report["logical_block_size_bytes"] == 4096, "{report}");
    ensure!(report["disk_size_bytes"] == 3 * DISK_BYTES, "{report}");
    for file in files {
        let data = fs::read(&file)?;
        let written = data.chunks(4096).filter(|block| block.starts_with(b"RHaulBlk")).count();
        // Some blocks are written twice.
        let share = WRITES / 3;
        ensure!((share * 8 / 10..=share).contains(&written), "{}: {written}", file.display());
    }
    let options = "--rw randrw --lun all --numjobs 3 --threads --iodepth 4 --verify --size 1m";
    measure(&socket, &format!("{options} --number_ios 300"))?;
    Ok(())
}

/// READ(10) cannot address most blocks of this unit.
#[test]
fn a_large_unit_is_driven_to_its_end() -> Result<()> {
    let folders = test_folders()?;
    let socket = folders.socket("scsi.sock");
    let units = ["4:16383,null=8T".to_owned()];
    let _daemon = Running::serve(&mut serve_units(&socket, &units)?)?;
    let options = "--lun 4:16383 --rw randread --number_ios 2000 --iodepth 32";
    ensure!(measure(&socket, options)?["disk_size_bytes"] == 8_u64 << 40);
    measure(&socket, "--lun 4:16383 --rw write --offset 4t --number_ios 100 --fsync 5")?;
    measure(&socket, "--lun 4:16383 --rw read --bs 64m --number_ios 10")?;
    Ok(())
}

#[test]
fn wrong_data_is_shown_with_its_unit() -> Result<()> {
    let folders = test_folders()?;
    let socket = folders.socket("scsi.sock");
    let units = ["2,null=1M".to_owned()];
    let _daemon = Running::serve(&mut serve_units(&socket, &units)?)?;
    let options = "--device scsi --lun 2 --rw read --number_ios 20 --verify";
    let finished = run(&mut bench(&socket, options)?)?.expect_code(EXIT_RUN)?;
    let words = "unit 0:2: wrong data at offset 0";
    ensure!(finished.stderr.contains(words), "{}", finished.stderr);
    Ok(())
}

#[test]
fn impossible_units_and_queues_are_refused() -> Result<()> {
    let folders = test_folders()?;
    let socket = folders.socket("scsi.sock");
    let units = ["1,null=1M".to_owned(), "5:2,null=1M,read-only=on".to_owned()];
    let mut command = serve_units(&socket, &units)?;
    let _daemon = Running::serve(command.args(["--num-queues", "2"]))?;
    let mut refusals = Refusals::default();
    for (options, words) in [
        ("--lun 0", ["no disk at unit 0:0", "0:1, 5:2"]),
        ("--lun 9:1", ["no such target", "0:1, 5:2"]),
        ("--lun 1 --numjobs 3", ["3 request queues", "the server has 2"]),
        ("--lun 5:2 --rw write", ["unit 5:2 is read-only", "--rw=write"]),
        ("--lun all --verify", ["unit 5:2 is read-only", "--verify"]),
        ("--lun 1 --size 2m", ["unit 0:1", "1048576"]),
    ] {
        let command = bench(&socket, &format!("--device scsi {options}"));
        refusals.check(options, command, &words);
    }
    refusals.check("blk", bench(&socket, ""), &["--device scsi", "scsi.sock"]);
    refusals.finish()
}
