//! Markdown: every link, and every path of the tree in a text, leads to a target.

use std::path::{Path, PathBuf};

use super::{Problem, Source};

/// Folders of files that texts name by their paths from the root.
const NAMED_FOLDERS: &[&str] =
    &["crates/", "xtask/src", "tests/", "docs/", "fuzz/", "lab/", "tools/", ".ci/"];

/// Problems of a Markdown file.
pub(super) fn check(source: &Source, root: &Path) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (number, line) in prose(&source.text) {
        for target in link_targets(&without_code(line)) {
            if let Some(what) = broken(source, root, &target) {
                problems.push(source.problem(number, what, "correct the link"));
            }
        }
        for path in code_spans(line).filter(|span| is_path(span)) {
            if !root.join(path.trim_end_matches('/')).exists() {
                let what = format!("`{path}` does not exist");
                problems.push(source.problem(number, what, "name a file that does"));
            }
        }
    }
    problems
}

/// The lines outside of code blocks, with their numbers.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut in_code = false;
    let mut lines = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        } else if !in_code {
            lines.push((index + 1, line));
        }
    }
    lines
}

/// The texts between backquotes.
fn code_spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// The line with a placeholder for each text between backquotes.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("code")
}

/// Returns true if a code span is a path from the root of the tree and not a pattern.
fn is_path(span: &str) -> bool {
    let plain = |next: char| next.is_alphanumeric() || "/._-".contains(next);
    NAMED_FOLDERS.iter().any(|folder| span.starts_with(folder)) && span.chars().all(plain)
}

/// The targets of `[text](target)`, `[text](target "title")` and `[text]: target`.
fn link_targets(line: &str) -> Vec<String> {
    let inline = line.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(to, _)| to);
    let reference = line
        .trim_start()
        .strip_prefix('[')
        .and_then(|rest| rest.split_once("]:"))
        .map(|(_, target)| target.trim());
    inline
        .chain(reference)
        .filter_map(|target| target.split_ascii_whitespace().next())
        .map(|target| target.trim_matches(['<', '>']).to_owned())
        .collect()
}

/// The fault of a link target, if there is one.
fn broken(source: &Source, root: &Path, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let this = root.join(&source.path);
    let file = this.parent().unwrap_or(root).join(path);
    if !path.is_empty() && !file.exists() {
        return Some(format!("the link {target} leads nowhere"));
    }
    let text = if path.is_empty() { source.text.clone() } else { read_markdown(&file)? };
    let found = anchor.is_empty() || anchors(&text).iter().any(|heading| heading == anchor);
    (!found).then(|| format!("the link {target} names no heading"))
}

/// The text of a Markdown file; `None` for any other file, since its anchors are unknown.
fn read_markdown(file: &PathBuf) -> Option<String> {
    let is_markdown = file.extension().is_some_and(|extension| extension == "md");
    is_markdown.then(|| std::fs::read_to_string(file).ok()).flatten()
}

/// The anchors that GitHub gives to headings.
fn anchors(text: &str) -> Vec<String> {
    prose(text)
        .into_iter()
        .filter(|(_, line)| line.starts_with('#'))
        .map(|(_, line)| {
            line.trim_start_matches('#')
                .trim()
                .to_lowercase()
                .chars()
                .filter(|next| next.is_alphanumeric() || " -_".contains(*next))
                .map(|next| if next == ' ' { '-' } else { next })
                .collect()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::found;

    #[test]
    fn links_that_lead_nowhere() {
        let what = ["1 the link nowhere.md leads nowhere"];
        assert_eq!(found("a.md", "See [this](nowhere.md)."), what);
        assert_eq!(found("a.md", "[this]: nowhere.md"), what);
        assert_eq!(found("a.md", "[a](Cargo.toml), [this](nowhere.md \"title\")"), what);
        assert_eq!(found("docs/a.md", "[a](Cargo.toml)").len(), 1);
        assert!(found("docs/a.md", "[a](../Cargo.toml)").is_empty());
    }

    #[test]
    fn external_links_and_code_are_not_checked() {
        assert!(found("a.md", "[a](https://example.org/x) [b](mailto:x@y)").is_empty());
        assert!(found("a.md", "`[a](nowhere.md)`").is_empty());
        assert!(found("a.md", "```\n[a](nowhere.md)\n```\n").is_empty());
    }

    #[test]
    fn anchors_name_headings() {
        let text = "# What it does, and `why`\n\n[a](#what-it-does-and-why)\n";
        assert!(found("a.md", text).is_empty());
        assert_eq!(found("a.md", "# A\n[b](#c)"), ["2 the link #c names no heading"]);
        assert_eq!(found("a.md", "```\n# c\n```\n[b](#c)"), ["4 the link #c names no heading"]);
    }

    #[test]
    fn paths_in_code_spans() {
        assert_eq!(found("a.md", "In `crates/none.rs`."), ["1 `crates/none.rs` does not exist"]);
        assert!(found("a.md", "`crates/blockio/Cargo.toml`, `crates/`, `crates/*.rs`").is_empty());
    }
}
