//! Errors about values in the words of a user, in place of the parser's words.

/// Rewords an error about the syntax of the configuration file.
pub(crate) fn reword_syntax(error: &str) -> String {
    let words = match error {
        "invalid basic string, expected `\"`" | "invalid literal string, expected `'`" => {
            "the text has no end: close its quotes on the same line"
        }
        "string values must be quoted, expected literal string" => {
            "the value is missing, or is text without quotes; write text in quotes, as in \"none\""
        }
        // The parser takes an unquoted word for a number.
        _ if error.starts_with("invalid float") => {
            "the value is no number; write text in quotes, as in \"none\""
        }
        "duplicate key" => "this key occurs twice; leave one of them out",
        _ => return error.replace('\n', "; "),
    };
    words.to_owned()
}

/// The words of a format.
pub(crate) struct Words {
    object: &'static str,
    key: &'static str,
    /// The place that describes all keys.
    remedy: &'static str,
}

/// The words of parameters in JSON.
pub(crate) const PARAMETERS: Words =
    Words { object: "an object", key: "field", remedy: "`ringhaul ctl schema` has all parameters" };

/// The words of the configuration file.
pub(crate) const FILE: Words =
    Words { object: "a table", key: "key", remedy: "`man ringhaul.toml` has all keys" };

/// The parser's words for a value that must name one of several kinds, and does not.
const NO_KIND: [&str; 4] = [
    "invalid type: map, expected enum",
    "invalid value: map, expected map with a single key",
    "invalid type: unit variant, expected newtype variant",
    "wanted exactly 1 element, found 0 elements",
];

/// The parser's words for a value with several kinds where one belongs.
const SEVERAL_KINDS: &str = "wanted exactly 1 element, more than 1 element";

/// The parser's words for a value that is no name of a kind, and has none as its key.
const NO_NAME: &str = "wanted string or table";

impl Words {
    /// Rewords an error of the parser.
    pub(crate) fn reword(&self, error: &str) -> String {
        let Self { object, key, remedy } = self;
        if NO_KIND.contains(&error) {
            return format!("it has no kind: write {object} with one key, the kind; {remedy}");
        }
        if let Some(name) = error.strip_prefix("missing field ") {
            return format!("missing {key} {name}; {remedy}");
        }
        if let Some(rest) = error.strip_prefix("unknown field ") {
            return format!("unknown {key} {rest}");
        }
        if let Some(rest) = error.strip_prefix("unknown variant ") {
            return format!("unknown word {rest}");
        }
        if error.starts_with("invalid length") || error == SEVERAL_KINDS {
            return format!("it has more keys than its kind takes; {remedy}");
        }
        if error == NO_NAME {
            return format!("expected one of its words, or {object} with one as its key; {remedy}");
        }
        self.reword_value(error)
    }

    /// Rewords an error about a single value.
    fn reword_value(&self, error: &str) -> String {
        let wrong = error.strip_prefix("invalid type: ").or(error.strip_prefix("invalid value: "));
        // A text may contain the separator, and so may the found value alone.
        match wrong.and_then(|wrong| wrong.rsplit_once(", expected ")) {
            Some((found, expected)) => {
                format!(
                    "expected {}, not {}",
                    self.expected_value(expected),
                    self.found_value(found)
                )
            }
            None => error.to_owned(),
        }
    }

    /// The value that the parser found.
    fn found_value(&self, found: &str) -> String {
        let quoted = |value: &str| value.trim_matches('`').to_owned();
        match found.split_once(' ') {
            Some(("string", text)) => format!("the text {text}"),
            Some(("integer" | "boolean", value)) => quoted(value),
            Some(("floating", rest)) => quoted(rest.trim_start_matches("point ")),
            _ => match found {
                "map" => self.object.to_owned(),
                "sequence" => "a list".to_owned(),
                other => other.to_owned(),
            },
        }
    }

    /// The value that the parser expected. A type of ours has its own words.
    fn expected_value(&self, expected: &str) -> String {
        let (smallest, number) = match expected.strip_prefix("a nonzero ") {
            Some(number) => (1, number),
            None => (0, expected),
        };
        let largest = match number {
            "u8" => u64::from(u8::MAX),
            "u16" => u64::from(u16::MAX),
            "u32" => u64::from(u32::MAX),
            "u64" | "usize" => return format!("a whole number of {smallest} or more"),
            _ => {
                return match expected {
                    "a string" | "string" => "text",
                    "path string" => "a path",
                    "a boolean" => "true or false",
                    "f64" => "a number",
                    "a sequence" => "a list",
                    "a map" | "map" => self.object,
                    "enum" | "string or map" | "variant identifier" => "one of its words",
                    name if is_type(name) => self.object,
                    other => other,
                }
                .to_owned();
            }
        };
        format!("a whole number from {smallest} to {largest}")
    }
}

