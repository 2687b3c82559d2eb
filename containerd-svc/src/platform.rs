//! Platforms of images.

use std::fmt;

use serde::Deserialize;

/// An operating system and processor architecture, as values of Go's `GOOS` and `GOARCH`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Platform {
    /// For example `linux`.
    #[serde(default)]
    pub os: String,
    /// For example `amd64`.
    #[serde(default)]
    pub architecture: String,
    /// For example `v7` of `arm`.
    #[serde(default)]
    pub variant: Option<String>,
}

impl Platform {
    /// The platform that this program was built for.
    pub fn of_build_target() -> Self {
        let (architecture, variant) = match std::env::consts::ARCH {
            "x86_64" => ("amd64", None),
            "aarch64" => ("arm64", None),
            "x86" => ("386", None),
            "arm" => ("arm", Some("v7")),
            "powerpc64" if cfg!(target_endian = "little") => ("ppc64le", None),
            "loongarch64" => ("loong64", None),
            other => (other, None),
        };
        Self { os: "linux".into(), architecture: architecture.into(), variant: variant.map(String::from) }
    }

    /// Returns whether it names anything: an image that states no platform is accepted on every one.
    pub(crate) fn is_stated(&self) -> bool {
        !(self.os.is_empty() && self.architecture.is_empty())
    }

    /// Returns whether this platform runs images for `other`. A platform without a variant runs the baseline variant:
    /// `v8` of `arm64`, `v1` of `amd64`.
    pub fn can_run(&self, other: &Self) -> bool {
        let same = self.os == other.os && self.architecture == other.architecture;
        let variant = |platform: &Self| match (platform.architecture.as_str(), platform.variant.as_deref()) {
            (_, None | Some("")) | ("arm64", Some("v8")) | ("amd64", Some("v1")) => String::new(),
            (_, Some(variant)) => variant.to_owned(),
        };
        let (native, wanted) = (variant(self), variant(other));
        // A newer variant of 32-bit ARM runs images for an older one: v7 those for v6.
        same && (wanted.is_empty() || native == wanted || self.architecture == "arm" && wanted < native)
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        self.variant
            .iter()
            .filter(|variant| !variant.is_empty())
            .try_for_each(|variant| write!(f, "/{variant}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn platform(text: &str) -> Platform {
        let mut parts = text.split('/').map(String::from);
        let mut next = || parts.next().unwrap_or_default();
        let (os, architecture) = (next(), next());
        Platform { os, architecture, variant: Some(next()).filter(|variant| !variant.is_empty()) }
    }

    #[test]
    fn a_machine_runs_images_of_its_platform_only() {
        for (machine, image) in [
            ("linux/amd64", "linux/amd64"),
            ("linux/amd64", "linux/amd64/v1"),
            ("linux/arm64", "linux/arm64/v8"),
            ("linux/arm/v7", "linux/arm/v6"),
        ] {
            assert!(platform(machine).can_run(&platform(image)), "{machine} {image}");
        }
        for (machine, image) in [
            ("linux/amd64", "linux/arm64"),
            ("linux/amd64", "windows/amd64"),
            ("linux/amd64", "linux/amd64/v3"),
            ("linux/arm/v7", "linux/arm/v8"),
            ("linux/amd64", "unknown/unknown"),
        ] {
            assert!(!platform(machine).can_run(&platform(image)), "{machine} {image}");
        }
    }
}
