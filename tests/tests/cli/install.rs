//! `make install`: a program with its manual, completions, units and discovery files.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{ringhaul, run};
use ringhaul_kit::server::ringhaul_binary;
use ringhaul_kit::system::is_installed;

fn install(destination: &Path, prefix: &str, binary: &Path) -> Result<Command> {
    let mut command = Command::new("make");
    command.arg("--directory").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    command.args(["--no-print-directory", "install", &format!("PREFIX={prefix}")]);
    command.arg(format!("DESTDIR={}", destination.display()));
    command.arg(format!("BINARY={}", binary.display()));
    Ok(command)
}

fn files_of(folder: &Path) -> Result<BTreeSet<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// The paths of programs below `prefix` that a file names.
fn programs(file: &Path, prefix: &str) -> Result<BTreeSet<String>> {
    let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    let words = text.split(|letter: char| !(letter.is_alphanumeric() || "/-_.".contains(letter)));
    Ok(words
        .filter(|word| word.starts_with(&format!("{prefix}/bin/")))
        .map(str::to_owned)
        .collect())
}

#[test]
fn installed_files_name_the_installed_program() -> Result<()> {
    let (folder, binary) = (tempfile::tempdir()?, ringhaul_binary()?);
    for (prefix, zsh) in [("/usr", "vendor-completions"), ("/opt/ringhaul", "site-functions")] {
        let destination = folder.path().join(prefix.replace('/', "_"));
        run(&mut install(&destination, prefix, &binary)?)?.expect_code(0)?;
        let at = |path: &str| destination.join(&prefix[1..]).join(path);
        let there = run(Command::new(at("bin/ringhaul")).arg("--version"))?.expect_code(0)?.stdout;
        ensure!(there == run(ringhaul()?.arg("--version"))?.expect_code(0)?.stdout, "{there}");
        for file in [
            "lib/systemd/system/ringhaul.service",
            "lib/systemd/system/ringhaul@.service",
            "share/qemu/vhost-user/50-ringhaul.json",
            "share/qemu/vhost-user/50-ringhaul-scsi.json",
        ] {
            let named = programs(&at(file), prefix)?;
            ensure!(!named.is_empty(), "{file} names no program below {prefix}");
            for program in named {
                ensure!(destination.join(&program[1..]).exists(), "{file} names {program}");
            }
        }
        for file in [
            "lib/sysusers.d/ringhaul.conf",
            "lib/tmpfiles.d/ringhaul.conf",
            "share/bash-completion/completions/ringhaul",
            &format!("share/zsh/{zsh}/_ringhaul"),
            "share/fish/vendor_completions.d/ringhaul.fish",
        ] {
            ensure!(
                fs::metadata(at(file)).with_context(|| file.to_owned())?.len() > 0,
                "{file} is empty"
            );
        }
    }
    Ok(())
}

#[test]
fn the_manual_has_a_page_for_each_command() -> Result<()> {
    let folder = tempfile::tempdir()?;
    run(&mut install(folder.path(), "/usr", &ringhaul_binary()?)?)?.expect_code(0)?;
    let manual = folder.path().join("usr/share/man/man1");
    let mut expected = BTreeSet::from(["ringhaul.1".to_owned(), "ringhaul-scsi.1".to_owned()]);
    for words in [&[][..], &["ctl"], &["disk"]] {
        let help = run(ringhaul()?.args(words).arg("--help"))?.expect_code(0)?.stdout;
        let (_, list) = help.split_once("\nCommands:\n").context("a help without commands")?;
        for line in list.lines().take_while(|line| !line.is_empty()) {
            let name = line.strip_prefix("  ").and_then(|line| line.split_whitespace().next());
            // Further lines of a description have more spaces.
            let is_name = !line.starts_with("   ");
            if let Some(name) = name.filter(|name| is_name && *name != "help") {
                expected.insert(format!("ringhaul-{}.1", [words, &[name]].concat().join("-")));
            }
        }
    }
    ensure!(expected.len() > 20, "{expected:?}");
    let pages = files_of(&manual)?;
    ensure!(pages == expected, "{expected:?} are expected, and {pages:?} are there");
    let serve = fs::read_to_string(manual.join("ringhaul-serve.1"))?;
    ensure!(serve.starts_with(".") && serve.contains("\\-\\-socket\\-path"), "{serve}");
    Ok(())
}

