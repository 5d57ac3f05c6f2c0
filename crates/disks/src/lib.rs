//! Disks that are no local file: images, encrypted disks, and disks of servers and clusters.
//!
//! Each kind has a module with a function `open`, which returns a
//! [`DiskSource`](blockio::DiskSource) over the seam of `blockio::driver`. A layer, such as `qcow2`
//! or `luks`, is opened over the source of the disk below.
//!
//! `blockio::driver` explains how to add a kind. A program that serves disks gives the kind a name,
//! as `spec/disk.rs` of the daemon does.

#[cfg(test)]
#[cfg(feature = "luks")]
mod kinds_tests;
#[cfg(feature = "luks")]
pub mod luks;
pub mod nbd;
#[cfg(feature = "qcow2")]
pub mod qcow2;
#[cfg(feature = "rbd")]
pub mod rbd;
#[cfg(test)]
#[cfg(feature = "luks")]
mod stable_tests;
