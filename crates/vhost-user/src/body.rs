//! Bodies of messages, as plain data with their encoding.

/// The longest body that any message has. A header that announces more is invalid.
pub(crate) const MAX_BODY_BYTES: usize = 4096;

/// In the index of a ring: no descriptor comes with the message.
pub(super) const NO_FD: u64 = 1 << 8;

/// In the flags of a ring's addresses: writes to the used ring are logged.
pub(super) const VRING_F_LOG: u32 = 1 << 0;

/// A region of memory ("Memory region description").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Start in guest memory.
    pub guest_addr: u64,
    /// Bytes.
    pub size: u64,
    /// Start in the front-end's address space.
    pub user_addr: u64,
    /// Start in the file that comes with it, in bytes.
    pub file_offset: u64,
}

/// The addresses of a ring in the front-end's address space ("Vring address description").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingAddresses {
    /// The descriptor table.
    pub desc_table: u64,
    /// The avail ring.
    pub avail_ring: u64,
    /// The used ring.
    pub used_ring: u64,
}

/// A part of the configuration space ("Virtio device config space").
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The first byte.
    pub offset: u32,
    /// The writer: 0 for the driver, 1 for a migration.
    pub flags: u32,
    /// The bytes. A read uses only their number.
    pub data: Vec<u8>,
}

/// The position of the inflight region in its file, and its dimensions ("Inflight description").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InflightArea {
    /// Bytes.
    pub size: u64,
    /// Start in the file that comes with it, in bytes.
    pub file_offset: u64,
    /// The number of its queues.
    pub queues: u16,
    /// Entries of the longest queue.
    pub queue_size: u16,
}

/// The position of the log of written pages in its file ("Log description").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogArea {
    /// Bytes.
    pub size: u64,
    /// Start in the file that comes with it, in bytes.
    pub file_offset: u64,
}

impl LogArea {
    pub(super) fn decode(body: &[u8]) -> Option<Self> {
        let [size, file_offset] = numbers(body)?;
        Some(Self { size, file_offset })
    }

    /// The body of a message of this area.
    pub fn encode(&self) -> Vec<u8> {
        [self.size, self.file_offset].map(u64::to_ne_bytes).concat()
    }
}

pub(super) fn size_of_body(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or_else(|_| unreachable!("a body is at most {MAX_BODY_BYTES}"))
}

impl InflightArea {
    /// Bytes of its fields. Most front-ends append four bytes of padding.
    const BYTES: usize = 20;
    const PADDED_BYTES: usize = 24;

    /// The body of a message of this area.
    pub fn encode(&self) -> [u8; Self::PADDED_BYTES] {
        let mut body = [0; Self::PADDED_BYTES];
        body[..8].copy_from_slice(&self.size.to_ne_bytes());
        body[8..16].copy_from_slice(&self.file_offset.to_ne_bytes());
        body[16..18].copy_from_slice(&self.queues.to_ne_bytes());
        body[18..20].copy_from_slice(&self.queue_size.to_ne_bytes());
        body
    }

    /// Decodes a body, with or without padding. `None` if it has another length.
    pub fn decode(body: &[u8]) -> Option<Self> {
        if ![Self::BYTES, Self::PADDED_BYTES].contains(&body.len()) {
            return None;
        }
        let number = |at: usize| Some(u64::from_ne_bytes(body.get(at..at + 8)?.try_into().ok()?));
        let count = |at: usize| Some(u16::from_ne_bytes(body.get(at..at + 2)?.try_into().ok()?));
        Some(Self {
            size: number(0)?,
            file_offset: number(8)?,
            queues: count(16)?,
            queue_size: count(18)?,
        })
    }
}

impl Region {
    /// Bytes of a region in a message.
    const BYTES: usize = 32;

    /// A region of a file that is no guest memory.
    pub(super) fn at_start(size: u64, file_offset: u64) -> Self {
        Self { guest_addr: 0, size, user_addr: 0, file_offset }
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let [guest_addr, size, user_addr, file_offset] = numbers(bytes)?;
        Some(Self { guest_addr, size, user_addr, file_offset })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let Self { guest_addr, size, user_addr, file_offset } = *self;
        [guest_addr, size, user_addr, file_offset].map(u64::to_ne_bytes).concat()
    }

    /// The body of a message about one region.
    pub(super) fn encode_single(&self) -> Vec<u8> {
        [vec![0; 8], self.encode()].concat()
    }
}

impl Config {
    const HEAD_BYTES: usize = 12;

    pub(super) fn decode(body: &[u8]) -> Option<Self> {
        let (head, data) = body.split_first_chunk::<{ Self::HEAD_BYTES }>()?;
        let [offset, size, flags] = words(head);
        (size as usize == data.len()).then(|| Self { offset, flags, data: data.to_vec() })
    }

    /// The body of the message, or of the answer to a read.
    pub fn encode(&self) -> Vec<u8> {
        let head = [self.offset, size_of_body(self.data.len()), self.flags].map(u32::to_ne_bytes);
        [head.concat(), self.data.clone()].concat()
    }
}

/// The table of regions: their number, and the regions. It has at least one. virtio_uml always
/// sends room for two, so bytes after the last region are ignored.
pub(super) fn regions(body: &[u8]) -> Option<Vec<Region>> {
    let (head, table) = body.split_first_chunk::<8>()?;
    let [count, _padding] = words(head);
    let table = table.get(..(count as usize).checked_mul(Region::BYTES)?)?;
    if table.is_empty() {
        return None;
    }
    table.chunks_exact(Region::BYTES).map(Region::decode).collect()
}

pub(super) fn single_region(body: &[u8]) -> Option<Region> {
    let (_padding, region) = body.split_first_chunk::<8>()?;
    Region::decode(region)
}

/// The number of a ring, its addresses, and the address of its used ring in the log, if the flags
/// ask for that.
pub(super) fn ring_addresses(body: &[u8]) -> Option<(u32, RingAddresses, Option<u64>)> {
    let (head, rest) = body.split_first_chunk::<8>()?;
    let [index, flags] = words(head);
    let [desc_table, used_ring, avail_ring, log] = numbers(rest)?;
    let log = (flags & VRING_F_LOG != 0).then_some(log);
    Some((index, RingAddresses { desc_table, avail_ring, used_ring }, log))
}

pub(super) fn ring_fd(body: &[u8]) -> Option<(u8, bool)> {
    let value = number(body)?;
    let index = u8::try_from(value & !NO_FD).ok()?;
    Some((index, value & NO_FD == 0))
}

pub(super) fn number(body: &[u8]) -> Option<u64> {
    body.try_into().ok().map(u64::from_ne_bytes)
}

/// `N` numbers of 8 bytes each; `None` if there are more or fewer bytes.
pub(super) fn numbers<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
    let numbers: Vec<u64> = bytes.chunks(8).map(number).collect::<Option<_>>()?;
    numbers.try_into().ok()
}

/// `BYTES` is four times `N`.
pub(super) fn words<const N: usize, const BYTES: usize>(bytes: &[u8; BYTES]) -> [u32; N] {
    const { assert!(BYTES == 4 * N) };
    std::array::from_fn(|at| u32::from_ne_bytes(std::array::from_fn(|byte| bytes[4 * at + byte])))
}
