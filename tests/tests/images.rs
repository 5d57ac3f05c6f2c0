//! qcow2 images: QEMU's programs find the written data in them, and no fault.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt as _, MetadataExt};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Finished, Refusals, Running, TestFolders, bench, ringhaul, run};
use ringhaul_kit::control::taking_over;
use ringhaul_kit::daemon::pattern;
use ringhaul_kit::frontend::{Frontend, Setup, blk, segment};
use ringhaul_kit::system::{is_installed, run as run_program};
use rustix::process::Signal;

const MIB: usize = 1 << 20;
/// Bytes of one request.
const REQUEST_BYTES: usize = 128 << 10;
const DISK_BYTES: usize = 8 * MIB;

/// The folder of a test's images, and the expected contents of its disk.
struct Images {
    folders: TestFolders,
    content: Vec<u8>,
}

/// A daemon that serves an image, and its front-end.
struct Served {
    daemon: Running,
    frontend: Frontend,
}

impl Images {
    fn new() -> Result<Self> {
        let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
        Ok(Self { folders, content: vec![0; DISK_BYTES] })
    }

    fn path(&self, name: &str) -> Result<String> {
        let path = self.folders.path(name).into_os_string().into_string();
        path.ok().context("a path with an odd name")
    }

    /// Runs `qemu-img` with these words; `@` stands for the path of the folder.
    fn qemu_img(&self, words: &str) -> Result<String> {
        let full = |word: &str| match word.strip_prefix('@') {
            Some(name) => self.path(name),
            None => Ok(word.to_owned()),
        };
        let words = words.split_whitespace().map(full).collect::<Result<Vec<_>>>()?;
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        run_program("qemu-img", &words)
    }

    /// The name of a disk in an image that may have all backing files beside it.
    fn name(&self, image: &str) -> Result<String> {
        Ok(format!("qcow2,backing=beside,path={}", self.path(image)?))
    }

    fn command(&self, disk: &str) -> Result<Command> {
        let mut command = ringhaul()?;
        command.arg("serve").arg("--socket-path").arg(self.folders.socket("disk.sock"));
        command.args(["--disk", disk]);
        Ok(command)
    }

    fn serve(&self, image: &str) -> Result<Served> {
        let mut command = self.command(&self.name(image)?)?;
        command.arg("--control").arg(self.folders.socket("control"));
        let daemon = Running::serve(&mut command)?;
        let frontend = Frontend::attach(&self.folders.socket("disk.sock"), &Setup::default())?;
        Ok(Served { daemon, frontend })
    }

    fn write(&mut self, served: &mut Served, place: usize, data: &[u8]) -> Result<()> {
        served.frontend.write(0, sector(place)?, data)?;
        self.content[place..place + data.len()].copy_from_slice(data);
        Ok(())
    }

    /// Writes of all sizes, some of them into allocated places.
    fn write_all_over(&mut self, served: &mut Served) -> Result<()> {
        for (index, bytes) in [512, 4096, 65_536, REQUEST_BYTES].into_iter().enumerate() {
            for round in 0..2 {
                let place = index * MIB + 512 + round * 2048;
                self.write(served, place, &pattern((index * 2 + round) as u64, bytes))?;
            }
        }
        self.write(served, DISK_BYTES - 512, &pattern(99, 512))?;
        self.check(served)
    }

    fn check(&self, served: &mut Served) -> Result<()> {
        for (index, expected) in self.content.chunks(REQUEST_BYTES).enumerate() {
            let found = served.frontend.read(1, sector(index * REQUEST_BYTES)?, REQUEST_BYTES)?;
            ensure!(found == expected, "request {index} reads something else");
        }
        Ok(())
    }

    /// Checks that QEMU finds no fault in a closed image, and reads the expected contents.
    fn check_image(&self, image: &str) -> Result<()> {
        self.qemu_img(&format!("check -q @{image}"))?;
        let front = fs::read(self.path(image)?)?;
        ensure!(front[7] < 3 || front[79] & 1 == 0, "the image is marked");
        fs::write(self.path("expected.img")?, &self.content)?;
        self.qemu_img(&format!("compare -q -f raw -F qcow2 @expected.img @{image}")).map(drop)
    }

