//! The pages about Proxmox VE, Cloud Hypervisor and Firecracker: their examples and tables.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use ringhaul_kit::cli::{Running, TestFolders};
use ringhaul_kit::guest::{
    Accelerator, Image, KERNEL_OPTIONS, KVM_DISK_BYTES, KvmGuest, Vm, VmOptions, Vmm, lacks_kvm,
};
use ringhaul_kit::page::{Page, Shell, code_spans, replaced, try_commands, try_functions};
use ringhaul_kit::system::print_skipped;
use ringhaul_tools::process::retry;
use ringhaul_tools::workspace::find_program;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::{LIMIT, scenario, serve_vm1};

/// Folders and files of the pages.
const SOCKETS: &str = "/run/ringhaul-vm1";
const DISKS: &str = "/srv/disks";
const API: &str = "/run/vm1.api";

/// A page, and a daemon that serves its disk.
struct Scene {
    folders: TestFolders,
    shell: Shell,
    page: Page,
}

impl Scene {
    fn new(page: &str) -> Result<Self> {
        let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
        let shell = Shell::new(&folders.path(""))?;
        let shell = shell.with("RINGHAUL_CONTROL", folders.socket("control"));
        folders.disk("vm1.img", KVM_DISK_BYTES)?;
        Ok(Self { folders, shell, page: Page::read(page)? })
    }

    fn serve(&self) -> Result<Running> {
        serve_vm1(&self.folders)
    }

    /// An example in the folders of this scene.
    fn local(&self, example: &str) -> String {
        let folder = |path: PathBuf| path.display().to_string().trim_end_matches('/').to_owned();
        example
            .replace(SOCKETS, &folder(self.folders.socket("")))
            .replace(DISKS, &folder(self.folders.path("")))
            .replace(API, &folder(self.folders.socket("api")))
    }

    fn run(&self, words: &str) -> Result<()> {
        self.shell.run(&self.local(&self.page.block("sh", words)?)).map(drop)
    }

    fn create_image(&self) -> Result<()> {
        let create = format!("qemu-img create -q -f qcow2 data.qcow2 {KVM_DISK_BYTES}");
        self.shell.run(&create).map(drop)
    }
}

/// Kills the daemon, and starts its successor.
fn restart(scene: &Scene, mut daemon: Running) -> Result<Running> {
    daemon.signal(Signal::KILL)?;
    daemon.finish()?;
    scene.serve()
}

fn stop(mut daemon: Running) -> Result<()> {
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}

/// The monitor of a human, as `qm monitor` has it.
struct Monitor(UnixStream);

impl Monitor {
    const PROMPT: &str = "(qemu) ";

    fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).context("connecting to the monitor")?;
        stream.set_read_timeout(Some(LIMIT)).context("limiting a wait")?;
        let mut monitor = Self(stream);
        monitor.answer()?;
        Ok(monitor)
    }

    fn answer(&mut self) -> Result<String> {
        let (mut text, mut piece) = (String::new(), [0; 4096]);
        while !text.ends_with(Self::PROMPT) {
            let count = self.0.read(&mut piece).context("reading from the monitor")?;
            ensure!(count > 0, "the monitor ends: {text}");
            text.push_str(&String::from_utf8_lossy(&piece[..count]));
        }
        Ok(text)
    }

    fn execute(&mut self, line: &str) -> Result<String> {
        self.0.write_all(format!("{line}\n").as_bytes()).context("writing to the monitor")?;
        self.answer()
    }

    /// Executes the lines of an example, which have no answer but errors.
    fn run(&mut self, example: &str) -> Result<()> {
        for line in example.lines() {
            let answer = self.execute(line)?;
            ensure!(!answer.contains("Error"), "{line}: {answer}");
        }
        Ok(())
    }
}

/// Options like those that Proxmox puts in front of `args:`.
fn proxmox(machine: &str, args: &str, image: &Image, folder: &Path) -> Result<Command> {
    let accelerator = match Accelerator::choose(image)? {
        Accelerator::Kvm => "accel=kvm",
        Accelerator::Tcg => "accel=tcg",
    };
    let at = |name: &str| folder.join(name).display().to_string();
    let socket = |id: &str, more: &str| format!("socket,id={id},path={}{more}", at(id));
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "qemu-system-x86_64"])
        .args(["-name", "vm1,debug-threads=on", "-nodefaults", "-nographic"])
        .args(["-smp", "2,sockets=1,cores=2,maxcpus=2", "-cpu", "max", "-m", "512"])
        .args(["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"])
        .args(["-chardev", &socket("agent", ""), "-serial", "chardev:agent"])
        .args(["-chardev", &socket("monitor", ""), "-mon", "chardev=monitor,mode=control"])
        .args(["-chardev", &socket("human", ",server=on,wait=off")])
        .args(["-mon", "chardev=human,mode=readline"])
        .arg("-kernel")
        .arg(&image.kernel)
        .arg("-initrd")
        .arg(&image.initramfs)
        .args(["-append", KERNEL_OPTIONS])
        .args(["-machine", &format!("{accelerator},type={machine}")])
        .args(args.split_whitespace())
        .stdin(Stdio::null());
    Ok(command)
}

