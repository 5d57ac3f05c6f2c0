//! Front-ends that never connect again, under a daemon that systemd starts after each kill: their
//! connections, memory and eventfds are in the store of systemd.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::LIMIT;
use ringhaul_kit::frontend::{Frontend, Setup, blk};
use ringhaul_kit::guest::{Bus, Disk, Image, KVM_DISK_BYTES, KvmGuest, Vm, Vmm, lacks_kvm};
use ringhaul_kit::system::print_skipped;
use ringhaul_tools::process::retry;

use crate::driver::{Driver, FEW_BLOCKS, check_file};
use crate::systemd::{Host, VM};

/// The kills of each kind of front-end.
const KILLS: u32 = 6;

/// Lets systemd start the daemon as often as the test kills it.
const NO_LIMIT: &str = "
    folder=/etc/systemd/system/ringhaul@vm1.service.d
    mkdir -p $folder
    printf '[Unit]\\nStartLimitIntervalSec=0\\n' > $folder/limit.conf
    systemctl daemon-reload";

/// A kind of front-end and daemon.
#[derive(Debug, Clone, Copy)]
struct Kind {
    options: &'static str,
    lun: Option<u8>,
    keeps_region: bool,
    sleeps: bool,
}

const KINDS: [Kind; 5] = [
    Kind { options: "--engine io_uring", lun: None, keeps_region: false, sleeps: true },
    Kind { options: "--engine aio --iothreads 2", lun: None, keeps_region: false, sleeps: false },
    Kind { options: "--engine io_uring", lun: Some(3), keeps_region: false, sleeps: true },
    Kind { options: "--engine aio", lun: Some(3), keeps_region: false, sleeps: false },
    Kind {
        options: "--engine io_uring --in-order on",
        lun: None,
        keeps_region: true,
        sleeps: true,
    },
];

#[test]
fn connected_front_ends_survive_kills() -> Result<()> {
    let Some(host) = Host::install()? else { return Ok(()) };
    host.run(NO_LIMIT)?;
    for kind in KINDS {
        survive(&host, kind).with_context(|| format!("{kind:?}\n{}", log(&host)))?;
    }
    Ok(())
}

fn log(host: &Host) -> String {
    host.run("journalctl --no-pager --output=cat -n 60 -u ringhaul@vm1").unwrap_or_default()
}

/// Bytes of the disk of a driver.
const FEW_BYTES: u64 = 512 << 10;

/// Starts the service with a new disk.
fn start(host: &Host, bytes: u64, options: &str, lun: Option<u8>) -> Result<()> {
    let device = match lun {
        None => "DISK=/srv/disks/vm1.img\n".to_owned(),
        // The unit has --disk, which this one replaces.
        Some(lun) => format!("DEVICE=--device scsi --lun {lun},blk-file=/srv/disks/vm1.img\n"),
    };
    let unit = if lun.is_some() { "s/ --disk ${DISK}/ $DEVICE/" } else { "" };
    host.run(&format!(
        "set -e
        rm -f /srv/disks/vm1.img; truncate -s {bytes} /srv/disks/vm1.img
        chown ringhaul:ringhaul /srv/disks/vm1.img
        sed '{unit}' /mnt/systemd/ringhaul@.service > /etc/systemd/system/ringhaul@.service
        printf '{device}OPTIONS={options}\\n' > /etc/ringhaul/vm1.env
        systemctl daemon-reload
        systemctl start ringhaul@vm1"
    ))?;
    Ok(())
}

/// The number of descriptors in the store of the service.
fn stored(host: &Host) -> Result<u32> {
    Ok(host.property(VM, "NFileDescriptorStore")?.parse()?)
}

fn survive(host: &Host, kind: Kind) -> Result<()> {
    start(host, FEW_BYTES, kind.options, kind.lun)?;
    let mut driver = Driver::connect(&host.socket(), FEW_BLOCKS, kind.keeps_region, kind.lun)?;
    driver.sleeps = kind.sleeps;
    driver.attach()?;
    driver.run(200, false)?;
    for round in 0..KILLS {
        let is_back = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let kill = scope.spawn(|| {
                // The process of an upgrade owns the store from then on.
                let replaced = if round == 1 { upgrade(host) } else { Ok(()) };
                let killed = replaced.and_then(|()| kill(host));
                is_back.store(true, Ordering::Relaxed);
                killed
            });
            while !is_back.load(Ordering::Relaxed) {
                driver.run(50, false)?;
            }
            kill.join().map_err(|_| anyhow::anyhow!("the killer panicked"))?
        })
        .with_context(|| format!("round {round}"))?;
        driver.run(200, false)?;
    }
    driver.run(0, true)?;
    let Driver { frontend, versions, .. } = driver;
    ensure!(stored(host)? > 0, "nothing is stored");
    drop(frontend);
    retry(LIMIT, || {
        let left = stored(host)?;
        ensure!(left == 0, "{left} descriptors of a front-end that has left are stored");
        Ok(())
    })?;
    host.run("systemctl stop ringhaul@vm1")?;
    check_file(&host.disks.path().join("vm1.img"), &versions)
}

