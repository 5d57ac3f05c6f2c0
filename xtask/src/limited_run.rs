//! A command with a time limit, and a limit for each test that it runs. When a limit is over, all
//! its processes are ended, and the unfinished tests are named.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ringhaul_tools::group::Group;
use ringhaul_tools::process::Interrupt;

use crate::failures::Failures;

/// The longest wait between two checks of the limits.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The time for output to arrive after the end of a command.
const OUTPUT_GRACE: Duration = Duration::from_secs(2);

/// libtest's message about a slow test, and the time after which it comes.
const SLOW: &str = " has been running for over 60 seconds";
const SLOW_AFTER: Duration = Duration::from_secs(60);

/// Time limits of a command.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// Limit of the whole command.
    pub(crate) whole: Duration,
    /// Limit of each test.
    pub(crate) test: Duration,
}

/// The end of a command.
#[derive(Debug)]
pub(crate) enum End {
    /// The status, and the failures that the output reports.
    Ended(ExitStatus, Vec<String>),
    /// A limit was over. The text has the limit, the unfinished tests, and the processes.
    Overdue(String),
}

/// Runs `command` to its end. Reads its standard output. If `is_shown`, shows its output by lines,
/// each after `name`, because another command may run beside it.
///
/// # Errors
/// If the command cannot be started, or a signal comes. Its processes have ended by the return.
pub(crate) fn run(
    name: &str,
    command: &mut Command,
    limits: Limits,
    is_shown: bool,
    interrupt: &Interrupt,
) -> Result<End> {
    interrupt.check()?;
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    if is_shown {
        command.stderr(Stdio::piped());
    }
    let mut group = Group::start(name, command)?;
    let output = group.child().stdout.take().context("the command has no standard output")?;
    let errors = group.child().stderr.take();
    let (sender, pieces) = mpsc::channel();
    // The threads end with the last process that holds a pipe open; no wait depends on that.
    if let Some(errors) = errors {
        let sender = sender.clone();
        std::thread::spawn(move || read(errors, Stream::Errors, &sender));
    }
    std::thread::spawn(move || read(output, Stream::Output, &sender));
    let mut tests = Tests::default();
    let mut screen = is_shown.then(|| Screen::new(name));
    let mut failures = [Failures::default(), Failures::default()];
    let mut take = |(stream, piece): (Stream, Vec<u8>), tests: &mut Tests| {
        if stream == Stream::Output {
            tests.parse_output(&piece);
        }
        failures[stream as usize].parse(&piece);
        if let Some(screen) = &mut screen {
            screen.show(stream, &piece);
        }
    };
    let start = Instant::now();
    while !group.has_ended()? {
        match pieces.recv_timeout(POLL_INTERVAL) {
            Ok(piece) => take(piece, &mut tests),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(POLL_INTERVAL),
        }
        let overdue = match (start.elapsed() > limits.whole, tests.overdue(limits.test)) {
            (_, Some(test)) => Some(format!("{test} took more than {} s", limits.test.as_secs())),
            (true, None) => Some(format!("took more than {} s", limits.whole.as_secs())),
            (false, None) => None,
        };
        if let Some(overdue) = overdue {
            let text = format!("{overdue}; {}", unfinished(&tests, &group));
            group.stop(Duration::from_secs(10));
            return Ok(End::Overdue(text));
        }
        // Dropping the group ends it.
        interrupt.check()?;
    }
    let end = Instant::now() + OUTPUT_GRACE;
    while let Ok(piece) = pieces.recv_timeout(end.saturating_duration_since(Instant::now())) {
        take(piece, &mut tests);
    }
    let status = group.wait()?;
    // Ctrl-C reaches the command as well, but its status is not the reason then.
    interrupt.check()?;
    Ok(End::Ended(status, failures.into_iter().flat_map(|failures| failures.lines).collect()))
}

/// An output of a command.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stream {
    Output,
    Errors,
}

fn read(mut input: impl Read, stream: Stream, pieces: &mpsc::Sender<(Stream, Vec<u8>)>) {
    let mut buffer = [0; 4096];
    while let Ok(len @ 1..) = input.read(&mut buffer) {
        if pieces.send((stream, buffer[..len].to_vec())).is_err() {
            return;
        }
    }
}

/// Shows whole lines of a command, each after its name. Dropping it shows the rest.
struct Screen {
    name: String,
    output: Vec<u8>,
    errors: Vec<u8>,
}

impl Screen {
    fn new(name: &str) -> Self {
        Self { name: name.to_owned(), output: Vec::new(), errors: Vec::new() }
    }

    fn show(&mut self, stream: Stream, piece: &[u8]) {
        // A reader of this output that has gone does not end the checks.
        let _ = match stream {
            Stream::Output => {
                let lines = whole_lines(&self.name, &mut self.output, piece);
                let mut out = std::io::stdout().lock();
                out.write_all(&lines).and_then(|()| out.flush())
            }
            Stream::Errors => {
                let lines = whole_lines(&self.name, &mut self.errors, piece);
                std::io::stderr().lock().write_all(&lines)
            }
        };
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        for stream in [Stream::Output, Stream::Errors] {
            let rest = match stream {
                Stream::Output => &self.output,
                Stream::Errors => &self.errors,
            };
            if !rest.is_empty() {
                self.show(stream, b"\n");
            }
        }
    }
}

/// Adds a piece to the begun line. Returns the lines that are whole now, each after `name`.
fn whole_lines(name: &str, begun: &mut Vec<u8>, piece: &[u8]) -> Vec<u8> {
    begun.extend_from_slice(piece);
    let end = begun.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    let mut lines = Vec::new();
    for line in begun.drain(..end).as_slice().split_inclusive(|byte| *byte == b'\n') {
        lines.extend_from_slice(name.as_bytes());
        lines.extend_from_slice(b": ");
        lines.extend_from_slice(line);
    }
    lines
}

