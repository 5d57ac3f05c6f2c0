//! Errors about parameters in the words of a user, in place of those of the parser.

const SCHEMA: &str = "`ringhaul ctl schema` has all parameters";

/// The parser's words for a value that must name one of several kinds, and does not.
const NO_KIND: [&str; 3] = [
    "invalid type: map, expected enum",
    "invalid value: map, expected map with a single key",
    "invalid type: unit variant, expected newtype variant",
];

/// Rewords an error about parameters.
pub(super) fn reword(error: &str) -> String {
    if NO_KIND.contains(&error) {
        return format!("it has no kind: write an object with one key, the kind; {SCHEMA}");
    }
    if error.starts_with("missing field") {
        return format!("{error}; {SCHEMA}");
    }
    if let Some(rest) = error.strip_prefix("unknown variant ") {
        return format!("unknown word {rest}");
    }
    if error.starts_with("invalid length") {
        return format!("it has more keys than its kind takes; {SCHEMA}");
    }
    let wrong = error.strip_prefix("invalid type: ").or(error.strip_prefix("invalid value: "));
    // A text may contain the separator, and so may the found value alone.
    match wrong.and_then(|wrong| wrong.rsplit_once(", expected ")) {
        Some((found, expected)) => {
            format!("expected {}, not {}", expected_value(expected), found_value(found))
        }
        None => error.to_owned(),
    }
}

/// The value that the parser found.
fn found_value(found: &str) -> String {
    let quoted = |value: &str| value.trim_matches('`').to_owned();
    match found.split_once(' ') {
        Some(("string", text)) => format!("the text {text}"),
        Some(("integer" | "boolean", value)) => quoted(value),
        Some(("floating", rest)) => quoted(rest.trim_start_matches("point ")),
        _ => match found {
            "map" => "an object".to_owned(),
            "sequence" => "a list".to_owned(),
            other => other.to_owned(),
        },
    }
}

/// The value that the parser expected. A type of ours has its own words.
fn expected_value(expected: &str) -> String {
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
                "a map" | "map" => "an object",
                "enum" | "string or map" | "variant identifier" => "one of its words",
                name if is_type(name) => "an object",
                other => other,
            }
            .to_owned();
        }
    };
    format!("a whole number from {smallest} to {largest}")
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
    fn of<T: DeserializeOwned>(value: Value) -> String {
        let error = serde_json::from_value::<T>(value).err().expect("the value is refused");
        reword(&error.to_string())
    }

    #[test]
    fn errors_have_words_of_a_user() {
        for (said, expected) in [
            (
                of::<u16>(json!("64")),
                "expected a whole number from 0 to 65535, not the text \"64\"",
            ),
            (of::<u16>(json!(70_000)), "expected a whole number from 0 to 65535, not 70000"),
            (of::<u8>(json!(-1)), "expected a whole number from 0 to 255, not -1"),
            (of::<u32>(json!(1.5)), "expected a whole number from 0 to 4294967295, not 1.5"),
            (of::<u64>(json!(null)), "expected a whole number of 0 or more, not null"),
            (of::<NonZeroU32>(json!(0)), "expected a whole number from 1 to 4294967295, not 0"),
            (of::<bool>(json!("on")), "expected true or false, not the text \"on\""),
            (of::<bool>(json!(1)), "expected true or false, not 1"),
            (of::<String>(json!(true)), "expected text, not true"),
            (of::<String>(json!([])), "expected text, not a list"),
            (of::<PathBuf>(json!(1)), "expected a path, not 1"),
            (of::<f64>(json!("1")), "expected a number, not the text \"1\""),
            (of::<Vec<u8>>(json!({})), "expected a list, not an object"),
            (
                of::<Disk>(json!("a, expected b")),
                "expected an object, not the text \"a, expected b\"",
            ),
            (of::<Kind>(json!(1)), "expected one of its words, not 1"),
            (of::<Kind>(json!("x")), "unknown word `x`, expected `plain` or `blk`"),
            (
                of::<Kind>(json!({})),
                &format!("it has no kind: write an object with one key, the kind; {SCHEMA}"),
            ),
            (of::<Kind>(json!({ "blk": {} })), &format!("missing field `path`; {SCHEMA}")),
            (of::<Disk>(json!({ "x": 1 })), "unknown field `x`, expected `path`"),
        ] {
            assert_eq!(said, expected);
        }
    }
}