fn upgrade(host: &Host) -> Result<()> {
    host.run("ringhaul ctl upgrade /usr/bin/ringhaul").map(drop)
}

/// Kills the daemon, and waits for the next one.
fn kill(host: &Host) -> Result<()> {
    let process = host.process()?;
    host.run("systemctl kill --signal=KILL ringhaul@vm1")?;
    wait_for_next(host, &process)?;
    host.wait_for(VM, "StatusText", "1 export served, 1 with a front-end")
}

/// Waits until another process runs the service.
fn wait_for_next(host: &Host, process: &str) -> Result<()> {
    retry(LIMIT, || {
        let now = host.process()?;
        ensure!(now != "0" && now != process, "the service has the process {now}");
        Ok(())
    })
}

/// QEMU brings a region of its own, and here it never connects again.
#[test]
fn a_connected_qemu_with_packed_rings_survives_kills() -> Result<()> {
    let Some(host) = host_of_guests()? else { return Ok(()) };
    for options in ["--engine io_uring", "--engine aio --iothreads 2"] {
        let console = survive_under(&host, &Vmm::QemuOnce, options)?;
        let resets = console.lines().filter(|line| line.ends_with(" packed")).count();
        ensure!(resets >= 2, "{resets} resets:\n{console}");
    }
    Ok(())
}

/// Alioth and Firecracker have no region and never connect again.
#[test]
fn guests_of_other_vmms_survive_kills() -> Result<()> {
    let Some(host) = host_of_guests()? else { return Ok(()) };
    let mut vmms = Vmm::all_in_path();
    match Vmm::alioth() {
        Ok(vmm) => vmms.push(vmm),
        Err(error) => print_skipped(&format!("Alioth, which cannot be installed: {error:#}")),
    }
    for vmm in vmms.iter().filter(|vmm| !vmm.connects_again()) {
        survive_under(&host, vmm, "--engine io_uring").with_context(|| format!("{vmm:?}"))?;
    }
    Ok(())
}

/// `None`: this machine has no containers, or no KVM.
fn host_of_guests() -> Result<Option<Host>> {
    if let Some(reason) = lacks_kvm() {
        print_skipped(&reason);
        return Ok(None);
    }
    let host = Host::install()?;
    host.iter().try_for_each(|host| host.run(NO_LIMIT).map(drop))?;
    Ok(host)
}

/// Kills the daemon under a guest that verifies its data. Returns the console of the guest.
fn survive_under(host: &Host, vmm: &Vmm, options: &str) -> Result<String> {
    start(host, KVM_DISK_BYTES, options, None)?;
    let mut guest = KvmGuest::start(vmm, &host.socket())?;
    guest.wait_rounds(1)?;
    for round in 0..KILLS / 2 {
        if round == 1 {
            upgrade(host)?;
        }
        kill(host)?;
        let going_on = guest.wait_rounds(1 + u64::from(round % 2));
        going_on.with_context(|| format!("round {round}\n{}", log(host)))?;
    }
    let console = guest.console();
    drop(guest);
    host.run("systemctl stop ringhaul@vm1")?;
    Ok(console)
}

/// Bytes of the disk of the load in a Linux guest.
const LOAD_BYTES: u64 = 128 << 20;
const LOAD_LIMIT: Duration = Duration::from_secs(180);

/// User Mode Linux always has packed rings. It has no region, so the daemon keeps one.
#[test]
fn a_connected_user_mode_linux_survives_kills() -> Result<()> {
    let Some(host) = Host::install()? else { return Ok(()) };
    if let Err(error) = Image::find_uml() {
        print_skipped(&format!("{error:#}"));
        return Ok(());
    }
    host.run(NO_LIMIT)?;
    start(&host, LOAD_BYTES, "--engine io_uring", None)?;
    let disk = Disk { bus: Bus::Blk, socket: host.socket(), num_queues: 1, queue_size: 256 };
    let mut vm = Vm::boot_fast(vec![disk])?;
    let shown = host.run("ringhaul ctl --control /run/ringhaul-vm1/control show vm1")?;
    ensure!(shown.contains("ring-packed"), "{shown}");
    let load = |script: &str| format!("DISK=vda\n{script}");
    vm.check(&load(include_str!("../../guest/verify-start.sh")), LOAD_LIMIT)?;
    for round in 0..KILLS {
        kill(&host)?;
        // The guest goes on.
        let writes = "before=$(awk '{ print $5 }' /sys/block/vda/stat)
            until [ $(awk '{ print $5 }' /sys/block/vda/stat) -gt $((before + 200)) ]; do
                usleep 10000
            done";
        let going_on = vm.check(writes, LOAD_LIMIT);
        going_on.with_context(|| format!("round {round}\n{}", log(&host)))?;
    }
    vm.check(include_str!("../../guest/verify-stop.sh"), LOAD_LIMIT)?;
    vm.power_off(LOAD_LIMIT)?;
    host.run("systemctl stop ringhaul@vm1").map(drop)
}

