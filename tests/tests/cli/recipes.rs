//! The pages about Kata Containers and KubeVirt: their files and commands, and the domains that the
//! hook makes.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{LIMIT, Running, TestFolders, bench, run};
use ringhaul_kit::libvirt::Libvirt;
use ringhaul_kit::page::{Page, Shell, try_commands};
use ringhaul_kit::system::print_skipped;
use ringhaul_tools::process::retry;
use rustix::fs::{major, minor};
use rustix::process::Signal;
use serde_json::Value;

use crate::{DISK_BYTES, is_root, test_folders};

/// Kata's number of vhost-user-blk devices.
const KATA_MAJOR: u32 = 241;

/// A shell for the examples of a page, in folders with a disk.
fn shell(folders: &TestFolders) -> Result<Shell> {
    folders.disk("vm1.img", DISK_BYTES)?;
    Ok(Shell::new(&folders.path(""))?.with("RINGHAUL_CONTROL", folders.socket("control")))
}

fn stop(mut daemon: Running) -> Result<()> {
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}

/// The socket of the device, found as Kata does: by the name of the node with its numbers.
fn find_socket(store: &Path, numbers: (u32, u32)) -> Result<PathBuf> {
    let devices = store.join("block/devices");
    for entry in fs::read_dir(&devices).with_context(|| format!("reading {devices:?}"))? {
        let entry = entry.context("reading a folder")?;
        let node = entry.metadata().context("examining a node")?;
        if (major(node.rdev()), minor(node.rdev())) == numbers {
            ensure!(node.file_type().is_block_device(), "{entry:?} is no block device");
            return Ok(store.join("block/sockets").join(entry.file_name()));
        }
    }
    anyhow::bail!("no node in {devices:?} has the numbers {numbers:?}")
}

#[test]
fn the_page_about_kata_works() -> Result<()> {
    if !is_root() {
        print_skipped("the page about Kata, whose device node needs root");
        return Ok(());
    }
    let folders = test_folders()?;
    let (shell, page) = (shell(&folders)?, Page::read("guide/recipes/kata.md")?);
    let config = page.block("toml", "[hypervisor.qemu]")?;
    let value = |key: &str| {
        let line = config.lines().find_map(|line| line.strip_prefix(&format!("{key} = ")));
        line.with_context(|| format!("the configuration has no {key}"))
    };
    ensure!(value("enable_vhost_user_store")? == "true" && value("enable_hugepages")? == "true");
    ensure!(value("vhost_user_reconnect_timeout_sec")?.parse::<u32>()? > 0);
    let store = value("vhost_user_store_path")?.trim_matches('"');
    let own = folders.socket("kata");
    let local = |text: &str| -> Result<String> {
        ensure!(text.contains(store), "{text} does not use {store}");
        let text = text.replace(store, &own.display().to_string());
        let disk = folders.path("vm1.img").display().to_string();
        let control = folders.socket("control").display().to_string();
        Ok(text.replace("/srv/disks/vm1.img", &disk).replace("/run/ringhaul/control", &control))
    };

    shell.run(&local(&page.block("sh", "mknod")?)?)?;
    let daemon = shell.serve(&local(&page.block("sh", "ringhaul serve")?)?)?;
    let container = local(&page.block("text", "--device")?)?;
    let device = container.split([' ', ':']).find(|word| word.contains("/block/devices/"));
    let node = fs::metadata(device.context("the container has no device")?).context("the node")?;
    let numbers = (major(node.rdev()), minor(node.rdev()));
    ensure!(numbers.0 == KATA_MAJOR, "the node has the numbers {numbers:?}");
    let socket = find_socket(&own, numbers)?;
    run(&mut bench(&socket, "--rw randrw --verify --runtime 500ms")?)?.expect_code(0)?;
    let commands = try_commands(&shell, &page.table("| function |")?)?;
    ensure!(commands >= 3, "the table has {commands} commands of Ringhaul");
    stop(daemon)
}

/// A domain as KubeVirt passes it to a hook, with `memory` for its memory.
fn domain(memory: &str) -> String {
    format!(
        "<domain type=\"qemu\" xmlns:qemu=\"http://libvirt.org/schemas/domain/qemu/1.0\">\
         <name>default_vm1</name><memory unit=\"b\">536870912</memory>{memory}\
         <os><type arch=\"x86_64\" machine=\"q35\">hvm</type></os><vcpu placement=\"static\">4\
         </vcpu><features><acpi></acpi></features><devices><disk device=\"disk\" type=\"file\">\
         <source file=\"/var/run/kubevirt-private/disk.img\"></source>\
         <target bus=\"virtio\" dev=\"vda\"></target><driver name=\"qemu\" type=\"raw\"></driver>\
         </disk><console type=\"pty\"></console></devices></domain>"
    )
}

