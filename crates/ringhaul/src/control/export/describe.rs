//! The details and the counters of an export.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::{Duration, Instant};

use blockio::DiskSource;
use blockio::disk::WaitTimes;
use device::Device;
use device::unit_address::UnitAddress;
use vhost_user::Session;

use super::Export;
use crate::control::hand_over_state::ExportCounters;
use crate::socket::peer::Peer;
use crate::spec::UnitPlace;
use crate::spec::command::StatsReader;
use crate::spec::qos::QosSpec;
use crate::spec::stats::{ExportStats, OperationStats, QueueServed};
use crate::spec::status::{DiskDetails, ExportDetails, FrontEndDetails, MissingUnit};

impl Export {
    /// Describes the export in detail.
    pub(in crate::control) fn details(&self, now: Instant) -> ExportDetails {
        let front_end = self.session.as_ref().map(|session| FrontEndDetails {
            connected_seconds: now.saturating_duration_since(self.connected).as_secs(),
            peer: Peer::from_socket(session).ok(),
            session: session.describe(),
        });
        let disks = self.spec.device.places().into_iter().zip(&self.disks).enumerate();
        let disks = disks.map(|(index, (place, disk))| describe(place, disk, self.rules(index)));
        let disks = disks.collect();
        let missing_units = match &self.setup.device {
            Device::Scsi(device) => device.held_requests().into_iter().map(missing).collect(),
            Device::Blk(_) => Vec::new(),
        };
        ExportDetails { status: self.status(), front_end, disks, missing_units }
    }

    /// The export's counters so far.
    pub(in crate::control) fn stats(&mut self, reader: StatsReader) -> ExportStats {
        let ExportCounters { throttled_ns, retried_ns, held_ns, queues } = self.counters();
        let device = &self.setup.device;
        let load = self.session.as_ref().map(Session::load);
        let (depth, deepest) = load.map_or((0, 0), |load| (load.requests(), load.deepest()));
        let taken = device.take_peaks();
        self.peaks.iter_mut().for_each(|peaks| peaks.include(taken));
        let peaks = std::mem::take(&mut self.peaks[reader as usize]);
        ExportStats {
            name: self.spec.name(),
            served: self.served(),
            operations: OperationStats::all(&device.totals(), peaks.longest_ns),
            depth: depth.into(),
            depth_peak: peaks.depth.max(deepest.into()),
            throttled_ns,
            retried_ns,
            held_ns,
            queues,
        }
    }

    /// The counters of this process and of earlier ones, except the totals of requests.
    pub(in crate::control) fn counters(&self) -> ExportCounters {
        let device = &self.setup.device;
        let started = (0..device.num_queues()).filter_map(|index| {
            Some((index, QueueServed::new(index, &*device.queue_stats(index)?)))
        });
        let mut queues: BTreeMap<u16, QueueServed> = started.collect();
        for earlier in &self.earlier.queues {
            match queues.entry(earlier.index) {
                Entry::Occupied(mut queue) => *queue.get_mut() += earlier,
                Entry::Vacant(place) => drop(place.insert(earlier.clone())),
            }
        }
        ExportCounters {
            throttled_ns: self.earlier.throttled_ns + self.waited_ns(|times| times.throttled),
            retried_ns: self.earlier.retried_ns + self.waited_ns(|times| times.retried),
            held_ns: self.earlier.held_ns + self.waited_ns(|times| times.held),
            queues: queues.into_values().collect(),
        }
    }

    /// The sum of one of the wait times of all disks.
    fn waited_ns(&self, which: fn(WaitTimes) -> Duration) -> u64 {
        let sum: Duration = self.disks.iter().map(|disk| which(disk.wait_times())).sum();
        u64::try_from(sum.as_nanos()).unwrap_or(u64::MAX)
    }
}

fn missing((UnitAddress { target, lun }, waiting_requests): (UnitAddress, usize)) -> MissingUnit {
    MissingUnit { unit: UnitPlace { target, lun }, waiting_requests }
}

fn describe(place: Option<UnitPlace>, disk: &DiskSource, rules: QosSpec) -> DiskDetails {
    let info = disk.info();
    let engine = disk.preference().filter(|_| disk.has_engine());
    DiskDetails {
        place,
        size_bytes: info.size_bytes,
        logical_block_bytes: info.logical_block_bytes,
        direct: info.direct,
        read_only: info.read_only,
        state: disk.state().into(),
        state_seconds: disk.state_since().map(|since| since.elapsed().as_secs()),
        waiting: disk.retry_state().map(Into::into),
        remark: disk.remark(),
        warning: disk.warning(),
        waited: disk.retry_totals().0,
        rules: rules.into(),
        chain: disk.chain().iter().map(ToString::to_string).collect(),
        device_number: disk.device_number(),
        engine: engine.map(|(engine, _)| engine.to_string()),
        engine_reason: engine.map(|(_, reason)| reason.to_owned()),
    }
}
