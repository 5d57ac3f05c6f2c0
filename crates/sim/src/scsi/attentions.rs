//! Unit attentions of an I_T nexus: each is reported once, and before any other answer.
//!
//! Commands that overlap may be carried out in any order, and the cause of an attention takes a
//! while. So an attention is expected from some time on, and is certain from a later time on. If a
//! command was answered without a certain attention, another command that began before that answer
//! must have reported it.

use super::{Code, NEXUS_LOST, POWER_ON};

const NEVER: u64 = u64::MAX;

#[derive(Debug, Clone)]
struct Attention {
    id: u64,
    code: Code,
    /// The attention may be there from this time on.
    begin: u64,
    /// The attention is there from this time on, unless it was reported.
    sure_since: u64,
    /// Commands that begin after this time do not report it.
    gone_since: u64,
    /// The time of the first answer that should have reported it.
    missed_at: u64,
    /// The end of its cause.
    settled_at: u64,
    /// Begin and end of the command that has reported it.
    reported: Option<(u64, u64)>,
    /// An attention of the same code was reported, which may have been this one.
    is_doubtful: bool,
}

/// The outcome of a cause of attentions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CauseOutcome {
    Surely,
    Maybe,
    Not,
}

#[derive(Debug, Default)]
pub(crate) struct Attentions {
    all: Vec<Attention>,
    next_id: u64,
    /// The end of the last reset.
    last_reset: u64,
}

/// Resets clear all earlier attentions (SAM-5, section 5.14.1). The loss of a nexus clears none.
fn is_reset(code: Code) -> bool {
    code[0] == POWER_ON[0] && code != NEXUS_LOST
}

/// Order of reports: lower ranks come first.
fn rank(code: Code) -> u8 {
    match code {
        _ if is_reset(code) => 0,
        NEXUS_LOST => 1,
        _ => 2,
    }
}

impl Attentions {
    /// Notes that a cause has begun that may raise this attention. Returns the attention's number.
    pub(crate) fn expect(&mut self, code: Code, begin: u64) -> u64 {
        self.next_id += 1;
        self.all.push(Attention {
            id: self.next_id,
            code,
            begin,
            sure_since: NEVER,
            gone_since: NEVER,
            missed_at: NEVER,
            settled_at: NEVER,
            reported: None,
            is_doubtful: false,
        });
        self.next_id
    }

    /// Notes that the cause of an attention has ended.
    pub(crate) fn settle(
        &mut self,
        id: u64,
        end: u64,
        outcome: CauseOutcome,
    ) -> Result<(), String> {
        let Some(at) = self.all.iter().position(|one| one.id == id) else { return Ok(()) };
        let Attention { code, begin, reported, is_doubtful, .. } = self.all[at];
        if outcome == CauseOutcome::Not {
            self.all.remove(at);
            // The report must then have been for another attention of that code.
            return reported.map_or(Ok(()), |(begin, end)| self.record_report(code, begin, end));
        }
        // Attentions of the same code merge, and a reset clears earlier ones.
        let has_other = self.all.iter().any(|one| one.id != id && one.code == code);
        let is_sure = outcome == CauseOutcome::Surely
            && !has_other
            && !is_doubtful
            && self.last_reset < begin;
        if is_reset(code) {
            self.clear(Some(id), (begin, end), outcome == CauseOutcome::Surely);
            self.last_reset = end;
        }
        let one = self.all.iter_mut().find(|one| one.id == id).expect("it was there");
        one.settled_at = end;
        one.sure_since = if is_sure { end } else { NEVER };
        self.all.retain(|one| one.settled_at == NEVER || one.reported.is_none());
        Ok(())
    }

    /// Raises an attention at once.
    pub(crate) fn raise(&mut self, code: Code, now: u64) {
        let id = self.expect(code, now);
        self.settle(id, now + 1, CauseOutcome::Surely).expect("it has happened");
    }

    /// Notes that all attentions may be gone. If `is_sure`, attentions from before `begin`
    /// certainly are gone at `end`.
    fn clear(&mut self, except: Option<u64>, (begin, end): (u64, u64), is_sure: bool) {
        for one in self.all.iter_mut().filter(|one| Some(one.id) != except) {
            (one.sure_since, one.missed_at) = (NEVER, NEVER);
            if is_sure && one.settled_at < begin {
                one.gone_since = one.gone_since.min(end);
            }
        }
    }

    /// Forgets all attentions, because their nexus is gone.
    pub(crate) fn forget(&mut self, now: u64) {
        self.clear(None, (now, now), true);
    }

