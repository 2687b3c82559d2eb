//! The versions, the members and the keys that etcd has written into its own database, read without etcd.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use prost::Message as _;

use super::version::EtcdVersion;

/// etcd's database in its data directory.
pub(super) const DB_PATH: &str = "member/snap/db";

/// The versions that etcd keeps, by bucket and key: of the cluster in every release, of the schema from 3.6 on.
///
/// *Source:* `ClusterClusterVersionKeyName` and `MetaStorageVersionName` in etcd's `schema/bucket.go`.
const VERSION_KEYS: [(&[u8], &[u8]); 2] = [(b"cluster", b"clusterVersion"), (b"meta", b"storageVersion")];

// *Source:* `db.go`, `internal/common/{meta,page,bucket}.go` in go.etcd.io/bbolt. Numbers have the byte order of the
// machine.
const MAGIC: u32 = 0xED0C_DAED;
const PAGE_HEADER: usize = 16;
const META_CHECKED: usize = 56;
const ELEMENT: usize = 16;
const BRANCH_PAGE: u16 = 0x01;
const LEAF_PAGE: u16 = 0x02;
const BUCKET_HEADER: usize = 16;
const PAGE_SIZES: [u64; 7] = [1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16];
/// The largest page with its overflow that is read. Pages on the way to a version are small.
const MAX_PAGE: u64 = 16 << 20;
/// The length of a revision; that of a deletion has a mark after it.
const REVISION_BYTES: usize = 17;
/// More levels than a tree of any size has; a damaged one may have a cycle.
const MAX_DEPTH: u32 = 32;

/// The highest version that etcd has written into this database. None if there is none, or if its file cannot be
/// understood: etcd checks that itself.
pub(super) fn highest_version(file: &File) -> io::Result<Option<EtcdVersion>> {
    let Some(db) = Db::open(file)? else { return Ok(None) };
    let mut highest = None;
    for (bucket, key) in VERSION_KEYS {
        let Some(bucket) = db.find(db.page(db.root)?, bucket)? else { continue };
        let Some(page) = db.bucket_page(&bucket)? else { continue };
        let value = db.find(Some(page), key)?;
        let version = value.and_then(|value| EtcdVersion::parse(std::str::from_utf8(&value).ok()?));
        highest = highest.max(version);
    }
    Ok(highest)
}

/// The members in this database, as etcd writes and serves them: each in JSON. None at all if its file cannot be
/// understood.
///
/// *Source:* `Members` in etcd's `schema/bucket.go`, and `mustSaveMemberToBackend` in `schema/membership.go`.
pub(super) fn stored_members(file: &File) -> io::Result<Vec<Vec<u8>>> {
    let mut members = Vec::new();
    if let Some(db) = Db::open(file)?
        && let Some(bucket) = db.find(db.page(db.root)?, b"members")?
    {
        db.collect_values(db.bucket_page(&bucket)?, MAX_DEPTH, &mut members)?;
    }
    Ok(members)
}

/// A key of the store in its revisions, as etcd writes it.
///
/// *Source:* `KeyValue` in etcd's mvccpb/kv.proto.
#[derive(Clone, PartialEq, prost::Message)]
struct StoredKey {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "5")]
    value: Vec<u8>,
}

/// The newest value of a key in this database. None if it has none, or if its file cannot be understood, any page of it that
/// may have a newer value included.
///
/// All changes since the last compaction are there, in the order of their revisions, so that the last one of the key counts.
///
/// *Source:* `Key` in etcd's `schema/bucket.go`, `revToBytes` and `appendMarkTombstone` in `mvcc/revision.go`.
pub(super) fn stored_value(file: &File, key: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let Some(db) = Db::open(file)? else { return Ok(None) };
    let Some(bucket) = db.find(db.page(db.root)?, b"key")? else { return Ok(None) };
    match db.find_last(db.bucket_page(&bucket)?, key, MAX_DEPTH) {
        Ok(found) => Ok(found.flatten()),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(None),
        Err(error) => Err(error),
    }
}

/// The value of a change of this key; none if it is a deletion. None at all if the change is of another key.
fn parse_change(revision: &[u8], change: &[u8], key: &[u8]) -> io::Result<Option<Option<Vec<u8>>>> {
    let stored = StoredKey::decode(change).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    Ok((stored.key == key).then(|| (revision.len() == REVISION_BYTES).then_some(stored.value)))
}

