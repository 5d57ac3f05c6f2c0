//! Requests and answers: JSON-RPC 2.0, an object for each line.

use std::fmt;

use ringhaul_options::redact::{escape_json, redact};
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::control::subscribers::ExportEvent;
use crate::spec::command::CommandError;

/// A request of a client.
#[derive(Debug, PartialEq)]
pub(super) struct Request {
    /// The id as it is written. `None` for a notification, which has no answer.
    pub(super) id: Option<String>,
    pub(super) method: String,
    pub(super) params: Value,
}

/// Defines the codes with their numbers and meanings, and the list of all.
macro_rules! codes {
    ($($name:ident = $number:expr, $meaning:literal;)+) => {
        /// The kind of an error, for programs. The first four numbers are JSON-RPC's.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Code {
            $(#[doc = $meaning] $name = $number,)+
        }

        impl Code {
            /// All codes with their meanings.
            pub(super) const ALL: &[(Self, &str)] = &[$((Self::$name, $meaning)),+];
        }
    };
}

codes! {
    NoJson = -32700, "the line is not JSON";
    NoRequest = -32600, "the line is not a request";
    NoMethod = -32601, "no method has this name";
    Params = -32602, "the method does not have these parameters";
    Failed = 1, "the request was tried and failed";
    Unknown = 2, "no export or unit has this name";
    Exists = 3, "an export or unit has this name already";
    Busy = 4, "the request is too early or too late, or another change is in progress";
    WrongKind = 5, "the export is of another kind";
    Ending = 6, "the daemon is ending, or another process has taken over from it";
    Refused = 7, "this client is not served";
    Unfinished = 8, "the request was not finished by the deadline, and continues";
    NotKept = 9, "the change was made, but not saved: a restart would undo it";
    UpgradeLater = 10, "the program has not taken over; try again";
    UpgradeRefused = 11, "the program has not taken over; do not try again";
}

/// The reason that a request was not carried out, with advice.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct RpcError {
    code: i32,
    message: String,
}

impl RpcError {
    pub(super) fn new(code: Code, message: impl Into<String>) -> Self {
        let message = redact(&message.into()).into_owned();
        Self { code: code as i32, message }
    }
}

impl From<CommandError> for RpcError {
    fn from(error: CommandError) -> Self {
        let code = match error {
            CommandError::Exists(_) | CommandError::UnitExists(..) => Code::Exists,
            CommandError::Unknown(_)
            | CommandError::UnknownUnit(..)
            | CommandError::Forgotten(_) => Code::Unknown,
            CommandError::NotSaved(_) => Code::NotKept,
            CommandError::UpgradeLater(_) => Code::UpgradeLater,
            CommandError::UpgradeRefused(_) => Code::UpgradeRefused,
            CommandError::Busy(..)
            | CommandError::UnitBusy(..)
            | CommandError::UnitBeingCancelled(..)
            | CommandError::UnitCancelled(..)
            | CommandError::DiskBusy(_)
            | CommandError::HandingOver
            | CommandError::Cancelled(_)
            | CommandError::Changed
            | CommandError::NotNow(_)
            | CommandError::NotPaused(_) => Code::Busy,
            CommandError::NotEnded(..) => Code::Unfinished,
            CommandError::NoUnits(_) | CommandError::NoDisk(_) | CommandError::NoTurns(_) => {
                Code::WrongKind
            }
            CommandError::Ending | CommandError::HandedOver(_) => Code::Ending,
            CommandError::Invalid(_) => Code::Params,
            CommandError::Failed(_) => Code::Failed,
        };
        Self::new(code, error.to_string())
    }
}

