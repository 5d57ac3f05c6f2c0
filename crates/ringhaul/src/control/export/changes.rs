//! Changes of an export's disks: addition, removal, size, limits and error policy.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use blockio::DiskSource;
use device::Device;
use disks::open::CancelToken;

use super::Export;
use crate::control::disk_change::{DiskChange, DiskChangeKind};
use crate::control::guest_turns::GuestTurns;
use crate::control::order::{Answered, ChangingUnit, ResizingDisk, UnitChange, WatchedDisk};
use crate::control::subscribers::EventDetails;
use crate::spec::command::{CommandError, ExportState};
use crate::spec::qos::{FullQosSpec, QosChange, QosSpec};
use crate::spec::{DeviceSpec, UnitPlace, UnitSpec};

impl Export {
    /// Begins to change a logical unit.
    pub(in crate::control) fn begin_unit(
        &mut self,
        place: UnitPlace,
        change: UnitChange,
    ) -> Answered<ChangingUnit> {
        let (name, state) = (self.spec.name(), self.state());
        let busy = self.changing.iter().find(|other| other.place == Some(place));
        let (Device::Scsi(device), DeviceSpec::Scsi(units)) =
            (&self.setup.device, &mut self.spec.device)
        else {
            return Err(CommandError::NoUnits(name));
        };
        if state != ExportState::Serving {
            return Err(CommandError::Busy(name, state));
        }
        match (busy, change) {
            // A unit whose disk is open is about to be added: too late to cancel it.
            (Some(busy), UnitChange::Remove) if busy.adds() && !busy.blocks_hand_over => {
                busy.cancel_addition();
                return Err(CommandError::UnitBeingCancelled(name, place));
            }
            (Some(_), _) => return Err(CommandError::UnitBusy(name, place)),
            (None, _) => {}
        }
        let index = units.iter().position(|unit| unit.place() == place);
        let removed = match (change, index) {
            (UnitChange::Add, None) => None,
            (UnitChange::Add, Some(_)) => return Err(CommandError::UnitExists(name, place)),
            (UnitChange::Remove, Some(index)) => {
                units.remove(index);
                Some(self.disks.remove(index))
            }
            (UnitChange::Remove, None) => return Err(CommandError::UnknownUnit(name, place)),
        };
        let device = device.clone();
        if removed.is_some() {
            self.keep_units();
        }
        let cancel_token = CancelToken::default();
        let (kind, blocks_hand_over) = match change {
            UnitChange::Add => (DiskChangeKind::Adding(cancel_token.clone()), false),
            UnitChange::Remove => (DiskChangeKind::Removing, true),
        };
        self.changing.push(DiskChange { place: Some(place), kind, blocks_hand_over });
        let mut settings = self.spec.settings.clone();
        // The limits in the settings are from the start, and the group's may have changed since.
        self.groups.fill(&mut settings.rules.limits);
        let endpoint = self.spec.endpoint.clone();
        let log_name = self.log.name().to_owned();
        Ok(ChangingUnit {
            id: self.id(),
            name,
            log_name,
            device,
            settings,
            endpoint,
            cancel_token,
            removed,
            turns: self.turns.clone(),
        })
    }

    /// Blocks or allows hand-overs during the change at this place. Returns false if the change was
    /// cancelled.
    pub(in crate::control) fn block_hand_over(
        &mut self,
        place: Option<UnitPlace>,
        blocks_hand_over: bool,
    ) -> bool {
        let mut changing = self.changing.iter_mut();
        let changing = changing.find(|other| other.place == place).expect("its place is kept");
        changing.blocks_hand_over = blocks_hand_over;
        changing.is_active()
    }

    fn is_changing(&self, place: Option<UnitPlace>) -> bool {
        self.changing.iter().any(|other| other.place == place)
    }

    /// Begins to change the size of a disk.
    pub(in crate::control) fn begin_resize(
        &mut self,
        place: Option<UnitPlace>,
    ) -> Answered<ResizingDisk> {
        let (name, state) = (self.spec.name(), self.state());
        if state != ExportState::Serving {
            return Err(CommandError::Busy(name, state));
        }
        let index = self.index_of(place)?;
        match place {
            _ if !self.is_changing(place) => {}
            Some(place) => return Err(CommandError::UnitBusy(name, place)),
            None => return Err(CommandError::DiskBusy(name)),
        }
        let (device, disk) = (self.setup.device.clone(), self.disks[index].clone());
        let (identity, is_local) = (disk.identity().to_owned(), disk.has_engine());
        let kind = DiskChangeKind::Resizing { identity, is_local };
        self.changing.push(DiskChange { place, kind, blocks_hand_over: true });
        let log_name = self.log.name().to_owned();
        Ok(ResizingDisk { id: self.id(), log_name, device, disk, turns: self.turns.clone() })
    }

