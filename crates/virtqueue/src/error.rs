//! Errors of memory maps, of rings and of single requests.

use std::fmt;

/// A refused memory map, or a failed access to one.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The map would have more than [`MAX_REGIONS`](crate::MAX_REGIONS) regions.
    #[error("cannot map {count} memory regions: at most {max} are supported")]
    TooManyRegions {
        /// The number of regions that the map would have.
        count: usize,
        /// The largest number of regions.
        max: usize,
    },
    /// The region has no bytes.
    #[error("cannot map the memory region at guest address {guest_addr:#x}: its size is zero")]
    EmptyRegion {
        /// Start of the region.
        guest_addr: u64,
    },
    /// The end of the region does not fit in 64 bits, in one of its address spaces or in its file.
    #[error(
        "cannot map the memory region at guest address {guest_addr:#x} (front-end address \
         {user_addr:#x}, file offset {file_offset:#x}): it runs past the end of the address space, \
         with {size:#x} bytes"
    )]
    AddressWrap {
        /// Start of the region in guest memory.
        guest_addr: u64,
        /// Start of the region in the front-end.
        user_addr: u64,
        /// Start of the region in its file.
        file_offset: u64,
        /// Bytes.
        size: u64,
    },
    /// Two regions have addresses in common.
    #[error(
        "cannot map the memory region at {space} address {second:#x}: it overlaps the region at \
         {first:#x}; remove that region first"
    )]
    Overlap {
        /// The address space in which they overlap: `guest` or `front-end`.
        space: &'static str,
        /// The region with the lower start.
        first: u64,
        /// The region with the higher start.
        second: u64,
    },
    /// The file ends before the region does. Touching the rest would raise SIGBUS.
    #[error(
        "cannot map the memory region at guest address {guest_addr:#x}: it needs {needed} bytes \
         of its file, which has {length}"
    )]
    FileTooShort {
        /// Start of the region.
        guest_addr: u64,
        /// Offset in the file at which the region ends.
        needed: u64,
        /// Length of the file.
        length: u64,
    },
    /// The file is of a kind that cannot be guest memory, or that the rules do not allow: accesses
    /// to files without seals may wait for a program or a server.
    #[error(
        "cannot map the memory region at guest address {guest_addr:#x}: its descriptor does not \
         refer to memory (a memfd, a file on tmpfs or hugetlbfs, or a DAX device){advice}"
    )]
    NotMemory {
        /// Start of the region.
        guest_addr: u64,
        /// The advice of [`MappingRules`](crate::MappingRules).
        advice: &'static str,
    },
    /// The file cannot be examined.
    #[error(
        "cannot examine the file of the memory region at guest address {guest_addr:#x}: {cause}"
    )]
    Stat {
        /// Start of the region.
        guest_addr: u64,
        /// The error of `statx`.
        cause: std::io::Error,
    },
    /// The kernel refused the mapping.
    #[error(
        "cannot map the memory region at guest address {guest_addr:#x} ({size:#x} bytes) for \
         reading and writing: {cause}"
    )]
    Map {
        /// Start of the region.
        guest_addr: u64,
        /// Bytes.
        size: u64,
        /// The error of `mmap`.
        cause: std::io::Error,
    },
    /// The mapping would exceed a budget.
    #[error(
        "cannot map the memory region at guest address {guest_addr:#x}: it needs {needed} bytes, \
         {mapped} are mapped already, and {what} is limited to {limit}"
    )]
    OverBudget {
        /// Start of the region.
        guest_addr: u64,
        /// Bytes of the mapping, which has whole pages.
        needed: u64,
        /// Bytes that count in that budget so far.
        mapped: u64,
        /// The limit of that budget in bytes.
        limit: u64,
        /// The name of that budget.
        what: &'static str,
    },
    /// No region has exactly these addresses and this size.
    #[error(
        "cannot remove the memory region at guest address {guest_addr:#x} (front-end address \
         {user_addr:#x}, {size:#x} bytes): there is no such region"
    )]
    UnknownRegion {
        /// Start of the region in guest memory.
        guest_addr: u64,
        /// Start of the region in the front-end.
        user_addr: u64,
        /// Bytes.
        size: u64,
    },
    /// The access reaches an address in no region. The bytes before it have been copied.
    #[error("guest address {addr:#x} is in no memory region")]
    Unmapped {
        /// The first address that is not mapped.
        addr: u64,
    },
}

/// A part of a virtqueue (virtio 1.3, section 2.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingPart {
    /// The Descriptor Area.
    DescTable,
    /// The Driver Area.
    AvailRing,
    /// The Device Area.
    UsedRing,
}

