//! `ringhaul ctl`: sends commands to a daemon over its control socket.

mod args;
mod calls;
mod connection;
mod doctor;
mod files;
mod show;
mod top;
pub(crate) mod upgrade;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ringhaul::control_socket;
use ringhaul_options::redact::printable;
use serde_json::{Value, json};

pub(crate) use args::{CtlArgs, CtlCommand};
use connection::{Connection, EXIT_REFUSED, Refusal, find_control_socket};
use show::{Form, print};

/// The removal was not finished by the deadline and continues.
const EXIT_UNFINISHED: u8 = 3;

/// Error codes of answers: handed over to another process, and removal continues.
const HANDED_OVER: i64 = 6;
const UNFINISHED: i64 = 8;

/// Sends the command and prints the answer. The exit code is nonzero if the daemon refused or
/// failed.
///
/// # Errors
///
/// When the daemon cannot be reached.
pub(crate) fn run(args: &CtlArgs) -> Result<ExitCode> {
    let form = match args.json {
        true => Form::Json,
        false if std::io::stdout().is_terminal() => Form::Table,
        false => Form::Lines,
    };
    if let CtlCommand::Schema = args.what {
        print(&show::json(&control_socket::schema()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let is_raw = matches!(args.what, CtlCommand::Call { .. });
    // Invalid words fail here, before any daemon is contacted.
    let calls = calls::calls_of(&args.what)?;
    if let CtlCommand::Upgrade { binary, option, retry, sandbox, in_unit } = &args.what {
        let binary = binary.as_ref().or(option.as_ref()).context("it takes a program")?;
        let retry = Duration::from_millis(retry.unwrap_or(0));
        let program = upgrade::Program { path: upgrade::program(binary)?, in_unit: *in_unit };
        let control = find_control_socket(args.control.clone())?;
        return upgrade::run((&program, *sandbox), retry, &control, form);
    }
    let control = find_control_socket(args.control.clone())?;
    let mut daemon = Connection::new(&control)?;
    match &args.what {
        CtlCommand::Top(options) => return top::run(options, &mut daemon, args.json),
        CtlCommand::Doctor(options) => return doctor::run(options, &mut daemon, form),
        _ => {}
    }
    // Only `export.add` makes several calls.
    let names: Vec<String> = calls.iter().map(|(_, params)| calls::export_name(params)).collect();
    for (number, (method, params)) in calls.into_iter().enumerate() {
        let unit = params.get("unit").cloned();
        let mut asked = ask(&mut daemon, method, params.clone(), (form, is_raw))?;
        if let Err(Refusal { code: HANDED_OVER, .. }) = asked
            && let Ok(next) = Connection::new(&control)
        {
            // The command waited for an upgrade, so the new process carries it out.
            daemon = next;
            asked = ask(&mut daemon, method, params, (form, is_raw))?;
        }
        match asked {
            Ok(()) if ["export.add", "lun.add"].contains(&method) => {
                print_warnings(&mut daemon, &names[number], unit.as_ref());
            }
            Ok(()) => {}
            Err(refusal) => {
                let partial = describe_partial_add(&names, number);
                eprintln!("ringhaul: {}", printable(&(refusal.message + &partial)));
                return Ok(ExitCode::from(match refusal.code {
                    UNFINISHED => EXIT_UNFINISHED,
                    _ => EXIT_REFUSED,
                }));
            }
        }
    }
    if let CtlCommand::Shutdown { wait: true } = args.what {
        daemon.wait_for_end()?;
    }
    if let CtlCommand::Events { .. } = args.what {
        loop {
            print(&show::event(&daemon.event()?, form))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the daemon's warnings about disks that were just added: of a whole export, or of a
/// `unit`.
fn print_warnings(daemon: &mut Connection, export: &str, unit: Option<&Value>) {
    // The disk was added; a failure here changes nothing.
    let Ok(Ok(shown)) = daemon.call("export.show", &json!({ "export": export })) else { return };
    for warning in show::warnings(&shown, unit) {
        eprintln!("ringhaul: {}", printable(&format!("{export}: warning: {warning}")));
    }
}

/// Lists the exports that were added and not added when number `refused` was refused.
fn describe_partial_add(names: &[String], refused: usize) -> String {
    if names.len() < 2 {
        return String::new();
    }
    let (added, others) = names.split_at(refused);
    let added = if added.is_empty() { "nothing".to_owned() } else { added.join(", ") };
    format!("; added: {added}; not added: {}", others.join(", "))
}

/// Calls a method, and prints the answer.
fn ask(
    daemon: &mut Connection,
    method: &str,
    mut params: Value,
    (form, is_raw): (Form, bool),
) -> Result<Result<(), Refusal>> {
    if let Some(more) = params.as_object_mut().and_then(|params| params.remove(calls::MORE_BYTES)) {
        // The daemon accepts absolute sizes only.
        let shown = daemon.call("export.show", &json!({ "export": params["export"] }))?;
        let shown = match shown {
            Ok(shown) => shown,
            Err(refusal) => return Ok(Err(refusal)),
        };
        match calls::grown(&shown, &params, &more)? {
            Some(size) => params["size-bytes"] = size,
            // The daemon's refusal explains the missing size.
            None => match daemon.call(method, &params)? {
                Ok(_) => bail!("the disk was added during this command; try again"),
                Err(refusal) => return Ok(Err(refusal)),
            },
        }
    }
    let answered = match method {
        // The paths of a raw call begin in the folder of the daemon.
        "export.add" | "lun.add" if !is_raw => files::add(daemon, method, &params)?,
        _ => daemon.call(method, &params)?,
    };
    let answer = match answered {
        Ok(answer) => answer,
        Err(refusal) => return Ok(Err(refusal)),
    };
    print(&show::answer(method, &answer, form)).map(Ok)
}
