//! What a test needs of its guest: the rest of `#[ignore = "needs kernel with …"]`.

use std::collections::BTreeSet;

/// What a guest has or has not: a network with `network`, a TPM 2.0 with `tpm`, and programs: the conformance tests of
/// CSI drivers, gVisor with a containerd that runs it, etcd and etcdctl, containerd and ctr, systemd and systemctl, tangd.
const PARTS: [&str; 8] = ["network", "tpm", "csi-sanity", "gvisor", "etcd", "containerd", "systemd", "tang"];

/// The devices and programs of a guest. Of two tests with different needs, the larger one serves both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GuestNeed {
    /// Empty disks.
    pub(crate) disks: Disks,
    /// Empty disks with logical blocks of 4096 bytes.
    pub(crate) disks_4kn: Disks,
    /// Bytes of memory.
    pub(crate) memory: u64,
    /// Those of [`PARTS`] that it has.
    parts: BTreeSet<&'static str>,
}

/// So many disks of so many bytes each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Disks {
    pub(crate) count: u32,
    pub(crate) bytes: u64,
}

impl Default for GuestNeed {
    fn default() -> Self {
        let (disks, disks_4kn) = (Disks::default(), Disks::default());
        Self { disks, disks_4kn, memory: 1 << 30, parts: BTreeSet::new() }
    }
}

impl GuestNeed {
    /// Reads `kernel`, or `kernel with` and a list separated by commas or `and`: `2 disks of 1 GiB`,
    /// `a disk of 512 MiB`, `a 4Kn disk of 1 GiB`, `2 GiB of memory`, and the [`PARTS`]. A guest's tests are root, so
    /// `root` adds nothing.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let unknown = || format!("needs {text:?}, which this command doesn't know");
        let rest = text.trim().strip_prefix("kernel").ok_or_else(unknown)?;
        let items = rest.replace(" with ", ", ").replace(" and ", ", ");
        let items = match items.strip_prefix(", ") {
            None if items.is_empty() => return Ok(Self::default()),
            None => return Err(unknown()),
            Some(items) => items,
        };
        let mut need = Self::default();
        for item in items.split(", ") {
            need.add_item(item.trim())
                .ok_or_else(|| format!("needs a kernel with {item:?}, which this command doesn't know"))?;
        }
        Ok(need)
    }

    fn add_item(&mut self, item: &str) -> Option<()> {
        if let Some(part) = PARTS.into_iter().find(|part| *part == item) {
            self.parts.insert(part);
            return Some(());
        }
        if item == "root" {
            return Some(());
        }
        let (count, what) = item.split_once(' ')?;
        let count = if count == "a" { 1 } else { count.parse().ok()? };
        match what.split_once(" of ") {
            Some((unit, "memory")) => self.memory = parse_size(count, unit)?,
            Some((kind, size)) => {
                let (number, unit) = size.split_once(' ')?;
                let disks = Disks { count, bytes: parse_size(number.parse().ok()?, unit)? };
                match kind {
                    "disk" | "disks" => self.disks = disks,
                    "4Kn disk" | "4Kn disks" => self.disks_4kn = disks,
                    _ => return None,
                }
            }
            None => return None,
        }
        Some(())
    }

    /// Whether it has one of [`PARTS`].
    pub(crate) fn has(&self, part: &str) -> bool {
        self.parts.contains(part)
    }

    /// A guest that serves both.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.parts.extend(other.parts);
        Self {
            disks: self.disks.and(other.disks),
            disks_4kn: self.disks_4kn.and(other.disks_4kn),
            memory: self.memory.max(other.memory),
            parts: self.parts,
        }
    }
}

impl Disks {
    fn and(self, other: Self) -> Self {
        Self { count: self.count.max(other.count), bytes: self.bytes.max(other.bytes) }
    }
}

fn parse_size(number: u32, unit: &str) -> Option<u64> {
    let shift = match unit {
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    // Zero is a mistake.
    (number > 0).then(|| u64::from(number) << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_are_parsed() {
        let need = |text: &str| GuestNeed::parse(text).unwrap();
        assert_eq!(need("kernel and root"), GuestNeed::default());
        let large = need("kernel with 2 disks of 1 GiB, network and 1536 MiB of memory");
        assert_eq!((large.disks, large.memory), (Disks { count: 2, bytes: 1 << 30 }, 1536 << 20));
        assert!(large.has("network") && !large.has("tpm"));
        assert_eq!(need("kernel with a 4Kn disk of 512 MiB").disks_4kn, Disks { count: 1, bytes: 512 << 20 });
        for part in PARTS {
            assert!(need(&format!("kernel with a disk of 1 GiB and {part}")).has(part));
        }
    }

    #[test]
    fn an_unknown_need_is_an_error() {
        for text in [
            "",
            "kernels",
            "kernel with",
            "kernel with disks",
            "kernel with 2 disks",
            "kernel with 0 GiB of memory",
            "kernel with 1 TiB of memory",
            "kernel with two disks of 1 GiB",
            "kernel with a moon rocket",
            "kernel, moon",
        ] {
            assert!(GuestNeed::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn one_guest_serves_two_tests() {
        let [one, two] = ["kernel with 2 disks of 1 GiB", "kernel with a disk of 4 GiB and network"]
            .map(|text| GuestNeed::parse(text).unwrap());
        let both = one.clone().and(two.clone());
        assert_eq!(both.disks, Disks { count: 2, bytes: 4 << 30 });
        assert!(both.has("network") && both == two.and(one));
    }
}