    fn info(&self, disk: &str) -> Result<Finished> {
        run(ringhaul()?.args(["disk", "info", disk]))
    }
}

impl Served {
    fn change(&mut self, kind: u32, place: usize, bytes: usize, flags: u32) -> Result<()> {
        let part = segment(sector(place)?, u32::try_from(sector(bytes)?)?, flags);
        let answer = self.frontend.request(0, kind, 0, &part, 0)?;
        ensure!(answer.status == blk::OK, "request {kind} ended with {answer:?}");
        Ok(())
    }

    fn end(mut self) -> Result<()> {
        let flushed = self.frontend.request(0, blk::FLUSH, 0, &[], 0)?.status;
        ensure!(flushed == blk::OK, "a flush ended with {flushed}");
        drop(self.frontend);
        self.daemon.signal(Signal::TERM)?;
        self.daemon.finish()?.expect_code(0).map(drop)
    }
}

fn sector(byte: usize) -> Result<u64> {
    Ok(u64::try_from(byte)? / 512)
}

fn has_programs() -> bool {
    is_installed("qemu-img")
}

#[test]
fn qemu_reads_written_data_in_images_of_all_kinds() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    for options in [
        "preallocation=off",
        "preallocation=metadata",
        "cluster_size=512",
        "cluster_size=2M,preallocation=falloc",
        "compat=0.10",
        "refcount_bits=1",
    ] {
        let mut images = Images::new()?;
        images.qemu_img(&format!("create -q -f qcow2 -o {options} @disk {DISK_BYTES}"))?;
        let mut served = images.serve("disk")?;
        images.write_all_over(&mut served).context(options)?;
        let (place, bytes) = (MIB + 8192, 3 * MIB / 2 + 512);
        for (flags, place) in [(0, place), (1, place + MIB)] {
            served.change(blk::WRITE_ZEROES, place, bytes, flags).context(options)?;
            images.content[place..place + bytes].fill(0);
        }
        images.check(&mut served).context(options)?;
        images.write_all_over(&mut served).context(options)?;
        served.end()?;
        images.check_image("disk").context(options)?;
    }
    Ok(())
}

#[test]
fn a_disk_keeps_changes_over_its_backing_files() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    let mut images = Images::new()?;
    // The base is shorter than the image over it.
    let base = pattern(7, DISK_BYTES / 2);
    fs::write(images.path("base.img")?, &base)?;
    images.content[..base.len()].copy_from_slice(&base);
    let middle = "create -q -f qcow2 -o cluster_size=4k -b base.img -F raw @middle";
    images.qemu_img(&format!("{middle} {DISK_BYTES}"))?;
    let mut served = images.serve("middle")?;
    images.check(&mut served)?;
    images.write(&mut served, 3 * MIB + 512, &pattern(8, 9 * 512))?;
    served.end()?;
    images.check_image("middle")?;
    // QEMU compresses an image, which is then read and overwritten.
    let before = images.content.clone();
    for kind in ["zlib", "zstd"] {
        images.content.clone_from(&before);
        let compress = format!("convert -c -O qcow2 -o compression_type={kind}");
        images.qemu_img(&format!("{compress} @middle @compressed"))?;
        images.qemu_img("create -q -f qcow2 -b compressed -F qcow2 @disk")?;
        let disk = images.name("disk")?;
        let text = images.info(&disk)?.expect_code(0)?.stdout;
        for words in ["format    qcow2", "/disk\n", "/compressed\n", ", backing file"] {
            ensure!(text.contains(words), "no {words:?}:\n{text}");
        }
        for image in ["disk", "compressed"] {
            images.content.clone_from(&before);
            let mut served = images.serve(image)?;
            images.check(&mut served)?;
            images.write_all_over(&mut served)?;
            // Data of the backing file must not reappear.
            served.change(blk::WRITE_ZEROES, 2 * MIB, MIB, 1)?;
            images.content[2 * MIB..3 * MIB].fill(0);
            images.check(&mut served)?;
            served.end()?;
            images.check_image(image)?;
        }
    }
    Ok(())
}

