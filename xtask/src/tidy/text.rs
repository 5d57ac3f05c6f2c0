//! Rules about lines of text: width, words, borders, unfinished work, private paths.

use std::path::Path;

use super::tables::{self, Scope};
use super::{Problem, Source};

/// Problems of any text file.
pub(super) fn check(source: &Source, private_paths: &[String]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (index, line) in source.text.lines().enumerate() {
        let number = index + 1;
        problems.extend(width(source, number, line));
        problems.extend(marks(source, number, line));
        problems.extend(words(source, number, line));
        problems.extend(borders(source, number, line));
        problems.extend(paths(source, number, line, private_paths));
    }
    problems
}

/// The absolute paths of this machine: the tree, its parent, the home.
pub(super) fn private_paths(root: &Path) -> Vec<String> {
    let shared = ["/", "/tmp", "/usr", "/var", "/opt", "/mnt", "/srv", "/home", "/src"];
    let home = std::env::var("HOME").unwrap_or_default();
    // /root exists on every machine, and in the guest.
    let home = (home != "/root").then_some(home);
    [Some(root.to_string_lossy().into_owned()), root.parent().map(|up| up.display().to_string())]
        .into_iter()
        .chain([home])
        .flatten()
        .filter(|path| path.starts_with('/') && !shared.contains(&path.as_str()))
        .collect()
}

fn width(source: &Source, number: usize, line: &str) -> Option<Problem> {
    let columns = line.chars().count();
    // Rows of tables, and links and pictures that no break can shorten, may be wide.
    let is_prose = source.has_extension("md") && !line.starts_with(['|', '!', '[']);
    ((source.is_code() || is_prose) && columns > tables::MAX_COLUMNS).then(|| {
        let what = format!("line of {columns} columns");
        source.problem(number, what, format!("break it before column {}", tables::MAX_COLUMNS + 1))
    })
}

fn marks(source: &Source, number: usize, line: &str) -> Option<Problem> {
    let mark = tables::MARKS.iter().find(|mark| has_word(line, mark))?;
    Some(source.problem(number, format!("{mark} in the text"), "do it now or open an issue"))
}

fn words(source: &Source, number: usize, line: &str) -> Vec<Problem> {
    if tables::is_within(&source.path, tables::WORD_LISTS) {
        return Vec::new();
    }
    let lower = line.to_lowercase();
    tables::WORDS
        .iter()
        .filter(|word| word.scope == Scope::Everywhere)
        .filter(|word| tables::is_within(&source.path, word.within))
        .filter(|word| !tables::is_within(&source.path, word.except))
        .filter(|word| has_part(&lower, word.wrong))
        .map(|word| source.problem(number, format!("the word `{}`", word.wrong), word.advice))
        .collect()
}

fn borders(source: &Source, number: usize, line: &str) -> Vec<Problem> {
    let lower = line.to_lowercase();
    tables::BORDERS
        .iter()
        .filter(|border| tables::is_within(&source.path, border.within))
        .flat_map(|border| border.banned.iter().map(move |word| (word, border.advice)))
        .filter(|(word, _)| lower.contains(**word))
        .map(|(word, advice)| source.problem(number, format!("`{word}` in this crate"), advice))
        .collect()
}

fn paths(source: &Source, number: usize, line: &str, private: &[String]) -> Option<Problem> {
    let found = private
        .iter()
        .map(String::as_str)
        .chain(["/home/", "/Users/"])
        .find(|path| has_absolute_path(line, path))?;
    let what = format!("a path of one machine ({found})");
    Some(source.problem(number, what, "use a relative path, a variable or a temporary folder"))
}

/// Returns true if `line` contains the path `path`, alone or with parts after it, but not inside of
/// a longer path.
fn has_absolute_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(start, _)| {
        let before = line[..start].chars().next_back();
        let after = line[start + path.len()..].chars().next();
        let continues = |next: char| next.is_alphanumeric() || "-_.".contains(next);
        let opens = before.is_none_or(|last| !(continues(last) || "/}~$".contains(last)));
        // `/home/` is private only if a name follows, any other path only if its last name ends.
        let closes = match path.ends_with('/') {
            true => after.is_some_and(|next| next.is_alphanumeric()),
            false => after.is_none_or(|next| !continues(next)),
        };
        opens && closes
    })
}

