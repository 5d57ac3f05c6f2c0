//! The control socket.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{self, Running, TestFolders, bench, ringhaul, run};
use ringhaul_kit::fuse::{Fuse, opcode};
use ringhaul_kit::system::print_skipped;
use serde_json::{Value, json};

use super::{is_root, test_folders};

/// A limit that only ends a hopeless wait.
const HOPELESS: Duration = Duration::from_secs(60);

/// A connection to a daemon.
pub(crate) struct Client(BufReader<UnixStream>);

impl Client {
    pub(crate) fn new(path: &Path) -> Result<Self> {
        Ok(Self(BufReader::new(UnixStream::connect(path)?)))
    }

    fn send(&mut self, line: &[u8]) -> Result<()> {
        Ok(self.0.get_mut().write_all(line)?)
    }

    /// The next answer, or `None` if the daemon has closed the connection.
    fn answer(&mut self) -> Result<Option<Value>> {
        let line = self.line()?;
        Ok((!line.is_empty()).then(|| serde_json::from_str(&line)).transpose()?)
    }

    /// The next line; empty if the daemon has closed the connection.
    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        Ok(line)
    }

    pub(crate) fn call(&mut self, method: &str, params: &Value) -> Result<Value> {
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        self.send(format!("{request}\n").as_bytes())?;
        self.answer()?.context("the daemon has hung up")
    }
}

fn serve(folders: &TestFolders) -> Result<Running> {
    let mut command = ringhaul()?;
    command.arg("serve").arg("--socket-path").arg(folders.socket("vm.sock"));
    command.args(["--device", "scsi", "--lun", "0,null=1M"]);
    command.arg("--control").arg(folders.socket("control"));
    Running::serve(&mut command)
}

#[test]
fn exports_and_units_are_added_and_removed_by_request() -> Result<()> {
    let folders = test_folders()?;
    let daemon = serve(&folders)?;
    let mut client = Client::new(&folders.socket("control"))?;
    let vm = folders.socket("vm.sock").display().to_string();
    let disk = folders.disk("more.img", 1 << 20)?;
    let unit = json!({ "lun": 3, "disk": { "file": disk } });
    let of_unit = json!({ "export": vm, "lun": 3 });
    for _ in 0..3 {
        let added = client.call("lun.add", &json!({ "export": vm, "unit": unit }))?;
        ensure!(added["result"] == json!({}), "{added}");
        let again = client.call("lun.add", &json!({ "export": vm, "unit": unit }))?;
        ensure!(again["error"]["code"] == 3, "{again}");
        let shown = client.call("export.show", &json!({ "export": vm }))?;
        ensure!(shown["result"]["size-bytes"] == 2 << 20, "{shown}");
        fs::File::options().write(true).open(&disk)?.set_len(3 << 20)?;
        let resized = client.call("disk.resize", &of_unit)?;
        ensure!(resized["result"]["size-bytes"] == 3 << 20, "{resized}");
        let removed = client.call("lun.remove", &of_unit)?;
        ensure!(removed["result"] == json!({}), "{removed}");
        let removed = client.call("lun.remove", &of_unit)?;
        ensure!(removed["error"]["code"] == 2, "{removed}");
        fs::File::options().write(true).open(&disk)?.set_len(1 << 20)?;
    }
    let other = folders.socket("other.sock");
    let blk = json!({ "blk": { "file": disk } });
    let spec = json!({ "name": "vm2", "endpoint": { "path": other }, "device": blk });
    let added = client.call("export.add", &spec)?;
    ensure!(added["result"] == json!({}) && other.exists(), "{added}");
    for called in [&json!("vm2"), &json!(other)] {
        let shown = client.call("export.show", &json!({ "export": called }))?;
        ensure!(shown["result"]["name"] == "vm2", "{called}: {shown}");
    }
    let unused = folders.socket("unused.sock");
    for (name, path) in [("vm2", &unused), ("vm3", &other)] {
        let spec = json!({ "name": name, "endpoint": { "path": path }, "device": blk });
        let again = client.call("export.add", &spec)?;
        ensure!(again["error"]["code"] == 3 && !unused.exists(), "{again}");
    }
    let no_units = json!({ "export": other, "unit": unit });
    ensure!(client.call("lun.add", &no_units)?["error"]["code"] == 5, "blk has no units");
    let removed = client.call("export.remove", &json!({ "export": other }))?;
    ensure!(removed["result"]["name"] == "vm2" && !other.exists(), "{removed}");
    let ended = client.call("shutdown", &json!({}))?;
    ensure!(ended["result"] == json!({}), "{ended}");
    daemon.finish()?.expect_code(0)?;
    ensure!(!folders.socket("control").exists(), "the control socket is left behind");
    Ok(())
}

