//! The floors of each crate: its folders and files, of which a lower one imports nothing from a
//! higher one. No modules import each other in a cycle.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::Span;
use syn::visit::{self, Visit};
use syn::{File, Item, ItemMod, ItemUse, UseTree};

use super::rust::is_cfg_test;
use super::tables::{self, Floors};
use super::{Problem, Source};

/// The file with the table.
const TABLE: &str = "xtask/src/tidy/tables.rs";

/// A module by its path within the crate; empty is the crate's root.
type Path = Vec<String>;

/// Checks each crate that has a table of floors. `sources` is the whole tree.
pub(super) fn check(sources: &[Source]) -> Vec<Problem> {
    tables::FLOORS.iter().flat_map(|floors| check_crate(floors, sources)).collect()
}

fn check_crate(floors: &Floors, sources: &[Source]) -> Vec<Problem> {
    let modules = modules_of(floors.folder, sources);
    let mut problems = Vec::new();
    let floor_of = |path: &Path| {
        let mut names = floors.floors.split_whitespace();
        names.position(|floor| path.first().is_some_and(|first| first == floor))
    };
    let is_there =
        |floor: &str| modules.keys().any(|path| path.first().is_some_and(|p| p == floor));
    for floor in floors.floors.split_whitespace().filter(|floor| !is_there(floor)) {
        problems.push(Problem {
            file: TABLE.to_owned(),
            line: 1,
            what: format!("`{floor}` is a floor of {}", floors.folder),
            advice: "the crate has no such file or folder: remove the floor".to_owned(),
        });
    }
    let mut import_graph = BTreeMap::new();
    for (path, module) in modules.iter().filter(|(path, _)| !path.is_empty()) {
        let name = path.join("::");
        let Some(floor) = floor_of(path) else {
            let advice = format!("insert it in {TABLE}, above all that it imports");
            problems.push(module.source.problem(1, format!("`{name}` has no floor"), advice));
            continue;
        };
        let mut targets = BTreeSet::new();
        for (line, target) in module.imports(path, &modules) {
            let other = target.join("::");
            if target.is_empty() {
                let what = format!("`{name}` imports from the crate's root");
                let advice = "import from the module of the item";
                problems.push(module.source.problem(line, what, advice));
            } else if floor_of(&target).is_some_and(|above| above > floor) {
                let what = format!("`{name}` imports `{other}` from a higher floor");
                let advice = "move the item to a lower floor";
                problems.push(module.source.problem(line, what, advice));
            }
            targets.insert(target);
        }
        import_graph.insert(path.clone(), targets);
    }
    if floors.allows_inner_cycles {
        return problems;
    }
    problems.extend(find_cycle(&import_graph).map(|cycle| {
        let names: Vec<String> = cycle.iter().map(|path| path.join("::")).collect();
        let source = modules[&cycle[0]].source;
        let what = format!("modules import each other: {}", names.join(" > "));
        source.problem(1, what, "move the shared items to a lower module")
    }));
    problems
}

/// A file and its imports.
struct Module<'a> {
    source: &'a Source,
    /// Paths in their source form, with `crate` and `super` resolved where possible: the line, the
    /// module that the path starts from, and the rest.
    paths: Vec<(usize, Path, Path)>,
}

impl Module<'_> {
    /// The modules that are imported from. The first part of a path may also be a crate's name,
    /// which no module has.
    fn imports(&self, own: &Path, modules: &BTreeMap<Path, Module<'_>>) -> Vec<(usize, Path)> {
        let mut imports = Vec::new();
        for (line, start, rest) in &self.paths {
            let mut target = start.clone();
            for part in rest {
                target.push(part.clone());
                if !modules.contains_key(&target) {
                    target.pop();
                    break;
                }
            }
            // A path that stays at this module leads to an item of this file, or to a crate.
            if target != *own {
                imports.push((*line, target));
            }
        }
        imports
    }
}

