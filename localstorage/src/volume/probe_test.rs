use std::io::Cursor;

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;

/// A disk of zeros with these bytes in it.
fn disk(size: u64, parts: &[(u64, &[u8])]) -> Cursor<Vec<u8>> {
    let mut bytes = vec![0; size as usize];
    for (offset, part) in parts {
        bytes[*offset as usize..][..part.len()].copy_from_slice(part);
    }
    Cursor::new(bytes)
}

fn contents(size: u64, parts: &[(u64, &[u8])]) -> Contents {
    probe(&mut disk(size, parts)).unwrap()
}

/// What was found, and where.
fn places(contents: Contents) -> Vec<(&'static str, u64)> {
    let Contents::Occupied { found } = contents else { panic!("{contents:?}") };
    found.iter().map(|signature| (signature.name, signature.offset)).collect()
}

/// The UUID of the file system that a claim is about.
const OURS: Uuid = Uuid(*b"a UUID of 16 byt");

#[test]
fn every_signature_of_the_table_is_found_alone_on_any_size_of_disk() {
    for size in [2 * MIB, 2 * MIB + 512, 3 * MIB + 4096, 5 * MIB + 1024] {
        assert_eq!(contents(size, &[]), Contents::Blank);
        for (name, from, distance, magic) in SIGNATURES {
            let offset = if matches!(from, Start) { *distance } else { size - distance };
            let found = match contents(size, &[(offset, magic)]) {
                Contents::Xfs { found, .. } | Contents::Occupied { found } => found,
                other => panic!("{name} at {offset} of {size} is {other:?}"),
            };
            let is_it = |it: &&Signature| (it.name, it.offset) == (*name, offset);
            assert!(found.iter().any(|it| is_it(&it)), "{name}: {found:?}");
        }
    }
}

#[test]
fn signatures_whose_place_depends_on_the_size_are_found() {
    for size in [2 * MIB, 2 * MIB + 512, 3 * MIB + 65_536 + 4096] {
        let newer = (size / 512 - 16) / 8 * 8 * 512;
        let older = size / 65_536 * 65_536 - 65_536;
        let labels = size / (256 << 10) * (256 << 10) - (512 << 10);
        for (name, offset, magic) in [
            ("linux_raid_member", newer, RAID),
            ("linux_raid_member", older, RAID),
            ("zfs_member", 128 << 10, UBERBLOCK[0]),
            ("zfs_member", (256 << 10) + (255 << 10), UBERBLOCK[1]),
            ("zfs_member", labels + (130 << 10), UBERBLOCK[0]),
            ("swap", 4086, b"SWAPSPACE2"),
            ("swap", 65_526, b"SWAPSPACE2"),
            ("swsuspend", 4086, b"S1SUSPEND\0"),
        ] {
            assert_eq!(places(contents(size, &[(offset, magic)])), [(name, offset)], "{size}");
        }
    }
}

#[test]
fn bytes_that_no_table_knows_are_data_and_not_blank() {
    for offset in [0, 511, 4096, 65_535] {
        assert_eq!(places(contents(2 * MIB, &[(offset, b"x")])), [("data", offset)]);
    }
    assert_eq!(contents(2 * MIB, &[(65_536, b"x")]), Contents::Blank);
}

#[test]
fn an_xfs_has_its_label_and_one_that_is_being_made_is_none() {
    let label = |label: &[u8], in_progress: u8| {
        contents(2 * MIB, &[(0, b"XFSB"), (108, label), (126, &[in_progress])])
    };
    assert!(matches!(label(b"nodekeel", 0), Contents::Xfs { label, .. } if label == "nodekeel"));
    assert!(matches!(label(b"twelve-bytes", 0), Contents::Xfs { label, .. } if label == "twelve-bytes"));
    assert!(matches!(label(b"\xff", 0), Contents::Xfs { label, .. } if label == "\u{fffd}"));
    assert!(matches!(label(b"nodekeel", 1), Contents::Occupied { .. }));
}

