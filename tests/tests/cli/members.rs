//! Requests by members of the `--control-group`: each method, and the takeover.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, ringhaul, run};
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
    call_as(GROUP, path, method, params)
}

/// Like [`call_as_member`], as a user in another group.
fn call_as(group: &str, path: &Path, method: &str, params: &Value) -> Result<Value> {
    const ASK: &str = r#"
        $SIG{PIPE} = 'IGNORE';
        my $socket = IO::Socket::UNIX->new(Peer => $ARGV[0]) or die "cannot connect";
        print $socket "$ARGV[1]\n";
        $socket->flush();
        print scalar <$socket>;
    "#;
    let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
    let mut ask = Command::new("setpriv");
    ask.args(["--reuid=65534", "--regid=65534", &format!("--groups={group}")]);
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

/// `upgrade.begin` passes on the environment of the daemon and its output, `takeover` all disks and
/// guest memory, and `state.load` the reservations of a guest. They are for root and that user
/// alone. All other methods are for members, too.
#[test]
fn members_may_call_every_method_except_upgrade_state_and_takeover() -> Result<()> {
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
    let wait = json!({ "process": 1 });
    let load = json!({ "export": "vm", "state": {} });
    let refused = [
        ("upgrade.begin", json!({})),
        ("upgrade.wait", wait),
        ("state.save", vm.clone()),
        ("state.load", load),
        ("takeover", begin),
    ];
    for (method, params) in &refused {
        let answer = call_as_member(&path, method, params)?;
        let error = &answer["error"];
        let says = error["message"].as_str().unwrap_or_default();
        ensure!(error["code"] == REFUSED && answer["result"].is_null(), "{method}: {answer}");
        ensure!(says.contains("only root and the user of this daemon may"), "{method}: {says}");
    }
    let known: BTreeSet<String> =
        allowed.iter().chain(&refused[..4]).map(|(method, _)| (*method).to_owned()).collect();
    let with_end = known.into_iter().chain(["shutdown".to_owned()]).collect();
    ensure!(methods()? == with_end, "another method: {:?}", methods()?);
    let shown = Client::new(&path)?.call("export.show", &vm)?;
    ensure!(shown["result"]["state"] == "serving", "{shown}");
    let ended = call_as_member(&path, "shutdown", &json!({}))?;
    ensure!(ended["error"].is_null(), "{ended}");
    daemon.finish()?.expect_code(0).map(drop)
}

/// A daemon whose members may name files in the folder `allowed`, and sockets beside the control
/// socket.
fn serve_members(folders: &TestFolders, options: &[&str]) -> Result<Running> {
    let allowed = folders.path("allowed");
    if !allowed.exists() {
        fs::create_dir(&allowed)?;
    }
    for folder in [folders.path("x"), folders.socket("x")] {
        let folder = folder.parent().context("a file has a folder")?;
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    }
    let mut command = ringhaul()?;
    command.args(["serve", "--name", "vm", "--device", "scsi", "--lun", "0,null=1M"]);
    command.arg("--socket-path").arg(folders.socket("vm.sock"));
    command.arg("--control").arg(folders.socket("control")).args(["--control-group", GROUP]);
    command.arg("--allow-disk-dir").arg(allowed).args(options);
    Running::serve(&mut command)
}

/// The export of a member, with a socket beside the control socket.
fn export(folders: &TestFolders, name: &str, disk: &Value) -> Value {
    json!({ "name": name, "endpoint": { "path": folders.socket(&format!("{name}.sock")) },
        "device": { "blk": disk } })
}

#[test]
fn members_name_files_and_sockets_in_allowed_folders_alone() -> Result<()> {
    if !is_root() {
        print_skipped("only root can become another user");
        return Ok(());
    }
    let folders = test_folders()?;
    let daemon = serve_members(&folders, &[])?;
    let control = folders.socket("control");
    for name in ["secret", "allowed/disk", "allowed/key"] {
        folders.disk(name, 1 << 20)?;
    }
    symlink(folders.path("secret"), folders.path("allowed/link"))?;
    fs::create_dir(folders.path("allowed/open"))?;
    fs::set_permissions(folders.path("allowed/open"), fs::Permissions::from_mode(0o777))?;
    symlink(folders.path("allowed/disk"), folders.path("allowed/within"))?;
    let (allowed, secret) = (folders.path("allowed"), folders.path("secret"));
    let file = |path: &str| json!({ "file": allowed.join(path) });
    let answer = call_as_member(&control, "export.add", &export(&folders, "disk", &file("disk")))?;
    ensure!(answer["error"].is_null(), "{answer}");
    let luks = json!({ "luks": { "key": { "file": secret }, "over": file("disk") } });
    let elsewhere = json!({ "endpoint": { "path": folders.path("vm.sock") },
        "device": { "blk": "null:1M" } });
    let descriptor = json!({ "endpoint": { "fd": 3 }, "device": { "blk": "null:1M" } });
    let state = json!({ "endpoint": { "path": folders.socket("control.state.new") },
        "device": { "blk": "null:1M" } });
    let with = |disk: Value| export(&folders, "no", &disk);
    let backing = json!({ "qcow2": { "backing": "anywhere", "over": file("image") } });
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&secret);
    run(create.arg(allowed.join("image")))?.expect_code(0)?;
    let refusals = [
        (with(json!({ "file": secret })), "it is outside"),
        (with(file("../secret")), "without '..'"),
        (with(file("link")), "cannot name"),
        (with(luks), "cannot name"),
        (with(json!("nbd,socket=/run/server")), "name the server by host and port"),
        (with(json!("rbd:pool/image")), "its access to a Ceph cluster"),
        (with(json!({ "luks": { "key": { "fd": 9 }, "over": file("disk") } })), "descriptor"),
        (with(backing), "the backing file of"),
        (elsewhere, "cannot place a socket"),
        (descriptor, "descriptor"),
        (state, "kept for the daemon"),
    ];
    for (params, words) in refusals {
        let answer = call_as_member(&control, "export.add", &params)?;
        let says = answer["error"]["message"].as_str().unwrap_or_default();
        ensure!(answer["error"]["code"] == REFUSED && says.contains(words), "{params}: {answer}");
        // The same parameters mean something for root, who may name every file.
        let of_root = Client::new(&control)?.call("export.add", &params)?;
        ensure!(of_root["error"]["code"] != REFUSED, "{params}: {of_root}");
        let name = params["name"].as_str().or_else(|| params["endpoint"]["path"].as_str());
        let removal = json!({ "export": name.unwrap_or_default() });
        Client::new(&control)?.call("export.remove", &removal)?;
    }
    let reservations = |path: &str| {
        let settings = json!({ "reservations": allowed.join(path) });
        json!({ "export": "vm", "unit": { "lun": 1, "disk": "null:1M", "settings": settings } })
    };
    for (path, words) in [("open/file", "can replace files in"), ("../file", "without '..'")] {
        let answer = call_as_member(&control, "lun.add", &reservations(path))?;
        let says = answer["error"]["message"].as_str().unwrap_or_default();
        ensure!(answer["error"]["code"] == REFUSED && says.contains(words), "{path}: {answer}");
    }
    let answer = call_as_member(&control, "lun.add", &reservations("file"))?;
    ensure!(answer["error"].is_null(), "{answer}");
    Client::new(&control)?.call("shutdown", &json!({}))?;
    daemon.finish()?.expect_code(0).map(drop)
}

