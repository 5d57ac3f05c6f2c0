//! Messages with descriptors on Unix sockets.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// The most descriptors that the kernel lets through with one message (`SCM_MAX_FD`).
pub(crate) const FDS_MAX: usize = 253;

/// A received message, or a piece of a stream.
pub(crate) struct Received {
    /// The number of bytes.
    pub(crate) bytes: usize,
    /// The descriptors, which programs that this process starts do not inherit.
    pub(crate) fds: Vec<OwnedFd>,
    /// True if descriptors are missing, because the limit on open files is reached.
    pub(crate) lacks_fds: bool,
}

/// Sends bytes with at most [`FDS_MAX`] descriptors. Returns the number of bytes that the kernel
/// has taken.
///
/// # Errors
///
/// When there are too many descriptors, or the kernel refuses the message.
pub(crate) fn send(
    socket: impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags | SendFlags::NOSIGNAL)?)
}

/// Receives into `bytes`.
///
/// # Errors
///
/// When the kernel refuses.
pub(crate) fn receive(
    socket: impl AsFd,
    bytes: &mut [u8],
    flags: RecvFlags,
) -> rustix::io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let slices = &mut [IoSliceMut::new(bytes)];
    let received = recvmsg(socket, slices, &mut control, flags | RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            fds.extend(some);
        }
    }
    let lacks_fds = received.flags.contains(ReturnFlags::CTRUNC);
    Ok(Received { bytes: received.bytes, fds, lacks_fds })
}
