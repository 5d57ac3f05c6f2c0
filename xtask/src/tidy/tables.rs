//! The limits, lists and exceptions that `tidy` applies.

/// Maximum lines of a function, from `fn` to its closing brace.
pub(super) const MAX_FUNCTION_LINES: usize = 70;

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
    ("crates/blockio/src/disk/identity.rs", "asks for a UUID, which rustix does not"),
    ("crates/blockio/src/disk/lock.rs", "byte locks, which rustix does not have"),
    ("crates/blockio/src/disk/luks/no_dump.rs", "pages of keys, which core dumps leave out"),
    ("crates/blockio/src/disk/nbd/loaned_op.rs", "memory of an op that another thread carries out"),
    ("crates/blockio/src/disk/nbd/pipe.rs", "ends the use of that memory before the op"),
    ("crates/blockio/src/disk/nbd/tests.rs", "a list of memory with a log of writes"),
    ("crates/blockio/src/disk/nbd/tests/slow.rs", "has a socket ignore what comes"),
    ("crates/blockio/src/disk/nbd/transport.rs", "sends and receives lists of memory"),
    ("crates/blockio/src/disk/rbd/api.rs", "looks up the functions of Ceph's libraries"),
    ("crates/blockio/src/disk/rbd/image.rs", "calls the functions of Ceph's libraries"),
    ("crates/blockio/src/disk/qcow2/storage.rs", "functions that imago calls unsafe"),
    ("crates/blockio/src/time_slice.rs", "slices of threads, which rustix does not have"),
    ("crates/virtqueue/src/inflight.rs", "an account in memory that the front-end shares"),
    ("crates/virtqueue/src/mapping.rs", "maps and unmaps one region"),
    ("crates/virtqueue/tests/it/sigbus.rs", "sends itself the signals of the kernel"),
    ("crates/virtqueue/src/memory/local.rs", "makes lists of ranges that the map has mapped"),
    ("crates/virtqueue/src/memory/map.rs", "copies from and to mapped guest memory"),
    ("crates/virtqueue/src/memory/table.rs", "reads descriptors of a table that was checked"),
    ("crates/virtqueue/src/sigbus.rs", "a signal handler that maps memory"),
    ("crates/virtqueue/src/rings.rs", "split rings in guest memory"),
    ("crates/device/src/call_watch.rs", "a signal to one thread, and its handler"),
    ("crates/device/src/eventfd.rs", "system calls of Linux AIO, which adds to an eventfd"),
    ("crates/ringhaul/src/file_limit.rs", "ignores a signal"),
    ("crates/ringhaul/src/group.rs", "asks the C library, which knows where groups are listed"),
    ("crates/ringhaul/src/heap.rs", "an option of the heap, by the name that it looks for"),
    ("crates/ringhaul/src/inherit.rs", "takes over a descriptor by its number"),
    ("crates/ringhaul/src/peer.rs", "asks for options of sockets that rustix has no room for"),
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
    ("crates/blockio/src/write_loss.rs", "a disk is opened anew, which the simulation only plays"),
    ("crates/blockio/src/task.rs", "other threads, which the simulation only plays"),
    ("crates/virtqueue/src/death.rs", "a process dies, which the simulation only plays"),
    ("crates/blockio/src/contract.rs", "tests: futures on a simulated kernel"),
];

/// Public items that no other crate, test, example or fuzz target names: the crate, the item, and
/// its user.
pub(super) const UNUSED_PUBLIC: &[(&str, &str, &str)] = &[];

