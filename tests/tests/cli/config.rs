//! The configuration file.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{READY, Refusals, Running, TestFolders, bench, ringhaul, run};
use ringhaul_kit::control::taking_over;
use ringhaul_kit::fuse::{Fuse, opcode};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::control::Client;
use super::{DISK_BYTES, test_folders};

const DOCUMENTATION: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/configuration.md"));

fn write(folders: &TestFolders, text: &str) -> Result<PathBuf> {
    let path = folders.path("ringhaul.toml");
    fs::write(&path, text)?;
    Ok(path)
}

fn check(file: &Path) -> Result<Command> {
    let mut command = ringhaul()?;
    command.arg("check").arg(file);
    Ok(command)
}

/// `check` finds the errors that `serve` would report at once, given the options of `serve`.
#[test]
fn a_file_is_checked_with_the_options_of_serve() -> Result<()> {
    let folders = test_folders()?;
    let export = |socket: &str| {
        format!("[[export]]\nendpoint.path = \"{socket}\"\ndevice.blk = \"null:1M\"\n")
    };
    let grouped = format!("control-group = \"root\"\n{}", export("/a"));
    let file = write(&folders, &grouped)?;
    run(&mut check(&file)?)?.expect_refusal(&["--control"])?;
    run(check(&file)?.args(["--control", "/c"]))?.expect_code(0)?;
    run(check(&file)?.args(["--control", "/a"]))?
        .expect_refusal(&["is the path of the control socket"])?;
    run(check(&file)?.arg("--iothread"))?.expect_refusal(&["--iothread"])?;
    let threads = format!("{}iothread = 1\n", export("/a"));
    let file = write(&folders, &threads)?;
    run(&mut check(&file)?)?.expect_refusal(&["IoThread 1 does not exist"])?;
    run(check(&file)?.args(["--iothreads", "2"]))?.expect_code(0)?;
    let long = format!("socket-path=/{},null=1M", "x".repeat(107));
    run(check(&file)?.args(["--iothreads", "2", "--export", &long]))?
        .expect_refusal(&["too long for a socket"])?;
    for (text, words) in [
        (export(&format!("/{}", "x".repeat(107))), "too long for a socket"),
        (grouped.replace("root", "no such group"), "cannot use --control-group"),
        (format!("poll-budget = 50.0\n{}", export("/a")), "write 50"),
        (format!("{}run-max = 60000\n", export("/a")), "run-max must be 1 to 1024"),
        (format!("engine = \"aio\"\niopoll = true\n{}", export("/a")), "engine io_uring, not aio"),
    ] {
        let file = write(&folders, &text)?;
        run(check(&file)?.args(["--control", "/c"]))?.expect_refusal(&[words])?;
    }
    // A switch that is off, and an option with the words on and off.
    let off = format!("engine = \"aio\"\niopoll = false\npoll-pause = true\n{}", export("/a"));
    run(&mut check(&write(&folders, &off)?)?)?.expect_code(0)?;
    Ok(())
}

fn serve(file: &Path) -> Result<Command> {
    let mut command = ringhaul()?;
    command.arg("serve").arg("--config").arg(file);
    Ok(command)
}

/// The names of the served exports, sorted.
fn names(client: &mut Client) -> Result<Vec<String>> {
    let answer = client.call("export.list", &json!({}))?;
    let exports = answer["result"].as_array().context("no list")?;
    let name = |export: &Value| export["name"].as_str().unwrap_or_default().to_owned();
    let mut names: Vec<String> = exports.iter().map(name).collect();
    names.sort();
    Ok(names)
}

