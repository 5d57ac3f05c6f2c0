//! Rules about Rust code, on its tokens and its syntax tree.

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Block, File, ImplItemFn, Item, ItemFn, Meta, Signature, TraitItemFn};

use super::tables::{self, Scope};
use super::{Problem, Source};

/// Problems of a Rust file.
pub(super) fn check(source: &Source) -> Vec<Problem> {
    let file = match syn::parse_file(&source.text) {
        Ok(file) => file,
        Err(error) => {
            let line = error.span().start().line;
            return vec![source.problem(line, format!("not Rust ({error})"), "let it compile")];
        }
    };
    let mut problems = Vec::new();
    problems.extend(module_doc(source, &file));
    problems.extend(file_length(source, &file));
    let mut functions = Functions { source, problems: Vec::new() };
    functions.visit_file(&file);
    problems.append(&mut functions.problems);
    // A file that syn can parse has tokens, so the default is never used.
    let tokens = source.text.parse::<TokenStream>().unwrap_or_default();
    let mut scan = Tokens { source, problems: &mut problems };
    scan.stream(tokens);
    problems
}

fn module_doc(source: &Source, file: &File) -> Option<Problem> {
    let is_doc = |attribute: &Attribute| match &attribute.meta {
        Meta::NameValue(pair) => pair.path.is_ident("doc"),
        _ => false,
    };
    let missing = !file.attrs.iter().any(is_doc);
    missing.then(|| {
        let advice = "begin the file with `//!` and what the module is for";
        source.problem(1, "no module documentation".to_owned(), advice)
    })
}

/// The line on which the module with the tests begins.
fn tests_start(file: &File) -> Option<usize> {
    let attribute = file.items.iter().find_map(|item| match item {
        Item::Mod(module) => module.attrs.iter().find(|attribute| is_cfg_test(attribute)),
        _ => None,
    })?;
    Some(attribute.pound_token.span.start().line)
}

fn file_length(source: &Source, file: &File) -> Option<Problem> {
    let lines = match tests_start(file) {
        Some(start) => start - 1,
        None => source.text.lines().count(),
    };
    (lines > tables::MAX_FILE_LINES).then(|| {
        let what = format!("file of {lines} lines before its tests");
        let advice = format!("split it by what it is about; {} at most", tables::MAX_FILE_LINES);
        source.problem(tables::MAX_FILE_LINES + 1, what, advice)
    })
}

/// Returns true if an attribute is `#[cfg(test)]` or `#[cfg(all(test, ...))]`.
pub(super) fn is_cfg_test(attribute: &Attribute) -> bool {
    let Meta::List(list) = &attribute.meta else {
        return false;
    };
    if !list.path.is_ident("cfg") {
        return false;
    }
    let mut tokens = list.tokens.clone().into_iter();
    match (tokens.next(), tokens.next()) {
        (Some(TokenTree::Ident(name)), None) => name == "test",
        (Some(TokenTree::Ident(name)), Some(TokenTree::Group(group))) => {
            let first = group.stream().into_iter().next();
            name == "all" && matches!(first, Some(TokenTree::Ident(inner)) if inner == "test")
        }
        _ => false,
    }
}

/// Measures functions.
struct Functions<'a> {
    source: &'a Source,
    problems: Vec<Problem>,
}

impl Functions<'_> {
    fn measure(&mut self, signature: &Signature, block: &Block) {
        let first = signature.fn_token.span.start().line;
        let last = block.brace_token.span.close().end().line;
        let lines = last - first + 1;
        if lines > tables::MAX_FUNCTION_LINES {
            let what = format!("function `{}` of {lines} lines", signature.ident);
            let advice = format!("split it; {} at most", tables::MAX_FUNCTION_LINES);
            self.problems.push(self.source.problem(first, what, advice));
        }
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_fn(&mut self, function: &'ast ItemFn) {
        self.measure(&function.sig, &function.block);
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        self.measure(&function.sig, &function.block);
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast TraitItemFn) {
        if let Some(block) = &function.default {
            self.measure(&function.sig, block);
        }
        visit::visit_trait_item_fn(self, function);
    }
}

/// Checks every token, including tokens inside of macros.
struct Tokens<'a> {
    source: &'a Source,
    problems: &'a mut Vec<Problem>,
}