/// Returns true if the parser names a type of the program.
fn is_type(expected: &str) -> bool {
    ["struct ", "enum ", "internally tagged enum "].iter().any(|kind| expected.starts_with(kind))
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::path::PathBuf;

    use serde::Deserialize;
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "kebab-case", deny_unknown_fields)]
    enum Kind {
        Plain,
        Blk(#[expect(dead_code, reason = "only errors matter")] Disk),
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Disk {
        #[serde(rename = "path")]
        _path: String,
    }

    /// The words for a value that is no `T`.
    fn words_for<T: DeserializeOwned>(value: Value) -> String {
        let error = serde_json::from_value::<T>(value).err().expect("the value is refused");
        PARAMETERS.reword(&error.to_string())
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Export {
        #[serde(rename = "kind")]
        _kind: Kind,
        #[serde(rename = "queues", default)]
        _queues: u16,
        #[serde(rename = "list", default)]
        _list: Vec<u8>,
    }

    #[test]
    fn errors_of_a_file_have_words_of_a_user() {
        let remedy = FILE.remedy;
        let no_kind = format!("it has no kind: write a table with one key, the kind; {remedy}");
        for (text, expected) in [
            ("", &*format!("missing key `kind`; {remedy}")),
            ("kind = {}", &no_kind),
            ("kind = 1", "expected one of its words, or a table with one as its key"),
            ("kind = \"x\"", "unknown word `x`, expected `plain` or `blk`"),
            ("kind = { blk = 1 }", "expected a table, not 1"),
            ("kind = { blk = {} }", &format!("missing key `path`; {remedy}")),
            ("kind = { blk = { path = 1.5 } }", "expected text, not 1.5"),
            ("kind = { plain = 1, blk = 2 }", "it has more keys than its kind takes"),
            (
                "kind = \"plain\"\nqueues = \"4\"",
                "expected a whole number from 0 to 65535, not the text \"4\"",
            ),
            (
                "kind = \"plain\"\nqueues = 70000",
                "expected a whole number from 0 to 65535, not 70000",
            ),
            ("kind = \"plain\"\nlist = { a = 1 }", "expected a list, not a table"),
            ("kinds = 1", "unknown key `kinds`, expected one of `kind`, `queues`, `list`"),
        ] {
            let error = toml::from_str::<Export>(text).expect_err("the text is refused");
            let said = FILE.reword(error.message());
            assert!(said.starts_with(expected), "{text}: {said} ({})", error.message());
        }
    }

    #[test]
    fn errors_of_syntax_have_words_of_a_user() {
        for (text, expected) in [
            ("a = ", "the value is missing"),
            ("a = maybe", "the value is missing, or is text without quotes"),
            ("a = none", "the value is no number; write text in quotes"),
            ("a = \"b", "the text has no end"),
            ("a = 'b\nc = 1", "the text has no end"),
            ("a = 1\na = 2", "this key occurs twice"),
            ("a", "key with no value, expected `=`"),
            ("[[a]", "unclosed array table, expected `]`"),
        ] {
            let error = toml::de::DeTable::parse(text).expect_err("the text is refused");
            let said = reword_syntax(error.message());
            assert!(said.starts_with(expected), "{text}: {said} ({})", error.message());
        }
    }

    #[test]
    fn errors_have_words_of_a_user() {
        let remedy = PARAMETERS.remedy;
        for (said, expected) in [
            (
                words_for::<u16>(json!("64")),
                "expected a whole number from 0 to 65535, not the text \"64\"",
            ),
            (words_for::<u16>(json!(70_000)), "expected a whole number from 0 to 65535, not 70000"),
            (words_for::<u8>(json!(-1)), "expected a whole number from 0 to 255, not -1"),
            (words_for::<u32>(json!(1.5)), "expected a whole number from 0 to 4294967295, not 1.5"),
            (words_for::<u64>(json!(null)), "expected a whole number of 0 or more, not null"),
            (
                words_for::<NonZeroU32>(json!(0)),
                "expected a whole number from 1 to 4294967295, not 0",
            ),
            (words_for::<bool>(json!("on")), "expected true or false, not the text \"on\""),
            (words_for::<bool>(json!(1)), "expected true or false, not 1"),
            (words_for::<String>(json!(true)), "expected text, not true"),
            (words_for::<String>(json!([])), "expected text, not a list"),
            (words_for::<PathBuf>(json!(1)), "expected a path, not 1"),
            (words_for::<f64>(json!("1")), "expected a number, not the text \"1\""),
            (words_for::<Vec<u8>>(json!({})), "expected a list, not an object"),
            (
                words_for::<Disk>(json!("a, expected b")),
                "expected an object, not the text \"a, expected b\"",
            ),
            (words_for::<Kind>(json!(1)), "expected one of its words, not 1"),
            (words_for::<Kind>(json!("x")), "unknown word `x`, expected `plain` or `blk`"),
            (
                words_for::<Kind>(json!({})),
                &format!("it has no kind: write an object with one key, the kind; {remedy}"),
            ),
            (words_for::<Kind>(json!({ "blk": {} })), &format!("missing field `path`; {remedy}")),
            (words_for::<Disk>(json!({ "x": 1 })), "unknown field `x`, expected `path`"),
        ] {
            assert_eq!(said, expected);
        }
    }
}
