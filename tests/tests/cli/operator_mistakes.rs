//! Mistakes of operators that the daemon must report.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Finished, Running, ringhaul, ringhaul_under, run, serve};
use ringhaul_kit::daemon::pattern;
use ringhaul_kit::frontend::{Frontend, Setup, blk};
use rustix::process::Signal;

use super::{DISK_BYTES, test_folders};

/// Runs `ringhaul ctl` with these words.
fn ctl(control: &Path, words: &[&str]) -> Result<Finished> {
    run(ringhaul()?.args(["ctl", "--control"]).arg(control).args(words))
}

/// An empty log would hide every later mistake.
#[test]
fn every_command_refuses_a_mistyped_log_level() -> Result<()> {
    let folders = test_folders()?;
    let (disk, socket) = (folders.disk("disk.img", DISK_BYTES)?, folders.socket("disk.sock"));
    let control = folders.socket("control");
    let levels = "error, warn (or warning), info, debug, trace and off";
    for bad in ["verbose", "Debgu", "info,wran", "qemu=debug"] {
        let refused = run(serve(&socket, &disk)?.args(["--log", bad]))?;
        refused.expect_refusal(&["--log", bad])?;
        let file = folders.path("bad.toml");
        std::fs::write(&file, format!("log = \"{bad}\"\n"))?;
        run(ringhaul()?.arg("check").arg(&file))?.expect_code(2)?;
    }
    let refused = run(serve(&socket, &disk)?.args(["--log", "verbose"]))?;
    ensure!(refused.stderr.contains(levels), "{}", refused.stderr);

    let mut command = serve(&socket, &disk)?;
    command.args(["--log", "warning", "--control"]).arg(&control).env("RUST_LOG", "verbose");
    let mut daemon = Running::start(&mut command)?;
    let deadline = std::time::Instant::now() + ringhaul_kit::cli::LIMIT;
    while ctl(&control, &["ping"])?.expect_code(0).is_err() {
        ensure!(std::time::Instant::now() < deadline, "no daemon answers");
    }
    let set = ctl(&control, &["set", "log=verbose"])?;
    ensure!(set.stderr.contains(levels), "{}", set.stderr);
    ensure!(ctl(&control, &["set", "log=warning"])?.expect_code(0)?.stdout.contains("log=warning"));
    ctl(&control, &["set", "log=info"])?.expect_code(0)?;
    daemon.signal(Signal::TERM)?;
    daemon.wait_for("SIGTERM: ")?;
    daemon.finish()?.expect_code(0)?;

    let mut command =
        serve(&folders.socket("other.sock"), &folders.disk("other.img", DISK_BYTES)?)?;
    let mut daemon = Running::serve(command.env("RUST_LOG", "verbose"))?;
    ensure!(daemon.stderr().contains("RUST_LOG is ignored: 'verbose'"), "{}", daemon.stderr());
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// Guest memory may arrive later, and requests are served then.
#[test]
fn a_guest_without_shared_memory_is_named() -> Result<()> {
    let folders = test_folders()?;
    let (disk, socket) = (folders.disk("disk.img", DISK_BYTES)?, folders.socket("disk.sock"));
    let control = folders.socket("control");
    let mut command = serve(&socket, &disk)?;
    let mut daemon = Running::serve(command.arg("--control").arg(&control))?;
    let state = || Ok::<_, anyhow::Error>(ctl(&control, &["list"])?.expect_code(0)?.stdout);

    let mut frontend = Frontend::connect(&socket, &Setup::default())?;
    frontend.negotiate()?;
    ensure!(state()?.contains(", connected"), "no queue was started");
    for queue in 0..frontend.rings.len() {
        frontend.start_queue(queue, 0)?;
        frontend.enable_queue(queue, true)?;
    }
    let line = daemon.wait_for("shares no memory")?;
    ensure!(line.contains("share=on") && line.contains("<memoryBacking>"), "{line}");
    ensure!(state()?.contains(", no memory"), "{}", state()?);

    frontend.share_memory()?;
    let data = pattern(7, 4096);
    frontend.write(0, 8, &data)?;
    ensure!(frontend.read(0, 8, 4096)? == data, "memory that came late is of no use");
    ensure!(state()?.contains(", connected"), "{}", state()?);
    daemon.signal(Signal::TERM)?;
    let log = daemon.finish()?.expect_code(0)?.stderr;
    ensure!(log.matches("shares no memory").count() == 1, "{log}");
    Ok(())
}

/// Zeroes would pass for data of the guest.
#[test]
fn a_truncated_file_gives_logged_errors() -> Result<()> {
    let folders = test_folders()?;
    let (disk, socket) = (folders.disk("disk.img", DISK_BYTES)?, folders.socket("disk.sock"));
    for engine in ["io_uring", "aio", "threads"] {
        let mut command = serve(&socket, &disk)?;
        let mut daemon = Running::serve(command.args(["--engine", engine]))?;
        let mut frontend = Frontend::attach(&socket, &Setup::default())?;
        let file = std::fs::OpenOptions::new().write(true).open(&disk)?;
        file.set_len(1 << 20)?;
        let answer = frontend.request(0, blk::IN, 4096, &[], 4096)?;
        ensure!(answer.status == blk::IOERR, "{engine}: a read has ended with {answer:?}");
        daemon.wait_for_each(&["a request failed", "its disk has shrunk to 1048576 bytes"])?;
        let answer = frontend.request(0, blk::OUT, 4096, &pattern(1, 4096), 0)?;
        ensure!(answer.status == blk::IOERR, "{engine}: a write has ended with {answer:?}");
        ensure!(file.metadata()?.len() == 1 << 20, "{engine}: a write has made it longer");
        file.set_len(DISK_BYTES)?;
        let deadline = std::time::Instant::now() + ringhaul_kit::cli::LIMIT;
        while frontend.request(0, blk::OUT, 4096, &pattern(1, 4096), 0)?.status != blk::OK {
            ensure!(std::time::Instant::now() < deadline, "{engine}: its size is back, in vain");
        }
        ensure!(frontend.read(0, 4096, 4096)? == pattern(1, 4096), "{engine}");
        drop(frontend);
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0).context(engine)?;
    }
    Ok(())
}

