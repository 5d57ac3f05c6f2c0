//! The effect of each service action of PERSISTENT RESERVE OUT (SPC-4, sections 5.13.7 to 5.13.11).

use super::command::{NO_ACTION_KEY, NO_DESTINATION, NOTHING_TO_MOVE, Request, ServiceAction};
use super::file::FileError;
use super::registry::{PortName, Registry, Reservation};
use crate::access::sense::Sense;

/// A PERSISTENT RESERVE OUT that changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// The status is RESERVATION CONFLICT.
    #[error("the command conflicts with registrations or a reservation of the disk")]
    Conflict,
    /// The status is CHECK CONDITION.
    #[error("{0}")]
    Check(#[from] Sense),
    /// The status is CHECK CONDITION with [`Sense::NOT_SAVED`].
    #[error("{0}")]
    NotSaved(#[from] FileError),
}

/// The effects of a service action besides its change of the registry.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Effects {
    /// True if PRGENERATION counts the action.
    pub(super) is_counted: bool,
    /// Unit attentions for the initiators at other ports.
    pub(super) attentions: Vec<(PortName, Sense)>,
    /// Ports with commands to abort.
    pub(super) aborted: Vec<PortName>,
}

impl Effects {
    /// The effects of a service action that PRGENERATION counts.
    fn counted() -> Self {
        Self { is_counted: true, ..Self::default() }
    }

    /// Adds a unit attention for each registered port except that of the command.
    fn add_attentions(&mut self, registry: &Registry, port: PortName, sense: Sense) {
        let others = registry.registrations().iter().filter(|other| other.port != port);
        self.attentions.extend(others.map(|other| (other.port, sense)));
    }
}

/// The port that sent a command, and all attached ports.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ports<'a> {
    pub(super) own: PortName,
    pub(super) attached: &'a [PortName],
}

impl Registry {
    /// Carries out a command. After a failure, the registry is of no use.
    ///
    /// # Errors
    ///
    /// If the standard does not allow the command.
    pub(super) fn perform(
        &mut self,
        ports: Ports<'_>,
        request: &Request,
    ) -> Result<Effects, Refusal> {
        use ServiceAction as Action;
        let own_key = self.key_of(ports.own);
        let must_be_registered = request.action != Action::Register;
        if request.action != Action::RegisterAndIgnoreExistingKey
            && (own_key != request.key || (must_be_registered && own_key.is_none()))
        {
            return Err(Refusal::Conflict);
        }
        match request.action {
            Action::Register | Action::RegisterAndIgnoreExistingKey => {
                self.register(ports.own, request)
            }
            Action::Reserve => self.reserve(ports.own, request),
            Action::Release => self.release(ports.own, request),
            Action::Clear => self.clear(ports.own, request),
            Action::Preempt | Action::PreemptAndAbort => self.preempt(ports.own, request),
            Action::RegisterAndMove => self.register_and_move(ports, request),
        }
    }

    fn register(&mut self, port: PortName, request: &Request) -> Result<Effects, Refusal> {
        request.bits?;
        let mut effects = Effects::counted();
        match request.action_key {
            Some(key) => self.set_key(port, key)?,
            // By the standard this does nothing, so it does not count either.
            None if self.key_of(port).is_none() => return Ok(Effects::default()),
            None => {
                let released = self.remove(|registration| registration.port == port);
                if released.is_some_and(|held| held.reservation_type.is_registrants_only()) {
                    effects.add_attentions(self, port, Sense::RESERVATIONS_RELEASED);
                }
            }
        }
        self.aptpl = request.aptpl;
        Ok(effects)
    }

    fn reserve(&mut self, port: PortName, request: &Request) -> Result<Effects, Refusal> {
        if let Some(held) = self.reservation {
            let is_same = request.established() == Ok(held.reservation_type);
            if !is_same || !self.is_holder(port) {
                return Err(Refusal::Conflict);
            }
        }
        request.bits?;
        if self.reservation.is_none() {
            self.reservation = Some(Reservation::new(request.established()?, port));
        }
        Ok(Effects::default())
    }

