//! Leases that are kept alive.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;

use super::convert;
use super::kv::EtcdKv;
use crate::consensus::kv::{KvError, Lease, LeaseId};

/// The pause after a failed keep-alive.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

pub(super) async fn grant_lease(kv: EtcdKv, ttl: Duration) -> Result<Lease, KvError> {
    let seconds = ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0)).max(1);
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
    let mut client = kv.client.lease_client();
    let granted = kv.call("grant a lease", client.grant(seconds, None)).await?;
    let (id, ttl) = (LeaseId(granted.id()), Duration::from_secs(granted.ttl().unsigned_abs()));
    let (dropped, ended) = (CancellationToken::new(), CancellationToken::new());
    tokio::spawn(keep_alive(kv.clone(), id, ttl, dropped.clone(), ended.clone()));
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

/// Keeps a lease alive until its guard is dropped, and reports if it ends before that.
async fn keep_alive(
    kv: EtcdKv,
    id: LeaseId,
    ttl: Duration,
    dropped: CancellationToken,
    ended: CancellationToken,
) {
    let keeping = async {
        let mut until = Instant::now() + ttl;
        loop {
            let session = keep_alive_session(&kv, id, ttl, &mut until);
            match session.await {
                Err(KvError::LeaseNotFound { .. }) => return,
                _ if Instant::now() >= until => return,
                _ => sleep(RETRY_PAUSE).await,
            }
        }
    };
    tokio::select! {
        () = dropped.cancelled() => {}
        () = kv.stop_token.cancelled() => {}
        () = ended.cancelled() => {}
        () = keeping => ended.cancel(),
    }
}

/// Keeps a lease alive over one connection, three times within its TTL; returns when the connection ends.
/// `until` is when the lease expires without another keep-alive.
async fn keep_alive_session(
    kv: &EtcdKv,
    id: LeaseId,
    ttl: Duration,
    until: &mut Instant,
) -> Result<(), KvError> {
    const OPERATION: &str = "keep a lease alive";
    let mut client = kv.client.lease_client();
    let sent = Instant::now();
    let opening = kv.call(OPERATION, async { client.keep_alive(id.0).await });
    let Ok(opened) = timeout_at(*until, opening).await else { return Ok(()) };
    let (mut keeper, mut answers) = opened.map_err(lease_not_found)?;
    *until = sent + ttl;
    loop {
        sleep(ttl / 3).await;
        let sent = Instant::now();
        keeper.keep_alive().await.map_err(|error| convert::kv_error(OPERATION, error))?;
        let Ok(answer) = timeout_at(*until, answers.message()).await else { return Ok(()) };
        match answer.map_err(|error| convert::kv_error(OPERATION, error))? {
            None => return Ok(()),
            Some(answer) if answer.ttl() <= 0 => return Err(KvError::LeaseNotFound { lease: id }),
            Some(_) => *until = sent + ttl,
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
