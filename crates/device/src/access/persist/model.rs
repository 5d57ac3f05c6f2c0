//! A small model of persistent reservations, and a test of the real ones against it.

use std::path::Path;

use proptest::prelude::*;

use super::tests::{load, when_free};
use super::*;

/// Ports 0 to 2 are attached, and port 3 is unknown.
const PORTS: [PortName; 4] =
    [PortName([0x31; 8]), PortName([0x32; 8]), PortName([0x33; 8]), PortName([0x34; 8])];

/// The result of a command: GOOD, RESERVATION CONFLICT, or the code of its sense data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Good,
    Conflict,
    Check([u8; 2]),
}

const IN_CDB: Status = Status::Check([0x24, 0]);
const IN_LIST: Status = Status::Check([0x26, 0]);
const INVALID_RELEASE: Status = Status::Check([0x26, 4]);

#[derive(Debug, Clone)]
struct Command {
    from: usize,
    action: u8,
    scope: u8,
    code: u8,
    /// `None` is the right one.
    key: Option<u64>,
    action_key: u64,
    aptpl: bool,
    unregisters: bool,
    to: usize,
}

prop_compose! {
    fn commands()(
        from in 0..3usize,
        action in 0..9u8,
        scope in prop_oneof![9 => Just(0u8), 1 => Just(1)],
        code in 0..10u8,
        key in prop_oneof![4 => Just(None), 1 => (0..4u64).prop_map(Some)],
        action_key in 0..4u64,
        aptpl in any::<bool>(),
        unregisters in any::<bool>(),
        to in 0..4usize,
    ) -> Command {
        Command { from, action, scope, code, key, action_key, aptpl, unregisters, to }
    }
}

#[derive(Debug, Clone, Default)]
struct Model {
    /// Zero: the port is not registered.
    keys: [u64; 4],
    /// Zero: there is no reservation.
    code: u8,
    /// The holder, unless all registrants hold the reservation.
    holder: usize,
    aptpl: bool,
    generation: u32,
}

impl Model {
    fn holds(&self, port: usize) -> bool {
        match self.code {
            0 => false,
            7 | 8 => self.keys[port] != 0,
            _ => self.holder == port,
        }
    }

    /// Conflicts of reads and of writes.
    fn conflicts(&self, port: usize) -> [bool; 2] {
        let is_shared = matches!(self.code, 5..=8) && self.keys[port] != 0;
        let conflicts = self.code != 0 && !is_shared && !self.holds(port);
        [conflicts && matches!(self.code, 3 | 6 | 8), conflicts]
    }

    fn unregister(&mut self, port: usize) {
        self.keys[port] = 0;
        let is_held = match self.code {
            7 | 8 => self.keys != [0; 4],
            _ => self.holder != port,
        };
        if !is_held {
            self.code = 0;
        }
    }

    fn perform(&mut self, command: &Command) -> Status {
        let own = command.from;
        let key = command.key.unwrap_or(self.keys[own]);
        let is_right = key == self.keys[own];
        let is_valid = command.scope == 0 && matches!(command.code, 1 | 3 | 5..=8);
        match command.action {
            8.. => IN_CDB,
            0 if !is_right => Status::Conflict,
            0 | 6 => self.register(command),
            _ if !is_right || key == 0 => Status::Conflict,
            1 if self.code == 0 && is_valid => {
                (self.code, self.holder) = (command.code, own);
                Status::Good
            }
            1 if self.code == 0 => IN_CDB,
            1 if self.holds(own) && is_valid && command.code == self.code => Status::Good,
            1 => Status::Conflict,
            2 if !self.holds(own) => {
                if command.scope == 0 {
                    Status::Good
                } else {
                    IN_CDB
                }
            }
            2 if !is_valid || command.code != self.code => INVALID_RELEASE,
            2 => {
                self.code = 0;
                Status::Good
            }
            3 => {
                (self.keys, self.code) = ([0; 4], 0);
                self.count()
            }
            4 | 5 => self.preempt(command, is_valid),
            7 => self.register_and_move(command),
        }
    }

    fn count(&mut self) -> Status {
        self.generation += 1;
        Status::Good
    }

    fn register(&mut self, command: &Command) -> Status {
        let own = command.from;
        if self.keys[own] == 0 && command.action_key == 0 {
            return Status::Good;
        }
        if command.action_key == 0 {
            self.unregister(own);
        }
        self.keys[own] = command.action_key;
        self.aptpl = command.aptpl;
        self.count()
    }

    fn preempt(&mut self, command: &Command, is_valid: bool) -> Status {
        let (own, key) = (command.from, command.action_key);
        let replaces = match self.code {
            0 => false,
            7 | 8 => key == 0,
            _ if key == 0 => return IN_LIST,
            _ => self.keys[self.holder] == key,
        };
        let is_named = |found: u64| found != 0 && (found == key || (replaces && key == 0));
        let named: Vec<usize> = (0..4).filter(|port| is_named(self.keys[*port])).collect();
        if named.is_empty() {
            return Status::Conflict;
        }
        if replaces && !is_valid {
            return IN_CDB;
        }
        for port in named {
            if !(replaces && port == own) {
                self.unregister(port);
            }
        }
        if replaces {
            (self.code, self.holder) = (command.code, own);
        }
        self.count()
    }

