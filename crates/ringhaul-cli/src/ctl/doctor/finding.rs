//! Findings: their order, and their forms for people, scripts and programs.

use std::fmt::{self, Write};

use ringhaul_options::redact::printable;
use serde::Serialize;

/// The harm of a finding, the worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    /// A guest has no disk, or data is at risk.
    Harmful,
    /// Requests are slower than they could be, or a restart would cost the guest its disk.
    Warning,
    /// A fact that explains figures, and that may be intended.
    Note,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// A fault, or a fact that costs time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) level: Level,
    /// The export; `None` for the host or the whole daemon.
    pub(super) export: Option<String>,
    /// The name of the finding.
    pub(super) finding: &'static str,
    /// The fact, with its figure.
    pub(super) figure: String,
    pub(super) remedy: String,
}

impl Finding {
    pub(super) fn new(
        level: Level,
        finding: &'static str,
        figure: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { level, export: None, finding, figure: figure.into(), remedy: remedy.into() }
    }

    /// The finding of an export.
    pub(super) fn for_export(self, export: &str) -> Self {
        Self { export: Some(export.to_owned()), ..self }
    }

    /// Returns true if the finding should be mended.
    pub(super) fn needs_action(&self) -> bool {
        self.level != Level::Note
    }
}

/// Orders findings by harm. Findings of one level keep their order.
pub(super) fn sort(findings: &mut [Finding]) {
    findings.sort_by_key(|finding| finding.level);
}

/// For people: each finding with its figure and its remedy.
pub(super) fn text(findings: &[Finding]) -> String {
    if findings.is_empty() {
        return "nothing found\n".to_owned();
    }
    let mut text = String::new();
    for Finding { level, export, finding, figure, remedy } in findings {
        let place = export.as_deref().unwrap_or("host");
        // Writing to a string does not fail.
        let _ = writeln!(text, "{level}: {}: {finding}", printable(place));
        let _ = writeln!(text, "    {}", printable(figure));
        let _ = writeln!(text, "    remedy: {}", printable(remedy));
    }
    text
}

/// For scripts: a line for each finding.
pub(super) fn lines(findings: &[Finding]) -> String {
    let line = |Finding { level, export, finding, figure, remedy }: &Finding| {
        let place = export.as_deref().unwrap_or("host");
        let line = format!("{level}  {place}  {finding}  {figure}; {remedy}");
        format!("{}\n", printable(&line))
    };
    findings.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings() -> Vec<Finding> {
        let of = |level, name| Finding::new(level, name, "7 of 8", "do this");
        let mut all = vec![
            of(Level::Note, "a"),
            of(Level::Warning, "b").for_export("vm\n"),
            of(Level::Harmful, "c"),
            of(Level::Warning, "d"),
        ];
        sort(&mut all);
        all
    }

    #[test]
    fn the_most_harmful_comes_first() {
        let names: Vec<_> = findings().iter().map(|finding| finding.finding).collect();
        assert_eq!(names, ["c", "b", "d", "a"]);
        let need: Vec<_> = findings().iter().map(Finding::needs_action).collect();
        assert_eq!(need, [true, true, true, false]);
    }

    #[test]
    fn people_and_scripts_see_figure_and_remedy() {
        assert_eq!(text(&[]), "nothing found\n");
        let expected = "harmful: host: c\n    7 of 8\n    remedy: do this\n\
                        warning: vm\\n: b\n    7 of 8\n    remedy: do this\n";
        assert_eq!(text(&findings()[..2]), expected);
        let expected = "harmful  host  c  7 of 8; do this\nwarning  vm\\n  b  7 of 8; do this\n";
        assert_eq!(lines(&findings()[..2]), expected);
    }
}
