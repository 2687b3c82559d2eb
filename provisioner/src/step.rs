//! The side effects of this crate as single steps, so that tests can kill the process between two of them.

use std::fmt;
use std::sync::Arc;

/// A side effect that outlives the process: a change of a directory, of the quota, or of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum VolumeStep {
    /// Create a volume's directory in the staging directory, where nothing else sees it.
    CreateDirectory,
    /// Set its limits.
    SetLimits,
    /// Copy a directory that is imported into one next to the volumes.
    CopyTree,
    /// Move a directory that is imported next to the volumes.
    MoveToImport,
    /// Set the limits of an imported directory, and count all files in it.
    LimitTree,
    /// Clone the files of a snapshot or of a copy into the staged directory.
    CloneTree,
    /// Create the sparse file of a block or strict volume in the staged directory.
    CreateImage,
    /// Make the file system in it.
    FormatImage,
    /// Set the size of the file of an existing volume, or of a copy.
    GrowImage,
    /// Grow what uses the file: its loop device, and the mounted file system in it.
    GrowDevice,
    /// Record that a volume or a snapshot is a block or strict one.
    MarkKind,
    /// Remove that record.
    UnmarkKind,
    /// Mark a copy, or a block or strict volume, as one that may have no PersistentVolume yet, until one is seen or a
    /// pod mounts it.
    MarkUnpublished,
    /// Remove the mark.
    MarkPublished,
    /// Rename the directory, with its limits, into the directory of volumes.
    RenameIntoPlace,
    /// Create a trash entry for a volume.
    CreateTrashEntry,
    /// Move the volume into it.
    MoveToTrash,
    /// Erase the volume's data.
    EraseContent,
    /// Release its project.
    ReleaseProject,
    /// Remove the empty trash entry.
    RemoveTrashEntry,
    /// Attach the file of a block or strict volume to a loop device.
    AttachDevice,
    /// Create the directory or file at which a volume is mounted for a pod.
    CreateTarget,
    /// Mount the volume there.
    MountVolume,
    /// Unmount it.
    UnmountVolume,
    /// Remove the directory or file.
    RemoveTarget,
    /// Detach the file of a block volume from its loop device.
    DetachDevice,
    /// Write this node into a claim without a selected node.
    SelectNode,
    /// Remove this node from a claim whose volume does not fit on it.
    DeselectNode,
    /// Write the node of a claim's data source into the claim, in place of this node.
    HandOverClaim,
    /// Create the PersistentVolume.
    CreatePersistentVolume,
    /// Delete the PersistentVolume.
    DeletePersistentVolume,
    /// Add the finalizer.
    AddFinalizer,
    /// Remove the finalizer.
    RemoveFinalizer,
    /// Record the claim that a volume is bound to.
    RecordClaim,
    /// Write into a claim's status that its volume is being expanded or modified.
    MarkResize,
    /// Change the limits of an existing volume.
    ResizeLimits,
    /// Write the new capacity or VolumeAttributesClass into the PersistentVolume, or that it is an imported one.
    UpdateVolume,
    /// Write into a claim's status that its volume has been expanded or modified.
    FinishResize,
    /// Write into a claim's status why its volume is not expanded or modified.
    MarkInfeasible,
    /// Create or update a CSIStorageCapacity of the node.
    PublishCapacity,
    /// Delete a CSIStorageCapacity of the node.
    RemoveCapacity,
    /// Write into the status of a VolumeSnapshotContent that its snapshot is ready, or why it is not, and
    /// before that into its annotation the named store that it is taken in.
    UpdateSnapshotStatus,
    /// Remove the finalizer of a VolumeSnapshotContent.
    RemoveSnapshotFinalizer,
    /// Create, change or remove the record of a move to another node.
    RecordMove,
    /// Annotate a PersistentVolume whose disk was declared lost, or remove the annotation where it is not.
    MarkLost,
    /// Annotate a PersistentVolume before it is reported as abnormal, or remove the annotation after it was reported as
    /// normal.
    MarkCondition,
    /// Create or update an event.
    CreateEvent,
}

