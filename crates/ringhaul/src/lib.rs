//! Ringhaul serves disks to virtual machines.
//!
//! The program is in `main.rs`. This library holds its parts, for tests and simulations to drive.
//! A VMM that wants a device in its own process embeds the crate `device` alone.

mod cgroup;
pub mod command;
pub mod config;
pub mod control;
mod control_socket;
pub mod ctl;
pub mod daemon;
mod descriptor_limit;
mod disk_accesses;
pub mod disk_command;
mod disk_names;
pub mod disk_rules;
pub mod disk_spec;
mod disk_user;
mod doors;
pub mod ending;
mod engines;
pub mod export;
mod export_log;
pub mod file_limit;
mod group;
mod handed_fds;
mod inherit;
pub mod io_threads;
mod kept;
pub mod log;
mod log_limit;
mod make_device;
pub mod memory_limits;
mod notify;
mod open_disk;
mod open_image;
#[cfg(feature = "luks")]
mod open_luks;
pub mod options;
pub mod peer;
mod reload;
pub mod secrets;
pub mod serve;
pub mod settings;
mod side_by_side;
mod size_watch;
pub mod spec;
pub mod stats;
pub mod status;
mod subscribers;
mod succession;
mod takeover;
mod thread_watch;
pub mod version;
pub mod vhost_user;
mod wanted;

pub use export_log::ExportLog;
