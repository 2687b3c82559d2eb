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
    #[error("invalid image name {text:?}: use a name in lower case such as docker.io/library/busybox:1.36")]
    Image {
        /// The text, or its start.
        text: String,
    },
    /// The image has only a tag, and the name of its file can't be its repository.
    #[error(
        "the image has only the tag {tag:?}, and the file name {repository:?} can't be its repository: rename the file \
         to lower-case letters and digits with single . _ - between, or save the image with its full name"
    )]
    Repository {
        /// The tag, or its start.
        tag: String,
        /// The name of the file without its suffix, or its start.
        repository: String,
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
    /// [`InvalidContainerdName::Image`], and [`InvalidContainerdName::Repository`] of a bare tag.
    pub(crate) fn of_reference(reference: &str, repository: &str) -> Result<Self, InvalidContainerdName> {
        if reference.contains(['/', ':', '@']) || !is_tag(reference) {
            return reference.parse();
        }
        let named = format!("{repository}:{reference}").parse();
        named.map_err(|_| InvalidContainerdName::Repository {
            tag: text_start(reference),
            repository: text_start(repository),
        })
    }
}

impl ImageName {
    /// The name without its tag or digest.
    pub(crate) fn repository(&self) -> &str {
        // A complete name has one of the two.
        let named = self.0.split_once('@').or_else(|| self.0.rsplit_once(':'));
        named.map_or(&self.0, |(repository, _)| repository)
    }

    /// The digest as it is in the name, if it has one.
    pub(crate) fn digest(&self) -> Option<&str> {
        self.0.split_once('@').map(|(_, digest)| digest)
    }

    /// The same repository with this digest in the place of the tag; `None` for a name with a digest.
    pub(crate) fn with_digest(&self, digest: &crate::Digest) -> Option<Self> {
        // A complete name without a digest has a tag.
        let (repository, _) = self.0.rsplit_once(':').filter(|_| !self.0.contains('@'))?;
        Some(Self(format!("{repository}@{digest}")))
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
        // A registry has a dot, a port or an upper-case letter in its name, unless it is localhost: so Docker tells
        // it from a path.
        Some((first, rest))
            if first.contains(['.', ':'])
                || first == "localhost"
                || first.bytes().any(|byte| byte.is_ascii_uppercase()) =>
        {
            (first, rest)
        }
        _ => (DEFAULT_REGISTRY, path),
    };
    // The former name of Docker's registry, which old references have.
    let registry = if registry == "index.docker.io" { DEFAULT_REGISTRY } else { registry };
    let is_valid_path = repository.len() <= MAX_REPOSITORY_BYTES && repository.split('/').all(is_component);
    // Without a registry, 64 hexadecimal digits are the id of an image.
    if !is_registry(registry) || !is_valid_path || crate::Digest::from_hex(rest).is_some() {
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

/// *Source:* `RepositoryNameTotalLengthMax` of the distribution's `reference` package.
const MAX_REPOSITORY_BYTES: usize = 255;

fn is_tag(tag: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let Some(first) = tag.bytes().next() else { return false };
    tag.len() <= 128 && plain(first) && tag.bytes().all(|byte| plain(byte) || byte == b'.' || byte == b'-')
}

fn is_registry(registry: &str) -> bool {
    let (host, port) = match registry.rsplit_once(':') {
        // The last colon of an IPv6 address without a port is within its brackets.
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (registry, None),
    };
    let label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    let is_port =
        |port: &str| (1..=5).contains(&port.len()) && port.bytes().all(|byte| byte.is_ascii_digit());
    let is_host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(ipv6) => !ipv6.is_empty() && ipv6.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b':'),
        None => host.split('.').all(label),
    };
    is_host && port.is_none_or(is_port)
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
    fn a_digest_takes_the_place_of_the_tag() {
        let digest = crate::Digest::of_content(b"a");
        for name in ["registry.k8s.io/pause:3.10", "[fd00::1]:5000/app", "busybox"] {
            let name: ImageName = name.parse().expect("valid");
            let with_digest = name.with_digest(&digest).expect("it has none");
            assert_eq!(format!("{name}@{digest}").parse().as_ref(), Ok(&with_digest));
            assert_eq!(with_digest.with_digest(&digest), None);
        }
    }

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

