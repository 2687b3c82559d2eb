//! A mounter that mounts nothing, and remembers.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{MountError, MountSpec, Mounted, Mounter};

/// One call that a [`RecordingMounter`] took.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MountCall {
    /// Something was mounted that was not mounted before.
    Mount {
        /// How.
        spec: MountSpec,
        /// From what.
        source: Option<PathBuf>,
        /// Where.
        target: PathBuf,
    },
    /// What was mounted there was unmounted.
    Unmount {
        /// Where.
        target: PathBuf,
    },
}

#[derive(Debug, Default)]
struct Recorded {
    calls: Vec<MountCall>,
    /// What is mounted by target, the topmost last.
    stacks: BTreeMap<PathBuf, Vec<(Option<PathBuf>, Mounted)>>,
    failures: Vec<io::ErrorKind>,
}

/// A [`Mounter`] that keeps its contract in memory: for tests on machines where nothing can be mounted.
#[derive(Debug, Default)]
pub struct RecordingMounter(Mutex<Recorded>);

impl RecordingMounter {
    /// The calls that changed something, in order.
    pub fn calls(&self) -> Vec<MountCall> {
        self.recorded().calls.clone()
    }

    /// Lets the next mount fail with an error of this kind; as many as this is called.
    pub fn fail_next(&self, kind: io::ErrorKind) {
        self.recorded().failures.push(kind);
    }

    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mounter for RecordingMounter {
    fn mount(&self, spec: &MountSpec, source: Option<&Path>, target: &Path) -> Result<(), MountError> {
        let mut recorded = self.recorded();
        if let Some((from, is)) = recorded.stacks.get(target).and_then(|stack| stack.last()) {
            return match is.is(spec, None) && from.as_deref() == source {
                true => Ok(()),
                false => Err(MountError::Conflict { target: target.to_owned(), is: Box::new(is.clone()) }),
            };
        }
        if let Some(kind) = recorded.failures.pop() {
            return Err(MountError::Mount {
                target: target.to_owned(),
                fstype: spec.fstype,
                kernel: "the test wanted it".into(),
                source: kind.into(),
            });
        }
        let options = spec.options.iter().map(|option| (*option).to_owned()).collect();
        let mounted = Mounted { fstype: spec.fstype.into(), device: (0, 0), flags: spec.flags, options };
        recorded.stacks.entry(target.into()).or_default().push((source.map(Path::to_owned), mounted));
        let (source, target) = (source.map(Path::to_owned), target.to_owned());
        recorded.calls.push(MountCall::Mount { spec: *spec, source, target });
        Ok(())
    }

    fn unmount(&self, target: &Path) -> Result<(), MountError> {
        let mut recorded = self.recorded();
        if recorded.stacks.get_mut(target).and_then(Vec::pop).is_some() {
            recorded.stacks.retain(|_, stack| !stack.is_empty());
            recorded.calls.push(MountCall::Unmount { target: target.to_owned() });
        }
        Ok(())
    }

    fn mounted(&self, target: &Path) -> Result<Option<Mounted>, MountError> {
        let recorded = self.recorded();
        Ok(recorded.stacks.get(target).and_then(|stack| stack.last()).map(|(_, mounted)| mounted.clone()))
    }
}
