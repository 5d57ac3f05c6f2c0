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
            turns.forget();
            tracing::info!(export, "the loaded state is dropped");
            return Ok(Reply::StateLoaded);
        }
        let state = MovedState::parse(state).with_context(loading);
        let loaded = turns.load(state.map_err(CommandError::Invalid)?);
        loaded.with_context(loading).map_err(|error| match error.downcast_ref() {
            Some(TurnError::Running) => CommandError::NotNow(error),
            _ => CommandError::Invalid(error),
        })?;
        tracing::info!(export, "the next guest continues with the state that is loaded");
        Ok(Reply::StateLoaded)
    }
}
