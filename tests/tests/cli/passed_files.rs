//! Files that `ctl` opens with the rights of its user, and passes to the daemon.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, bench, ringhaul_under, run};
use ringhaul_kit::system::print_skipped;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::control::Client;
use super::{is_root, test_folders};

const GROUP: &str = "4711";
/// The user of the daemon, and a member of the control group.
const DAEMON: u32 = 65533;
const MEMBER: u32 = 65534;
const BYTES: u64 = 4 << 20;

/// `ringhaul` as a user in the control group.
fn ringhaul_as(user: u32) -> Result<Command> {
    let [user, group] = ["reuid", "regid"].map(|option| format!("--{option}={user}"));
    ringhaul_under(&["setpriv", &user, &group, &format!("--groups={GROUP}")])
}

/// Folders to which the daemon's user alone writes.
fn folders() -> Result<TestFolders> {
    let folders = test_folders()?;
    for file in [folders.path("x"), folders.socket("x")] {
        let folder = file.parent().context("a file has a folder")?;
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    }
    Ok(folders)
}

/// Makes a disk that belongs to one user alone.
fn disk_of(folders: &TestFolders, name: &str, user: u32) -> Result<PathBuf> {
    let path = folders.disk(name, BYTES)?;
    give(&path, user)?;
    Ok(path)
}

fn give(path: &Path, user: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(chown(path, Some(user), Some(user))?)
}

/// A daemon of this user with a virtio-scsi export `vm`.
fn command(folders: &TestFolders, user: u32) -> Result<Command> {
    let socket = folders.socket("vm.sock");
    let folder = socket.parent().context("a socket has a folder")?;
    chown(folder, Some(user), Some(user))?;
    let mut command = ringhaul_as(user)?;
    command.args(["serve", "--name", "vm", "--device", "scsi", "--lun", "0,null=1M"]);
    command.arg("--socket-path").arg(&socket);
    command.arg("--control").arg(folders.socket("control")).args(["--control-group", GROUP]);
    Ok(command)
}

fn serve(folders: &TestFolders, user: u32) -> Result<Running> {
    Running::serve(&mut command(folders, user)?)
}

/// A daemon of this user in folders of its own; `None` if this test cannot become another user.
fn start(user: u32) -> Result<Option<(TestFolders, Running)>> {
    if !is_root() {
        print_skipped("only root can become another user");
        return Ok(None);
    }
    let folders = folders()?;
    let daemon = serve(&folders, user)?;
    Ok(Some((folders, daemon)))
}

/// Starts the daemon again, and waits for lines with all these words, in any order.
fn serve_again(folders: &TestFolders, user: u32, words: &[&str]) -> Result<Running> {
    let mut daemon = Running::start(&mut command(folders, user)?)?;
    while !words.iter().all(|words| daemon.stderr().contains(words)) {
        daemon.wait_for("")?;
    }
    Ok(daemon)
}

/// `ctl` of a user with these words.
fn ctl(folders: &TestFolders, user: u32, words: &[&str]) -> Result<Command> {
    let mut command = ringhaul_as(user)?;
    command.args(["ctl", "--control"]).arg(folders.socket("control")).args(words);
    Ok(command)
}

/// `ctl add` of a disk on a socket of the name.
fn add(folders: &TestFolders, user: u32, name: &str, disk: &str) -> Result<Command> {
    let mut command = ctl(folders, user, &["add", "--name", name, "--disk", disk])?;
    command.arg("--socket-path").arg(folders.socket(&format!("{name}.sock")));
    Ok(command)
}

/// Writes to the disk of an export and reads it again.
fn check_io(folders: &TestFolders, name: &str) -> Result<()> {
    let options = "--rw randrw --number_ios 100 --size 1m --verify";
    let socket = folders.socket(&format!("{name}.sock"));
    run(&mut bench(&socket, options)?)?.expect_code(0).map(drop)
}

/// Makes an image with two backing files, all of which belong to one user alone.
fn chain_of(folders: &TestFolders, user: u32) -> Result<PathBuf> {
    let [base, middle, top] = ["base", "middle", "top"].map(|name| folders.path(name));
    fs::write(&base, vec![7; usize::try_from(BYTES)?])?;
    for (image, below, format) in [(&middle, "base", "raw"), (&top, "middle", "qcow2")] {
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "-b", below, "-F", format]).arg(image);
        run(&mut create)?.expect_code(0)?;
    }
    [&base, &middle, &top].into_iter().try_for_each(|path| give(path, user))?;
    Ok(top)
}

/// Makes an image name another backing file, while a daemon or its last operations may lock it.
fn rebase(image: &Path, backing: &Path) -> Result<()> {
    let mut rebase = Command::new("qemu-img");
    rebase.args(["rebase", "-u", "-F", "raw", "-b"]).arg(backing).arg("--image-opts");
    let unlocked = "driver=qcow2,file.driver=file,file.locking=off,file.filename=";
    rebase.arg(format!("{unlocked}{}", image.display()));
    run(&mut rebase)?.expect_code(0).map(drop)
}

