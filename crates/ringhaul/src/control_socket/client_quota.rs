//! Limits on the clients of the control socket.
//!
//! Root and the user of the daemon have places of their own, which members of the `--control-group`
//! cannot take. So an owner can give commands, however many members are connected.

use std::sync::{Arc, Mutex, PoisonError};

use super::message::{Code, RpcError};

/// The most clients of a kind, owners or members, at a time.
const CLIENTS_MAX: usize = 32;
/// The most requests of a kind that may wait for a disk or a guest. Requests of clients that have
/// gone may hang; requests that do not wait are still served.
const WAITING_MAX: usize = 16;
/// The most subscribers of a kind: a subscriber stays, and sends no requests.
const SUBSCRIBERS_MAX: usize = 8;

/// The places of members and of owners.
#[derive(Clone, Default)]
pub(super) struct ClientQuota(Arc<Mutex<[Usage; 2]>>);

#[derive(Clone, Copy, Default)]
struct Usage {
    clients: usize,
    waiting: usize,
    subscribers: usize,
}

/// The slot of a client, until it is dropped.
pub(super) struct ClientSlot {
    quota: ClientQuota,
    /// True if the client is root, or the user of the daemon.
    pub(super) is_owner: bool,
    has_subscribed: bool,
}

/// A request that may wait for a disk or a guest, until this is dropped.
pub(super) struct SlowRequest {
    quota: ClientQuota,
    is_owner: bool,
}

impl ClientQuota {
    /// Takes a slot for one more client.
    ///
    /// # Errors
    ///
    /// When all are taken.
    pub(super) fn take(&self, is_owner: bool) -> Result<ClientSlot, RpcError> {
        let is_free = self.change(is_owner, |taken| {
            let is_free = taken.clients < CLIENTS_MAX;
            taken.clients += usize::from(is_free);
            is_free
        });
        if !is_free {
            let text = format!("{CLIENTS_MAX} clients are connected; close one of them");
            return Err(RpcError::new(Code::Refused, text));
        }
        Ok(ClientSlot { quota: self.clone(), is_owner, has_subscribed: false })
    }

    fn change<T>(&self, is_owner: bool, change: impl FnOnce(&mut Usage) -> T) -> T {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut taken[usize::from(is_owner)])
    }
}

impl ClientSlot {
    /// Begins a request that may wait.
    ///
    /// # Errors
    ///
    /// When too many other requests wait.
    pub(super) fn begin_slow_request(&self) -> Result<SlowRequest, RpcError> {
        let is_free = self.quota.change(self.is_owner, |taken| {
            let is_free = taken.waiting < WAITING_MAX;
            taken.waiting += usize::from(is_free);
            is_free
        });
        if !is_free {
            let text = format!(
                "{WAITING_MAX} other requests wait; try again when one of them is answered"
            );
            return Err(RpcError::new(Code::Busy, text));
        }
        Ok(SlowRequest { quota: self.quota.clone(), is_owner: self.is_owner })
    }

    /// Counts the client as a subscriber.
    ///
    /// # Errors
    ///
    /// When it has subscribed already, or too many clients have.
    pub(super) fn subscribe(&mut self) -> Result<(), RpcError> {
        if self.has_subscribed {
            let text = "this connection already has a subscription; open another connection";
            return Err(RpcError::new(Code::Busy, text));
        }
        let is_free = self.quota.change(self.is_owner, |taken| {
            let is_free = taken.subscribers < SUBSCRIBERS_MAX;
            taken.subscribers += usize::from(is_free);
            is_free
        });
        if !is_free {
            let text = format!("{SUBSCRIBERS_MAX} clients have subscribed; close one of them");
            return Err(RpcError::new(Code::Refused, text));
        }
        self.has_subscribed = true;
        Ok(())
    }
}

impl Drop for ClientSlot {
    fn drop(&mut self) {
        self.quota.change(self.is_owner, |taken| {
            taken.clients -= 1;
            taken.subscribers -= usize::from(self.has_subscribed);
        });
    }
}

impl Drop for SlowRequest {
    fn drop(&mut self) {
        self.quota.change(self.is_owner, |taken| taken.waiting -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_the_group_leave_places_for_root() {
        let quota = ClientQuota::default();
        let take_all = |is_owner| {
            let taken: Vec<ClientSlot> =
                std::iter::from_fn(|| quota.take(is_owner).ok()).take(1000).collect();
            assert_eq!(taken.len(), CLIENTS_MAX);
            taken
        };
        let mut members = take_all(false);
        drop(take_all(true));
        members.pop();
        members.push(quota.take(false).unwrap());
        assert!(quota.take(false).is_err());
    }

    /// The limit is on requests that wait now, not on all earlier ones.
    #[test]
    fn requests_that_hang_leave_room_for_others() {
        let quota = ClientQuota::default();
        let taken: Vec<ClientSlot> = std::iter::from_fn(|| quota.take(false).ok()).collect();
        let mut waiting: Vec<SlowRequest> =
            taken[..WAITING_MAX].iter().map(|slot| slot.begin_slow_request().unwrap()).collect();
        let last = taken.last().unwrap();
        assert!(last.begin_slow_request().is_err());
        assert!(quota.take(true).unwrap().begin_slow_request().is_ok());
        waiting.pop();
        assert!(last.begin_slow_request().is_ok());
    }

    #[test]
    fn subscribers_leave_places_for_others() {
        let quota = ClientQuota::default();
        let mut taken: Vec<ClientSlot> =
            std::iter::from_fn(|| quota.take(true).ok()).take(CLIENTS_MAX).collect();
        let subscribed: Vec<bool> = taken.iter_mut().map(|slot| slot.subscribe().is_ok()).collect();
        assert_eq!(subscribed.iter().filter(|is| **is).count(), SUBSCRIBERS_MAX);
        assert!(taken[0].subscribe().is_err());
        // A subscriber that leaves makes room for another.
        drop(taken.remove(0));
        assert!(taken[CLIENTS_MAX - 2].subscribe().is_ok());
        assert!(taken[CLIENTS_MAX - 3].subscribe().is_err());
    }
}
