//! The limits, lists and exceptions that `tidy` applies.

/// Maximum lines of a function, from `fn` to its closing brace.
pub(super) const MAX_FUNCTION_LINES: usize = 69;

/// Maximum lines of a file before its `#[cfg(test)]` module.
pub(super) const MAX_FILE_LINES: usize = 500;

/// Maximum columns of a line of code.
pub(super) const MAX_COLUMNS: usize = 100;

/// Maximum columns of a commit's subject.
pub(super) const MAX_SUBJECT_COLUMNS: usize = 72;

/// Commits up to this one are not checked.
pub(super) const COMMITS_SINCE: &str = "b792aa6";

/// Commits from before this check existed.
pub(super) const BAD_COMMITS: &[&str] = &["4c36b94", "b8a470b", "002b34a"];

/// Folders that hold no source, by name.
pub(super) const SKIPPED_FOLDERS: &[&str] = &[".git", "target"];

/// Files that may use `unsafe`, with the reason.
pub(super) const UNSAFE_FILES: &[(&str, &str)] = &[
    ("crates/iomem/src/copy.rs", "volatile copies of memory that others may write"),
    ("crates/iomem/src/shared_byte.rs", "a byte of a list of shared memory"),
    ("crates/iomem/src/list.rs", "lists of memory that others may write"),
    ("crates/iomem/src/block.rs", "memory of our own at a chosen alignment"),
    ("crates/blockio/src/engine/aio.rs", "control blocks with pointers that the kernel keeps"),
    ("crates/blockio/src/engine/aio_ring.rs", "a ring of completions that the kernel writes"),
    ("crates/blockio/src/engine/io_uring/fixed.rs", "memory that the kernel has looked up"),
    (
        "crates/blockio/src/engine/io_uring/op_ring.rs",
        "entries with pointers that the kernel keeps",
    ),
    ("crates/blockio/src/engine/io_uring/watches.rs", "entries that name eventfds"),
    ("crates/blockio/src/engine/kernel/linux/aio.rs", "system calls that rustix does not have"),
    ("crates/blockio/src/engine/kernel/linux/ring.rs", "the one system call of io_uring"),
    ("crates/blockio/src/engine/kernel/sim/aio.rs", "plays the kernel: pointers of control blocks"),
    ("crates/blockio/src/engine/kernel/sim/pool.rs", "plays the kernel: memory of jobs"),
    ("crates/blockio/src/engine/kernel/sim/ring.rs", "plays the kernel: pointers of entries"),
    ("crates/blockio/src/engine/kernel/sim/world.rs", "plays the kernel: memory of ops"),
    ("crates/blockio/src/engine/pool.rs", "system calls on memory that belongs to slots"),
    ("crates/blockio/src/disk/file/attributes.rs", "asks for a UUID, which rustix does not"),
    ("crates/blockio/src/disk/file/lock.rs", "byte locks, which rustix does not have"),
    ("crates/disks/src/luks/memory.rs", "pages of keys, which core dumps leave out"),
    ("crates/disks/src/nbd/loaned_op.rs", "memory of an op that another thread carries out"),
    ("crates/disks/src/nbd/tests.rs", "a list of memory with a log of writes"),
    ("crates/disks/src/nbd/tests/slow.rs", "has a socket ignore what comes"),
    ("crates/disks/src/nbd/transport.rs", "sends and receives lists of memory"),
    ("crates/disks/src/rbd/api.rs", "looks up the functions of Ceph's libraries"),
    ("crates/disks/src/rbd/image.rs", "calls the functions of Ceph's libraries"),
    ("crates/disks/src/rbd/image/fake.rs", "tests: plays the functions of Ceph's libraries"),
    ("crates/disks/src/open/inherit.rs", "takes over a descriptor by its number"),
    ("crates/disks/src/secret_heap.rs", "an allocator for keys"),
    ("crates/disks/src/qcow2/storage.rs", "functions that imago calls unsafe"),
    ("crates/blockio/src/thread/time_slice.rs", "slices of threads, which rustix does not have"),
    ("crates/virtqueue/src/inflight.rs", "an account in memory that the front-end shares"),
    ("crates/virtqueue/src/inflight/packed.rs", "an account in memory that the front-end shares"),
    ("crates/virtqueue/src/descriptor_ring.rs", "packed rings in guest memory"),
    ("crates/virtqueue/src/region.rs", "maps and unmaps one region"),
    ("crates/virtqueue/tests/it/sigbus.rs", "sends itself the signals of the kernel"),
    ("crates/virtqueue/src/memory/dirty_log.rs", "marks pages in a log that the front-end shares"),
    ("crates/virtqueue/src/memory/local.rs", "makes lists of ranges that the map has mapped"),
    ("crates/virtqueue/src/memory/map.rs", "copies from and to mapped guest memory"),
    ("crates/virtqueue/src/memory/table.rs", "reads descriptors of a table that was checked"),
    ("crates/virtqueue/src/sigbus.rs", "a signal handler that maps memory"),
    ("crates/virtqueue/src/rings.rs", "split rings in guest memory"),
    ("crates/device/src/queue/call_watch.rs", "a signal to one thread, and its handler"),
    ("crates/device/src/queue/eventfd.rs", "system calls of Linux AIO, which adds to an eventfd"),
    ("crates/ringhaul/src/process/limits.rs", "ignores a signal"),
    ("crates/ringhaul/tests/sandbox/attempts.rs", "tests: system calls of an attacker"),
    ("crates/ringhaul/tests/sandbox/unlisted.rs", "tests: a system call that is denied"),
    ("crates/ringhaul/src/sandbox/unlisted.rs", "a signal handler that denies system calls"),
    ("crates/ringhaul/src/sandbox/helper.rs", "forks a process, and closes its descriptors"),
    ("crates/ringhaul-cli/src/heap.rs", "an option of the heap, by the name that it looks for"),
    ("crates/ringhaul/src/process/peer.rs", "asks for the groups of a peer, as no crate does"),
    (
        "crates/bench/src/peer.rs",
        "asks for a process id that may be 0, which rustix has no room for",
    ),
];

