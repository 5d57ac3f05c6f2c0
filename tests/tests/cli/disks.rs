//! Disks that cannot be served, and disks that need other options.

use std::ffi::OsString;
use std::fs::{File, Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{
    Refusals, Running, TestFolders, bench, ringhaul, ringhaul_under, run, serve,
};
use ringhaul_kit::system::print_skipped;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::Signal;

use crate::{DISK_BYTES, is_root, test_folders};

/// The capabilities by which root bypasses permissions.
const OVERRIDE: &str = "-dac_override,-dac_read_search";

fn serve_with(folders: &TestFolders, file: &Path, options: &str) -> Result<Command> {
    let mut command = serve(&folders.socket("refused.sock"), file)?;
    command.args(options.split_whitespace());
    Ok(command)
}

/// A pipe: neither a regular file nor a block device.
fn not_a_disk(folders: &TestFolders) -> Result<PathBuf> {
    let path = folders.path("pipe");
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).context("making a pipe")?;
    Ok(path)
}

/// Reads of holes do not measure a device.
#[test]
fn the_engine_trial_uses_the_fullest_disk_of_a_device() -> Result<()> {
    let folders = test_folders()?;
    let [hole, full, other] = ["hole", "full", "other"].map(|name| folders.disk(name, DISK_BYTES));
    let (hole, full, other) = (hole?, full?, other?);
    std::fs::write(&full, vec![7; usize::try_from(DISK_BYTES)?])?;
    File::open(&full)?.sync_all()?;
    let mut command = ringhaul()?;
    command.arg("serve");
    for (name, file) in [("a", &hole), ("b", &full), ("c", &other)] {
        let socket = folders.socket(name);
        let export = format!("socket-path={},blk-file={}", socket.display(), file.display());
        command.args(["--export", &export]);
    }
    let mut daemon = Running::start(&mut command)?;
    let serving = |file: &Path| format!("{}: {} MiB", file.display(), DISK_BYTES >> 20);
    let last = daemon.wait_for(&serving(&other));
    let log = daemon.stderr();
    last?;
    let count = |words: &str| log.matches(words).count();
    ensure!(count("a trial of") == 1, "not one trial:\n{log}");
    ensure!(count(&format!("as for {}, which is", full.display())) == 2, "not both:\n{log}");
    Ok(())
}

#[test]
fn files_that_are_no_disks_are_refused() -> Result<()> {
    let folders = test_folders()?;
    let missing = folders.path("missing.img");
    let missing_name = missing.to_string_lossy();
    let folder = folders.path("");
    let empty = folders.disk("empty.img", 0)?;
    let odd = folders.disk("odd.img", 1000)?;
    let half = folders.disk("half.img", 4096 + 512)?;
    let mut refusals = Refusals::default();
    let mut check = |what: &str, file: &Path, options: &str, words: &[&str]| {
        refusals.check(what, serve_with(&folders, file, options), words);
    };

    check("missing", &missing, "", &[&missing_name, "No such file", "; check the path"]);
    check("missing, page cache", &missing, "--cache writeback", &["No such file"]);
    check("missing, read-only", &missing, "--read-only", &["No such file"]);
    check("folder", &folder, "", &["is a directory", "name a file or a block device"]);
    check("folder, read-only", &folder, "--read-only", &["is a directory"]);
    check("pipe", &not_a_disk(&folders)?, "", &["neither a regular file nor a block device; name"]);
    check(
        "terminal",
        Path::new("/dev/null"),
        "",
        &["neither a regular file nor a block device; name"],
    );
    check("empty", &empty, "", &["empty.img", "size is zero", "truncate -s"]);
    check("odd", &odd, "", &["odd.img", "1000 bytes", "multiple", "truncate -s 1024"]);
    check("odd, page cache", &odd, "--cache writeback", &["1000 bytes", "truncate -s 1024"]);
    check(
        "half a block",
        &half,
        "--logical-block-size 4096",
        &["4608 bytes", "logical block of 4096", "truncate -s 8192"],
    );
    refusals.finish()
}

