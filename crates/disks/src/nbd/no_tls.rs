//! The stand-in for TLS in builds without the feature `nbd-tls`.

use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;

use super::handshake::Stream;
use super::options::{NbdOptions, NbdTls};

/// The TLS of a connection, which no connection has.
pub(super) enum Tls {}

/// Refuses the connection.
///
/// # Errors
///
/// Always.
pub(super) fn agree<T>(
    _: &NbdOptions,
    _: &NbdTls,
    _: &mut (impl Read + Write),
    _: impl FnOnce(&mut dyn Stream) -> Result<T, String>,
) -> Result<(Tls, T), String> {
    Err("this program was built without TLS; build it with the feature nbd-tls".to_owned())
}

impl Tls {
    pub(super) fn has_unsent(&self) -> bool {
        match *self {}
    }

    pub(super) fn push(&mut self, _: BorrowedFd<'_>) -> io::Result<()> {
        match *self {}
    }

    pub(super) fn encrypt(&mut self, _: &[u8]) -> io::Result<()> {
        match *self {}
    }

    pub(super) fn pull(
        &mut self,
        _: BorrowedFd<'_>,
        _: impl FnMut(&[u8]) -> usize,
    ) -> io::Result<usize> {
        match *self {}
    }
}
