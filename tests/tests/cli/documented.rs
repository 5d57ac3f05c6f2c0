//! The pages about disks: their examples work, and their keys match the program.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Finished, Running, TestFolders, ringhaul, run};
use ringhaul_kit::nbd_server::NbdServer;
use ringhaul_kit::page::{Page, code_spans};
use ringhaul_kit::server::ringhaul_binary;
use ringhaul_kit::system::is_installed;
use ringhaul_tools::workspace;
use rustix::process::Signal;

use super::test_folders;

/// The pages about disks, in order.
const PAGE: &str = concat!(
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guide/disks.md")),
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guide/disks-images.md")),
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guide/disks-network.md")),
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guide/disks-encrypted.md")),
);

/// The general form of a name, not a name itself.
const FORM: &str = "KIND,KEY=VALUE,...";

/// A name that a page warns against.
const WITH_SECRET: &str = "nbd://user:password@host/x";

/// External programs in examples that a machine may lack.
const TOOLS: [&str; 4] = ["cryptsetup", "qemu-img", "qemu-nbd", "sfdisk"];

/// Marks of examples with a disk on another machine. Such examples are parsed here and not run;
/// `rbd/named.rs` runs the rbd ones if a cluster can be started.
const ELSEWHERE: [&str; 3] = ["rbd,", "rbd:", "nbds://"];

/// Name and size in bytes of a disk that exists before the examples of a part run.
const DISK: (&str, u64) = ("disk.img", 10 << 30);

/// The examples of one part of a page, below one heading.
struct Part {
    title: &'static str,
    /// The lines of each example.
    examples: Vec<Vec<&'static str>>,
}

/// All examples of the pages: indented text that is not part of a list.
fn parts() -> Vec<Part> {
    let mut parts = vec![Part { title: "the beginning", examples: Vec::new() }];
    let (mut is_inside, mut is_fenced) = (false, false);
    for line in PAGE.lines() {
        is_fenced ^= line.starts_with("```");
        if is_fenced {
            continue;
        }
        let code = line.strip_prefix("    ");
        let title = line.strip_prefix("# ").or_else(|| line.strip_prefix("## "));
        if let (Some(title), Some(part)) = (title, parts.last_mut()) {
            match part.examples.is_empty() {
                true => part.title = title,
                false => parts.push(Part { title, examples: Vec::new() }),
            }
        } else if let (Some(code), Some(part)) = (code, parts.last_mut()) {
            match part.examples.last_mut() {
                Some(example) if is_inside => example.push(code),
                _ => part.examples.push(vec![code]),
            }
        }
        is_inside = code.is_some();
    }
    parts
}

/// Text between backticks in prose and tables.
fn spans(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter(|line| !line.starts_with("    "))
        .flat_map(|line| line.split('`').skip(1).step_by(2))
}

/// The rows of the table with this head, as cells.
fn table(head: &str) -> Result<Vec<Vec<&'static str>>> {
    let (_, rest) = PAGE.split_once(head).with_context(|| format!("there is no table {head}"))?;
    let rows = rest.lines().skip(2).take_while(|line| line.starts_with('|'));
    Ok(rows.map(|row| row.split('|').skip(1).map(str::trim).collect()).collect())
}

/// Removes text in parentheses.
fn without_remarks(text: &str) -> String {
    let parts = text.split('(').enumerate();
    let outside = |(index, part): (usize, &str)| match index {
        0 => part.to_owned(),
        _ => part.split_once(')').map_or(String::new(), |(_, after)| after.to_owned()),
    };
    parts.map(outside).collect()
}

/// The words that the program expected in the name of a disk, from its error message.
fn expected(disk: &str) -> Result<Vec<String>> {
    let refused = run(ringhaul()?.args(["disk", "info", disk]))?;
    refused.expect_refusal(&["cannot understand", "(expected: "])?;
    let list = refused.stderr.split_once("(expected: ").map_or("", |(_, list)| list);
    let list = list.split([';', ')']).next().unwrap_or_default();
    Ok(list.split(", ").map(str::to_owned).collect())
}