#[test]
fn permissions_are_respected() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let without_override: &[&str] =
        if is_root() { &["setpriv", "--bounding-set", OVERRIDE] } else { &[] };
    let serve = |options: &str| -> Result<Command> {
        let mut command = ringhaul_under(without_override)?;
        command.arg("serve").arg("--socket-path").arg(folders.socket("refused.sock"));
        command.arg("--blk-file").arg(&file).args(options.split_whitespace());
        Ok(command)
    };
    let mut refusals = Refusals::default();
    set_permissions(&file, Permissions::from_mode(0o000))?;
    let words = ["disk.img", "Permission denied", "check its permissions"];
    refusals.check("unreadable", serve(""), &words);
    refusals.check("unreadable, read-only", serve("--read-only"), &words);
    set_permissions(&file, Permissions::from_mode(0o444))?;
    refusals.check("not writable", serve(""), &["Permission denied", "read-only"]);
    refusals.finish()?;

    let mut daemon = Running::serve(&mut serve("--read-only")?)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn a_disk_that_is_in_use_is_refused() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let mut refusals = Refusals::default();
    let words = ["disk.img", "locked", "end that use first"];

    let writer = Running::serve(&mut serve(&folders.socket("writer.sock"), &file)?)?;
    refusals.check("second writer", serve_with(&folders, &file, ""), &words);
    refusals.check("reader", serve_with(&folders, &file, "--read-only"), &words);
    drop(writer);

    // Any number of daemons may read a disk, and then none may write.
    let read_only = |name: &str| -> Result<Running> {
        Running::serve(serve(&folders.socket(name), &file)?.arg("--read-only"))
    };
    let _readers = (read_only("one.sock")?, read_only("two.sock")?);
    refusals.check("writer", serve_with(&folders, &file, ""), &words);
    refusals.finish()
}

/// A command for `ringhaul` in its own mount namespace, which `script` sets up. `None`, with a skip
/// reported, if such namespaces are unavailable.
fn ringhaul_with_mounts(script: &str, variables: &[(&str, &Path)]) -> Result<Option<Command>> {
    let namespaces: &[&str] =
        if is_root() { &["--mount"] } else { &["--user", "--map-root-user", "--mount"] };
    let script = OsString::from(format!("set -e\n{script}\nexec \"$@\""));
    let probe = Command::new("unshare")
        .args(namespaces)
        .args(["sh", "-c", "mount -t ramfs none /mnt"])
        .output()
        .context("starting unshare")?;
    if !probe.status.success() {
        let reason = String::from_utf8_lossy(&probe.stderr);
        print_skipped(&format!("no mounts of its own for a process: {reason}"));
        return Ok(None);
    }
    let mut words: Vec<OsString> = vec!["unshare".into()];
    words.extend(namespaces.iter().map(Into::into));
    words.extend(["sh".into(), "-c".into(), script, "sh".into()]);
    let mut command = ringhaul_under(&words)?;
    command.envs(variables.iter().copied());
    Ok(Some(command))
}

#[test]
fn without_direct_io_the_page_cache_is_used_or_advised() -> Result<()> {
    let folders = test_folders()?;
    let socket = folders.socket("disk.sock");
    // Files of ramfs cannot be opened with O_DIRECT.
    let script = "mount -t ramfs none \"$FOLDER\" && truncate -s 16M \"$FOLDER/disk.img\"";
    let serve = |options: &[&str]| -> Result<Option<Command>> {
        let folder = folders.path("");
        let Some(mut command) = ringhaul_with_mounts(script, &[("FOLDER", &folder)])? else {
            return Ok(None);
        };
        command.arg("serve").arg("--socket-path").arg(&socket);
        command.arg("--blk-file").arg(folder.join("disk.img")).args(options);
        Ok(Some(command))
    };
    let mut refusals = Refusals::default();
    for mode in ["none", "directsync"] {
        let Some(command) = serve(&["--cache", mode])? else { return Ok(()) };
        let words = ["disk.img", "direct I/O", "--cache writeback", "--cache writethrough"];
        refusals.check(mode, Ok(command), &words);
    }
    refusals.finish()?;

    let Some(mut command) = serve(&[])? else { return Ok(()) };
    let mut daemon = Running::start(&mut command)?;
    daemon.wait_for("falling back to --cache writeback")?;
    daemon.wait_for("engine io_uring: ")?;
    let ready = daemon.wait_for("serving on")?;
    ensure!(ready.contains("cache writeback"), "{ready}");
    let options = "--rw randrw --number_ios 200 --iodepth 8 --verify";
    run(&mut bench(&socket, options)?)?.expect_code(0)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// Some kernels offer direct I/O on tmpfs: the daemon probes for it and logs the result.
#[test]
fn a_disk_on_tmpfs_is_served_either_way() -> Result<()> {
    const TMPFS: &str = "/dev/shm";
    let Ok(folders) = TestFolders::new(TMPFS) else {
        print_skipped(&format!("nothing can be written to {TMPFS}"));
        return Ok(());
    };
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let mut daemon = Running::serve(&mut serve(&folders.socket("disk.sock"), &file)?)?;
    let fell_back = daemon.stderr().contains("falling back to --cache writeback");
    ensure!(fell_back != daemon.stderr().contains("cache none"), "{}", daemon.stderr());
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    let mut command = serve_with(&folders, &file, "--cache none")?;
    if fell_back {
        run(&mut command)?.expect_refusal(&["direct I/O", "--cache writeback"])?;
    } else {
        Running::serve(&mut command)?;
    }
    Ok(())
}

#[test]
fn a_read_only_file_system_is_refused_for_writing() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let script = "mount --bind \"$FOLDER\" \"$FOLDER\"\n\
                  mount -o remount,bind,ro \"$FOLDER\"";
    let folder = folders.path("");
    let Some(mut command) = ringhaul_with_mounts(script, &[("FOLDER", &folder)])? else {
        return Ok(());
    };
    command.arg("serve").arg("--socket-path").arg(folders.socket("disk.sock"));
    command.arg("--blk-file").arg(&file);
    run(&mut command)?.expect_refusal(&["disk.img", "Read-only file system", "open it read-only"])
}