/// Sends a ping from a separate program as user 65534 in these groups. Returns the daemon's answer,
/// or `None` if the kernel refused the connection.
fn call_as_user_nobody(path: &Path, groups: &str) -> Result<Option<Value>> {
    const ASK: &str = r#"
        $SIG{PIPE} = 'IGNORE';
        my $socket = IO::Socket::UNIX->new(Peer => $ARGV[0]) or exit;
        print $socket qq({"jsonrpc": "2.0", "id": 1, "method": "ping"}\n);
        $socket->flush();
        print scalar <$socket>;
    "#;
    let mut ask = Command::new("setpriv");
    ask.args(["--reuid=65534", "--regid=65534", groups, "perl", "-MIO::Socket::UNIX", "-e", ASK]);
    let finished = run(ask.arg(path).stdin(Stdio::null()))?.expect_code(0)?;
    let answer = finished.stdout.lines().next().map(serde_json::from_str).transpose()?;
    Ok(answer)
}

#[test]
fn members_of_the_control_group_are_served() -> Result<()> {
    if !is_root() {
        print_skipped("only root can become another user");
        return Ok(());
    }
    let folders = test_folders()?;
    let path = folders.socket("control");
    let folder = path.parent().context("a socket has a folder")?;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    let serve = |group: &[&str]| {
        let mut command = ringhaul()?;
        command.args(["serve", "--disk", "null,size=1M", "--socket-path"]);
        command.arg(folders.socket("vm.sock")).arg("--control").arg(&path).args(group);
        Running::serve(&mut command)
    };
    let (member, stranger) = ("--groups=4711", "--clear-groups");
    for (options, mode) in [(&["--control-group", "4711"][..], 0o660), (&[], 0o600)] {
        let daemon = serve(options)?;
        let seen = fs::metadata(&path)?.permissions().mode() & 0o777;
        ensure!(seen == mode, "the socket has mode {seen:o}");
        let answer = call_as_user_nobody(&path, member)?;
        let is_served = answer.is_some_and(|answer| answer["result"]["version"].is_string());
        ensure!(is_served != options.is_empty(), "a member with {options:?}: {is_served}");
        ensure!(call_as_user_nobody(&path, stranger)?.is_none(), "a stranger may connect");
        // A client that can connect is refused by its credentials.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666))?;
        let refused = call_as_user_nobody(&path, stranger)?.context("it cannot connect")?;
        ensure!(refused["error"]["code"] == 7, "{refused}");
        Client::new(&path)?.call("shutdown", &json!({}))?;
        daemon.finish()?.expect_code(0)?;
    }
    let refused = serve(&["--control-group", "no such group"]);
    ensure!(refused.is_err(), "any name is a group");
    Ok(())
}

/// The next event of a subscriber.
pub(crate) fn event(client: &mut Client) -> Result<Value> {
    let mut line = client.answer()?.context("the subscriber was dropped")?;
    ensure!(line["method"] == "event" && line.get("id").is_none(), "{line}");
    Ok(line["params"].take())
}

