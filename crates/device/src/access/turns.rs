//! The file of the reservations of a disk that processes on several hosts use in turn.

use super::persist::ReservationStorage;
use super::{DiskAccess, ReservationsError, StorageGuard};

impl DiskAccess {
    /// Like [`store_reservations`](Self::store_reservations), for a disk that processes on several
    /// hosts use in turn. Stored reservations are loaded when a [use](Self::begin_use) begins.
    ///
    /// # Errors
    ///
    /// If other exports of the disk have chosen another place, or none.
    pub fn store_reservations_later(
        &self,
        place: ReservationStorage,
    ) -> Result<StorageGuard, ReservationsError> {
        Ok(self.reservations.store_later_in(place)?)
    }

    /// Begins a use of a disk that another host may have used before, for the turn of a guest with
    /// this number: takes the file of its reservations, and loads them if there is one. Waits for
    /// the file system.
    ///
    /// # Errors
    ///
    /// Like [`store_reservations`](Self::store_reservations).
    pub fn begin_use(&self, turn: u64) -> Result<(), ReservationsError> {
        let mut turns = self.turns.lock();
        self.reservations.take_file()?;
        if !turns.contains(&turn) {
            turns.push(turn);
        }
        Ok(())
    }

    /// Ends the use during this turn, if it has [begun](Self::begin_use). Leaves the file of the
    /// reservations to the next host, unless another guest here has its turn. Call it while no
    /// command of the guest runs.
    pub fn end_use(&self, turn: u64) {
        let mut turns = self.turns.lock();
        let has_begun = turns.extract_if(.., |other| *other == turn).next().is_some();
        if has_begun && turns.is_empty() {
            self.reservations.release_file();
        }
    }
}
