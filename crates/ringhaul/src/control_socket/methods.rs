//! The methods, their parameters, and their answers.

use std::time::Duration;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::access::Role;
use super::client::Client;
use super::descriptors::Descriptor;
use super::message::{Code, RpcError};
use super::schema::Schemas;
use crate::control::subscribers::{EventKind, ExportEvent};
use crate::log::recent_lines;
use crate::monitoring;
use crate::process;
use crate::spec::command::{Command, EndCause, ExportStatus, NewSize, Removal, Reply, StatsReader};
use crate::spec::parser_words::PARAMETERS;
use crate::spec::process::{LogLines, ProcessStatus};
use crate::spec::process::{SuccessorProgress, SuccessorStart};
use crate::spec::qos::{FullQosSpec, LimitSpec, OnError, QosChange};
use crate::spec::settings::{Settings, SettingsChange};
use crate::spec::stats::DaemonStats;
use crate::spec::status::ExportDetails;
use crate::spec::{ExportSpec, UnitPlace, UnitSpec};

/// All methods, each with the least role of a client that may call it.
static METHODS: [&dyn Method; 21] = [
    &Typed { name: "ping", role: Role::Reader, kind: Kind::Query, carry_out: ping },
    &Typed { name: "export.list", role: Role::Reader, kind: Kind::Query, carry_out: list },
    &Typed { name: "export.show", role: Role::Reader, kind: Kind::Query, carry_out: show },
    &Typed { name: "export.add", role: Role::Member, kind: Kind::MayWait, carry_out: add },
    &Typed { name: "export.remove", role: Role::Member, kind: Kind::MayWait, carry_out: remove },
    &Typed { name: "lun.add", role: Role::Member, kind: Kind::MayWait, carry_out: add_unit },
    &Typed { name: "lun.remove", role: Role::Member, kind: Kind::MayWait, carry_out: remove_unit },
    &Typed { name: "disk.resize", role: Role::Member, kind: Kind::MayWait, carry_out: resize },
    &Typed { name: "disk.set", role: Role::Member, kind: Kind::Change, carry_out: set_disk },
    &Typed { name: "disk.resume", role: Role::Member, kind: Kind::Change, carry_out: resume_disk },
    &Typed { name: "state.save", role: Role::Owner, kind: Kind::Wait, carry_out: save_state },
    &Typed { name: "state.load", role: Role::Owner, kind: Kind::MayWait, carry_out: load_state },
    &Typed { name: "set", role: Role::Member, kind: Kind::Change, carry_out: set },
    &Typed {
        name: "upgrade.begin",
        role: Role::Owner,
        kind: Kind::Change,
        carry_out: begin_upgrade,
    },
    &Typed { name: "upgrade.wait", role: Role::Owner, kind: Kind::Wait, carry_out: await_upgrade },
    &Typed { name: "stats", role: Role::Reader, kind: Kind::Query, carry_out: stats },
    &Typed { name: "metrics", role: Role::Reader, kind: Kind::Query, carry_out: metrics },
    &Typed { name: "process", role: Role::Reader, kind: Kind::Query, carry_out: process_status },
    &Typed { name: "log", role: Role::Reader, kind: Kind::Query, carry_out: log },
    &Typed { name: "subscribe", role: Role::Reader, kind: Kind::Query, carry_out: subscribe },
    &Typed { name: "shutdown", role: Role::Member, kind: Kind::Ends, carry_out: shutdown },
];

/// The effect of a method, and the time that it may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Changes nothing and does not wait.
    Query,
    /// Changes nothing and may wait.
    Wait,
    /// Does not wait.
    Change,
    /// A change that may wait for a disk or a guest.
    MayWait,
    /// The process may end before it can answer. An empty answer comes first.
    Ends,
}

/// A method in the list of all.
pub(super) trait Method: Sync {
    fn name(&self) -> &'static str;
    fn kind(&self) -> Kind;
    /// The least role of a client that may call it.
    fn role(&self) -> Role;
    /// Reads the parameters of a call.
    fn with(&self, params: Value) -> Result<Call, RpcError>;
    fn schema(&self, schemas: &mut Schemas) -> Value;

    /// Returns true if files may come with a call.
    fn takes_descriptors(&self) -> bool {
        ["export.add", "lun.add"].contains(&self.name())
    }
}

