//! The start of the threads of a confined daemon, each with the rights of its work.
//!
//! A thread inherits the denials of the thread that starts it. So one thread without a table of
//! calls (`tables.rs`) starts all others, and each of them enters its own table before its work
//! begins. Pool threads are an exception: their IoThread starts them, and they inherit its table.

use std::io;
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::{Builder, JoinHandle};

use anyhow::{Context, Result};
use blockio::executor::{Lock, set_thread_starter};
use seccompiler::{BpfProgram, apply_filter};

use super::calls;
use super::rules::Rules;
use super::tables::{TABLES, Table};
use super::unlisted::{self, Reaction};

/// The work of a thread, until the thread takes it. If no thread can be started, the caller drops
/// the work, because the thread that starts the others must not wait for a disk.
type Work = Arc<Lock<Option<Box<dyn FnOnce() + Send>>>>;

/// A thread to be started.
struct Order {
    name: String,
    work: Work,
    started: mpsc::Sender<io::Result<JoinHandle<()>>>,
}

/// The rights of threads.
struct Rights {
    reaction: Reaction,
    /// The filters of [`TABLES`]. `None`: the threads of that table have none.
    filters: Vec<Option<BpfProgram>>,
}

static RIGHTS: OnceLock<Rights> = OnceLock::new();
static STARTER: OnceLock<mpsc::Sender<Order>> = OnceLock::new();

/// Starts the thread that starts the others. It has the denials of the calling thread. Returns the
/// reason if threads get no tables.
///
/// # Errors
///
/// When the kernel has no thread left.
pub(super) fn begin(rules: &Rules, reaction: Reaction) -> Result<Option<String>> {
    let filter = |table: &Table| {
        // Ceph's libraries run in threads that use disks.
        let is_applied = !(table.uses_disks && rules.has_libraries);
        is_applied.then(|| calls::only(table.calls(), reaction.action())).transpose()
    };
    let filters = TABLES.iter().map(filter).collect::<Result<Vec<_>>>();
    let prepared = filters.and_then(|filters| unlisted::catch(reaction).map(|()| filters));
    let (filters, lacks) = match prepared {
        Ok(filters) => (filters, None),
        Err(error) => (TABLES.iter().map(|_| None).collect(), Some(format!("{error:#}"))),
    };
    let (orders, received) = mpsc::channel();
    Builder::new()
        .name("ringhaul-starts".into())
        .spawn(move || start_all(received))
        .context("cannot start the thread that starts the others")?;
    // A process is confined once.
    let _ = RIGHTS.set(Rights { reaction, filters });
    let _ = STARTER.set(orders);
    set_thread_starter(start);
    if lacks.is_none() && reaction != Reaction::KernelLog {
        unlisted::start_report(reaction).context("cannot start the thread that reports calls")?;
    }
    Ok(lacks)
}

fn start_all(orders: mpsc::Receiver<Order>) {
    for Order { name, work, started } in orders {
        let of_thread = name.clone();
        let run = move || {
            enter(&of_thread);
            let taken = work.lock().take();
            if let Some(work) = taken {
                work();
            }
        };
        // The receiver waits for the answer.
        let _ = started.send(Builder::new().name(name).spawn(run));
    }
}

/// Starts a thread.
fn start(name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
    let gone = || io::Error::other("the thread that starts the others has ended");
    let work = Arc::new(Lock::new(Some(work)));
    let (started, answer) = mpsc::channel();
    let order = Order { name: name.to_owned(), work: Arc::clone(&work), started };
    STARTER.get().ok_or_else(gone)?.send(order).map_err(|_| gone())?;
    answer.recv().map_err(|_| gone())?
}

/// Returns true if threads have denials.
pub(super) fn are_denied() -> bool {
    RIGHTS.get().is_some_and(|rights| rights.reaction != Reaction::KernelLog)
}

/// Allows this thread the calls of its table alone, and no ring of io_uring if it has no table.
/// Does nothing without a sandbox.
pub(crate) fn enter(name: &str) {
    let Some(Rights { reaction, filters }) = RIGHTS.get() else { return };
    let index = TABLES.iter().position(|table| table.is_of(name));
    let entered = match index.and_then(|index| filters[index].as_ref()) {
        Some(filter) => apply_filter(filter).context("cannot restrict its system calls"),
        None if *reaction == Reaction::KernelLog => Ok(()),
        // As long as the thread may make rings, so may its descendants.
        None if index.is_some_and(|index| TABLES[index].makes_rings()) => Ok(()),
        None => calls::deny_rings(),
    };
    if let Err(error) = entered {
        tracing::warn!("the sandbox of the thread {name} is incomplete: {error:#}");
    }
}
