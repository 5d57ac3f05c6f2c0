//! ARCHITECTURE.md against the tree: its code map names each file outside of folders, and each of
//! its invariants is asserted by its number.

use std::collections::BTreeSet;

use proc_macro2::{TokenStream, TokenTree};

use super::floors::test_modules;
use super::{Problem, Source};

/// The text to check.
pub(super) const FILE: &str = "ARCHITECTURE.md";

/// The start of the text of an assertion, or of a check in a test or the simulation.
const NAME: &str = "invariant ";

/// Checks the text. `sources` is the whole tree.
pub(super) fn check(sources: &[Source]) -> Vec<Problem> {
    let Some(text) = sources.iter().find(|source| source.path == FILE) else {
        return Vec::new();
    };
    let mut problems = code_map(text, sources);
    problems.extend(invariants(text, sources));
    problems
}

/// The lines below a heading up to the next one, with their numbers.
pub(super) fn section<'a>(text: &'a Source, heading: &str) -> Vec<(usize, &'a str)> {
    let lines = text.text.lines().enumerate().map(|(index, line)| (index + 1, line));
    let below = lines.skip_while(|(_, line)| line.trim_start_matches('#').trim() != heading);
    below.skip(1).take_while(|(_, line)| !line.starts_with('#')).collect()
}

/// The texts between backquotes.
pub(super) fn code_spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// Checks that each crate with a table in the code map has exactly its files there.
fn code_map(text: &Source, sources: &[Source]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut maps: Vec<(usize, String, BTreeSet<&str>)> = Vec::new();
    for (number, line) in section(text, "Code map") {
        if line.starts_with("`crates/") {
            let folder = code_spans(line).next().unwrap_or_default();
            maps.push((number, format!("{folder}/src/"), BTreeSet::new()));
        } else if line.starts_with('|')
            && let Some((_, folder, names)) = maps.last_mut()
        {
            let files = line.split('|').nth(1).unwrap_or_default();
            for name in code_spans(files) {
                if !sources.iter().any(|source| source.path.starts_with(&format!("{folder}{name}")))
                {
                    let what = format!("`{name}` is not in {folder}");
                    problems.push(text.problem(number, what, "take it out of the code map"));
                }
                names.insert(name);
            }
        }
    }
    for (number, folder, names) in maps.iter().filter(|(.., names)| !names.is_empty()) {
        for file in files_of(folder, sources).filter(|file| !names.contains(file.as_str())) {
            let what = format!("`{file}` of {folder} is not in the code map");
            problems.push(text.problem(*number, what, "say what it does"));
        }
    }
    problems
}

/// The files of a crate outside of folders, but for its root and tests.
fn files_of(folder: &str, sources: &[Source]) -> impl Iterator<Item = String> {
    let root = sources.iter().find(|source| source.path == format!("{folder}lib.rs"));
    let root = root.and_then(|root| syn::parse_file(&root.text).ok());
    let tests: Vec<String> = root.iter().flat_map(test_modules).collect();
    let inside = sources.iter().filter_map(move |source| source.path.strip_prefix(folder));
    let files = inside.filter(|name| name.ends_with(".rs") && !name.contains('/'));
    files
        .filter(move |name| !tests.iter().any(|test| **name == format!("{test}.rs")))
        .filter(|name| *name != "lib.rs")
        .map(ToOwned::to_owned)
}