/// The modules of a crate and their floors.
pub(super) struct Floors {
    /// The folder of its sources.
    pub(super) folder: &'static str,
    /// The number of a floor, and its modules. Imports point downward; within a floor, in one
    /// direction.
    pub(super) modules: &'static [(u32, &'static [&'static str])],
}

/// The floors of each crate, from the lowest up. Modules of tests have none.
pub(super) const FLOORS: &[Floors] = &[
    Floors {
        folder: "crates/iomem/src",
        modules: &[(0, &["copy", "fits", "memory"]), (1, &["list"]), (2, &["block"])],
    },
    Floors {
        folder: "crates/blockio/src",
        modules: &[
            // Basics for all modules.
            (0, &["clock::linux", "clock::sim", "error", "interest", "op_kind", "sync"]),
            (0, &["ab_test", "rate_limit", "regular_file", "stall_log", "task_key", "time_slice"]),
            (1, &["clock", "oneshot", "stats", "write_loss"]),
            (1, &["config", "device_queue", "mailbox", "pacing", "poll_window"]),
            // Files, tasks.
            (2, &["open_file", "task"]),
            (3, &["bounce", "io_file"]),
            // Ops and their slots.
            (4, &["admission", "admission::backlog", "admission::bytes"]),
            (4, &["admission::devices", "admission::shares"]),
            (5, &["op"]),
            (6, &["stalled_ops"]),
            // Engines and their interfaces to the kernel.
            (7, &["engine::pool"]),
            (7, &["engine::kernel::aio_abi", "engine::kernel::ring_abi"]),
            (8, &["engine::announce", "engine::retry"]),
            (8, &["engine::kernel::linux::aio", "engine::kernel::linux::ring"]),
            (8, &["engine::kernel::sim::world"]),
            (9, &["engine::kernel::sim::aio", "engine::kernel::sim::pool"]),
            (9, &["engine::kernel::linux", "engine::kernel::sim::ring"]),
            (10, &["engine::kernel::sim"]),
            (11, &["engine::kernel"]),
            (12, &["engine::aio_ring", "engine::epoll", "engine::threads"]),
            (13, &["engine::aio"]),
            (12, &["engine::io_uring::fixed", "engine::io_uring::watches"]),
            (13, &["engine::io_uring::op_ring"]),
            (14, &["engine::io_uring"]),
            (15, &["engine"]),
            // The loop.
            (16, &["reactor"]),
            (17, &["io_state"]),
            (18, &["fairness", "registered"]),
            (19, &["turn"]),
            // The API for tasks.
            (20, &["io"]),
            (21, &["foreign_op", "remote", "task_set"]),
            (22, &["io_thread"]),
            // Disks.
            (22, &["disk::alignment", "disk::info", "disk::lock_holder", "disk::partial_blocks"]),
            (22, &["disk::sysfs"]),
            (21, &["disk::folder", "disk::foreign"]),
            (22, &["disk::error_policy", "disk::limits", "disk::wait_queue"]),
            (23, &["disk::identity", "disk::lock", "disk::null", "disk::size_probe"]),
            (23, &["disk::retries", "disk::shared"]),
            (24, &["disk::bulk_turns", "disk::source", "disk::throttle"]),
            (25, &["disk::driver", "disk::file"]),
            (26, &["disk", "disk::file::zeroes"]),
            (27, &["disk::properties", "disk::requests", "disk::simulated", "disk::slow_path"]),
            // Kinds of disks behind the seam.
            (27, &["disk::content", "disk::raw"]),
            (0, &["disk::nbd::options", "disk::nbd::resolver", "disk::nbd::wire"]),
            (0, &["disk::nbd::write_fence"]),
            (1, &["disk::nbd::handshake", "disk::nbd::tls"]),
            (2, &["disk::nbd::transport"]),
            (3, &["disk::nbd::connect"]),
            (23, &["disk::nbd::answer", "disk::nbd::loaned_op", "disk::nbd::shared"]),
            (24, &["disk::nbd::requests"]),
            (25, &["disk::nbd::flow", "disk::nbd::pipe"]),
            (26, &["disk::nbd::abandoned", "disk::nbd::retry", "disk::nbd::stalled"]),
            (26, &["disk::nbd::socket_source"]),
            (28, &["disk::nbd::link"]),
            (29, &["disk::nbd::connection_choice"]),
            (30, &["disk::nbd", "disk::nbd::disk"]),
            (0, &["disk::rbd::api", "disk::rbd::name"]),
            (22, &["disk::rbd::pending_ops"]),
            (23, &["disk::rbd::image"]),
            (24, &["disk::rbd::shared"]),
            (26, &["disk::rbd::open", "disk::rbd::requests"]),
            (27, &["disk::nbd::drain", "disk::rbd"]),
            (0, &["disk::luks::hash", "disk::luks::no_dump", "disk::luks::xts"]),
            (1, &["disk::luks::memory", "disk::luks::secret"]),
            (2, &["disk::luks::header"]),
            (3, &["disk::luks::version1", "disk::luks::version2"]),
            (27, &["disk::luks", "disk::qcow2::leaks::reader", "disk::qcow2::order::counted"]),
            (0, &["disk::qcow2::counts", "disk::qcow2::mark", "disk::qcow2::places"]),
            (0, &["disk::qcow2::ahead", "disk::qcow2::bitmaps", "disk::qcow2::known"]),
            (1, &["disk::qcow2::order", "disk::qcow2::room", "disk::qcow2::zstd"]),
            (0, &["disk::qcow2::owner::streams"]),
            (27, &["disk::qcow2::header", "disk::qcow2::table", "disk::qcow2::uses"]),
            (28, &["disk::qcow2::owner::changes", "disk::qcow2::storage"]),
            (28, &["disk::qcow2::owner::job"]),
            (29, &["disk::qcow2::core", "disk::qcow2::storage::reserve"]),
            (30, &["disk::qcow2::format", "disk::qcow2::leaks", "disk::qcow2::storage::writes"]),
            (31, &["disk::qcow2::leaks::bitmaps", "disk::qcow2::leaks::tables"]),
            (31, &["disk::qcow2::owner", "disk::qcow2::storage::packed"]),
            (32, &["disk::qcow2::attached", "disk::qcow2::owner::alone"]),
            (32, &["disk::qcow2::owner::clear", "disk::qcow2::owner::commit"]),
            (32, &["disk::qcow2::owner::rest"]),
            (33, &["disk::qcow2", "disk::qcow2::owner::ahead", "disk::qcow2::owner::unpacked"]),
            (27, &["disk::qcow2::order::entries", "disk::qcow2::placing", "engine_trial"]),
        ],
    },
    Floors {
        folder: "crates/virtqueue/src",
        modules: &[
            (0, &["budget", "death", "error", "inflight::recovery", "limits", "mapping"]),
            (1, &["sigbus"]),
            (2, &["region"]),
            (3, &["memory::map"]),
            (4, &["memory::local", "memory::table"]),
            (5, &["memory::translator"]),
            (6, &["memory"]),
            (7, &["chain", "inflight", "rings"]),
            (8, &["split"]),
            (9, &["driver", "split::put_back"]),
        ],
    },
    Floors {
        folder: "crates/device/src",
        modules: &[
            (0, &["config_space", "eventfd", "events", "batching", "buffer_budget", "stats"]),
            (0, &["per_thread", "queue_status", "request_barrier", "scsi::address"]),
            (1, &["blk::config", "call_watch"]),
            (1, &["data_budget", "ordered_completion"]),
            (2, &["queue_setup"]),
            (2, &["queue"]),
            (3, &["device_core", "queue::room", "queue::stop", "queue_task"]),
            // virtio-scsi: data, then state of an IoThread, then commands, then the device.
            (1, &["scsi::medium", "scsi::task_resources", "scsi::wait_group"]),
            (1, &["scsi::fields", "scsi::persist::locked_file", "scsi::sense", "scsi::semaphore"]),
            (2, &["scsi::cdb", "scsi::config", "scsi::persist::registry", "scsi::task_set"]),
            (3, &["scsi::held", "scsi::persist::command", "scsi::persist::file"]),
            (4, &["scsi::persist::report", "scsi::persist::rules"]),
            (5, &["scsi::persist"]),
            (6, &["scsi::access", "scsi::outcome"]),
            (7, &["scsi::unit"]),
            (8, &["scsi::units"]),
            (9, &["scsi::event_queue", "scsi::request_queue"]),
            (10, &["scsi::answer", "scsi::task_wait"]),
            (10, &["scsi::block", "scsi::mode", "scsi::reserve", "scsi::unmap", "scsi::verify"]),
            (11, &["scsi::inquiry"]),
            (12, &["scsi::report"]),
            (13, &["scsi::device"]),
            (14, &["scsi::control_queue", "scsi::request"]),
            (15, &["scsi::request::earlier"]),
            // virtio-blk, which obeys reservations of its disk by SCSI initiators.
            (7, &["blk::device"]),
            (8, &["blk::request"]),
            (9, &["blk"]),
            (15, &["scsi"]),
            (16, &["device"]),
            (17, &["hand_over"]),
        ],
    },
    Floors {
        folder: "crates/ringhaul/src",
        modules: &[
            // Process-wide modules, and data.
            (0, &["descriptor_limit", "file_limit", "group", "passed_fds", "heap", "inherit"]),
            (0, &["io_threads", "rate_limit", "log::queue", "memory_limits", "parallel"]),
            (0, &["shared_disks", "disk_names", "options::switches", "peer", "thread_watch"]),
            (0, &["qos::limit_spec", "disk_spec::nbd", "disk_spec::rbd", "service_manager"]),
            (
                0,
                &[
                    "cgroup",
                    "disk_spec::backing",
                    "socket_permissions",
                    "redact",
                    "spec::values",
                    "cancellation",
                ],
            ),
            (1, &["qos", "disk_spec::data", "disk_spec::text", "log::filter"]),
            (2, &["disk_spec::grammar", "examples", "version"]),
            (3, &["disk_spec"]),
            (3, &["open_image", "open_luks", "spec"]),
            (4, &["lease_id", "endpoint", "export_log", "log", "open_disk", "options::disk"]),
            (4, &["ctl::names", "spec::validation", "spec::rules", "status", "subscribers"]),
            (5, &["disk_command", "make_device"]),
            (5, &["options", "settings", "stats"]),
            (6, &["command"]),
            (6, &["options::unit"]),
            (7, &["saved_state::changes", "options::export", "ownership::gate"]),
            (3, &["ctl::connection", "ctl::show", "ctl::sockets"]),
            (8, &["config", "ctl::args", "saved_state::file", "ownership"]),
            (9, &["ctl::calls", "saved_state"]),
            // Sessions.
            (5, &["vhost_user::body", "vhost_user::examiner"]),
            (6, &["vhost_user::peer_fds", "vhost_user::message"]),
            (7, &["vhost_user::call", "vhost_user::load", "vhost_user::setup"]),
            (8, &["vhost_user::channel", "vhost_user::ring", "vhost_user::shared_memory"]),
            (9, &["vhost_user::describe", "vhost_user::inflight"]),
            (10, &["vhost_user::undo"]),
            (11, &["vhost_user::outcome"]),
            (12, &["vhost_user::config"]),
            (13, &["vhost_user::connection"]),
            (
                14,
                &[
                    "vhost_user::connection::pause",
                    "vhost_user::connection::stop",
                    "vhost_user::session_state",
                ],
            ),
            (15, &["vhost_user::session"]),
            (16, &["vhost_user"]),
            // Exports and their control thread.
            (17, &["control::disk_change", "control::hand_over_state", "control::opening"]),
            (18, &["control::order"]),
            (19, &["control::closing", "control::export::memory_watch"]),
            (20, &["control::export"]),
            (21, &["control::export::changes", "control::export::describe", "control::hand_over"]),
            (22, &["control::exports"]),
            (23, &["control", "control::exports::hand_over", "control::exports::opening"]),
            // The daemon.
            (24, &["shutdown", "takeover", "takeover::format", "takeover::wire"]),
            (25, &["engines", "takeover::arguments"]),
            (25, &["daemon::opening"]),
            (26, &["daemon"]),
            (7, &["reload::difference"]),
            (27, &["daemon::adding", "daemon::hand_over", "reload", "disk_monitor"]),
            (28, &["daemon::keeping"]),
            (28, &["takeover::old_process", "takeover::upgrade", "takeover::new_process"]),
            (28, &["control_socket::connection", "control_socket::schema"]),
            (28, &["control_socket::message", "control_socket::client_quota"]),
            (27, &["control_socket::unique_keys"]),
            (29, &["control_socket::client"]),
            (30, &["control_socket::methods"]),
            (31, &["control_socket"]),
            (29, &["serve::start"]),
            (32, &["ctl", "serve"]),
        ],
    },
];

/// Abstract words in 1,000 words of comments or of a page. Each ceiling may only fall.
pub(super) const MAX_ABSTRACT: usize = 5;

/// Doc comments that open with a pronoun or a question word, in percent.
pub(super) const MAX_OPENINGS: usize = 3;

/// Words of a sentence.
pub(super) const MAX_WORDS: usize = 35;

/// The places in which a word is sought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In identifiers, documentation, comments, strings and Markdown.
    Everywhere,
    /// In identifiers of Rust code, except constants, which may have names of specifications.
    Identifiers,
}

