//! `/proc/self/mountinfo`, parsed.
//!
//! *Source:* proc_pid_mountinfo(5); `show_mountinfo` in Linux `fs/proc_namespace.c`.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

use super::{MountFlags, MountInfo};

/// The mounts of the calling thread. Only in tests do threads of one process have different mount namespaces.
const MOUNTINFO_PATH: &str = "/proc/thread-self/mountinfo";

/// One line of the kernel's mount table.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MountEntry {
    /// The mount ID, as in statx(2). The kernel may reuse it after an unmount.
    pub id: u64,
    /// The directory of the file system that is mounted: `/` for all of it.
    pub root: PathBuf,
    /// The absolute path of the mount point, as the calling thread sees it.
    pub target: PathBuf,
    /// The source of the mount: the device, for a file system on a device.
    pub source: OsString,
    /// The flags of this mount only; [`info`](Self::info) also contains those of its file system.
    pub own_flags: MountFlags,
    /// The flags of the file system, the same for all its mounts.
    pub file_system_flags: MountFlags,
    /// True if mounts below it propagate to other mount namespaces.
    pub is_shared: bool,
    /// The mounted file system.
    pub info: MountInfo,
}

/// Reads all mounts in the order of the kernel; later ones may hide earlier ones.
///
/// *Source:* proc_pid_mountinfo(5).
///
/// # Errors
/// If `/proc` is not mounted.
pub fn mount_table() -> io::Result<Vec<MountEntry>> {
    Ok(parse_mountinfo(&std::fs::read(MOUNTINFO_PATH)?))
}

/// Parses the table. It skips invalid lines, and ignores fields that a newer kernel adds at the end of a
/// line: a caller that checks for mounts in use must not miss one because of them.
pub(super) fn parse_mountinfo(text: &[u8]) -> Vec<MountEntry> {
    text.split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

/// `36 35 98:0 / /mnt rw,noatime shared:1 - ext3 /dev/root rw,errors=continue`
fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    // The field in between is the ID of the parent mount.
    let (major, minor) = std::str::from_utf8(fields.nth(1)?).ok()?.split_once(':')?;
    let device = (major.parse().ok()?, minor.parse().ok()?);
    let [root, target] = [fields.next()?, fields.next()?].map(|field| PathBuf::from(unescape_name(field)));
    let of_mount = unescape_text(fields.next()?);
    // A lone dash ends the optional fields.
    let mut is_shared = false;
    loop {
        match fields.next()? {
            b"-" => break,
            field => is_shared |= field.starts_with(b"shared:"),
        }
    }
    let (fstype, source) = (unescape_text(fields.next()?), unescape_name(fields.next()?));
    let of_file_system = unescape_text(fields.next()?);
    if !target.is_absolute() {
        return None;
    }
    let flags = |options: &str| {
        options.split(',').map(MountFlags::from_name).fold(MountFlags::NONE, MountFlags::union)
    };
    let (own_flags, file_system_flags) = (flags(&of_mount), flags(&of_file_system));
    let is_flag = |option: &&str| MountFlags::from_name(option) != MountFlags::NONE;
    let all = of_mount.split(',').chain(of_file_system.split(','));
    let options = all.filter(|option| !is_flag(option) && !option.is_empty()).map(str::to_owned).collect();
    let info = MountInfo { fstype, device, flags: own_flags.union(file_system_flags), options };
    Some(MountEntry { id, root, target, source, own_flags, file_system_flags, is_shared, info })
}

fn unescape_name(field: &[u8]) -> OsString {
    OsString::from_vec(unescape(field))
}

fn unescape_text(field: &[u8]) -> String {
    String::from_utf8_lossy(&unescape(field)).into_owned()
}

/// `\040` is a space: the kernel escapes characters that would end a field.
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

/// The format of the kernel, except for parent IDs, which this crate does not read.
impl fmt::Display for MountEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, own_flags, file_system_flags, info, .. } = self;
        let MountInfo { fstype, device: (major, minor), options, .. } = info;
        let [root, target, source] = [self.root.as_os_str(), self.target.as_os_str(), &self.source]
            .map(|name| escape(name.as_bytes()));
        let shared = if self.is_shared { " shared:1" } else { "" };
        let mut of_file_system: Vec<&str> = file_system_flags.names().collect();
        of_file_system.extend(options.iter().map(String::as_str));
        let all = if of_file_system.is_empty() { "rw".to_owned() } else { of_file_system.join(",") };
        write!(
            f,
            "{id} 1 {major}:{minor} {root} {target} {own_flags}{shared} - {} {source} ",
            escape(fstype.as_bytes())
        )?;
        f.write_str(&escape(all.as_bytes()))
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

