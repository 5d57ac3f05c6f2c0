//! The units of `contrib/systemd` under systemd itself: start, failed start, reload, watchdog,
//! upgrade, restart and kills under load.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::container::Container;
use ringhaul_kit::daemon::LIMIT;
use ringhaul_kit::frontend::message::Channel;
use ringhaul_kit::server::ringhaul_binary;
use ringhaul_tools::process::retry;
use tempfile::TempDir;

use crate::driver::{Driver, FEW_BLOCKS, check_file};

/// The service of one virtual machine.
pub(super) const VM: &str = "ringhaul@vm1";

const CONTRIB: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../contrib/systemd");

/// Installs everything as docs/guide/service.md does.
const INSTALL: &str = "
    cp /mnt/ringhaul/ringhaul /usr/bin/ringhaul
    cd /mnt/systemd
    cp ringhaul.service ringhaul@.service /etc/systemd/system/
    cp sysusers.conf /usr/lib/sysusers.d/ringhaul.conf
    cp tmpfiles.conf /usr/lib/tmpfiles.d/ringhaul.conf
    cp -n ringhaul.toml /etc/ringhaul.toml
    systemd-sysusers
    systemd-tmpfiles --create ringhaul.conf
    systemctl daemon-reload
    echo 'OPTIONS=--control-group kvm --iothreads 2' > /etc/ringhaul/vm1.env
    truncate -s 512K /srv/disks/vm1.img
    chown ringhaul:ringhaul /srv/disks/vm1.img";

/// A container with Ringhaul.
pub(super) struct Host {
    pub(super) container: Container,
    pub(super) disks: TempDir,
}

impl Host {
    pub(super) fn install() -> Result<Option<Self>> {
        let cache = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let disks = tempfile::tempdir_in(cache)?;
        let program = ringhaul_binary()?.canonicalize()?;
        let program = program.parent().context("the program has no folder")?;
        let contrib = fs::canonicalize(CONTRIB)?;
        let binds =
            [(disks.path(), "/srv/disks"), (program, "/mnt/ringhaul"), (&contrib, "/mnt/systemd")];
        let Some(container) = Container::boot(cache, &binds)? else { return Ok(None) };
        container.output(&format!("set -e; {INSTALL}"))?;
        Ok(Some(Self { container, disks }))
    }

    pub(super) fn run(&self, script: &str) -> Result<String> {
        self.container.output(script)
    }

    /// A property of a unit.
    pub(super) fn property(&self, unit: &str, property: &str) -> Result<String> {
        self.run(&format!("systemctl show --value --property={property} {unit}"))
    }

    /// Waits until a property of a unit has this value.
    pub(super) fn wait_for(&self, unit: &str, property: &str, value: &str) -> Result<()> {
        retry(LIMIT, || {
            let now = self.property(unit, property)?;
            ensure!(now == value, "{property} of {unit} is {now:?}, and not {value:?}");
            Ok(())
        })
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.container.path("/run/ringhaul-vm1/disk.sock")
    }

    /// The process of the service.
    pub(super) fn process(&self) -> Result<String> {
        self.property(VM, "MainPID")
    }

    /// The rights, namespaces, control groups and limits of the service's process.
    fn place(&self) -> Result<String> {
        let folder = format!("/proc/{}", self.process()?);
        self.run(&format!(
            "cd {folder}
            for name in mnt net uts ipc cgroup; do readlink ns/$name; done
            cat cgroup limits oom_score_adj
            grep -E '^(Umask|Uid|Gid|Groups|CapEff|CapBnd|CapAmb|NoNewPrivs):' status"
        ))
    }

    /// The place, and the number of filters of system calls. A command of the unit has namespaces
    /// of its own for mounts and the host's name, with the same content.
    fn settings(&self) -> Result<String> {
        let place = self.place()?;
        let is_own = |line: &str| line.starts_with("mnt:") || line.starts_with("uts:");
        let place = place.lines().filter(|line| !is_own(line)).collect::<Vec<_>>();
        let filters = format!("grep ^Seccomp /proc/{}/status", self.process()?);
        Ok(format!("{}\n{}", place.join("\n"), self.run(&filters)?))
    }

    /// Connects again, when the service has another process than this one.
    fn reconnect(&self, driver: &mut Driver, process: &str) -> Result<()> {
        driver.take()?;
        retry(LIMIT, || {
            let now = self.process()?;
            ensure!(now != "0" && now != process, "the service has the process {now}");
            driver.frontend.channel = Channel::connect(&self.socket())?;
            Ok(())
        })?;
        driver.attach()
    }
}

