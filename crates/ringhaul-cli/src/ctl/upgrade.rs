//! `ringhaul ctl upgrade`: starts a program in the place of the daemon, and waits until it has
//! taken over.

mod daemon_process;
mod place;
mod status;
pub(crate) mod successor;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ringhaul::options::SandboxMode;
use ringhaul::spec::process::{SuccessorProgress, SuccessorStart};
use ringhaul_options::redact::printable;
use serde_json::{Value, json};

use super::connection::{self, Connection, Refusal};
use super::show::{self, Form, print};
use daemon_process::DaemonProcess;
pub(super) use successor::Program;
use successor::{CallerWord, Successor};

/// No program has taken over; an attempt in a moment may succeed.
const EXIT_LATER: u8 = 4;

/// No program has taken over, and another attempt would fail in the same way.
const EXIT_REFUSED: u8 = 5;

/// Error codes of answers: the daemon has no such method, and the two refusals of a takeover.
const NO_METHOD: i64 = -32601;
const LATER: i64 = 10;
const REFUSED: i64 = 11;

/// The pause between two attempts.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// The time that the new process may take until it takes over.
const START_MAX: Duration = Duration::from_secs(600);

/// The interval of checks for the end of the new process.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The time that a process that has taken over may take until it serves. One of an earlier version
/// may not say that it does.
const SERVE_MAX: Duration = Duration::from_secs(10);

/// The pause between two questions to it.
const SERVE_PAUSE: Duration = Duration::from_millis(20);

/// The time that a daemon may take for an answer, beyond the time that the request gives it.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// The time that the daemon may take to note the reason of a process that has ended.
const REASON_MAX: Duration = Duration::from_secs(2);

/// Replaces the daemon by `program`, with attempts until one is refused for good or the time is up.
///
/// # Errors
///
/// When the daemon cannot be reached, or is lost.
pub(super) fn run(
    (program, sandbox): (&Program, Option<SandboxMode>),
    retry: Duration,
    control: &Path,
    form: Form,
) -> Result<ExitCode> {
    let caller = CallerWord::new(sandbox);
    let retry_until = Instant::now() + retry;
    if program.in_unit && runs(control, &program.path)? {
        return Ok(ExitCode::SUCCESS);
    }
    loop {
        let Refusal { code, message } = match attempt(program, &caller, control)? {
            Ok(answer) => {
                print(&show::answer("upgrade.wait", &answer, form))?;
                return Ok(ExitCode::SUCCESS);
            }
            Err(refusal) => refusal,
        };
        if code == LATER && Instant::now() < retry_until {
            std::thread::sleep(RETRY_PAUSE);
            continue;
        }
        eprintln!("ringhaul: {}", printable(&message));
        return Ok(ExitCode::from(match code {
            LATER => EXIT_LATER,
            REFUSED => EXIT_REFUSED,
            _ => connection::EXIT_REFUSED,
        }));
    }
}

/// The program of the command line, as an absolute path.
pub(super) fn program(binary: &Path) -> Result<PathBuf> {
    if !binary.as_os_str().as_encoded_bytes().contains(&b'/') {
        bail!(
            "'{}' is not a path, and PATH is not searched; give the path of the new program, such \
             as /usr/bin/ringhaul",
            binary.display()
        );
    }
    let absolute = std::path::absolute(binary);
    absolute.with_context(|| format!("cannot make the path {} absolute", binary.display()))
}

/// Returns true if the daemon runs the program in this file, and not a former one of that name.
fn runs(control: &Path, program: &Path) -> Result<bool> {
    let daemon = DaemonProcess::find(&connect(control)?)?;
    let running = PathBuf::from(format!("/proc/{}/exe", daemon.id.as_raw_pid()));
    let file = |path: &Path| {
        let found = fs::metadata(path)
            .with_context(|| format!("cannot read the attributes of {}", path.display()));
        found.map(|file| (file.dev(), file.ino()))
    };
    Ok(file(&running)? == file(program)?)
}

/// Connects to a daemon. Each wait for it has a limit.
fn connect(control: &Path) -> Result<Connection> {
    let daemon = Connection::new(control)?;
    daemon.set_limit(ANSWER_MAX)?;
    Ok(daemon)
}

/// Calls a method. The daemon may take `deadline` for the work.
fn call(
    daemon: &mut Connection,
    method: &str,
    params: &Value,
    deadline: Duration,
) -> Result<Result<Value, Refusal>> {
    daemon.set_limit(deadline + ANSWER_MAX)?;
    let answer = daemon.call(method, params)?;
    daemon.set_limit(ANSWER_MAX)?;
    Ok(answer)
}