/// The modules of a crate, except tests.
fn modules_of<'a>(folder: &str, sources: &'a [Source]) -> BTreeMap<Path, Module<'a>> {
    let mut modules = BTreeMap::new();
    let mut tests = Vec::new();
    for source in sources {
        let Some(inner) = source.path.strip_prefix(folder).and_then(|rest| rest.strip_prefix('/'))
        else {
            continue;
        };
        let Some(name) = inner.strip_suffix(".rs") else { continue };
        let path: Path = match name {
            "lib" | "main" => Path::new(),
            name => name.trim_end_matches("/mod").split('/').map(ToOwned::to_owned).collect(),
        };
        // A separate rule reports invalid Rust.
        let Ok(file) = syn::parse_file(&source.text) else { continue };
        tests.extend(test_modules(&file).map(|name| {
            let mut test = path.clone();
            test.push(name);
            test
        }));
        let mut paths = Paths { own: path.clone(), inner: 0, found: Vec::new() };
        paths.visit_file(&file);
        modules.insert(path, Module { source, paths: paths.found });
    }
    modules.retain(|path, _| !tests.iter().any(|test| path.starts_with(test)));
    modules
}

/// Names of the modules for tests only.
pub(super) fn test_modules(file: &File) -> impl Iterator<Item = String> {
    file.items.iter().filter_map(|item| match item {
        Item::Mod(module) if module.attrs.iter().any(is_cfg_test) => Some(module.ident.to_string()),
        _ => None,
    })
}

/// Collects the paths of a file that may lead to other modules of its crate.
struct Paths {
    own: Path,
    /// Depth of the walk in modules within the file.
    inner: usize,
    found: Vec<(usize, Path, Path)>,
}

impl Paths {
    fn add(&mut self, span: Span, parts: &[String], in_use: bool) {
        let mut start = self.own.clone();
        // For a module within the file, `super` is the file.
        let mut inner = self.inner;
        let mut rest = parts;
        let first = rest.first().map(String::as_str);
        match first {
            Some("crate") => {
                start.clear();
                rest = &rest[1..];
            }
            Some("super" | "self") => {
                while let Some(first) = rest.first() {
                    match first.as_str() {
                        "super" if inner > 0 => inner -= 1,
                        "super" => drop(start.pop()),
                        "self" => {}
                        _ => break,
                    }
                    rest = &rest[1..];
                }
            }
            // A path that may lead to a child.
            _ if in_use && self.inner == 0 => {}
            _ => return,
        }
        if inner == 0 || first == Some("crate") {
            self.found.push((span.start().line, start, rest.to_vec()));
        }
    }

    fn add_tree(&mut self, tree: &UseTree, parts: &mut Vec<String>) {
        match tree {
            UseTree::Path(path) => {
                parts.push(path.ident.to_string());
                self.add_tree(&path.tree, parts);
                parts.pop();
            }
            UseTree::Group(group) => {
                group.items.iter().for_each(|item| self.add_tree(item, parts));
            }
            UseTree::Name(name) => self.add_leaf(name.ident.span(), name.ident.to_string(), parts),
            UseTree::Rename(name) => {
                self.add_leaf(name.ident.span(), name.ident.to_string(), parts);
            }
            UseTree::Glob(glob) => self.add(glob.star_token.spans[0], parts, true),
        }
    }

    fn add_leaf(&mut self, span: Span, name: String, parts: &mut Vec<String>) {
        // `a::{self}` is `a`.
        let is_self = name == "self" && !parts.is_empty();
        if !is_self {
            parts.push(name);
        }
        self.add(span, parts, true);
        if !is_self {
            parts.pop();
        }
    }
}

impl<'ast> Visit<'ast> for Paths {
    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        if !module.attrs.iter().any(is_cfg_test) {
            self.inner += 1;
            visit::visit_item_mod(self, module);
            self.inner -= 1;
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        self.add_tree(&item.tree, &mut Vec::new());
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let parts: Vec<String> =
            path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if let Some(first) = path.segments.first() {
            self.add(first.ident.span(), &parts, false);
        }
        visit::visit_path(self, path);
    }

    // `pub(in path)` is no import.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}
}

/// Returns modules that import each other in a cycle, if there are any, from the first back to
/// itself.
fn find_cycle(import_graph: &BTreeMap<Path, BTreeSet<Path>>) -> Option<Vec<Path>> {
    let mut done = BTreeSet::new();
    import_graph.keys().find_map(|start| walk(start, import_graph, &mut Vec::new(), &mut done))
}

