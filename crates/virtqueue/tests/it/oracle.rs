//! Random rings, good and hostile, against the chain iterator of `virtio-queue`. Both sides read
//! the same files, and must see the same buffers.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, OnceLock};

use proptest::prelude::*;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use virtqueue::{Chain, GuestMemory, LocalMemory, MappingRules, RegionConfig, SplitQueue};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

use crate::ring::{
    AVAIL_RING, BORDER, DESC_TABLE, Entry, F_INDIRECT, F_NEXT, F_WRITE, HOLE, ISLAND, ISLAND_BYTES,
    RANGES, USED_RING, config, contents, memfd, write_desc,
};

/// The largest queue in these tests. Small queues find more.
const SIZE_BITS: u32 = 5;
/// Addresses of indirect tables with random contents. One table crosses the border of two regions.
const TABLES: [u64; 3] = [0xa000, 0xb001, BORDER - 40];
const TABLE_ENTRIES: u16 = 6;
/// Areas for buffers, away from rings and tables.
const DATA: [(u64, u64); 3] = [(0xc000, BORDER), (BORDER + 0x1000, HOLE), (ISLAND, ISLAND + 4096)];

/// Memory that is mapped twice: once for us and once for the oracle.
struct Twins {
    ours: Arc<GuestMemory>,
    oracle: GuestMemoryMmap<()>,
}

impl Twins {
    fn new() -> Self {
        let files: Vec<Arc<File>> = RANGES.iter().map(|&(_, size)| memfd(size)).collect();
        for (pattern, file) in patterns().iter().zip(&files) {
            file.write_all_at(pattern, 0).expect("a file takes its length");
        }
        let region = |(&(guest_addr, size), file): (&(u64, u64), &Arc<File>)| RegionConfig {
            guest_addr,
            size,
            user_addr: guest_addr,
            file: Arc::clone(file),
            file_offset: 0,
        };
        let regions: Vec<_> = RANGES.iter().zip(&files).map(region).collect();
        let ranges = RANGES.iter().zip(&files).map(|(&(start, size), file)| {
            let size = usize::try_from(size).expect("64 bits");
            (GuestAddress(start), size, Some(FileOffset::from_arc(Arc::clone(file), 0)))
        });
        let ours = GuestMemory::new(&regions, &MappingRules::default()).expect("good regions");
        let ours = Arc::new(ours);
        let oracle = GuestMemoryMmap::from_ranges_with_files(ranges).expect("regions are good");
        Self { ours, oracle }
    }

    /// The oracle's bytes of these buffers, one after another. `None` if they are not mapped.
    fn bytes(&self, descriptors: &[Descriptor]) -> Option<Vec<u8>> {
        let mut all = Vec::new();
        for descriptor in descriptors {
            let mut bytes = vec![0; usize::try_from(descriptor.len()).expect("64 bits")];
            if !bytes.is_empty() {
                self.oracle.read_slice(&mut bytes, descriptor.addr()).ok()?;
            }
            all.extend(bytes);
        }
        Some(all)
    }
}

/// Contents for each region that identify every place in it.
fn patterns() -> &'static [Vec<u8>] {
    static PATTERNS: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    let word = |addr: u64| (addr ^ 0x5bd1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes();
    PATTERNS.get_or_init(|| {
        RANGES
            .iter()
            .map(|&(start, size)| (start..start + size).step_by(8).flat_map(word).collect())
            .collect()
    })
}

fn oracle_queue(size: u16) -> Queue {
    let mut queue = Queue::new(size).expect("a power of two");
    let half = |addr: u64| Some(u32::try_from(addr).expect("a low address"));
    queue.set_desc_table_address(half(DESC_TABLE), Some(0));
    queue.set_avail_ring_address(half(AVAIL_RING), Some(0));
    queue.set_used_ring_address(half(USED_RING), Some(0));
    queue.set_ready(true);
    queue
}

