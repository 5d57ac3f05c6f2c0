//! Answers and events, as people and scripts read them.

use std::fmt::Write;
use std::io::Write as _;

use anyhow::{Context, Result};
use ringhaul_options::redact::{escape_controls, escape_json};
use serde_json::Value;

/// The form of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// For people.
    Table,
    /// For scripts: a line for each item, and JSON for answers with too many parts.
    Lines,
    /// The daemon's answer.
    Json,
}

/// Prints a text on standard output.
pub(super) fn print(text: &str) -> Result<()> {
    let mut output = std::io::stdout().lock();
    let printed = output.write_all(text.as_bytes()).and_then(|()| output.flush());
    printed.context("cannot write to standard output")
}

/// The answer of a method.
pub(super) fn answer(method: &str, answer: &Value, form: Form) -> String {
    match (method, form) {
        ("state.save", _) => json(&answer["state"]),
        (_, Form::Json) => json(answer),
        _ if answer.as_object().is_some_and(serde_json::Map::is_empty) => String::new(),
        ("export.list", Form::Table) => exports(answer),
        ("export.list", Form::Lines) => list(answer).iter().map(line_of).collect(),
        ("export.show", Form::Table) => export(answer),
        ("stats", Form::Table) => stats(answer),
        ("stats", Form::Lines) => served_lines(answer),
        ("metrics", Form::Table) => {
            let lines = answer["text"].as_str().unwrap_or_default().lines();
            lines.map(|line| escape_controls(line) + "\n").collect()
        }
        ("metrics", _) => answer["text"].as_str().unwrap_or_default().to_owned(),
        ("set", _) => settings(answer),
        _ => json(answer),
    }
}

/// An event.
pub(super) fn event(event: &Value, form: Form) -> String {
    if form == Form::Json {
        return escape_json(format!("{event}\n"));
    }
    let mut line = format!("{} {}", text(&event["export"]), text(&event["event"]));
    // Writing to a string does not fail.
    if let Some(lun) = event["lun"].as_u64() {
        let _ = write!(line, " {}:{lun}", event["target"]);
    }
    if let Some(size) = event["size-bytes"].as_u64() {
        let _ = write!(line, " {}", size_text(size));
    }
    if let Some(pid) = event["peer"]["pid"].as_u64() {
        let _ = write!(line, " process {pid}");
    }
    for key in ["reason", "message"] {
        if event[key].is_string() {
            let _ = write!(line, ": {}", text(&event[key]));
        }
    }
    if let Some(left_out @ 1..) = event["left-out"].as_u64() {
        let _ = write!(line, " ({left_out} more left out)");
    }
    line + "\n"
}

/// JSON on several lines, without control characters but the ends of lines.
pub(super) fn json(value: &Value) -> String {
    escape_json(format!("{value:#}\n"))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A string with its control characters escaped, for a terminal; other values as in JSON.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => escape_controls(text),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

/// A size in the largest unit in which it is a whole number.
fn size_text(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let exact = units.into_iter().find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift);
    match exact {
        Some((shift, unit)) => format!("{} {unit}", bytes >> shift),
        None => format!("{bytes} bytes"),
    }
}

fn size(value: &Value) -> String {
    value.as_u64().map_or_else(|| "-".to_owned(), size_text)
}

/// An export in one line.
fn line_of(export: &Value) -> String {
    let size = export["size-bytes"].as_u64().unwrap_or(0) >> 20;
    let disk = match export["disk-state"].as_str() {
        Some("ready") | None => String::new(),
        Some(other) => format!(", disk {other}"),
    };
    let (name, state) = (text(&export["name"]), text(&export["state"]));
    format!("{name}  {state}, {size} MiB, {}{disk}\n", front_end(export))
}

fn front_end(export: &Value) -> &'static str {
    match export["connected"].as_bool() {
        Some(true) if export["lacks-memory"] == true => "no memory",
        Some(true) => "connected",
        _ => "no front-end",
    }
}

