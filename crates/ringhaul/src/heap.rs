//! The heap of the program, and of the libraries that it loads.

use tikv_jemallocator::Jemalloc;

/// Requests to files allocate nothing. Those to images in a Ceph cluster pass through three threads
/// of librbd and librados, which free what the others have allocated.
#[global_allocator]
static HEAP: Jemalloc = Jemalloc;

/// Two arenas for all threads. By default there are four for each CPU: where address space is
/// limited (`ulimit -v`), the pool threads that a slow disk makes necessary would find less room.
// SAFETY: jemalloc has a weak symbol of this name, a `const char *`, and reads the text up to its
// zero before `main`.
#[unsafe(export_name = "malloc_conf")]
static OPTIONS: &[u8; 10] = b"narenas:2\0";
