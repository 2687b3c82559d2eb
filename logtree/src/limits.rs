//! The limits of a store.

/// The amount that a [`LogStore`](crate::LogStore) keeps. Beyond a limit, the oldest entries are dropped and
/// counted; appends are never rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "plain data, complete")]
pub struct LogLimits {
    /// Memory for the entries of one name, at least 4 KiB. Default 1 MiB, some 6,000 lines.
    pub bytes_per_dn: usize,
    /// Maximum number of entries of one name, in addition. Default none.
    pub entries_per_dn: Option<usize>,
    /// Memory for everything, at least `bytes_per_dn`: entries, the names themselves (about 1 KiB each), and
    /// [`LineWriter`](crate::LineWriter)s (2 KiB each, and up to a quarter of it for lines whose end has not been
    /// written, which are cut beyond that). Writers take up to half of it from the names. When it is used up, names
    /// that need more get it from the names that use most: a flooding name cannot evict a quiet one. Only when there
    /// is no such name, or when it uses less than 4 KiB, a name loses all its entries: names with one line go first,
    /// those with a warning or worse last, and among equals the one that is idle for longest. Each of the three kinds
    /// has a share of an eighth, so that a new name keeps its line for a while. Default 64 MiB.
    ///
    /// Readers take memory in addition: some 200 bytes for each name they read, and 64 KiB or an entry during a call,
    /// for entries that may be dropped while they are copied.
    pub total_bytes: usize,
    /// Maximum number of names with entries, at least 2. Beyond it, a name loses its entries in the same order, and its
    /// readers find their number. It is forgotten when there are five times as many names, or the memory is used up:
    /// the nearest name above it inherits its number of dropped entries. Its readers still find it, exactly for the
    /// last 37,000 names with the default memory, of which a sixteenth is for that; for earlier ones, an upper bound.
    /// Default 65,536, more than the default memory can hold.
    pub max_names: usize,
    /// Maximum length of raw lines, in bytes, at most a quarter of `bytes_per_dn`; longer lines are cut.
    /// Default 1024.
    pub line_bytes: usize,
    /// Maximum length of leveled entries, message and fields together, in bytes, at most half of
    /// `bytes_per_dn`; longer ones are cut. Default 16 KiB.
    pub message_bytes: usize,
}

impl Default for LogLimits {
    fn default() -> LogLimits {
        LogLimits {
            bytes_per_dn: 1 << 20,
            entries_per_dn: None,
            total_bytes: 64 << 20,
            max_names: 1 << 16,
            line_bytes: 1024,
            message_bytes: 16 << 10,
        }
    }
}

impl LogLimits {
    /// The limits, clamped to the documented ranges, so that a record always fits its ring.
    pub(crate) fn clamped(self) -> LogLimits {
        // At most 1 GiB: a record takes at most half of it, and stores its length in 32 bits.
        let bytes_per_dn = self.bytes_per_dn.clamp(4 << 10, 1 << 30);
        LogLimits {
            bytes_per_dn,
            entries_per_dn: self.entries_per_dn.map(|entries| entries.max(1)),
            total_bytes: self.total_bytes.max(bytes_per_dn),
            max_names: self.max_names.max(2),
            line_bytes: self.line_bytes.clamp(1, bytes_per_dn / 4),
            message_bytes: self.message_bytes.clamp(64, bytes_per_dn / 2),
        }
    }
}