impl VolumeStep {
    /// All steps of a volume's life cycle, roughly in order.
    pub const ALL: [Self; 47] = [
        Self::PublishCapacity,
        Self::SelectNode,
        Self::CreateDirectory,
        Self::SetLimits,
        Self::MoveToImport,
        Self::LimitTree,
        Self::HandOverClaim,
        Self::CloneTree,
        Self::CreateImage,
        Self::FormatImage,
        Self::MarkUnpublished,
        Self::MarkKind,
        Self::CopyTree,
        Self::RenameIntoPlace,
        Self::UpdateSnapshotStatus,
        Self::CreatePersistentVolume,
        Self::MarkPublished,
        Self::CreateEvent,
        Self::DeselectNode,
        Self::RecordClaim,
        Self::AddFinalizer,
        Self::CreateTarget,
        Self::AttachDevice,
        Self::MountVolume,
        Self::MarkResize,
        Self::ResizeLimits,
        Self::GrowImage,
        Self::GrowDevice,
        Self::UpdateVolume,
        Self::FinishResize,
        Self::MarkInfeasible,
        Self::UnmountVolume,
        Self::RemoveTarget,
        Self::DetachDevice,
        Self::CreateTrashEntry,
        Self::MoveToTrash,
        Self::UnmarkKind,
        Self::DeletePersistentVolume,
        Self::RemoveFinalizer,
        Self::RemoveSnapshotFinalizer,
        Self::EraseContent,
        Self::ReleaseProject,
        Self::RemoveTrashEntry,
        Self::RecordMove,
        Self::MarkLost,
        Self::MarkCondition,
        Self::RemoveCapacity,
    ];
}

/// The moment before or after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(clippy::exhaustive_enums, reason = "complete by nature: before or after")]
pub enum StepMoment {
    /// The step has not happened.
    Before,
    /// The step has happened, and no later step has.
    After,
}

/// Is called before and after each step, on the thread that performs it. Implemented by every
/// `Fn(VolumeStep, StepMoment)`.
///
/// For tests: a hook that kills the process at a step shows what a crash there leaves behind. It must not
/// block for long.
pub trait StepHook: Send + Sync {
    /// A step is about to happen, or has happened.
    fn on_step(&self, step: VolumeStep, moment: StepMoment);
}

impl<F: Fn(VolumeStep, StepMoment) + Send + Sync> StepHook for F {
    fn on_step(&self, step: VolumeStep, moment: StepMoment) {
        self(step, moment);
    }
}

/// Performs steps and notifies the hook, if any.
#[derive(Clone, Default)]
pub(crate) struct StepRunner(Option<Arc<dyn StepHook>>);

impl StepRunner {
    pub(crate) fn new(hook: Option<Arc<dyn StepHook>>) -> Self {
        Self(hook)
    }

    /// Performs a step; the hook is notified after it only if it succeeded.
    pub(crate) fn run_step<T, E>(
        &self,
        step: VolumeStep,
        act: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        self.notify_hook(step, StepMoment::Before);
        let result = act()?;
        self.notify_hook(step, StepMoment::After);
        Ok(result)
    }

    /// Like [`run_step`](Self::run_step), for an asynchronous step.
    pub(crate) async fn run_async<T, E>(
        &self,
        step: VolumeStep,
        act: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        self.notify_hook(step, StepMoment::Before);
        let result = act.await?;
        self.notify_hook(step, StepMoment::After);
        Ok(result)
    }

    fn notify_hook(&self, step: VolumeStep, moment: StepMoment) {
        if let Some(hook) = &self.0 {
            hook.on_step(step, moment);
        }
    }
}

impl fmt::Debug for StepRunner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Hook" } else { "no hook" })
    }
}
