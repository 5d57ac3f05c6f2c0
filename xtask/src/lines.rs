//! `cargo xtask lines`: the size of the tree in lines of product, proof and tools.
//!
//! A line counts if there is code on it: blank lines, comments and documentation do not. Unit
//! tests, and code that only the simulation or a model checker compiles, are proof in any file.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use proc_macro2::{TokenStream, TokenTree};
use ringhaul_tools::workspace;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Field, FieldValue, ImplItemFn, Item, Meta};

use crate::tidy::files;

/// Options of `cargo xtask lines`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also count these revisions
    revisions: Vec<String>,
}

/// The purpose of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Category {
    Product,
    Proof,
    Tools,
    /// Texts for people; all of their lines count.
    Documents,
    /// Results of measurements; all of their lines count.
    Data,
}

const CATEGORIES: [(Category, &str); 5] = [
    (Category::Product, "product"),
    (Category::Proof, "proof"),
    (Category::Tools, "tools"),
    (Category::Documents, "documents"),
    (Category::Data, "data"),
];

/// Folders and their categories; the first match decides. `*` is any name.
const FOLDERS: &[(&str, Category)] = &[
    ("crates/sim/", Category::Proof),
    ("crates/bench/src/", Category::Tools),
    ("crates/*/src/", Category::Product),
    ("crates/*/tests/", Category::Proof),
    ("crates/*/examples/", Category::Tools),
    ("tests/", Category::Proof),
    ("fuzz/", Category::Proof),
    ("lab/", Category::Tools),
    ("tools/", Category::Tools),
    ("xtask/", Category::Tools),
];

/// Names in a `cfg` of code that the daemon does not have.
const PROOF_CFGS: &[&str] = &["test", "sim", "ringhaul_sim", "loom", "shuttle", "driver"];

/// The number of lines of each category.
type Counts = BTreeMap<Category, usize>;

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut trees = Vec::new();
    for revision in &args.revisions {
        let folder = tempfile::tempdir().context("making a temporary folder")?;
        workspace::extract(revision, folder.path())?;
        trees.push((revision.as_str(), count(folder.path())?));
    }
    trees.push(("here", count(workspace::root())?));
    print!("{:<12}", "lines");
    CATEGORIES.iter().for_each(|(_, name)| print!("{name:>11}"));
    println!();
    for (name, counts) in &trees {
        print!("{name:<12}");
        CATEGORIES
            .iter()
            .for_each(|(category, _)| print!("{:>11}", counts.get(category).unwrap_or(&0)));
        println!();
    }
    Ok(())
}

fn count(root: &Path) -> Result<Counts> {
    let mut counts = Counts::new();
    let mut rust = BTreeMap::new();
    for path in files(root)? {
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("rs") => {
                rust.insert(name, text);
            }
            Some("md") => *counts.entry(Category::Documents).or_default() += text.lines().count(),
            Some("json") if !name.starts_with("contrib/") => {
                *counts.entry(Category::Data).or_default() += text.lines().count();
            }
            Some("sh") => {
                let lines = text.lines().map(str::trim);
                let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#')).count();
                let category = category_of(&name).unwrap_or(Category::Tools);
                *counts.entry(category).or_default() += lines;
            }
            _ => {}
        }
    }
    let proof = modules_of_proof(&rust);
    for (name, text) in &rust {
        let Some(category) = category_of(name) else { continue };
        let is_proof = |start: &String| name.starts_with(start.as_str());
        let category = if proof.iter().any(is_proof) { Category::Proof } else { category };
        let (own, tests) = split(text);
        *counts.entry(category).or_default() += own;
        // The tests of a tool count as tools.
        let category = if category == Category::Tools { Category::Tools } else { Category::Proof };
        *counts.entry(category).or_default() += tests;
    }
    Ok(counts)
}

fn category_of(name: &str) -> Option<Category> {
    FOLDERS.iter().find(|(folder, _)| is_below(folder, name)).map(|(_, category)| *category)
}

/// Returns true if `name` is below `folder`, in which `*` stands for one name.
fn is_below(folder: &str, name: &str) -> bool {
    let mut parts = name.split('/');
    folder
        .trim_end_matches('/')
        .split('/')
        .all(|wanted| parts.next().is_some_and(|part| wanted == "*" || wanted == part))
}

/// Prefixes of the paths of modules that are declared behind a `cfg` of [`PROOF_CFGS`].
fn modules_of_proof(rust: &BTreeMap<String, String>) -> Vec<String> {
    let mut modules = Vec::new();
    for (name, text) in rust {
        let Ok(file) = syn::parse_file(text) else { continue };
        let path = PathBuf::from(name);
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let mut folder = path.parent().unwrap_or(Path::new("")).to_path_buf();
        if !["lib", "main", "mod"].contains(&stem.as_str()) {
            folder.push(stem);
        }
        for item in &file.items {
            if let Item::Mod(module) = item
                && module.content.is_none()
                && module.attrs.iter().any(is_proof)
            {
                let start = folder.join(module.ident.to_string()).to_string_lossy().into_owned();
                modules.extend([format!("{start}.rs"), format!("{start}/")]);
            }
        }
    }
    modules
}

