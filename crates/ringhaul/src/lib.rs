//! Ringhaul serves disks to virtual machines.
//!
//! The program is in `main.rs`. This library holds its parts, for tests and simulations to drive.
//! A VMM that wants a device in its own process embeds the crate `device` alone.

mod cancellation;
mod cgroup;
pub mod command;
pub mod config;
pub mod control;
mod control_socket;
pub mod ctl;
pub mod daemon;
mod descriptor_limit;
pub mod disk_command;
mod disk_monitor;
mod disk_names;
pub mod disk_spec;
pub mod endpoint;
mod engines;
mod export_log;
pub mod file_limit;
mod group;
mod inherit;
pub mod io_threads;
mod lease_id;
pub mod log;
mod make_device;
pub mod memory_limits;
mod open_disk;
mod open_image;
#[cfg(feature = "luks")]
mod open_luks;
pub mod options;
mod ownership;
mod parallel;
mod passed_fds;
pub mod peer;
pub mod qos;
mod rate_limit;
pub mod redact;
mod reload;
mod saved_state;
pub mod serve;
mod service_manager;
pub mod settings;
mod shared_disks;
pub mod shutdown;
mod socket_permissions;
pub mod spec;
pub mod stats;
pub mod status;
mod subscribers;
mod takeover;
mod thread_watch;
pub mod version;
pub mod vhost_user;

pub use export_log::ExportLog;
