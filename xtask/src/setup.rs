//! Tests of the part of `xtask/setup.sh` that reads the machine's configuration.

use std::path::Path;
use std::process::Command;

use ringhaul_tools::{process, workspace};

const DEBIAN: &str = "\
# The distribution.
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/security.gpg
";

/// The output of setup.sh with these files below `sources.list.d` (or `sources.list`).
fn backports(files: &[(&str, &str)]) -> anyhow::Result<String> {
    let folder = tempfile::tempdir()?;
    std::fs::create_dir(folder.path().join("sources.list.d"))?;
    for (name, text) in files {
        let parent = if *name == "sources.list" { "" } else { "sources.list.d" };
        std::fs::write(folder.path().join(parent).join(name), text)?;
    }
    script(&["--backports", &folder.path().to_string_lossy(), "bookworm"])
}

fn script(words: &[&str]) -> anyhow::Result<String> {
    let script = Path::new(workspace::root()).join("xtask/setup.sh");
    process::output(Command::new("sh").arg(script).args(words))
}

fn expected(uri: &str, signed_by: &str) -> String {
    format!("Types: deb\nURIs: {uri}\nSuites: bookworm-backports\nComponents: main{signed_by}")
}

#[test]
fn the_configured_mirror_and_key_are_used() {
    let key = "\nSigned-By: /usr/share/keyrings/debian.gpg";
    let written = backports(&[("debian.sources", DEBIAN)]).unwrap();
    assert_eq!(written, expected("http://mirror.example/debian", key));
}

#[test]
fn one_line_sources_are_read() {
    let line = "deb [arch=amd64 signed-by=/etc/key.gpg] https://other.example/d bookworm main\n";
    let others = "deb cdrom:[Debian] bookworm main\ndeb-src http://no.example bookworm main\n";
    let written = backports(&[("sources.list", &format!("{others}{line}"))]).unwrap();
    assert_eq!(written, expected("https://other.example/d", "\nSigned-By: /etc/key.gpg"));
    let written = backports(&[("a.list", "deb http://a.example bookworm main\n")]).unwrap();
    assert_eq!(written, expected("http://a.example", ""));
}

#[test]
fn a_key_inside_of_the_file_is_copied() {
    let key = "Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQIN\n -----END";
    let stanza = format!("Types: deb\nURIs: http://a.example\nSuites: bookworm\n{key}\n");
    let written = backports(&[("a.sources", &stanza)]).unwrap();
    assert_eq!(written, expected("http://a.example", &format!("\n{key}")));
}

#[test]
fn nothing_is_written_if_backports_are_there() {
    let stanza = "Types: deb\nURIs: http://b.example\nSuites: bookworm-backports\n";
    let files = [("debian.sources", DEBIAN), ("backports.sources", stanza)];
    assert_eq!(backports(&files).unwrap(), "");
    let line = "deb http://b.example bookworm-backports main\n";
    assert_eq!(backports(&[("debian.sources", DEBIAN), ("b.list", line)]).unwrap(), "");
}

#[test]
fn disabled_sources_do_not_count() {
    let off = "Enabled: no\nTypes: deb\nURIs: http://b.example\nSuites: bookworm-backports\n";
    let line = "# deb http://b.example bookworm-backports main\n";
    let files = [("debian.sources", DEBIAN), ("off.sources", off), ("off.list", line)];
    assert!(backports(&files).unwrap().starts_with("Types: deb"));
}

#[test]
fn a_machine_without_sources_is_an_error() {
    let error = backports(&[]).unwrap_err().to_string();
    assert!(error.contains("no apt source of bookworm"), "{error}");
}

#[test]
fn unknown_options_are_errors() {
    assert!(script(&["--what"]).is_err());
}
