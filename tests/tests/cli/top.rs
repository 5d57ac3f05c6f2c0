//! `ringhaul ctl top`.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, bench, ringhaul, ringhaul_under, run, serve};
use ringhaul_kit::frontend::{Frontend, Setup};
use ringhaul_kit::server::ringhaul_binary;
use ringhaul_tools::process::wait_child;
use serde_json::Value;

use crate::{DISK_BYTES, test_folders};

fn start(folders: &TestFolders) -> Result<Running> {
    folders.disk("disk.img", DISK_BYTES)?;
    let mut command = serve(&folders.socket("vm.sock"), &folders.path("disk.img"))?;
    command.args(["--name", "vm", "--control"]).arg(folders.socket("control"));
    Running::serve(&mut command)
}

fn top(folders: &TestFolders) -> Result<Command> {
    let mut command = ringhaul()?;
    command.args(["ctl", "--control"]).arg(folders.socket("control")).arg("top");
    Ok(command)
}

#[test]
fn one_page_shows_the_load() -> Result<()> {
    let folders = test_folders()?;
    let _daemon = start(&folders)?;
    let mut idle = top(&folders)?;
    let page = run(idle.args(["--once", "--interval", "0.1"]))?.expect_code(0)?.stdout;
    ensure!(page.contains("exports: 1, 0 requests/s") && page.contains("waiting"), "{page}");
    let mut load = Running::start(&mut bench(&folders.socket("vm.sock"), "--rw randread")?)?;
    // Figures of a whole interval under load.
    let page = loop {
        let mut json = top(&folders)?;
        let page = run(json.args(["--once", "--json", "--interval", "0.3"]))?.expect_code(0)?;
        let page: Value = serde_json::from_str(&page.stdout)?;
        if page["exports"][0]["reads-per-second"].as_f64() > Some(1.0) {
            break page;
        }
    };
    let export = &page["exports"][0];
    ensure!(export["name"] == "vm" && export["state"] == "serving", "{export}");
    ensure!(export["writes-per-second"] == 0.0, "{export}");
    let latencies = ["p50-us", "p99-us"].map(|key| export[key].as_f64().unwrap_or(-1.0));
    ensure!(latencies[0] > 0.0 && latencies[0] <= latencies[1], "{export}");
    let mut details = top(&folders)?;
    let details = run(details.args(["vm", "--once", "--interval", "0.3"]))?.expect_code(0)?.stdout;
    ensure!(details.starts_with("vm: serving") && details.contains('█'), "{details}");
    load.signal(rustix::process::Signal::TERM)?;
    load.finish()?;
    Ok(())
}

/// Each line has the figures of its own interval: a request is in one of them.
#[test]
fn a_request_is_in_the_figures_of_one_interval() -> Result<()> {
    let folders = test_folders()?;
    let _daemon = start(&folders)?;
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    let mut json = ringhaul_under(&["sh", "-c", "exec \"$@\" >&2", "sh"])?;
    json.args(["ctl", "--control"]).arg(folders.socket("control"));
    let mut pages = Running::start(json.args(["top", "--json", "--interval", "0.1"]))?;
    let mut requests = || -> Result<f64> {
        let page: Value = serde_json::from_str(&pages.wait_for("{")?)?;
        let seconds = page["seconds"].as_f64().context("no seconds")?;
        let rate = page["exports"][0]["requests-per-second"].as_f64().context("no rate")?;
        Ok((rate * seconds).round())
    };
    ensure!(requests()? == 0.0);
    frontend.read(0, 0, 4096)?;
    let mut seen = Vec::new();
    while seen.iter().filter(|count| **count == 0.0).count() < 5 || !seen.contains(&1.0) {
        seen.push(requests()?);
        ensure!(seen.iter().sum::<f64>() <= 1.0, "{seen:?}");
    }
    pages.signal(rustix::process::Signal::TERM)?;
    pages.finish()?;
    Ok(())
}

#[test]
fn an_export_that_does_not_exist_is_named() -> Result<()> {
    let folders = test_folders()?;
    let _daemon = start(&folders)?;
    for form in [&[][..], &["--json"]] {
        let words = [&["other", "--once", "--interval", "0.1"], form].concat();
        let refused = run(top(&folders)?.args(words))?;
        refused.expect_refusal(&["there is no export other", "ctl list"])?;
    }
    Ok(())
}

#[test]
fn one_export_is_shown_alone() -> Result<()> {
    let folders = test_folders()?;
    let _daemon = start(&folders)?;
    let mut add = ringhaul()?;
    add.args(["ctl", "--control"]).arg(folders.socket("control"));
    add.args(["add", "--name", "other", "--disk", "null:1M", "--socket-path"]);
    run(add.arg(folders.socket("other.sock")))?.expect_code(0)?;
    for (export, expected) in [(None, &["vm", "other"][..]), (Some("other"), &["other"])] {
        let mut json = top(&folders)?;
        json.args(["--once", "--json", "--interval", "0.1"]).args(export);
        let page: Value = serde_json::from_str(&run(&mut json)?.expect_code(0)?.stdout)?;
        let exports = page["exports"].as_array().context("no exports")?.iter();
        let names: Vec<_> = exports.filter_map(|export| export["name"].as_str()).collect();
        ensure!(names == expected, "{export:?}: {names:?}");
    }
    Ok(())
}

/// On a terminal, `q` and Ctrl-C end it, and the terminal is as before.
#[test]
fn a_key_ends_it_and_the_terminal_is_restored() -> Result<()> {
    let folders = test_folders()?;
    let _daemon = start(&folders)?;
    press(&folders, b"nq", &["ended 0"]).context("q")?;
    // While it asks the daemon, Ctrl-C is a signal.
    press(&folders, b"\x03", &["ended 0", "ended 130"]).context("Ctrl-C")
}

/// Presses keys when the first page is there. `ends` has the lines with possible statuses.
fn press(folders: &TestFolders, keys: &[u8], ends: &[&str]) -> Result<()> {
    let control = folders.socket("control");
    let ringhaul = ringhaul_binary()?;
    let inside = format!(
        "trap : INT; stty -g; {} ctl --control {} top --interval 0.1; echo ended $?; stty -g",
        ringhaul.display(),
        control.display()
    );
    let mut script = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "script", "-qec", &inside, "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting script, of the package bsdutils")?;
    let mut keyboard = script.stdin.take().context("no stdin")?;
    let mut lines = BufReader::new(script.stdout.take().context("no stdout")?).lines();
    let before = lines.next().context("no settings of the terminal")??;
    let (mut has_page, mut after) = (false, None);
    while let Some(line) = lines.next().transpose()? {
        if line.contains("q quit; sort: i b p d n") && !has_page {
            has_page = true;
            keyboard.write_all(keys)?;
        }
        if line.contains("ended") {
            ensure!(ends.iter().any(|end| line.ends_with(end)), "{line}");
            after = lines.next().transpose()?;
        }
    }
    ensure!(has_page && after.as_ref() == Some(&before), "{before:?} became {after:?}");
    wait_child(&mut script, std::time::Instant::now() + ringhaul_kit::cli::LIMIT)?;
    Ok(())
}
