//! The failure of a run.

use std::cell::RefCell;
use std::fmt;

thread_local! {
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Keeps panics instead of printing them. A panic is a failure of the run, and is shown later,
/// together with the rest of the failure.
pub(crate) fn keep_panics() {
    std::panic::set_hook(Box::new(|info| PANIC.set(info.to_string())));
}

/// The message of the last panic on this thread.
pub(crate) fn panic_message() -> String {
    PANIC.take()
}

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