/// A word that has a better one.
pub(super) struct Word {
    /// Lower case; `_` separates the parts of an identifier.
    pub(super) wrong: &'static str,
    pub(super) place: Place,
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
        place: Place::Identifiers,
        within: &["crates/"],
        except: &[],
        advice: "the device's eventfd to the driver is a call",
    },
    Word {
        wrong: "interrupt",
        place: Place::Identifiers,
        within: &["crates/virtqueue/", "crates/device/", "crates/ringhaul/"],
        except: &[],
        advice: "the device's eventfd to the driver is a call",
    },
    Word {
        wrong: "reactor",
        place: Place::Identifiers,
        within: &["crates/device/", "crates/ringhaul/", "crates/virtqueue/", "crates/bench/"],
        except: &[],
        advice: "a thread with a loop and an engine is an IoThread",
    },
    Word {
        wrong: "worker",
        place: Place::Identifiers,
        within: &["crates/blockio/", "crates/device/", "crates/ringhaul/", "crates/virtqueue/"],
        // The threads of the pool behind the engine `threads` are no IoThreads: they only block.
        except: &["crates/blockio/src/engine/threads"],
        advice: "a thread with a loop and an engine is an IoThread",
    },
    Word {
        wrong: "backend",
        place: Place::Identifiers,
        within: &["crates/blockio/"],
        except: &[],
        advice: "what a request addresses is a disk; in vhost-user we are the back-end",
    },
    Word {
        wrong: "driver",
        place: Place::Identifiers,
        within: &["crates/blockio/"],
        // A disk that is no local file has a driver.
        except: &["crates/blockio/src/disk"],
        advice: "how an op reaches the kernel is an engine",
    },
    Word {
        wrong: "inflight",
        place: Place::Identifiers,
        within: &["crates/blockio/"],
        except: &[],
        advice: "ops that the kernel has are `in_kernel`; inflight is a region of vhost-user",
    },
    Word {
        wrong: "in_flight",
        place: Place::Identifiers,
        within: &["crates/blockio/"],
        except: &[],
        advice: "ops that the kernel has are `in_kernel`",
    },
    Word {
        wrong: "enqueue",
        place: Place::Identifiers,
        within: &["crates/blockio/"],
        except: &[],
        advice: "an op is queued, then submitted",
    },
];