fn kind(export: &Value) -> &'static str {
    if export["device"].get("scsi").is_some() { "scsi" } else { "blk" }
}

fn exports(answer: &Value) -> String {
    let row = |export: &Value| {
        vec![
            text(&export["name"]),
            kind(export).to_owned(),
            text(&export["state"]),
            size(&export["size-bytes"]),
            text(&export["disk-state"]),
            front_end(export).to_owned(),
            text(&export["unfinished"]),
        ]
    };
    let head = ["NAME", "DEVICE", "STATE", "SIZE", "DISK", "FRONT-END", "REQUESTS"];
    table(&head, list(answer).iter().map(row).collect())
}

/// Rows below their heads, each column as wide as it must be.
fn table(head: &[&str], rows: Vec<Vec<String>>) -> String {
    let head = head.iter().map(|head| (*head).to_owned()).collect::<Vec<_>>();
    let all: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let columns = all.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = all.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        let line = cells.collect::<Vec<_>>().join("  ");
        format!("{}\n", line.trim_end())
    };
    all.iter().map(line).collect()
}

fn export(export: &Value) -> String {
    let mut rows: Vec<[String; 2]> = vec![
        ["name".into(), text(&export["name"])],
        ["socket".into(), text(&export["endpoint"]["path"])],
        ["device".into(), kind(export).into()],
        ["state".into(), text(&export["state"])],
    ];
    if export["waits-for"].is_string() {
        rows.push(["waits for".into(), text(&export["waits-for"])]);
    }
    rows.push(["requests".into(), format!("{} not finished", text(&export["unfinished"]))]);
    rows.extend(served(&export["served"]).map(|(name, what)| [name, what]));
    let front = &export["front-end"];
    let who = match front["peer"]["pid"].as_u64() {
        _ if front.is_null() => "none".to_owned(),
        Some(pid) => format!("process {pid}, user {}", text(&front["peer"]["uid"])),
        None => "of another PID namespace".to_owned(),
    };
    rows.push(["front-end".into(), who]);
    if !front.is_null() {
        let names = |key: &str| list(&front[key]).iter().map(text).collect::<Vec<_>>().join(" ");
        let memory = &front["memory"];
        let plural = if memory["regions"] == 1 { "" } else { "s" };
        let regions = text(&memory["regions"]);
        let memory = format!("{} in {regions} region{plural}", size(&memory["bytes"]));
        rows.push(["connected".into(), format!("{} s", text(&front["connected-seconds"]))]);
        rows.push(["features".into(), names("features")]);
        rows.push(["protocol".into(), names("protocol-features")]);
        rows.push(["memory".into(), memory]);
    }
    let rows: Vec<Vec<String>> = rows.into_iter().map(Vec::from).collect();
    let [first, rest @ ..] = &rows[..] else { unreachable!("there is a row for the name") };
    let first: Vec<&str> = first.iter().map(String::as_str).collect();
    let mut shown = table(&first, rest.to_vec());
    shown += &disks(&export["disks"]);
    shown += &queues(&front["queues"]);
    shown
}

fn disks(disks: &Value) -> String {
    let row = |disk: &Value| {
        // A disk without an engine has no page cache here either.
        let (cache, engine) = match (&disk["engine"], disk["direct"] == true) {
            (Value::Null, _) => ("-", "-".to_owned()),
            (engine, is_direct) => (
                if is_direct { "direct" } else { "page cache" },
                [text(engine), text(&disk["engine-reason"])].join(": "),
            ),
        };
        let made_of: Vec<String> = list(&disk["chain"]).iter().map(text).collect();
        let (size, made_of) = (size(&disk["size-bytes"]), made_of.join(" over "));
        vec![place_of(disk), size, disk_state(disk), cache.to_owned(), made_of, engine]
    };
    let head = ["UNIT", "SIZE", "DISK", "CACHE", "MADE OF", "ENGINE"];
    let shown = table(&head, list(disks).iter().map(row).collect());
    let warnings = list(disks).iter().filter(|disk| disk["warning"].is_string());
    let warning =
        |disk: &Value| format!("warning: {}: {}\n", place_of(disk), text(&disk["warning"]));
    let warnings: String = warnings.map(warning).collect();
    format!("\n{shown}{warnings}\n{}", rules(disks))
}

