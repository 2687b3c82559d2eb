//! What holds for every store of images.

use bytes::Bytes;

use crate::image::{Descriptor, Image, Labels};
use crate::store::{ImageStore, Import, Incoming};
use crate::{Digest, Namespace};

/// Checks the [contract](ImageStore#contract) in a namespace of the store that nobody uses.
///
/// # Panics
/// Where it is broken.
pub async fn conformance(store: &dyn ImageStore, namespace: &Namespace) {
    nothing_is_there_at_first(store, namespace).await;
    what_is_written_can_be_read(store, namespace).await;
    a_wrong_digest_is_refused(store, namespace).await;
    what_was_given_up_can_be_written_again(store, namespace).await;
    an_image_keeps_what_it_leads_to(store, namespace).await;
    a_name_is_given_on(store, namespace).await;
}

fn of(text: &str) -> (Digest, Bytes) {
    (Digest::of(text.as_bytes()), Bytes::copy_from_slice(text.as_bytes()))
}

async fn begin(store: &dyn ImageStore, namespace: &Namespace) -> Box<dyn Import> {
    store.begin(namespace).await.expect("an import can be begun")
}

/// Writes a text, and says whether it had to be written.
async fn write(import: &mut dyn Import, text: &str, is_told: bool) -> bool {
    let (digest, bytes) = of(text);
    let told = is_told.then_some(digest);
    let incoming = Incoming { digest: told, size: bytes.len() as u64, file: format!("file {text}") };
    let Some(mut writer) = import.blob(&incoming).await.expect("content can be announced") else {
        return false;
    };
    for part in bytes.chunks(5) {
        writer.write(Bytes::copy_from_slice(part)).await.expect("content can be written");
    }
    writer.commit(&digest).await.expect("content can be committed");
    true
}

fn image(name: &str, text: &str) -> Image {
    let (digest, bytes) = of(text);
    let media_type = "application/vnd.oci.image.manifest.v1+json".to_owned();
    let target = Descriptor { media_type, digest, size: bytes.len() as u64 };
    Image { name: name.to_owned(), target, labels: Labels::from([("nodekeel.test".into(), text.into())]) }
}

async fn nothing_is_there_at_first(store: &dyn ImageStore, namespace: &Namespace) {
    assert_eq!(store.images(namespace).await.expect("listed"), [], "the namespace is not used");
    let (digest, _) = of("nothing");
    assert_eq!(store.size(namespace, &digest).await.expect("asked"), None);
    assert_eq!(store.read(namespace, &digest, 1000).await.expect("asked"), None);
}

async fn what_is_written_can_be_read(store: &dyn ImageStore, namespace: &Namespace) {
    let mut import = begin(store, namespace).await;
    for (text, is_told) in [("told", true), ("not told", false), ("", true)] {
        assert!(write(&mut *import, text, is_told).await, "{text:?} is new");
        let (digest, bytes) = of(text);
        assert_eq!(store.size(namespace, &digest).await.expect("asked"), Some(bytes.len() as u64));
        assert_eq!(store.read(namespace, &digest, 8).await.expect("read"), Some(bytes.to_vec()));
        assert!(!write(&mut *import, text, true).await, "{text:?} is there");
    }
    // Whoever doesn't know what comes learns only at its end that it is there.
    write(&mut *import, "told", false).await;
    let (digest, _) = of("not told");
    assert!(store.read(namespace, &digest, 7).await.is_err(), "it has one byte more");
    import.end().await.expect("ended");
}

async fn a_wrong_digest_is_refused(store: &dyn ImageStore, namespace: &Namespace) {
    let (digest, bytes) = of("right");
    let mut import = begin(store, namespace).await;
    for text in ["wrong", "right and more", "righ"] {
        let incoming = Incoming { digest: Some(digest), size: bytes.len() as u64, file: "file".into() };
        let mut writer = import.blob(&incoming).await.expect("announced").expect("it isn't there");
        // Either of the two may notice.
        let written = writer.write(Bytes::copy_from_slice(text.as_bytes())).await;
        let committed = writer.commit(&digest).await;
        assert!(written.is_err() || committed.is_err(), "{text:?} is not right");
        assert_eq!(store.size(namespace, &digest).await.expect("asked"), None);
    }
    assert!(write(&mut *import, "right", true).await);
    import.end().await.expect("ended");
}

async fn what_was_given_up_can_be_written_again(store: &dyn ImageStore, namespace: &Namespace) {
    let (digest, bytes) = of("given up");
    let mut import = begin(store, namespace).await;
    let incoming = Incoming { digest: Some(digest), size: bytes.len() as u64, file: "file".into() };
    let mut writer = import.blob(&incoming).await.expect("announced").expect("it isn't there");
    writer.write(bytes.slice(..4)).await.expect("written");
    drop((writer, import));
    let mut import = begin(store, namespace).await;
    assert!(write(&mut *import, "given up", true).await, "nothing of it had been committed");
    import.end().await.expect("ended");
}

async fn an_image_keeps_what_it_leads_to(store: &dyn ImageStore, namespace: &Namespace) {
    let mut import = begin(store, namespace).await;
    for text in ["a target", "a child", "a grandchild"] {
        write(&mut *import, text, true).await;
    }
    for (from, to) in [("a target", "a child"), ("a child", "a grandchild")] {
        let label = ("containerd.io/gc.ref.content.x".to_owned(), of(to).0.to_string());
        import.label(&of(from).0, &Labels::from([label])).await.expect("labelled");
    }
    let image = image("localhost/conformance:kept", "a target");
    import.list(&image).await.expect("listed");
    import.end().await.expect("ended");
    // An end of another import is when others' leftovers go.
    begin(store, namespace).await.end().await.expect("ended");
    assert_eq!(store.images(namespace).await.expect("listed"), [image]);
    for text in ["a target", "a child", "a grandchild"] {
        assert!(store.size(namespace, &of(text).0).await.expect("asked").is_some(), "{text} is kept");
    }
}

async fn a_name_is_given_on(store: &dyn ImageStore, namespace: &Namespace) {
    let mut import = begin(store, namespace).await;
    write(&mut *import, "another target", true).await;
    let image = image("localhost/conformance:kept", "another target");
    import.list(&image).await.expect("listed in the place of the other");
    import.list(&image).await.expect("listed as it is");
    import.end().await.expect("ended");
    assert_eq!(store.images(namespace).await.expect("listed"), [image]);
}
