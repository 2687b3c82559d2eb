//! A mounter that mounts nothing and records its calls.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{MountError, MountInfo, MountSpec, Mounter};

/// One call that a [`RecordingMounter`] recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MountCall {
    /// A file system was mounted.
    Mount {
        /// The spec.
        spec: MountSpec,
        /// The source.
        source: Option<PathBuf>,
        /// The target.
        target: PathBuf,
    },
    /// A mount was removed.
    Unmount {
        /// The target.
        target: PathBuf,
    },
}

#[derive(Debug, Default)]
struct RecorderState {
    calls: Vec<MountCall>,
    /// The mounts of each target, the topmost last.
    stacks: BTreeMap<PathBuf, Vec<(Option<PathBuf>, MountInfo)>>,
    failures: Vec<io::ErrorKind>,
}

/// A [`Mounter`] in memory, for tests on hosts that permit no mounts.
#[derive(Debug, Default)]
pub struct RecordingMounter(Mutex<RecorderState>);

impl RecordingMounter {
    /// The calls that changed the mounts, in order.
    pub fn recorded_calls(&self) -> Vec<MountCall> {
        self.lock_state().calls.clone()
    }

    /// Makes the next mount fail with an error of this kind. Each call makes one more mount fail.
    pub fn fail_next_mount(&self, kind: io::ErrorKind) {
        self.lock_state().failures.push(kind);
    }

    fn lock_state(&self) -> MutexGuard<'_, RecorderState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mounter for RecordingMounter {
    fn mount(&self, spec: &MountSpec, source: Option<&Path>, target: &Path) -> Result<(), MountError> {
        let mut recorded = self.lock_state();
        if let Some((from, existing)) = recorded.stacks.get(target).and_then(|stack| stack.last()) {
            // Sources have no device numbers here, so their paths are compared.
            return match existing.matches_spec(spec, None) && from.as_deref() == source {
                true => Ok(()),
                false => Err(MountError::Conflict {
                    target: target.to_owned(),
                    existing: Box::new(existing.clone()),
                }),
            };
        }
        if let Some(kind) = recorded.failures.pop() {
            return Err(MountError::Mount {
                target: target.to_owned(),
                fstype: spec.fstype,
                kernel: "injected by the test".into(),
                source: kind.into(),
            });
        }
        let options = spec.options.iter().map(|option| (*option).to_owned()).collect();
        let mounted = MountInfo { fstype: spec.fstype.into(), device: (0, 0), flags: spec.flags, options };
        recorded.stacks.entry(target.into()).or_default().push((source.map(Path::to_owned), mounted));
        let (source, target) = (source.map(Path::to_owned), target.to_owned());
        recorded.calls.push(MountCall::Mount { spec: *spec, source, target });
        Ok(())
    }

    fn unmount(&self, target: &Path) -> Result<(), MountError> {
        let mut recorded = self.lock_state();
        if recorded.stacks.get_mut(target).and_then(Vec::pop).is_some() {
            recorded.stacks.retain(|_, stack| !stack.is_empty());
            recorded.calls.push(MountCall::Unmount { target: target.to_owned() });
        }
        Ok(())
    }

    fn mount_info(&self, target: &Path) -> Result<Option<MountInfo>, MountError> {
        let recorded = self.lock_state();
        Ok(recorded.stacks.get(target).and_then(|stack| stack.last()).map(|(_, mounted)| mounted.clone()))
    }
}