/// Checks that the parser of the mount table never panics, and that a parsed entry is printed to the same
/// one.
///
/// # Panics
/// If the check fails.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_mountinfo(bytes: &[u8]) {
    for entry in parse_mountinfo(bytes) {
        let again = parse_mountinfo(entry.to_string().as_bytes());
        assert_eq!(again.len(), 1, "one line is one entry");
        let names = |entry: &MountEntry| (entry.root.clone(), entry.target.clone(), entry.source.clone());
        assert_eq!(names(&again[0]), names(&entry), "printed names are parsed back");
        let facts = |entry: &MountEntry| {
            (entry.id, entry.own_flags, entry.file_system_flags, entry.is_shared, entry.info.flags)
        };
        assert_eq!(facts(&again[0]), facts(&entry), "printed flags are parsed back");
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
34 29 0:44 /a\\040part /with\\040space rw - tmpfs tmp\\134fs rw,size=1k
";

    #[test]
    fn flags_come_from_the_mount_and_from_the_file_system() {
        let entries = parse_mountinfo(TABLE);
        let of = |target: &str| {
            let entry = entries.iter().rev().find(|entry| entry.target.as_os_str() == target);
            &entry.expect(target).info
        };
        assert_eq!(entries.len(), 5);
        assert_eq!(of("/esp").flags.to_string(), "nosuid,nodev,noexec,sync");
        assert_eq!((of("/data").device, of("/data").fstype.as_str()), ((8, 2), "xfs"));
        assert!(of("/data").options.contains(&"prjquota".to_owned()), "the topmost mount counts");
        assert_eq!(of("/with space").flags, MountFlags::NONE);
        let flags = |target: &str| {
            let entry = entries.iter().find(|entry| entry.target.as_os_str() == target).expect(target);
            (entry.own_flags.to_string(), entry.file_system_flags.to_string())
        };
        assert_eq!(flags("/esp"), ("nosuid,nodev,noexec".to_owned(), "sync".to_owned()));
        let part = &entries[4];
        assert_eq!((part.root.to_str(), part.source.to_str()), (Some("/a part"), Some("tmp\\fs")));
        let facts = |entry: &MountEntry| (entry.id, entry.own_flags.to_string(), entry.is_shared);
        assert_eq!(facts(&entries[0]), (23, "nosuid,nodev,noexec".to_owned(), true));
        assert_eq!(
            facts(&entries[1]),
            (31, "nosuid,nodev,noexec".to_owned(), false),
            "sync is a flag of the file system"
        );
    }

    #[test]
    fn unknown_fields_and_invalid_utf8_hide_no_mount() {
        let text = b"1 2 3:4 / /a rw new:1 - xfs /dev/a rw added\n2 2 3:4 / /b rw - fuse.\xff b rw,o=\xfe\n";
        assert_eq!(parse_mountinfo(text).iter().map(|entry| entry.id).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn every_mount_of_this_host_is_read() {
        // In a chroot the root is not a mount, and without /proc nothing can be read.
        match std::fs::read(super::MOUNTINFO_PATH) {
            Ok(text) => {
                let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).count();
                assert_eq!(parse_mountinfo(&text).len(), lines);
                assert!(mount_table().is_ok());
            }
            Err(_) => assert!(mount_table().is_err()),
        }
    }

    fn flags() -> impl Strategy<Value = MountFlags> {
        (0u32..32).prop_map(MountFlags)
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
            fuzz_mountinfo(&bytes);
        }

        #[test]
        fn a_printed_entry_is_parsed_back(
            target in prop::collection::vec(1u8..=255, 0..20),
            (root, source) in (prop::collection::vec(1u8..=255, 0..9), prop::collection::vec(1u8..=255, 0..9)),
            fstype in "[a-z0-9 \\\\]{1,8}",
            device: (u32, u32),
            id: u64,
            is_shared: bool,
            (own_flags, file_system_flags) in (flags(), flags()),
            options in prop::collection::vec("x[a-z=\\\\ ]{1,8}", 0..3),
        ) {
            let target = PathBuf::from(OsString::from_vec([b"/", &target[..]].concat()));
            let (root, source) = (PathBuf::from(OsString::from_vec(root)), OsString::from_vec(source));
            let info = MountInfo { fstype, device, flags: own_flags | file_system_flags, options };
            let mut entry =
                MountEntry { id, root, target, source, own_flags, file_system_flags, is_shared, info };
            let parsed = parse_mountinfo(entry.to_string().as_bytes());
            // The table prints `rw` in the absence of `ro`; it is not a requested option.
            let mut again = parsed;
            for entry in again.iter_mut().chain([&mut entry]) {
                entry.info.options.retain(|option| option != "rw");
            }
            prop_assert_eq!(again, vec![entry]);
        }
    }
}
