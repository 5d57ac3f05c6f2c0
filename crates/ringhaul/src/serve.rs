//! `ringhaul serve`.

use std::process::ExitCode;
use std::sync::mpsc;

use anyhow::{Context, Result, bail};
use blockio::EngineKind;
use blockio::choose::Choice;
use blockio::stats::{OpStats, Stats};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::blk::BlkDevice;
use crate::export::{Endpoint, Export};
use crate::io_threads::IoThreads;
use crate::options::{OpenDisk, ServeArgs};

/// Why the daemon ends.
enum End {
    Signal(i32),
    ExportEnded,
}

/// Serves one disk until a signal comes or the front-end of an inherited connection goes.
///
/// # Errors
///
/// When the daemon cannot start: the caller exits with status 2.
pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    // First of all, so that a signal that comes early is not lost.
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("cannot take over signals")?;
    raise_descriptor_limit();
    let OpenDisk { source, options, summary } = args.open_disk()?;
    // Before the threads, which say what they chose: what is refused is refused in one line.
    let endpoint = match (&args.socket_path, args.fd) {
        (Some(path), _) => Endpoint::bind(path)?,
        (None, Some(fd)) => Endpoint::inherit(fd)?,
        (None, None) => bail!("no socket is named; use --socket-path PATH or --fd FD"),
    };
    let threads = start_threads(args, &source)?;
    let name = options.name.clone();
    let device = BlkDevice::new(source, options);
    let (end, ends) = mpsc::channel();
    let ended = end.clone();
    let export = Export::start(&name, device, endpoint, threads.remotes().to_vec(), move || {
        // The receiver goes only when the daemon ends anyway.
        let _ = ended.send(End::ExportEnded);
    })?;
    match &args.socket_path {
        Some(path) => tracing::info!("{summary}; serving on {}", path.display()),
        None => tracing::info!("{summary}; serving on an inherited socket"),
    }
    let signal_handle = signals.handle();
    let signal_thread = std::thread::Builder::new()
        .name("ringhaul-signal".into())
        .spawn(move || {
            for signal in &mut signals {
                let _ = end.send(End::Signal(signal));
            }
        })
        .context("cannot start the thread for signals")?;
    if let Ok(End::Signal(signal)) = ends.recv() {
        let signal = if signal == SIGINT { "SIGINT" } else { "SIGTERM" };
        tracing::info!("{signal}: finishing requests, then ending");
    }
    export.stop();
    for (index, remote) in threads.remotes().iter().enumerate() {
        tracing::info!("iothread-{index}: {}", summary_of(remote.stats()));
    }
    drop(threads);
    signal_handle.close();
    let _ = signal_thread.join();
    Ok(ExitCode::SUCCESS)
}

/// A front-end may bring a descriptor for each of 509 memory regions and three for each queue,
/// more than the usual soft limit of 1024.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!("cannot raise the limit on open files: {error}");
    }
}

/// Starts the IoThreads, with the engine that was asked for or the best that works.
fn start_threads(args: &ServeArgs, source: &blockio::DiskSource) -> Result<IoThreads> {
    let count = usize::from(args.iothreads);
    let start = |engine| IoThreads::start(count, &args.io_thread_config(engine));
    if let Some(engine) = args.engine() {
        let threads = start(engine)?;
        let waits = engine == EngineKind::Aio && !source.info().direct;
        let but = if waits { "; with the page cache its submits wait for the disk" } else { "" };
        tracing::info!("engine {engine}: as asked{but}");
        return Ok(threads);
    }
    let choice = blockio::choose::best_engine(source);
    let Choice { engine, why } = &choice;
    match start(*engine) {
        Ok(threads) => {
            tracing::info!("engine {engine}: {why}");
            Ok(threads)
        }
        // The trial had room for one context, and there are more IoThreads.
        Err(error) if *engine != EngineKind::Threads => {
            tracing::warn!("{error:#}; falling back to engine threads");
            start(EngineKind::Threads)
        }
        Err(error) => Err(error),
    }
}

/// What an IoThread did, in one line.
fn summary_of(stats: &Stats) -> String {
    let of = |name: &str, ops: &OpStats| match (ops.ops.get(), ops.errors.get()) {
        (count, 0) => format!("{count} {name}"),
        (count, errors) => format!("{count} {name} ({errors} failed)"),
    };
    format!(
        "{}, {}, {}, {}; {} calls, {} submits, {} waits",
        of("reads", &stats.read),
        of("writes", &stats.write),
        of("flushes", &stats.flush),
        of("discards and zeroings", &stats.deallocate),
        stats.syscalls.eventfd_write.get(),
        stats.submitted_at_once.count(),
        stats.syscalls.epoll_wait.get() + stats.syscalls.io_uring_enter.get(),
    )
}
