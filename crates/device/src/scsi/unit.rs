//! A logical unit: a disk as initiators see it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blockio::DiskSource;
use blockio::disk::DiskInfo;

use super::access::DiskAccess;
use super::address::{UnitAddress, UnitNumber};
use super::persist::{Attached, PortInUse, PortName};
use super::sense::{Format, Sense};

/// Attentions that wait at most. A driver that never asks loses the oldest.
const ATTENTIONS_MAX: usize = 16;

/// Bytes of a serial number at most.
pub const SERIAL_BYTES: usize = 36;

/// Bytes of a vendor identification at most.
pub const VENDOR_BYTES: usize = 8;

/// Bytes of a product identification at most.
pub const PRODUCT_BYTES: usize = 16;

/// Bytes of a product revision at most.
pub const REVISION_BYTES: usize = 4;

/// Identifiers of a unit in its vital product data, from which guests make the names of its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Identifiers {
    /// NAA, and the T10 vendor identification with the serial number. udev names the disk
    /// `scsi-3` and the NAA identifier.
    #[default]
    Standard,
    /// The serial number as a vendor-specific identifier. udev names the disk
    /// `scsi-0VENDOR_PRODUCT_SERIAL`.
    VendorSpecific,
    /// The same, behind an NAA identifier, which udev prefers.
    VendorSpecificAndNaa,
}

/// What the operator chose for a logical unit.
#[derive(Clone)]
pub struct UnitOptions {
    /// T10 vendor identification, up to 8 bytes of ASCII.
    pub vendor: String,
    /// Product identification, up to 16 bytes of ASCII.
    pub product: String,
    /// Product revision, up to 4 bytes of ASCII.
    pub revision: String,
    /// Unit serial number, up to 36 bytes of ASCII. The same for all paths to the disk, always.
    pub serial: String,
    /// An NAA identifier (SPC-5, section 7.7.6.6) that no other disk has. Units with one identifier
    /// must be on one disk, even if guests do not see it.
    pub naa: [u8; 8],
    /// The identifiers that guests see.
    pub identifiers: Identifiers,
    /// Whether START STOP UNIT stops the unit, for all that share its disk; ignored otherwise.
    pub obeys_stop: bool,
    /// Whether the medium rotates: guests sort requests for it.
    pub rotational: bool,
    /// Whether blocks can be given back with UNMAP and WRITE SAME.
    pub discard: bool,
    /// Whether the initiator sees a write cache, which it has to flush.
    pub write_cache: bool,
    /// What it shares with other units on the same disk.
    pub access: Arc<DiskAccess>,
    /// The name of the port through which its initiator reaches the disk, always the same and no
    /// other unit's: an NAA identifier. Persistent reservations are kept by it.
    pub port: [u8; 8],
}

/// A logical unit, shared by all queues of its device.
pub(crate) struct Unit {
    pub(crate) address: UnitAddress,
    pub(crate) number: UnitNumber,
    pub(crate) source: DiskSource,
    pub(crate) options: UnitOptions,
    /// What it shares with other units on the disk.
    pub(crate) access: Arc<DiskAccess>,
    /// Its I_T nexus.
    pub(crate) attached: Attached,
    pub(crate) attentions: Arc<Attentions>,
}

/// What an initiator is to hear before anything else. Other threads add to it, and none of them
/// holds the disk for that.
#[derive(Default)]
pub(crate) struct Attentions {
    waiting: Mutex<VecDeque<Sense>>,
    count: AtomicUsize,
}

impl UnitOptions {
    /// What is wrong with the texts, if anything.
    pub(crate) fn check(&self) -> Result<(), String> {
        let texts = [
            ("vendor", &self.vendor, VENDOR_BYTES),
            ("product", &self.product, PRODUCT_BYTES),
            ("revision", &self.revision, REVISION_BYTES),
            ("serial number", &self.serial, SERIAL_BYTES),
        ];
        for (name, text, bytes) in texts {
            if text.len() > bytes || !text.bytes().all(|byte| (0x20..0x7f).contains(&byte)) {
                return Err(format!("{name} must be at most {bytes} bytes of printable ASCII"));
            }
        }
        Ok(())
    }
}

