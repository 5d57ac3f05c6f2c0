//! The start of threads of the operating system.

use std::io;
use std::sync::OnceLock;
use std::thread::{Builder, JoinHandle};

/// Starts a thread with this name for this work.
pub type ThreadStarter = fn(&str, Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>;

/// The starter of a process whose threads differ in their rights.
static STARTER: OnceLock<ThreadStarter> = OnceLock::new();

/// Has `start` start all further threads of this process for [`start_thread`]: the name of a thread
/// may decide about its rights. The threads of a pool are no such threads. Their IoThread starts
/// them, and they inherit its rights and its time slice. The first call counts.
pub fn set_thread_starter(start: ThreadStarter) {
    let _ = STARTER.set(start);
}

/// Starts a thread.
///
/// # Errors
///
/// When the kernel has no thread left.
pub fn start_thread(
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    match STARTER.get() {
        Some(start) => start(name, Box::new(work)),
        None => Builder::new().name(name.to_owned()).spawn(work),
    }
}
