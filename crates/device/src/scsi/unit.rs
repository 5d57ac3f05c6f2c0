//! A logical unit: a disk as seen by initiators.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockio::DiskSource;
use blockio::disk::DiskInfo;
use blockio::executor::Lock;

use crate::access::DiskAccess;
use crate::access::persist::{Attached, PortInUse, PortName};
use crate::access::sense::{Format, Sense};
use crate::unit_address::{UnitAddress, UnitNumber};

/// The most pending attentions. A driver that never reads them loses the oldest.
pub(crate) const ATTENTIONS_MAX: usize = 16;

/// The most bytes of a serial number.
pub const SERIAL_BYTES: usize = 36;

/// The most bytes of a vendor identification.
pub const VENDOR_BYTES: usize = 8;

/// The most bytes of a product identification.
pub const PRODUCT_BYTES: usize = 16;

/// The most bytes of a product revision.
pub const REVISION_BYTES: usize = 4;

/// Identifiers of a unit in its vital product data, from which guests derive disk names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Identifiers {
    /// NAA, and the T10 vendor identification with the serial number. udev names the disk
    /// `scsi-3` and the NAA identifier.
    #[default]
    Standard,
    /// The serial number as a vendor-specific identifier. udev names the disk
    /// `scsi-0VENDOR_PRODUCT_SERIAL`.
    VendorSpecific,
    /// Like `VendorSpecific`, behind an NAA identifier, which udev prefers.
    VendorSpecificAndNaa,
}

/// The operator's options for a logical unit.
#[derive(Clone)]
pub struct UnitOptions {
    /// T10 vendor identification, up to 8 bytes of ASCII.
    pub vendor: String,
    /// Product identification, up to 16 bytes of ASCII.
    pub product: String,
    /// Product revision, up to 4 bytes of ASCII.
    pub revision: String,
    /// Unit serial number, up to 36 bytes of ASCII. Must be the same on all paths to the disk,
    /// always.
    pub serial: String,
    /// An NAA identifier (SPC-5, section 7.7.6.6), unique to the disk. Units with equal identifiers
    /// must be on one disk, even if guests do not see the identifier.
    pub naa: [u8; 8],
    /// The identifiers that guests see.
    pub identifiers: Identifiers,
    /// If true, START STOP UNIT stops the unit for all sharers of its disk; otherwise a stop only
    /// flushes.
    pub obeys_stop: bool,
    /// True if the medium rotates: guests then sort their requests.
    pub rotational: bool,
    /// True if UNMAP and WRITE SAME can deallocate blocks.
    pub discard: bool,
    /// True if the initiator sees a write cache, which it has to flush.
    pub write_cache: bool,
    /// The state shared with other units on the same disk.
    pub access: Arc<DiskAccess>,
    /// The name of the port through which its initiator reaches the disk: an NAA identifier,
    /// permanent and unique to the unit. Persistent reservations are kept under this name.
    pub port: [u8; 8],
}

/// A logical unit, shared by all queues of its device.
pub(crate) struct Unit {
    pub(crate) address: UnitAddress,
    pub(crate) number: UnitNumber,
    pub(crate) source: DiskSource,
    pub(crate) options: UnitOptions,
    /// The state shared with other units on the disk.
    pub(crate) access: Arc<DiskAccess>,
    /// Its I_T nexus.
    pub(crate) attached: Attached,
    pub(crate) attentions: Arc<Attentions>,
}

/// Unit attentions that an initiator must receive first. Other threads add attentions without
/// holding the disk.
#[derive(Default)]
pub(crate) struct Attentions {
    waiting: Lock<VecDeque<Sense>>,
    count: AtomicUsize,
}

impl UnitOptions {
    /// A unit with these names, on a disk of its own: it has a write cache, deallocates blocks,
    /// obeys stops, and has no texts.
    pub fn new(naa: [u8; 8], port: [u8; 8]) -> Self {
        Self {
            vendor: String::new(),
            product: String::new(),
            revision: String::new(),
            serial: String::new(),
            naa,
            identifiers: Identifiers::Standard,
            obeys_stop: true,
            rotational: false,
            discard: true,
            write_cache: true,
            access: Arc::default(),
            port,
        }
    }

    /// Fails with a message if a text is too long or not printable ASCII.
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

    /// True if initiators would take the unit for another path to the disk of `other`, although the
    /// disks differ.
    pub(crate) fn has_identity_conflict(&self, other: &Self) -> bool {
        self.options.naa == other.options.naa && self.source.identity() != other.source.identity()
    }

    pub(crate) fn info(&self) -> DiskInfo {
        self.source.info()
    }

    /// Prepares for another driver. The unit returns to its initial state, unless other units use
    /// the disk.
    pub(crate) fn restart(&self) {
        if self.access.is_alone(self.attached.nexus()) {
            self.access.reset();
        }
        self.attentions.add(Sense::POWER_ON);
    }

