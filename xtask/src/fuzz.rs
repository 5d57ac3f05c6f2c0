//! `cargo xtask fuzz`: runs the fuzz targets, each for a limited time.

use std::num::NonZero;
use std::sync::Mutex;

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

/// Runs the targets, as many at a time as there are processors. New inputs are kept in
/// `fuzz/corpus`, which is not part of the tree, and failing inputs in `fuzz/artifacts`.
pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(missing) = missing() {
        bail!("{missing}");
    }
    let interrupt = Interrupt::install()?;
    let chosen = TARGETS.into_iter().filter(|name| args.target.as_ref().is_none_or(|t| t == name));
    // One call builds all of them: the runs find them up to date.
    let mut build = workspace::nightly().context(workspace::NO_NIGHTLY)?;
    build.args(["fuzz", "build"]).args(&args.target);
    ManagedChild::run("the build of the fuzz targets", &mut build, &interrupt)?;
    let next = Mutex::new(chosen);
    let run_some = || -> Result<()> {
        let take = || next.lock().ok()?.next();
        while let Some(target) = take() {
            run_target(target, args.seconds, &interrupt)?;
        }
        Ok(())
    };
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..processors).map(|_| scope.spawn(run_some)).collect();
        let ends = threads.into_iter().map(|thread| match thread.join() {
            Ok(end) => end,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        // All have ended before the first error is returned.
        ends.collect::<Vec<_>>().into_iter().collect()
    })
}

fn run_target(target: &str, seconds: u32, interrupt: &Interrupt) -> Result<()> {
    let folder = |kind: &str| workspace::root().join("fuzz").join(kind).join(target);
    let (corpus, seeds) = (folder("corpus"), folder("seeds"));
    std::fs::create_dir_all(&corpus)
        .with_context(|| format!("making the folder {}", corpus.display()))?;
    let mut command = workspace::nightly().context(workspace::NO_NIGHTLY)?;
    command.args(["fuzz", "run", target]).args([&corpus, &seeds]).args([
        "--",
        &format!("-max_total_time={seconds}"),
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
    command.env("LSAN_OPTIONS", format!("print_suppressions=0:suppressions='{}'", leaks.display()));
    println!("fuzz: {target}, {seconds} s");
    let run = ManagedChild::run(&format!("fuzz target {target}"), &mut command, interrupt);
    run.with_context(|| {
        format!(
            "an input may be in fuzz/artifacts/{target}; \
             `cargo +nightly fuzz run {target} FILE` repeats it"
        )
    })
}
