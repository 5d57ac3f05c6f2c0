//! `cargo lab dashboard`: draws main panels of the Grafana dashboard for docs/guide/monitoring.md.
//!
//! A daemon serves a file under a load that changes, and Prometheus scrapes it. The expressions and
//! titles are those of `contrib/monitoring/dashboard.json`.

mod picture;

use std::fs::File;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, bench, ringhaul, run as finish, serve};
use ringhaul_kit::prometheus::{Prometheus, free_address};
use ringhaul_tools::workspace;
use serde_json::Value;

use crate::rig::machine;
use picture::{Panel, Series, Unit};

/// The dashboard, and the picture of it.
const DASHBOARD: &str = "contrib/monitoring/dashboard.json";
const PICTURE: &str = "docs/guide/dashboard.svg";

/// The drawn panels.
const PANELS: [&str; 4] =
    ["Requests per second", "Latency of reads", "Requests that wait", "CPU time of IoThreads"];

/// The name of the export, and the size of its disk.
const EXPORT: &str = "vm1";
const DISK_BYTES: usize = 256 << 20;

/// The length of a phase, and the range over which rates are taken, in seconds.
const PHASE: u32 = 20;
const RATE: u32 = 5;

/// The phases of the load: limits of the disk, options of the load generator, and their meaning.
const PHASES: [(&str, &str, &str); 4] = [
    ("iops-total=0", "--rw randread --iodepth 4", "reads, depth 4"),
    ("iops-total=0", "--rw randrw --iodepth 16", "reads and writes, depth 16"),
    ("iops-total=5000", "--rw randrw --iodepth 16", "the same with iops-total=5000"),
    ("iops-total=0", "--rw randread --iodepth 1", "reads, depth 1"),
];

/// Options of `cargo lab dashboard`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs the load, and writes the picture.
pub(crate) fn run(_: &Args) -> Result<()> {
    let folders = TestFolders::new(&workspace::target_dir()?.display().to_string())?;
    let (start, panels) = measure(&folders)?;
    let phases = PHASES.map(|(_, _, meaning)| meaning);
    let text = picture::draw(&panels, start, f64::from(PHASE), &phases, &machine_line()?);
    let path = workspace::root().join(PICTURE);
    std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    println!("wrote {}", path.display());
    Ok(())
}

/// Runs the phases. Returns their start and the panels.
fn measure(folders: &TestFolders) -> Result<(f64, Vec<Panel>)> {
    fill(&folders.path("disk.img"))?;
    let (scraped, socket) = (free_address()?, folders.socket("vm.sock"));
    let control = folders.socket("control");
    let mut command = serve(&socket, &folders.path("disk.img"))?;
    command.args(["--name", EXPORT, "--metrics", &scraped.to_string(), "--control"]);
    let _daemon = Running::serve(command.arg(&control))?;
    let prometheus = start_prometheus(folders, scraped)?;
    let start = now()?;
    for (limits, load, meaning) in PHASES {
        println!("{PHASE} s: {meaning}");
        let mut set = ringhaul()?;
        set.arg("ctl").arg("--control").arg(&control).args(["set-disk", EXPORT, limits]);
        finish(&mut set)?.expect_code(0)?;
        let options = format!("{load} --bs 4k --runtime {PHASE}");
        finish(&mut bench(&socket, &options)?)?.expect_code(0)?;
    }
    let end = now()?;
    let panels = PANELS.iter().map(|title| panel(&prometheus, title, (start, end)));
    Ok((start, panels.collect::<Result<_>>()?))
}

fn start_prometheus(folders: &TestFolders, scraped: SocketAddr) -> Result<Prometheus> {
    let prometheus = Prometheus::start(&folders.path(""), scraped, "1s")?;
    // The picture begins when the first scrapes are there.
    prometheus.wait(&format!("rate(ringhaul_start_time_seconds[{RATE}s])"))?;
    Ok(prometheus)
}

/// Makes a disk without holes.
fn fill(path: &Path) -> Result<()> {
    let mut file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
    let piece: Vec<u8> = (0..1 << 20).map(|index: u32| index.to_le_bytes()[1]).collect();
    for _ in 0..DISK_BYTES / piece.len() {
        file.write_all(&piece).context("filling the disk")?;
    }
    file.sync_all().context("filling the disk")
}

