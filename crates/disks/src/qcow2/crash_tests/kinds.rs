//! The kinds of images in tests of power cuts.

use super::MIB;

/// Content below a new image.
pub(super) enum Below {
    Nothing,
    Raw,
    /// Compressed data in the image itself.
    Compressed,
}

/// A kind of image, and its first run.
pub(super) struct Kind {
    pub(super) options: &'static str,
    pub(super) bytes: u64,
    pub(super) below: Below,
    pub(super) rounds: u64,
    pub(super) grows: bool,
    /// The fewest blocks of reference counts that the first run adds.
    pub(super) new_blocks: usize,
}

/// Images that gain blocks of reference counts, a longer table of blocks and L2 tables, have parts
/// of clusters written, and reuse space.
pub(super) const KINDS: [Kind; 8] = [
    Kind {
        options: "cluster_size=512,refcount_bits=64",
        bytes: 4 * MIB,
        below: Below::Nothing,
        rounds: 100,
        grows: true,
        new_blocks: 0,
    },
    Kind {
        options: "cluster_size=512,refcount_bits=16",
        bytes: 2 * MIB,
        below: Below::Nothing,
        rounds: 50,
        grows: false,
        new_blocks: 4,
    },
    Kind {
        options: "cluster_size=512,refcount_bits=1",
        bytes: 6 * MIB,
        below: Below::Raw,
        rounds: 100,
        grows: false,
        new_blocks: 1,
    },
    Kind {
        options: "cluster_size=4k,refcount_bits=1",
        bytes: 4 * MIB,
        below: Below::Raw,
        rounds: 50,
        grows: true,
        new_blocks: 0,
    },
    Kind {
        options: "cluster_size=512,compat=0.10",
        bytes: 2 * MIB,
        below: Below::Nothing,
        rounds: 50,
        grows: false,
        new_blocks: 0,
    },
    Kind {
        options: "cluster_size=4k",
        bytes: 2 * MIB,
        below: Below::Compressed,
        rounds: 50,
        grows: true,
        new_blocks: 0,
    },
    Kind {
        options: "cluster_size=64k",
        bytes: 4 * MIB,
        below: Below::Raw,
        rounds: 20,
        grows: true,
        new_blocks: 0,
    },
    Kind {
        options: "cluster_size=64k",
        bytes: 16 * MIB,
        below: Below::Nothing,
        rounds: 30,
        grows: false,
        new_blocks: 0,
    },
];
