//! The page about libvirt: its examples and tables, with libvirt's daemon and a guest that runs.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, ringhaul, run};
use ringhaul_kit::guest::{Accelerator, Image, KERNEL_OPTIONS, Vm, VmOptions};
use ringhaul_kit::libvirt::Libvirt;
use ringhaul_kit::page::{self, Page, Shell, code_spans, replaced};
use ringhaul_kit::system::print_skipped;
use ringhaul_tools::process::{output, retry};
use rustix::process::Signal;

use super::{LIMIT, scenario, serve_vm1};

const PAGE: &str = "guide/recipes/libvirt.md";

/// Folders of the page.
const SOCKETS: &str = "/run/ringhaul-vm1";
const DISKS: &str = "/srv/disks";
const BACKUP: &str = "/srv/backup";

/// The size of the disk, and the place of the test's data on each disk.
const DISK_BYTES: u64 = 64 << 20;
const DATA_OFFSET: u64 = 1 << 20;
const DATA_BYTES: usize = 1 << 20;

/// Parts of the domain that a test cannot have, and their substitutes.
fn here(domain: &str, socket: &str, image: &Image, folder: &Path) -> Result<String> {
    let kvm = Accelerator::choose(image)? == Accelerator::Kvm;
    let (kernel, initrd) = (image.kernel.display(), image.initramfs.display());
    let boot = format!(
        "<kernel>{kernel}</kernel><initrd>{initrd}</initrd><cmdline>{KERNEL_OPTIONS}</cmdline>"
    );
    let folder = folder.display();
    let serial = format!(
        "<memballoon model='none'/><serial type='file'><source path='{folder}/console'/></serial>\
         <serial type='unix'><source mode='connect' path='{folder}/agent'/></serial>"
    );
    let monitor = format!(
        "<qemu:commandline xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\
         <qemu:arg value='-chardev'/><qemu:arg value='socket,id=test,path={folder}/monitor'/>\
         <qemu:arg value='-mon'/><qemu:arg value='chardev=test,mode=control'/>\
         </qemu:commandline></domain>"
    );
    let domain = without(domain, "<interface", "</interface>")?;
    replaced(
        &domain,
        &[
            (SOCKETS, socket),
            ("domain type='kvm'", if kvm { "domain type='kvm'" } else { "domain type='qemu'" }),
            ("host-passthrough", if kvm { "host-passthrough" } else { "maximum" }),
            ("<memory unit='GiB'>4<", "<memory unit='MiB'>512<"),
            ("<boot dev='hd'/>", &boot),
            ("<console type='pty'/>", &serial),
            ("</domain>", &monitor),
        ],
    )
}

/// Removes the text from `start` to `end`.
pub(crate) fn without(text: &str, start: &str, end: &str) -> Result<String> {
    let (before, rest) = text.split_once(start).with_context(|| format!("no {start}:\n{text}"))?;
    let (_, after) = rest.split_once(end).with_context(|| format!("no {end}:\n{text}"))?;
    Ok(format!("{before}{after}"))
}

/// A daemon with the service's export, a libvirt, and a shell that reaches both.
struct Scene {
    folders: TestFolders,
    libvirt: Libvirt,
    shell: Shell,
    page: Page,
}

impl Scene {
    fn new() -> Result<Self> {
        let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
        let libvirt = Libvirt::new()?;
        let shell = Shell::new(&folders.path(""))?
            .with("LIBVIRT_DEFAULT_URI", libvirt.uri())
            .with("RINGHAUL_CONTROL", folders.socket("control"));
        folders.disk("vm1.img", DISK_BYTES)?;
        std::fs::create_dir(folders.path("backup")).context("making a folder")?;
        Ok(Self { folders, libvirt, shell, page: Page::read(PAGE)? })
    }

    fn serve(&self) -> Result<Running> {
        serve_vm1(&self.folders)
    }

    /// The folder of the sockets, as in the page.
    fn sockets(&self) -> String {
        self.folders.socket("").display().to_string().trim_end_matches('/').to_owned()
    }

    /// An example in the folders of this scene.
    fn local(&self, example: &str) -> String {
        let disks = self.folders.path("").display().to_string();
        let disks = disks.trim_end_matches('/');
        example
            .replace(SOCKETS, &self.sockets())
            .replace(DISKS, disks)
            .replace(BACKUP, &format!("{disks}/backup"))
    }

