//! Threads that may make rings of io_uring.
//!
//! A thread inherits the denials of the thread that starts it, and every thread of a confined
//! daemon is denied new rings. One thread without that denial starts the few that need rings.

use std::io;
use std::sync::{OnceLock, mpsc};
use std::thread::{Builder, JoinHandle};

/// A thread to be started.
struct Order {
    name: String,
    work: Box<dyn FnOnce() + Send>,
    started: mpsc::Sender<io::Result<JoinHandle<()>>>,
}

static STARTER: OnceLock<mpsc::Sender<Order>> = OnceLock::new();

/// Starts the thread that starts the others. It has the denials of the calling thread.
///
/// # Errors
///
/// When the kernel has no thread left.
pub(super) fn begin() -> io::Result<()> {
    let (orders, received) = mpsc::channel::<Order>();
    let start_all = move || {
        for Order { name, work, started } in received {
            // The receiver waits for the answer.
            let _ = started.send(Builder::new().name(name).spawn(work));
        }
    };
    Builder::new().name("ringhaul-starts".into()).spawn(start_all)?;
    // A process is confined once.
    let _ = STARTER.set(orders);
    Ok(())
}

/// Starts a thread that may make rings. Without a sandbox every thread may.
///
/// # Errors
///
/// When the kernel has no thread left.
pub(crate) fn spawn(
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let Some(starter) = STARTER.get() else {
        return Builder::new().name(name.to_owned()).spawn(work);
    };
    let (started, answer) = mpsc::channel();
    let order = Order { name: name.to_owned(), work: Box::new(work), started };
    let gone = || io::Error::other("the thread that starts IoThreads has ended");
    starter.send(order).map_err(|_| gone())?;
    answer.recv().map_err(|_| gone())?
}
