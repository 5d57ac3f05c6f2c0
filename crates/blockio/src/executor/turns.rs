//! The turns of users that have a thing one after another.

/// The turns of users that have a thing one after another, each with a higher number than earlier
/// ones. A turn may end before it has begun, and begin after a later one. `T` belongs to the turn.
#[derive(Debug)]
pub struct Turns<T = ()> {
    holder: Option<(u64, T)>,
    /// The highest number of a user with a turn that has ended.
    ended: u64,
}

impl<T> Turns<T> {
    /// The user that has the turn.
    pub fn holder(&self) -> Option<u64> {
        self.holder.as_ref().map(|(user, _)| *user)
    }

    /// The last user that had a turn or has it.
    pub fn last(&self) -> u64 {
        self.holder().unwrap_or(self.ended)
    }

    /// Returns true if the turn of this user, or a later one, has ended.
    pub fn has_ended(&self, user: u64) -> bool {
        self.ended >= user
    }

    /// Begins a turn. If a later user has the turn, that user keeps it.
    pub fn begin(&mut self, user: u64, with: T) {
        self.holder = Some((self.holder().map_or(user, |holder| holder.max(user)), with));
    }

    /// Takes the turn from its user, before another one begins it.
    pub fn take(&mut self) -> Option<(u64, T)> {
        self.holder.take()
    }

    /// Ends the turns up to that of this user. Returns the one that was in progress.
    pub fn end(&mut self, user: u64) -> Option<(u64, T)> {
        self.ended = self.ended.max(user);
        self.holder.take_if(|(holder, _)| *holder <= user)
    }
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self { holder: None, ended: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_ends_with_its_user_or_a_later_one() {
        let mut turns = Turns::default();
        turns.begin(3, 'a');
        turns.begin(2, 'b');
        assert_eq!((turns.holder(), turns.last()), (Some(3), 3), "an earlier user takes it");
        assert_eq!((turns.end(2), turns.has_ended(3)), (None, false));
        assert_eq!((turns.end(4), turns.last()), (Some((3, 'b')), 4));
        assert!(turns.has_ended(4) && !turns.has_ended(5));
    }
}
