//! Encrypted disks of other programs: the daemon reads their data, and they read the daemon's.
//!
//! QEMU reads and writes images of version 1. `cryptsetup reencrypt` makes and decrypts images of
//! version 2. It works on files, without the kernel's help.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Finished, Refusals, Running, TestFolders, ringhaul, run};
use ringhaul_kit::daemon::pattern;
use ringhaul_kit::frontend::{Frontend, Setup, blk, segment};
use ringhaul_kit::system::{is_installed, run as run_program};
use rustix::process::{Pid, Signal};

const DISK_BYTES: usize = 4 << 20;
/// Bytes of one request.
const REQUEST_BYTES: usize = 128 << 10;
const KEY: &str = "no secret, with a newline\n";
/// A weak key derivation suffices for tests.
const FAST_PBKDF2: [&str; 4] = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];

/// The folder of a test's images, and the expected contents of its disk.
struct Images {
    folders: TestFolders,
    key: PathBuf,
    content: Vec<u8>,
    /// The key of the data, or empty if it is unknown.
    volume_key: Vec<u8>,
}

impl Images {
    fn new() -> Result<Self> {
        let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
        let key = folders.path("key");
        fs::write(&key, KEY).context("writing the key")?;
        Ok(Self { folders, key, content: pattern(13, DISK_BYTES), volume_key: Vec::new() })
    }

    fn path(&self, name: &str) -> Result<String> {
        let path = self.folders.path(name).into_os_string().into_string();
        path.ok().context("a path with an odd name")
    }

    /// Makes a file with the contents of the disk, and room behind them.
    fn plain(&self, name: &str, room_bytes: usize) -> Result<String> {
        let path = self.path(name)?;
        fs::write(&path, &self.content)?;
        let size = DISK_BYTES + room_bytes;
        OpenOptions::new().write(true).open(&path)?.set_len(size.try_into()?)?;
        Ok(path)
    }

    fn name(&self, keys: &str, image: &str) -> String {
        format!("luks,key-file={}{keys},over=file,path={image}", self.key.display())
    }

    /// The key in the form of QEMU's programs.
    fn secret(&self) -> String {
        format!("secret,id=key,file={}", self.key.display())
    }

