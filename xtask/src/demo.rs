//! `cargo xtask demo`: the whole path once, from a disk image to figures, in a minute.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ringhaul_tools::process::{Interrupt, Running, describe};
use ringhaul_tools::workspace;

/// The size of a piece. Every second piece of the image has data, the rest is a hole.
const PIECE_BYTES: usize = 1 << 20;

/// The time limit for the daemon to open its disk and listen.
const START_LIMIT: Duration = Duration::from_secs(30);

/// The time that the load generator may take beyond its run time.
const BENCH_MARGIN: Duration = Duration::from_secs(60);

/// Options of `cargo xtask demo`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Size of the sample disk, in MiB
    #[arg(long, default_value_t = 256)]
    size: usize,
    /// Seconds to drive it for
    #[arg(long, default_value_t = 10)]
    runtime: u64,
}

/// Builds the daemon, serves a sample disk, drives it, and stops. Removes everything after success
/// and failure.
pub(crate) fn run(args: &Args) -> Result<()> {
    let interrupt = Interrupt::install()?;
    println!("Building Ringhaul (release) …");
    let binary = workspace::ringhaul_binary()?;
    interrupt.check()?;

    // Dropped last: the daemon ends before its files are removed.
    let folder = tempfile::Builder::new()
        .prefix("ringhaul-demo-")
        .tempdir()
        .context("making a temporary folder (TMPDIR chooses where)")?;
    let disk = folder.path().join("disk.img");
    let socket = folder.path().join("socket");
    println!("Making a sample disk of {} MiB, half of it holes: {}", args.size, disk.display());
    make_disk(&disk, args.size, &interrupt)?;

    let mut serve = Command::new(&binary);
    serve.arg("serve").arg("--socket-path").arg(&socket).arg("--blk-file").arg(&disk);
    println!("Serving it:\n  {}", line_of(&serve));
    let mut daemon = Running::start("ringhaul serve", &mut serve, &interrupt)?;
    daemon.wait_for_socket(&socket, START_LIMIT)?;

    let mut bench = Command::new(&binary);
    bench.arg("bench").arg("--socket-path").arg(&socket);
    bench.args(["--rw", "randread", "--bs", "4k", "--iodepth", "32", "--eta", "always"]);
    bench.args(["--runtime", &args.runtime.to_string()]);
    println!("Driving it for {} s, as a VM would:\n  {}", args.runtime, line_of(&bench));
    let limit = Duration::from_secs(args.runtime) + BENCH_MARGIN;
    let status = Running::start("ringhaul bench", &mut bench, &interrupt)?.wait(limit)?;
    if !status.success() {
        bail!("ringhaul bench ended with {}", describe(status));
    }

    let status = daemon.stop()?;
    if !status.success() {
        bail!("ringhaul serve ended with {} after SIGTERM, not with 0", describe(status));
    }
    if socket.exists() {
        bail!("ringhaul serve left its socket {} behind", socket.display());
    }
    folder.close().context("removing the temporary folder")?;
    println!("Stopped; the sample disk and the socket are removed.");
    Ok(())
}

/// Writes an image of `size_mib` MiB with random data in every second piece.
fn make_disk(path: &Path, size_mib: usize, interrupt: &Interrupt) -> Result<()> {
    let context = || format!("writing the sample disk {}", path.display());
    let size = u64::try_from(size_mib)?.checked_mul(1 << 20).context("--size is too large")?;
    let mut image = File::create_new(path).with_context(context)?;
    image.set_len(size).with_context(context)?;
    let mut random = File::open("/dev/urandom").context("opening /dev/urandom")?;
    let mut piece = vec![0; PIECE_BYTES];
    let step = 2 * u64::try_from(PIECE_BYTES)?;
    let mut position = 0;
    while position < size {
        interrupt.check()?;
        random.read_exact(&mut piece).context("reading /dev/urandom")?;
        image.seek(SeekFrom::Start(position)).with_context(context)?;
        image.write_all(&piece).with_context(context)?;
        position += step;
    }
    // Otherwise the kernel would write this data back during the measurement.
    image.sync_all().with_context(context)
}

/// Formats a command line for display; its arguments have no spaces here.
fn line_of(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words = [program].into_iter().chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn the_sample_disk_is_half_holes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        make_disk(&path, 4, &Interrupt::never()).unwrap();
        let metadata = path.metadata().unwrap();
        assert_eq!(metadata.len(), 4 << 20);
        assert!(metadata.blocks() * 512 <= 2 << 20, "{} blocks", metadata.blocks());
        let bytes = std::fs::read(&path).unwrap();
        assert!(bytes[..PIECE_BYTES].iter().any(|byte| *byte != 0));
        assert!(bytes[PIECE_BYTES..2 * PIECE_BYTES].iter().all(|byte| *byte == 0));
    }
}
