//! `cargo lab neighbours`: the speed of an export while another one of its IoThread misbehaves.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ringhaul_tools::workspace;

use crate::rig::machine;

/// Options of `cargo lab neighbours`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Rounds; each measures the neighbour once in quiet and once disturbed
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Seconds of one measurement
    #[arg(long, default_value_t = 1.0)]
    runtime: f64,
    /// Only measurements with this in their name, such as `full pipe` or `aio/`
    #[arg(long, value_name = "PATTERN", default_value = "")]
    only: String,
    /// Folder for neighbours.md [default: neighbours/ in the target directory]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// Runs the measurement that stands beside the tests of neighbours, and writes its table. The
/// machine should do nothing else. Quiet and disturbed spans alternate.
pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(args.rounds > 0 && args.runtime > 0.0, "a zero leaves nothing to do");
    let runtime = Duration::try_from_secs_f64(args.runtime).context("--runtime")?;
    let folder = match &args.output {
        Some(folder) => folder.clone(),
        None => workspace::target_dir()?.join("neighbours"),
    };
    let binary = std::path::absolute(workspace::ringhaul_binary()?)?;
    let mut text = String::new();
    for (name, value) in machine::facts(&binary)? {
        _ = writeln!(text, "- {name}: {value}");
    }
    let rounds = format!("{} of {} s in quiet and as long disturbed", args.rounds, args.runtime);
    _ = writeln!(text, "- rounds: {rounds}, in turn; nothing is pinned\n");
    let output = workspace::cargo()
        .args(["test", "--quiet", "--package", "ringhaul-tests", "--test", "neighbours"])
        .args(["--", "--ignored", "--nocapture", "report"])
        .env("RINGHAUL_BIN", binary)
        .env("RINGHAUL_NEIGHBOURS_ONLY", &args.only)
        .env("RINGHAUL_NEIGHBOURS_ROUNDS", args.rounds.to_string())
        .env("RINGHAUL_NEIGHBOURS_RUNTIME_MS", runtime.as_millis().to_string())
        .output()
        .context("running the measurement")?;
    let table = String::from_utf8_lossy(&output.stdout);
    for line in table.lines().filter(|line| line.starts_with('|')) {
        text.push_str(line);
        text.push('\n');
    }
    print!("{text}");
    std::fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    let path = folder.join("neighbours.md");
    std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    println!("wrote {}", path.display());
    if !output.status.success() {
        eprintln!("{table}{}", String::from_utf8_lossy(&output.stderr));
        bail!("the measurement failed; the table has what there was before");
    }
    Ok(())
}