    /// Serves a disk, checks all of its contents, and changes some in each way.
    fn serve(&mut self, disk: &str, block_bytes: usize) -> Result<()> {
        let socket = self.folders.socket("disk.sock");
        let mut command = ringhaul()?;
        command.arg("serve").arg("--socket-path").arg(&socket).args(["--disk", disk]);
        let mut daemon = Running::serve(&mut command)?;
        let mut frontend = Frontend::attach(&socket, &Setup::default())?;
        self.check(&mut frontend)?;
        let places = [0, block_bytes, 1 << 20, DISK_BYTES - REQUEST_BYTES];
        for (place, bytes) in places.into_iter().zip([block_bytes, 5 * block_bytes].repeat(2)) {
            let data = pattern(place as u64 + 1, bytes);
            frontend.write(0, sector(place)?, &data)?;
            self.content[place..place + bytes].copy_from_slice(&data);
        }
        let zeroed = 2 << 20..(2 << 20) + 300 * 4096;
        let part = segment(sector(zeroed.start)?, u32::try_from(sector(zeroed.len())?)?, 0);
        let answer = frontend.request(0, blk::WRITE_ZEROES, 0, &part, 0)?;
        ensure!(answer.status == blk::OK, "zeroes ended with {answer:?}");
        self.content[zeroed].fill(0);
        // Without the option `discard`, a discard has no effect.
        let part = segment(sector(3 << 20)?, 256, 0);
        frontend.request(0, blk::DISCARD, 0, &part, 0)?;
        ensure!(frontend.request(0, blk::FLUSH, 0, &[], 0)?.status == blk::OK, "no flush");
        self.check(&mut frontend)?;
        self.check_core_dump(daemon.pid())?;
        drop(frontend);
        ensure!(!daemon.stderr().contains(KEY.trim()), "the key is logged");
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0).map(drop)
    }

    fn check(&self, frontend: &mut Frontend) -> Result<()> {
        for (index, expected) in self.content.chunks(REQUEST_BYTES).enumerate() {
            let found = frontend.read(1, sector(index * REQUEST_BYTES)?, REQUEST_BYTES)?;
            ensure!(found == expected, "request {index} reads something else");
        }
        Ok(())
    }

    /// Checks that a core dump of a process would have no key, at addresses where keys begin.
    fn check_core_dump(&self, pid: Pid) -> Result<()> {
        const ALIGN: usize = 16;
        let keys: Vec<&[u8]> =
            self.volume_key.chunks(ALIGN).chain([&KEY.as_bytes()[..ALIGN]]).collect();
        let pid = pid.as_raw_nonzero();
        let maps = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
        let memory = File::open(format!("/proc/{pid}/mem"))?;
        let (mut range, mut seen) = (None, 0);
        for line in maps.lines() {
            if let Some(found) = writable(line) {
                range = Some(found);
            }
            let (Some(flags), Some((start, end))) = (line.strip_prefix("VmFlags:"), range) else {
                continue;
            };
            range = None;
            let mut bytes = vec![0; usize::try_from(end - start)?];
            if memory.read_exact_at(&mut bytes, start).is_err() {
                continue;
            }
            let has_key = bytes.chunks(ALIGN).any(|part| keys.contains(&part));
            let is_dumped = !flags.split_whitespace().any(|flag| flag == "dd");
            ensure!(!has_key || !is_dumped, "a core dump has a key, in {start:x} to {end:x}");
            seen += usize::from(has_key);
        }
        ensure!(seen > 0 || self.volume_key.is_empty(), "the key of the data is nowhere");
        Ok(())
    }

    fn check_file(&self, path: &str) -> Result<()> {
        let mut found = vec![0; DISK_BYTES];
        File::open(path)?.read_exact_at(&mut found, 0)?;
        ensure!(found == self.content, "{path} has something else than the disk");
        Ok(())
    }

    /// Runs `cryptsetup` with the key.
    fn cryptsetup(&self, arguments: &[&str]) -> Result<()> {
        let key = self.key.to_str().context("a path with an odd name")?;
        run_program("cryptsetup", &[&["--batch-mode", "--key-file", key], arguments].concat())?;
        Ok(())
    }

    fn info(&self, disk: &str) -> Result<Finished> {
        run(ringhaul()?.args(["disk", "info", disk]))
    }
}

/// The bounds of writable memory, from the first line about it in `smaps`.
fn writable(line: &str) -> Option<(u64, u64)> {
    let mut words = line.split(' ');
    let (start, end) = words.next()?.split_once('-')?;
    words.next()?.starts_with("rw").then_some(())?;
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
}

fn sector(byte: usize) -> Result<u64> {
    Ok(u64::try_from(byte)? / 512)
}

fn has_programs() -> bool {
    is_installed("cryptsetup") && is_installed("qemu-img")
}

