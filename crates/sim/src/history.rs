//! Checks that some order of the requests explains the results of reads and the content after a
//! crash.
//!
//! Each sector is a register of its own. Requests that overlap in time may take effect in any
//! order; a request that is answered before another begins comes first. Because each write has its
//! own number, this can be decided (Gibbons and Korach, "Testing shared memories", 1997). A value
//! lives from the first answer to the last begin of all requests that write or read it. Values with
//! such a lifetime must not live at the same time.

use iomem::fits;

use crate::content::Value;
use crate::failure::Failure;

/// The time of an answer that is missing.
pub(crate) const NEVER: u64 = u64::MAX;

#[derive(Debug, Clone)]
struct Write {
    value: Value,
    begin: u64,
    end: u64,
    /// Answered as done, so it has taken effect.
    certain: bool,
    /// Its answer promised that it is on stable storage.
    durable: bool,
    /// Answered with an error. Later flushes promise nothing about it: the kernel may have dropped
    /// its data after reads have seen them.
    failed: bool,
    /// Times of death of the daemons that had the write.
    deaths: Vec<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Read {
    value: Value,
    begin: u64,
    end: u64,
}

/// The values that COMPARE AND WRITE has found and written.
type Swap = (Value, Value);

#[derive(Debug, Default, Clone)]
struct Sector {
    writes: Vec<Write>,
    reads: Vec<Read>,
    swaps: Vec<Swap>,
}

/// All requests to the disk since its content was last known.
pub(crate) struct History {
    sectors: Vec<Sector>,
    /// The latest begin of a flush that was answered as done.
    last_flush: u64,
}

/// A write of the history: a sector, and the index of the write there.
pub(crate) type WriteRef = (u64, usize);

impl History {
    /// The history of a disk with this content.
    pub(crate) fn new(content: impl Iterator<Item = Value>) -> Self {
        let sector = |value| {
            let first = Write {
                value,
                begin: 0,
                end: 0,
                certain: true,
                durable: true,
                failed: false,
                deaths: Vec::new(),
            };
            Sector { writes: vec![first], ..Sector::default() }
        };
        Self { sectors: content.map(sector).collect(), last_flush: 0 }
    }

    fn sector(&mut self, sector: u64) -> &mut Sector {
        &mut self.sectors[fits::<_, usize>(sector, "the number of a sector")]
    }

    pub(crate) fn begin_write(&mut self, sector: u64, value: Value, begin: u64) -> WriteRef {
        let writes = &mut self.sector(sector).writes;
        writes.push(Write {
            value,
            begin,
            end: NEVER,
            certain: false,
            durable: false,
            failed: false,
            deaths: Vec::new(),
        });
        (sector, writes.len() - 1)
    }

    pub(crate) fn end_write(&mut self, write: WriteRef, end: u64, certain: bool, durable: bool) {
        let write = &mut self.sector(write.0).writes[write.1];
        (write.end, write.certain, write.durable) = (end, certain, durable);
    }

    /// Notes that a write was answered with an error.
    pub(crate) fn note_failed(&mut self, write: WriteRef) {
        self.sector(write.0).writes[write.1].failed = true;
    }

    /// Removes a refused write, which must have had no effect.
    pub(crate) fn remove_refused(&mut self, write: WriteRef) {
        let write = &mut self.sector(write.0).writes[write.1];
        (write.begin, write.end) = (NEVER, NEVER);
    }

    pub(crate) fn read(&mut self, sector: u64, value: Value, begin: u64, end: u64) {
        self.sector(sector).reads.push(Read { value, begin, end });
    }

    /// Records that COMPARE AND WRITE has found `was` and written `value`, with nothing between.
    pub(crate) fn record_swap(
        &mut self,
        sector: u64,
        was: Value,
        value: Value,
        begin: u64,
        end: u64,
    ) {
        self.read(sector, was, begin, end);
        self.sector(sector).swaps.push((was, value));
    }

    /// The value of the last write that was answered as done, or the initial value.
    pub(crate) fn last_value(&self, sector: u64) -> Value {
        let writes = &self.sectors[fits::<_, usize>(sector, "the number of a sector")].writes;
        writes.iter().rev().find(|write| write.certain).map_or(Value::Zero, |write| write.value)
    }

