//! An image in memory behind the functions of librbd, for tests. Operations end within the call
//! that begins them.

use std::ffi::{c_char, c_int};
use std::ops::Range;
use std::ptr::null_mut;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Cluster, Image, Pool};
use crate::rbd::api::{Api, Handle, OnAnswer, OnChange};

/// An operation: its kind, its offset and its bytes.
pub(in crate::rbd) type Op = (&'static str, u64, u64);

static API: Api = Api {
    rados_shutdown,
    rados_ioctx_destroy,
    rbd_open,
    rbd_close,
    rbd_get_size,
    rbd_update_watch,
    rbd_update_unwatch,
    rbd_aio_create_completion,
    rbd_aio_get_return_value,
    rbd_aio_release,
    rbd_aio_read,
    rbd_aio_write,
    rbd_aio_flush,
    rbd_flush,
    rbd_invalidate_cache,
    rbd_lock_acquire,
    rbd_lock_release,
    rbd_aio_discard,
    rbd_aio_write_zeroes,
    ..Api::ABSENT
};

/// The image as its cluster has it.
#[derive(Clone, Default)]
pub(in crate::rbd) struct FakeImage(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    content: Vec<u8>,
    /// The function to call after a change of the size, and its argument.
    watch: Option<(OnChange, usize)>,
    /// The errno with which all operations fail; 0 for none.
    errno: i32,
    ops: Vec<Op>,
    /// The size that the image gets during the next query of its size.
    next_size: Option<usize>,
    /// True to keep discards and zeroes unanswered.
    holds: bool,
    /// Completions of these, with their results.
    held: Vec<(usize, isize)>,
}

impl FakeImage {
    pub(in crate::rbd) fn new(content: &[u8]) -> Self {
        let fake = Self::default();
        fake.state().content = content.to_vec();
        fake
    }

    pub(in crate::rbd) fn open(&self) -> Image {
        let cluster = Cluster { api: &API, handle: null_mut() };
        let handle = Arc::into_raw(Arc::clone(&self.0)).cast_mut().cast();
        Image::open(Pool { cluster, handle }, c"image", None, false).unwrap()
    }

    pub(in crate::rbd) fn content(&self) -> Vec<u8> {
        self.state().content.clone()
    }

    /// Gives the image another size, as another client does.
    pub(in crate::rbd) fn resize(&self, bytes: usize) {
        resize(&self.0, bytes);
    }

    /// Gives the image another size during the next query, which finds the present one.
    pub(in crate::rbd) fn resize_during_query(&self, bytes: usize) {
        self.state().next_size = Some(bytes);
    }

    /// Keeps discards and zeroes unanswered until [`answer_held`](Self::answer_held).
    pub(in crate::rbd) fn hold(&self) {
        self.state().holds = true;
    }

    pub(in crate::rbd) fn answer_held(&self) {
        let held = std::mem::take(&mut self.state().held);
        for (completion, result) in held {
            answer(completion as Handle, result);
        }
    }

    /// Makes all operations fail; 0 for none.
    pub(in crate::rbd) fn fail_with(&self, errno: i32) {
        self.state().errno = errno;
    }

    /// The operations since the last call.
    pub(in crate::rbd) fn take_ops(&self) -> Vec<Op> {
        std::mem::take(&mut self.state().ops)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Notes an operation, and returns the part of its range that is in the image, or a negative
    /// errno.
    fn begin(&mut self, op: Op) -> Result<Range<usize>, isize> {
        let (_, offset, len) = op;
        self.ops.push(op);
        let size = self.content.len() as u64;
        match self.errno {
            0 if len > 0 && offset >= size => Err(-(libc::EINVAL as isize)),
            0 => {
                Ok(iomem::fits(offset, "a place")..iomem::fits((offset + len).min(size), "an end"))
            }
            errno => Err(-(errno as isize)),
        }
    }
}

fn resize(image: &Mutex<State>, bytes: usize) {
    let watch = {
        let mut state = image.lock().unwrap_or_else(PoisonError::into_inner);
        state.content.resize(bytes, 0);
        state.watch
    };
    if let Some((on_change, argument)) = watch {
        // SAFETY: the watch has not ended, so its argument is there.
        unsafe { on_change(argument as Handle) };
    }
}

/// The state of an open image.
fn state(image: Handle) -> MutexGuard<'static, State> {
    shared(image).lock().unwrap_or_else(PoisonError::into_inner)
}

fn shared(image: Handle) -> &'static Mutex<State> {
    // SAFETY: the pool of the image keeps its state until the image is closed.
    unsafe { &*image.cast::<Mutex<State>>() }
}

struct Completion {
    on_answer: OnAnswer,
    argument: Handle,
    result: isize,
}

/// Ends an operation.
fn answer(completion: Handle, result: isize) -> c_int {
    // SAFETY: the completion is that of a new operation, so it was not released.
    let (on_answer, argument) = unsafe {
        let completion = &mut *completion.cast::<Completion>();
        completion.result = result;
        (completion.on_answer, completion.argument)
    };
    // SAFETY: each operation ends once, with its own completion and argument.
    unsafe { on_answer(completion, argument) };
    0
}

unsafe extern "C" fn rados_shutdown(_: Handle) {}

unsafe extern "C" fn rados_ioctx_destroy(pool: Handle) {
    // SAFETY: the handle is that of `FakeImage::open`, and is given back once.
    drop(unsafe { Arc::from_raw(pool.cast::<Mutex<State>>()) });
}