/// QEMU also opens the images of `cryptsetup`.
#[test]
fn qemu_and_the_daemon_read_each_other_s_data() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    for (name, of_qemu, of_cryptsetup) in [
        ("qemu-256", "cipher-alg=aes-256,hash-alg=sha256", &[][..]),
        ("qemu-128", "cipher-alg=aes-128,hash-alg=sha1", &[]),
        ("cryptsetup-256", "", &["--hash", "sha512", "--key-size", "512"]),
        ("cryptsetup-128", "", &["--hash", "sha1", "--key-size", "256"]),
    ] {
        let mut images = Images::new()?;
        let (plain, image) = (images.plain("plain.img", 0)?, images.path(name)?);
        let (secret, out) = (images.secret(), images.path("out.img")?);
        let convert = ["convert", "--object", &secret];
        if of_qemu.is_empty() {
            // The data begins after 2 MiB.
            File::create(&image)?.set_len((DISK_BYTES + (2 << 20)) as u64)?;
            let format = ["luksFormat", "--type", "luks1", "--pbkdf-force-iterations", "1000"];
            images.cryptsetup(&[&format, of_cryptsetup, &[&image]].concat())?;
            let target = format!("driver=luks,key-secret=key,file.filename={image}");
            let into = ["-n", "--target-image-opts", "-f", "raw", &plain, &target];
            run_program("qemu-img", &[&convert[..], &into].concat())?;
        } else {
            let how = format!("key-secret=key,iter-time=10,{of_qemu}");
            let into = ["-f", "raw", "-O", "luks", "-o", &how, &plain, &image];
            run_program("qemu-img", &[&convert[..], &into].concat())?;
        }
        let disk = images.name("", &image);
        images.serve(&disk, 512).context(name)?;
        let source = format!("driver=luks,key-secret=key,file.filename={image}");
        let from = ["--image-opts", "-O", "raw", &source, &out];
        run_program("qemu-img", &[&convert[..], &from].concat())?;
        images.check_file(&out).context(name)?;
        images.cryptsetup(&["open", "--test-passphrase", &image])?;
    }
    Ok(())
}

/// Version 2 with each key derivation, and with sectors of each size.
#[test]
fn cryptsetup_decrypts_disks_that_the_daemon_has_changed() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    let argon2 =
        |kind| ["--pbkdf", kind, "--pbkdf-force-iterations", "4", "--pbkdf-memory", "64"].to_vec();
    let hash = [&FAST_PBKDF2[..], &["--hash", "sha512"]].concat();
    for (sector_bytes, pbkdf, key_bits) in [
        (512, argon2("argon2id"), "512"),
        (1024, argon2("argon2i"), "256"),
        (2048, FAST_PBKDF2.to_vec(), "512"),
        (4096, hash, "256"),
    ] {
        let what = || format!("sectors of {sector_bytes} bytes, {pbkdf:?}");
        let mut images = Images::new()?;
        // The data moves behind the header.
        let image = images.plain("image", 32 << 20)?;
        let sectors = sector_bytes.to_string();
        let how = ["--type", "luks2", "--key-size", key_bits, "--sector-size", &sectors];
        let encrypt = ["reencrypt", "--encrypt", "--reduce-device-size", "32M", &image];
        images.cryptsetup(&[&encrypt[..], &how, &pbkdf].concat()).with_context(what)?;
        let volume_key = images.path("volume-key")?;
        let dump = ["luksDump", "--dump-volume-key", "--volume-key-file", &volume_key, &image];
        images.cryptsetup(&dump)?;
        images.volume_key = fs::read(&volume_key)?;
        let disk = images.name("", &image);
        let text = images.info(&disk)?.expect_code(0)?.stdout;
        ensure!(text.contains("format    luks") && text.contains("version 2"), "{text}");
        images.serve(&disk, sector_bytes).with_context(what)?;
        images.cryptsetup(&["open", "--test-passphrase", &image])?;
        let header = images.path("header")?;
        let decrypt = ["reencrypt", "--decrypt", "--force-offline-reencrypt", "--header", &header];
        images.cryptsetup(&[&decrypt[..], &[&image]].concat()).with_context(what)?;
        images.check_file(&image).with_context(what)?;
    }
    Ok(())
}