fn sorted<T: Ord>(values: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut values: Vec<T> = values.into_iter().collect();
    values.sort();
    values
}

#[test]
fn documented_keys_of_disks_match_the_program() -> Result<()> {
    let mut rows: Vec<(&str, Vec<String>)> = Vec::new();
    for row in table("| kind | what it is | keys | short |")? {
        let keys = without_remarks(row[2]);
        let keys = spans(&keys).map(str::to_owned);
        match (row[0].trim_matches('`'), rows.last_mut()) {
            // A row without a kind has further keys of the kind above.
            ("", Some((_, above))) => above.extend(keys),
            (kind, _) => rows.push((kind, keys.collect())),
        }
    }
    let kinds = sorted(rows.iter().map(|(kind, _)| (*kind).to_owned()));
    let known = sorted(expected("nothing")?);
    ensure!(kinds == known, "the page has the kinds {kinds:?}, the program {known:?}");
    for (kind, keys) in rows {
        let keys = sorted(keys);
        let known = sorted(expected(&format!("{kind},nothing=1"))?);
        ensure!(keys == known, "the page has the keys {keys:?} of {kind}, the program {known:?}");
    }
    let (known, of_nbd) = (expected("nbd,nothing=1")?, table("| key | meaning |")?);
    ensure!(!of_nbd.is_empty(), "the page has no keys of nbd");
    for row in of_nbd {
        let key = row[0].trim_matches('`');
        ensure!(known.iter().any(|known| known == key), "nbd has no key {key}");
    }
    Ok(())
}

#[test]
fn documented_names_of_disks_are_accepted() -> Result<()> {
    let kinds = expected("nothing")?;
    let place = ExampleFolder::new()?;
    let is_name = |span: &&str| {
        let scheme = span.split([',', ':']).next().unwrap_or_default();
        let kind = scheme.trim_end_matches("+unix");
        let is_kind = kinds.iter().any(|known| [known, "nbds"].contains(&kind));
        is_kind && *span != scheme && !span.ends_with("://")
    };
    let names: Vec<&str> = spans(PAGE).filter(is_name).collect();
    ensure!(names.len() > 10, "only {names:?}");
    for name in names {
        let name = name.replace("PATH", "/disk").replace("SIZE", "1G").replace("PORT", "1");
        let understood =
            place.understand(&format!("--disk '{}'", name.replace("DISK", "/disk")))?;
        if name == WITH_SECRET {
            understood.expect_refusal(&["***"])?;
            ensure!(!understood.stderr.contains("user:"), "{}", understood.stderr);
        } else {
            understood.expect_code(0).with_context(|| name.clone())?;
        }
    }
    Ok(())
}

