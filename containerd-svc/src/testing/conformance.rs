//! The conformance suite of image stores.

use bytes::Bytes;

use crate::image::{Descriptor, Image, Labels};
use crate::store::{ImageStore, ImportSession, IncomingBlob};
use crate::{Digest, Namespace};

/// Checks the [contract](ImageStore#contract) in an unused namespace of the store.
///
/// # Panics
/// If the store breaks the contract.
pub async fn conformance(store: &dyn ImageStore, namespace: &Namespace) {
    an_unused_namespace_is_empty(store, namespace).await;
    written_content_can_be_read(store, namespace).await;
    a_wrong_digest_is_rejected(store, namespace).await;
    abandoned_content_can_be_written_again(store, namespace).await;
    an_image_keeps_its_content(store, namespace).await;
    a_name_moves_to_another_image(store, namespace).await;
    labels_of_an_image_are_merged(store, namespace).await;
}

fn content_of(text: &str) -> (Digest, Bytes) {
    (Digest::of_content(text.as_bytes()), Bytes::copy_from_slice(text.as_bytes()))
}

async fn begin_import(store: &dyn ImageStore, namespace: &Namespace) -> Box<dyn ImportSession> {
    store.begin_import(namespace).await.expect("an import session can begin")
}

/// Writes a text; returns whether it was new.
async fn write_content(import: &mut dyn ImportSession, text: &str, has_digest: bool) -> bool {
    let (digest, bytes) = content_of(text);
    let expected = has_digest.then_some(digest);
    let incoming = IncomingBlob { digest: expected, size: bytes.len() as u64, file: format!("file {text}") };
    let Some(mut writer) = import.open_writer(&incoming).await.expect("content can be announced") else {
        return false;
    };
    for part in bytes.chunks(5) {
        writer.write(Bytes::copy_from_slice(part)).await.expect("content can be written");
    }
    writer.commit(&digest).await.expect("content can be committed");
    true
}

fn test_image(name: &str, text: &str) -> Image {
    let (digest, bytes) = content_of(text);
    let media_type = "application/vnd.oci.image.manifest.v1+json".to_owned();
    let target = Descriptor { media_type, digest, size: bytes.len() as u64 };
    Image { name: name.to_owned(), target, labels: Labels::from([("nodekeel.test".into(), text.into())]) }
}

async fn an_unused_namespace_is_empty(store: &dyn ImageStore, namespace: &Namespace) {
    assert_eq!(store.list_images(namespace).await.expect("listed"), [], "the namespace is not used");
    let (digest, _) = content_of("nothing");
    assert_eq!(store.content_size(namespace, &digest).await.expect("a size"), None);
    assert_eq!(store.read_content(namespace, &digest, 1000).await.expect("a result"), None);
}

async fn written_content_can_be_read(store: &dyn ImageStore, namespace: &Namespace) {
    let mut import = begin_import(store, namespace).await;
    for (text, has_digest) in [("named", true), ("nameless", false), ("", true)] {
        assert!(write_content(&mut *import, text, has_digest).await, "{text:?} is new");
        let (digest, bytes) = content_of(text);
        assert_eq!(store.content_size(namespace, &digest).await.expect("a size"), Some(bytes.len() as u64));
        let read = store.read_content(namespace, &digest, bytes.len() as u64).await;
        assert_eq!(read.expect("read"), Some(bytes.to_vec()));
        assert!(!write_content(&mut *import, text, true).await, "{text:?} exists");
    }
    // Without a digest, existing content is detected only at the commit.
    write_content(&mut *import, "named", false).await;
    let (digest, _) = content_of("nameless");
    assert_eq!(store.read_content(namespace, &digest, 7).await.expect("a result"), None, "of another size");
    import.finish().await.expect("finished");
}

