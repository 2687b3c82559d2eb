//! Plans imports: a pure function of the bundles in the directory and the listed images.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::image::{Image, Labels};
use crate::{Digest, Namespace};

/// Key prefix of the label that names the bundle of a listed image.
pub const BUNDLE_LABEL_PREFIX: &str = "nodekeel.preseed/";

/// Identifies a file without reading all of it: by its size, modification time, and first and last 64 KiB.
///
/// A new archive has another index or checksum there, so this is as good as a digest unless a file is forged;
/// and the images are identified by their digests in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BundleFingerprint(pub Digest);

/// A bundle file in the directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bundle {
    /// The namespace of its images: the name of its directory.
    pub namespace: Namespace,
    /// Its file name, such as `pause.tar`.
    pub file: String,
    /// Its identity.
    pub fingerprint: BundleFingerprint,
}

/// The planned action for a bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum BundleAction {
    /// All of its images are listed: check that their content exists, and import it otherwise.
    Verify(Vec<Image>),
    /// Import it.
    Import(ImportReason),
}

/// The reason for an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImportReason {
    /// None of its images is listed.
    New,
    /// The file changed since it was imported.
    Changed,
    /// An image of it was removed, or has another target now.
    Incomplete,
    /// Its layers were not unpacked, and unpacking is enabled now.
    NotUnpacked,
}

impl fmt::Display for ImportReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::New => "new",
            Self::Changed => "changed",
            Self::Incomplete => "an image was removed",
            Self::NotUnpacked => "not unpacked",
        })
    }
}

/// The content of a label: the file, how many images it names, the target of this one, and whether it is
/// unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BundleLabel {
    pub(crate) fingerprint: BundleFingerprint,
    pub(crate) count: usize,
    pub(crate) target: Digest,
    pub(crate) unpacked: bool,
}

/// The suffix of a label if layers are unpacked.
const UNPACKED_SUFFIX: &str = "unpacked";

impl fmt::Display for BundleLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.fingerprint.0.to_hex(), self.count, self.target)?;
        if self.unpacked { write!(f, " {UNPACKED_SUFFIX}") } else { Ok(()) }
    }
}

impl FromStr for BundleLabel {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.split(' ');
        let mut next = || parts.next().ok_or(());
        let fingerprint = BundleFingerprint(Digest::from_hex(next()?).ok_or(())?);
        let count = next()?.parse().map_err(drop)?;
        let target = next()?.parse().map_err(drop)?;
        let unpacked = match parts.next() {
            None => false,
            Some(UNPACKED_SUFFIX) => true,
            Some(_) => return Err(()),
        };
        if parts.next().is_some() { Err(()) } else { Ok(Self { fingerprint, count, target, unpacked }) }
    }
}

impl Bundle {
    /// The key of the label on its images.
    pub(crate) fn label_key(&self) -> String {
        format!("{BUNDLE_LABEL_PREFIX}{}", self.file)
    }

    /// The label of one of its images.
    pub(crate) fn image_labels(&self, count: usize, target: Digest, unpacked: bool) -> Labels {
        let label = BundleLabel { fingerprint: self.fingerprint, count, target, unpacked };
        Labels::from([(self.label_key(), label.to_string())])
    }
}

/// Plans the action for each bundle, in their order. `listed` holds the images of each namespace;
/// `unpack` says whether layers should be unpacked. Layers that are already unpacked stay unpacked.
pub fn plan_imports(
    bundles: Vec<Bundle>,
    listed: &BTreeMap<Namespace, Vec<Image>>,
    unpack: bool,
) -> Vec<(Bundle, BundleAction)> {
    let planned = bundles.into_iter().map(|bundle| {
        let images = listed.get(&bundle.namespace).map_or(&[][..], Vec::as_slice);
        let action = plan_bundle(&bundle, images, unpack);
        (bundle, action)
    });
    planned.collect()
}

