//! Limits on the clients of the control socket.
//!
//! Each role has places of its own: members of the groups take no place of root and of the daemon's
//! user. So an owner can give commands, however many members are connected.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::access::Role;
use super::message::{Code, RpcError};

/// The most clients of a role at a time.
const CLIENTS_MAX: usize = 32;
/// The most requests of a role that may wait for a disk or a guest. Requests of clients that have
/// gone may hang; requests that do not wait are still served.
const WAITING_MAX: usize = 16;
/// The most subscribers of a role: a subscriber stays, and sends no requests.
const SUBSCRIBERS_MAX: usize = 8;

/// The places of clients, by their roles.
#[derive(Clone, Default)]
pub(super) struct ClientQuota(Arc<[Usage; Role::COUNT]>);

#[derive(Clone, Default)]
struct Usage {
    clients: Arc<AtomicUsize>,
    waiting: Arc<AtomicUsize>,
    subscribers: Arc<AtomicUsize>,
}

/// A permit of a limited number, until it is dropped.
pub(super) struct Permit(Arc<AtomicUsize>);

/// The slot of a client, until it is dropped.
pub(super) struct ClientSlot {
    usage: Usage,
    /// The rights of the client.
    pub(super) role: Role,
    _client: Permit,
    subscription: Option<Permit>,
}

impl Permit {
    fn take(count: &Arc<AtomicUsize>, max: usize) -> Option<Self> {
        let one_more = |count| (count < max).then_some(count + 1);
        count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(Self(Arc::clone(count)))
    }
}

impl Drop for Permit {
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
    pub(super) fn take(&self, role: Role) -> Result<ClientSlot, RpcError> {
        let usage = self.0[role as usize].clone();
        let client = Permit::take(&usage.clients, CLIENTS_MAX).ok_or_else(|| {
            let text = format!("{CLIENTS_MAX} clients are connected; close one of them");
            RpcError::new(Code::Refused, text)
        })?;
        Ok(ClientSlot { usage, role, _client: client, subscription: None })
    }

    /// The numbers of clients of a role, and of their requests that wait.
    #[cfg(test)]
    pub(super) fn taken(&self, role: Role) -> (usize, usize) {
        let Usage { clients, waiting, .. } = &self.0[role as usize];
        (clients.load(Ordering::Relaxed), waiting.load(Ordering::Relaxed))
    }
}

impl ClientSlot {
    /// Begins a request that may wait for a disk or a guest, until the place is dropped.
    ///
    /// # Errors
    ///
    /// When too many other requests wait.
    pub(super) fn begin_slow_request(&self) -> Result<Permit, RpcError> {
        Permit::take(&self.usage.waiting, WAITING_MAX).ok_or_else(|| {
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
        self.subscription = Permit::take(&self.usage.subscribers, SUBSCRIBERS_MAX);
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
        let take_all = |role| {
            let taken: Vec<ClientSlot> =
                std::iter::from_fn(|| quota.take(role).ok()).take(1000).collect();
            assert_eq!(taken.len(), CLIENTS_MAX);
            taken
        };
        let mut members = take_all(Role::Member);
        drop(take_all(Role::Owner));
        drop(take_all(Role::Reader));
        members.pop();
        members.push(quota.take(Role::Member).unwrap());
        assert!(quota.take(Role::Member).is_err());
    }

    /// The limit is on requests that wait now, not on all earlier ones.
    #[test]
    fn requests_that_hang_leave_room_for_others() {
        let quota = ClientQuota::default();
        let taken: Vec<ClientSlot> = std::iter::from_fn(|| quota.take(Role::Member).ok()).collect();
        let mut waiting: Vec<Permit> =
            taken[..WAITING_MAX].iter().map(|slot| slot.begin_slow_request().unwrap()).collect();
        let last = taken.last().unwrap();
        assert!(last.begin_slow_request().is_err());
        assert!(quota.take(Role::Owner).unwrap().begin_slow_request().is_ok());
        waiting.pop();
        assert!(last.begin_slow_request().is_ok());
    }

    /// Subscribers stay connected for ever.
    #[test]
    fn requests_that_wait_and_subscribers_leave_places_for_each_other() {
        let quota = ClientQuota::default();
        let mut taken: Vec<ClientSlot> =
            std::iter::from_fn(|| quota.take(Role::Member).ok()).collect();
        taken[..SUBSCRIBERS_MAX].iter_mut().for_each(|slot| slot.subscribe().unwrap());
        let wait = |slot: &ClientSlot| slot.begin_slow_request().unwrap();
        let waiting: Vec<Permit> = taken[..WAITING_MAX].iter().map(wait).collect();
        drop(taken.remove(0));
        assert!(taken.last_mut().unwrap().subscribe().is_ok());
        drop(waiting);
    }

    /// Its events would not fit between those of the first subscription.
    #[test]
    fn a_client_subscribes_once() {
        let quota = ClientQuota::default();
        let mut client = quota.take(Role::Reader).unwrap();
        client.subscribe().unwrap();
        let error = format!("{:?}", client.subscribe().unwrap_err());
        assert!(error.contains("already has a subscription"), "{error}");
        // The first one keeps its place.
        let mut others: Vec<ClientSlot> =
            std::iter::from_fn(|| quota.take(Role::Reader).ok()).collect();
        let subscribed = others.iter_mut().filter_map(|slot| slot.subscribe().ok()).count();
        assert_eq!(subscribed, SUBSCRIBERS_MAX - 1);
    }

    #[test]
    fn subscribers_leave_places_for_others() {
        let quota = ClientQuota::default();
        let mut taken: Vec<ClientSlot> =
            std::iter::from_fn(|| quota.take(Role::Owner).ok()).take(CLIENTS_MAX).collect();
        let subscribed: Vec<bool> = taken.iter_mut().map(|slot| slot.subscribe().is_ok()).collect();
        assert_eq!(subscribed.iter().filter(|is| **is).count(), SUBSCRIBERS_MAX);
        assert!(taken[0].subscribe().is_err());
        // A subscriber that leaves makes room for another.
        drop(taken.remove(0));
        assert!(taken[CLIENTS_MAX - 2].subscribe().is_ok());
        assert!(taken[CLIENTS_MAX - 3].subscribe().is_err());
    }
}
