//! How much address space the heap takes.

/// Two arenas for all threads. By default the C library gives each thread one of 64 MiB of address
/// space, up to eight for each CPU: where that is limited (`ulimit -v`), the pool threads that a
/// slow disk makes necessary would find no room to start, which ends the process. Requests
/// to files allocate nothing, and those to disks of other kinds little, so threads hardly wait for
/// each other here.
pub(crate) fn limit_arenas() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes two numbers and changes nothing but what it is for. If it is refused,
    // the default stays.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
    }
}
