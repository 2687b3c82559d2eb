//! Leases that are kept alive.

use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;

use super::convert;
use super::kv::EtcdKv;
use crate::consensus::kv::{KvError, Lease, LeaseId};

/// The pause after a failed keep-alive: nothing notifies that the next one would succeed.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

pub(super) async fn grant_lease(kv: EtcdKv, ttl: Duration) -> Result<Lease, KvError> {
    let seconds = ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0)).max(1);
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
    let mut client = kv.client.lease_client();
    // The store counts from some time after this.
    let requested_at = Instant::now();
    let granted = kv.call("grant a lease", client.grant(seconds, None)).await?;
    let (id, ttl) = (LeaseId(granted.id()), Duration::from_secs(granted.ttl().unsigned_abs()));
    let (dropped, ended) = (CancellationToken::new(), CancellationToken::new());
    let lease = LeaseTime { ttl, until: requested_at + ttl };
    tokio::spawn(keep_alive(kv.clone(), id, lease, dropped.clone(), ended.clone()));
    let on_revoke = ended.clone();
    let revoke = move || -> std::pin::Pin<Box<dyn Future<Output = Result<(), KvError>> + Send>> {
        Box::pin(async move {
            let mut client = kv.client.lease_client();
            let revoked = kv.call("revoke a lease", client.revoke(id.0)).await;
            on_revoke.cancel();
            revoked.map(drop)
        })
    };
    Ok(Lease::new(id, ttl, dropped, ended, Box::new(revoke)))
}

/// How long a lease is known to exist.
#[derive(Clone, Copy, Debug)]
struct LeaseTime {
    ttl: Duration,
    /// When it expires without another keep-alive, at the earliest: its TTL after the last request that was
    /// answered had been sent.
    until: Instant,
}

impl LeaseTime {
    /// When the next keep-alive is due: three times within the TTL, and never after the lease may have
    /// expired.
    fn next_keep_alive(&self, now: Instant) -> Instant {
        (now + self.ttl / 3).min(self.until)
    }

    fn is_over(&self, now: Instant) -> bool {
        now >= self.until
    }

    /// A keep-alive that was sent at this time has been answered.
    fn extend(&mut self, sent: Instant) {
        self.until = self.until.max(sent + self.ttl);
    }
}

/// Keeps a lease alive until its guard is dropped, and reports if it ends before that: also if the member's run
/// ends, after which nothing keeps it alive.
async fn keep_alive(
    kv: EtcdKv,
    id: LeaseId,
    mut lease: LeaseTime,
    dropped: CancellationToken,
    ended: CancellationToken,
) {
    let keeping = async {
        loop {
            let session = keep_alive_session(&kv, id, &mut lease);
            match session.await {
                Err(KvError::LeaseNotFound { .. }) => return,
                _ if lease.is_over(Instant::now()) => return,
                _ => sleep_until((Instant::now() + RETRY_PAUSE).min(lease.until)).await,
            }
        }
    };
    tokio::select! {
        () = dropped.cancelled() => {}
        () = ended.cancelled() => {}
        () = kv.stop_token.cancelled() => ended.cancel(),
        () = keeping => ended.cancel(),
    }
}

/// Keeps a lease alive over one connection; returns when the connection ends, or the lease may have expired.
async fn keep_alive_session(kv: &EtcdKv, id: LeaseId, lease: &mut LeaseTime) -> Result<(), KvError> {
    const OPERATION: &str = "keep a lease alive";
    let mut client = kv.client.lease_client();
    let sent = Instant::now();
    let opening = kv.call(OPERATION, async { client.keep_alive(id.0).await });
    let Ok(opened) = timeout_at(lease.until, opening).await else { return Ok(()) };
    let (mut keeper, mut answers) = opened.map_err(lease_not_found)?;
    lease.extend(sent);
    loop {
        sleep_until(lease.next_keep_alive(Instant::now())).await;
        // The process may have slept longer.
        if lease.is_over(Instant::now()) {
            return Ok(());
        }
        let sent = Instant::now();
        let asking = async {
            keeper.keep_alive().await?;
            answers.message().await
        };
        let Ok(answer) = timeout_at(lease.until, asking).await else { return Ok(()) };
        match answer.map_err(|error| convert::kv_error(OPERATION, error))? {
            None => return Ok(()),
            Some(answer) if answer.ttl() <= 0 => return Err(KvError::LeaseNotFound { lease: id }),
            Some(_) => lease.extend(sent),
        }
    }
}

/// The client library reports an expired lease by a text that differs from etcd's.
fn lease_not_found(error: KvError) -> KvError {
    let is_lost = |source: &dyn std::error::Error| source.to_string().contains("lease not found");
    match error {
        KvError::Unavailable { source, .. } | KvError::Rejected { source, .. } if is_lost(&*source) => {
            KvError::LeaseNotFound { lease: LeaseId(0) }
        }
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(6);

    #[test]
    fn a_lease_counts_from_before_its_request() {
        let requested = Instant::now();
        let mut lease = LeaseTime { ttl: TTL, until: requested + TTL };
        let later = requested + Duration::from_secs(2);
        lease.extend(later);
        assert_eq!(lease.until, later + TTL);
        lease.extend(requested);
        assert_eq!(lease.until, later + TTL, "an answer that comes late shortens nothing");
    }

    #[test]
    fn a_keep_alive_is_never_due_after_the_lease_may_have_expired() {
        let now = Instant::now();
        let fresh = LeaseTime { ttl: TTL, until: now + TTL };
        assert_eq!(fresh.next_keep_alive(now), now + TTL / 3);
        let late = LeaseTime { ttl: TTL, until: now + Duration::from_secs(1) };
        assert_eq!(late.next_keep_alive(now), late.until);
        assert!(!late.is_over(now) && late.is_over(late.until));
    }
}