/// Checks that each invariant is asserted somewhere, and that every number in the code exists.
fn invariants(text: &Source, sources: &[Source]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut asserted = BTreeSet::new();
    let lines = section(text, "Invariants");
    let numbers: Vec<(usize, u32)> = lines
        .iter()
        .filter_map(|(line, text)| Some((*line, text.split_once(". ")?.0.parse().ok()?)))
        .collect();
    let is_known = |wanted: &u32| numbers.iter().any(|(_, number)| number == wanted);
    let crates = sources.iter().filter(|source| source.path.starts_with("crates/"));
    for source in crates.filter(|source| source.has_extension("rs")) {
        for (index, line) in source.text.lines().enumerate() {
            for unknown in named(line).into_iter().filter(|number| !is_known(number)) {
                let what = format!("invariant {unknown}");
                problems.push(source.problem(index + 1, what, format!("{FILE} has none")));
            }
        }
        // A separate rule reports invalid Rust.
        let tokens = source.text.parse().unwrap_or_default();
        texts(tokens, &mut |text| asserted.extend(named(text)));
    }
    for (line, number) in numbers.iter().filter(|(_, number)| !asserted.contains(number)) {
        let what = format!("invariant {number} is asserted nowhere in crates/");
        let advice = format!("begin the text of an assertion with `{NAME}{number}: `");
        problems.push(text.problem(*line, what, advice));
    }
    problems
}

/// The numbers of the invariants in a text.
fn named(text: &str) -> Vec<u32> {
    let lower = text.to_lowercase();
    let rests = lower.split(NAME).skip(1);
    rests
        .filter_map(|rest| rest.split(|next: char| !next.is_ascii_digit()).next()?.parse().ok())
        .collect()
}

/// Calls `visit` with each literal outside of attributes, and thus of documentation.
fn texts(tokens: TokenStream, visit: &mut impl FnMut(&str)) {
    let mut in_attribute = false;
    for token in tokens {
        let is_sign = |sign| matches!(&token, TokenTree::Punct(mark) if mark.as_char() == sign);
        let begins = is_sign('#') || (in_attribute && is_sign('!'));
        match &token {
            TokenTree::Group(group) if !in_attribute => texts(group.stream(), visit),
            TokenTree::Literal(literal) => visit(&literal.to_string()),
            _ => {}
        }
        in_attribute = begins;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "## Code map\n`crates/a`: a.\n\n| files | what |\n|---|---|\n\
                       | `one.rs`, `one/` | one |\n## Invariants\n1. First.\n   More.\n\
                       2. Second.\n";

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let source = |(path, text): &(&str, &str)| Source {
            path: (*path).to_owned(),
            text: (*text).to_owned(),
        };
        let sources: Vec<Source> = files.iter().map(source).collect();
        let what = |problem: Problem| format!("{} {}", problem.line, problem.what);
        check(&sources).into_iter().map(what).collect()
    }

    #[test]
    fn a_map_has_exactly_the_files_of_the_tree() {
        let root = "#[cfg(test)]\nmod tests;";
        let asserts = "fn a() { assert!(b, \"invariant 1: c\"); Failure::new(\"invariant 2\") }";
        let mut files = vec![
            (FILE, MAP),
            ("crates/a/src/lib.rs", root),
            ("crates/a/src/tests.rs", ""),
            ("crates/a/src/one.rs", asserts),
            ("crates/a/src/one/two.rs", ""),
            ("crates/b/src/three.rs", ""),
        ];
        assert!(found(&files).is_empty(), "{:?}", found(&files));
        files.push(("crates/a/src/two.rs", ""));
        assert_eq!(found(&files), ["2 `two.rs` of crates/a/src/ is not in the code map"]);
        files.remove(4);
        let what = "6 `one/` is not in crates/a/src/";
        assert_eq!(found(&files)[0], what);
    }

    #[test]
    fn invariants_are_asserted_by_their_numbers() {
        let text = "/// Invariant 1.\nfn a() { assert!(b, \"invariant 2: c\") } // invariant 1";
        let files = [(FILE, MAP), ("crates/a/src/one.rs", text), ("crates/a/src/one/a.rs", "")];
        assert_eq!(found(&files), ["8 invariant 1 is asserted nowhere in crates/"]);
        let text = "// Invariant 12.\nfn a() { assert!(b, \"invariant 2, invariant 1\") }";
        let files = [(FILE, MAP), ("crates/a/src/one.rs", text), ("crates/a/src/one/a.rs", "")];
        assert_eq!(found(&files), ["1 invariant 12"]);
    }
}