/// The parameter that names the descriptors of a request.
pub(super) const DESCRIPTORS: &str = "descriptors";

/// A method with its parameters.
pub(super) type Call = Box<dyn FnOnce(&mut Client) -> Result<Value, RpcError>>;

/// A method with the types of its parameters and its answer.
struct Typed<P, A> {
    name: &'static str,
    role: Role,
    kind: Kind,
    carry_out: fn(P, &mut Client) -> Result<A, RpcError>,
}

impl<P, A> Method for Typed<P, A>
where
    P: DeserializeOwned + JsonSchema + 'static,
    A: Serialize + JsonSchema + 'static,
{
    fn name(&self) -> &'static str {
        self.name
    }

    fn kind(&self) -> Kind {
        self.kind
    }

    fn role(&self) -> Role {
        self.role
    }

    fn with(&self, params: Value) -> Result<Call, RpcError> {
        if !params.is_object() {
            return Err(RpcError::new(Code::Params, "the parameters must be an object with names"));
        }
        let params: P = serde_path_to_error::deserialize(params).map_err(|error| {
            let (place, error) =
                (error.path().to_string(), PARAMETERS.reword(&error.inner().to_string()));
            // Some errors concern all parameters, and some name their place themselves.
            let is_known = place == "." || error.contains(&format!("`{place}`"));
            let text = if is_known { error } else { format!("{place}: {error}") };
            RpcError::new(Code::Params, text)
        })?;
        let carry_out = self.carry_out;
        Ok(Box::new(move |client| {
            serde_json::to_value(carry_out(params, client)?).map_err(|error| {
                RpcError::new(Code::Failed, format!("cannot encode the answer as JSON: {error}"))
            })
        }))
    }

    fn schema(&self, schemas: &mut Schemas) -> Value {
        let mut params = schemas.read::<P>();
        if self.takes_descriptors() {
            let mut names = schemas.read::<Vec<Descriptor>>();
            names["description"] = json!("The files that come with the request as descriptors.");
            params["properties"][DESCRIPTORS] = names;
        }
        json!({ "params": params, "result": schemas.written::<A>() })
    }
}

/// Finds the method with this name.
pub(super) fn find(name: &str) -> Result<&'static dyn Method, RpcError> {
    METHODS.into_iter().find(|method| method.name() == name).ok_or_else(|| {
        let names = METHODS.map(|method| method.name()).join(", ");
        RpcError::new(
            Code::NoMethod,
            format!("there is no method '{name}'; the methods are {names}"),
        )
    })
}

/// All methods with their parameters and answers, events and errors, by JSON Schema.
pub fn schema() -> Value {
    let mut schemas = Schemas::new();
    let methods = METHODS.map(|method| (method.name().to_owned(), method.schema(&mut schemas)));
    let methods = Map::from_iter(methods);
    let event = schemas.written::<ExportEvent>();
    let errors =
        Code::ALL.iter().map(|(code, meaning)| ((*code as i32).to_string(), json!(meaning)));
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "version": env!("CARGO_PKG_VERSION"),
        "methods": methods,
        "events": { "event": { "params": event } },
        "errors": Map::from_iter(errors),
        "$defs": schemas.definitions(),
    })
}

/// Lets the daemon carry out a command, and takes the answer out of its kind of reply.
macro_rules! ask {
    ($client:ident, $command:expr, $reply:path) => {
        $client.handle($command).map(|reply| match reply {
            $reply(answer) => answer,
            other => unreachable!("{other:?} is no {}", stringify!($reply)),
        })
    };
}

/// An empty answer: the request was carried out.
#[derive(Serialize, JsonSchema)]
struct Done {}

/// Checks that the daemon is there.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Ping {}

/// The version of the daemon.
#[derive(Serialize, JsonSchema)]
struct Version {
    /// The version that `ringhaul --version` prints.
    version: &'static str,
    /// The features that it was built with.
    features: &'static [&'static str],
}

fn ping(_: Ping, _: &mut Client) -> Result<Version, RpcError> {
    Ok(Version { version: env!("CARGO_PKG_VERSION"), features: process::FEATURES })
}

/// Lists the exports, in the order in which they were added.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct List {}

fn list(_: List, client: &mut Client) -> Result<Vec<ExportStatus>, RpcError> {
    Ok(client.daemon()?.exports()?)
}

