//! The JSON documents of images, reduced to the fields in use.
//!
//! *Source:* OCI image specification 1.1 (image-index.md, manifest.md, config.md, annotations.md); Docker's
//! image specification 1.2 for `manifest.json`; `io.containerd.image.name` is containerd's annotation.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, SeqAccess, Visitor};

use crate::image::{Descriptor, media};
use crate::{Digest, Platform};

/// Annotations with an image's full name, and with its tag or name.
const NAME_ANNOTATIONS: [&str; 2] = ["io.containerd.image.name", "org.opencontainers.image.ref.name"];

/// Entries of an index or layers of a manifest; [`ImportLimits::descriptors`](crate::ImportLimits::descriptors) may be
/// lower. It bounds the memory of a document of tiny entries.
const MAX_LIST_ENTRIES: usize = 65_536;

/// A descriptor within a document.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct JsonDescriptor {
    #[serde(default)]
    media_type: String,
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    #[serde(default)]
    pub(crate) platform: Option<Platform>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

/// The kind of content that a descriptor refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TargetKind {
    Index,
    Manifest,
    /// Not an image: a signature, a chart.
    Other,
}

impl JsonDescriptor {
    pub(crate) fn to_descriptor(&self) -> Descriptor {
        let media_type = if self.media_type.is_empty() { media::OCI_MANIFEST } else { &self.media_type };
        Descriptor { media_type: media_type.to_owned(), digest: self.digest, size: self.size }
    }
}

/// An entry of an index. Each is parsed alone: one that this crate can't use does not affect the others.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(crate) enum IndexEntry {
    Descriptor(JsonDescriptor),
    /// A descriptor with another digest than SHA-256, or an invalid one.
    Unusable {
        #[serde(default)]
        digest: Option<String>,
        #[serde(default)]
        annotations: Option<BTreeMap<String, String>>,
    },
    /// No descriptor at all.
    Invalid(IgnoredAny),
}

impl IndexEntry {
    /// The name that the archive gives it.
    pub(crate) fn reference_name(&self) -> Option<&str> {
        match self {
            Self::Descriptor(JsonDescriptor { annotations, .. }) | Self::Unusable { annotations, .. } => {
                let annotations = annotations.as_ref()?;
                let name = NAME_ANNOTATIONS.iter().find_map(|key| annotations.get(*key));
                name.map(String::as_str).filter(|name| !name.is_empty())
            }
            Self::Invalid(_) => None,
        }
    }

    /// The digest of a descriptor that can't be used.
    pub(crate) fn unusable_digest(&self) -> Option<&str> {
        if let Self::Unusable { digest, .. } = self { digest.as_deref() } else { None }
    }
}

impl Descriptor {
    pub(crate) fn target_kind(&self) -> TargetKind {
        match self.media_type.as_str() {
            media::OCI_INDEX | media::DOCKER_LIST => TargetKind::Index,
            media::OCI_MANIFEST | media::DOCKER_MANIFEST => TargetKind::Manifest,
            _ => TargetKind::Other,
        }
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct ImageIndex {
    #[serde(deserialize_with = "deserialize_list")]
    pub(crate) manifests: Vec<IndexEntry>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ImageManifest {
    pub(crate) config: JsonDescriptor,
    #[serde(deserialize_with = "deserialize_list")]
    pub(crate) layers: Vec<JsonDescriptor>,
}

impl ImageManifest {
    /// The media type that shows that this is no image which containerd could run: that of the configuration, or of a
    /// layer. Signatures of cosign, for one, have the configuration of an image.
    ///
    /// *Source:* containerd's `images.IsConfigType` and `images.IsLayerType`.
    pub(crate) fn artifact_type(&self) -> Option<&str> {
        let config = &self.config.media_type;
        if ![media::OCI_CONFIG, media::DOCKER_CONFIG].contains(&config.as_str()) {
            return Some(config);
        }
        let is_layer = |media_type: &str| {
            [media::OCI_LAYER_PREFIX, media::DOCKER_LAYER_PREFIX]
                .iter()
                .any(|prefix| media_type.starts_with(prefix))
        };
        let layers = self.layers.iter().map(|layer| layer.media_type.as_str());
        layers.into_iter().find(|media_type| !is_layer(media_type))
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct ImageConfig {
    #[serde(flatten)]
    pub(crate) platform: Platform,
    pub(crate) rootfs: RootFs,
}

#[derive(Debug, Deserialize)]
pub(crate) struct RootFs {
    #[serde(deserialize_with = "deserialize_list")]
    pub(crate) diff_ids: Vec<Digest>,
}

/// An image in a docker-archive's `manifest.json`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct DockerManifestEntry {
    pub(crate) config: String,
    #[serde(default)]
    pub(crate) repo_tags: Option<Vec<String>>,
    #[serde(default)]
    pub(crate) layers: Option<Vec<String>>,
}

/// A list of at most [`MAX_LIST_ENTRIES`]; `null`, which programs in Go write for an empty list, is one.
fn deserialize_list<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    struct List<T>(std::marker::PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for List<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MAX_LIST_ENTRIES}")
        }

        fn visit_unit<E>(self) -> Result<Vec<T>, E> {
            Ok(Vec::new())
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Vec<T>, A::Error> {
            let mut list = Vec::new();
            while let Some(entry) = entries.next_element()? {
                if list.len() == MAX_LIST_ENTRIES {
                    return Err(A::Error::invalid_length(list.len() + 1, &self));
                }
                list.push(entry);
            }
            Ok(list)
        }
    }
    from.deserialize_any(List(std::marker::PhantomData))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_an_index_are_parsed_one_by_one() {
        let digest = Digest::of_content(b"");
        let text = format!(
            r#"{{"manifests": [7, {{"digest": "sha512:00", "size": 1, "annotations": {{"{}": "localhost/a:1"}}}},
                {{"digest": "{digest}", "size": 1}}]}}"#,
            NAME_ANNOTATIONS[0]
        );
        let index: ImageIndex = serde_json::from_str(&text).expect("an index");
        let [IndexEntry::Invalid(_), unusable @ IndexEntry::Unusable { .. }, IndexEntry::Descriptor(good)] =
            &index.manifests[..]
        else {
            panic!("{index:?}")
        };
        assert_eq!(unusable.reference_name(), Some("localhost/a:1"));
        assert_eq!(good.digest, digest);
    }

    #[test]
    fn a_list_may_be_null_and_is_bounded() {
        let parse = |list: &str| serde_json::from_str::<ImageIndex>(&format!(r#"{{"manifests": {list}}}"#));
        assert_eq!(parse("null").expect("an index").manifests.len(), 0);
        let full = |count: usize| format!("[{}0]", "0,".repeat(count - 1));
        assert_eq!(parse(&full(MAX_LIST_ENTRIES)).expect("an index").manifests.len(), MAX_LIST_ENTRIES);
        assert!(parse(&full(MAX_LIST_ENTRIES + 1)).is_err());
        assert!(parse("7").is_err());
        assert!(serde_json::from_str::<ImageIndex>("{}").is_err());
    }
}
