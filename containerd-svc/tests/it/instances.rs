//! Several programs that import into one containerd.

use std::fs;

use nodekeel_containerd_svc::{Image, ImageStore as _};

use crate::bundles::{BundleFixture, archive_of, k8s_namespace};

/// The only instance, and one with a name: directories with the same files, and one store.
fn two_instances() -> (BundleFixture, BundleFixture) {
    let (only, mut named) = (BundleFixture::new(), BundleFixture::new());
    named.store = only.store.clone();
    named.preseed = named.preseed.with_instance("operator".parse().unwrap());
    (only, named)
}

fn is_pinned(image: &Image) -> bool {
    image.labels.contains_key("io.cri-containerd.pinned")
}

#[tokio::test]
async fn instances_keep_each_others_images_pinned() {
    let (only, named) = two_instances();
    only.put_image("a.tar", "localhost/os:1", b"os")
        .put_bundle("both.tar", &archive_of("localhost/both:1", b"1").to_tar());
    named.put_image("a.tar", "localhost/operator:1", b"operator");
    named.put_bundle("both.tar", &archive_of("localhost/both:1", b"1").to_tar());
    let mut written = 0;
    for round in 0..3 {
        for bundles in [&named, &only] {
            let report = bundles.run_preseed().await;
            assert_eq!((report.failures(), report.changes), (Vec::<String>::new(), Vec::new()), "{round}");
        }
        let images = only.list_images().await;
        assert!(images.len() == 3 && images.iter().all(is_pinned), "{images:?}");
        if round > 0 {
            assert_eq!(only.store.written_bytes(), written, "nothing is imported again");
        }
        written = only.store.written_bytes();
    }
    // One that another instance still brings stays pinned.
    for (bundles, is_last) in [(&only, false), (&named, true)] {
        fs::remove_file(bundles.path("both.tar")).unwrap();
        bundles.run_preseed().await;
        let images = only.store.list_images(&k8s_namespace()).await.unwrap();
        let both = images.iter().find(|image| image.name == "localhost/both:1").unwrap();
        assert_eq!(is_pinned(both), !is_last, "{both:?}");
    }
}

#[tokio::test]
async fn a_name_with_different_images_belongs_to_the_instance_that_sorts_first() {
    let (only, named) = two_instances();
    only.put_image("a.tar", "localhost/same:1", b"os");
    named.put_image("b.tar", "localhost/same:1", b"operator");
    named.run_preseed().await;
    only.run_preseed().await;
    let settled = only.list_images().await;
    for bundles in [&named, &only, &named] {
        let report = bundles.run_preseed().await;
        assert_eq!((report.failures(), report.changes), (Vec::<String>::new(), Vec::new()));
        assert_eq!(only.list_images().await, settled);
    }
    // Without its bundle, the name goes over.
    fs::remove_file(only.path("a.tar")).unwrap();
    only.run_preseed().await;
    named.run_preseed().await;
    let images = only.list_images().await;
    assert!(images[0].target != settled[0].target && is_pinned(&images[0]), "{images:?}");
}
