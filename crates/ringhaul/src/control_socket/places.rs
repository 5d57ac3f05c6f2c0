//! Limits on the clients of the control socket.
//!
//! Root and the user of the daemon have places of their own, which members of the `--control-group`
//! cannot take. So an owner can give commands, however many members are connected.

use std::sync::{Arc, Mutex, PoisonError};

use super::message::{Code, Problem};

/// The most clients of a kind, owners or members, at a time.
const CLIENTS_MAX: usize = 32;
/// The most requests of a kind that may wait for a disk or a guest. Requests of clients that have
/// gone may hang; requests that do not wait are still served.
const WAITING_MAX: usize = 16;
/// The most subscribers of a kind: a subscriber stays, and sends no requests.
const SUBSCRIBERS_MAX: usize = 8;

/// The places of members and of owners.
#[derive(Clone, Default)]
pub(super) struct Places(Arc<Mutex<[Taken; 2]>>);

#[derive(Clone, Copy, Default)]
struct Taken {
    clients: usize,
    waiting: usize,
    subscribers: usize,
}

/// The place of a client, until it is dropped.
pub(super) struct Place {
    places: Places,
    /// True if the client is root, or the user of the daemon.
    pub(super) is_owner: bool,
    has_subscribed: bool,
}

/// A request that may wait for a disk or a guest, until this is dropped.
pub(super) struct Waiting {
    places: Places,
    is_owner: bool,
}

impl Places {
    /// Takes a place for one more client.
    ///
    /// # Errors
    ///
    /// When all are taken.
    pub(super) fn take(&self, is_owner: bool) -> Result<Place, Problem> {
        let is_free = self.change(is_owner, |taken| {
            let is_free = taken.clients < CLIENTS_MAX;
            taken.clients += usize::from(is_free);
            is_free
        });
        if !is_free {
            let text = format!("{CLIENTS_MAX} clients are connected; close one of them");
            return Err(Problem::new(Code::Refused, text));
        }
        Ok(Place { places: self.clone(), is_owner, has_subscribed: false })
    }

    fn change<T>(&self, is_owner: bool, change: impl FnOnce(&mut Taken) -> T) -> T {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut taken[usize::from(is_owner)])
    }
}

impl Place {
    /// Begins a request that may wait.
    ///
    /// # Errors
    ///
    /// When too many other requests wait.
    pub(super) fn begin_to_wait(&self) -> Result<Waiting, Problem> {
        let is_free = self.places.change(self.is_owner, |taken| {
            let is_free = taken.waiting < WAITING_MAX;
            taken.waiting += usize::from(is_free);
            is_free
        });
        if !is_free {
            let text = format!(
                "{WAITING_MAX} other requests wait, or hang; try again when one of them is answered"
            );
            return Err(Problem::new(Code::Busy, text));
        }
        Ok(Waiting { places: self.places.clone(), is_owner: self.is_owner })
    }

    /// Counts the client as a subscriber.
    ///
    /// # Errors
    ///
    /// When it has subscribed already, or too many clients have.
    pub(super) fn subscribe(&mut self) -> Result<(), Problem> {
        if self.has_subscribed {
            let text = "this connection has a subscription; open another connection";
            return Err(Problem::new(Code::Busy, text));
        }
        let is_free = self.places.change(self.is_owner, |taken| {
            let is_free = taken.subscribers < SUBSCRIBERS_MAX;
            taken.subscribers += usize::from(is_free);
            is_free
        });
        if !is_free {
            let text = format!("{SUBSCRIBERS_MAX} clients have subscribed; close one of them");
            return Err(Problem::new(Code::Refused, text));
        }
        self.has_subscribed = true;
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.change(self.is_owner, |taken| {
            taken.clients -= 1;
            taken.subscribers -= usize::from(self.has_subscribed);
        });
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.places.change(self.is_owner, |taken| taken.waiting -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_the_group_leave_places_for_root() {
        let places = Places::default();
        let take_all = |is_owner| {
            let taken: Vec<Place> =
                std::iter::from_fn(|| places.take(is_owner).ok()).take(1000).collect();
            assert_eq!(taken.len(), CLIENTS_MAX);
            taken
        };
        let mut members = take_all(false);
        drop(take_all(true));
        members.pop();
        members.push(places.take(false).unwrap());
        assert!(places.take(false).is_err());
    }

    /// The limit is on requests that wait now, not on all earlier ones.
    #[test]
    fn requests_that_hang_leave_room_for_others() {
        let places = Places::default();
        let taken: Vec<Place> = std::iter::from_fn(|| places.take(false).ok()).collect();
        let mut waiting: Vec<Waiting> =
            taken[..WAITING_MAX].iter().map(|place| place.begin_to_wait().unwrap()).collect();
        let last = taken.last().unwrap();
        assert!(last.begin_to_wait().is_err());
        assert!(places.take(true).unwrap().begin_to_wait().is_ok());
        waiting.pop();
        assert!(last.begin_to_wait().is_ok());
    }

    #[test]
    fn subscribers_leave_places_for_others() {
        let places = Places::default();
        let mut taken: Vec<Place> =
            std::iter::from_fn(|| places.take(true).ok()).take(CLIENTS_MAX).collect();
        let subscribed: Vec<bool> =
            taken.iter_mut().map(|place| place.subscribe().is_ok()).collect();
        assert_eq!(subscribed.iter().filter(|is| **is).count(), SUBSCRIBERS_MAX);
        assert!(taken[0].subscribe().is_err());
        // A subscriber that leaves makes room for another.
        drop(taken.remove(0));
        assert!(taken[CLIENTS_MAX - 2].subscribe().is_ok());
        assert!(taken[CLIENTS_MAX - 3].subscribe().is_err());
    }
}
