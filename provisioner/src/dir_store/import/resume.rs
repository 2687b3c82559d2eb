//! Decides where an import resumes: a pure function of what exists.

/// Where a call resumes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ImportStart {
    Start,
    /// The directory was moved.
    Commit,
    Done,
    Reject(ImportConflict),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum ImportConflict {
    Missing,
    VolumeExists,
    Reappeared,
}

/// The places that exist at the start of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct ImportPlaces {
    pub(super) source: bool,
    /// The moved directory.
    pub(super) staged: bool,
    pub(super) volume: bool,
    /// The volume is the one of an earlier call: only that, and no pod, has written into a volume without a
    /// PersistentVolume.
    pub(super) is_volume_ours: bool,
}

pub(super) fn plan_start(places: ImportPlaces) -> ImportStart {
    match places {
        // An earlier call has renamed its data into place.
        ImportPlaces { staged: false, volume: true, is_volume_ours: true, .. } => ImportStart::Done,
        // A pod has used the claim first. Its volume is never replaced.
        ImportPlaces { volume: true, .. } => ImportStart::Reject(ImportConflict::VolumeExists),
        // A new directory has the name of the moved one: only the operator knows which one is meant.
        ImportPlaces { source: true, staged: true, .. } => ImportStart::Reject(ImportConflict::Reappeared),
        ImportPlaces { source: false, staged: false, .. } => ImportStart::Reject(ImportConflict::Missing),
        // The directory is moved; its limits and its publication are left to do.
        ImportPlaces { staged: true, .. } => ImportStart::Commit,
        ImportPlaces { .. } => ImportStart::Start,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_call_starts_over_only_where_nothing_was_done(source: bool, staged: bool, volume: bool, ours: bool) {
            let start = plan_start(ImportPlaces { source, staged, volume, is_volume_ours: ours });
            prop_assert_eq!(start == ImportStart::Start, source && !staged && !volume);
            prop_assert_eq!(start == ImportStart::Commit, !source && staged && !volume);
            prop_assert_eq!(start == ImportStart::Done, !staged && volume && ours);
        }
    }
}