/// Returns true if an attribute is a `cfg` that is false in the daemon.
fn is_proof(attribute: &Attribute) -> bool {
    let Meta::List(list) = &attribute.meta else { return false };
    list.path.is_ident("cfg") && names_proof(list.tokens.clone())
}

/// Returns true if a condition names one of [`PROOF_CFGS`] outside of `not(...)`.
fn names_proof(condition: TokenStream) -> bool {
    let mut denied = false;
    condition.into_iter().any(|token| {
        let is_denied = std::mem::take(&mut denied);
        match token {
            TokenTree::Ident(name) => {
                denied = name == "not";
                PROOF_CFGS.iter().any(|proof| name == proof)
            }
            TokenTree::Literal(value) => PROOF_CFGS.contains(&value.to_string().trim_matches('"')),
            TokenTree::Group(group) => !is_denied && names_proof(group.stream()),
            TokenTree::Punct(_) => false,
        }
    })
}

/// The lines of items, methods and fields behind a `cfg` of [`PROOF_CFGS`].
#[derive(Default)]
struct ProofLines(Vec<RangeInclusive<usize>>);

impl ProofLines {
    /// Notes the lines of an element with these attributes, if it is proof. Returns true if it is.
    fn note(&mut self, attributes: &[Attribute], element: &impl Spanned) -> bool {
        let is_proof = attributes.iter().any(is_proof);
        if is_proof {
            let span = element.span();
            self.0.push(span.start().line..=span.end().line);
        }
        is_proof
    }
}

impl<'ast> Visit<'ast> for ProofLines {
    fn visit_item(&mut self, item: &'ast Item) {
        if !self.note(attributes(item), item) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, method: &'ast ImplItemFn) {
        if !self.note(&method.attrs, method) {
            visit::visit_impl_item_fn(self, method);
        }
    }

    fn visit_field(&mut self, field: &'ast Field) {
        self.note(&field.attrs, field);
    }

    fn visit_field_value(&mut self, value: &'ast FieldValue) {
        if !self.note(&value.attrs, value) {
            visit::visit_field_value(self, value);
        }
    }
}

/// Counts the lines of code of a file outside and inside of elements behind a `cfg` of
/// [`PROOF_CFGS`].
fn split(text: &str) -> (usize, usize) {
    let mut proof = ProofLines::default();
    if let Ok(file) = syn::parse_file(text) {
        proof.visit_file(&file);
    }
    let code = text.lines().enumerate().filter(|(_, line)| {
        let line = line.trim();
        !line.is_empty() && !line.starts_with("//")
    });
    let (tests, own): (Vec<usize>, Vec<usize>) = code
        .map(|(index, _)| index + 1)
        .partition(|number| proof.0.iter().any(|lines| lines.contains(number)));
    (own.len(), tests.len())
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Mod(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        Item::Const(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_decide_the_category_of_a_file() {
        assert_eq!(category_of("crates/blockio/src/op.rs"), Some(Category::Product));
        assert_eq!(category_of("crates/bench/src/job.rs"), Some(Category::Tools));
        assert_eq!(category_of("crates/virtqueue/tests/it/main.rs"), Some(Category::Proof));
        assert_eq!(category_of("build.rs"), None);
    }

    #[test]
    fn comments_and_tests_are_no_product() {
        let text = "//! Doc.\n\n// Why.\nfn a() {}\n\n#[cfg(test)]\nmod tests {\n    // x\n}\n";
        assert_eq!(split(text), (1, 3));
        let text = "#[cfg(not(ringhaul_sim))]\nfn a() {}\n#[cfg(ringhaul_sim)]\nfn a() {}\n";
        assert_eq!(split(text), (2, 2));
        let text = "struct A {\n    #[cfg(test)]\n    b: u8,\n}\nimpl A {\n    fn c() {}\n\n\
                    #[cfg(test)]\n    fn d() {}\n}\n";
        assert_eq!(split(text), (5, 4));
    }

    #[test]
    fn modules_for_tests_are_proof() {
        let text = "#[cfg(all(test, not(loom)))]\nmod kernel_tests;\n#[cfg(feature = \"sim\")]\n\
                    pub mod sim;\nmod aio;\n";
        let rust = BTreeMap::from([("crates/a/src/engine.rs".to_owned(), text.to_owned())]);
        assert_eq!(
            modules_of_proof(&rust),
            [
                "crates/a/src/engine/kernel_tests.rs",
                "crates/a/src/engine/kernel_tests/",
                "crates/a/src/engine/sim.rs",
                "crates/a/src/engine/sim/",
            ]
        );
    }
}
