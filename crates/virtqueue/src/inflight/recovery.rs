//! The state of a queue that the previous process has left in its account.

/// The state that the previous process has left in an account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// No state: the account is new.
    New,
    /// The account is of this ring, and its requests are executed again.
    Known {
        /// The number of requests that had been taken and not answered.
        requests: u16,
    },
    /// The account is of an earlier ring, which the driver has replaced. It was reset.
    Stale {
        /// The number of requests of that ring that had been taken and not answered.
        requests: u16,
    },
}

impl Recovery {
    /// Returns a description for the log, or `None` if no requests were left.
    #[must_use]
    pub fn describe(self) -> Option<String> {
        let count = |requests| match requests {
            1 => "1 request".to_owned(),
            _ => format!("{requests} requests"),
        };
        match self {
            Self::New | Self::Known { requests: 0 } | Self::Stale { requests: 0 } => None,
            Self::Known { requests } => {
                Some(format!("{} of an earlier process are repeated", count(requests)))
            }
            Self::Stale { requests } => {
                let requests = count(requests);
                Some(format!(
                    "{requests} of an earlier process are dropped, because the driver has set up \
                     the ring again"
                ))
            }
        }
    }
}