/// Warnings about disks of an export that was shown: about the added unit, if there is one, or
/// about all.
pub(super) fn warnings(shown: &Value, added: Option<&Value>) -> Vec<String> {
    let is_meant = |disk: &&Value| {
        let is_there = |unit: &Value| {
            let number = |value: &Value| value.as_u64().unwrap_or(0);
            ["target", "lun"].iter().all(|key| number(&disk[*key]) == number(&unit[*key]))
        };
        disk["warning"].is_string() && added.is_none_or(is_there)
    };
    list(&shown["disks"]).iter().filter(is_meant).map(|disk| text(&disk["warning"])).collect()
}

/// The address of a disk in a virtio-scsi device.
fn place_of(disk: &Value) -> String {
    match disk["lun"].as_u64() {
        Some(lun) => format!("{}:{lun}", disk["target"]),
        None => "-".to_owned(),
    }
}

/// The limits and error policies of disks, and the numbers of requests that have waited.
fn rules(disks: &Value) -> String {
    let row = |disk: &Value| {
        let limits = disk["limits"].as_object().into_iter().flatten();
        let limits: Vec<String> =
            limits.map(|(key, value)| format!("{key}={}", text(value))).collect();
        let limits = if limits.is_empty() { "none".to_owned() } else { limits.join(" ") };
        let [rerror, werror, waited] = ["rerror", "werror", "waited"].map(|key| text(&disk[key]));
        vec![place_of(disk), rerror, werror, waited, limits]
    };
    let head = ["UNIT", "RERROR", "WERROR", "WAITED", "LIMITS"];
    table(&head, list(disks).iter().map(row).collect())
}

/// The state of a disk, its duration, and further remarks.
fn disk_state(disk: &Value) -> String {
    let mut state = text(&disk["state"]);
    // Writing to a string does not fail.
    if let Some(seconds) = disk["state-seconds"].as_u64() {
        let _ = write!(state, " for {seconds} s");
    }
    if disk["waiting"].is_string() && disk["waiting"] != disk["state"] {
        let _ = write!(state, ", {}", text(&disk["waiting"]));
    }
    if disk["remark"].is_string() {
        let _ = write!(state, " ({})", text(&disk["remark"]));
    }
    state
}

fn queues(queues: &Value) -> String {
    let keys = ["index", "role", "state", "size", "next-avail", "requests"];
    let row = |queue: &Value| keys.iter().map(|key| text(&queue[key])).collect();
    let rows: Vec<_> = list(queues).iter().map(row).collect();
    if rows.is_empty() {
        return String::new();
    }
    let head = ["QUEUE", "ROLE", "STATE", "SIZE", "NEXT AVAIL", "REQUESTS"];
    format!("\n{}", table(&head, rows))
}

/// The served requests by kind, without kinds that have none.
fn served(served: &Value) -> impl Iterator<Item = (String, String)> {
    served.as_object().into_iter().flatten().filter_map(|(kind, counts)| {
        let requests = counts["requests"].as_u64().filter(|requests| *requests > 0)?;
        let mut line = format!("{requests}");
        // Writing to a string does not fail.
        if let Some(bytes @ 1..) = counts["bytes"].as_u64() {
            let _ = write!(line, " of {}", size_text(bytes));
        }
        if let Some(errors @ 1..) = counts["errors"].as_u64() {
            let _ = write!(line, ", {errors} failed");
        }
        Some((kind.clone(), line))
    })
}