/// Returns the id of the new process, or the refusal.
fn attempt(
    program: &Program,
    caller: &CallerWord,
    control: &Path,
) -> Result<Result<Value, Refusal>> {
    let binary = &program.path;
    let mut connection = connect(control)?;
    let start: SuccessorStart = match connection.call("upgrade.begin", &json!({}))? {
        Ok(start) => serde_json::from_value(start).context("cannot understand the daemon")?,
        // A daemon of an earlier version starts the program itself.
        Err(Refusal { code: NO_METHOD, .. }) => {
            return call(&mut connection, "upgrade", &json!({ "binary": binary }), START_MAX);
        }
        Err(refusal) => return Ok(Err(refusal)),
    };
    let streams = connection.descriptors(successor::STREAMS)?;
    let daemon = match DaemonProcess::find(&connection) {
        Ok(daemon) => daemon,
        Err(error) => return Ok(Err(refused(format!("{error:#}")))),
    };
    let sandbox = connection.call("process", &json!({}))?.ok();
    let sandbox = sandbox.and_then(|shown| serde_json::from_value(shown["sandbox"].clone()).ok());
    match Successor::start(program, (start, sandbox), caller.clone(), daemon, &streams) {
        Ok(successor) => wait(binary, successor, connection, control),
        Err(error) => Ok(Err(refused(format!("{error:#}")))),
    }
}

/// Waits until the process has taken over.
fn wait(
    binary: &Path,
    mut successor: Successor,
    mut connection: Connection,
    control: &Path,
) -> Result<Result<Value, Refusal>> {
    let (process, end) = (successor.process(), Instant::now() + START_MAX);
    let taken = json!({ "process": process });
    let mut limit = CHECK_INTERVAL;
    loop {
        // Before the daemon is asked: its answer is then the last one.
        let ended = successor.try_wait()?;
        let is_late = Instant::now() >= end;
        if is_late || ended.is_some() && limit == CHECK_INTERVAL {
            limit = Duration::ZERO;
        }
        let params = json!({ "process": process, "deadline-ms": limit.as_millis() });
        let progress = match call(&mut connection, "upgrade.wait", &params, limit) {
            Ok(Ok(progress)) => serde_json::from_value::<SuccessorProgress>(progress)?,
            Ok(Err(refusal)) => {
                successor.end();
                let message =
                    format!("{} has not taken over: {}", binary.display(), refusal.message);
                return Ok(Err(Refusal { message, ..refusal }));
            }
            // The daemon may have ended because the process has taken over.
            Err(_) if serves(control, process) => {
                SuccessorProgress { has_asked: true, has_taken_over: true }
            }
            Err(error) => {
                // It may have taken over and be about to serve.
                successor.detach();
                return Err(error);
            }
        };
        match (progress, ended) {
            (SuccessorProgress { has_taken_over: true, .. }, _) => {
                let has_ended = || !matches!(successor.try_wait(), Ok(None));
                wait_until_served(control, process, has_ended)?;
                successor.detach();
                return Ok(Ok(taken));
            }
            (SuccessorProgress { has_asked: true, .. }, Some(_)) if limit < REASON_MAX => {
                limit = REASON_MAX;
            }
            (_, Some(status)) => return Ok(Err(refused(ended_early(binary, status)))),
            (_, None) if is_late => {
                let seconds = START_MAX.as_secs();
                let message = format!("{} has not taken over in {seconds} s", binary.display());
                return Ok(Err(Refusal { code: LATER, message }));
            }
            (_, None) => {}
        }
    }
}

fn refused(message: String) -> Refusal {
    Refusal { code: REFUSED, message }
}

/// The error about a process that has ended and never asked.
fn ended_early(binary: &Path, status: String) -> String {
    format!(
        "{} has not taken over: it ended ({status}) before it asked for the exports; if it is a \
         ringhaul, see its error in the log of this daemon, otherwise name one",
        binary.display()
    )
}

/// Waits until a process that has taken over serves: a kill before that loses its front-ends.
///
/// # Errors
///
/// When the process has ended.
fn wait_until_served(
    control: &Path,
    process: u32,
    mut has_ended: impl FnMut() -> bool,
) -> Result<()> {
    let end = Instant::now() + SERVE_MAX;
    while !serves(control, process) && Instant::now() < end {
        if has_ended() {
            bail!(
                "process {process} has taken over, and has ended; see its log, and start the \
                 daemon again"
            );
        }
        std::thread::sleep(SERVE_PAUSE);
    }
    Ok(())
}

