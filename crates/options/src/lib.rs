//! Forms and values of options that programs share.
//!
//! ```
//! use std::time::Duration;
//!
//! use ringhaul_options::key_value::split_at_commas;
//! use ringhaul_options::{parse_duration, parse_size};
//!
//! assert_eq!(parse_size("64K"), Ok(64 << 10));
//! assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
//! assert_eq!(split_at_commas("file=/a,,b,serial=7"), ["file=/a,b", "serial=7"]);
//! ```

#![forbid(unsafe_code)]

#[cfg(feature = "clap")]
mod choices;
mod duration;
pub mod key_value;
pub mod redact;
mod size;

#[cfg(feature = "clap")]
pub use choices::{CompletionRingChoice, EngineChoice, LockChoice, OnOff, ineffective_warning};
pub use duration::parse_duration;
pub use size::parse_size;
