//! The messages of a migration: the log of written pages is set, replaced and dropped while the
//! rings run.

use vhost_user::message::{LogArea, Request};

use super::{Disconnect, FrontEnd, OnReply};

impl FrontEnd {
    /// Begins to log all writes of the device.
    pub(crate) fn begin_log(&mut self) {
        self.guest.begin_migration();
        if self.is_memory_due {
            self.share_memory();
        }
        // A session keeps the log of an earlier migration, and would mark pages there once more.
        if self.has_log || self.rng.chance(500) {
            self.send_log();
            self.send_log_features();
        } else {
            self.send_log_features();
            self.send_log();
        }
        self.push(Request::GetFeatures, OnReply::Logging);
    }

    /// Continues a migration over a new connection, or with a device that was reset.
    pub(super) fn continue_log(&mut self) {
        if self.guest.migration().is_some() {
            self.send_log();
            self.push(Request::GetFeatures, OnReply::Logging);
        }
    }

    /// Replaces the log by another.
    pub(crate) fn replace_log(&mut self) {
        self.guest.add_log();
        self.send_log();
    }

    /// Drops the log, because the migration has failed.
    pub(crate) fn end_log(&mut self) {
        self.guest.cancel_migration();
        self.send_log_features();
        self.push(Request::GetFeatures, OnReply::Unlogged);
    }

    /// Stops all queues, and then closes the connection.
    pub(crate) fn switch(&mut self) {
        self.guest.pause();
        self.begin_disconnect(Disconnect::Politely);
    }

    fn send_log(&mut self) {
        let Some((area, fd)) = self.guest.with_log(|log| (log.area(), log.descriptor())) else {
            return;
        };
        self.push_with(Request::SetLogBase(area), vec![fd], OnReply::Log(area));
    }

    /// Turns marks on or off.
    fn send_log_features(&mut self) {
        let features = Request::SetFeatures(self.all_features());
        let mut messages: Vec<Request> =
            (0..self.vrings.len()).map(|queue| self.addresses(queue)).collect();
        let at = self.rng.index(messages.len() + 1);
        messages.insert(at, features);
        messages.into_iter().for_each(|message| self.push(message, OnReply::Nothing));
    }

    /// Takes the answer to a log. Returns false if it is wrong.
    pub(super) fn log_is_taken(&mut self, area: LogArea, body: &[u8]) -> bool {
        self.has_log = true;
        self.guest.has_taken_log();
        body == area.encode()
    }
}
