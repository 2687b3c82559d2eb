//! `/proc/self/mountinfo`, parsed.
//!
//! *Source:* proc_pid_mountinfo(5); `show_mountinfo` in Linux `fs/proc_namespace.c`.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

use super::{MountFlags, Mounted};

/// One line of the table: what is mounted, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MountEntry {
    /// The directory, by its absolute path.
    pub(super) target: PathBuf,
    /// What is mounted on it.
    pub(super) mounted: Mounted,
}

/// Parses the table; lines of another form are skipped, since a newer kernel may add some.
///
/// Later lines are mounted over earlier ones of the same target.
pub(super) fn parse_mountinfo(text: &[u8]) -> Vec<MountEntry> {
    text.split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

/// `36 35 98:0 / /mnt rw,noatime shared:1 - ext3 /dev/root rw,errors=continue`
fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|byte| *byte == b' ');
    let (major, minor) = std::str::from_utf8(fields.nth(2)?).ok()?.split_once(':')?;
    let device = (major.parse().ok()?, minor.parse().ok()?);
    let target = PathBuf::from(OsString::from_vec(unescape(fields.nth(1)?)));
    let of_mount = std::str::from_utf8(fields.next()?).ok()?;
    // Optional fields, as many as there are, end with a lone dash.
    fields.by_ref().find(|field| *field == b"-")?;
    let fstype = String::from_utf8(unescape(fields.next()?)).ok()?;
    let of_file_system = String::from_utf8(unescape(fields.nth(1)?)).ok()?;
    if fields.next().is_some() || !target.is_absolute() {
        return None;
    }
    let all = || of_mount.split(',').chain(of_file_system.split(','));
    let flags = all().map(MountFlags::from_name).fold(MountFlags::NONE, MountFlags::with);
    let is_flag = |option: &&str| MountFlags::from_name(option) != MountFlags::NONE;
    let options = all().filter(|option| !is_flag(option) && !option.is_empty()).map(str::to_owned).collect();
    Some(MountEntry { target, mounted: Mounted { fstype, device, flags, options } })
}

/// `\040` is a space: the kernel escapes what would end a field.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let octal = match rest {
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] => {
                Some((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'))
            }
            _ => None,
        };
        plain.push(octal.unwrap_or(*first));
        rest = if octal.is_some() { &rest[4..] } else { tail };
    }
    plain
}

/// As the kernel prints it, but for the numbers of mounts, which nothing here reads.
impl fmt::Display for MountEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mounted { fstype, device: (major, minor), flags, options } = &self.mounted;
        let target = escape(self.target.as_os_str().as_bytes());
        write!(f, "1 1 {major}:{minor} / {target} {flags} - {} none ", escape(fstype.as_bytes()))?;
        f.write_str(&escape(if options.is_empty() { "rw".into() } else { options.join(",") }.as_bytes()))
    }
}

fn escape(field: &[u8]) -> String {
    use fmt::Write as _;
    let mut text = String::new();
    for byte in field {
        match byte {
            b'!'..=b'[' | b']'..=b'~' => text.push(char::from(*byte)),
            byte => write!(text, "\\{byte:03o}").unwrap_or_default(),
        }
    }
    text
}

/// What the table of mounts may hold: never panics, and what is read prints to what is read again.
///
/// # Panics
/// Where that isn't so.
#[cfg(any(test, feature = "testing"))]
pub fn mountinfo(bytes: &[u8]) {
    for entry in parse_mountinfo(bytes) {
        let again = parse_mountinfo(entry.to_string().as_bytes());
        assert_eq!(again.len(), 1, "one line is one entry");
        assert_eq!(again[0].target, entry.target, "a path is read as it was printed");
        assert_eq!(again[0].mounted.flags, entry.mounted.flags, "flags are read as they were printed");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TABLE: &[u8] = b"\
23 29 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:13 - proc proc rw
31 29 8:1 / /esp rw,nosuid,nodev,noexec,relatime - vfat /dev/sda1 rw,sync,fmask=0022,errors=remount-ro
32 29 8:2 / /data rw,nosuid,noexec shared:1 master:2 - xfs /dev/sda2 rw,attr2,inode64,noquota
33 29 8:2 / /data rw,nosuid,noexec - xfs /dev/sda2 rw,attr2,prjquota
nonsense
34 29 0:44 / /with\\040space rw - tmpfs tmp\\134fs rw,size=1k
";

    #[test]
    fn flags_come_from_the_mount_and_from_the_file_system() {
        let entries = parse_mountinfo(TABLE);
        let of = |target: &str| {
            let entry = entries.iter().rev().find(|entry| entry.target.as_os_str() == target);
            &entry.expect(target).mounted
        };
        assert_eq!(entries.len(), 5);
        assert_eq!(of("/esp").flags.to_string(), "nosuid,nodev,noexec,sync");
        assert_eq!((of("/data").device, of("/data").fstype.as_str()), ((8, 2), "xfs"));
        assert!(of("/data").options.contains(&"prjquota".to_owned()), "the topmost mount counts");
        assert_eq!(of("/with space").flags, MountFlags::NONE);
    }

    fn flags() -> impl Strategy<Value = MountFlags> {
        (0u32..32).prop_map(MountFlags)
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
            mountinfo(&bytes);
        }

        #[test]
        fn what_is_printed_is_parsed_again(
            target in prop::collection::vec(1u8..=255, 0..20),
            fstype in "[a-z0-9 \\\\]{1,8}",
            device: (u32, u32),
            flags in flags(),
            options in prop::collection::vec("x[a-z=\\\\ ]{1,8}", 0..3),
        ) {
            let target = PathBuf::from(OsString::from_vec([b"/", &target[..]].concat()));
            let mut entry = MountEntry { target, mounted: Mounted { fstype, device, flags, options } };
            let parsed = parse_mountinfo(entry.to_string().as_bytes());
            // `rw` is what a table prints for the want of `ro`; it is no option that anybody chose.
            let mut again = parsed;
            for entry in again.iter_mut().chain([&mut entry]) {
                entry.mounted.options.retain(|option| option != "rw");
            }
            prop_assert_eq!(again, vec![entry]);
        }
    }
}