    /// Notes that a command has reported an attention.
    pub(crate) fn record_report(&mut self, code: Code, begin: u64, end: u64) -> Result<(), String> {
        let fits = |one: &Attention| {
            one.code == code
                && one.reported.is_none()
                && one.begin < end
                && begin < one.gone_since
                && begin < one.missed_at
        };
        let find =
            |is_it: fn(&Attention) -> bool| self.all.iter().position(|one| fits(one) && is_it(one));
        // A cause that has not ended may still raise a further attention.
        let found = find(|one| one.sure_since != NEVER)
            .or_else(|| find(|one| one.settled_at != NEVER))
            .or_else(|| find(|_| true));
        let Some(found) = found else {
            return Err(format!("attention {code:02x?} was not to be heard: {:?}", self.all));
        };
        // Attentions of the same code merge, so this report may have covered all of them.
        for other in self.all.iter_mut().filter(|one| fits(one)) {
            (other.sure_since, other.missed_at, other.is_doubtful) = (NEVER, NEVER, true);
        }
        self.all[found].reported = Some((begin, end));
        self.pass(begin, end, |other| rank(other) < rank(code));
        self.all.retain(|one| one.settled_at == NEVER || one.reported.is_none());
        Ok(())
    }

    /// Notes that a command that reports attentions was carried out without one.
    pub(crate) fn record_skip(&mut self, begin: u64, end: u64) {
        self.pass(begin, end, |_| true);
    }

    fn pass(&mut self, begin: u64, end: u64, is_meant: impl Fn(Code) -> bool) {
        for one in self.all.iter_mut().filter(|one| one.reported.is_none() && is_meant(one.code)) {
            if one.sure_since < begin {
                one.missed_at = one.missed_at.min(end);
            }
        }
    }

    /// Checks at the end that no attention was lost.
    pub(crate) fn check_end(&self) -> Result<(), String> {
        match self.all.iter().find(|one| one.missed_at != NEVER && one.reported.is_none()) {
            Some(one) => Err(format!("{one:?} was passed over, and nobody has heard it")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scsi::{CAPACITY_CHANGED, UNIT_RESET};

    #[test]
    fn each_is_heard_once_and_by_the_first_that_comes() {
        let mut attentions = Attentions::default();
        attentions.raise(CAPACITY_CHANGED, 10);
        assert!(attentions.record_report(UNIT_RESET, 20, 30).is_err());
        assert!(attentions.record_report(CAPACITY_CHANGED, 20, 30).is_ok());
        assert!(attentions.record_report(CAPACITY_CHANGED, 20, 30).is_err());
        attentions.raise(CAPACITY_CHANGED, 40);
        attentions.record_skip(50, 60);
        assert!(attentions.check_end().is_err());
        assert!(attentions.record_report(CAPACITY_CHANGED, 70, 80).is_err(), "it was passed over");
        assert!(attentions.record_report(CAPACITY_CHANGED, 55, 80).is_ok());
        assert!(attentions.check_end().is_ok());
    }

    #[test]
    fn a_reset_comes_first_and_clears_earlier_attentions() {
        let mut attentions = Attentions::default();
        attentions.raise(CAPACITY_CHANGED, 10);
        let id = attentions.expect(UNIT_RESET, 20);
        assert!(attentions.settle(id, 30, CauseOutcome::Surely).is_ok());
        assert!(attentions.record_report(CAPACITY_CHANGED, 40, 50).is_err());
        attentions.raise(CAPACITY_CHANGED, 51);
        assert!(attentions.record_report(CAPACITY_CHANGED, 60, 70).is_ok());
        assert!(attentions.check_end().is_err(), "the reset was to be heard first");
        let id = attentions.expect(CAPACITY_CHANGED, 80);
        assert!(attentions.record_report(CAPACITY_CHANGED, 81, 82).is_ok());
        assert!(attentions.settle(id, 83, CauseOutcome::Not).is_err());
    }

    #[test]
    fn a_lost_nexus_comes_after_resets_and_clears_nothing() {
        let mut attentions = Attentions::default();
        attentions.raise(UNIT_RESET, 10);
        attentions.raise(CAPACITY_CHANGED, 20);
        attentions.raise(NEXUS_LOST, 30);
        for (code, begin) in [(UNIT_RESET, 40), (NEXUS_LOST, 50), (CAPACITY_CHANGED, 60)] {
            assert!(attentions.record_report(code, begin, begin + 5).is_ok());
            assert!(attentions.check_end().is_ok());
        }
        attentions.raise(CAPACITY_CHANGED, 70);
        attentions.raise(NEXUS_LOST, 80);
        assert!(attentions.record_report(CAPACITY_CHANGED, 90, 95).is_ok());
        assert!(attentions.check_end().is_err(), "the nexus was to be heard of first");
    }
}