    /// The turns of its guests, whose state moves with them.
    pub(in crate::control) fn guest_turns(&self) -> Answered<Arc<GuestTurns>> {
        let (name, state) = (self.spec.name(), self.state());
        if state != ExportState::Serving {
            return Err(CommandError::Busy(name, state));
        }
        match (&self.setup.device, &self.turns) {
            (Device::Blk(_), _) => Err(CommandError::NoUnits(name)),
            (Device::Scsi(_), None) => Err(CommandError::NoTurns(name)),
            (Device::Scsi(_), Some(turns)) => Ok(Arc::clone(turns)),
        }
    }

    /// The disks that this process releases when another one has taken over. A lock that stays
    /// after a loss of data, and that no front-end uses, is not released.
    pub(in crate::control) fn disks_to_release(&self) -> Vec<DiskSource> {
        let is_idle = self.turns.as_ref().is_some_and(|turns| !turns.locks().are_held());
        let stays = |disk: &&DiskSource| is_idle && disk.hand_over().loss().is_some();
        self.disks.iter().filter(|disk| !stays(disk)).cloned().collect()
    }

    /// The index of the disk at this place.
    fn index_of(&self, place: Option<UnitPlace>) -> Answered<usize> {
        let name = || self.spec.name();
        match (&self.spec.device, place) {
            (DeviceSpec::Blk(_), None) => Ok(0),
            (DeviceSpec::Blk(_), Some(_)) => Err(CommandError::NoUnits(name())),
            (DeviceSpec::Scsi(_), None) => Err(CommandError::NoDisk(name())),
            (DeviceSpec::Scsi(units), Some(place)) => {
                let index = units.iter().position(|unit| unit.place() == place);
                index.ok_or_else(|| CommandError::UnknownUnit(name(), place))
            }
        }
    }

    /// The disk at a place, or all of them.
    pub(in crate::control) fn disks_at(
        &self,
        place: Option<UnitPlace>,
    ) -> Answered<Vec<DiskSource>> {
        match place {
            None => Ok(self.disks.clone()),
            Some(_) => Ok(vec![self.disks[self.index_of(place)?].clone()]),
        }
    }

    /// Changes the limits and the error policy of a disk. Returns the rules that hold now, and the
    /// export's name in the log.
    pub(in crate::control) fn set_rules(
        &mut self,
        place: Option<UnitPlace>,
        change: &QosChange,
    ) -> Answered<(FullQosSpec, String)> {
        let index = self.index_of(place)?;
        let log_name = self.log.name().to_owned();
        if change.is_empty() {
            return Ok((self.rules(index).into(), log_name));
        }
        let rules = self.rules(index).with_change(change);
        let name = self.spec.name();
        let wrong = || format!("cannot change the disk of {name}");
        rules.check().with_context(wrong).map_err(CommandError::Invalid)?;
        self.groups.apply_change(&self.disks[index], &rules, change).with_context(wrong)?;
        match &mut self.spec.device {
            DeviceSpec::Blk(_) => self.spec.settings.rules = rules,
            DeviceSpec::Scsi(units) => {
                units[index].settings.set_rules(&rules, &self.spec.settings.rules);
            }
        }
        Ok((self.rules(index).into(), log_name))
    }

    /// The rules that hold for one of its disks.
    pub(super) fn rules(&self, index: usize) -> QosSpec {
        let usual = &self.spec.settings.rules;
        let mut rules = match &self.spec.device {
            DeviceSpec::Blk(_) => usual.clone(),
            DeviceSpec::Scsi(units) => units[index].settings.rules(usual),
        };
        self.groups.fill(&mut rules.limits);
        rules
    }

    /// Adds a logical unit, as requested at `asked`. Returns its disk if the export has ended.
    pub(in crate::control) fn add_unit(
        &mut self,
        unit: UnitSpec,
        disk: DiskSource,
        asked: Instant,
    ) -> Option<DiskSource> {
        let has_ended = self.has_ended();
        let DeviceSpec::Scsi(units) = &mut self.spec.device else { return Some(disk) };
        if has_ended {
            return Some(disk);
        }
        self.log.report(|| EventDetails::LunAdded { unit: unit.place() });
        if unit.settings.names_limits() {
            let mut usual = self.spec.settings.rules.clone();
            self.groups.fill(&mut usual.limits);
            self.groups.apply_group_limits(&unit.settings.rules(&usual).limits, asked);
        }
        units.push(unit);
        self.disks.push(disk);
        self.keep_units();
        None
    }

