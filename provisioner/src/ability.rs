//! "Can this node serve?": one fact, which the store's probe tells, and what follows from it for a claim.
//!
//! Identity is not ability: a store whose disk was remounted read-only, or whose quota is off, is still the one of the
//! node's volumes. So the store is asked to do once what a claim needs, and the answer drives readiness, conditions,
//! published capacity, the selection of claims, and the node's Lease. Existing volumes stay published either way.

use std::error::Error;
use std::io;
use std::time::Duration;

use nodekeel_fsquota::Error as QuotaError;
use rustix::io::Errno;

use crate::error_chain::format_chain;
use crate::name::StoreName;
use crate::store::VolumeStoreError;

pub(crate) mod prober;

/// Whether a node can create volumes, as its last probe has found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ability {
    /// Not known: the store is not known to be the one of this node's volumes yet, or its first probe has not ended.
    Unknown,
    /// The node can create volumes. They may be refused all the same, for lack of space.
    Able,
    /// The node can't create volumes, whatever is asked of it.
    Unable {
        /// The kind of the cause.
        cause: InabilityCause,
        /// The reason, and the remedy.
        why: String,
    },
}

/// The kind of a cause for which a node can't create volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InabilityCause {
    /// The store is not served: it is absent, or not the one of this node's volumes.
    Unserved,
    /// The file system is read-only.
    ReadOnly,
    /// The disk, or its file system, fails.
    Failing,
    /// The kernel sets no limits, or doesn't enforce them.
    NoLimits,
    /// The process or the kernel has no more file descriptors, or no memory.
    NoResources,
    /// The disk does not answer.
    Hung,
    /// Another one.
    Other,
}

impl InabilityCause {
    /// The cause as a word, for metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unserved => "unserved",
            Self::ReadOnly => "read_only",
            Self::Failing => "failing",
            Self::NoLimits => "no_limits",
            Self::NoResources => "no_resources",
            Self::Hung => "hung",
            Self::Other => "other",
        }
    }

    /// What to type, or to look at.
    fn remedy(self) -> &'static str {
        match self {
            // The reasons of the others say it themselves.
            Self::Unserved | Self::Other | Self::NoLimits => "",
            Self::ReadOnly => {
                "; see `dmesg` for why, then run `mount -o remount,rw` on it, or check its file system"
            }
            Self::Failing => "; see `dmesg`: the disk fails, or its file system must be checked",
            Self::NoResources => "; raise the limit of open files, or find the process that uses them up",
            Self::Hung => "; see `dmesg`, and the disk",
        }
    }

    /// The kind of a store's error: the first cause in its chain that says one.
    fn of_error(error: &(dyn Error + 'static)) -> Self {
        let mut link = Some(error);
        while let Some(error) = link {
            if let Some(cause) = Self::of_link(error) {
                return cause;
            }
            link = error.source();
        }
        Self::Other
    }

    fn of_link(error: &(dyn Error + 'static)) -> Option<Self> {
        if let Some(error) = error.downcast_ref::<QuotaError>() {
            return match error {
                QuotaError::ReadOnly => Some(Self::ReadOnly),
                QuotaError::EnforcementOff | QuotaError::LimitNotBinding { .. } => Some(Self::NoLimits),
                _ => None,
            };
        }
        let number = match (error.downcast_ref::<io::Error>(), error.downcast_ref::<Errno>()) {
            (Some(error), _) => error.raw_os_error()?,
            (None, Some(errno)) => errno.raw_os_error(),
            (None, None) => return None,
        };
        match Errno::from_raw_os_error(number) {
            Errno::ROFS => Some(Self::ReadOnly),
            // EUCLEAN is how file systems say that they are damaged, and XFS also that it has shut down.
            Errno::IO | Errno::UCLEAN | Errno::NODEV | Errno::NXIO => Some(Self::Failing),
            Errno::DQUOT => Some(Self::NoLimits),
            Errno::MFILE | Errno::NFILE | Errno::NOMEM => Some(Self::NoResources),
            _ => None,
        }
    }
}

impl Ability {
    /// Returns whether the node is known to be able.
    pub fn is_able(&self) -> bool {
        matches!(self, Self::Able)
    }

    /// The reason why the node can't create volumes, if it can't.
    pub fn inability(&self) -> Option<&str> {
        match self {
            Self::Unable { why, .. } => Some(why),
            Self::Unknown | Self::Able => None,
        }
    }

    /// The ability as a probe of the store has found it; `None`: it gave no answer in this time.
    pub(crate) fn of_probe(answer: Option<Result<(), VolumeStoreError>>, within: Duration) -> Self {
        let (cause, text) = match answer {
            Some(Ok(())) => return Self::Able,
            Some(Err(error)) => (InabilityCause::of_error(&error), format_chain(&error)),
            None => {
                let text = format!("the disk of the volumes has not answered within {} s", within.as_secs());
                (InabilityCause::Hung, text)
            }
        };
        Self::Unable { cause, why: format!("{text}{}", cause.remedy()) }
    }

    /// The ability to create volumes in a store that the node does not have.
    pub(crate) fn without_store(store: &StoreName) -> Self {
        let why = format!(
            "the claim's storage class names store {store}, which the node does not have: add it to the stores in the \
             configuration of the node, or use another class"
        );
        Self::Unable { cause: InabilityCause::Unserved, why }
    }

    /// Returns whether two abilities are the same but for the text of the reason.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Unable { cause, .. }, Self::Unable { cause: other, .. }) => cause == other,
            _ => self == other,
        }
    }
}

