//! The version of the program, and facts about this machine.

use std::fmt::Write as _;

use blockio::config::EngineOptions;
use blockio::{EngineKind, IoThread, IoThreadConfig};
use virtqueue::InflightRegion;

use crate::daemon::format::FORMATS;
use crate::process::FEATURES;

/// The version, the commit if the build has recorded it, the features, and facts about this
/// machine: engines, the library of Ceph, the kernel. This version reads and writes the
/// listed formats of takeovers.
pub fn describe(commit: Option<&str>) -> String {
    let mut engines: Vec<String> = Vec::new();
    for engine in [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads] {
        let state = match IoThread::new(&IoThreadConfig {
            engine: EngineOptions::default().engine(engine),
            ..IoThreadConfig::default()
        }) {
            Ok(_) => engine.to_string(),
            Err(error) => format!("no {engine} ({error})"),
        };
        engines.push(state);
    }
    let librbd = disks::rbd::library().map_or_else(|why| why, |()| "found".into());
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let formats = FORMATS.map(|format| format.to_string()).join(", ");
    let rows = [
        ("commit", commit.unwrap_or("not recorded; `make build` records it").to_owned()),
        ("takeover", format!("formats {formats}; inflight version {}", InflightRegion::VERSION)),
        ("features", FEATURES.join(", ")),
        ("engines", engines.join(", ")),
        ("librbd", librbd),
        ("kernel", kernel.trim().to_owned()),
    ];
    let mut text = format!("ringhaul {}\n", env!("CARGO_PKG_VERSION"));
    for (name, what) in rows {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name:<9} {what}");
    }
    text
}
