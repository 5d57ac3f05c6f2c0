//! Memory maps: refusals, sharing, and addresses.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::slice;
use std::sync::Arc;

use virtqueue::{
    GuestMemory, LocalMemory, MAX_REGIONS, MappingBudget, MappingRules, MemoryError, MemoryFiles,
    RegionConfig,
};

use crate::ring::memfd;

const PAGE: u64 = 0x1000;
/// The front-end address of guest address 0 in these tests.
const USER: u64 = 0x7f00_0000_0000;

fn rules() -> MappingRules {
    MappingRules::default()
}

fn region(guest_addr: u64, size: u64, file: &Arc<File>, file_offset: u64) -> RegionConfig {
    let user_addr = guest_addr.wrapping_add(USER);
    RegionConfig { guest_addr, size, user_addr, file: Arc::clone(file), file_offset }
}

#[test]
fn a_file_is_shared_both_ways() {
    let file = memfd(4 * PAGE);
    let memory = GuestMemory::new(&[region(PAGE, 2 * PAGE, &file, PAGE)], &rules()).unwrap();
    file.write_all_at(b"from the guest", PAGE + 10).unwrap();
    let mut bytes = [0; 14];
    memory.read(PAGE + 10, &mut bytes).unwrap();
    assert_eq!(&bytes, b"from the guest");

    memory.write(3 * PAGE - 5, b"12345").unwrap();
    let mut bytes = [0; 6];
    file.read_exact_at(&mut bytes, 3 * PAGE - 5).unwrap();
    assert_eq!(&bytes, b"12345\0");
}

#[test]
fn an_offset_need_not_be_aligned() {
    let file = memfd(3 * PAGE);
    let offset = PAGE + 24;
    let memory = GuestMemory::new(&[region(0, PAGE, &file, offset)], &rules()).unwrap();
    memory.write(0, b"first").unwrap();
    memory.write(PAGE - 4, b"last").unwrap();
    let mut bytes = [0; 5];
    file.read_exact_at(&mut bytes, offset).unwrap();
    assert_eq!(&bytes, b"first");
    file.read_exact_at(&mut bytes[..4], offset + PAGE - 4).unwrap();
    assert_eq!(&bytes[..4], b"last");
    assert!(memory.read(PAGE, &mut bytes).is_err(), "mapped in fact, but not in the region");
}

#[test]
fn accesses_cross_regions_that_touch() {
    let file = memfd(4 * PAGE);
    // In reverse order in the file, so that nothing works by accident.
    let regions = [region(2 * PAGE, PAGE, &file, 0), region(PAGE, PAGE, &file, 2 * PAGE)];
    let memory = GuestMemory::new(&regions, &rules()).unwrap();
    let text = b"across the border";
    memory.write(2 * PAGE - 6, text).unwrap();
    let mut bytes = [0; 17];
    memory.read(2 * PAGE - 6, &mut bytes).unwrap();
    assert_eq!(&bytes, text);
    file.read_exact_at(&mut bytes[..11], 0).unwrap();
    assert_eq!(&bytes[..11], b" the border");

    for (addr, first_bad) in [(PAGE - 1, PAGE - 1), (3 * PAGE - 4, 3 * PAGE), (u64::MAX, u64::MAX)]
    {
        let error = memory.read(addr, &mut bytes).unwrap_err();
        assert!(matches!(error, MemoryError::Unmapped { addr } if addr == first_bad), "{error}");
        let error = memory.write(addr, &bytes).unwrap_err();
        assert!(matches!(error, MemoryError::Unmapped { addr } if addr == first_bad), "{error}");
    }
    memory.read(u64::MAX, &mut []).unwrap();
}