fn stats(answer: &Value) -> String {
    let row = |export: &Value| {
        let name = text(&export["name"]);
        let rows =
            served(&export["served"]).map(move |(kind, what)| vec![name.clone(), kind, what]);
        rows.collect::<Vec<_>>()
    };
    let rows = list(&answer["exports"]).iter().flat_map(row).collect();
    let mut shown = table(&["EXPORT", "KIND", "REQUESTS"], rows);
    let thread = |thread: &Value| {
        let operations = |key: &str| text(&thread[key]["count"]);
        let median = thread["reads"]["latency-ns"]["median"].as_u64().unwrap_or(0) / 1000;
        vec![
            text(&thread["name"]),
            operations("reads"),
            operations("writes"),
            operations("flushes"),
            operations("deallocations"),
            format!("{median} us"),
            text(&thread["late"]),
            text(&thread["turns"]),
        ]
    };
    let head =
        ["IOTHREAD", "READS", "WRITES", "FLUSHES", "DISCARDS", "MEDIAN READ", "LATE", "TURNS"];
    let threads = list(&answer["iothreads"]).iter().map(thread).collect();
    let _ = write!(shown, "\n{}", table(&head, threads));
    shown
}

/// For scripts: export, kind, requests, bytes and errors, each kind on a line.
fn served_lines(answer: &Value) -> String {
    let lines = |export: &Value| {
        let name = text(&export["name"]);
        let kinds = export["served"].as_object().into_iter().flatten();
        let line = |(kind, counts): (&String, &Value)| {
            let [requests, bytes, errors] =
                ["requests", "bytes", "errors"].map(|key| text(&counts[key]));
            format!("{name}  {kind} {requests} {bytes} {errors}\n")
        };
        kinds.map(line).collect::<String>()
    };
    list(&answer["exports"]).iter().map(lines).collect()
}

