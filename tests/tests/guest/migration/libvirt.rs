//! Moves of a guest between two libvirt daemons, as the page about migration has them.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use ringhaul_kit::cli::{Running, TestFolders, ringhaul};
use ringhaul_kit::guest::{KVM_DISK_BYTES, KvmGuest, RingLayout, Vmm, lacks_kvm};
use ringhaul_kit::libvirt::Libvirt;
use ringhaul_kit::page::{Page, Shell, code_spans, replaced};
use ringhaul_kit::system::print_skipped;
use ringhaul_tools::process::retry;
use rustix::process::Signal;

use crate::LIMIT;
use crate::libvirt::without;

const PAGE: &str = "guide/migration.md";

/// The guest's build.
const VMM: Vmm = Vmm::QemuMoved { layout: RingLayout::Split, is_target: false, is_scsi: false };

/// The folders of the sockets in the page, and the address of the target.
const PLACE: &str = "/run/ringhaul-vm1/";
const NEW_PLACE: &str = "/run/ringhaul-moved/";
const TARGET: &str = "qemu+ssh://target/system";

/// The example of a move, and that of a move to another socket.
const MOVE: &str = "virsh migrate --live --persistent --undefinesource vm1 qemu";
const MOVE_TO_SOCKET: &str = "--persistent-xml";

/// The line of a daemon that gets no lock.
const NO_LOCK: &str = "cannot run without the lock of the disk";

/// The domain of the page about libvirt, with the kit's guest in it.
fn here(domain: &str, place: &Path, folder: &Path) -> Result<String> {
    let (place, folder) = (place.display(), folder.display());
    let boot = format!(
        "<loader>/usr/share/qemu/qboot.rom</loader><kernel>{folder}/guest</kernel><cmdline/>"
    );
    let serial = format!(
        "<controller type='usb' model='none'/><memballoon model='none'/>\
         <serial type='file'><source path='{place}/console' append='on'/></serial>"
    );
    let domain = without(domain, "<interface", "</interface>")?;
    let cpu = "<cpu mode='host-passthrough'><feature policy='disable' name='arch-capabilities'/>\
               </cpu>";
    replaced(
        &domain,
        &[
            (PLACE, &format!("{place}/")),
            ("<cpu mode='host-passthrough'/>", cpu),
            ("<memory unit='GiB'>4<", "<memory unit='MiB'>64<"),
            ("<vcpu>4<", "<vcpu>1<"),
            // The guest looks for disks on the first bus.
            ("machine='q35'", "machine='pc'"),
            ("device='disk'", "device='disk' model='virtio-non-transitional'"),
            ("<boot dev='hd'/>", &boot),
            ("<console type='pty'/>", &serial),
        ],
    )
}

/// A libvirt and a daemon with the disk.
struct Host {
    /// The folder of the daemon's socket, and of a link to the guest's console.
    place: PathBuf,
    libvirt: Libvirt,
    daemon: Running,
    guest: KvmGuest,
}

impl Host {
    /// Starts both, and the domain if there is one.
    fn start(folders: &TestFolders, name: &str, domain: Option<&str>) -> Result<Self> {
        let place = folders.socket(name);
        std::fs::create_dir(&place).context("making the folder of a socket")?;
        let daemon = serve(folders, &place, &["--lock", "late"])?;
        let libvirt = Libvirt::new()?;
        let guest = KvmGuest::start_by(&VMM, |folder| {
            symlink(folder.join("console"), place.join("console")).context("making a link")?;
            let Some(domain) = domain else { return Ok(libvirt.command(None)) };
            let file = libvirt.write("vm1.xml", &here(domain, &place, folder)?)?;
            Libvirt::validate(&file)?;
            Ok(libvirt.command(Some(&file)))
        })?;
        Ok(Self { place, libvirt, daemon, guest })
    }

    /// The address of its libvirt, as a word of a shell.
    fn uri(&self) -> String {
        format!("'{}'", self.libvirt.uri().display())
    }

