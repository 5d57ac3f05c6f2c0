//! The guide as a new user of the package follows it: its commands, in a system of its own.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use ringhaul_kit::container::Container;
use ringhaul_kit::daemon::LIMIT;
use ringhaul_kit::page::{Page, code_spans, replaced};
use ringhaul_kit::system::can_change_system;
use ringhaul_tools::process::{output, retry};
use tempfile::TempDir;

use super::package::{has_tools, make};

/// Makes the sample export of `/etc/ringhaul.toml` one of another virtual machine.
const EDIT: &str = "sed -i -e 's/^# \\(\\[\\[\\|name\\|endpoint\\|device\\)/\\1/' -e s/vm1/vm2/";

/// A container with an installed package.
struct Host {
    container: Container,
    disks: TempDir,
    _package: TempDir,
}

impl Host {
    fn install() -> Result<Option<Self>> {
        if !can_change_system("packages of a container")
            || !has_tools(&["cargo-cyclonedx", "cargo-deb", "dpkg-shlibdeps", "qemu-img"])?
        {
            return Ok(None);
        }
        let cache = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let [disks, package] = [(); 2].map(|()| tempfile::tempdir_in(cache));
        let (disks, package) = (disks?, package?);
        make("deb", package.path(), &[])?;
        let binds = [(disks.path(), "/srv/disks"), (package.path(), "/mnt")];
        let Some(container) = Container::boot(cache, &binds)? else { return Ok(None) };
        let host = Self { container, disks, _package: package };
        host.run("dpkg --install /mnt/*.deb < /dev/null")?;
        Ok(Some(host))
    }

    /// Runs a block of commands as it stands.
    fn run(&self, block: &str) -> Result<String> {
        self.container.output(&format!("set -e; export PAGER=cat; {block}"))
    }

    /// Fails unless one export of a daemon is served.
    fn is_served(&self, service: &str, name: &str) -> Result<()> {
        let list = self.run(&format!("ringhaul ctl --control /run/{service}/control list"))?;
        ensure!(list.starts_with(&format!("{name}  serving, ")), "{list}");
        Ok(())
    }
}

#[test]
fn commands_of_the_guide_work_after_the_installation() -> Result<()> {
    let Some(host) = Host::install()? else { return Ok(()) };
    let demo = Page::read("guide/install.md")?.block("sh", "ringhaul demo")?;
    let page = "test -s /usr/share/man/man7/ringhaul-disks.7.gz";
    host.run(&replaced(
        &demo,
        &[("demo", "demo --runtime 1 --size 16"), ("man ringhaul-disks", page)],
    )?)?;
    one_virtual_machine(&host)?;
    let process = host.run("systemctl show --value --property=MainPID ringhaul@vm1")?;
    host.run(&commands("guide/crash-and-upgrade.md", "ctl upgrade")?)?;
    let now = host.run("systemctl show --value --property=MainPID ringhaul@vm1")?;
    ensure!(now != process, "the upgrade has kept the process {process}");
    host.run(&Page::read("guide/troubleshooting.md")?.block("sh", "ringhaul disk info")?)?;
    findings(&host)?;
    a_broken_disk(&host)?;
    documents(&host)?;
    many_disks(&host)?;
    host.run("systemctl stop ringhaul ringhaul@vm1 ringhaul@vm3")?;
    for row in Page::read("guide/install.md")?.table("| command | effect |")? {
        for command in code_spans(row[0]).into_iter().filter(|command| command.contains("apt ")) {
            let apt = replaced(command, &[("sudo apt ", "apt-get -qq -y ")])?;
            host.run(&format!("{apt} < /dev/null"))?;
        }
    }
    host.run(
        "test ! -e /usr/bin/ringhaul; test ! -e /etc/ringhaul.toml; test -e /srv/disks/vm1.img",
    )
    .map(drop)
}

/// The commands of a console, which begin with a dollar sign.
fn commands(page: &str, words: &str) -> Result<String> {
    let block = Page::read(page)?.block("console", words)?;
    let lines: Vec<&str> = block.lines().filter_map(|line| line.strip_prefix("$ ")).collect();
    Ok(lines.join("\n"))
}

