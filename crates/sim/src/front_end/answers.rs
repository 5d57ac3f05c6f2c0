//! The answers of the session to the front-end's messages.

use std::fmt;

use vhost_user::message::Header;

use super::{Event, FrontEnd, OnReply};
use crate::failure::Failure;

impl FrontEnd {
    /// Acts on the answer to a message.
    pub(super) fn conclude(
        &mut self,
        header: Header,
        body: &[u8],
        then: OnReply,
    ) -> Result<(), Failure> {
        let is_ack = !header.has_answer();
        let wrong = |this: &Self| Err(this.fail("a wrong answer", &format!("{then:?}: {body:?}")));
        if is_ack && body != [0; 8] {
            return wrong(self);
        }
        match then {
            OnReply::Nothing => {}
            OnReply::Number(number) if body == number.to_ne_bytes() => {}
            OnReply::Number(_) => return wrong(self),
            OnReply::Started(queue) => self.events.push(Event::Started(queue)),
            OnReply::Base(queue) => {
                let base = body.get(4..).and_then(|bytes| bytes.try_into().ok());
                let Some(base) = base.map(u32::from_ne_bytes) else {
                    return wrong(self);
                };
                self.stopped(queue, |expected| base == expected, format_args!("{base:#x}"))?;
            }
            OnReply::Disabled(queue) => {
                self.vrings[queue].is_paused = true;
                let next_avail = self.link.as_ref().and_then(|l| l.session.next_avail(queue));
                // The session tells the place of the next chain alone.
                let is_it = |expected: u32| {
                    next_avail.is_some_and(|next| u32::from(next) == expected & 0xffff)
                };
                self.stopped(queue, is_it, format_args!("{next_avail:x?}"))?;
            }
            OnReply::Mapped if self.is_idle() => self.check_memory()?,
            // The next map may already be in place, or be in progress.
            OnReply::Mapped => {}
            OnReply::Negotiated => self.report_cache(),
            OnReply::Region if self.take_region(body) => {}
            OnReply::Region => return wrong(self),
            OnReply::HasRegion => self.has_region = true,
            OnReply::Log(area) if self.log_is_taken(area, body) => {}
            OnReply::Log(_) => return wrong(self),
            OnReply::Logging => self.guest.begin_copy(),
            OnReply::Unlogged => self.guest.end_migration(),
            OnReply::Writeback(value) => {
                if body.last() != Some(&value) {
                    return wrong(self);
                }
                self.is_cached = value != 0;
                self.report_cache();
            }
            OnReply::Reset { keeps_cache } => {
                self.vrings
                    .iter_mut()
                    .for_each(|vring| (vring.runs, vring.is_paused) = (false, false));
                self.is_cached = if keeps_cache { self.is_cached } else { self.can_cache() };
                self.has_log &= keeps_cache;
                self.events.push(Event::AllStopped);
            }
        }
        Ok(())
    }

    /// Reports the state of the cache, unless a waiting message may change it: the guest may not
    /// rely on an answer that the device has overtaken.
    fn report_cache(&mut self) {
        let changes = |then: &OnReply| {
            matches!(then, OnReply::Writeback(_) | OnReply::Negotiated | OnReply::Reset { .. })
        };
        let mut waiting =
            self.expected.iter().map(|(_, then)| then).chain(self.to_send.iter().map(|i| &i.then));
        if !waiting.any(changes) {
            self.events.push(Event::Cached(self.is_cached));
        }
    }

    /// Checks that a queue has stopped at the base that follows from its answers and from the
    /// requests that it has left in the region.
    fn stopped(
        &mut self,
        queue: usize,
        is_it: impl FnOnce(u32) -> bool,
        said: fmt::Arguments<'_>,
    ) -> Result<(), Failure> {
        let left = if self.has_region { self.guest.marked(queue) } else { Vec::new() };
        let base = self.guest.base(queue, &left);
        if !is_it(base) {
            let text = format!("queue {queue} at {said} and not {base:#x}; it has left {left:?}");
            return Err(self.fail("a queue says that it has stopped", &text));
        }
        self.events.push(Event::Stopped(queue, base));
        Ok(())
    }
}
