//! The mark on a directory that owns its project.
//!
//! An entry that is moved out of a limited directory, or copied with all attributes, keeps the project. So a
//! project alone doesn't prove whose limits it has: the directory that was given it carries the mark, with its
//! inode, so that a copy of the mark proves nothing. Only processes with CAP_SYS_ADMIN in the initial user
//! namespace read and write `trusted` attributes.

use std::fmt;

/// The extended attribute that holds the mark.
pub(crate) const OWNER_ATTRIBUTE: &str = "trusted.nodekeel.project";

/// The content of a directory's mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnerMark {
    /// The project that was allocated to the directory.
    pub(crate) project: u32,
    /// The project of another directory, or 0 for none, that the entries still have, until the whole tree is changed.
    pub(crate) previous: Option<u32>,
}

/// An inode, distinguished from earlier ones with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InodeId {
    pub(crate) inode: u64,
    pub(crate) generation: u32,
}

/// The value of the attribute: words of the form `key=number`. Words that this release doesn't know are
/// skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnerRecord {
    pub(crate) mark: OwnerMark,
    pub(crate) inode: InodeId,
}

impl OwnerRecord {
    /// Parses the value; `None` if it is damaged.
    pub(crate) fn parse(value: &[u8]) -> Option<Self> {
        // By key and not by position: an earlier release reads the marks of a later one.
        let words: Vec<(&str, &str)> =
            std::str::from_utf8(value).ok()?.split(' ').filter_map(|word| word.split_once('=')).collect();
        let find = |key: &str| words.iter().find(|(name, _)| *name == key).map(|(_, number)| *number);
        let mark = OwnerMark {
            project: find("project")?.parse().ok()?,
            previous: find("previous").map(str::parse).transpose().ok()?,
        };
        let inode =
            InodeId { inode: find("inode")?.parse().ok()?, generation: find("generation")?.parse().ok()? };
        Some(Self { mark, inode })
    }
}

impl fmt::Display for OwnerRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mark: OwnerMark { project, previous }, inode: InodeId { inode, generation } } = self;
        write!(f, "project={project} inode={inode} generation={generation}")?;
        previous.map_or(Ok(()), |previous| write!(f, " previous={previous}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: OwnerRecord = OwnerRecord {
        mark: OwnerMark { project: 2_000_000_007, previous: None },
        inode: InodeId { inode: 131, generation: 4_000_000_000 },
    };
    /// As written on disks: later releases have to read it.
    const WRITTEN: &str = "project=2000000007 inode=131 generation=4000000000";

    #[test]
    fn the_mark_of_this_release_stays_readable() {
        assert_eq!(RECORD.to_string(), WRITTEN);
        assert_eq!(OwnerRecord::parse(WRITTEN.as_bytes()), Some(RECORD));
        let moving = OwnerRecord { mark: OwnerMark { previous: Some(7), ..RECORD.mark }, ..RECORD };
        assert_eq!(moving.to_string(), format!("{WRITTEN} previous=7"));
        assert_eq!(OwnerRecord::parse(moving.to_string().as_bytes()), Some(moving));
    }

    #[test]
    fn unknown_words_of_a_mark_are_skipped_and_damaged_marks_say_nothing() {
        assert_eq!(OwnerRecord::parse(format!("{WRITTEN} later=x words").as_bytes()), Some(RECORD));
        for damaged in [
            "",
            "project=7",
            "project=7 inode=1",
            "project=x inode=1 generation=1",
            "project=-1 inode=1 generation=1",
        ] {
            assert_eq!(OwnerRecord::parse(damaged.as_bytes()), None, "{damaged:?}");
        }
        assert_eq!(OwnerRecord::parse(format!("{WRITTEN} previous=").as_bytes()), None);
        assert_eq!(OwnerRecord::parse(b"project=\xff inode=1 generation=1"), None);
    }
}
