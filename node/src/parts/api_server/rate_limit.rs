//! How often something may happen that anyone who reaches the port can bring about.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// A number at once, and then one in each period.
#[derive(Debug)]
pub(super) struct RateLimit {
    period: Duration,
    burst: u32,
    /// How many may come at once.
    tokens: u32,
    /// The time up to which tokens were added.
    filled: Instant,
    refused: u64,
}

/// Calls of the strangers at one source are admitted this often at most, and those of all are recorded: anyone who reaches the port
/// can make them, and each is a read of the cluster's store.
const STRANGERS_PERIOD: Duration = Duration::from_millis(50);
/// Those that are admitted at once after a quiet time.
const STRANGERS_BURST: u32 = 100;
/// The same of all sources together.
const ALL_STRANGERS_PERIOD: Duration = Duration::from_millis(10);
const ALL_STRANGERS_BURST: u32 = 500;
/// The sources with a limit of their own. More are bounded together.
const MAX_SOURCES: usize = 256;

impl RateLimit {
    pub(super) fn of_strangers(now: Instant) -> Self {
        Self::new(STRANGERS_PERIOD, STRANGERS_BURST, now)
    }

    pub(super) fn new(period: Duration, burst: u32, now: Instant) -> Self {
        Self { period, burst, tokens: burst, filled: now, refused: 0 }
    }

    fn fill(&mut self, now: Instant) {
        let periods = now.saturating_duration_since(self.filled).as_nanos() / self.period.as_nanos();
        let periods = u32::try_from(periods).unwrap_or(u32::MAX);
        self.tokens = self.tokens.saturating_add(periods).min(self.burst);
        self.filled += self.period * periods;
    }

    /// Whether it was quiet so long that the limit is as a new one.
    fn is_full(&mut self, now: Instant) -> bool {
        self.fill(now);
        self.tokens == self.burst
    }

    /// If this one may be: the number of those before it that might not.
    pub(super) fn next(&mut self, now: Instant) -> Option<u64> {
        self.fill(now);
        if self.tokens == 0 {
            self.refused += 1;
            return None;
        }
        self.tokens -= 1;
        Some(std::mem::take(&mut self.refused))
    }
}

/// The limit of the strangers' calls: one source leaves room for the others.
#[derive(Debug)]
pub(super) struct StrangerCalls {
    all: RateLimit,
    sources: BTreeMap<IpAddr, RateLimit>,
}

impl StrangerCalls {
    pub(super) fn new(now: Instant) -> Self {
        Self { all: RateLimit::new(ALL_STRANGERS_PERIOD, ALL_STRANGERS_BURST, now), sources: BTreeMap::new() }
    }

    /// Whether a call from this address may be.
    pub(super) fn admits(&mut self, address: IpAddr, now: Instant) -> bool {
        let source = source_of(address);
        if self.sources.len() >= MAX_SOURCES {
            self.sources.retain(|_, limit| !limit.is_full(now));
        }
        let has_room = self.sources.len() < MAX_SOURCES;
        let of_source = match self.sources.get_mut(&source) {
            Some(limit) => limit.next(now).is_some(),
            None if has_room => {
                let limit = self.sources.entry(source).or_insert_with(|| RateLimit::of_strangers(now));
                limit.next(now).is_some()
            }
            None => true,
        };
        of_source && self.all.next(now).is_some()
    }
}

/// Who has one address, has all of these: of IPv6 a network of a link.
pub(super) fn source_of(address: IpAddr) -> IpAddr {
    const LINK: u128 = !(u64::MAX as u128);
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & LINK).into(),
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_from_one_source_leaves_room_for_others_and_many_are_bounded_together() {
        let now = Instant::now();
        let mut calls = StrangerCalls::new(now);
        let mut admitted = |address: &str, times: u32| {
            (0..times).filter(|_| calls.admits(address.parse().expect("an address"), now)).count()
        };
        assert_eq!(admitted("192.0.2.1", 1000), 100);
        assert_eq!(admitted("192.0.2.2", 1), 1);
        // A link is one source, and an address of IPv4 the same in IPv6.
        assert_eq!(admitted("2001:db8::1", 1000) + admitted("2001:db8::2", 1000), 100);
        assert_eq!(admitted("::ffff:192.0.2.1", 1000), 0);
        let flood: usize = (0..1000).map(|n| admitted(&format!("198.51.{}.{}", n / 250, n % 250), 1)).sum();
        assert_eq!(flood, 500 - 201);
        assert_eq!(calls.sources.len(), MAX_SOURCES);
        let later = now + Duration::from_secs(60);
        assert!(calls.admits([203, 0, 113, 1].into(), later) && calls.sources.len() == 1);
    }

    #[test]
    fn a_flood_is_counted_and_has_no_effect() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut limit = RateLimit::new(second, 5, start);
        assert_eq!((0..1000).filter(|_| limit.next(start).is_some()).count(), 5);
        let later = start + second;
        assert_eq!(limit.next(later), Some(995));
        assert_eq!(limit.next(later), None);
        assert_eq!(limit.next(later + 3600 * second), Some(1));
        assert_eq!((0..10).filter(|_| limit.next(later + 3600 * second).is_some()).count(), 4);
    }
}