#[test]
fn the_documented_example_is_served() -> Result<()> {
    let folders = test_folders()?;
    let sockets = folders.socket("x").parent().context("no folder")?.display().to_string();
    let disks = folders.path("x").parent().context("no folder")?.display().to_string();
    let example = DOCUMENTATION.split("```toml\n").nth(1).context("no example")?;
    let example = example.split("```").next().unwrap_or_default();
    let example = example.replace("/run/ringhaul", &sockets).replace("/srv", &disks);
    for name in ["mail.img", "install.iso", "database.img", "log.img"] {
        folders.disk(name, DISK_BYTES)?;
    }
    // An option that needs a second option, in a file that has both.
    let group = fs::metadata(&sockets)?.gid();
    let file = write(&folders, &format!("control-group = \"{group}\"\n{example}"))?;
    let checked = run(&mut check(&file)?)?.expect_code(0)?;
    let expected = format!(
        "mail on {sockets}/mail.sock: virtio-blk, {disks}/mail.img\n\
         {sockets}/install.sock: virtio-blk, {disks}/install.iso, read-only\n\
         database on {sockets}/database.sock: virtio-scsi, 0:0 {disks}/database.img, \
         1:7 {disks}/log.img\n\
         {sockets}/null.sock: virtio-blk, null disk of 1073741824 bytes\n"
    );
    ensure!(checked.stdout == expected, "{}", checked.stdout);

    let mut command = serve(&file)?;
    // `--export` adds to the file, and an option overrides its value in the file.
    command.args(["--num-queues", "3", "--export"]);
    command.arg(format!("socket-path={sockets}/more.sock,null=1M"));
    let mut daemon = Running::serve(&mut command)?;
    for _ in 0..4 {
        daemon.wait_for(READY)?;
    }
    let mut client = Client::new(&folders.socket("control"))?;
    ensure!(names(&mut client)?.len() == 5, "{:?}", names(&mut client)?);
    let mode = fs::metadata(folders.socket("control"))?.permissions().mode() & 0o777;
    ensure!(mode == 0o660, "the control socket has mode {mode:o}");
    let mail = client.call("export.show", &json!({ "export": "mail" }))?["result"].clone();
    let seen = json!([mail["serial"], mail["num-queues"], mail["cache"], mail["iothread"]]);
    ensure!(seen == json!(["mail-0001", 3, "none", null]), "{mail}");
    let options = "--rw randrw --number_ios 100 --size 4m --verify";
    run(&mut bench(&folders.socket("mail.sock"), options)?)?.expect_code(0)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// Checks that each text is refused with these words behind the name of the file.
fn check_refused(cases: &[(&str, &[&str])]) -> Result<()> {
    let folders = test_folders()?;
    let mut refusals = Refusals::default();
    for (number, (text, words)) in cases.iter().enumerate() {
        let file = folders.path(&format!("{number}.toml"));
        fs::write(&file, text)?;
        let name = file.display().to_string();
        let words = [&[&*name], *words].concat();
        refusals.check(text, check(&file), &words);
        refusals.check(text, serve(&file), &words);
    }
    let missing = folders.path("missing.toml");
    refusals.check("missing", check(&missing), &["missing.toml", "No such file"]);
    refusals.finish()
}

#[test]
fn an_invalid_option_is_refused_with_the_position() -> Result<()> {
    check_refused(&[
        ("iothreads = maybe\n", &[":1:13: ", "text without quotes"]),
        ("\niothreads = 0\n", &[":2:1: ", "0 is not in 1..=256"]),
        ("sqpoll = \"yes\"\n", &[":1:1: ", "sqpoll must be true or false"]),
        ("engine = [\"aio\"]\n", &[":1:1: ", "engine must be a single value"]),
        ("engin = \"aio\"\n", &[":1:1: ", "unknown option 'engin'"]),
        ("serial = \"x\"\n", &[":1:1: ", "under [[export]]"]),
        ("config = \"x\"\n", &[":1:1: ", "unknown option 'config'"]),
        ("control-group = \"0\"\n", &["required", "--control <PATH>"]),
        ("export = 3\n", &["[[export]]"]),
        ("engine = \"aio\"\nsqpoll = true\n", &["--sqpoll is for engine io_uring"]),
        ("iothreads = \"2\"\n", &[":1:1: ", "must be a number; write it without quotes"]),
        ("cache = none\n", &[":1:", "write text in quotes"]),
    ])
}

#[test]
fn an_invalid_export_is_refused_with_the_position() -> Result<()> {
    let export = "[[export]]\nendpoint = { path = \"/a\" }\n";
    let blk = "device = { blk = { null = { size-bytes = 512 } } }\n";
    let cases: [(String, &[&str]); 16] = [
        (format!("{export}{blk}read_only = true\n"), &[":4:1: ", "unknown key `read_only`"]),
        (
            format!("{export}{blk}num-queues = \"x\"\n"),
            &[":4:14: num-queues: expected a whole number from 0 to 65535, not the text \"x\""],
        ),
        (
            format!("{export}{blk}cache = \"fast\"\n"),
            &[":4:9: cache: unknown word `fast`, expected one of `none`, "],
        ),
        (
            format!("{export}device = {{}}\n"),
            &[":3:10: device: it has no kind: write a table with one key, the kind; "],
        ),
        (format!("{export}{blk}num-queues = 0\n"), &[":1:1: ", "must be 1 to 256"]),
        (format!("{export}{blk}iothread = 1\n"), &[":1:1: ", "IoThread 1 does not exist"]),
        (
            format!("{export}{blk}{export}{blk}"),
            &[":4:1: ", "/a is already used by the export /a of line 1"],
        ),
        (
            format!("{export}{}", blk.replace("{ size-bytes = 512 }", "5")),
            &[":3:27: ", "the keys of"],
        ),
        (format!("{export}device = {{ blk = {{ nbd = 3 }} }}\n"), &[":3:26: ", "the keys of"]),
        (
            format!("{export}device = {{ nvme = 1 }}\n"),
            &[":3:12: ", "device: unknown word `nvme`, expected `blk` or `scsi`"],
        ),
        (export.to_owned(), &[":1:1: missing key `device`; `man ringhaul.toml` has all keys"]),
        (
            format!("[[export]]\nendpoint = {{ fd = 3 }}\n{blk}"),
            &[":1:1: ", "only --fd can inherit"],
        ),
        (format!("[[export]]\nendpoint = {{ path = \"\" }}\n{blk}"), &[":1:1: ", "is empty"]),
        (
            format!("control = \"/a\"\n{export}{blk}"),
            &[":2:1: ", "/a is the path of the control socket"],
        ),
        (format!("{export}{blk}logical-block-bytes = 5\n"), &[":1:1: ", "block of 5 bytes"]),
        (format!("{export}{}", blk.replace("512", "513")), &[":1:1: ", "a disk of 513 bytes"]),
    ];
    let cases: Vec<_> = cases.iter().map(|(text, words)| (&**text, *words)).collect();
    check_refused(&cases)
}

/// Makes exports of null disks in the form of the configuration file.
struct Exports<'a>(&'a TestFolders);

