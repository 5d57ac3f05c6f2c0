//! A logical unit: a disk as initiators see it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use blockio::DiskSource;
use blockio::disk::DiskInfo;

use super::access::DiskAccess;
use super::address::UnitAddress;
use super::persist::{Attached, PortInUse, PortName};
use super::sense::Sense;

/// Attentions that wait at most. A driver that never asks loses the oldest.
const ATTENTIONS_MAX: usize = 16;

/// Bytes of a serial number at most.
pub const SERIAL_BYTES: usize = 36;

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
    /// An NAA identifier (SPC-5, section 7.7.6.6) that no other disk has.
    pub naa: [u8; 8],
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
    pub(crate) source: DiskSource,
    pub(crate) options: UnitOptions,
    /// WCE of the caching mode page.
    write_cache: AtomicBool,
    /// STOP UNIT was the last that was heard.
    pub(crate) stopped: AtomicBool,
    /// What it shares with other units on the disk.
    pub(crate) access: Arc<DiskAccess>,
    /// Its I_T nexus.
    pub(crate) attached: Attached,
    /// What the initiator is to hear before anything else.
    attentions: Mutex<VecDeque<Sense>>,
    attention_count: AtomicUsize,
}

impl UnitOptions {
    /// What is wrong with the texts, if anything.
    pub(crate) fn check(&self) -> Result<(), String> {
        let texts = [
            ("vendor", &self.vendor, 8),
            ("product", &self.product, 16),
            ("revision", &self.revision, 4),
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
            source,
            write_cache: AtomicBool::new(options.write_cache),
            access: Arc::clone(&options.access),
            attached,
            options,
            stopped: AtomicBool::new(false),
            attentions: Mutex::default(),
            attention_count: AtomicUsize::new(0),
        };
        unit.add_attention(Sense::POWER_ON);
        Ok(unit)
    }

    pub(crate) fn info(&self) -> DiskInfo {
        self.source.info()
    }

    /// Back to what it was when it was made; the initiator hears why.
    pub(crate) fn reset(&self, why: Sense) {
        self.write_cache.store(self.options.write_cache, Ordering::Relaxed);
        self.stopped.store(false, Ordering::Relaxed);
        let mut attentions = self.attentions.lock().unwrap_or_else(PoisonError::into_inner);
        // A reset covers whatever else there was to say (SAM-6, section 5.14.1).
        attentions.clear();
        attentions.push_back(why);
        self.attention_count.store(attentions.len(), Ordering::Relaxed);
    }

    /// Has the initiator hear of something with its next command.
    pub(crate) fn add_attention(&self, sense: Sense) {
        let mut attentions = self.attentions.lock().unwrap_or_else(PoisonError::into_inner);
        if attentions.contains(&sense) {
            return;
        }
        if attentions.len() == ATTENTIONS_MAX {
            attentions.pop_front();
        }
        attentions.push_back(sense);
        self.attention_count.store(attentions.len(), Ordering::Relaxed);
    }

    /// What there is to hear first, which then was heard.
    #[inline]
    pub(crate) fn take_attention(&self) -> Option<Sense> {
        if self.attention_count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut attentions = self.attentions.lock().unwrap_or_else(PoisonError::into_inner);
        let sense = attentions.pop_front();
        self.attention_count.store(attentions.len(), Ordering::Relaxed);
        sense
    }

    /// REPORT LUNS was heard, so that units have changed is no news.
    pub(crate) fn forget_attention(&self, sense: Sense) {
        let mut attentions = self.attentions.lock().unwrap_or_else(PoisonError::into_inner);
        attentions.retain(|other| *other != sense);
        self.attention_count.store(attentions.len(), Ordering::Relaxed);
    }

    /// Whether a write may be answered before it is on stable storage.
    #[inline]
    pub(crate) fn has_write_cache(&self) -> bool {
        self.write_cache.load(Ordering::Relaxed)
    }

    /// Switches the cache, which a unit that was set up without one does not have.
    pub(crate) fn set_write_cache(&self, on: bool) {
        assert!(self.options.write_cache || !on, "MODE SELECT checks that");
        self.write_cache.store(on, Ordering::Relaxed);
    }

    /// Whether blocks can be given back, unless the medium is write-protected: it is thin either
    /// way.
    pub(crate) fn can_unmap(&self) -> bool {
        self.options.discard
    }
}
