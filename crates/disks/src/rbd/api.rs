//! The functions of librados and librbd that are used, and the ownership of their arguments. The
//! libraries are loaded when the first image is opened: nothing else needs them.

use std::ffi::{c_char, c_int, c_void};

use blockio::executor::Lock;
use libloading::os::unix::Library;

/// An opaque object of a library.
pub(super) type Handle = *mut c_void;

/// Called by a thread of librbd when an operation has ended, with its completion and the argument
/// of `rbd_aio_create_completion`.
pub(super) type OnAnswer = unsafe extern "C" fn(Handle, Handle);

/// Called by a thread of librbd with an argument when an image has changed.
pub(super) type OnChange = unsafe extern "C" fn(Handle);

/// librbd, which brings librados along: a lookup finds functions of both.
const LIBRARY: &str = "librbd.so.1";

macro_rules! functions {
    ($($(#[$about:meta])* $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions, as declared in the headers of Ceph 16. A function that returns an `int`
        /// returns a negative errno if it fails.
        pub(super) struct Api {
            $($(#[$about])*
            pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Api {
            fn load(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the types are from the headers, and the library stays loaded.
                    $($name: unsafe { *library.get(concat!(stringify!($name), "\0"))? },)*
                })
            }

            /// Functions that no test may call.
            #[cfg(test)]
            pub(super) const ABSENT: Self = Self {
                $($name: {
                    unsafe extern "C" fn absent($(_: $argument),*) $(-> $result)? {
                        unreachable!(concat!("a test calls ", stringify!($name)))
                    }
                    absent
                },)*
            };
        }
    };
}

functions! {
    /// Makes a handle for us, which `rados_shutdown` takes back. Both texts are copied.
    rados_create2(*mut Handle, *const c_char, *const c_char, u64) -> c_int;
    /// Reads a file. The path is not kept; without a path the usual places are searched.
    rados_conf_read_file(Handle, *const c_char) -> c_int;
    /// Sets an option. Both texts are copied.
    rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
    /// Writes the value of an option, with a zero at its end, to memory of ours of this length.
    rados_conf_get(Handle, *const c_char, *mut c_char, usize) -> c_int;
    /// Waits for the monitors, for at most `client_mount_timeout`.
    rados_connect(Handle) -> c_int;
    /// Takes the handle back, connected or not. No pool of it may be open.
    rados_shutdown(Handle);
    /// Writes the id of the cluster as text, with a zero at its end, to memory of ours of this
    /// length.
    rados_cluster_fsid(Handle, *mut c_char, usize) -> c_int;
    /// Makes a handle for us, which `rados_ioctx_destroy` takes back. The name is not kept.
    rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
    /// Takes the handle back. No image of it may be open.
    rados_ioctx_destroy(Handle);
    /// Chooses a namespace for later calls. The name is copied.
    rados_ioctx_set_namespace(Handle, *const c_char);
    /// The number of the pool.
    rados_ioctx_get_id(Handle) -> i64;
    /// Makes a handle for us, which `rbd_close` takes back. The names are not kept; the second one,
    /// of a snapshot, may be null. The pool stays ours and stays open for as long as the image.
    rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    /// Like `rbd_open`.
    rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    /// Takes the handle back, after waiting for the end of all operations.
    rbd_close(Handle) -> c_int;
    /// Writes the id of the image, with a zero at its end, to memory of ours of this length.
    rbd_get_id(Handle, *mut c_char, usize) -> c_int;
    /// Writes the present size in bytes, which may have to be asked for.
    rbd_get_size(Handle, *mut u64) -> c_int;
    /// Changes the size, and waits.
    rbd_resize(Handle, u64) -> c_int;
    /// Writes the number of bytes that lie together in one object.
    rbd_get_stripe_unit(Handle, *mut u64) -> c_int;
    /// Writes the number of objects over which neighbouring stripe units are spread.
    rbd_get_stripe_count(Handle, *mut u64) -> c_int;
    /// Registers a function for changes, until `rbd_update_unwatch`. Its argument stays ours.
    rbd_update_watch(Handle, *mut u64, OnChange, Handle) -> c_int;
    /// Ends the watch: when it returns, the function is not running and will not be called.
    rbd_update_unwatch(Handle, u64) -> c_int;
    /// Acquires the exclusive lock, and does not pass it on when other clients ask for it.
    rbd_lock_acquire(Handle, c_int) -> c_int;
    /// Releases the exclusive lock, if we have it, when the operations that need it have ended. The
    /// next operation that needs it acquires it again.
    rbd_lock_release(Handle) -> c_int;
    /// Makes a completion for us, which `rbd_aio_release` takes back. The argument stays ours and
    /// is passed to the function, which is called once for an operation that was begun, and never
    /// for one that could not be.
    rbd_aio_create_completion(Handle, OnAnswer, *mut Handle) -> c_int;
    /// The result of the operation: bytes or a negative errno. Within the call of the function, or
    /// later.
    rbd_aio_get_return_value(Handle) -> isize;
    /// Takes the completion back, also from within the call of its function.
    rbd_aio_release(Handle);
    /// Begins to read into memory, which librbd fills until the operation has ended. Until then the
    /// memory stays ours and in place. The result is the number of bytes read: the image may end
    /// within the range.
    rbd_aio_read(Handle, u64, usize, *mut c_char, Handle) -> c_int;
    /// Begins to write from memory, which stays ours and unchanged until the operation has ended.
    /// Bytes beyond the end of the image are left out silently.
    rbd_aio_write(Handle, u64, usize, *const c_char, Handle) -> c_int;
    /// Begins to flush everything written before the call.
    rbd_aio_flush(Handle, Handle) -> c_int;
    /// Flushes everything written, also in the cache of the image, and waits.
    rbd_flush(Handle) -> c_int;
    /// Drops the cache of the image, after it is written.
    rbd_invalidate_cache(Handle) -> c_int;
    /// Begins to give space back.
    rbd_aio_discard(Handle, u64, u64, Handle) -> c_int;
    /// Begins to make a range read as zeroes, according to flags such as [`THICK`].
    rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
}

/// A flag of `rbd_aio_write_zeroes`: the range keeps its space.
pub(super) const THICK: c_int = 1;

/// The mode of `rbd_lock_acquire` with a single owner.
pub(super) const EXCLUSIVE: c_int = 0;

/// The functions, once they are loaded.
static LOADED: Lock<Option<&'static Api>> = Lock::new(None);

/// The functions of the libraries, which are loaded by the first call and stay as long as the
/// program runs, because their threads do.
pub(super) fn api() -> Result<&'static Api, String> {
    let mut loaded = LOADED.lock();
    if let Some(api) = *loaded {
        return Ok(api);
    }
    // SAFETY: loading runs the constructors of Ceph's libraries, which need nothing from us.
    let library = unsafe { Library::new(LIBRARY) }.map_err(|error| {
        format!("cannot load the Ceph library ({error}); install it (Debian and Ubuntu: librbd1)")
    })?;
    let api = Api::load(&library).map_err(|error| {
        format!("the Ceph library is too old ({error}); install Ceph 16 or later")
    })?;
    std::mem::forget(library);
    Ok(loaded.insert(Box::leak(Box::new(api))))
}
