use std::io::{Cursor, SeekFrom};

use proptest::prelude::*;

use super::super::claim::{DiskClaim, SECTOR_BYTES, claim_offset, encode_claim};
use super::super::digest::DigestScope;
use super::super::disk_ends::WINDOW_BYTES;
use super::super::signatures::{MD_RAID_MAGIC, SIGNATURES, Start, ZFS_UBERBLOCKS};
use super::super::uuid::Uuid;
use super::*;

const MIB: u64 = 1 << 20;

/// A disk of zeros with these bytes.
fn zeroed_disk(size: u64, parts: &[(u64, &[u8])]) -> Cursor<Vec<u8>> {
    let mut bytes = vec![0; size as usize];
    for (offset, part) in parts {
        bytes[*offset as usize..][..part.len()].copy_from_slice(part);
    }
    Cursor::new(bytes)
}

fn probe_image(size: u64, parts: &[(u64, &[u8])]) -> VolumeContents {
    probe_disk(&mut zeroed_disk(size, parts)).unwrap()
}

/// The names and offsets of the found signatures.
fn signature_offsets(contents: VolumeContents) -> Vec<(&'static str, u64)> {
    let VolumeContents::Occupied { found, .. } = contents else { panic!("{contents:?}") };
    found.iter().map(|signature| (signature.name, signature.offset)).collect()
}

/// The UUID in the claims of the tests.
const OURS: Uuid = Uuid(*b"a UUID of 16 byt");

#[test]
fn every_known_signature_is_found_on_any_disk_size() {
    for size in [2 * MIB, 2 * MIB + 512, 3 * MIB + 4096, 5 * MIB + 1024] {
        assert!(matches!(probe_image(size, &[]), VolumeContents::Unread { .. }));
        for (name, from, distance, magic) in SIGNATURES {
            let offset = if matches!(from, Start) { *distance } else { size - distance };
            let found = match probe_image(size, &[(offset, magic)]) {
                VolumeContents::Xfs { found, .. } | VolumeContents::Occupied { found, .. } => found,
                other => panic!("{name} at {offset} of {size} is {other:?}"),
            };
            let is_it = |it: &&DiskSignature| (it.name, it.offset) == (*name, offset);
            assert!(found.iter().any(|it| is_it(&it)), "{name}: {found:?}");
        }
    }
}

#[test]
fn signatures_at_size_dependent_offsets_are_found() {
    for size in [2 * MIB, 2 * MIB + 512, 3 * MIB + 65_536 + 4096] {
        let newer = (size / 512 - 16) / 8 * 8 * 512;
        let older = size / 65_536 * 65_536 - 65_536;
        let labels = size / (256 << 10) * (256 << 10) - (512 << 10);
        for (name, offset, magic) in [
            ("linux_raid_member", newer, MD_RAID_MAGIC),
            ("linux_raid_member", older, MD_RAID_MAGIC),
            ("zfs_member", 128 << 10, ZFS_UBERBLOCKS[0]),
            ("zfs_member", (256 << 10) + (255 << 10), ZFS_UBERBLOCKS[1]),
            ("zfs_member", labels + (130 << 10), ZFS_UBERBLOCKS[0]),
            ("swap", 4086, b"SWAPSPACE2"),
            ("swap", 65_526, b"SWAPSPACE2"),
            ("swsuspend", 4086, b"S1SUSPEND\0"),
        ] {
            assert_eq!(signature_offsets(probe_image(size, &[(offset, magic)])), [(name, offset)], "{size}");
        }
    }
}

#[test]
fn unknown_bytes_are_data_and_not_blank() {
    for offset in [0, 511, 4096, 65_535, 65_536, MIB - 1, 7 * MIB, 8 * MIB - 1] {
        assert_eq!(signature_offsets(probe_image(8 * MIB, &[(offset, b"x")])), [("data", offset)]);
    }
}