/// What is done with a claim that this node was selected for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SelectedClaimAction<'a> {
    /// Create its volume.
    Provision,
    /// Deselect this node, for this reason: another one can serve the claim.
    Deselect(&'a str),
    /// Wait for this node, for this reason: no other node has the data of the claim's source.
    Wait(&'a str),
}

/// Decides about a claim that this node was selected for.
pub(crate) fn plan_selected_claim(ability: &Ability, has_source: bool) -> SelectedClaimAction<'_> {
    match (ability.inability(), has_source) {
        (None, _) => SelectedClaimAction::Provision,
        (Some(why), false) => SelectedClaimAction::Deselect(why),
        (Some(why), true) => SelectedClaimAction::Wait(why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::VolumeId;
    use crate::testing::objects::sample_uid;

    fn errno(errno: Errno) -> VolumeStoreError {
        VolumeStoreError::Probe { source: Box::new(io::Error::from(errno)) }
    }

    fn quota(error: QuotaError) -> VolumeStoreError {
        VolumeStoreError::Probe { source: Box::new(error) }
    }

    #[test]
    fn the_cause_of_an_inability_is_the_first_known_one_of_its_chain() {
        use InabilityCause::{Failing, NoLimits, NoResources, Other, ReadOnly};
        let id = VolumeId::from_uid(&sample_uid(1)).expect("a UUID");
        for (error, expected) in [
            (errno(Errno::ROFS), ReadOnly),
            (quota(QuotaError::ReadOnly), ReadOnly),
            (errno(Errno::IO), Failing),
            (errno(Errno::UCLEAN), Failing),
            (errno(Errno::DQUOT), NoLimits),
            (quota(QuotaError::EnforcementOff), NoLimits),
            (errno(Errno::NFILE), NoResources),
            (errno(Errno::ACCESS), Other),
            (VolumeStoreError::NotFound { id }, Other),
        ] {
            let text = format_chain(&error);
            let found = Ability::of_probe(Some(Err(error)), Duration::ZERO);
            let Ability::Unable { cause, why } = &found else { panic!("{found:?}") };
            assert_eq!(*cause, expected, "{text}");
            assert!(why.starts_with(&text), "{why}");
        }
        assert_eq!(Ability::of_probe(Some(Ok(())), Duration::ZERO), Ability::Able);
        let hung = Ability::of_probe(None, Duration::from_secs(20));
        assert!(
            matches!(&hung, Ability::Unable { cause: InabilityCause::Hung, why } if why.contains("20 s"))
        );
    }

    #[test]
    fn a_claim_of_a_node_that_is_unable_goes_to_another_unless_its_data_are_here() {
        use SelectedClaimAction::{Deselect, Provision, Wait};
        let unable = Ability::Unable { cause: InabilityCause::ReadOnly, why: "read-only".to_owned() };
        for (ability, has_source, expected) in [
            (&Ability::Able, false, Provision),
            (&Ability::Able, true, Provision),
            (&unable, false, Deselect("read-only")),
            (&unable, true, Wait("read-only")),
        ] {
            assert_eq!(plan_selected_claim(ability, has_source), expected);
        }
    }

    #[test]
    fn another_text_of_the_same_cause_is_no_change() {
        let unable = |cause, why: &str| Ability::Unable { cause, why: why.to_owned() };
        let (read_only, failing) = (InabilityCause::ReadOnly, InabilityCause::Failing);
        assert!(unable(read_only, "a").is_same(&unable(read_only, "b")));
        assert!(!unable(read_only, "a").is_same(&unable(failing, "a")));
        assert!(Ability::Able.is_same(&Ability::Able) && !Ability::Able.is_same(&Ability::Unknown));
    }
}
