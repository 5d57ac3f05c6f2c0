//! Moves of a guest on each kind of disk.

use anyhow::Result;

use super::moves_there_and_back;
use super::scene::{Device, DiskKind};

#[test]
fn a_guest_moves_with_io_uring() -> Result<()> {
    moves_there_and_back(Device::Blk, DiskKind::Raw, &["--engine", "io_uring"])
}

#[test]
fn a_guest_moves_with_aio() -> Result<()> {
    moves_there_and_back(Device::Blk, DiskKind::Raw, &["--engine", "aio"])
}

#[test]
fn a_guest_moves_with_the_page_cache() -> Result<()> {
    let options = ["--engine", "threads", "--cache", "writeback"];
    moves_there_and_back(Device::Blk, DiskKind::Raw, &options)
}

#[test]
fn a_guest_moves_on_an_image() -> Result<()> {
    moves_there_and_back(Device::Blk, DiskKind::Qcow2, &[])
}

#[test]
fn a_guest_moves_on_an_nbd_server() -> Result<()> {
    moves_there_and_back(Device::Blk, DiskKind::Nbd, &[])
}

#[test]
fn a_guest_moves_on_a_unit() -> Result<()> {
    moves_there_and_back(Device::Scsi, DiskKind::Raw, &[])
}

#[test]
fn a_guest_moves_on_a_unit_with_an_image() -> Result<()> {
    moves_there_and_back(Device::Scsi, DiskKind::Qcow2, &[])
}

#[test]
fn a_guest_moves_with_packed_rings() -> Result<()> {
    moves_there_and_back(Device::PackedBlk, DiskKind::Raw, &["--engine", "io_uring"])
}

#[test]
fn a_guest_moves_on_a_unit_with_packed_rings() -> Result<()> {
    moves_there_and_back(Device::PackedScsi, DiskKind::Qcow2, &[])
}

#[test]
fn a_guest_moves_on_a_unit_with_an_nbd_server() -> Result<()> {
    moves_there_and_back(Device::Scsi, DiskKind::Nbd, &[])
}
