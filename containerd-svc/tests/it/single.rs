//! One archive, by an operator's hand.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use nodekeel_containerd_svc::testing::{Archive, MemStore, Shape};
use nodekeel_containerd_svc::{Image, ImageStore as _, ImportError, import};

use crate::bundles::k8s;

/// Imports these bytes as `archive.tar.gz`.
async fn take(store: &MemStore, bytes: &[u8]) -> Result<Vec<Image>, ImportError> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    import(store, &k8s(), (Path::new("/images/archive.tar.gz"), File::open(file.path()).unwrap())).await
}

#[tokio::test]
async fn it_is_listed_without_a_mark_and_a_later_one_takes_its_name() {
    let store = MemStore::new();
    let first =
        take(&store, &Archive::new(Shape::Docker).image(&["localhost/a:1"], b"first").tar()).await.unwrap();
    assert_eq!(store.images(&k8s()).await.unwrap(), first);
    assert!(first[0].labels.is_empty(), "{first:?}");
    let second =
        take(&store, &Archive::new(Shape::Layout).image(&["localhost/a:1"], b"second").gzip()).await.unwrap();
    assert_ne!(first[0].target, second[0].target);
    assert_eq!(store.images(&k8s()).await.unwrap(), second);
}

#[tokio::test]
async fn a_bad_one_is_an_error_that_names_it_and_lists_nothing() {
    let store = MemStore::new();
    let archive = Archive::new(Shape::Layout).image(&["localhost/a:1"], &[7; 10_000]).tar();
    for bytes in [b"scribble".as_slice(), &archive[..archive.len() / 2]] {
        let error = take(&store, bytes).await.unwrap_err();
        assert!(error.to_string().contains("/images/archive.tar.gz") && !error.is_retryable(), "{error}");
        assert_eq!(store.images(&k8s()).await.unwrap(), []);
    }
}
