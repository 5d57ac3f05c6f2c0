//! Rows of the tables that no longer apply to anything.

use super::links::NAMED_FOLDERS;
use super::tables::{self, Word};
use super::{Problem, Source, rust};

/// Checks the tables. `sources` is the whole tree.
pub(super) fn check(sources: &[Source]) -> Vec<Problem> {
    let starts = |start: &&str| sources.iter().any(|source| source.path.starts_with(*start));
    let mut rows: Vec<(&str, &str)> = Vec::new();
    let has = |file: &str, word: &str| {
        sources.iter().any(|source| source.path == file && rust::has_word(source, word))
    };
    for (file, _) in tables::UNSAFE_FILES {
        if !has(file, "unsafe") {
            rows.push((file, "there is no such file with `unsafe` in it"));
        }
    }
    for (file, _) in tables::SIMULATED_FILES {
        if !has(file, tables::SIMULATION) {
            rows.push((file, "there is no such file with a branch for the simulation"));
        }
    }
    let nothing = "no file's path begins like that";
    for Word { within, except, .. } in tables::WORDS {
        let places = within.iter().chain(*except);
        rows.extend(places.filter(|start| !starts(start)).map(|start| (*start, nothing)));
    }
    let borders = tables::BORDERS.iter().map(|border| &border.within);
    let places = borders.chain(tables::WORD_LISTS).chain(NAMED_FOLDERS);
    rows.extend(places.filter(|start| !starts(start)).map(|start| (*start, nothing)));
    rows.sort_unstable();
    rows.dedup();
    let problem = |(row, why): (&str, &str)| Problem {
        file: "xtask/src/tidy/tables.rs".to_owned(),
        line: 1,
        what: format!("the row `{row}` is dead"),
        advice: format!("{why}: correct it or take it out"),
    };
    rows.into_iter().map(problem).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(paths: &[&str]) -> Vec<String> {
        let source = |path: &&str| {
            let text = if path.contains("rings") { "fn a() { unsafe { b() } }" } else { "" };
            Source { path: (*path).to_owned(), text: text.to_owned() }
        };
        let sources: Vec<Source> = paths.iter().map(source).collect();
        check(&sources).into_iter().map(|problem| problem.what).collect()
    }

    #[test]
    fn rows_that_apply_to_nothing_are_found() {
        let rings = "the row `crates/virtqueue/src/rings.rs` is dead".to_owned();
        let border = "the row `crates/blockio/` is dead".to_owned();
        let all = found(&[]);
        assert!(all.contains(&rings) && all.contains(&border), "{all:?}");
        let some = found(&["crates/virtqueue/src/rings.rs", "crates/blockio/src/lib.rs"]);
        assert!(!some.contains(&rings) && !some.contains(&border), "{some:?}");
        // A file without `unsafe` needs no row.
        let copy = "the row `crates/iomem/src/copy.rs` is dead".to_owned();
        assert!(found(&["crates/iomem/src/copy.rs"]).contains(&copy));
    }
}
