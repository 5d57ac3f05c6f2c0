//! The fields of events and spans.

use std::fmt::{self, Write as _};

use tracing::field::{Field, Visit};

/// The fields of an event.
#[derive(Default)]
pub(super) struct Fields {
    pub(super) message: String,
    pub(super) export: Option<String>,
    pub(super) left_out: u64,
}

impl Fields {
    fn set(&mut self, field: &Field, value: &dyn fmt::Display) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value}"),
            "export" => write!(self.export.get_or_insert_default(), "{value}"),
            name => write!(self.message, " {name}={value}"),
        };
    }
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "left_out" {
            self.left_out = value;
        } else {
            self.set(field, &value);
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field, &value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.set(field, &format_args!("{value:?}"));
    }
}