    /// Returns true if the daemon has the lock of its disk: on the byte against other writers.
    fn is_locked(&self) -> Result<bool> {
        let folder = format!("/proc/{}/fdinfo", self.daemon.pid());
        let files = std::fs::read_dir(&folder).with_context(|| format!("reading {folder}"))?;
        // Descriptors come and go.
        let mut texts =
            files.flatten().filter_map(|file| std::fs::read_to_string(file.path()).ok());
        Ok(texts.any(|text| {
            text.lines().any(|line| line.starts_with("lock:") && line.ends_with(" 201 201"))
        }))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // unshare ignores SIGTERM.
        let _ = self.guest.kill();
    }
}

fn serve(folders: &TestFolders, place: &Path, options: &[&str]) -> Result<Running> {
    let mut command = ringhaul()?;
    command.arg("serve").arg("--socket-path").arg(place.join("disk.sock"));
    command.arg("--blk-file").arg(folders.path("disk")).args(options);
    Running::serve(&mut command)
}

/// Two hosts, of which the first has the guest.
struct Scene {
    folders: TestFolders,
    shell: Shell,
    page: Page,
    from: Host,
    to: Host,
}

impl Scene {
    fn new() -> Result<Self> {
        let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
        let shell = Shell::new(&folders.path(""))?;
        folders.disk("disk", KVM_DISK_BYTES)?;
        let domain = Page::read("guide/recipes/libvirt.md")?.block("xml", "<domain")?;
        let mut from = Host::start(&folders, "a", Some(&domain))?;
        let to = Host::start(&folders, "b", None)?;
        from.guest.wait_rounds(2)?;
        retry(LIMIT, || shell.run(&format!("virsh -c {} uri", to.uri())).map(drop))?;
        Ok(Self { folders, shell, page: Page::read(PAGE)?, from, to })
    }

    /// An example of the page as a script for these hosts.
    fn local(&self, example: &str) -> Result<String> {
        let (from, to) = (self.from.place.display(), self.to.place.display());
        let example = example.replace(PLACE, &format!("{from}/"));
        let example = example.replace(NEW_PLACE, &format!("{to}/"));
        let example = replaced(&example, &[(TARGET, &self.to.uri())])?;
        Ok(format!("export LIBVIRT_DEFAULT_URI={}\n{example}", self.from.uri()))
    }

    /// A script that moves the guest to the other host, with further options.
    fn migrate(&self, options: &str) -> Result<String> {
        let example = self.page.block("sh", MOVE_TO_SOCKET)?;
        let (xml, _) = example.split_once("virsh migrate").context("no move to a socket")?;
        let options =
            format!("virsh migrate --xml target.xml --persistent-xml target.xml {options} ");
        let command = replaced(&self.page.block("sh", MOVE)?, &[("virsh migrate ", &options)])?;
        self.local(&format!("{xml}{command}"))
    }

    /// Runs a script that moves the guest, and waits until it continues. Then the other host is the
    /// first one.
    fn run_move(&mut self, script: &str) -> Result<()> {
        ensure!(self.from.is_locked()? && !self.to.is_locked()?, "the guest has not moved");
        self.shell.run(script)?;
        let round = self.from.guest.round();
        std::mem::swap(&mut self.from, &mut self.to);
        self.from.guest.wait_for_round_unless(round + 2, || None)?;
        ensure!(self.from.is_locked()? && !self.to.is_locked()?, "the guest has moved");
        ensure!(self.to.guest.round() == round, "the guest runs twice");
        Ok(())
    }

    /// Kills the daemon of the target, and starts one with these options.
    fn replace_target(&mut self, options: &[&str]) -> Result<()> {
        self.to.daemon.signal(Signal::KILL)?;
        self.to.daemon = serve(&self.folders, &self.to.place, options)?;
        Ok(())
    }

    /// Runs a command of virsh on the host with the guest.
    fn virsh(&self, command: &str) -> Result<()> {
        self.shell.run(&format!("virsh -c {} {command}", self.from.uri())).map(drop)
    }
}

