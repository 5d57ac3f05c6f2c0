//! Conventions of a command line: version, help, exit statuses, completions.

use std::fs;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Running, bench, ringhaul, run};
use rustix::process::Signal;

use crate::{DISK_BYTES, test_folders};

#[test]
fn a_version_has_the_details_of_a_bug_report() -> Result<()> {
    let version = concat!("ringhaul ", env!("CARGO_PKG_VERSION"));
    let text = run(ringhaul()?.arg("version"))?.expect_code(0)?.stdout;
    ensure!(text.starts_with(version), "{text}");
    for row in
        ["\ncommit ", "\ntakeover  formats ", "\nfeatures ", "\nengines ", "\nlibrbd ", "\nkernel "]
    {
        ensure!(text.contains(row), "no {row:?}:\n{text}");
    }
    ensure!(text.contains("threads") && text.contains("qcow2"), "{text}");
    for words in [&["--version"][..], &["serve", "--version"], &["ctl", "--version"]] {
        let text = run(ringhaul()?.args(words))?.expect_code(0)?.stdout;
        ensure!(text.starts_with(version) && text.contains("\nengines "), "{words:?}: {text}");
    }
    let short = run(ringhaul()?.arg("-V"))?.expect_code(0)?.stdout;
    ensure!(short.trim_end() == version, "{short}");
    Ok(())
}

#[test]
fn help_has_groups_and_ends_with_examples() -> Result<()> {
    for (command, groups) in [
        ("serve", &["Socket:", "Disk:", "Device:", "Threads and engines:"][..]),
        ("bench", &["Options with --filename:"]),
        ("check", &[]),
    ] {
        for help in ["-h", "--help"] {
            let text = run(ringhaul()?.args([command, help]))?.expect_code(0)?.stdout;
            let place = |words: &str| text.find(&format!("\n{words}\n"));
            for group in groups {
                ensure!(place(group).is_some_and(|at| Some(at) < place("Log:")), "{group}: {text}");
            }
            let example = format!("\nExamples:\n  ringhaul {command} ");
            // The summary of `serve` is short, and names the complete text.
            match (command, help) {
                ("serve", "-h") => {
                    ensure!(text.contains("`ringhaul serve --help` has all"), "{text}");
                    ensure!(text.lines().count() <= 50 && !text.contains("--slice-us"), "{text}");
                }
                _ => ensure!(text.contains("\nStatus: 0, "), "{text}"),
            }
            ensure!(text.contains(&example), "{text}");
            // An installed program has no such files.
            ensure!(!text.contains("crate::") && !text.contains("docs/"), "{text}");
        }
    }
    let keys = run(ringhaul()?.args(["disk", "--help"]))?.expect_code(0)?.stdout;
    ensure!(keys.contains("\n  luks   key-file, key-fd, header, discard, over\n"), "{keys}");
    Ok(())
}

#[test]
fn exit_statuses_match_the_help() -> Result<()> {
    let folders = test_folders()?;
    let (disk, socket) = (folders.disk("disk.img", DISK_BYTES)?, folders.socket("vm.sock"));
    run(&mut bench(&socket, "--number_ios 1")?)?.expect_code(2)?;
    let mut serve = ringhaul()?;
    serve.args(["serve", "--rerror", "report", "--socket-path"]).arg(&socket);
    let mut daemon = Running::serve(serve.arg("--blk-file").arg(&disk))?;
    let usual = "--name=x --ioengine=io_uring --direct=1 --time_based --group_reporting=1";
    let finished =
        run(&mut bench(&socket, &format!("{usual} --runtime=100ms"))?)?.expect_code(0)?;
    let note = "ringhaul: not needed here: --ioengine, --direct, --time_based, --group_reporting\n";
    ensure!(finished.stderr.contains(note), "{}", finished.stderr);
    let fio = "--name=boot --number_ios 9 --output-format fio-json";
    let report = run(&mut bench(&socket, fio)?)?.expect_code(0)?.stdout;
    let report: serde_json::Value = serde_json::from_str(&report)?;
    let job = &report["jobs"][0];
    ensure!(job["jobname"] == "boot" && job["read"]["total_ios"] == 9, "{report}");
    // Reads beyond the end of the file fail.
    fs::File::options().write(true).open(&disk)?.set_len(DISK_BYTES / 2)?;
    let half = format!("--rw read --number_ios 9 --offset {}", DISK_BYTES / 2);
    run(&mut bench(&socket, &half)?)?.expect_code(1)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    let file = folders.path("vms.toml");
    for (text, code) in [("iothreads = 2\n", 0), ("iothreads = 0\n", 2)] {
        fs::write(&file, text)?;
        run(ringhaul()?.arg("check").arg(&file))?.expect_code(code)?;
    }
    for (path, code) in [(&*disk, 0), (&folders.path("missing.img"), 2)] {
        run(ringhaul()?.args(["disk", "info"]).arg(path))?.expect_code(code)?;
        let bench = ["disk", "bench", "--runtime", "0.1"];
        run(ringhaul()?.args(bench).arg(path))?.expect_code(code)?;
    }
    Ok(())
}

#[test]
fn a_takeover_without_a_daemon_names_the_control_option() -> Result<()> {
    let nobody = test_folders()?.socket("nobody");
    let refused = run(ringhaul()?.args(["serve", "--takeover"]).arg(&nobody))?;
    refused.expect_refusal(&["nobody", "the --control socket of a daemon", "without --takeover"])
}

#[test]
fn a_shell_completes_names_of_exports_and_keys_of_disks() -> Result<()> {
    let script = run(ringhaul()?.args(["completions", "bash"]))?.expect_code(0)?.stdout;
    ensure!(script.contains("COMPLETE") && script.contains("ringhaul"), "{script}");
    let folders = test_folders()?;
    let (control, socket) = (folders.socket("control"), folders.socket("vm.sock"));
    let mut serve = ringhaul()?;
    serve.args(["serve", "--state", "none", "--control"]).arg(&control);
    serve.args(["--name", "boot-disk", "--disk", "null:1M", "--socket-path"]).arg(&socket);
    let mut daemon = Running::serve(&mut serve)?;
    let complete = |words: &[&str]| -> Result<String> {
        let mut command = ringhaul()?;
        command.env("COMPLETE", "bash").env("_CLAP_IFS", "\n");
        command.env("_CLAP_COMPLETE_INDEX", (words.len() - 1).to_string());
        Ok(run(command.arg("--").args(words))?.expect_code(0)?.stdout)
    };
    let control = control.display().to_string();
    let names = complete(&["ringhaul", "ctl", "--control", &control, "show", ""])?;
    ensure!(names.lines().any(|name| name == "boot-disk"), "{names}");
    let none = complete(&["ringhaul", "ctl", "--control", "/nowhere", "show", ""])?;
    ensure!(!none.contains("boot-disk"), "{none}");
    let kinds = complete(&["ringhaul", "serve", "--disk", "qc"])?;
    ensure!(kinds.lines().any(|kind| kind == "qcow2,"), "{kinds}");
    let keys = complete(&["ringhaul", "serve", "--disk", "qcow2,ba"])?;
    ensure!(keys.lines().any(|key| key == "qcow2,backing="), "{keys}");
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}
