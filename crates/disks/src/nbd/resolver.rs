//! The addresses of machines, from a resolver that may take long, or never answer.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Condvar};
use std::time::Instant;

use blockio::executor::{Lock, start_thread};

/// The resolver's answer for a name.
type Answer = Result<Vec<SocketAddr>, String>;

/// Asks the resolver, for as long as that takes.
type Ask = fn(&str, u16) -> io::Result<Vec<SocketAddr>>;

/// Look-ups of names. Nothing ends a thread in the resolver, so each name has at most one: further
/// callers wait for its answer.
pub(super) struct Resolver {
    ask: Ask,
    lookups: Lock<BTreeMap<(String, u16), Arc<Lookup>>>,
}

/// The look-ups of all disks.
pub(super) static RESOLVER: Resolver =
    Resolver::new(|host, port| Ok((host, port).to_socket_addrs()?.collect()));

#[derive(Default)]
struct Lookup {
    answer: Lock<Option<Answer>>,
    is_there: Condvar,
}

impl Resolver {
    const fn new(ask: Ask) -> Self {
        Self { ask, lookups: Lock::new(BTreeMap::new()) }
    }

    /// Finds the addresses of a machine.
    ///
    /// # Errors
    ///
    /// The reason why it is not found, and advice.
    pub(super) fn find(&'static self, host: &str, port: u16, until: Instant) -> Answer {
        if let Ok(address) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(address, port)]);
        }
        let lookup = self.start_lookup(host, port)?;
        lookup.wait(until).unwrap_or_else(|| {
            Err(format!(
                "cannot resolve {host}: no name server answers; use its address, or repair the \
                 resolver"
            ))
        })
    }

    /// Starts a thread that looks a name up, unless there is one.
    fn start_lookup(&'static self, host: &str, port: u16) -> Result<Arc<Lookup>, String> {
        let mut all = self.lookups.lock();
        let key = (host.to_owned(), port);
        if let Some(lookup) = all.get(&key) {
            return Ok(Arc::clone(lookup));
        }
        let lookup = Arc::<Lookup>::default();
        let (found, name) = (Arc::clone(&lookup), key.clone());
        let work = move || {
            let (host, port) = &name;
            let answer = (self.ask)(host, *port).map_err(|error| {
                format!("cannot resolve {host}: {error}; check the name of the server")
            });
            // Later callers start a new look-up.
            self.lookups.lock().remove(&name);
            found.finish(answer);
        };
        let started = start_thread("nbd-resolve", work);
        started
            .map_err(|error| format!("cannot start the thread that resolves {host}: {error}"))?;
        all.insert(key, Arc::clone(&lookup));
        Ok(lookup)
    }
}

impl Lookup {
    fn finish(&self, answer: Answer) {
        *self.answer.lock() = Some(answer);
        self.is_there.notify_all();
    }

    /// Waits for the answer; `None` if there is none at `until`.
    fn wait(&self, until: Instant) -> Option<Answer> {
        let left = until.saturating_duration_since(Instant::now());
        let is_missing = |answer: &mut Option<Answer>| answer.is_none();
        self.answer.wait_timeout_while(&self.is_there, left, is_missing).clone()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_name_without_an_address_is_an_error() {
        let found = RESOLVER.find("127.0.0.1", 7, Instant::now() + PATIENCE).unwrap();
        assert_eq!(found, ["127.0.0.1:7".parse().unwrap()]);
        let error = RESOLVER.find("no host", 7, Instant::now() + PATIENCE).unwrap_err();
        assert!(error.contains("cannot resolve no host"), "{error}");
    }

    static ASKED: AtomicUsize = AtomicUsize::new(0);
    static ANSWERS: (Lock<bool>, Condvar) = (Lock::new(false), Condvar::new());

    /// A resolver that hangs until the test releases it.
    fn hang(_: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        ASKED.fetch_add(1, Ordering::Relaxed);
        drop(ANSWERS.0.wait_while(&ANSWERS.1, |answers| !*answers));
        Ok(vec![SocketAddr::new([127, 0, 0, 1].into(), port)])
    }

    #[test]
    fn lookups_of_one_name_share_a_thread() {
        static HANGING: Resolver = Resolver::new(hang);
        for _ in 0..3 {
            let error = HANGING.find("host", 7, Instant::now()).unwrap_err();
            assert!(error.contains("no name server answers"), "{error}");
        }
        let waiting = thread::spawn(|| HANGING.find("host", 7, Instant::now() + PATIENCE));
        let other = thread::spawn(|| HANGING.find("host", 8, Instant::now() + PATIENCE));
        // A waiting caller has a handle, and so do the list and the thread.
        let handles = || {
            let lookup = HANGING.lookups.lock();
            lookup.get(&("host".to_owned(), 7)).map_or(0, Arc::strong_count)
        };
        while handles() < 3 || ASKED.load(Ordering::Relaxed) < 2 {
            thread::yield_now();
        }
        *ANSWERS.0.lock() = true;
        ANSWERS.1.notify_all();
        for (found, port) in [(waiting, 7), (other, 8)] {
            assert_eq!(found.join().unwrap().unwrap()[0].port(), port);
        }
        assert_eq!(ASKED.load(Ordering::Relaxed), 2, "each has asked");
        // The next caller starts a new look-up.
        HANGING.find("host", 7, Instant::now() + PATIENCE).unwrap();
        assert_eq!(ASKED.load(Ordering::Relaxed), 3);
    }
}
