//! The packages that an embedder of the device links: few, and none for command lines.

use std::collections::BTreeSet;
use std::process::Command;

const PACKAGES_MAX: usize = 30;

/// The packages that `package` links, including itself.
fn linked_by(package: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--package", package, "--edges", "normal"])
        .args(["--prefix", "none", "--format", "{p}", "--locked", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("package names are text");
    let names = text.lines().filter_map(|line| line.split(' ').next());
    let names: BTreeSet<String> = names.map(ToOwned::to_owned).collect();
    assert!(names.contains(package), "the list is of something else: {text}");
    names
}

#[test]
fn an_embedder_links_few_packages() {
    let names = linked_by(env!("CARGO_PKG_NAME"));
    assert!(names.contains("virtqueue") && names.contains("blockio"));
    assert!(names.len() <= PACKAGES_MAX, "{} packages: {names:?}", names.len());
    for banned in ["anyhow", "clap", "signal-hook", "tracing-subscriber", "vhost"] {
        assert!(!names.contains(banned), "invariant 1: the device links {banned}");
    }
}

#[test]
fn disks_and_rings_are_linked_without_each_other() {
    for (package, banned) in [
        ("blockio", &["virtqueue", "virtio-bindings", "vm-memory"][..]),
        ("virtqueue", &["blockio", "io-uring"]),
        ("iomem", &["blockio", "virtqueue"]),
    ] {
        let names = linked_by(package);
        let found = banned.iter().find(|name| names.contains(**name));
        assert_eq!(found, None, "invariant 1: {package} links it");
    }
}