/// The disk below may be of any kind: an export of an NBD server, a qcow2 image.
#[test]
fn an_encrypted_disk_can_be_on_any_kind_of_disk() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    let mut images = Images::new()?;
    let (plain, encrypted) = (images.plain("plain.img", 0)?, images.path("encrypted")?);
    let (secret, out) = (images.secret(), images.path("out.img")?);
    let convert = ["convert", "--object", &secret];
    let into = ["-f", "raw", "-O", "luks", "-o", "key-secret=key,iter-time=10", &plain, &encrypted];
    run_program("qemu-img", &[&convert[..], &into].concat())?;
    let key = images.key.display().to_string();
    let source = format!("driver=luks,key-secret=key,file.filename={encrypted}");
    let from = ["--image-opts", "-O", "raw", &source, &out];
    if is_installed("nbdkit") {
        let socket = images.folders.socket("nbd.sock");
        let mut server = Command::new("nbdkit");
        server.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket);
        let mut server = Running::start(server.args(["file", &encrypted]))?;
        let deadline = Instant::now() + Duration::from_secs(60);
        while UnixStream::connect(&socket).is_err() {
            ensure!(Instant::now() < deadline, "nbdkit has no socket: {}", server.stderr());
            std::thread::sleep(Duration::from_millis(10));
        }
        let over = format!("nbd,socket={}", socket.display());
        images.serve(&format!("luks,key-file={key},over={over}"), 512).context("over NBD")?;
        server.signal(Signal::TERM)?;
        server.finish()?;
        run_program("qemu-img", &[&convert[..], &from].concat())?;
        images.check_file(&out).context("over NBD")?;
    }
    let image = images.path("image.qcow2")?;
    run_program("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &encrypted, &image])?;
    let disk = format!("luks,key-file={key},over=qcow2,path={image}");
    images.serve(&disk, 512).context("over qcow2")?;
    run_program("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", &image, &encrypted])?;
    run_program("qemu-img", &[&convert[..], &from].concat())?;
    images.check_file(&out).context("over qcow2")
}

/// The new process takes time to open the disk, while the old one still allocates in the image.
#[test]
fn an_encrypted_disk_on_an_image_is_taken_over() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    const CLUSTER: usize = 64 << 10;
    let images = Images::new()?;
    let [plain, image] = ["plain.img", "image.qcow2"].map(|name| images.path(name));
    let (plain, image, secret) = (plain?, image?, images.secret());
    let create = ["create", "-q", "--object", &secret, "-f", "luks"];
    let of_key = ["-o", "key-secret=key,iter-time=20", &plain, "64M"];
    run_program("qemu-img", &[&create[..], &of_key].concat())?;
    run_program("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &plain, &image])?;
    let [socket, control] = ["disk.sock", "control"].map(|name| images.folders.socket(name));
    let disk = format!("luks,key-file={},over=qcow2,path={image}", images.key.display());
    let mut command = ringhaul()?;
    command.args(["serve", "--disk", &disk, "--socket-path"]).arg(&socket);
    let mut daemon = Running::serve(command.arg("--control").arg(&control))?;
    let mut frontend = Frontend::attach(&socket, &Setup::default())?;
    let mut next = Running::start(ringhaul()?.args(["serve", "--takeover"]).arg(&control))?;
    let mut written = Vec::new();
    for place in (0..64 << 20).step_by(CLUSTER) {
        if next.stderr().contains("took over 1 export") {
            break;
        }
        frontend.write(0, sector(place)?, &pattern(place as u64, 4096))?;
        written.push(place);
    }
    next.wait_for("took over 1 export")?;
    daemon = std::mem::replace(&mut next, daemon);
    next.finish()?.expect_code(0)?;
    for place in written {
        let found = frontend.read(0, sector(place)?, 4096)?;
        ensure!(found == pattern(place as u64, 4096), "old data at byte {place}");
    }
    drop(frontend);
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    run_program("qemu-img", &["check", "-q", &image]).map(drop)
}

#[test]
fn a_detached_header_is_read_from_its_file() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    let mut images = Images::new()?;
    let (image, header) = (images.plain("image", 0)?, images.path("header")?);
    File::create(&header)?.set_len(16 << 20)?;
    let encrypt = ["reencrypt", "--encrypt", "--header", &header, &image];
    images.cryptsetup(&[&encrypt[..], &FAST_PBKDF2].concat())?;
    let disk = images.name(&format!(",header={header}"), &image);
    images.serve(&disk, 4096)?;
    let decrypt = ["reencrypt", "--decrypt", "--force-offline-reencrypt", "--header", &header];
    images.cryptsetup(&[&decrypt[..], &[&image]].concat())?;
    images.check_file(&image)
}

