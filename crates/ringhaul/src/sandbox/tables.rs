//! The system calls that each kind of thread needs.
//!
//! They come from records of all threads in end-to-end tests, by `raw_syscalls:sys_enter`. Other
//! versions of the C library make other calls for the same, and so do other processors.

use libc::c_long;

use super::calls::numbers;

/// The calls of threads.
pub(super) struct Table {
    /// Names of threads. A name that ends with a dash is the start of names.
    threads: &'static [&'static str],
    calls: &'static [&'static [c_long]],
    /// Calls of these threads besides.
    also: &'static [c_long],
    /// True if the threads open, close or use disks, so that libraries of disks run in them.
    pub(super) uses_disks: bool,
}

impl Table {
    /// Returns true if a thread with this name has the table.
    pub(super) fn is_of(&self, name: &str) -> bool {
        let is_it = |own: &str| own == name || own.ends_with('-') && name.starts_with(own);
        self.threads.iter().any(|own| is_it(own))
    }

    /// All calls of the threads. Some appear twice.
    pub(super) fn calls(&self) -> impl Iterator<Item = c_long> {
        self.calls.iter().copied().flatten().chain(self.also).copied().chain([SKIPPED])
    }

    /// Returns true if the threads make rings of io_uring.
    pub(super) fn makes_rings(&self) -> bool {
        self.calls().any(|call| call == libc::SYS_io_uring_setup)
    }
}

/// The table of threads that open disks, up to their names.
const OPENS_DISKS: Table = Table {
    threads: &[],
    calls: &[
        COMMON,
        THREADS,
        LOOP,
        DATA,
        MESSAGES,
        FILES,
        SOCKETS,
        MEMORY_FILES,
        FILE_SIZES,
        LIMITS,
    ],
    also: &[],
    uses_disks: true,
};

/// The table of threads that use no disk, up to their names and calls.
const USES_NO_DISK: Table = Table { threads: &[], calls: &[], also: &[], uses_disks: false };

/// All tables. Threads of the resolver (`nbd-resolve`) and of Ceph (`ringhaul-rbd`) run libraries
/// of the system, and have none. Pool threads have the table of their IoThread.
pub(super) const TABLES: &[Table] = &[
    Table {
        threads: &["iothread-"],
        calls: &[COMMON, THREADS, LOOP, RINGS, DATA, MESSAGES, MEMORY_FILES, FILE_SIZES, LIMITS],
        ..OPENS_DISKS
    },
    Table { threads: &["ringhaul-rings", "qcow2"], also: RINGS, ..OPENS_DISKS },
    Table {
        threads: &[
            "ringhaul",
            "ringhaul-client",
            "ringhaul-lock",
            "ringhaul-open",
            "ringhaul-reload",
            "ringhaul-restore",
            "ringhaul-side",
        ],
        ..OPENS_DISKS
    },
    Table { threads: &["ringhaul-size"], also: CHANGES, ..OPENS_DISKS },
    Table {
        threads: &["ringhaul-close"],
        calls: &[COMMON, LOOP, DATA, MESSAGES, FILES],
        ..OPENS_DISKS
    },
    Table { threads: &["nbd-connect"], calls: &[COMMON, MESSAGES, FILES, SOCKETS], ..USES_NO_DISK },
    Table {
        threads: &["ringhaul-control"],
        calls: &[COMMON, MESSAGES, FILES, EVENTS, SOCKETS, MEMORY_FILES, FILE_SIZES, LIMITS],
        ..USES_NO_DISK
    },
    Table {
        threads: &["ringhaul-config", "ringhaul-metric"],
        calls: &[COMMON, MESSAGES, FILES],
        ..USES_NO_DISK
    },
    Table {
        threads: &["ringhaul-reserve"],
        calls: &[COMMON, MESSAGES, FILES, FILE_SIZES],
        ..USES_NO_DISK
    },
    Table {
        threads: &["ringhaul-notify", "ringhaul-store"],
        calls: &[COMMON, MESSAGES, SOCKETS],
        ..USES_NO_DISK
    },
    Table {
        threads: &["ringhaul-call", "ringhaul-map", "ringhaul-unmap"],
        calls: &[COMMON, EVENTS, MEMORY, MESSAGES, NAMES],
        ..USES_NO_DISK
    },
    Table {
        threads: &["ringhaul-events", "ringhaul-heir", "ringhaul-rpc", "ringhaul-signal"],
        calls: &[COMMON, MESSAGES],
        ..USES_NO_DISK
    },
    Table {
        threads: &["ringhaul-denied", "ringhaul-log", "ringhaul-patience", "ringhaul-sizes"],
        calls: &[COMMON],
        ..USES_NO_DISK
    },
    Table { threads: &["ringhaul-watch"], calls: &[COMMON, NAMES], ..USES_NO_DISK },
];

/// A call that a debugger has the kernel skip. It has the result that the debugger chooses.
const SKIPPED: c_long = 0xffff_ffff;