/// A terminal would take control characters for colours and extra lines.
#[test]
fn errors_have_no_control_characters() -> Result<()> {
    let folders = test_folders()?;
    let name = "x\u{1b}[31m\nERROR all lost";
    let missing = folders.path(name);
    for option in ["--blk-file", "--disk", "--config", "--takeover"] {
        let mut command = ringhaul()?;
        command.args(["serve", "--socket-path"]).arg(folders.socket("disk.sock"));
        let refused = run(command.arg(option).arg(&missing))?;
        refused.expect_refusal(&["\\u{1b}[31m\\nERROR"])?;
    }
    Ok(())
}

/// The names of files may come from strangers.
#[test]
fn output_has_no_control_characters() -> Result<()> {
    let folders = test_folders()?;
    let disk = folders.disk("x\u{1b}[31m\u{9b}\u{7f}\nsize 1 TiB", DISK_BYTES)?;
    let (path, config) = (disk.display().to_string(), folders.path("config.toml"));
    let socket = folders.socket("\u{1b}[31m.sock").display().to_string();
    let export = format!("[[export]]\nendpoint.path = {socket:?}\ndevice.blk.file = {path:?}\n");
    // TOML has the escapes of JSON.
    let export = ["1b", "9b", "7f"].iter().fold(export, |export, code| {
        export.replace(&format!("\\u{{{code}}}"), &format!("\\u00{code}"))
    });
    std::fs::write(&config, export)?;
    let (config, pattern) = (config.display().to_string(), ["--rw", "read", "--runtime", "50ms"]);
    let shown = "x\\u{1b}[31m\\u{9b}\\u{7f}\\nsize 1 TiB";
    let in_json = "x\\u001b[31m\\u009b\\u007f\\nsize 1 TiB";
    for (words, shown) in [
        (&["disk", "info", &path][..], format!("{shown}\n")),
        (&["disk", "info", &path, "--json"], format!("{in_json}\"")),
        (&["check", &config], format!("{shown}\n")),
        (&[&["bench", "--filename", &path][..], &pattern].concat(), format!("{shown}: disk")),
        (&[&["disk", "bench", &path][..], &pattern].concat(), format!("{shown}: disk")),
        (
            &[&["bench", "--output-format", "json", "--filename", &path][..], &pattern].concat(),
            format!("{in_json}\""),
        ),
    ] {
        let Finished { stdout, .. } = run(ringhaul()?.args(words))?.expect_code(0)?;
        let is_clean = !stdout.replace('\n', "").contains(char::is_control);
        ensure!(stdout.contains(&shown) && is_clean, "{words:?}: {stdout:?}");
    }
    Ok(())
}

#[test]
fn lines_for_the_journal_have_a_priority_and_no_time() -> Result<()> {
    let folders = test_folders()?;
    let (disk, socket) = (folders.disk("disk.img", DISK_BYTES)?, folders.socket("disk.sock"));
    let shell = "JOURNAL_STREAM=$(stat -L -c %d:%i /proc/self/fd/2) exec \"$@\"";
    let mut command = ringhaul_under(&["sh", "-c", shell, "sh"])?;
    command.arg("serve").arg("--socket-path").arg(&socket).arg("--blk-file").arg(&disk);
    let mut daemon = Running::serve(command.env("RUST_LOG", "verbose"))?;
    daemon.signal(Signal::TERM)?;
    let log = daemon.finish()?.expect_code(0)?.stderr;
    ensure!(log.contains("<4>WARN RUST_LOG is ignored"), "{log}");
    ensure!(log.contains(&format!("<6>INFO {}: ", socket.display())), "{log}");
    let mut command = ringhaul_under(&["sh", "-c", shell, "sh"])?;
    command.arg("serve").arg("--socket-path").arg(&socket).args(["--blk-file", "/missing"]);
    let refused = run(&mut command)?.expect_code(2)?;
    ensure!(refused.stderr.starts_with("<3>ringhaul: cannot open /missing"), "{}", refused.stderr);
    // The variable may refer to the standard error of the parent.
    let mut command = serve(&socket, &disk)?;
    let mut daemon = Running::serve(command.env("JOURNAL_STREAM", "1:1"))?;
    daemon.signal(Signal::TERM)?;
    let log = daemon.finish()?.expect_code(0)?.stderr;
    ensure!(log.starts_with("20") && !log.contains("<6>"), "{log}");
    Ok(())
}