/// Describes the unfinished tests, as far as they are known, and the running processes.
fn unfinished(tests: &Tests, group: &Group) -> String {
    let names: Vec<&str> = tests.running().collect();
    let processes = group.processes().join(", ");
    match names.is_empty() {
        true => format!("no test is known to hang; running: {processes}"),
        false => format!("tests that had not ended: {}; running: {processes}", names.join(", ")),
    }
}

/// The running tests according to libtest's output. A test that runs alone is named at its start, a
/// test among parallel ones after a minute.
#[derive(Default)]
struct Tests {
    /// Tests that have begun and not ended.
    begun: BTreeMap<String, Instant>,
    line: Vec<u8>,
}

impl Tests {
    fn parse_output(&mut self, piece: &[u8]) {
        for byte in piece {
            if *byte == b'\n' {
                let line = std::mem::take(&mut self.line);
                self.parse_line(&String::from_utf8_lossy(&line));
            } else {
                self.line.push(*byte);
            }
        }
        let alone = String::from_utf8_lossy(&self.line);
        if let Some((name, _)) = test_line(&alone) {
            self.begun.entry(name.to_owned()).or_insert_with(Instant::now);
        }
    }

    fn parse_line(&mut self, line: &str) {
        if let Some(name) = line.strip_suffix(SLOW) {
            let name = name.strip_prefix("test ").unwrap_or(name);
            let begun = Instant::now().checked_sub(SLOW_AFTER).unwrap_or_else(Instant::now);
            self.begun.entry(name.to_owned()).or_insert(begun);
        } else if let Some((name, _)) = test_line(line) {
            self.begun.remove(name);
        } else if line.starts_with("test result: ") {
            self.begun.clear();
        }
    }

    fn running(&self) -> impl Iterator<Item = &str> {
        self.begun.keys().map(String::as_str)
    }

    /// A test that has run for longer than `limit`.
    fn overdue(&self, limit: Duration) -> Option<&str> {
        let mut all = self.begun.iter();
        all.find(|(_, begun)| begun.elapsed() > limit).map(|(name, _)| name.as_str())
    }
}

/// Parses the name of a test, without a remark, and its result so far.
fn test_line(line: &str) -> Option<(&str, &str)> {
    let (name, result) = line.strip_prefix("test ")?.split_once(" ... ")?;
    Some((name.strip_suffix(" - should panic").unwrap_or(name), result))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Limits = Limits { whole: Duration::from_secs(600), test: Duration::from_secs(600) };

    /// The mark of a run within [`hangs_on_request`].
    const HANG: &str = "RINGHAUL_TEST_HANGS";

    #[test]
    fn hangs_on_request() {
        while std::env::var_os(HANG).is_some() {
            std::thread::park();
        }
    }

    /// The tests of this program, one of which hangs.
    fn hanging() -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--test-threads=1", "limited_run::tests::hangs_on_request"]).env(HANG, "1");
        command
    }

    #[test]
    fn a_test_that_hangs_is_ended_and_named() {
        for limits in [
            Limits { test: Duration::from_secs(2), ..LONG },
            Limits { whole: Duration::from_secs(2), ..LONG },
        ] {
            let end =
                run("tests", &mut hanging(), limits, false, &Interrupt::unset_for_test()).unwrap();
            let End::Overdue(text) = end else { panic!("{end:?}") };
            assert!(text.contains("took more than 2 s"), "{text}");
            let name = "tests that had not ended: limited_run::tests::hangs_on_request; running: ";
            assert!(text.contains(name), "{text}");
        }
    }

    #[test]
    fn a_command_that_ends_has_its_status() {
        for (program, code) in [("true", 0), ("false", 1)] {
            let end =
                run(program, &mut Command::new(program), LONG, false, &Interrupt::unset_for_test());
            let End::Ended(status, _) = end.unwrap() else { panic!("{program} was not awaited") };
            assert_eq!(status.code(), Some(code));
        }
    }

    #[test]
    fn output_that_another_process_keeps_open_is_not_awaited() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 20 & exit 0"]);
        let end = run("sh", &mut command, LONG, false, &Interrupt::unset_for_test()).unwrap();
        assert!(matches!(end, End::Ended(..)), "{end:?}");
    }

    #[test]
    fn lines_are_shown_as_a_whole_after_the_name() {
        let mut begun = Vec::new();
        assert!(whole_lines("a", &mut begun, b"test b ... ").is_empty());
        assert_eq!(whole_lines("a", &mut begun, b"ok\n\nc"), b"a: test b ... ok\na: \n");
        assert_eq!(whole_lines("a", &mut begun, b"\n"), b"a: c\n");
    }

    #[test]
    fn running_tests_are_parsed_from_output() {
        let mut tests = Tests::default();
        let running = |tests: &Tests| tests.running().map(str::to_owned).collect::<Vec<_>>();
        tests.parse_output(
            b"running 4 tests\ntest a::b ... ok\ntest c has been running for over 60 sec",
        );
        assert!(running(&tests).is_empty());
        tests.parse_output(b"onds\ntest d ... ignored\ntest e - should panic ... ");
        assert_eq!(running(&tests), ["c", "e"]);
        assert_eq!(tests.overdue(Duration::from_secs(59)), Some("c"));
        assert_eq!(tests.overdue(Duration::from_secs(600)), None);
        tests.parse_output(b"ok\ntest c ... FAILED\n");
        assert!(running(&tests).is_empty());
        tests.parse_output(
            b"test f has been running for over 60 seconds\ntest result: FAILED. 1 passed\n",
        );
        assert!(running(&tests).is_empty());
    }
}
