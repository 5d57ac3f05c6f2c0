//! Ringhaul serves disks to virtual machines.
//!
//! The daemon, as a library for its program, the crate `ringhaul-cli`, and for tests. A VMM that
//! wants a device in its own process embeds the crate `device` alone. Programs that send requests
//! to the daemon find their form in a schema, and an export in [`spec::ExportSpec`]:
//!
//! ```
//! use ringhaul::control_socket::schema;
//! use ringhaul::spec::ExportSpec;
//!
//! # fn main() -> Result<(), serde_json::Error> {
//! let export: ExportSpec = serde_json::from_str(
//!     r#"{"name": "vm1", "endpoint": {"path": "/run/vm1.sock"}, "device": {"blk": "/vm1.raw"}}"#,
//! )?;
//! assert_eq!(export.name(), "vm1");
//! assert!(schema()["methods"]["export.add"].is_object());
//! # Ok(())
//! # }
//! ```

pub mod control;
pub mod control_socket;
pub mod daemon;
pub mod fd_store;
pub mod log;
pub mod monitoring;
pub mod open;
pub mod options;
pub mod process;
pub mod sandbox;
pub mod serve;
pub mod socket;
pub mod spec;
pub mod takeover;
#[cfg(test)]
pub(crate) mod testing;
pub mod threads;
pub mod version;

pub use control::export_log::ExportLog;
