//! Looks after volumes that nobody refers to.

use std::collections::BTreeSet;

use kube::runtime::reflector::ObjectRef;
use nodekeel_supervisor::Backoff;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::apply::{ApplyError, chain};
use crate::controller::World;
use crate::controller::attempts::chance;
use crate::controller::sift::Sweep;
use crate::id::VolumeId;

/// How many signals are taken at once: a list that comes anew may follow another.
const BATCH: usize = 256;

/// Sweeps whenever something tells that there may be something to sweep.
pub(super) async fn run(world: &World, mut signals: UnboundedReceiver<Sweep>) {
    let (mut batch, mut wanted) = (Vec::new(), BTreeSet::new());
    while signals.recv_many(&mut batch, BATCH).await > 0 {
        let (mut all, mut failures) = (false, 0);
        for signal in batch.drain(..) {
            match signal {
                Sweep::All => all = true,
                Sweep::One(id) => drop(wanted.insert(id)),
            }
        }
        while let Err(error) = sweep(world, &mut all, &mut wanted).await {
            failures += 1;
            let backoff: Backoff = world.provisioner.config.backoff;
            let time = backoff.delay(failures, chance());
            tracing::warn!("can't look for unused volumes, will try again in {time:?}: {}", chain(&error));
            tokio::time::sleep(time).await;
        }
    }
}

/// Sweeps what is wanted; what is done is wanted no more.
async fn sweep(world: &World, all: &mut bool, wanted: &mut BTreeSet<VolumeId>) -> Result<(), ApplyError> {
    let applier = &world.provisioner.applier;
    if *all {
        wanted.extend(applier.store.list().await.map_err(ApplyError::Store)?);
        *all = false;
    }
    while let Some(id) = wanted.first().cloned() {
        // Most of them have their object here.
        if world.volumes.get(&ObjectRef::new(id.as_str())).is_none() {
            applier.sweep(&id).await?;
        }
        wanted.remove(&id);
    }
    Ok(())
}
