//! Decides which images may be listed.

use std::fmt;
use std::str::FromStr;

use async_trait::async_trait;

use crate::{Digest, ImageName, Namespace};

/// An image that an archive asks to list.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct OfferedImage<'a> {
    /// The namespace.
    pub namespace: &'a Namespace,
    /// The name that it would have.
    pub name: &'a ImageName,
    /// The digest of its manifest, or of its index of manifests. It is listed only if all of its content matches that.
    pub digest: &'a Digest,
}

/// Decides which images of archives may be listed.
///
/// # Contract
/// - It is asked for each name of each image, before the image is unpacked and listed, and again about listed images.
/// - The same image gets the same answer as long as the policy lives: a refused image is not offered again until its archive
///   changes, or another process reads it.
/// - Where it can't decide, it refuses.
#[async_trait]
pub trait ImagePolicy: Send + Sync + fmt::Debug {
    /// Checks one image.
    ///
    /// # Errors
    /// The reason of a refusal, and what an operator is to do.
    async fn check_image(&self, image: OfferedImage<'_>) -> Result<(), String>;
}

/// Allows the images whose digests are in a list: nobody who can only write archives can bring another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowList {
    setting: String,
    allowed: Vec<AllowedImage>,
}

impl AllowList {
    /// A list with these entries; without any, no image is allowed. The setting is where it is kept, such as `images.allow`:
    /// refusals name it.
    pub fn new(setting: impl Into<String>, allowed: impl IntoIterator<Item = AllowedImage>) -> Self {
        Self { setting: setting.into(), allowed: allowed.into_iter().collect() }
    }
}

#[async_trait]
impl ImagePolicy for AllowList {
    async fn check_image(&self, OfferedImage { name, digest, .. }: OfferedImage<'_>) -> Result<(), String> {
        let repository = name.repository();
        let is_allowed = |allowed: &AllowedImage| {
            allowed.digest == *digest && allowed.repository.as_deref().is_none_or(|only| only == repository)
        };
        match self.allowed.iter().any(is_allowed) {
            true => Ok(()),
            false => Err(format!("if it is trusted, add \"{repository}@{digest}\" to {}", self.setting)),
        }
    }
}

/// An entry of an [`AllowList`]: a digest, which any name may have, or `REPOSITORY@DIGEST`, for the names of that repository.
///
/// The digest is that of the image's manifest, or of its index of manifests: the one of a pull by digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedImage {
    repository: Option<String>,
    digest: Digest,
}

/// An invalid entry of an [`AllowList`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid image {text:?}: expected sha256:DIGEST or REPOSITORY@sha256:DIGEST, without a tag")]
pub struct InvalidAllowedImage {
    /// The text, or its start.
    pub text: String,
}

impl FromStr for AllowedImage {
    type Err = InvalidAllowedImage;

    fn from_str(text: &str) -> Result<Self, InvalidAllowedImage> {
        let parse = || {
            let Some((repository, digest)) = text.rsplit_once('@') else {
                return Some(Self { repository: None, digest: text.parse().ok()? });
            };
            let name: ImageName = text.parse().ok()?;
            // A complete name drops a tag in front of the digest, which an operator may believe to be checked.
            let is_tagged = repository.rsplit_once(':').is_some_and(|(_, end)| !end.contains('/'));
            let repository = Some(name.repository().to_owned());
            (!is_tagged).then_some(Self { repository, digest: digest.parse().ok()? })
        };
        parse().ok_or_else(|| InvalidAllowedImage { text: text.chars().take(100).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_entry_allows_its_digest_in_its_repository_alone() {
        let (digest, other) = (Digest::of_content(b"image"), Digest::of_content(b"other"));
        let namespace = "k8s.io".parse().expect("a namespace");
        for (entry, name, digest_of_image, is_allowed) in [
            (format!("{digest}"), "localhost/any:1", digest, true),
            (format!("{digest}"), "localhost/any:1", other, false),
            (format!("pause@{digest}"), "docker.io/library/pause:3.10", digest, true),
            (format!("pause@{digest}"), &format!("pause@{digest}"), digest, true),
            (format!("pause@{digest}"), "registry.k8s.io/pause:3.10", digest, false),
            (format!("pause@{digest}"), "pause:3.10", other, false),
            (format!("[fd00::1]:5000/a@{digest}"), "[fd00::1]:5000/a:1", digest, true),
        ] {
            let name = name.parse().expect(name);
            let list = AllowList::new("images.allow", [entry.parse().expect(&entry)]);
            let offered = OfferedImage { namespace: &namespace, name: &name, digest: &digest_of_image };
            let checked = list.check_image(offered).await;
            assert_eq!(checked.is_ok(), is_allowed, "{entry} {name}: {checked:?}");
            if let Err(reason) = checked {
                // The entry that the reason names is the one that allows it.
                let entry = reason.split('"').nth(1).expect("an entry").parse().expect(&reason);
                assert!(AllowList::new("", [entry]).check_image(offered).await.is_ok(), "{reason}");
            }
        }
    }

    #[test]
    fn an_entry_without_a_whole_digest_or_with_a_tag_is_refused() {
        let digest = Digest::of_content(b"image");
        let texts = ["", "pause", "sha256:12", "@", "pause@sha256:12"].map(str::to_owned);
        for text in texts.into_iter().chain([format!("pause:3.10@{digest}"), format!("Pause@{digest}")]) {
            assert!(text.parse::<AllowedImage>().is_err(), "{text}");
        }
    }
}
