//! Names of namespaces and images.

use std::fmt;
use std::str::FromStr;

/// Maximum length of a namespace, in bytes.
///
/// *Source:* containerd's `identifiers` package.
pub const MAX_NAMESPACE_BYTES: usize = 76;

/// Maximum length of an image name, in bytes.
///
/// *Source:* `NameTotalLengthMax` of the distribution's `reference` package is 255 without tag and digest; a
/// tag has at most 128.
pub const MAX_IMAGE_NAME_BYTES: usize = 512;

/// A containerd namespace such as `k8s.io`: letters and digits, with single `.`, `_` and `-` between them.
///
/// *Source:* containerd's `identifiers` package.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Namespace(String);

/// The full name of an image, such as `docker.io/library/busybox:1.36`.
///
/// Short names are completed as Docker, containerd and the kubelet complete them: the default registry is
/// `docker.io`, a name there without a slash is below `library/`, and the default tag is `:latest`.
///
/// *Source:* the distribution's `reference` package (`ParseDockerRef`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageName(String);

/// An invalid name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidContainerdName {
    /// Invalid namespace: letters and digits, with single `.`, `_` and `-` between them.
    #[error(
        "invalid containerd namespace {text:?}: use letters and digits with single . _ - between, at most \
         {MAX_NAMESPACE_BYTES}"
    )]
    Namespace {
        /// The text, or its start.
        text: String,
    },
    /// Invalid image name.
    #[error("invalid image name {text:?}: use a name such as docker.io/library/busybox:1.36")]
    Image {
        /// The text, or its start.
        text: String,
    },
}

fn text_start(text: &str) -> String {
    text.chars().take(100).collect()
}

impl Namespace {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Namespace {
    type Err = InvalidContainerdName;