    /// True if a request that was out from `begin` to `end` must have found this value in a sector,
    /// in every order of requests. Its own write comes after its read, unless a daemon died while
    /// it was out.
    pub(crate) fn must_have(&self, sector: u64, value: Value, begin: u64, end: u64) -> bool {
        let writes = &self.sectors[fits::<_, usize>(sector, "the number of a sector")].writes;
        let is_it = |write: &&Write| write.certain && write.value == value && write.end < begin;
        writes.iter().any(|write| {
            is_it(&write)
                && writes.iter().all(|other| {
                    let is_own = other.begin == begin && other.deaths.is_empty();
                    let is_elsewhen = other.end < write.begin || end < other.begin;
                    is_own || other.value == value || is_elsewhen
                })
        })
    }

    pub(crate) fn flushed(&mut self, begin: u64) {
        self.last_flush = self.last_flush.max(begin);
    }

    /// Notes that the daemon died before it answered: another daemon carries out the write, maybe
    /// again.
    pub(crate) fn died(&mut self, write: WriteRef, now: u64) {
        self.sector(write.0).writes[write.1].deaths.push(now);
    }

    pub(crate) fn has_died(&self, (sector, write): WriteRef) -> bool {
        let sector = &self.sectors[fits::<_, usize>(sector, "the number of a sector")];
        !sector.writes[write].deaths.is_empty()
    }

    /// Checks that every read can be explained.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        for (index, sector) in self.sectors.iter().enumerate() {
            for read in &sector.reads {
                sector.check_read(read).map_err(|text| fail("bad read", index, &text))?;
            }
            sector.check_order().map_err(|text| fail("no order", index, &text))?;
            sector.check_swaps().map_err(|text| fail("no exclusion", index, &text))?;
        }
        Ok(())
    }

    /// Checks that `value` may be left in `sector`. After a loss of power only writes on stable
    /// storage must remain, otherwise all.
    pub(crate) fn check_left(
        &self,
        sector: usize,
        value: Value,
        power_lost: bool,
    ) -> Result<(), Failure> {
        let writes = &self.sectors[sector].writes;
        let is_flushed = |w: &Write| w.end < self.last_flush && !w.failed;
        let is_kept = |w: &Write| !power_lost || w.durable || is_flushed(w);
        let durable = |w: &Write| self.sectors[sector].has_happened(w) && is_kept(w);
        let possible = writes.iter().any(|write| {
            write.value == value
                && write.begin != NEVER
                && !writes.iter().any(|later| durable(later) && write.end < later.begin)
        });
        if possible {
            return Ok(());
        }
        let kept: Vec<_> = writes.iter().filter(|write| durable(write)).collect();
        let promise = if power_lost { "invariant 11: " } else { "" };
        let text = format!("{promise}{value:?} is left, but kept must be {kept:?}");
        Err(fail("lost data", sector, &text))
    }
}

fn fail(kind: &'static str, sector: usize, text: &str) -> Failure {
    Failure::new(kind, format!("sector {sector}: {text}"))
}

impl Sector {
    fn check_read(&self, read: &Read) -> Result<(), String> {
        let mut writers = self.writes.iter().filter(|write| write.value == read.value).peekable();
        if writers.peek().is_none() {
            return Err(format!("{read:?}, which nobody wrote"));
        }
        let in_time =
            |write: &&Write| write.begin < read.end && !self.is_overwritten(write, read.begin);
        if writers.any(|write| in_time(&write)) {
            return Ok(());
        }
        Err(format!("{read:?}, which was not there at that time; writes: {:?}", self.writes))
    }

    /// True if a completed write was certainly overwritten before `time`.
    fn is_overwritten(&self, write: &Write, time: u64) -> bool {
        self.writes.iter().any(|later| later.certain && write.end < later.begin && later.end < time)
    }

    /// True if a write certainly took effect: it was done, or it is a discard and the only possible
    /// origin of the zeroes of a read.
    fn has_happened(&self, write: &Write) -> bool {
        let explains = |write: &Write, read: &Read| {
            write.value == read.value
                && write.begin < read.end
                && !self.is_overwritten(write, read.begin)
        };
        write.certain
            || self
                .reads
                .iter()
                .filter(|read| explains(write, read))
                .any(|read| self.writes.iter().filter(|other| explains(other, read)).count() == 1)
    }

