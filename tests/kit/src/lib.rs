//! Building blocks of end-to-end tests: servers under test, and their clients.
//!
//! [`daemon`] and [`cli`] start Ringhaul, [`server`] starts it or qemu-storage-daemon for a guest.
//! [`frontend`] is a front-end that can misbehave, and [`guest`] boots real guests, which
//! [`libvirt`] can run. [`nbd_server`] and [`ceph`] run foreign servers with disks.
//! [`service_manager`] plays systemd, and a [`container`] has it. [`fuse`], [`system`] and
//! [`kernel_trace`] change or watch the machine, and [`file_trace`] watches a unit test. A
//! [`journal`] has all changes of a disk, which [`fuse`] and [`nbd_recorder`] record. A [`page`] of
//! the documents has examples.

pub mod ceph;
pub mod cli;
pub mod container;
pub mod control;
pub mod daemon;
pub mod file_trace;
pub mod frontend;
pub mod fuse;
pub mod guest;
pub mod journal;
pub mod kernel_trace;
pub mod libvirt;
pub mod nbd_recorder;
pub mod nbd_server;
pub mod page;
pub mod prometheus;
pub mod random;
pub mod rest;
pub mod server;
pub mod service_manager;
pub mod system;
