//! The page about the first VM: its commands, with a guest that boots from the image.

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::TestFolders;
use ringhaul_kit::guest::{Accelerator, BOOTED_FROM_DISK, Image, Vm, VmOptions};
use ringhaul_kit::page::{Page, Shell, replaced};
use rustix::process::Signal;

use super::{LIMIT, scenario};

#[test]
fn the_page_about_the_first_vm_works() -> Result<()> {
    scenario(try_page)
}

fn try_page() -> Result<()> {
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let (shell, page) = (Shell::new(&folders.path(""))?, Page::read("guide/first-vm.md")?);
    let image = Image::prepare()?;
    image.make_boot_disk(&folders.path("boot.img"))?;

    let first = page.block("sh", "curl -LO https://cloud.debian.org/")?;
    let (download, rest) = first.split_once('\n').context("one line")?;
    let name = download.rsplit('/').next().unwrap_or_default();
    shell.run(&format!("qemu-img convert -q -O qcow2 boot.img {name}"))?;
    let (serve, qemu) = rest.split_once("&\n").context("no daemon")?;
    let mut daemon = shell.serve(serve)?;
    let mut vm = boot(&shell, qemu, &image)?;
    vm.check(&format!("grep -q {BOOTED_FROM_DISK} /proc/cmdline"), LIMIT)?;
    for line in page.block("sh", "top --once")?.lines() {
        // Status 1 of `doctor` is a finding, such as a kernel without a part of the sandbox.
        let expected = if line.ends_with("doctor") { &[0, 1][..] } else { &[0] };
        let seen = shell.try_run(line)?;
        ensure!(
            seen.status.code().is_some_and(|code| expected.contains(&code)),
            "{line}: {seen:?}"
        );
        ensure!(!seen.stdout.contains("harmful"), "{}", seen.stdout);
    }
    vm.power_off(LIMIT)?;
    let bench = page.block("sh", "ringhaul bench")?;
    shell.run(&replaced(&bench, &[("--runtime 5", "--runtime 500ms")])?)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;

    let empty = page.block("sh", "truncate -s 10G data.img")?;
    let (create, serve) = empty.split_once('\n').context("one line")?;
    shell.run(create)?;
    let mut daemon = shell.serve(serve)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}

/// Boots with the command of the page, on fewer processors with less memory.
fn boot(shell: &Shell, qemu: &str, image: &Image) -> Result<Vm> {
    let accelerator = match Accelerator::choose(image)? {
        Accelerator::Kvm => "-enable-kvm -cpu host",
        Accelerator::Tcg => "-accel tcg,thread=multi -cpu max",
    };
    let qemu = replaced(
        qemu.trim_end(),
        &[
            ("-enable-kvm -cpu host", accelerator),
            ("-smp 4 -m 4G", "-smp 2 -m 512M"),
            ("size=4G", "size=512M"),
        ],
    )?;
    let options = VmOptions { boot_attempts: 1, ..VmOptions::default() };
    Vm::boot_with(&options, |folder| {
        let folder = folder.display();
        // Further consoles of the test, and its monitor.
        Ok(shell.command(&format!(
            "exec {qemu} -chardev stdio,id=console,signal=off -serial chardev:console \
             -chardev socket,id=agent,path={folder}/agent -serial chardev:agent \
             -chardev socket,id=monitor,path={folder}/monitor -mon chardev=monitor,mode=control"
        )))
    })
}
