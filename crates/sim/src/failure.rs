//! The failure of a run.

use std::fmt;

/// A failure of a run.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    /// A few words that are the same for runs that fail in the same way.
    pub(crate) kind: &'static str,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(kind: &'static str, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.text)
    }
}
