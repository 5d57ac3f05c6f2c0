//! Real guests for tests: a Debian or Ubuntu kernel in QEMU, or User Mode Linux, with disks over
//! vhost-user.
//!
//! [`Image`] is the kernel with its initramfs, [`Accelerator`] the way in which QEMU executes it,
//! [`Vm`] the running guest. `cargo guest` starts the same by hand. The guest's side is the script
//! `guest/init`.

mod accelerator;
mod channel;
mod cpio;
mod image;
mod kernel;
mod kvm;
mod machine;
mod mover;
mod qemu;
mod trace;
mod uml;
mod vm;

pub use accelerator::Accelerator;
pub use channel::StopFlag;
pub use image::{BOOTED_FROM_DISK, Image, KERNEL_OPTIONS, shared_libraries};
pub use kvm::{HotPlug, KVM_DISK_BYTES, KvmGuest, RingLayout, Vmm, lacks_kvm};
pub use machine::QemuCrashed;
pub use mover::{FAST, Mover, QemuHost, SLOW};
pub use vm::{Bus, Disk, ScriptOutput, Vm, VmOptions};