/// Runs both sides over the ring. With `expect_good`, an error or a fault fails the test.
fn compare(twins: &Twins, size: u16, heads: &[u16], avail_idx: u16, expect_good: bool) {
    for (index, head) in (0_u64..).zip(heads) {
        twins.ours.write(AVAIL_RING + 4 + index * 2, &head.to_le_bytes()).expect("mapped");
    }
    twins.ours.write(AVAIL_RING + 2, &avail_idx.to_le_bytes()).expect("mapped");

    let local = LocalMemory::new(Arc::clone(&twins.ours));
    let mut queue = SplitQueue::new(local, config(size, true)).expect("the set-up is good");
    let mut oracle = oracle_queue(size);
    let mut popped = 0;
    loop {
        let chain = match queue.pop() {
            Ok(Some(chain)) => chain,
            Ok(None) => break,
            Err(error) => {
                assert!(!expect_good, "{error}");
                return;
            }
        };
        popped += 1;
        let theirs = oracle
            .iter(&twins.oracle)
            .expect("avail idx is good")
            .next()
            .expect("the oracle has a chain too");
        assert_eq!(chain.head, theirs.head_index());
        let descriptors: Vec<Descriptor> = theirs.collect();
        assert!(!expect_good || chain.fault.is_none(), "{:?}", chain.fault);
        match chain.fault {
            None => agree(twins, &chain, &descriptors),
            Some(_) => answer(twins, chain, &descriptors),
        }
    }
    assert_eq!(popped, avail_idx);
}

fn agree(twins: &Twins, chain: &Chain, descriptors: &[Descriptor]) {
    let (writable, readable): (Vec<_>, Vec<_>) =
        descriptors.iter().copied().partition(|descriptor| descriptor.is_write_only());
    assert_eq!(Some(contents(&chain.readable)), twins.bytes(&readable));
    assert_eq!(Some(contents(&chain.writable)), twins.bytes(&writable));
}

/// Checks that a bad request has only its last device-writable byte, if that is mapped.
fn answer(twins: &Twins, mut chain: Chain, descriptors: &[Descriptor]) {
    assert!(chain.readable.is_empty());
    if descriptors.last().is_some_and(|last| last.has_next()) {
        return; // The oracle stops before the end of a chain that is too long.
    }
    let last = descriptors.iter().rev().find(|d| d.is_write_only() && d.len() > 0);
    let addr = last.and_then(|d| d.addr().0.checked_add(u64::from(d.len()) - 1));
    let mapped = addr.filter(|&addr| twins.ours.read(addr, &mut [0]).is_ok());
    let status = chain.writable.take_last_byte();
    assert!(chain.writable.is_empty());
    if let (Some(addr), Some(status)) = (mapped, &status) {
        let mut before = [0];
        twins.ours.read(addr, &mut before).expect("mapped");
        status.write(!before[0]);
        let now: u8 = twins.oracle.read_obj(GuestAddress(addr)).expect("mapped");
        assert_eq!(now, !before[0], "another byte was written");
        status.write(before[0]);
    } else {
        assert_eq!(status.is_some(), mapped.is_some());
    }
}

/// A buffer in mapped memory: address and length.
fn good_buffer() -> impl Strategy<Value = (u64, u32)> {
    (0..DATA.len(), any::<u32>(), prop_oneof![Just(0), 1..64_u32, 1..9000_u32]).prop_map(
        |(area, place, len)| {
            // The first area touches the second, so its buffers may extend into it.
            let (start, end) = (DATA[area].0, if area == 0 { HOLE } else { DATA[area].1 });
            let len = len.min(u32::try_from(end - start).expect("a small area"));
            (start + u64::from(place) % (end - start - u64::from(len) + 1), len)
        },
    )
}

/// The buffers of one chain, device-writable ones last, and the number of them in an indirect
/// table.
fn good_chain() -> impl Strategy<Value = (Vec<(u64, u32, u16)>, usize)> {
    (prop::collection::vec(good_buffer(), 1..8), 0..9_usize, 0..9_usize).prop_map(
        |(buffers, readable, indirect)| {
            let flags = |index| if index < readable { 0 } else { F_WRITE };
            let buffers: Vec<_> = buffers
                .into_iter()
                .enumerate()
                .map(|(index, (addr, len))| (addr, len, flags(index)))
                .collect();
            let indirect = indirect.min(buffers.len());
            (buffers, indirect)
        },
    )
}

