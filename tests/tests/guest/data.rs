//! A guest reads, writes and discards in all ways.

use std::path::Path;

use anyhow::Result;
use ringhaul_kit::guest::Vm;
use ringhaul_kit::server::{Cache, Engine, Export, allocated_bytes};

use super::{
    Boot, FILES_CHECK, FILES_WRITE, FIO_VERIFY, LIMIT, Scene, WRITE_ZEROES, boot, boot_fast,
    check_attributes, check_clean_exit, check_file_system, check_same_bytes, scenario, with,
};

const TRIM: &str = include_str!("../../guest/trim.sh");

/// Less than the size of the files in the guest's folder `lib`.
const TRIMMED_BYTES: u64 = 16 << 20;

/// The space that a file system on the host may use for a file that is one hole.
const HOLE_BYTES: u64 = 64 * 1024;

/// Reads, writes and discards in all ways, with one engine and one cache mode.
fn data(
    boot: Boot,
    (engine, cache): (Engine, Cache),
    logical_block_bytes: u32,
    queue_size: u16,
) -> Result<()> {
    scenario(|| {
        let scene = Scene::new()?;
        let export = scene.export(&format!("{engine}-{cache}"), engine, cache)?;
        data_of(&scene, &Export { logical_block_bytes, queue_size, ..export }, boot)
    })
}

pub(super) fn data_of(scene: &Scene, export: &Export, boot: Boot) -> Result<()> {
    let mut server = scene.serve(export)?;
    let mut vm = boot(&[export])?;
    let disk = ("DISK", "vda");

    check_attributes(&mut vm, "vda", &server)?;
    let min_bytes = export.logical_block_bytes.to_string();
    vm.check(&with(FIO_VERIFY, &[disk, ("MIN_BYTES", &min_bytes)]), LIMIT)?;
    check_same_bytes(&mut vm, "vda", &export.file)?;
    check_discard(&mut vm, &export.file)?;
    vm.check(&with(WRITE_ZEROES, &[disk]), LIMIT)?;

    vm.check(&with(FILES_WRITE, &[disk]), LIMIT)?;
    vm.check(&with(FILES_CHECK, &[disk]), LIMIT)?;
    check_trim(&mut vm, &export.file)?;
    vm.check("e2fsck -f -n /dev/vda", LIMIT)?;
    check_same_bytes(&mut vm, "vda", &export.file)?;

    vm.power_off(LIMIT)?;
    server.check_running()?;
    check_clean_exit(&mut server)?;
    check_file_system(&export.file)
}

/// Trims a file system after a part of its files was deleted. The host frees their space.
fn check_trim(vm: &mut Vm, file: &Path) -> Result<()> {
    let before = allocated_bytes(file)?;
    vm.check(&with(TRIM, &[("DISK", "vda"), ("DELETED", "lib")]), LIMIT)?;
    let after = allocated_bytes(file)?;
    assert!(after + TRIMMED_BYTES < before, "{after} of {before} bytes are still allocated");
    Ok(())
}

/// Discards a disk with data, which must then read as zeroes and take no space on the host.
fn check_discard(vm: &mut Vm, file: &Path) -> Result<()> {
    vm.check("dd if=/dev/urandom of=/dev/vda bs=1M count=16 conv=fsync", LIMIT)?;
    let before = allocated_bytes(file)?;
    assert!(before > 16 * 1024 * 1024, "only {before} bytes are allocated");
    vm.check("/usr/sbin/blkdiscard /dev/vda", LIMIT)?;
    let after = allocated_bytes(file)?;
    assert!(after <= HOLE_BYTES, "{after} of {before} bytes are still allocated");
    let script = "echo 3 >/proc/sys/vm/drop_caches\ntr -d '\\0' </dev/vda | wc -c\n";
    assert_eq!(vm.check(script, LIMIT)?, "0", "bytes that are not zero");
    Ok(())
}

#[test]
fn with_io_uring_direct() -> Result<()> {
    data(boot, (Engine::IoUring, Cache::None), 512, 64)
}

#[test]
fn with_io_uring_in_the_page_cache() -> Result<()> {
    data(boot_fast, (Engine::IoUring, Cache::Writeback), 4096, 256)
}

#[test]
fn with_aio_direct() -> Result<()> {
    data(boot_fast, (Engine::Aio, Cache::None), 512, 256)
}

#[test]
fn with_aio_in_the_page_cache() -> Result<()> {
    data(boot_fast, (Engine::Aio, Cache::Writeback), 4096, 256)
}

#[test]
fn with_threads_direct() -> Result<()> {
    data(boot, (Engine::Threads, Cache::None), 4096, 1024)
}

#[test]
fn with_threads_in_the_page_cache() -> Result<()> {
    data(boot_fast, (Engine::Threads, Cache::Writeback), 512, 256)
}
