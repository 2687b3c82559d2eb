//! The record of a damaged image in the store, which outlives the process that has found the damage.
//!
//! It is a label of the image: also one without a bundle has it, and one whose bundle is on a disk that is not mounted.

use std::collections::BTreeMap;

use crate::image::{Image, Labels};
use crate::store::{ImageStore, ImageStoreError};
use crate::{Digest, Namespace};

/// The label. Its value is the target, and the reason if its unpacked layers are damaged.
const LABEL: &str = "nodekeel.image-damage";

/// What is damaged of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum DamageRecord {
    /// Its content. The store knows whether that has been written again.
    Content,
    /// Its unpacked layers, with the reason.
    Layers(String),
}

/// The records of these images, by target. One of an image whose name has gone over to another target is none.
pub(super) fn read_all(images: &[Image]) -> BTreeMap<Digest, DamageRecord> {
    let record = |image: &Image| {
        let text = image.labels.get(LABEL)?;
        let (target, reason) = text.split_once(' ').unwrap_or((text, ""));
        let record = match reason {
            "" => DamageRecord::Content,
            reason => DamageRecord::Layers(reason.to_owned()),
        };
        (target.parse() == Ok(image.target.digest)).then_some((image.target.digest, record))
    };
    images.iter().filter_map(record).collect()
}

/// Records what is damaged under all names of a target, or that nothing is.
pub(super) async fn write(
    store: &dyn ImageStore,
    namespace: &Namespace,
    target: Digest,
    record: Option<&DamageRecord>,
) -> Result<(), ImageStoreError> {
    let value = match record {
        None => String::new(),
        Some(DamageRecord::Content) => target.to_string(),
        Some(DamageRecord::Layers(reason)) => format!("{target} {reason}"),
    };
    let mut images = store.list_images(namespace).await?;
    let known = |image: &Image| image.labels.get(LABEL).cloned().unwrap_or_default();
    images.retain(|image| image.target.digest == target && known(image) != value);
    if images.is_empty() {
        return Ok(());
    }
    let mut session = store.begin_import(namespace).await?;
    for image in images {
        let labels = Labels::from([(LABEL.to_owned(), value.clone())]);
        session.put_image(&Image { labels, ..image }).await?;
    }
    session.finish().await
}
