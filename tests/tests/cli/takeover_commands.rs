//! Commands to a daemon while another process takes over from it.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, ringhaul};
use ringhaul_kit::control::taking_over;
use ringhaul_kit::frontend::{Frontend, Setup};
use ringhaul_kit::service_manager::ServiceManager;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::takeover::{Client, TAKEN, begin, check};
use crate::{DISK_BYTES, test_folders};

/// Begins a takeover and pauses the queues of the daemon.
fn begin_paused_takeover(folders: &TestFolders) -> Result<Client> {
    let mut successor = Client::new(folders)?;
    successor.begin()?;
    let paused = successor.call("takeover.pause", &json!({}))?;
    ensure!(paused["error"].is_null(), "{paused}");
    Ok(successor)
}

fn error_message(answer: &Value) -> Result<&str> {
    answer["error"]["message"].as_str().with_context(|| format!("it was not refused: {answer}"))
}

/// The old process ends, and hands nothing over.
#[test]
fn a_daemon_that_stops_cancels_its_takeover() -> Result<()> {
    for by_signal in [true, false] {
        let folders = test_folders()?;
        let mut daemon = Running::serve(&mut begin(&folders)?)?;
        let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
        check(&mut frontend, 1)?;
        let mut callers = Client::new(&folders)?;
        let mut successor = begin_paused_takeover(&folders)?;
        if by_signal {
            daemon.signal(Signal::TERM)?;
        } else {
            callers.send("shutdown", &json!({}))?;
        }
        daemon.wait_for("finishing requests, then ending")?;
        ensure!(frontend.channel.receive()?.is_none(), "the export goes on");
        // The daemon may already have ended.
        let taken = successor.call("takeover.take", &json!({}));
        ensure!(taken.as_ref().map_or(true, |taken| error_message(taken).is_ok()), "{taken:?}");
        let log = daemon.finish()?.expect_code(0)?.stderr;
        // The daemon did not wait for the time-out of the new process.
        ensure!(!log.contains("it does not answer"), "{log}");
        for name in ["vm.sock", "control"] {
            ensure!(!folders.socket(name).exists(), "{name} is left behind");
        }
    }
    Ok(())
}

/// The process that serves in the end gets the signal, whenever it is sent.
#[test]
fn a_stop_during_a_takeover_ends_the_serving_process() -> Result<()> {
    let folders = test_folders()?;
    let (mut passed_on, mut cancelled) = (0, 0);
    for delay in 0..16 {
        let mut old = Running::serve(&mut begin(&folders)?)?;
        let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
        check(&mut frontend, 1)?;
        let mut new = Running::start(&mut taking_over(&folders)?)?;
        new.wait_for("ready to take over")?;
        std::thread::sleep(Duration::from_micros(500 * delay));
        // This fails if the old process has ended.
        let _ = old.signal(Signal::TERM);
        let old = old.finish()?.expect_code(0)?.stderr;
        if old.contains("has taken over") && !old.contains("passed on") {
            // The old process had ended, or was about to, and did not receive the signal.
            ensure!(!old.contains("SIGTERM"), "the signal is lost: {old}");
            new.signal(Signal::TERM)?;
        }
        passed_on += u32::from(old.contains("passed on"));
        let is_cancelled = !old.contains("has taken over");
        cancelled += u32::from(is_cancelled);
        new.finish()?.expect_code(if is_cancelled { 2 } else { 0 })?;
        for name in ["vm.sock", "control"] {
            ensure!(!folders.socket(name).exists(), "{name} is left behind");
        }
    }
    eprintln!("of 16 takeovers, {cancelled} were given up, and {passed_on} signals passed on");
    Ok(())
}