#[test]
fn pages_of_the_manual_from_documents_are_complete() -> Result<()> {
    let folder = tempfile::tempdir()?;
    run(&mut install(folder.path(), "/usr", &ringhaul_binary()?)?)?.expect_code(0)?;
    let manual = folder.path().join("usr/share/man");
    let (disks, control, configuration) =
        ("man7/ringhaul-disks.7", "man7/ringhaul-control.7", "man5/ringhaul.toml.5");
    for (page, words) in [
        (disks, &["ENCRYPTED DISKS", "    raw,offset=1M,over=file,path=/srv/disk.img"][..]),
        // The first columns of tables are entries, and links to other pages name them.
        (disks, &["\n       rbd    what it is: a Ceph image\n", "(ringhaul.toml(5))"]),
        (control, &["\n       1. Front-ends can no longer connect.", "\nEVENTS\n"]),
        (configuration, &["\nRELOAD\n", "\n           iothreads = 2\n", "ringhaul-disks(7)"]),
    ] {
        if !is_installed("mandoc") {
            break;
        }
        let mut render = Command::new("mandoc");
        render.args(["-Tutf8", "-Owidth=500"]).arg(manual.join(page));
        // Letters are struck twice for bold and over a line for italics.
        let text = run(&mut render)?.expect_code(0)?.stdout;
        let struck = text.split('\u{8}').rev().map(|part| part.to_owned());
        let text = struck.reduce(|after, mut before| {
            before.pop();
            before + &after
        });
        let text = text.unwrap_or_default();
        for word in words {
            ensure!(text.contains(word), "{page} has no {word:?}:\n{text}");
        }
    }
    Ok(())
}

#[test]
fn formatters_understand_all_pages_of_the_manual() -> Result<()> {
    let folder = tempfile::tempdir()?;
    run(&mut install(folder.path(), "/usr", &ringhaul_binary()?)?)?.expect_code(0)?;
    let manual = folder.path().join("usr/share/man");
    for (section, least) in [("man1", 30), ("man5", 1), ("man7", 2)] {
        let pages = files_of(&manual.join(section))?;
        ensure!(pages.len() >= least, "{pages:?}");
        for page in pages {
            let page = format!("{section}/{page}");
            for (program, options) in [
                ("mandoc", &["-Tlint", "-Werror"][..]),
                ("groff", &["-Kutf8", "-man", "-Tutf8", "-ww", "-z"]),
            ] {
                if !is_installed(program) {
                    continue;
                }
                let mut format = Command::new(program);
                format.args(options).arg(&page).current_dir(&manual);
                let formatted = run(&mut format)?.expect_code(0)?;
                let messages = formatted.stdout + &formatted.stderr;
                // A long word without a place to break it.
                let lines = messages.lines().filter(|line| !line.contains("cannot adjust line"));
                let lines: Vec<&str> = lines.collect();
                ensure!(lines.is_empty(), "{program} {page}: {lines:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_configuration_file_that_exists_is_kept() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("etc/ringhaul.toml");
    let binary = ringhaul_binary()?;
    run(&mut install(folder.path(), "/usr", &binary)?)?.expect_code(0)?;
    ensure!(fs::read_to_string(&file)?.contains("iothreads"), "a sample has that option");
    fs::write(&file, "iothreads = 4\n")?;
    run(&mut install(folder.path(), "/usr", &binary)?)?.expect_code(0)?;
    ensure!(fs::read_to_string(&file)? == "iothreads = 4\n");
    Ok(())
}

#[test]
fn a_program_that_is_not_built_and_a_relative_folder_are_refused() -> Result<()> {
    let folder = tempfile::tempdir()?;
    for (destination, binary, words) in [
        (folder.path(), Path::new("/nonexistent"), "run `make build` before"),
        (Path::new("relative"), &*ringhaul_binary()?, "are absolute paths, not relative"),
    ] {
        let refused = run(&mut install(destination, "/usr", binary)?)?.expect_code(2)?.stderr;
        ensure!(refused.contains(words), "{refused}");
    }
    ensure!(files_of(folder.path())?.is_empty(), "a refused installation leaves nothing");
    Ok(())
}