#[test]
fn documented_examples_of_disks_work() -> Result<()> {
    let fences: Vec<_> = PAGE.lines().filter(|line| line.starts_with("```")).collect();
    // The certificates of the guide have a test of their own, in `nbd_tls`.
    ensure!(fences == ["```sh", "```"], "this test reads examples that are indented: {fences:?}");
    let (mut failures, mut tried) = (Vec::new(), 0);
    for part in parts() {
        let uses = |tool: &&&str| part.examples.iter().flatten().any(|line| line.contains(**tool));
        if !TOOLS.iter().filter(uses).all(|tool| is_installed(tool)) {
            continue;
        }
        // Later examples of a part use the files of earlier ones.
        let mut place = ExampleFolder::new()?;
        place.folders.disk(DISK.0, DISK.1)?;
        for example in &part.examples {
            let done = place.try_example(example);
            failures.extend(done.err().map(|error| format!("{}: {error:#}", part.title)));
            tried += 1;
        }
    }
    ensure!(tried > 0, "no example was tried");
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

/// A folder in which examples run. Dropping it removes files and ends servers.
struct ExampleFolder {
    folders: TestFolders,
    /// The value of `PATH`.
    programs: String,
    /// External servers that examples started.
    nbd_servers: Vec<NbdServer>,
}

impl ExampleFolder {
    fn new() -> Result<Self> {
        let folders = test_folders()?;
        let folder = folders.path("bin");
        fs::create_dir(&folder)?;
        symlink(fs::canonicalize(ringhaul_binary()?)?, folder.join("ringhaul"))?;
        let others = std::env::var("PATH").context("there is no PATH")?;
        let programs = format!("{}:{others}", folder.display());
        Ok(Self { folders, programs, nbd_servers: Vec::new() })
    }

    fn folder(&self) -> PathBuf {
        self.folders.path("")
    }

    /// Replaces the folders of the pages by folders of this place.
    fn here(&self, text: &str) -> String {
        let disks = self.folder().display().to_string();
        let text = text.replace("/srv/", &disks).replace("/etc/", &format!("{disks}etc/"));
        text.replace("/run/nbd.sock", &self.folders.socket("nbd.sock").display().to_string())
    }

    /// A shell command as typed by a user.
    fn shell(&self, line: &str) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "sh", "-c", line]).stdin(Stdio::null());
        command.current_dir(self.folder()).env("PATH", &self.programs).env_remove("RUST_LOG");
        command
    }

    fn run(&self, line: &str) -> Result<Finished> {
        run(&mut self.shell(line))?.expect_code(0).with_context(|| line.to_owned())
    }

    /// Parses options of `serve` without opening anything.
    fn understand(&self, options: &str) -> Result<Finished> {
        let file = self.folders.path("nothing.toml");
        fs::write(&file, "")?;
        let line = format!("ringhaul check {} --socket-path x.sock {options}", file.display());
        run(&mut self.shell(&line))
    }

    fn try_example(&mut self, example: &[&str]) -> Result<()> {
        match example {
            [FORM] => Ok(()),
            [line, output @ ..] if line.starts_with("$ ") => self.try_session(&line[2..], output),
            lines => lines.iter().try_for_each(|line| self.try_line(line)),
        }
    }

    fn try_line(&mut self, line: &str) -> Result<()> {
        let is_elsewhere = ELSEWHERE.iter().any(|words| line.contains(words));
        let line = &self.here(line);
        let options = match line.strip_prefix("ringhaul serve --socket-path vm1.sock ") {
            Some(options) => Some(options),
            None => line.starts_with("--").then_some(&**line),
        };
        match options {
            Some(options) if is_elsewhere => {
                self.understand(options)?.expect_code(0).with_context(|| line.clone()).map(drop)
            }
            Some(options) if options.starts_with("--export") => self.serve(options),
            Some(options) if options.starts_with("--lun") => {
                self.serve(&format!("--socket-path vm1.sock --device scsi {options}"))
            }
            Some(options) => self.serve(&format!("--socket-path vm1.sock {options}")),
            None if line.starts_with('{') => {
                let endpoint = "[[export]]\nendpoint.path = \"vm1.sock\"";
                let export = format!("{endpoint}\ndevice.blk = {line}\n");
                fs::write(self.folders.path("ringhaul.toml"), export)?;
                self.serve("--config ringhaul.toml")
            }
            // A program of Ceph, which needs a cluster.
            None if line.starts_with("rbd create ") => Ok(()),
            None => self.try_command(line),
        }
    }

    /// Runs a line that is no option of `serve`.
    fn try_command(&mut self, line: &str) -> Result<()> {
        let first = line.split([' ', ',']).next().unwrap_or_default();
        if let Some(server) = line.strip_suffix(" &") {
            let (_, socket) =
                server.split_once("--socket ").context("a server without a socket")?;
            let socket = socket.split(' ').next().unwrap_or_default();
            let mut command = Command::new("sh");
            command.args(["-c", &format!("exec {server}")]);
            let nbd_server = NbdServer::start(Path::new(socket), &mut command);
            self.nbd_servers.push(nbd_server.with_context(|| line.to_owned())?);
            Ok(())
        } else if line.starts_with(&format!("{first},")) {
            self.run(&format!("ringhaul disk info {line}")).map(drop)
        } else {
            self.run(&quick(line)).map(drop)
        }
    }

    /// Serves with these options, checks that one export is served, and ends the daemon.
    fn serve(&self, options: &str) -> Result<()> {
        let control = self.folders.socket("control").display().to_string();
        let line = format!("exec ringhaul serve --control {control} {options}");
        let mut daemon =
            Running::serve(&mut self.shell(&line)).with_context(|| options.to_owned())?;
        let list = self.run(&format!("ringhaul ctl --control {control} list"))?.stdout;
        let is_served = list.lines().count() == 1 && list.contains("serving, ");
        ensure!(is_served, "{options}: {list}");
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0).with_context(|| options.to_owned()).map(drop)
    }

    /// Runs a command and compares its output with the pages.
    fn try_session(&mut self, command: &str, documented: &[&str]) -> Result<()> {
        let command = self.here(command);
        if documented.is_empty() {
            return self.try_command(&command);
        }
        let output = self.run(&command)?.stdout;
        let documented: Vec<String> = documented.iter().map(|line| self.here(line)).collect();
        let output: Vec<String> = output.lines().map(str::to_owned).collect();
        // Only some file systems report these.
        let words = |lines: &[String]| -> Vec<String> {
            let words = lines.iter().filter_map(|line| line.split(' ').next());
            words.filter(|word| !["discards", "holes"].contains(word)).map(str::to_owned).collect()
        };
        ensure!(
            words(&output) == words(&documented),
            "{command} says {output:?}, the page {documented:?}"
        );
        // Values in the remaining rows depend on the machine.
        for row in ["size ", "format ", "made of "] {
            let of = |lines: &[String]| lines.iter().find(|line| line.starts_with(row)).cloned();
            let (output, documented) = (of(&output), of(&documented));
            ensure!(output == documented, "{command} says {output:?}, the page {documented:?}");
        }
        Ok(())
    }
}