/// `head` and similar programs close the pipe early.
#[test]
fn a_closed_pipe_is_no_failure() -> Result<()> {
    let mut command = ringhaul_under(&["bash", "-o", "pipefail", "-c", "\"$@\" | true", "bash"])?;
    let finished = run(command.args(["ctl", "schema"]))?.expect_code(0)?;
    ensure!(finished.stderr.is_empty(), "{}", finished.stderr);
    Ok(())
}

#[test]
fn a_daemon_is_found_and_its_end_waited_for() -> Result<()> {
    let folders = test_folders()?;
    let (disk, socket) = (folders.disk("disk.img", DISK_BYTES)?, folders.socket("disk.sock"));
    let control = folders.socket("control");
    let mut command = serve(&socket, &disk)?;
    let mut daemon = Running::serve(command.arg("--control").arg(&control))?;
    let ctl =
        |words: &[&str]| run(ringhaul()?.arg("ctl").args(words).env("RINGHAUL_CONTROL", &control));
    ensure!(ctl(&["list"])?.expect_code(0)?.stdout.contains("serving"));
    let frontend = Frontend::attach(&socket, &Setup::default())?;
    ctl(&["shutdown", "--wait"])?.expect_code(0)?;
    // The disk is free at once.
    let mut next = serve(&socket, &disk)?;
    let mut next = Running::serve(&mut next)?;
    drop(frontend);
    daemon.wait_for("finishing requests")?;
    daemon.finish()?.expect_code(0)?;
    next.signal(Signal::TERM)?;
    next.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn a_file_is_named_by_its_name_and_may_be_measured_while_in_use() -> Result<()> {
    let folders = test_folders()?;
    let (disk, socket) = (folders.disk("vm1.img", DISK_BYTES)?, folders.socket("disk.sock"));
    let folder = disk.parent().context("a disk has a folder")?;
    let here = |words: &[&str]| run(ringhaul()?.args(words).current_dir(folder));
    ensure!(here(&["disk", "info", "vm1.img"])?.expect_code(0)?.stdout.contains("16 MiB"));
    let refused = here(&["serve", "--socket-path", "s", "--disk", "vm1.img"])?;
    refused.expect_refusal(&["write ./vm1.img"])?;
    let mut daemon = Running::serve(&mut serve(&socket, &disk)?)?;
    let bench = ["disk", "bench", "vm1.img", "--rw", "read", "--runtime", "1"];
    here(&bench)?.expect_refusal(&["--lock off"])?;
    here(&[&bench[..], &["--lock", "off"]].concat())?.expect_code(0)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// Rows of a table: a command line, and words of its error.
#[test]
fn errors_of_options_explain_the_mistake() -> Result<()> {
    let folders = test_folders()?;
    let control = folders.socket("control");
    let named = control.to_string_lossy().into_owned();
    let serve = ["serve", "--disk", "null:1M", "--socket-path"];
    let with = |more: &[&'static str]| [&serve[..], &["s"], more].concat();
    for (words, expected) in [
        (vec!["bench"], "--filename"),
        (vec!["bench", "--socket-path", "s", "--iodepth", "0"], "at least 1"),
        (vec!["ctl", "--control", "c", "events", "bogus"], "lun-removed"),
        (vec!["ctl", "--control", "c", "set-disk", "v", "iops-total=x"], "a whole number"),
        (with(&["--poll-max-us", "64us"]), "a whole number"),
        (with(&["--iothread", "3"]), "there is only 0"),
        (with(&["--control", "s"]), "name one socket"),
    ] {
        run(ringhaul()?.args(&words))?.expect_refusal(&[expected]).context(words.join(" "))?;
    }
    let mut command = ringhaul()?;
    command.args(serve).arg(folders.socket("vm.sock")).args(["--control", &named, "--name", "vm"]);
    let mut daemon = Running::serve(&mut command)?;
    for (words, expected) in [
        (&["set", "poll-max-us=99999"][..], "0 to 10000"),
        (&["set", "poll-max-us=99999999999"], "0 to 10000"),
        (&["resize", "vm", "512"], "as in 512M"),
    ] {
        let refused = ctl(&control, words)?.expect_code(1)?;
        ensure!(refused.stderr.contains(expected), "{words:?}: {}", refused.stderr);
    }
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}
