//! Changes a tree of files at random, and compares it with a model again and again.
//!
//! `tree_stress FOLDER SEED STOP` works in FOLDER, on an empty tree, until the file STOP exists. A
//! round makes, writes, truncates, renames, links and removes files and folders, writes everything
//! to the disk, drops the caches of the kernel, and reads the whole tree. It needs the standard
//! library alone: guests without a Rust toolchain run it, linked statically.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// The operations of a round.
const OPERATIONS: u64 = 120;

/// The names in a folder, so few that operations often meet an existing file.
const NAMES: u64 = 24;

/// The most bytes of a write, and of a length.
const WRITE_BYTES: u64 = 24 << 10;
const FILE_BYTES: u64 = 64 << 10;

/// An entry of a folder.
enum Entry {
    Folder,
    /// A name of the file with this number.
    File(usize),
    Symlink(String),
}

/// The tree, and its model: paths below the folder, and the contents of files.
struct Tree {
    root: PathBuf,
    random: u64,
    entries: BTreeMap<String, Entry>,
    contents: Vec<Vec<u8>>,
}

impl Tree {
    /// A random number below `limit` (splitmix64).
    fn below(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }

    /// A random element of the paths for which `wanted` is true.
    fn pick(&mut self, wanted: fn(&Entry) -> bool) -> Option<String> {
        let found = self.entries.iter().filter(|(_, entry)| wanted(entry));
        let paths: Vec<String> = found.map(|(path, _)| path.clone()).collect();
        let count = u64::try_from(paths.len()).ok().filter(|&count| count > 0)?;
        let index = usize::try_from(self.below(count)).ok()?;
        paths.into_iter().nth(index)
    }

    /// A path in a random folder, at most three levels deep. An entry may have it.
    fn new_path(&mut self) -> String {
        let folder = match self.below(3) {
            0 => None,
            _ => self.pick(|entry| matches!(entry, Entry::Folder)),
        };
        let folder = folder.unwrap_or_default();
        let name = self.below(NAMES);
        match folder.matches('/').count() {
            0 | 1 => format!("{folder}/name-{name}"),
            _ => format!("/name-{name}"),
        }
    }

