//! The methods: which there are, their parameters, and what they answer.

use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::client::Client;
use super::message::{Code, Problem};
use crate::command::{Command, EndCause, ExportStatus, NewSize, Removal, Reply};
use crate::settings::{Settings, SettingsChange};
use crate::spec::{ExportSpec, UnitPlace, UnitSpec};
use crate::stats::DaemonStats;
use crate::status::ExportDetails;
use crate::subscribers::Kind;

/// All methods.
const METHODS: [Entry; 13] = [
    Entry::of::<Ping>(),
    Entry::of::<List>(),
    Entry::of::<Show>(),
    Entry::of::<Add>(),
    Entry::of::<Removal>(),
    Entry::of::<AddUnit>(),
    Entry::of::<RemoveUnit>(),
    Entry::of::<Resize>(),
    Entry::of::<SettingsChange>(),
    Entry::of::<Upgrade>(),
    Entry::of::<Counters>(),
    Entry::of::<Subscribe>(),
    Entry::of::<Shutdown>(),
];

/// A method, which is what its parameters are read into.
trait Method: DeserializeOwned + 'static {
    const NAME: &'static str;
    /// Whether it may wait for a disk or a guest.
    const MAY_WAIT: bool;
    /// The process may end before there is time for an answer, so that comes first: an empty one.
    const ENDS: bool = false;
    type Answer: Serialize;

    /// Does what is asked for, and waits for that.
    fn carry_out(self, client: &mut Client) -> Result<Self::Answer, Problem>;
}

/// A method in the list of all.
pub(super) struct Entry {
    name: &'static str,
    /// Whether it may wait for a disk or a guest.
    pub(super) may_wait: bool,
    /// Its answer comes before what it does: an empty one.
    pub(super) ends: bool,
    call: fn(Value) -> Result<Call, Problem>,
}

/// A method with its parameters.
pub(super) type Call = Box<dyn FnOnce(&mut Client) -> Result<Value, Problem>>;

impl Entry {
    const fn of<M: Method>() -> Self {
        Self { name: M::NAME, may_wait: M::MAY_WAIT, ends: M::ENDS, call: call::<M> }
    }

    /// The method of this name.
    pub(super) fn find(name: &str) -> Result<&'static Self, Problem> {
        METHODS.iter().find(|entry| entry.name == name).ok_or_else(|| {
            let names = METHODS.each_ref().map(|entry| entry.name).join(", ");
            Problem::new(Code::NoMethod, format!("there is no method '{name}'; there are {names}"))
        })
    }

    /// The method with these parameters.
    pub(super) fn with(&self, params: Value) -> Result<Call, Problem> {
        (self.call)(params)
    }
}

fn call<M: Method>(params: Value) -> Result<Call, Problem> {
    if !params.is_object() {
        return Err(Problem::new(Code::Params, "the parameters must be an object, by name"));
    }
    let method: M = serde_json::from_value(params)
        .map_err(|error| Problem::new(Code::Params, error.to_string()))?;
    Ok(Box::new(|client| {
        let answer = serde_json::to_value(method.carry_out(client)?);
        answer.map_err(|error| {
            Problem::new(Code::Failed, format!("the answer cannot be written as JSON: {error}"))
        })
    }))
}

/// An answer that says only that something was done.
#[derive(Serialize)]
struct Done {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Ping {}

#[derive(Serialize)]
struct Version {
    version: &'static str,
}

impl Method for Ping {
    const NAME: &'static str = "ping";
    const MAY_WAIT: bool = false;
    type Answer = Version;

