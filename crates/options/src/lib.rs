//! Forms and values of options that programs share.

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
