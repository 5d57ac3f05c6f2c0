//! The functions of librados and librbd that are used, and who owns what they are given. The
//! libraries are loaded when the first image is opened: nothing else needs them.

use std::ffi::{c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::Library;

/// Something of a library that only it knows.
pub(super) type Handle = *mut c_void;

/// What a thread of librbd calls when an operation has ended, with its completion and the argument
/// that this was made with.
pub(super) type OnAnswer = unsafe extern "C" fn(Handle, Handle);

/// What a thread of librbd calls with an argument when an image has changed.
pub(super) type OnChange = unsafe extern "C" fn(Handle);

/// librbd, which brings librados along: looking a function up finds those of both.
const LIBRARY: &str = "librbd.so.1";

macro_rules! functions {
    ($($(#[$about:meta])* $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions, as the headers of Ceph 16 have them. Those that return an `int` return a
        /// negative errno if they fail.
        pub(super) struct Api {
            $($(#[$about])*
            pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Api {
            fn of(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the types are those of the headers, and the library stays loaded.
                    $($name: unsafe { *library.get(concat!(stringify!($name), "\0"))? },)*
                })
            }
        }
    };
}

functions! {
    /// Makes a handle for us, which `rados_shutdown` takes back. Both texts are copied.
    rados_create2(*mut Handle, *const c_char, *const c_char, u64) -> c_int;
    /// Reads a file. The path is not kept; without one the usual places are looked at.
    rados_conf_read_file(Handle, *const c_char) -> c_int;
    /// Sets an option. Both texts are copied.
    rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
    /// Writes the value of an option, with a zero at its end, to memory of ours of this length.
    rados_conf_get(Handle, *const c_char, *mut c_char, usize) -> c_int;
    /// Waits for the monitors, for as long as `client_mount_timeout` says.
    rados_connect(Handle) -> c_int;
    /// Takes the handle back, connected or not. No pool of it is open any more.
    rados_shutdown(Handle);
    /// Writes the id of the cluster as text, with a zero at its end, to memory of ours of this
    /// length.
    rados_cluster_fsid(Handle, *mut c_char, usize) -> c_int;
    /// Makes a handle for us, which `rados_ioctx_destroy` takes back. The name is not kept.
    rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
    /// Takes the handle back. No image of it is open any more.
    rados_ioctx_destroy(Handle);
    /// Chooses a namespace for what follows. The name is copied.
    rados_ioctx_set_namespace(Handle, *const c_char);
    /// The number of the pool.
    rados_ioctx_get_id(Handle) -> i64;
    /// Makes a handle for us, which `rbd_close` takes back. The names are not kept; the second one,
    /// of a snapshot, may be null. The pool stays ours and stays open for as long as the image.
    rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    /// As `rbd_open`.
    rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    /// Takes the handle back, when all operations have ended: it waits for them.
    rbd_close(Handle) -> c_int;
    /// Writes the id of the image, with a zero at its end, to memory of ours of this length.
    rbd_get_id(Handle, *mut c_char, usize) -> c_int;
    /// Writes the size in bytes as it is now, which may have to be asked for.
    rbd_get_size(Handle, *mut u64) -> c_int;
    /// Changes the size, and waits.
    rbd_resize(Handle, u64) -> c_int;
    /// Writes how many bytes lie together in one object.
    rbd_get_stripe_unit(Handle, *mut u64) -> c_int;
    /// Writes over how many objects neighbouring stripe units are spread.
    rbd_get_stripe_count(Handle, *mut u64) -> c_int;
    /// Has a function called, until `rbd_update_unwatch`, with an argument that stays ours.
    rbd_update_watch(Handle, *mut u64, OnChange, Handle) -> c_int;
    /// Ends that: when it returns, the function is not running and will not be called.
    rbd_update_unwatch(Handle, u64) -> c_int;
    /// Acquires the exclusive lock, and does not pass it on when others ask for it.
    rbd_lock_acquire(Handle, c_int) -> c_int;
    /// Releases the exclusive lock, if we have it, when the operations that need it have ended. The
    /// next one that needs it acquires it again.
    rbd_lock_release(Handle) -> c_int;
    /// Makes a completion for us, which `rbd_aio_release` takes back. The argument stays ours and
    /// is passed to the function, which is called once for an operation that was begun, and never
    /// for one that could not be.
    rbd_aio_create_completion(Handle, OnAnswer, *mut Handle) -> c_int;
    /// What the operation has come to: bytes or a negative errno. Within the call of the function,
    /// or later.
    rbd_aio_get_return_value(Handle) -> isize;
    /// Takes the completion back, from within the call of its function too.
    rbd_aio_release(Handle);
    /// Begins to read into memory, which stays ours, and where it is, until the operation has
    /// ended; librbd fills it then. It comes to how much there was: the image may end within it.
    rbd_aio_read(Handle, u64, usize, *mut c_char, Handle) -> c_int;
    /// Begins to write from memory, which stays ours, and as it is, until the operation has ended.
    /// What lies beyond the end of the image is left out, without a word.
    rbd_aio_write(Handle, u64, usize, *const c_char, Handle) -> c_int;
    /// Begins to flush what has been written when it is called.
    rbd_aio_flush(Handle, Handle) -> c_int;
    /// Flushes what has been written, that in the cache of the image too, and waits.
    rbd_flush(Handle) -> c_int;
    /// Begins to give space back.
    rbd_aio_discard(Handle, u64, u64, Handle) -> c_int;
    /// Begins to make a range read as zeroes, in the way that the flags say: see [`THICK`].
    rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
}

/// A flag of `rbd_aio_write_zeroes`: the range keeps its space.
pub(super) const THICK: c_int = 1;

/// The mode of `rbd_lock_acquire` in which one has the lock.
pub(super) const EXCLUSIVE: c_int = 0;

/// The functions, once they were found.
static LOADED: Mutex<Option<&'static Api>> = Mutex::new(None);

/// The functions of the libraries, which are loaded when this is called first and stay for as long
/// as the program runs: their threads do.
pub(super) fn api() -> Result<&'static Api, String> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(api) = *loaded {
        return Ok(api);
    }
    // SAFETY: what runs when it is loaded are the constructors of Ceph's libraries, which need
    // nothing from us.
    let library = unsafe { Library::new(LIBRARY) }.map_err(|error| {
        format!(
            "the library of Ceph cannot be loaded ({error}); install it (Debian and Ubuntu: \
             librbd1)"
        )
    })?;
    let api = Api::of(&library).map_err(|error| {
        format!("the library of Ceph is too old ({error}); install that of Ceph 16 or later")
    })?;
    std::mem::forget(library);
    Ok(loaded.insert(Box::leak(Box::new(api))))
}
