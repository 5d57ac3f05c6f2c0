//! The servers that are compared, and how each is started.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::lab::targets::Target;

/// Bytes of the null disk, for both: 64 GiB, more than any real disk here.
const NULL_SIZE: u64 = 64 << 30;

/// A program with options, serving one disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Server {
    Ringhaul,
    /// qemu-storage-daemon with `aio=native`.
    QsdNative,
    /// qemu-storage-daemon with `aio=threads`.
    QsdThreads,
    /// qemu-storage-daemon with its null disk.
    QsdNull,
}

impl Server {
    /// Who is compared on `target`; Ringhaul is the first.
    pub(super) fn on(target: Target) -> &'static [Self] {
        match target {
            Target::Null => &[Self::Ringhaul, Self::QsdNull],
            Target::Zram | Target::Loop | Target::File => {
                &[Self::Ringhaul, Self::QsdNative, Self::QsdThreads]
            }
        }
    }

    /// The program's name.
    pub(super) fn program(self) -> &'static str {
        match self {
            Self::Ringhaul => "ringhaul",
            Self::QsdNative | Self::QsdThreads | Self::QsdNull => "qemu-storage-daemon",
        }
    }

    /// Options to serve `disk` (of a type that `target` has) on `socket`.
    ///
    /// Both bypass the page cache and offer a write cache that is never flushed, so a write is
    /// done when the kernel says so, for both alike.
    pub(super) fn options(
        self,
        target: Target,
        engine: &str,
        disk: &str,
        socket: &str,
    ) -> Vec<String> {
        if self == Self::Ringhaul {
            let disk = match target {
                Target::Null => ["--disk".to_owned(), format!("null,size={NULL_SIZE}")],
                _ => ["--blk-file".to_owned(), disk.to_owned()],
            };
            let fixed = ["--num-queues", "1", "--cache", "none", "--engine", engine];
            let start = ["serve", "--socket-path", socket].map(str::to_owned);
            return start.into_iter().chain(disk).chain(fixed.map(str::to_owned)).collect();
        }
        let driver = if target == Target::File { "file" } else { "host_device" };
        let real = |aio| {
            let direct = "cache.direct=on,node-name=disk";
            format!("driver={driver},filename={disk},aio={aio},{direct}")
        };
        let blockdev = match self {
            Self::QsdNative => real("native"),
            Self::QsdThreads => real("threads"),
            _ => format!("driver=null-co,size={NULL_SIZE},read-zeroes=off,node-name=disk"),
        };
        let export = format!(
            "type=vhost-user-blk,id=export,node-name=disk,iothread=thread,writable=on,\
             num-queues=1,addr.type=unix,addr.path={socket}"
        );
        ["--object", "iothread,id=thread", "--blockdev", &blockdev, "--export", &export]
            .map(str::to_owned)
            .to_vec()
    }
}

impl fmt::Display for Server {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Ringhaul => "Ringhaul",
            Self::QsdNative => "QSD aio=native",
            Self::QsdThreads => "QSD aio=threads",
            Self::QsdNull => "QSD null-co",
        })
    }
}

impl Serialize for Server {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