/// The exports that are served, by name.
fn names(folders: &TestFolders) -> Result<Vec<String>> {
    let listed = Client::new(&folders.socket("control"))?.call("export.list", &json!({}))?;
    let listed = listed["result"].as_array().context("no list")?.clone();
    let name = |export: &Value| export["name"].as_str().unwrap_or_default().to_owned();
    let mut names: Vec<String> =
        listed.iter().filter(|export| export["state"] == "serving").map(name).collect();
    names.sort_unstable();
    Ok(names)
}

/// The user of the daemon opens none of these files, the member all of its own and none of the
/// daemon's.
#[test]
fn disks_are_opened_with_the_rights_of_the_user_of_ctl() -> Result<()> {
    let Some((folders, daemon)) = start(DAEMON)? else { return Ok(()) };
    let own = disk_of(&folders, "own.img", MEMBER)?;
    let unit = disk_of(&folders, "unit.img", MEMBER)?;
    let of_daemon = disk_of(&folders, "daemon.img", DAEMON)?;
    let of_root = disk_of(&folders, "root.img", 0)?;
    let chain = format!("qcow2,backing=beside,path={}", chain_of(&folders, MEMBER)?.display());
    let shown = |path: &Path| path.display().to_string();
    run(&mut add(&folders, MEMBER, "own", &shown(&own))?)?.expect_code(0)?;
    run(&mut add(&folders, MEMBER, "chain", &chain)?)?.expect_code(0)?;
    let words = ["add-lun", "vm", &format!("1,blk-file={}", unit.display())];
    run(&mut ctl(&folders, MEMBER, &words)?)?.expect_code(0)?;
    run(&mut add(&folders, 0, "root", &shown(&of_root))?)?.expect_code(0)?;
    for name in ["own", "chain", "root"] {
        check_io(&folders, name)?;
    }
    // The file has the locks of the daemon, not of `ctl`.
    let mut locked = Command::new("qemu-io");
    let locked = run(locked.args(["-f", "raw", "-c", "write 0 512"]).arg(&own))?;
    ensure!(!locked.status.success() && locked.stderr.contains("lock"), "{locked:?}");
    for disk in [&of_daemon, &of_root] {
        let refused = run(&mut add(&folders, MEMBER, "no", &shown(disk))?)?;
        let says = &refused.stderr;
        ensure!(refused.status.code() == Some(1), "{refused:?}");
        ensure!(says.contains(&shown(disk)) && says.contains("as user 65534"), "{says}");
        ensure!(says.contains("unless it passes the open file"), "{says}");
    }
    // The rights of the daemon's user are not those of the caller either.
    let refused = run(&mut add(&folders, DAEMON, "no", &shown(&of_root))?)?;
    ensure!(refused.status.code() == Some(1), "{refused:?}");

    let mut successor = ringhaul_as(DAEMON)?;
    successor.args(["serve", "--takeover"]).arg(folders.socket("control"));
    let mut successor = Running::start(&mut successor)?;
    successor.wait_for("took over 4 exports from process")?;
    daemon.finish()?.expect_code(0)?;
    for name in ["own", "chain", "root"] {
        check_io(&folders, name)?;
    }
    successor.signal(Signal::KILL)?;
    successor.finish()?;
    // The next process has no rights to these files and no descriptors.
    let lost =
        ["vm: unit 0:1", "own:", "chain:", "root:"].map(|of| format!("{of} cannot be restored"));
    let mut words: Vec<&str> = lost.iter().map(String::as_str).collect();
    words.push("vm: virtio-scsi");
    let mut daemon = serve_again(&folders, DAEMON, &words)?;
    ensure!(names(&folders)? == ["vm"], "{:?}", names(&folders)?);
    run(&mut add(&folders, MEMBER, "own", &shown(&own))?)?.expect_code(0)?;
    check_io(&folders, "own")?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}

/// Root may open all files, so only the record of the file keeps a member from another one.
#[test]
fn a_restart_opens_the_file_that_a_member_has_named_and_no_other() -> Result<()> {
    let Some((folders, mut daemon)) = start(0)? else { return Ok(()) };
    let secret = disk_of(&folders, "secret.img", 0)?;
    for name in ["kept", "link", "unit"] {
        let disk = disk_of(&folders, name, MEMBER)?;
        if name == "unit" {
            let words = ["add-lun", "vm", &format!("1,blk-file={}", disk.display())];
            run(&mut ctl(&folders, MEMBER, &words)?)?.expect_code(0)?;
        } else {
            run(&mut add(&folders, MEMBER, name, &disk.display().to_string())?)?.expect_code(0)?;
        }
    }
    let top = chain_of(&folders, MEMBER)?;
    let chain = format!("qcow2,backing=anywhere,path={}", top.display());
    run(&mut add(&folders, MEMBER, "chain", &chain)?)?.expect_code(0)?;
    check_io(&folders, "kept")?;
    daemon.signal(Signal::KILL)?;
    daemon.finish()?;
    daemon = serve(&folders, 0)?;
    while names(&folders)? != ["chain", "kept", "link", "vm"] {
        std::thread::yield_now();
    }
    daemon.signal(Signal::KILL)?;
    daemon.finish()?;
    for name in ["link", "unit"] {
        fs::rename(folders.path(name), folders.path("away"))?;
        symlink(&secret, folders.path(name))?;
    }
    // An image that now names a file of root.
    rebase(&top, &secret)?;
    let [unit, link] = ["unit", "link"].map(|name| folders.path(name).display().to_string());
    let words = [
        &format!("vm: unit 0:1 cannot be restored: {unit} is another file than"),
        &format!("link: cannot be restored: {link} is another file than"),
        "chain: cannot be restored: cannot open",
    ];
    let mut daemon = serve_again(&folders, 0, &words)?;
    while names(&folders)? != ["kept", "vm"] {
        std::thread::yield_now();
    }
    check_io(&folders, "kept")?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}

