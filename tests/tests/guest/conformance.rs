//! libiscsi's `iscsi-test-cu` on the units of a virtio-scsi device.
//!
//! The program was written for iSCSI. Tests of transport errors, and of the view of a second
//! initiator (reservations, resets), are possible only there.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::guest::Vm;
use ringhaul_kit::server::{Cache, Engine, Export};

use super::{LIMIT, Scene, boot, check_clean_exit, scenario, with};

const RUN: &str = include_str!("../../guest/scsi-conformance.sh");

/// Suites that are not run, and the reasons.
const LEFT_OUT: [(&str, &str); 4] = [
    ("MultipathIO", "it has a run of its own, with two units on one disk"),
    ("NoMedia", "no medium can be taken out"),
    ("PreventAllow", "no medium can be taken out"),
    ("Sanitize", "the command is optional, and the program crashes when a target lacks it"),
];

/// Tests that skip themselves on any unit, and the reasons; `*` stands for any end of a name.
const SKIPPED: [(&str, &str); 21] = [
    ("CompareAndWrite.InvalidDataOutSize", "physical blocks are as large as logical ones"),
    ("ExtendedCopy.*", "the command is optional"),
    ("MultipathIO.CompareAndWriteAsync", "only with iSCSI"),
    ("MultipathIO.Reset", "only with iSCSI"),
    ("OrWrite.*", "the command is optional"),
    ("Prefetch10.*", "the command is optional"),
    ("Prefetch16.*", "the command is optional"),
    ("ProutPreempt.*", "a second initiator is possible only with iSCSI"),
    ("ProutReserve.Access*", "a second initiator is possible only with iSCSI"),
    ("ProutReserve.Ownership*", "a second initiator is possible only with iSCSI"),
    ("ReadOnly.ReadOnlySBC", "that part is about ORWRITE, or the unit can be written to"),
    ("ReadDefectData10.*", "the command is optional"),
    ("ReadDefectData12.*", "the command is optional"),
    ("ReceiveCopyResults.*", "the command is optional"),
    ("Reserve6.*", "the command is obsolete"),
    ("StartStopUnit.Simple", "no medium can be taken out"),
    ("WriteAtomic16.*", "the command is optional"),
    ("WriteSame10.InvalidDataOutSize", "physical blocks are as large as logical ones"),
    ("WriteSame10.UnmapUnaligned", "physical blocks are as large as logical ones"),
    ("WriteSame16.InvalidDataOutSize", "physical blocks are as large as logical ones"),
    ("WriteSame16.UnmapUnaligned", "physical blocks are as large as logical ones"),
];

/// Tests that skip themselves on units without unmap.
const SKIPPED_WHEN_THICK: [&str; 9] = [
    "GetLBAStatus.UnmapSingle",
    "Inquiry.BlockLimits",
    "Unmap.Simple",
    "Unmap.VPD",
    "Unmap.ZeroBlocks",
    "WriteSame10.Unmap",
    "WriteSame10.UnmapUntilEnd",
    "WriteSame16.Unmap",
    "WriteSame16.UnmapUntilEnd",
];

/// Tests that fail because the program is wrong.
const FAILED: [(&str, &str); 2] = [
    // These end with 256 blocks, which the field of 8 bits holds as 0. That is no error (SBC-4,
    // section 5.3).
    ("CompareAndWrite.Miscompare", "256 blocks are sent as 0 blocks"),
    ("CompareAndWrite.Simple", "256 blocks are sent as 0 blocks"),
];

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Outcome {
    Passed,
    Skipped,
    Failed,
}

/// The outcome of each test, by `SUITE.TEST`.
type Outcomes = BTreeMap<String, Outcome>;

/// Parses the output of the program.
fn parse(text: &str) -> Result<Outcomes> {
    ensure!(text.contains("Tests completed with return value: 0"), "it did not end:\n{text}");
    let mut outcomes = Outcomes::new();
    let (mut suite, mut test, mut skipped) = ("", "", false);
    for line in text.lines().map(str::trim_end) {
        if let Some(name) = line.strip_prefix("Suite: ") {
            suite = name;
        } else if let Some(name) = line.trim_start().strip_prefix("Test: ") {
            test = name.split(' ').next().unwrap_or_default();
            skipped = false;
        }
        skipped |= line.contains("[SKIPPED]");
        let last = line.rsplit("...").next().unwrap_or_default();
        let outcome = match last {
            "passed" if skipped => Outcome::Skipped,
            "passed" => Outcome::Passed,
            "FAILED" => Outcome::Failed,
            _ => continue,
        };
        outcomes.insert(format!("{suite}.{test}"), outcome);
    }
    Ok(outcomes)
}

/// The expected outcome of a test.
fn expected(test: &str, is_thin: bool) -> Outcome {
    let meant = |name: &str| match name.strip_suffix('*') {
        Some(suite) => test.starts_with(suite),
        None => test == name,
    };
    if FAILED.iter().any(|(name, _)| meant(name)) {
        Outcome::Failed
    } else if SKIPPED.iter().any(|(name, _)| meant(name))
        || !is_thin && SKIPPED_WHEN_THICK.iter().any(|name| meant(name))
    {
        Outcome::Skipped
    } else {
        Outcome::Passed
    }
}

