//! Secrets that users put into names of disks: no output repeats them.

use std::fs;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Finished, Running, ringhaul, run};
use rustix::process::Signal;
use serde_json::json;

use super::control::Client;
use super::test_folders;

fn check_quiet(output: &str) -> Result<()> {
    ensure!(output.contains("***") && !output.contains("hidden"), "the output is {output}");
    Ok(())
}

fn check_refused(finished: Finished) -> Result<()> {
    ensure!(!finished.stdout.contains("hidden"), "it printed: {}", finished.stdout);
    check_quiet(&finished.stderr)
}

#[test]
fn secrets_in_names_of_disks_are_not_repeated() -> Result<()> {
    let folders = test_folders()?;
    for disk in [
        "nbd://user:hidden@host/x",
        "raw,over=nbd+unix://user:hidden@/x?socket=/a",
        "nbd://host/x?password=hidden",
        "rbd:vms/vm1,key=hidden",
        "rbd:vms/vm1:id=a:key=hidden",
        "http://user:hidden@host/x",
        "nbd,host=user:hidden@h",
        "nbd:user:hidden@host",
        "nbd://user%3Ahidden%40host",
        "nbd://h/x?pass=hidden",
        "nbd,host=h,pwd=hidden",
        "nbd,host=h,secret-key=hidden",
        "nbd,host=h,tls-psk=hidden",
        "luks,key='hidden',over=/a",
        "luks,key=hid,hidden,over=/a",
        "luks,key=hid hidden,over=/a",
    ] {
        check_refused(run(ringhaul()?.args(["disk", "info", disk]))?)?;
        check_refused(run(ringhaul()?.args(["serve", "--socket-path", "/a", "--disk", disk]))?)?;
        let export = format!("/a,disk={disk}");
        check_refused(run(ringhaul()?.args([
            "--log-format",
            "json",
            "serve",
            "--export",
            &export,
        ]))?)?;
    }
    let file = folders.path("ringhaul.toml");
    let blk = r#"blk = { nbd = "nbd://user:hidden@host/x" }"#;
    fs::write(
        &file,
        format!("[[export]]\nendpoint = {{ path = \"/a\" }}\ndevice = {{ {blk} }}\n"),
    )?;
    check_refused(run(ringhaul()?.arg("check").arg(&file))?)?;
    check_refused(run(ringhaul()?.args(["serve", "--config"]).arg(&file))?)
}

#[test]
fn a_daemon_does_not_repeat_secrets() -> Result<()> {
    let folders = test_folders()?;
    let control = folders.socket("control");
    let mut command = ringhaul()?;
    command.args(["serve", "--disk", "null:1M", "--socket-path"]).arg(folders.socket("vm.sock"));
    let mut daemon = Running::serve(command.arg("--control").arg(&control))?;
    let mut client = Client::new(&control)?;
    let blk = json!({ "nbd": "nbd://user:hidden@host/x" });
    let export = json!({ "endpoint": { "path": "/a" }, "device": { "blk": blk } });
    check_quiet(&client.call("export.add", &export)?.to_string())?;
    drop(client);
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}
