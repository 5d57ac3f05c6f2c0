//! Servers that do not answer: checks by the connections of an IoThread, and reports.

use std::time::Instant;

use blockio::driver::{Line, is_late};

use super::pipe::Pipe;
use super::shared::Condition;

impl Pipe {
    /// Publishes the condition of the connections.
    pub(super) fn publish_condition(&self, why: Option<(Instant, &str)>) {
        let now = self.io.recently();
        let waiting = self.oldest_waiting().filter(|since| is_late(*since, now));
        let (up, late, since, is_idle) = {
            let requests = self.requests.borrow();
            let late = || requests.links.iter().filter_map(|link| link.stalled_since);
            let up = requests.links.iter().filter(|link| link.is_up).count();
            (up, late().count(), late().chain(waiting).min(), requests.are_idle())
        };
        let condition = match (why, since) {
            (Some((since, why)), _) if up == 0 => Condition::Away(since, why.to_owned()),
            (_, Some(since)) if up > 0 => Condition::Late { since, up, late },
            _ => Condition::Up(up),
        };
        self.shared.set_condition(self.number, condition);
        if up > 0 && is_idle {
            self.shared.forget_stall(self.number);
        }
    }

    /// Checks if the server is late with requests of a link. Its connection exists since `begun`,
    /// and has received all bytes that had come. Publishes the condition; the log has a line for
    /// all connections together. `was_answered`: the link received something since the last check.
    pub(super) fn check_stalled(&self, index: usize, begun: Instant, was_answered: bool) {
        let now = self.io.recently();
        // A request that is sent again has waited for a server that was away, and not for an
        // answer.
        let oldest = self.oldest_of(index).map(|since| since.max(begun));
        let stalled_since = oldest.filter(|since| is_late(*since, now));
        self.requests.borrow_mut().links[index].stalled_since = stalled_since;
        self.publish_condition(None);
        let name = &self.shared.options;
        match self.shared.check_stalled(self.number, now, was_answered) {
            Some(Line::Waits(age)) => tracing::warn!(
                "{name}: the server has not answered an operation for {} s; requests wait for it; \
                 check the server, its storage and the network",
                age.as_secs()
            ),
            Some(Line::Answers(after)) => {
                tracing::info!("{name}: the server answers again, after {} s", after.as_secs());
            }
            None => {}
        }
    }
}