#[test]
fn a_guest_moves_between_two_libvirts() -> Result<()> {
    if let Some(reason) = lacks_kvm().or(Libvirt::is_too_old()?) {
        print_skipped(&reason);
        return Ok(());
    }
    let mut scene = Scene::new()?;
    scene.run_move(&scene.local(&scene.page.block("sh", MOVE_TO_SOCKET)?)?)?;
    scene.run_move(&scene.migrate("--p2p --tunnelled")?)?;
    try_refusals(&mut scene)?;
    try_absent_daemon(&mut scene)?;
    let socket = scene.folders.socket("move");
    scene.run_move(&scene.migrate(&format!("--migrateuri unix://{}", socket.display()))?)?;

    scene.virsh("managedsave vm1")?;
    ensure!(!scene.from.is_locked()?, "the guest is saved");
    scene.virsh("start vm1")?;
    scene.from.guest.wait_rounds(2)?;
    try_lock_of_source(&mut scene)
}

/// Tries each row of the table of errors. The guest continues.
fn try_refusals(scene: &mut Scene) -> Result<()> {
    let page = Page::read(PAGE)?;
    let rows = page.table("| `virsh migrate` |")?;
    ensure!(rows.len() == 4, "{rows:?}");
    for row in rows {
        let ([case], [words]) = (&code_spans(row[0])[..], &code_spans(row[1])[..]) else {
            bail!("{row:?} has no case or no words");
        };
        scene.replace_target(&["--lock", "late"])?;
        let mut script = scene.migrate("")?;
        match *case {
            "--num-queues 1" => scene.replace_target(&["--lock", "late", "--num-queues", "1"])?,
            "host_uuid" => script = script.replace(&scene.to.uri(), &scene.from.uri()),
            option => script = scene.migrate(option)?,
        }
        let refused = scene.shell.try_run(&script)?;
        ensure!(
            !refused.status.success() && refused.stderr.contains(words),
            "{row:?}: {refused:?}"
        );
        scene.from.guest.wait_rounds(2)?;
    }
    let refused = serve(&scene.folders, &scene.folders.socket(""), &["--lock", "on"]);
    let refusal = format!("{:?}", refused.err());
    ensure!(refusal.contains("it is locked by ringhaul"), "{refusal}");
    Ok(())
}

/// A move to a host without a daemon waits until it is ended there.
fn try_absent_daemon(scene: &mut Scene) -> Result<()> {
    scene.to.daemon.signal(Signal::TERM)?;
    let socket = scene.to.place.join("disk.sock");
    retry(LIMIT, || {
        ensure!(!socket.exists(), "{} is still there", socket.display());
        Ok(())
    })?;
    let mut command = scene.shell.command(&scene.migrate("")?);
    let mut waiting = command.stderr(Stdio::null()).spawn().context("starting virsh")?;
    let destroy = format!("virsh -c {} destroy vm1", scene.to.uri());
    retry(LIMIT, || {
        // It fails before the domain is there, and with the domain gone when it has ended it.
        let _ = scene.shell.try_run(&destroy)?;
        ensure!(waiting.try_wait()?.is_some(), "virsh waits for the target");
        Ok(())
    })?;
    ensure!(!waiting.wait()?.success(), "the guest has moved to a host without a daemon");
    scene.from.guest.wait_rounds(2)?;
    scene.to.daemon = serve(&scene.folders, &scene.to.place, &["--lock", "late"])?;
    Ok(())
}

/// A guest waits on the target until the source's daemon, which keeps its lock, has ended.
fn try_lock_of_source(scene: &mut Scene) -> Result<()> {
    scene.from.daemon.signal(Signal::KILL)?;
    scene.from.daemon = serve(&scene.folders, &scene.from.place, &["--lock", "on"])?;
    scene.from.guest.wait_rounds(2)?;
    scene.shell.run(&scene.migrate("")?)?;
    let round = scene.from.guest.round();
    let line = scene.to.daemon.wait_for(NO_LOCK)?;
    let holder = format!("locked by ringhaul (process {})", scene.from.daemon.pid());
    ensure!(line.contains(&holder), "{line} does not name the source's daemon");
    ensure!(scene.to.guest.round() <= round, "two daemons use the disk");
    scene.from.daemon.signal(Signal::TERM)?;
    scene.to.guest.wait_for_round_unless(round + 2, || None)?;
    ensure!(scene.to.is_locked()?, "the guest runs");
    Ok(())
}