#[test]
fn a_complete_xfs_has_its_label_and_an_incomplete_one_is_occupied() {
    let label = |label: &[u8], in_progress: u8| {
        probe_image(2 * MIB, &[(0, b"XFSB"), (108, label), (126, &[in_progress])])
    };
    assert!(matches!(label(b"nodekeel", 0), VolumeContents::Xfs { label, .. } if label == "nodekeel"));
    assert!(
        matches!(label(b"twelve-bytes", 0), VolumeContents::Xfs { label, .. } if label == "twelve-bytes")
    );
    assert!(matches!(label(b"\xff", 0), VolumeContents::Xfs { label, .. } if label == "\u{fffd}"));
    assert!(matches!(label(b"nodekeel", 1), VolumeContents::Occupied { .. }));
}

/// The superblock that the format of the tests' claims writes.
const OUR_XFS: [(u64, &[u8]); 3] = [(0, b"XFSB"), (32, &OURS.0), (108, b"ours")];

#[test]
fn a_claim_counts_at_its_offset_and_only_for_what_it_names() {
    for size in [2 * MIB, 3 * MIB + 512] {
        let at = claim_offset(size);
        let ours = encode_claim(OURS, "ours", &VolumeContents::Blank);
        assert_eq!(DiskClaim::parse(&ours).and_then(DiskClaim::uuid), Some(OURS));
        let interrupted = |parts: &[(u64, &[u8])]| probe_image(size, parts) == VolumeContents::Interrupted;
        assert!(interrupted(&[(at, &ours)]));
        let claimed = |parts: &[(u64, &'static [u8])]| [&OUR_XFS[..], parts, &[(at, &ours)]].concat();
        assert!(interrupted(&claimed(&[])), "complete, and not released");
        assert!(interrupted(&claimed(&[(126, &[1])])), "not complete");
        assert!(interrupted(&claimed(&[(8192, b"XAGI"), (8192 + 64, &OURS.0)])), "a header");
        assert!(!interrupted(&[(0, b"XFSB"), (126, &[1]), (at, &ours)]), "foreign, and not complete");
        assert!(!interrupted(&[(0, b"XFSB"), (32, &OURS.0), (108, b"other"), (at, &ours)]));
        assert!(!interrupted(&[(0, b"XFSB"), (108, b"ours"), (at, &ours)]), "foreign, with the same label");
        assert!(!interrupted(&[(0, b"LUKS\xba\xbe"), (at, &ours)]));
        assert!(matches!(probe_image(size, &[(at + 512, &ours)]), VolumeContents::Occupied { .. }));
        assert!(matches!(probe_image(size, &[(0, &ours)]), VolumeContents::Occupied { .. }));

        let ext: (u64, &[u8]) = (1080, b"\x53\xef");
        let erased = encode_claim(OURS, "ours", &probe_image(size, &[ext]));
        assert!(interrupted(&[ext, (at, &erased)]));
        assert!(interrupted(&[(700, b"what is left of it"), (at, &erased)]));
        assert!(!interrupted(&[ext, (0, b"LUKS\xba\xbe"), (at, &erased)]));
        assert!(!interrupted(&[ext, (1128, b"another UUID"), (at, &erased)]), "another ext");

        let gpt: (u64, &[u8]) = (size - 512, b"EFI PART");
        let erased = encode_claim(OURS, "ours", &probe_image(size, &[ext, gpt]));
        // mkfs.xfs wipes the start before the end, and writes after that.
        assert!(interrupted(&[ext, gpt, (at, &erased)]) && interrupted(&[gpt, (at, &erased)]));
        assert!(interrupted(&[&OUR_XFS[..], &[(126, &[1]), gpt, (at, &erased)]].concat()));
    }
}

#[test]
fn a_claim_does_not_change_the_fingerprints_it_names() {
    // A label of ZFS reaches into the block of the claim.
    let size = 2 * MIB;
    let (at, ring) = (claim_offset(size), size - (512 << 10));
    let zfs: (u64, &[u8]) = (ring + (128 << 10), ZFS_UBERBLOCKS[0]);
    let beside: (u64, &[u8]) = (at + 1024, b"beside the claim");
    let found = probe_image(size, &[zfs, beside]);
    let erased = encode_claim(OURS, "ours", &found);
    assert_eq!(probe_image(size, &[zfs, beside, (at, &erased)]), VolumeContents::Interrupted);
}

/// mkfs.xfs clears the first blocks at once, and then writes its headers sector by sector: after a power cut, a disk
/// with a cache may have any of these writes, and not the others.
#[test]
fn a_claim_covers_what_it_erases_beside_what_its_format_has_written() {
    let size = 2 * MIB;
    let at = claim_offset(size);
    let ext: [(u64, &[u8]); 3] = [(1080, b"\x53\xef"), (1128, b"its UUID"), (1600, b"more of it")];
    let claim = encode_claim(OURS, "ours", &probe_image(size, &ext));
    let probe = |parts: &[(u64, &[u8])]| probe_image(size, &[&[(at, &claim[..])], parts].concat());
    let [label, uuid, _] = ext;
    for around in [&OUR_XFS[..], &[(512, b"XAGF"), (576, &OURS.0)], &[]] {
        let erased = [&[label, uuid], around].concat();
        assert_eq!(probe(&erased), VolumeContents::Interrupted, "{around:?}");
        // Another ext that was made since.
        let other = [&[label, (1128, b"another")], around].concat();
        assert_ne!(probe(&other), VolumeContents::Interrupted, "{around:?}");
    }
    // Its sector alone does not prove what is around it.
    assert_ne!(probe(&[label, uuid, (2048, b"somebody's")]), VolumeContents::Interrupted);
}

#[test]
fn a_claim_of_a_disk_that_was_given_up_unread_covers_data_anywhere() {
    let size = 4 * MIB;
    let unread = probe_image(size, &[]);
    let claim = encode_claim(OURS, "ours", &unread);
    let parts: [(u64, &[u8]); 2] = [(claim_offset(size), &claim), (2 * MIB, b"anything")];
    assert_eq!(probe_image(size, &parts), VolumeContents::Interrupted);
    let blank = encode_claim(OURS, "ours", &VolumeContents::Blank);
    assert!(
        DiskClaim::parse(&blank).unwrap().erases_nothing()
            && !DiskClaim::parse(&claim).unwrap().erases_nothing()
    );
}

/// Claims of earlier builds name signatures by their blocks alone.
#[test]
fn a_claim_without_sectors_is_read() {
    let size = 2 * MIB;
    let ext: (u64, &[u8]) = (1080, b"\x53\xef");
    let claim = encode_claim(OURS, "ours", &probe_image(size, &[ext]));
    let text = String::from_utf8(claim.to_vec()).unwrap();
    let (line, _) = text.split_once(", sector").unwrap();
    let earlier = format!("{line}\n");
    let at = claim_offset(size);
    let probe = |parts: &[(u64, &[u8])]| probe_image(size, &[&[(at, earlier.as_bytes())], parts].concat());
    assert_eq!(probe(&[ext]), VolumeContents::Interrupted);
    let around = [&OUR_XFS[..], &[ext]].concat();
    assert_ne!(probe(&around), VolumeContents::Interrupted);
}

#[test]
fn signatures_of_one_kind_have_different_fingerprints() {
    let mark = |parts: &[(u64, &[u8])]| match probe_image(2 * MIB, parts) {
        VolumeContents::Xfs { found, .. } | VolumeContents::Occupied { found, .. } => found[0].fingerprint,
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

/// As mkfs.xfs 6.1 writes it with a stripe unit of 256 KiB: eight headers fill a block, and then come the record of
/// the unmount and sectors that have only the cycle.
#[test]
fn a_claim_covers_the_log_record_of_its_format() {
    let size = 4 * MIB;
    let claim = encode_claim(OURS, "ours", &VolumeContents::Blank);
    let mut block = [0; 4096];
    block.chunks_mut(SECTOR_BYTES).for_each(|sector| sector[3] = 1);
    let probe = |block: &[u8]| probe_image(size, &[(claim_offset(size), &claim[..]), (2 * MIB, block)]);
    assert_eq!(probe(&block), VolumeContents::Interrupted);
    block[..14].copy_from_slice(b"\0\0\0\x01\0\0\0\x08\xaa\x20\0\0\x6e\x55");
    assert_eq!(probe(&block), VolumeContents::Interrupted);
    for (at, byte) in [(8, 0xab), (20, 1), (511, 1), (515, 2), (600, 1)] {
        let mut other = block;
        other[at] = byte;
        assert!(matches!(probe(&other), VolumeContents::Occupied { .. }), "byte {at}");
    }
}

#[test]
fn a_claim_names_as_many_signatures_as_fit() {
    let found: Vec<_> = SIGNATURES
        .iter()
        .map(|(name, _, offset, _)| DiskSignature { name, offset: *offset, fingerprint: 7, sector: 8 })
        .collect();
    let digest = ContentsDigest::new(DigestScope::Sampled, &[]);
    let sector = encode_claim(OURS, "ours", &VolumeContents::Occupied { found, digest });
    let text = std::str::from_utf8(&sector).unwrap();
    assert!(text.contains("xfs_log at byte 0, 00000007, sector 00000008\n"), "{text}");
    assert_eq!(DiskClaim::parse(&sector).and_then(DiskClaim::uuid), Some(OURS));
}

#[test]
fn a_disk_too_small_or_unreadable_is_an_error() {
    assert!(probe_disk(&mut zeroed_disk(2 * MIB - 1, &[])).is_err());
    struct Broken(Cursor<Vec<u8>>);
    impl Read for Broken {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            // The last MiB is unreadable.
            if self.0.position() >= MIB { Err(io::ErrorKind::Other.into()) } else { self.0.read(bytes) }
        }
    }
    impl Seek for Broken {
        fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
            self.0.seek(to)
        }
    }
    assert!(probe_disk(&mut Broken(zeroed_disk(2 * MIB, &[]))).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn arbitrary_bytes_never_panic_and_are_never_blank(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
        fuzz_disk_image(&bytes);
    }

    #[test]
    fn a_disk_with_a_byte_near_either_end_is_never_formatted_unasked(
        size in 2 * MIB..4 * MIB,
        offset in 0..WINDOW_BYTES,
        is_end: bool,
        byte in 1u8..,
    ) {
        let offset = if is_end { size - 1 - offset } else { offset };
        let found = probe_image(size, &[(offset, &[byte])]);
        prop_assert!(matches!(found, VolumeContents::Occupied { .. }), "{found:?}");
    }

    /// Data without a signature, written after a power cut between the claim and the first byte of mkfs.xfs, or
    /// in the middle of it.
    #[test]
    fn foreign_data_on_a_claimed_blank_disk_is_named_wherever_it_shows(
        size in (2 * MIB..6 * MIB).prop_map(|size| size / 512 * 512),
        place in 0.0..1.0_f64,
        byte in 1u8..,
        is_started: bool,
    ) {
        let claim_at = claim_offset(size);
        let claim = encode_claim(OURS, "ours", &VolumeContents::Blank);
        // Not in the block of the superblock: the probe does not know there what belongs to it.
        let offset = (4096 + ((size - 4096) as f64 * place) as u64).min(size - 1);
        prop_assume!(!(claim_at..claim_at + SECTOR_BYTES as u64).contains(&offset));
        let started = if is_started { &OUR_XFS[..] } else { &[] };
        let claimed = |claim: &[u8]| probe_image(size, &[started, &[(claim_at, claim), (offset, &[byte])]].concat());
        let found = claimed(&claim);
        let named = signature_offsets(found.clone());
        prop_assert!(named.contains(&(DiskSignature::DATA, offset)), "{named:?}");
        // With consent, it is erased, and that resumes.
        let erased = encode_claim(OURS, "ours", &found);
        prop_assert_eq!(claimed(&erased), VolumeContents::Interrupted);
    }
}
