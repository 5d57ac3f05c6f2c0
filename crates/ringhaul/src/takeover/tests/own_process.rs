//! Tests of takeovers in processes of their own, with an environment of their own.

use std::ffi::OsStr;
use std::net::Shutdown;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

use serde_json::Value;

use super::{Old, daemon};
use crate::daemon::format::{ProcessOptions, TAKE};
use crate::socket::Endpoint;
use crate::spec::settings::SettingsChange;
use crate::takeover::successor_start;

/// Runs a test again in a process of its own, with these variables. Returns false in that process.
fn run_alone(name: &str, variables: &[(&str, &OsStr)]) -> bool {
    const CHILD: &str = "RINGHAUL_TEST_ALONE";
    if std::env::var_os(CHILD).is_some() {
        return false;
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", &format!("takeover::tests::own_process::{name}")]);
    let output = child.env(CHILD, "1").envs(variables.iter().copied()).output().unwrap();
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && shown.contains("1 passed"), "{shown}");
    true
}

/// The service manager would end the service together with the new process, which has not learned
/// that it may serve.
#[test]
fn the_manager_keeps_the_process_whose_answer_does_not_arrive() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    let name = "the_manager_keeps_the_process_whose_answer_does_not_arrive";
    if run_alone(name, &[("NOTIFY_SOCKET", path.as_os_str())]) {
        manager.set_nonblocking(true).unwrap();
        let mut buffer = [0; 256];
        let messages = std::iter::from_fn(|| {
            let bytes = manager.recv(&mut buffer).ok()?;
            Some(String::from_utf8_lossy(&buffer[..bytes]).into_owned())
        });
        let main: Vec<String> = messages.filter(|text| text.starts_with("MAINPID")).collect();
        // Both processes of the test are one.
        assert!(main.len() == 2 && main[0] == main[1], "{main:?}");
        return;
    }
    let mut old = Old::new();
    let error = old.take(|taker, _| {
        assert!(taker.begin()["result"].is_object() && taker.pause()["result"].is_object());
        taker.lines.get_ref().shutdown(Shutdown::Read).unwrap();
        taker.send(TAKE, &Value::Null);
    });
    let error = error.unwrap();
    assert!(error.contains("Broken pipe"), "{error}");
    old.frontend.write(0, 8, &[3; 4096]).unwrap();
    assert!(old.frontend.read(1, 8, 4096).unwrap() == [3; 4096]);
    old.set_limit(&old.daemon, 6000);
    assert!(std::fs::read_to_string(old.path("state")).unwrap().contains("6000"));
}

/// The new process would take sockets and signs of life that are not for it.
#[test]
fn variables_about_one_process_are_not_passed_on() {
    let own = ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID"];
    let shared = ["NOTIFY_SOCKET", "WATCHDOG_USEC", "RINGHAUL_TEST_SHARED"];
    let all: Vec<(&str, &OsStr)> =
        own.iter().chain(&shared).map(|name| (*name, OsStr::new("1"))).collect();
    if run_alone("variables_about_one_process_are_not_passed_on", &all) {
        return;
    }
    let (daemon, _ending) = daemon();
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let endpoint = Arc::new(Endpoint::bind(&control, "--control").unwrap());
    let changes = SettingsChange::default();
    let options = ProcessOptions { directory: "/".into(), arguments: vec![], changes };
    daemon.set_process_options(options, Some(Arc::downgrade(&endpoint)));
    let start = successor_start(&daemon).unwrap();
    assert_eq!((start.process, start.control), (std::process::id(), control));
    let has = |name: &&str| start.environment.contains_key(*name);
    assert_eq!(own.iter().find(|name| has(name)), None);
    assert!(shared.iter().all(has), "{:?}", start.environment);
}