/// Without the store a kill disconnects the front-end.
#[test]
fn a_kill_without_the_store_disconnects_front_ends() -> Result<()> {
    let Some(host) = Host::install()? else { return Ok(()) };
    host.run(NO_LIMIT)?;
    let lost = |options: &str, text: &str| -> Result<()> {
        start(&host, FEW_BYTES, options, None)?;
        let mut driver = Driver::connect(&host.socket(), FEW_BLOCKS, false, None)?;
        driver.attach()?;
        driver.run(50, false)?;
        let process = host.process()?;
        host.run(text)?;
        host.run("systemctl kill --signal=KILL ringhaul@vm1")?;
        wait_for_next(&host, &process)?;
        host.wait_for(VM, "StatusText", "1 export served, 0 with a front-end")?;
        ensure!(stored(&host)? == 0, "a descriptor without a user is stored");
        ensure!(driver.frontend.channel.receive()?.is_none(), "the front-end is connected");
        host.run("systemctl stop ringhaul@vm1").map(drop)
    };
    lost("--keep-connections off", "true")?;
    // The next process serves another disk, or cannot keep the descriptors.
    let other = "truncate -s 1M /srv/disks/other.img; chown ringhaul: /srv/disks/other.img
        echo DISK=/srv/disks/other.img >> /etc/ringhaul/vm1.env";
    lost("", other)?;
    ensure!(log(&host).contains("another disk now"), "{}", log(&host));
    host.run(
        "printf '[Service]\\nFileDescriptorStoreMax=1\\n' \
            > /etc/systemd/system/ringhaul@vm1.service.d/few.conf
        systemctl daemon-reload",
    )?;
    lost("", "true")?;
    ensure!(log(&host).contains("FileDescriptorStoreMax"), "{}", log(&host));
    Ok(())
}

const EXPORTS: u32 = 256;
const QUEUES: u16 = 8;
/// Connection, record, region, two files of memory, and three eventfds for each queue.
const DESCRIPTORS: u32 = 5 + 3 * QUEUES as u32;
/// systemd has one pair of sockets for each front-end.
const STORED: u32 = 2 * EXPORTS;

/// Prints the times, and the memory of systemd.
#[test]
fn systemd_keeps_thousands_of_descriptors() -> Result<()> {
    let Some(host) = Host::install()? else { return Ok(()) };
    let socket = |number| format!("/run/ringhaul/vm{number}.sock");
    let exports = (0..EXPORTS).map(|number| {
        format!(
            "[[export]]\nname = \"vm{number}\"\nendpoint = {{ path = \"{}\" }}\n\
             device = {{ blk = {{ null = {{ size-bytes = 1048576 }} }} }}\n",
            socket(number)
        )
    });
    fs::write(host.container.path("/etc/ringhaul.toml"), exports.collect::<String>())?;
    host.run("systemctl start ringhaul")?;
    let before = host.container.leader_status("VmRSS")?;
    let begun = Instant::now();
    let setup = Setup { queues: QUEUES, ..Setup::default() };
    let front_ends = (0..EXPORTS).map(|number| {
        let mut front_end = Frontend::attach(&host.container.path(&socket(number)), &setup)?;
        front_end.read(0, 0, 512)?;
        Ok(front_end)
    });
    let mut front_ends = front_ends.collect::<Result<Vec<_>>>()?;
    let attached = begun.elapsed();
    retry(LIMIT, || {
        let stored: u32 = host.property("ringhaul", "NFileDescriptorStore")?.parse()?;
        ensure!(stored == STORED, "{stored} descriptors are stored");
        Ok(())
    })?;
    let stored = begun.elapsed();
    let after = host.container.leader_status("VmRSS")?;
    let killed = Instant::now();
    host.run("systemctl kill --signal=KILL ringhaul")?;
    front_ends[0].request(0, blk::FLUSH, 0, &[], 0)?;
    let first = killed.elapsed();
    for front_end in &mut front_ends {
        front_end.read(0, 0, 512)?;
    }
    let all = killed.elapsed();
    println!(
        "{} descriptors of {EXPORTS} front-ends: attached in {attached:.2?}, stored in \
         {stored:.2?}; after a kill the first request took {first:.2?}, one of each front-end \
         {all:.2?}; memory of systemd {before} before, {after} after",
        EXPORTS * DESCRIPTORS
    );
    drop(front_ends);
    host.run("systemctl stop ringhaul")?;
    Ok(())
}
