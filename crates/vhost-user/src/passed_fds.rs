//! Descriptors that one process hands to another, beside a text that describes their use.

use std::io;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use serde::{Deserialize, Serialize};

/// A receiver of the descriptors that belong to a state.
pub trait FdSink {
    /// Adds a descriptor. `name` describes it.
    ///
    /// # Errors
    ///
    /// When it cannot be added.
    fn put(&mut self, name: &str, fd: BorrowedFd<'_>) -> io::Result<FdIndex>;

    /// Like [`put`](Self::put), for a descriptor that this process has opened or received since the
    /// last state, perhaps under the number of an earlier one.
    ///
    /// # Errors
    ///
    /// Like [`put`](Self::put).
    fn put_new(&mut self, name: &str, fd: BorrowedFd<'_>) -> io::Result<FdIndex> {
        self.put(name, fd)
    }
}

impl FdSink for PassedFds {
    fn put(&mut self, name: &str, fd: BorrowedFd<'_>) -> io::Result<FdIndex> {
        Self::put(self, name, fd)
    }
}

/// Descriptors in the order in which they are sent. Each has a name, so that a service manager or
/// another keeper can store them.
#[derive(Debug, Default)]
pub struct PassedFds {
    list: Vec<(String, Option<OwnedFd>)>,
}

/// The index of a descriptor in the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FdIndex(usize);

impl FdIndex {
    /// The index of the descriptor at this place, counted from 0.
    pub const fn new(place: usize) -> Self {
        Self(place)
    }
}

impl PassedFds {
    /// Creates the list that was received.
    pub fn new(names: Vec<String>, fds: impl IntoIterator<Item = OwnedFd>) -> Self {
        Self { list: names.into_iter().zip(fds.into_iter().map(Some)).collect() }
    }

    /// Adds a duplicate of `fd`.
    ///
    /// # Errors
    ///
    /// When no descriptor is left.
    pub fn put(&mut self, name: impl Into<String>, fd: impl AsFd) -> io::Result<FdIndex> {
        let index = FdIndex(self.list.len());
        self.list.push((name.into(), Some(fd.as_fd().try_clone_to_owned()?)));
        Ok(index)
    }

    /// Like [`put`](Self::put), for an optional descriptor.
    ///
    /// # Errors
    ///
    /// Like [`put`](Self::put).
    pub fn put_some(
        &mut self,
        name: impl Into<String>,
        fd: Option<impl AsFd>,
    ) -> io::Result<Option<FdIndex>> {
        fd.map(|fd| self.put(name, fd)).transpose()
    }

    /// Takes a descriptor out of the list.
    ///
    /// # Errors
    ///
    /// When it was not received, or was taken already.
    pub fn take(&mut self, index: FdIndex) -> io::Result<OwnedFd> {
        let missing = || {
            let text = format!("descriptor {} was not handed over", index.0);
            io::Error::new(io::ErrorKind::InvalidData, text)
        };
        self.list.get_mut(index.0).and_then(|(_, fd)| fd.take()).ok_or_else(missing)
    }

    /// Like [`take`](Self::take), for an optional descriptor.
    ///
    /// # Errors
    ///
    /// Like [`take`](Self::take).
    pub fn take_some(&mut self, index: Option<FdIndex>) -> io::Result<Option<OwnedFd>> {
        index.map(|index| self.take(index)).transpose()
    }

    /// The names of the descriptors, in order.
    pub fn names(&self) -> Vec<String> {
        self.list.iter().map(|(name, _)| name.clone()).collect()
    }

    /// The descriptors that were not taken.
    pub fn all(&self) -> impl Iterator<Item = &OwnedFd> {
        self.list.iter().filter_map(|(_, fd)| fd.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn a_descriptor_is_taken_once() {
        let mut fds = PassedFds::default();
        let event = eventfd(3, EventfdFlags::NONBLOCK).unwrap();
        let index = fds.put("event", &event).unwrap();
        assert_eq!((fds.put_some("none", None::<&OwnedFd>).unwrap(), fds.all().count()), (None, 1));
        let mut fds = PassedFds::new(fds.names(), fds.list.into_iter().filter_map(|(_, fd)| fd));
        let mut count = [0; 8];
        rustix::io::read(fds.take(index).unwrap(), &mut count).unwrap();
        assert_eq!(count, 3_u64.to_ne_bytes());
        let error = fds.take(index).unwrap_err().to_string();
        assert!(error.contains("descriptor 0 was not handed over"), "{error}");
        assert!(fds.take(FdIndex(1)).is_err() && fds.take_some(None).unwrap().is_none());
    }
}
