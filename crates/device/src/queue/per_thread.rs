//! Values that IoThreads keep for each queue of a device, for calls from other threads.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockio::executor::Lock;
use blockio::{Io, Remote};

/// The number of the next value in this process.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// The number of each queue's last value, and its thread, by the index of the queue.
type Locations = BTreeMap<u16, (usize, Remote)>;

/// A `T` for each started queue, on the queue's IoThread.
pub(crate) struct PerThread<T> {
    locations: Arc<Lock<Locations>>,
    kind: PhantomData<fn(T)>,
}

impl<T> Default for PerThread<T> {
    fn default() -> Self {
        Self { locations: Arc::default(), kind: PhantomData }
    }
}

impl<T: 'static> PerThread<T> {
    /// Sets the value of queue `index`, which starts on this IoThread.
    pub(crate) fn insert(&self, index: u16, io: &Io, value: &Rc<T>) {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        io.share(number, value);
        self.locations.lock().insert(index, (number, io.remote()));
    }

    /// Posts a call to the IoThread of each queue, made by `call` for the queue's index. The call
    /// receives the value, or `None` if it is gone. If the thread has ended, the call is dropped.
    pub(crate) fn post_each(
        &self,
        mut call: impl FnMut(u16) -> Box<dyn FnOnce(Option<&T>) + Send>,
    ) {
        for (&index, &(number, ref thread)) in &*self.locations.lock() {
            let call = call(index);
            thread.post(move |io| call(io.shared(number).as_deref()));
        }
    }

    /// Forgets values that are gone.
    pub(crate) fn remove_dropped(&self) {
        for (&index, &(number, ref thread)) in &*self.locations.lock() {
            let locations = Arc::clone(&self.locations);
            thread.post(move |io| {
                let mut locations = locations.lock();
                if io.shared::<T>(number).is_none()
                    && locations.get(&index).is_some_and(|(last, _)| *last == number)
                {
                    locations.remove(&index);
                }
            });
        }
    }
}