/// The folder of the control socket is allowed without an option.
#[test]
fn members_place_sockets_in_allowed_folders_and_below_them() -> Result<()> {
    if !is_root() {
        print_skipped("only root can become another user");
        return Ok(());
    }
    let folders = test_folders()?;
    let more = folders.path("sockets");
    fs::create_dir_all(more.join("below"))?;
    let option = more.to_str().context("an odd path")?;
    let daemon = serve_members(&folders, &["--allow-socket-dir", option])?;
    let control = folders.socket("control");
    for (socket, is_allowed) in [
        (folders.socket("a.sock"), true),
        (more.join("b.sock"), true),
        (more.join("below/c.sock"), true),
        (more.join("../d.sock"), false),
        (folders.path("e.sock"), false),
    ] {
        let export = json!({ "endpoint": { "path": socket }, "device": { "blk": "null:1M" } });
        let answer = call_as_member(&control, "export.add", &export)?;
        let is_right = match is_allowed {
            true => answer["error"].is_null() && socket.exists(),
            false => answer["error"]["code"] == REFUSED && !socket.exists(),
        };
        ensure!(is_right, "{}: {answer}", socket.display());
    }
    Client::new(&control)?.call("shutdown", &json!({}))?;
    daemon.finish()?.expect_code(0).map(drop)
}

