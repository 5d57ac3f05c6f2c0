//! Persistent reservations of a disk (SPC-4, section 5.13), as a set of possible states: a
//! PERSISTENT RESERVE OUT that is in progress, or was aborted, may have taken effect or not.

use std::collections::BTreeMap;

use super::{Code, Outcome};
use crate::timeline::Timeline;

/// UNIT ATTENTION codes of reservations.
const PREEMPTED: Code = [0x2a, 0x03];
const RELEASED: Code = [0x2a, 0x04];
const UNREGISTERED: Code = [0x2a, 0x05];

const IN_CDB: Outcome = Outcome::Check(5, [0x24, 0]);
const IN_LIST: Outcome = Outcome::Check(5, [0x26, 0]);
const INVALID_RELEASE: Outcome = Outcome::Check(5, [0x26, 4]);

/// A PERSISTENT RESERVE OUT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Order {
    /// The device that receives the order.
    pub(crate) from: usize,
    /// The service action.
    pub(crate) action: u8,
    /// The type.
    pub(crate) code: u8,
    pub(crate) key: u64,
    pub(crate) action_key: u64,
}

impl Order {
    /// True if the order may end commands.
    pub(crate) fn aborts(&self) -> bool {
        self.action == 5
    }
}

/// The need of a command for the medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    Nothing,
    Reading,
    Writing,
}

/// Registered keys, and the reservation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct State {
    keys: BTreeMap<usize, u64>,
    /// The type of the reservation; 0 if there is none.
    code: u8,
    /// The device that holds it, unless all registrants do.
    holder: usize,
}

/// A possible effect of an order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Effect {
    pub(crate) outcome: Outcome,
    pub(crate) state: State,
    /// Devices that receive unit attentions, with their codes.
    pub(crate) attentions: Vec<(usize, Code)>,
    /// Devices with commands that are aborted.
    pub(crate) aborted: Vec<usize>,
}

impl State {
    fn is_of_all(&self) -> bool {
        matches!(self.code, 7 | 8)
    }

    fn holds(&self, device: usize) -> bool {
        self.code != 0
            && if self.is_of_all() {
                self.keys.contains_key(&device)
            } else {
                self.holder == device
            }
    }

    /// True if a command of a device conflicts.
    fn conflicts(&self, device: usize, needs: Needs) -> bool {
        let is_exempt = self.holds(device)
            || matches!(self.code, 5 | 6) && self.keys.contains_key(&device)
            || self.code == 0;
        let is_exclusive = matches!(self.code, 3 | 6 | 8);
        !is_exempt && (needs == Needs::Writing || needs == Needs::Reading && is_exclusive)
    }

    fn others(&self, device: usize) -> impl Iterator<Item = usize> {
        self.keys.keys().copied().filter(move |other| *other != device)
    }

    /// The effect of an order on this state.
    fn perform(&self, order: &Order) -> Effect {
        let mut effect = Effect {
            outcome: Outcome::Good,
            state: self.clone(),
            attentions: Vec::new(),
            aborted: Vec::new(),
        };
        let own = self.keys.get(&order.from).copied().unwrap_or(0);
        let is_right = own == order.key && (own != 0 || order.action == 0);
        if !is_right && order.action != 6 {
            effect.outcome = Outcome::Conflict;
            return effect;
        }
        let is_valid = matches!(order.code, 1 | 3 | 5..=8);
        match order.action {
            0 | 6 => effect.register(order),
            1 if self.code == 0 && is_valid => {
                (effect.state.code, effect.state.holder) = (order.code, order.from);
            }
            1 if self.code == 0 => effect.outcome = IN_CDB,
            1 if self.holds(order.from) && order.code == self.code => {}
            1 => effect.outcome = Outcome::Conflict,
            2 if !self.holds(order.from) => {}
            2 if order.code != self.code => effect.outcome = INVALID_RELEASE,
            2 => {
                if self.code >= 5 {
                    effect.notify_others(order.from, RELEASED);
                }
                effect.state.code = 0;
            }
            3 => {
                effect.notify_others(order.from, PREEMPTED);
                effect.state = Self::default();
            }
            _ => effect.preempt(order, is_valid),
        }
        effect
    }
}

impl Effect {
    fn notify_others(&mut self, device: usize, code: Code) {
        let attentions: Vec<_> = self.state.others(device).map(|other| (other, code)).collect();
        self.attentions.extend(attentions);
    }

    /// Removes a registration. Returns true if that ends the reservation.
    fn unregister(&mut self, device: usize) -> bool {
        let was_held = self.state.code != 0;
        self.state.keys.remove(&device);
        let is_held = match self.state.is_of_all() {
            true => !self.state.keys.is_empty(),
            false => self.state.holder != device,
        };
        if was_held && !is_held {
            self.state.code = 0;
        }
        was_held && !is_held
    }

