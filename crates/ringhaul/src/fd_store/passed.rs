//! The sessions that a killed process has left in the store.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;

use vhost_user::{PassedFds, SessionState};

use super::keeper::StoredSession;
use super::record::Record;
use crate::process::service_manager::{self, STORED_PREFIX};
use crate::spec::{DeviceSpec, ExportSpec};

/// The session of a front-end that was connected when its daemon was killed. Dropping it
/// disconnects the front-end, unless a keeper has the session again.
pub(crate) struct KilledSession {
    /// The export at the time of its last record.
    pub(crate) export: ExportSpec,
    pub(crate) state: Option<SessionState>,
    pub(crate) fds: PassedFds,
    /// Its place in the store. `None`: only in tests.
    pub(crate) kept: Option<StoredSession>,
}

impl KilledSession {
    #[cfg(test)]
    pub(super) fn new(export: ExportSpec, state: SessionState) -> Self {
        Self { export, state: Some(state), fds: PassedFds::default(), kept: None }
    }

    /// The reason why this export cannot continue the session.
    pub(super) fn difference(&self, export: &ExportSpec) -> Option<String> {
        let before = &self.export;
        if before.endpoint != export.endpoint {
            return Some(format!("its socket was {}", before.endpoint));
        }
        let is_other_disk = match (&before.device, &export.device) {
            (DeviceSpec::Blk(before), DeviceSpec::Blk(now)) => before != now,
            (DeviceSpec::Scsi(before), DeviceSpec::Scsi(now)) => before.iter().any(|unit| {
                now.iter().any(|other| other.place() == unit.place() && other.disk != unit.disk)
            }),
            _ => return Some("the export has another kind of device now".to_owned()),
        };
        is_other_disk
            .then(|| format!("the export has another disk now; it was {}", before.summary()))
    }
}

/// Finds the sessions among the descriptors that the manager has passed, the newest first.
pub(super) fn sessions(passed: Vec<(String, OwnedFd)>) -> Vec<KilledSession> {
    let mut stashes: BTreeMap<u64, (String, Vec<OwnedFd>)> = BTreeMap::new();
    for (name, fd) in passed {
        let number = number_of(&name).unwrap_or_default();
        stashes.entry(number).or_insert((name, Vec::new())).1.push(fd);
    }
    let session = |(name, ends): (String, Vec<OwnedFd>)| {
        let found = session(&name, ends).inspect_err(|error| {
            tracing::warn!(
                "a front-end of the killed daemon is disconnected: {error} (its descriptors were \
                 stored as {name})"
            );
            service_manager::forget(&name);
        });
        found.ok().flatten()
    };
    stashes.into_values().rev().filter_map(session).collect()
}

/// The number in the name of a stash.
pub(super) fn number_of(name: &str) -> Option<u64> {
    name.strip_prefix(STORED_PREFIX)?.parse().ok()
}

/// Opens a stash. `None`: its session was not kept yet.
fn session(name: &str, ends: Vec<OwnedFd>) -> io::Result<Option<KilledSession>> {
    let (kept, files) = StoredSession::open(name.to_owned(), ends)?;
    let Some(Record { export, session, descriptors }) = kept.read()? else { return Ok(None) };
    let fd = |number| {
        let file = files.get(number).ok_or_else(|| io::Error::other("a descriptor is missing"))?;
        file.try_clone()
    };
    let fds = descriptors.iter().map(fd).collect::<io::Result<Vec<_>>>()?;
    let fds = PassedFds::new(vec![String::new(); fds.len()], fds);
    Ok(Some(KilledSession { export, state: Some(session), fds, kept: Some(kept) }))
}
