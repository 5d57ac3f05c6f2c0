//! The vhost-user session, driven by hand: with a clock of the test's own, and IoThreads that run
//! only when the test lets them. Messages are checked against the `vhost` crate's.

#[cfg(test)]
mod lock;
#[cfg(test)]
mod log;
mod memory;
#[cfg(test)]
mod oracle;
#[cfg(test)]
mod scene;
#[cfg(test)]
mod session;
