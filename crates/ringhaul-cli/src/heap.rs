//! The heap of the program and of the libraries that it loads.

#[cfg(any(feature = "luks", feature = "nbd-tls"))]
use disks::secret_heap::SecretHeap;

#[cfg(not(feature = "jemalloc"))]
use std::alloc::System as Heap;
#[cfg(feature = "jemalloc")]
use tikv_jemallocator::Jemalloc as Heap;

/// The allocator, with a region for keys where disks have any. Requests to files allocate nothing.
/// Requests to images in a Ceph cluster pass through three threads of librbd and librados, each of
/// which frees memory that another thread allocated.
#[cfg(any(feature = "luks", feature = "nbd-tls"))]
#[global_allocator]
static HEAP: SecretHeap<Heap> = SecretHeap::new(Heap);

#[cfg(not(any(feature = "luks", feature = "nbd-tls")))]
#[global_allocator]
static HEAP: Heap = Heap;

/// Limits jemalloc to two arenas for all threads. The default of four per CPU would leave less
/// address space, where it is limited (`ulimit -v`), for the pool threads that a slow disk makes
/// necessary.
// SAFETY: jemalloc has a weak symbol of this name, a `const char *`, and reads the text up to its
// zero before `main`.
#[cfg(feature = "jemalloc")]
#[unsafe(export_name = "malloc_conf")]
static OPTIONS: &[u8; 10] = b"narenas:2\0";
