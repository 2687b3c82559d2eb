//! The connections of machines that come to enrol: their keys are in no record, and what they can hold is bounded.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::rate_limit::source_of;
use crate::access::PublicKey;

/// The connections at the same time. A further one closes the oldest of the source that has the most.
const MAX_CONNECTIONS: usize = 64;

/// The longest time of a connection. A node enrols within a second.
const LIFETIME: Duration = Duration::from_secs(15);

/// The open connections of strangers, the oldest first. A key has one: its next one closes the one before.
#[derive(Debug, Default)]
pub(super) struct Strangers {
    open: VecDeque<Open>,
}

#[derive(Debug)]
struct Open {
    key: PublicKey,
    source: IpAddr,
    until: Instant,
    closed: CancellationToken,
    place: Weak<()>,
}

/// A connection of a stranger, until it is dropped.
#[derive(Debug)]
pub(super) struct StrangerPlace {
    pub(super) key: PublicKey,
    /// Canceled when it must be closed.
    pub(super) closed: CancellationToken,
    _place: Arc<()>,
}

impl Strangers {
    /// Adds a connection from this address, whose client has proved this key.
    pub(super) fn connect(&mut self, key: PublicKey, address: IpAddr) -> StrangerPlace {
        let source = source_of(address);
        self.open.retain(|open| {
            if open.key == key {
                open.closed.cancel();
            }
            open.key != key && open.place.strong_count() > 0
        });
        if self.open.len() >= MAX_CONNECTIONS
            && let Some(oldest) = self.oldest_of_most().and_then(|index| self.open.remove(index))
        {
            oldest.closed.cancel();
        }
        let (closed, place) = (CancellationToken::new(), Arc::new(()));
        let until = Instant::now() + LIFETIME;
        self.open.push_back(Open {
            key,
            source,
            until,
            closed: closed.clone(),
            place: Arc::downgrade(&place),
        });
        StrangerPlace { key, closed, _place: place }
    }

    /// The oldest connection of the source that has the most.
    fn oldest_of_most(&self) -> Option<usize> {
        let count = |source| self.open.iter().filter(|open| open.source == source).count();
        let most = self.open.iter().map(|open| count(open.source)).max();
        self.open.iter().position(|open| Some(count(open.source)) == most)
    }

    /// Closes each connection whose time is over, and never returns without one.
    ///
    /// # Cancel safety
    /// It can be dropped and called again.
    pub(super) async fn close_late(&mut self) {
        match self.open.front() {
            Some(oldest) => sleep_until(oldest.until).await,
            None => std::future::pending().await,
        }
        if let Some(oldest) = self.open.pop_front() {
            oldest.closed.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::PrivateKey;

    fn key() -> PublicKey {
        PrivateKey::generate().expect("random numbers").public_key()
    }

    #[tokio::test(start_paused = true)]
    async fn a_stranger_has_one_connection_for_a_time_and_a_flood_closes_its_own() {
        let mut strangers = Strangers::default();
        let (one, other) = (key(), key());
        let at = |last: u8| IpAddr::from([192, 0, 2, last]);
        let first = strangers.connect(one, at(1));
        let of_other = strangers.connect(other, at(2));
        let second = strangers.connect(one, at(1));
        assert!(first.closed.is_cancelled() && !second.closed.is_cancelled());
        // One that is gone has no place.
        drop(first);
        drop(second);
        let flood: Vec<_> = (0..MAX_CONNECTIONS - 1).map(|_| strangers.connect(key(), at(3))).collect();
        assert!(!of_other.closed.is_cancelled() && !flood[0].closed.is_cancelled());
        // It takes no place of another source.
        let last = strangers.connect(key(), at(4));
        assert!(flood[0].closed.is_cancelled() && !of_other.closed.is_cancelled());
        let began = Instant::now();
        strangers.close_late().await;
        assert_eq!(began.elapsed(), LIFETIME);
        assert!(of_other.closed.is_cancelled() && !last.closed.is_cancelled());
    }
}