#[test]
fn bad_regions_are_refused() {
    let file = memfd(2 * PAGE);
    let try_one = |config: RegionConfig| GuestMemory::new(&[config], &rules()).unwrap_err();
    assert!(matches!(try_one(region(0, 0, &file, 0)), MemoryError::EmptyRegion { guest_addr: 0 }));

    let guest_wraps = RegionConfig { user_addr: 0, ..region(u64::MAX - PAGE, 2 * PAGE, &file, 0) };
    assert!(matches!(try_one(guest_wraps), MemoryError::AddressWrap { .. }));
    let user_wraps = RegionConfig { user_addr: u64::MAX - 1, ..region(0, PAGE, &file, 0) };
    assert!(matches!(try_one(user_wraps), MemoryError::AddressWrap { .. }));
    assert!(matches!(
        try_one(region(0, PAGE, &file, u64::MAX - 1)),
        MemoryError::AddressWrap { file_offset, .. } if file_offset == u64::MAX - 1
    ));

    let too_long = try_one(region(0, PAGE + 1, &file, PAGE));
    assert!(
        matches!(too_long, MemoryError::FileTooShort { needed, length, .. }
            if needed == 2 * PAGE + 1 && length == 2 * PAGE),
        "{too_long}"
    );
    GuestMemory::new(&[region(0, PAGE, &file, PAGE)], &rules()).unwrap();

    // The file is memory, but must not be written.
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    let read_only = Arc::new(File::open(name).unwrap());
    let refused = try_one(region(0, PAGE, &read_only, 0));
    assert!(matches!(refused, MemoryError::Map { .. }), "{refused}");
}

#[test]
fn memory_must_come_from_files_that_have_seals() {
    let any = MappingRules { files: MemoryFiles::Any, ..rules() };
    let on_disk = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    on_disk.set_len(2 * PAGE).unwrap();
    let config = region(0, PAGE, &Arc::new(on_disk), PAGE);
    let refused = GuestMemory::new(slice::from_ref(&config), &rules()).unwrap_err();
    assert!(matches!(refused, MemoryError::NotMemory { .. }), "{refused}");
    let refused = GuestMemory::empty().with_region(&config, &rules()).unwrap_err();
    assert!(matches!(refused, MemoryError::NotMemory { .. }), "{refused}");
    let memory = GuestMemory::new(&[config], &any).unwrap();
    memory.write(0, b"asked for").unwrap();

    let (pipe, _writer) = std::io::pipe().unwrap();
    let pipe = File::from(OwnedFd::from(pipe));
    for file in [File::open("/").unwrap(), pipe, File::open("/dev/zero").unwrap()] {
        let refused = GuestMemory::new(&[region(0, PAGE, &Arc::new(file), 0)], &rules());
        assert!(matches!(refused, Err(MemoryError::NotMemory { .. })), "{refused:?}");
    }
    let directory = Arc::new(File::open("/").unwrap());
    let refused = GuestMemory::new(&[region(0, PAGE, &directory, 0)], &any);
    assert!(matches!(refused, Err(MemoryError::NotMemory { .. })), "{refused:?}");

    // A named file in a file system of memory is as good as an unnamed one.
    let shm = Path::new("/dev/shm");
    if shm.exists() {
        let named = tempfile::tempfile_in(shm).unwrap();
        named.set_len(PAGE).unwrap();
        GuestMemory::new(&[region(0, PAGE, &Arc::new(named), 0)], &rules()).unwrap();
    }
}

#[test]
fn a_map_keeps_no_descriptor_open() {
    let file = memfd(2 * PAGE);
    let config = region(0, PAGE, &file, 0);
    let memory = GuestMemory::new(&[config], &rules()).unwrap();
    assert_eq!(Arc::strong_count(&file), 1, "the map holds the file");
    drop(file);
    memory.write(0, b"still mapped").unwrap();
}

