//! How many clients the control socket serves at a time.
//!
//! Root and the user of the daemon have places of their own, which members of the `--control-group`
//! cannot take: however many of these are connected, somebody can still say what is to be done.

use std::sync::{Arc, Mutex, PoisonError};

use super::message::{Code, Problem};

/// Clients of a kind at a time. Requests of clients that have gone may hang, so those that come
/// next may ask for what does not wait.
const CLIENTS_MAX: usize = 16;
const HURRIED_MAX: usize = 16;
/// How many of them may have subscribed: a subscriber stays, and asks for nothing.
const SUBSCRIBERS_MAX: usize = 8;

/// All places, of owners and of others.
#[derive(Clone, Default)]
pub(super) struct Places(Arc<Mutex<[Taken; 2]>>);

#[derive(Clone, Copy, Default)]
struct Taken {
    clients: usize,
    subscribers: usize,
}

/// One of them, until it is dropped.
pub(super) struct Place {
    places: Places,
    /// The client is root, or the user of the daemon.
    pub(super) is_owner: bool,
    /// It may ask for what waits for a disk or a guest.
    pub(super) may_wait: bool,
    has_subscribed: bool,
}

impl Places {
    /// A place for one more client.
    ///
    /// # Errors
    ///
    /// When all are taken.
    pub(super) fn take(&self, is_owner: bool) -> Result<Place, Problem> {
        let clients = self.change(is_owner, |taken| {
            let is_free = taken.clients < CLIENTS_MAX + HURRIED_MAX;
            taken.clients += usize::from(is_free);
            is_free.then_some(taken.clients)
        });
        let clients = clients.ok_or_else(too_many)?;
        let may_wait = clients <= CLIENTS_MAX;
        Ok(Place { places: self.clone(), is_owner, may_wait, has_subscribed: false })
    }

    fn change<T>(&self, is_owner: bool, change: impl FnOnce(&mut Taken) -> T) -> T {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut taken[usize::from(is_owner)])
    }
}

impl Place {
    /// Checks that the client may ask for what waits.
    ///
    /// # Errors
    ///
    /// When too many came before it.
    pub(super) fn check_may_wait(&self) -> Result<(), Problem> {
        if self.may_wait { Ok(()) } else { Err(too_many()) }
    }

    /// The client stays to hear of events.
    ///
    /// # Errors
    ///
    /// When it does so already, or too many others do.
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

fn too_many() -> Problem {
    let text =
        format!("{CLIENTS_MAX} clients are connected, or their requests hang; close one of them");
    Problem::new(Code::Refused, text)
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
            assert_eq!(taken.iter().filter(|place| place.may_wait).count(), CLIENTS_MAX);
            assert_eq!(taken.len(), CLIENTS_MAX + HURRIED_MAX);
            taken
        };
        let mut members = take_all(false);
        drop(take_all(true));
        members.pop();
        members.push(places.take(false).unwrap());
        assert!(places.take(false).is_err());
        assert!(members.pop().unwrap().check_may_wait().is_err());
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
        // One that goes leaves its place to another.
        drop(taken.remove(0));
        assert!(taken[CLIENTS_MAX - 2].subscribe().is_ok());
        assert!(taken[CLIENTS_MAX - 3].subscribe().is_err());
    }
}
