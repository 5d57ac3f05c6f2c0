//! A small vhost-user front-end with a virtio-blk driver, which can misbehave.
//!
//! It shares no code with the daemon, nor with the crates that the daemon uses for messages. Its
//! ring is the driver's side, which shares none with the device's. The well-formed path is
//! [`Frontend::attach`] and [`Frontend::request`]. With the modules a test can leave out, repeat or
//! spoil each of their steps.

pub mod log;
pub mod memory;
pub mod message;
pub mod ring;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};

use virtqueue::QueueConfig;

use crate::daemon::{Daemon, SECTOR_BYTES, pattern};
use memory::{Memory, Region, take_count};
use message::{Channel, Message, Reply, code};
use ring::{Desc, Ring, STRIDE, layout_at};

/// Feature bits of virtio 1.3, sections 5.2.3 and 6.
#[expect(missing_docs, reason = "the names are the specification's")]
pub mod feature {
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// The vhost-user bit for the log of written pages.
    pub const LOG_ALL: u64 = 1 << 26;
    pub const ANY_LAYOUT: u64 = 1 << 27;
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    pub const RING_PACKED: u64 = 1 << 34;
    /// The vhost-user bit for protocol features.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
}

#[expect(missing_docs, reason = "the names are the specification's")]
pub mod blk;
#[expect(missing_docs, reason = "the names are the specification's")]
pub mod protocol_feature;

/// Start of guest memory; nothing is mapped below.
pub const MEMORY_START: u64 = 0x10_0000;
/// The border between the two regions of guest memory.
pub const BORDER: u64 = 0x50_0000;
/// End of guest memory.
pub const MEMORY_END: u64 = 0x90_0000;
/// Free for descriptor tables and the like.
pub const SCRATCH: u64 = 0x1c_0000;
/// Free for data, up to [`BORDER`] and beyond.
pub const DATA: u64 = 0x20_0000;

/// Headers and status bytes, 64 bytes for each slot and 1024 slots for each queue.
const SLOTS: u64 = 0x14_0000;
const SLOT_BYTES: u64 = 64;
const SLOTS_OF_QUEUE: u64 = 1024 * SLOT_BYTES;
/// Bytes of data for one queue's [`Frontend::request`]. Queues follow one another from [`DATA`].
pub const DATA_BYTES: u64 = 0x4_0000;

/// The features and queues that a front-end asks for.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Features to accept if offered.
    pub features: u64,
    /// Protocol features to accept if offered; `None` to ignore protocol features.
    pub protocol_features: Option<u64>,
    /// Number of queues.
    pub queues: u16,
    /// Entries of each queue.
    pub queue_size: u16,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            features: feature::VERSION_1
                | feature::INDIRECT_DESC
                | feature::EVENT_IDX
                | feature::FLUSH
                | feature::MQ
                | feature::DISCARD
                | feature::WRITE_ZEROES,
            protocol_features: Some(
                protocol_feature::MQ
                    | protocol_feature::REPLY_ACK
                    | protocol_feature::CONFIG
                    | protocol_feature::CONFIGURE_MEM_SLOTS,
            ),
            queues: 2,
            queue_size: 64,
        }
    }
}

impl Setup {
    /// Removes features.
    #[must_use]
    pub fn without(mut self, features: u64) -> Self {
        self.features &= !features;
        self
    }

    /// Sets the size of the rings.
    #[must_use]
    pub fn queue_size(mut self, entries: u16) -> Self {
        self.queue_size = entries;
        self
    }
}

/// The outcome of a request.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RequestOutcome {
    /// The status byte.
    pub status: u8,
    /// The length in the used element.
    pub used_bytes: u32,
    /// The content of the data buffer.
    pub data: Vec<u8>,
}

/// A front-end in any state of attachment.
pub struct Frontend {
    /// The connection.
    pub channel: Channel,
    /// Guest memory.
    pub memory: Arc<Memory>,
    /// The queues.
    pub rings: Vec<Ring>,
    /// The negotiated features.
    pub features: u64,
    acks: bool,
    setup: Setup,
}

impl Frontend {
    /// Connects, and sends nothing.
    ///
    /// # Errors
    /// If no daemon listens, or the kernel has no memory left.
    pub fn connect(socket: &Path, setup: &Setup) -> Result<Self> {
        let regions = vec![
            Region::new(MEMORY_START, BORDER - MEMORY_START)?,
            Region::new(BORDER, MEMORY_END - BORDER)?,
        ];
        let memory = Arc::new(Memory::new(regions)?);
        let rings = (0..u64::from(setup.queues))
            .map(|queue| {
                let mut config = layout_at(MEMORY_START + queue * STRIDE, setup.queue_size);
                config.event_idx = setup.features & feature::EVENT_IDX != 0;
                Ring::new(&memory, config)
            })
            .collect::<Result<_>>()?;
        let channel = Channel::connect(socket)?;
        Ok(Self { channel, memory, rings, features: 0, acks: false, setup: setup.clone() })
    }

