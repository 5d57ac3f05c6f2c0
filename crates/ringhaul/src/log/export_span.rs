//! Spans of exports: lines about a disk get the name of the export that the disk was opened for.
//!
//! The crates of disks do not know exports. They keep the span in which a disk was opened, and
//! enter it for lines about the disk.

use tracing::span::{Attributes, Id};
use tracing::{Span, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::FormatFields;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use super::fields::Fields;

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