/// Describes an export in detail.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Show {
    /// Its name or its socket.
    export: String,
}

fn show(params: Show, client: &mut Client) -> Result<ExportDetails, RpcError> {
    Ok(client.daemon()?.details(params.export)?)
}

/// Opens the disks of an export and serves it.
#[derive(Deserialize, JsonSchema)]
#[serde(transparent)]
struct Add(ExportSpec);

fn add(params: Add, client: &mut Client) -> Result<Done, RpcError> {
    client.handle(Command::Add(vec![params.0])).map(|_| Done {})
}

fn remove(params: Removal, client: &mut Client) -> Result<ExportStatus, RpcError> {
    ask!(client, Command::Remove(params), Reply::Removed).map(|status| *status)
}

/// Adds a logical unit to a virtio-scsi device. The guest is notified.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AddUnit {
    /// The name or the socket of the export.
    export: String,
    /// The unit.
    unit: UnitSpec,
}

fn add_unit(params: AddUnit, client: &mut Client) -> Result<Done, RpcError> {
    let command = Command::AddUnit(params.export, Box::new(params.unit));
    client.handle(command).map(|_| Done {})
}

/// Removes a logical unit, and answers when its disk is closed. The guest is notified.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RemoveUnit {
    /// The name or the socket of the export.
    export: String,
    /// 0 to 255.
    #[serde(default)]
    target: u8,
    /// 0 to 16,383.
    lun: u16,
}

fn remove_unit(params: RemoveUnit, client: &mut Client) -> Result<Done, RpcError> {
    let RemoveUnit { export, target, lun } = params;
    client.handle(Command::RemoveUnit(export, UnitPlace { target, lun })).map(|_| Done {})
}

/// Changes the size of a disk, and notifies the guest.
#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Resize {
    /// The name or the socket of the export.
    export: String,
    /// The target of the unit; 0 if it is left out.
    target: Option<u8>,
    /// The unit. `None`: the disk of a virtio-blk device.
    lun: Option<u16>,
    /// The new size in bytes. `None`: the present size of its file or device.
    size_bytes: Option<u64>,
    /// Allow a size below the present one. Data beyond it is lost.
    #[serde(default)]
    shrink: bool,
}

/// The size of the disk.
#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
struct Resized {
    /// The present size in bytes.
    size_bytes: u64,
}

fn resize(params: Resize, client: &mut Client) -> Result<Resized, RpcError> {
    let Resize { export, target, lun, size_bytes, shrink } = params;
    let size = NewSize { size_bytes, shrink };
    let command = Command::Resize(export, place(target, lun)?, size);
    ask!(client, command, Reply::Resized).map(|size_bytes| Resized { size_bytes })
}

/// Changes the limits of a disk, and the handling of requests that it fails.
#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct SetDisk {
    /// The name or the socket of the export.
    export: String,
    /// The target of the unit; 0 if it is left out.
    target: Option<u8>,
    /// The unit. `None`: the disk of a virtio-blk device.
    lun: Option<u16>,
    /// Limits to change; 0 is none, and an empty group is none.
    limits: Option<LimitSpec>,
    /// The handling of reads that fail.
    rerror: Option<OnError>,
    /// The handling of writes, discards and zeroes that fail.
    werror: Option<OnError>,
}

fn set_disk(params: SetDisk, client: &mut Client) -> Result<FullQosSpec, RpcError> {
    let SetDisk { export, target, lun, limits, rerror, werror } = params;
    let change = Box::new(QosChange { limits, rerror, werror });
    ask!(client, Command::SetDisk(export, place(target, lun)?, change), Reply::Rules)
        .map(|rules| *rules)
}

/// Retries at once the requests that wait because a disk has failed them.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ResumeDisk {
    /// The name or the socket of the export.
    export: String,
    /// The target of the unit; 0 if it is left out.
    target: Option<u8>,
    /// The unit. `None`: all disks of the export.
    lun: Option<u16>,
}

fn resume_disk(params: ResumeDisk, client: &mut Client) -> Result<Done, RpcError> {
    let ResumeDisk { export, target, lun } = params;
    client.handle(Command::Resume(export, place(target, lun)?)).map(|_| Done {})
}

/// Returns the state that the logical units of an export had when their guest stopped.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SaveState {
    /// The name or the socket of the export.
    export: String,
}

