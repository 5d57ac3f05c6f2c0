//! Descriptors that one process hands to another, beside a text that describes their use.

use std::io;

use rustix::fd::{AsFd, OwnedFd};
use serde::{Deserialize, Serialize};

/// Descriptors in the order in which they are sent. Each has a name, so that a service manager or
/// another keeper can store them.
#[derive(Debug, Default)]
pub(crate) struct HandedFds {
    list: Vec<(String, Option<OwnedFd>)>,
}

/// The place of a descriptor in the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Place(usize);

impl HandedFds {
    /// Creates the list that was received.
    #[must_use]
    pub(crate) fn new(names: Vec<String>, fds: impl IntoIterator<Item = OwnedFd>) -> Self {
        Self { list: names.into_iter().zip(fds.into_iter().map(Some)).collect() }
    }

    /// Adds a duplicate of `fd`.
    ///
    /// # Errors
    ///
    /// When no descriptor is left.
    pub(crate) fn put(&mut self, name: impl Into<String>, fd: impl AsFd) -> io::Result<Place> {
        let place = Place(self.list.len());
        self.list.push((name.into(), Some(fd.as_fd().try_clone_to_owned()?)));
        Ok(place)
    }

    /// Like [`put`](Self::put), for an optional descriptor.
    ///
    /// # Errors
    ///
    /// Like [`put`](Self::put).
    pub(crate) fn put_some(
        &mut self,
        name: impl Into<String>,
        fd: Option<impl AsFd>,
    ) -> io::Result<Option<Place>> {
        fd.map(|fd| self.put(name, fd)).transpose()
    }

    /// Takes a descriptor out of the list.
    ///
    /// # Errors
    ///
    /// When it was not received, or was taken already.
    pub(crate) fn take(&mut self, place: Place) -> io::Result<OwnedFd> {
        let missing = || {
            let text = format!("descriptor {} was not handed over", place.0);
            io::Error::new(io::ErrorKind::InvalidData, text)
        };
        self.list.get_mut(place.0).and_then(|(_, fd)| fd.take()).ok_or_else(missing)
    }

    /// Like [`take`](Self::take), for an optional descriptor.
    ///
    /// # Errors
    ///
    /// Like [`take`](Self::take).
    pub(crate) fn take_some(&mut self, place: Option<Place>) -> io::Result<Option<OwnedFd>> {
        place.map(|place| self.take(place)).transpose()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.list.iter().map(|(name, _)| name.clone()).collect()
    }

    /// The descriptors that were not taken.
    pub(crate) fn all(&self) -> impl Iterator<Item = &OwnedFd> {
        self.list.iter().filter_map(|(_, fd)| fd.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn what_is_put_is_taken_once() {
        let mut fds = HandedFds::default();
        let event = eventfd(3, EventfdFlags::NONBLOCK).unwrap();
        let place = fds.put("event", &event).unwrap();
        assert_eq!((fds.put_some("none", None::<&OwnedFd>).unwrap(), fds.all().count()), (None, 1));
        let mut fds = HandedFds::new(fds.names(), fds.list.into_iter().filter_map(|(_, fd)| fd));
        let mut count = [0; 8];
        rustix::io::read(fds.take(place).unwrap(), &mut count).unwrap();
        assert_eq!(count, 3_u64.to_ne_bytes());
        let error = fds.take(place).unwrap_err().to_string();
        assert!(error.contains("descriptor 0 was not handed over"), "{error}");
        assert!(fds.take(Place(1)).is_err() && fds.take_some(None).unwrap().is_none());
    }
}