impl Unit {
    pub(crate) fn new(
        address: UnitAddress,
        source: DiskSource,
        options: UnitOptions,
    ) -> Result<Self, PortInUse> {
        let attached = options.access.attach(PortName(options.port))?;
        let unit = Self {
            address,
            number: UnitNumber::next(),
            source,
            access: Arc::clone(&options.access),
            attached,
            options,
            attentions: Arc::default(),
        };
        unit.attentions.add(Sense::POWER_ON);
        Ok(unit)
    }

    /// Whether initiators would hold it for another path to the disk of `other`, though it is on
    /// another disk.
    pub(crate) fn is_taken_for(&self, other: &Self) -> bool {
        self.options.naa == other.options.naa && self.source.identity() != other.source.identity()
    }

    pub(crate) fn info(&self) -> DiskInfo {
        self.source.info()
    }

    /// Another driver comes. It finds the unit as it was set up, unless others use it.
    pub(crate) fn restart(&self) {
        if self.access.is_alone(self.attached.nexus()) {
            self.access.reset();
        }
        self.attentions.add(Sense::POWER_ON);
    }

    /// Whether a write may be answered before it is on stable storage.
    #[inline]
    pub(crate) fn has_write_cache(&self) -> bool {
        self.options.write_cache && !self.access.cache_is_off()
    }

    /// Switches the cache, which a unit that was set up without one does not have.
    pub(crate) fn set_write_cache(&self, on: bool) {
        assert!(self.options.write_cache, "MODE SELECT checks that");
        self.access.set_cache_off(!on);
    }

    /// How initiators want sense data.
    pub(crate) fn sense_format(&self) -> Format {
        if self.access.has_descriptor_sense() { Format::Descriptor } else { Format::Fixed }
    }

    /// Whether blocks can be given back, unless the medium is write-protected: it is thin either
    /// way.
    pub(crate) fn can_unmap(&self) -> bool {
        self.options.discard
    }
}

impl Attentions {
    /// There is one more to hear.
    pub(crate) fn add(&self, sense: Sense) {
        let mut waiting = self.waiting();
        // A reset covers whatever else there is to say (SAM-6, section 5.14.1).
        if sense.is_reset() {
            waiting.clear();
        }
        if waiting.contains(&sense) {
            return;
        }
        if waiting.len() == ATTENTIONS_MAX {
            waiting.pop_front();
        }
        if sense.is_nexus_loss() {
            // It comes first but for resets, and covers nothing.
            let resets = waiting.iter().take_while(|other| other.is_reset()).count();
            waiting.insert(resets, sense);
        } else {
            waiting.push_back(sense);
        }
        self.count.store(waiting.len(), Ordering::Relaxed);
    }

    /// Whether one waits.
    #[inline]
    pub(crate) fn has_any(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// The first one, which then was heard.
    pub(crate) fn take(&self) -> Option<Sense> {
        let mut waiting = self.waiting();
        let sense = waiting.pop_front();
        self.count.store(waiting.len(), Ordering::Relaxed);
        sense
    }

    /// It was not heard after all, and is the first again. The others stay.
    pub(crate) fn put_back(&self, sense: Sense) {
        let mut waiting = self.waiting();
        if !waiting.contains(&sense) {
            waiting.push_front(sense);
        }
        self.count.store(waiting.len(), Ordering::Relaxed);
    }

    /// The codes of all that wait.
    pub(crate) fn codes(&self) -> Vec<[u8; 2]> {
        self.waiting().iter().map(|sense| sense.code).collect()
    }

    /// What another process had, in place of what there is.
    pub(crate) fn take_over(&self, codes: &[[u8; 2]]) {
        let mut waiting = self.waiting();
        *waiting = codes.iter().map(|code| Sense::attention(*code)).collect();
        self.count.store(waiting.len(), Ordering::Relaxed);
    }

    /// It was heard in another way.
    pub(crate) fn forget(&self, sense: Sense) {
        let mut waiting = self.waiting();
        waiting.retain(|other| *other != sense);
        self.count.store(waiting.len(), Ordering::Relaxed);
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<Sense>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
