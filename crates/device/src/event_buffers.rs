//! The buffers that a driver makes available for events, such as those of virtio-scsi's event queue
//! (virtio 1.3, section 5.6.6.3).

use std::cell::RefCell;
use std::rc::Rc;

use virtqueue::Chain;

use crate::queue::Queue;
use crate::queue_task::Handler;

/// Chains that nothing was written to yet. They go back to the driver when the queue stops, because
/// nobody else will ever answer them.
#[derive(Default)]
pub(crate) struct EventBuffers {
    held: RefCell<Vec<Chain>>,
}

impl Handler for EventBuffers {
    async fn serve(self: Rc<Self>, _: Rc<Queue>, chain: Chain) {
        self.held.borrow_mut().push(chain);
    }

    fn stop(&self, queue: &Queue) {
        for chain in self.held.take() {
            queue.push(chain.head, 0);
        }
    }
}