impl Tokens<'_> {
    fn stream(&mut self, stream: TokenStream) {
        let mut tokens = stream.into_iter().peekable();
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Group(group) => self.stream(group.stream()),
                TokenTree::Ident(name) => {
                    let next = tokens.peek();
                    let is_macro =
                        matches!(next, Some(TokenTree::Punct(next)) if next.as_char() == '!');
                    self.identifier(&name, is_macro);
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
        }
    }

    fn identifier(&mut self, name: &Ident, is_macro: bool) {
        let text = name.to_string();
        if text == "unsafe" {
            self.check_unsafe(name.span());
        }
        if text == tables::SIMULATION {
            self.check_simulation(name.span());
        }
        if is_macro {
            self.check_macro(&text, name.span());
        }
        self.check_words(&text, name.span());
    }

    fn check_unsafe(&mut self, span: Span) {
        let path = &self.source.path;
        if !tables::UNSAFE_FILES.iter().any(|(file, _)| file == path) {
            let advice = "use what the files in UNSAFE_FILES (xtask/src/tidy/tables.rs) offer";
            self.push(span, "`unsafe` in this file".to_owned(), advice);
        }
    }

    fn check_simulation(&mut self, span: Span) {
        let path = &self.source.path;
        let is_free = !path.starts_with("crates/") || path.starts_with("crates/sim/");
        if !is_free && !tables::SIMULATED_FILES.iter().any(|(file, _)| file == path) {
            let advice = "make it configuration: the simulation runs the code of the product";
            self.push(span, format!("`cfg({})` in this file", tables::SIMULATION), advice);
        }
    }

    fn check_macro(&mut self, name: &str, span: Span) {
        if let Some((_, advice)) = tables::MACROS.iter().find(|(banned, _)| *banned == name) {
            self.push(span, format!("`{name}!`"), advice);
        }
    }

    fn check_words(&mut self, name: &str, span: Span) {
        let path = &self.source.path;
        if is_constant(name) || tables::is_within(path, tables::WORD_LISTS) {
            return;
        }
        let parts = format!("_{}_", snake_case(name));
        for word in tables::WORDS {
            let applies = word.scope == Scope::Identifiers
                && tables::is_within(path, word.within)
                && !tables::is_within(path, word.except);
            if applies && parts.contains(&format!("_{}_", word.wrong)) {
                self.push(span, format!("`{}` in the name `{name}`", word.wrong), word.advice);
            }
        }
    }

    fn push(&mut self, span: Span, what: String, advice: &str) {
        self.problems.push(self.source.problem(span.start().line, what, advice));
    }
}

/// Returns true if a name is in the form of constants.
fn is_constant(name: &str) -> bool {
    !name.chars().any(char::is_lowercase)
}

/// Converts `IoThread` and `io_thread` to `io_thread`.
fn snake_case(name: &str) -> String {
    let mut snake = String::with_capacity(name.len() + 4);
    let mut after_lower = false;
    for letter in name.chars() {
        if letter.is_uppercase() && after_lower {
            snake.push('_');
        }
        after_lower = letter.is_lowercase() || letter.is_numeric();
        snake.extend(letter.to_lowercase());
    }
    snake
}

#[cfg(test)]
mod tests {
    use super::super::tests::found;
    use super::snake_case;

    /// A function of `lines` lines.
    fn function(lines: usize) -> String {
        format!("fn long() {{\n{}}}\n", "    x();\n".repeat(lines - 2))
    }

    #[test]
    fn long_functions() {
        let good = format!("//! Doc.\n/// Documentation\n/// does not count.\n{}", function(69));
        assert!(found("a.rs", &good).is_empty());
        let bad = format!("//! Doc.\n{}", function(70));
        assert_eq!(found("a.rs", &bad), ["2 function `long` of 70 lines"]);
        let method = format!("//! Doc.\nimpl A {{\n{}}}\n", function(70));
        assert_eq!(found("a.rs", &method), ["3 function `long` of 70 lines"]);
        let default = format!("//! Doc.\ntrait A {{\n{}}}\n", function(70));
        assert_eq!(found("a.rs", &default), ["3 function `long` of 70 lines"]);
        let nested = format!("//! Doc.\nmod a {{\nfn b() {{ {} }}\n}}\n", function(70));
        assert!(found("a.rs", &nested).contains(&"3 function `long` of 70 lines".to_owned()));
    }

