//! Features, protocol features and the device status.

use super::Connection;
use crate::config;
use crate::message::{F_LOG_ALL, F_PROTOCOL_FEATURES, protocol_feature};
use crate::outcome::{Change, Outcome, Refusal};

/// Features of vhost-user, beside the features of the device.
pub(super) const VHOST_FEATURES: u64 = F_PROTOCOL_FEATURES | F_LOG_ALL;

impl Connection {
    pub(super) fn offered_features(&self) -> u64 {
        self.setup.device.features() | VHOST_FEATURES
    }

    /// The features that the front-end has set.
    pub(crate) fn features(&self) -> u64 {
        let log_all = if self.log_all { F_LOG_ALL } else { 0 };
        let protocol = if self.rings_need_enable { F_PROTOCOL_FEATURES } else { 0 };
        self.setup.device.negotiated().features() | log_all | protocol
    }

    pub(super) fn set_protocol_features(&mut self, features: u64) -> Result<Outcome, Refusal> {
        let unknown = features & !config::protocol_features(&self.setup.device);
        if unknown != 0 {
            let text = format!("the protocol features {unknown:#x} were not offered");
            return Err(Refusal::needing_ack(text));
        }
        let region = protocol_feature::INFLIGHT_SHMFD;
        let base = protocol_feature::GET_VRING_BASE_INFLIGHT;
        for (feature, needed, names) in [
            (base, region, "GET_VRING_BASE_INFLIGHT needs INFLIGHT_SHMFD"),
            (
                protocol_feature::GET_VRING_BASE_SKIP_DRAIN,
                base,
                "GET_VRING_BASE_SKIP_DRAIN needs GET_VRING_BASE_INFLIGHT",
            ),
        ] {
            if features & feature != 0 && features & needed == 0 {
                let text = format!("protocol feature {names}, which the front-end did not select");
                return Err(Refusal::needing_ack(text));
            }
        }
        self.protocol_features = features;
        Ok(Outcome::Done)
    }

    /// Keeps the features that concern the connection.
    pub(super) fn keep_flags(&mut self, features: u64) {
        self.rings_need_enable = features & F_PROTOCOL_FEATURES != 0;
        self.log_all = features & F_LOG_ALL != 0;
        let enables = !self.rings_need_enable;
        self.rings.iter_mut().for_each(|ring| ring.settings.enabled |= enables);
    }

    pub(super) fn set_features(&mut self, features: u64) -> Result<Outcome, Refusal> {
        let unknown = features & !self.offered_features();
        if unknown != 0 {
            let text = format!("the features {unknown:#x} were not offered");
            return Err(Refusal::needing_ack(text));
        }
        if features ^ self.features() == F_LOG_ALL {
            return self.set_log_all(features & F_LOG_ALL != 0);
        }
        Ok(self.begin(Change::Features(features)))
    }

    pub(super) fn set_status(&mut self, status: u64) -> Result<Outcome, Refusal> {
        let status = u8::try_from(status).map_err(|_| {
            Refusal::needing_ack(format!("the device status {status:#x} is out of range"))
        })?;
        if status == 0 {
            // Front-ends also send status 0 to pause their guest. Its driver does not notice, and
            // keeps its `writeback`.
            return Ok(self.begin(Change::Reset { keep_writeback: true }));
        }
        self.status = status;
        Ok(Outcome::Done)
    }
}
