//! What is known of the process before when a queue starts.

/// What an account says about the process before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// Nothing: it is new.
    New,
    /// The ring is the one that it is about, and so many requests are to be executed again.
    Known {
        /// Requests that had been taken and not answered.
        requests: u16,
    },
    /// It is about another ring, which a driver has set up before, and has been begun anew.
    Stale {
        /// Requests of that ring that had been taken and not answered.
        requests: u16,
    },
}

impl Recovery {
    /// What a log says of it; none when no requests were left.
    #[must_use]
    pub fn describe(self) -> Option<String> {
        let count = |requests| match requests {
            1 => "1 request".to_owned(),
            _ => format!("{requests} requests"),
        };
        match self {
            Self::New | Self::Known { requests: 0 } | Self::Stale { requests: 0 } => None,
            Self::Known { requests } => {
                Some(format!("{} that had been taken before are done again", count(requests)))
            }
            Self::Stale { requests } => {
                let requests = count(requests);
                Some(format!("{requests} of a ring that was set up anew since are forgotten"))
            }
        }
    }
}
