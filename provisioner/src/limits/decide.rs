//! Decides whether the limits of a volume are those of its PersistentVolume: a pure function of both.

use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};

use crate::store::FoundLimits;

/// What a limit may have more than was set: file systems round it up to their blocks, which have at most 64 KiB.
const ROUNDING: u64 = 64 << 10;

/// What was promised to a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PromisedLimits {
    /// The capacity of the PersistentVolume.
    pub(crate) bytes: Bytes,
    /// What an expansion in progress may have set already; the capacity, if there is none.
    pub(crate) most: Bytes,
    /// The inode limit that its VolumeAttributesClass sets. Without one, the limit that is found is right.
    pub(crate) inodes: Option<Inodes>,
    /// The inode limit that it was created with, for one that has none: a directory always has one.
    pub(crate) default_inodes: Inodes,
    /// A block or strict volume: its size is in its file, and can't be lost.
    pub(crate) is_image: bool,
}

/// The action for the limits of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LimitAction {
    /// Nothing: they are right.
    Keep,
    /// Set these for all that is in the volume, and look again: only then it is known what the volume itself uses.
    Restore(QuotaLimits),
    /// Report that the capacity of the PersistentVolume can't be read: it promises nothing that could be set.
    ReportNoCapacity,
    /// Report that the limit is too large, and can't be lowered below what is used without stopping its pod.
    ReportTooLarge {
        /// The limit that it has.
        limit: Bytes,
        /// What it uses.
        used: Bytes,
    },
}

/// Decides about the limits of a volume.
pub(crate) fn plan_limits(promised: &PromisedLimits, found: &FoundLimits) -> LimitAction {
    if promised.bytes == Bytes(0) {
        return LimitAction::ReportNoCapacity;
    }
    let is_lost = !found.is_own || found.limits.bytes.is_none();
    if promised.is_image {
        let limits = QuotaLimits { bytes: Some(promised.bytes), inodes: None };
        return if is_lost { LimitAction::Restore(limits) } else { LimitAction::Keep };
    }
    let limit = found.limits.bytes.unwrap_or_default();
    let (is_small, is_large) = (limit < promised.bytes, limit.0 > promised.most.0.saturating_add(ROUNDING));
    // That of another volume's project says nothing of this one.
    let own_inodes = found.limits.inodes.filter(|_| found.is_own);
    let default_inodes = || match found.is_own {
        // A pod that has had no such limit may use more than the default already.
        true => promised.default_inodes.max(found.usage.inodes),
        false => promised.default_inodes,
    };
    let inodes = promised.inodes.or(own_inodes).unwrap_or_else(default_inodes);
    let is_used = found.usage.bytes > promised.bytes;
    if !is_lost && is_large && is_used {
        return LimitAction::ReportTooLarge { limit, used: found.usage.bytes };
    }
    if !is_lost && !is_small && !is_large && Some(inodes) == found.limits.inodes {
        return LimitAction::Keep;
    }
    // Of a volume that is not known to have a project of its own, the usage may be that of others, too. It gets one with the
    // limit that it has, which the next look lowers if that is safe.
    let is_kept = !is_small && (is_used || !is_lost && !is_large);
    let bytes = if is_kept { limit } else { promised.bytes };
    LimitAction::Restore(QuotaLimits { bytes: Some(bytes), inodes: Some(inodes) })
}

#[cfg(test)]
mod tests {
    use nodekeel_fsquota::QuotaUsage;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn promised(mebibytes: u64) -> PromisedLimits {
        let bytes = Bytes(mebibytes * MIB);
        let default_inodes = Inodes(1024);
        PromisedLimits { bytes, most: bytes, inodes: None, default_inodes, is_image: false }
    }

    fn limits(mebibytes: u64, inodes: u64) -> QuotaLimits {
        QuotaLimits { bytes: Some(Bytes(mebibytes * MIB)), inodes: Some(Inodes(inodes)) }
    }

    fn found(limits: QuotaLimits, used: u64) -> FoundLimits {
        let usage = QuotaUsage { bytes: Bytes(used * MIB), inodes: Inodes(1) };
        FoundLimits { limits, usage, is_own: true }
    }

    #[test]
    fn limits_that_are_not_those_of_the_persistent_volume_are_set_again_where_that_is_safe() {
        use LimitAction::{Keep, ReportNoCapacity, Restore};
        let (none, eight) = (QuotaLimits::default(), promised(8));
        let rounded = QuotaLimits { bytes: Some(Bytes(8 * MIB + 4096)), ..limits(8, 1024) };
        let expanding = PromisedLimits { most: Bytes(16 * MIB), ..eight };
        let classed = PromisedLimits { inodes: Some(Inodes(7)), ..eight };
        let image = PromisedLimits { is_image: true, ..eight };
        let size = QuotaLimits { bytes: Some(Bytes(8 * MIB)), inodes: None };
        let other = |mebibytes, used| FoundLimits { is_own: false, ..found(limits(mebibytes, 99), used) };
        let no_inodes = |inodes| {
            let of_bytes = QuotaLimits { inodes: None, ..limits(8, 0) };
            let usage = QuotaUsage { bytes: Bytes(MIB), inodes: Inodes(inodes) };
            FoundLimits { usage, ..found(of_bytes, 1) }
        };
        let too_large = LimitAction::ReportTooLarge { limit: Bytes(99 * MIB), used: Bytes(9 * MIB) };
        for (name, promised, found, expected) in [
            ("right", eight, found(limits(8, 1024), 1), Keep),
            ("right, and full", eight, found(limits(8, 1024), 9), Keep),
            ("rounded up", eight, found(rounded, 1), Keep),
            ("inodes of a class that has changed since", eight, found(limits(8, 5), 1), Keep),
            ("none", eight, found(none, 0), Restore(limits(8, 1024))),
            ("that of another volume", eight, other(8, 1), Restore(limits(8, 1024))),
            ("a large one of another volume", eight, other(99, 1), Restore(limits(8, 1024))),
            ("a large and used one that may be its own", eight, other(99, 9), Restore(limits(99, 1024))),
            ("a small one of another volume", eight, other(4, 9), Restore(limits(8, 1024))),
            ("bytes only", eight, no_inodes(5), Restore(limits(8, 1024))),
            ("bytes only, and many inodes", eight, no_inodes(5000), Restore(limits(8, 5000))),
            ("smaller", eight, found(limits(4, 1024), 1), Restore(limits(8, 1024))),
            ("larger", eight, found(limits(99, 1024), 1), Restore(limits(8, 1024))),
            ("larger, and used", eight, found(limits(99, 1024), 9), too_large),
            ("being expanded", expanding, found(limits(16, 1024), 9), Keep),
            ("of an attributes class", classed, found(limits(8, 1024), 1), Restore(limits(8, 7))),
            ("of no size", promised(0), found(none, 1), ReportNoCapacity),
            ("an image", image, found(size, 1), Keep),
            ("a grown image", image, found(limits(99, 1024), 1), Keep),
            ("an image without a limit", image, found(none, 0), Restore(size)),
        ] {
            assert_eq!(plan_limits(&promised, &found), expected, "{name}");
        }
    }
}