impl Exports<'_> {
    fn socket(&self, name: &str) -> String {
        self.0.socket(name).display().to_string()
    }

    fn control(&self) -> String {
        format!("control = \"{}\"\n", self.socket("control"))
    }

    fn blk(&self, name: &str, more: &str) -> String {
        let path = self.socket(name);
        format!(
            "[[export]]\nendpoint = {{ path = \"{path}\" }}\n\
             device = {{ blk = {{ null = {{ size-bytes = 1048576 }} }} }}\n{more}"
        )
    }

    fn scsi(&self, luns: [u16; 2]) -> String {
        let unit = |lun: u16| {
            let disk = "{ null = { size-bytes = 512 } }";
            format!("[[export.device.scsi]]\nlun = {lun}\ndisk = {disk}\n")
        };
        let (path, units) = (self.socket("scsi"), luns.map(unit).concat());
        format!("[[export]]\nname = \"scsi\"\nendpoint = {{ path = \"{path}\" }}\n{units}")
    }

    /// Checks that the exports match the second file and the command line.
    fn check_second(&self, client: &mut Client) -> Result<()> {
        let mut expected =
            ["changes", "new", "own", "stays"].map(|name| self.socket(name)).to_vec();
        expected.push("scsi".into());
        expected.sort();
        ensure!(names(client)? == expected, "{:?}", names(client)?);
        let changed = client.call("export.show", &json!({ "export": self.socket("changes") }))?;
        let changed = &changed["result"];
        ensure!(changed["size-bytes"] == 2_097_152 && changed["read-only"] == false, "{changed}");
        let scsi = client.call("export.show", &json!({ "export": "scsi" }))?["result"].clone();
        let units = scsi["device"]["scsi"].as_array();
        let luns: Vec<&Value> = units.into_iter().flatten().map(|unit| &unit["lun"]).collect();
        ensure!(luns == [1, 2], "{scsi}");
        Ok(())
    }
}

