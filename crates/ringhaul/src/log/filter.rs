//! Filters of the log, as options, the control socket and `RUST_LOG` give them.
//!
//! Directives stand between commas: a level, or `PART=LEVEL`. Each is understood or refused,
//! because a filter that is misunderstood would leave the log without a line.

use tracing_subscriber::filter::{LevelFilter, Targets};

/// The level of parts that a filter does not name.
pub(super) const DEFAULT_LEVEL: LevelFilter = LevelFilter::INFO;

/// The levels, for messages.
const LEVELS: &str = "error, warn (or warning), info, debug, trace and off";

/// The crates that write to the log.
const CRATES: &[&str] = &[
    "blockio",
    "device",
    "disks",
    "imago",
    "iomem",
    "ringhaul",
    "ringhaul_bench",
    "vhost_user",
    "virtqueue",
];

/// Understands a filter. A later directive about the same part replaces the earlier one.
///
/// # Errors
///
/// A directive with an unknown level, or about an unknown part.
pub(super) fn parse(text: &str) -> Result<Targets, String> {
    let refused = |why: String| format!("'{text}' is not a filter: {why}");
    let mut targets = Targets::new().with_default(DEFAULT_LEVEL);
    for directive in text.split(',') {
        targets = match directive.split_once('=') {
            Some((part, level)) => targets.with_target(
                checked_part(part).map_err(refused)?,
                level_of(level).map_err(refused)?,
            ),
            None => targets.with_default(level_of(directive).map_err(refused)?),
        };
    }
    Ok(targets)
}

fn level_of(word: &str) -> Result<LevelFilter, String> {
    Ok(match word.trim().to_ascii_lowercase().as_str() {
        "off" => LevelFilter::OFF,
        "error" => LevelFilter::ERROR,
        "warn" | "warning" => LevelFilter::WARN,
        "info" => LevelFilter::INFO,
        "debug" => LevelFilter::DEBUG,
        "trace" => LevelFilter::TRACE,
        "" => return Err(format!("a level is missing; levels are {LEVELS}")),
        _ => return Err(format!("'{word}' is not a level; levels are {LEVELS}")),
    })
}

/// The part, if a crate of the program begins with it: `block`, `blockio` and `blockio::engine` are
/// fine.
fn checked_part(part: &str) -> Result<&str, String> {
    let part = part.trim();
    let is_ours = |name: &str| match part.split_once("::") {
        Some((head, _)) => head == name,
        None => !part.is_empty() && name.starts_with(part),
    };
    if CRATES.iter().any(|name| is_ours(name)) {
        return Ok(part);
    }
    Err(format!("'{part}' is not a part of this program; parts are {}", CRATES.join(", ")))
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn levels_apply_to_the_parts_that_are_named() {
        for (text, part, level, is_logged) in [
            ("warning", "ringhaul", Level::WARN, true),
            ("warning", "ringhaul", Level::INFO, false),
            ("WARN", "blockio", Level::WARN, true),
            ("off", "ringhaul", Level::ERROR, false),
            ("info, blockio=debug", "blockio::engine", Level::DEBUG, true),
            ("info, blockio=debug", "ringhaul", Level::DEBUG, false),
            ("blockio::engine=trace", "blockio::engine::aio", Level::TRACE, true),
            ("off,disks=debug", "disks::nbd", Level::DEBUG, true),
            ("blockio::engine=trace", "blockio::turn", Level::DEBUG, false),
            // A filter about one part leaves the rest at the default level.
            ("blockio=debug", "ringhaul", Level::INFO, true),
            ("off,blockio=debug", "ringhaul", Level::ERROR, false),
            ("ringhaul=error,ringhaul=debug", "ringhaul", Level::DEBUG, true),
        ] {
            let targets = parse(text).unwrap();
            assert_eq!(targets.would_enable(part, &level), is_logged, "{text} {part} {level}");
        }
    }

    #[test]
    fn mistyped_words_are_refused_with_the_words_that_exist() {
        for bad in ["verbose", "Debgu", "3", "", "info,", "ringhaul=loud", "ringhaul=", "[span]"] {
            let error = parse(bad).unwrap_err();
            assert!(error.contains("warn (or warning), info, debug"), "{bad}: {error}");
        }
        for bad in ["qemu=debug", "=info", "=,=", "ringhauls=info", "rhinghaul::log=info"] {
            let error = parse(bad).unwrap_err();
            assert!(error.contains("parts are blockio, device"), "{bad}: {error}");
        }
        assert!(parse("a=b=c").is_err());
    }
}