    fn release(&mut self, port: PortName, request: &Request) -> Result<Effects, Refusal> {
        request.bits?;
        let Some(held) = self.reservation.filter(|_| self.is_holder(port)) else {
            request.scope?;
            return Ok(Effects::default());
        };
        if request.established() != Ok(held.reservation_type) {
            return Err(Sense::INVALID_RELEASE.into());
        }
        self.reservation = None;
        let mut effects = Effects::default();
        let released = held.reservation_type;
        if released.is_registrants_only() || released.is_all_registrants() {
            effects.add_attentions(self, port, Sense::RESERVATIONS_RELEASED);
        }
        Ok(effects)
    }

    fn clear(&mut self, port: PortName, request: &Request) -> Result<Effects, Refusal> {
        request.bits?;
        let mut effects = Effects::counted();
        effects.add_attentions(self, port, Sense::RESERVATIONS_PREEMPTED);
        self.remove(|_| true);
        Ok(effects)
    }

    /// PREEMPT and PREEMPT AND ABORT. A missing key selects all registrants.
    fn preempt(&mut self, port: PortName, request: &Request) -> Result<Effects, Refusal> {
        let held = self.reservation;
        // The reservation that is preempted with the registrations.
        let replaced = match (held, request.action_key) {
            (None, None) => return Err(Refusal::Conflict),
            (Some(Reservation { holder: None, .. }), None) => held,
            (Some(Reservation { holder: Some(_), .. }), None) => return Err(NO_ACTION_KEY.into()),
            (Some(Reservation { holder: Some(holder), .. }), key) if self.key_of(holder) == key => {
                held
            }
            (_, Some(_)) => None,
        };
        let is_meant = |key| request.action_key.is_none_or(|meant| meant == key);
        let registrations = self.registrations().iter();
        let preempted: Vec<PortName> = registrations
            .filter(|registration| is_meant(registration.key))
            .map(|registration| registration.port)
            .collect();
        if preempted.is_empty() {
            return Err(Refusal::Conflict);
        }
        request.bits?;
        let established = match replaced {
            Some(_) => Some(Reservation::new(request.established()?, port)),
            None => None,
        };
        let mut effects = Effects::counted();
        let others = preempted.iter().filter(|other| **other != port);
        effects.attentions.extend(others.map(|other| (*other, Sense::REGISTRATIONS_PREEMPTED)));
        // A port that preempts a reservation holds the next one, and stays registered.
        let stays = |other: PortName| established.is_some() && other == port;
        self.remove(|other| is_meant(other.key) && !stays(other.port));
        if let (Some(old), Some(new)) = (replaced, established) {
            self.reservation = established;
            if old.reservation_type != new.reservation_type {
                effects.add_attentions(self, port, Sense::RESERVATIONS_RELEASED);
            }
        }
        if request.action == ServiceAction::PreemptAndAbort {
            effects.aborted = preempted;
        }
        Ok(effects)
    }

