//! JSON Schemas of the types that are read and written.

use schemars::JsonSchema;
use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde_json::{Map, Value};

/// The suffix of the names of definitions for written types. Types that are read may take more.
const WRITTEN: &str = "-written";

/// Generates schemas. Only types that contain themselves get a definition; the rest are inlined.
pub(super) struct Schemas {
    read: SchemaGenerator,
    written: SchemaGenerator,
}

impl Schemas {
    pub(super) fn new() -> Self {
        let settings =
            || SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
        let (read, written) = (settings().for_deserialize(), settings().for_serialize());
        Self { read: read.into_generator(), written: written.into_generator() }
    }

    /// The schema of a type that is read.
    pub(super) fn read<T: JsonSchema>(&mut self) -> Value {
        plain(self.read.subschema_for::<T>().to_value())
    }

    /// The schema of a type that is written.
    pub(super) fn written<T: JsonSchema>(&mut self) -> Value {
        point_to_written(self.written.subschema_for::<T>().to_value())
    }

    /// The definitions that the schemas refer to.
    pub(super) fn definitions(mut self) -> Map<String, Value> {
        let read = self.read.take_definitions(true).into_iter();
        let written = self.written.take_definitions(true).into_iter();
        let written = written.map(|(name, schema)| (name + WRITTEN, point_to_written(schema)));
        read.map(|(name, schema)| (name, plain(schema))).chain(written).collect()
    }
}

/// Translates descriptions of Rust types: `None` is null in JSON, and links have
/// no meaning there.
fn plain(mut schema: Value) -> Value {
    change_texts(&mut schema, &|key, text| {
        if key == "description" {
            *text = text.replace("`None`", "null").replace("[`", "`").replace("`]", "`");
        }
    });
    schema
}

/// Like [`plain`], for a schema that refers to definitions of written types.
fn point_to_written(mut schema: Value) -> Value {
    change_texts(&mut schema, &|key, text| {
        if key == "$ref" {
            text.push_str(WRITTEN);
        }
    });
    plain(schema)
}

/// Changes all texts, by their keys.
fn change_texts(schema: &mut Value, change: &impl Fn(&str, &mut String)) {
    match schema {
        Value::Object(object) => {
            for (key, value) in object {
                match value {
                    Value::String(text) => change(key, text),
                    other => change_texts(other, change),
                }
            }
        }
        Value::Array(array) => array.iter_mut().for_each(|value| change_texts(value, change)),
        _ => {}
    }
}