fn walk(
    path: &Path,
    import_graph: &BTreeMap<Path, BTreeSet<Path>>,
    trail: &mut Vec<Path>,
    done: &mut BTreeSet<Path>,
) -> Option<Vec<Path>> {
    if let Some(place) = trail.iter().position(|other| other == path) {
        let mut cycle = trail[place..].to_vec();
        cycle.push(path.clone());
        return Some(cycle);
    }
    if done.contains(path) {
        return None;
    }
    trail.push(path.clone());
    let targets = import_graph.get(path).into_iter().flatten();
    let found = targets.into_iter().find_map(|target| walk(target, import_graph, trail, done));
    trail.pop();
    done.insert(path.clone());
    found
}

#[cfg(test)]
mod tests {
    use super::super::workspace;
    use super::*;

    const FLOORS: Floors =
        Floors { folder: "a/src", floors: "ground op", allows_inner_cycles: false };

    /// The problems of a crate with these files.
    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let source = |&(path, text): &(&str, &str)| Source {
            path: format!("a/src/{path}"),
            text: text.to_owned(),
        };
        let mut sources: Vec<Source> = files.iter().map(source).collect();
        for path in ["ground.rs", "op.rs", "op/slot.rs"] {
            if !files.iter().any(|(other, _)| *other == path) {
                sources.push(source(&(path, "")));
            }
        }
        let problems = check_crate(&FLOORS, &sources);
        problems.iter().map(|problem| format!("{}: {}", problem.file, problem.what)).collect()
    }

    #[test]
    fn an_import_from_below_or_beside_is_right() {
        let op = "use crate::ground::{self, Thing};\nuse std::fmt;\nuse slot::Slot;\n";
        assert_eq!(found(&[("op.rs", op), ("op/slot.rs", "use crate::ground;")]), [""; 0]);
    }

    #[test]
    fn an_import_from_above_is_wrong_in_every_form() {
        for text in [
            "use crate::op::Op;",
            "use crate::{op};",
            "use super::op::{slot::Slot as _};",
            "pub(crate) use crate::op::*;",
            "fn a() { crate::op::run(); }",
            "fn a(op: super::op::Op) {}",
            "mod b { use super::super::op::Op; }",
            "#[cfg(feature = \"sim\")]\nuse crate::op::Op;",
        ] {
            let problems = found(&[("ground.rs", text)]);
            assert_eq!(problems.len(), 1, "{text}: {problems:?}");
            assert!(problems[0].starts_with("a/src/ground.rs: `ground` imports `op"));
        }
    }

    #[test]
    fn imports_of_tests_are_not_checked() {
        let tests = "#[cfg(test)]\nmod tests { use crate::op::Op; use crate::Root; }";
        assert_eq!(found(&[("ground.rs", tests)]), [""; 0]);
        let ground = "#[cfg(all(test, unix))]\nmod more;\nmod own { struct A; }";
        let files = [("ground.rs", ground), ("ground/more.rs", "use crate::op::Op;")];
        assert_eq!(found(&files), [""; 0]);
    }

    #[test]
    fn modules_of_one_floor_may_not_import_each_other() {
        let files = [("op.rs", "use slot::Slot;"), ("op/slot.rs", "use super::Op;")];
        let what = "a/src/op.rs: modules import each other: op > op::slot > op";
        assert_eq!(found(&files), [what]);
    }

    #[test]
    fn nothing_is_imported_from_the_root() {
        let what = "a/src/ground.rs: `ground` imports from the crate's root";
        assert_eq!(found(&[("ground.rs", "use crate::Io;")]), [what]);
    }

    #[test]
    fn the_table_is_complete_and_has_no_dead_rows() {
        let what = "a/src/new.rs: `new` has no floor";
        assert_eq!(found(&[("new.rs", ""), ("lib.rs", "pub use crate::op::Op;")]), [what]);
        let none = check_crate(&FLOORS, &[]);
        assert_eq!(none.len(), 2);
        assert!(none[0].what.contains("is a floor") && none[0].file == TABLE);
    }

    #[test]
    fn every_crate_of_the_table_is_in_the_tree() {
        for floors in tables::FLOORS {
            assert!(workspace::root().join(floors.folder).is_dir(), "{}", floors.folder);
        }
    }
}