/// The name of a backing file is relative to the link that leads to the image, like in QEMU.
#[test]
fn backing_files_are_found_from_links() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    let mut images = Images::new()?;
    images.content = pattern(7, DISK_BYTES);
    fs::write(images.path("base.img")?, &images.content)?;
    fs::create_dir(images.path("store")?)?;
    images.qemu_img("create -q -f qcow2 -u -b base.img -F raw @store/middle 8M")?;
    std::os::unix::fs::symlink("store/middle", images.path("link")?)?;
    images.qemu_img("create -q -f qcow2 -b link -F qcow2 @disk")?;
    let mut served = images.serve("disk")?;
    images.check(&mut served)?;
    served.end()?;
    images.check_image("disk")
}

#[test]
fn a_discard_frees_clusters_and_their_space() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    let mut images = Images::new()?;
    images.qemu_img(&format!("create -q -f qcow2 @disk {DISK_BYTES}"))?;
    let path = images.path("disk")?;
    let allocated = || Ok::<_, anyhow::Error>(fs::metadata(&path)?.blocks() * 512);
    let mut served = images.serve("disk")?;
    let mut sizes = Vec::new();
    for round in 0..3 {
        for place in (0..DISK_BYTES).step_by(REQUEST_BYTES) {
            images.write(&mut served, place, &pattern(round, REQUEST_BYTES))?;
        }
        images.check(&mut served)?;
        let full = allocated()?;
        served.change(blk::DISCARD, 0, DISK_BYTES, 0)?;
        images.content.fill(0);
        images.check(&mut served)?;
        let empty = allocated()?;
        ensure!(full - empty >= DISK_BYTES as u64 / 2, "{full} bytes, and {empty} afterwards");
        sizes.push(fs::metadata(&path)?.len());
    }
    served.end()?;
    ensure!(sizes.iter().all(|size| *size == sizes[0]), "clusters are not used again: {sizes:?}");
    images.check_image("disk")
}

/// A request may reuse the clusters that it frees: for a copy of data of the backing file at an
/// edge, and for a new table.
#[test]
fn clusters_that_zeroes_free_are_reused_safely() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    const KIB: usize = 1 << 10;
    // With clusters of 512 bytes, one table maps 32 KiB.
    for (options, written, zeroed, kind) in [
        ("cluster_size=64k", 0..64 * KIB, 0..68 * KIB, blk::WRITE_ZEROES),
        ("cluster_size=64k", 64 * KIB..128 * KIB, 60 * KIB..128 * KIB, blk::WRITE_ZEROES),
        ("cluster_size=512", 0..32 * KIB, 0..40 * KIB, blk::WRITE_ZEROES),
        ("cluster_size=512", 0..32 * KIB, 512..MIB + 512, blk::WRITE_ZEROES),
        ("cluster_size=512", 0..32 * KIB, 0..MIB, blk::DISCARD),
    ] {
        let mut images = Images::new()?;
        images.content = pattern(5, DISK_BYTES);
        fs::write(images.path("base.img")?, &images.content)?;
        images.qemu_img(&format!("create -q -f qcow2 -o {options} -b base.img -F raw @disk"))?;
        let mut served = images.serve("disk")?;
        images.write(&mut served, written.start, &pattern(6, written.len()))?;
        served.change(kind, zeroed.start, zeroed.len(), u32::from(kind == blk::WRITE_ZEROES))?;
        images.content[zeroed.clone()].fill(0);
        let what = || format!("{options}, request {kind} of {zeroed:?}");
        images.check(&mut served).with_context(what)?;
        served.end()?;
        images.check_image("disk").with_context(what)?;
        let mut served = images.serve("disk")?;
        images.check(&mut served).with_context(what)?;
        served.end()?;
    }
    Ok(())
}

/// More first writes at once than imago keeps L2 tables in memory, each to a separate table.
#[test]
fn more_tables_than_fit_in_memory_are_made_at_once() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    let images = Images::new()?;
    images.qemu_img("create -q -f qcow2 -o cluster_size=512 @disk 64M")?;
    let mut command = images.command(&images.name("disk")?)?;
    let mut daemon = Running::serve(command.args(["--num-queues", "4", "--iothreads", "2"]))?;
    let load = "--rw randwrite --bs 512 --iodepth 128 --numjobs 4 --number_ios 1000 --verify";
    run(&mut bench(&images.folders.socket("disk.sock"), load)?)?.expect_code(0)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    images.qemu_img("check -q @disk").map(drop)
}

