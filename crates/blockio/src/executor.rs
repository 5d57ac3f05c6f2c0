//! Tasks, their wakers, messages from other threads, and the means to wait for one another: a fair
//! semaphore, a notify, a lock and turns. Knows no I/O.

pub(crate) mod mailbox;
#[cfg(all(test, any(loom, shuttle)))]
pub(crate) mod model_tests;
pub(crate) mod notify;
pub mod oneshot;
pub(crate) mod os_thread;
pub(crate) mod semaphore;
pub(crate) mod sync;
pub(crate) mod task;
pub(crate) mod turns;
pub(crate) mod wait_list;

pub use notify::Notify;
pub use os_thread::{ThreadStarter, set_thread_starter, start_thread};
pub use semaphore::FairSemaphore;
pub use sync::Lock;
pub use turns::Turns;
