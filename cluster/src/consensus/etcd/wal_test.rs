//! A log that is rewritten, from records as etcd writes them.

use super::*;

const MEMBER: u64 = 0x1111;
const OTHER: u64 = 0x2222;

fn metadata() -> (i64, Vec<u8>) {
    (METADATA, Metadata { member: MEMBER, cluster: 7 }.encode_to_vec())
}

fn entry(term: u64, index: u64) -> (i64, Vec<u8>) {
    (ENTRY, Entry { kind: 0, term, index, data: Some(vec![index as u8; 40]) }.encode_to_vec())
}

fn change(term: u64, index: u64, kind: i32, member: u64) -> (i64, Vec<u8>) {
    let data = Some(ConfChange { id: 5, kind, member }.encode_to_vec());
    (ENTRY, Entry { kind: CONF_CHANGE, term, index, data }.encode_to_vec())
}

fn state(term: u64, commit: u64) -> (i64, Vec<u8>) {
    (STATE, HardState { term, vote: MEMBER, commit }.encode_to_vec())
}

fn snapshot(index: u64, term: u64) -> (i64, Vec<u8>) {
    (SNAPSHOT, Snapshot { index, term }.encode_to_vec())
}

/// Writes segments, each with the head that etcd gives it, and zeros at the end.
fn write_segments(dir: &Dir, segments: &[&[(i64, Vec<u8>)]]) {
    let mut crc = 0;
    for (number, records) in segments.iter().enumerate() {
        let mut writer = LogWriter { file: Vec::new(), crc };
        writer.write(CRC, None).unwrap();
        for (kind, data) in [metadata()].iter().chain(*records) {
            writer.write(*kind, Some(data.clone())).unwrap();
        }
        crc = writer.crc;
        writer.file.resize(writer.file.len() + 4096, 0);
        let name = format!("{number:016x}-{:016x}.wal", number * 3);
        dir.write(name, &writer.file, FileMode::new(0o600)).unwrap();
    }
}

/// The entries that count, the state, and the id of the cluster, as etcd reads them.
fn read_back(dir: &Dir) -> (Vec<Entry>, HardState, u64) {
    let (mut entries, mut state, mut cluster) = (Vec::<Entry>::new(), HardState::default(), 0);
    let names = read_log(dir, |record| {
        let data = record.data.as_deref().unwrap_or_default();
        match record.kind {
            METADATA => cluster = Metadata::decode(data).unwrap().cluster,
            STATE => state = HardState::decode(data).unwrap(),
            ENTRY => {
                let entry = Entry::decode(data).unwrap();
                entries.retain(|before| before.index < entry.index);
                entries.push(entry);
            }
            _ => {}
        }
        Ok(())
    });
    assert_eq!(names.unwrap(), ["0000000000000000-0000000000000000.wal"]);
    (entries, state, cluster)
}

/// Rewrites these segments; returns the terms and indexes of the entries, and the state.
fn rewrite(segments: &[&[(i64, Vec<u8>)]]) -> Result<(Vec<(u64, u64)>, HardState), LogError> {
    let scratch = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"]
        .map(|name| Dir::open(scratch.path()).unwrap().ensure_dir(name, FileMode::PRIVATE_DIR).unwrap());
    write_segments(&from, segments);
    rewrite_log(&from, &to, &BTreeSet::from([MEMBER, OTHER]))?;
    let (entries, state, cluster) = read_back(&to);
    assert_ne!(cluster, 7, "the id of the former cluster");
    Ok((entries.iter().map(|entry| (entry.term, entry.index)).collect(), state))
}

#[test]
fn all_entries_are_committed_and_the_others_removed_after_them() {
    let one = [snapshot(0, 0), entry(1, 1), entry(1, 2), state(1, 1)];
    let two = [state(1, 2), entry(2, 3), entry(2, 4), state(3, 2)];
    let (entries, state) = rewrite(&[&one, &two]).unwrap();
    assert_eq!(entries, [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5)]);
    assert_eq!(state, HardState { term: 3, vote: MEMBER, commit: 5 });
}

