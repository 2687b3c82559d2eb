//! Keys that are settled by processes which are killed at any point, with a cluster whose answers are lost and late.

use std::sync::{Arc, Mutex, MutexGuard};

use nodekeel_localstorage::volume::{KeyPolicy, MountState, SlotKind, UnlockKey, UnlockSecret, VolumeError};
use proptest::prelude::*;

use super::VolumeKeyError;
use super::cluster_keys::ClusterKeyStore;
use super::plan::SlotFacts;
use super::settle::{HeldKey, KeyOutcome, KeySlotDevice, settle_keys};
use crate::parts::storage::unlock::VolumeUnlock;

/// A slot of the header: its kind, its generation, and for a split slot the number of the cluster's half.
type Slot = (SlotKind, u32, Option<u8>);

/// The call that fails next.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// The process is killed at this call, which takes effect or does not.
    Kill { call: usize, takes_effect: bool },
    /// The cluster does not answer this call. A change takes effect then, or late.
    NoAnswer { call: usize, is_late: bool },
}

/// The disk, the cluster and the present process.
#[derive(Debug)]
struct World {
    has_local_cold_start: bool,
    lacks_passphrase: bool,
    /// No key that still exists opens the volume.
    is_lost: bool,
    slots: Vec<Slot>,
    /// Keys of the cluster, and their version.
    stored: (Vec<u8>, u64),
    /// A change that the cluster has received and not made yet.
    late: Option<(Vec<u8>, u64)>,
    last_key: u8,
    calls: usize,
    fault: Option<Fault>,
    is_killed: bool,
    held: Option<UnlockKey>,
}

struct Killed;

impl World {
    /// One call that changes something, or may fail.
    fn change(&mut self, change: impl FnOnce(&mut World)) -> Result<(), Killed> {
        self.calls += 1;
        match self.fault {
            _ if self.is_killed => return Err(Killed),
            Some(Fault::Kill { call, takes_effect }) if call == self.calls => {
                self.is_killed = true;
                if takes_effect {
                    change(self);
                }
                self.check();
                return Err(Killed);
            }
            _ => change(self),
        }
        self.check();
        Ok(())
    }

    /// Asserts the invariants that hold at every moment.
    fn check(&self) {
        let opens = |(kind, _, key): &Slot| match key {
            Some(key) => self.stored.0.contains(key),
            None => *kind == SlotKind::Local,
        };
        assert!(self.is_lost || self.slots.iter().any(opens), "nothing opens the volume: {self:?}");
        assert!(self.slots.len() <= 5, "slots pile up: {self:?}");
        assert!(self.stored.0.len() <= 3, "keys pile up: {self:?}");
    }

    fn newest(&self, kind: SlotKind) -> Option<u32> {
        self.slots.iter().filter(|slot| slot.0 == kind).map(|slot| slot.1).max()
    }

    /// The generation of the newest slot that a secret opens.
    fn opens(&self, secret: &UnlockSecret) -> Option<u32> {
        match secret {
            UnlockSecret::Cluster(key) => {
                let opened = self.slots.iter().filter(|slot| slot.2 == Some(key.expose_bytes()[0]));
                opened.map(|slot| slot.1).max()
            }
            _ => self.newest(SlotKind::Local),
        }
    }

    /// The slots that a confirmation of the newest split slot removes, as in localstorage.
    fn superseded(&self) -> Vec<Slot> {
        let newest = self.newest(SlotKind::Split).unwrap_or(0);
        let is_superseded = |slot: &&Slot| match slot.0 {
            SlotKind::Local => !self.has_local_cold_start || slot.1 < newest,
            _ => slot.1 < newest,
        };
        self.slots.iter().filter(is_superseded).copied().collect()
    }

    fn needs_local(&self) -> bool {
        self.has_local_cold_start && self.newest(SlotKind::Local) != self.newest(SlotKind::Split)
    }

    fn remove(&mut self, slot: Slot) -> Result<(), Killed> {
        self.change(|world| world.slots.retain(|other| *other != slot))
    }

    fn rotate(&mut self, secret: &UnlockSecret) -> Result<UnlockKey, Killed> {
        let opened = self.opens(secret).expect("the plan rotates by keys that open the volume");
        let generation = self.slots.iter().map(|slot| slot.1).max().unwrap_or(0) + 1;
        let newer = self.slots.iter().filter(|slot| slot.1 > opened).copied().collect::<Vec<_>>();
        newer.into_iter().try_for_each(|slot| self.remove(slot))?;
        self.last_key += 1;
        let key = self.last_key;
        self.change(|world| world.slots.push((SlotKind::Split, generation, Some(key))))?;
        Ok(unlock_key(key))
    }

