//! Commits: a subject that fits a line, and a body with the reason.

use std::path::Path;
use std::process::Command;

use super::{Problem, tables};

/// Problems of the commits since [`tables::COMMITS_SINCE`]; none without git, or if the history
/// does not reach that far back.
pub(super) fn check(root: &Path) -> Vec<Problem> {
    let range = format!("{}..HEAD", tables::COMMITS_SINCE);
    let mut log = Command::new("git");
    log.current_dir(root).args(["log", "--no-merges", "--format=%h%x1f%s%x1f%b%x1e", &range]);
    match log.output() {
        Ok(output) if output.status.success() => problems(&String::from_utf8_lossy(&output.stdout)),
        _ => {
            println!("tidy: there is no history here, so commits are not checked");
            Vec::new()
        }
    }
}

/// Problems of the commits in a log: hash, subject and body, each followed by a mark.
fn problems(log: &str) -> Vec<Problem> {
    log.split('\x1e').filter_map(|commit| problem(commit.trim_start())).collect()
}

fn problem(commit: &str) -> Option<Problem> {
    let (hash, rest) = commit.split_once('\x1f')?;
    let (subject, body) = rest.split_once('\x1f')?;
    if tables::BAD_COMMITS.iter().any(|bad| hash.starts_with(bad)) {
        return None;
    }
    let columns = subject.chars().count();
    let (what, advice) = if columns > tables::MAX_SUBJECT_COLUMNS {
        let most = tables::MAX_SUBJECT_COLUMNS;
        (format!("a subject of {columns} columns"), format!("{most} at most: {subject}"))
    } else if subject.ends_with('.') {
        ("a full stop after the subject".to_owned(), format!("leave it out: {subject}"))
    } else if body.trim().is_empty() {
        ("no body".to_owned(), format!("say why: {subject}"))
    } else {
        return None;
    };
    Some(Problem { file: format!("commit {hash}"), line: 1, what, advice })
}

#[cfg(test)]
mod tests {
    fn found(commits: &[(&str, &str, &str)]) -> Vec<String> {
        let log = commits
            .iter()
            .map(|(hash, subject, body)| format!("{hash}\x1f{subject}\x1f{body}\x1e\n"));
        let problems = super::problems(&log.collect::<String>());
        problems.into_iter().map(|problem| format!("{}: {}", problem.file, problem.what)).collect()
    }

    #[test]
    fn subjects_fit_and_bodies_are_there() {
        let long = "x".repeat(73);
        let why = "It was slow.\n";
        assert!(found(&[("1", &long[1..], why), ("2", "a: b", why)]).is_empty());
        assert_eq!(found(&[("1", &long, why)]), ["commit 1: a subject of 73 columns"]);
        assert_eq!(found(&[("1", "a: b.", why)]), ["commit 1: a full stop after the subject"]);
        assert_eq!(found(&[("1", "a: b", "\n"), ("2", "c", why)]), ["commit 1: no body"]);
    }
}