/// The `cfg` of builds with simulated kernels.
pub(super) const SIMULATION: &str = "ringhaul_sim";

/// Files of the product that may use it, with the reason. None of them has a constant or a branch
/// within a function that depends on it.
pub(super) const SIMULATED_FILES: &[(&str, &str)] = &[
    ("crates/blockio/src/clock.rs", "chooses the clock"),
    ("crates/blockio/src/engine/kernel.rs", "chooses the kernel"),
    ("crates/blockio/src/disk.rs", "disks of a simulated kernel"),
    (
        "crates/blockio/src/file/write_loss.rs",
        "a disk is opened anew, which the simulation only plays",
    ),
    ("crates/blockio/src/executor/task.rs", "other threads, which the simulation only plays"),
    ("crates/virtqueue/src/death.rs", "a process dies, which the simulation only plays"),
    ("crates/blockio/src/contract_tests.rs", "tests: futures on a simulated kernel"),
];

/// The floors of a crate.
pub(super) struct Floors {
    /// The folder of its sources.
    pub(super) folder: &'static str,
    /// Files and folders there by their names as modules, from the lowest up.
    pub(super) floors: &'static str,
    /// Modules within a folder may import each other.
    pub(super) allows_inner_cycles: bool,
}

/// The floors of each crate. Modules of tests have none.
pub(super) const FLOORS: &[Floors] = &[
    Floors {
        folder: "crates/iomem/src",
        floors: "copy fits memory shared_byte list block",
        allows_inner_cycles: false,
    },
    Floors {
        folder: "crates/blockio/src",
        floors: "clock error config executor stats file admission op watchdog engine thread \
                 disk driver testing",
        allows_inner_cycles: false,
    },
    Floors {
        folder: "crates/disks/src",
        floors: "secret_heap luks nbd spec rbd qcow2 open",
        allows_inner_cycles: false,
    },
    Floors {
        folder: "crates/virtqueue/src",
        floors: "budget death error device_queue sigbus region memory chain queue_memory \
                 position rings avail_idx descriptor_ring inflight split packed virtqueue driver",
        allows_inner_cycles: false,
    },
    Floors {
        folder: "crates/device/src",
        floors: "unit_address access stats events queue device_core blk scsi device hand_over \
                 moved_state",
        allows_inner_cycles: false,
    },
    Floors {
        folder: "crates/vhost-user/src",
        floors: "details body examiner passed_fds peer_fds call message channel shared_memory \
                 load ring describe inflight run_lock outcome config connection session_state \
                 session serve",
        allows_inner_cycles: false,
    },
    Floors {
        folder: "crates/ringhaul/src",
        floors: "log process sandbox socket spec fd_store open control options threads daemon \
                 takeover version monitoring control_socket serve",
        allows_inner_cycles: false,
    },
    Floors {
        folder: "crates/ringhaul-cli/src",
        floors: "heap examples demo disk_command manual ctl",
        allows_inner_cycles: false,
    },
    Floors {
        folder: "crates/options/src",
        floors: "choices duration redact size key_value",
        allows_inner_cycles: false,
    },
    Floors {
        folder: "crates/bench/src",
        floors: "arrivals error memory peer quantities verify pattern ring vhost_user args \
                 engine_stats stats job plan progress server blk report scsi requests driver \
                 probe worker device engine_worker supervisor target phases run disk_bench",
        allows_inner_cycles: false,
    },
    Floors {
        folder: "crates/sim/src",
        floors: "failure ram rng timeline content log plan device faults history inflight \
                 attribution layout world converted_disk message request scsi chain_request \
                 disk guest front_end export control stack run shrink workers",
        allows_inner_cycles: true,
    },
];