    fn from_str(text: &str) -> Result<Self, InvalidContainerdName> {
        let part = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let valid = text.len() <= MAX_NAMESPACE_BYTES && text.split(['.', '_', '-']).all(part);
        valid
            .then(|| Self(text.to_owned()))
            .ok_or_else(|| InvalidContainerdName::Namespace { text: text_start(text) })
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl ImageName {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name of an archive's reference: a full name as it is, a bare tag (without `/`, `:` and `@`) in the
    /// repository.
    ///
    /// # Errors
    /// [`InvalidContainerdName::Image`].
    pub(crate) fn of_reference(reference: &str, repository: &str) -> Result<Self, InvalidContainerdName> {
        match reference.contains(['/', ':', '@']) {
            true => reference.parse(),
            false => format!("{repository}:{reference}").parse(),
        }
    }
}

impl FromStr for ImageName {
    type Err = InvalidContainerdName;

    fn from_str(text: &str) -> Result<Self, InvalidContainerdName> {
        complete_name(text).map(Self).ok_or_else(|| InvalidContainerdName::Image { text: text_start(text) })
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Completes a name; `None` if it is invalid.
fn complete_name(text: &str) -> Option<String> {
    if text.len() > MAX_IMAGE_NAME_BYTES {
        return None;
    }
    let (rest, digest) = match text.split_once('@') {
        Some((rest, digest)) => (rest, Some(digest)),
        None => (text, None),
    };
    if digest.is_some_and(|digest| digest.parse::<crate::Digest>().is_err()) {
        return None;
    }
    let (path, tag) = match rest.rsplit_once(':') {
        // A colon before a slash separates a port.
        Some((path, tag)) if !tag.contains('/') => (path, Some(tag)),
        _ => (rest, None),
    };
    if tag.is_some_and(|tag| !is_tag(tag)) {
        return None;
    }
    let (registry, repository) = match path.split_once('/') {
        // A registry has a dot or a port in its name, unless it is localhost: so Docker tells it from a path.
        Some((first, rest)) if first.contains(['.', ':']) || first == "localhost" => (first, rest),
        _ => (DEFAULT_REGISTRY, path),
    };
    // The former name of Docker's registry, which old references have.
    let registry = if registry == "index.docker.io" { DEFAULT_REGISTRY } else { registry };
    if !is_registry(registry) || !repository.split('/').all(is_component) {
        return None;
    }
    // Also where the registry is given: skopeo writes such names, and the CRI lists the completed one alone.
    let library = if registry == DEFAULT_REGISTRY && !repository.contains('/') { "library/" } else { "" };
    let end = match (digest, tag) {
        // A digest replaces the tag, as in the names that containerd lists.
        (Some(digest), _) => format!("@{digest}"),
        (None, tag) => format!(":{}", tag.unwrap_or("latest")),
    };
    Some(format!("{registry}/{library}{repository}{end}"))
}

const DEFAULT_REGISTRY: &str = "docker.io";

fn is_tag(tag: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let Some(first) = tag.bytes().next() else { return false };
    tag.len() <= 128 && plain(first) && tag.bytes().all(|byte| plain(byte) || byte == b'.' || byte == b'-')
}

fn is_registry(registry: &str) -> bool {
    let (host, port) = match registry.split_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (registry, None),
    };
    let label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    let is_port =
        |port: &str| (1..=5).contains(&port.len()) && port.bytes().all(|byte| byte.is_ascii_digit());
    host.split('.').all(label) && port.is_none_or(is_port)
}

/// Lower-case letters and digits, with `.`, `_`, `__` or any number of `-` between them.
fn is_component(component: &str) -> bool {
    let mut rest = component.as_bytes();
    loop {
        let word = rest.iter().take_while(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit()).count();
        if word == 0 {
            return false;
        }
        rest = &rest[word..];
        let between = rest.iter().take_while(|byte| matches!(byte, b'.' | b'_' | b'-')).count();
        match &rest[..between] {
            [] => return rest.is_empty(),
            b"." | b"_" | b"__" => {}
            dashes if dashes.iter().all(|byte| *byte == b'-') => {}
            _ => return false,
        }
        rest = &rest[between..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_are_identifiers() {
        for name in ["k8s.io", "default", "a-b_c.d", "0"] {
            assert_eq!(name.parse::<Namespace>().expect(name).as_str(), name);
        }
        for name in ["", ".", "..", "a/b", "a..b", "-a", "a-", "a b", "é", &"a".repeat(77)] {
            assert!(name.parse::<Namespace>().is_err(), "{name}");
        }
    }

    #[test]
    fn short_names_are_completed_as_the_kubelet_completes_them() {
        for (short, full) in [
            ("busybox", "docker.io/library/busybox:latest"),
            ("busybox:1.36", "docker.io/library/busybox:1.36"),
            ("bazel/metropolis/test:x", "docker.io/bazel/metropolis/test:x"),
            ("localhost/pause:1", "localhost/pause:1"),
            ("localhost:5000/a/b", "localhost:5000/a/b:latest"),
            ("index.docker.io/library/a:1", "docker.io/library/a:1"),
            ("docker.io/busybox:1", "docker.io/library/busybox:1"),
            ("index.docker.io/busybox", "docker.io/library/busybox:latest"),
            ("registry.example/busybox:1", "registry.example/busybox:1"),
            ("registry.k8s.io/pause:3.10", "registry.k8s.io/pause:3.10"),
            (
                "preseed.metropolis.internal/node/kubernetes/pause:latest",
                "preseed.metropolis.internal/node/kubernetes/pause:latest",
            ),
            ("a__b/c---d:T", "docker.io/a__b/c---d:T"),
        ] {
            assert_eq!(short.parse::<ImageName>().expect(short).as_str(), full);
            assert_eq!(full.parse::<ImageName>().expect(full).as_str(), full);
        }
        let digest = crate::Digest::of_content(b"");
        let named = format!("localhost/a:1@{digest}");
        assert_eq!(named.parse::<ImageName>().expect("ok").as_str(), format!("localhost/a@{digest}"));
    }

    #[test]
    fn malformed_image_names_are_rejected() {
        for name in [
            "",
            ":",
            "/",
            "a/",
            "/a",
            "A",
            "a:",
            "a:-x",
            "a b",
            "../x",
            "a/../b",
            "a@sha256:0",
            "a___b",
            "-a",
            "a\n",
        ] {
            assert!(name.parse::<ImageName>().is_err(), "{name:?}");
        }
    }

    #[test]
    fn a_bare_tag_belongs_to_the_bundles_repository() {
        let of = |reference| ImageName::of_reference(reference, "pause").map(|name| name.to_string());
        assert_eq!(of("3.9"), Ok("docker.io/library/pause:3.9".into()));
        assert_eq!(of("localhost/pause:1"), Ok("localhost/pause:1".into()));
        assert!(ImageName::of_reference("3.9", "Not a repository").is_err());
    }
}
