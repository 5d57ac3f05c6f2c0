//! A load in the guest that reads what it has written, and how it ends when nothing was lost.

use anyhow::{Result, ensure};
use ringhaul_kit::guest::Vm;
use ringhaul_kit::server::Server;

use super::{LIMIT, check_clean_exit, check_same_bytes, with};

const START: &str = include_str!("../../guest/verify-start.sh");
const STOP: &str = include_str!("../../guest/verify-stop.sh");

/// Begins to write to a disk, and to read it again.
pub(super) fn start(vm: &mut Vm, disk: &str) -> Result<()> {
    vm.check(&with(START, &[("DISK", disk)]), LIMIT).map(drop)
}

/// Ends that, the guest and the daemon. None of them has seen an error, and the disk has what the
/// guest reads.
pub(super) fn finish(vm: Vm, disk: &str, server: Server) -> Result<()> {
    finish_after(vm, disk, server, "^$")
}

/// The same after something of which the kernel's log has these lines.
pub(super) fn finish_after(mut vm: Vm, disk: &str, mut server: Server, lines: &str) -> Result<()> {
    stop(&mut vm, lines)?;
    check_same_bytes(&mut vm, disk, &server.export().file)?;
    end(vm, &mut server)
}

/// Ends the load alone.
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

/// The guest's kernel has reported no error of its disks. That a logical unit was switched on is
/// none: what it may have lost of its state is reported so (SAM-5, unit attention conditions).
fn check_no_errors(vm: &mut Vm, expected: &str) -> Result<()> {
    let errors = "i/o error|blocked for more|timed out|abort|reset|offline|rejecting";
    let is_none = "Power-on or device reset occurred";
    let other = format!("grep -v -e '{is_none}' -e '{expected}'");
    vm.check(&format!("! dmesg | {other} | grep -iE '{errors}'"), LIMIT)?;
    Ok(())
}
