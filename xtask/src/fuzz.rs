//! `cargo xtask fuzz`: runs the fuzz targets, each for a limited time.

use anyhow::{Context, Result, bail};
use ringhaul_tools::process::{Interrupt, ManagedChild};
use ringhaul_tools::workspace;

/// The targets, in `fuzz/fuzz_targets`.
const TARGETS: [&str; 7] = ["chains", "device", "luks", "messages", "nbd", "qcow2", "scsi"];

/// Options of `cargo xtask fuzz`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run each target for this many seconds
    #[arg(long, default_value_t = 60)]
    seconds: u32,

    /// Run this target only
    #[arg(value_parser = TARGETS)]
    target: Option<String>,
}

/// The missing tool without which the targets cannot run.
pub(crate) fn missing() -> Option<&'static str> {
    if workspace::find_program("cargo-fuzz").is_none() {
        return Some("cargo-fuzz is missing: cargo install --locked cargo-fuzz");
    }
    workspace::nightly().is_none().then_some(workspace::NO_NIGHTLY)
}

/// Runs the targets. New inputs are kept in `fuzz/corpus`, which is not part of the tree, and
/// failing inputs in `fuzz/artifacts`.
pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(missing) = missing() {
        bail!("{missing}");
    }
    let interrupt = Interrupt::install()?;
    let targets = TARGETS.iter().filter(|name| args.target.as_ref().is_none_or(|t| t == *name));
    for target in targets {
        let folder = |kind: &str| workspace::root().join("fuzz").join(kind).join(target);
        let (corpus, seeds) = (folder("corpus"), folder("seeds"));
        std::fs::create_dir_all(&corpus)
            .with_context(|| format!("making the folder {}", corpus.display()))?;
        let mut command = workspace::nightly().context(workspace::NO_NIGHTLY)?;
        command.args(["fuzz", "run", target]).args([&corpus, &seeds]).args([
            "--",
            &format!("-max_total_time={}", args.seconds),
            // A hang is a failure, and so is unbounded growth of memory.
            "-timeout=30",
            "-rss_limit_mb=2048",
            "-max_len=4096",
            "-print_final_stats=1",
            // Each new function name would start llvm-symbolizer.
            "-print_funcs=0",
            "-verbosity=0",
        ]);
        let leaks = workspace::root().join("fuzz/leaks.txt");
        command.env(
            "LSAN_OPTIONS",
            format!("print_suppressions=0:suppressions='{}'", leaks.display()),
        );
        println!("fuzz: {target}, {} s", args.seconds);
        let run = ManagedChild::run(&format!("fuzz target {target}"), &mut command, &interrupt);
        run.with_context(|| {
            format!(
                "an input may be in fuzz/artifacts/{target}; \
                 `cargo +nightly fuzz run {target} FILE` repeats it"
            )
        })?;
    }
    Ok(())
}