    fn carry_out(self, _: &mut Client) -> Result<Version, Problem> {
        Ok(Version { version: env!("CARGO_PKG_VERSION") })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {}

impl Method for List {
    const NAME: &'static str = "export.list";
    const MAY_WAIT: bool = false;
    type Answer = Vec<ExportStatus>;

    fn carry_out(self, client: &mut Client) -> Result<Vec<ExportStatus>, Problem> {
        match client.handle(Command::Show)? {
            Reply::Exports(exports) => Ok(exports),
            other => unreachable!("{other:?} is no list of exports"),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Show {
    export: String,
}

impl Method for Show {
    const NAME: &'static str = "export.show";
    const MAY_WAIT: bool = false;
    type Answer = ExportDetails;

    fn carry_out(self, client: &mut Client) -> Result<ExportDetails, Problem> {
        match client.handle(Command::Describe(self.export))? {
            Reply::Export(details) => Ok(*details),
            other => unreachable!("{other:?} is no export"),
        }
    }
}

#[derive(Deserialize)]
#[serde(transparent)]
struct Add(ExportSpec);

impl Method for Add {
    const NAME: &'static str = "export.add";
    const MAY_WAIT: bool = true;
    type Answer = Done;

    fn carry_out(self, client: &mut Client) -> Result<Done, Problem> {
        client.handle(Command::Add(vec![self.0])).map(|_| Done {})
    }
}

impl Method for Removal {
    const NAME: &'static str = "export.remove";
    const MAY_WAIT: bool = true;
    type Answer = ExportStatus;

    fn carry_out(self, client: &mut Client) -> Result<ExportStatus, Problem> {
        match client.handle(Command::Remove(self))? {
            Reply::Removed(status) => Ok(*status),
            other => unreachable!("{other:?} is no end of an export"),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AddUnit {
    export: String,
    unit: UnitSpec,
}

impl Method for AddUnit {
    const NAME: &'static str = "lun.add";
    const MAY_WAIT: bool = true;
    type Answer = Done;

    fn carry_out(self, client: &mut Client) -> Result<Done, Problem> {
        let command = Command::AddUnit(self.export, Box::new(self.unit));
        client.handle(command).map(|_| Done {})
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RemoveUnit {
    export: String,
    #[serde(default)]
    target: u8,
    lun: u16,
}

impl Method for RemoveUnit {
    const NAME: &'static str = "lun.remove";
    const MAY_WAIT: bool = true;
    type Answer = Done;

    fn carry_out(self, client: &mut Client) -> Result<Done, Problem> {
        let Self { export, target, lun } = self;
        client.handle(Command::RemoveUnit(export, UnitPlace { target, lun })).map(|_| Done {})
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Resize {
    export: String,
    target: Option<u8>,
    /// `None`: the disk of a virtio-blk device.
    lun: Option<u16>,
    size_bytes: Option<u64>,
    #[serde(default)]
    shrink: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Resized {
    size_bytes: u64,
}

impl Method for Resize {
    const NAME: &'static str = "disk.resize";
    const MAY_WAIT: bool = true;
    type Answer = Resized;

    fn carry_out(self, client: &mut Client) -> Result<Resized, Problem> {
        let Self { export, target, lun, size_bytes, shrink } = self;
        if lun.is_none() && target.is_some() {
            return Err(Problem::new(Code::Params, "a target without a lun names no disk"));
        }
        let place = lun.map(|lun| UnitPlace { target: target.unwrap_or(0), lun });
        let command = Command::Resize(export, place, NewSize { size_bytes, shrink });
        match client.handle(command)? {
            Reply::Resized(size_bytes) => Ok(Resized { size_bytes }),
            other => unreachable!("{other:?} is no size"),
        }
    }
}

impl Method for SettingsChange {
    const NAME: &'static str = "set";
    const MAY_WAIT: bool = false;
    type Answer = Settings;

    fn carry_out(self, client: &mut Client) -> Result<Settings, Problem> {
        match client.handle(Command::Set(self))? {
            Reply::Settings(settings) => Ok(settings),
            other => unreachable!("{other:?} is no setting"),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Counters {}

impl Method for Counters {
    const NAME: &'static str = "stats";
    const MAY_WAIT: bool = false;
    type Answer = DaemonStats;

    fn carry_out(self, client: &mut Client) -> Result<DaemonStats, Problem> {
        match client.handle(Command::Stats)? {
            Reply::Stats(stats) => Ok(*stats),
            other => unreachable!("{other:?} has no counters"),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Subscribe {
    /// Which events; all of them if this is left out.
    events: Option<Vec<Kind>>,
}

impl Method for Subscribe {
    const NAME: &'static str = "subscribe";
    const MAY_WAIT: bool = false;
    type Answer = Done;

    fn carry_out(self, client: &mut Client) -> Result<Done, Problem> {
        client.subscribe(self.events).map(|()| Done {})
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Upgrade {
    /// The program that is started to take over from this one.
    binary: PathBuf,
}

#[derive(Serialize)]
struct Upgraded {
    /// The id of the process that has taken over.
    process: u32,
}

impl Method for Upgrade {
    const NAME: &'static str = "upgrade";
    const MAY_WAIT: bool = true;
    type Answer = Upgraded;

    fn carry_out(self, client: &mut Client) -> Result<Upgraded, Problem> {
        Ok(Upgraded { process: client.upgrade(&self.binary)? })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Shutdown {}

impl Method for Shutdown {
    const NAME: &'static str = "shutdown";
    const MAY_WAIT: bool = false;
    const ENDS: bool = true;
    type Answer = Done;

    fn carry_out(self, client: &mut Client) -> Result<Done, Problem> {
        client.handle(Command::End(EndCause::Control)).map(|_| Done {})
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn problem_of(method: &str, params: Value) -> Option<Problem> {
        Entry::find(method).and_then(|entry| entry.with(params)).err()
    }

    #[test]
    fn methods_take_their_own_parameters_and_no_others() {
        let unit = json!({ "lun": 3, "disk": { "null": { "size-bytes": 512 } } });
        let add = json!({ "export": "/a", "unit": unit });
        assert_eq!(problem_of("lun.add", add), None);
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
            let problem = problem_of(method, params).unwrap();
            assert_eq!(problem, Problem::new(Code::Params, message_of(&problem)), "{method}");
        }
        let problem = problem_of("lun.new", json!({})).unwrap();
        assert_eq!(problem, Problem::new(Code::NoMethod, message_of(&problem)));
        assert!(message_of(&problem).contains("lun.add, lun.remove"));
    }

    fn message_of(problem: &Problem) -> String {
        serde_json::to_value(problem).unwrap()["message"].as_str().unwrap().to_owned()
    }
}
