//! The kernel's list of mounts.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

/// One line of `/proc/self/mountinfo`. *Source:* proc_pid_mountinfo(5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) id: u64,
    /// Major and minor number.
    pub(crate) device: (u32, u32),
    /// What of the file system is mounted: `/` for all of it.
    pub(crate) root: PathBuf,
    pub(crate) point: PathBuf,
    /// Of the mount.
    pub(crate) options: OsString,
    pub(crate) kind: OsString,
    /// The device, for a file system that is on one.
    pub(crate) source: OsString,
    /// Of the file system, wherever it is mounted.
    pub(crate) super_options: OsString,
}

impl Mount {
    /// Reads a line; `None` for one that is none.
    pub(crate) fn parse(line: &[u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ');
        let id = number(fields.next()?)?;
        let _parent = fields.next()?;
        let device = fields.next()?;
        let colon = device.iter().position(|byte| *byte == b':')?;
        let device = (number(&device[..colon])?, number(&device[colon + 1..])?);
        let (root, point) = (unescape(fields.next()?), unescape(fields.next()?));
        let options = unescape(fields.next()?);
        // Optional fields, and what ends them.
        fields.by_ref().find(|field| *field == b"-")?;
        let (kind, source) = (unescape(fields.next()?), unescape(fields.next()?));
        let super_options = unescape(fields.next()?);
        let (root, point) = (root.into(), point.into());
        fields.next().is_none().then_some(Self {
            id,
            device,
            root,
            point,
            options,
            kind,
            source,
            super_options,
        })
    }

    pub(crate) fn is_read_only(&self) -> bool {
        [&self.options, &self.super_options].iter().any(|options| has_option(options, "ro"))
    }
}

impl fmt::Display for Mount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, device: (major, minor), .. } = self;
        let [root, point] = [&self.root, &self.point].map(|path| escape(path.as_os_str()));
        let [options, kind, source, super_options] =
            [&self.options, &self.kind, &self.source, &self.super_options].map(|text| escape(text));
        write!(f, "{id} 0 {major}:{minor} {root} {point} {options} - {kind} {source} {super_options}")
    }
}

fn has_option(options: &OsStr, option: &str) -> bool {
    options.as_bytes().split(|byte| *byte == b',').any(|one| one == option.as_bytes())
}

fn number<T: std::str::FromStr>(digits: &[u8]) -> Option<T> {
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(digits).ok().filter(|_| is_number)?.parse().ok()
}

/// The kernel writes space, tab, newline, backslash and `#` as a backslash and three octal digits.
fn unescape(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        match octal(rest) {
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

fn octal(escape: &[u8]) -> Option<u8> {
    let [b'\\', digits @ ..] = escape.get(..4)? else { return None };
    let text = std::str::from_utf8(digits).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    u8::from_str_radix(text?, 8).ok()
}

/// As the kernel would; what isn't ASCII is escaped too, so that it is text.
fn escape(field: &OsStr) -> String {
    let escaped = |byte: &u8| match byte {
        b'!'..=b'~' if !b"\\#".contains(byte) => char::from(*byte).to_string(),
        byte => format!("\\{byte:03o}"),
    };
    field.as_bytes().iter().map(escaped).collect()
}

/// Every mount of the text of a mountinfo file; lines that are none are passed over.
pub(crate) fn parse(text: &[u8]) -> impl Iterator<Item = Mount> {
    text.split(|byte| *byte == b'\n').filter_map(Mount::parse)
}

/// The mount of a descriptor, by what fdinfo says of it. *Source:* proc_pid_fdinfo(5).
pub(crate) fn mount_id(fdinfo: &[u8]) -> Option<u64> {
    let mut lines = fdinfo.split(|byte| *byte == b'\n');
    number(lines.find_map(|line| line.strip_prefix(b"mnt_id:"))?.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &[u8] =
        br"36 35 98:0 /mnt1 /mnt\0402 rw,noatime master:1 shared:2 - ext4 /dev/root rw,prjquota";

    #[test]
    fn a_line_is_read_with_its_optional_fields_and_escapes() {
        let mount = Mount::parse(LINE).unwrap();
        assert_eq!((mount.id, mount.device), (36, (98, 0)));
        assert_eq!((mount.root, mount.point), ("/mnt1".into(), "/mnt 2".into()));
        assert_eq!((mount.kind, mount.source), ("ext4".into(), "/dev/root".into()));
        assert_eq!((mount.options, mount.super_options), ("rw,noatime".into(), "rw,prjquota".into()));
    }

    #[test]
    fn read_only_is_an_option_of_either_and_no_part_of_another() {
        let with = |options: &str, super_options: &str| {
            let line = format!("1 0 8:1 / / {options} - xfs /dev/sda {super_options}");
            Mount::parse(line.as_bytes()).unwrap().is_read_only()
        };
        assert!(with("ro,noatime", "rw") && with("rw", "rw,ro"));
        assert!(!with("rw,errors=ro", "rw,norecovery,prompt"));
    }

    #[test]
    fn what_is_no_line_is_passed_over() {
        for line in
            ["", "x", "1 0 8:1 / / rw", "1 0 8 / / rw - xfs /dev/sda rw", "1 0 8:+1 / / rw - xfs a rw"]
        {
            assert_eq!(Mount::parse(line.as_bytes()), None, "{line:?}");
        }
        assert_eq!(parse(&[LINE, b"\nrubbish\n", LINE].concat()).count(), 2);
    }

    #[test]
    fn the_mount_of_a_descriptor_is_found() {
        assert_eq!(mount_id(b"pos:\t0\nflags:\t0100000\nmnt_id:\t29\nino:\t2\n"), Some(29));
        assert_eq!(mount_id(b"pos:\t0\nmnt_id:\tx\n"), None);
    }
}