/// The owner of an image writes to it while it is served. A process that takes over reads its
/// header again, with the rights of root.
#[test]
fn a_takeover_opens_no_file_that_a_member_has_not_named() -> Result<()> {
    let Some((folders, mut daemon)) = start(0)? else { return Ok(()) };
    let secret = disk_of(&folders, "secret.img", 0)?;
    let top = chain_of(&folders, MEMBER)?;
    let chain = format!("qcow2,backing=anywhere,path={}", top.display());
    run(&mut add(&folders, MEMBER, "chain", &chain)?)?.expect_code(0)?;
    rebase(&top, &secret)?;
    let mut successor = ringhaul_as(0)?;
    let refused = run(successor.args(["serve", "--takeover"]).arg(folders.socket("control")))?;
    let says = &refused.stderr;
    ensure!(!refused.status.success(), "{refused:?}");
    let words = [&*secret.display().to_string(), "it is not among the files that came with"];
    ensure!(words.iter().all(|words| says.contains(words)), "{says}");
    check_io(&folders, "chain")?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}

/// A user that is neither root nor that of the daemon may have made a link to any file.
#[test]
fn root_follows_no_links_of_other_users_for_the_daemon() -> Result<()> {
    let Some((folders, mut daemon)) = start(DAEMON)? else { return Ok(()) };
    let secret = disk_of(&folders, "secret.img", 0)?;
    let name = |name: &str| folders.path(name);
    fs::create_dir(name("folder"))?;
    fs::copy(&secret, name("folder/secret.img"))?;
    symlink(&secret, name("disk"))?;
    symlink("folder", name("link"))?;
    let key = format!("luks,key-file={},over={}", name("disk").display(), secret.display());
    let below = name("link/secret.img").display().to_string();
    for owner in [MEMBER, DAEMON] {
        ["disk", "link"].iter().try_for_each(|link| lchown(name(link), Some(owner), None))?;
        for disk in [&name("disk").display().to_string(), &below, &key] {
            let refused = run(&mut add(&folders, 0, "no", disk)?)?;
            let words = format!("is a link of user {owner}; name its target");
            ensure!(!refused.status.success() && refused.stderr.contains(&words), "{refused:?}");
        }
    }
    ["disk", "link"].iter().try_for_each(|link| lchown(name(link), Some(0), None))?;
    run(&mut add(&folders, 0, "root", &name("disk").display().to_string())?)?.expect_code(0)?;
    let unit = format!("1,blk-file={below},read-only=off");
    run(&mut ctl(&folders, 0, &["add-lun", "vm", &unit])?)?.expect_code(0)?;
    // The daemon opens what an image chooses, with its own rights.
    let chain = format!("qcow2,backing=anywhere,path={}", chain_of(&folders, 0)?.display());
    let refused = run(&mut add(&folders, 0, "chain", &chain)?)?;
    let words = "root passes no file that the header of an image names";
    ensure!(!refused.status.success() && refused.stderr.contains(words), "{refused:?}");
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// The daemon alone says if its export is read-only, and code in its place could lie.
#[test]
fn root_passes_a_unit_for_writing_only_if_it_says_so_or_the_daemon_may_write() -> Result<()> {
    if !is_root() {
        print_skipped("only root can become another user");
        return Ok(());
    }
    let folders = folders()?;
    let mut daemon = serve(&folders, DAEMON)?;
    let of_root = disk_of(&folders, "root.img", 0)?;
    let of_daemon = disk_of(&folders, "daemon.img", DAEMON)?;
    let add_lun = |lun: u32, path: &Path, more: &str| -> Result<_> {
        let unit = format!("{lun},blk-file={}{more}", path.display());
        run(&mut ctl(&folders, 0, &["add-lun", "vm", &unit])?)
    };
    let refused = add_lun(1, &of_root, "")?.expect_code(1)?.stderr;
    ensure!(refused.contains("add read-only=off to the unit"), "{refused}");
    add_lun(1, &of_root, ",read-only=on")?.expect_code(0)?;
    run(&mut ctl(&folders, 0, &["remove-lun", "vm", "1"])?)?.expect_code(0)?;
    add_lun(1, &of_root, ",read-only=off")?.expect_code(0)?;
    add_lun(2, &of_daemon, "")?.expect_code(0)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}
