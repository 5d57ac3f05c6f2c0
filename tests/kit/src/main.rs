//! `cargo guest`: boots the guests of the end-to-end tests by hand.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use ringhaul_kit::guest::{Accelerator, Bus, Disk, Image, StopFlag, Vm, VmOptions};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

#[derive(Parser)]
#[command(name = "cargo guest", about = "Real guests with vhost-user disks")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the kernel and initramfs of test guests, unless they exist
    Image {
        /// Build them again, with the newest kernel that apt knows
        #[arg(long)]
        rebuild: bool,
    },
    /// Boot a guest with vhost-user disks and run scripts in it; its exit status is the script's
    Run(RunArgs),
}

#[derive(clap::Args)]
struct RunArgs {
    /// Socket of a vhost-user back-end; again for a further device
    #[arg(long = "socket", value_name = "PATH")]
    sockets: Vec<PathBuf>,

    /// The devices are virtio-scsi, not virtio-blk
    #[arg(long)]
    scsi: bool,

    /// Shell script to run in the guest, again for a further one; without it, stdin is run
    #[arg(long = "script", value_name = "FILE")]
    scripts: Vec<PathBuf>,

    /// Virtqueues of each disk
    #[arg(long, value_name = "N", default_value_t = 2)]
    num_queues: u16,

    /// Entries of each virtqueue
    #[arg(long, value_name = "N", default_value_t = 128)]
    queue_size: u16,

    /// Memory of the guest in MiB
    #[arg(long, value_name = "N", default_value_t = 1024)]
    memory_mib: u32,

    /// Processors of the guest
    #[arg(long, value_name = "N", default_value_t = 2)]
    vcpus: u32,

    /// Way to execute its instructions; without it, KVM where that works
    #[arg(long, value_name = "NAME")]
    accelerator: Option<Accelerator>,

    /// Seconds that each script may take
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(status) => status,
        Err(error) => {
            eprintln!("guest: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<ExitCode> {
    match &args.command {
        Command::Image { rebuild } => {
            let image = if *rebuild { Image::rebuild()? } else { Image::prepare()? };
            println!("{}", image.kernel_version);
            println!("{}\n{}", image.kernel.display(), image.initramfs.display());
            Ok(ExitCode::SUCCESS)
        }
        Command::Run(args) => run_scripts(args),
    }
}

fn run_scripts(args: &RunArgs) -> Result<ExitCode> {
    let scripts = read_scripts(&args.scripts)?;
    let image = Image::prepare()?;
    let accelerator = match args.accelerator {
        Some(accelerator) => accelerator,
        None => Accelerator::choose(&image)?,
    };
    let stop = StopFlag::default();
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, StopFlag::clone(&stop))
            .with_context(|| format!("installing a handler for signal {signal}"))?;
    }
    let disks = args.sockets.iter().map(|socket| Disk {
        bus: if args.scsi { Bus::Scsi } else { Bus::Blk },
        socket: socket.clone(),
        num_queues: args.num_queues,
        queue_size: args.queue_size,
    });
    let options = VmOptions {
        disks: disks.collect(),
        memory_mib: args.memory_mib,
        vcpus: args.vcpus,
        echo: true,
        stop,
        ..VmOptions::default()
    };
    eprintln!("guest: {} with {accelerator}", image.kernel_version);
    let mut vm = Vm::boot(&image, accelerator, &options)?;
    for script in &scripts {
        let output = vm.run(script, Duration::from_secs(args.timeout))?;
        if output.status != 0 {
            eprintln!("guest: the script ended with status {}", output.status);
            return Ok(ExitCode::from(u8::try_from(output.status).unwrap_or(1)));
        }
    }
    vm.power_off(Duration::from_secs(args.timeout))?;
    Ok(ExitCode::SUCCESS)
}

fn read_scripts(paths: &[PathBuf]) -> Result<Vec<String>> {
    if paths.is_empty() {
        let mut script = String::new();
        std::io::stdin().read_to_string(&mut script).context("reading a script from stdin")?;
        return Ok(vec![script]);
    }
    let read = |path: &Path| {
        std::fs::read_to_string(path)
            .with_context(|| format!("reading the script {}", path.display()))
    };
    paths.iter().map(|path| read(path)).collect()
}