/// A guest may break into its daemon, which has the user of the daemons of other guests.
#[test]
fn an_instance_does_not_reach_the_sockets_of_another() -> Result<()> {
    let Some(host) = Host::install()? else { return Ok(()) };
    host.run(
        "set -e
        cp -a /srv/disks/vm1.img /srv/disks/vm2.img
        systemctl start ringhaul@vm1 ringhaul@vm2",
    )?;
    let reached = |in_place: &str| {
        host.run(&format!(
            "{in_place} sh -c 'for vm in vm1 vm2; do
                ringhaul ctl --control /run/ringhaul-$vm/control list > /dev/null 2>&1 && echo $vm
            done; true'"
        ))
    };
    ensure!(reached("")?.split_whitespace().eq(["vm1", "vm2"]), "one does not run");
    let process = host.process()?;
    let inside = reached(&format!(
        "nsenter --target {process} --mount -- setpriv --reuid ringhaul --regid kvm --init-groups"
    ))?;
    ensure!(inside.trim() == "vm1", "the first instance reaches {inside:?}");
    a_network_disk_reaches_the_list_of_name_servers(&host)
}

/// `/etc/resolv.conf` may be a link to a folder below `/run`, which instances do not see otherwise.
fn a_network_disk_reaches_the_list_of_name_servers(host: &Host) -> Result<()> {
    let folders = ["NetworkManager", "resolvconf", "nscd"];
    let seen = || {
        host.run("systemctl restart ringhaul@vm1")?;
        let process = host.process()?;
        host.run(&format!("nsenter --target {process} --mount -- ls /run"))
    };
    host.run(&format!("cd /run; mkdir -p {}", folders.join(" ")))?;
    let before = seen()?;
    ensure!(!folders.into_iter().any(|name| before.contains(name)), "an instance sees {before}");
    host.run(
        "install -D -m 644 /mnt/systemd/network-disks.conf \
            -t /etc/systemd/system/ringhaul@.service.d/
        systemctl daemon-reload; systemctl reset-failed",
    )?;
    let after = seen()?;
    ensure!(folders.into_iter().all(|name| after.contains(name)), "an instance sees only {after}");
    // A machine without these folders starts the service too.
    host.run("systemctl stop ringhaul@vm1; cd /run; rmdir NetworkManager resolvconf nscd")?;
    host.run("systemctl start ringhaul@vm1").map(drop)
}

#[test]
fn a_service_survives_kills_restarts_and_upgrades() -> Result<()> {
    let Some(host) = Host::install()? else { return Ok(()) };
    host.run("systemctl start ringhaul@vm1")?;
    let mut driver = Driver::new(&host.socket(), FEW_BLOCKS, true)?;
    driver.attach()?;
    for round in 0..3 {
        let process = host.process()?;
        driver.run(200, false)?;
        host.run("systemctl kill --signal=KILL ringhaul@vm1")?;
        host.reconnect(&mut driver, &process).with_context(|| format!("round {round}"))?;
        driver.run(200, false)?;
        // The file of the program is another one, as after the upgrade of a package.
        let (process, place) = (host.process()?, host.place()?);
        host.run(
            "cp /mnt/ringhaul/ringhaul /usr/bin/ringhaul.new
            mv /usr/bin/ringhaul.new /usr/bin/ringhaul
            ringhaul ctl upgrade /usr/bin/ringhaul",
        )?;
        driver.run(200, false)?;
        ensure!(host.process()? != process, "systemd does not know the new process");
        let now = host.place()?;
        ensure!(now == place, "the new process is elsewhere:\n{now}\ninstead of\n{place}");
        host.wait_for(VM, "StatusText", "1 export served, 1 with a front-end")?;
    }
    ensure!(host.property(VM, "NRestarts")? == "3", "an upgrade is no restart");
    both_units_have_ten_times_the_usual_weight(&host)?;
    let process = host.process()?;
    // systemd limits the starts of a unit within ten seconds.
    host.run("systemctl reset-failed ringhaul@vm1; systemctl restart ringhaul@vm1")?;
    host.reconnect(&mut driver, &process)?;
    driver.run(200, false)?;
    driver.run(0, true)?;
    let Driver { frontend, versions, .. } = driver;
    drop(frontend);
    host.run("systemctl stop ringhaul@vm1")?;
    ensure!(host.property(VM, "Result")? == "success", "it did not stop cleanly");
    check_file(&host.disks.path().join("vm1.img"), &versions)
}

/// The kernel has the weight as far as the container has the controller.
fn both_units_have_ten_times_the_usual_weight(host: &Host) -> Result<()> {
    for unit in [VM, "ringhaul"] {
        let weight = host.property(unit, "CPUWeight")?;
        ensure!(weight == "1000", "the weight of {unit} is {weight}");
    }
    let group = host.property(VM, "ControlGroup")?;
    let weight = host.run(&format!("cat /sys/fs/cgroup{group}/cpu.weight || true"))?;
    ensure!(["", "1000"].contains(&&*weight), "the kernel has the weight {weight}");
    Ok(())
}

