//! The language of comments and pages: abstract words, openings of doc comments, long sentences.

use std::collections::BTreeSet;

use super::tables::{self, MAX_ABSTRACT, MAX_ABSTRACT_OF_PAGE, MAX_OPENINGS, MAX_WORDS};
use super::{Problem, Source};

/// Folders and pages whose language is checked as one. Each crate is one more.
const AREAS: &[&str] = &[
    "fuzz",
    "lab",
    "tests",
    "tools",
    "xtask",
    "docs",
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
];

/// Words that stand in place of a noun.
const ABSTRACT_WORDS: &[&str] = &[
    "who",
    "whoever",
    "whom",
    "whose",
    "nobody",
    "somebody",
    "anybody",
    "everybody",
    "those",
    "others",
    "what",
    "whatever",
    "meanwhile",
    "anew",
];

/// Pairs of words that do the same.
const ABSTRACT_PHRASES: &[[&str; 2]] = &[
    ["so", "many"],
    ["so", "much"],
    ["another", "one"],
    ["the", "other"],
    ["by", "then"],
    ["all", "that"],
    ["no", "more"],
    ["any", "more"],
];

/// Openings of doc comments that name no subject.
const OPENINGS: &[&str] = &[
    "It", "They", "That", "Those", "This", "One", "What", "Whether", "Who", "Whoever", "The same",
    "As", "Of", "Has", "Says", "Tells", "Them", "Another", "Others", "How", "Where", "Which",
    "Nobody", "Somebody",
];

/// The counts of a file or of an area.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    words: usize,
    abstract_words: usize,
    doc_comments: usize,
    openings: usize,
    /// Lines at which sentences begin that have too many words.
    long: Vec<usize>,
}

impl Counts {
    fn add(&mut self, other: &Self) {
        self.words += other.words;
        self.abstract_words += other.abstract_words;
        self.doc_comments += other.doc_comments;
        self.openings += other.openings;
    }
}

/// Checks the areas of the whole tree.
pub(super) fn check(sources: &[Source]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for area in AREAS.iter().copied().chain(crates(sources)) {
        let mut total = Counts::default();
        let mut worst: Option<(&Source, Counts)> = None;
        for source in sources.iter().filter(|source| is_in(&source.path, area)) {
            let Some(counts) = count(source) else { continue };
            for line in &counts.long {
                let what = format!("a sentence of more than {MAX_WORDS} words");
                problems.push(source.problem(*line, what, "divide it: one idea per sentence"));
            }
            if source.has_extension("md") {
                problems.extend(page_excess(source, &counts));
            }
            total.add(&counts);
            let weight = |counts: &Counts| counts.abstract_words + counts.openings;
            if worst.as_ref().is_none_or(|(_, most)| weight(&counts) > weight(most)) {
                worst = Some((source, counts));
            }
        }
        if let Some((source, counts)) = worst {
            problems.extend(excess(area, &total, source, &counts));
        }
    }
    problems
}

/// The folders of the crates.
fn crates(sources: &[Source]) -> BTreeSet<&str> {
    let below = sources.iter().filter(|source| source.path.starts_with("crates/"));
    let ends = below.filter_map(|source| Some((source, source.path.match_indices('/').nth(1)?.0)));
    ends.map(|(source, end)| &source.path[..end]).collect()
}

fn is_in(path: &str, area: &str) -> bool {
    path == area || path.strip_prefix(area).is_some_and(|rest| rest.starts_with('/'))
}

/// The problem of a page with too many abstract words.
fn page_excess(page: &Source, counts: &Counts) -> Option<Problem> {
    let most = (MAX_ABSTRACT_OF_PAGE * counts.words / 1000).max(1);
    let what = format!("{} abstract words on this page", counts.abstract_words);
    let advice = format!("at most {most}: name the thing");
    (counts.abstract_words > most).then(|| page.problem(1, what, advice))
}

