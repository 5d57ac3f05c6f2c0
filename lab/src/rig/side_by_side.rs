//! Servers that run at the same time, each with a socket of its own.
//!
//! Starting a server takes longer than a short measurement. Servers that sleep while their rivals
//! are measured are started only once.

use std::time::Duration;

use anyhow::Result;
use ringhaul_tools::process::Running;
use serde_json::Value;

use super::{Lab, Program};

/// Running servers. Dropping them ends them.
pub(crate) struct Servers<'a> {
    lab: &'a Lab,
    /// Names and processes, in the order of places.
    running: Vec<(String, Running)>,
}

impl Lab {
    /// Starts `servers` on the server CPU. The place of each is its index. Each must listen on the
    /// socket of its place ([`Lab::socket_of`]).
    pub(crate) fn serve_all(&self, servers: &[Program]) -> Result<Servers<'_>> {
        let start = |(place, server): (usize, &Program)| {
            let running = self.explain(self.start(server, &[], place), &server.name, place)?;
            Ok((server.name.clone(), running))
        };
        let running = servers.iter().enumerate().map(start).collect::<Result<_>>()?;
        Ok(Servers { lab: self, running })
    }
}

impl Servers<'_> {
    /// Drives the server at `place` with the load generator and returns the report. `options` must
    /// name neither the socket nor an output file.
    pub(crate) fn bench(&self, place: usize, options: &[String], limit: Duration) -> Result<Value> {
        let socket = ["--socket-path".to_owned(), self.lab.socket_of(place)];
        let options: Vec<_> = socket.iter().chain(options).cloned().collect();
        self.lab.explain(self.lab.bench(&options, limit), &self.running[place].0, place)
    }

    /// Ends all servers.
    ///
    /// # Errors
    /// If a server does not end, or does not exit successfully.
    pub(crate) fn stop(self) -> Result<()> {
        for (place, (name, mut running)) in self.running.into_iter().enumerate() {
            self.lab.explain(self.lab.stop(&mut running, &name, place), &name, place)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixListener;
    use std::path::Path;
    use std::process::Command;

    use ringhaul_tools::process::{self, Interrupt, is_listening};

    const SOCKET: &str = "RINGHAUL_LAB_TEST_SOCKET";
    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    #[ignore = "plays a server for the other tests here"]
    fn plays_a_server() {
        let Some(socket) = std::env::var_os(SOCKET) else { return };
        let interrupt = Interrupt::install().unwrap();
        // Not a macro, whose output the test harness would capture.
        write!(std::io::stderr(), "I am {}", Path::new(&socket).display()).unwrap();
        assert_ne!(socket, "nowhere");
        let _listener = UnixListener::bind(socket).unwrap();
        interrupt.wait_until(LIMIT, "the end of the test", || Ok(false)).unwrap_err();
    }

    /// This test program in the role of the server above.
    fn server(name: &str, socket: &str) -> Program {
        let program = std::env::current_exe().unwrap().to_string_lossy().into_owned();
        let test = "rig::side_by_side::tests::plays_a_server";
        let socket = format!("{SOCKET}={socket}");
        let words = ["env", &socket, &program, "--ignored", "--exact", test];
        Program { name: name.to_owned(), words: words.map(str::to_owned).to_vec(), is_free: false }
    }

    #[test]
    fn servers_listen_side_by_side_and_end_together() {
        let lab = Lab::for_tests("true");
        let sockets = [0, 1].map(|place| lab.socket_of(place));
        let listening = || sockets.clone().map(|socket| is_listening(Path::new(&socket)).unwrap());
        let programs = [server("first", &sockets[0]), server("second", &sockets[1])];
        let servers = lab.serve_all(&programs).unwrap();
        assert_eq!(listening(), [true, true]);
        servers.stop().unwrap();
        assert_eq!(listening(), [false, false]);
        assert!(sockets.iter().all(|socket| !Path::new(socket).exists()));
        drop(lab.serve_all(&programs[..1]).unwrap());
        assert_eq!(listening(), [false, false], "dropping them does not end them");
    }

    #[test]
    fn the_load_goes_to_one_server_and_errors_name_it() {
        // A load generator that reports its arguments, or fails on request.
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("bench");
        let text = "#!/bin/sh\n[ $4 = --fail ] && exit 9\n\
                    for last; do :; done; echo \"{\\\"options\\\": \\\"$*\\\"}\" > \"$last\"\n";
        let script = script.to_str().unwrap();
        // Written by a shell: children of other tests must not inherit a writable descriptor of a
        // program.
        let write = "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\"";
        process::output(Command::new("sh").args(["-c", write, script, text])).unwrap();
        let lab = Lab::for_tests(script);
        let sockets = [0, 1].map(|place| lab.socket_of(place));
        let programs = [server("first", &sockets[0]), server("second", &sockets[1])];
        let servers = lab.serve_all(&programs).unwrap();
        for (place, name) in ["first", "second"].into_iter().enumerate() {
            let report = servers.bench(place, &["--quick".to_owned()], LIMIT).unwrap();
            let expected = format!("bench --socket-path {} --quick", sockets[place]);
            assert!(report["options"].as_str().unwrap().starts_with(&expected), "{report}");
            let error = servers.bench(place, &["--fail".to_owned()], LIMIT).unwrap_err();
            let error = format!("{error:#}");
            assert!(error.contains(&format!("measuring {name}")), "{error}");
            assert!(error.contains(&format!("I am {}", sockets[place])), "{error}");
        }
        servers.stop().unwrap();
    }

    #[test]
    fn a_server_that_ends_early_takes_the_others_with_it() {
        let lab = Lab::for_tests("true");
        let first = lab.socket_of(0);
        let result = lab.serve_all(&[server("first", &first), server("second", "nowhere")]);
        let error = format!("{:#}", result.err().unwrap());
        assert!(error.contains("second ended with"), "{error}");
        assert!(error.contains("I am nowhere"), "{error}");
        assert!(!is_listening(Path::new(&first)).unwrap());
    }
}