/// A stop straight after it gives the new process time to end.
#[test]
fn a_reload_starts_the_installed_program_with_all_settings_of_the_unit() -> Result<()> {
    let Some(host) = Host::install()? else { return Ok(()) };
    host.run("systemctl start ringhaul@vm1")?;
    let mut driver = Driver::new(&host.socket(), FEW_BLOCKS, true)?;
    driver.attach()?;
    driver.run(200, false)?;
    let (process, settings) = (host.process()?, host.settings()?);
    let reload =
        "systemctl reload ringhaul@vm1 || { journalctl --no-pager -u ringhaul@vm1 >&2; false; }";
    host.run(reload)?;
    ensure!(host.process()? == process, "the same program has taken over");
    host.run(&format!(
        "cp /mnt/ringhaul/ringhaul /usr/bin/ringhaul.new
        mv /usr/bin/ringhaul.new /usr/bin/ringhaul
        {reload}"
    ))?;
    driver.run(200, false)?;
    ensure!(host.process()? != process, "the former program stays");
    let now = host.settings()?;
    ensure!(now == settings, "the new process has the settings\n{now}\ninstead of\n{settings}");
    ensure!(host.property(VM, "NRestarts")? == "0", "it was restarted");
    driver.run(0, true)?;
    let Driver { frontend, versions, .. } = driver;
    drop(frontend);
    host.run("systemctl stop ringhaul@vm1")?;
    ensure!(host.property(VM, "Result")? == "success", "it did not stop cleanly");
    check_file(&host.disks.path().join("vm1.img"), &versions)
}

#[test]
fn a_service_reports_its_start_its_reload_and_its_life() -> Result<()> {
    let Some(host) = Host::install()? else { return Ok(()) };
    a_failed_start_is_reported(&host)?;
    a_reload_changes_exports(&host)?;
    a_hanging_daemon_is_replaced(&host)
}

fn a_failed_start_is_reported(host: &Host) -> Result<()> {
    let started = host.container.run("systemctl start ringhaul@missing")?;
    ensure!(!started.status.success(), "a failed start counts as a start");
    let reason = "cannot open /srv/disks/missing.img";
    let status = host.property("ringhaul@missing", "StatusText")?;
    ensure!(status.starts_with(reason), "{status}");
    ensure!(host.property("ringhaul@missing", "NRestarts")? == "0", "the start is repeated");
    let log = host.run("journalctl --no-pager --output=cat -p err -u ringhaul@missing")?;
    ensure!(log.lines().any(|line| line.starts_with(&format!("ringhaul: {reason}"))), "{log}");
    Ok(())
}

/// The unit of a socket on docs/guide/service.md belongs to the export.
fn a_reload_changes_exports(host: &Host) -> Result<()> {
    let page = include_str!("../../../docs/guide/service.md");
    let socket = page.split("```ini\n").nth(1).and_then(|text| text.split("```").next());
    let units = host.container.path("/etc/systemd/system");
    fs::write(units.join("ringhaul-vm1.socket"), socket.context("no unit of a socket")?)?;
    host.run("systemctl daemon-reload; systemctl start ringhaul-vm1.socket ringhaul")?;
    host.wait_for("ringhaul", "StatusText", "0 exports served, 0 with a front-end")?;
    // It connects before anything serves it.
    let mut driver = Driver::new(&host.container.path("/run/ringhaul/vm1.sock"), FEW_BLOCKS, true)?;
    let file = host.container.path("/etc/ringhaul.toml");
    let export = fs::read_to_string(&file)?.replace("# [[", "[[").replace("# name", "name");
    let export = export.replace("# endpoint", "endpoint").replace("# device", "device");
    fs::write(&file, format!("{export}bad = 1\n"))?;
    let reloaded = host.container.run("systemctl reload ringhaul")?;
    ensure!(!reloaded.status.success(), "a wrong file is accepted");
    fs::write(&file, export)?;
    host.run("systemctl reload ringhaul")?;
    host.wait_for("ringhaul", "StatusText", "1 export served, 1 with a front-end")?;
    driver.attach()?;
    driver.run(200, false)?;
    driver.run(0, true)?;
    drop(driver);
    host.run("systemctl stop ringhaul")?;
    ensure!(host.property("ringhaul-vm1.socket", "SubState")? == "listening", "it is closed");
    host.run("systemctl stop ringhaul-vm1.socket")?;
    Ok(())
}

fn a_hanging_daemon_is_replaced(host: &Host) -> Result<()> {
    host.run(
        "folder=/etc/systemd/system/ringhaul@vm1.service.d
        mkdir $folder
        sed s/=60/=1/ /mnt/systemd/watchdog.conf > $folder/watchdog.conf
        systemctl daemon-reload
        systemctl start ringhaul@vm1",
    )?;
    // The process of an upgrade gives signs of life too.
    host.run("ringhaul ctl upgrade /usr/bin/ringhaul")?;
    let sign = || host.property(VM, "WatchdogTimestampMonotonic");
    for _ in 0..4 {
        let last = sign()?;
        retry(LIMIT, || {
            ensure!(sign()? != last, "it gives no sign of life");
            Ok(())
        })?;
    }
    ensure!(host.property(VM, "NRestarts")? == "0", "it was replaced although it lives");
    let process = host.process()?;
    host.run("systemctl kill --signal=STOP ringhaul@vm1")?;
    host.wait_for(VM, "NRestarts", "1")?;
    host.wait_for(VM, "ActiveState", "active")?;
    ensure!(host.process()? != process, "it still hangs");
    let log = host.run("journalctl --no-pager --output=cat -u ringhaul@vm1")?;
    ensure!(log.contains("Watchdog timeout"), "{log}");
    Ok(())
}
