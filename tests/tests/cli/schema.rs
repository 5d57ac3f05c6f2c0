//! A check of values against JSON Schemas, limited to the keywords in the daemon's schemas.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};

/// Keywords that restrict no value.
const REMARKS: [&str; 4] = ["$schema", "description", "default", "format"];

/// Checks a value against a part of a document.
pub(crate) fn check(document: &Value, schema: &Value, value: &Value) -> Result<()> {
    let object = match schema {
        Value::Bool(true) => return Ok(()),
        Value::Object(object) => object,
        _ => bail!("{schema} allows nothing"),
    };
    for (keyword, rule) in object {
        check_keyword(document, object, (keyword, rule), value)
            .with_context(|| format!("{keyword} of {value}"))?;
    }
    Ok(())
}

fn check_keyword(
    document: &Value,
    schema: &Map<String, Value>,
    (keyword, rule): (&str, &Value),
    value: &Value,
) -> Result<()> {
    let properties = || schema.get("properties").and_then(Value::as_object);
    let all = || rule.as_array().context("it is no list");
    let fits = |schema: &&Value| check(document, schema, value).is_ok();
    match keyword {
        _ if REMARKS.contains(&keyword) => {}
        "$ref" => {
            let place = rule.as_str().and_then(|rule| rule.strip_prefix('#'));
            let target = place.and_then(|place| document.pointer(place));
            check(document, target.context("it leads nowhere")?, value)?;
        }
        "type" => {
            let types = rule.as_array().map_or(vec![rule], |types| types.iter().collect());
            ensure!(types.iter().any(|name| is_of_type(value, name)), "it is no {rule}");
        }
        "const" => ensure!(value == rule, "it is not {rule}"),
        "enum" => ensure!(all()?.contains(value), "it is not in {rule}"),
        // These keywords concern only numbers or objects.
        "minimum" | "maximum" if !value.is_number() => {}
        "required" if !value.is_object() => {}
        "minimum" => ensure!(value.as_f64() >= rule.as_f64(), "it is below {rule}"),
        "maximum" => ensure!(value.as_f64() <= rule.as_f64(), "it is above {rule}"),
        "anyOf" => ensure!(all()?.iter().any(|schema| fits(&schema)), "none fits"),
        "oneOf" => ensure!(all()?.iter().filter(fits).count() == 1, "not one fits"),
        "items" => {
            let mut values = value.as_array().into_iter().flatten();
            values.try_for_each(|value| check(document, rule, value))?;
        }
        "required" => {
            let lacks = |key: &&Value| value.get(key.as_str().unwrap_or_default()).is_none();
            ensure!(!all()?.iter().any(|key| lacks(&key)), "it lacks some of {rule}");
        }
        "properties" => {
            for (key, schema) in properties().into_iter().flatten() {
                if let Some(value) = value.get(key) {
                    check(document, schema, value).with_context(|| key.clone())?;
                }
            }
        }
        "additionalProperties" => {
            let known = |key: &str| properties().is_some_and(|all| all.contains_key(key));
            for (key, value) in value.as_object().into_iter().flatten() {
                ensure!(known(key) || check(document, rule, value).is_ok(), "{key} is not known");
            }
        }
        other => bail!("this check does not know {other}"),
    }
    Ok(())
}

fn is_of_type(value: &Value, name: &Value) -> bool {
    match name.as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.is_u64() || value.is_i64(),
        Some("number") => value.is_number(),
        Some("null") => value.is_null(),
        _ => false,
    }
}