    pub(in crate::control) fn report_removed(&self, place: Option<UnitPlace>) {
        if let Some(unit) = place {
            self.log.report(|| EventDetails::LunRemoved { unit });
        }
    }

    /// Reports the new size of the disk at a place. A virtio-scsi device notifies initiators
    /// itself.
    pub(in crate::control) fn report_size(&self, unit: Option<UnitPlace>) {
        if let Some(disk) = self.disk_at(unit) {
            disk.note_announcement();
            self.log.report(|| EventDetails::Resized { unit, size_bytes: disk.info().size_bytes });
        }
        if matches!(self.spec.device, DeviceSpec::Blk(_)) {
            self.notify_front_end();
        }
    }

    /// Reports a new size for all disks of this export with this identity, except the resized one:
    /// the export with number `id` has it at `place`.
    pub(in crate::control) fn report_size_of(
        &self,
        identity: &str,
        (id, place): (u64, Option<UnitPlace>),
    ) {
        for other in self.spec.device.places() {
            let is_it = self.disk_at(other).is_some_and(|disk| disk.identity() == identity);
            if is_it && (self.id(), other) != (id, place) {
                self.report_size(other);
            }
        }
    }

    /// Returns true if a disk of this identity changes its size.
    pub(in crate::control) fn resizes(&self, identity: &str) -> bool {
        self.changing.iter().any(|changing| changing.resizes(identity))
    }

    pub(in crate::control) fn disk_at(&self, place: Option<UnitPlace>) -> Option<&DiskSource> {
        let index = self.spec.device.places().iter().position(|other| *other == place)?;
        self.disks.get(index)
    }

    /// Notifies the front-end that the configuration space has changed.
    fn notify_front_end(&self) {
        if self.session.as_ref().is_some_and(|session| !session.send_config_change()) {
            tracing::warn!(
                export = self.log.name(),
                "the front-end does not support notifications of a new size: the guest sees it \
                 after a restart, or after a command of the VMM (Firecracker: PATCH /drives)"
            );
        }
    }

    /// Describes its disks, to be watched.
    pub(in crate::control) fn watched_disks(&self) -> Vec<WatchedDisk> {
        let watched = |(place, disk): (Option<UnitPlace>, &DiskSource)| {
            let (export, size_bytes) = (self.spec.name(), disk.announced_bytes());
            let (waited, trouble) = disk.retry_totals();
            WatchedDisk {
                export,
                place,
                size_probe: disk.size_probe(),
                size_bytes,
                is_remote: disk.is_remote(),
                state: disk.state(),
                waiting: disk.retry_state(),
                loss: disk.hand_over().loss(),
                waited,
                trouble,
            }
        };
        self.spec.device.places().into_iter().zip(&self.disks).map(watched).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use blockio::DiskOptions;
    use serde_json::json;

    use super::*;
    use crate::control::export::tests::{Scene, run, scsi_export};
    use crate::control::export_log::ExportLog;
    use crate::control::subscribers::{EventReceiver, Subscribers, Subscription};
    use crate::socket::Endpoint;
    use crate::testing::LogCapture;

    fn place(lun: u16) -> UnitPlace {
        UnitPlace { target: 0, lun }
    }

    /// A scene whose events are received.
    fn scene() -> (Scene, UnixStream, (Subscription, EventReceiver)) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut scene = Scene::new(Endpoint::Connection(ours));
        let subscribers = Subscribers::default();
        let queue = subscribers.subscribe();
        let log = ExportLog::new("test").with_subscribers(subscribers);
        scene.setup.as_mut().unwrap().log = Arc::new(log);
        (scene, theirs, queue)
    }

    fn null(size_bytes: u64) -> DiskSource {
        DiskSource::null(size_bytes, &DiskOptions::default()).unwrap()
    }

    #[test]
    fn a_command_is_about_the_disk_at_its_place() {
        let (mut scene, _front_end, _) = scene();
        let mut export = scsi_export(&mut scene);
        export.disks = vec![null(512), null(1024)];
        let limits = |limits| QosChange {
            limits: Some(serde_json::from_value(limits).unwrap()),
            ..QosChange::default()
        };
        export.set_rules(Some(place(1)), &limits(json!({ "iops-total": 7 }))).map(drop).unwrap();
        let limited = export.disks.iter().map(|disk| disk.limits().requests.total.is_some());
        assert_eq!(limited.collect::<Vec<_>>(), [false, true]);
        let spec = export.spec.clone();
        for (lun, iops) in [(0, None), (1, Some(7))] {
            let (rules, _) = export.set_rules(Some(place(lun)), &QosChange::default()).unwrap();
            assert_eq!(rules.limits.iops_total, iops);
        }
        assert_eq!(export.spec, spec, "a query changes nothing");
        let sizes = |export: &Export, place| {
            let disks = export.disks_at(place).unwrap();
            disks.iter().map(|disk| disk.info().size_bytes).collect::<Vec<_>>()
        };
        assert_eq!(sizes(&export, Some(place(1))), [1024]);
        assert_eq!(sizes(&export, None), [512, 1024]);
    }

