//! Public items of a library that are not named outside of it.
//!
//! The rule goes by names. An item is used if its name is a word in any other crate, test, example
//! or fuzz target. A type in the signature of a public item is used too, since callers need it
//! without naming it. So the rule may miss an unused item with a common name (`new`).

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Ident, TokenStream, TokenTree};
use quote::ToTokens;
use syn::visit::{self, Visit};
use syn::{ImplItem, Item, ItemImpl, ItemMod, Visibility};

use super::rust::is_cfg_test;
use super::{Problem, Source};

/// Checks all libraries. `sources` is the whole tree.
pub(super) fn check(sources: &[Source]) -> Vec<Problem> {
    let rust: Vec<(&Source, BTreeSet<String>)> = sources
        .iter()
        .filter(|source| source.has_extension("rs"))
        .map(|source| (source, words(&source.text)))
        .collect();
    let libraries = sources.iter().filter_map(|source| source.path.strip_suffix("lib.rs"));
    let libraries = libraries.filter(|folder| folder.ends_with("/src/") && *folder != "fuzz/src/");
    let mut problems = Vec::new();
    for folder in libraries {
        let main = format!("{folder}main.rs");
        let is_inside = |path: &str| path.starts_with(folder) && path != main;
        let (inside, outside): (Vec<_>, Vec<_>) =
            rust.iter().partition(|(source, _)| is_inside(&source.path));
        let named = |name: &str| outside.iter().any(|(_, words)| words.contains(name));
        let mut library = Library::default();
        for (source, _) in &inside {
            library.add(source);
        }
        for (name, places) in &library.items {
            if named(name) || library.signatures.contains(name) {
                continue;
            }
            for (source, line) in places {
                let what = format!("public `{name}`, which no other crate or test names");
                problems.push(source.problem(*line, what, "make it private"));
            }
        }
    }
    problems
}

/// The public items of a library, and the names in their signatures.
#[derive(Default)]
struct Library<'a> {
    items: BTreeMap<String, Vec<(&'a Source, usize)>>,
    signatures: BTreeSet<String>,
}

impl<'a> Library<'a> {
    fn add(&mut self, source: &'a Source) {
        // A separate rule reports invalid Rust.
        let Ok(file) = syn::parse_file(&source.text) else { return };
        let mut walk = Walk { source, library: self };
        walk.visit_file(&file);
    }
}

struct Walk<'a, 'l> {
    source: &'a Source,
    library: &'l mut Library<'a>,
}

impl Walk<'_, '_> {
    /// Records an item if it is public, with the names that `signature` adds.
    fn item(&mut self, name: &Ident, is: &Visibility, signature: impl FnOnce(&mut Self)) {
        if matches!(is, Visibility::Public(_)) {
            let place = (self.source, name.span().start().line);
            self.library.items.entry(name.to_string()).or_default().push(place);
            signature(self);
        }
    }

    fn signature(&mut self, tokens: impl ToTokens) {
        collect(tokens.to_token_stream(), &mut self.library.signatures);
    }

    /// Records the signature of an item, without the item's own name.
    fn signature_of(&mut self, name: &Ident, tokens: impl ToTokens) {
        let mut names = BTreeSet::new();
        collect(tokens.to_token_stream(), &mut names);
        names.remove(&name.to_string());
        self.library.signatures.append(&mut names);
    }
}

impl<'ast> Visit<'ast> for Walk<'_, '_> {
    fn visit_item(&mut self, item: &'ast Item) {
        match item {
            Item::Fn(one) => self.item(&one.sig.ident, &one.vis, |walk| {
                walk.signature_of(&one.sig.ident, &one.sig);
            }),
            Item::Struct(one) => self.item(&one.ident, &one.vis, |walk| {
                let public = |field: &&syn::Field| matches!(field.vis, Visibility::Public(_));
                one.fields.iter().filter(public).for_each(|field| walk.signature(&field.ty));
                walk.signature(&one.generics);
            }),
            Item::Enum(one) => self.item(&one.ident, &one.vis, |walk| {
                one.variants.iter().for_each(|variant| walk.signature(&variant.fields));
            }),
            Item::Trait(one) => {
                self.item(&one.ident, &one.vis, |walk| walk.signature_of(&one.ident, one));
            }
            Item::Type(one) => self.item(&one.ident, &one.vis, |walk| walk.signature(&one.ty)),
            Item::Const(one) => self.item(&one.ident, &one.vis, |walk| walk.signature(&one.ty)),
            Item::Static(one) => self.item(&one.ident, &one.vis, |walk| walk.signature(&one.ty)),
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        if !module.attrs.iter().any(is_cfg_test) {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_impl(&mut self, block: &'ast ItemImpl) {
        for item in &block.items {
            match item {
                // Users of a trait of the type need these, named or not.
                ImplItem::Type(one) if block.trait_.is_some() => self.signature(&one.ty),
                ImplItem::Fn(one) if block.trait_.is_none() => {
                    self.item(&one.sig.ident, &one.vis, |walk| {
                        walk.signature_of(&one.sig.ident, &one.sig);
                    });
                }
                ImplItem::Const(one) if block.trait_.is_none() => {
                    self.item(&one.ident, &one.vis, |walk| walk.signature(&one.ty));
                }
                _ => {}
            }
        }
    }
}

/// All words of a file, including words in macros.
fn words(text: &str) -> BTreeSet<String> {
    let mut words = BTreeSet::new();
    collect(text.parse().unwrap_or_default(), &mut words);
    words
}

fn collect(stream: TokenStream, words: &mut BTreeSet<String>) {
    for token in stream {
        match token {
            TokenTree::Group(group) => collect(group.stream(), words),
            TokenTree::Ident(name) => {
                words.insert(name.to_string());
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let source = |(path, text): &(&str, &str)| Source {
            path: (*path).to_owned(),
            text: (*text).to_owned(),
        };
        let sources: Vec<Source> = files.iter().map(source).collect();
        let problems = check(&sources).into_iter();
        problems.map(|problem| format!("{} {}", problem.file, problem.what)).collect()
    }

    #[test]
    fn unused_items_are_found() {
        let library = "pub struct Named;
pub struct Lone;
impl Named { pub fn call(&self) {} \
                       pub fn lonely(&self) {} fn own(&self) {} }\n\
                       #[cfg(test)]\nmod tests { pub struct Test; }";
        let user = "fn main() { a::Named.call(); }";
        let files = [("crates/a/src/lib.rs", library), ("crates/a/tests/it.rs", user)];
        let what = |name| {
            format!("crates/a/src/lib.rs public `{name}`, which no other crate or test names")
        };
        assert_eq!(found(&files), [what("Lone"), what("lonely")]);
    }

    #[test]
    fn items_in_signatures_are_used() {
        let library = "pub struct Answer;\npub fn ask() -> Answer { Answer }\n\
                       impl Iterator for Answer { type Item = Word; }\npub struct Word;";
        let files = [("crates/a/src/lib.rs", library), ("crates/b/src/lib.rs", "fn b() { ask() }")];
        assert!(found(&files).is_empty(), "{:?}", found(&files));
    }

    #[test]
    fn another_program_of_the_same_crate_is_outside() {
        let files =
            [("crates/a/src/lib.rs", "pub fn run() {}"), ("crates/a/src/main.rs", "run!()")];
        assert!(found(&files).is_empty());
    }
}
