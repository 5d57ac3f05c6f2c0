//! The vhost-user session, driven by hand: with a clock that the test holds, and IoThreads that do
//! nothing unless the test lets them. And its messages against the `vhost` crate's.

#[cfg(test)]
mod kept;
#[cfg(test)]
mod memory;
#[cfg(test)]
mod oracle;
#[cfg(test)]
mod scene;
#[cfg(test)]
mod session;
