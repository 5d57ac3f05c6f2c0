//! Images in qcow2 format on NBD servers: they have the space of the server's export.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, bench, ringhaul, run};
use ringhaul_kit::daemon::pattern;
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, Setup, blk, segment};
use ringhaul_kit::system::{is_installed, run as run_program};
use rustix::process::Signal;

use super::nbd::{NbdServer, serve, test_folders};

const MIB: usize = 1 << 20;
const DISK_BYTES: usize = 32 * MIB;
/// Bytes of one request.
const REQUEST_BYTES: usize = 128 << 10;
const CLUSTER: usize = 64 << 10;
/// The number of unanswered writes of a daemon that is killed.
const UNANSWERED: u16 = 8;

/// An image, its server, and the expected contents of its disk.
struct Image {
    folders: TestFolders,
    path: String,
    disk: String,
    content: Vec<u8>,
    _server: NbdServer,
}

/// A daemon that serves an image, and its front-end.
struct Served {
    daemon: Running,
    frontend: Frontend,
}

impl Image {
    /// Makes an image of `bytes` bytes, over a backing file if its contents are given. `None` if a
    /// program is not installed.
    fn new(base: Option<Vec<u8>>, bytes: usize) -> Result<Option<Self>> {
        if !["nbdkit", "qemu-img"].iter().all(|program| is_installed(program)) {
            return Ok(None);
        }
        let folders = test_folders()?;
        let [path, below] = ["image", "base"].map(|name| folders.path(name).display().to_string());
        let mut create = vec!["create", "-q", "-f", "qcow2"];
        let mut content = base.unwrap_or_default();
        if !content.is_empty() {
            fs::write(&below, &content)?;
            create.extend(["-b", &*below, "-F", "raw"]);
        }
        let size = DISK_BYTES.to_string();
        create.extend([&*path, &size]);
        run_program("qemu-img", &create)?;
        give_space(&path, bytes)?;
        content.resize(DISK_BYTES, 0);
        // nbdkit locks no file, so other programs may open the image.
        let server = NbdServer::start_nbdkit(&folders, &["file", &path])?;
        let disk = format!("qcow2,backing=anywhere,over={}", server.uri(""));
        Ok(Some(Self { folders, path, disk, content, _server: server }))
    }

    fn serve(&self) -> Result<Served> {
        let daemon = serve(&self.folders, &self.disk, &[])?;
        let frontend = Frontend::attach(&self.folders.socket("vm.sock"), &Setup::default())?;
        Ok(Served { daemon, frontend })
    }

    fn ctl(&self, words: &[&str]) -> Result<String> {
        let mut ctl = ringhaul()?;
        ctl.args(["ctl", "--control"]).arg(self.folders.socket("control")).args(words);
        Ok(run(&mut ctl)?.expect_code(0)?.stdout)
    }

