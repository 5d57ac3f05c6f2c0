//! Backing files that an image may have.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use serde::{Deserialize, Deserializer, Serialize};

/// Separates the names of a list. The first part of a backing file's name has no colon, because the
/// part before it would be the scheme of a URI.
const SEPARATOR: char = ':';

/// Backing files that an image may have. The image itself names them, and may have come from
/// anywhere.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackingFiles {
    /// No backing files.
    #[default]
    None,
    /// All files in the folder of the image, and in folders inside.
    Beside,
    /// All files of this machine: the image is trusted.
    Anywhere,
    /// These files, including the backing files of backing files. Relative paths begin in the
    /// folder of the image.
    #[serde(untagged)]
    Named(Vec<PathBuf>),
}

impl BackingFiles {
    /// Reads the value of the key `backing`.
    ///
    /// # Errors
    ///
    /// When one of its names is empty.
    pub(super) fn parse(text: &str) -> Result<Self> {
        match text {
            "none" => return Ok(Self::None),
            "beside" => return Ok(Self::Beside),
            "anywhere" => return Ok(Self::Anywhere),
            _ => {}
        }
        ensure!(
            text.split(SEPARATOR).all(|name| !name.is_empty()),
            "'{text}' has an empty name (expected: none, beside, anywhere, or file names separated \
             by colons)"
        );
        Ok(Self::Named(text.split(SEPARATOR).map(PathBuf::from).collect()))
    }
}

/// The forms of a value in a table.
#[derive(Deserialize)]
#[serde(untagged, expecting = "none, beside, anywhere, or a list of files")]
enum Form {
    Text(String),
    Names(Vec<PathBuf>),
}

impl<'de> Deserialize<'de> for BackingFiles {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Form::deserialize(deserializer)? {
            Form::Text(text) => Self::parse(&text).map_err(serde::de::Error::custom),
            Form::Names(names) => Ok(Self::Named(names)),
        }
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for BackingFiles {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "BackingFiles".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "description": "The files that the image may name as its backing files: none, all \
                            files in its folder, files anywhere, or a list of files. Paths in the \
                            list are relative to the folder of the image.",
            "oneOf": [
                { "type": "string", "enum": ["none", "beside", "anywhere"] },
                { "type": "array", "items": { "type": "string" } },
            ],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_names_are_read_in_both_forms() {
        let named = |names: &[&str]| BackingFiles::Named(names.iter().map(PathBuf::from).collect());
        for (text, expected, json) in [
            ("none", BackingFiles::None, r#""none""#),
            ("beside", BackingFiles::Beside, r#""beside""#),
            ("anywhere", BackingFiles::Anywhere, r#""anywhere""#),
            ("base.img", named(&["base.img"]), r#"["base.img"]"#),
            ("./none:/a/b", named(&["./none", "/a/b"]), r#"["./none","/a/b"]"#),
        ] {
            let read = BackingFiles::parse(text).unwrap();
            assert_eq!(read, expected);
            assert_eq!(serde_json::to_string(&read).unwrap(), json);
            assert_eq!(serde_json::from_str::<BackingFiles>(json).unwrap(), expected);
        }
        for text in ["", ":a", "a::b", "a:"] {
            let error = BackingFiles::parse(text).unwrap_err().to_string();
            assert!(error.contains("has an empty name"), "{error}");
        }
        let error = serde_json::from_str::<BackingFiles>("3").unwrap_err().to_string();
        assert!(error.contains("or a list of files"), "{error}");
    }
}
