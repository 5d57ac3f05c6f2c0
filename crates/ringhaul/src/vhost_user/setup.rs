//! What a session works with.

use std::sync::Arc;
use std::task::Waker;

use blockio::Remote;
use device::Device;
use virtqueue::MappingRules;

use super::examiner::Examiner;

/// What a session works with.
#[derive(Clone)]
pub struct SessionSetup {
    /// The device that is served.
    pub device: Device,
    /// Queue `i` is served by IoThread `i` modulo their number, which is not 0.
    pub threads: Vec<Remote>,
    /// What the front-end may have mapped.
    pub rules: MappingRules,
    /// Where descriptors are examined that may make one wait. One for each export.
    pub examiner: Arc<Examiner>,
    /// Woken when [`Session::progress`](super::Session::progress) has something to do that its
    /// socket does not show.
    pub waker: Waker,
}