/// Takes all keys out of a bucket of this database, which no etcd has open: its root page has none from now on. The pages below
/// it stay as unused room.
pub(super) fn clear_bucket(file: &File, bucket: &[u8]) -> io::Result<()> {
    let Some(db) = Db::open(file)? else { return Ok(()) };
    let mut id = db.root;
    for _ in 0..MAX_DEPTH {
        let Some(bytes) = db.page(id)? else { return Ok(()) };
        match page_flags(&bytes) {
            Some(BRANCH_PAGE) => match branch_child(&bytes, bucket) {
                Some(child) => id = child,
                None => return Ok(()),
            },
            Some(LEAF_PAGE) => {
                let Some((value_at, value)) = leaf_entry(&bytes, bucket) else { return Ok(()) };
                let page_at = match number(value, 0, 8) {
                    // A small bucket has its root page in its value.
                    Some(0) => id * db.page_size + (value_at + BUCKET_HEADER) as u64,
                    Some(root) => root * db.page_size,
                    None => return Ok(()),
                };
                let none = 0_u16;
                file.write_all_at(&LEAF_PAGE.to_ne_bytes(), page_at + 8)?;
                return file.write_all_at(&none.to_ne_bytes(), page_at + 10);
            }
            _ => return Ok(()),
        }
    }
    Ok(())
}

struct Db<'a> {
    file: &'a File,
    page_size: u64,
    root: u64,
}