/// Calls of every thread: memory, which is locked if it has keys; futexes, clocks and signals;
/// reads and writes of open descriptors; the end of the thread and of the process. `mremap`
/// enlarges a buffer of the heap. `only` in `calls.rs` adds `mmap` and `mprotect`, without
/// executable memory.
const COMMON: &[c_long] = numbers![
    write read futex brk clock_getres clock_gettime clock_nanosleep close exit exit_group fcntl
    fstat getcpu getpid getrandom gettid gettimeofday madvise membarrier mlock mlock2 mremap munlock
    munmap nanosleep ppoll prctl restart_syscall rseq rt_sigaction rt_sigprocmask rt_sigreturn
    sched_getaffinity sched_yield set_robust_list sigaltstack tgkill writev
    ; target_arch = "x86_64": poll time
    // The C library musl ends a process by it.
    ; target_env = "musl": tkill
];

/// New threads. `ringhaul-starts` starts all but two kinds: an IoThread starts its pool, and the
/// removal of a logical unit starts the watch of its closing.
const THREADS: &[c_long] = numbers![clone clone3];

/// The loop of an IoThread, with its engines.
const LOOP: &[c_long] = numbers![
    io_uring_enter io_submit epoll_pwait epoll_create1 epoll_ctl epoll_pwait2 eventfd2 io_cancel
    io_destroy io_getevents io_setup io_uring_register sched_getattr sched_setattr timerfd_create
    timerfd_settime
    ; target_arch = "x86_64": epoll_wait
];

/// New rings, and the filter that denies further ones.
const RINGS: &[c_long] = numbers![io_uring_setup seccomp];

/// Operations on open disks.
const DATA: &[c_long] = numbers![
    preadv preadv2 pwritev pwritev2 pread64 pwrite64 fadvise64 fallocate fdatasync fstat fstatfs
    fsync ioctl lseek readv statx
    , libc::SYS_newfstatat, libc::SYS_sync_file_range
];

/// Messages on sockets that are open, and new clients of a listener. `ioctl` sets a mode.
const MESSAGES: &[c_long] = numbers![
    sendmsg recvmsg sendto recvfrom accept4 getpeername getsockname getsockopt ioctl readv
    setsockopt shutdown
];

/// New sockets.
const SOCKETS: &[c_long] = numbers![socket bind connect listen socketpair];

/// Eventfds.
const EVENTS: &[c_long] = numbers![
    eventfd2 epoll_create1 epoll_ctl epoll_pwait
    ; target_arch = "x86_64": epoll_wait
];

/// Files in memory: an inflight region, the record of a front-end, and zeroes in place of guest
/// memory that is lost.
const MEMORY_FILES: &[c_long] = numbers![memfd_create];

/// Sizes of files in memory, of disks, and of the file of reservations.
const FILE_SIZES: &[c_long] = numbers![ftruncate];

/// Changes of files that the kernel announces.
const CHANGES: &[c_long] = numbers![inotify_init1 inotify_add_watch];

/// Limits of this process, which are read. (`calls.rs` denies the limits of other processes.)
const LIMITS: &[c_long] = numbers![prlimit64];

/// Files of guest memory that are looked at and mapped.
const MEMORY: &[c_long] = numbers![
    fstat fstatfs ioctl lseek statx
    , libc::SYS_newfstatat
];

/// Names of hanging descriptors, in `/proc`.
const NAMES: &[c_long] = numbers![
    readlinkat
    ; target_arch = "x86_64": readlink
];