    #[test]
    fn turns_are_of_serving_virtio_scsi_devices_with_late_locks() {
        use CommandError as E;
        let (mut scene, _front_end, _) = scene();
        assert!(matches!(scene.export().guest_turns(), Err(E::NoUnits(_))));
        let (mut scene, _front_end, _) = self::scene();
        let mut export = scsi_export(&mut scene);
        assert!(matches!(export.guest_turns(), Err(E::NoTurns(_))));
        let turns = GuestTurns::new(export.setup.device.clone(), Arc::default());
        export.turns = Some(Arc::new(turns));
        assert!(export.guest_turns().is_ok());
        export.begin_stop();
        assert!(matches!(export.guest_turns(), Err(E::Busy(..))));
    }

    /// A takeover waits no longer than a change needs, and force waits for local files.
    #[test]
    fn a_change_blocks_takeovers_until_it_is_told_otherwise() {
        let (mut scene, _front_end, _) = scene();
        let mut export = scsi_export(&mut scene);
        export.begin_unit(place(0), UnitChange::Remove).map(drop).unwrap();
        for blocks in [true, false] {
            assert!(export.block_hand_over(Some(place(0)), blocks), "it is not cancelled");
            assert_eq!(export.changing[0].blocks_hand_over, blocks);
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let local = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
        for (disk, is_local) in [(local, true), (null(512), false)] {
            (export.changing, export.disks) = (Vec::new(), vec![disk]);
            export.begin_resize(Some(place(1))).map(drop).unwrap();
            assert_eq!(export.changing[0].changes_file(), is_local);
        }
    }

    #[test]
    fn subscribers_learn_of_units_and_of_each_new_size_once() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let options = DiskOptions { no_lock: true, ..DiskOptions::default() };
        let open = || DiskSource::file(file.path(), &options).unwrap();
        let (mut scene, _front_end, (_subscription, queue)) = scene();
        let mut export = scsi_export(&mut scene);
        export.disks = vec![open(), null(512)];
        let unit = json!({ "lun": 2, "disk": "/disk" });
        let unit = serde_json::from_value(unit).unwrap();
        assert!(export.add_unit(unit, open(), Instant::now()).is_none());
        let events = || queue.events.try_iter().map(|event| event.details.clone());
        assert!(events().eq([EventDetails::LunAdded { unit: place(2) }]));
        export.report_removed(Some(place(1)));
        assert!(events().eq([EventDetails::LunRemoved { unit: place(1) }]));
        let resized = |lun| EventDetails::Resized { unit: Some(place(lun)), size_bytes: 4096 };
        export.report_size(Some(place(0)));
        assert!(events().eq([resized(0)]));
        let (identity, id) = (export.disks[0].identity().to_owned(), export.id());
        export.report_size_of(&identity, (id, Some(place(0))));
        assert!(events().eq([resized(2)]), "the command reports its own place");
        export.report_size_of(&identity, (id + 1, Some(place(0))));
        assert!(events().eq([resized(0), resized(2)]), "another export has it there, too");
    }

    #[test]
    fn the_log_says_that_a_guest_cannot_learn_of_a_new_size() {
        let (mut scene, _front_end, _) = scene();
        let mut export = scene.export();
        let is_said = |export: &Export| {
            let lines = LogCapture::lines_of(|| export.report_size(None));
            lines.iter().any(|line| line.contains("does not support notifications"))
        };
        assert!(!is_said(&export), "there is no front-end");
        run(&mut export);
        assert!(is_said(&export));
    }

    /// Such facts are reported to subscribers.
    #[test]
    fn the_watch_of_disks_has_their_state_and_their_loss() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let disk = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
        disk.hand_over().inherit(Some(libc::EIO), false);
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let export = Scene::on(disk, Endpoint::Connection(ours)).export();
        let watched = export.watched_disks();
        assert_eq!((watched[0].loss, watched[0].place), (Some(libc::EIO), None));
        assert_eq!(watched[0].state, blockio::disk::DiskState::Lost);
        assert!(watched[0].size_probe.is_some());
    }
}
