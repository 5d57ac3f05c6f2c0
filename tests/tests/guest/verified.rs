//! A load in the guest that verifies its own writes, and the checks at its end.

use anyhow::{Result, ensure};
use ringhaul_kit::guest::Vm;
use ringhaul_kit::server::Server;

use super::{LIMIT, check_clean_exit, check_same_bytes, with};

const START: &str = include_str!("../../guest/verify-start.sh");
const STOP: &str = include_str!("../../guest/verify-stop.sh");

/// Starts the load on a disk.
pub(super) fn start(vm: &mut Vm, disk: &str) -> Result<()> {
    vm.check(&with(START, &[("DISK", disk)]), LIMIT).map(drop)
}

/// Ends the load, the guest and the daemon. None has seen an error, and file and guest agree.
pub(super) fn finish(vm: Vm, disk: &str, server: Server) -> Result<()> {
    finish_after(vm, disk, server, "^$")
}

/// Like [`finish`], if the kernel's log may have these lines.
pub(super) fn finish_after(mut vm: Vm, disk: &str, mut server: Server, lines: &str) -> Result<()> {
    stop(&mut vm, lines)?;
    check_same_bytes(&mut vm, disk, &server.export().file)?;
    end(vm, &mut server)
}

/// Ends the load, and checks the kernel's log.
pub(super) fn stop(vm: &mut Vm, lines: &str) -> Result<()> {
    vm.check(STOP, LIMIT)?;
    check_no_errors(vm, lines)
}

/// Ends the guest and the daemon.
pub(super) fn end(vm: Vm, server: &mut Server) -> Result<()> {
    vm.power_off(LIMIT)?;
    ensure!(!server.messages().contains("failed"), "{}", server.messages());
    check_clean_exit(server)
}

/// Checks that the guest's kernel has reported no error of its disks. A power-on message of a
/// logical unit is no error: it reports a possible loss of state (SAM-5, unit attention
/// conditions).
fn check_no_errors(vm: &mut Vm, expected: &str) -> Result<()> {
    let errors = "i/o error|blocked for more|timed out|abort|reset|offline|rejecting";
    let is_none = "Power-on or device reset occurred";
    let other = format!("grep -v -e '{is_none}' -e '{expected}'");
    vm.check(&format!("! dmesg | {other} | grep -iE '{errors}'"), LIMIT)?;
    Ok(())
}
