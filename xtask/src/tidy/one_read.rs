//! The table of ARCHITECTURE.md that counts one read. Its functions exist and call each other, its
//! types exist, and its totals are right and within their limits.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::visit::{self, Visit};
use syn::{Block, Ident, ImplItemFn, Item, ItemFn, ItemImpl, ItemMod, Signature, Type};

use super::architecture::{FILE, code_spans, section};
use super::rust::is_cfg_test;
use super::{Problem, Source, tables};

/// The heading above the table.
const HEADING: &str = "One read, counted";

/// The caller of each phase of a turn, which is in no row.
const TURN: &str = "Io::turn_inside";

/// Checks the table. `sources` is the whole tree.
pub(super) fn check(sources: &[Source]) -> Vec<Problem> {
    let Some(text) = sources.iter().find(|source| source.path == FILE) else {
        return Vec::new();
    };
    let lines = section(text, HEADING);
    let code = Code::of(sources);
    let mut way = Way { text, code: &code, passed: Vec::new(), problems: Vec::new() };
    let mut types = BTreeSet::new();
    for &(number, line) in lines.iter().filter(|(_, line)| line.starts_with('|')) {
        let mut cells = line.split('|').skip(2);
        for function in code_spans(cells.next().unwrap_or_default()) {
            way.pass(number, function);
        }
        for name in code_spans(cells.next().unwrap_or_default()) {
            if !code.types.contains(name) {
                way.add(number, format!("the type `{name}` does not exist"));
            }
            types.insert(name);
        }
    }
    let functions: BTreeSet<&str> = way.passed.iter().map(|(name, _)| *name).collect();
    let files: BTreeSet<&str> =
        way.passed.iter().filter_map(|(_, found)| Some(found.as_ref()?.file)).collect();
    let counts = [functions.len(), files.len(), types.len()];
    let mut problems = way.problems;
    if !functions.is_empty() {
        problems.extend(totals(text, &lines, counts));
    }
    problems
}

/// Checks that the line with the totals has these counts, and that they are within the limits.
fn totals(text: &Source, lines: &[(usize, &str)], counts: [usize; 3]) -> Vec<Problem> {
    let [functions, files, types] = counts;
    let total = format!("{functions} functions, {files} files, {types} types");
    let (first, _) = lines[0];
    let mut problems = Vec::new();
    if !lines.iter().any(|(_, line)| line.contains(&total)) {
        let advice = format!("say so below \"{HEADING}\"");
        problems.push(text.problem(first, format!("the table has {total}"), advice));
    }
    let limits = tables::ONE_READ_MAX;
    if counts.iter().zip(limits).any(|(count, limit)| *count > limit) {
        let [functions, files, types] = limits;
        let advice = format!("at most {functions} functions, {files} files, {types} types");
        problems.push(text.problem(first, format!("one read takes {total}"), advice));
    }
    problems
}

/// The functions of the table, in order.
struct Way<'a, 'c> {
    text: &'a Source,
    code: &'c Code<'a>,
    passed: Vec<(&'a str, Option<&'c Function<'a>>)>,
    problems: Vec<Problem>,
}

impl<'a> Way<'a, '_> {
    fn pass(&mut self, line: usize, name: &'a str) {
        let found = self.code.functions.get(name);
        match found {
            None => self.add(line, format!("the function `{name}` does not exist")),
            // The first function has no caller here, and a function that comes again is a future
            // that resumes.
            Some(_) if self.passed.is_empty() => {}
            Some(_) if self.passed.iter().any(|(earlier, _)| *earlier == name) => {}
            Some(function) => {
                let earlier = self.passed.iter().filter_map(|(_, found)| *found);
                let mut earlier = earlier.chain(self.code.functions.get(TURN));
                if !earlier.any(|earlier| earlier.words.contains(&function.name)) {
                    self.add(line, format!("no function before `{name}` names it"));
                }
            }
        }
        self.passed.push((name, found));
    }

    fn add(&mut self, line: usize, what: String) {
        let advice = "correct the table: it is the way of one read, function by function";
        self.problems.push(self.text.problem(line, what, advice));
    }
}

/// The functions and types of the crates on the path of a request, without tests and simulations.
#[derive(Default)]
struct Code<'a> {
    /// Functions by the name of their type or, without a type, of their file: `Type::name`,
    /// `file::name`.
    functions: BTreeMap<String, Function<'a>>,
    types: BTreeSet<String>,
}

struct Function<'a> {
    file: &'a str,
    name: String,
    /// All names in its body.
    words: BTreeSet<String>,
}

