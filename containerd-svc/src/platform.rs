//! For which machines an image is.

use std::fmt;

use serde::Deserialize;

/// An operating system and a processor, in the words of Go's `GOOS` and `GOARCH`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Platform {
    /// As `linux`.
    #[serde(default)]
    pub os: String,
    /// As `amd64`.
    #[serde(default)]
    pub architecture: String,
    /// As `v7` of `arm`.
    #[serde(default)]
    pub variant: Option<String>,
}

impl Platform {
    /// The machine that this program was built for.
    pub fn of_this_machine() -> Self {
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

    /// Whether what is made for `other` runs here. A machine without a variant runs those that every one of its kind
    /// runs: `v8` of `arm64`, `v1` of `amd64`.
    pub fn runs(&self, other: &Self) -> bool {
        let same = self.os == other.os && self.architecture == other.architecture;
        let variant = |platform: &Self| match (platform.architecture.as_str(), platform.variant.as_deref()) {
            (_, None | Some("")) | ("arm64", Some("v8")) | ("amd64", Some("v1")) => String::new(),
            (_, Some(variant)) => variant.to_owned(),
        };
        let (own, others) = (variant(self), variant(other));
        same && (others.is_empty() || own == others || self.architecture == "arm" && others < own)
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
    fn a_machine_runs_what_is_made_for_it_and_nothing_else() {
        for (machine, image) in [
            ("linux/amd64", "linux/amd64"),
            ("linux/amd64", "linux/amd64/v1"),
            ("linux/arm64", "linux/arm64/v8"),
            ("linux/arm/v7", "linux/arm/v6"),
        ] {
            assert!(platform(machine).runs(&platform(image)), "{machine} {image}");
        }
        for (machine, image) in [
            ("linux/amd64", "linux/arm64"),
            ("linux/amd64", "windows/amd64"),
            ("linux/amd64", "linux/amd64/v3"),
            ("linux/arm/v7", "linux/arm/v8"),
            ("linux/amd64", "unknown/unknown"),
        ] {
            assert!(!platform(machine).runs(&platform(image)), "{machine} {image}");
        }
    }
}
