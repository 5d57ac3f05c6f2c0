//! Foreign ops in the combinators of other crates.

use std::pin::pin;
use std::rc::Rc;

use futures_util::future::{Either, join, select};
use futures_util::stream::{FuturesUnordered, StreamExt};
use iomem::Buffers;

use super::BLOCK;
use crate::thread::foreign_op::ForeignCompleter;
use crate::thread::io::Io;

/// A function that completes a foreign op at some time.
pub(super) type CompleteForeign = Rc<dyn Fn(ForeignCompleter)>;

/// Starts a thread that completes the ops that it gets, the last first.
pub(super) fn other_thread() -> CompleteForeign {
    let (sender, receiver) = std::sync::mpsc::channel::<ForeignCompleter>();
    std::thread::spawn(move || {
        while let Ok(first) = receiver.recv() {
            let mut all = vec![first];
            all.extend(receiver.try_iter());
            while let Some(completer) = all.pop() {
                assert!(completer.complete(Ok(BLOCK)));
            }
        }
    });
    Rc::new(move |completer| sender.send(completer).unwrap())
}

pub(super) async fn foreign(io: Rc<Io>, complete: CompleteForeign) {
    let start = || {
        let (op, completer) = io.foreign_op(Buffers::aligned(BLOCK, BLOCK));
        complete(completer);
        async move {
            let completion = op.await;
            assert_eq!((completion.result.unwrap(), completion.buffers.bytes()), (BLOCK, BLOCK));
        }
    };
    let mut all: FuturesUnordered<_> = (0..16).map(|_| start()).collect();
    while all.next().await.is_some() {}
    for round in 0..8 {
        match select(pin!(start()), pin!(start())).await {
            // The loser is dropped at the end of the round.
            Either::Left(_) if round % 2 == 0 => {}
            Either::Left((_, loser)) => loser.await,
            Either::Right((_, loser)) => loser.await,
        }
    }
    join(start(), join(start(), start())).await;
}