#[test]
fn the_page_about_proxmox_works() -> Result<()> {
    scenario(|| try_proxmox("pc", true))?;
    scenario(|| try_proxmox("q35", false))
}

fn try_proxmox(machine: &str, has_hotplug: bool) -> Result<()> {
    let scene = Scene::new("guide/recipes/proxmox.md")?;
    let command = scene.page.block("sh", "--args")?;
    ensure!(command.contains("--memory 4096 ") && command.contains("--numa 0 "), "{command}");
    // The shell joins the lines.
    let (_, args) = command.split_once("--args ").context("no --args")?;
    let args = scene.shell.run(&format!("printf %s {args}"))?.stdout;
    let args = scene.local(&replaced(&args, &[("size=4096M", "size=512M")])?);
    let mut daemon = scene.serve()?;
    let image = Image::prepare()?;
    // The second monitor is beside the folder's other sockets.
    let human = std::cell::RefCell::new(PathBuf::new());
    let options = VmOptions { boot_attempts: 1, ..VmOptions::default() };
    let mut vm = Vm::boot_with(&options, |folder| {
        *human.borrow_mut() = folder.join("human");
        proxmox(machine, &args, &image, folder)
    })?;
    let mut monitor = Monitor::connect(&human.borrow())?;

    vm.check("echo proxmox | dd of=/dev/vda bs=512 conv=sync,fsync", LIMIT)?;
    daemon = restart(&scene, daemon)?;
    vm.check("echo 3 >/proc/sys/vm/drop_caches; head -c 7 /dev/vda | grep -q proxmox", LIMIT)?;

    scene.create_image()?;
    scene.run("ringhaul ctl add")?;
    let add = scene.local(&scene.page.block("text", "device_add")?);
    if has_hotplug {
        monitor.run(&add)?;
        vm.check("while [ ! -b /dev/vdb ]; do usleep 50000; done", LIMIT)?;
        vm.check("echo second | dd of=/dev/vdb bs=512 conv=sync,fsync", LIMIT)?;
        let remove = scene.page.block("text", "device_del")?;
        let (first, rest) = remove.split_once('\n').context("two lines")?;
        monitor.run(first)?;
        vm.check("while [ -b /dev/vdb ]; do usleep 50000; done", LIMIT)?;
        retry(LIMIT, || monitor.run(rest))?;
    } else {
        let refused = add.lines().map(|line| monitor.execute(line)).collect::<Result<String>>()?;
        ensure!(refused.contains("does not support hotplugging"), "{refused}");
    }
    vm.check("grep -q proxmox /dev/vda", LIMIT)?;
    let commands = try_commands(&scene.shell, &scene.page.table("| function |")?)?;
    ensure!(commands >= 3, "the table has {commands} commands of Ringhaul");
    drop(vm);
    stop(daemon)
}

/// The reason to skip a page about a VMM that runs its guests with KVM.
fn skipped(programs: &[&str]) -> bool {
    let missing = programs.iter().find(|program| find_program(program).is_none());
    let reason = missing.map(|program| format!("$PATH lacks {program}")).or_else(lacks_kvm);
    if let Some(reason) = &reason {
        print_skipped(reason);
    }
    reason.is_some()
}

