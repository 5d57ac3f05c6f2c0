//! Open clusters, pools and images, without raw pointers.

#[cfg(test)]
pub(super) mod fake;

use std::ffi::{CStr, CString, c_char, c_int};
use std::io;
use std::mem::ManuallyDrop;
use std::ptr::{null, null_mut};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockio::Io;
use blockio::driver::ForeignOp;
use blockio::executor::start_thread;
use iomem::{Buffers, LentBlock};

use super::api::{Api, EXCLUSIVE, Handle, THICK, api};
use super::pending_ops::PendingOps;

/// More bytes than ids and values of options have.
const TEXT_MAX: usize = 256;

/// A handle of a cluster.
pub(super) struct Cluster {
    api: &'static Api,
    handle: Handle,
}

// SAFETY: librados lets any thread use its handles, several at once too.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// Makes an unconnected handle for a user, such as `client.admin`. The outer error is the
    /// reason why there are no libraries.
    pub(super) fn new(user: &CStr) -> Result<io::Result<Self>, String> {
        let api = api()?;
        let mut handle = null_mut();
        // SAFETY: the texts end with a zero, and the handle is written to memory of ours.
        let made =
            unsafe { (api.rados_create2)(&raw mut handle, c"ceph".as_ptr(), user.as_ptr(), 0) };
        Ok(checked(made).map(|()| Self { api, handle }))
    }

    /// Reads a configuration, without a path from the usual places.
    pub(super) fn read_configuration(&self, path: Option<&CStr>) -> io::Result<()> {
        let path = path.map_or(null(), CStr::as_ptr);
        // SAFETY: the handle is ours, the path ends with a zero or is null.
        checked(unsafe { (self.api.rados_conf_read_file)(self.handle, path) })
    }

    /// Sets an option.
    pub(super) fn set(&self, name: &CStr, value: &CStr) -> io::Result<()> {
        let (name, value) = (name.as_ptr(), value.as_ptr());
        // SAFETY: the handle is ours, the texts end with a zero.
        checked(unsafe { (self.api.rados_conf_set)(self.handle, name, value) })
    }

    /// The value of an option.
    pub(super) fn get(&self, name: &CStr) -> io::Result<String> {
        // SAFETY: the handle is ours, the name ends with a zero, the memory has that length.
        text(|memory, len| unsafe {
            (self.api.rados_conf_get)(self.handle, name.as_ptr(), memory, len)
        })
    }

    /// Connects, and waits for the monitors.
    pub(super) fn connect(&self) -> io::Result<()> {
        // SAFETY: the handle is ours.
        checked(unsafe { (self.api.rados_connect)(self.handle) })
    }

    /// The id of the cluster, once it is connected.
    pub(super) fn id(&self) -> io::Result<String> {
        // SAFETY: the handle is ours, the memory has that length.
        text(|memory, len| unsafe { (self.api.rados_cluster_fsid)(self.handle, memory, len) })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: the handle is ours. A pool owns its cluster and is closed first.
        unsafe { (self.api.rados_shutdown)(self.handle) };
    }
}

/// An open pool, in one of its namespaces.
pub(super) struct Pool {
    cluster: Cluster,
    handle: Handle,
}

// SAFETY: as for `Cluster`.
unsafe impl Send for Pool {}
// SAFETY: as for `Cluster`.
unsafe impl Sync for Pool {}

impl Pool {
    pub(super) fn open(cluster: Cluster, name: &CStr, namespace: &CStr) -> io::Result<Self> {
        let (api, mut handle) = (cluster.api, null_mut());
        // SAFETY: the cluster is connected, the texts end with a zero, and the handle is written
        // to memory of ours.
        unsafe {
            checked((api.rados_ioctx_create)(cluster.handle, name.as_ptr(), &raw mut handle))?;
            (api.rados_ioctx_set_namespace)(handle, namespace.as_ptr());
        }
        Ok(Self { cluster, handle })
    }