#[test]
fn subscribers_receive_events() -> Result<()> {
    let folders = test_folders()?;
    let daemon = serve(&folders)?;
    let path = folders.socket("control");
    let (mut all, mut some) = (Client::new(&path)?, Client::new(&path)?);
    let mut client = Client::new(&path)?;
    ensure!(all.call("subscribe", &json!({}))?["result"] == json!({}), "no subscription");
    let kinds = json!({ "events": ["lun-removed", "removed"] });
    ensure!(some.call("subscribe", &kinds)?["result"] == json!({}), "no subscription");
    ensure!(some.call("subscribe", &kinds)?["error"]["code"] == 4, "two subscriptions");
    let unknown = client.call("subscribe", &json!({ "events": ["birthday"] }))?;
    ensure!(unknown["error"]["code"] == -32602, "{unknown}");
    let disk = folders.disk("disk.img", 1 << 20)?;
    let vm = folders.socket("vm.sock");
    let unit = json!({ "lun": 3, "disk": { "file": disk } });
    client.call("lun.add", &json!({ "export": vm, "unit": unit }))?;
    let place = json!({ "export": vm, "target": 0, "lun": 3 });
    let with = |name: &str, more: Value| {
        let mut event = place.clone();
        event["event"] = json!(name);
        more.as_object().into_iter().flatten().for_each(|(k, v)| event[k] = v.clone());
        event
    };
    ensure!(event(&mut all)? == with("lun-added", json!({})));
    let grown = json!({ "export": vm, "lun": 3, "size-bytes": 3 << 20 });
    client.call("disk.resize", &grown)?;
    ensure!(event(&mut all)? == with("resized", json!({ "size-bytes": 3 << 20 })));
    client.call("lun.remove", &json!({ "export": vm, "lun": 3 }))?;
    ensure!(event(&mut all)? == with("lun-removed", json!({})));

    let socket = folders.socket("blk.sock");
    let blk = json!({ "blk": { "file": disk } });
    let spec = json!({ "name": "vm2", "endpoint": { "path": socket }, "device": blk });
    client.call("export.add", &spec)?;
    run(&mut bench(&socket, "--rw read --bs 4k --number_ios 1")?)?.expect_code(0)?;
    client.call("export.remove", &json!({ "export": "vm2" }))?;
    let mut seen = Vec::new();
    loop {
        let event = event(&mut all)?;
        ensure!(event["export"] == "vm2", "{event}");
        if event["event"] == "attached" {
            ensure!(event["peer"]["pid"].as_u64() > Some(0), "{event}");
        }
        seen.push(event["event"].as_str().context("an event has a name")?.to_owned());
        if event["event"] == "removed" {
            break;
        }
    }
    // The load generator probes a disk before it begins.
    ensure!(seen.first().is_some_and(|first| first == "added"), "{seen:?}");
    let count = |name: &str| seen.iter().filter(|seen| *seen == name).count();
    ensure!(count("attached") > 0 && count("attached") == count("gone"), "{seen:?}");
    ensure!(event(&mut some)? == with("lun-removed", json!({})));
    ensure!(event(&mut some)? == json!({ "export": "vm2", "event": "removed" }));
    // A subscriber may send other requests too.
    ensure!(some.call("ping", &json!({}))?["result"].is_object(), "it is not answered");
    client.call("shutdown", &json!({}))?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// Subscribers need not poll for the state of the disk.
#[test]
fn subscribers_receive_an_event_about_a_hung_disk() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let (socket, control) = (folders.socket("vm.sock"), folders.socket("control"));
    let mut command = cli::serve(&socket, &fuse.file())?;
    command.args(["--read-only", "--lock", "off", "--engine", "threads", "--name", "vm"]);
    let daemon = Running::serve(command.arg("--control").arg(&control))?;
    let mut client = Client::new(&control)?;
    client.call("subscribe", &json!({ "events": ["error"] }))?;
    client.0.get_ref().set_read_timeout(Some(HOPELESS))?;
    fuse.withhold(daemon.pid(), &[opcode::READ]);
    let load = Running::start(&mut bench(&socket, "--rw randread --number_ios 1")?);
    let event = event(&mut client);
    // Released even after a failure: the kernel keeps a process with hung reads.
    fuse.release();
    let event = event?;
    let message = event["message"].as_str().unwrap_or_default();
    ensure!(
        event["export"] == "vm" && message.contains("its disk has not answered for"),
        "{event}"
    );
    load?.finish()?.expect_code(0)?;
    Client::new(&control)?.call("shutdown", &json!({}))?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// Events pile up for a subscriber that does not read, and only for that one.
#[test]
fn a_subscriber_that_does_not_read_is_dropped() -> Result<()> {
    let folders = test_folders()?;
    let daemon = serve(&folders)?;
    let path = folders.socket("control");
    let (mut idle, mut client) = (Client::new(&path)?, Client::new(&path)?);
    idle.call("subscribe", &json!({}))?;
    let vm = folders.socket("vm.sock");
    let mut resized = 0;
    // More than its queue and its socket can hold: an event has a hundred bytes.
    for megabytes in 0..8192 {
        let size = (megabytes % 7 + 1) << 20;
        let resize = json!({ "export": vm, "lun": 0, "size-bytes": size, "shrink": true });
        let answer = client.call("disk.resize", &resize)?;
        ensure!(answer["result"]["size-bytes"] == size, "{answer}");
        resized += 1;
    }
    let mut seen = 0;
    while idle.answer()?.is_some() {
        seen += 1;
    }
    ensure!(seen > 0 && seen < resized, "{seen} of {resized} events have come");
    client.call("shutdown", &json!({}))?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn settings_change_while_requests_are_counted() -> Result<()> {
    let folders = test_folders()?;
    let daemon = serve(&folders)?;
    let mut client = Client::new(&folders.socket("control"))?;
    let load = "--device scsi --rw write --bs 4k --iodepth 4 --number_ios 256";
    run(&mut bench(&folders.socket("vm.sock"), load)?)?.expect_code(0)?;
    let stats = client.call("stats", &json!({}))?;
    let export = &stats["result"]["exports"][0];
    ensure!(export["served"]["writes"]["requests"] == 256, "{stats}");
    let queues = export["queues"].as_array().context("no queues")?;
    let writes = queues.iter().filter_map(|queue| queue["served"]["writes"]["bytes"].as_u64());
    ensure!(writes.sum::<u64>() == 256 * 4096, "{stats}");
    let thread = &stats["result"]["iothreads"][0];
    ensure!(thread["name"] == "iothread-0" && thread["turns"].as_u64() > Some(0), "{stats}");
    let mut set = |change: Value| client.call("set", &change);
    let before = set(json!({}))?;
    ensure!(before["result"]["log"] == "info", "{before}");
    for (change, words) in [
        (json!({ "poll-max-us": 10_001, "log": "off" }), "0 to 10000"),
        (json!({ "poll-budget": 0 }), "1 to 100"),
        (json!({ "log": "ringhaul=loud" }), "not a filter"),
        (json!({ "iothreads": 3 }), "`log`, `poll-max-us`, `poll-budget`"),
    ] {
        let refused = set(change)?;
        let text = refused["error"]["message"].as_str().unwrap_or_default();
        ensure!(text.contains(words), "{refused}");
    }
    ensure!(set(json!({}))? == before, "what was refused has changed something");
    for (us, log) in [(7, "info"), (9, "off"), (11, "warn"), (13, "ringhaul=info")] {
        let changed = set(json!({ "poll-max-us": us, "log": log }))?;
        let is_set = |key: &str, value: Value| changed["result"][key] == value;
        ensure!(is_set("poll-max-us", json!(us)) && is_set("log", json!(log)), "{changed}");
    }
    client.call("shutdown", &json!({}))?;
    let log = daemon.finish()?.expect_code(0)?.stderr;
    for (us, is_logged) in [(7, true), (9, false), (11, false), (13, true)] {
        ensure!(log.contains(&format!("poll-max-us {us},")) == is_logged, "{us}: {log}");
    }
    Ok(())
}

#[test]
fn requests_and_answers_follow_the_protocol() -> Result<()> {
    let folders = test_folders()?;
    let daemon = serve(&folders)?;
    let mut client = Client::new(&folders.socket("control"))?;
    let ping = br#"{"jsonrpc": "2.0", "id": 123456789012345678901234, "method": "ping"}"#;
    client.send(&[&ping[..], b"\n"].concat())?;
    let line = client.line()?;
    ensure!(line.contains(r#""id":123456789012345678901234,"#), "{line}");
    let twice = json!({ "jsonrpc": "2.0", "id": 1, "method": "export.show" }).to_string();
    let twice = twice.replace('}', r#","params":{"export":"a","export":"b"}}"#);
    client.send(format!("{twice}\n").as_bytes())?;
    let answer = client.answer()?.context("no answer")?;
    ensure!(answer["error"]["message"].to_string().contains("'export' occurs twice"), "{answer}");
    for (method, params, words) in [
        ("export.remove", json!({ "export": "a", "deadline-ms": -1 }), "deadline-ms: "),
        ("set", json!({ "poll-max-us": 10_001 }), "poll-max-us must be"),
        (
            "export.add",
            json!({ "endpoint": { "path": "/x" }, "device": { "blk": "null:1M" },
                               "run-max": 60_000 }),
            "run-max must be",
        ),
    ] {
        let answer = client.call(method, &params)?;
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        ensure!(answer["error"]["code"] == -32602 && message.starts_with(words), "{answer}");
    }
    client.call("shutdown", &json!({}))?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn invalid_requests_are_refused_without_harm() -> Result<()> {
    let folders = test_folders()?;
    let daemon = serve(&folders)?;
    let path = folders.socket("control");
    ensure!(fs::metadata(&path)?.permissions().mode() & 0o777 == 0o600, "others may connect");
    let mut client = Client::new(&path)?;
    for (line, code) in [
        (&b"nonsense\n"[..], -32700),
        (b"[1, 2]\n", -32600),
        (b"{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": \"format\"}\n", -32601),
        (b"{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": \"export.show\"}\n", -32602),
    ] {
        client.send(line)?;
        let answer = client.answer()?.context("no answer")?;
        ensure!(answer["error"]["code"] == code, "{answer}");
    }
    // A notification gets no answer, even if it is wrong. An empty line is ignored.
    client.send(b"\n{\"jsonrpc\": \"2.0\", \"method\": \"ping\"}\n")?;
    client.send(b"{\"jsonrpc\": \"2.0\", \"method\": \"ping\", \"params\": [1]}\n")?;
    ensure!(client.call("ping", &json!({}))?["result"]["version"].is_string(), "no version");

    let mut long = Client::new(&path)?;
    // The daemon closes the connection in the middle.
    let _ = long.send(&vec![b' '; 2 << 20]);
    if let Ok(Some(answer)) = long.answer() {
        ensure!(answer["error"]["code"] == -32600, "{answer}");
    }

    let of_unit = json!({ "export": "nobody", "lun": 3 });
    let mut others = Vec::new();
    loop {
        let mut other = Client::new(&path)?;
        // The daemon may already have closed a refused connection.
        let _ = other.send(b"{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": \"ping\"}\n");
        let answer = other.answer()?.context("no answer")?;
        if answer["error"]["code"] == 7 {
            break;
        }
        let code = &other.call("lun.remove", &of_unit)?["error"]["code"];
        // No request waits for the clients before it.
        ensure!(*code == 2, "{code}");
        others.push(other);
        ensure!(others.len() < 64, "any number of clients is served");
    }
    ensure!(others.len() >= 28, "{} clients", others.len());
    ensure!(client.call("ping", &json!({}))?["result"].is_object(), "the first is not served");
    drop(others);

    let mut ctl = ringhaul()?;
    ctl.args(["ctl", "--control"]).arg(&path).args(["show", "nobody"]);
    run(&mut ctl)?.expect_code(1)?;
    client.call("shutdown", &json!({}))?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}