#[test]
fn the_page_about_cloud_hypervisor_works() -> Result<()> {
    if skipped(&["cloud-hypervisor", "ch-remote"]) {
        return Ok(());
    }
    let scene = Scene::new("guide/recipes/cloud-hypervisor.md")?;
    let mut daemon = scene.serve()?;
    let line = scene.page.block("sh", "--kernel")?;
    let mut guest = KvmGuest::start_by(&Vmm::CloudHypervisor(PathBuf::new()), |folder| {
        let kernel = folder.join("guest").display().to_string();
        let line = replaced(&line, &[("vmlinux", &kernel), ("size=4G", "size=64M")])?;
        let line = scene.local(&line).replace("\\\n", " ");
        let line = format!("exec {} --serial tty --console off", line.trim());
        Ok(scene.shell.command(&line))
    })?;
    guest.wait_rounds(1)?;
    daemon = restart(&scene, daemon)?;
    guest.wait_rounds(2)?;
    let rows = scene.page.table("| `ch-remote` |")?;
    let commands = try_functions(&scene.shell, &rows, |function| {
        let line = scene.local(&format!("ch-remote --api-socket {API} {function}"));
        let seen = scene.shell.try_run(&line)?;
        ensure!(!seen.status.success(), "it succeeds");
        Ok(seen.stderr)
    })?;
    ensure!(commands >= 2, "the table has {commands} commands of Ringhaul");
    let counters =
        scene.shell.run(&scene.local(&format!("ch-remote --api-socket {API} counters")))?;
    ensure!(counters.stdout.trim() == "{}", "{}", counters.stdout);
    scene.create_image()?;
    scene.run("ringhaul ctl add")?;
    scene.run("ringhaul ctl remove")?;
    guest.wait_rounds(2)?;
    drop(guest);
    stop(daemon)
}

#[test]
fn the_page_about_firecracker_works() -> Result<()> {
    if skipped(&["firecracker", "curl"]) {
        return Ok(());
    }
    let scene = Scene::new("guide/recipes/firecracker.md")?;
    let daemon = scene.serve()?;
    let config: Value = serde_json::from_str(&scene.local(&scene.page.block("json", "drives")?))
        .context("reading the configuration of the page")?;
    refuse_keys(&scene, &config)?;
    let line = scene.local(&scene.page.block("sh", "--config-file")?);
    let mut guest = KvmGuest::start_by(&Vmm::Firecracker(PathBuf::new()), |folder| {
        write_config(&scene, &config, folder)?;
        Ok(scene.shell.command(&format!("exec {}", line.trim())))
    })?;
    guest.wait_rounds(1)?;
    scene.run("curl")?;
    request(&scene, r#"PATCH /vm {"state": "Paused"}"#)?;
    let rows = scene.page.table("| request |")?;
    let commands = try_functions(&scene.shell, &rows, |function| request(&scene, function))?;
    ensure!(commands > 0, "the table has no command of Ringhaul");
    scene.shell.run("ringhaul ctl set-disk vm1 iops-total=0")?;
    request(&scene, r#"PATCH /vm {"state": "Resumed"}"#)?;
    guest.wait_rounds(2)?;
    drop(guest);
    stop(daemon)
}

/// Writes the page's configuration for the guest in `folder`.
fn write_config(scene: &Scene, config: &Value, folder: &Path) -> Result<()> {
    let mut config = config.clone();
    config["boot-source"] = json!({"kernel_image_path": folder.join("guest"), "boot_args": ""});
    config["machine-config"]["mem_size_mib"] = json!(64);
    let file = scene.folders.path("vm1.json");
    std::fs::write(&file, config.to_string()).context("writing a configuration")
}

/// Fails unless Firecracker refuses each key of the table of keys.
fn refuse_keys(scene: &Scene, config: &Value) -> Result<()> {
    let rows = scene.page.table("| key of a drive |")?;
    ensure!(rows.len() >= 3, "{rows:?}");
    for row in rows {
        let ([key], [words]) = (&code_spans(row[0])[..], &code_spans(row[1])[..]) else {
            bail!("{row:?} names no key or no words");
        };
        let added: Value = serde_json::from_str(&format!("{{{key}}}")).context("reading a key")?;
        let mut config = config.clone();
        for (key, value) in added.as_object().context("a key with a value")? {
            config["drives"][0][key] = value.clone();
        }
        write_config(scene, &config, scene.folders.path("").as_path())?;
        std::fs::write(scene.folders.path("guest"), "").context("writing an empty kernel")?;
        let seen = scene.shell.try_run("firecracker --no-api --config-file vm1.json")?;
        let text = seen.stdout + &seen.stderr;
        ensure!(!seen.status.success() && text.contains(words), "{key}: {text}");
    }
    Ok(())
}

/// Sends `METHOD PATH BODY` to Firecracker, and returns the body of the answer.
fn request(scene: &Scene, text: &str) -> Result<String> {
    let mut words = text.splitn(3, ' ');
    let (Some(method), Some(path), Some(body)) = (words.next(), words.next(), words.next()) else {
        bail!("{text} is no request");
    };
    let line =
        format!("curl -s --unix-socket {API} -X {method} 'http://localhost{path}' -d '{body}'");
    Ok(scene.shell.run(&scene.local(&line))?.stdout)
}