    fn write(&mut self, served: &mut Served, place: usize, data: &[u8]) -> Result<()> {
        served.frontend.write(0, sector(place)?, data)?;
        self.content[place..place + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn check(&self, served: &mut Served) -> Result<()> {
        for (index, expected) in self.content.chunks(REQUEST_BYTES).enumerate() {
            let found = served.frontend.read(1, sector(index * REQUEST_BYTES)?, REQUEST_BYTES)?;
            ensure!(found == expected, "request {index} reads something else");
        }
        Ok(())
    }

    /// Checks that QEMU finds no fault in the image, and reads the expected contents.
    fn check_image(&self) -> Result<()> {
        run_program("qemu-img", &["check", "-q", &self.path])?;
        let expected = self.folders.path("expected").display().to_string();
        fs::write(&expected, &self.content)?;
        let compare = ["compare", "-q", "-f", "raw", "-F", "qcow2", &expected, &self.path];
        run_program("qemu-img", &compare).map(drop)
    }
}

impl Served {
    fn end(self) -> Result<()> {
        drop(self.frontend);
        end(self.daemon)
    }

    /// Begins writes from this byte on, each to its own cluster, and returns without waiting.
    fn begin_writes(&mut self, place: usize) -> Result<()> {
        self.frontend.memory.write(DATA, &pattern(1, 4096))?;
        for index in 0..UNANSWERED {
            let first = sector(place + usize::from(index) * CLUSTER)?;
            let (header, status) = self.frontend.put_header(0, index, blk::OUT, first)?;
            let data = Desc::readable(DATA, 4096);
            let chain = [Desc::readable(header, 16), data, Desc::writable(status, 1)];
            self.frontend.rings[0].put_chain(index * 3, &chain);
            self.frontend.rings[0].submit(index * 3)?;
        }
        Ok(())
    }
}

fn give_space(path: impl AsRef<Path>, bytes: usize) -> Result<()> {
    let file = OpenOptions::new().write(true).open(path).context("opening an image")?;
    file.set_len(bytes.try_into()?).context("giving it space")
}

fn sector(byte: usize) -> Result<u64> {
    Ok(u64::try_from(byte)? / 512)
}

fn end(mut daemon: Running) -> Result<()> {
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}

/// Writes to a full image wait, and continue after a request for the new size.
#[test]
fn a_full_image_continues_when_its_server_has_more_space() -> Result<()> {
    let Some(image) = Image::new(None, 8 * MIB)? else { return Ok(()) };
    let mut daemon = serve(&image.folders, &image.disk, &["--werror", "hold"])?;
    let vm = image.folders.socket("vm.sock");
    let load = format!("--rw randwrite --bs 64k --verify --number_ios {}", DISK_BYTES >> 16);
    let load = Running::start(&mut bench(&vm, &load)?)?;
    daemon.wait_for("it is full; extend it, then use `ringhaul ctl resize`")?;
    daemon.wait_for("has no space left, and writes wait for space")?;
    give_space(&image.path, 2 * DISK_BYTES)?;
    let output = image.ctl(&["resize", &vm.display().to_string()])?;
    ensure!(output.contains(&DISK_BYTES.to_string()), "{output}");
    let finished = load.finish()?.expect_code(0)?;
    ensure!(finished.stdout.contains(" 0 reads with wrong data"), "{}", finished.stdout);
    end(daemon)?;
    run_program("qemu-img", &["check", "-q", &image.path]).map(drop)
}

/// With a backing file, discards that the server carries out, and a resize.
#[test]
fn an_image_on_a_server_works_like_one_in_a_file() -> Result<()> {
    // The base is shorter than the disk.
    let base = pattern(7, DISK_BYTES / 2);
    let Some(mut image) = Image::new(Some(base), 3 * DISK_BYTES)? else { return Ok(()) };
    let mut served = image.serve()?;
    image.check(&mut served)?;
    for (round, bytes) in [512, 4096, REQUEST_BYTES].into_iter().enumerate() {
        for place in [MIB + 512, DISK_BYTES / 2 - 512, DISK_BYTES - REQUEST_BYTES] {
            image.write(&mut served, place, &pattern(round as u64, bytes))?;
        }
    }
    for place in (4 * MIB..12 * MIB).step_by(REQUEST_BYTES) {
        image.write(&mut served, place, &pattern(place as u64, REQUEST_BYTES))?;
    }
    image.check(&mut served)?;

    let allocated = || Ok::<_, anyhow::Error>(fs::metadata(&image.path)?.blocks() * 512);
    let before = allocated()?;
    let part = segment(sector(4 * MIB)?, u32::try_from(8 * MIB / 512)?, 0);
    let answer = served.frontend.request(0, blk::DISCARD, 0, &part, 0)?;
    ensure!(answer.status == blk::OK, "a discard ended with {answer:?}");
    let after = allocated()?;
    ensure!(after + 7 * MIB as u64 <= before, "{before} bytes, and {after} after a discard");
    image.content[4 * MIB..12 * MIB].fill(0);
    image.check(&mut served)?;

    let vm = image.folders.socket("vm.sock").display().to_string();
    image.ctl(&["resize", &vm, "48M"])?;
    image.content.resize(48 * MIB, 0);
    image.write(&mut served, 48 * MIB - REQUEST_BYTES, &pattern(3, REQUEST_BYTES))?;
    image.check(&mut served)?;
    served.end()?;
    image.check_image()
}

/// Answered writes are in the image, and QEMU finds no fault except leaked clusters.
#[test]
fn an_image_on_a_server_survives_its_daemon() -> Result<()> {
    let Some(mut image) = Image::new(None, 3 * DISK_BYTES)? else { return Ok(()) };
    let unchecked = 28 * MIB;
    for round in 0..4 {
        let mut served = image.serve()?;
        image.check(&mut served)?;
        for index in 0..20 + 7 * round {
            let place = (round * 5 + index * 11) * CLUSTER % unchecked;
            image.write(&mut served, place + 512, &pattern((round * 100 + index) as u64, 8192))?;
        }
        let begun = unchecked + round * usize::from(UNANSWERED) * CLUSTER;
        served.begin_writes(begun)?;
        served.daemon.signal(Signal::KILL)?;
        served.daemon.finish()?;
        let checked = Command::new("qemu-img").args(["check", "-q", &image.path]).output()?;
        ensure!(matches!(checked.status.code(), Some(0 | 3)), "round {round}: {checked:?}");
    }
    let load = "--rw randrw --verify --iodepth 16 --bssplit 4k/80:128k/20 --runtime 600";
    let mut daemon = serve(&image.folders, &image.disk, &[])?;
    let load = Running::start(&mut bench(&image.folders.socket("vm.sock"), load)?)?;
    daemon.wait_for("a front-end has connected")?;
    super::nbd::wait_for_load(&image.folders)?;
    daemon.signal(Signal::KILL)?;
    daemon.finish()?;
    load.finish()?.expect_code(1)?;
    super::nbd::drive(&image.folders, &image.disk, "--number_ios 1000")?;
    run_program("qemu-img", &["check", "-q", "-r", "leaks", &image.path])?;
    run_program("qemu-img", &["check", "-q", &image.path]).map(drop)
}
