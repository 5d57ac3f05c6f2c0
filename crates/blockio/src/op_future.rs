//! The future of an op.

use std::pin::Pin;
use std::task::{Context, Poll};

use crate::io::Io;
use crate::op::{Completion, Op};

/// An op on its way. Dropping it does not take the op back: its slot keeps everything that the
/// kernel uses until the completion.
pub(crate) struct OpFuture<'a> {
    io: &'a Io,
    state: OpState,
}

enum OpState {
    New(Op),
    Waiting(u32),
    Taken,
}

impl Io {
    /// Runs `op` to its completion; `ECANCELED` once the IoThread has ended. In a turn it is
    /// submitted at the end of the run, with all others; outside of one at once, and then it may be
    /// complete without waiting.
    #[inline]
    pub(crate) fn op(&self, op: Op) -> OpFuture<'_> {
        OpFuture { io: self, state: OpState::New(op) }
    }
}

impl Future for OpFuture<'_> {
    type Output = Completion;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Completion> {
        let slot = match std::mem::replace(&mut self.state, OpState::Taken) {
            OpState::New(op) => {
                let slot = self.io.start_op(op, self.io.running.owner(cx));
                if let Some(completion) = self.io.completion_at_once(slot) {
                    return Poll::Ready(completion);
                }
                slot
            }
            OpState::Waiting(slot) => match self.io.take_completion(slot, cx) {
                Some(completion) => return Poll::Ready(completion),
                None => slot,
            },
            OpState::Taken => return Poll::Pending,
        };
        self.state = OpState::Waiting(slot);
        Poll::Pending
    }
}

impl Drop for OpFuture<'_> {
    fn drop(&mut self) {
        if let OpState::Waiting(slot) = self.state {
            self.io.abandon_op(slot);
        }
    }
}