/// Makes a line run quickly: a short measurement, and a weak key derivation.
fn quick(line: &str) -> String {
    const FORMAT: &str = "cryptsetup luksFormat ";
    if line.starts_with("ringhaul disk bench ") {
        let (before, after) = line.split_once(" --runtime ").unwrap_or((line, ""));
        let after = after.split_once(' ').map_or("", |(_, after)| after);
        format!("{before} --runtime 500ms {after}")
    } else {
        line.replace(FORMAT, &format!("{FORMAT}--pbkdf pbkdf2 --pbkdf-force-iterations 1000 "))
    }
}

/// Appends the sources below a folder, with texts of several lines in one line, and without
/// backticks.
fn read_sources(folder: &Path, sources: &mut String) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            read_sources(&path, sources)?;
        } else if path.extension().is_some_and(|name| name == "rs") {
            for line in fs::read_to_string(&path)?.lines() {
                let line = line.trim_start().replace('`', "");
                match line.strip_suffix('\\') {
                    Some(part) => sources.push_str(part),
                    None => sources.push_str(&(line + "\n")),
                }
            }
        }
    }
    Ok(())
}

/// A user searches the tables for words of a line.
#[test]
fn the_program_has_the_words_of_the_tables_of_messages() -> Result<()> {
    // Lines of QEMU and SeaBIOS.
    const OTHERS: [&str; 2] = ["Failed to connect", "not a bootable disk"];
    let mut sources = String::new();
    for folder in fs::read_dir(workspace::root().join("crates"))? {
        read_sources(&folder?.path().join("src"), &mut sources)?;
    }
    let guide = workspace::root().join("docs/guide");
    let troubleshooting = fs::read_to_string(guide.join("troubleshooting.md"))?;
    let service = Page::read("guide/service.md")?;
    let rows = troubleshooting.lines().filter(|line| line.starts_with("| "));
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    let cells: Vec<&str> = cells
        .chain(service.table("| line | meaning |")?.iter().map(|row| row[0]))
        .filter(|cell| cell.contains('`'))
        .collect();
    ensure!(cells.len() > 50, "only {} rows were found", cells.len());
    for span in cells.into_iter().flat_map(code_spans).filter(|span| !OTHERS.contains(span)) {
        let has_all = span.split("...").all(|words| sources.contains(words.trim()));
        ensure!(has_all, "the program has no line with {span:?}");
    }
    Ok(())
}
