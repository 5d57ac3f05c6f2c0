//! A simulated kernel under the engines.
//!
//! A thread on which a [`World`] is [installed](install) has no real kernel for ops. Each submitted
//! op becomes a [`KernelOp`] of that world, which carries it out and answers it at a time of its
//! choice. The world's clock is the only one. Engines, slots, disks and the loop are the real ones;
//! so are eventfds. Several IoThreads can live on one such OS thread, to be stepped with
//! [`Wait::Never`](crate::Wait::Never), or with [`Wait::ForEvent`](crate::Wait::ForEvent) if
//! [`World::sleep`] does not wait.
//!
//! A world that makes all its choices from a seed repeats a run from the same seed.

mod aio;
mod pool;
mod ring;
mod world;

pub(in crate::engine) use aio::AioContext;
pub(in crate::engine) use pool::simulate_jobs;
pub(in crate::engine) use ring::Ring;
pub(in crate::engine) use world::sleep;
pub use world::{
    Installed, KernelOp, RingSetup, Signal, SqThread, World, install, is_readable, start_thread,
};