#[test]
fn a_damaged_header_is_replaced_by_its_copy() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    let images = Images::new()?;
    let image = images.path("image")?;
    File::create(&image)?.set_len(20 << 20)?;
    images.cryptsetup(&[&["luksFormat", "--type", "luks2", &image][..], &FAST_PBKDF2].concat())?;
    let disk = images.name("", &image);
    let whole = images.info(&disk)?.expect_code(0)?.stdout;
    let file = OpenOptions::new().write(true).open(&image)?;
    file.write_all_at(&[0xaa; 4096], 0)?;
    let found = images.info(&disk)?.expect_code(0)?;
    ensure!(found.stderr.contains("is damaged, and its copy is used"), "{}", found.stderr);
    let format =
        |text: &str| text.lines().find(|line| line.contains("luks version")).map(str::to_owned);
    ensure!(format(&found.stdout) == format(&whole), "{}", found.stdout);
    file.write_all_at(&[0xaa; 4096], 16_384)?;
    images.info(&disk)?.expect_refusal(&["no LUKS header", "cryptsetup luksHeaderRestore"])
}

#[test]
fn wrong_keys_and_headers_are_refused_with_a_reason() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    let images = Images::new()?;
    let image = images.path("image")?;
    let other = images.path("other")?;
    for (path, how) in [(&image, &[][..]), (&other, &["--cipher", "aes-cbc-essiv:sha256"])] {
        File::create(path)?.set_len(20 << 20)?;
        let format = ["luksFormat", "--type", "luks2", path];
        images.cryptsetup(&[&format[..], &FAST_PBKDF2, how].concat())?;
    }
    let plain = images.plain("plain", 0)?;
    let wrong = images.path("wrong")?;
    fs::write(&wrong, "wrong\n")?;
    let mut refusals = Refusals::default();
    let mut check = |what: &str, disk: &str, words: &[&str]| {
        let command = ringhaul().map(|mut command| {
            command.args(["disk", "info", disk]);
            command
        });
        refusals.check(what, command, words);
    };
    let wrong_key = format!("luks,key-file={wrong},over={image}");
    check(
        "wrong key",
        &wrong_key,
        &["ends with a newline", "opens none of the 1 key slots", "; check"],
    );
    let no_key = format!("luks,key-file={image}.key,over={image}");
    check("no key", &no_key, &["cannot read the key in", "No such file", "; check key-file"]);
    for (fd, words) in [
        ("77", ["descriptor 77: it is not open", "with 77< KEYFILE, or use key-file"]),
        ("2", ["descriptor 2: descriptors 0 to 2", "choose a number above 2"]),
        ("-1", ["descriptor -1: descriptors 0 to 2", "choose a number above 2"]),
    ] {
        check(fd, &format!("luks,key-fd={fd},over={image}"), &words);
    }
    check(
        "cipher",
        &images.name("", &other),
        &["aes-cbc-essiv:sha256", "is not supported", "aes-xts-plain64"],
    );
    check("plain", &images.name("", &plain), &["there is no LUKS header"]);
    refusals.finish()
}

#[test]
fn a_key_comes_from_a_descriptor() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    let images = Images::new()?;
    let image = images.path("image")?;
    File::create(&image)?.set_len(20 << 20)?;
    images.cryptsetup(&[&["luksFormat", "--type", "luks2", &image][..], &FAST_PBKDF2].concat())?;
    let key: &Path = &images.key;
    let words = ["sh", "-c", "exec \"$@\" 9<\"$KEY\"", "sh"];
    let mut command = ringhaul_kit::cli::ringhaul_under(&words)?;
    command.env("KEY", key).args(["disk", "info", &format!("luks,key-fd=9,over={image}")]);
    run(&mut command)?.expect_code(0)?;
    // The descriptor is open, but not for reading.
    let words = ["sh", "-c", "exec \"$@\" 9>/dev/null", "sh"];
    let mut command = ringhaul_kit::cli::ringhaul_under(&words)?;
    command.args(["disk", "info", &format!("luks,key-fd=9,over={image}")]);
    run(&mut command)?.expect_refusal(&["descriptor 9: Bad file", "with 9< KEYFILE"])
}
