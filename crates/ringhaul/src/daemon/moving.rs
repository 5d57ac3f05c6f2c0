//! The state of a guest that moves to another host.

use anyhow::Context;
use device::MovedState;
use serde_json::Value;

use super::Daemon;
use crate::control::guest_turns::TurnError;
use crate::spec::command::{CommandError, Reply};

impl Daemon {
    /// Returns the state that the units of an export had when their guest stopped.
    pub(super) fn save_state(&self, export: String) -> Result<Reply, CommandError> {
        let turns = self.control.guest_turns(export.clone(), false)?;
        let saving = || format!("cannot save the state of {export}");
        let state = turns
            .save()
            .map_err(|error| CommandError::NotNow(anyhow::Error::new(error).context(saving())))?;
        Ok(Reply::State(serde_json::to_value(state).with_context(saving)?))
    }

    /// Has the next guest of an export continue with the state that it had on another host; `null`
    /// drops a loaded state.
    pub(super) fn load_state(&self, export: String, state: &Value) -> Result<Reply, CommandError> {
        let turns = self.control.guest_turns(export.clone(), true)?;
        let loading = || format!("cannot load the state of a guest into {export}");
        if state.is_null() {
            turns.forget().map_err(|_| CommandError::HandingOver)?;
            tracing::info!(export, "the loaded state is dropped");
            return Ok(Reply::Done);
        }
        let state = MovedState::parse(state).with_context(loading);
        let loaded = turns.load(state.map_err(CommandError::Invalid)?);
        loaded.with_context(loading).map_err(|error| match error.downcast_ref() {
            Some(TurnError::Running) => CommandError::NotNow(error),
            Some(TurnError::HandingOver) => CommandError::HandingOver,
            _ => CommandError::Invalid(error),
        })?;
        tracing::info!(export, "the next guest continues with the state that is loaded");
        Ok(Reply::Done)
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use blockio::{DiskOptions, DiskSource};
    use clap::{Args, FromArgMatches};
    use serde_json::json;
    use vhost_user::RunLock;

    use super::*;
    use crate::daemon::Shutdown;
    use crate::options::ServeArgs;
    use crate::socket::inherited::InheritedSockets;
    use crate::spec::UnitPlace;
    use crate::spec::command::{Command, NewSize};

    const FIRST: UnitPlace = UnitPlace { target: 0, lun: 0 };
    const SECOND: UnitPlace = UnitPlace { target: 0, lun: 1 };

    /// A daemon with a unit that is locked for the turns of guests alone.
    struct Scene {
        folder: tempfile::TempDir,
        daemon: Daemon,
        _ending: Shutdown,
    }

    impl Scene {
        fn new() -> Self {
            let serve = ServeArgs::augment_args(clap::Command::new("serve"));
            let args = serve.get_matches_from(["serve", "--engine", "threads"]);
            let args = ServeArgs::from_arg_matches(&args).unwrap();
            let (daemon, _ending) = Daemon::start(args, InheritedSockets::default()).unwrap();
            let scene = Self { folder: tempfile::tempdir().unwrap(), daemon, _ending };
            for name in ["first", "second"] {
                std::fs::write(scene.path(name), [0; 4096]).unwrap();
            }
            let unit = json!({ "lun": 0, "disk": { "file": scene.path("first") } });
            let export = json!({
                "name": "vm", "endpoint": { "path": scene.path("vm") }, "late-lock": true,
                "device": { "scsi": [unit] },
            });
            let export = serde_json::from_value(export).unwrap();
            scene.handle(Command::Add(vec![export])).unwrap();
            scene
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn handle(&self, command: Command) -> Result<Reply, CommandError> {
            self.daemon.handle(command)
        }

        fn add_second(&self, reservations: &str) -> Result<Reply, CommandError> {
            let unit = json!({
                "lun": 1, "disk": { "file": self.path("second") },
                "settings": { "reservations": self.path(reservations) },
            });
            let unit = serde_json::from_value(unit).unwrap();
            self.handle(Command::AddUnit("vm".to_owned(), Box::new(unit)))
        }

        /// Returns true if another program can lock this disk.
        fn is_free(&self, name: &str) -> bool {
            let options = DiskOptions { at_once: true, ..DiskOptions::default() };
            DiskSource::file(&self.path(name), &options).is_ok()
        }
    }

    /// Programs decide by the kind of the error whether to try again.
    #[test]
    fn a_turn_decides_which_commands_are_refused() {
        let scene = Scene::new();
        let turns = scene.daemon.control.guest_turns("vm".to_owned(), false).unwrap();
        let resize = || {
            let size = NewSize { size_bytes: Some(8192), shrink: false };
            scene.handle(Command::Resize("vm".to_owned(), Some(FIRST), size))
        };
        let save = || scene.handle(Command::SaveState("vm".to_owned()));
        let load = |state: &Value| {
            scene.handle(Command::LoadState("vm".to_owned(), Box::new(state.clone())))
        };
        assert!(matches!(resize(), Err(CommandError::Invalid(_))), "another host may use it");
        assert!(matches!(save(), Err(CommandError::NotNow(_))), "there was no guest");
        turns.device().set_features(1 << 32).unwrap();
        turns.take(1).unwrap();
        assert!(matches!(resize(), Ok(Reply::Resized(8192))));
        assert!(matches!(save(), Err(CommandError::NotNow(_))), "the guest runs");
        turns.release(1).unwrap();
        let Ok(Reply::State(state)) = save() else { panic!("there is no state") };
        assert!(matches!(load(&json!({})), Err(CommandError::Invalid(_))));
        assert!(matches!(load(&state), Ok(Reply::Done)));
        assert!(matches!(load(&Value::Null), Ok(Reply::Done)));
        // The next process has the states of the turn.
        turns.hand_over();
        for state in [&state, &Value::Null] {
            let refused = load(state);
            assert!(matches!(refused, Err(CommandError::HandingOver)), "{refused:?}");
        }
        turns.resume();
        turns.take(2).unwrap();
        assert!(matches!(load(&state), Err(CommandError::NotNow(_))), "the guest runs");
    }

    #[test]
    fn a_new_unit_joins_its_group_of_limits() {
        let scene = Scene::new();
        let limits = json!({ "group": "g", "iops-total": 7 });
        let unit = json!({
            "lun": 1, "disk": { "file": scene.path("second") }, "settings": { "limits": limits },
        });
        let unit = serde_json::from_value(unit).unwrap();
        scene.handle(Command::AddUnit("vm".to_owned(), Box::new(unit))).unwrap();
        let group = |daemon: &Daemon| {
            let mut of_group = serde_json::from_value(json!({ "group": "g" })).unwrap();
            daemon.groups.fill(&mut of_group);
            serde_json::to_value(of_group).unwrap()
        };
        assert_eq!(group(&scene.daemon), limits);
        scene.handle(Command::RemoveUnit("vm".to_owned(), SECOND)).unwrap();
        assert_eq!(group(&scene.daemon), json!({ "group": "g" }), "its last disk has gone");
    }

    /// Other programs may use the disk of a unit that is not there.
    #[test]
    fn the_disk_of_a_unit_that_is_not_added_or_removed_is_free() {
        let scene = Scene::new();
        let turns = scene.daemon.control.guest_turns("vm".to_owned(), false).unwrap();
        turns.take(1).unwrap();
        std::fs::write(scene.path("broken"), "text").unwrap();
        assert!(scene.add_second("broken").is_err());
        assert!(scene.is_free("second"), "it is not added");
        scene.add_second("reservations").unwrap();
        assert!(!scene.is_free("second") && !scene.is_free("first"));
        scene.handle(Command::RemoveUnit("vm".to_owned(), SECOND)).unwrap();
        assert!(scene.is_free("second") && !scene.is_free("first"));
    }
}