impl<'a> Db<'a> {
    /// The database as its last commit left it.
    fn open(file: &'a File) -> io::Result<Option<Db<'a>>> {
        // The first page may be damaged: the second one tells the same, at a place that depends on the size.
        let mut newest: Option<(u64, u32, u64)> = None;
        for offset in [0].into_iter().chain(PAGE_SIZES) {
            let Some(bytes) = read_at(file, offset, PAGE_HEADER + META_CHECKED + 8)? else { break };
            let Some((transaction, page_size, root)) = parse_meta(&bytes[PAGE_HEADER..]) else { continue };
            let is_meta_page = offset == 0 || offset == u64::from(page_size);
            if is_meta_page && newest.is_none_or(|(newest, ..)| transaction > newest) {
                newest = Some((transaction, page_size, root));
            }
        }
        Ok(newest.map(|(_, page_size, root)| Db { file, page_size: page_size.into(), root }))
    }

    fn page(&self, id: u64) -> io::Result<Option<Vec<u8>>> {
        let Some(offset) = id.checked_mul(self.page_size) else { return Ok(None) };
        let Some(header) = read_at(self.file, offset, PAGE_HEADER)? else { return Ok(None) };
        let length = number(&header, 12, 4).map(|overflow| (overflow + 1).saturating_mul(self.page_size));
        match length.filter(|length| *length <= MAX_PAGE).and_then(|length| usize::try_from(length).ok()) {
            Some(length) => read_at(self.file, offset, length),
            None => Ok(None),
        }
    }

    /// The root page of a bucket. A small bucket has it in its value.
    fn bucket_page(&self, value: &[u8]) -> io::Result<Option<Vec<u8>>> {
        match number(value, 0, 8) {
            Some(0) => Ok(value.get(BUCKET_HEADER..).map(<[u8]>::to_vec)),
            Some(root) => self.page(root),
            None => Ok(None),
        }
    }

    /// All values in the tree below this page.
    fn collect_values(&self, page: Option<Vec<u8>>, depth: u32, values: &mut Vec<Vec<u8>>) -> io::Result<()> {
        let Some(bytes) = page.filter(|_| depth > 0) else { return Ok(()) };
        match page_flags(&bytes) {
            Some(LEAF_PAGE) => {
                values.extend(elements(&bytes).filter_map(|at| Some(leaf_element(&bytes, at)?.1.to_vec())));
            }
            Some(BRANCH_PAGE) => {
                for child in elements(&bytes).filter_map(|at| number(&bytes, at + 8, 8)) {
                    self.collect_values(self.page(child)?, depth - 1, values)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// The last change of a key of the store in the tree below this page. An error if a page cannot be understood: it may have
    /// a later one.
    fn find_last(
        &self,
        page: Option<Vec<u8>>,
        key: &[u8],
        depth: u32,
    ) -> io::Result<Option<Option<Vec<u8>>>> {
        let damaged = || io::Error::from(io::ErrorKind::InvalidData);
        let bytes = page.filter(|_| depth > 0).ok_or_else(damaged)?;
        let flags = page_flags(&bytes).filter(|flags| [LEAF_PAGE, BRANCH_PAGE].contains(flags));
        let is_leaf = flags.ok_or_else(damaged)? == LEAF_PAGE;
        for at in elements(&bytes).rev() {
            let found = if is_leaf {
                let (revision, change) = leaf_element(&bytes, at).ok_or_else(damaged)?;
                parse_change(revision, change, key)?
            } else {
                let child = number(&bytes, at + 8, 8).ok_or_else(damaged)?;
                self.find_last(self.page(child)?, key, depth - 1)?
            };
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// The value of a key in the tree below this page.
    fn find(&self, mut page: Option<Vec<u8>>, key: &[u8]) -> io::Result<Option<Vec<u8>>> {
        for _ in 0..MAX_DEPTH {
            let Some(bytes) = page else { return Ok(None) };
            match page_flags(&bytes) {
                Some(LEAF_PAGE) => return Ok(leaf_value(&bytes, key)),
                Some(BRANCH_PAGE) => match branch_child(&bytes, key) {
                    Some(child) => page = self.page(child)?,
                    None => return Ok(None),
                },
                _ => return Ok(None),
            }
        }
        Ok(None)
    }
}

/// The transaction, the size of a page and the root page of an intact meta page.
fn parse_meta(meta: &[u8]) -> Option<(u64, u32, u64)> {
    let is_intact = number(meta, 0, 4)? == u64::from(MAGIC)
        && number(meta, META_CHECKED, 8)? == fnv1a(meta.get(..META_CHECKED)?);
    let page_size = u32::try_from(number(meta, 8, 4)?).ok()?;
    is_intact.then_some((number(meta, 48, 8)?, page_size, number(meta, 16, 8)?))
}

fn page_flags(page: &[u8]) -> Option<u16> {
    number(page, 8, 2).and_then(|flags| u16::try_from(flags).ok())
}

fn leaf_value(page: &[u8], key: &[u8]) -> Option<Vec<u8>> {
    leaf_entry(page, key).map(|(_, value)| value.to_vec())
}

/// The value of a key, and its offset in the page.
fn leaf_entry<'a>(page: &'a [u8], key: &[u8]) -> Option<(usize, &'a [u8])> {
    for at in elements(page) {
        let (found, value) = leaf_element(page, at)?;
        if found == key {
            // *Source:* `leafPageElement`: the key's position is from the element on, and the value follows it.
            let position = at + usize::try_from(number(page, at + 4, 4)?).ok()?;
            return Some((position + found.len(), value));
        }
    }
    None
}

/// The key and the value of the element at this offset.
fn leaf_element(page: &[u8], at: usize) -> Option<(&[u8], &[u8])> {
    let position = at + usize::try_from(number(page, at + 4, 4)?).ok()?;
    let key_end = position + usize::try_from(number(page, at + 8, 4)?).ok()?;
    let value_end = key_end + usize::try_from(number(page, at + 12, 4)?).ok()?;
    Some((page.get(position..key_end)?, page.get(key_end..value_end)?))
}

/// The last child whose first key is not above this one.
fn branch_child(page: &[u8], key: &[u8]) -> Option<u64> {
    let mut child = None;
    for at in elements(page) {
        let position = at + usize::try_from(number(page, at, 4)?).ok()?;
        let first = page.get(position..position + usize::try_from(number(page, at + 4, 4)?).ok()?)?;
        if child.is_some() && first > key {
            break;
        }
        child = Some(number(page, at + 8, 8)?);
    }
    child
}

/// The offsets of a page's elements.
fn elements(page: &[u8]) -> impl DoubleEndedIterator<Item = usize> + use<> {
    let count = number(page, 10, 2).and_then(|count| usize::try_from(count).ok()).unwrap_or(0);
    (0..count).map(|index| PAGE_HEADER + index * ELEMENT)
}

/// A number of up to eight bytes, in the byte order of this machine.
fn number(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let bytes = bytes.get(at..at + size)?;
    let shift_in = |number: u64, byte: &u8| number << 8 | u64::from(*byte);
    Some(if cfg!(target_endian = "little") {
        bytes.iter().rev().fold(0, shift_in)
    } else {
        bytes.iter().fold(0, shift_in)
    })
}

/// bbolt's checksum. *Source:* Go's `hash/fnv`, `New64a`.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// These bytes of the file. None if it ends before.
fn read_at(file: &File, offset: u64, length: usize) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = vec![0; length];
    match file.read_exact_at(&mut bytes, offset) {
        Ok(()) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_database_has_no_version() {
        for content in [vec![], vec![0; 1 << 17], vec![0xff; 1 << 17], b"clusterVersion3.7.0".repeat(9000)] {
            let mut file = tempfile::tempfile().unwrap();
            io::Write::write_all(&mut file, &content).unwrap();
            assert_eq!(highest_version(&file).unwrap(), None);
            assert!(stored_members(&file).unwrap().is_empty());
            assert_eq!(stored_value(&file, b"clusterVersion").unwrap(), None);
        }
    }

    const PAGE: usize = 4096;

    /// A leaf page with these keys and values.
    fn leaf_page(id: u64, entries: &[(&str, Vec<u8>)]) -> Vec<u8> {
        let header = |flags: u16| [&id.to_ne_bytes()[..], &flags.to_ne_bytes()].concat();
        let count = (entries.len() as u16).to_ne_bytes();
        let mut page = [&header(LEAF_PAGE)[..], &count, &[0; 4]].concat();
        let mut at = entries.len() * ELEMENT;
        for (index, (key, value)) in entries.iter().enumerate() {
            for field in [0, at - index * ELEMENT, key.len(), value.len()] {
                page.extend((field as u32).to_ne_bytes());
            }
            at += key.len() + value.len();
        }
        entries.iter().for_each(|(key, value)| page.extend([key.as_bytes(), value].concat()));
        page
    }

    /// The value of a bucket: its root page is another one, or in the value.
    fn bucket(root: u64, inline: &[u8]) -> Vec<u8> {
        [&root.to_ne_bytes()[..], &[0; 8], inline].concat()
    }

    #[test]
    fn a_cleared_bucket_has_no_keys_and_the_others_keep_theirs() {
        let member = || vec![("8e9e05c52164694d", b"{}".to_vec())];
        let buckets = [
            ("cluster", bucket(3, &[])),
            ("members", bucket(0, &leaf_page(0, &member()))),
            ("members_removed", bucket(4, &[])),
        ];
        let mut meta =
            [MAGIC, 2, PAGE as u32, 0].iter().flat_map(|field| field.to_ne_bytes()).collect::<Vec<_>>();
        [2_u64, 0, 0, 5, 1].iter().for_each(|field| meta.extend(field.to_ne_bytes()));
        meta.extend(fnv1a(&meta).to_ne_bytes());
        let pages = [
            [&[0; PAGE_HEADER][..], &meta].concat(),
            Vec::new(),
            leaf_page(2, &buckets),
            leaf_page(3, &[("clusterVersion", b"3.4.0".to_vec())]),
            leaf_page(4, &member()),
        ];
        let file = tempfile::tempfile().unwrap();
        for (index, page) in pages.iter().enumerate() {
            file.write_all_at(page, (index * PAGE) as u64).unwrap();
        }
        file.set_len((pages.len() * PAGE) as u64).unwrap();
        let removed = || {
            let db = Db::open(&file).unwrap().unwrap();
            let (mut values, removed) =
                (Vec::new(), db.find(db.page(2).unwrap(), b"members_removed").unwrap());
            db.collect_values(db.bucket_page(&removed.unwrap()).unwrap(), 2, &mut values).unwrap();
            values.len()
        };
        assert_eq!((stored_members(&file).unwrap().len(), removed()), (1, 1));
        for bucket in ["members", "members_removed", "absent"] {
            clear_bucket(&file, bucket.as_bytes()).unwrap();
        }
        assert_eq!((stored_members(&file).unwrap().len(), removed()), (0, 0));
        assert_eq!(highest_version(&file).unwrap(), EtcdVersion::parse("3.4.0"));
    }

    #[test]
    fn a_deletion_is_a_change_without_a_value_and_another_key_is_none() {
        let change = StoredKey { key: b"/k".to_vec(), value: b"v".to_vec() }.encode_to_vec();
        let revision = [0; REVISION_BYTES];
        assert_eq!(parse_change(&revision, &change, b"/k").unwrap(), Some(Some(b"v".to_vec())));
        assert_eq!(parse_change(&[&revision[..], b"t"].concat(), &change, b"/k").unwrap(), Some(None));
        assert_eq!(parse_change(&revision, &change, b"/other").unwrap(), None);
        assert!(parse_change(&revision, b"\xff", b"/k").is_err(), "it may be of the key");
    }
}
