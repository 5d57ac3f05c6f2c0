//! The end of an engine: nothing is counted any longer.

use super::Lanes;

impl Lanes {
    /// Asserts that nothing is counted when no op is in an engine or waits for one.
    pub(crate) fn assert_idle(&self) {
        for lane in self.lanes.iter().flatten() {
            let counts = (lane.units, lane.extra_units, lane.bytes, lane.non_transfers);
            debug_assert_eq!(counts, (0, 0, 0, 0), "{} is counted", lane.file.path().display());
            debug_assert!(lane.backlog.is_empty(), "an op waits for a disk without ops");
            let taken = self.shares[lane.engine].taken;
            debug_assert_eq!(taken, 0, "room of {} is taken", lane.engine);
        }
        debug_assert_eq!(self.bytes.in_engines(), 0, "bytes without an op are counted");
        debug_assert_eq!(self.devices.units(), 0, "requests without an op are counted");
    }
}