    /// Connects and starts all queues.
    ///
    /// # Errors
    /// If the daemon does not cooperate.
    pub fn attach(socket: &Path, setup: &Setup) -> Result<Self> {
        let mut this = Self::connect(socket, setup)?;
        this.negotiate()?;
        this.share_memory()?;
        for queue in 0..this.rings.len() {
            this.start_queue(queue, 0)?;
            this.enable_queue(queue, true)?;
        }
        Ok(this)
    }

    /// Negotiates features.
    ///
    /// # Errors
    /// If the daemon does not cooperate.
    pub fn negotiate(&mut self) -> Result<()> {
        let offered = self.exchange_number(&Message::new(code::GET_FEATURES, Vec::new()))?;
        self.features = self.setup.features & offered;
        if let Some(wanted) = self.setup.protocol_features {
            self.features |= feature::PROTOCOL_FEATURES & offered;
            let offered =
                self.exchange_number(&Message::new(code::GET_PROTOCOL_FEATURES, Vec::new()))?;
            let negotiated = wanted & offered;
            self.send_checked(Message::number(code::SET_PROTOCOL_FEATURES, negotiated))?;
            self.acks = negotiated & protocol_feature::REPLY_ACK != 0;
        }
        self.send_checked(Message::new(code::SET_OWNER, Vec::new()))?;
        self.send_checked(Message::number(code::SET_FEATURES, self.features))
    }

    /// Shares all regions: one by one with CONFIGURE_MEM_SLOTS in the setup, else as a table.
    ///
    /// # Errors
    /// If the daemon does not cooperate.
    pub fn share_memory(&mut self) -> Result<()> {
        let memory = Arc::clone(&self.memory);
        let wanted = self.setup.protocol_features.unwrap_or(0);
        if wanted & protocol_feature::CONFIGURE_MEM_SLOTS == 0 {
            let regions: Vec<_> = memory.regions.iter().collect();
            return self.send_checked(Message::memory_table(&regions));
        }
        memory.regions.iter().try_for_each(|region| self.send_checked(Message::add_region(region)))
    }

    /// Announces a queue's place and starts it at avail entry `base`.
    ///
    /// # Errors
    /// If the daemon does not cooperate.
    pub fn start_queue(&mut self, queue: usize, base: u16) -> Result<()> {
        let index = u8::try_from(queue)?;
        let state = |request, value| Message::ring_state(request, u32::from(index), value);
        self.send_checked(state(code::SET_VRING_NUM, u32::from(self.rings[queue].config.size)))?;
        self.send_checked(state(code::SET_VRING_BASE, u32::from(base)))?;
        self.send_checked(self.address_message(queue)?)?;
        let Ring { kick, call, err, .. } = &self.rings[queue];
        let (kick, call, err) = (Arc::clone(kick), Arc::clone(call), Arc::clone(err));
        self.send_checked(Message::ring_fd(code::SET_VRING_CALL, index, Some(&call)))?;
        self.send_checked(Message::ring_fd(code::SET_VRING_ERR, index, Some(&err)))?;
        self.send_checked(Message::ring_fd(code::SET_VRING_KICK, index, Some(&kick)))
    }

    /// The message with a queue's addresses.
    ///
    /// # Errors
    /// If they are not in guest memory.
    pub fn address_message(&self, queue: usize) -> Result<Message> {
        let QueueConfig { desc_table, avail_ring, used_ring, .. } = self.rings[queue].config;
        Ok(Message::ring_addresses(
            u32::try_from(queue)?,
            self.memory.user_addr(desc_table)?,
            self.memory.user_addr(used_ring)?,
            self.memory.user_addr(avail_ring)?,
        ))
    }

    /// Enables or disables a queue. Without protocol features a queue is always enabled.
    ///
    /// # Errors
    /// If the daemon does not cooperate.
    pub fn enable_queue(&mut self, queue: usize, enable: bool) -> Result<()> {
        if self.features & feature::PROTOCOL_FEATURES == 0 {
            return Ok(());
        }
        let queue = u32::try_from(queue)?;
        self.send_checked(Message::ring_state(code::SET_VRING_ENABLE, queue, u32::from(enable)))
    }