    fn check_order(&self) -> Result<(), String> {
        let zones: Vec<(u64, u64, Value)> =
            self.writes.iter().flat_map(|write| self.zones(write)).collect();
        for (index, &(first, last, value)) in zones.iter().enumerate() {
            if first >= last {
                continue;
            }
            for (other, &(start, end, other_value)) in zones.iter().enumerate() {
                // Two lifetimes clash if they overlap. A write without a lifetime takes effect
                // between `end` and `start`, and clashes if all of that time is within the
                // lifetime.
                let clash = start < last && first < end;
                if other != index && clash {
                    return Err(format!(
                        "{value:?} lives from {first} to {last}, and {other_value:?} from {start} \
                         to {end}: reads go back in time; {self:?}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks that no write came between the read and the write of COMPARE AND WRITE. Zeroes have
    /// many writers, so they are not checked.
    fn check_swaps(&self) -> Result<(), String> {
        let swaps = self.swaps.iter().filter(|(was, _)| *was != Value::Zero);
        let zone = |value: Value| {
            let write = self.writes.iter().find(|write| write.value == value);
            write.and_then(|write| match self.zones(write)[..] {
                [zone] => Some(zone),
                // The value was there several times.
                _ => None,
            })
        };
        // True if one value certainly came before the second.
        let precedes = |one: Value, other: Value| match (zone(one), zone(other)) {
            (Some((first, _, _)), Some((_, last, _))) => first < last,
            _ => false,
        };
        for &(was, value) in swaps {
            let between = |write: &&Write| {
                let other = write.value;
                ![was, value, Value::Zero].contains(&other)
                    && precedes(was, other)
                    && precedes(other, value)
            };
            if let Some(write) = self.writes.iter().find(between) {
                return Err(format!("{write:?} came between {was:?} and {value:?}"));
            }
            let came_again =
                self.writes.iter().any(|write| write.value == was && !write.deaths.is_empty());
            let is_other = |other: &Swap| other.0 == was && other.1 != value;
            if !came_again && self.swaps.iter().any(is_other) {
                return Err(format!("{was:?} was replaced twice, once by {value:?}"));
            }
        }
        Ok(())
    }

    /// The times at which a write was certainly there. A write that was out when a daemon died may
    /// have come in the life of each daemon, and came in the last.
    fn zones(&self, write: &Write) -> Vec<(u64, u64, Value)> {
        let lives = [&[write.begin][..], &write.deaths].concat();
        if write.deaths.is_empty() || write.value == Value::Zero {
            return self.zone(write).into_iter().collect();
        }
        let found = |begin: u64, end: u64| {
            let within =
                |read: &&Read| read.value == write.value && begin <= read.begin && read.end <= end;
            let reads = self.reads.iter().filter(within);
            reads
                .fold((NEVER, 0), |(first, last), read| (first.min(read.end), last.max(read.begin)))
        };
        let earlier = lives.windows(2).map(|life| found(life[0], life[1]));
        let mut zones: Vec<_> = earlier.filter(|(first, _)| *first != NEVER).collect();
        if write.certain {
            let begin = lives.last().copied().unwrap_or(write.begin);
            zones.push((write.end, found(write.end, NEVER).1.max(begin)));
        }
        zones.into_iter().map(|(first, last)| (first, last, write.value)).collect()
    }

    /// The first answer and the last begin of all requests on a write's value. Zeroes have many
    /// writers, so only the time of their certain arrival is known.
    fn zone(&self, write: &Write) -> Option<(u64, u64, Value)> {
        let value = write.value;
        if value == Value::Zero {
            return write.certain.then_some((write.end, write.begin, value));
        }
        let reads = self.reads.iter().filter(|read| read.value == value);
        let (first, last) = reads
            .fold((NEVER, 0), |(first, last), read| (first.min(read.end), last.max(read.begin)));
        if !write.certain && first == NEVER {
            return None;
        }
        Some((first.min(write.end), last.max(write.begin), value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Value = Value::Id(10);
    const B: Value = Value::Id(11);

    fn history(writes: &[(Value, u64, u64)], reads: &[(Value, u64, u64)]) -> History {
        let mut history = History::new([Value::Id(1)].into_iter());
        for &(value, begin, end) in writes {
            let write = history.begin_write(0, value, begin);
            history.end_write(write, end, true, false);
        }
        for &(value, begin, end) in reads {
            history.read(0, value, begin, end);
        }
        history
    }

    #[test]
    fn concurrent_writes_may_come_in_any_order_but_in_one() {
        let both = [(A, 10, 20), (B, 10, 20)];
        assert!(history(&both, &[(A, 30, 40)]).check().is_ok());
        assert!(history(&both, &[(B, 30, 40)]).check().is_ok());
        assert!(history(&both, &[(A, 12, 13), (B, 30, 40)]).check().is_ok());
        assert!(history(&both, &[(A, 30, 40), (B, 50, 60)]).check().is_err());
        assert!(history(&both, &[(A, 12, 13), (B, 14, 15), (A, 30, 40)]).check().is_err());
    }

    #[test]
    fn a_read_sees_neither_the_past_nor_the_future() {
        let two = [(A, 10, 20), (B, 30, 40)];
        assert!(history(&two, &[(A, 50, 60)]).check().is_err());
        assert!(history(&two, &[(B, 1, 5)]).check().is_err());
        assert!(history(&two, &[(A, 35, 36)]).check().is_ok());
        assert!(history(&two, &[(Value::Id(9), 35, 36)]).check().is_err());
        assert!(history(&two, &[(Value::Zero, 35, 36)]).check().is_err());
        let zeroed = [(A, 10, 20), (Value::Zero, 30, 40)];
        assert!(history(&zeroed, &[(A, 50, 60)]).check().is_err());
        assert!(history(&zeroed, &[(Value::Zero, 50, 60)]).check().is_ok());
        assert!(history(&zeroed, &[(Value::Zero, 21, 25)]).check().is_err());
    }

    #[test]
    fn no_write_comes_between_the_two_halves_of_a_swap() {
        let initial = Value::Id(1);
        let swapped = |writes: &[(Value, u64, u64)], reads: &[(Value, u64, u64)]| {
            let mut history = history(writes, reads);
            let write = history.begin_write(0, B, 10);
            history.record_swap(0, initial, B, 10, 30);
            history.end_write(write, 30, true, false);
            history.check()
        };
        assert!(swapped(&[], &[]).is_ok());
        // The second write came, and was seen, before the last one.
        assert!(swapped(&[(A, 12, 20)], &[(A, 35, 40)]).is_ok());
        assert!(swapped(&[(A, 12, 20)], &[(A, 22, 25), (B, 35, 40)]).is_err());
    }

    #[test]
    fn one_value_is_replaced_once() {
        let mut history = history(&[(A, 10, 20), (B, 10, 20)], &[]);
        history.record_swap(0, Value::Id(1), A, 10, 20);
        assert!(history.check().is_ok());
        history.record_swap(0, Value::Id(1), B, 10, 20);
        assert!(history.check().is_err());
    }

    #[test]
    fn a_write_that_was_out_at_a_death_comes_again_until_its_answer() {
        let lives = |has_died: bool, reads: &[(Value, u64, u64)]| {
            let mut history = history(&[(B, 30, 40)], reads);
            let write = history.begin_write(0, A, 10);
            if has_died {
                history.died(write, 50);
            }
            history.end_write(write, 60, true, false);
            history.check()
        };
        let undone = [(A, 20, 25), (A, 70, 80)];
        assert!(lives(true, &undone).is_ok() && lives(false, &undone).is_err());
        let once = [(A, 20, 25), (B, 70, 80)];
        assert!(lives(true, &once).is_err() && lives(false, &once).is_ok());
        assert!(lives(true, &[(A, 70, 80), (B, 90, 95)]).is_err(), "it came after its answer");
    }

    #[test]
    fn content_is_sure_without_another_writer() {
        let history = history(&[(A, 10, 20), (B, 40, 50)], &[]);
        assert!(history.must_have(0, A, 25, 35));
        assert!(!history.must_have(0, A, 15, 35) && !history.must_have(0, A, 25, 45));
        assert!(!history.must_have(0, B, 25, 60));
        // A request's own write follows its read.
        assert!(history.must_have(0, A, 40, 60) && history.must_have(0, A, 40, 45));
    }

    #[test]
    fn a_flush_promises_nothing_about_a_failed_write() {
        for failed in [false, true] {
            let mut history = history(&[], &[]);
            let write = history.begin_write(0, A, 10);
            history.end_write(write, 20, false, false);
            if failed {
                history.note_failed(write);
            }
            history.read(0, A, 21, 22);
            history.flushed(30);
            assert_eq!(history.check_left(0, Value::Id(1), true).is_ok(), failed);
            assert!(history.check_left(0, A, true).is_ok());
            assert!(history.check_left(0, Value::Id(1), false).is_err());
        }
    }

    #[test]
    fn flushed_data_survive_a_crash() {
        let mut history = history(&[(A, 10, 20), (B, 30, 40)], &[]);
        for value in [Value::Id(1), A, B] {
            assert!(history.check_left(0, value, true).is_ok());
        }
        assert!(history.check_left(0, A, false).is_err());
        assert!(history.check_left(0, B, false).is_ok());
        history.flushed(25);
        assert!(history.check_left(0, Value::Id(1), true).is_err());
        assert!(history.check_left(0, A, true).is_ok());
        history.flushed(45);
        assert!(history.check_left(0, A, true).is_err());
        assert!(history.check_left(0, B, true).is_ok());
    }
}
