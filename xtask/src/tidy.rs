//! `cargo xtask tidy`: style as a test.
//!
//! Rules beyond rustfmt and clippy: lengths, files with `unsafe`, the borders between crates, the
//! words of the project, dead links, unused public items, the form of commits. The limits are in
//! `tables.rs`.

mod architecture;
mod commits;
mod floors;
mod language;
mod links;
mod rust;
mod tables;
mod text;
mod unused;

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use ringhaul_tools::workspace;

/// Options of `cargo xtask tidy`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Files to check, in place of all files of the tree
    files: Vec<PathBuf>,
}

/// A rule that a line breaks.
#[derive(Debug)]
struct Problem {
    file: String,
    line: usize,
    /// The offending text or fact.
    what: String,
    /// The reason and the remedy.
    advice: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}: {}: {}", self.file, self.line, self.what, self.advice)
    }
}

/// A file of the tree and its text.
struct Source {
    /// Path relative to the root, with `/`.
    path: String,
    text: String,
}

impl Source {
    fn problem(&self, line: usize, what: String, advice: impl Into<String>) -> Problem {
        Problem { file: self.path.clone(), line, what, advice: advice.into() }
    }

    fn has_extension(&self, extension: &str) -> bool {
        Path::new(&self.path).extension().is_some_and(|found| found == extension)
    }

    /// Returns true for a file of any programming language, and for the Makefile.
    fn is_code(&self) -> bool {
        let name = self.path.rsplit('/').next().unwrap_or_default();
        self.has_extension("rs")
            || self.has_extension("sh")
            || self.path.starts_with(".ci/")
            || name == "Makefile"
    }
}

/// Checks the tree (or the named files) and prints every problem.
pub(crate) fn run(args: &Args) -> Result<()> {
    let root = workspace::root();
    let mut paths = if args.files.is_empty() { files(root)? } else { Vec::new() };
    for file in &args.files {
        paths.push(file.canonicalize().with_context(|| format!("opening {}", file.display()))?);
    }
    let private_paths = text::private_paths(root);
    let mut problems = Vec::new();
    let mut sources = Vec::new();
    for path in &paths {
        sources.extend(read(root, path)?);
    }
    let count = sources.len();
    for source in &sources {
        problems.extend(check(source, root, &private_paths));
    }
    if args.files.is_empty() {
        problems.extend(floors::check(&sources));
        problems.extend(language::check(&sources));
        problems.extend(architecture::check(&sources));
        problems.extend(commits::check(root));
        problems.extend(unused::check(&sources));
    }
    for problem in &problems {
        println!("{problem}");
    }
    if !problems.is_empty() {
        bail!("tidy: {} problems in {count} files", problems.len());
    }
    println!("tidy: {count} files, no problems");
    Ok(())
}

/// Returns all problems of one file.
fn check(source: &Source, root: &Path, private_paths: &[String]) -> Vec<Problem> {
    let mut problems = text::check(source, private_paths);
    if source.has_extension("rs") {
        problems.extend(rust::check(source));
    }
    if source.has_extension("md") {
        problems.extend(links::check(source, root));
    }
    problems.sort_by_key(|problem| problem.line);
    problems
}

/// Reads a file; `None` if it is not text.
fn read(root: &Path, path: &Path) -> Result<Option<Source>> {
    let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let Ok(text) = String::from_utf8(bytes) else {
        return Ok(None);
    };
    let relative = path.strip_prefix(root).unwrap_or(path);
    Ok(Some(Source { path: relative.to_string_lossy().into_owned(), text }))
}

/// The files of the tree, sorted by name, without files that git ignores.
pub(crate) fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut list = Command::new("git");
    list.current_dir(root).args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let output = list.output().ok().filter(|output| output.status.success());
    let names = output.map(|output| output.stdout).unwrap_or_default();
    let names = names.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let paths = names.map(|name| root.join(OsStr::from_bytes(name)));
    // A file that was removed and not committed is still listed, and a link is no file.
    let is_file = |path: &PathBuf| {
        path.symlink_metadata().is_ok_and(|data| data.is_file())
            && path.file_name().is_some_and(|name| name != "Cargo.lock")
    };
    let mut paths: Vec<PathBuf> = paths.filter(is_file).collect();
    paths.sort();
    if paths.is_empty() {
        // A tarball of the tree has no git.
        walk(root, &mut paths)?;
    }
    Ok(paths)
}

/// Collects the files below `folder`, sorted by name.
fn walk(folder: &Path, paths: &mut Vec<PathBuf>) -> Result<()> {
    let context = || format!("listing {}", folder.display());
    let mut entries = std::fs::read_dir(folder)
        .with_context(context)?
        .collect::<Result<Vec<_>, _>>()
        .with_context(context)?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let kind = entry.file_type().with_context(context)?;
        let skipped = tables::SKIPPED_FOLDERS.iter().any(|name| entry.file_name() == *name);
        if kind.is_dir() && !skipped {
            walk(&entry.path(), paths)?;
        } else if kind.is_file() && entry.file_name() != "Cargo.lock" {
            paths.push(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The problems that `check` finds for `text` at `path`, each as `line what`.
    pub(super) fn found(path: &str, text: &str) -> Vec<String> {
        let source = Source { path: path.to_owned(), text: text.to_owned() };
        let private_paths = ["/srv/project".to_owned()];
        check(&source, workspace::root(), &private_paths)
            .into_iter()
            .map(|problem| format!("{} {}", problem.line, problem.what))
            .collect()
    }

    #[test]
    fn a_clean_file_has_no_problems() {
        let text = "//! Adds.\n\n/// The sum.\npub fn sum(a: u32, b: u32) -> u32 {\n    a + b\n}\n";
        assert_eq!(found("crates/blockio/src/sum.rs", text), Vec::<String>::new());
    }

    #[test]
    fn the_walk_finds_files_and_leaves_out_build_output() {
        let folder = tempfile::tempdir().unwrap();
        for path in ["a/b.rs", "target/c.rs", ".git/d", "e.md", "Cargo.lock"] {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        let expected = [folder.path().join("a/b.rs"), folder.path().join("e.md")];
        let mut paths = Vec::new();
        walk(folder.path(), &mut paths).unwrap();
        assert_eq!(paths, expected);
        assert_eq!(files(folder.path()).unwrap(), expected, "it is no repository");
    }

    #[test]
    fn files_that_git_ignores_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let git = |arguments: &[&str]| {
            let mut git = Command::new("git");
            assert!(git.current_dir(folder.path()).args(arguments).status().unwrap().success());
        };
        git(&["init", "-q"]);
        for (path, text) in [
            (".gitignore", ".tmp*\n"),
            (".tmp1", ""),
            ("a.rs", ""),
            ("gone", ""),
            ("Cargo.lock", ""),
        ] {
            std::fs::write(folder.path().join(path), text).unwrap();
        }
        git(&["add", "."]);
        std::fs::remove_file(folder.path().join("gone")).unwrap();
        std::fs::write(folder.path().join("new.rs"), "").unwrap();
        let expected = [".gitignore", "a.rs", "new.rs"].map(|name| folder.path().join(name));
        assert_eq!(files(folder.path()).unwrap(), expected);
    }
}
