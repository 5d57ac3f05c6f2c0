//! The socket of a service manager, which a daemon notifies: see sd_notify(3).

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::cli::LIMIT;

/// The interval in which the reader looks for its end.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A service manager that reads all messages. Dropping it ends its reader.
pub struct ServiceManager {
    messages: Receiver<String>,
    _reader: Arc<()>,
}

impl ServiceManager {
    /// Listens on `socket`, and makes `command` notify it.
    ///
    /// # Errors
    /// If the socket cannot be made.
    pub fn listen(socket: &Path, command: &mut Command) -> Result<Self> {
        command.env("NOTIFY_SOCKET", socket);
        let socket = UnixDatagram::bind(socket).context("making the socket for notifications")?;
        socket.set_read_timeout(Some(CHECK_INTERVAL))?;
        let (sender, messages) = channel();
        let reader = Arc::new(());
        let is_wanted: Weak<()> = Arc::downgrade(&reader);
        std::thread::spawn(move || {
            let mut buffer = [0; 1024];
            while is_wanted.strong_count() > 0 {
                if let Ok(bytes) = socket.recv(&mut buffer) {
                    // Sending fails only after the test has dropped the receiver.
                    let _ = sender.send(String::from_utf8_lossy(&buffer[..bytes]).into_owned());
                }
            }
        });
        Ok(Self { messages, _reader: reader })
    }

    /// Waits for a message that contains `text`, and returns it with the messages before it.
    ///
    /// # Errors
    /// If it does not arrive in time.
    pub fn wait_for(&self, text: &str) -> Result<Vec<String>> {
        let deadline = Instant::now() + LIMIT;
        let mut seen = Vec::new();
        while !seen.last().is_some_and(|last: &String| last.contains(text)) {
            let left = deadline.saturating_duration_since(Instant::now());
            let next = self.messages.recv_timeout(left);
            let Ok(next) = next else {
                seen.dedup();
                bail!("no {text:?} after {seen:?}");
            };
            seen.push(next);
        }
        Ok(seen)
    }

    /// The messages that have arrived since the last call.
    #[must_use]
    pub fn arrived(&self) -> Vec<String> {
        self.messages.try_iter().collect()
    }
}