    fn confirm(&mut self, secret: &UnlockSecret) -> Result<(), Killed> {
        let newest = self.newest(SlotKind::Split);
        assert_eq!(self.opens(secret), newest, "an older key is confirmed");
        if self.needs_local() {
            self.change(|world| world.slots.push((SlotKind::Local, newest.unwrap_or(0), None)))?;
        }
        self.superseded().into_iter().try_for_each(|slot| self.remove(slot))
    }

    /// The cluster makes a change that it has received, unless its keys have been changed since.
    fn apply_late(&mut self) {
        if let Some((keys, version)) = self.late.take().filter(|late| late.1 == self.stored.1) {
            self.stored = (keys, version + 1);
            self.check();
        }
    }

    /// Returns whether the cluster answers this call.
    fn answers(&self) -> Option<bool> {
        match self.fault {
            Some(Fault::NoAnswer { call, is_late }) if call == self.calls + 1 => Some(is_late),
            _ => None,
        }
    }
}

fn unlock_key(number: u8) -> UnlockKey {
    UnlockKey::from_bytes(&[number; 32]).expect("32 bytes")
}

struct Shared(Mutex<World>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, World> {
        self.0.lock().expect("no test has panicked")
    }
}

fn killed_device(_: Killed) -> VolumeError {
    VolumeError::InvalidState { state: MountState::Unmounted }
}

impl KeySlotDevice for Shared {
    fn slot_facts(&self) -> Result<SlotFacts, VolumeError> {
        let world = self.lock();
        Ok(SlotFacts {
            volume: "volume".into(),
            keys: KeyPolicy::Split,
            newest_split: world.newest(SlotKind::Split),
            has_local: world.newest(SlotKind::Local).is_some(),
            needs_confirmation: world.needs_local() || !world.superseded().is_empty(),
            lacks_passphrase: world.lacks_passphrase,
        })
    }

    fn test_secret(&self, secret: &UnlockSecret) -> Result<Option<u32>, VolumeError> {
        Ok(self.lock().opens(secret))
    }

    fn rotate_keys(&self, secret: &UnlockSecret) -> Result<Option<UnlockKey>, VolumeError> {
        self.lock().rotate(secret).map(Some).map_err(killed_device)
    }

    fn confirm_secret(&self, secret: &UnlockSecret) -> Result<(), VolumeError> {
        self.lock().confirm(secret).map_err(killed_device)
    }
}

impl ClusterKeyStore for Shared {
    type Version = u64;

    async fn load_keys(&self, _: &str) -> Result<(Vec<UnlockKey>, u64), VolumeKeyError> {
        let mut world = self.lock();
        world.change(|_| {}).map_err(|Killed| VolumeKeyError::NoCluster)?;
        let (keys, version) = &world.stored;
        Ok((keys.iter().copied().map(unlock_key).collect(), *version))
    }

    async fn replace_keys(&self, read: u64, keys: &[UnlockKey]) -> Result<(), VolumeKeyError> {
        let keys: Vec<_> = keys.iter().map(|key| key.expose_bytes()[0]).collect();
        let mut world = self.lock();
        if let Some(is_late) = world.answers() {
            world.calls += 1;
            world.late = Some((keys, read));
            if !is_late {
                world.apply_late();
            }
            return Err(VolumeKeyError::NoCluster);
        }
        let is_current = world.stored.1 == read;
        world
            .change(|world| {
                if is_current {
                    world.stored = (keys, read + 1);
                }
            })
            .map_err(|Killed| VolumeKeyError::NoCluster)?;
        if is_current { Ok(()) } else { Err(VolumeKeyError::NoCluster) }
    }
}

impl HeldKey for Shared {
    fn held(&self) -> Option<UnlockKey> {
        self.lock().held.clone()
    }

    fn keep(&self, key: UnlockKey) {
        self.lock().held = Some(key);
    }

    fn keep_stored(&self, _: &UnlockKey) {
        self.lock().held = None;
    }
}

/// One process, or one more attempt of the same.
#[derive(Debug, Clone, Copy)]
struct Attempt {
    /// An operator asks for new keys, which happens when the present ones are settled.
    rotates: bool,
    fault: Option<Fault>,
    /// The cluster makes its late change before this attempt; otherwise during it.
    late_before: bool,
}

fn any_attempt() -> impl Strategy<Value = Attempt> {
    let kill =
        (1..16_usize, any::<bool>()).prop_map(|(call, takes_effect)| Fault::Kill { call, takes_effect });
    let silence = (1..16_usize, any::<bool>()).prop_map(|(call, is_late)| Fault::NoAnswer { call, is_late });
    let fault = prop_oneof![1 => Just(None), 4 => kill.prop_map(Some), 2 => silence.prop_map(Some)];
    (any::<bool>(), fault, any::<bool>()).prop_map(|(rotates, fault, late_before)| Attempt {
        rotates,
        fault,
        late_before,
    })
}