#[test]
fn mapped_bytes_are_counted_and_limited() {
    let file = memfd(8 * PAGE);
    let process = MappingBudget::new("all memory", 4 * PAGE);
    let budget = process.child("this memory", 3 * PAGE);
    let rules = MappingRules { budget: budget.clone(), ..rules() };
    let mapped = || (budget.mapped_bytes() / PAGE, process.mapped_bytes() / PAGE);
    // A region in the middle of two pages takes both.
    let one = GuestMemory::new(&[region(0, PAGE, &file, PAGE / 2)], &rules).unwrap();
    assert_eq!(mapped(), (2, 2));
    let two = one.with_region(&region(0x10 * PAGE, PAGE, &file, 0), &rules).unwrap();
    assert_eq!(mapped(), (3, 3), "the maps share a region, which counts once");
    let error = two.with_region(&region(0x20 * PAGE, PAGE, &file, 0), &rules).unwrap_err();
    assert!(
        matches!(error, MemoryError::OverBudget { needed, mapped, limit, what: "this memory", .. }
            if (needed, mapped, limit) == (PAGE, 3 * PAGE, 3 * PAGE)),
        "{error}"
    );
    assert!(error.to_string().contains("12288"), "{error}");
    drop(one);
    assert_eq!(mapped(), (3, 3), "the later map still has both");
    let rest = two.without_region(0, USER, PAGE).unwrap();
    drop(two);
    assert_eq!(mapped(), (1, 1));

    // A second front-end uses the budget. Bytes that it gives back are available again.
    let other = MappingRules { budget: process.child("that memory", 4 * PAGE), ..rules.clone() };
    let hold = GuestMemory::new(&[region(0, 3 * PAGE, &file, 0)], &other).unwrap();
    let error = rest.with_region(&region(0, PAGE, &file, 0), &rules).unwrap_err();
    assert!(matches!(error, MemoryError::OverBudget { what: "all memory", .. }), "{error}");
    assert_eq!(mapped(), (1, 4));
    drop(hold);
    // A region that is refused for a different reason does not stay counted.
    let overlap = rest.with_region(&region(0x10 * PAGE, PAGE, &file, 0), &rules).unwrap_err();
    assert!(matches!(overlap, MemoryError::Overlap { .. }), "{overlap}");
    let too_long = GuestMemory::new(
        &[region(0, PAGE, &file, 0), region(2 * PAGE, 9 * PAGE, &file, 0)],
        &rules,
    );
    assert!(matches!(too_long, Err(MemoryError::FileTooShort { .. })));
    assert_eq!(mapped(), (1, 1));
    drop(rest);
    assert_eq!(mapped(), (0, 0));
}

/// The file is larger than the address space. The budget refuses it before the kernel is asked.
#[test]
fn a_sparse_file_does_not_use_up_address_space() {
    let file = memfd(1 << 47);
    let budget = MappingBudget::new("memory", 16 << 40);
    let rules = MappingRules { budget, ..rules() };
    let error = GuestMemory::new(&[region(0, 1 << 47, &file, 0)], &rules).unwrap_err();
    assert!(matches!(error, MemoryError::OverBudget { .. }), "{error}");
}

#[test]
fn overlaps_are_refused_in_both_address_spaces() {
    let file = memfd(4 * PAGE);
    let first = region(4 * PAGE, 2 * PAGE, &file, 0);
    let memory = GuestMemory::new(&[first], &rules()).unwrap();
    for guest_addr in [4 * PAGE, 5 * PAGE + 0xfff, 3 * PAGE + 1] {
        let config = RegionConfig { user_addr: 0, ..region(guest_addr, PAGE, &file, 0) };
        let error = memory.with_region(&config, &rules()).unwrap_err();
        assert!(matches!(error, MemoryError::Overlap { space: "guest", .. }), "{error}");
    }
    let config = RegionConfig { user_addr: USER + 5 * PAGE, ..region(0, PAGE, &file, 0) };
    let error = memory.with_region(&config, &rules()).unwrap_err();
    assert!(matches!(error, MemoryError::Overlap { space: "front-end", .. }), "{error}");
    for guest_addr in [3 * PAGE, 6 * PAGE] {
        memory.with_region(&region(guest_addr, PAGE, &file, 2 * PAGE), &rules()).unwrap();
    }
}

#[test]
fn successive_maps_share_regions() {
    let file = memfd(2 * PAGE);
    let empty = GuestMemory::empty();
    assert_eq!(empty.num_regions(), 0);
    assert!(empty.read(0, &mut [0]).is_err());
    let one = empty.with_region(&region(0, PAGE, &file, 0), &rules()).unwrap();
    let two = one.with_region(&region(0x10 * PAGE, PAGE, &file, PAGE), &rules()).unwrap();
    assert_eq!((one.num_regions(), two.num_regions()), (1, 2));

    assert_eq!(two.guest_addr_of_user(USER + 0x10 * PAGE + 7), Some(0x10 * PAGE + 7));
    assert_eq!(one.guest_addr_of_user(USER + 0x10 * PAGE + 7), None);
    assert_eq!(two.guest_addr_of_user(USER + PAGE), None);
    assert_eq!(two.guest_addr_of_user(USER - 1), None);

    for (guest_addr, user_addr, size) in
        [(PAGE, USER, PAGE), (0, USER + 1, PAGE), (0, USER, PAGE - 1)]
    {
        let error = two.without_region(guest_addr, user_addr, size).unwrap_err();
        assert!(matches!(error, MemoryError::UnknownRegion { .. }), "{error}");
    }
    let rest = two.without_region(0, USER, PAGE).unwrap();
    assert_eq!(rest.num_regions(), 1);
    drop((one, two));
    rest.write(0x10 * PAGE, b"still mapped").unwrap();
    assert!(rest.read(0, &mut [0]).is_err());
}

