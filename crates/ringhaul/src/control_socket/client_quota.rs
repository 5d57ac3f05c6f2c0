//! Limits on the clients of the control socket.
//!
//! Root and the user of the daemon have places of their own, which members of the `--control-group`
//! cannot take. So an owner can give commands, however many members are connected.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

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
pub(super) struct ClientQuota(Arc<[Usage; 2]>);

#[derive(Clone, Default)]
struct Usage {
    clients: Arc<AtomicUsize>,
    waiting: Arc<AtomicUsize>,
    subscribers: Arc<AtomicUsize>,
}

/// One place of a limited number, until it is dropped.
pub(super) struct Place(Arc<AtomicUsize>);

/// The slot of a client, until it is dropped.
pub(super) struct ClientSlot {
    usage: Usage,
    /// True if the client is root, or the user of the daemon.
    pub(super) is_owner: bool,
    _client: Place,
    subscription: Option<Place>,
}

impl Place {
    fn take(count: &Arc<AtomicUsize>, max: usize) -> Option<Self> {
        let one_more = |count| (count < max).then_some(count + 1);
        count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(Self(Arc::clone(count)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ClientQuota {
    /// Takes a slot for one more client.
    ///
    /// # Errors
    ///
    /// When all are taken.
    pub(super) fn take(&self, is_owner: bool) -> Result<ClientSlot, RpcError> {
        let usage = self.0[usize::from(is_owner)].clone();
        let client = Place::take(&usage.clients, CLIENTS_MAX).ok_or_else(|| {
            let text = format!("{CLIENTS_MAX} clients are connected; close one of them");
            RpcError::new(Code::Refused, text)
        })?;
        Ok(ClientSlot { usage, is_owner, _client: client, subscription: None })
    }
}

impl ClientSlot {
    /// Begins a request that may wait for a disk or a guest, until the place is dropped.
    ///
    /// # Errors
    ///
    /// When too many other requests wait.
    pub(super) fn begin_slow_request(&self) -> Result<Place, RpcError> {
        Place::take(&self.usage.waiting, WAITING_MAX).ok_or_else(|| {
            let text = format!(
                "{WAITING_MAX} other requests wait; try again when one of them is answered"
            );
            RpcError::new(Code::Busy, text)
        })
    }

    /// Counts the client as a subscriber.
    ///
    /// # Errors
    ///
    /// When it has subscribed already, or too many clients have.
    pub(super) fn subscribe(&mut self) -> Result<(), RpcError> {
        if self.subscription.is_some() {
            let text = "this connection already has a subscription; open another connection";
            return Err(RpcError::new(Code::Busy, text));
        }
        self.subscription = Place::take(&self.usage.subscribers, SUBSCRIBERS_MAX);
        if self.subscription.is_none() {
            let text = format!("{SUBSCRIBERS_MAX} clients have subscribed; close one of them");
            return Err(RpcError::new(Code::Refused, text));
        }
        Ok(())
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
        let mut waiting: Vec<Place> =
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