impl Request {
    /// Reads the request on a line.
    ///
    /// # Errors
    ///
    /// When the line is no request; with its id, as far as it has one.
    pub(super) fn parse(line: &[u8]) -> Result<Self, (Option<String>, RpcError)> {
        let value = read_unique(line)
            .map_err(|error| (None, RpcError::new(Code::NoJson, format!("no JSON: {error}"))))?;
        let Value::Object(mut object) = value else {
            let text = "a request is one object on one line; there are no batches";
            return Err((None, RpcError::new(Code::NoRequest, text)));
        };
        let id = object.remove("id");
        let wrong = |text: String| (id_of(line), RpcError::new(Code::NoRequest, text));
        if id.as_ref().is_some_and(|id| id.is_object() || id.is_array() || id.is_boolean()) {
            let text = "the id must be a string, a number or null";
            return Err((None, RpcError::new(Code::NoRequest, text)));
        }
        if object.remove("jsonrpc") != Some(json!("2.0")) {
            return Err(wrong(r#"it lacks "jsonrpc": "2.0""#.into()));
        }
        let Some(Value::String(method)) = object.remove("method") else {
            return Err(wrong("it has no method, or a method that is not a string".into()));
        };
        let params = object.remove("params").unwrap_or_else(|| Value::Object(Map::new()));
        if let Some((key, _)) = object.iter().next() {
            return Err(wrong(format!("a request has no member '{key}'")));
        }
        Ok(Self { id: id_of(line), method, params })
    }
}

/// The id of a request as it is written: a number may exceed the number types of this program.
fn id_of(line: &[u8]) -> Option<String> {
    // Without an id, reading it fails.
    #[derive(Deserialize)]
    struct Id<'a> {
        #[serde(borrow)]
        id: &'a RawValue,
    }
    serde_json::from_slice::<Id<'_>>(line).ok().map(|it| it.id.get().to_owned())
}

/// An answer, with the end of its line. It is safe for a terminal, on which `socat` shows it.
pub(super) fn answer_line(id: Option<&str>, result: Result<Value, RpcError>) -> String {
    let (id, version) = (id.unwrap_or("null"), r#""jsonrpc":"2.0""#);
    escape_json(match result {
        Ok(result) => format!("{{{version},\"id\":{id},\"result\":{result}}}\n"),
        Err(problem) => format!("{{{version},\"id\":{id},\"error\":{}}}\n", json!(problem)),
    })
}

/// A notification of an event, with the end of its line.
pub(super) fn event_line(event: &ExportEvent) -> String {
    let event = json!({ "jsonrpc": "2.0", "method": "event", "params": event });
    escape_json(format!("{event}\n"))
}

/// Reads a value from a text.
///
/// # Errors
///
/// When the text is no JSON, or an object in it repeats a key.
pub(super) fn read_unique(text: &[u8]) -> serde_json::Result<Value> {
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let value = UniqueKeys.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(value)
}

struct UniqueKeys;

impl<'de> DeserializeSeed<'de> for UniqueKeys {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for UniqueKeys {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(UniqueKeys)? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Value, A::Error> {
        let mut values = Map::new();
        while let Some(key) = object.next_key::<String>()? {
            if values.contains_key(&key) {
                return Err(A::Error::custom(format!("the key '{key}' occurs twice")));
            }
            let value = object.next_value_seed(UniqueKeys)?;
            values.insert(key, value);
        }
        Ok(Value::Object(values))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::subscribers::EventDetails;
    use crate::spec::UnitPlace;
    use crate::spec::command::ExportState;

    #[test]
    fn requests_are_read_and_others_are_refused() {
        let good = br#"{"jsonrpc": "2.0", "id": 7, "method": "ping", "params": {"a": 1}}"#;
        let request = Request::parse(good).unwrap();
        assert_eq!((request.id.as_deref(), &*request.method), (Some("7"), "ping"));
        assert_eq!(request.params, json!({ "a": 1 }));
        let notification = Request::parse(br#"{"jsonrpc": "2.0", "method": "ping"}"#).unwrap();
        assert_eq!((notification.id, notification.params), (None, json!({})));
        for (bad, code) in [
            (&b"{"[..], Code::NoJson),
            (b"\xff", Code::NoJson),
            (b"[]", Code::NoRequest),
            (br#"{"id": 1, "method": "ping"}"#, Code::NoRequest),
            (br#"{"jsonrpc": "1.0", "id": 1, "method": "ping"}"#, Code::NoRequest),
            (br#"{"jsonrpc": "2.0", "id": 1, "method": 3}"#, Code::NoRequest),
            (br#"{"jsonrpc": "2.0", "id": {}, "method": "ping"}"#, Code::NoRequest),
            (br#"{"jsonrpc": "2.0", "id": [1], "method": "ping"}"#, Code::NoRequest),
            (br#"{"jsonrpc": "2.0", "id": true, "method": "ping"}"#, Code::NoRequest),
            (br#"{"jsonrpc": "2.0", "id": 1, "method": "ping", "x": 1}"#, Code::NoRequest),
            (br#"{"jsonrpc": "2.0", "id": 1, "id": 2, "method": "ping"}"#, Code::NoJson),
        ] {
            let (_, problem) = Request::parse(bad).unwrap_err();
            assert_eq!(problem.code, code as i32, "{}", String::from_utf8_lossy(bad));
        }
        let (id, _) = Request::parse(br#"{"id": 3, "method": "ping"}"#).unwrap_err();
        assert_eq!(id.as_deref(), Some("3"), "the client knows which request it was");
        for id in ["1234567890123456789012", "-0.10", r#""a\u00e4""#, "null"] {
            let line = format!(r#"{{"jsonrpc": "2.0", "id": {id}, "method": "ping"}}"#);
            let request = Request::parse(line.as_bytes()).unwrap();
            assert_eq!(request.id.as_deref(), Some(id));
        }
    }

    /// Programs decide by the code, and an upgrade by the last column, whether to try again.
    #[test]
    fn each_error_of_a_command_has_its_code() {
        use CommandError as E;
        let (name, place) = (|| "vm".to_owned(), UnitPlace { target: 0, lun: 1 });
        let why = || anyhow::anyhow!("why");
        for (error, code, is_transient) in [
            (E::Exists(name()), Code::Exists, false),
            (E::Unknown(name()), Code::Unknown, false),
            (E::Busy(name(), ExportState::Opening), Code::Busy, true),
            (E::NotEnded(name(), String::new()), Code::Unfinished, false),
            (E::NoUnits(name()), Code::WrongKind, false),
            (E::NoTurns(name()), Code::WrongKind, false),
            (E::NoDisk(name()), Code::WrongKind, false),
            (E::UnitExists(name(), place), Code::Exists, false),
            (E::UnitBusy(name(), place), Code::Busy, true),
            (E::UnitBeingCancelled(name(), place), Code::Busy, true),
            (E::UnitCancelled(name(), place), Code::Busy, false),
            (E::DiskBusy(name()), Code::Busy, true),
            (E::Cancelled(name()), Code::Busy, false),
            (E::UnknownUnit(name(), place), Code::Unknown, false),
            (E::HandingOver, Code::Busy, true),
            (E::HandedOver(7), Code::Ending, false),
            (E::Changed, Code::Busy, true),
            (E::NotPaused(String::new()), Code::Busy, true),
            (E::NotNow(why()), Code::Busy, true),
            (E::UpgradeLater(String::new()), Code::UpgradeLater, false),
            (E::UpgradeRefused(String::new()), Code::UpgradeRefused, false),
            (E::NotSaved(why()), Code::NotKept, false),
            (E::Forgotten(name()), Code::Unknown, false),
            (E::Ending, Code::Ending, false),
            (E::Invalid(why()), Code::Params, false),
            (E::Failed(why()), Code::Failed, false),
        ] {
            assert_eq!(error.is_transient(), is_transient, "{error:?}");
            let text = error.to_string();
            assert_eq!(RpcError::from(error), RpcError::new(code, text));
        }
    }

    #[test]
    fn an_error_tells_no_secret() {
        let told = RpcError::new(Code::Failed, "cannot open nbd://user:secret@host/x");
        assert!(!told.message.contains("secret"), "{}", told.message);
    }

    #[test]
    fn answers_are_one_line() {
        let good = answer_line(Some(r#""a""#), Ok(json!({ "text": "one\ntwo" })));
        assert_eq!(good.matches('\n').count(), 1);
        let value: Value = serde_json::from_str(&good).unwrap();
        assert_eq!((&value["id"], &value["result"]["text"]), (&json!("a"), &json!("one\ntwo")));
        let bad = answer_line(None, Err(RpcError::new(Code::Unknown, "none")));
        let value: Value = serde_json::from_str(&bad).unwrap();
        assert_eq!((&value["id"], &value["error"]["code"]), (&Value::Null, &json!(2)));
    }

    /// A terminal takes U+009B for the start of a command.
    #[test]
    fn lines_have_no_control_characters() {
        let (text, details) = ("a\u{9b}31m\u{7f}\u{1b}", EventDetails::Added);
        let event = ExportEvent { export: text.to_owned(), details };
        for line in [
            answer_line(Some("1"), Ok(json!(text))),
            answer_line(None, Err(RpcError::new(Code::Unknown, text))),
            event_line(&event),
        ] {
            let value: Value = serde_json::from_str(&line).unwrap();
            let found = [&value["result"], &value["error"]["message"], &value["params"]["export"]];
            assert!(found.into_iter().any(|found| found == text), "{line:?}");
            assert!(!line.trim_end().contains(char::is_control), "{line:?}");
        }
    }
}

#[cfg(test)]
mod unique_keys_tests {
    use super::*;

    #[test]
    fn keys_are_named_once() {
        let all = r#"{"a": [null, true, -1, 18446744073709551615, 0.5, "x\n"], "b": {"a": {}}}"#;
        assert_eq!(
            read_unique(all.as_bytes()).unwrap(),
            serde_json::from_str::<Value>(all).unwrap()
        );
        for bad in [r#"{"a": 1, "a": 1}"#, r#"{"a": [{"b": 1, "c": 2, "b": 3}]}"#, "{} {}", "{"] {
            assert!(read_unique(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
