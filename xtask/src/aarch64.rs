//! `cargo xtask aarch64`: builds unit tests for aarch64 and runs them in QEMU's user mode.

use std::process::Command;

use anyhow::{Context, Result, bail};
use ringhaul_tools::process::{self, Interrupt, ManagedChild};
use ringhaul_tools::workspace;

const TARGET: &str = "aarch64-unknown-linux-gnu";

const LINKER: &str = "aarch64-linux-gnu-gcc";

/// The libraries of the foreign system, in the package of [`LINKER`].
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";

/// Names of QEMU's program, in packages `qemu-user` and `qemu-user-static`.
const EMULATORS: [&str; 2] = ["qemu-aarch64", "qemu-aarch64-static"];

/// Packages with the tests that QEMU cannot run, by parts of their names.
const PACKAGES: [(&str, &[&str]); 5] = [
    ("iomem", &[]),
    ("virtqueue", &[DEATHS, NOT_DUMPED]),
    ("vhost-user", &[FEWER_DESCRIPTORS]),
    ("ringhaul-device", &[TRACED, "queue::eventfd::tests::", FUA, LONG_VERIFY]),
    ("blockio", WITH_ENGINES),
];

/// Thousands of deaths of a process. QEMU needs minutes for them.
const DEATHS: &str = "nothing_is_lost_or_done_twice_whenever_the_process_dies";

/// QEMU has no flag in `/proc/self/smaps` for memory outside of core dumps.
const NOT_DUMPED: &str = "core_dumps_leave_guest_memory_out";

/// QEMU passes on all descriptors of a message, whatever the limit of the process is.
const FEWER_DESCRIPTORS: &str = "descriptors_beyond_the_limit_are_reported_as_lost";

/// strace sees the calls of QEMU.
const TRACED: &str = "a_file_is_stable_before_it_has_its_name";

/// A test that counts durable writes; they are flushes in QEMU's user mode.
const FUA: &str = "hand_over_state::mode_pages_are_as_they_were_selected";

/// A test that fails in QEMU for a reason that is not known yet.
const LONG_VERIFY: &str = "verify::tests::a_long_verify_ends_soon_when_its_task_is_aborted";

/// QEMU's user mode has neither io_uring nor Linux AIO, and no reads that the page cache answers.
const WITH_ENGINES: &[&str] = &[
    "contract_tests::",
    "disk::engine_trial::tests::files_of_one_file_system",
    "disk::flush_tests::",
    "disk::late_lock::tests::pages_that_were_read",
    "disk::size_tests::",
    "disk::tests::",
    "engine::aio::",
    "engine::embedding_tests::",
    "engine::hung_disk_tests::",
    "engine::io_uring::",
    "engine::kernel::",
    "engine::kernel_tests::",
    "engine::lifetime_tests::",
    "engine::mixed_engines_tests::",
    "engine::tests::",
    "thread::foreign_op::",
];

/// Tests of memory order. QEMU translates for the memory model of this machine, which may be
/// stronger, so that their success would prove nothing.
const MEMORY_ORDER: [&str; 2] = ["virtqueue --test it litmus", "blockio --lib model_tests"];

/// Builds everything, runs the tests, and names the tests that are not covered.
pub(crate) fn run() -> Result<()> {
    let interrupt = Interrupt::install()?;
    let emulator = EMULATORS.iter().find_map(|name| workspace::find_program(name));
    let emulator = emulator.context("qemu-aarch64 is missing: apt-get install qemu-user")?;
    if workspace::find_program(LINKER).is_none() {
        bail!("{LINKER} is missing: apt-get install gcc-aarch64-linux-gnu");
    }
    let installed = process::output(Command::new("rustup").args(["target", "list", "--installed"]));
    if !installed.context("asking rustup for its targets")?.lines().any(|line| line == TARGET) {
        bail!("the target is missing: rustup target add {TARGET}");
    }
    let runner = format!("{} -L {LIBRARIES}", emulator.display());
    let cargo = |words: &[&str]| {
        let mut cargo = workspace::cargo();
        cargo
            .args(words)
            .args(["--target", TARGET])
            .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER)
            .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", &runner)
            .env("CC_aarch64_unknown_linux_gnu", LINKER)
            .env("PROPTEST_CASES", "16");
        cargo
    };
    for (package, skipped) in PACKAGES {
        println!("aarch64: unit tests of {package} in QEMU");
        let mut test = cargo(&["test", "--lib", "--package", package]);
        test.arg("--").args(skipped.iter().flat_map(|name| ["--skip", name]));
        ManagedChild::run(&format!("{package} on aarch64"), &mut test, &interrupt)?;
    }
    for (package, skipped) in PACKAGES.iter().filter(|(_, skipped)| !skipped.is_empty()) {
        println!("aarch64: not covered in {package}: {}", skipped.join(", "));
    }
    println!("aarch64: memory order is not covered: {}", MEMORY_ORDER.join(", "));
    Ok(())
}