    pub(super) fn number(&self) -> i64 {
        // SAFETY: the handle is ours.
        unsafe { (self.cluster.api.rados_ioctx_get_id)(self.handle) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the handle is ours. An image owns its pool, so none is left.
        unsafe { (self.cluster.api.rados_ioctx_destroy)(self.handle) };
    }
}

/// An open image. Dropping it waits for its operations, unless they were abandoned.
pub(super) struct Image {
    open: ManuallyDrop<OpenImage>,
    waiting: Arc<PendingOps>,
    /// The number of changes of the image that librbd has reported.
    changes: Arc<AtomicU64>,
}

/// The parts of an image that its drop closes.
struct OpenImage {
    api: &'static Api,
    handle: Handle,
    watch: Option<u64>,
    /// The number to which librbd's watch adds.
    _changes: Arc<AtomicU64>,
    _pool: Pool,
}

// SAFETY: librbd lets any thread use its images, several at once too.
unsafe impl Send for OpenImage {}
// SAFETY: as above.
unsafe impl Sync for OpenImage {}

impl Drop for OpenImage {
    fn drop(&mut self) {
        // SAFETY: the handle is ours, and has no other users left. Errors were reported to the
        // requests whose operations failed.
        unsafe {
            if let Some(watch) = self.watch {
                (self.api.rbd_update_unwatch)(self.handle, watch);
            }
            (self.api.rbd_close)(self.handle);
        }
    }
}

/// State that is kept for an operation until it has ended.
struct OpState {
    api: &'static Api,
    waiting: Arc<PendingOps>,
    number: usize,
    /// The memory that librbd reads or writes. It is ours: an operation that was abandoned may end
    /// after its request was answered with a failure.
    _memory: Option<LentBlock>,
}

impl Image {
    /// Opens an image, and waits for the cluster.
    pub(super) fn open(
        pool: Pool,
        name: &CStr,
        snapshot: Option<&CStr>,
        read_only: bool,
    ) -> io::Result<Self> {
        let (api, mut handle) = (pool.cluster.api, null_mut());
        let function = if read_only { api.rbd_open_read_only } else { api.rbd_open };
        let snapshot = snapshot.map_or(null(), CStr::as_ptr);
        // SAFETY: the pool is open and stays so with the image, the texts end with a zero or are
        // null, and the handle is written to memory of ours.
        checked(unsafe { function(pool.handle, name.as_ptr(), &raw mut handle, snapshot) })?;
        let changes = Arc::new(AtomicU64::new(0));
        let waiting = Arc::new(PendingOps::default());
        let of_watch = Arc::clone(&changes);
        let mut open = OpenImage { api, handle, watch: None, _changes: of_watch, _pool: pool };
        let (mut watch, argument) = (0, Arc::as_ptr(&changes).cast_mut().cast());
        // SAFETY: the counter lives until the watch has ended, in `drop`.
        let watched =
            unsafe { (api.rbd_update_watch)(handle, &raw mut watch, on_change, argument) };
        checked(watched)?;
        open.watch = Some(watch);
        Ok(Self { open: ManuallyDrop::new(open), waiting, changes })
    }

    pub(super) fn pending_ops(&self) -> &Arc<PendingOps> {
        &self.waiting
    }

    /// The number of changes that librbd has reported. Each may have given the image another size.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    pub(super) fn id(&self) -> io::Result<String> {
        // SAFETY: the handle is ours, the memory has that length.
        text(|memory, len| unsafe { (self.open.api.rbd_get_id)(self.open.handle, memory, len) })
    }

    /// The size in bytes. Fails with `EFBIG` if no offset would reach the end.
    pub(super) fn size_bytes(&self) -> io::Result<u64> {
        let size = self.number(self.open.api.rbd_get_size)?;
        let is_reached = i64::try_from(size).is_ok();
        if is_reached { Ok(size) } else { Err(io::Error::from_raw_os_error(libc::EFBIG)) }
    }

