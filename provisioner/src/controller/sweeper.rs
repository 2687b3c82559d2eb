//! Looks after volumes that nobody refers to.

use std::collections::BTreeSet;

use kube::runtime::reflector::ObjectRef;
use nodekeel_supervisor::Backoff;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{Instant, sleep_until};

use crate::apply::{ApplyError, Owner, Swept};
use crate::chain::chain;
use crate::controller::World;
use crate::controller::attempts::chance;
use crate::controller::sift::Sweep;
use crate::id::VolumeId;
use crate::plan::{VolumeAction, VolumeIgnored, plan_volume};

/// How many signals are taken at once: a list that comes anew may follow another.
const BATCH: usize = 256;

/// What is to be looked at.
#[derive(Debug, Default)]
struct Wanted {
    all: bool,
    ids: BTreeSet<VolumeId>,
}

impl Wanted {
    fn is_empty(&self) -> bool {
        !self.all && self.ids.is_empty()
    }

    fn add(&mut self, other: Self) {
        self.all |= other.all;
        self.ids.extend(other.ids);
    }
}

/// Sweeps whenever something tells that there may be something to sweep.
pub(super) async fn run(world: &World, mut signals: UnboundedReceiver<Sweep>) {
    let mut sweeper = Sweeper { world, orphans: BTreeSet::new(), lost: BTreeSet::new() };
    let (mut batch, mut failed, mut failures) = (Vec::new(), Wanted::default(), 0);
    let mut due = Instant::now();
    loop {
        let mut wanted = Wanted::default();
        tokio::select! {
            count = signals.recv_many(&mut batch, BATCH) => if count == 0 {
                return;
            },
            () = sleep_until(due), if !failed.is_empty() => wanted = std::mem::take(&mut failed),
        }
        for signal in batch.drain(..) {
            match signal {
                Sweep::All => wanted.all = true,
                Sweep::One(id) => drop(wanted.ids.insert(id)),
            }
        }
        let left = sweeper.sweep(wanted).await;
        sweeper.count().await;
        if !left.is_empty() {
            failures += 1;
            let backoff: Backoff = world.provisioner.config.backoff;
            due = Instant::now() + backoff.delay(failures, chance());
            failed.add(left);
        } else if failed.is_empty() {
            failures = 0;
        }
    }
}

struct Sweeper<'a> {
    world: &'a World,
    /// Volumes that may hold data and have no object, of which was told.
    orphans: BTreeSet<VolumeId>,
    /// Volumes that have an object and aren't there, of which was told.
    lost: BTreeSet<VolumeId>,
}

impl Sweeper<'_> {
    /// Sweeps what is wanted; one that fails holds up no other. What is left is to be tried again.
    async fn sweep(&mut self, wanted: Wanted) -> Wanted {
        let applier = &self.world.provisioner.applier;
        let (mut left, mut ids) = (Wanted::default(), wanted.ids);
        if wanted.all {
            match applier.store.list().await {
                Ok(all) => {
                    ids.extend(all);
                    self.miss(&ids).await;
                }
                Err(error) => {
                    failed(&ApplyError::Store(error));
                    left.all = true;
                }
            }
        }
        let ids = self.without_object(ids).await;
        if ids.is_empty() {
            return left;
        }
        let owners = match applier.owners(&ids).await {
            Ok(owners) => owners,
            Err(error) => {
                failed(&error);
                left.ids = ids;
                return left;
            }
        };
        for (id, owner) in owners {
            if self.sweep_one(&id, owner).await.inspect_err(failed).is_err() {
                left.ids.insert(id);
            }
        }
        left
    }

    /// Looks for those that have an object and aren't there: not in a list that may be older than the object, and not by
    /// themselves.
    async fn miss(&mut self, listed: &BTreeSet<VolumeId>) {
        let applier = &self.world.provisioner.applier;
        for volume in self.world.volumes.state() {
            let id = volume.metadata.name.as_deref().and_then(|name| name.parse::<VolumeId>().ok());
            let Some(id) = id.filter(|id| !listed.contains(id)) else { continue };
            let is_to_be = matches!(
                plan_volume(&applier.me, &volume),
                VolumeAction::Protect | VolumeAction::Ignore(VolumeIgnored::InUse | VolumeIgnored::Retained)
            );
            if is_to_be && !applier.exists(&id).await && self.lost.insert(id.clone()) {
                tracing::error!(
                    pv = %id,
                    "a PersistentVolume of this node has no volume: no pod can use it; delete it, or bring its directory back"
                );
            }
        }
    }

    /// Counts what there is still to be told of.
    async fn count(&mut self) {
        let applier = &self.world.provisioner.applier;
        for (ids, stays) in [(&mut self.orphans, true), (&mut self.lost, false)] {
            let mut over = Vec::new();
            for id in ids.iter() {
                let has_object = self.world.volumes.get(&ObjectRef::new(id.as_str())).is_some();
                if has_object == stays || applier.exists(id).await != stays {
                    over.push(id.clone());
                }
            }
            ids.retain(|id| !over.contains(id));
        }
        applier.meter.orphans(self.orphans.len(), self.lost.len());
    }

    /// Those that exist; most of them have their object here.
    async fn without_object(&self, mut ids: BTreeSet<VolumeId>) -> BTreeSet<VolumeId> {
        ids.retain(|id| self.world.volumes.get(&ObjectRef::new(id.as_str())).is_none());
        let mut there = BTreeSet::new();
        for id in ids {
            if self.world.provisioner.applier.exists(&id).await {
                there.insert(id);
            }
        }
        there
    }

    async fn sweep_one(&mut self, id: &VolumeId, owner: Owner) -> Result<(), ApplyError> {
        match self.world.provisioner.applier.sweep(id, owner).await? {
            Swept::Orphan if self.orphans.insert(id.clone()) => {
                tracing::warn!(handle = %id, "a volume that may hold data has no PersistentVolume; it is left alone");
            }
            Swept::Orphan => {}
            Swept::Nothing | Swept::Removed => drop(self.orphans.remove(id)),
        }
        Ok(())
    }
}

fn failed(error: &ApplyError) {
    tracing::warn!("can't look for unused volumes, will try again: {}", chain(error));
}