/// Writes the chain into the next free descriptors, in the order of `free`. Returns its head, or
/// `None` if there are too few.
fn write_chain(
    memory: &GuestMemory,
    free: &mut Vec<u16>,
    table: u64,
    (buffers, indirect): &(Vec<(u64, u32, u16)>, usize),
) -> Option<u16> {
    let direct = buffers.len() - indirect;
    let needed = direct + usize::from(*indirect > 0);
    if needed > free.len() {
        return None;
    }
    let used = free.split_off(free.len() - needed);
    let next_of = |index: usize| used.get(index + 1).copied();
    for (index, &(addr, len, flags)) in buffers[..direct].iter().enumerate() {
        let next = next_of(index);
        let flags = flags | next.map_or(0, |_| F_NEXT);
        // The link behind the end of a chain must be ignored.
        write_desc(memory, DESC_TABLE, used[index], (addr, len, flags, next.unwrap_or(0xabcd)));
    }
    if *indirect > 0 {
        let last = buffers.len() - direct - 1;
        for (index, &(addr, len, flags)) in (0_u16..).zip(&buffers[direct..]) {
            let flags = if usize::from(index) < last { flags | F_NEXT } else { flags };
            write_desc(memory, table, index, (addr, len, flags, index + 1));
        }
        let len = u32::try_from(*indirect).expect("a short chain") * 16;
        write_desc(memory, DESC_TABLE, used[direct], (table, len, F_INDIRECT, 0));
    }
    used.first().copied()
}

fn hostile_desc(size: u16) -> impl Strategy<Value = Entry> {
    let edges: Vec<u64> = RANGES
        .iter()
        .flat_map(|&(start, size)| [start.wrapping_sub(1), start, start + 1, start + size - 1])
        .chain([HOLE, ISLAND + ISLAND_BYTES - 8, u64::MAX, u64::MAX - 15, 1 << 63])
        .chain([DESC_TABLE, AVAIL_RING, USED_RING])
        .collect();
    let addr = prop_oneof![
        8 => good_buffer().prop_map(|(addr, _)| addr),
        3 => prop::sample::select(TABLES.to_vec()),
        2 => prop::sample::select(edges),
        1 => any::<u64>(),
    ];
    let len = prop_oneof![
        8 => 0..64_u32,
        4 => (1..=u32::from(TABLE_ENTRIES)).prop_map(|entries| entries * 16),
        2 => 0..0x2_0000_u32,
        1 => prop::sample::select(vec![u32::MAX, 0x8000_0000, 16 * 1024, 16 * 1025, 0x000f_fff0]),
    ];
    let flags = prop_oneof![
        6 => prop::sample::select(vec![0, F_NEXT, F_WRITE, F_NEXT | F_WRITE]),
        2 => Just(F_INDIRECT),
        1 => any::<u16>(),
    ];
    let next = prop_oneof![20 => 0..size, 1 => Just(size), 1 => any::<u16>()];
    (addr, len, flags, next)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn well_formed_chains_match_the_oracle(
        bits in 0..=SIZE_BITS,
        chains in prop::collection::vec(good_chain(), 1..12),
        order in any::<prop::sample::Index>(),
    ) {
        let size = 1_u16 << bits;
        let twins = Twins::new();
        // Use the descriptors in an order that goes around the table by odd steps.
        let step = u16::try_from(order.index(16)).expect("small") * 2 + 1;
        let mut free: Vec<u16> = (0..size).map(|i| i.wrapping_mul(step) & (size - 1)).collect();
        let heads: Vec<u16> = chains
            .iter()
            .enumerate()
            .filter_map(|(index, chain)| {
                let table = 0xa000 + u64::try_from(index).expect("few") * 0x89;
                write_chain(&twins.ours, &mut free, table, chain)
            })
            .collect();
        let avail_idx = u16::try_from(heads.len()).expect("few");
        compare(&twins, size, &heads, avail_idx, true);
    }

    #[test]
    fn hostile_rings_do_no_harm(
        (size, table, tables, heads) in (0..=SIZE_BITS).prop_flat_map(|bits| {
            let size = 1_u16 << bits;
            let count = usize::from(size);
            let entries = TABLES.len() * usize::from(TABLE_ENTRIES);
            (
                Just(size),
                prop::collection::vec(hostile_desc(size), count),
                prop::collection::vec(hostile_desc(TABLE_ENTRIES), entries),
                prop::collection::vec(prop_oneof![60 => 0..size, 1 => any::<u16>()], count),
            )
        }),
        extra in prop_oneof![20 => Just(0_u16), 1 => any::<u16>()],
    ) {
        let twins = Twins::new();
        for (index, desc) in (0..size).zip(table) {
            write_desc(&twins.ours, DESC_TABLE, index, desc);
        }
        for (start, descs) in TABLES.iter().zip(tables.chunks(usize::from(TABLE_ENTRIES))) {
            for (index, &desc) in (0..TABLE_ENTRIES).zip(descs) {
                write_desc(&twins.ours, *start, index, desc);
            }
        }
        // An error ends a run, so try every head alone, too.
        for &head in &heads {
            compare(&twins, size, &[head], 1, false);
        }
        compare(&twins, size, &heads, size.wrapping_add(extra), false);
    }
}
