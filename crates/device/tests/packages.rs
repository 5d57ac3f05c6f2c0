//! What somebody takes in who embeds the device: few packages, and none for command lines.

use std::collections::BTreeSet;
use std::process::Command;

const PACKAGES_MAX: usize = 30;

#[test]
fn an_embedder_links_few_packages() {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--package", env!("CARGO_PKG_NAME"), "--edges", "normal"])
        .args(["--prefix", "none", "--format", "{p}", "--locked", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let names: BTreeSet<_> = text.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(names.contains("virtqueue"), "the list is of something else: {text}");
    assert!(names.len() <= PACKAGES_MAX, "{} packages: {names:?}", names.len());
    for banned in ["anyhow", "clap", "signal-hook", "tracing-subscriber", "vhost"] {
        assert!(!names.contains(banned), "the device takes in {banned}");
    }
}
