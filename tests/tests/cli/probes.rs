//! USDT probes of the program, and the scripts in `contrib/bpftrace` that use them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{LIMIT, Running, bench, run, serve};
use ringhaul_kit::server::ringhaul_binary;
use ringhaul_kit::system::{is_installed, print_skipped};
use rustix::process::Signal;

use crate::{DISK_BYTES, is_root, test_folders};

const NAMES: [&str; 6] = ["kick", "pop", "submit", "harvest", "push", "call"];

/// A line of readelf's output, behind its name.
fn field<'a>(text: &'a str, name: &str) -> Result<&'a str> {
    let rest = text.split_once(name).with_context(|| format!("no {name} in:\n{text}"))?.1;
    Ok(rest.split([',', '\n']).next().unwrap_or(rest).trim())
}

fn hexadecimal(text: &str) -> Result<u64> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    u64::from_str_radix(digits, 16).with_context(|| format!("{text} is no address"))
}

/// Returns the output of readelf about the program.
fn readelf(option: &str) -> Result<String> {
    let mut command = Command::new("readelf");
    let read = run(command.args([option, "--wide"]).arg(ringhaul_binary()?))?.expect_code(0)?;
    Ok(read.stdout)
}

/// The places of a name's probe in the notes of the program, which tools read, too. Each has a
/// location, a semaphore and arguments.
fn sites<'a>(notes: &'a str, name: &str) -> Vec<&'a str> {
    let begins = format!("{name}\n");
    let sites = notes.split("Provider: ringhaul\n").skip(1).map(|note| note.trim_start());
    sites.filter_map(|note| note.strip_prefix("Name: ")?.strip_prefix(begins.as_str())).collect()
}

/// Without a tracer, a probe is an instruction without effect: nothing tests a semaphore.
#[test]
fn each_probe_is_one_instruction_without_effect() -> Result<()> {
    const NO_OPERATION: &[u8] =
        if cfg!(target_arch = "aarch64") { &[0x1f, 0x20, 0x03, 0xd5] } else { &[0x90] };
    if !is_installed("readelf") {
        print_skipped("readelf of the package binutils is not installed");
        return Ok(());
    }
    let (notes, sections) = (readelf("--notes")?, readelf("--sections")?);
    let mut text = field(&sections, " .text ")?.split_whitespace().skip(1);
    let mut next = || hexadecimal(text.next().context("a short line about .text")?);
    let (text_address, text_offset) = (next()?, next()?);
    let program = File::open(ringhaul_binary()?)?;
    for name in NAMES {
        let sites = sites(&notes, name);
        ensure!(!sites.is_empty(), "no probe {name}:\n{notes}");
        for site in sites {
            ensure!(hexadecimal(field(site, "Semaphore: ")?)? == 0, "{name} is tested: {site}");
            let address = hexadecimal(field(site, "Location: ")?)?;
            let mut found = vec![0; NO_OPERATION.len()];
            program.read_exact_at(&mut found, address - text_address + text_offset)?;
            ensure!(found == NO_OPERATION, "{name} at {address:#x}: {found:x?}");
        }
    }
    Ok(())
}

/// The arguments of a probe are computed without a tracer, too: they are variables and fields. The
/// one call is that of a function that returns an address and is inlined.
#[test]
fn no_argument_of_a_probe_is_computed() -> Result<()> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let mut folders = vec![crates];
    let mut names = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let source = std::fs::read_to_string(&path)?;
                for probe in source.split("probe!(ringhaul, ").skip(1) {
                    let (probe, _) = probe.split_once(");").context("a probe without an end")?;
                    let (name, arguments) = probe.split_once(',').unwrap_or((probe, ""));
                    names.push(name.to_owned());
                    let computed = arguments.replace("self.number()", "").contains(['(', '!', '?']);
                    ensure!(!computed, "{}: {name} computes{arguments}", path.display());
                }
            }
        }
    }
    names.sort_unstable();
    let mut expected = NAMES;
    expected.sort_unstable();
    ensure!(names == expected, "the sources have other probes: {names:?}");
    Ok(())
}

/// The output of a script, traced while a load runs.
fn trace(script: &str, expected: &[&str]) -> Result<()> {
    let folders = test_folders()?;
    let (disk, socket) = (folders.disk("disk.img", DISK_BYTES)?, folders.socket("vm.sock"));
    let daemon = Running::serve(&mut serve(&socket, &disk)?)?;
    let script = format!("{}/../contrib/bpftrace/{script}", env!("CARGO_MANIFEST_DIR"));
    let deadline = Instant::now() + LIMIT;
    loop {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "bpftrace", "-p"]).stdin(Stdio::null());
        let pid = daemon.pid().as_raw_nonzero().to_string();
        let mut tracer = Running::start(command.arg(pid).arg(&script))?;
        // bpftrace does not tell when its probes are attached, so the load takes a while.
        run(&mut bench(&socket, "--rw randread --iodepth 8 --runtime 4")?)?.expect_code(0)?;
        tracer.signal(Signal::INT)?;
        let traced = tracer.finish()?.expect_code(0)?.stdout;
        if expected.iter().all(|name| traced.contains(name)) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "not all of {expected:?} in:\n{traced}");
    }
}

#[test]
fn the_scripts_count_requests_and_batches() -> Result<()> {
    let can_trace = || -> Result<bool> {
        let mut probe = Command::new("bpftrace");
        let ended = run(probe.args(["-e", "BEGIN { exit(); }"])).context("trying bpftrace")?;
        Ok(ended.status.success())
    };
    if !is_root() || !is_installed("bpftrace") || !can_trace()? {
        print_skipped("tracing needs root, bpftrace, and a kernel that permits it");
        return Ok(());
    }
    trace("latency.bt", &["@latency_us:"])?;
    trace("batches.bt", &["@submitted:", "@harvested:", "@requests[", "@kicks[", "@calls["])
}