impl fmt::Display for RingPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DescTable => "descriptor table",
            Self::AvailRing => "avail ring",
            Self::UsedRing => "used ring",
        })
    }
}

/// An inflight region that cannot be used, or an account of a queue in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InflightError {
    /// The region is for no queues, or for queues of an impossible size.
    #[error("an inflight region for {queues} queues of {queue_size} entries")]
    Shape {
        /// The number of queues.
        queues: u16,
        /// Entries of each queue.
        queue_size: u16,
    },
    /// The memory ends before the last account does.
    #[error(
        "the inflight region has {bytes} bytes, and {queues} queues of {queue_size} entries take \
         {needed} with the features of the driver; the front-end must ask for another region"
    )]
    TooShort {
        /// Bytes of the memory.
        bytes: u64,
        /// Bytes of all accounts.
        needed: u64,
        /// The number of queues.
        queues: u16,
        /// Entries of each queue.
        queue_size: u16,
    },
    /// The region has no account for the queue, so its requests would be lost with the process.
    #[error("queue {index} has no entries in the inflight region, which covers {queues} queues")]
    NoAccount {
        /// The index of the queue.
        index: u16,
        /// The number of queues that the region is for.
        queues: u16,
    },
    /// The ring has more entries than the account.
    #[error("a ring of {size} entries does not match its inflight region for {entries}")]
    RingTooLong {
        /// Entries of the account.
        entries: u16,
        /// Entries of the ring.
        size: u16,
    },
    /// The account was written by a back-end that took the region for one of a different size.
    #[error("the inflight region was used for queues of {entries} entries, not {expected}")]
    OtherSize {
        /// Entries according to the account.
        entries: u16,
        /// Entries according to the front-end.
        expected: u16,
    },
    /// The version of the account is unknown.
    #[error("the inflight region is of version {version}, which is unknown")]
    Version {
        /// The version in the account.
        version: u16,
    },
    /// The list of used elements leads out of the account.
    #[error("the inflight region links to entry {head}, beyond its {entries} entries")]
    LinkOutOfRange {
        /// The head that the link names.
        head: u16,
        /// Entries of the account.
        entries: u16,
    },
    /// The region is not aligned for atomic accesses.
    #[error("the inflight region is misaligned")]
    Misaligned,
    /// The front-end has truncated the region's file.
    #[error("the memory of the inflight region is gone: its file was truncated")]
    Gone,
}