/// The state of logical units.
#[derive(Serialize, JsonSchema)]
struct SavedUnits {
    /// An object for `state.load` on another host.
    state: Value,
}

fn save_state(params: SaveState, client: &mut Client) -> Result<SavedUnits, RpcError> {
    ask!(client, Command::SaveState(params.export), Reply::State).map(|state| SavedUnits { state })
}

/// Has the next guest of an export continue with the state that it had on another host.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct LoadState {
    /// The name or the socket of the export.
    export: String,
    /// The answer of `state.save` on the other host.
    state: Value,
}

fn load_state(params: LoadState, client: &mut Client) -> Result<Done, RpcError> {
    client.handle(Command::LoadState(params.export, Box::new(params.state))).map(|_| Done {})
}

/// The place of a disk. `None`: no unit is named.
fn place(target: Option<u8>, lun: Option<u16>) -> Result<Option<UnitPlace>, RpcError> {
    if lun.is_none() && target.is_some() {
        return Err(RpcError::new(Code::Params, "a target without a lun names no disk"));
    }
    Ok(lun.map(|lun| UnitPlace { target: target.unwrap_or(0), lun }))
}

fn set(params: SettingsChange, client: &mut Client) -> Result<Settings, RpcError> {
    ask!(client, Command::Set(params), Reply::Settings)
}

/// Returns all counters.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Counters {}

fn stats(_: Counters, client: &mut Client) -> Result<DaemonStats, RpcError> {
    Ok(client.daemon()?.stats(StatsReader::Control)?)
}

/// Returns the metrics for a monitoring system.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Metrics {}

/// Metrics.
#[derive(Serialize, JsonSchema)]
struct MetricsText {
    /// The text format of Prometheus, version 0.0.4.
    text: String,
}

fn metrics(_: Metrics, client: &mut Client) -> Result<MetricsText, RpcError> {
    Ok(MetricsText { text: monitoring::metrics(&*client.daemon()?)? })
}

/// Describes the process of the daemon and the limits that the system sets it.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Process {}

fn process_status(_: Process, client: &mut Client) -> Result<ProcessStatus, RpcError> {
    Ok(client.daemon()?.process_status()?)
}

/// Returns the last lines of the log.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Log {}

fn log(_: Log, client: &mut Client) -> Result<LogLines, RpcError> {
    client.daemon().map(|_| LogLines { lines: recent_lines() })
}

/// Sends events on this connection from now on.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Subscribe {
    /// The kinds of events; all of them if this is left out.
    events: Option<Vec<EventKind>>,
}

fn subscribe(params: Subscribe, client: &mut Client) -> Result<Done, RpcError> {
    client.subscribe(params.events).map(|()| Done {})
}

/// Describes the start of a process that is to take over from the daemon. The daemon's standard
/// output and standard error follow the answer, as descriptors with an empty line.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct BeginUpgrade {}

fn begin_upgrade(_: BeginUpgrade, client: &mut Client) -> Result<SuccessorStart, RpcError> {
    client.begin_upgrade()
}

/// Waits for a process to take over from the daemon.
#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct AwaitUpgrade {
    /// The id of the process.
    process: u32,
    /// The longest time to wait, in milliseconds.
    #[serde(default)]
    deadline_ms: u32,
}

fn await_upgrade(params: AwaitUpgrade, client: &mut Client) -> Result<SuccessorProgress, RpcError> {
    client.await_upgrade(params.process, Duration::from_millis(params.deadline_ms.into()))
}

/// Ends the daemon, as SIGTERM does.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Shutdown {}

