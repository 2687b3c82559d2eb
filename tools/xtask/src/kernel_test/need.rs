//! What a test needs of its guest: the rest of `#[ignore = "needs kernel with …"]`.

/// The devices and programs of a guest. Of two tests with different needs, the larger one serves both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GuestNeed {
    /// How many empty disks.
    pub(crate) disks: u32,
    /// Bytes of each of them.
    pub(crate) disk_size: u64,
    /// How many empty disks with logical blocks of 4096 bytes.
    pub(crate) disks_4kn: u32,
    /// Bytes of each of them.
    pub(crate) disk_size_4kn: u64,
    /// Bytes of memory.
    pub(crate) memory: u64,
    pub(crate) cpus: u32,
    pub(crate) network: bool,
    /// The conformance tests of CSI drivers.
    pub(crate) csi_sanity: bool,
    /// A TPM 2.0.
    pub(crate) tpm: bool,
    /// gVisor, and a containerd that runs it.
    pub(crate) gvisor: bool,
    /// etcd and etcdctl.
    pub(crate) etcd: bool,
    /// containerd and ctr.
    pub(crate) containerd: bool,
    /// systemd and systemctl.
    pub(crate) systemd: bool,
}

impl Default for GuestNeed {
    fn default() -> Self {
        Self {
            disks: 0,
            disk_size: 0,
            disks_4kn: 0,
            disk_size_4kn: 0,
            memory: 1 << 30,
            cpus: 2,
            network: false,
            csi_sanity: false,
            tpm: false,
            gvisor: false,
            etcd: false,
            containerd: false,
            systemd: false,
        }
    }
}

impl GuestNeed {
    /// Reads `kernel`, or `kernel with` and a list separated by commas or `and`: `2 disks of 1 GiB`,
    /// `a disk of 512 MiB`, `a 4Kn disk of 1 GiB`, `2 GiB of memory`, `4 processors`, `network`, `csi-sanity`, `tpm`,
    /// `gvisor`, `etcd`, `containerd`, `systemd`. A guest's tests are root, so `root` adds nothing.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let unknown = || format!("needs {text:?}, which this command doesn't know");
        let rest = text.trim().strip_prefix("kernel").ok_or_else(unknown)?;
        let items = rest.replace(" with ", ", ").replace(" and ", ", ");
        let items = match items.strip_prefix(", ") {
            None if items.is_empty() => return Ok(Self::default()),
            None => return Err(unknown()),
            Some(items) => items.to_owned(),
        };
        items.split(", ").try_fold(Self::default(), |need, item| need.with(item.trim()))
    }

    fn with(mut self, item: &str) -> Result<Self, String> {
        let unknown = || format!("needs a kernel with {item:?}, which this command doesn't know");
        match item {
            "network" | "a network" => self.network = true,
            "csi-sanity" => self.csi_sanity = true,
            "tpm" => self.tpm = true,
            "gvisor" => self.gvisor = true,
            "etcd" => self.etcd = true,
            "containerd" => self.containerd = true,
            "systemd" => self.systemd = true,
            "root" => {}
            _ => {
                let (count, what) = item.split_once(' ').ok_or_else(unknown)?;
                let count = if count == "a" { 1 } else { count.parse::<u32>().map_err(|_| unknown())? };
                match what.split_once(" of ") {
                    Some((unit, "memory")) => self.memory = size(count, unit).ok_or_else(unknown)?,
                    Some((kind @ ("disk" | "disks" | "4Kn disk" | "4Kn disks"), bytes)) => {
                        let (number, unit) = bytes.split_once(' ').ok_or_else(unknown)?;
                        let number = number.parse().map_err(|_| unknown())?;
                        let bytes = size(number, unit).ok_or_else(unknown)?;
                        match kind.starts_with("4Kn") {
                            false => (self.disks, self.disk_size) = (count, bytes),
                            true => (self.disks_4kn, self.disk_size_4kn) = (count, bytes),
                        }
                    }
                    None if matches!(what, "processor" | "processors") => self.cpus = count,
                    _ => return Err(unknown()),
                }
            }
        }
        Ok(self)
    }

    /// A guest that serves both.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            disks: self.disks.max(other.disks),
            disk_size: self.disk_size.max(other.disk_size),
            disks_4kn: self.disks_4kn.max(other.disks_4kn),
            disk_size_4kn: self.disk_size_4kn.max(other.disk_size_4kn),
            memory: self.memory.max(other.memory),
            cpus: self.cpus.max(other.cpus),
            network: self.network || other.network,
            csi_sanity: self.csi_sanity || other.csi_sanity,
            tpm: self.tpm || other.tpm,
            gvisor: self.gvisor || other.gvisor,
            etcd: self.etcd || other.etcd,
            containerd: self.containerd || other.containerd,
            systemd: self.systemd || other.systemd,
        }
    }
}

fn size(number: u32, unit: &str) -> Option<u64> {
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
        let need = GuestNeed::parse("kernel with 2 disks of 1 GiB, network and 1536 MiB of memory").unwrap();
        let expected = GuestNeed {
            disks: 2,
            disk_size: 1 << 30,
            memory: 1536 << 20,
            network: true,
            ..GuestNeed::default()
        };
        assert_eq!(need, expected);
        assert_eq!(GuestNeed::parse("kernel"), Ok(GuestNeed::default()));
        assert_eq!(GuestNeed::parse("kernel and root"), Ok(GuestNeed::default()));
        let need = GuestNeed::parse("kernel with a disk of 512 MiB and 4 processors").unwrap();
        assert_eq!((need.disks, need.disk_size, need.cpus), (1, 512 << 20, 4));
        let need = GuestNeed::parse("kernel with a disk of 1 GiB and a 4Kn disk of 512 MiB").unwrap();
        assert_eq!((need.disks, need.disks_4kn, need.disk_size_4kn), (1, 1, 512 << 20));
        assert!(GuestNeed::parse("kernel with csi-sanity").unwrap().csi_sanity);
        assert!(GuestNeed::parse("kernel with a disk of 1 GiB and tpm").unwrap().tpm);
        assert!(GuestNeed::parse("kernel with gvisor and 2 GiB of memory").unwrap().gvisor);
        let need = GuestNeed::parse("kernel with a disk of 700 MiB, etcd and containerd").unwrap();
        assert!(need.etcd && need.containerd);
        assert!(GuestNeed::parse("kernel with systemd").unwrap().systemd);
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
        let both = one.and(two);
        assert_eq!((both.disks, both.disk_size, both.network), (2, 4 << 30, true));
        assert_eq!(both, two.and(one));
    }
}