    /// *Source:* the tables of the distribution's `reference` package, normalize_test.go and reference_test.go.
    #[test]
    fn names_are_those_of_dockers_reference_package() {
        const HEX: &str = "1a3f5e7d9c1b3a5f7e9d1c3b5a7f9e1d3c5b7a9f1e3d5d7c9b1a3f5e7d9c1b3a";
        let long = "a/".repeat(127) + "a:tag-puts-this-over-max";
        let [digest, of_registry] = [format!("@sha256:{HEX}"), format!("docker.io/{HEX}")];
        for (text, path) in [
            ("docker/docker", "docker.io/docker/docker:latest"),
            ("localhost/debian", "localhost/debian:latest"),
            ("LOCALDOMAIN/debian", "LOCALDOMAIN/debian:latest"),
            ("Foo/bar", "Foo/bar:latest"),
            ("index.docker.io/debian", "docker.io/library/debian:latest"),
            ("127.0.0.1:5000/docker/docker", "127.0.0.1:5000/docker/docker:latest"),
            ("192.168.0.1", "docker.io/library/192.168.0.1:latest"),
            ("192.168.0.1:80", "docker.io/library/192.168.0.1:80"),
            ("192.168.1.1:5000/repo:5050", "192.168.1.1:5000/repo:5050"),
            ("[fc00::1]:5000/docker", "[fc00::1]:5000/docker:latest"),
            ("[fd00::1]:5000/app:1", "[fd00::1]:5000/app:1"),
            ("[2001:db8::1]/repo", "[2001:db8::1]/repo:latest"),
            ("[2001:db8:1:2:3:4:5:6]/repo:tag", "[2001:db8:1:2:3:4:5:6]/repo:tag"),
            ("test_com/foo", "docker.io/test_com/foo:latest"),
            ("xn--n3h.com:18080/foo", "xn--n3h.com:18080/foo:latest"),
            (
                "b.gcr.io/test.example.com/my-app:test.example.com",
                "b.gcr.io/test.example.com/my-app:test.example.com",
            ),
            ("lowercase:Uppercase", "docker.io/library/lowercase:Uppercase"),
            ("docker---rules/dock__er", "docker.io/docker---rules/dock__er:latest"),
            (&of_registry, &format!("docker.io/library/{HEX}:latest")),
            (&format!("redis{digest}"), &format!("docker.io/library/redis{digest}")),
            (&format!("busybox:latest{digest}"), &format!("docker.io/library/busybox{digest}")),
            (&format!("[2001:db8::1]:5000/repo:tag{digest}"), &format!("[2001:db8::1]:5000/repo{digest}")),
            (&long, &format!("docker.io/{long}")),
        ] {
            assert_eq!(text.parse::<ImageName>().map(|name| name.to_string()).as_deref(), Ok(path), "{text}");
        }
        for text in [
            "https://github.com/docker/docker",
            "docker/Docker",
            "Uppercase:tag",
            "test:5000/Uppercase/lowercase:tag",
            "-docker/docker",
            "docker-/docker",
            "-docker.io/docker/docker",
            "docker///docker",
            "____/____",
            "dock..er/docker",
            "dock_.er/docker",
            "dock-.er/docker",
            "[fc00::1]",
            "[fc00::1]:5000",
            "[2001:db8::1]:tag",
            "fc00::1:5000/debian",
            "[fe80::1%eth0]:5000/debian",
            "[2001:db8:3:4::192.0.2.33]:5000/debian",
            "[]/debian",
            "aa/asdf$$^/aa",
            "repo@sha256:ffffffffffffffffffffffffffffffffff",
            "validname@invaliddigest:ffff",
            HEX,
            &digest,
            &("a/".repeat(128) + "a:tag"),
        ] {
            assert!(text.parse::<ImageName>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_bare_tag_belongs_to_the_bundles_repository() {
        let of = |reference| ImageName::of_reference(reference, "pause").map(|name| name.to_string());
        assert_eq!(of("3.9"), Ok("docker.io/library/pause:3.9".into()));
        assert_eq!(of("localhost/pause:1"), Ok("localhost/pause:1".into()));
        let error = ImageName::of_reference("3.9", "My_App-1.2+git").expect_err("no repository").to_string();
        assert!(error.contains("\"My_App-1.2+git\"") && error.contains("rename the file"), "{error}");
        let error = ImageName::of_reference("not a tag", "pause").expect_err("no tag").to_string();
        assert!(error.contains("invalid image name \"not a tag\""), "{error}");
    }
}
