//! The devices that the kernel has on top of a disk, and the mounts of them: who keeps it from exclusive use.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::identity::{device_directory, device_numbers};
use crate::mount::mount_table;

/// A device on top of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    /// The name of the kernel, such as `dm-0`.
    pub(super) device: String,
    /// The major and minor number, as in sysfs.
    numbers: String,
    /// The name of a mapping of device-mapper; empty for other devices.
    pub(super) name: String,
    /// The identifier of a mapping; empty for other devices.
    pub(super) identifier: String,
}

#[cfg(all(test, feature = "luks"))]
impl Holder {
    pub(super) fn new(device: &str, name: &str, identifier: &str) -> Holder {
        let [device, name, identifier] = [device, name, identifier].map(str::to_owned);
        Holder { device, numbers: String::new(), name, identifier }
    }
}

/// The devices on top of one, by its directory in sysfs; each comes after all on top of it.
///
/// *Source:* Linux `Documentation/ABI/stable/sysfs-block`, `holders`.
fn find_holders(directory: &Path) -> io::Result<Vec<Holder>> {
    let mut found: Vec<Holder> = Vec::new();
    for entry in fs::read_dir(directory.join("holders"))? {
        let entry = entry?;
        let attribute = |name: &str| {
            Ok::<_, io::Error>(fs::read_to_string(entry.path().join(name))?.trim_end().to_owned())
        };
        for above in find_holders(&entry.path())? {
            if !found.contains(&above) {
                found.push(above);
            }
        }
        let holder = Holder {
            device: entry.file_name().to_string_lossy().into_owned(),
            numbers: attribute("dev")?,
            // Other devices have none.
            name: attribute("dm/name").unwrap_or_default(),
            identifier: attribute("dm/uuid").unwrap_or_default(),
        };
        if !found.contains(&holder) {
            found.push(holder);
        }
    }
    Ok(found)
}

/// The devices on top of an open disk; none on an image.
pub(super) fn holders_of(disk: &fs::File) -> io::Result<Vec<Holder>> {
    device_directory(disk)?.map_or(Ok(Vec::new()), |directory| find_holders(&directory))
}

/// Describes who uses a disk, for people, with what to type; none if the kernel names nobody.
pub(super) fn describe_users(disk: &fs::File) -> io::Result<Option<String>> {
    let Some((major, minor)) = device_numbers(&disk.metadata()?) else { return Ok(None) };
    let holders = holders_of(disk)?;
    let mut devices: BTreeSet<String> = holders.iter().map(|holder| holder.numbers.clone()).collect();
    devices.insert(format!("{major}:{minor}"));
    let mounts = mount_table()?.into_iter().filter(|mount| {
        let (major, minor) = mount.info.device;
        devices.contains(&format!("{major}:{minor}"))
    });
    Ok(describe(&holders, mounts.map(|mount| mount.target)))
}

fn describe(holders: &[Holder], mounts: impl Iterator<Item = PathBuf>) -> Option<String> {
    let mounts = mounts.map(|target| format!("mounted on {0}: `umount {0}`", target.display()));
    let holders = holders.iter().map(|Holder { device, name, identifier, .. }| match name.as_str() {
        "" => format!("part of {device}: stop that device"),
        _ if identifier.starts_with("CRYPT-") => format!("open as mapping {name}: `cryptsetup close {name}`"),
        _ => format!("part of mapping {name}: `dmsetup remove {name}`"),
    });
    let all: Vec<_> = mounts.chain(holders).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_are_found_from_the_top_and_described_with_what_to_type() {
        let sys = tempfile::tempdir().unwrap();
        let add = |path: &str, numbers: &str, mapping: Option<(&str, &str)>| {
            let directory = sys.path().join(path);
            fs::create_dir_all(directory.join("holders")).unwrap();
            fs::write(directory.join("dev"), format!("{numbers}\n")).unwrap();
            if let Some((name, identifier)) = mapping {
                fs::create_dir(directory.join("dm")).unwrap();
                fs::write(directory.join("dm/name"), format!("{name}\n")).unwrap();
                fs::write(directory.join("dm/uuid"), format!("{identifier}\n")).unwrap();
            }
        };
        add("vdb", "254:16", None);
        assert_eq!(find_holders(&sys.path().join("vdb")).unwrap(), []);
        add("vdb/holders/dm-0", "253:0", Some(("data_dif", "CRYPT-INTEGRITY-data_dif")));
        add("vdb/holders/dm-0/holders/dm-1", "253:1", Some(("data", "CRYPT-LUKS2-1-data")));
        let holders = find_holders(&sys.path().join("vdb")).unwrap();
        let devices: Vec<_> = holders.iter().map(|holder| holder.device.as_str()).collect();
        assert_eq!(devices, ["dm-1", "dm-0"]);
        let text = describe(&holders, ["/srv".into()].into_iter()).unwrap();
        assert!(
            text.starts_with("mounted on /srv: `umount /srv`; open as mapping data: `cryptsetup close data`"),
            "{text}"
        );
        assert_eq!(describe(&[], std::iter::empty()), None);
    }
}