#[test]
fn an_entry_that_was_replaced_does_not_come_back() {
    let log = [entry(1, 1), entry(1, 2), entry(1, 3), entry(2, 2), state(2, 2)];
    assert_eq!(rewrite(&[&log]).unwrap().0, [(1, 1), (2, 2), (2, 3)]);
}

#[test]
fn a_received_snapshot_replaces_the_log_and_an_own_one_does_not() {
    let received = [entry(1, 1), entry(1, 2), entry(1, 3), snapshot(2, 9), state(9, 2)];
    assert_eq!(rewrite(&[&received]).unwrap().1.commit, 3, "the snapshot, and the removal");
    let own = [entry(1, 1), entry(1, 2), entry(1, 3), snapshot(2, 1), state(1, 2)];
    assert_eq!(rewrite(&[&own]).unwrap().1.commit, 4);
    let ahead = [entry(1, 1), snapshot(20, 2), state(2, 20), entry(2, 21)];
    assert_eq!(rewrite(&[&ahead]).unwrap().1.commit, 22);
}

#[test]
fn members_that_the_log_adds_are_removed_too() {
    let log = [entry(1, 1), change(1, 2, ADD_LEARNER, 0x3333), state(1, 1)];
    let (entries, state) = rewrite(&[&log]).unwrap();
    assert_eq!((entries.len(), state.commit), (4, 4));
}

#[test]
fn a_removal_of_the_member_itself_counts_only_if_it_is_committed() {
    let log = |commit| [entry(1, 1), change(1, 2, REMOVE_NODE, MEMBER), entry(1, 3), state(1, commit)];
    assert!(matches!(rewrite(&[&log(2)]), Err(LogError::Removed)));
    let (entries, state) = rewrite(&[&log(1)]).unwrap();
    assert_eq!((entries, state.commit), (vec![(1, 1), (1, 2)], 2));
}

#[test]
fn a_record_that_was_cut_off_ends_the_log_and_a_changed_one_is_damage() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = Dir::open(scratch.path()).unwrap();
    write_segments(&dir, &[&[entry(1, 1), state(1, 1), entry(1, 2)]]);
    let name = "0000000000000000-0000000000000000.wal";
    let written = dir.read(name).unwrap();
    let count = |bytes: &[u8]| {
        dir.write(name, bytes, FileMode::new(0o600)).unwrap();
        let mut count = 0;
        read_log(&dir, |_| {
            count += 1;
            Ok(())
        })
        .map(|_| count)
    };
    assert_eq!(count(&written).unwrap(), 5);
    let end = written.len() - 4096;
    assert_eq!(count(&written[..end - 9]).unwrap(), 4, "without its last bytes");
    for at in 0..end {
        let mut changed = written.clone();
        changed[at] ^= 0x10;
        // Never a panic, and never a record that is another one.
        if let Ok(count) = count(&changed) {
            assert!(count <= 5, "{at}");
        }
    }
    let mut changed = written;
    let in_data = end - 20;
    changed[in_data] ^= 1;
    assert!(matches!(count(&changed), Err(LogError::Damaged { .. })));
}

#[test]
fn a_sum_is_that_of_the_castagnoli_polynomial() {
    assert_eq!(crc32c(0, b"123456789"), 0xe306_9283);
    assert_eq!(crc32c(crc32c(0, b"1234"), b"56789"), 0xe306_9283);
}

#[test]
fn arbitrary_records_never_panic() {
    let records = [metadata(), snapshot(0, 0), entry(1, 1), change(1, 2, ADD_NODE, OTHER), state(1, 1)];
    let mut bytes = Vec::new();
    for (kind, data) in &records {
        bytes.extend([u8::try_from(*kind).unwrap(), u8::try_from(data.len()).unwrap()]);
        bytes.extend(data);
    }
    for at in 0..bytes.len() {
        check_arbitrary_log(&bytes[..at]);
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut changed = bytes.clone();
            changed[at] = value;
            check_arbitrary_log(&changed);
        }
    }
}

#[test]
fn an_index_that_no_log_reaches_is_refused() {
    for last in [entry(1, u64::MAX), snapshot(u64::MAX, 1)] {
        let records = [last, state(1, 0)];
        assert!(matches!(rewrite(&[&records]), Err(LogError::Incomplete(_))), "{records:?}");
    }
}
