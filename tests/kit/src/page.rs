//! Examples and tables of a page of the documents, which tests run, so that page and program stay
//! together.

use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use ringhaul_tools::workspace;

use crate::cli::{Finished, Running, run};
use crate::server::ringhaul_binary;

/// A page of the documents.
pub struct Page {
    path: String,
    text: String,
}

impl Page {
    /// Reads the page at `path` below `docs`.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn read(path: &str) -> Result<Self> {
        let file = workspace::root().join("docs").join(path);
        let text = std::fs::read_to_string(&file)
            .with_context(|| format!("reading the page {}", file.display()))?;
        Ok(Self { path: path.to_owned(), text })
    }

    /// The blocks between fences of the language `language`.
    #[must_use]
    pub fn blocks(&self, language: &str) -> Vec<String> {
        let mut blocks = Vec::new();
        let mut lines = self.text.lines();
        while let Some(line) = lines.next() {
            let Some(opened) = line.strip_prefix("```") else { continue };
            let block: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
            if opened == language {
                blocks.push(block.join("\n") + "\n");
            }
        }
        blocks
    }

    /// The only block of this language that contains `words`.
    ///
    /// # Errors
    /// If there is none, or more than one.
    pub fn block(&self, language: &str, words: &str) -> Result<String> {
        let mut blocks = self.blocks(language);
        blocks.retain(|block| block.contains(words));
        let (path, count) = (&self.path, blocks.len());
        ensure!(count == 1, "{path} has {count} blocks of {language} with {words:?}");
        Ok(blocks.remove(0))
    }

    /// The rows of the table whose first line begins with `head`, as cells.
    ///
    /// # Errors
    /// If there is no such table.
    pub fn table(&self, head: &str) -> Result<Vec<Vec<&str>>> {
        let mut lines = self.text.lines().skip_while(|line| !line.starts_with(head));
        lines.next().with_context(|| format!("{} has no table {head}", self.path))?;
        let rows = lines.skip(1).take_while(|line| line.starts_with('|'));
        Ok(rows.map(cells).collect())
    }
}

fn cells(row: &str) -> Vec<&str> {
    row.trim_matches('|').split('|').map(str::trim).collect()
}

/// The texts between backticks.
#[must_use]
pub fn code_spans(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// Tries the rows of a table of functions. A row has a function that is refused, words of the
/// refusal, and commands of Ringhaul in its place. `refuse` tries the function, and returns the
/// refusal. Returns the number of commands.
///
/// # Errors
/// If a refusal lacks the words, or a command fails.
pub fn try_functions(
    shell: &Shell,
    rows: &[Vec<&str>],
    refuse: impl Fn(&str) -> Result<String>,
) -> Result<usize> {
    let mut commands = 0;
    for row in rows {
        let [function, words, instead] = row[..] else { bail!("{row:?} has no three cells") };
        let (functions, words) = (code_spans(function), code_spans(words));
        let ([function], [words]) = (&functions[..], &words[..]) else {
            bail!("{row:?} names no function or no words");
        };
        let refusal = refuse(function).with_context(|| (*function).to_owned())?;
        ensure!(refusal.contains(words), "{function} says {refusal}");
        commands += try_commands(shell, &[vec![instead]])?;
    }
    Ok(commands)
}

/// Runs Ringhaul's commands in the last cells of a table. Returns their number.
///
/// # Errors
/// If one fails.
pub fn try_commands(shell: &Shell, rows: &[Vec<&str>]) -> Result<usize> {
    let spans = rows.iter().filter_map(|row| row.last()).flat_map(|cell| code_spans(cell));
    // A command without its arguments is only named.
    let is_whole = |span: &&str| span.starts_with("ringhaul ctl") && *span != "ringhaul ctl add";
    let mut commands = 0;
    for command in spans.filter(is_whole) {
        shell.run(command)?;
        commands += 1;
    }
    Ok(commands)
}

/// Replaces parts of an example. Each must be there, so that a page cannot lose one unnoticed.
///
/// # Errors
/// If a part is missing.
pub fn replaced(text: &str, parts: &[(&str, &str)]) -> Result<String> {
    let mut text = text.to_owned();
    for (from, to) in parts {
        ensure!(text.contains(from), "the example has no {from:?}:\n{text}");
        text = text.replace(from, to);
    }
    Ok(text)
}

/// A shell that runs the examples of a page in a folder. `ringhaul` in it is the program under
/// test.
pub struct Shell {
    folder: PathBuf,
    variables: Vec<(&'static str, OsString)>,
}

impl Shell {
    /// A shell whose commands run in `folder`.
    ///
    /// # Errors
    /// If the program is missing, or the folder cannot be used.
    pub fn new(folder: &Path) -> Result<Self> {
        let programs = folder.join("bin");
        std::fs::create_dir(&programs).with_context(|| format!("making {}", programs.display()))?;
        let binary = std::fs::canonicalize(ringhaul_binary()?).context("finding the program")?;
        symlink(binary, programs.join("ringhaul")).context("linking the program")?;
        let mut path = programs.into_os_string();
        path.push(":");
        path.push(std::env::var_os("PATH").context("there is no PATH")?);
        Ok(Self { folder: folder.to_owned(), variables: vec![("PATH", path)] })
    }

    /// Sets a variable of the environment.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl Into<OsString>) -> Self {
        self.variables.push((name, value.into()));
        self
    }

    /// A script that is not yet started.
    #[must_use]
    pub fn command(&self, script: &str) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "sh", "-euc", script]).stdin(Stdio::null());
        command.current_dir(&self.folder).env_remove("RUST_LOG").env("LC_ALL", "C");
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs a script to its end, whatever its status.
    ///
    /// # Errors
    /// If it does not end in time.
    pub fn try_run(&self, script: &str) -> Result<Finished> {
        run(&mut self.command(script))
    }

    /// Runs a script that must succeed.
    ///
    /// # Errors
    /// If it fails.
    pub fn run(&self, script: &str) -> Result<Finished> {
        self.try_run(script)?.expect_code(0).with_context(|| script.to_owned())
    }

    /// Starts the daemon with the only line of a script, and waits until it serves.
    ///
    /// # Errors
    /// If it does not get that far.
    pub fn serve(&self, line: &str) -> Result<Running> {
        let line = line.trim().trim_end_matches('&');
        Running::serve(&mut self.command(&format!("exec {line}"))).context(line.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(text: &str) -> Page {
        Page { path: "page.md".to_owned(), text: text.to_owned() }
    }

    #[test]
    fn blocks_of_one_language_are_found() {
        let page = page("a\n```sh\none\n```\n```xml\n<two/>\n```\n```sh\nthree\nfour\n```\n");
        assert_eq!(page.blocks("sh"), ["one\n", "three\nfour\n"]);
        assert_eq!(page.block("sh", "four").unwrap(), "three\nfour\n");
        assert!(page.block("sh", "two").is_err());
        assert!(page.block("sh", "e").is_err());
    }

    #[test]
    fn tables_have_cells() {
        let page = page("| a | b |\n|---|---|\n| `x y` | |\n| z | w |\n\n| c |\n|---|\n| d |\n");
        assert_eq!(page.table("| a").unwrap(), [["`x y`", ""], ["z", "w"]]);
        assert!(page.table("| e").is_err());
        assert_eq!(code_spans("a `b c` and `d`"), ["b c", "d"]);
    }

    #[test]
    fn a_part_that_is_missing_is_an_error() {
        assert_eq!(replaced("a b a", &[("a", "c")]).unwrap(), "c b c");
        assert!(replaced("a", &[("b", "c")]).is_err());
    }
}