fn settings(answer: &Value) -> String {
    let settings = answer.as_object().into_iter().flatten();
    settings.map(|(key, value)| format!("{key}={}\n", text(value))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_unit_is_shown_by_target_and_number() {
        assert_eq!(place_of(&json!({ "target": 3, "lun": 5 })), "3:5");
        assert_eq!(place_of(&json!({ "size-bytes": 512 })), "-");
    }

    #[test]
    fn exports_are_tables_lines_and_json() {
        let exports = json!([
            { "name": "vm1", "state": "serving", "size-bytes": 2_u64 << 30, "disk-state": "ready",
              "connected": true, "unfinished": 3, "device": { "blk": {} } },
            { "name": "b\u{1b}", "state": "stopping", "size-bytes": 1 << 20, "disk-state": "late",
              "connected": false, "unfinished": 0, "device": { "scsi": [] } },
        ]);
        let lines = "vm1  serving, 2048 MiB, connected\n\
                     b\\u{1b}  stopping, 1 MiB, no front-end, disk late\n";
        assert_eq!(answer("export.list", &exports, Form::Lines), lines);
        let expected = "\
NAME     DEVICE  STATE     SIZE   DISK   FRONT-END     REQUESTS
vm1      blk     serving   2 GiB  ready  connected     3
b\\u{1b}  scsi    stopping  1 MiB  late   no front-end  0
";
        assert_eq!(answer("export.list", &exports, Form::Table), expected);
        let printed = answer("export.list", &exports, Form::Json);
        assert_eq!(serde_json::from_str::<Value>(&printed).unwrap(), exports);
        for form in [Form::Table, Form::Lines] {
            assert_eq!(answer("lun.add", &json!({}), form), "");
        }
    }

    #[test]
    fn a_disk_is_shown_with_its_state_and_its_layers() {
        let shown = disks(&json!([
            { "size-bytes": 1 << 20, "state": "away", "state-seconds": 7, "remark": "0 of 2",
              "waiting": "held", "direct": false, "chain": ["raw all bytes from 512", "file /a"],
              "engine": "aio", "engine-reason": "x", "rerror": "report", "werror": "hold",
              "waited": 4, "limits": { "group": "a", "iops-total": 7 } },
        ]));
        let expected = "
UNIT  SIZE   DISK                         CACHE       MADE OF                              ENGINE
-     1 MiB  away for 7 s, held (0 of 2)  page cache  raw all bytes from 512 over file /a  aio: x

UNIT  RERROR  WERROR  WAITED  LIMITS
-     report  hold    4       group=a iops-total=7
";
        assert_eq!(shown, expected);
        let null = json!([{ "size-bytes": 1 << 20, "state": "ready", "direct": false,
                            "chain": ["null"], "engine": null, "engine-reason": null }]);
        let shown = disks(&null);
        assert!(shown.contains("\n-     1 MiB  ready  -      null     -\n"), "{shown}");
    }

    /// A terminal takes each of them for the start of a command.
    #[test]
    fn json_has_no_control_characters() {
        let value = json!({ "export": "a\u{9b}31m\u{7f}\u{1b}", "event": "added" });
        let show = |method| answer(method, &value, Form::Json);
        let state = json!({ "state": value });
        for text in [show("export.list"), answer("state.save", &state, Form::Lines)]
            .into_iter()
            .chain([answer("lun.show", &value, Form::Lines), event(&value, Form::Json)])
        {
            assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
            assert!(!text.replace('\n', "").contains(char::is_control), "{text:?}");
        }
    }

    /// Files of metrics keep each byte.
    #[test]
    fn metrics_on_a_terminal_have_no_control_characters() {
        let metrics = json!({ "text": "a{export=\"b\u{1b}\"} 1\nc 2\n" });
        let escaped = "a{export=\"b\\u{1b}\"} 1\nc 2\n";
        assert_eq!(answer("metrics", &metrics, Form::Table), escaped);
        assert_eq!(answer("metrics", &metrics, Form::Lines), metrics["text"].as_str().unwrap());
    }

    /// Disks of an export for virtio-blk have no place.
    #[test]
    fn a_command_shows_the_warnings_of_the_disk_that_it_adds() {
        let mut disks = vec![
            json!({ "target": 0, "lun": 1, "warning": "a" }),
            json!({ "target": 1, "lun": 1, "warning": "b" }),
            json!({ "target": 1, "lun": 2, "warning": "c" }),
        ];
        disks.push(json!({ "target": 1, "lun": 3 }));
        let shown = json!({ "disks": disks });
        for (added, expected) in [
            (Some(json!({ "target": 1, "lun": 1 })), &["b"][..]),
            (Some(json!({ "target": 1, "lun": 2 })), &["c"]),
            // The target is 0 by default.
            (Some(json!({ "lun": 1 })), &["a"]),
            (Some(json!({ "lun": 2 })), &[]),
            (Some(json!({ "target": 1, "lun": 3 })), &[]),
            (None, &["a", "b", "c"]),
        ] {
            assert_eq!(warnings(&shown, added.as_ref()), expected, "{added:?}");
        }
        assert_eq!(warnings(&json!({ "disks": [{ "warning": "d" }] }), None), ["d"]);
    }

    #[test]
    fn events_are_lines() {
        for (json, line) in [
            (json!({ "export": "vm", "event": "gone", "reason": null }), "vm gone\n"),
            (
                json!({ "export": "vm", "event": "resized", "size-bytes": 1536 << 20 }),
                "vm resized 1536 MiB\n",
            ),
            (
                json!({ "export": "vm", "event": "lun-added", "target": 0, "lun": 7 }),
                "vm lun-added 0:7\n",
            ),
            (
                json!({ "export": "vm", "event": "error", "message": "a\nb", "left-out": 0 }),
                "vm error: a\\nb\n",
            ),
            (
                json!({ "export": "vm", "event": "error", "message": "a", "left-out": 3 }),
                "vm error: a (3 more left out)\n",
            ),
        ] {
            assert_eq!(event(&json, Form::Lines), line);
        }
    }

    #[test]
    fn sizes_are_exact() {
        for (bytes, expected) in
            [(0, "0 bytes"), (512, "512 bytes"), (10 << 30, "10 GiB"), (1 << 41, "2 TiB")]
        {
            assert_eq!(size_text(bytes), expected);
        }
    }
}
