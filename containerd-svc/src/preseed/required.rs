//! The images that others wait for.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use super::BundleOutcome;
use crate::name::InvalidContainerdName;
use crate::plan::{Bundle, BundleAction};
use crate::scan::repository_name;
use crate::{ImageName, Namespace};

/// A bundle or an image that the preseed imports first, and that its dependents wait for.
///
/// As text, the name of a bundle's file (`pause.tar`, also `k8s.io/pause.tar`) or of an image
/// (`registry.k8s.io/pause:3.10`).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequiredImage {
    /// All images of the bundles with this file name, in the namespace if there is one.
    Bundle {
        /// The namespace.
        namespace: Option<Namespace>,
        /// The file name.
        file: String,
    },
    /// The image with this name, in any namespace.
    Image(ImageName),
}

impl FromStr for RequiredImage {
    type Err = InvalidContainerdName;

    fn from_str(text: &str) -> Result<Self, InvalidContainerdName> {
        let (namespace, file) = match text.split_once('/') {
            Some((namespace, file)) => (Some(namespace), file),
            None => (None, text),
        };
        match repository_name(file).filter(|_| !file.contains(['/', ':', '@'])) {
            Some(_) => {
                let namespace = namespace.map(str::parse).transpose()?;
                Ok(Self::Bundle { namespace, file: file.to_owned() })
            }
            None => text.parse().map(Self::Image),
        }
    }
}

impl fmt::Display for RequiredImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bundle { namespace: Some(namespace), file } => write!(f, "{namespace}/{file}"),
            Self::Bundle { namespace: None, file } => f.write_str(file),
            Self::Image(name) => name.fmt(f),
        }
    }
}

impl RequiredImage {
    fn is_bundle(&self, bundle: &Bundle) -> bool {
        let Self::Bundle { namespace, file } = self else { return false };
        *file == bundle.file && namespace.as_ref().is_none_or(|namespace| *namespace == bundle.namespace)
    }

    fn is_image(&self, name: &str) -> bool {
        matches!(self, Self::Image(required) if required.as_str() == name)
    }

    /// Returns whether a pass has found out about it: its bundle is imported or has failed, or its image is there.
    fn is_processed(&self, outcomes: &BTreeMap<Bundle, BundleOutcome>) -> bool {
        outcomes.iter().any(|(bundle, outcome)| {
            self.is_bundle(bundle)
                || outcome.images().is_some_and(|(_, names)| names.iter().any(|name| self.is_image(name)))
        })
    }
}

/// Returns whether a bundle comes first.
pub(super) fn is_first(required: &[RequiredImage], bundle: &Bundle, action: &BundleAction) -> bool {
    required.iter().any(|required| {
        let has_image = match action {
            BundleAction::Verify(images) => images.iter().any(|image| required.is_image(&image.name)),
            BundleAction::Import(_) => false,
        };
        required.is_bundle(bundle) || has_image
    })
}

/// Returns whether nothing more is waited for; without required images, all bundles are, and this is false.
pub(super) fn are_processed(required: &[RequiredImage], outcomes: &BTreeMap<Bundle, BundleOutcome>) -> bool {
    !required.is_empty() && required.iter().all(|required| required.is_processed(outcomes))
}

/// The required images that no bundle has brought.
pub(super) fn find_absent(
    required: &[RequiredImage],
    outcomes: &BTreeMap<Bundle, BundleOutcome>,
) -> Vec<RequiredImage> {
    required.iter().filter(|required| !required.is_processed(outcomes)).cloned().collect()
}

/// The names that are required of these outcomes, with their namespaces.
pub(super) fn required_names(
    required: &[RequiredImage],
    outcomes: &BTreeMap<Bundle, BundleOutcome>,
) -> Vec<(Namespace, String)> {
    let mut found = Vec::new();
    for (bundle, outcome) in outcomes {
        let Some((namespace, names)) = outcome.images() else { continue };
        let is_required = |name: &str| {
            required.is_empty()
                || required.iter().any(|required| required.is_bundle(bundle) || required.is_image(name))
        };
        found.extend(
            names.iter().filter(|name| is_required(name)).map(|name| (namespace.clone(), name.clone())),
        );
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_required_image_is_a_file_or_a_name() {
        let parse = |text: &str| text.parse::<RequiredImage>();
        let bundle = |namespace: Option<&str>| RequiredImage::Bundle {
            namespace: namespace.map(|namespace| namespace.parse().expect("a namespace")),
            file: "pause.tar.zst".into(),
        };
        assert_eq!(parse("pause.tar.zst"), Ok(bundle(None)));
        assert_eq!(parse("k8s.io/pause.tar.zst"), Ok(bundle(Some("k8s.io"))));
        for (text, name) in [
            ("pause:3.10", "docker.io/library/pause:3.10"),
            ("registry.k8s.io/pause:3.10", "registry.k8s.io/pause:3.10"),
            ("registry.k8s.io/a/b.tar", "registry.k8s.io/a/b.tar:latest"),
        ] {
            assert_eq!(parse(text).expect(text).to_string(), name);
        }
        for text in ["", "Pause:1", "-/pause.tar"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