impl<'a> Code<'a> {
    fn of(sources: &'a [Source]) -> Self {
        let mut code = Self::default();
        for source in sources.iter().filter(|source| is_on_the_way(&source.path)) {
            // A separate rule reports invalid Rust.
            let Ok(file) = syn::parse_file(&source.text) else { continue };
            let name = source.path.rsplit('/').next().unwrap_or_default();
            let owner = name.trim_end_matches(".rs").to_owned();
            Walk { code: &mut code, file: &source.path, owner }.visit_file(&file);
        }
        code
    }
}

fn is_on_the_way(path: &str) -> bool {
    let is_product = tables::ONE_READ_CRATES.iter().any(|folder| path.starts_with(folder));
    is_product && path.ends_with(".rs") && !path.contains("/sim") && !path.contains("test")
}

struct Walk<'a, 'c> {
    code: &'c mut Code<'a>,
    file: &'a str,
    /// The type of the current functions, or the file.
    owner: String,
}

impl Walk<'_, '_> {
    fn add(&mut self, signature: &Signature, block: &Block) {
        let name = signature.ident.to_string();
        let mut words = BTreeSet::new();
        collect(block.to_token_stream(), &mut words);
        let full = format!("{}::{name}", self.owner);
        self.code.functions.insert(full, Function { file: self.file, name, words });
    }

    fn add_type(&mut self, name: &Ident) {
        self.code.types.insert(name.to_string());
    }
}

impl<'ast> Visit<'ast> for Walk<'_, '_> {
    fn visit_item(&mut self, item: &'ast Item) {
        match item {
            Item::Struct(one) => self.add_type(&one.ident),
            Item::Enum(one) => self.add_type(&one.ident),
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        if !module.attrs.iter().any(is_cfg_test) {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_fn(&mut self, function: &'ast ItemFn) {
        self.add(&function.sig, &function.block);
    }

    fn visit_item_impl(&mut self, block: &'ast ItemImpl) {
        let Type::Path(path) = &*block.self_ty else { return };
        let Some(last) = path.path.segments.last() else { return };
        let file = std::mem::replace(&mut self.owner, last.ident.to_string());
        visit::visit_item_impl(self, block);
        self.owner = file;
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        self.add(&function.sig, &function.block);
    }
}

fn collect(stream: TokenStream, words: &mut BTreeSet<String>) {
    for token in stream {
        match token {
            TokenTree::Group(group) => collect(group.stream(), words),
            TokenTree::Ident(name) => drop(words.insert(name.to_string())),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: &str = "struct Chain; struct Queue;\nasync fn serve() { queue.pop() }\n\
                        impl Queue { fn pop(&self) -> Chain { walk(self) } fn push(&self) {} }\n\
                        impl a::Source for Queue { fn notify(&self) {} }\n\
                        fn walk(queue: &Queue) {}\n#[cfg(test)] mod tests { fn test() {} }";

    fn found(rows: &str, total: &str) -> Vec<String> {
        let source = |path: &str, text: String| Source { path: path.to_owned(), text };
        let text = format!("## {HEADING}\n{total}.\n\n| stretch | functions | types |\n{rows}\n");
        let sources = [source(FILE, text), source("crates/device/src/queue.rs", CODE.to_owned())];
        check(&sources).into_iter().map(|problem| problem.what).collect()
    }

    #[test]
    fn a_table_that_is_true() {
        let rows = "| pop | `queue::serve` → `Queue::pop` → `queue::walk` | `Chain` |\n\
                    | again | `queue::serve` | `Chain` |";
        let none: [&str; 0] = [];
        assert_eq!(found(rows, "3 functions, 1 files, 1 types"), none);
        assert_eq!(
            found(rows, "4 functions, 1 files, 1 types"),
            ["the table has 3 functions, 1 files, 1 types"]
        );
    }

    #[test]
    fn a_table_that_is_not() {
        let total = "2 functions, 1 files, 1 types";
        let what = ["the function `Queue::peek` does not exist", "the type `Link` does not exist"];
        let rows = "| pop | `queue::serve` → `Queue::peek` | `Link` |";
        assert_eq!(found(rows, total), what);
        let rows = "| pop | `queue::serve` → `Queue::push` | `Chain` |";
        assert_eq!(found(rows, total), ["no function before `Queue::push` names it"]);
        let rows = "| pop | `queue::serve` → `tests::test` | `Chain` |";
        assert_eq!(found(rows, total), ["the function `tests::test` does not exist"]);
    }
}