/// Many requests at once, of which many are the first in their cluster.
#[test]
fn concurrent_requests_do_not_harm_each_other() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    for options in ["cluster_size=4k", "cluster_size=64k"] {
        let images = Images::new()?;
        images.qemu_img(&format!("create -q -f qcow2 -o {options} @disk 64M"))?;
        let mut command = images.command(&images.name("disk")?)?;
        let mut daemon = Running::serve(command.args(["--iothreads", "2"]))?;
        let load = "--rw randrw --bssplit 512/20:4k/40:32k/30:200k/10 --iodepth 16 --numjobs 2 \
                    --number_ios 1500 --fsync 50 --verify";
        run(&mut bench(&images.folders.socket("disk.sock"), load)?)?.expect_code(0)?;
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0)?;
        images.qemu_img("check -q @disk")?;
    }
    Ok(())
}

#[test]
fn an_image_grows_while_it_is_served() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    let mut images = Images::new()?;
    images.content = pattern(1, DISK_BYTES);
    fs::write(images.path("base.img")?, &images.content)?;
    images.qemu_img("create -q -f qcow2 -b base.img -F raw @disk")?;
    let mut served = images.serve("disk")?;
    images.check(&mut served)?;
    let socket = images.folders.socket("disk.sock");
    let control = images.folders.socket("control");
    let resize = |size: &str| {
        let mut command = ringhaul()?;
        run(command.args(["ctl", "--control"]).arg(&control).arg("resize").arg(&socket).arg(size))
    };
    resize("16M")?.expect_code(0)?;
    let shrunk = resize("8M")?;
    ensure!(shrunk.status.code() != Some(0), "it was made smaller");
    images.content.resize(2 * DISK_BYTES, 0);
    images.check(&mut served)?;
    images.write(&mut served, 2 * DISK_BYTES - 4096, &pattern(3, 4096))?;
    images.check(&mut served)?;
    served.end()?;
    images.check_image("disk")?;
    // Data of a longer base behind the old end was never on the disk.
    images.qemu_img(&format!("create -q -f qcow2 -b disk -F qcow2 @short {DISK_BYTES}"))?;
    let served = images.serve("short")?;
    let refused = resize("16M")?;
    ensure!(refused.status.code() != Some(0), "it has grown over a longer base");
    ensure!(refused.stderr.contains("backing file is larger"), "{}", refused.stderr);
    served.end()
}

/// Removes the backing file's format from an image; QEMU makes no image without one.
fn forget_format(image: &str) -> Result<()> {
    let mut front = fs::read(image)?;
    let of_format = 0xe279_2aca_u32.to_be_bytes();
    let place = front.windows(4).position(|bytes| bytes == of_format).context("no format")?;
    front[place] = 0x12;
    Ok(fs::write(image, front)?)
}