    fn run(&self, words: &str) -> Result<()> {
        let script = self.page.block("sh", words)?;
        self.shell.run(&self.local(&script)).map(drop)
    }

    fn boot(&self, image: &Image) -> Result<Vm> {
        let domain = self.page.block("xml", "<domain")?;
        let options = VmOptions { boot_attempts: 1, ..VmOptions::default() };
        Vm::boot_with(&options, |folder| {
            let domain = here(&domain, &self.sockets(), image, folder)?;
            let file = self.libvirt.write("vm1.xml", &domain)?;
            Libvirt::validate(&file)?;
            Ok(self.libvirt.command(Some(&file)))
        })
    }
}

/// A script for the guest that fills the test's place on a disk with data of `word`.
fn write(disk: &str, word: &str) -> String {
    format!(
        "yes {word} | dd of=/dev/{disk} bs=1M count=1 seek=1 iflag=fullblock conv=notrunc,fsync"
    )
}

/// A script for the guest that compares.
fn check(disk: &str, word: &str) -> String {
    format!(
        "echo 3 >/proc/sys/vm/drop_caches\n\
         yes {word} | head -c 1048576 | md5sum >/tmp/wanted\n\
         dd if=/dev/{disk} bs=1M count=1 skip=1 | md5sum | cmp - /tmp/wanted"
    )
}

/// Fails unless a raw disk has the data of `word`.
fn compare(file: &Path, word: &str) -> Result<()> {
    let mut data = vec![0; DATA_BYTES];
    File::open(file)
        .and_then(|file| file.read_exact_at(&mut data, DATA_OFFSET))
        .with_context(|| format!("reading {}", file.display()))?;
    let line = format!("{word}\n").into_bytes();
    let is_right = data.iter().zip(line.iter().cycle()).all(|(found, wanted)| found == wanted);
    ensure!(is_right, "{} does not have the data {word}", file.display());
    Ok(())
}

#[test]
fn the_page_about_libvirt_works_with_a_guest() -> Result<()> {
    match Libvirt::is_too_old()? {
        Some(reason) => print_skipped(&reason),
        None => scenario(run_page)?,
    }
    Ok(())
}

fn run_page() -> Result<()> {
    let scene = Scene::new()?;
    let image = Image::prepare()?;
    let mut daemon = scene.serve()?;
    let mut vm = scene.boot(&image)?;

    vm.check(&write("vda", "first"), LIMIT)?;
    daemon.signal(Signal::KILL)?;
    daemon.finish()?;
    daemon = scene.serve()?;
    vm.check(&check("vda", "first"), LIMIT)?;

    try_functions(&scene)?;
    vm.check(&format!("[ $(cat /sys/block/vda/size) = {} ]", 20u64 << 21), LIMIT)?;

    let data = scene.page.block("xml", "data.sock")?;
    ensure!(!data.contains("<domain"), "the second disk is in the domain");
    std::fs::write(scene.folders.path("data.xml"), scene.local(&data)).context("writing")?;
    let create = format!("qemu-img create -q -f qcow2 data.qcow2 {DISK_BYTES}");
    scene.shell.run(&create)?;
    scene.run("ringhaul ctl add")?;
    vm.check("while [ ! -b /dev/vdb ]; do usleep 50000; done", LIMIT)?;
    vm.check(&write("vdb", "second"), LIMIT)?;

    vm.check(&write("vda", "third"), LIMIT)?;
    scene.run("virsh suspend")?;
    vm.check(&write("vda", "fourth"), LIMIT)?;
    vm.check(&check("vdb", "second"), LIMIT)?;
    compare(&scene.folders.path("backup/vm1.img"), "third")?;
    check_image(&scene.folders.path("backup/data.qcow2"), &scene.folders.path("raw.img"))?;

    scene.run("virsh detach-disk")?;
    vm.check("while [ -b /dev/vdb ]; do usleep 50000; done", LIMIT)?;
    vm.check(&check("vda", "fourth"), LIMIT)?;
    scene.shell.run("virsh destroy vm1")?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}

/// Checks the copy of a qcow2 image that was in use.
fn check_image(image: &Path, raw: &Path) -> Result<()> {
    let leaks = ["check", "-q", "-r", "leaks"];
    output(Command::new("qemu-img").args(leaks).arg(image))?;
    let convert = ["convert", "-f", "qcow2", "-O", "raw"];
    output(Command::new("qemu-img").args(convert).arg(image).arg(raw))?;
    compare(raw, "second")
}