fn shutdown(_: Shutdown, client: &mut Client) -> Result<Done, RpcError> {
    client.handle(Command::End(EndCause::Control)).map(|_| Done {})
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::{Arc, Weak};

    use super::super::access::Access;
    use super::super::client_quota::ClientQuota;
    use super::super::connection::{Connection, LIMITS};
    use super::*;
    use crate::process::peer::Peer;

    /// Collects all keys of objects that a schema describes, and all words that it takes.
    fn names(schema: &Value, found: &mut BTreeSet<String>) {
        match schema {
            Value::Object(object) => {
                for (key, value) in object {
                    let keys = value.as_object().filter(|_| key == "properties");
                    found.extend(keys.into_iter().flat_map(Map::keys).cloned());
                    let words = value.as_array().filter(|_| key == "enum").into_iter().flatten();
                    let words = words.chain(Some(value).filter(|_| key == "const"));
                    found.extend(words.filter_map(Value::as_str).map(str::to_owned));
                    names(value, found);
                }
            }
            Value::Array(array) => array.iter().for_each(|value| names(value, found)),
            _ => {}
        }
    }

    #[test]
    fn everything_is_documented() {
        let docs = include_str!("../../../../docs/reference/control.md");
        let is_there = |name: &str| docs.contains(&format!("`{name}`"));
        let mut names_of_all = BTreeSet::new();
        let schema = schema();
        names(&schema, &mut names_of_all);
        let methods = schema["methods"].as_object().unwrap();
        assert!(methods.contains_key("export.add") && names_of_all.contains("engine-reason"));
        let missing: Vec<&String> =
            methods.keys().chain(&names_of_all).filter(|name| !is_there(name)).collect();
        assert!(missing.is_empty(), "docs/reference/control.md lacks {missing:?}");
        for (code, meaning) in schema["errors"].as_object().unwrap() {
            let row = format!("| {code} | {} |", meaning.as_str().unwrap());
            assert!(docs.contains(&row), "docs/reference/control.md lacks {row}");
        }
    }

    /// Collects keys of objects without a description. A key that names one of several kinds is
    /// described with the kind.
    fn undescribed(place: &str, schema: &Value, found: &mut Vec<String>) {
        match schema {
            Value::Object(object) => {
                let keys = object.get("properties").and_then(Value::as_object);
                let is_kind =
                    object.contains_key("description") && keys.is_some_and(|keys| keys.len() == 1);
                for (key, value) in keys.into_iter().flatten().filter(|_| !is_kind) {
                    if value.get("description").or(value.get("const")).is_none() {
                        found.push(format!("{place} {key}"));
                    }
                }
                object.iter().for_each(|(key, value)| {
                    undescribed(&format!("{place} {key}"), value, found);
                });
            }
            Value::Array(array) => array.iter().for_each(|v| undescribed(place, v, found)),
            _ => {}
        }
    }

    #[test]
    fn every_key_is_described() {
        let (schema, mut found) = (schema(), Vec::new());
        for (name, method) in schema["methods"].as_object().unwrap() {
            for (part, of_method) in method.as_object().unwrap() {
                // The description of a method is not one of its keys.
                let mut keys = of_method.clone();
                keys.as_object_mut().unwrap().remove("description");
                undescribed(&format!("{name} {part}"), &keys, &mut found);
            }
        }
        undescribed("event", &schema["events"], &mut found);
        assert!(found.is_empty(), "{found:#?}");
    }

    /// Unknown keys are refused, and the schema says so.
    #[test]
    fn parameters_are_closed() {
        for (name, method) in schema()["methods"].as_object().unwrap() {
            let params = &method["params"];
            assert_eq!(params["type"], "object", "{name}");
            assert_eq!(params["additionalProperties"], false, "{name}: {params}");
        }
    }

    fn problem_of(method: &str, params: Value) -> Option<RpcError> {
        find(method).and_then(|method| method.with(params)).err()
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
            assert_eq!(problem, RpcError::new(Code::Params, message_of(&problem)), "{method}");
        }
        let problem = problem_of("lun.new", json!({})).unwrap();
        assert_eq!(problem, RpcError::new(Code::NoMethod, message_of(&problem)));
        assert!(message_of(&problem).contains("lun.add, lun.remove"));
    }

    /// The slots for requests that wait depend on it.
    #[test]
    fn methods_that_may_wait_or_end_the_process_are_marked() {
        let of = |kind| METHODS.into_iter().filter(move |method| method.kind() == kind);
        let names = |kind| of(kind).map(|method| method.name()).collect::<Vec<_>>();
        let disks = ["export.add", "export.remove", "lun.add", "lun.remove", "disk.resize"];
        assert_eq!(names(Kind::MayWait), [&disks[..], &["state.load"]].concat());
        assert_eq!(names(Kind::Wait), ["state.save", "upgrade.wait"]);
        assert_eq!(names(Kind::Ends), ["shutdown"]);
    }

    #[test]
    fn a_disk_is_named_by_its_target_and_lun() {
        assert_eq!(place(None, None).unwrap(), None);
        assert_eq!(place(None, Some(7)).unwrap(), Some(UnitPlace { target: 0, lun: 7 }));
        assert_eq!(place(Some(3), Some(7)).unwrap(), Some(UnitPlace { target: 3, lun: 7 }));
        let problem = place(Some(3), None).unwrap_err();
        assert_eq!(problem, RpcError::new(Code::Params, message_of(&problem)));
    }

    /// A reader changes nothing, and a member does not get the memory of guests.
    #[test]
    fn each_method_has_its_role() {
        let of = |role| {
            let client = client(role);
            let is_allowed =
                |method: &&dyn Method| client.check_role(method.name(), method.role()).is_ok();
            let allowed = METHODS.into_iter().filter(is_allowed);
            allowed.map(|method| method.name()).collect::<BTreeSet<_>>()
        };
        let all: BTreeSet<_> = METHODS.into_iter().map(|method| method.name()).collect();
        let queries =
            METHODS.into_iter().filter(|method| method.kind() == Kind::Query).map(|m| m.name());
        assert_eq!(of(Role::Reader), queries.collect());
        let of_owners = ["upgrade.begin", "upgrade.wait", "state.save", "state.load"];
        assert_eq!(
            of(Role::Member),
            all.iter().copied().filter(|m| !of_owners.contains(m)).collect()
        );
        assert_eq!(of(Role::Owner), all);
        for (role, words) in [
            (Role::Reader, "permission denied: a member of --control-read-group may only query"),
            (Role::Member, "permission denied: only root and the user of this daemon may"),
        ] {
            let refused = client(role).check_role("upgrade.begin", Role::Owner).unwrap_err();
            assert_eq!(refused, RpcError::new(Code::Refused, message_of(&refused)));
            assert!(message_of(&refused).contains(words), "{}", message_of(&refused));
        }
    }

    fn client(role: Role) -> Client {
        let (ours, _) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = Peer::from_socket(&ours).unwrap();
        let slot = ClientQuota::default().take(role).unwrap();
        let connection = Arc::new(Connection::new(ours, LIMITS).unwrap());
        Client::new(Weak::new(), Access::default().into(), peer, slot, connection)
    }

    #[test]
    fn a_parameter_that_is_wrong_is_named() {
        let unit = json!({ "lun": 3, "disk": { "null": { "size-bytes": "big" } } });
        let export = |key: &str, value: Value| {
            let mut export = json!({ "endpoint": { "path": "/a" }, "device": { "scsi": [] } });
            export[key] = value;
            export
        };
        for (method, params, place) in [
            ("export.remove", json!({ "export": "/a", "deadline-ms": -1 }), "deadline-ms: "),
            ("lun.add", json!({ "export": "/a", "unit": unit }), "unit.disk"),
            ("export.add", export("queue-size", json!("x")), "queue-size: "),
            ("export.add", export("limits", json!({ "iops-total": "x" })), "limits.iops-total: "),
            ("export.add", export("queue", json!(1)), "unknown field `queue`"),
            ("set", json!({ "poll-max-us": "x" }), "poll-max-us: "),
            ("export.show", json!({}), "missing field `export`; `ringhaul ctl schema`"),
            ("export.add", json!({ "device": {} }), "device: it has no kind: write an object"),
            ("export.add", json!({ "device": "blk" }), "device.blk: it has no kind"),
            ("export.add", json!({ "device": { "blk": {} } }), "device.blk: it has no kind"),
        ] {
            let problem = problem_of(method, params).unwrap();
            assert!(message_of(&problem).starts_with(place), "{}", message_of(&problem));
        }
    }

    /// The target of each reference in a schema exists.
    #[test]
    fn references_lead_somewhere() {
        let schema = schema();
        let (mut left, mut count) = (vec![&schema], 0);
        while let Some(value) = left.pop() {
            left.extend(value.as_object().into_iter().flat_map(Map::values));
            left.extend(value.as_array().into_iter().flatten());
            if let Some(target) = value.get("$ref").and_then(Value::as_str) {
                let pointer = target.strip_prefix('#').unwrap();
                assert!(schema.pointer(pointer).is_some(), "{target} is nowhere");
                count += 1;
            }
        }
        assert!(count > 0, "a disk lies over another one");
    }

    fn message_of(problem: &RpcError) -> String {
        serde_json::to_value(problem).unwrap()["message"].as_str().unwrap().to_owned()
    }
}