    /// True if a write may be answered before it is on stable storage.
    #[inline]
    pub(crate) fn has_write_cache(&self) -> bool {
        self.options.write_cache && !self.access.cache_is_off()
    }

    /// Switches the write cache, with which the unit must have been set up.
    pub(crate) fn set_write_cache(&self, on: bool) {
        assert!(self.options.write_cache, "MODE SELECT checks that");
        self.access.set_cache_off(!on);
    }

    /// The sense data format that initiators have chosen.
    pub(crate) fn sense_format(&self) -> Format {
        if self.access.has_descriptor_sense() { Format::Descriptor } else { Format::Fixed }
    }

    /// True if blocks can be deallocated. Also true for a write-protected medium, which is thin
    /// either way.
    pub(crate) fn can_unmap(&self) -> bool {
        self.options.discard
    }
}

impl Attentions {
    /// Adds an attention.
    pub(crate) fn add(&self, sense: Sense) {
        let mut waiting = self.waiting.lock();
        // A reset covers all other attentions (SAM-6, section 5.14.1).
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
            // A nexus loss comes first except for resets, and covers nothing.
            let resets = waiting.iter().take_while(|other| other.is_reset()).count();
            waiting.insert(resets, sense);
        } else {
            waiting.push_back(sense);
        }
        self.count.store(waiting.len(), Ordering::Relaxed);
    }

    /// True if an attention is pending.
    #[inline]
    pub(crate) fn has_any(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Takes the first attention, which counts as delivered.
    pub(crate) fn take(&self) -> Option<Sense> {
        let mut waiting = self.waiting.lock();
        let sense = waiting.pop_front();
        self.count.store(waiting.len(), Ordering::Relaxed);
        sense
    }

    /// Puts back an attention that was not delivered after all, as the first one. All other
    /// attentions stay. A reset that arrived in the meantime covers it.
    pub(crate) fn put_back(&self, sense: Sense) {
        let mut waiting = self.waiting.lock();
        let is_covered = waiting.contains(&sense) || waiting.iter().any(|other| other.is_reset());
        if !is_covered && waiting.len() < ATTENTIONS_MAX {
            waiting.push_front(sense);
        }
        self.count.store(waiting.len(), Ordering::Relaxed);
    }

    /// The codes of all pending attentions.
    pub(crate) fn pending_codes(&self) -> Vec<[u8; 2]> {
        self.waiting.lock().iter().map(|sense| sense.code).collect()
    }

    /// Replaces all attentions by the codes of another process.
    pub(crate) fn take_over(&self, codes: &[[u8; 2]]) {
        let mut waiting = self.waiting.lock();
        *waiting = codes.iter().map(|code| Sense::attention(*code)).collect();
        self.count.store(waiting.len(), Ordering::Relaxed);
    }

    /// Removes an attention that the initiator learned of in another way.
    pub(crate) fn remove(&self, sense: Sense) {
        let mut waiting = self.waiting.lock();
        waiting.retain(|other| *other != sense);
        self.count.store(waiting.len(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reset_covers_an_attention_that_comes_back() {
        let (earlier, later) = (Sense::attention([0x2a, 0x01]), Sense::attention([0x2a, 0x09]));
        let attentions = Attentions::default();
        attentions.add(earlier);
        attentions.add(later);
        let taken = attentions.take().unwrap();
        attentions.put_back(taken);
        assert_eq!(attentions.pending_codes(), [earlier.code, later.code]);
        let taken = attentions.take().unwrap();
        attentions.add(Sense::POWER_ON);
        attentions.put_back(taken);
        assert_eq!(attentions.pending_codes(), [Sense::POWER_ON.code]);
    }

    #[test]
    fn an_attention_that_comes_back_and_is_there_again_comes_once() {
        let (sense, later) = (Sense::MODE_CHANGED, Sense::CAPACITY_CHANGED);
        let attentions = Attentions::default();
        attentions.add(sense);
        let taken = attentions.take().unwrap();
        attentions.add(later);
        attentions.add(sense);
        attentions.put_back(taken);
        assert_eq!(attentions.pending_codes(), [later.code, sense.code]);
    }

    #[test]
    fn an_attention_that_comes_back_to_a_full_list_is_the_oldest() {
        let attentions = Attentions::default();
        let of = |number: usize| Sense::attention([0x3f, u8::try_from(number).unwrap()]);
        attentions.add(of(0));
        let taken = attentions.take().unwrap();
        (1..=ATTENTIONS_MAX).for_each(|number| attentions.add(of(number)));
        attentions.put_back(taken);
        assert_eq!(attentions.pending_codes().len(), ATTENTIONS_MAX);
        assert_eq!(attentions.take(), Some(of(1)));
    }
}