/// A loop device with the lifetime of this value.
struct LoopDevice {
    path: PathBuf,
    /// The device is detached right after it is opened. The kernel frees it at its last close, so
    /// no device is left over when a test is killed.
    _open: File,
}

impl LoopDevice {
    /// Attaches a device to `file`. `None`, with a skip reported, if loop devices are unavailable.
    fn attach(file: &Path, options: &[&str]) -> Result<Option<Self>> {
        let losetup = |arguments: &[&str], file: &Path| {
            Command::new("losetup").args(arguments).arg(file).output().context("starting losetup")
        };
        let arguments: Vec<&str> = ["--find", "--show"].iter().chain(options).copied().collect();
        let output = losetup(&arguments, file)?;
        if !output.status.success() {
            print_skipped(&format!("no loop device: {}", String::from_utf8_lossy(&output.stderr)));
            return Ok(None);
        }
        let path = PathBuf::from(String::from_utf8(output.stdout)?.trim());
        let open = File::open(&path).with_context(|| format!("opening {}", path.display()));
        let detached = losetup(&["--detach"], &path)?;
        ensure!(detached.status.success(), "{}", String::from_utf8_lossy(&detached.stderr));
        Ok(Some(Self { path, _open: open? }))
    }
}

#[test]
fn a_block_device_is_served_to_one() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let Some(device) = LoopDevice::attach(&file, &[])? else { return Ok(()) };
    let socket = folders.socket("disk.sock");
    let mut daemon = Running::serve(&mut serve(&socket, &device.path)?)?;
    let mut refusals = Refusals::default();
    let words = ["/dev/loop", "busy", "mounted or used by another program", "end that use first"];
    refusals.check("claimed", serve_with(&folders, &device.path, ""), &words);
    let options = "--rw randrw --number_ios 200 --iodepth 8 --verify";
    run(&mut bench(&socket, options)?)?.expect_code(0)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;

    let made = Command::new("mkfs.ext4").arg("-q").arg(&device.path).output();
    if made.is_ok_and(|output| output.status.success()) {
        let mount_point = folders.path("");
        let variables = [("DEVICE", device.path.as_path()), ("FOLDER", &mount_point)];
        let script = "mount \"$DEVICE\" \"$FOLDER\"";
        if let Some(mut command) = ringhaul_with_mounts(script, &variables)? {
            command.arg("--socket-path").arg(&socket).arg("--blk-file").arg(&device.path);
            refusals.check("mounted", Ok(command), &words);
        }
    } else {
        print_skipped("a mounted device, because mkfs.ext4 does not work");
    }
    refusals.finish()
}

#[test]
fn a_read_only_block_device_is_refused_for_writing() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let Some(device) = LoopDevice::attach(&file, &["--read-only"])? else { return Ok(()) };
    let mut daemon = Running::serve(serve_with(&folders, &device.path, "")?.arg("--read-only"))?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    // Linux opens the device for writing, and fails each write.
    let mut refusals = Refusals::default();
    refusals.check(
        "for writing",
        serve_with(&folders, &device.path, ""),
        &["read-only", "/dev/loop"],
    );
    refusals.finish()
}