/// The problems of an area, shown at the file that contributes most.
fn excess(area: &str, total: &Counts, source: &Source, worst: &Counts) -> Vec<Problem> {
    let mut problems = Vec::new();
    if 1000 * total.abstract_words > MAX_ABSTRACT * total.words {
        let rate = 1000 * total.abstract_words / total.words;
        let what = format!(
            "{area} has {rate} abstract words per 1,000, this file {} of them",
            worst.abstract_words
        );
        problems.push(source.problem(1, what, format!("at most {MAX_ABSTRACT}: name the thing")));
    }
    if 100 * total.openings > MAX_OPENINGS * total.doc_comments {
        let rate = 100 * total.openings / total.doc_comments;
        let what = format!(
            "{rate}% of the doc comments of {area} open with a pronoun, {} in this file",
            worst.openings
        );
        let advice = format!("at most {MAX_OPENINGS}%: open with a noun or a verb");
        problems.push(source.problem(1, what, advice));
    }
    problems
}

/// Counts a file. `None` for files that are neither Rust nor Markdown.
fn count(source: &Source) -> Option<Counts> {
    if tables::is_within(&source.path, tables::WORD_LISTS) {
        return None;
    }
    let mut counts = Counts::default();
    let lines: Vec<&str> = match (source.has_extension("rs"), source.has_extension("md")) {
        (true, _) => source.text.lines().map(comment).collect(),
        (_, true) => source.text.lines().map(page).collect(),
        _ => return None,
    };
    if source.has_extension("rs") {
        count_openings(&source.text, &mut counts);
    }
    let mut sentence = Sentence::default();
    let mut is_code = false;
    for (index, line) in lines.iter().enumerate() {
        let trimmed = line.trim();
        if trimmed.starts_with("```") {
            is_code = !is_code;
        }
        if trimmed.is_empty() || trimmed.starts_with("```") || is_code {
            sentence.end(&mut counts);
            continue;
        }
        if trimmed.starts_with(['-', '*', '#', '|']) {
            sentence.end(&mut counts);
        }
        sentence.read(&plain(trimmed), index + 1, &mut counts);
    }
    sentence.end(&mut counts);
    Some(counts)
}

/// The text of a comment line; empty for code.
fn comment(line: &str) -> &str {
    let Some(text) = line.trim_start().strip_prefix("//") else { return "" };
    text.trim_start_matches(['/', '!'])
}

/// The text of a line of Markdown; empty for rows of tables.
fn page(line: &str) -> &str {
    if line.trim_start().starts_with('|') { "" } else { line }
}

