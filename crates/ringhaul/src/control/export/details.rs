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
use crate::process::peer::Peer;
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
            kept: self.kept.is_kept(),
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use blockio::testing::RemoteStub;
    use blockio::{DiskOptions, EngineKind};
    use device::Peaks;
    use serde_json::json;

    use super::*;
    use crate::control::export::tests::{Scene, run, scsi_export};
    use crate::control::order::UnitChange;
    use crate::socket::Endpoint;
    use crate::spec::DeviceSpec;

    fn scene() -> (Scene, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Scene::new(Endpoint::Connection(ours)), theirs)
    }

    #[test]
    fn the_details_are_of_each_disk_at_its_place() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, [b"QFI\xfb".as_slice(), &[0; 16380]].concat()).unwrap();
        let options = DiskOptions {
            no_lock: true,
            read_only: true,
            logical_block_bytes: Some(4096),
            ..DiskOptions::default()
        };
        let lost = DiskSource::file(file.path(), &options).unwrap();
        lost.detect_format();
        lost.hand_over().inherit(Some(libc::EIO), false);
        let remote = RemoteStub::new(&[0; 8192]);
        remote.set_away(true);
        let null = DiskSource::null(512, &DiskOptions::default()).unwrap();
        let (mut scene, _front_end) = scene();
        let mut export = scsi_export(&mut scene);
        run(&mut export);
        export.begin_unit(UnitPlace { target: 0, lun: 1 }, UnitChange::Remove).map(drop).unwrap();
        export.changing.clear();
        let prefer = |disk: DiskSource| disk.prefer_engine(EngineKind::Threads, "a reason");
        export.disks.clear();
        for (lun, disk) in [(2, null), (3, lost), (4, remote.source())] {
            let unit = json!({ "target": 5, "lun": lun, "disk": "/disk",
                "settings": { "limits": { "iops-total": lun } } });
            let unit = serde_json::from_value(unit).unwrap();
            assert!(export.add_unit(unit, prefer(disk), Instant::now()).is_none());
        }
        let DeviceSpec::Scsi(units) = &mut export.spec.device else { unreachable!("it has units") };
        units.remove(0);
        let now = Instant::now();
        export.connected = now.checked_sub(Duration::from_secs(1000)).unwrap();
        let details = serde_json::to_value(export.details(now)).unwrap();
        let front_end = &details["front-end"];
        assert_eq!(front_end["connected-seconds"], 1000);
        assert_eq!(front_end["peer"]["pid"], std::process::id());
        assert_eq!(details["disk-state"], "lost", "the worst one");
        let device = export.disks[1].device_number();
        let expected = json!([
            { "target": 5, "lun": 2, "size-bytes": 512, "logical-block-bytes": 512,
              "direct": false, "read-only": false, "state": "ready", "waited": 0,
              "limits": { "iops-total": 2 }, "rerror": "report", "werror": "hold-briefly",
              "chain": ["null"], "engine": null, "engine-reason": null },
            { "target": 5, "lun": 3, "size-bytes": 16384, "logical-block-bytes": 4096,
              "direct": false, "read-only": true, "state": "lost", "waited": 0,
              "limits": { "iops-total": 3 }, "rerror": "report", "werror": "hold-briefly",
              "warning": export.disks[1].warning().unwrap(), "device-number": device.unwrap(),
              "chain": [format!("file {}", file.path().display())],
              "engine": "threads", "engine-reason": "a reason" },
            { "target": 5, "lun": 4, "size-bytes": 8192, "logical-block-bytes": 512,
              "direct": false, "read-only": false, "state": "away", "state-seconds": 0,
              "remark": "0 jobs", "waited": 0,
              "limits": { "iops-total": 4 }, "rerror": "report", "werror": "hold-briefly",
              "chain": ["elsewhere thread"], "engine": null, "engine-reason": null },
        ]);
        assert_eq!(details["disks"], expected);
    }

    #[test]
    fn the_counters_are_sums_and_the_peaks_those_of_each_reader() {
        let (mut scene, _front_end) = scene();
        let mut export = scene.export();
        export.earlier = serde_json::from_value(json!({
            "throttled-ns": 1, "retried-ns": 2, "held-ns": 4, "queues": [],
        }))
        .unwrap();
        let peaks = |depth, longest_ns| Peaks { depth, longest_ns };
        export.peaks = [peaks(3, [1, 2, 3, 4, 5, 6]), peaks(5, [6, 5, 4, 3, 2, 1])];
        let mut read = |reader| {
            let stats = export.stats(reader);
            assert_eq!((stats.throttled_ns, stats.retried_ns, stats.held_ns), (1, 2, 4));
            let longest = stats.operations.iter().map(|of_kind| of_kind.latency_max_ns);
            (stats.depth_peak, longest.collect::<Vec<_>>())
        };
        assert_eq!(read(StatsReader::Control), (3, vec![1, 2, 3, 4, 5, 6]));
        assert_eq!(read(StatsReader::Control), (0, vec![0; 6]));
        assert_eq!(read(StatsReader::Monitoring), (5, vec![6, 5, 4, 3, 2, 1]));
    }
}
