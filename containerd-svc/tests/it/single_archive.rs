//! Imports one archive, as an operator does.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat, MemStore};
use nodekeel_containerd_svc::{Image, ImageStore as _, ImportError, ImportLimits, import_archive};

use crate::bundles::k8s_namespace;

/// Imports these bytes as `archive.tar.gz`.
async fn import_bytes(store: &MemStore, bytes: &[u8]) -> Result<Vec<Image>, ImportError> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    let archive = File::open(file.path()).unwrap();
    let imported = import_archive(
        store,
        &k8s_namespace(),
        Path::new("/images/archive.tar.gz"),
        archive,
        &ImportLimits::default(),
        None,
    )
    .await?;
    assert!(imported.left_out.is_empty(), "{imported:?}");
    Ok(imported.images)
}

#[tokio::test]
async fn a_single_archive_gets_no_label_and_a_later_one_takes_its_name() {
    let store = MemStore::new();
    let first = import_bytes(
        &store,
        &ArchiveBuilder::new(BuiltArchiveFormat::DockerArchive)
            .with_image(&["localhost/a:1"], b"first")
            .to_tar(),
    )
    .await
    .unwrap();
    assert_eq!(store.list_images(&k8s_namespace()).await.unwrap(), first);
    assert!(first[0].labels.is_empty(), "{first:?}");
    let second = import_bytes(
        &store,
        &ArchiveBuilder::new(BuiltArchiveFormat::OciLayout)
            .with_image(&["localhost/a:1"], b"second")
            .to_gzip(),
    )
    .await
    .unwrap();
    assert_ne!(first[0].target, second[0].target);
    assert_eq!(store.list_images(&k8s_namespace()).await.unwrap(), second);
}

#[tokio::test]
async fn an_invalid_archive_is_an_error_that_names_it_and_lists_nothing() {
    let store = MemStore::new();
    let archive = ArchiveBuilder::new(BuiltArchiveFormat::OciLayout)
        .with_image(&["localhost/a:1"], &[7; 10_000])
        .to_tar();
    for bytes in [b"scribble".as_slice(), &archive[..archive.len() / 2]] {
        let error = import_bytes(&store, bytes).await.unwrap_err();
        assert!(error.to_string().contains("/images/archive.tar.gz") && !error.is_retryable(), "{error}");
        assert_eq!(store.list_images(&k8s_namespace()).await.unwrap(), []);
    }
}