/// The line without code spans, addresses and targets of links.
fn plain(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    for (index, part) in line.split('`').enumerate() {
        text.push_str(if index % 2 == 0 { part } else { " X " });
    }
    let mut rest = text.as_str();
    let mut plain = String::with_capacity(text.len());
    while let Some((before, target)) = rest.split_once("](") {
        plain.push_str(before);
        plain.push_str(" X ");
        rest = target.split_once(')').map_or("", |(_, after)| after);
    }
    plain.push_str(rest);
    let words = plain.split(' ').map(|word| if word.contains("://") { "X" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

/// A sentence that is being read, possibly over several lines.
#[derive(Default)]
struct Sentence {
    words: usize,
    first_line: usize,
    /// The last word, for phrases of two.
    last: String,
}

impl Sentence {
    fn read(&mut self, text: &str, line: usize, counts: &mut Counts) {
        for part in text.split_inclusive(char::is_whitespace) {
            for word in part.split(|next: char| !next.is_ascii_alphabetic() && next != '\'') {
                self.add(word, line, counts);
            }
            let part = part.trim_end();
            if part.ends_with(['.', '!', '?', ':']) {
                self.end(counts);
            }
        }
    }

    fn add(&mut self, word: &str, line: usize, counts: &mut Counts) {
        if word.is_empty() {
            return;
        }
        if self.words == 0 {
            self.first_line = line;
        }
        self.words += 1;
        counts.words += 1;
        let word = word.to_ascii_lowercase();
        let stem = word.split('\'').next().unwrap_or_default();
        let is_phrase = ABSTRACT_PHRASES.contains(&[self.last.as_str(), stem]);
        counts.abstract_words += usize::from(ABSTRACT_WORDS.contains(&stem) || is_phrase);
        self.last = word;
    }

    fn end(&mut self, counts: &mut Counts) {
        if self.words > MAX_WORDS {
            counts.long.push(self.first_line);
        }
        *self = Self::default();
    }
}

/// Counts doc comments, and the first words that are pronouns or question words.
fn count_openings(text: &str, counts: &mut Counts) {
    let mut is_first = true;
    for line in text.lines() {
        let Some(doc) = line.trim_start().strip_prefix("///") else {
            is_first = true;
            continue;
        };
        let doc = doc.trim();
        if is_first && !doc.is_empty() {
            counts.doc_comments += 1;
            let opens = |opening: &&str| {
                doc.strip_prefix(*opening)
                    .is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
            };
            counts.openings += usize::from(OPENINGS.iter().any(opens));
        }
        is_first = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(path: &str, text: &str) -> Counts {
        count(&Source { path: path.to_owned(), text: text.to_owned() }).unwrap()
    }

    #[test]
    fn abstract_words_are_counted_in_prose_alone() {
        let text =
            "Say what it is.\n\n| what | who |\n\n```\nwhat\n```\n\n`what` the [other](who).\n";
        let counts = counted("docs/a.md", text);
        assert_eq!((counts.abstract_words, counts.words), (2, 8));
        let code = "//! Nobody's.\nlet what = \"who\"; // no: what\n/// So\n/// many.\nfn f() {}\n";
        let counts = counted("crates/a.rs", code);
        assert_eq!((counts.abstract_words, counts.words), (2, 3));
    }

    #[test]
    fn doc_comments_open_with_nouns_and_verbs() {
        let text = "/// Whether it is.\n/// Who knows.\nfn a() {}\n/// Of this.\nfn b() {}\n\
                    /// Offset.\nfn c() {}\n// What is no doc comment.\n///\n/// That.\n";
        let counts = counted("crates/a.rs", text);
        assert_eq!((counts.openings, counts.doc_comments), (2, 3));
    }

    #[test]
    fn long_sentences_are_found_over_lines() {
        let words = |count| vec!["word"; count].join(" ");
        let text = format!("Short.\n{}\n{}.\n\n{}. Next.\n", words(20), words(16), words(35));
        assert_eq!(counted("docs/a.md", &text).long, [2]);
        let list = format!("- {}\n- {}\n", words(20), words(20));
        assert_eq!(counted("docs/a.md", &list).long, Vec::<usize>::new());
    }

    #[test]
    fn a_page_above_its_ceiling_is_a_problem() {
        let source = |words: usize, bad: usize| {
            let text = [vec!["word"; words - bad], vec!["what"; bad]].concat().join(" ");
            Source { path: "docs/a.md".to_owned(), text: text + ".\n" }
        };
        for (words, most) in [(10, 1), (333, 1), (667, 2), (1000, 3)] {
            for (bad, is_problem) in [(most, false), (most + 1, true)] {
                let page = source(words, bad);
                let found = page_excess(&page, &count(&page).unwrap());
                assert_eq!(found.is_some(), is_problem, "{bad} of {words} words");
            }
        }
    }

    #[test]
    fn an_area_above_a_ceiling_is_a_problem() {
        let source =
            |path: &str, text: &str| Source { path: path.to_owned(), text: text.to_owned() };
        let sources = [
            source("docs/a.md", "Somebody said what nobody knew."),
            source("README.md", "A disk serves a guest."),
        ];
        let found: Vec<String> = check(&sources).into_iter().map(|found| found.file).collect();
        assert_eq!(found, ["docs/a.md", "docs/a.md"]);
        for area in ["tools", "crates/a", "crates/a-b"] {
            let sources = [source(&format!("{area}/src/a.rs"), "/// It is.\nfn a() {}\n")];
            let found: Vec<String> = check(&sources).into_iter().map(|found| found.what).collect();
            let what =
                format!("100% of the doc comments of {area} open with a pronoun, 1 in this file");
            assert_eq!(found, [what]);
        }
    }
}
