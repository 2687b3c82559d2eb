//! What becomes of claims and volumes, as it is heard of.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// How long what has to come is waited for, on a machine that does much else.
const PATIENCE: Duration = Duration::from_secs(240);

/// The names of claims that were bound, and of volumes that are gone, with when it was heard.
pub(crate) struct Watches {
    bound: UnboundedReceiver<(String, Instant)>,
    gone: UnboundedReceiver<(String, Instant)>,
}

impl Watches {
    pub(crate) fn start(client: &Client) -> Self {
        let ((tell_bound, bound), (tell_gone, gone)) = (unbounded_channel(), unbounded_channel());
        tokio::spawn(watch_claims(client.clone(), tell_bound));
        tokio::spawn(watch_volumes(client.clone(), tell_gone));
        Self { bound, gone }
    }

    /// Waits until all these claims are bound: when the last one was.
    pub(crate) async fn bound(&mut self, names: HashSet<String>) -> Result<Instant> {
        all(&mut self.bound, names).await.context("wait for claims to be bound")
    }

    /// Waits until all these volumes are gone: when the last one was.
    pub(crate) async fn gone(&mut self, names: HashSet<String>) -> Result<Instant> {
        all(&mut self.gone, names).await.context("wait for volumes to go")
    }
}

async fn all(
    heard: &mut UnboundedReceiver<(String, Instant)>,
    mut names: HashSet<String>,
) -> Result<Instant> {
    let wait = async {
        let mut last = Instant::now();
        while !names.is_empty() {
            let (name, time) = heard.recv().await.context("the watch has ended")?;
            if names.remove(&name) {
                last = time;
            }
        }
        anyhow::Ok(last)
    };
    let done = tokio::time::timeout(PATIENCE, wait).await;
    done.unwrap_or_else(|_| Err(anyhow::anyhow!("it didn't come within {PATIENCE:?}")))
}

async fn watch_claims(client: Client, tell: UnboundedSender<(String, Instant)>) {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client, "default");
    let mut changes =
        std::pin::pin!(watcher(claims, watcher::Config::default()).default_backoff().applied_objects());
    while let Some(change) = changes.next().await {
        let Ok(claim) = change else { continue };
        let phase = claim.status.and_then(|status| status.phase);
        // The receiver goes when all is measured.
        if phase.as_deref() == Some("Bound")
            && tell.send((claim.metadata.name.unwrap_or_default(), Instant::now())).is_err()
        {
            return;
        }
    }
}

async fn watch_volumes(client: Client, tell: UnboundedSender<(String, Instant)>) {
    let volumes: Api<PersistentVolume> = Api::all(client);
    let mut events = std::pin::pin!(watcher(volumes, watcher::Config::default()).default_backoff());
    while let Some(event) = events.next().await {
        if let Ok(Event::Delete(volume)) = event
            && tell.send((volume.metadata.name.unwrap_or_default(), Instant::now())).is_err()
        {
            return;
        }
    }
}