unsafe extern "C" fn rbd_open(
    pool: Handle,
    _: *const c_char,
    image: *mut Handle,
    _: *const c_char,
) -> c_int {
    // SAFETY: the caller has room for the handle.
    unsafe { *image = pool };
    0
}

unsafe extern "C" fn rbd_close(_: Handle) -> c_int {
    0
}

unsafe extern "C" fn rbd_get_size(image: Handle, size: *mut u64) -> c_int {
    let (now, next) = {
        let mut state = state(image);
        (state.content.len(), state.next_size.take())
    };
    // SAFETY: the caller has room for the size.
    unsafe { *size = now as u64 };
    next.into_iter().for_each(|bytes| resize(shared(image), bytes));
    0
}

unsafe extern "C" fn rbd_update_watch(
    image: Handle,
    _: *mut u64,
    on_change: OnChange,
    argument: Handle,
) -> c_int {
    state(image).watch = Some((on_change, argument as usize));
    0
}

unsafe extern "C" fn rbd_update_unwatch(image: Handle, _: u64) -> c_int {
    state(image).watch = None;
    0
}

unsafe extern "C" fn rbd_aio_create_completion(
    argument: Handle,
    on_answer: OnAnswer,
    completion: *mut Handle,
) -> c_int {
    let made = Box::new(Completion { on_answer, argument, result: 0 });
    // SAFETY: the caller has room for the handle.
    unsafe { *completion = Box::into_raw(made).cast() };
    0
}

unsafe extern "C" fn rbd_aio_get_return_value(completion: Handle) -> isize {
    // SAFETY: the completion was not released.
    unsafe { (*completion.cast::<Completion>()).result }
}

unsafe extern "C" fn rbd_aio_release(completion: Handle) {
    // SAFETY: the completion is that of `rbd_aio_create_completion`, and is given back once.
    drop(unsafe { Box::from_raw(completion.cast::<Completion>()) });
}

unsafe extern "C" fn rbd_aio_read(
    image: Handle,
    offset: u64,
    len: usize,
    memory: *mut c_char,
    completion: Handle,
) -> c_int {
    // SAFETY: the memory has that many bytes, and is the operation's until it ends.
    let memory = unsafe { slice::from_raw_parts_mut(memory.cast::<u8>(), len) };
    let read = {
        let mut state = state(image);
        state.begin(("read", offset, len as u64)).map(|range| {
            let bytes = range.len();
            memory[..bytes].copy_from_slice(&state.content[range]);
            iomem::fits(bytes, "bytes")
        })
    };
    answer(completion, read.unwrap_or_else(|errno| errno))
}

unsafe extern "C" fn rbd_aio_write(
    image: Handle,
    offset: u64,
    len: usize,
    memory: *const c_char,
    completion: Handle,
) -> c_int {
    // SAFETY: as in `rbd_aio_read`.
    let memory = unsafe { slice::from_raw_parts(memory.cast::<u8>(), len) };
    let written = {
        let mut state = state(image);
        state.begin(("write", offset, len as u64)).map(|range| {
            let bytes = range.len();
            state.content[range].copy_from_slice(&memory[..bytes]);
        })
    };
    answer(completion, written.err().unwrap_or(0))
}

unsafe extern "C" fn rbd_aio_flush(image: Handle, completion: Handle) -> c_int {
    let flushed = state(image).begin(("flush", 0, 0));
    answer(completion, flushed.err().unwrap_or(0))
}

unsafe extern "C" fn rbd_flush(image: Handle) -> c_int {
    let flushed = state(image).begin(("write back", 0, 0));
    flushed.map_or_else(|error| c_int::try_from(error).unwrap(), |_| 0)
}

unsafe extern "C" fn rbd_invalidate_cache(image: Handle) -> c_int {
    let dropped = state(image).begin(("drop cache", 0, 0));
    dropped.map_or_else(|error| c_int::try_from(error).unwrap(), |_| 0)
}

unsafe extern "C" fn rbd_lock_acquire(image: Handle, _: c_int) -> c_int {
    let locked = state(image).begin(("lock", 0, 0));
    locked.map_or_else(|error| c_int::try_from(error).unwrap(), |_| 0)
}

unsafe extern "C" fn rbd_lock_release(image: Handle) -> c_int {
    state(image).ops.push(("unlock", 0, 0));
    0
}

fn clear(image: Handle, op: Op, completion: Handle) -> c_int {
    let cleared = {
        let mut state = state(image);
        let cleared = state.begin(op).map(|range| state.content[range].fill(0));
        if state.holds {
            state.held.push((completion as usize, cleared.err().unwrap_or(0)));
            return 0;
        }
        cleared
    };
    answer(completion, cleared.err().unwrap_or(0))
}

unsafe extern "C" fn rbd_aio_discard(
    image: Handle,
    offset: u64,
    len: u64,
    completion: Handle,
) -> c_int {
    clear(image, ("discard", offset, len), completion)
}

unsafe extern "C" fn rbd_aio_write_zeroes(
    image: Handle,
    offset: u64,
    len: usize,
    completion: Handle,
    flags: c_int,
    _: c_int,
) -> c_int {
    let kind = if flags == 0 { "unmap" } else { "zero" };
    clear(image, (kind, offset, len as u64), completion)
}