#[test]
fn a_claim_counts_in_its_place_and_for_what_it_names_alone() {
    for size in [2 * MIB, 3 * MIB + 512] {
        let at = claim_offset(size);
        let ours = claim(OURS, "ours", &Contents::Blank);
        assert_eq!(claimed(&ours), Some(OURS));
        let interrupted = |parts: &[(u64, &[u8])]| contents(size, parts) == Contents::Interrupted;
        assert!(interrupted(&[(at, &ours)]));
        let complete: [(u64, &[u8]); 3] = [(0, b"XFSB"), (32, &OURS.0), (108, b"ours")];
        assert!(interrupted(&[&complete[..], &[(at, &ours)]].concat()), "complete, and not released");
        assert!(interrupted(&[(0, b"XFSB"), (126, &[1]), (at, &ours)]), "not complete");
        assert!(interrupted(&[(700, b"half"), (at, &ours)]), "nothing that is known");
        assert!(!interrupted(&[(0, b"XFSB"), (32, &OURS.0), (108, b"other"), (at, &ours)]));
        assert!(!interrupted(&[(0, b"XFSB"), (108, b"ours"), (at, &ours)]), "somebody's, of the same label");
        assert!(!interrupted(&[(0, b"LUKS\xba\xbe"), (at, &ours)]));
        assert_eq!(contents(size, &[(at + 512, &ours)]), Contents::Blank);
        assert!(matches!(contents(size, &[(0, &ours)]), Contents::Occupied { .. }));

        let ext: (u64, &[u8]) = (1080, b"\x53\xef");
        let given_up = claim(OURS, "ours", &contents(size, &[ext]));
        assert!(interrupted(&[ext, (at, &given_up)]));
        assert!(!interrupted(&[ext, (0, b"LUKS\xba\xbe"), (at, &given_up)]));
        assert!(!interrupted(&[ext, (1128, b"another UUID"), (at, &given_up)]), "another ext");

        let gpt: (u64, &[u8]) = (size - 512, b"EFI PART");
        let given_up = claim(OURS, "ours", &contents(size, &[ext, gpt]));
        // mkfs.xfs wipes the start before the end, and writes after that.
        assert!(interrupted(&[ext, gpt, (at, &given_up)]) && interrupted(&[gpt, (at, &given_up)]));
        assert!(interrupted(&[gpt, (0, b"XFSB"), (126, &[1]), (at, &given_up)]));
    }
}

#[test]
fn a_claim_does_not_change_what_it_names() {
    // A label of ZFS reaches into the block of the claim.
    let size = 2 * MIB;
    let (at, ring) = (claim_offset(size), size - (512 << 10));
    let zfs: (u64, &[u8]) = (ring + (128 << 10), UBERBLOCK[0]);
    let beside: (u64, &[u8]) = (at + 1024, b"beside the claim");
    let found = contents(size, &[zfs, beside]);
    let given_up = claim(OURS, "ours", &found);
    assert_eq!(contents(size, &[zfs, beside, (at, &given_up)]), Contents::Interrupted);
}

#[test]
fn what_is_of_the_same_kind_has_another_mark() {
    let mark = |parts: &[(u64, &[u8])]| match contents(2 * MIB, parts) {
        Contents::Xfs { found, .. } | Contents::Occupied { found } => found[0].mark,
        other => panic!("{other:?}"),
    };
    let ext: (u64, &[u8]) = (1080, b"\x53\xef");
    assert_ne!(mark(&[ext, (1128, b"one")]), mark(&[ext, (1128, b"two")]));
    let gpt: (u64, &[u8]) = (2 * MIB - 512, b"EFI PART");
    assert_ne!(mark(&[gpt, (2 * MIB - 456, b"one")]), mark(&[gpt, (2 * MIB - 456, b"two")]));
    let xfs = |uuid, counters| mark(&[(0, b"XFSB"), (32, uuid), (108, b"nodekeel"), (128, counters)]);
    assert_ne!(xfs(b"one", b""), xfs(b"two", b""));
    assert_eq!(xfs(b"one", b"1"), xfs(b"one", b"2"), "a mount changes the superblock");
}

#[test]
fn a_claim_that_names_too_much_covers_what_it_has_room_for() {
    let found: Vec<_> =
        SIGNATURES.iter().map(|(name, _, offset, _)| Signature { name, offset: *offset, mark: 7 }).collect();
    let sector = claim(OURS, "ours", &Contents::Occupied { found });
    let text = std::str::from_utf8(&sector).unwrap();
    assert!(is_claim(&sector) && text.contains("xfs_log at byte 0, 00000007\n"), "{text}");
    assert_eq!(claimed(&sector), Some(OURS));
}

#[test]
fn what_is_too_small_or_cannot_be_read_is_an_error() {
    assert!(probe(&mut disk(2 * MIB - 1, &[])).is_err());
    struct Broken(Cursor<Vec<u8>>);
    impl Read for Broken {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            // The last MiB can't be read.
            if self.0.position() >= MIB { Err(io::ErrorKind::Other.into()) } else { self.0.read(bytes) }
        }
    }
    impl Seek for Broken {
        fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
            self.0.seek(to)
        }
    }
    assert!(probe(&mut Broken(disk(2 * MIB, &[]))).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn arbitrary_bytes_never_panic_and_are_never_blank(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
        disk_image(&bytes);
    }

    #[test]
    fn a_disk_with_a_byte_near_its_start_is_never_formatted_unasked(
        size in 2 * MIB..4 * MIB,
        offset in 0..QUIET as u64,
        byte in 1u8..,
    ) {
        let found = contents(size, &[(offset, &[byte])]);
        prop_assert!(matches!(found, Contents::Occupied { .. }), "{found:?}");
    }
}