fn now() -> Result<f64> {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is wrong")?;
    Ok(time.as_secs_f64())
}

/// Reads the series of a panel from Prometheus.
fn panel(prometheus: &Prometheus, title: &str, (start, end): (f64, f64)) -> Result<Panel> {
    let (unit, targets) = targets(title)?;
    let mut all = Vec::new();
    for (expression, legend) in targets {
        for found in prometheus.query_range(&expression, (start, end), Duration::from_secs(1))? {
            let name = legend_name(&legend, &found.labels)?;
            all.push(Series { name, points: found.points });
        }
    }
    // Kinds of requests that the load does not have stay at zero.
    all.retain(|series| series.points.iter().any(|(_, value)| *value > 0.0));
    ensure!(!all.is_empty(), "the panel {title} has no data");
    Ok(Panel { title: title.to_owned(), unit, series: all })
}

/// The unit, and the expressions with their legends, of a panel of the dashboard.
fn targets(title: &str) -> Result<(Unit, Vec<(String, String)>)> {
    let text = std::fs::read_to_string(workspace::root().join(DASHBOARD))
        .with_context(|| format!("reading {DASHBOARD}"))?;
    let dashboard: Value = serde_json::from_str(&text).context("reading the dashboard")?;
    let panels = dashboard["panels"].as_array().context("the dashboard has no panels")?;
    let panel = panels.iter().find(|panel| panel["title"] == title);
    let panel = panel.with_context(|| format!("the dashboard has no panel {title}"))?;
    let unit = Unit::from_grafana(panel["fieldConfig"]["defaults"]["unit"].as_str())?;
    let targets = panel["targets"].as_array().context("the panel has no targets")?;
    let text = |target: &Value, key: &str| target[key].as_str().unwrap_or_default().to_owned();
    let targets = targets.iter().map(|target| {
        let expression = text(target, "expr").replace("$export", EXPORT);
        let expression = expression.replace("$__rate_interval", &format!("{RATE}s"));
        (expression, text(target, "legendFormat"))
    });
    Ok((unit, targets.collect()))
}

/// Replaces `{{label}}` in a legend.
fn legend_name(legend: &str, labels: &Value) -> Result<String> {
    let Some((before, rest)) = legend.split_once("{{") else { return Ok(legend.to_owned()) };
    let (label, after) = rest.split_once("}}").context("a legend without an end")?;
    let value = labels[label].as_str().with_context(|| format!("no label {label}"))?;
    legend_name(&format!("{before}{value}{after}"), labels)
}

/// The machine, the versions and the commit of the run.
fn machine_line() -> Result<String> {
    let facts = machine::facts(&workspace::ringhaul_binary()?)?;
    let known = |name: &str| facts.iter().find(|(key, _)| *key == name).map(|(_, value)| value);
    let fact = |name: &str| known(name).with_context(|| format!("the machine has no {name}"));
    Ok(format!("Machine: {}, {}; {}.", fact("CPU")?, fact("kernel")?, fact("Ringhaul")?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_dashboard_has_the_drawn_panels() {
        for title in PANELS {
            let (_, targets) = targets(title).unwrap();
            assert!(!targets.is_empty(), "{title}");
            for (expression, _) in targets {
                assert!(!expression.contains('$'), "{expression}");
            }
        }
        assert!(targets("Nothing").is_err());
    }

    #[test]
    fn the_picture_in_the_tree_has_the_panels() {
        let kept = std::fs::read_to_string(workspace::root().join(PICTURE)).unwrap();
        for text in PANELS.iter().chain(&PHASES.map(|(_, _, meaning)| meaning)) {
            assert!(kept.contains(text), "{PICTURE} has no {text}: run cargo lab dashboard");
        }
    }

    #[test]
    fn a_legend_has_values_of_labels() {
        let labels = json!({"op": "read", "cause": "disk"});
        assert_eq!(legend_name("{{op}} {{cause}}", &labels).unwrap(), "read disk");
        assert_eq!(legend_name("median", &labels).unwrap(), "median");
        assert!(legend_name("{{state}}", &labels).is_err());
    }
}
