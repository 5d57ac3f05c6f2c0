//! `ringhaul ctl` and completions, as people and scripts use them.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{
    EXIT_USAGE, Finished, Running, TestFolders, bench, ringhaul, ringhaul_under, run, serve,
};
use ringhaul_kit::frontend::{Frontend, Setup};
use ringhaul_kit::fuse::{Fuse, opcode};
use ringhaul_kit::system::print_skipped;
use rustix::process::geteuid;
use serde_json::{Value, json};

use super::{DISK_BYTES, is_root, schema, test_folders};

/// Runs `ringhaul ctl` with these words.
fn ctl(control: &Path, words: &[&str]) -> Result<Finished> {
    run(ringhaul()?.args(["ctl", "--control"]).arg(control).args(words))
}

/// Serves the export `vm`. Returns the control socket, too.
fn serve_vm(folders: &TestFolders) -> Result<(Running, PathBuf)> {
    let control = folders.socket("control");
    let mut command = serve(&folders.socket("vm.sock"), &folders.disk("disk.img", DISK_BYTES)?)?;
    let daemon = Running::serve(command.args(["--name", "vm", "--control"]).arg(&control))?;
    Ok((daemon, control))
}

/// Runs `ringhaul ctl` with a pseudo-terminal as its stdout, and returns its output.
fn ctl_on_terminal(control: &Path, words: &str) -> Result<String> {
    let program = ringhaul()?;
    let program = program.get_args().last().context("no program")?.to_string_lossy().into_owned();
    let line = format!("{program} ctl --control {} {words}", control.display());
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    Ok(run(&mut script)?.expect_code(0)?.stdout.replace('\r', ""))
}

