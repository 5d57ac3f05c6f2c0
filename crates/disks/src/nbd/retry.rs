//! Retries of a server that is away, and the log lines about it.

use std::time::{Duration, Instant};

use blockio::clock;

use super::client::Client;
use super::shared::{SharedExport, UnflushedChanges};

/// The wait before the server is tried again. It doubles from the first to the second.
pub(super) const RETRY_MIN: Duration = Duration::from_millis(50);
pub(super) const RETRY_MAX: Duration = Duration::from_secs(1);

/// The end of a connection.
pub(super) struct Ended {
    pub(super) why: String,
    /// True if it has answered a request.
    pub(super) was_useful: bool,
    pub(super) unflushed: UnflushedChanges,
    /// The number of requests to send again.
    pub(super) again: usize,
    /// The number of changes that the server may still make because of it.
    pub(super) held: usize,
}

/// The retries of a server.
pub(super) struct Retry {
    /// The time since which it is away.
    since: Option<Instant>,
    /// The reason in the log.
    logged_reason: String,
    /// True if the log reports it as away.
    is_logged: bool,
    pub(super) wait: Duration,
}

impl Retry {
    pub(super) fn new() -> Self {
        Self { since: None, logged_reason: String::new(), is_logged: false, wait: RETRY_MIN }
    }

    /// The time to wait before the next attempt.
    pub(super) fn next_pause(&mut self) -> Duration {
        let pause = self.wait;
        self.wait = (pause * 2).min(RETRY_MAX);
        pause
    }

    pub(super) fn record_failure(&mut self, client: &Client, why: &str) {
        let since = *self.since.get_or_insert_with(clock::now);
        client.publish_condition(Some((since, why)));
        if self.logged_reason != why
            && let Some(left_out) = client.shared.permit_line(clock::now())
        {
            why.clone_into(&mut self.logged_reason);
            self.is_logged = true;
            let _span = client.shared.span.enter();
            let name = &client.shared.options;
            match client.shared.another_client(client.number) {
                Some(_) => tracing::warn!(
                    left_out,
                    "{name} refuses the connection of an IoThread: {why}; its requests use \
                     connections of other IoThreads, and it connects again"
                ),
                None => tracing::warn!(
                    left_out,
                    "{name} is away: {why}; requests wait until a new connection succeeds"
                ),
            }
        }
    }

    /// Logs a broken connection. Repeated breaks get a line now and then, but a loss of data always
    /// does: it happens once.
    pub(super) fn record_break(&mut self, client: &Client, ended: &Ended) {
        let _span = client.shared.span.enter();
        let name = &client.shared.options;
        let Ended { why, again, held, .. } = ended;
        let since = *self.since.get_or_insert_with(clock::now);
        client.publish_condition(Some((since, why)));
        let permit = client.shared.permit_break(ended.was_useful, clock::now());
        self.is_logged = permit.is_some();
        if let Some(left_out) = permit {
            tracing::warn!(
                left_out,
                "{name}: a connection broke: {why}; requests to be sent again: {again}"
            );
            if *held > 0 {
                tracing::warn!(
                    "{name}: the server may still execute unanswered writes ({held}); later writes \
                     to the same ranges wait until it has answered or closed the connection"
                );
            }
        }
        log_unflushed(&client.shared, ended.unflushed, self.is_logged);
    }

    pub(super) fn record_return(&mut self, client: &Client) {
        self.logged_reason.clear();
        let is_logged = std::mem::take(&mut self.is_logged);
        if let Some(since) = self.since.take().filter(|_| is_logged) {
            let seconds = since.elapsed().as_secs();
            let _span = client.shared.span.enter();
            tracing::info!("{} is back after {seconds} s", client.shared.options);
        }
    }
}

/// Logs the state of changes that were not flushed; a loss in any case.
pub(super) fn log_unflushed(shared: &SharedExport, unflushed: UnflushedChanges, is_logged: bool) {
    let (name, _span) = (&shared.options, shared.span.enter());
    match unflushed {
        UnflushedChanges::Lost => tracing::error!(
            "{name}: unflushed writes may be lost, so all further flushes fail; check the disk, \
             then restart the export"
        ),
        UnflushedChanges::Trusted if is_logged => tracing::warn!(
            "{name}: unflushed writes are lost if the server's machine has restarted"
        ),
        UnflushedChanges::Trusted | UnflushedChanges::Nothing => {}
    }
}
