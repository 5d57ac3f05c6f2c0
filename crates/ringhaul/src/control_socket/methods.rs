//! The methods: which there are, their parameters, and what they answer.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::message::{Code, Problem};
use crate::command::{Command, CommandError, EndCause, Reply};
use crate::daemon::Daemon;
use crate::spec::{ExportSpec, UnitPlace, UnitSpec};

/// What a method does.
#[derive(Debug)]
pub(super) enum Call {
    Ping,
    /// Describes one export.
    Show(String),
    Command(Command),
}

impl Call {
    /// Whether it may wait for a disk or a guest.
    pub(super) fn may_wait(&self) -> bool {
        !matches!(self, Self::Ping | Self::Show(_) | Self::Command(Command::Show | Command::End(_)))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    export: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AddUnit {
    export: String,
    unit: UnitSpec,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct OfUnit {
    export: String,
    #[serde(default)]
    target: u8,
    lun: u16,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Resize {
    export: String,
    #[serde(default)]
    target: u8,
    lun: u16,
    /// Of a null disk; others have the size of their file or device.
    size_bytes: Option<u64>,
}

/// The call that a method and its parameters make.
pub(super) fn parse(method: &str, params: Value) -> Result<Call, Problem> {
    Ok(Call::Command(match method {
        "ping" => {
            of::<Nothing>(params)?;
            return Ok(Call::Ping);
        }
        "export.show" => return Ok(Call::Show(of::<Named>(params)?.export)),
        "export.list" => {
            of::<Nothing>(params)?;
            Command::Show
        }
        "export.add" => Command::Add(vec![of::<ExportSpec>(params)?]),
        "export.remove" => Command::Remove(of::<Named>(params)?.export),
        "lun.add" => {
            let AddUnit { export, unit } = of(params)?;
            Command::AddUnit(export, Box::new(unit))
        }
        "lun.remove" => {
            let OfUnit { export, target, lun } = of(params)?;
            Command::RemoveUnit(export, UnitPlace { target, lun })
        }
        "disk.resize" => {
            let Resize { export, target, lun, size_bytes } = of(params)?;
            Command::ResizeUnit(export, UnitPlace { target, lun }, size_bytes)
        }
        "shutdown" => {
            of::<Nothing>(params)?;
            Command::End(EndCause::Control)
        }
        other => {
            let text = format!(
                "there is no method '{other}'; there are ping, export.add, export.remove, \
                 export.list, export.show, lun.add, lun.remove, disk.resize and shutdown"
            );
            return Err(Problem::new(Code::NoMethod, text));
        }
    }))
}

fn of<T: DeserializeOwned>(params: Value) -> Result<T, Problem> {
    if !params.is_object() {
        return Err(Problem::new(Code::Params, "the parameters must be an object, by name"));
    }
    serde_json::from_value(params).map_err(|error| Problem::new(Code::Params, error.to_string()))
}

/// Does what a call says, and waits for that.
pub(super) fn carry_out(daemon: &Daemon, call: Call) -> Result<Value, Problem> {
    let (command, only) = match call {
        Call::Ping => return Ok(json!({ "version": env!("CARGO_PKG_VERSION") })),
        Call::Show(name) => (Command::Show, Some(name)),
        Call::Command(command) => (command, None),
    };
    let reply = daemon.handle(command).map_err(|error| Problem::from(&error))?;
    match (reply, only) {
        (Reply::Exports(exports), Some(name)) => {
            let found = exports.iter().find(|export| export.name == name);
            let found = found.ok_or_else(|| Problem::from(&CommandError::Unknown(name)))?;
            value(found)
        }
        (Reply::Exports(exports), None) => value(&exports),
        (Reply::Removed(status), _) => value(&*status),
        (Reply::Resized(size_bytes), _) => Ok(json!({ "size-bytes": size_bytes })),
        (Reply::Added | Reply::UnitAdded | Reply::UnitRemoved | Reply::Ending, _) => Ok(json!({})),
    }
}

fn value(status: &impl serde::Serialize) -> Result<Value, Problem> {
    let told = serde_json::to_value(status);
    told.map_err(|error| Problem::new(Code::Failed, format!("it cannot be told in JSON: {error}")))
}

impl From<&CommandError> for Problem {
    fn from(error: &CommandError) -> Self {
        let code = match error {
            CommandError::Exists(_) | CommandError::UnitExists(..) => Code::Exists,
            CommandError::Unknown(_) | CommandError::UnknownUnit(..) => Code::Unknown,
            CommandError::Busy(..) | CommandError::UnitBusy(..) => Code::Busy,
            CommandError::NoUnits(_) => Code::WrongKind,
            CommandError::Ending => Code::Ending,
            CommandError::Failed(_) => Code::Failed,
        };
        Self::new(code, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_take_their_own_parameters_and_no_others() {
        let unit = json!({ "lun": 3, "disk": { "null": { "size-bytes": 512 } } });
        let add = json!({ "export": "/a", "unit": unit });
        let Ok(Call::Command(Command::AddUnit(export, unit))) = parse("lun.add", add) else {
            panic!("it was not understood");
        };
        assert_eq!((&*export, unit.place()), ("/a", UnitPlace { target: 0, lun: 3 }));
        for (method, params) in [
            ("ping", json!({ "a": 1 })),
            ("ping", json!([1])),
            ("export.show", json!(["/a"])),
            ("export.remove", json!({})),
            ("export.remove", json!({ "export": 3 })),
            ("export.list", json!({ "export": "/a" })),
            ("lun.remove", json!({ "export": "/a", "lun": 1, "targets": 2 })),
            ("lun.remove", json!({ "export": "/a", "lun": 70_000 })),
            ("lun.add", json!({ "export": "/a", "unit": { "lun": 1 } })),
            ("disk.resize", json!({ "export": "/a", "lun": 0, "size": 1 })),
        ] {
            let problem = parse(method, params).unwrap_err();
            assert_eq!(problem, Problem::new(Code::Params, message_of(&problem)), "{method}");
        }
        let problem = parse("lun.new", json!({})).unwrap_err();
        assert_eq!(problem, Problem::new(Code::NoMethod, message_of(&problem)));
    }

    fn message_of(problem: &Problem) -> String {
        serde_json::to_value(problem).unwrap()["message"].as_str().unwrap().to_owned()
    }
}
