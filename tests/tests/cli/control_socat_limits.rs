//! The end of the daemon and the limits of its control socket, as seen through `socat`.

use std::time::Instant;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{LIMIT, Running, bench};
use ringhaul_kit::fuse::{Fuse, opcode};
use ringhaul_tools::process::retry;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::control_socat::{NO_REQUEST, begin, shut_down};
use super::socat::Socat;

/// The exit code of a daemon that a second signal ended with requests unfinished.
const EXIT_ABANDONED: i32 = 3;
/// The number of clients that root and the user of the daemon may connect.
const CLIENTS_MAX: usize = 32;
/// The maximum length of a line in bytes.
const LINE_MAX: usize = 1 << 20;
/// The error code for refused clients.
const REFUSED: i32 = 7;

/// Clients are answered after the first signal. The log names the unfinished requests after the
/// second.
#[test]
fn a_second_signal_names_the_unfinished_requests() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let file = fuse.file().display().to_string();
    let reads = ["--read-only", "--lock", "off", "--engine", "threads", "--name", "vm"];
    let begun = begin(&[&reads[..], &["--blk-file", &file]].concat())?;
    let Some((folders, mut daemon, mut client)) = begun else { return Ok(()) };
    fuse.withhold(daemon.pid(), &[opcode::READ]);
    let load = Running::start(&mut bench(&folders.socket("vm.sock"), "--number_ios 4")?)?;
    let ends = (|| {
        fuse.wait_for(opcode::READ)?;
        daemon.signal(Signal::TERM)?;
        daemon.wait_for("finishing requests, then ending")?;
        // The thread that serves exports receives the stop a moment later.
        retry(LIMIT, || {
            let shown = client.call("export.show", &json!({ "export": "vm" }))?;
            let waits = shown["waits-for"].as_str().unwrap_or_default();
            ensure!(
                shown["state"] == "stopping" && waits.starts_with("queue 0: 1 request"),
                "{shown}"
            );
            Ok(())
        })?;
        daemon.signal(Signal::TERM)?;
        daemon.wait_for("unfinished: ")
    })();
    // Released even after a failure: the kernel keeps a process with hung reads.
    fuse.release();
    let line = ends?;
    ensure!(line.contains("unfinished: vm: queue 0: 1 request is not answered"), "{line}");
    daemon.finish()?.expect_code(EXIT_ABANDONED)?;
    ensure!(client.next_line()?.is_none(), "there is more to hear");
    load.finish()?.expect_code(1)?;
    Ok(())
}

#[test]
fn a_line_that_is_too_long_is_refused() -> Result<()> {
    let Some((folders, daemon, mut client)) = begin(&["--disk", "null,size=1M"])? else {
        return Ok(());
    };
    // Blanks may follow a request.
    let ping = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    let blanks = " ".repeat(LINE_MAX - ping.len());
    client.send_text(&format!("{ping}{blanks}\n"))?;
    ensure!(client.answer(1)?["result"].is_object(), "as much as there may be is too long");
    let mut long = Socat::connect(&folders.socket("control"))?;
    long.send_text(&"x".repeat(LINE_MAX + 1))?;
    let refused = long.next_line()?.unwrap_or_default();
    ensure!(is_refused(&refused, NO_REQUEST, "at most 1048576 bytes"), "{refused}");
    ensure!(long.next_line()?.is_none(), "the connection stays");
    shut_down(client, daemon).map(drop)
}

#[test]
fn excess_clients_are_refused() -> Result<()> {
    let Some((folders, daemon, mut client)) = begin(&["--disk", "null,size=1M"])? else {
        return Ok(());
    };
    let connect = || Socat::connect(&folders.socket("control"));
    client.call("ping", &json!({}))?;
    let mut others = Vec::new();
    for _ in 1..CLIENTS_MAX {
        let mut other = connect()?;
        other.call("ping", &json!({}))?;
        others.push(other);
    }
    let words = "32 clients are connected; close one of them";
    let one_more = connect()?;
    let refused = one_more.next_line()?.unwrap_or_default();
    ensure!(is_refused(&refused, REFUSED, words), "{refused}");
    ensure!(one_more.next_line()?.is_none(), "the connection stays");
    // Connected clients are answered, and a client that leaves makes room.
    client.call("ping", &json!({}))?;
    drop(others.pop());
    let start = Instant::now();
    loop {
        let mut other = connect()?;
        // A refused client gets the refusal as its answer, or is closed before it has sent a
        // request.
        if other.call("ping", &json!({})).is_ok() {
            break;
        }
        ensure!(start.elapsed() < LIMIT, "no place becomes free");
    }
    shut_down(client, daemon).map(drop)
}

/// Returns true if this is an error without an id.
fn is_refused(answer: &Value, code: i32, words: &str) -> bool {
    let error = &answer["error"];
    let says = error["message"].as_str().is_some_and(|message| message.contains(words));
    answer["id"].is_null() && error["code"] == code && says
}