/// Files that are opened, as far as Landlock permits them, and locked, replaced and removed.
const FILES: &[c_long] = numbers![
    openat openat2 faccessat faccessat2 fallocate fchmod fdatasync flock fstat fstatfs fsync getcwd
    getdents64 getegid geteuid getgid getuid ioctl lseek pread64 pwrite64 readlinkat renameat2
    renameat statfs statx unlinkat
    ; target_arch = "x86_64": access lstat open readlink rename stat unlink
    , libc::SYS_newfstatat
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;
    use crate::sandbox::calls;
    use crate::sandbox::rules::Rules;

    fn lists(table: &Table, call: c_long) -> bool {
        table.calls().any(|listed| listed == call)
    }

    /// The threads whose tables have a call.
    fn threads_with(call: c_long) -> BTreeSet<&'static str> {
        let tables = TABLES.iter().filter(|table| lists(table, call));
        tables.flat_map(|table| table.threads.iter().copied()).collect()
    }

    /// Threads that run libraries of the system.
    const WITHOUT_TABLE: [&str; 2] = ["nbd-resolve", "ringhaul-rbd"];

    /// The calls that start threads, up to the name.
    const STARTS: [&str; 3] = ["start_thread(", "begin_on(list, Box::new(call), ", "queue("];

    /// Files that start threads by other means: pool threads, scoped threads, the helper's.
    const OTHER_STARTS: [&str; 5] = [
        "blockio/src/executor/os_thread.rs",
        "blockio/src/engine/threads.rs",
        "ringhaul/src/control.rs",
        "ringhaul/src/sandbox/helper.rs",
        "ringhaul/src/sandbox/threads.rs",
    ];

    /// Adds the names of threads that a file starts.
    fn add_names(path: &Path, names: &mut Vec<String>) {
        let text = std::fs::read_to_string(path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap();
        let is_other = OTHER_STARTS.iter().any(|file| path.ends_with(file));
        let is_simulated = path.to_string_lossy().contains("/sim/");
        let is_plain = is_other || is_simulated || !code.contains("thread::Builder");
        assert!(is_plain, "{} starts threads that have no table", path.display());
        for start in STARTS {
            let names_of = code.split(start).skip(1).filter_map(|rest| {
                let rest = rest.trim_start().strip_prefix("&format!(").unwrap_or(rest.trim_start());
                rest.strip_prefix('"')?.split(['"', '{']).next()
            });
            names.extend(names_of.map(str::to_owned));
        }
    }

    fn add_folder(folder: &Path, names: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                add_folder(&path, names);
            } else if path.extension().is_some_and(|end| end == "rs") {
                add_names(&path, names);
            }
        }
    }

    #[test]
    fn every_thread_that_a_crate_starts_has_one_table() {
        let mut names = Vec::new();
        for folder in ["blockio", "disks", "device", "vhost-user", "virtqueue", "ringhaul"] {
            let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
            add_folder(&crates.join(folder).join("src"), &mut names);
        }
        assert!(names.len() > 25, "{names:?}");
        for name in &names {
            let tables = TABLES.iter().filter(|table| table.is_of(name)).count();
            let expected = usize::from(!WITHOUT_TABLE.contains(&&**name));
            assert_eq!(tables, expected, "tables of the thread {name}");
        }
        for name in TABLES.iter().flat_map(|table| table.threads) {
            let is_main = *name == "ringhaul";
            assert!(is_main || names.iter().any(|known| known == name), "no thread {name}");
        }
    }
    /// The filter of the process comes first, so that such an entry would have no effect.
    #[test]
    fn no_table_has_a_call_that_the_process_is_denied() {
        let mut rules = Rules::default();
        rules.server(10809);
        let denied = calls::denied(&rules).unwrap();
        let always = denied.iter().filter(|(_, rules)| rules.is_empty()).map(|(call, _)| *call);
        for call in always {
            assert_eq!(threads_with(call), BTreeSet::new(), "call {call}");
        }
    }

    #[test]
    fn every_table_has_the_calls_of_the_handler_of_denials_and_of_ends() {
        #[cfg(target_arch = "x86_64")]
        let poll = libc::SYS_poll;
        #[cfg(not(target_arch = "x86_64"))]
        let poll = libc::SYS_ppoll;
        for call in [
            libc::SYS_prctl,
            libc::SYS_write,
            poll,
            libc::SYS_exit_group,
            libc::SYS_rt_sigreturn,
            libc::SYS_exit,
            libc::SYS_futex,
            libc::SYS_munmap,
        ] {
            let lacking = TABLES.iter().find(|table| !lists(table, call));
            assert!(lacking.is_none(), "{:?} lacks call {call}", lacking.unwrap().threads);
        }
    }

    /// Calls with which a thread that a guest has taken over would reach further.
    #[test]
    fn calls_that_reach_further_belong_to_few_threads() {
        let open_disks = [
            "qcow2",
            "ringhaul",
            "ringhaul-client",
            "ringhaul-lock",
            "ringhaul-open",
            "ringhaul-reload",
            "ringhaul-restore",
            "ringhaul-rings",
            "ringhaul-side",
            "ringhaul-size",
        ];
        let also = |more: &[&'static str]| open_disks.iter().chain(more).copied().collect();
        let with_sockets = ["nbd-connect", "ringhaul-control", "ringhaul-notify", "ringhaul-store"];
        let only = |threads: &[&'static str]| threads.iter().copied().collect::<BTreeSet<_>>();
        let with_files = [
            "nbd-connect",
            "ringhaul-close",
            "ringhaul-config",
            "ringhaul-control",
            "ringhaul-metric",
            "ringhaul-reserve",
        ];
        for (call, threads) in [
            (libc::SYS_openat, also(&with_files)),
            (libc::SYS_unlinkat, also(&with_files)),
            (libc::SYS_renameat, also(&with_files)),
            (libc::SYS_socket, also(&with_sockets)),
            (libc::SYS_connect, also(&with_sockets)),
            (libc::SYS_io_uring_setup, only(&["iothread-", "qcow2", "ringhaul-rings"])),
            (libc::SYS_clone, also(&["iothread-"])),
            (libc::SYS_memfd_create, also(&["iothread-", "ringhaul-control"])),
            (libc::SYS_ftruncate, also(&["iothread-", "ringhaul-control", "ringhaul-reserve"])),
            (libc::SYS_prlimit64, also(&["iothread-", "ringhaul-control"])),
            (libc::SYS_inotify_add_watch, only(&["ringhaul-size"])),
        ] {
            assert_eq!(threads_with(call), threads, "threads with call {call}");
        }
    }
}