    pub(super) fn stripe_unit(&self) -> io::Result<u64> {
        self.number(self.open.api.rbd_get_stripe_unit)
    }

    pub(super) fn stripe_count(&self) -> io::Result<u64> {
        self.number(self.open.api.rbd_get_stripe_count)
    }

    fn number(&self, get: unsafe extern "C" fn(Handle, *mut u64) -> c_int) -> io::Result<u64> {
        let mut number = 0;
        // SAFETY: the handle is ours, and the number is written to memory of ours.
        checked(unsafe { get(self.open.handle, &raw mut number) })?;
        Ok(number)
    }

    /// Calls a function of the image that waits for the cluster.
    fn wait(&self, function: unsafe extern "C" fn(Handle) -> c_int) -> io::Result<()> {
        // SAFETY: the handle is ours.
        checked(unsafe { function(self.open.handle) })
    }

    /// Changes the size, and waits for the cluster.
    pub(super) fn resize(&self, size_bytes: u64) -> io::Result<()> {
        // SAFETY: the handle is ours.
        checked(unsafe { (self.open.api.rbd_resize)(self.open.handle, size_bytes) })
    }

    /// Acquires the exclusive lock for as long as the image is open. Waits for the cluster, and for
    /// the lock of a client that has vanished.
    pub(super) fn lock(&self) -> io::Result<()> {
        // SAFETY: the handle is ours.
        checked(unsafe { (self.open.api.rbd_lock_acquire)(self.open.handle, EXCLUSIVE) })
    }

    /// Releases the exclusive lock. Fails if another client has it.
    pub(super) fn unlock(&self) -> io::Result<()> {
        self.wait(self.open.api.rbd_lock_release)
    }

    /// Flushes the cache, and waits for the cluster.
    pub(super) fn write_back(&self) -> io::Result<()> {
        self.wait(self.open.api.rbd_flush)
    }

    /// Drops the cache, after it is written.
    pub(super) fn drop_cache(&self) -> io::Result<()> {
        self.wait(self.open.api.rbd_invalidate_cache)
    }

    /// Begins to read into all of `memory`, of which `buffers` is a list.
    pub(super) fn read(
        &self,
        io: &Rc<Io>,
        offset: u64,
        memory: LentBlock,
        buffers: Buffers,
    ) -> ForeignOp {
        let (start, bytes) = (memory.start(), buffers.bytes());
        // SAFETY: the memory has that many bytes. It stays until the operation has ended, because
        // its `OpState` owns it, even if no task waits.
        self.begin(io, Some(memory), buffers, |api, image, completion| unsafe {
            (api.rbd_aio_read)(image, offset, bytes, start.cast(), completion)
        })
    }

    /// Begins to write all of `memory`, of which `buffers` is a list.
    pub(super) fn write(
        &self,
        io: &Rc<Io>,
        offset: u64,
        memory: LentBlock,
        buffers: Buffers,
    ) -> ForeignOp {
        let (start, bytes) = (memory.start(), buffers.bytes());
        // SAFETY: as in `read`.
        self.begin(io, Some(memory), buffers, |api, image, completion| unsafe {
            (api.rbd_aio_write)(image, offset, bytes, start.cast(), completion)
        })
    }

    pub(super) fn flush(&self, io: &Rc<Io>) -> ForeignOp {
        // SAFETY: only open handles are passed.
        self.begin(io, None, Buffers::empty(), |api, image, completion| unsafe {
            (api.rbd_aio_flush)(image, completion)
        })
    }

    pub(super) fn discard(&self, io: &Rc<Io>, offset: u64, len: u64) -> ForeignOp {
        // SAFETY: as in `flush`.
        self.begin(io, None, Buffers::empty(), |api, image, completion| unsafe {
            (api.rbd_aio_discard)(image, offset, len, completion)
        })
    }