    fn full(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Runs a random operation.
    fn step(&mut self) -> io::Result<()> {
        match self.below(12) {
            0..=2 => self.create(),
            3 | 4 => self.write(),
            5 => self.truncate(),
            6 | 7 => self.rename(),
            8 => self.link(),
            9 => self.make_folder_or_symlink(),
            10 => self.remove(),
            _ => match self.pick(|entry| matches!(entry, Entry::File(_))) {
                Some(path) => File::open(self.full(&path))?.sync_all(),
                None => Ok(()),
            },
        }
    }

    fn random_bytes(&mut self, limit: u64) -> Vec<u8> {
        let length = self.below(limit);
        let start = self.below(251);
        (0..length).map(|at| ((at * 7 + at / 256 + start) % 251) as u8).collect()
    }

    fn create(&mut self) -> io::Result<()> {
        let path = self.new_path();
        if self.entries.contains_key(&path) {
            return Ok(());
        }
        let content = self.random_bytes(WRITE_BYTES);
        fs::write(self.full(&path), &content)?;
        self.contents.push(content);
        self.entries.insert(path, Entry::File(self.contents.len() - 1));
        Ok(())
    }

    /// The path and the number of a random file.
    fn pick_file(&mut self) -> Option<(String, usize)> {
        let path = self.pick(|entry| matches!(entry, Entry::File(_)))?;
        match self.entries[&path] {
            Entry::File(number) => Some((path, number)),
            Entry::Folder | Entry::Symlink(_) => None,
        }
    }

    fn write(&mut self) -> io::Result<()> {
        let Some((path, number)) = self.pick_file() else { return Ok(()) };
        let offset = self.below(FILE_BYTES - WRITE_BYTES);
        let bytes = self.random_bytes(WRITE_BYTES);
        if bytes.is_empty() {
            return Ok(());
        }
        let mut file = OpenOptions::new().write(true).open(self.full(&path))?;
        file.seek(SeekFrom::Start(offset))?;
        file.write_all(&bytes)?;
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        let content = &mut self.contents[number];
        content.resize(content.len().max(offset + bytes.len()), 0);
        content[offset..offset + bytes.len()].copy_from_slice(&bytes);
        Ok(())
    }

    fn truncate(&mut self) -> io::Result<()> {
        let Some((path, number)) = self.pick_file() else { return Ok(()) };
        let length = self.below(FILE_BYTES);
        OpenOptions::new().write(true).open(self.full(&path))?.set_len(length)?;
        self.contents[number].resize(usize::try_from(length).map_err(io::Error::other)?, 0);
        Ok(())
    }

    /// Renames a file or a symbolic link, over another one if there is one, or a folder.
    fn rename(&mut self) -> io::Result<()> {
        let Some(from) = self.pick(|_| true) else { return Ok(()) };
        let to = self.new_path();
        let is_folder = matches!(self.entries[&from], Entry::Folder);
        let is_inside = to == from || to.starts_with(&format!("{from}/"));
        let replaced = self.entries.get(&to);
        if is_inside || is_folder && replaced.is_some() || matches!(replaced, Some(Entry::Folder)) {
            return Ok(());
        }
        if let (Entry::File(a), Some(Entry::File(b))) = (&self.entries[&from], replaced)
            && a == b
        {
            // Two names of one file: rename(2) does nothing.
            return Ok(());
        }
        fs::rename(self.full(&from), self.full(&to))?;
        let below = format!("{from}/");
        let moved = self.entries.keys().filter(|path| **path == from || path.starts_with(&below));
        for path in moved.cloned().collect::<Vec<_>>() {
            if let Some(entry) = self.entries.remove(&path) {
                self.entries.insert(format!("{to}{}", &path[from.len()..]), entry);
            }
        }
        Ok(())
    }

    fn link(&mut self) -> io::Result<()> {
        let Some((from, number)) = self.pick_file() else { return Ok(()) };
        let to = self.new_path();
        if self.entries.contains_key(&to) {
            return Ok(());
        }
        fs::hard_link(self.full(&from), self.full(&to))?;
        self.entries.insert(to, Entry::File(number));
        Ok(())
    }

    fn make_folder_or_symlink(&mut self) -> io::Result<()> {
        let path = self.new_path();
        if self.entries.contains_key(&path) {
            return Ok(());
        }
        if self.below(2) == 0 {
            fs::create_dir(self.full(&path))?;
            self.entries.insert(path, Entry::Folder);
        } else {
            let target = self.new_path();
            symlink(&target, self.full(&path))?;
            self.entries.insert(path, Entry::Symlink(target));
        }
        Ok(())
    }

    fn remove(&mut self) -> io::Result<()> {
        let Some(path) = self.pick(|_| true) else { return Ok(()) };
        if !matches!(self.entries[&path], Entry::Folder) {
            fs::remove_file(self.full(&path))?;
        } else if self.entries.keys().any(|other| other.starts_with(&format!("{path}/"))) {
            return Ok(());
        } else {
            fs::remove_dir(self.full(&path))?;
        }
        self.entries.remove(&path);
        Ok(())
    }

    /// Compares the tree with the model, once as it is in memory, which has data that was read in
    /// the round before, and once as it is on the disk.
    fn check(&self) -> io::Result<()> {
        self.compare()?;
        // A program without dependencies has no syncfs(2).
        let synced = Command::new("sync").arg("-f").arg(&self.root).status()?;
        if !synced.success() {
            return Err(io::Error::other(format!("sync ended with {synced}")));
        }
        fs::write("/proc/sys/vm/drop_caches", "3")?;
        self.compare()
    }

    fn compare(&self) -> io::Result<()> {
        let mut found = 0;
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(self.full(&folder))? {
                let name = entry?.file_name();
                let path = format!("{folder}/{}", name.display());
                self.check_entry(&path).map_err(|error| {
                    io::Error::new(error.kind(), format!("checking {path}: {error}"))
                })?;
                found += 1;
                if matches!(self.entries[&path], Entry::Folder) {
                    folders.push(path);
                }
            }
        }
        match found == self.entries.len() {
            true => Ok(()),
            false => Err(io::Error::other(format!(
                "the tree has {found} entries in place of {}",
                self.entries.len()
            ))),
        }
    }

    fn check_entry(&self, path: &str) -> io::Result<()> {
        let full = self.full(path);
        let kind = fs::symlink_metadata(&full)?;
        let is_as_expected = match self.entries.get(path) {
            Some(Entry::Folder) => kind.is_dir(),
            Some(Entry::Symlink(target)) => {
                kind.is_symlink() && fs::read_link(&full)? == Path::new(target)
            }
            Some(&Entry::File(number)) => {
                let is_same =
                    |entry: &&Entry| matches!(entry, Entry::File(other) if *other == number);
                let names = self.entries.values().filter(is_same).count();
                kind.is_file()
                    && u64::try_from(names) == Ok(kind.nlink())
                    && fs::read(&full)? == self.contents[number]
            }
            None => false,
        };
        match is_as_expected {
            true => Ok(()),
            false => Err(io::Error::other("it is not as it was written")),
        }
    }
}

fn run(root: &str, seed: u64, stop: &Path) -> io::Result<()> {
    let contents = Vec::new();
    let mut tree = Tree { root: root.into(), random: seed, entries: BTreeMap::new(), contents };
    for round in 1.. {
        for _ in 0..OPERATIONS {
            tree.step()?;
        }
        tree.check()?;
        println!("round {round}: {} entries", tree.entries.len());
        if stop.exists() {
            break;
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [root, seed, stop] = arguments.as_slice() else {
        eprintln!("usage: tree_stress FOLDER SEED STOP");
        return ExitCode::FAILURE;
    };
    let result = seed.parse().map_err(io::Error::other);
    match result.and_then(|seed| run(root, seed, Path::new(stop))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tree_stress: {error}");
            ExitCode::FAILURE
        }
    }
}
