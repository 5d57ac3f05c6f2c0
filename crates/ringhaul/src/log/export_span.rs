//! The fields of events, and spans of exports: lines about a disk get the name of the export that
//! the disk was opened for.
//!
//! The crates of disks do not know exports. They keep the span in which a disk was opened, and
//! enter it for lines about the disk.

use std::fmt::{self, Write as _};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Span, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::FormatFields;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// The target of spans.
const TARGET: &str = "ringhaul::log::export_span";

/// The span of the export with this name. An export without a name has none.
pub(crate) fn export_span(export: &str) -> Span {
    if export.is_empty() {
        return Span::none();
    }
    tracing::error_span!(target: TARGET, "export", export)
}

/// Returns a filter that suppresses no span: a span that a filter has suppressed would be absent
/// after the next change of the filter.
pub(super) fn with_spans(filter: Targets) -> Targets {
    filter.with_target(TARGET, LevelFilter::ERROR)
}

/// Keeps the names in the spans.
pub(super) struct ExportNames;

struct ExportName(String);

impl<S: Subscriber + for<'span> LookupSpan<'span>> Layer<S> for ExportNames {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let (Some(name), Some(span)) = (fields.export, context.span(id)) {
            span.extensions_mut().insert(ExportName(name));
        }
    }
}

/// The name of the export around an event.
pub(super) fn current_export<S, N>(context: &FmtContext<'_, S, N>) -> Option<String>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    N: for<'writer> FormatFields<'writer> + 'static,
{
    let name_of = |span: tracing_subscriber::registry::SpanRef<'_, S>| {
        span.extensions().get::<ExportName>().map(|name| name.0.clone())
    };
    context.event_scope()?.find_map(name_of)
}

/// The fields of an event or a span.
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
