//! The kernel's list of mounts.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

/// One line of `/proc/self/mountinfo`. *Source:* proc_pid_mountinfo(5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MountinfoEntry {
    pub(crate) id: u64,
    /// Major and minor number.
    pub(crate) device: (u32, u32),
    /// The directory of the file system that is mounted: `/` for all of it.
    pub(crate) root: PathBuf,
    pub(crate) mount_point: PathBuf,
    /// The options of this mount.
    pub(crate) options: OsString,
    pub(crate) fs_type: OsString,
    /// The device, for a file system on a device.
    pub(crate) source: OsString,
    /// The options of the file system, the same for all its mounts.
    pub(crate) super_options: OsString,
}

impl MountinfoEntry {
    /// Parses a line; `None` if it is malformed.
    pub(crate) fn parse_line(line: &[u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ');
        let id = parse_number(fields.next()?)?;
        let _parent = fields.next()?;
        let device = fields.next()?;
        let colon = device.iter().position(|byte| *byte == b':')?;
        let device = (parse_number(&device[..colon])?, parse_number(&device[colon + 1..])?);
        let (root, point) = (unescape_field(fields.next()?), unescape_field(fields.next()?));
        let options = unescape_field(fields.next()?);
        // Optional fields, and the separator after them.
        fields.by_ref().find(|field| *field == b"-")?;
        let (kind, source) = (unescape_field(fields.next()?), unescape_field(fields.next()?));
        let super_options = unescape_field(fields.next()?);
        let (root, point) = (root.into(), point.into());
        fields.next().is_none().then_some(Self {
            id,
            device,
            root,
            mount_point: point,
            options,
            fs_type: kind,
            source,
            super_options,
        })
    }

    /// Whether nothing can be written through this mount.
    pub(crate) fn is_read_only(&self) -> bool {
        has_option(&self.options, "ro") || self.is_read_only_file_system()
    }

    /// Whether nothing can be written through any mount of the file system.
    pub(crate) fn is_read_only_file_system(&self) -> bool {
        has_option(&self.super_options, "ro")
    }
}

impl fmt::Display for MountinfoEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, device: (major, minor), .. } = self;
        let [root, point] = [&self.root, &self.mount_point].map(|path| escape_field(path.as_os_str()));
        let [options, kind, source, super_options] =
            [&self.options, &self.fs_type, &self.source, &self.super_options].map(|text| escape_field(text));
        write!(f, "{id} 0 {major}:{minor} {root} {point} {options} - {kind} {source} {super_options}")
    }
}

fn has_option(options: &OsStr, option: &str) -> bool {
    options.as_bytes().split(|byte| *byte == b',').any(|one| one == option.as_bytes())
}

fn parse_number<T: std::str::FromStr>(digits: &[u8]) -> Option<T> {
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(digits).ok().filter(|_| is_number)?.parse().ok()
}

/// The kernel writes space, tab, newline, backslash and `#` as a backslash and three octal digits.
fn unescape_field(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        match parse_octal_escape(rest) {
            Some(byte) => {
                bytes.push(byte);
                rest = &rest[4..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    OsString::from_vec(bytes)
}

fn parse_octal_escape(escape: &[u8]) -> Option<u8> {
    let [b'\\', digits @ ..] = escape.get(..4)? else { return None };
    let text = std::str::from_utf8(digits).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    u8::from_str_radix(text?, 8).ok()
}

/// Escapes as the kernel does, and also escapes non-ASCII bytes, so that the result is text.
fn escape_field(field: &OsStr) -> String {
    let escaped = |byte: &u8| match byte {
        b'!'..=b'~' if !b"\\#".contains(byte) => char::from(*byte).to_string(),
        byte => format!("\\{byte:03o}"),
    };
    field.as_bytes().iter().map(escaped).collect()
}

/// Every mount in the text of a mountinfo file; malformed lines are skipped.
pub(crate) fn parse_mountinfo(text: &[u8]) -> impl Iterator<Item = MountinfoEntry> {
    text.split(|byte| *byte == b'\n').filter_map(MountinfoEntry::parse_line)
}

/// The mount id of a descriptor, from its fdinfo. *Source:* proc_pid_fdinfo(5).
pub(crate) fn parse_mount_id(fdinfo: &[u8]) -> Option<u64> {
    let mut lines = fdinfo.split(|byte| *byte == b'\n');
    parse_number(lines.find_map(|line| line.strip_prefix(b"mnt_id:"))?.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &[u8] =
        br"36 35 98:0 /mnt1 /mnt\0402 rw,noatime master:1 shared:2 - ext4 /dev/root rw,prjquota";

    #[test]
    fn a_line_is_parsed_with_optional_fields_and_escapes() {
        let mount = MountinfoEntry::parse_line(LINE).unwrap();
        assert_eq!((mount.id, mount.device), (36, (98, 0)));
        assert_eq!((mount.root, mount.mount_point), ("/mnt1".into(), "/mnt 2".into()));
        assert_eq!((mount.fs_type, mount.source), ("ext4".into(), "/dev/root".into()));
        assert_eq!((mount.options, mount.super_options), ("rw,noatime".into(), "rw,prjquota".into()));
    }

    #[test]
    fn read_only_is_a_whole_option_of_the_mount_or_the_file_system() {
        let with = |options: &str, super_options: &str| {
            let line = format!("1 0 8:1 / / {options} - xfs /dev/sda {super_options}");
            MountinfoEntry::parse_line(line.as_bytes()).unwrap().is_read_only()
        };
        assert!(with("ro,noatime", "rw") && with("rw", "rw,ro"));
        assert!(!with("rw,errors=ro", "rw,norecovery,prompt"));
    }

    #[test]
    fn malformed_lines_are_skipped() {
        for line in
            ["", "x", "1 0 8:1 / / rw", "1 0 8 / / rw - xfs /dev/sda rw", "1 0 8:+1 / / rw - xfs a rw"]
        {
            assert_eq!(MountinfoEntry::parse_line(line.as_bytes()), None, "{line:?}");
        }
        assert_eq!(parse_mountinfo(&[LINE, b"\nrubbish\n", LINE].concat()).count(), 2);
    }

    #[test]
    fn the_mount_id_of_a_descriptor_is_parsed() {
        assert_eq!(parse_mount_id(b"pos:\t0\nflags:\t0100000\nmnt_id:\t29\nino:\t2\n"), Some(29));
        assert_eq!(parse_mount_id(b"pos:\t0\nmnt_id:\tx\n"), None);
    }
}