/// Returns true if this process serves the control socket.
fn serves(control: &Path, process: u32) -> bool {
    let shown = Connection::new(control).and_then(|mut daemon| {
        daemon.set_limit(REASON_MAX)?;
        daemon.call("process", &json!({}))
    });
    shown.is_ok_and(|shown| shown.is_ok_and(|shown| shown["process"] == process))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    use super::*;

    /// An earlier daemon knows only the method `upgrade`, which starts the program.
    #[test]
    fn an_earlier_daemon_starts_the_program_itself() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let listener = UnixListener::bind(&path).unwrap();
        let daemon = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut asked = Vec::new();
            for line in BufReader::new(&stream).lines().map(Result::unwrap) {
                let request: Value = serde_json::from_str(&line).unwrap();
                let answer = match request["method"].as_str() {
                    Some("upgrade") => json!({ "result": { "process": 7 } }),
                    _ => json!({ "error": { "code": NO_METHOD, "message": "no method" } }),
                };
                writeln!(&stream, "{answer}").unwrap();
                asked.push(request);
            }
            asked
        });
        let program = Program { path: "/bin/it".into(), in_unit: false };
        let answer = attempt(&program, &CallerWord::default(), &path).unwrap();
        assert_eq!(answer.ok().unwrap(), json!({ "process": 7 }));
        let asked = daemon.join().unwrap();
        let methods: Vec<_> = asked.iter().map(|request| request["method"].clone()).collect();
        assert_eq!(methods, ["upgrade.begin", "upgrade"]);
        assert_eq!(asked[1]["params"], json!({ "binary": "/bin/it" }));
    }

    /// Scripts decide by the status whether to try again, as this command does by itself.
    #[test]
    fn only_a_refusal_for_the_moment_is_tried_again() {
        for (codes, status) in [
            (&[LATER, LATER, REFUSED][..], EXIT_REFUSED),
            (&[REFUSED], EXIT_REFUSED),
            (&[7], crate::ctl::EXIT_REFUSED),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("control");
            let listener = UnixListener::bind(&path).unwrap();
            std::thread::scope(|scope| {
                let daemon = scope.spawn(move || {
                    for code in codes {
                        let (stream, _) = listener.accept().unwrap();
                        BufReader::new(&stream).read_line(&mut String::new()).unwrap();
                        let error = json!({ "code": code, "message": "why" });
                        writeln!(&stream, "{}", json!({ "error": error })).unwrap();
                    }
                });
                let program = Program { path: "/bin/it".into(), in_unit: false };
                let retry = Duration::from_secs(60);
                let exit = run((&program, None), retry, &path, Form::Lines).unwrap();
                assert_eq!(format!("{exit:?}"), format!("{:?}", ExitCode::from(status)));
                daemon.join().unwrap();
            });
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let listener = UnixListener::bind(&path).unwrap();
        let daemon = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            BufReader::new(&stream).read_line(&mut String::new()).unwrap();
            let error = json!({ "code": LATER, "message": "why" });
            writeln!(&stream, "{}", json!({ "error": error })).unwrap();
        });
        let program = Program { path: "/bin/it".into(), in_unit: false };
        let exit = run((&program, None), Duration::ZERO, &path, Form::Lines).unwrap();
        assert_eq!(format!("{exit:?}"), format!("{:?}", ExitCode::from(EXIT_LATER)));
        daemon.join().unwrap();
    }

    /// A daemon that hangs up may have been replaced, restarted, or be in trouble.
    #[test]
    fn a_lost_connection_is_a_success_only_if_the_process_serves() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        assert!(!serves(&path, 7), "nothing serves");
        let listener = UnixListener::bind(&path).unwrap();
        let daemon = std::thread::spawn(move || {
            for answer in [
                json!({ "result": { "process": 7 } }),
                json!({ "result": { "process": 8 } }),
                json!({ "error": { "code": NO_METHOD, "message": "no method" } }),
            ] {
                let (stream, _) = listener.accept().unwrap();
                BufReader::new(&stream).read_line(&mut String::new()).unwrap();
                writeln!(&stream, "{answer}").unwrap();
            }
        });
        assert_eq!([7, 7, 7].map(|process| serves(&path, process)), [true, false, false]);
        daemon.join().unwrap();
    }

    /// The former process answers until it has ended.
    #[test]
    fn an_upgrade_is_done_when_the_new_process_serves() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let listener = UnixListener::bind(&path).unwrap();
        let daemon = std::thread::spawn(move || {
            for answer in [
                json!({ "error": { "code": 3, "message": "ending" } }),
                json!({ "result": { "process": 8 } }),
                json!({ "result": { "process": 7 } }),
            ] {
                let (stream, _) = listener.accept().unwrap();
                BufReader::new(&stream).read_line(&mut String::new()).unwrap();
                writeln!(&stream, "{answer}").unwrap();
            }
        });
        let mut checks = 0;
        let has_ended = || {
            checks += 1;
            false
        };
        wait_until_served(&path, 7, has_ended).unwrap();
        daemon.join().unwrap();
        assert_eq!(checks, 2, "each answer but the last one is of the former process");
        let error = wait_until_served(&path, 7, || true).unwrap_err().to_string();
        assert!(error.contains("process 7 has taken over, and has ended"), "{error}");
    }

    #[test]
    fn a_program_is_a_path() {
        let error = program(Path::new("false")).unwrap_err().to_string();
        assert!(error.contains("'false' is not a path"), "{error}");
        let here = std::env::current_dir().unwrap();
        assert_eq!(program(Path::new("./it")).unwrap(), here.join("it"));
        assert_eq!(program(Path::new("/bin/it")).unwrap(), Path::new("/bin/it"));
    }
}