/// Files that contain wrong words in order to forbid them.
pub(super) const WORD_LISTS: &[&str] = &["xtask/src/tidy/", "CONTRIBUTING.md"];

/// Words that a crate must not use, with the reason.
pub(super) struct Border {
    pub(super) within: &'static str,
    /// Lower case; also found inside longer words.
    pub(super) banned: &'static [&'static str],
    pub(super) advice: &'static str,
}

/// Borders between crates that the compiler does not enforce.
pub(super) const BORDERS: &[Border] = &[
    Border {
        within: "crates/blockio/",
        banned: &["virtio", "vhost", "virtqueue", "guest"],
        advice: "blockio knows files and threads only; what is about guests goes into device",
    },
    Border {
        within: "crates/virtqueue/src/",
        banned: &["blockio", "pread", "pwrite", "io_submit", "io_uring"],
        advice: "virtqueue does no disk I/O; what needs both goes into device",
    },
    Border {
        within: "crates/device/src/",
        banned: &["vhost", "clap", "anyhow", "ringhaul::"],
        advice: "a VMM embeds the device alone; what is about daemons goes into ringhaul",
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
    Word { wrong, place: Place::Everywhere, within: &[""], except: &[], advice }
}

/// Returns true if `path` begins with one of `starts`.
pub(super) fn is_within(path: &str, starts: &[&str]) -> bool {
    starts.iter().any(|start| path.starts_with(start))
}
