//! The units in `contrib/systemd`, as systemd reads and rates them.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::run;
use ringhaul_kit::server::ringhaul_binary;
use ringhaul_kit::system::is_installed;

const CONTRIB: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../contrib/systemd");

/// The units, and names under which systemd loads them.
const UNITS: [(&str, &str); 2] =
    [("ringhaul.service", "ringhaul.service"), ("ringhaul@.service", "ringhaul@vm1.service")];

const BLOCK_DEVICES: &str = "block-devices.conf";
const NETWORK_DISKS: &str = "network-disks.conf";

/// Copies a unit and its drop-ins into a folder of units, with another path of the program.
fn install(units: &Path, unit: &str, drop_ins: &[&str], program: &str) -> Result<()> {
    let folder = units.join(format!("{unit}.d"));
    fs::create_dir_all(&folder)?;
    let read = |name: &str| {
        let path = Path::new(CONTRIB).join(name);
        fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
    };
    let text = read(unit)?.replace("/usr/bin/ringhaul ", &format!("{program} "));
    fs::write(units.join(unit), text)?;
    drop_ins.iter().try_for_each(|name| Ok(fs::write(folder.join(name), read(name)?)?))
}

/// systemd reports unknown keys and values, and programs that are missing.
#[test]
fn systemd_understands_each_line() -> Result<()> {
    if !is_installed("systemd-analyze") {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let program = ringhaul_binary()?.canonicalize()?.display().to_string();
    for (unit, name) in UNITS {
        let drop_ins = [BLOCK_DEVICES, NETWORK_DISKS, "watchdog.conf"];
        install(folder.path(), unit, &drop_ins, &program)?;
        let mut verify = Command::new("systemd-analyze");
        verify.args(["verify", "--man=no"]).arg(folder.path().join(name));
        if unit != name {
            fs::copy(folder.path().join(unit), folder.path().join(name))?;
        }
        let verified = run(&mut verify)?.expect_code(0)?;
        // Lines about units of other packages, which systemd loads too, begin with their paths.
        let is_ours =
            |line: &&str| !line.starts_with('/') || Path::new(line).starts_with(folder.path());
        let ours: Vec<&str> = verified.stderr.lines().filter(is_ours).collect();
        ensure!(ours.is_empty(), "{ours:#?}");
    }
    Ok(())
}

/// A rating in tenths, of 100 at most; 0 is best. docs/guide/service.md names both limits.
#[test]
fn the_sandbox_is_tight() -> Result<()> {
    if !is_installed("systemd-analyze") {
        return Ok(());
    }
    for (drop_ins, limit) in [(&[][..], "10"), (&[BLOCK_DEVICES, NETWORK_DISKS][..], "20")] {
        for (unit, name) in UNITS {
            let root = tempfile::tempdir()?;
            let units = root.path().join("etc/systemd/system");
            install(&units, unit, drop_ins, "/usr/bin/ringhaul")?;
            let mut security = Command::new("systemd-analyze");
            security.args(["security", "--offline=true", "--no-pager", "--threshold", limit]);
            security.arg(format!("--root={}", root.path().display())).arg(name);
            run(&mut security)?.expect_code(0).with_context(|| format!("{name}, {drop_ins:?}"))?;
        }
    }
    Ok(())
}

/// Guest memory counts in the cgroup of the daemon, which would be killed at a limit.
#[test]
fn the_daemon_has_no_limit_of_memory_and_is_killed_last() -> Result<()> {
    for (unit, _) in UNITS {
        let text = fs::read_to_string(Path::new(CONTRIB).join(unit))?;
        ensure!(text.lines().any(|line| line == "OOMScoreAdjust=-900"), "{unit}");
        let is_limit = |line: &&str| line.starts_with("Memory") && !line.starts_with("MemoryDeny");
        let limit = text.lines().find(is_limit);
        ensure!(limit.is_none(), "{unit} has {limit:?}");
    }
    Ok(())
}
