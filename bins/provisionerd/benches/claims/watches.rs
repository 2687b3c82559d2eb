//! Watches claims and volumes.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Timeout for expected events, on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(240);

/// The names of bound claims and deleted volumes, with the time of the watch event.
pub(crate) struct ObjectWatches {
    bound: UnboundedReceiver<(String, Instant)>,
    deleted: UnboundedReceiver<(String, Instant)>,
}

impl ObjectWatches {
    pub(crate) fn start(client: &Client) -> Self {
        let ((bound_sender, bound), (deleted_sender, deleted)) = (unbounded_channel(), unbounded_channel());
        tokio::spawn(watch_claims(client.clone(), bound_sender));
        tokio::spawn(watch_volumes(client.clone(), deleted_sender));
        Self { bound, deleted }
    }

    /// Waits until all these claims are bound; returns the time of the last one.
    pub(crate) async fn wait_bound(&mut self, names: HashSet<String>) -> Result<Instant> {
        wait_for_all(&mut self.bound, names).await.context("wait for claims to be bound")
    }

    /// Waits until all these volumes are deleted; returns the time of the last one.
    pub(crate) async fn wait_deleted(&mut self, names: HashSet<String>) -> Result<Instant> {
        wait_for_all(&mut self.deleted, names).await.context("wait for volumes to be deleted")
    }
}

async fn wait_for_all(
    events: &mut UnboundedReceiver<(String, Instant)>,
    mut names: HashSet<String>,
) -> Result<Instant> {
    let wait = async {
        let mut last = Instant::now();
        while !names.is_empty() {
            let (name, time) = events.recv().await.context("the watch is closed")?;
            if names.remove(&name) {
                last = time;
            }
        }
        anyhow::Ok(last)
    };
    let done = tokio::time::timeout(TIMEOUT, wait).await;
    done.unwrap_or_else(|_| Err(anyhow::anyhow!("timed out after {TIMEOUT:?}")))
}

async fn watch_claims(client: Client, sender: UnboundedSender<(String, Instant)>) {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client, "default");
    let mut changes =
        std::pin::pin!(watcher(claims, watcher::Config::default()).default_backoff().applied_objects());
    while let Some(change) = changes.next().await {
        let Ok(claim) = change else { continue };
        let phase = claim.status.and_then(|status| status.phase);
        // The receiver is dropped after the measurement.
        if phase.as_deref() == Some("Bound")
            && sender.send((claim.metadata.name.unwrap_or_default(), Instant::now())).is_err()
        {
            return;
        }
    }
}

async fn watch_volumes(client: Client, sender: UnboundedSender<(String, Instant)>) {
    let volumes: Api<PersistentVolume> = Api::all(client);
    let mut events = std::pin::pin!(watcher(volumes, watcher::Config::default()).default_backoff());
    while let Some(event) = events.next().await {
        if let Ok(Event::Delete(volume)) = event
            && sender.send((volume.metadata.name.unwrap_or_default(), Instant::now())).is_err()
        {
            return;
        }
    }
}