#[test]
fn commands_wait_for_the_end_of_a_takeover() -> Result<()> {
    let folders = test_folders()?;
    let mut daemon = Running::serve(&mut begin(&folders)?)?;
    let (disk, more) = (folders.disk("more.img", DISK_BYTES)?, folders.socket("more.sock"));
    let add = json!({ "endpoint": { "path": more }, "device": { "blk": { "file": disk } } });
    let set = json!({ "poll-max-us": 7 });
    let client = || Client::new(&folders);
    let mut callers = vec![(client()?, "export.add", &add), (client()?, "set", &set)];
    let mut other = client()?;

    let cancelled = begin_paused_takeover(&folders)?;
    for (client, method, params) in &mut callers {
        client.send(method, params)?;
    }
    // Other requests do not wait for these.
    let exports = other.call("export.list", &json!({}))?;
    ensure!(exports["result"].as_array().is_some_and(|all| all.len() == 1), "{exports}");
    drop(cancelled);
    daemon.wait_for("does not take over")?;
    for (client, method, _) in &mut callers {
        let done = client.answer()?;
        ensure!(done["error"].is_null(), "{method}: {done}");
    }

    // A process that hands over accepts no new clients.
    for _ in 0..6 {
        let mut one_more = client()?;
        one_more.call("ping", &json!({}))?;
        callers.push((one_more, "set", &set));
    }
    // A setting before the pause is handed over, and a later one is refused.
    let mut successor = Client::new(&folders)?;
    let described = successor.begin()?;
    ensure!(described["result"]["says"]["life"]["changes"]["poll-max-us"] == 7, "{described}");
    other.call("set", &json!({ "poll-budget": 3 }))?;
    let paused = successor.call("takeover.pause", &json!({}))?;
    let changes = &paused["result"]["says"]["changes"];
    ensure!(changes["poll-max-us"] == 7 && changes["poll-budget"] == 3, "{paused}");
    for (client, method, params) in &mut callers {
        client.send("ping", &json!({}))?;
        client.send(method, params)?;
    }
    for (client, ..) in &mut callers {
        client.answer()?;
    }
    successor.call("takeover.take", &json!({}))?;
    let mut answers = 0;
    for (client, method, _) in &mut callers {
        // The reason depends on the moment at which the old process reads the request. A request
        // that was not read before the end gets a closed connection.
        let refused = match client.answer() {
            Err(error) if is_closed(&error) => continue,
            answer => answer?,
        };
        answers += 1;
        let reason = error_message(&refused)?;
        ensure!(
            reason.contains("has taken over the exports") || reason.contains("is ending"),
            "{method}: {refused}"
        );
    }
    // The first clients had time for their request while the last ones got the answer to `ping`.
    ensure!(answers > 0, "no command that waited has an answer");
    daemon.wait_for("has taken over")?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// Returns true if the daemon has closed the connection.
fn is_closed(error: &anyhow::Error) -> bool {
    let cause = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    cause == Some(std::io::ErrorKind::ConnectionReset) || error.to_string().contains("has hung up")
}

/// The new process has the settings that changed while it opened the exports.
#[test]
fn settings_of_a_takeover_in_progress_are_kept() -> Result<()> {
    let folders = test_folders()?;
    let mut old = Running::serve(&mut begin(&folders)?)?;
    let mut client = Client::new(&folders)?;
    // A busy machine may carry out no further change before the takeover.
    let mut set = 1;
    let first = client.call("set", &json!({ "poll-max-us": set }))?;
    ensure!(first["error"].is_null(), "{first}");
    let mut new = Running::start(&mut taking_over(&folders)?)?;
    old.wait_for("wants to take over")?;
    for value in 2..1000 {
        match client.call("set", &json!({ "poll-max-us": value })) {
            Ok(answer) if answer["error"].is_null() => set = value,
            _ => break,
        }
    }
    new.wait_for(TAKEN)?;
    old.finish()?.expect_code(0)?;
    let now = Client::new(&folders)?.call("set", &json!({}))?;
    ensure!(now["result"]["poll-max-us"] == set, "{set} was set last, and {now} holds");
    eprintln!("{set} times set");
    Ok(())
}

/// The process that serves in the end reads the configuration file again. SIGHUP stops no takeover
/// at any step.
#[test]
fn a_file_is_read_again_after_a_takeover() -> Result<()> {
    let folders = test_folders()?;
    let (control, socket) = (folders.socket("control"), folders.socket("vm.sock"));
    let text = format!(
        "control = \"{}\"\n[[export]]\nendpoint = {{ path = \"{}\" }}\n\
         device = {{ blk = {{ null = {{ size-bytes = 1048576 }} }} }}\n",
        control.display(),
        socket.display()
    );
    let file = folders.path("ringhaul.toml");
    std::fs::write(&file, text)?;
    let mut daemon = Running::serve(ringhaul()?.args(["serve", "--config"]).arg(&file))?;
    let waits = "waits for the result of a takeover";
    let begin_takeover_with_signals = |daemon: &mut Running| -> Result<Client> {
        let mut successor = Client::new(&folders)?;
        let described = successor.begin()?;
        ensure!(described["error"].is_null(), "{described}");
        daemon.signal(Signal::HUP)?;
        daemon.wait_for(waits)?;
        let paused = successor.call("takeover.pause", &json!({}))?;
        ensure!(paused["error"].is_null(), "{paused}");
        daemon.signal(Signal::HUP)?;
        daemon.wait_for(waits)?;
        Ok(successor)
    };
    drop(begin_takeover_with_signals(&mut daemon)?);
    daemon.wait_for("applied the configuration")?;
    let mut successor = begin_takeover_with_signals(&mut daemon)?;
    let taken = successor.call("takeover.take", &json!({}))?;
    ensure!(taken["error"].is_null(), "{taken}");
    for _ in 0..2 {
        let passed_on = successor.answer()?;
        ensure!(passed_on["method"] == "takeover.pass-on", "{passed_on}");
        ensure!(passed_on["params"] == "reload", "{passed_on}");
    }
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// The process that has taken over knows nothing of them.
#[test]
fn requests_that_wait_for_a_takeover_have_their_answers_before_the_old_process_ends() -> Result<()>
{
    let folders = test_folders()?;
    let daemon = Running::serve(&mut begin(&folders)?)?;
    let mut heir = Client::new(&folders)?;
    heir.begin()?;
    let waiting = || -> Result<Client> {
        let mut client = Client::new(&folders)?;
        client.call("ping", &json!({}))?;
        client.send("export.remove", &json!({ "export": "absent" }))?;
        Ok(client)
    };
    let waiting = (0..12).map(|_| waiting()).collect::<Result<Vec<_>>>()?;
    for method in ["takeover.pause", "takeover.take"] {
        let answer = heir.call(method, &json!(null))?;
        ensure!(answer["error"].is_null(), "{method}: {answer}");
    }
    for mut client in waiting {
        let answer = client.answer()?;
        let says = answer["error"]["message"].as_str().unwrap_or_default();
        ensure!(says.contains(&format!("process {}", std::process::id())), "{answer}");
    }
    daemon.finish()?.expect_code(0).map(drop)
}

/// A new process that dies when it takes over has never been the main process of the service.
#[test]
fn a_process_that_takes_no_answer_does_not_remain_the_main_process() -> Result<()> {
    let folders = test_folders()?;
    let mut command = begin(&folders)?;
    let manager = ServiceManager::listen(&folders.socket("manager"), &mut command)?;
    let mut daemon = Running::serve(&mut command)?;
    let mut heir = begin_paused_takeover(&folders)?;
    heir.stop_reading()?;
    heir.send("takeover.take", &json!(null))?;
    for process in [std::process::id(), daemon.pid().as_raw_pid().cast_unsigned()] {
        manager.wait_for(&format!("MAINPID={process}\n"))?;
    }
    daemon.wait_for("does not take over")?;
    let answer = Client::new(&folders)?.call("set", &json!({}))?;
    ensure!(answer["error"].is_null(), "{answer}");
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}