#[test]
fn regions_can_be_added_up_to_the_maximum() {
    let count = u64::try_from(MAX_REGIONS).unwrap();
    let file = memfd((count + 1) * PAGE);
    // Every second page of guest memory, the last first.
    let configs: Vec<_> =
        (0..count).rev().map(|i| region(2 * i * PAGE, PAGE, &file, i * PAGE)).collect();
    let memory = GuestMemory::new(&configs, &rules()).unwrap();
    assert_eq!(memory.num_regions(), MAX_REGIONS);
    for i in 0..count {
        memory.write(2 * i * PAGE + 8, &i.to_le_bytes()).unwrap();
        assert!(memory.read((2 * i + 1) * PAGE, &mut [0]).is_err());
    }
    let mut bytes = [0; 8];
    for i in 0..count {
        file.read_exact_at(&mut bytes, i * PAGE + 8).unwrap();
        assert_eq!(u64::from_le_bytes(bytes), i);
    }
    let one_more = region(2 * count * PAGE, PAGE, &file, count * PAGE);
    let error = memory.with_region(&one_more, &rules()).unwrap_err();
    assert!(matches!(error, MemoryError::TooManyRegions { count: 510, max: 509 }), "{error}");
    let all: Vec<_> = configs.into_iter().chain([one_more]).collect();
    assert!(matches!(GuestMemory::new(&all, &rules()), Err(MemoryError::TooManyRegions { .. })));
}

#[test]
fn copies_work_at_any_alignment() {
    let memory = GuestMemory::anonymous(&[(0, PAGE)]).unwrap();
    let pattern: Vec<u8> = (0..64).collect();
    for start in 0..9_usize {
        for len in 0..40_usize {
            memory.write(0, &[0xff; 64]).unwrap();
            let addr = u64::try_from(start).unwrap();
            memory.write(addr, &pattern[..len]).unwrap();
            let mut whole = [0; 64];
            memory.read(0, &mut whole).unwrap();
            assert_eq!(&whole[start..start + len], &pattern[..len]);
            assert!(whole[..start].iter().chain(&whole[start + len..]).all(|&byte| byte == 0xff));
            let mut part = vec![0; len];
            memory.read(addr, &mut part).unwrap();
            assert_eq!(part, pattern[..len]);
        }
    }
}

#[test]
fn a_map_is_shared_between_threads_and_local_references_are_counted() {
    fn is_shared<T: Send + Sync>(_: &T) {}
    let memory = Arc::new(GuestMemory::anonymous(&[(0, PAGE)]).unwrap());
    is_shared(&memory);
    let local = LocalMemory::new(Arc::clone(&memory));
    let clone = local.clone();
    assert_eq!(Arc::strong_count(&memory), 3, "a clone costs no atomic operation");
    drop(local);
    clone.write(0, b"x").unwrap();
    drop(clone);
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn host_addresses_of_lists_lead_back_to_guest_addresses() {
    let memory = GuestMemory::anonymous(&[(0, PAGE), (16 * PAGE, PAGE)]).unwrap();
    let local = LocalMemory::new(Arc::new(memory));
    let whole = local.whole();
    let expected = [(0, PAGE), (16 * PAGE, PAGE)];
    for (range, (addr, size)) in whole.iovecs().iter().zip(expected) {
        assert_eq!(range.iov_len as u64, size);
        let host = range.iov_base.cast::<u8>().cast_const();
        assert_eq!(local.guest_addr_of_host(host), Some(addr));
        assert_eq!(local.guest_addr_of_host(host.wrapping_add(range.iov_len - 1)), {
            Some(addr + size - 1)
        });
        assert_ne!(local.guest_addr_of_host(host.wrapping_sub(1)), Some(addr.wrapping_sub(1)));
    }
}