/// Abstract words in 1,000 words of comments or pages of an area. Each ceiling may only fall.
pub(super) const MAX_ABSTRACT: usize = 2;

/// Abstract words in 1,000 words of one page. A short page may have one.
pub(super) const MAX_ABSTRACT_OF_PAGE: usize = 3;

/// Doc comments that open with a pronoun or a question word, in percent.
pub(super) const MAX_OPENINGS: usize = 1;

/// Words of a sentence.
pub(super) const MAX_WORDS: usize = 35;

/// The places in which a word is sought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// In identifiers, documentation, comments, strings and Markdown.
    Everywhere,
    /// In identifiers of Rust code, except constants, which may have names of specifications.
    Identifiers,
}

/// A word that has a better one.
pub(super) struct Word {
    /// Lower case; `_` separates the parts of an identifier.
    pub(super) wrong: &'static str,
    pub(super) scope: Scope,
    /// Folders and files in which it is wrong, as prefixes of paths; "" is all.
    pub(super) within: &'static [&'static str],
    /// Folders and files in which it is allowed.
    pub(super) except: &'static [&'static str],
    pub(super) advice: &'static str,
}

/// Words that would be a second name for the same thing.
pub(super) const WORDS: &[Word] = &[
    everywhere("doorbell", "the driver's eventfd to the device is a kick"),
    everywhere("doorbells", "the driver's eventfds to the device are kicks"),
    everywhere("desc_idx", "the first descriptor of a chain is its head"),
    everywhere("reap", "completions are harvested"),
    everywhere("reaps", "completions are harvested"),
    everywhere("reaped", "completions are harvested"),
    everywhere("reaping", "completions are harvested"),
    everywhere("reaper", "completions are harvested"),
    Word {
        wrong: "irq",
        scope: Scope::Identifiers,
        within: &["crates/"],
        except: &[],
        advice: "the device's eventfd to the driver is a call",
    },
    Word {
        wrong: "interrupt",
        scope: Scope::Identifiers,
        within: &[
            "crates/virtqueue/",
            "crates/device/",
            "crates/vhost-user/",
            "crates/ringhaul/",
            "crates/ringhaul-cli/",
        ],
        except: &[],
        advice: "the device's eventfd to the driver is a call",
    },
    Word {
        wrong: "reactor",
        scope: Scope::Identifiers,
        within: &[
            "crates/device/",
            "crates/vhost-user/",
            "crates/ringhaul/",
            "crates/ringhaul-cli/",
            "crates/virtqueue/",
            "crates/bench/",
        ],
        except: &[],
        advice: "a thread with a loop and an engine is an IoThread",
    },
    Word {
        wrong: "worker",
        scope: Scope::Identifiers,
        within: &[
            "crates/blockio/",
            "crates/disks/",
            "crates/device/",
            "crates/vhost-user/",
            "crates/ringhaul/",
            "crates/ringhaul-cli/",
            "crates/virtqueue/",
        ],
        // The threads of the pool behind the engine `threads` are no IoThreads: they only block.
        except: &["crates/blockio/src/engine/threads"],
        advice: "a thread with a loop and an engine is an IoThread",
    },
    Word {
        wrong: "backend",
        scope: Scope::Identifiers,
        within: &["crates/blockio/", "crates/disks/"],
        except: &[],
        advice: "what a request addresses is a disk; in vhost-user we are the back-end",
    },
    Word {
        wrong: "driver",
        scope: Scope::Identifiers,
        within: &["crates/blockio/"],
        // A disk that is no local file has a driver.
        except: &[
            "crates/blockio/src/disk",
            "crates/blockio/src/driver.rs",
            "crates/blockio/src/lib.rs",
            "crates/blockio/src/testing.rs",
        ],
        advice: "how an op reaches the kernel is an engine",
    },
    Word {
        wrong: "inflight",
        scope: Scope::Identifiers,
        within: &["crates/blockio/", "crates/disks/"],
        except: &[],
        advice: "ops that the kernel has are `in_kernel`; inflight is a region of vhost-user",
    },
    Word {
        wrong: "in_flight",
        scope: Scope::Identifiers,
        within: &["crates/blockio/", "crates/disks/"],
        except: &[],
        advice: "ops that the kernel has are `in_kernel`",
    },
    Word {
        wrong: "enqueue",
        scope: Scope::Identifiers,
        within: &["crates/blockio/", "crates/disks/"],
        except: &[],
        advice: "an op is queued, then submitted",
    },
];

