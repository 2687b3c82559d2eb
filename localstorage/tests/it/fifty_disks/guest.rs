//! Disks whose formats only a kernel writes.

use super::{Outcome, Workshop, check_damages};
use crate::fixture::in_child_process;

/// A member of a software RAID, with its metadata in this version.
macro_rules! md {
    ($version:literal) => {
        concat!(
            "modprobe -a md_mod raid1; mdadm --create /dev/md0 --quiet --run --level=1 --metadata=",
            $version,
            " --raid-devices=2 $DEVICE missing; dd if=$FILES/photo of=/dev/md0 conv=fsync; ",
            "mdadm --stop --quiet /dev/md0"
        )
    };
}

/// The size of each of them, in MiB.
const MEBIBYTES: u64 = 192;

/// Their names, and scripts that know the disk as `$DEVICE`.
const FORMATS: [(&str, &str); 9] = [
    (
        "lvm",
        "lvm vgcreate -q \"$LVM\" back $DEVICE; lvm lvcreate -q -y \"$LVM\" -L 64M -n letters back; \
         dd if=$FILES/photo of=/dev/mapper/back-letters conv=fsync; lvm vgchange -q \"$LVM\" -an back",
    ),
    (
        "lvm with metadata at both ends",
        "lvm pvcreate -q \"$LVM\" --pvmetadatacopies 2 $DEVICE; lvm vgcreate -q \"$LVM\" back $DEVICE",
    ),
    (
        "lvm thin",
        "lvm vgcreate -q \"$LVM\" back $DEVICE; lvm lvcreate -q -y \"$LVM\" -T -L 96M -V 64M -n letters back/pool; \
         dd if=$FILES/photo of=/dev/mapper/back-letters conv=fsync; lvm vgchange -q \"$LVM\" -an back",
    ),
    ("md 0.90", md!("0.90")),
    ("md 1.0", md!("1.0")),
    ("md 1.1", md!("1.1")),
    ("md 1.2", md!("1.2")),
    (
        "dm-integrity",
        "integritysetup format -q $DEVICE; integritysetup open $DEVICE back; \
         dd if=$FILES/photo of=/dev/mapper/back conv=fsync; integritysetup close back",
    ),
    // It has no header: everywhere, it looks random.
    (
        "plain dm-crypt",
        "cryptsetup open -q --type plain --cipher aes-xts-plain64 --key-size 512 --key-file $FILES/photo $DEVICE back; \
         mkfs.ext4 -q -F -d $FILES /dev/mapper/back; cryptsetup close back",
    ),
];

/// LVM without udev, and without the programs that watch and check a thin pool.
pub(super) const LVM: &str = "--config=activation{udev_sync=0 udev_rules=0 monitoring=0} \
                              global{thin_check_executable=\"\"}";

#[test]
#[ignore = "soak: needs kernel"]
fn disks_that_only_a_kernel_formats_are_refused_and_not_a_byte_changes() {
    in_child_process(disks_that_only_a_kernel_formats_are_refused_and_not_a_byte_changes, || {
        let workshop = Workshop::new();
        let mut all = Outcome::default();
        for (name, script) in FORMATS {
            let script = format!(
                "modprobe loop; DEVICE=$(losetup -f); losetup $DEVICE $DISK; {script}; losetup -d $DEVICE"
            );
            let outcome = check_damages(&workshop, name, &workshop.make_disk(name, MEBIBYTES, &script));
            all.refused += outcome.refused;
            all.missed.extend(outcome.missed);
        }
        println!("{} disks refused", all.refused);
        assert_eq!(all.missed, Vec::<String>::new());
        assert!(all.refused >= FORMATS.len(), "{} disks refused", all.refused);
    });
}