    #[test]
    fn long_files() {
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", "// x\n".repeat(600));
        let lines = |count: usize| format!("//! Doc.\n{}", "// x\n".repeat(count - 1));
        assert!(found("a.rs", &(lines(500) + &tests)).is_empty());
        let what = "501 file of 501 lines before its tests";
        assert_eq!(found("a.rs", &(lines(501) + &tests)), [what]);
        let all = tests.replace("(test)", "(all(test, not(loom)))");
        assert!(found("a.rs", &(lines(500) + &all)).is_empty());
        assert_eq!(found("a.rs", &lines(501)), [what]);
        let other = tests.replace("(test)", "(unix)");
        assert_eq!(found("a.rs", &(lines(1) + &other)).len(), 1);
    }

    #[test]
    fn unsafe_outside_of_its_files() {
        let code = "//! Doc.\nfn a() {\n    unsafe { b() }\n}\n";
        assert_eq!(found("crates/blockio/src/a.rs", code), ["3 `unsafe` in this file"]);
        assert!(found("crates/blockio/src/engine/aio.rs", code).is_empty());
        let in_macro = "//! Doc.\nmacro_rules! a {\n    () => { unsafe { b() } };\n}\n";
        assert_eq!(found("a.rs", in_macro), ["3 `unsafe` in this file"]);
        let in_words =
            "//! Not unsafe.\n#![forbid(unsafe_code)]\n// unsafe\nconst A: &str = \"unsafe\";\n";
        assert!(found("a.rs", in_words).is_empty());
    }

    #[test]
    fn a_simulation_of_other_code() {
        let code = "//! Doc.\nconst A: bool = cfg!(ringhaul_sim);\n";
        let what = ["2 `cfg(ringhaul_sim)` in this file"];
        assert_eq!(found("crates/blockio/src/op/bounce.rs", code), what);
        for free in ["crates/blockio/src/clock.rs", "crates/sim/src/a.rs", "xtask/src/a.rs"] {
            assert!(found(free, code).is_empty(), "{free}");
        }
    }

    #[test]
    fn missing_module_documentation() {
        assert_eq!(found("a.rs", "// Not this.\nfn a() {}\n"), ["1 no module documentation"]);
        assert!(found("a.rs", "#![allow(x)]\n//! This.\nfn a() {}\n").is_empty());
    }

    #[test]
    fn forbidden_macros() {
        for (name, _) in super::tables::MACROS {
            let code = format!("//! Doc.\nfn a() {{\n    std::{name}!(1);\n}}\n");
            assert_eq!(found("a.rs", &code), [format!("3 `{name}!`")]);
        }
        assert!(found("a.rs", "//! Doc.\nfn todo() {}\n").is_empty());
    }

    #[test]
    fn words_in_identifiers() {
        let names = |name: &str| format!("//! Doc.\nfn {name}() {{}}\n");
        let path = "crates/ringhaul/src/a.rs";
        let what = ["2 `worker` in the name `start_worker`"];
        assert_eq!(found(path, &names("start_worker")), what);
        assert_eq!(found(path, "//! Doc.\nstruct WorkerPool;\n").len(), 1);
        assert!(found(path, &names("coworkers")).is_empty());
        assert!(found(path, "//! Doc. The kernel's worker thread.\n").is_empty());
        assert!(found(path, "//! Doc.\nconst NO_INTERRUPT: u16 = 1;\n").is_empty());
        assert!(found("crates/blockio/src/engine/threads.rs", &names("worker")).is_empty());
        let what = ["2 `in_flight` in the name `ops_in_flight`"];
        assert_eq!(found("crates/blockio/src/a.rs", &names("ops_in_flight")), what);
    }

    #[test]
    fn every_word_fires() {
        for word in super::tables::WORDS {
            let path = format!("{}src/a.rs", word.within[0]);
            // Only texts can contain a phrase.
            let code = match word.wrong.contains(' ') {
                true => format!("//! Doc, {}.\n", word.wrong),
                false => format!("//! Doc.\nfn a_{}() {{}}\n", word.wrong),
            };
            assert_eq!(found(&path, &code).len(), 1, "{}", word.wrong);
        }
    }

    #[test]
    fn files_that_are_not_rust() {
        let problems = found("a.rs", "//! Doc.\nfn (\n");
        assert!(problems[0].starts_with("2 not Rust"), "{problems:?}");
    }

    #[test]
    fn names_are_split_into_words() {
        assert_eq!(snake_case("IoThread"), "io_thread");
        assert_eq!(snake_case("VhostUserBackend2Req"), "vhost_user_backend2_req");
        assert_eq!(snake_case("in_flight"), "in_flight");
    }
}