/// Files that contain wrong words in order to forbid them.
pub(super) const WORD_LISTS: &[&str] = &["xtask/src/tidy/", "CONTRIBUTING.md"];

/// Words that crates must not use, with the reason.
pub(super) struct Border {
    pub(super) within: &'static [&'static str],
    /// Lower case; also found inside longer words.
    pub(super) banned: &'static [&'static str],
    pub(super) advice: &'static str,
}

/// Borders between crates that the compiler does not enforce.
pub(super) const BORDERS: &[Border] = &[
    Border {
        within: &["crates/blockio/", "crates/disks/"],
        banned: &["virtio", "vhost", "virtqueue", "guest"],
        advice: "it knows files, servers and threads only; code about guests goes into device",
    },
    Border {
        within: &["crates/virtqueue/src/"],
        banned: &["blockio", "pread", "pwrite", "io_submit", "io_uring"],
        advice: "virtqueue does no disk I/O; what needs both goes into device",
    },
    Border {
        within: &["crates/device/src/"],
        banned: &["vhost", "clap", "anyhow", "ringhaul::"],
        advice: "a VMM embeds the device alone; what is about daemons goes into ringhaul",
    },
    Border {
        within: &["crates/vhost-user/src/"],
        banned: &["clap", "anyhow", "ringhaul::"],
        advice: "a session serves one device; code about daemons goes into ringhaul",
    },
];

/// Marks of unfinished work. In pieces, so that this file does not break its own rule.
pub(super) const MARKS: &[&str] =
    &[concat!("TO", "DO"), concat!("FIX", "ME"), concat!("X", "XX"), concat!("HA", "CK")];

/// Macros that must not be committed.
pub(super) const MACROS: &[(&str, &str)] = &[
    ("dbg", "remove it, or make it a log line"),
    ("todo", "write what is missing"),
    ("unimplemented", "write what is missing, or return an error"),
];

const fn everywhere(wrong: &'static str, advice: &'static str) -> Word {
    Word { wrong, scope: Scope::Everywhere, within: &[""], except: &[], advice }
}

/// Returns true if `path` begins with one of `starts`.
pub(super) fn is_within(path: &str, starts: &[&str]) -> bool {
    starts.iter().any(|start| path.starts_with(start))
}
