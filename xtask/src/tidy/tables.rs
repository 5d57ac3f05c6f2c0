//! The limits, lists and exceptions that `tidy` applies.

/// Lines of a function, from `fn` to its closing brace.
pub(super) const MAX_FUNCTION_LINES: usize = 70;

/// Lines of a file before its `#[cfg(test)]` module.
pub(super) const MAX_FILE_LINES: usize = 500;

/// Columns of a line of code.
pub(super) const MAX_COLUMNS: usize = 100;

/// Folders that hold no source, by name.
pub(super) const SKIPPED_FOLDERS: &[&str] = &[".git", "target"];

/// Files that may say `unsafe`, and why.
pub(super) const UNSAFE_FILES: &[(&str, &str)] = &[
    ("crates/blockio/src/engine/*.rs", "system calls on memory that the kernel goes on using"),
    ("crates/blockio/src/engine/io_uring/*.rs", "the ring of engine io_uring"),
    ("crates/blockio/src/disk/lock.rs", "byte locks, which rustix does not have"),
    ("crates/blockio/src/buf.rs", "buffers in memory that others may write"),
    ("crates/virtqueue/src/mapping.rs", "maps and unmaps one region"),
    ("crates/virtqueue/tests/it/sigbus.rs", "sends itself the signals of the kernel"),
    ("crates/virtqueue/src/memory.rs", "guest memory: translation and volatile access"),
    ("crates/virtqueue/src/sigbus.rs", "a signal handler that maps memory"),
    ("crates/virtqueue/src/split.rs", "split rings in guest memory"),
    ("crates/virtqueue/src/packed.rs", "packed rings in guest memory"),
    ("crates/virtqueue/src/inflight.rs", "the inflight region, shared with the front-end"),
    ("crates/ringhaul/src/call_watch.rs", "a signal to one thread, and its handler"),
    ("crates/ringhaul/src/file_limit.rs", "ignores a signal"),
    ("crates/ringhaul/src/heap.rs", "an option of the C library"),
    ("crates/ringhaul/src/inherit.rs", "takes over a descriptor by its number"),
    ("crates/ringhaul/src/guest_buf.rs", "hands guest memory to an engine"),
    ("crates/bench/src/driver.rs", "the driver side of the rings, in memory it shares"),
];

/// Files whose `#[cfg(test)]` module may say `unsafe`, and why.
pub(super) const UNSAFE_TESTS: &[(&str, &str)] =
    &[("crates/blockio/src/op.rs", "makes a list of buffers, to see who keeps it alive")];

/// Where a word is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In identifiers, documentation, comments, strings and Markdown.
    Everywhere,
    /// In identifiers of Rust code, except constants, which carry names of specifications.
    Identifiers,
}

/// A word that has a better one.
pub(super) struct Word {
    /// Lower case; `_` separates the parts of an identifier.
    pub(super) wrong: &'static str,
    pub(super) place: Place,
    /// Folders and files in which it is wrong, as starts of paths; "" is all.
    pub(super) within: &'static [&'static str],
    /// Folders and files in which it is right all the same.
    pub(super) except: &'static [&'static str],
    pub(super) advice: &'static str,
}

/// Words that would be a second name of something.
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
        within: &["crates/virtqueue/", "crates/ringhaul/"],
        except: &[],
        advice: "the device's eventfd to the driver is a call",
    },
    Word {
        wrong: "reactor",
        place: Place::Identifiers,
        within: &["crates/ringhaul/", "crates/virtqueue/", "crates/bench/"],
        except: &[],
        advice: "a thread with a loop and an engine is an IoThread",
    },
    Word {
        wrong: "worker",
        place: Place::Identifiers,
        within: &["crates/blockio/", "crates/ringhaul/", "crates/virtqueue/"],
        // The pool behind the engine `threads` is no IoThread: its threads only block.
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
        except: &[],
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

/// Files that name wrong words in order to forbid them.
pub(super) const WORD_LISTS: &[&str] = &["xtask/src/tidy/", "CONTRIBUTING.md"];

/// What one crate may not know of, and why.
pub(super) struct Border {
    pub(super) within: &'static str,
    /// Lower case; found inside longer words too.
    pub(super) banned: &'static [&'static str],
    pub(super) advice: &'static str,
}

/// The borders that a compiler does not see.
pub(super) const BORDERS: &[Border] = &[
    Border {
        within: "crates/blockio/",
        banned: &["virtio", "vhost", "virtqueue", "guest"],
        advice: "blockio knows files and threads only; what is about guests goes into ringhaul",
    },
    Border {
        within: "crates/virtqueue/src/",
        banned: &["blockio", "pread", "pwrite", "io_submit", "io_uring"],
        advice: "virtqueue does no disk I/O; what needs both goes into ringhaul",
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

/// Whether `path` is in the area of one of `starts`.
pub(super) fn is_within(path: &str, starts: &[&str]) -> bool {
    starts.iter().any(|start| path.starts_with(start))
}