    /// Stops a queue. Returns the next avail entry that it would have taken.
    ///
    /// # Errors
    /// If the daemon does not cooperate.
    pub fn stop_queue(&mut self, queue: usize) -> Result<u16> {
        self.stop_queue_by(code::GET_VRING_BASE, queue)
    }

    /// Stops a queue by a message with this code, like [`stop_queue`](Self::stop_queue).
    ///
    /// # Errors
    /// If the daemon does not cooperate.
    pub fn stop_queue_by(&mut self, code: u32, queue: usize) -> Result<u16> {
        let message = Message::ring_state(code, u32::try_from(queue)?, 0);
        let reply = self.exchange(&message)?;
        let (index, base) = reply.body.split_at_checked(4).context("the answer is too short")?;
        ensure!(index == u32::try_from(queue)?.to_ne_bytes(), "another queue in {reply:?}");
        Ok(u16::try_from(u32::from_ne_bytes(base.try_into()?))?)
    }

    /// Reads bytes of the configuration space.
    ///
    /// # Errors
    /// If the answer has a different size.
    pub fn config(&mut self, offset: u32, bytes: usize) -> Result<Vec<u8>> {
        let reply =
            self.exchange(&Message::config(code::GET_CONFIG, offset, &vec![0xaa; bytes]))?;
        ensure!(reply.body.len() == 12 + bytes, "asked for {bytes} bytes, got {reply:?}");
        let size = u32::try_from(bytes)?;
        ensure!(reply.body[..8] == [offset.to_ne_bytes(), size.to_ne_bytes()].concat());
        Ok(reply.body[12..].to_vec())
    }

    /// Sends a message, and checks that it was carried out if the daemon can acknowledge that.
    ///
    /// # Errors
    /// If it was not.
    pub fn send_checked(&mut self, message: Message) -> Result<()> {
        if !self.acks {
            return self.channel.send(&message);
        }
        let status = self.exchange_number(&message.needs_reply())?;
        ensure!(status == 0, "the daemon refused a message");
        Ok(())
    }

    /// Sends a message that the daemon must refuse, by its answer or by closing the connection.
    ///
    /// # Errors
    /// If the daemon reports success.
    pub fn expect_refused(&mut self, message: Message) -> Result<()> {
        match self.channel.exchange(&message.needs_reply())? {
            None => Ok(()),
            Some(reply) => {
                ensure!(reply.number()? != 0, "the daemon did what it must not");
                Ok(())
            }
        }
    }

    /// Sends a message with a reply, and receives the reply.
    ///
    /// # Errors
    /// If there is none.
    pub fn exchange(&mut self, message: &Message) -> Result<Reply> {
        let request = message.request;
        let reply = self.channel.exchange(message)?;
        reply.with_context(|| format!("the daemon closed the connection at request {request}"))
    }

    /// Sends a message that asks for a number, and receives that number.
    ///
    /// # Errors
    /// If there is none.
    pub fn exchange_number(&mut self, message: &Message) -> Result<u64> {
        self.exchange(message)?.number()
    }

    /// Writes the header of slot `slot`, and sets its status byte to [`blk::PENDING`]. Returns the
    /// addresses of both.
    ///
    /// # Errors
    /// If the slot is not in guest memory.
    pub fn put_header(
        &self,
        queue: usize,
        slot: u16,
        kind: u32,
        sector: u64,
    ) -> Result<(u64, u64)> {
        let addr = slot_addr(queue, slot);
        let status = addr + 32;
        self.memory.write(addr, &header(kind, sector))?;
        self.memory.write(status, &[blk::PENDING])?;
        Ok((addr, status))
    }

    /// The status byte that [`put_header`](Self::put_header) has placed for a slot.
    #[must_use]
    pub fn status(&self, queue: usize, slot: u16) -> Option<u8> {
        self.memory.read(slot_addr(queue, slot) + 32, 1).ok()?.first().copied()
    }

    /// Carries out one request: a header, data to the device, room for data from it, a status.
    ///
    /// # Errors
    /// If it is not answered in time, or a different chain comes back.
    pub fn request(
        &mut self,
        queue: usize,
        kind: u32,
        sector: u64,
        out: &[u8],
        room: usize,
    ) -> Result<RequestOutcome> {
        let (header, status) = self.put_header(queue, 0, kind, sector)?;
        let data = DATA + u64::try_from(queue)? * DATA_BYTES;
        let data_in = data + u64::try_from(out.len())?.next_multiple_of(4096);
        self.memory.write(data, out)?;
        self.memory.write(data_in, &vec![0x77; room])?;
        let mut chain = vec![Desc::readable(header, 16)];
        if !out.is_empty() {
            chain.push(Desc::readable(data, u32::try_from(out.len())?));
        }
        if room > 0 {
            chain.push(Desc::writable(data_in, u32::try_from(room)?));
        }
        chain.push(Desc::writable(status, 1));
        let used_bytes = self.execute(queue, &chain)?;
        let [status] = self.memory.read(status, 1)?[..] else { unreachable!("one byte") };
        Ok(RequestOutcome { status, used_bytes, data: self.memory.read(data_in, room)? })
    }