/// The text of a key of the page's configuration map.
fn hook(page: &Page) -> Result<String> {
    let map = page.block("yaml", "kind: ConfigMap")?;
    let (_, script) = map.split_once("  onDefineDomain: |\n").context("no onDefineDomain")?;
    Ok(script.lines().map(|line| format!("{}\n", line.get(4..).unwrap_or(""))).collect())
}

#[test]
fn the_hook_for_kubevirt_adds_a_disk_that_libvirt_accepts() -> Result<()> {
    if let Some(reason) = Libvirt::is_too_old()? {
        print_skipped(&reason);
        return Ok(());
    }
    let folders = test_folders()?;
    let (libvirt, page) = (Libvirt::new()?, Page::read("guide/recipes/kubevirt.md")?);
    let shell = shell(&folders)?.with("LIBVIRT_DEFAULT_URI", libvirt.uri());
    let script = libvirt.write("onDefineDomain", &hook(&page)?)?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).context("setting a mode")?;
    let _daemon = Running::start(&mut libvirt.command(None))?;
    retry(LIMIT, || shell.run("virsh uri").map(drop))?;
    for memory in [
        "",
        "<memoryBacking><hugepages></hugepages></memoryBacking>",
        "<memoryBacking><locked></locked></memoryBacking>",
        "<memoryBacking><source type=\"memfd\"></source><access mode=\"shared\"></access>\
         </memoryBacking>",
    ] {
        let input = libvirt.write("input.xml", &domain(memory))?;
        let line = format!("{0} --vmi '{{}}' --domain \"$(cat {1})\"", show(&script), show(&input));
        let output = libvirt.write("output.xml", &shell.run(&line)?.stdout)?;
        Libvirt::validate(&output)?;
        shell.run(&format!("virsh define {}", show(&output)))?;
        let text = fs::read_to_string(&output).context("reading a domain")?;
        ensure!(text.matches("<access mode=").count() == 1, "{text}");
        // libvirt translates huge pages only where hugetlbfs is mounted.
        if memory.contains("hugepages") {
            shell.run("virsh undefine default_vm1")?;
            continue;
        }
        let qemu = shell.run("virsh domxml-to-native qemu-argv --domain default_vm1")?.stdout;
        for part in ["vhost-user-blk-pci", "path=/var/run/ringhaul/disk.sock,reconnect-ms=1000"] {
            ensure!(qemu.contains(part), "{memory}: {qemu}");
        }
        ensure!(qemu.contains("\"share\":true"), "{memory}: {qemu}");
        shell.run("virsh undefine default_vm1")?;
    }
    Ok(())
}

fn show(path: &Path) -> String {
    path.display().to_string()
}

#[test]
fn the_sidecar_for_kubevirt_serves_the_socket_of_the_hook() -> Result<()> {
    let folders = test_folders()?;
    let (shell, page) = (shell(&folders)?, Page::read("guide/recipes/kubevirt.md")?);
    fs::rename(folders.path("vm1.img"), folders.path("disk.img")).context("renaming")?;
    let vm = page.block("yaml", "kind: VirtualMachine")?;
    let (from, to) = (vm.find("[{").context("no list")?, vm.find("}]").context("no list")?);
    let sidecars: Value = serde_json::from_str(&vm[from..to + 2]).context("the annotation")?;
    let (volume, map) = (&sidecars[0]["pvc"], &sidecars[0]["configMap"]);
    ensure!(map["hookPath"] == "/usr/bin/onDefineDomain", "{map}");
    let named = page.block("yaml", "kind: ConfigMap")?;
    for name in [&map["name"], &map["key"]] {
        let name = name.as_str().context("no name")?;
        ensure!(named.contains(name), "the configuration map has no {name}");
    }
    // Both containers have the volume, at two places.
    let inside = volume["volumePath"].as_str().context("no volumePath")?;
    let shared = volume["sharedComputePath"].as_str().context("no sharedComputePath")?;
    let hook = hook(&page)?;
    let (_, path) = hook.split_once("path='").context("the hook names no socket")?;
    let path = path.split('\'').next().unwrap_or_default();
    let name = path.strip_prefix(shared).context("the socket is not on the volume")?;

    let start = page.block("sh", "sidecar-shim")?;
    let (serve, _) = start.split_once('&').context("nothing is started")?;
    let (_, serve) = serve.split_once('\n').context("there is no second line")?;
    let socket = folders.socket(name.trim_start_matches('/'));
    let place = |name: &str| format!("{inside}/{name}");
    let serve = serve
        .replace(&place("disk.img"), &show(&folders.path("disk.img")))
        .replace(&place("control"), &show(&folders.socket("control")))
        .replace(&format!("{inside}{name}"), &show(&socket));
    ensure!(!serve.contains(&place("")), "{serve}");
    let daemon = shell.serve(&serve)?;
    run(&mut bench(&socket, "--rw randrw --verify --runtime 500ms")?)?.expect_code(0)?;
    let commands = try_commands(&shell, &page.table("| function |")?)?;
    ensure!(commands >= 3, "the table has {commands} commands of Ringhaul");
    stop(daemon)
}