fn one_virtual_machine(host: &Host) -> Result<()> {
    let page = Page::read("guide/service.md")?;
    host.run(&page.block("sh", "truncate")?)?;
    host.is_served("ringhaul-vm1", "vm1")?;
    ensure!(host.run("systemctl is-enabled ringhaul@vm1")? == "enabled");
    // The file of another disk and more options.
    let settings = replaced(&page.block("sh", "DISK=qcow2:")?, &[("vm1", "vm3")])?;
    fs::write(host.container.path("/etc/ringhaul/vm3.env"), settings)?;
    let image = host.disks.path().join("vm3.qcow2");
    output(Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("1G"))?;
    host.run("chown ringhaul: /srv/disks/vm3.qcow2; systemctl start ringhaul@vm3")?;
    host.is_served("ringhaul-vm3", "vm3")?;
    let limits = host.run("ringhaul ctl --control /run/ringhaul-vm3/control set-disk vm3")?;
    ensure!(limits.contains("2000"), "{limits}");
    host.run("systemctl stop ringhaul@vm3").map(drop)
}

/// `top`, `doctor` and the bug report of the page about monitoring.
fn findings(host: &Host) -> Result<()> {
    let top = host.run(&commands("guide/monitoring.md", "ctl top")?)?;
    ensure!(top.contains("\nvm1 ") && top.contains("EXPORT "), "{top}");
    // Status 1 is a finding, such as a kernel without a part of the sandbox.
    let doctor = commands("guide/monitoring.md", "ctl doctor")?;
    let seen = host.container.run(&format!("{doctor} --bundle /srv/report.json"))?;
    ensure!(matches!(seen.status.code(), Some(0 | 1)), "{seen:?}");
    ensure!(!seen.stdout.contains("harmful"), "{}", seen.stdout);
    host.run("test -s /srv/report.json").map(drop)
}

/// A disk is cut while it is served. The commands and the cure of the page about troubles.
fn a_broken_disk(host: &Host) -> Result<()> {
    let page = Page::read("guide/troubleshooting.md")?;
    let (looks, rows) =
        (page.block("sh", "ringhaul disk info")?, page.table("| log line | cause | cure |")?);
    ensure!(rows.iter().any(|row| row[0].contains("has shrunk to")), "{rows:?}");
    let read = |offset: &str| {
        host.container.run(&format!(
            "ringhaul bench --socket-path /run/ringhaul-vm1/disk.sock --rw read --number_ios 9 \
                --size 1m --offset {offset}"
        ))
    };
    read("6g")?.expect_code(0)?;
    host.run("truncate -s 5G /srv/disks/vm1.img")?;
    retry(LIMIT, || {
        // Status 1 of `doctor` is a finding.
        let seen = host.container.run(&looks)?.stdout;
        ensure!(seen.contains("has shrunk to"), "{seen}");
        Ok(())
    })?;
    read("6g")?.expect_code(1)?;
    read("4g")?.expect_code(0)?;
    let seen = host.container.run(&looks)?.stdout;
    ensure!(seen.contains("failed-requests") && seen.contains("a request failed"), "{seen}");
    host.run("truncate -s 10G /srv/disks/vm1.img")?;
    read("6g")?.expect_code(0).map(drop)
}

/// The pages that messages name, and the files that pages name, are installed.
fn documents(host: &Host) -> Result<()> {
    let listed = host.run(
        "cd /usr/share/doc/ringhaul
        grep -o '/usr/share/ringhaul/[a-z.]*\\|/usr/share/doc/ringhaul/[a-z.-]*' docs/guide/*.md |
            cut -d : -f 2 | sort -u",
    )?;
    ensure!(listed.lines().count() >= 3, "{listed}");
    let files = listed.lines().map(|file| format!("test -e {file}"));
    // The list of parts has a part without which there is no program.
    let more =
        ["test -s docs/guide/attach.md", "grep -q '\"name\": \"io-uring\"' ringhaul.cdx.json"];
    let files: Vec<String> = files.chain(more.map(str::to_owned)).collect();
    host.run(&format!("cd /usr/share/doc/ringhaul; {}", files.join("; "))).map(drop)
}

fn many_disks(host: &Host) -> Result<()> {
    let page = Page::read("guide/service.md")?;
    let edited = page.block("sh", "editor /etc/ringhaul.toml")?;
    host.run("truncate -s 64M /srv/disks/vm2.img; chown ringhaul: /srv/disks/vm2.img")?;
    host.run(&replaced(&edited, &[("editor", EDIT)])?)?;
    host.is_served("ringhaul", "vm2")?;
    host.run(&page.block("sh", "block-devices.conf")?)?;
    host.is_served("ringhaul", "vm2")?;
    let files = host.run("systemctl show --value --property=DropInPaths ringhaul")?;
    ensure!(files.contains("/block-devices.conf"), "{files}");
    let policy = host.run("systemctl show --value --property=PrivateDevices ringhaul")?;
    ensure!(policy == "no", "PrivateDevices is {policy}");
    Ok(())
}
