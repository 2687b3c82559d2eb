use std::io::Cursor;

use super::*;

fn read_entries(bytes: &[u8]) -> Result<Vec<(TarEntry, Vec<u8>)>, ArchiveError> {
    // The tests reach the other default limits without reading much.
    let limits = ImportLimits { entries: 1000, ..ImportLimits::default() };
    let mut tar = TarReader::open(Cursor::new(bytes.to_vec()), &limits)?;
    let mut found = Vec::new();
    while let Some(entry) = tar.next_entry()? {
        let content = tar.read_all_content()?;
        found.push((entry, content));
    }
    tar.read_trailer()?;
    Ok(found)
}

fn create_archive(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = ::tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = ::tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, *content).expect("added");
    }
    builder.into_inner().expect("an archive")
}

#[test]
fn files_come_in_their_order_with_their_content() {
    let long = "d/".repeat(150) + "file";
    let large = vec![7; 100_000];
    let found =
        read_entries(&create_archive(&[("./a", b"1"), (&long, &large), ("empty", b"")])).expect("a tar");
    let names: Vec<_> = found.iter().map(|(entry, content)| (entry.name.as_str(), content.len())).collect();
    assert_eq!(names, [("a", 1), (long.as_str(), 100_000), ("empty", 0)]);
    assert!(found.iter().all(|(entry, _)| entry.kind == EntryKind::File));
}

#[test]
fn pax_headers_apply_to_the_next_entry() {
    let mut builder = ::tar::Builder::new(Vec::new());
    builder.append_pax_extensions([("path", "long/name".as_bytes()), ("mtime", b"1.5")]).expect("added");
    let mut header = ::tar::Header::new_ustar();
    header.set_size(2);
    builder.append_data(&mut header, "short", &b"ab"[..]).expect("added");
    let found = read_entries(&builder.into_inner().expect("an archive")).expect("a tar");
    assert_eq!((found[0].0.name.as_str(), found[0].1.as_slice()), ("long/name", &b"ab"[..]));
}

#[test]
fn links_are_entries_without_content() {
    let mut builder = ::tar::Builder::new(Vec::new());
    for kind in [::tar::EntryType::Symlink, ::tar::EntryType::Link] {
        let mut header = ::tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(0);
        builder.append_link(&mut header, "a/layer.tar", "../b/layer.tar").expect("added");
    }
    let found = read_entries(&builder.into_inner().expect("an archive")).expect("a tar");
    let to = || "../b/layer.tar".to_owned();
    assert_eq!(found[0].0.kind, EntryKind::Symlink(to()));
    assert_eq!(found[1].0.kind, EntryKind::Hardlink(to()));
}

#[test]
fn a_path_traversal_is_rejected() {
    for name in ["../etc/passwd", "/etc/passwd", "a/../../b", "./.."] {
        let mut bytes = create_archive(&[("x", b"")]);
        bytes[..100].fill(0);
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        let sum: u32 = bytes[..512]
            .iter()
            .enumerate()
            .map(|(at, byte)| if (148..156).contains(&at) { 32 } else { u32::from(*byte) })
            .sum();
        bytes[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        assert!(matches!(read_entries(&bytes), Err(ArchiveError::PathTraversal { .. })), "{name}");
    }
}

#[test]
fn an_archive_cut_before_its_end_is_truncated() {
    let complete = create_archive(&[("a", &[1; 700]), ("b", b"2")]);
    for length in 0..complete.len() - 1024 {
        let error = read_entries(&complete[..length]).expect_err("truncated");
        assert!(matches!(error, ArchiveError::Truncated { .. }), "{length}: {error}");
    }
    // One block of zeros ends a tar; anything after it is ignored.
    assert!(read_entries(&complete[..complete.len() - 512]).is_ok());
}

#[test]
fn invalid_tars_are_rejected() {
    for bytes in [vec![1; 512], vec![b'x'; 4096], b"{}".repeat(600)] {
        assert!(matches!(read_entries(&bytes), Err(ArchiveError::Tar { at: 0, .. })));
    }
    let mut flipped = create_archive(&[("a", b"1")]);
    flipped[5] ^= 1;
    assert!(matches!(read_entries(&flipped), Err(ArchiveError::Tar { .. })));
}

#[test]
fn sizes_beyond_the_limits_are_rejected_before_allocation() {
    let mut header = ::tar::Header::new_gnu();
    header.set_path("a").expect("short");
    header.set_size(u64::MAX >> 1);
    header.set_cksum();
    let of = |bytes: &[u8]| match read_entries(bytes) {
        Err(ArchiveError::Limit { of, .. }) => Some(of),
        _ => None,
    };
    assert_eq!(of(header.as_bytes()), Some(ArchiveLimitKind::Bytes));
    header.set_entry_type(::tar::EntryType::GNULongName);
    header.set_cksum();
    assert_eq!(of(header.as_bytes()), Some(ArchiveLimitKind::Name));
    let many: Vec<u8> = {
        header.set_entry_type(::tar::EntryType::Regular);
        header.set_size(0);
        header.set_cksum();
        header.as_bytes().repeat(1001)
    };
    assert_eq!(of(&many), Some(ArchiveLimitKind::Entries));
}

#[test]
fn numbers_are_octal_or_binary() {
    assert_eq!(parse_number(b"0000644\0"), Some(0o644));
    assert_eq!(parse_number(b"    12 \0"), Some(0o12));
    assert_eq!(parse_number(b"\0\0\0\0\0\0\0\0"), Some(0));
    assert_eq!(parse_number(&[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]), Some(65_536));
    for wrong in [&b"0000009\0"[..], b"-000001\0", b"+000001\0", &[0xff; 12]] {
        assert_eq!(parse_number(wrong), None, "{wrong:?}");
    }
}
