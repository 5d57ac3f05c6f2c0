//! Names of Rust files in comments and in Markdown: such files exist.

use super::{Problem, Source};

/// Checks all files. `sources` is the whole tree.
pub(super) fn check(sources: &[Source]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for source in sources {
        for (index, line) in source.text.lines().enumerate() {
            let Some(text) = prose(source, line) else { continue };
            for name in names(text).filter(|name| !exists(name, sources)) {
                let what = format!("`{name}`, which does not exist");
                problems.push(source.problem(index + 1, what, "name a file that does"));
            }
        }
    }
    problems
}

/// Returns the prose of a line: a comment, or a line of Markdown.
fn prose<'a>(source: &Source, line: &'a str) -> Option<&'a str> {
    if source.has_extension("md") {
        return Some(line);
    }
    let text = line.trim_start();
    (source.has_extension("rs") && text.starts_with("//")).then_some(text)
}

/// The words of `text` with the ending of Rust files. Skips names with `{}` or `*` for a part.
fn names(text: &str) -> impl Iterator<Item = &str> {
    let joins = |next: char| next.is_alphanumeric() || "_-./*{}".contains(next);
    let words = text.split(move |next| !joins(next));
    let words = words.map(|word| word.trim_matches('.').trim_start_matches("/"));
    words.filter(|word| word.len() > 3 && word.ends_with(".rs") && !word.contains(['*', '{']))
}

fn exists(name: &str, sources: &[Source]) -> bool {
    let name = name.trim_start_matches("../");
    sources.iter().any(|source| {
        let rest = source.path.strip_suffix(name);
        rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('/'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        let source =
            |path: &str, text: &str| Source { path: path.to_owned(), text: text.to_owned() };
        let sources = [source(path, text), source("crates/a/src/engine/aio.rs", "")];
        check(&sources).into_iter().map(|problem| problem.what).collect()
    }

    #[test]
    fn names_of_files_that_have_gone() {
        let what = ["`engine/sim.rs`, which does not exist"];
        assert_eq!(found("crates/a/src/b.rs", "//! See `engine/sim.rs`.\n"), what);
        assert_eq!(found("docs/a.md", "See `engine/sim.rs`."), what);
        for good in ["//! See `engine/aio.rs`, aio.rs and b.rs.", "let a = \"c.rs\";", "// *.rs"] {
            assert!(found("crates/a/src/b.rs", good).is_empty(), "{good}");
        }
        assert!(found("docs/a.md", "[a](../crates/a/src/engine/aio.rs)").is_empty());
        assert_eq!(found("docs/a.md", "`io.rs`"), ["`io.rs`, which does not exist"]);
    }
}