    fn register_and_move(
        &mut self,
        ports: Ports<'_>,
        request: &Request,
    ) -> Result<Effects, Refusal> {
        let held = self.reservation.ok_or(NOTHING_TO_MOVE)?;
        // If all registrants hold the reservation, none of them can move it.
        if held.holder != Some(ports.own) {
            return Err(Refusal::Conflict);
        }
        request.bits?;
        let key = request.action_key.ok_or(NO_ACTION_KEY)?;
        let destination = request.destination?;
        // An unknown port could never release the reservation.
        let is_known = ports.attached.contains(&destination) || self.key_of(destination).is_some();
        if destination == ports.own || !is_known {
            return Err(NO_DESTINATION.into());
        }
        self.set_key(destination, key)?;
        self.reservation = Some(Reservation { holder: Some(destination), ..held });
        if request.unregisters {
            self.remove(|registration| registration.port == ports.own);
        }
        self.aptpl = request.aptpl;
        Ok(Effects::counted())
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::super::registry::{Key, ReservationType};
    use super::*;

    /// The holder with key 1, a registrant with key 2, and an unregistered port.
    const PORTS: [PortName; 3] = [PortName([0xa; 8]), PortName([0xb; 8]), PortName([0xc; 8])];
    const STRANGER: PortName = PortName([0xd; 8]);

    fn name(port: PortName) -> char {
        "abc".chars().nth(PORTS.iter().position(|other| *other == port).unwrap()).unwrap()
    }

    fn request(action: ServiceAction, key: u64, action_key: u64, code: u8) -> Request {
        Request {
            action,
            scope: Ok(()),
            reservation_type: ReservationType::from_code(code).ok_or(Sense::in_cdb(2, Some(3))),
            key: Key::new(key),
            action_key: Key::new(action_key),
            bits: Ok(()),
            aptpl: false,
            unregisters: false,
            destination: Ok(PORTS[2]),
        }
    }

    fn registry(held: Option<u8>) -> Registry {
        let mut registry = Registry::default();
        registry.set_key(PORTS[0], Key::new(1).unwrap()).unwrap();
        registry.set_key(PORTS[1], Key::new(2).unwrap()).unwrap();
        let held = held.map(|code| ReservationType::from_code(code).unwrap());
        registry.reservation = held.map(|held| Reservation::new(held, PORTS[0]));
        registry
    }

    fn perform(
        registry: &mut Registry,
        port: PortName,
        request: &Request,
    ) -> Result<Effects, Refusal> {
        registry.perform(Ports { own: port, attached: &PORTS }, request)
    }

    /// The outcome of a command: a status, or the registrations with keys, the reservation, the
    /// unit attentions, and the ports with aborted commands.
    fn describe(result: Result<Effects, Refusal>, registry: &Registry) -> String {
        let effects = match result {
            Ok(effects) => effects,
            Err(Refusal::Conflict) => return "conflict".to_owned(),
            Err(Refusal::Check(sense)) => return format!("{:02x?}", sense.code),
            Err(Refusal::NotSaved(error)) => panic!("{error}"),
        };
        let mut registrations = registry.registrations().to_vec();
        registrations.sort_by_key(|registration| registration.port);
        let registrations: Vec<String> = registrations
            .iter()
            .map(|registration| format!("{}{}", name(registration.port), registration.key))
            .collect();
        let mut text = registrations.join(" ");
        if let Some(held) = registry.reservation {
            let holder = held.holder.map_or("all".to_owned(), |holder| name(holder).to_string());
            write!(text, ", {} by {holder}", held.reservation_type.code()).unwrap();
        }
        for (port, sense) in effects.attentions {
            write!(text, "; {} {:02x?}", name(port), sense.code).unwrap();
        }
        if !effects.aborted.is_empty() {
            let aborted: String = effects.aborted.into_iter().map(name).collect();
            write!(text, "; abort {aborted}").unwrap();
        }
        text
    }

    /// Sends a command of each of the ports with its right key, to a disk with a reservation of
    /// each type. `expected` has rows for no reservation, for the types of one holder, the
    /// registrants only and the all registrants types. There, T is the type of the reservation,
    /// and N that of the command, which is T if `is_same`, and 1 without a reservation.
    fn check(sent: &Request, is_same: bool, expected: [[&str; 3]; 4]) {
        let [none, one, only, all] = expected;
        for (held, row) in [
            (None, none),
            (Some(1), one),
            (Some(3), one),
            (Some(5), only),
            (Some(6), only),
            (Some(7), all),
            (Some(8), all),
        ] {
            let code = match held {
                Some(held) if is_same => held,
                Some(1) => 3,
                _ => 1,
            };
            for ((port, key), expected) in PORTS.into_iter().zip([1, 2, 0]).zip(row) {
                let mut registry = registry(held);
                let reservation_type = ReservationType::from_code(code).ok_or(Sense::NONE);
                let sent = Request { key: Key::new(key), reservation_type, ..*sent };
                let result = perform(&mut registry, port, &sent);
                let expected = expected
                    .replace(", T", &format!(", {}", held.unwrap_or(0)))
                    .replace(", N", &format!(", {code}"))
                    .replace("2a03", "[2a, 03]")
                    .replace("2a04", "[2a, 04]")
                    .replace("2a05", "[2a, 05]");
                let found = describe(result, &registry);
                assert_eq!(found, expected, "{sent:?} of {} with {held:?}", name(port));
            }
        }
    }

    const C: &str = "conflict";
    const ALL_CONFLICT: [&str; 3] = [C; 3];
    const IN_LIST: &str = "[26, 00]";
    const IN_CDB: &str = "[24, 00]";
    const INVALID_RELEASE: &str = "[26, 04]";

    #[test]
    fn reserve() {
        let sent = request(ServiceAction::Reserve, 0, 7, 1);
        let none = ["a1 b2, N by a", "a1 b2, N by b", C];
        let one = ["a1 b2, T by a", C, C];
        check(&sent, true, [none, one, one, ["a1 b2, T by all", "a1 b2, T by all", C]]);
        check(&sent, false, [none, ALL_CONFLICT, ALL_CONFLICT, ALL_CONFLICT]);
        for code in [0, 2, 4, 9] {
            let refused = |held| {
                let mut registry = registry(held);
                let sent = request(ServiceAction::Reserve, 1, 0, code);
                describe(perform(&mut registry, PORTS[0], &sent), &registry)
            };
            assert_eq!([refused(None).as_str(), &refused(Some(1))], [IN_CDB, C]);
        }
    }

    #[test]
    fn all_registrants_hold_a_reservation_that_one_of_them_made() {
        for code in [7, 8] {
            let mut registry = registry(None);
            let sent = request(ServiceAction::Reserve, 2, 0, code);
            perform(&mut registry, PORTS[1], &sent).unwrap();
            assert_eq!(PORTS.map(|port| registry.is_holder(port)), [true, true, false]);
        }
    }

    #[test]
    fn release() {
        let sent = request(ServiceAction::Release, 0, 7, 1);
        let none = ["a1 b2", "a1 b2", C];
        let all = ["a1 b2; b 2a04", "a1 b2; a 2a04", C];
        let one = ["a1 b2", "a1 b2, T by a", C];
        check(&sent, true, [none, one, ["a1 b2; b 2a04", one[1], C], all]);
        let other = [INVALID_RELEASE, "a1 b2, T by a", C];
        check(&sent, false, [none, other, other, [INVALID_RELEASE, INVALID_RELEASE, C]]);
        let scope = Err(Sense::in_cdb(2, Some(7)));
        let sent = Request { scope, ..sent };
        let none = [IN_CDB, IN_CDB, C];
        let other = [INVALID_RELEASE, IN_CDB, C];
        check(&sent, true, [none, other, other, [INVALID_RELEASE, INVALID_RELEASE, C]]);
    }

    #[test]
    fn clear() {
        let row = ["; b 2a03", "; a 2a03", C];
        check(&request(ServiceAction::Clear, 0, 7, 1), false, [row; 4]);
    }

    #[test]
    fn register() {
        for action in [ServiceAction::Register, ServiceAction::RegisterAndIgnoreExistingKey] {
            let one = ["a9 b2, T by a", "a1 b9, T by a", "a1 b2 c9, T by a"];
            let all = ["a9 b2, T by all", "a1 b9, T by all", "a1 b2 c9, T by all"];
            let none = ["a9 b2", "a1 b9", "a1 b2 c9"];
            check(&request(action, 0, 9, 1), false, [none, one, one, all]);
            let one = ["b2", "a1, T by a", "a1 b2, T by a"];
            let only = ["b2; b 2a04", one[1], one[2]];
            let all = ["b2, T by all", "a1, T by all", "a1 b2, T by all"];
            check(&request(action, 0, 0, 1), false, [["b2", "a1", "a1 b2"], one, only, all]);
        }
    }

    #[test]
    fn preempt() {
        let preempt = |action_key| request(ServiceAction::Preempt, 0, action_key, 1);
        let none = ["b2", "b2; a 2a05", C];
        let one = ["a1 b2, T by a", "b2, T by b; a 2a05", C];
        let all = ["b2, T by all", "b2, T by all; a 2a05", C];
        check(&preempt(1), true, [none, one, one, all]);
        let one = ["a1 b2, N by a; b 2a04", "b2, N by b; a 2a05", C];
        check(&preempt(1), false, [none, one, one, all]);
        let none = ["a1; b 2a05", "a1", C];
        let one = ["a1, T by a; b 2a05", "a1, T by a", C];
        let all = ["a1, T by all; b 2a05", "a1, T by all", C];
        for is_same in [true, false] {
            check(&preempt(2), is_same, [none, one, one, all]);
            check(&preempt(7), is_same, [ALL_CONFLICT; 4]);
        }
        let one = [IN_LIST, IN_LIST, C];
        let all = ["a1, T by all; b 2a05", "b2, T by all; a 2a05", C];
        check(&preempt(0), true, [ALL_CONFLICT, one, one, all]);
        let all = ["a1, N by a; b 2a05", "b2, N by b; a 2a05", C];
        check(&preempt(0), false, [ALL_CONFLICT, one, one, all]);
    }

    #[test]
    fn preempt_and_abort() {
        let preempt = |action_key| request(ServiceAction::PreemptAndAbort, 0, action_key, 1);
        let none = ["b2; abort a", "b2; a 2a05; abort a", C];
        let one = ["a1 b2, T by a; abort a", "b2, T by b; a 2a05; abort a", C];
        let all = ["b2, T by all; abort a", "b2, T by all; a 2a05; abort a", C];
        check(&preempt(1), true, [none, one, one, all]);
        let one = [IN_LIST, IN_LIST, C];
        let all = ["a1, T by all; b 2a05; abort ab", "b2, T by all; a 2a05; abort ab", C];
        check(&preempt(0), true, [ALL_CONFLICT, one, one, all]);
    }

    #[test]
    fn preempt_ignores_a_type_it_does_not_need_and_refuses_one_it_does() {
        let sent = request(ServiceAction::Preempt, 2, 1, 4);
        for (held, expected) in [(None, "b2; a [2a, 05]"), (Some(3), IN_CDB)] {
            let mut registry = registry(held);
            let result = perform(&mut registry, PORTS[1], &sent);
            assert_eq!(describe(result, &registry), expected);
        }
    }

    #[test]
    fn the_last_of_all_registrants_takes_the_reservation_with_it() {
        let mut registry = registry(Some(8));
        registry.set_key(PORTS[1], Key::new(1).unwrap()).unwrap();
        let sent = request(ServiceAction::Preempt, 1, 1, 1);
        let result = perform(&mut registry, PORTS[1], &sent);
        assert_eq!(describe(result, &registry), "; a [2a, 05]");
        assert_eq!(registry.reservation, None);
    }

    #[test]
    fn a_preemptor_with_the_key_of_the_holder_stays_registered() {
        let mut registry = registry(Some(6));
        registry.set_key(PORTS[1], Key::new(1).unwrap()).unwrap();
        registry.set_key(PORTS[2], Key::new(3).unwrap()).unwrap();
        let sent = request(ServiceAction::Preempt, 1, 1, 3);
        let result = perform(&mut registry, PORTS[1], &sent);
        assert_eq!(describe(result, &registry), "b1 c3, 3 by b; a [2a, 05]; c [2a, 04]");
    }

    #[test]
    fn register_and_move() {
        let sent = request(ServiceAction::RegisterAndMove, 0, 9, 4);
        let none = [IN_CDB, IN_CDB, C];
        let moved = |expected| [none, [expected, C, C], [expected, C, C], ALL_CONFLICT];
        check(&sent, false, moved("a1 b2 c9, T by c"));
        check(&Request { unregisters: true, ..sent }, false, moved("b2 c9, T by c"));
        let to = |port| Request { destination: Ok(port), ..sent };
        check(&to(PORTS[1]), false, moved("a1 b9, T by b"));
        check(&to(PORTS[0]), false, moved(IN_LIST));
        check(&to(STRANGER), false, moved(IN_LIST));
        check(&request(ServiceAction::RegisterAndMove, 0, 0, 1), false, moved(IN_LIST));
        let away = Request { destination: Err(Sense::in_list(24, Some(3))), ..sent };
        check(&away, false, moved(IN_LIST));
        // A registered port is known without being attached.
        let mut registry = registry(Some(3));
        let sent = Request { key: Key::new(1), ..to(PORTS[1]) };
        let ports = Ports { own: PORTS[0], attached: &PORTS[..1] };
        registry.perform(ports, &sent).unwrap();
        assert!(registry.is_holder(PORTS[1]));
    }

    #[test]
    fn a_wrong_key_is_a_conflict_before_any_other_fault() {
        use ServiceAction as Action;
        for action in [
            Action::Register,
            Action::Reserve,
            Action::Release,
            Action::Clear,
            Action::Preempt,
            Action::PreemptAndAbort,
            Action::RegisterAndMove,
        ] {
            for (port, key) in [(0, 0), (0, 2), (1, 1), (2, 1), (2, 7)] {
                for held in [None, Some(3), Some(5), Some(7)] {
                    let mut registry = registry(held);
                    let bits = Err(Sense::in_list(20, Some(3)));
                    let sent = Request { bits, ..request(action, key, 1, 4) };
                    let result = perform(&mut registry, PORTS[port], &sent);
                    assert_eq!(result, Err(Refusal::Conflict), "{sent:?} of {port}");
                }
            }
        }
    }

    #[test]
    fn bits_that_are_not_supported_are_refused() {
        for action in [ServiceAction::Register, ServiceAction::RegisterAndIgnoreExistingKey] {
            let bits = Err(Sense::in_list(20, Some(3)));
            for (port, key) in PORTS.into_iter().zip([1, 2, 0]) {
                let sent = Request { bits, ..request(action, key, 9, 1) };
                let result = perform(&mut registry(None), port, &sent);
                assert_eq!(result, Err(Refusal::Check(Sense::in_list(20, Some(3)))));
            }
        }
    }

    #[test]
    fn a_registration_too_many_is_refused() {
        let mut registry = registry(Some(1));
        for number in 0.. {
            let port = PortName(u64::to_be_bytes(number));
            if registry.set_key(port, Key::MAX).is_err() {
                break;
            }
        }
        let register = request(ServiceAction::Register, 0, 9, 1);
        let sent_to_move = request(ServiceAction::RegisterAndMove, 1, 9, 1);
        for (port, sent) in [(PORTS[2], register), (PORTS[0], sent_to_move)] {
            let result = perform(&mut registry.clone(), port, &sent);
            assert_eq!(result, Err(Refusal::Check(Sense::TOO_MANY_REGISTRATIONS)));
        }
    }

    #[test]
    fn the_last_registration_decides_persistence() {
        use ServiceAction as Action;
        for (action, port, key, action_key, decides) in [
            (Action::Register, 0, 1, 1, true),
            (Action::Register, 0, 1, 0, true),
            (Action::Register, 2, 0, 0, false),
            (Action::RegisterAndIgnoreExistingKey, 2, 0, 9, true),
            (Action::RegisterAndMove, 0, 1, 9, true),
            (Action::Release, 0, 1, 0, false),
            (Action::Clear, 0, 1, 0, false),
            (Action::Preempt, 0, 1, 2, false),
        ] {
            for aptpl in [false, true] {
                let mut registry = registry(Some(3));
                registry.aptpl = !aptpl;
                let sent = Request { aptpl, ..request(action, key, action_key, 3) };
                perform(&mut registry, PORTS[port], &sent).unwrap();
                assert_eq!(registry.aptpl, if decides { aptpl } else { !aptpl }, "{sent:?}");
            }
        }
    }

    #[test]
    fn the_generation_counts_changes_of_registrations() {
        use ServiceAction as Action;
        for (action, port, key, action_key, counts) in [
            (Action::Register, 0, 1, 1, true),
            (Action::Register, 0, 1, 0, true),
            (Action::Register, 2, 0, 0, false),
            (Action::RegisterAndIgnoreExistingKey, 2, 7, 9, true),
            (Action::RegisterAndMove, 0, 1, 9, true),
            (Action::Reserve, 0, 1, 0, false),
            (Action::Release, 0, 1, 0, false),
            (Action::Clear, 0, 1, 0, true),
            (Action::Preempt, 0, 1, 2, true),
            (Action::PreemptAndAbort, 0, 1, 1, true),
        ] {
            let sent = request(action, key, action_key, 3);
            let effects = perform(&mut registry(Some(3)), PORTS[port], &sent).unwrap();
            assert_eq!(effects.is_counted, counts, "{sent:?}");
        }
    }
}
