//! What a name loses with its entries: which of them has to go first.

/// What a name loses with its entries, the least first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Loss {
    /// One entry at most, below a warning.
    #[default]
    OneLine,
    Lines,
    /// A warning, or worse, is among them.
    Warnings,
}

/// A name's place: what it loses, and a sequence number that its last is not below.
pub(crate) type IdlePlace = (Loss, u64);
