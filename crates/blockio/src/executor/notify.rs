//! A notify: it wakes futures on any threads that listen for a change.

use std::sync::PoisonError;
use std::task::Context;

use crate::executor::sync::{Mutex, MutexGuard};
use crate::executor::wait_list::WaitList;

/// Wakes listeners: all of them, or those with certain keys.
#[derive(Debug)]
pub struct Notify<K = ()>(Mutex<WaitList<K>>);

/// A place for a future that may listen, until it is dropped.
#[derive(Debug)]
pub struct Listener<'a, K = ()> {
    notify: &'a Notify<K>,
    number: u64,
}

impl<K> Default for Notify<K> {
    fn default() -> Self {
        Self(Mutex::new(WaitList::default()))
    }
}

impl Notify {
    /// A place for one future.
    pub fn listener(&self) -> Listener<'_> {
        self.listener_with(())
    }

    /// Wakes all futures that listen, once. Make the change that they wait for first.
    pub fn notify_all(&self) {
        self.notify_where(|()| true);
    }
}

impl<K> Notify<K> {
    /// A place for one future, with a key.
    pub(crate) fn listener_with(&self, key: K) -> Listener<'_, K> {
        Listener { number: self.list().push(key), notify: self }
    }

    /// Wakes the futures that listen with a key for which `is_meant` holds, once.
    pub(crate) fn notify_where(&self, is_meant: impl Fn(&K) -> bool) {
        let mut list = self.list();
        let mut numbers = list.numbers();
        while let Some((number, waker)) = list.take_waker(numbers.clone(), &is_meant) {
            // The waker may run any code, so the lock is released first.
            drop(list);
            waker.wake();
            numbers.start = number + 1;
            list = self.list();
        }
    }

    fn list(&self) -> MutexGuard<'_, WaitList<K>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K> Listener<'_, K> {
    /// Makes the next notification wake the future that is polled with `cx`. The future must check
    /// its condition after this call.
    pub fn listen(&self, cx: &Context<'_>) {
        let replaced = self.notify.list().set_waker(self.number, cx);
        drop(replaced);
    }
}

impl<K> Drop for Listener<'_, K> {
    fn drop(&mut self) {
        let gone = self.notify.list().remove(self.number);
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::{Wake, Waker};

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicU32);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Woken {
        fn listens<K>(self: &Arc<Self>, listener: &Listener<'_, K>) {
            listener.listen(&Context::from_waker(&Waker::from(Arc::clone(self))));
        }

        fn take(&self) -> u32 {
            self.0.swap(0, Ordering::Relaxed)
        }
    }

    /// Invariant 12: the waker of the last poll is woken, and no other.
    #[test]
    fn a_listener_is_woken_once_by_its_last_waker_until_it_listens_again() {
        let [first, last] = [(); 2].map(|()| Arc::<Woken>::default());
        let notify = Notify::default();
        let [listener, other, gone] = [(); 3].map(|()| notify.listener());
        first.listens(&listener);
        last.listens(&listener);
        last.listens(&other);
        last.listens(&gone);
        drop(gone);
        notify.notify_all();
        assert_eq!((first.take(), last.take()), (0, 2), "invariant 12");
        notify.notify_all();
        assert_eq!((first.take(), last.take()), (0, 0), "none listens");
        first.listens(&other);
        notify.notify_all();
        assert_eq!((first.take(), last.take()), (1, 0));
        drop((listener, other));
        assert!(notify.list().is_empty());
    }

    #[test]
    fn listeners_whose_keys_are_not_meant_listen_on() {
        let (notify, woken) = (Notify::default(), Arc::<Woken>::default());
        let listeners = [3, 1, 2].map(|key| notify.listener_with(key));
        listeners.iter().for_each(|listener| woken.listens(listener));
        notify.notify_where(|&key| key < 3);
        assert_eq!(woken.take(), 2);
        notify.notify_where(|&key| key < 3);
        assert_eq!(woken.take(), 0);
        notify.notify_where(|&key| key == 3);
        assert_eq!(woken.take(), 1);
    }

    /// Wakers run any code: this one listens again, drops another listener and notifies.
    #[test]
    fn a_waker_may_use_the_notify_that_wakes_it() {
        struct Busy(Arc<Notify>, AtomicU32);

        impl Wake for Busy {
            fn wake(self: Arc<Self>) {
                if self.1.fetch_add(1, Ordering::Relaxed) == 0 {
                    self.0.notify_all();
                    let listener = self.0.listener();
                    listener.listen(&Context::from_waker(&Waker::from(Arc::clone(&self))));
                    self.0.notify_all();
                }
            }
        }

        let notify = Arc::new(Notify::default());
        let busy = Arc::new(Busy(Arc::clone(&notify), AtomicU32::new(0)));
        let listeners = [(); 2].map(|()| notify.listener());
        for listener in &listeners {
            listener.listen(&Context::from_waker(&Waker::from(Arc::clone(&busy))));
        }
        notify.notify_all();
        assert_eq!(busy.1.load(Ordering::Relaxed), 3);
    }
}