#[test]
fn a_reload_applies_the_difference() -> Result<()> {
    let folders = test_folders()?;
    let exports = Exports(&folders);
    let (control, stays) = (exports.control(), exports.blk("stays", ""));
    let more = [
        exports.blk("goes", "name = \"vm-that-goes\"\n"),
        exports.blk("changes", ""),
        exports.scsi([0, 1]),
    ];
    let file = write(&folders, &[&*control, &stays, &more.concat()].concat())?;
    let mut command = serve(&file)?;
    command.arg("--export").arg(format!("socket-path={},null=1M", exports.socket("own")));
    let mut daemon = Running::serve(&mut command)?;
    for _ in 0..4 {
        daemon.wait_for(READY)?;
    }
    let mut client = Client::new(&folders.socket("control"))?;
    // A guest uses this export all the time.
    let options = "--rw randrw --runtime 1h --timeout 1h --eta always --verify";
    let mut load = Running::start(&mut bench(&folders.socket("stays"), options)?)?;
    load.wait_for("IOPS")?;

    let options = "iothreads = 2\nlog = \"info,disks=warn\"\npoll-budget = 9\npoll-max-us = 77\n";
    let options = format!("{control}{options}");
    fs::write(&file, format!("{options}{}", exports.blk("new", "serial = 3\n")))?;
    daemon.signal(Signal::HUP)?;
    let line = daemon.wait_for("cannot reload the configuration, so nothing changes")?;
    ensure!(line.contains("ringhaul.toml:9:10: serial: expected text, not 3"), "{line}");
    ensure!(names(&mut client)?.len() == 5, "something has changed");

    let changes = exports.blk("changes", "read-only = true\n").replace("1048576", "2097152");
    let more = [changes, exports.scsi([1, 2]), exports.blk("new", "")];
    fs::write(&file, [&*options, &stays, &more.concat()].concat())?;
    for times in 0..2 {
        daemon.signal(Signal::HUP)?;
        daemon.wait_for("iothreads has changed; restart the daemon")?;
        if times == 0 {
            for option in ["log", "poll-budget", "poll-max-us"] {
                daemon.wait_for(&format!("{option} has changed and applies now"))?;
            }
            let settings = client.call("set", &json!({}))?["result"].take();
            let expected = json!({ "log": "info,disks=warn", "poll-budget": 9, "poll-max-us": 77 });
            ensure!(settings == expected, "{settings}");
            daemon.wait_for("vm-that-goes: removed")?;
        }
        let line =
            daemon.wait_for("the settings read-only cannot change while the export is served")?;
        ensure!(line.contains(&exports.socket("changes")), "{line}");
        daemon.wait_for("applied the configuration")?;
        exports.check_second(&mut client)?;
    }
    // An empty file removes all of its exports.
    fs::write(&file, "")?;
    daemon.signal(Signal::HUP)?;
    load.finish()?;
    daemon.wait_for("applied the configuration")?;
    let left = names(&mut client)?;
    ensure!(left == [exports.socket("own")], "{left:?}");
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn a_successor_reads_the_file_too() -> Result<()> {
    let folders = test_folders()?;
    let exports = Exports(&folders);
    let first = exports.control() + &exports.blk("first", "");
    let file = write(&folders, &format!("{first}{}", exports.blk("gone", "")))?;
    let mut old = Running::serve(&mut serve(&file)?)?;
    // No reload has applied this text.
    fs::write(&file, format!("{first}{}", exports.blk("second", "")))?;
    let mut new = Running::start(&mut taking_over(&folders)?)?;
    new.wait_for("took over 2 exports from process")?;
    old.wait_for("has taken over")?;
    old.finish()?.expect_code(0)?;
    new.signal(Signal::HUP)?;
    new.wait_for("applied the configuration")?;
    let mut client = Client::new(&folders.socket("control"))?;
    // An export that the file lost after the old process read it still counts as one of the file.
    let expected = ["first", "second"].map(|name| exports.socket(name));
    ensure!(names(&mut client)? == expected, "{:?}", names(&mut client)?);
    fs::write(&file, exports.control() + &exports.blk("second", ""))?;
    new.signal(Signal::HUP)?;
    new.wait_for("removed")?;
    new.wait_for("applied the configuration")?;
    ensure!(names(&mut client)? == expected[1..], "{:?}", names(&mut client)?);
    new.signal(Signal::TERM)?;
    new.finish()?.expect_code(0)?;
    Ok(())
}

/// Neither other exports of a reload nor the next reload wait for the disk.
#[test]
fn a_reload_does_not_wait_for_a_disk_that_hangs() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let disk = folders.disk("disk.img", DISK_BYTES)?;
    let export = |name: &str, disk: &Path, more: &str| {
        let (socket, disk) = (folders.socket(name), disk.display());
        format!(
            "[[export]]\nendpoint = {{ path = \"{}\" }}\n\
             device = {{ blk = {{ file = \"{disk}\" }} }}\n{more}",
            socket.display()
        )
    };
    let file = write(&folders, "")?;
    let mut command = serve(&file)?;
    command.arg("--export").arg(format!("socket-path={},null=1M", folders.socket("own").display()));
    let mut daemon = Running::serve(&mut command)?;
    // Dropped first: a process with a call that is stuck cannot be killed.
    let fuse = fuse;
    fuse.withhold(daemon.pid(), &[opcode::OPEN]);
    let hung = export("hung", &fuse.file(), "read-only = true\nno-lock = true\n");
    fs::write(&file, [&*hung, &export("healthy", &disk, "")].concat())?;
    daemon.signal(Signal::HUP)?;
    daemon.wait_for(&format!("serving on {}", folders.socket("healthy").display()))?;
    fuse.wait_for(opcode::OPEN)?;
    let line = daemon.wait_for("its change is not complete after")?;
    ensure!(line.contains(&folders.socket("hung").display().to_string()), "{line}");
    fs::write(&file, &hung)?;
    daemon.signal(Signal::HUP)?;
    daemon.wait_for("removed")?;
    fuse.release();
    daemon.wait_for(&format!("serving on {}", folders.socket("hung").display()))?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// A read of a pipe without a writer would block the daemon.
#[test]
fn a_pipe_as_the_file_is_refused_without_blocking() -> Result<()> {
    let folders = test_folders()?;
    let (file, control) = (folders.path("ringhaul.toml"), folders.socket("control"));
    let text = |name: &str| {
        format!(
            "control = \"{}\"\n[[export]]\nname = \"{name}\"\nendpoint = {{ path = \"{}\" }}\n\
             device = {{ blk = {{ null = {{ size-bytes = 1048576 }} }} }}\n",
            control.display(),
            folders.socket(name).display()
        )
    };
    let pipe = || -> Result<()> {
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        let kind = rustix::fs::FileType::Fifo;
        Ok(rustix::fs::mknodat(rustix::fs::CWD, &file, kind, mode, 0)?)
    };
    pipe()?;
    let mut serve = ringhaul()?;
    serve.args(["serve", "--config"]).arg(&file);
    run(&mut serve)?.expect_refusal(&["ringhaul.toml", "it is not a regular file"])?;
    fs::remove_file(&file)?;
    fs::write(&file, text("before"))?;
    let mut daemon = Running::serve(&mut serve)?;
    fs::remove_file(&file)?;
    pipe()?;
    daemon.signal(Signal::HUP)?;
    daemon.wait_for("so nothing changes: cannot read the configuration file")?;
    fs::remove_file(&file)?;
    fs::write(&file, text("after"))?;
    daemon.signal(Signal::HUP)?;
    daemon.wait_for("before: removed")?;
    daemon.wait_for("applied the configuration")?;
    ensure!(folders.socket("after").exists(), "{}", daemon.stderr());
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// A reload that waits for a file system without limit would block all later ones.
#[test]
fn a_reload_of_a_hung_file_is_cancelled() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let exports = Exports(&folders);
    let text = exports.control() + &exports.blk("before", "");
    let file = write(&folders, &text)?;
    let mut daemon = Running::serve(&mut serve(&file)?)?;
    // Dropped first: a process with a call that is stuck cannot be killed.
    let fuse = fuse;
    fuse.withhold(daemon.helper()?, &[opcode::OPEN]);
    fs::remove_file(&file)?;
    std::os::unix::fs::symlink(fuse.file(), &file)?;
    daemon.signal(Signal::HUP)?;
    fuse.wait_for(opcode::OPEN)?;
    let is_left = (|| {
        let name = file.display();
        daemon
            .wait_for(&format!("reading {name} takes longer than 2 s; the reload waits for it"))?;
        let line = daemon.wait_for("so nothing changes: ")?;
        let reason = format!("cannot read {name} within 10 s; reload again when it can be read");
        ensure!(line.contains(&reason), "{line}");
        fs::remove_file(&file)?;
        fs::write(&file, format!("{text}{}", exports.blk("after", "")))?;
        daemon.signal(Signal::HUP)?;
        daemon.wait_for("applied the configuration")
    })();
    // Released even after a failure: the kernel keeps a process with hung calls.
    fuse.release();
    is_left?;
    let mut client = Client::new(&folders.socket("control"))?;
    let expected = ["after", "before"].map(|name| exports.socket(name));
    let mut served = names(&mut client)?;
    served.sort();
    ensure!(served == expected, "{served:?}");
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}