async fn a_wrong_digest_is_rejected(store: &dyn ImageStore, namespace: &Namespace) {
    let (digest, bytes) = content_of("right");
    let mut import = begin_import(store, namespace).await;
    for text in ["wrong", "right and more", "righ"] {
        let incoming = IncomingBlob { digest: Some(digest), size: bytes.len() as u64, file: "file".into() };
        let mut writer = import.open_writer(&incoming).await.expect("announced").expect("new content");
        // Either call may detect it.
        let written = writer.write(Bytes::copy_from_slice(text.as_bytes())).await;
        let committed = writer.commit(&digest).await;
        assert!(written.is_err() || committed.is_err(), "{text:?} is not right");
        assert_eq!(store.content_size(namespace, &digest).await.expect("a size"), None);
    }
    assert!(write_content(&mut *import, "right", true).await);
    import.finish().await.expect("finished");
}

async fn abandoned_content_can_be_written_again(store: &dyn ImageStore, namespace: &Namespace) {
    let (digest, bytes) = content_of("abandoned");
    let mut import = begin_import(store, namespace).await;
    let incoming = IncomingBlob { digest: Some(digest), size: bytes.len() as u64, file: "file".into() };
    let mut writer = import.open_writer(&incoming).await.expect("announced").expect("new content");
    writer.write(bytes.slice(..4)).await.expect("written");
    drop((writer, import));
    let mut import = begin_import(store, namespace).await;
    assert!(write_content(&mut *import, "abandoned", true).await, "the abandoned session committed nothing");
    import.finish().await.expect("finished");
}

async fn an_image_keeps_its_content(store: &dyn ImageStore, namespace: &Namespace) {
    let mut import = begin_import(store, namespace).await;
    for text in ["a target", "a child", "a grandchild"] {
        write_content(&mut *import, text, true).await;
    }
    for (from, to) in [("a target", "a child"), ("a child", "a grandchild")] {
        let label = ("containerd.io/gc.ref.content.x".to_owned(), content_of(to).0.to_string());
        import.label_content(&content_of(from).0, &Labels::from([label])).await.expect("labelled");
    }
    let image = test_image("localhost/conformance:kept", "a target");
    import.put_image(&image).await.expect("listed");
    import.finish().await.expect("finished");
    // Finishing another session collects garbage of earlier ones.
    begin_import(store, namespace).await.finish().await.expect("finished");
    assert_eq!(store.list_images(namespace).await.expect("listed"), [image]);
    for text in ["a target", "a child", "a grandchild"] {
        assert!(
            store.content_size(namespace, &content_of(text).0).await.expect("a size").is_some(),
            "{text} is kept"
        );
    }
}

async fn a_name_moves_to_another_image(store: &dyn ImageStore, namespace: &Namespace) {
    let mut import = begin_import(store, namespace).await;
    write_content(&mut *import, "another target", true).await;
    let image = test_image("localhost/conformance:kept", "another target");
    import.put_image(&image).await.expect("the other image is replaced");
    import.put_image(&image).await.expect("listed again");
    import.finish().await.expect("finished");
    assert_eq!(store.list_images(namespace).await.expect("listed"), [image]);
}

async fn labels_of_an_image_are_merged(store: &dyn ImageStore, namespace: &Namespace) {
    let image = test_image("localhost/conformance:kept", "another target");
    for (label, expected) in [("added", Some("added")), ("", None)] {
        let mut import = begin_import(store, namespace).await;
        let labels = Labels::from([("nodekeel.added".into(), label.into())]);
        import.put_image(&Image { labels, ..image.clone() }).await.expect("the label is put");
        import.finish().await.expect("finished");
        let listed = store.list_images(namespace).await.expect("listed").remove(0);
        assert_eq!(listed.labels.get("nodekeel.added").map(String::as_str), expected, "{listed:?}");
        assert_eq!(listed.labels.get("nodekeel.test"), image.labels.get("nodekeel.test"), "others are kept");
    }
    let namespaces = store.list_namespaces().await.expect("listed");
    assert!(namespaces.contains(namespace), "{namespaces:?}");
}