    fn register(&mut self, order: &Order) {
        if order.action_key != 0 {
            self.state.keys.insert(order.from, order.action_key);
            return;
        }
        let code = self.state.code;
        if self.state.keys.contains_key(&order.from)
            && self.unregister(order.from)
            && matches!(code, 5 | 6)
        {
            self.notify_others(order.from, RELEASED);
        }
    }

    fn preempt(&mut self, order: &Order, is_valid: bool) {
        let (state, key) = (&self.state, order.action_key);
        let replaces = match state.code {
            0 => false,
            7 | 8 => key == 0,
            _ if key == 0 => {
                self.outcome = IN_LIST;
                return;
            }
            _ => state.keys.get(&state.holder) == Some(&key),
        };
        let old = state.code;
        let meant = |found: u64| found == key || (replaces && key == 0);
        let named: Vec<usize> = state
            .keys
            .iter()
            .filter(|(_, found)| meant(**found))
            .map(|(device, _)| *device)
            .collect();
        if named.is_empty() || (replaces && !is_valid) {
            self.outcome = if named.is_empty() { Outcome::Conflict } else { IN_CDB };
            return;
        }
        for device in named.iter().copied().filter(|device| !(replaces && *device == order.from)) {
            self.unregister(device);
            if device != order.from {
                self.attentions.push((device, UNREGISTERED));
            }
        }
        if replaces {
            if old != order.code {
                self.notify_others(order.from, RELEASED);
            }
            (self.state.code, self.state.holder) = (order.code, order.from);
        }
        if order.action == 5 {
            self.aborted = named;
        }
    }
}

/// The possible reservations of a disk.
#[derive(Debug)]
pub(crate) struct Reservations {
    /// The possible states, without the order in progress.
    now: Vec<State>,
    all: Timeline<Vec<State>>,
    /// The order in progress, and its possible effects.
    order: Option<(Order, Vec<Effect>)>,
}

impl Default for Reservations {
    fn default() -> Self {
        let now = vec![State::default()];
        Self { all: Timeline::new(now.clone()), now, order: None }
    }
}

impl Reservations {
    /// True if an order can begin now.
    pub(crate) fn is_idle(&self) -> bool {
        self.order.is_none()
    }

    /// A key that a device may have registered.
    pub(crate) fn key_of(&self, device: usize) -> u64 {
        self.now.first().and_then(|state| state.keys.get(&device)).copied().unwrap_or(0)
    }

    /// The type that the reservation may have.
    pub(crate) fn code(&self) -> u8 {
        self.now.first().map_or(0, |state| state.code)
    }

    /// Begins an order. Returns its possible effects.
    pub(crate) fn begin(&mut self, order: Order, begin: u64) -> &[Effect] {
        let effects: Vec<Effect> = self.now.iter().map(|state| state.perform(&order)).collect();
        let after = effects.iter().map(|effect| effect.state.clone());
        self.all.set(begin, distinct(self.now.iter().cloned().chain(after)));
        &self.order.insert((order, effects)).1
    }

    /// Forgets all reservations. Returns the order that was in progress, which begins once more.
    pub(crate) fn died(&mut self, now: u64) -> Option<Order> {
        self.now = vec![State::default()];
        self.all.set(now, self.now.clone());
        self.order.take().map(|(order, _)| order)
    }

    /// Ends the order with this outcome; `None` if it may have taken effect or not. Returns the
    /// effects that remain possible.
    pub(crate) fn end(
        &mut self,
        outcome: Option<Outcome>,
        end: u64,
    ) -> Result<Vec<Effect>, String> {
        let Some((order, mut effects)) = self.order.take() else { return Ok(Vec::new()) };
        match outcome {
            Some(outcome) => {
                let text = format!("{order:?} of {:?} ends with {outcome:?}", self.now);
                effects.retain(|effect| effect.outcome == outcome);
                if effects.is_empty() {
                    return Err(text);
                }
                self.now = distinct(effects.iter().map(|effect| effect.state.clone()));
            }
            None => {
                let after = effects.iter().map(|effect| effect.state.clone());
                self.now = distinct(self.now.iter().cloned().chain(after));
            }
        }
        self.all.set(end, self.now.clone());
        Ok(effects)
    }

    /// Ends an order that was not carried out.
    pub(crate) fn refuse(&mut self, end: u64) {
        self.order = None;
        self.all.set(end, self.now.clone());
    }

    /// Returns two flags: a command may have been carried out, and it may have conflicted.
    pub(crate) fn allows(&self, device: usize, needs: Needs, begin: u64, end: u64) -> [bool; 2] {
        let mut states = self.all.during(begin, end).flatten();
        let mut again = self.all.during(begin, end).flatten();
        [
            states.any(|state| !state.conflicts(device, needs)),
            again.any(|state| state.conflicts(device, needs)),
        ]
    }
}

fn distinct(states: impl Iterator<Item = State>) -> Vec<State> {
    let mut all: Vec<State> = Vec::new();
    for state in states {
        if !all.contains(&state) {
            all.push(state);
        }
    }
    all
}
