//! The mount options of a volume, which its class names and the node plugin applies.

use std::str::FromStr;

/// A mount option of a StorageClass or a PersistentVolume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MountOption {
    /// `ro`, `rw`
    ReadOnly(bool),
    /// `suid`, `nosuid`
    Suid(bool),
    /// `dev`, `nodev`
    Dev(bool),
    /// `exec`, `noexec`
    Exec(bool),
}

/// A text is not a mount option of this driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UnknownMountOption;

impl UnknownMountOption {
    /// The known options, after a colon.
    pub(crate) const HINT: &str = ": use ro, rw, suid, nosuid, dev, nodev, exec or noexec";
}

impl FromStr for MountOption {
    type Err = UnknownMountOption;

    fn from_str(text: &str) -> Result<Self, UnknownMountOption> {
        Ok(match text {
            "ro" | "rw" => Self::ReadOnly(text == "ro"),
            "suid" | "nosuid" => Self::Suid(text == "suid"),
            "dev" | "nodev" => Self::Dev(text == "dev"),
            "exec" | "noexec" => Self::Exec(text == "exec"),
            _ => return Err(UnknownMountOption),
        })
    }
}

/// The single options: each element is one or, as in fstab, several.
pub(crate) fn split_options(flags: &[String]) -> impl Iterator<Item = &str> {
    flags.iter().flat_map(|flags| flags.split(',')).filter(|flag| !flag.is_empty())
}
