//! Names that are reserved for exports which are being opened.

use std::time::Instant;

use super::Exports;
use crate::control::closing::Closing;
use crate::control::opening::PendingExport;
use crate::control::order::Answered;
use crate::open::cancellation::CancelToken;
use crate::spec::ExportSpec;
use crate::spec::command::CommandError;

impl Exports {
    pub(super) fn reserve(
        &mut self,
        specs: Vec<ExportSpec>,
        follows_hand_over: bool,
        now: Instant,
    ) -> Answered<Vec<CancelToken>> {
        if self.stopping.is_some() || self.is_start_cancelled {
            return Err(CommandError::Ending);
        }
        let before = self.opening.len();
        for spec in specs {
            let open = self.list.iter().map(|export| &export.spec);
            let closing = self.closing.iter().map(Closing::spec);
            let opening = self.opening.iter().map(|opening| &opening.spec);
            let mut others = open.chain(closing).chain(opening);
            if let Some(name) = others.find_map(|other| spec.clashes_with(other)) {
                self.opening.truncate(before);
                return Err(CommandError::Exists(name));
            }
            self.opening.push(PendingExport::new(spec, follows_hand_over, now));
        }
        Ok(self.opening[before..].iter().map(PendingExport::cancel_token).collect())
    }

    pub(super) fn claim(&mut self, name: &str) -> Answered<()> {
        if self.stopping.is_some() {
            return Err(CommandError::Ending);
        }
        let opening = self.opening.iter_mut().find(|opening| opening.spec.name() == name);
        opening.expect("its name is kept").claim()
    }

    pub(super) fn release(&mut self, names: &[String]) {
        let is_of = |opening: &mut PendingExport| names.contains(&opening.spec.name());
        self.opening.extract_if(.., is_of).for_each(PendingExport::released);
    }

    /// Removes and returns the entry of an export that is served from now on.
    pub(super) fn opened(&mut self, spec: &ExportSpec) -> Option<PendingExport> {
        let place = self.opening.iter().position(|opening| opening.spec == *spec);
        place.map(|place| self.opening.remove(place))
    }

    pub(super) fn cancel_start(&mut self, names: &[String]) -> bool {
        // A daemon that has served an export continues without exports.
        let is_alone = self.next_id == 0
            && self.opening.iter().all(|opening| names.contains(&opening.spec.name()));
        self.is_start_cancelled |= is_alone;
        is_alone
    }
}