/// Returns true if `line` contains `word` between characters that are in no identifier.
fn has_word(line: &str, word: &str) -> bool {
    let joins = |next: char| next.is_alphanumeric() || next == '_';
    bounded(line, word, joins)
}

/// Returns true if `line` contains `word` as a word or as a part of an identifier.
fn has_part(line: &str, word: &str) -> bool {
    bounded(line, word, char::is_alphanumeric)
}

fn bounded(line: &str, word: &str, joins: impl Fn(char) -> bool) -> bool {
    line.match_indices(word).any(|(start, _)| {
        let before = line[..start].chars().next_back();
        let after = line[start + word.len()..].chars().next();
        !before.is_some_and(&joins) && !after.is_some_and(&joins)
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::found;

    #[test]
    fn long_lines_of_code() {
        let fits = format!("# {}\n", "é".repeat(98));
        let long = format!("# {}\n", "é".repeat(99));
        assert!(found("Makefile", &fits).is_empty());
        assert_eq!(found("Makefile", &long), ["1 line of 101 columns"]);
        assert_eq!(found("docs/x.md", &long), ["1 line of 101 columns"]);
        assert!(found("docs/x.md", &format!("| {}\n", "é".repeat(99))).is_empty());
    }

    #[test]
    fn unfinished_work() {
        for mark in super::tables::MARKS {
            assert_eq!(
                found("a.toml", &format!("\n# {mark}: x")),
                [format!("2 {mark} in the text")]
            );
        }
        // A mark inside of a word does not count.
        let word = format!("mktemp -d /tmp/a.{}", "X".repeat(6));
        assert!(found("a.sh", &word).is_empty());
    }

    #[test]
    fn wrong_words() {
        assert_eq!(found("docs/a.md", "Ring the Doorbell."), ["1 the word `doorbell`"]);
        assert_eq!(found("a.sh", "reaped_at=1"), ["1 the word `reaped`"]);
        assert!(found("docs/a.md", "A disk reappears.").is_empty());
        assert!(found("CONTRIBUTING.md", "doorbell").is_empty());
    }

    #[test]
    fn borders_of_crates() {
        let doc = "//! Vhost-user.\n";
        for name in ["blockio", "disks"] {
            let path = format!("crates/{name}/src/a.rs");
            assert_eq!(found(&path, doc), ["1 `vhost` in this crate"]);
        }
        assert_eq!(
            found("crates/blockio/Cargo.toml", "virtio-x = 1"),
            ["1 `virtio` in this crate"]
        );
        assert!(found("crates/ringhaul/src/a.rs", doc).is_empty());
        let doc = "//! Calls preadv.\n";
        assert_eq!(found("crates/virtqueue/src/a.rs", doc), ["1 `pread` in this crate"]);
        assert!(found("crates/blockio/src/a.rs", doc).is_empty());
        let doc = "//! Bails with anyhow.\n";
        assert_eq!(found("crates/vhost-user/src/a.rs", doc), ["1 `anyhow` in this crate"]);
    }

    #[test]
    fn private_paths() {
        // In pieces, since this file is checked too.
        let home = concat!("/ho", "me/");
        let line = format!("cd {home}anna/x");
        assert_eq!(found("a.sh", &line), [format!("1 a path of one machine ({home})")]);
        let line = "cat /srv/project/x";
        assert_eq!(found("a.sh", line), ["1 a path of one machine (/srv/project)"]);
        for good in ["cat /srv/projects/x", "cat sub/srv/project/x", "ls $X/srv/project", home] {
            assert!(found("a.sh", good).is_empty(), "{good}");
        }
    }

    #[test]
    fn common_paths_are_not_private() {
        let of = |root: &str| super::private_paths(std::path::Path::new(root));
        assert!(!of("/tmp/tree").contains(&"/tmp".to_owned()));
        assert!(of("/tmp/tree").contains(&"/tmp/tree".to_owned()));
        assert!(of("/data/one/tree").contains(&"/data/one".to_owned()));
    }
}
