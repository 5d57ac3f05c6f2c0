//! The failures that the output of a command reports: failed tests with their first lines, and
//! errors of cargo and the compiler.

/// The most lines of a command, and of each failed test.
const MAX_LINES: usize = 40;
const MAX_TEST_LINES: usize = 12;

/// Reads an output by pieces, and keeps the lines about failures.
#[derive(Default)]
pub(crate) struct Failures {
    pub(crate) lines: Vec<String>,
    begun: Vec<u8>,
    /// The lines that may still follow the name of a failed test.
    wanted: usize,
}

impl Failures {
    pub(crate) fn parse(&mut self, piece: &[u8]) {
        for byte in piece {
            if *byte == b'\n' {
                let line = std::mem::take(&mut self.begun);
                self.parse_line(&String::from_utf8_lossy(&line));
            } else {
                self.begun.push(*byte);
            }
        }
    }

    fn parse_line(&mut self, line: &str) {
        let is_test = line.starts_with("---- ") && line.ends_with(" ----");
        if is_test {
            self.wanted = MAX_TEST_LINES;
        } else if line == "failures:" {
            self.wanted = 0;
        }
        let is_error = line.starts_with("error") || line.starts_with("Error: ");
        let is_kept = is_test || is_error || (self.wanted > 0 && !line.trim().is_empty());
        if is_kept && self.lines.len() < MAX_LINES {
            self.wanted = self.wanted.saturating_sub(1);
            self.lines.push(line.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_test_is_kept_with_its_first_lines() {
        let mut failures = Failures::default();
        failures.parse(b"test a ... ok\ntest b ... FAILED\n\nfailures:\n\n---- b std");
        failures.parse(b"out ----\nError: opening c\n\nCaused by:\n    no such file\n");
        failures.parse(b"\nfailures:\n    b\n\ntest result: FAILED. 1 passed; 1 failed\n");
        let lines = ["---- b stdout ----", "Error: opening c", "Caused by:", "    no such file"];
        assert_eq!(failures.lines, lines);
    }

    #[test]
    fn long_outputs_are_cut() {
        let mut failures = Failures::default();
        failures.parse(b"error: one\n---- b stdout ----\n");
        failures.parse("text\n".repeat(100).as_bytes());
        assert_eq!(failures.lines.len(), 1 + MAX_TEST_LINES);
        failures.parse("error[E0001]: two\n".repeat(100).as_bytes());
        assert_eq!(failures.lines.len(), MAX_LINES);
    }
}