#[test]
fn ctl_accepts_the_options_of_serve() -> Result<()> {
    let folders = test_folders()?;
    let control = folders.socket("control");
    let mut command = ringhaul()?;
    command.args(["serve", "--device", "scsi", "--lun", "0,null=1M", "--name", "vm1"]);
    command.arg("--socket-path").arg(folders.socket("vm1.sock")).arg("--control").arg(&control);
    let daemon = Running::serve(&mut command)?;
    let done =
        |words: &[&str]| Ok::<_, anyhow::Error>(ctl(&control, words)?.expect_code(0)?.stdout);

    // The daemon runs in a different folder, so paths must be resolved by `ctl`.
    let disk = folders.disk("disk.img", DISK_BYTES)?;
    let folder = disk.parent().context("a disk has a folder")?;
    let mut add = ringhaul()?;
    add.current_dir(folder).args(["ctl", "--control"]).arg(&control);
    add.args(["add", "--name", "vm2", "--blk-file", "disk.img", "--cache", "writeback"]);
    add.arg("--socket-path").arg(folders.socket("vm2.sock"));
    run(&mut add)?.expect_code(0)?;
    let list = done(&["list"])?;
    let lines: Vec<&str> = list.lines().collect();
    ensure!(lines == ["vm1  serving, 1 MiB, no front-end", "vm2  serving, 16 MiB, no front-end"]);
    let shown: Value = serde_json::from_str(&done(&["--json", "show", "vm2"])?)?;
    ensure!(shown["cache"] == "writeback" && shown["disks"][0]["engine"].is_string(), "{shown}");

    done(&["resize", "vm2", "+1M"])?;
    let bytes = disk.metadata()?.len();
    ensure!(bytes == DISK_BYTES + (1 << 20), "the file has {bytes} bytes");
    ctl(&control, &["resize", "vm2", "1M"])?.expect_code(1)?;
    done(&["resize", "vm2", "1M", "--shrink"])?;
    ensure!(disk.metadata()?.len() == 1 << 20, "it was not cut off");
    done(&["add-lun", "vm1", "2:7,null=1M"])?;
    done(&["resize", "vm1", "2:7", "+3M"])?;
    let shown: Value = serde_json::from_str(&done(&["show", "vm1"])?)?;
    ensure!(shown["disks"][1]["size-bytes"] == 4 << 20, "{shown}");
    done(&["remove-lun", "vm1", "2:7"])?;
    let set = done(&["set", "poll-max-us=7", "log=warn"])?;
    ensure!(set.lines().any(|line| line == "poll-max-us=7"), "{set}");
    ensure!(set.lines().any(|line| line == "log=warn"), "{set}");
    ensure!(done(&["stats"])?.lines().any(|line| line == "vm2  reads 0 0 0"), "no counters");
    done(&["remove", "vm2", "--force", "--deadline", "60"])?;

    let refused = ctl(&control, &["remove", "vm2"])?.expect_code(1)?;
    ensure!(refused.stderr.contains("there is no export vm2"), "{}", refused.stderr);
    ensure!(refused.stdout.is_empty(), "{}", refused.stdout);
    // A number that names no unit is a size.
    ctl(&control, &["resize", "vm1", "20000"])?.expect_code(1)?;
    ctl(&control, &["resize", "vm1", "-1M"])?.expect_refusal(&["'-1'", "--shrink"])?;
    let refused = ctl(&control, &["resize", "vm1", "+1M"])?.expect_code(1)?;
    ensure!(refused.stderr.contains("name one of its logical units"), "{}", refused.stderr);
    let control_last = ["ctl", "list", "--control", &control.display().to_string()];
    ensure!(run(ringhaul()?.args(control_last))?.expect_code(0)?.stdout.contains("vm1"), "none");
    ctl(&folders.socket("nobody"), &["list"])?.expect_refusal(&["nobody", "--control"])?;
    done(&["shutdown"])?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// A daemon with the export `vm`, on a disk whose flushes and closes `fuse` can withhold.
fn serve_fuse(folders: &TestFolders, fuse: &Fuse) -> Result<Running> {
    let mut command = ringhaul()?;
    command.args(["serve", "--engine", "threads", "--read-only", "--lock", "off", "--name", "vm"]);
    command.arg("--blk-file").arg(fuse.file()).arg("--socket-path").arg(folders.socket("vm.sock"));
    command.arg("--control").arg(folders.socket("control"));
    Running::serve(&mut command)
}

#[test]
fn a_removal_reports_a_missed_deadline() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let control = folders.socket("control");
    let daemon = serve_fuse(&folders, &fuse)?;
    fuse.withhold(daemon.pid(), &[opcode::FLUSH]);
    let late = ctl(&control, &["remove", "vm", "--deadline", "0.2"]);
    let list = ctl(&control, &["list"]);
    fuse.release();
    let late = late?.expect_code(3)?;
    ensure!(late.stderr.contains("vm has not ended: its disk is not closed"), "{}", late.stderr);
    ensure!(list?.stdout.starts_with("vm  stopping"), "it is not stopping");
    // The export keeps stopping, and may already be gone.
    ctl(&control, &["remove", "vm"])?;
    ensure!(ctl(&control, &["list"])?.expect_code(0)?.stdout.is_empty(), "it is still there");
    ctl(&control, &["shutdown"])?.expect_code(0)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// A single call with `--force` is enough, and its answer names the unfinished work.
#[test]
fn a_forced_removal_does_not_wait_for_a_hung_close() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let control = folders.socket("control");
    let mut daemon = serve_fuse(&folders, &fuse)?;
    fuse.withhold(daemon.pid(), &[opcode::FLUSH]);
    let removed = ctl(&control, &["remove", "vm", "--force", "--deadline", "60"]);
    let list = ctl(&control, &["list"]);
    let line = daemon.wait_for("removed by force, although its disk is not closed");
    // Released even after a failure: the kernel keeps a process with hung calls.
    fuse.release();
    let removed = removed?.expect_code(0)?.stdout;
    ensure!(removed.contains(r#""waits-for": "its disk is not closed""#), "{removed}");
    ensure!(list?.expect_code(0)?.stdout.is_empty(), "it is still there");
    line?;
    ctl(&control, &["shutdown"])?.expect_code(0)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn a_terminal_gets_tables() -> Result<()> {
    let folders = test_folders()?;
    let control = folders.socket("control");
    let mut command = ringhaul()?;
    command.args(["serve", "--disk", "null,size=1G", "--name", "vm1"]);
    command.arg("--socket-path").arg(folders.socket("vm1.sock")).arg("--control").arg(&control);
    let daemon = Running::serve(&mut command)?;
    for (words, head, row) in [
        ("list", "NAME  DEVICE  STATE", "vm1   blk     serving  1 GiB"),
        ("show vm1", "UNIT  SIZE", "-     1 GiB  ready"),
        ("stats", "IOTHREAD    READS", "iothread-0  0"),
    ] {
        let shown = ctl_on_terminal(&control, words)?;
        for start in [head, row] {
            ensure!(shown.lines().any(|line| line.starts_with(start)), "{words}:\n{shown}");
        }
    }
    let mut events = ringhaul()?;
    events.args(["ctl", "--control"]).arg(&control).args(["events", "resized"]);
    let mut events = events.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let stdout = events.stdout.take().context("it has no stdout")?;
    let (sender, first) = channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let _ = BufReader::new(stdout).read_line(&mut line).map(|_| sender.send(line));
    });
    // Events before the subscription are lost, so resize until one arrives.
    let mut sizes = (1..1000).map(|size| format!("{size}M"));
    let line = loop {
        let size = sizes.next().context("no event comes")?;
        ctl(&control, &["resize", "vm1", &size, "--shrink"])?.expect_code(0)?;
        if let Ok(line) = first.recv_timeout(Duration::from_millis(100)) {
            break line;
        }
    };
    ensure!(line.starts_with("vm1 resized ") && line.ends_with(" MiB\n"), "{line}");
    ctl(&control, &["shutdown"])?.expect_code(0)?;
    daemon.finish()?.expect_code(0)?;
    let ended = events.wait_with_output()?;
    let output = String::from_utf8_lossy(&ended.stderr);
    ensure!(ended.status.code() == Some(2), "events ended with {}", ended.status);
    // `ctl` cannot tell an end from a takeover; after a takeover a second call succeeds.
    ensure!(
        output.contains("was replaced in a takeover") && output.contains("run the command again"),
        "{output}"
    );
    Ok(())
}

#[test]
fn answers_match_the_schema() -> Result<()> {
    let folders = test_folders()?;
    let control = folders.socket("control");
    let printed = run(ringhaul()?.args(["ctl", "schema"]))?.expect_code(0)?.stdout;
    let schema: Value = serde_json::from_str(&printed)?;
    let mut command = ringhaul()?;
    let layers = "1,iops-total=9,disk=raw,size=512,over=raw,over=null:1M";
    command.args(["serve", "--device", "scsi", "--lun", "0,null=1M", "--lun", layers]);
    command.args(["--name", "vm1"]);
    command.arg("--socket-path").arg(folders.socket("vm1.sock")).arg("--control").arg(&control);
    let daemon = Running::serve(&mut command)?;
    let blk = folders.socket("blk");
    let words = ["add", "--name", "blk", "--disk", "null:1M", "--socket-path"];
    ctl(&control, &[&words[..], &[&blk.display().to_string()]].concat())?.expect_code(0)?;
    let frontend = Frontend::attach(&blk, &Setup::default())?;
    for (words, method) in [
        (&["ping"][..], "ping"),
        (&["list"], "export.list"),
        (&["show", "vm1"], "export.show"),
        (&["show", "blk"], "export.show"),
        (&["stats"], "stats"),
        (&["set"], "set"),
        (&["resize", "vm1", "0", "2M"], "disk.resize"),
        (&["set-disk", "vm1", "0"], "disk.set"),
        (&["remove", "vm1"], "export.remove"),
    ] {
        let words = [&["--json"], words].concat();
        let answer = serde_json::from_str(&ctl(&control, &words)?.expect_code(0)?.stdout)?;
        schema::check(&schema, &schema["methods"][method]["result"], &answer)
            .with_context(|| format!("{method}: {answer}"))?;
    }
    let unit = |disk: Value| json!({ "export": "vm1", "unit": { "lun": 2, "disk": disk } });
    let over = |disk: Value| json!({ "raw": { "over": disk } });
    for (disk, is_good) in [
        (json!("null:1M"), true),
        (over(over(json!({ "null": { "size-bytes": 512 } }))), true),
        (over(over(json!("null:1M"))), true),
        (over(json!({ "raw": { "of": "null:1M" } })), false),
        (over(json!(7)), false),
    ] {
        let checked =
            schema::check(&schema, &schema["methods"]["lun.add"]["params"], &unit(disk.clone()));
        ensure!(checked.is_ok() == is_good, "{disk}: {checked:?}");
    }
    drop(frontend);
    ctl(&control, &["shutdown"])?.expect_code(0)?;
    daemon.finish()?.expect_code(0)?;
    run(ringhaul()?.args(["ctl", "list"]))?.expect_refusal(&["--control PATH"])
}

/// Exports are added one by one.
#[test]
fn an_error_lists_the_exports_that_were_added() -> Result<()> {
    let folders = test_folders()?;
    let control = folders.socket("control");
    let mut command = ringhaul()?;
    let own = format!("socket-path={},null=1M", folders.socket("vm.sock").display());
    command.args(["serve", "--export", &own, "--control"]).arg(&control);
    let daemon = Running::serve(&mut command)?;
    let export = |name: &str, disk: &str| {
        format!("socket-path={},name={name},{disk}", folders.socket(name).display())
    };
    let exports =
        [export("a", "null=1M"), export("b", "blk-file=/nowhere"), export("c", "null=1M")];
    let [a, b, c] = &exports;
    let output = ctl(&control, &["add", "--export", a, "--export", b, "--export", c])?;
    let output = output.expect_code(1)?.stderr;
    ensure!(output.trim_end().ends_with("; added: a; not added: b, c"), "{output}");
    let list = ctl(&control, &["list"])?.expect_code(0)?.stdout;
    ensure!(list.lines().count() == 2 && list.contains("a  serving"), "{list}");
    let output = ctl(&control, &["add", "--export", b])?.expect_code(1)?.stderr;
    ensure!(!output.contains("added"), "there is one only: {output}");
    ctl(&control, &["shutdown"])?.expect_code(0)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// `PATH` with the folder of the program in front: completions call `ringhaul`.
fn path_with_program() -> Result<String> {
    let program = ringhaul()?;
    let program = Path::new(program.get_args().last().context("no program")?);
    let folder = program.parent().context("the program has no folder")?.display();
    Ok(format!("{folder}:{}", std::env::var("PATH")?))
}

#[test]
fn bash_completes_arguments_of_ctl() -> Result<()> {
    let script = run(ringhaul()?.args(["completions", "bash"]))?.expect_code(0)?.stdout;
    let mut bash = Command::new("bash");
    let commands = r#"
COMP_WORDS=(ringhaul ctl re); COMP_CWORD=2; COMP_TYPE=9
_clap_complete_ringhaul ringhaul re ctl; echo "${COMPREPLY[@]}""#;
    bash.args(["--norc", "-c", &(script + commands)]).env("PATH", path_with_program()?);
    let completed = run(&mut bash)?.expect_code(0)?.stdout;
    ensure!(completed.trim() == "remove remove-lun resize resume", "{completed}");
    Ok(())
}

/// Returns true if this shell is installed; reports a skip if not.
fn has_shell(shell: &str) -> bool {
    let has = Command::new(shell).args(["-c", "true"]).status().is_ok_and(|it| it.success());
    if !has {
        print_skipped(&format!("completions of {shell}: there is no {shell}"));
    }
    has
}

/// Each shell runs the script that is generated for it.
#[test]
fn zsh_and_fish_complete_arguments_of_ctl() -> Result<()> {
    let folders = test_folders()?;
    let folder = folders.socket("completions");
    fs::create_dir(&folder)?;
    if has_shell("fish") {
        let script = run(ringhaul()?.args(["completions", "fish"]))?.expect_code(0)?.stdout;
        let commands = script + "\ncomplete --do-complete 'ringhaul ctl re'\n";
        let mut fish = Command::new("fish");
        fish.args(["--no-config", "-c", &commands]).env("HOME", &folder);
        fish.env("PATH", path_with_program()?);
        let completed = run(&mut fish)?.expect_code(0)?.stdout;
        let words: Vec<&str> =
            completed.lines().filter_map(|line| line.split('\t').next()).collect();
        ensure!(words == ["remove", "remove-lun", "resize", "resume"], "{completed}");
    }
    if has_shell("zsh") {
        let script = run(ringhaul()?.args(["completions", "zsh"]))?.expect_code(0)?.stdout;
        fs::write(folder.join("_ringhaul"), script)?;
        // zsh completes only in interactive shells, so it gets a terminal.
        let commands = r#"
zmodload zsh/zpty
zpty shell "TERM=dumb zsh --no-rcs -i"
zpty -w shell "fpath=('$HOME' \$fpath); autoload -Uz compinit; compinit -D -u
bindkey '^I' list-choices; PS1=; print rea''dy"
zpty -r shell seen '*ready*'
zpty -w -n shell $'ringhaul ctl re\t'
zpty -r shell seen '*resume*'
print -r -- "$seen"
zpty -d shell"#;
        let mut zsh = Command::new("zsh");
        zsh.args(["--no-rcs", "-c", commands])
            .env("HOME", &folder)
            .env("PATH", path_with_program()?);
        let completed = run(&mut zsh)?.expect_code(0)?.stdout;
        let words = completed.lines().map(str::trim_start).filter(|line| line.starts_with("re"));
        let words: Vec<&str> = words.filter_map(|line| line.split_whitespace().next()).collect();
        ensure!(words == ["remove", "remove-lun", "resize", "resume"], "{completed}");
    }
    Ok(())
}

/// The columns of a person's view come from fields that only a connected front-end has.
#[test]
fn a_shown_export_has_its_front_end_and_its_queues() -> Result<()> {
    let folders = test_folders()?;
    let (daemon, control) = serve_vm(&folders)?;
    let options = "--rw randread --runtime 1h --timeout 1h --eta always";
    let mut load = Running::start(&mut bench(&folders.socket("vm.sock"), options)?)?;
    load.wait_for("IOPS")?;
    let shown = ctl_on_terminal(&control, "show vm")?;
    let row = |name: &str| {
        let mut lines = shown.lines().filter_map(|line| line.strip_prefix(name));
        lines.next().map(str::trim_start).with_context(|| format!("no {name} in:\n{shown}"))
    };
    let (process, user) = (load.pid().as_raw_nonzero(), geteuid().as_raw());
    ensure!(row("front-end ")? == format!("process {process}, user {user}"), "{shown}");
    for (name, word) in [
        ("connected ", " s"),
        ("features ", "version-1"),
        ("protocol ", "mq "),
        ("memory ", " in 1 region"),
        ("reads ", " of "),
        ("QUEUE ", "ROLE  "),
        ("0 ", "running"),
    ] {
        ensure!(row(name)?.contains(word), "{name}: {}", row(name)?);
    }
    drop((load, daemon));
    Ok(())
}

/// `state load` reads standard input. The daemon is asked only with a whole state.
#[test]
fn a_text_that_is_no_state_is_refused_before_the_daemon_is_asked() -> Result<()> {
    let folders = test_folders()?;
    let (daemon, control) = serve_vm(&folders)?;
    let long = format!("\"{}\"", "x".repeat(1 << 20));
    for (state, status, expected) in [
        (" \n", EXIT_USAGE, "standard input is empty; `ringhaul ctl state save`"),
        (&*long, EXIT_USAGE, "more than 1 MiB"),
        ("{\"units\":", EXIT_USAGE, "standard input has no state in JSON"),
        ("{}", 1, "vm"),
    ] {
        let file = folders.path("state");
        fs::write(&file, state)?;
        let mut load = ringhaul()?;
        load.args(["ctl", "--control"]).arg(&control).args(["state", "load", "vm"]);
        let refused = run(load.stdin(fs::File::open(&file)?))?.expect_code(status)?;
        ensure!(refused.stderr.contains(expected), "{expected}: {}", refused.stderr);
        ensure!(refused.stdout.is_empty(), "{}", refused.stdout);
    }
    let refused = ctl(&control, &["state", "save", "vm"])?.expect_code(1)?;
    ensure!(refused.stderr.contains("vm"), "{}", refused.stderr);
    drop(daemon);
    Ok(())
}

/// Without an option, the only daemon of the machine is meant.
#[test]
fn the_only_control_socket_of_the_machine_is_used() -> Result<()> {
    if !is_root() {
        print_skipped("only root mounts");
        return Ok(());
    }
    let folders = test_folders()?;
    let (daemon, control) = serve_vm(&folders)?;
    let list = |places: &[&str]| -> Result<Finished> {
        // The folders are in a file system that only this command sees.
        let mut script = "mount -t tmpfs none /run".to_owned();
        for place in places {
            let made = format!(" && mkdir /run/{place} && ln -s \"$CONTROL\" /run/{place}/control");
            script.push_str(&made);
        }
        script.push_str(" && exec \"$@\"");
        let mut list = ringhaul_under(&["unshare", "--mount", "sh", "-c", &script, "sh"])?;
        run(list.env_remove("RINGHAUL_CONTROL").env("CONTROL", &control).args(["ctl", "list"]))
    };
    for only in ["ringhaul", "ringhaul-a"] {
        let listed = list(&[only, "other"])?.expect_code(0)?.stdout;
        ensure!(listed.starts_with("vm  serving"), "{only}: {listed}");
    }
    list(&["ringhaul-a", "ringhaul"])?.expect_refusal(&[
        "which daemon is meant",
        "found /run/ringhaul/control, /run/ringhaul-a/control",
    ])?;
    list(&["other"])?.expect_refusal(&["which daemon is meant", "there is no socket"])?;
    drop(daemon);
    Ok(())
}