fn plan_bundle(bundle: &Bundle, images: &[Image], unpack: bool) -> BundleAction {
    let key = bundle.label_key();
    let labelled: Vec<(&Image, &String)> =
        images.iter().filter_map(|image| Some((image, image.labels.get(&key)?))).collect();
    if labelled.is_empty() {
        return BundleAction::Import(ImportReason::New);
    }
    let Ok(labels) =
        labelled.iter().map(|(_, label)| label.parse::<BundleLabel>()).collect::<Result<Vec<_>, _>>()
    else {
        return BundleAction::Import(ImportReason::Changed);
    };
    if labels.iter().any(|label| label.fingerprint != bundle.fingerprint) {
        return BundleAction::Import(ImportReason::Changed);
    }
    let is_complete = labels.iter().all(|label| label.count == labelled.len());
    let is_unmoved =
        labels.iter().zip(&labelled).all(|(label, (image, _))| label.target == image.target.digest);
    if !(is_complete && is_unmoved) {
        return BundleAction::Import(ImportReason::Incomplete);
    }
    if unpack && labels.iter().any(|label| !label.unpacked) {
        return BundleAction::Import(ImportReason::NotUnpacked);
    }
    BundleAction::Verify(labelled.into_iter().map(|(image, _)| image.clone()).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::image::Descriptor;

    fn test_bundle(file: &str, content: &str) -> Bundle {
        let namespace = "k8s.io".parse().expect("a namespace");
        Bundle {
            namespace,
            file: file.into(),
            fingerprint: BundleFingerprint(Digest::of_content(content.as_bytes())),
        }
    }

    fn test_image(name: &str, target: &str, labels: Labels) -> Image {
        let digest = Digest::of_content(target.as_bytes());
        Image { name: name.into(), target: Descriptor { media_type: "x".into(), digest, size: 1 }, labels }
    }

    fn planned_action(bundle: &Bundle, images: &[Image]) -> BundleAction {
        planned_action_with(bundle, images, false)
    }

    fn planned_action_with(bundle: &Bundle, images: &[Image], unpack: bool) -> BundleAction {
        let listed = BTreeMap::from([(bundle.namespace.clone(), images.to_vec())]);
        plan_imports(vec![bundle.clone()], &listed, unpack).remove(0).1
    }

    /// Two images of a bundle, as an import lists them.
    fn imported_images(bundle: &Bundle, unpacked: bool) -> [Image; 2] {
        ["x", "y"].map(|name| {
            test_image(name, name, bundle.image_labels(2, Digest::of_content(name.as_bytes()), unpacked))
        })
    }

    #[test]
    fn a_new_bundle_is_imported() {
        let bundle = test_bundle("a.tar", "1");
        assert_eq!(planned_action(&bundle, &[]), BundleAction::Import(ImportReason::New));
        let other =
            test_image("x", "t", test_bundle("b.tar", "1").image_labels(1, Digest::of_content(b"t"), false));
        assert_eq!(planned_action(&bundle, &[other]), BundleAction::Import(ImportReason::New));
        assert_eq!(
            plan_imports(vec![bundle.clone()], &BTreeMap::new(), true),
            [(bundle, BundleAction::Import(ImportReason::New))]
        );
    }

    #[test]
    fn a_listed_unchanged_bundle_is_only_verified() {
        let bundle = test_bundle("a.tar", "1");
        let images = imported_images(&bundle, false);
        assert_eq!(planned_action(&bundle, &images), BundleAction::Verify(images.to_vec()));
    }

    #[test]
    fn changed_missing_and_moved_images_are_imported_again() {
        let bundle = test_bundle("a.tar", "1");
        let images = imported_images(&bundle, false);
        assert_eq!(
            planned_action(&test_bundle("a.tar", "2"), &images),
            BundleAction::Import(ImportReason::Changed)
        );
        assert_eq!(planned_action(&bundle, &images[..1]), BundleAction::Import(ImportReason::Incomplete));
        let mut moved = images.clone();
        moved[1].target.digest = Digest::of_content(b"elsewhere");
        assert_eq!(planned_action(&bundle, &moved), BundleAction::Import(ImportReason::Incomplete));
        let mut corrupted = images;
        corrupted[0].labels.insert(bundle.label_key(), "corrupt".into());
        assert_eq!(planned_action(&bundle, &corrupted), BundleAction::Import(ImportReason::Changed));
    }

    #[test]
    fn a_bundle_is_imported_again_when_unpacking_is_turned_on() {
        let bundle = test_bundle("a.tar", "1");
        let (packed, unpacked) = (imported_images(&bundle, false), imported_images(&bundle, true));
        assert_eq!(
            planned_action_with(&bundle, &packed, true),
            BundleAction::Import(ImportReason::NotUnpacked)
        );
        for unpack in [false, true] {
            assert_eq!(
                planned_action_with(&bundle, &unpacked, unpack),
                BundleAction::Verify(unpacked.to_vec())
            );
        }
    }

    proptest! {
        #[test]
        fn no_label_makes_planning_panic(text in "[0-9a-f:sh ]{0,200}") {
            let bundle = test_bundle("a.tar", "1");
            let labels = Labels::from([(bundle.label_key(), text)]);
            let action = planned_action(&bundle, &[test_image("x", "x", labels)]);
            prop_assert!(!matches!(action, BundleAction::Verify(_)));
        }

        #[test]
        fn a_bundle_label_survives_formatting_and_parsing(count: usize, a: [u8; 8], b: [u8; 8], unpacked: bool) {
            let (fingerprint, target) = (BundleFingerprint(Digest::of_content(&a)), Digest::of_content(&b));
            let label = BundleLabel { fingerprint, count, target, unpacked };
            prop_assert_eq!(label.to_string().parse(), Ok(label));
        }
    }
}