#[test]
fn a_folder_that_is_allowed_exists() -> Result<()> {
    let folders = test_folders()?;
    for option in ["--allow-disk-dir", "--allow-socket-dir"] {
        let mut command = ringhaul()?;
        command.args(["serve", "--disk", "null:1M", "--socket-path"]);
        command.arg(folders.socket("vm.sock")).arg("--control").arg(folders.socket("control"));
        let refused = run(command.arg(option).arg(folders.path("absent")))?;
        refused.expect_refusal(&[option, "absent"])?;
    }
    // A file has them as lists.
    let file = folders.path("ringhaul.toml");
    let text = format!("allow-disk-dir = [\"/\", \"{}\"]\n", folders.path("absent").display());
    fs::write(&file, text)?;
    let mut command = ringhaul()?;
    command.args(["serve", "--disk", "null:1M", "--socket-path"]);
    command.arg(folders.socket("vm.sock")).arg("--control").arg(folders.socket("control"));
    // Without an option of that name, which would take precedence.
    command.arg("--allow-socket-dir").arg(folders.socket(""));
    run(command.arg("--config").arg(&file))?.expect_refusal(&["--allow-disk-dir", "absent"])
}

/// Both groups may connect, each with its own rights, and no other user.
#[test]
fn readers_may_query_and_call_no_other_method() -> Result<()> {
    const READERS: &str = "4712";
    if !is_root() {
        print_skipped("only root can become another user");
        return Ok(());
    }
    let folders = test_folders()?;
    let daemon = serve_members(&folders, &["--control-read-group", READERS])?;
    let control = folders.socket("control");
    let queries =
        ["ping", "export.list", "export.show", "stats", "metrics", "process", "log", "subscribe"];
    for method in methods()? {
        // The role comes before the parameters.
        let params = match &*method {
            "export.show" => json!({ "export": "vm" }),
            _ => json!({}),
        };
        let answer = call_as(READERS, &control, &method, &params)?;
        let says = answer["error"]["message"].as_str().unwrap_or_default();
        if queries.contains(&&*method) {
            ensure!(answer["error"].is_null(), "{method}: {answer}");
        } else {
            ensure!(answer["error"]["code"] == REFUSED, "{method}: {answer}");
            ensure!(says.starts_with("permission denied: a member of --control-read"), "{says}");
        }
    }
    let begin = json!({ "formats": [6], "inflight-versions": [1], "version": "test" });
    let answer = call_as(READERS, &control, "takeover", &begin)?;
    ensure!(answer["error"]["code"] == REFUSED, "{answer}");
    let answer = call_as_member(&control, "set", &json!({}))?;
    ensure!(answer["error"].is_null(), "{answer}");
    let stranger = call_as("4713", &control, "ping", &json!({}));
    ensure!(stranger.is_err(), "a stranger may connect: {stranger:?}");
    Client::new(&control)?.call("shutdown", &json!({}))?;
    daemon.finish()?.expect_code(0).map(drop)
}
