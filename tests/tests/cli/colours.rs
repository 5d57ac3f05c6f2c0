//! Colours of each kind of output: on a terminal alone, and not if `NO_COLOR` is set.

use std::process::Command;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Running, run, serve};
use ringhaul_kit::frontend::{Frontend, Setup};
use ringhaul_kit::server::ringhaul_binary;

use crate::{DISK_BYTES, test_folders};

/// Returns the output of a shell's line with a pseudo-terminal as its stdin, stdout and stderr.
fn on_terminal(line: &str, no_color: Option<&str>) -> Result<String> {
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", line, "/dev/null"]).env("TERM", "xterm");
    for name in ["NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE"] {
        script.env_remove(name);
    }
    script.envs(no_color.map(|value| ("NO_COLOR", value)));
    Ok(run(&mut script)?.stdout)
}

/// Returns true if a text has escape sequences of ECMA-48 that set colours or styles.
fn has_colours(text: &str) -> bool {
    text.split("\x1b[").skip(1).any(|rest| {
        rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';').starts_with('m')
    })
}

/// Expects colours in the output of a shell's line, unless `NO_COLOR` has a value.
fn check(line: &str, words: &str) -> Result<()> {
    for (no_color, coloured) in [(None, true), (Some(""), true), (Some("1"), false)] {
        let text = on_terminal(line, no_color)?;
        ensure!(text.contains(words), "no {words:?} with NO_COLOR={no_color:?}:\n{text}");
        ensure!(has_colours(&text) == coloured, "NO_COLOR={no_color:?}, {line}:\n{text:?}");
    }
    Ok(())
}

/// The page of `ctl top` about an export in a bad state.
#[test]
fn the_page_of_top_has_no_colours_if_they_are_refused() -> Result<()> {
    let folders = test_folders()?;
    let (control, socket) = (folders.socket("control"), folders.socket("vm.sock"));
    let mut command = serve(&socket, &folders.disk("disk.img", DISK_BYTES)?)?;
    let _daemon = Running::serve(command.arg("--control").arg(&control))?;
    // A queue without memory.
    let mut frontend = Frontend::connect(&socket, &Setup::default())?;
    frontend.negotiate()?;
    frontend.start_queue(0, 0)?;
    frontend.enable_queue(0, true)?;
    let line = format!(
        "{} ctl --control {} top --once --interval 0.1",
        ringhaul_binary()?.display(),
        control.display()
    );
    check(&line, "no memory")
}

#[test]
fn lines_of_the_log_have_no_colours_if_they_are_refused() -> Result<()> {
    let folders = test_folders()?;
    let disk = folders.disk("disk.img", DISK_BYTES)?;
    let socket = folders.socket("vm.sock");
    let (binary, socket, disk) = (ringhaul_binary()?, socket.display(), disk.display());
    let line = format!(
        "{} serve --socket-path {socket} --blk-file {disk} & \
         until [ -S {socket} ]; do sleep 0.05; done; kill $!; wait $!",
        binary.display()
    );
    check(&line, "SIGTERM")
}

#[test]
fn help_has_no_colours_if_they_are_refused() -> Result<()> {
    check(&format!("{} serve --help", ringhaul_binary()?.display()), "--socket-path")
}