/// A bad ring. The device must stop this queue, and this queue alone.
///
/// After an error from [`SplitQueue::pop`](crate::SplitQueue::pop) nothing more can be learned from
/// the ring. Chains that were popped before may still be pushed and published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// The previous process left the queue in an uncertain state.
    #[error("{0}; requests would be lost or repeated, so the queue cannot start")]
    Inflight(#[from] InflightError),
    /// The queue size is not a power of two, or out of range.
    #[error("queue size {size} is not a power of two between 1 and {max}")]
    Size {
        /// The requested size.
        size: u16,
        /// The largest size.
        max: u16,
    },
    /// A part of the ring is not aligned as the specification demands.
    #[error("the {part} at guest address {addr:#x} is not aligned to {align} bytes")]
    Misaligned {
        /// The part.
        part: RingPart,
        /// Guest address of its start.
        addr: u64,
        /// The required alignment in bytes.
        align: usize,
    },
    /// A part of the ring is not inside one memory region.
    #[error("the {part} at guest address {addr:#x} ({len} bytes) is not within one memory region")]
    Unmapped {
        /// The part.
        part: RingPart,
        /// Guest address of its start.
        addr: u64,
        /// Bytes.
        len: usize,
    },
    /// The owner of the memory of a part of the ring has truncated it.
    #[error(
        "the memory of the {part} at guest address {addr:#x} ({len} bytes) is gone: its file was \
         truncated"
    )]
    MemoryGone {
        /// The part.
        part: RingPart,
        /// Guest address of its start.
        addr: u64,
        /// Bytes.
        len: usize,
    },
    /// The driver's avail idx is further ahead than the ring is long. An index that moves back
    /// counts as far ahead, because it wraps.
    #[error("avail idx {avail_idx} is more than the queue size {size} ahead of {next_avail}")]
    AvailIndex {
        /// The avail idx that the driver wrote.
        avail_idx: u16,
        /// The avail entry from which the device counts.
        next_avail: u16,
        /// The queue size.
        size: u16,
    },
    /// The driver made more chains available than the ring has descriptors for.
    #[error(
        "the driver offers {available} more chains while the device holds {in_device} of {size}"
    )]
    TooManyChains {
        /// Chains that the device has not popped.
        available: u16,
        /// Chains that the device has popped and not pushed.
        in_device: u16,
        /// The queue size.
        size: u16,
    },
    /// The avail ring names a descriptor that does not exist.
    #[error("head {head} is outside of the descriptor table of {entries}")]
    HeadOutOfRange {
        /// The head that the driver wrote.
        head: u16,
        /// Entries of the table.
        entries: u16,
    },
    /// A descriptor links to a descriptor that does not exist.
    #[error("chain {head} continues at descriptor {next}, outside of a table of {entries}")]
    NextOutOfRange {
        /// Head of the chain.
        head: u16,
        /// The link that the driver wrote.
        next: u16,
        /// Entries of the (possibly indirect) table.
        entries: u16,
    },
    /// A chain has more descriptors than its table, so it loops.
    #[error("chain {head} loops: it has more descriptors than its table of {entries}")]
    Loop {
        /// Head of the chain.
        head: u16,
        /// Entries of the (possibly indirect) table.
        entries: u16,
    },
    /// An indirect descriptor although the feature was not negotiated.
    #[error("chain {head} has an indirect descriptor, which was not negotiated")]
    IndirectNotNegotiated {
        /// Head of the chain.
        head: u16,
    },
    /// An indirect descriptor in an indirect table.
    #[error("chain {head} has an indirect descriptor in an indirect table")]
    NestedIndirect {
        /// Head of the chain.
        head: u16,
    },
    /// A descriptor with both `INDIRECT` and `NEXT`.
    #[error("chain {head} has an indirect descriptor that is not its last")]
    IndirectWithNext {
        /// Head of the chain.
        head: u16,
    },
    /// An indirect descriptor in a longer chain, in a packed ring.
    #[error("chain {head} has an indirect descriptor beside others")]
    IndirectNotAlone {
        /// Head of the chain.
        head: u16,
    },
    /// A buffer id that the device holds already, in a packed ring.
    #[error("buffer id {id} is made available again while the device holds it")]
    DuplicateId {
        /// The id.
        id: u16,
    },
    /// A place in a packed ring that does not exist, from a front-end.
    #[error("the ring continues at descriptor {slot}, outside of its {size}")]
    Base {
        /// The descriptor.
        slot: u16,
        /// Entries of the ring.
        size: u16,
    },
    /// A base of a packed ring with requests in the device, which no inflight region has.
    #[error(
        "the ring continues with {descriptors} of its descriptors in the device, and no inflight \
         region has their requests; stop the ring with its requests answered, or share the region \
         that they are in"
    )]
    NoAccountOfRequests {
        /// The number of descriptors between the next used element and the next chain.
        descriptors: u16,
    },
    /// An indirect table whose length is zero, not a multiple of 16, or too large.
    #[error("chain {head} has an indirect table of {len} bytes, not 1 to {max} descriptors of 16")]
    IndirectLength {
        /// Head of the chain.
        head: u16,
        /// Bytes.
        len: u32,
        /// The largest number of descriptors in a table.
        max: u16,
    },
    /// An indirect table that is not wholly in guest memory.
    #[error("chain {head} has an indirect table at {addr:#x} ({len} bytes), which is not mapped")]
    IndirectUnmapped {
        /// Head of the chain.
        head: u16,
        /// Guest address.
        addr: u64,
        /// Bytes.
        len: u32,
    },
}

/// A bad request whose chain has an end. The device answers it with an error status if
/// [`Buffers::take_last_byte`](iomem::Buffers::take_last_byte) gives it a status byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChainFault {
    /// A buffer is not wholly in guest memory.
    #[error("the buffer at guest address {addr:#x} ({len} bytes) is not mapped")]
    Unmapped {
        /// Guest address.
        addr: u64,
        /// Bytes.
        len: u32,
    },
    /// A device-readable descriptor follows a device-writable one (virtio 1.3, section 2.7.4.2).
    #[error("a device-readable descriptor follows a device-writable one")]
    ReadableAfterWritable,
    /// The descriptors add up to more than 2^32 - 1 bytes.
    #[error("the chain is {bytes} bytes long, more than {max}", max = u32::MAX)]
    TooLong {
        /// The sum of the lengths.
        bytes: usize,
    },
    /// The buffers cross too many memory regions. Their list would grow out of bounds.
    #[error("the buffers of the chain are in more than {max} pieces of guest memory")]
    TooManyPieces {
        /// The largest number of host ranges that a chain may have in each direction.
        max: usize,
    },
}