    fn register_and_move(&mut self, command: &Command) -> Status {
        let own = command.from;
        match self.code {
            0 => return IN_CDB,
            7 | 8 => return Status::Conflict,
            _ if self.holder != own => return Status::Conflict,
            _ => {}
        }
        if command.action_key == 0 || command.to == own || command.to == 3 {
            return IN_LIST;
        }
        self.keys[command.to] = command.action_key;
        self.holder = command.to;
        if command.unregisters {
            self.unregister(own);
        }
        self.aptpl = command.aptpl;
        self.count()
    }

    /// The keys, the codes of types, and the names of all registered ports.
    fn registered(&self) -> Vec<(u64, u8, PortName)> {
        let ports = (0..4).filter(|port| self.keys[*port] != 0);
        let code = |port| if self.holds(port) { self.code } else { 0 };
        ports.map(|port| (self.keys[port], code(port), PORTS[port])).collect()
    }
}

fn send(nexus: &Attached, command: &Command, key: u64) -> Result<ReserveEffects, Refusal> {
    let moves = command.action == 7;
    let mut list = vec![0; 24];
    list[..8].copy_from_slice(&key.to_be_bytes());
    list[8..16].copy_from_slice(&command.action_key.to_be_bytes());
    if moves {
        list[17] = u8::from(command.unregisters) << 1 | u8::from(command.aptpl);
        list[19] = 1;
        list[23] = 24;
        list.extend(PORTS[command.to].transport_id());
    } else {
        list[20] = u8::from(command.aptpl);
    }
    let length = if moves { 48 } else { 24 };
    let scope_and_type = command.scope << 4 | command.code;
    let cdb = [0x5f, command.action, scope_and_type, 0, 0, 0, 0, 0, length, 0];
    nexus.reserve_out(&cdb, &list)
}

/// The data of READ FULL STATUS: the generation and the registrations, sorted by port.
fn full_status(reservations: &Reservations) -> (u32, Vec<(u64, u8, PortName)>) {
    let data = reservations.reserve_in(&[0x5e, 3, 0, 0, 0, 0, 0, 255, 255, 0]).unwrap();
    let generation = u32::from_be_bytes(*data.first_chunk().unwrap());
    let (descriptors, rest) = data[8..].as_chunks::<48>();
    assert!(rest.is_empty());
    let mut registered: Vec<_> = descriptors
        .iter()
        .map(|descriptor| {
            let key = u64::from_be_bytes(*descriptor.first_chunk().unwrap());
            (key, descriptor[13], PortName(descriptor[28..36].try_into().unwrap()))
        })
        .collect();
    registered.sort_by_key(|(_, _, port)| *port);
    (generation, registered)
}

fn status(result: &Result<ReserveEffects, Refusal>) -> Status {
    match result {
        Ok(_) => Status::Good,
        Err(Refusal::Conflict) => Status::Conflict,
        Err(Refusal::Check(sense)) => Status::Check(sense.code),
        Err(Refusal::NotSaved(error)) => panic!("{error}"),
    }
}

/// Checks that a restart finds the state of the model.
fn check_restart(path: &Path, model: &Model) {
    let found = when_free(|| load(path.to_owned()));
    let expected = if model.aptpl { model.registered() } else { Vec::new() };
    assert_eq!(full_status(&found), (0, expected));
    assert_eq!(path.exists(), model.aptpl);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn reservations_are_as_the_model_has_them(
        commands in prop::collection::vec(commands(), 1..40),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.reservations");
        let reservations = load(path.clone()).unwrap();
        let nexuses = [0, 1, 2].map(|port| reservations.attach(PORTS[port]).unwrap());
        let mut model = Model::default();
        for command in &commands {
            let key = command.key.unwrap_or(model.keys[command.from]);
            let result = send(&nexuses[command.from], command, key);
            let expected = model.perform(command);
            prop_assert_eq!(status(&result), expected, "{:?}", command);
            prop_assert_eq!(full_status(&reservations), (model.generation, model.registered()));
            for (port, nexus) in nexuses.iter().enumerate() {
                let found = [CommandClass::Reads, CommandClass::Writes];
                let found = found.map(|class| nexus.conflicts(class));
                prop_assert_eq!(found, model.conflicts(port), "port {}, {:?}", port, command);
            }
            if let Ok(done) = result {
                let own = nexuses[command.from].nexus();
                prop_assert!(done.attentions.iter().all(|(nexus, _)| *nexus != own));
            }
        }
        drop((nexuses, reservations));
        check_restart(&path, &model);
    }
}
