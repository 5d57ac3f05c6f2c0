//! Images in a configuration file, as logical units, and driven without a guest.

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{READY, Running, run};
use serde_json::Value;

use super::{Scene, Served};

/// A table with its own `conf`, a text that relies on the environment, and a unit.
pub(super) fn configuration_file(scene: &mut Scene) -> Result<()> {
    for name in ["table", "text", "unit"] {
        scene.image(name)?;
    }
    let socket = |name: &str| scene.sockets.path().join(format!("{name}.sock"));
    let conf = scene.cluster.conf();
    let table = format!("{{ rbd = {{ image = \"table\", conf = \"{}\" }} }}", conf.display());
    let export = |name: &str, device: &str| {
        let path = socket(name).display().to_string();
        format!("[[export]]\nname = \"{name}\"\nendpoint.path = \"{path}\"\n{device}\n")
    };
    let unit = "[[export.device.scsi]]\nlun = 3\ndisk = \"rbd:rbd/unit\"";
    let exports = [
        export("table", &format!("device.blk = {table}")),
        export("text", "device.blk = \"rbd:text\""),
        export("unit", unit),
    ];
    let (file, control) = (scene.cluster.path("ringhaul.toml"), socket("control"));
    std::fs::write(&file, exports.concat())?;
    let mut command = scene.ringhaul(&["serve", "--config"])?;
    command.arg(&file).arg("--control").arg(&control);
    let mut daemon = Running::serve(&mut command)?;
    for _ in 1..exports.len() {
        daemon.wait_for(READY)?;
    }
    let mut served = Served { daemon, socket: socket("table"), control };
    for (name, options) in [("table", ""), ("text", ""), ("unit", "--device scsi --lun 3")] {
        served.socket = socket(name);
        let load = served.load(&format!("--number_ios 300 {options}"))?;
        let output = load.finish()?.expect_code(0).context(name)?.stdout;
        ensure!(output.contains(" 0 reads with wrong data"), "{name}: {output}");
    }
    served.end()?;
    // Each load went to its own image, which is empty otherwise.
    for name in ["table", "text", "unit"] {
        let has = scene.cluster.tool("rbd", &["diff", name])?;
        ensure!(has.lines().count() > 1, "nothing was written to {name}: {has}");
    }
    Ok(())
}

const PAGE: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guide/disks-network.md"));

/// The examples of the part `rbd` of the page, with this test's cluster in place of theirs.
pub(super) fn documented_examples(scene: &mut Scene) -> Result<()> {
    let (_, part) = PAGE.split_once("\n## rbd\n").context("the page has no such part")?;
    let part = part.split("\n## ").next().unwrap_or_default();
    let cluster = &scene.cluster;
    cluster.tool("ceph", &["osd", "pool", "create", "vms", "8", "8"])?;
    let keyring = cluster.path("vm-host.keyring").display().to_string();
    let rights = ["mon", "profile rbd", "osd", "profile rbd", "-o", &keyring];
    cluster.tool("ceph", &[&["auth", "get-or-create", "client.vm-host"], &rights[..]].concat())?;
    let conf = cluster.conf().display().to_string();
    let places = [("/etc/ceph/b.conf", &conf), ("/etc/ceph/vm-host.keyring", &keyring)];
    let mut served = 0;
    for line in part.lines().filter_map(|line| line.strip_prefix("    ")) {
        let here = |line: String, (there, here): (&str, &String)| line.replace(there, here);
        let line = places.into_iter().fold(line.to_owned(), here);
        if let Some(options) = line.strip_prefix("rbd ") {
            let options: Vec<&str> = options.split(' ').collect();
            scene.cluster.tool("rbd", &options).context(line.clone())?;
        } else if let Some((_, disk)) = line.split_once("--disk ") {
            let export = scene.serve(&format!("documented-{served}"), disk, &[])?;
            let load = export.load("--number_ios 100")?.finish()?.expect_code(0)?.stdout;
            ensure!(load.contains(" 0 reads with wrong data"), "{line}: {load}");
            export.end().context(line.clone())?;
            served += 1;
        }
    }
    ensure!(served == 2, "the page has {served} disks in a cluster");
    Ok(())
}

pub(super) fn disk_bench(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("driven")?;
    let drive = |options: &str| -> Result<_> {
        let mut command = scene.ringhaul(&["disk", "bench", &disk, "--runtime", "500ms"])?;
        run(command.args(options.split_whitespace()))
    };
    let output = drive("--rw randrw --numjobs 2 --destroy-contents --json")?.expect_code(0)?.stdout;
    let output: Value = serde_json::from_str(&output).context("reading the result")?;
    for figure in ["read_iops", "write_iops", "bandwidth_bytes_per_s", "latency_mean_us"] {
        ensure!(output[figure].as_f64() > Some(0.0), "{figure} is {}", output[figure]);
    }
    ensure!(output["errors"] == 0 && output["disk_size_bytes"] == super::IMAGE_BYTES, "{output}");
    drive("--rw write")?.expect_refusal(&["--destroy-contents"])
}
