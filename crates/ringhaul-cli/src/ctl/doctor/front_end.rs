//! Findings about the front-end of an export and about its queues.

use std::path::Path;

use ringhaul::spec::EndpointSpec;
use ringhaul::spec::command::ExportState;
use ringhaul::spec::status::{
    FrontEndDetails, HOW_TO_SHARE_MEMORY, QueueDetails, QueueRole, QueueState,
};

use super::facts::ExportFacts;
use super::finding::{Finding, Level};

/// Entries of a queue below which deep loads wait for entries.
const SMALL_QUEUE: u16 = 64;

/// Findings about the front-end of an export.
pub(super) fn findings(export: &ExportFacts) -> Vec<Finding> {
    let status = &export.details.status;
    if status.state == ExportState::Opening {
        return vec![not_served()];
    }
    let Some(front_end) = &export.details.front_end else {
        return no_front_end(export).into_iter().collect();
    };
    if status.lacks_memory {
        let pid = process_of(front_end);
        let regions = front_end.session.memory.regions;
        return vec![Finding::new(
            Level::Harmful,
            "memory-not-shared",
            format!(
                "{pid} has started a queue and shares {regions} regions of memory, so the guest \
                 waits for its disk"
            ),
            HOW_TO_SHARE_MEMORY,
        )];
    }
    if !front_end.session.queues.iter().any(is_running_request_queue) {
        // The features are not final yet.
        return Vec::new();
    }
    let all = [
        no_inflight_region(export, front_end),
        no_reconnect(export, front_end),
        no_event_idx(front_end),
    ];
    all.into_iter().flatten().chain(small_queues(export, front_end)).collect()
}

fn is_running_request_queue(queue: &QueueDetails) -> bool {
    queue.role == QueueRole::Request && queue.state == QueueState::Running
}

/// The process of a front-end, for a sentence.
fn process_of(front_end: &FrontEndDetails) -> String {
    match front_end.peer.as_ref().and_then(|peer| peer.pid) {
        Some(pid) => format!("the front-end (process {pid})"),
        None => "the front-end".to_owned(),
    }
}

/// An export whose disks are not open yet, so that no front-end can connect.
fn not_served() -> Finding {
    Finding::new(
        Level::Harmful,
        "not-served",
        "the disks are still being opened, so the guest has no disk",
        "see the log for the disk that does not answer",
    )
}

/// A front-end that has gone: its guest is off, or does not connect again.
fn no_front_end(export: &ExportFacts) -> Option<Finding> {
    let status = &export.details.status;
    if status.sessions == 0 || status.state != ExportState::Serving {
        return None;
    }
    Some(Finding::new(
        Level::Note,
        "no-front-end",
        format!("no front-end is connected, after {} so far", status.sessions),
        "start the guest; if it runs, its VMM does not connect again, so restart the guest \
         (docs/guide/attach.md)",
    ))
}

/// A crash repeats or loses requests without an account of them. For a connection that the service
/// manager keeps, the daemon has an account of its own.
fn no_inflight_region(export: &ExportFacts, front_end: &FrontEndDetails) -> Option<Finding> {
    let session = &front_end.session;
    let has_region = session.protocol_features.iter().any(|name| name == "inflight-shmfd");
    if has_region || front_end.kept || export.details.status.spec.settings.in_order {
        return None;
    }
    Some(Finding::new(
        Level::Warning,
        "no-inflight-region",
        format!(
            "{} keeps no inflight region, so the guest may hang after a crash of the daemon; \
             negotiated: {}",
            process_of(front_end),
            session.protocol_features.join(" ")
        ),
        "use a VMM with inflight regions, such as QEMU, or the option in-order of virtio-blk",
    ))
}

/// A VMM that does not connect again after a restart of the daemon.
fn no_reconnect(export: &ExportFacts, front_end: &FrontEndDetails) -> Option<Finding> {
    let words = &export.command_line;
    let EndpointSpec::Path(socket) = &export.details.status.spec.endpoint else { return None };
    let never = "restart the daemon by `ringhaul ctl upgrade` only, which keeps the connection";
    let program = words.first().and_then(|word| Path::new(word).file_name()?.to_str())?;
    let (figure, remedy) = if let Some(word) = words.iter().find(|word| is_socket(word, socket)) {
        if has_reconnect(word) {
            return None;
        }
        let remedy = "add reconnect-ms=1000 to it (reconnect=1 before QEMU 9.2); with libvirt, \
                      <reconnect enabled='yes' timeout='1'/>";
        (format!("{program} has -chardev {word}"), remedy)
    } else if program.starts_with("firecracker") || program.starts_with("alioth") {
        (format!("{program} never connects again"), never)
    } else if words.iter().any(|word| word.starts_with("virtio_uml.device=")) {
        ("User Mode Linux never connects again".to_owned(), never)
    } else {
        return None;
    };
    // A kill is only a pause for a connection that the service manager keeps.
    let event = if front_end.kept { "is stopped" } else { "restarts" };
    let figure = format!("{figure}, so the guest loses its disk when the daemon {event}");
    Some(Finding::new(Level::Warning, "no-reconnect", figure, remedy))
}

/// Returns true if a word of QEMU's command line is the character device of this socket.
fn is_socket(word: &str, socket: &Path) -> bool {
    let path = word.split(',').find_map(|part| part.strip_prefix("path="));
    // Either may be relative.
    word.starts_with("socket,")
        && path.is_some_and(|path| socket.ends_with(path) || Path::new(path).ends_with(socket))
}

fn has_reconnect(word: &str) -> bool {
    let value = |part: &str| {
        let value = part.strip_prefix("reconnect=").or_else(|| part.strip_prefix("reconnect-ms="));
        value.map(|value| value != "0")
    };
    word.split(',').find_map(value) == Some(true)
}

/// Each answer calls the driver, and each request kicks, if neither can ask for less.
fn no_event_idx(front_end: &FrontEndDetails) -> Option<Finding> {
    let features = &front_end.session.features;
    if features.iter().any(|name| name == "event-idx") {
        return None;
    }
    Some(Finding::new(
        Level::Note,
        "no-event-idx",
        format!("the driver has negotiated {}, without event-idx", features.join(" ")),
        "none while a firmware uses the disk; then, with QEMU, remove event_idx=off: without it, \
         kicks and calls cost more CPU time",
    ))
}

/// Queues that are small, or were nearly full.
fn small_queues(export: &ExportFacts, front_end: &FrontEndDetails) -> Option<Finding> {
    let queues = front_end.session.queues.iter().filter(|queue| is_running_request_queue(queue));
    let size = queues.map(|queue| queue.size).min()?;
    let peak = export.stats.as_ref().map_or(0, |[_, after]| after.depth_peak);
    let is_full = peak >= u64::from(size) - u64::from(size / 4);
    let level = match (is_full, size < SMALL_QUEUE) {
        (true, _) => Level::Warning,
        (false, true) => Level::Note,
        (false, false) => return None,
    };
    Some(Finding::new(
        level,
        "small-queue",
        format!("a queue has {size} entries, and the most unanswered requests were {peak}"),
        "with QEMU, queue-size=256 and num-queues=CPUS; with Cloud Hypervisor, queue_size=256",
    ))
}
