//! Chooses the way in which QEMU executes the guest's instructions.
//!
//! An accessible /dev/kvm proves little: in nested virtual machines it often exists and then fails
//! or hangs. So a guest is booted once as a probe, with a time limit, and the result is stored
//! until this machine reboots.

use std::fmt;
use std::fs::OpenOptions;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;

use super::image::{self, Image};
use super::vm::{Vm, VmOptions};

/// With working KVM a probe guest is up in two or three seconds, with TCG in five. A KVM that needs
/// longer than this limit is of no use.
const PROBE_LIMIT: Duration = Duration::from_secs(15);

/// Changes at each boot of this machine.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The way in which QEMU executes the guest's instructions.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum Accelerator {
    /// By the processor, through /dev/kvm.
    Kvm,
    /// By translation: 10 to 50 times slower, but possible everywhere.
    Tcg,
}

impl Accelerator {
    /// KVM if a guest boots with it, else TCG.
    ///
    /// # Errors
    /// If the result cannot be stored under the target directory.
    pub fn choose(image: &Image) -> Result<Self> {
        if let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm") {
            eprintln!("guest: TCG, as /dev/kvm cannot be opened: {error}");
            return Ok(Self::Tcg);
        }
        let _lock = image::lock()?;
        let boot_id =
            std::fs::read_to_string(BOOT_ID).with_context(|| format!("reading {BOOT_ID}"))?;
        let file = image::guest_dir()?.join("accelerator");
        let known = std::fs::read_to_string(&file).unwrap_or_default();
        if let Some((known_boot_id, name)) = known.split_once(' ')
            && known_boot_id == boot_id.trim()
            && let Ok(accelerator) = Self::from_str(name.trim(), true)
        {
            return Ok(accelerator);
        }
        let accelerator = Self::probe(image);
        std::fs::write(&file, format!("{} {accelerator}\n", boot_id.trim()))
            .with_context(|| format!("writing {}", file.display()))?;
        Ok(accelerator)
    }

    fn probe(image: &Image) -> Self {
        let options = VmOptions { boot_limit: PROBE_LIMIT, ..VmOptions::default() };
        match Vm::boot(image, Self::Kvm, &options) {
            Ok(_) => Self::Kvm,
            Err(error) => {
                let error = error.to_string();
                let reason = error.lines().next().unwrap_or_default();
                eprintln!("guest: TCG, as no guest boots with KVM here: {reason}");
                Self::Tcg
            }
        }
    }

    /// The value of QEMU's option `-accel`.
    pub(crate) fn qemu_argument(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg,thread=multi",
        }
    }
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}
