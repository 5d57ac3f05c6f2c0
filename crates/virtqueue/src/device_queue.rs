//! The operations of queues that a device calls once for a batch of chains.

use crate::error::QueueError;

/// A virtqueue of any layout, as a device sees it between batches of chains.
///
/// A step of a device is generic over it, and so checks the layout of a
/// [`Virtqueue`](crate::Virtqueue) once. The queue of each layout pops and pushes chains by methods
/// of its own.
pub trait DeviceQueue {
    /// The number of chains to pop. Looks for new ones if `fresh`, or if none is known.
    ///
    /// # Errors
    ///
    /// If the ring is bad: the device must stop this queue. No earlier chain is lost.
    fn available(&mut self, fresh: bool) -> Result<u16, QueueError>;

    /// The number of chains to pop, with new ones. 0 if the ring is bad, which the next pop
    /// reports.
    #[inline]
    fn available_now(&mut self) -> u16 {
        self.available(true).unwrap_or(0)
    }

    /// The number of chains that were popped and not pushed yet.
    fn in_device(&self) -> u16;

    /// The number of the next chain to pop: of a split ring its avail entry, of a packed ring the
    /// number of chains that were popped since the start.
    fn next_chain(&self) -> u16;

    /// Makes all pushed elements visible, and returns the number of new ones. A sleeping driver
    /// sees them only after [`publish`](Self::publish) has asked for a call, as it must in the end.
    ///
    /// # Panics
    ///
    /// If more than 32,768 elements of a split ring were published since the last
    /// [`needs_call`](Self::needs_call).
    fn publish_quietly(&mut self) -> u16;

    /// Returns true if the driver wants a call for any element that was published since the last
    /// call of this function, or if a call is forced. Pushed elements must be published.
    #[must_use = "the driver may sleep until it is called"]
    fn needs_call(&mut self) -> bool;

    /// Makes all pushed elements visible to the driver. Returns true if the driver wants a call for
    /// any element since the last `publish`, or if a call is forced, with or without new elements.
    #[inline]
    #[must_use = "the driver may sleep until it is called"]
    fn publish(&mut self) -> bool {
        self.publish_quietly();
        self.needs_call()
    }

    /// Returns true if the driver seems to sleep until called for elements since the last
    /// `publish`, or for the next one. A cheap check, which may miss a driver that has just asked.
    fn driver_sleeps(&self) -> bool;
}
