//! Reads `/proc/thread-self/mountinfo`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

use super::mounts::MountFlags;

/// One mount. *Source:* proc_pid_mountinfo(5).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mount {
    pub(super) id: u64,
    /// The device's major and minor number.
    pub(super) device: (u32, u32),
    /// Where it is mounted, as this process sees it.
    pub(super) point: PathBuf,
    /// The flags of this mount alone.
    pub(super) flags: MountFlags,
    /// What is mounted below it is seen in other places, too.
    pub(super) is_shared: bool,
}

/// Reads all lines; one that has another form, which no kernel has written so far, is left out.
pub(super) fn parse(text: &[u8]) -> Vec<Mount> {
    text.split(|byte| *byte == b'\n').filter_map(line).collect()
}

fn line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = number(fields.next()?)?;
    let _parent = fields.next()?;
    let device = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    let device = (device.0.parse().ok()?, device.1.parse().ok()?);
    let _root = fields.next()?;
    let point = PathBuf::from(OsString::from_vec(unescape(fields.next()?)));
    let flags = flags(fields.next()?);
    let is_shared = fields.take_while(|field| *field != b"-").any(|field| field.starts_with(b"shared:"));
    Some(Mount { id, device, point, flags, is_shared })
}

fn number(field: &[u8]) -> Option<u64> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

fn flags(options: &[u8]) -> MountFlags {
    let has = |wanted: &[u8]| options.split(|byte| *byte == b',').any(|option| option == wanted);
    MountFlags {
        read_only: has(b"ro"),
        no_suid: has(b"nosuid"),
        no_dev: has(b"nodev"),
        no_exec: has(b"noexec"),
    }
}

/// Undoes the kernel's `\ooo` for blanks, tabs, line ends and backslashes.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let (byte, after) = octal(rest).map_or((first, after), |byte| (byte, &rest[4..]));
        bytes.push(byte);
        rest = after;
    }
    bytes
}

/// The byte for which the first four bytes stand.
fn octal(text: &[u8]) -> Option<u8> {
    let [b'\\', digits @ ..] = text.get(..4)? else { return None };
    let value =
        |sum: u32, digit: &u8| (b'0'..=b'7').contains(digit).then(|| sum * 8 + u32::from(digit - b'0'));
    digits.iter().try_fold(0, value).and_then(|byte| u8::try_from(byte).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::ffi::OsStrExt as _;

    #[test]
    fn lines_of_a_kernel_are_read() {
        let text = b"22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
            36 22 98:1 /mnt1 /mnt/a\\040b\\134 ro,nosuid,nodev,noexec,noatime master:1 - ext3 /dev/root rw,errors=continue\n";
        let mounts = parse(text);
        assert_eq!(
            mounts[0],
            Mount {
                id: 22,
                device: (254, 0),
                point: "/".into(),
                flags: MountFlags::default(),
                is_shared: true
            }
        );
        assert_eq!(mounts[1].point, PathBuf::from("/mnt/a b\\"));
        let all = MountFlags { read_only: true, no_suid: true, no_dev: true, no_exec: true };
        assert!(!mounts[1].is_shared);
        assert_eq!((mounts[1].id, mounts[1].device, mounts[1].flags), (36, (98, 1), all));
    }

    #[test]
    fn the_mounts_of_this_machine_are_all_read() {
        let text = std::fs::read("/proc/thread-self/mountinfo").expect("procfs");
        assert_eq!(
            parse(&text).len(),
            text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).count()
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            parse(&text);
        }

        #[test]
        fn any_mount_point_is_read_as_the_kernel_escapes_it(name in proptest::collection::vec(1u8.., 1..40)) {
            let mut escaped = Vec::new();
            for byte in &name {
                match byte {
                    b' ' | b'\t' | b'\n' | b'\\' => escaped.extend(format!("\\{byte:03o}").bytes()),
                    byte => escaped.push(*byte),
                }
            }
            let line = [&b"1 2 3:4 / "[..], &escaped, b" rw - x y rw"].concat();
            let mounts = parse(&line);
            prop_assert_eq!(mounts[0].point.as_os_str().as_bytes(), &name[..]);
        }
    }
}
