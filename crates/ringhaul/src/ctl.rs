//! `ringhaul ctl`: asks a daemon over its control socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use serde_json::{Map, Value, json};

use crate::options::unit::{parse_lun, parse_place};

/// The daemon has refused.
const EXIT_REFUSED: u8 = 1;

/// Options of `ringhaul ctl`.
#[derive(Debug, Clone, Args)]
pub struct CtlArgs {
    /// The control socket of the daemon, as its own option of this name has it.
    #[arg(long, value_name = "PATH")]
    pub control: PathBuf,
    /// What to ask.
    #[command(subcommand)]
    pub what: What,
}

/// What to ask a daemon. EXPORT is the path of an export's socket.
#[derive(Debug, Clone, Subcommand)]
pub enum What {
    /// Ask whether it is there.
    Ping,
    /// List the exports.
    List,
    /// Describe an export.
    Show {
        /// The path of its socket.
        export: String,
    },
    /// End an export, and wait until its requests are finished.
    Remove {
        /// The path of its socket.
        export: String,
    },
    /// Add a logical unit to a virtio-scsi device.
    AddLun {
        /// The path of the export's socket.
        export: String,
        /// As the values of `serve --lun`.
        #[arg(value_name = "[T:]LUN,KEY=VALUE,...")]
        unit: String,
    },
    /// Take a logical unit away.
    RemoveLun {
        /// The path of the export's socket.
        export: String,
        /// Its address.
        #[arg(value_name = "[T:]LUN")]
        unit: String,
    },
    /// Tell the guest that the file or device behind a logical unit has another size now.
    Resize {
        /// The path of the export's socket.
        export: String,
        /// Its address.
        #[arg(value_name = "[T:]LUN")]
        unit: String,
    },
    /// Have another program take over from the daemon, which ends, while its guests go on.
    Upgrade {
        /// The program: a `ringhaul` of any version that understands this one.
        binary: PathBuf,
    },
    /// End the daemon, as SIGTERM does.
    Shutdown,
    /// Call a method with parameters, a JSON object.
    Call {
        /// Its name.
        method: String,
        /// Its parameters.
        #[arg(default_value = "{}")]
        params: String,
    },
}

/// Asks, prints the answer, and says in the exit code whether it was one.
///
/// # Errors
///
/// When the daemon cannot be asked.
pub fn run(args: &CtlArgs) -> Result<ExitCode> {
    let (method, params) = call_of(&args.what)?;
    let path = args.control.display();
    let stream = UnixStream::connect(&args.control)
        .with_context(|| format!("cannot connect to {path}; is it a daemon's --control?"))?;
    let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
    let asking = || format!("cannot ask the daemon at {path}");
    (&stream).write_all(format!("{request}\n").as_bytes()).with_context(asking)?;
    let mut line = String::new();
    if BufReader::new(&stream).read_line(&mut line).with_context(asking)? == 0 {
        bail!("the daemon at {path} has gone without an answer");
    }
    let mut answer: Map<String, Value> =
        serde_json::from_str(&line).with_context(|| format!("what {path} answers is no JSON"))?;
    if let Some(error) = answer.get("error") {
        eprintln!("ringhaul: {}", error["message"].as_str().unwrap_or("the daemon has refused"));
        return Ok(ExitCode::from(EXIT_REFUSED));
    }
    let result = answer.remove("result").context("the answer has neither result nor error")?;
    match (&args.what, &result) {
        (What::List, Value::Array(exports)) => {
            let lines: Vec<String> = exports.iter().map(line_of).collect();
            print(&lines.concat())?;
        }
        (_, Value::Object(object)) if object.is_empty() => {}
        _ => print(&format!("{}\n", serde_json::to_string_pretty(&result)?))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The method that is called, and with what.
fn call_of(what: &What) -> Result<(&str, Value)> {
    Ok(match what {
        What::Ping => ("ping", json!({})),
        What::List => ("export.list", json!({})),
        What::Show { export } => ("export.show", json!({ "export": export })),
        What::Remove { export } => ("export.remove", json!({ "export": export })),
        What::AddLun { export, unit } => {
            ("lun.add", json!({ "export": export, "unit": parse_lun(unit)? }))
        }
        What::RemoveLun { export, unit } => ("lun.remove", of_unit(export, unit)?),
        What::Resize { export, unit } => ("disk.resize", of_unit(export, unit)?),
        What::Upgrade { binary } => {
            // The daemon may work in another directory.
            let binary = std::path::absolute(binary).context("which directory this is")?;
            ("upgrade", json!({ "binary": binary }))
        }
        What::Shutdown => ("shutdown", json!({})),
        What::Call { method, params } => {
            let params = serde_json::from_str(params).context("the parameters are no JSON")?;
            (method, params)
        }
    })
}

fn of_unit(export: &str, unit: &str) -> Result<Value> {
    let place = parse_place(unit)?;
    Ok(json!({ "export": export, "target": place.target, "lun": place.lun }))
}

fn print(text: &str) -> Result<()> {
    std::io::stdout().write_all(text.as_bytes()).context("cannot write to standard output")
}

/// An export in one line.
fn line_of(export: &Value) -> String {
    let text = |key: &str| export[key].as_str().unwrap_or("?").to_owned();
    let size = export["size-bytes"].as_u64().unwrap_or(0) >> 20;
    let guest = match export["connected"].as_bool() {
        Some(true) => "connected",
        _ => "no front-end",
    };
    let disk = match &*text("disk-state") {
        "ready" => String::new(),
        other => format!(", disk {other}"),
    };
    format!("{}  {}, {size} MiB, {guest}{disk}\n", text("name"), text("state"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_become_calls() {
        let what = What::AddLun { export: "/a".into(), unit: "3:7,null=1M".into() };
        let (method, params) = call_of(&what).unwrap();
        assert_eq!(method, "lun.add");
        assert_eq!((&params["export"], &params["unit"]["target"]), (&json!("/a"), &json!(3)));
        let what = What::Resize { export: "/a".into(), unit: "7".into() };
        let expected = json!({ "export": "/a", "target": 0, "lun": 7 });
        assert_eq!(call_of(&what).unwrap(), ("disk.resize", expected));
        let what = What::RemoveLun { export: "/a".into(), unit: "x".into() };
        assert!(call_of(&what).is_err());
    }
}