/// Tries each row of the table of functions: libvirt refuses, and Ringhaul's command works.
fn try_functions(scene: &Scene) -> Result<()> {
    let rows = scene.page.table("| `virsh` |")?;
    ensure!(rows.len() > 10, "{rows:?}");
    let own = scene.libvirt.uri().into_string().ok().context("a path of text")?;
    let commands = page::try_functions(&scene.shell, &rows, |function| {
        let function = function.replace("qemu+ssh://host/system", &own);
        let seen = scene.shell.try_run(&format!("virsh {function}"))?;
        ensure!(!seen.status.success(), "it succeeds");
        Ok(seen.stderr)
    })?;
    ensure!(commands >= 5, "the table has {commands} commands of Ringhaul");
    // They have an effect that other commands show.
    let limits = scene.shell.run("ringhaul ctl set-disk vm1")?.stdout;
    ensure!(limits.contains("500"), "{limits}");
    scene.shell.run("ringhaul ctl set-disk vm1 iops-total=0")?;
    let metrics = scene.shell.run("ringhaul ctl metrics")?.stdout;
    ensure!(metrics.contains("ringhaul_disk_state{"), "{metrics}");
    let silent = scene.shell.run("virsh domstats --block vm1")?.stdout;
    ensure!(silent.contains("block.0.name=vda") && !silent.contains("rd.reqs"), "{silent}");
    let silent = scene.shell.run("virsh domblkerror vm1")?.stdout;
    ensure!(silent.contains("No errors"), "{silent}");
    Ok(())
}

#[test]
fn libvirt_refuses_the_elements_that_the_page_names() -> Result<()> {
    if let Some(reason) = Libvirt::is_too_old()? {
        print_skipped(&reason);
        return Ok(());
    }
    let scene = Scene::new()?;
    let _libvirt = Running::start(&mut scene.libvirt.command(None))?;
    retry(LIMIT, || scene.shell.run("virsh uri").map(drop))?;
    let domain = scene.page.block("xml", "<domain")?;
    let define = |domain: &str| -> Result<(bool, String)> {
        let file = scene.libvirt.write("edited.xml", domain)?;
        Libvirt::validate(&file)?;
        let defined = scene.shell.try_run(&format!("virsh define '{}'", file.display()))?;
        let is_defined = defined.status.success();
        if is_defined {
            scene.shell.run("virsh undefine vm1")?;
        }
        Ok((is_defined, defined.stderr))
    };
    let (is_defined, error) = define(&domain)?;
    ensure!(is_defined, "{error}");
    let (rows, mut options) = (scene.page.table("| XML |")?, 0);
    ensure!(rows.len() > 10, "{rows:?}");
    for row in rows {
        let [element] = code_spans(row[0])[..] else { anyhow::bail!("{row:?}") };
        let edited = match element.starts_with('<') {
            true => replaced(&domain, &[("</disk>", &format!("{element}</disk>"))])?,
            false => replaced(&domain, &[("queues='4'/>", &format!("queues='4' {element}/>"))])?,
        };
        let (is_defined, error) = define(&edited)?;
        let is_refused = error.contains("is not supported with vhostuser disk");
        ensure!(!is_defined && is_refused, "{element}: {error}");
        for option in code_spans(row[1]).into_iter().filter(|span| span.starts_with("--")) {
            understand(&scene, option)?;
            options += 1;
        }
    }
    ensure!(options > 8, "the table has {options} options");
    for accepted in ["queue_size='256'", "event_idx='on'"] {
        let edited = replaced(&domain, &[("queues='4'/>", &format!("queues='4' {accepted}/>"))])?;
        let (is_defined, error) = define(&edited)?;
        ensure!(is_defined, "{accepted}: {error}");
    }
    Ok(())
}

/// Fails unless `serve` has this option.
fn understand(scene: &Scene, option: &str) -> Result<()> {
    let file = scene.folders.path("options.toml");
    std::fs::write(&file, "").context("writing")?;
    let mut command = ringhaul()?;
    command.arg("check").arg(&file).args(["--socket-path", "x.sock"]);
    if !option.starts_with("--lun") {
        command.args(["--blk-file", "x.img"]);
    }
    run(command.args(option.split(' ')))?.expect_code(0).with_context(|| option.to_owned())?;
    Ok(())
}