/// Runs suites on the unit at the nodes, and compares the outcomes with the expected ones.
fn check(vm: &mut Vm, nodes: &str, suites: &[&str], is_thin: bool) -> Result<()> {
    let names: Vec<String> = suites.iter().map(|suite| format!("SCSI.{suite}")).collect();
    let variables = [("NODES", nodes), ("SUITES", &*names.join(","))];
    let text = vm.check(&with(RUN, &variables), LIMIT)?;
    let outcomes = parse(&text)?;
    let run = |suite: &&&str| outcomes.keys().any(|test| test.starts_with(&format!("{suite}.")));
    let left: Vec<_> = suites.iter().filter(|suite| !run(suite)).collect();
    assert!(left.is_empty(), "{left:?} were not run:\n{text}");
    let surprises = outcomes.iter().filter(|(test, outcome)| **outcome != expected(test, is_thin));
    let surprises: Vec<String> = surprises
        .map(|(test, outcome)| format!("{test}: {outcome:?}\n{}", around(&text, test)))
        .collect();
    assert!(surprises.is_empty(), "on {nodes}:\n{}", surprises.join("\n"));
    Ok(())
}

/// The output of the program about a test, or at least about its suite.
fn around<'a>(text: &'a str, test: &str) -> &'a str {
    let (suite, test) = test.split_once('.').unwrap_or((test, ""));
    let suite = text.split("Suite: ").find(|part| part.starts_with(suite)).unwrap_or(text);
    let test = format!("{test} ...");
    suite.split("Test: ").find(|part| part.starts_with(&test)).unwrap_or(suite)
}

/// The node of the unit at an address: of its disk, or of the generic device of a read-only unit,
/// because the program opens disks for writing.
fn node(vm: &mut Vm, address: &str, kind: &str) -> Result<String> {
    let path = vm.check(&format!("ls -d /sys/bus/scsi/devices/*:0:{address}/{kind}/*"), LIMIT)?;
    let name = path.rsplit('/').next().context("a path has a name")?;
    Ok(format!("/dev/{name}"))
}

/// The suites of the program for SCSI targets, except [`LEFT_OUT`].
fn suites(vm: &mut Vm) -> Result<Vec<String>> {
    let list = vm.check("iscsi-test-cu --list", LIMIT)?;
    let names = list.lines().filter_map(|line| line.trim_end().strip_prefix("SCSI."));
    let is_suite = |name: &&str| !name.contains('.');
    let is_run = |name: &&str| LEFT_OUT.iter().all(|(left_out, _)| name != left_out);
    let suites: Vec<String> = names.filter(is_suite).filter(is_run).map(str::to_owned).collect();
    ensure!(suites.len() > 30, "too few suites:\n{list}");
    Ok(suites)
}

fn conformance() -> Result<()> {
    let scene = Scene::new()?;
    let file = |name: &str| -> Result<String> {
        let export = scene.export(name, Engine::IoUring, Cache::None)?;
        Ok(export.file.display().to_string())
    };
    let export = scene.export("conformance", Engine::IoUring, Cache::None)?;
    let (shared, thick, read_only) = (file("shared")?, file("thick")?, file("read-only")?);
    let units = vec![
        format!("1,blk-file={thick},discard=off"),
        format!("2,blk-file={read_only},read-only=on"),
        format!("3,blk-file={shared},lock=off"),
        format!("1:3,blk-file={shared},lock=off"),
    ];
    let export = Export { units: Some(units), ..export };
    let mut server = scene.serve(&export)?;
    let mut vm = boot(&[&export])?;

    let all = suites(&mut vm)?;
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let paths = [node(&mut vm, "0:3", "block")?, node(&mut vm, "1:3", "block")?].join(" ");
    check(&mut vm, &paths, &["MultipathIO"], true)?;
    let thin = node(&mut vm, "0:0", "block")?;
    check(&mut vm, &thin, &all, true)?;
    // The remaining suites do not depend on provisioning.
    let thick = node(&mut vm, "0:1", "block")?;
    let provisioning = ["GetLBAStatus", "Inquiry", "ReadCapacity16", "Unmap", "WriteSame10"];
    check(&mut vm, &thick, &provisioning, false)?;
    let read_only = node(&mut vm, "0:2", "scsi_generic")?;
    let reading =
        ["Inquiry", "Mandatory", "ModeSense6", "Read10", "Read16", "ReadOnly", "Verify10"];
    check(&mut vm, &read_only, &reading, true)?;

    vm.power_off(LIMIT)?;
    check_clean_exit(&mut server)
}

#[test]
fn scsi_units_conform() -> Result<()> {
    scenario(conformance)
}

#[test]
fn outcomes_of_tests_are_parsed() -> Result<()> {
    let text = "\nSuite: One\n  Test: A ...passed\n  Test: B ...    [SKIPPED] no\npassed\n\
                Suite: Two\n  Test: C ...    [FAILED] it is 3\nFAILED\n    1. c.c:1\n\
                Tests completed with return value: 0\n";
    let outcomes = Vec::from_iter(parse(text)?);
    let expected =
        [("One.A", Outcome::Passed), ("One.B", Outcome::Skipped), ("Two.C", Outcome::Failed)];
    assert_eq!(outcomes, expected.map(|(name, outcome)| (name.to_owned(), outcome)));
    assert!(parse("Suite: One\n  Test: A ...passed\nSegmentation fault").is_err());
    Ok(())
}