    /// Carries out one chain, in descriptors 0 and up, and returns its used length.
    ///
    /// # Errors
    /// If it is not answered in time, or a different chain comes back.
    pub fn execute(&mut self, queue: usize, chain: &[Desc]) -> Result<u32> {
        self.rings[queue].put_chain(0, chain);
        self.finish(queue)
    }

    /// Like [`execute`](Self::execute), but through an indirect table.
    ///
    /// # Errors
    /// As for [`execute`](Self::execute).
    pub fn execute_indirect(&mut self, queue: usize, table: u64, chain: &[Desc]) -> Result<u32> {
        self.rings[queue].put_indirect(0, table, chain);
        self.finish(queue)
    }

    fn finish(&mut self, queue: usize) -> Result<u32> {
        let ring = &mut self.rings[queue];
        ring.submit(0)?;
        let used = ring.wait_used()?;
        ensure!(used.head == 0, "chain 0 was submitted, and {used:?} came back");
        Ok(used.bytes)
    }

    /// Reads sectors.
    ///
    /// # Errors
    /// If the read fails.
    pub fn read(&mut self, queue: usize, sector: u64, bytes: usize) -> Result<Vec<u8>> {
        let answer = self.request(queue, blk::IN, sector, &[], bytes)?;
        ensure!(answer.status == blk::OK, "a read of sector {sector} ended with {answer:?}");
        ensure!(answer.used_bytes as usize == bytes + 1, "{} bytes used", answer.used_bytes);
        Ok(answer.data)
    }

    /// Writes sectors.
    ///
    /// # Errors
    /// If the write fails.
    pub fn write(&mut self, queue: usize, sector: u64, data: &[u8]) -> Result<()> {
        let answer = self.request(queue, blk::OUT, sector, data, 0)?;
        ensure!(answer.status == blk::OK, "a write of sector {sector} ended with {answer:?}");
        ensure!(answer.used_bytes == 1, "{} bytes used", answer.used_bytes);
        Ok(())
    }

    /// Waits until the IoThread of a queue has finished its visible work, notify included. Then no
    /// call of another queue of that IoThread is still due. Stops and starts the queue, which must
    /// be empty.
    ///
    /// # Errors
    /// If the daemon does not cooperate.
    pub fn settle(&mut self, queue: usize) -> Result<()> {
        let base = self.stop_queue(queue)?;
        self.start_queue(queue, base)?;
        memory::wait_readable(&self.rings[queue].call, "call at the start of a queue")?;
        take_count(&self.rings[queue].call);
        Ok(())
    }
}

fn slot_addr(queue: usize, slot: u16) -> u64 {
    SLOTS + queue as u64 * SLOTS_OF_QUEUE + u64::from(slot) * SLOT_BYTES
}

/// The header of a request.
#[must_use]
pub fn header(kind: u32, sector: u64) -> Vec<u8> {
    [kind.to_le_bytes().to_vec(), vec![0; 4], sector.to_le_bytes().to_vec()].concat()
}

/// A segment of a discard or write-zeroes request.
#[must_use]
pub fn segment(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let counts = [sectors.to_le_bytes(), flags.to_le_bytes()].concat();
    [sector.to_le_bytes().to_vec(), counts].concat()
}

/// Checks that the daemon is alive and serves a new front-end: each queue writes new data that the
/// second queue reads back.
///
/// # Errors
/// If the daemon fails.
pub fn check_service(daemon: &mut Daemon) -> Result<()> {
    static SEED: AtomicU64 = AtomicU64::new(1);
    daemon.check_running()?;
    let result = (|| {
        let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
        for (writer, reader, sector) in [(0, 1, 4096), (1, 0, 4098)] {
            let data = pattern(SEED.fetch_add(1, Ordering::Relaxed), 2 * SECTOR_BYTES);
            frontend.write(writer, sector, &data)?;
            ensure!(
                frontend.read(reader, sector, data.len())? == data,
                "read what was not written"
            );
        }
        Ok(())
    })();
    result.with_context(|| format!("a good front-end, after which:\n{}", daemon.messages()))?;
    daemon.check_running()
}