/// A volume whose creation has ended. `keeps_key`: its process runs on.
fn new_world(has_local_cold_start: bool, keeps_key: bool) -> World {
    World {
        has_local_cold_start,
        lacks_passphrase: false,
        is_lost: false,
        slots: vec![(SlotKind::Local, 1, None), (SlotKind::Split, 1, Some(1))],
        stored: (Vec::new(), 0),
        late: None,
        last_key: 1,
        calls: 0,
        fault: None,
        is_killed: false,
        held: keeps_key.then(|| unlock_key(1)),
    }
}

async fn attempt(world: &Arc<Shared>, attempt: Attempt) {
    {
        let mut world = world.lock();
        if attempt.late_before {
            world.apply_late();
        }
        if std::mem::take(&mut world.is_killed) {
            world.held = None;
        }
        (world.calls, world.fault) = (0, attempt.fault);
    }
    let settled = settle_keys(world, &**world, &**world).await;
    world.lock().apply_late();
    let may_rotate = world.slot_facts().is_ok_and(|slots| !slots.needs_temporary_slot());
    if let (Ok(KeyOutcome::Stored(key)), true) = (settled, attempt.rotates && may_rotate) {
        let rotated = world.lock().rotate(&UnlockSecret::Cluster(key));
        if let Ok(key) = rotated {
            world.keep(key);
            let _ = settle_keys(world, &**world, &**world).await;
        }
    }
}

fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(work)
}

proptest! {
    #[test]
    fn keys_are_settled_whatever_was_killed_lost_or_late(
        has_local_cold_start in any::<bool>(),
        lacks_passphrase in any::<bool>(),
        keeps_key in any::<bool>(),
        attempts in prop::collection::vec(any_attempt(), 0..6),
    ) {
        let world = Arc::new(Shared(Mutex::new(new_world(has_local_cold_start, keeps_key))));
        world.lock().lacks_passphrase = lacks_passphrase && !has_local_cold_start;
        run(async {
            for next in attempts {
                attempt(&world, next).await;
            }
            world.lock().lacks_passphrase = false;
            attempt(&world, Attempt { rotates: false, fault: None, late_before: true }).await;
        });
        let world = world.lock();
        let generation = world.newest(SlotKind::Split).expect("a split slot");
        let split: Vec<_> = world.slots.iter().filter(|slot| slot.0 == SlotKind::Split).collect();
        let local: Vec<_> = world.slots.iter().filter(|slot| slot.0 == SlotKind::Local).collect();
        prop_assert_eq!(split.len(), 1);
        prop_assert_eq!(&world.stored.0, &[split[0].2.expect("a key")]);
        let kept = (SlotKind::Local, generation, None);
        prop_assert_eq!(local, if has_local_cold_start { vec![&kept] } else { Vec::new() });
        prop_assert!(world.held.is_none());
    }
}

#[test]
fn a_volume_whose_key_the_cluster_has_lost_is_left_as_it_is() {
    let mut world = new_world(false, false);
    world.slots.remove(0);
    world.stored.0 = vec![9];
    world.is_lost = true;
    let world = Arc::new(Shared(Mutex::new(world)));
    let outcome = run(settle_keys(&world, &*world, &*world));
    assert!(matches!(outcome, Ok(KeyOutcome::Lost)), "{outcome:?}");
    let world = world.lock();
    assert_eq!((&world.slots[..], &world.stored.0[..]), (&[(SlotKind::Split, 1, Some(1))][..], &[9][..]));
}

#[test]
fn the_key_that_the_cluster_has_opens_the_volume_again() {
    let mut world = new_world(false, false);
    world.slots.remove(0);
    world.stored.0 = vec![1];
    let world = Arc::new(Shared(Mutex::new(world)));
    // The slot that has opened the volume is gone; an earlier noded may have left it open.
    for before in [Some(UnlockSecret::Node), None] {
        let unlock = VolumeUnlock::default();
        before.into_iter().for_each(|secret| unlock.keep_secret(secret));
        run(settle_keys(&world, &*world, &unlock)).expect("settled");
        let again = unlock.secret();
        assert!(
            matches!(&again, Some(UnlockSecret::Cluster(key)) if *key.expose_bytes() == [1; 32]),
            "{again:?}"
        );
    }
}

#[test]
fn the_temporary_slot_stays_until_an_operator_could_open_the_volume() {
    let world = Arc::new(Shared(Mutex::new(new_world(false, true))));
    for (lacks_passphrase, slots) in [(true, 2), (false, 1)] {
        world.lock().lacks_passphrase = lacks_passphrase;
        let outcome = run(settle_keys(&world, &*world, &*world));
        assert!(matches!(outcome, Ok(KeyOutcome::Stored(_))), "{outcome:?}");
        let world = world.lock();
        assert_eq!((world.slots.len(), &world.stored.0[..]), (slots, &[1][..]));
    }
}
