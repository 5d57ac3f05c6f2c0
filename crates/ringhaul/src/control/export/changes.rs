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
