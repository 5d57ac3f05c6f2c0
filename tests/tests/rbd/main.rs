//! Images in a Ceph cluster with one OSD, which the test starts.
//!
//! All parts are one test, because a cluster takes ten seconds to start and its OSD is stopped and
//! killed. The parts run in sequence.

mod clients;
mod data;
mod layers;
mod moves;
mod named;
mod outage;

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use ringhaul_kit::ceph::Cluster;
use ringhaul_kit::cli::{Refusals, Running, ringhaul, run};
use ringhaul_kit::frontend::{Frontend, Setup};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

const IMAGE_BYTES: u64 = 64 << 20;

/// A cluster, and a folder for sockets.
struct Scene {
    cluster: Cluster,
    sockets: TempDir,
}

/// A daemon that serves one image.
struct Served {
    daemon: Running,
    socket: PathBuf,
    control: PathBuf,
}

impl Scene {
    /// A `ringhaul` command for a client of the cluster.
    fn ringhaul(&self, words: &[&str]) -> Result<std::process::Command> {
        let mut command = ringhaul()?;
        command.env("CEPH_CONF", self.cluster.conf()).args(words);
        Ok(command)
    }

    /// Serves a disk, with more options.
    fn serve(&self, name: &str, disk: &str, options: &[&str]) -> Result<Served> {
        let [socket, control] =
            ["sock", "control"].map(|end| self.sockets.path().join(format!("{name}.{end}")));
        let mut command = self.ringhaul(&["serve", "--disk", disk, "--socket-path"])?;
        command.arg(&socket).arg("--control").arg(&control).args(options);
        Ok(Served { daemon: Running::serve(&mut command)?, socket, control })
    }

    /// Makes an image, and returns the name of its disk.
    fn image(&self, name: &str) -> Result<String> {
        self.cluster.create_image(name, IMAGE_BYTES)?;
        Ok(format!("rbd:{name}"))
    }
}

impl Served {
    fn connect(&self) -> Result<Frontend> {
        Frontend::attach(&self.socket, &Setup::default())
    }

    fn ctl(&self, words: &[&str]) -> Result<String> {
        let mut command = ringhaul()?;
        command.arg("ctl").arg("--control").arg(&self.control).args(words);
        Ok(run(&mut command)?.expect_code(0)?.stdout)
    }

    /// Starts a load that verifies its own writes.
    fn load(&self, options: &str) -> Result<Running> {
        let mut command = ringhaul()?;
        command.arg("bench").arg("--socket-path").arg(&self.socket);
        Running::start(
            command
                .args("--rw randrw --iodepth 8 --verify".split(' '))
                .args(options.split_whitespace()),
        )
    }

    /// The answer of `show` about the export.
    fn show(&self) -> Result<Value> {
        let text = self.ctl(&["--json", "show", &self.socket.to_string_lossy()])?;
        serde_json::from_str(&text).context("reading what `show` says")
    }

    fn end(mut self) -> Result<()> {
        self.daemon.signal(Signal::TERM)?;
        self.daemon.finish()?.expect_code(0).map(drop)
    }
}

type Part = fn(&mut Scene) -> Result<()>;

