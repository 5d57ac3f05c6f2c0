//! A program that reads and writes a disk without a guest.

use ringhaul_embed::{Buffers, DiskOptions, DiskSource, IoThread, IoThreadConfig};

#[test]
fn a_loop_for_a_disk_reads_into_owned_memory() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    for direct in [false, true] {
        let options = DiskOptions { direct, ..DiskOptions::default() };
        let source = DiskSource::file(file.path(), &options).unwrap();
        let thread = IoThread::for_disk(&source, &IoThreadConfig::default()).unwrap();
        let disk = source.attach(thread.io());
        let data = vec![u8::from(direct) + 1; 4096];
        let write = disk.write(4096, Buffers::from_vec(data.clone()), false);
        thread.block_on(write).unwrap().unwrap();
        assert_eq!(thread.block_on(disk.read_vec(4096, 4096)).unwrap().unwrap(), data);
        assert!(thread.block_on(disk.read_vec(1 << 20, 4096)).unwrap().is_err());
    }
}