#[test]
fn unsupported_images_are_refused_with_a_reason() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    let images = Images::new()?;
    let base = images.path("base.img")?;
    File::create(&base)?.set_len(DISK_BYTES as u64)?;
    fs::create_dir(images.path("inner")?)?;
    for create in [
        "-o compression_type=zstd @compression 8M",
        "-o extended_l2=on @subclusters 8M",
        "-o data_file=@data @external 8M",
        "-o lazy_refcounts=on @lazy 8M",
        "@snapshots 8M",
        "-b ../base.img -F raw @inner/outside",
        "-u -b base.img -F raw @guessed 8M",
        "-u -b base.img -F vmdk @vmdk 8M",
        "-u -b nothing -F raw @absent 8M",
        "-u -b nbd://host/x -F raw @elsewhere 8M",
        "-u -b loop -F qcow2 @loop 8M",
        "-b base.img -F raw @overlay",
    ] {
        let create = create.replace("data_file=@", &format!("data_file={}/", images.path("")?));
        images.qemu_img(&format!("create -q -f qcow2 {create}"))?;
    }
    images.qemu_img("snapshot -q -c one @snapshots")?;
    let compression = OpenOptions::new().write(true).open(images.path("compression")?)?;
    compression.write_all_at(&[2], 104)?;
    images.qemu_img("create -q -f qcow2 @cut 8M")?;
    OpenOptions::new().write(true).open(images.path("cut")?)?.set_len(100)?;
    forget_format(&images.path("guessed")?)?;
    let mut refusals = Refusals::default();
    let mut check = |what: &str, disk: &str, words: &[&str]| {
        refusals.check(what, images.command(disk), words);
    };
    for (image, words) in [
        ("compression", ["compression of kind 2", "qemu-img convert"]),
        ("subclusters", ["extended L2", "qemu-img convert"]),
        ("external", ["external data file", "qemu-img convert"]),
        ("snapshots", ["internal snapshots (1)", "qemu-img snapshot -d"]),
        ("inner/outside", ["is outside the folder", "allow it with backing=/"]),
        ("guessed", ["does not state the format", "qemu-img rebase -u"]),
        ("vmdk", ["format vmdk is not supported", "qemu-img convert"]),
        ("cut", ["has the reference count 0", "qemu-img check -r all"]),
        ("absent", ["nothing", "qemu-img rebase -u"]),
        ("elsewhere", ["nbd://host/x", "only files can be backing files; copy"]),
        ("loop", ["the backing file of", "form a loop through"]),
        ("base.img", ["not a qcow2 image", "qemu-img create"]),
    ] {
        check(image, &images.name(image)?, &words);
    }
    let auto = format!("image,format=auto,path={base}");
    check("a raw disk", &auto, &["its user could write the header of an image", "raw,over"]);
    check("a layer", &format!("qcow2,over=raw,over={base}"), &[&base, "not a qcow2 image"]);
    let overlay = format!("image,format=auto,path={}", images.path("overlay")?);
    let words = ["allows no backing file", "name of the disk: backing=base.img", "backing=beside"];
    check("an image that a guest could have made", &overlay, &words);
    refusals.finish()?;
    let outside = images.name("inner/outside")?.replace("beside", "anywhere");
    let overlay = format!("{overlay},backing=beside");
    for disk in [outside, images.name("lazy")?, auto, overlay, images.name("snapshots")?] {
        images.info(&disk)?.expect_code(0)?;
    }
    Ok(())
}

/// QEMU's programs see the locks of the image and of its backing file.
#[test]
fn images_are_locked_as_qemu_locks_them() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    let images = Images::new()?;
    images.qemu_img(&format!("create -q -f qcow2 @base {DISK_BYTES}"))?;
    images.qemu_img("create -q -f qcow2 -b base -F qcow2 @disk")?;
    let served = images.serve("disk")?;
    for image in ["disk", "base"] {
        let error = images.qemu_img(&format!("resize -f qcow2 @{image} +1M")).unwrap_err();
        let error = format!("{error:#}");
        ensure!(error.contains("lock"), "{image}: {error}");
    }
    // Another disk may use the same base.
    images.qemu_img("create -q -f qcow2 -b base -F qcow2 @other")?;
    images.info(&images.name("other")?)?.expect_code(0)?;
    served.end()
}

/// The new process opens the image while the old one still allocates in it.
#[test]
fn an_image_is_taken_over() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    let mut images = Images::new()?;
    images.qemu_img(&format!("create -q -f qcow2 -o cluster_size=4k @disk {DISK_BYTES}"))?;
    let mut served = images.serve("disk")?;
    for round in 0..3 {
        let mut next = Running::start(&mut taking_over(&images.folders)?)?;
        // Writes before and after the new process opens the image, and while the queues of the old
        // one stop.
        for place in (round * 2 * MIB..(round + 1) * 2 * MIB).step_by(8192) {
            images.write(&mut served, place, &pattern(place as u64, 8192))?;
        }
        next.wait_for("took over 1 export")?;
        let old = std::mem::replace(&mut served.daemon, next);
        old.finish()?.expect_code(0)?;
        images.check(&mut served)?;
    }
    images.write_all_over(&mut served)?;
    served.end()?;
    images.check_image("disk")
}
