//! The set-up of a session.

use std::sync::Arc;
use std::task::Waker;

use blockio::Remote;
use device::Device;
use virtqueue::MappingRules;

use super::examiner::Examiner;

/// The device, threads and rules of a session.
#[derive(Clone)]
pub struct SessionSetup {
    /// The device that is served.
    pub device: Device,
    /// Queue `i` is served by IoThread `i` modulo their number, which is not 0.
    pub threads: Vec<Remote>,
    /// The rules for memory that the front-end shares.
    pub rules: MappingRules,
    /// The threads that examine descriptors which may block. Each export has its own.
    pub examiner: Arc<Examiner>,
    /// The waker for work of [`Session::progress`](super::Session::progress) that the socket does
    /// not announce.
    pub waker: Waker,
}