#[test]
fn images_in_a_cluster() -> Result<()> {
    let begun = Instant::now();
    let Some(cluster) = Cluster::start()? else { return Ok(()) };
    let sockets = tempfile::tempdir().context("making a folder for sockets")?;
    let mut scene = Scene { cluster, sockets };
    let seconds = begun.elapsed().as_secs();
    eprintln!("the cluster is there after {seconds} s");
    let parts: &[(&str, Part)] = &[
        ("an image is described, or refused", image_is_described),
        ("what is written is in the cluster", data::data_is_in_the_cluster),
        ("marks of pages for a move", data::marks),
        ("discards and zeroes", data::discards_and_zeroes),
        ("requests during a discard", data::requests_during_a_discard),
        ("what was flushed survives the OSD", data::flushed_data_is_durable),
        ("sizes", data::sizes),
        ("sizes of what is only read", data::sizes_for_readers),
        ("snapshots and clones", data::snapshots),
        ("an image of a format over one in the cluster", layers::qcow2),
        ("an image that is changed, and its daemon killed", layers::changed_image),
        ("an image that is full", layers::full_image),
        ("an encrypted disk over an image in the cluster", layers::luks),
        ("images in a configuration file", named::configuration_file),
        ("an image is driven by `disk bench`", named::disk_bench),
        ("images of the page about disks", named::documented_examples),
        ("namespaces, users and keyrings", clients::users),
        ("threads of the library", clients::threads),
        ("two clients pass the lock on", clients::lock_is_passed_on),
        ("the process that takes over has the lock", clients::lock_is_handed_over),
        ("the process that takes over reads what a cache had", clients::cache_is_handed_over),
        ("an end is passed on while a lock is left", clients::end_is_passed_on),
        ("a lock that is kept", clients::lock_is_kept),
        ("a lock that a dead one has", clients::lock_of_a_killed_daemon),
        ("the lock moves with a guest", clients::lock_moves_with_a_guest),
        ("a client is locked out", clients::is_locked_out),
        ("requests wait for an OSD", outage::requests_wait),
        ("memory of what was given up", outage::failed_read_fills_no_memory),
        ("an image that cannot be closed", outage::removal_during_a_hung_close),
        ("an export that waits is removed", outage::removal_with_waiting_requests),
        ("a guest", data::guest),
        ("a guest of QEMU moves", moves::guest_moves),
    ];
    let only = std::env::var("RINGHAUL_RBD_PART").unwrap_or_default();
    let mut failures = Vec::new();
    for (name, part) in parts.iter().filter(|(name, _)| name.contains(&only)) {
        let begun = Instant::now();
        let result = part(&mut scene);
        let outcome = result.as_ref().err().map_or("ok".into(), |error| format!("{error:#}"));
        let _ = writeln!(std::io::stderr(), "{name}: {outcome}, {:.1?}", begun.elapsed());
        failures.extend(result.err().map(|error| format!("{name}: {error:#}")));
    }
    if !failures.is_empty() {
        eprintln!("{}", scene.cluster.messages());
        bail!("{}", failures.join("\n"));
    }
    Ok(())
}

fn image_is_described(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("described")?;
    let info = run(&mut scene.ringhaul(&["disk", "info", &disk])?)?.expect_code(0)?.stdout;
    for line in [
        "size      67108864 bytes, 64 MiB",
        "blocks    512 bytes, physical 4096",
        "made of   rbd rbd/described",
        "discards  in units of 65536 bytes",
        "can       flush, discard, write zeroes, resize, lock, snapshots",
    ] {
        ensure!(info.contains(line), "no {line:?} in\n{info}");
    }
    let mut refusals = Refusals::default();
    let mut refuse = |disk: &str, words: &[&str]| {
        refusals.check(disk, scene.ringhaul(&["disk", "info", disk]), words);
    };
    refuse("rbd:missing", &["cannot use rbd rbd/missing", "no such image", "`rbd ls`"]);
    refuse("rbd:nowhere/a", &["its pool nowhere", "`ceph osd pool ls`"]);
    refuse("rbd:described@never", &["it has no snapshot never"]);
    refuse("rbd:a,conf=/nowhere/ceph.conf", &["its configuration /nowhere/ceph.conf", "No such"]);
    let garbage = scene.sockets.path().join("garbage.conf");
    std::fs::write(&garbage, "[[[ =\n")?;
    let disk_of_garbage = format!("rbd:a,conf={}", garbage.display());
    refuse(&disk_of_garbage, &["garbage.conf is not a Ceph configuration", "with conf"]);
    refuse("rbd:a,keyring=/nowhere/key", &["its keyring /nowhere/key", "No such"]);
    refuse("rbd:a,id=nobody", &["as client.nobody", "check"]);
    // This is like a machine without Ceph, or with another file of the library's name.
    std::fs::write(scene.sockets.path().join("librbd.so.1"), "")?;
    let mut command = scene.ringhaul(&["disk", "info", &disk])?;
    command.env("LD_LIBRARY_PATH", scene.sockets.path());
    let words = ["cannot load the Ceph library", "install it", "librbd1"];
    refusals.check("no library", Ok(command), &words);
    refusals.finish()
}