    pub(super) fn write_zeroes(
        &self,
        io: &Rc<Io>,
        offset: u64,
        len: usize,
        may_unmap: bool,
    ) -> ForeignOp {
        let flags = if may_unmap { 0 } else { THICK };
        // SAFETY: as in `flush`.
        self.begin(io, None, Buffers::empty(), |api, image, completion| unsafe {
            (api.rbd_aio_write_zeroes)(image, offset, len, completion, flags, 0)
        })
    }

    /// Begins an operation. `submit` passes it to librbd together with its completion. Does not
    /// wait: librbd hands the operation to a thread of its own at once (`rbd_non_blocking_aio`).
    fn begin(
        &self,
        io: &Rc<Io>,
        memory: Option<LentBlock>,
        buffers: Buffers,
        submit: impl FnOnce(&Api, Handle, Handle) -> c_int,
    ) -> ForeignOp {
        let (op, completer) = io.foreign_op(buffers);
        let Some(number) = self.waiting.begin(completer) else { return op };
        let begun = OpState {
            api: self.open.api,
            waiting: Arc::clone(&self.waiting),
            number,
            _memory: memory,
        };
        let argument = Box::into_raw(Box::new(begun));
        let mut completion = null_mut();
        // SAFETY: the argument stays until `on_answer`, or the code below, has taken it back.
        let result = unsafe {
            let made = (self.open.api.rbd_aio_create_completion)(
                argument.cast(),
                on_answer,
                &raw mut completion,
            );
            if made < 0 { made } else { submit(self.open.api, self.open.handle, completion) }
        };
        if let Err(error) = checked(result) {
            // SAFETY: `on_answer` is not called for an operation that was not begun, so both are
            // still ours.
            let begun = unsafe {
                if !completion.is_null() {
                    (self.open.api.rbd_aio_release)(completion);
                }
                Box::from_raw(argument)
            };
            begun.waiting.end(number, Err(error));
        }
        op
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: it is taken once, and not used after this.
        let open = unsafe { ManuallyDrop::take(&mut self.open) };
        if self.waiting.was_abandoned() {
            // A thread closes it when the cluster answers. If that cannot start, it is closed here.
            let _ = start_thread("ringhaul-rbd", move || drop(open));
        }
    }
}

/// Called by a thread of librbd that has ended an operation.
unsafe extern "C" fn on_answer(completion: Handle, argument: Handle) {
    // SAFETY: the argument is that of `begin`, and librbd calls this once for each.
    let begun = unsafe { Box::from_raw(argument.cast::<OpState>()) };
    // SAFETY: the completion is ours to release from here on.
    let result = unsafe {
        let result = (begun.api.rbd_aio_get_return_value)(completion);
        (begun.api.rbd_aio_release)(completion);
        result
    };
    let result = usize::try_from(result).map_err(|_| {
        let errno = i32::try_from(result.unsigned_abs()).unwrap_or(libc::EIO);
        io::Error::from_raw_os_error(errno)
    });
    begun.waiting.end(begun.number, result);
}

/// Called by a thread of librbd that has noticed a change.
unsafe extern "C" fn on_change(argument: Handle) {
    // SAFETY: the argument is the counter of an image, which keeps it as long as it watches.
    let changes = unsafe { &*argument.cast::<AtomicU64>() };
    changes.fetch_add(1, Ordering::Release);
}

/// The text that a function writes to memory of a given length, with a zero at its end.
fn text(write: impl FnOnce(*mut c_char, usize) -> c_int) -> io::Result<String> {
    let mut memory = [0; TEXT_MAX];
    checked(write(memory.as_mut_ptr().cast(), TEXT_MAX - 1))?;
    let text = CStr::from_bytes_until_nul(&memory).map_err(io::Error::other)?;
    Ok(text.to_string_lossy().into_owned())
}

fn checked(result: c_int) -> io::Result<()> {
    match result {
        0.. => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno.checked_neg().unwrap_or(libc::EIO))),
    }
}

/// Converts a text for the libraries.
pub(super) fn c_text(text: &str) -> io::Result<CString> {
    CString::new(text).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}
