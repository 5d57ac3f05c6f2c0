//! Requests by members of the `--control-group`: each method, and the takeover.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, ringhaul, run};
use ringhaul_kit::system::print_skipped;
use serde_json::{Value, json};

use super::control::Client;
use super::{is_root, test_folders};

/// The error code of a refusal.
const REFUSED: i32 = 7;
const GROUP: &str = "4711";

/// Sends a request from an independent program, as a user in this group alone. Returns the first
/// answer.
fn call_as_member(path: &Path, method: &str, params: &Value) -> Result<Value> {
    const ASK: &str = r#"
        $SIG{PIPE} = 'IGNORE';
        my $socket = IO::Socket::UNIX->new(Peer => $ARGV[0]) or die "cannot connect";
        print $socket "$ARGV[1]\n";
        $socket->flush();
        print scalar <$socket>;
    "#;
    let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
    let mut ask = Command::new("setpriv");
    ask.args(["--reuid=65534", "--regid=65534", &format!("--groups={GROUP}")]);
    ask.args(["perl", "-MIO::Socket::UNIX", "-e", ASK]).arg(path).arg(request.to_string());
    let finished = run(ask.stdin(Stdio::null()))?.expect_code(0)?;
    let answer = finished.stdout.lines().next().context("it has no answer")?;
    serde_json::from_str(answer).with_context(|| format!("{method} answers {answer:?}"))
}

/// The methods that the daemon documents.
fn methods() -> Result<BTreeSet<String>> {
    let output = run(ringhaul()?.args(["ctl", "schema"]))?.expect_code(0)?.stdout;
    let schema: Value = serde_json::from_str(&output)?;
    let methods = schema["methods"].as_object().context("the schema has no methods")?;
    Ok(methods.keys().cloned().collect())
}

/// `upgrade` runs a program as the user of the daemon, and `takeover` passes on all disks and guest
/// memory. Both are for root and that user alone. All other methods are for members, too.
#[test]
fn members_may_call_every_method_except_upgrade_and_takeover() -> Result<()> {
    if !is_root() {
        print_skipped("only root can become another user");
        return Ok(());
    }
    let folders = test_folders()?;
    let path = folders.socket("control");
    let folder = path.parent().context("a socket has a folder")?;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    let mut command = ringhaul()?;
    command.args(["serve", "--name", "vm", "--device", "scsi", "--lun", "0,null=1M"]);
    command.arg("--socket-path").arg(folders.socket("vm.sock"));
    command.arg("--control").arg(&path).args(["--control-group", GROUP]);
    let daemon = Running::serve(&mut command)?;
    let proof = folders.path("proof");
    let program = folders.path("program");
    fs::write(&program, format!("#!/bin/sh\ntouch {}\n", proof.display()))?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    let disk = json!("null,size=1M");
    let other = json!({ "name": "other", "endpoint": { "path": folders.socket("other.sock") },
        "device": { "blk": disk } });
    let unit = json!({ "lun": 1, "disk": disk });
    let (vm, of_unit) = (json!({ "export": "vm" }), json!({ "export": "vm", "lun": 0 }));
    let allowed = [
        ("ping", json!({})),
        ("export.list", json!({})),
        ("export.show", vm.clone()),
        ("export.add", other),
        ("export.remove", json!({ "export": "other" })),
        ("lun.add", json!({ "export": "vm", "unit": unit })),
        ("lun.remove", json!({ "export": "vm", "lun": 1 })),
        ("disk.resize", of_unit.clone()),
        ("disk.set", of_unit.clone()),
        ("disk.resume", of_unit),
        ("set", json!({})),
        ("stats", json!({})),
        ("metrics", json!({})),
        ("log", json!({})),
        ("process", json!({})),
        ("subscribe", json!({})),
    ];
    for (method, params) in &allowed {
        let answer = call_as_member(&path, method, params)?;
        ensure!(answer["error"]["code"] != REFUSED, "{method}: {answer}");
        ensure!(answer["error"]["code"] != -32602, "{method} has other parameters: {answer}");
    }
    let begin = json!({ "formats": [4], "inflight-versions": [1], "version": "test" });
    let refused = [("upgrade", json!({ "binary": program })), ("takeover", begin)];
    for (method, params) in &refused {
        let answer = call_as_member(&path, method, params)?;
        let error = &answer["error"];
        let says = error["message"].as_str().unwrap_or_default();
        ensure!(error["code"] == REFUSED && answer["result"].is_null(), "{method}: {answer}");
        ensure!(says.contains("only root and the user of this daemon may"), "{method}: {says}");
    }
    ensure!(!proof.exists(), "a program has run as the user of the daemon");
    let known: BTreeSet<String> =
        allowed.iter().chain(&refused[..1]).map(|(method, _)| (*method).to_owned()).collect();
    let with_end = known.into_iter().chain(["shutdown".to_owned()]).collect();
    ensure!(methods()? == with_end, "another method: {:?}", methods()?);
    let shown = Client::new(&path)?.call("export.show", &vm)?;
    ensure!(shown["result"]["state"] == "serving", "{shown}");
    let ended = call_as_member(&path, "shutdown", &json!({}))?;
    ensure!(ended["error"].is_null(), "{ended}");
    daemon.finish()?.expect_code(0).map(drop)
}
