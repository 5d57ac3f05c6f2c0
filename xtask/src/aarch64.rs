//! `cargo xtask aarch64`: builds the program and unit tests for aarch64, and runs them in QEMU's
//! user mode.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ringhaul_tools::process::{self, Interrupt, ManagedChild};
use ringhaul_tools::workspace;

const TARGET: &str = "aarch64-unknown-linux-gnu";

const LINKER: &str = "aarch64-linux-gnu-gcc";

/// The libraries of the foreign system, in the package of [`LINKER`].
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";

/// The program among them that starts others.
const LOADER: &str = "ld-linux-aarch64.so.1";

/// Names of QEMU's program, in packages `qemu-user` and `qemu-user-static`.
const EMULATORS: [&str; 2] = ["qemu-aarch64", "qemu-aarch64-static"];

/// Ends a hopeless wait.
const LIMIT: Duration = Duration::from_secs(60);

/// Packages with the tests that QEMU cannot run, by parts of their names.
const PACKAGES: [(&str, &[&str]); 6] = [
    ("iomem", &[]),
    ("virtqueue", &[DEATHS, NOT_DUMPED]),
    ("vhost-user", &[FEWER_DESCRIPTORS]),
    ("ringhaul-device", &[TRACED, "queue::eventfd::tests::", FUA, LONG_VERIFY]),
    ("blockio", WITH_ENGINES),
    ("ringhaul-options", &[]),
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

/// A test with direct I/O. QEMU passes on that statx(2) knows the alignments of a file, and not the
/// alignments: no file seems to have direct I/O.
const LONG_VERIFY: &str = "verify::tests::a_long_verify_ends_soon_when_its_task_is_aborted";

/// QEMU's user mode has neither io_uring nor Linux AIO, no direct I/O, and no reads that the page
/// cache answers.
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

/// Builds everything, runs the program and the tests, and names the tests that are not covered.
pub(crate) fn run() -> Result<()> {
    let interrupt = Interrupt::install()?;
    let machine = Machine::find()?;
    let mut build = machine.cargo(&["rustc", "--package", "ringhaul-cli"]);
    build.arg("--").args(link_with_libraries());
    ManagedChild::run("the program for aarch64", &mut build, &interrupt)?;
    let program = workspace::target_dir()?.join(TARGET).join("debug/ringhaul");
    machine.try_program(&program, &interrupt)?;
    for (package, skipped) in PACKAGES {
        println!("aarch64: unit tests of {package} in QEMU");
        let mut test = machine.cargo(&["test", "--lib", "--package", package]);
        test.arg("--").args(skipped.iter().flat_map(|name| ["--skip", name]));
        ManagedChild::run(&format!("{package} on aarch64"), &mut test, &interrupt)?;
    }
    for (package, skipped) in PACKAGES.iter().filter(|(_, skipped)| !skipped.is_empty()) {
        println!("aarch64: not covered in {package}: {}", skipped.join(", "));
    }
    println!("aarch64: memory order is not covered: {}", MEMORY_ORDER.join(", "));
    Ok(())
}

/// Options of rustc for a program that finds its libraries without a word to QEMU. With QEMU's
/// option for them the program would see their folder in place of `/`, from which `ctl` looks up a
/// socket.
fn link_with_libraries() -> [String; 2] {
    let folder = format!("{LIBRARIES}/lib");
    [
        format!("-Clink-arg=-Wl,--dynamic-linker={folder}/{LOADER}"),
        format!("-Clink-arg=-Wl,-rpath,{folder}"),
    ]
}

/// QEMU's user mode, with the compiler and the libraries of the foreign system.
struct Machine {
    emulator: PathBuf,
}

impl Machine {
    fn find() -> Result<Self> {
        let emulator = EMULATORS.iter().find_map(|name| workspace::find_program(name));
        let emulator = emulator.context("qemu-aarch64 is missing: apt-get install qemu-user")?;
        if workspace::find_program(LINKER).is_none() {
            bail!(
                "{LINKER} is missing: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
            );
        }
        let targets =
            process::output(Command::new("rustup").args(["target", "list", "--installed"]));
        if !targets.context("asking rustup for its targets")?.lines().any(|line| line == TARGET) {
            bail!("the target is missing: rustup target add {TARGET}");
        }
        Ok(Self { emulator })
    }

    fn cargo(&self, words: &[&str]) -> Command {
        let runner = format!("{} -L {LIBRARIES}", self.emulator.display());
        let mut cargo = workspace::cargo();
        cargo
            .args(words)
            .args(["--target", TARGET])
            .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER)
            .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner)
            .env("CC_aarch64_unknown_linux_gnu", LINKER)
            .env("PROPTEST_CASES", "16");
        cargo
    }

    fn command(&self, program: &Path, words: &[&str]) -> Command {
        let mut command = Command::new(&self.emulator);
        command.arg(program).args(words);
        command
    }

    /// Serves an image to a front-end, both on aarch64. QEMU's user mode has no seccomp, so the
    /// daemon has no sandbox.
    fn try_program(&self, program: &Path, interrupt: &Interrupt) -> Result<()> {
        let folder = tempfile::tempdir().context("making a folder")?;
        let at = |name: &str| folder.path().join(name).display().to_string();
        let run = |words: &[&str]| process::output(&mut self.command(program, words));
        let (image, socket, control) = (at("disk.qcow2"), at("vm1.sock"), at("control"));
        println!("aarch64: {}", run(&["--version"])?);
        process::output(
            Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", &image, "64M"]),
        )?;
        let disk = format!("qcow2:{image}");
        let info = run(&["disk", "info", &disk])?;
        ensure!(info.contains("64 MiB"), "the image is not known:\n{info}");
        let serve = ["serve", "--sandbox", "off", "--control", &control, "--name", "vm1"];
        let serve = [&serve[..], &["--socket-path", &socket, "--disk", &disk]].concat();
        let mut serve = self.command(program, &serve);
        let mut daemon = ManagedChild::start("ringhaul on aarch64", &mut serve, interrupt)?;
        daemon.wait_for_socket(Path::new(&socket), LIMIT)?;
        let load = ["bench", "--socket-path", &socket, "--rw", "randrw", "--verify"];
        run(&[&load[..], &["--size", "8m", "--number_ios", "50"]].concat())?;
        let ctl = |words: &[&str]| run(&[&["ctl", "--control", &control][..], words].concat());
        let list = ctl(&["list"])?;
        ensure!(list.contains("vm1  serving, 64 MiB"), "the export is not listed:\n{list}");
        ctl(&["shutdown", "--wait"])?;
        let status = daemon.wait(LIMIT)?;
        ensure!(status.success(), "the daemon ended with {}", process::describe(status));
        process::output(Command::new("qemu-img").args(["check", "-q", &image])).map(drop)
    }
}
