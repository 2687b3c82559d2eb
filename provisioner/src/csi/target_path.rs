//! The path at which a volume is mounted for a pod.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Component, Path, PathBuf};

/// Maximum length of a path in bytes. *Source:* Linux' `PATH_MAX`, without its final NUL.
const MAX_PATH_BYTES: usize = 4095;

/// A target path (CSI `target_path`) below the kubelet's directory, relative to it: at least one component,
/// each an ordinary name.
///
/// A path in this form cannot lead out of the directory. Implementations of
/// [`VolumeMounter`](super::VolumeMounter) ensure that symbolic links do not lead out of it either.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TargetPath(PathBuf);

/// A path can't be a target.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TargetError {
    /// The path is empty.
    #[error("the path is missing")]
    Missing,
    /// The path is longer than Linux permits.
    #[error("the path is longer than {MAX_PATH_BYTES} bytes")]
    TooLong,
    /// The path is not absolute, or contains `..` or NUL.
    #[error("the path must be absolute, without `..` and NUL")]
    Malformed,
    /// The path is not below the kubelet's directory.
    #[error(
        "the path is not below the kubelet's directory {}: set that to the kubelet's --root-dir",
        kubelet.display()
    )]
    OutsideKubelet {
        /// The kubelet's directory.
        kubelet: PathBuf,
    },
}

impl TargetPath {
    /// Parses an absolute path, which must be below the kubelet's directory.
    ///
    /// # Errors
    /// See [`TargetError`].
    pub fn try_new(kubelet: &Path, path: &str) -> Result<Self, TargetError> {
        match path {
            "" => return Err(TargetError::Missing),
            path if path.len() > MAX_PATH_BYTES => return Err(TargetError::TooLong),
            path if path.contains('\0') => return Err(TargetError::Malformed),
            _ => {}
        }
        let path = Path::new(path);
        // Before the prefix is removed: with `..`, a path below the directory can lead out of it.
        let is_plain = |part: Component<'_>| matches!(part, Component::Normal(_) | Component::RootDir);
        if !path.is_absolute() || !path.components().all(is_plain) {
            return Err(TargetError::Malformed);
        }
        let elsewhere = || TargetError::OutsideKubelet { kubelet: kubelet.to_owned() };
        // By components, to normalize `//` and `/./`.
        let below: PathBuf = path.strip_prefix(kubelet).map_err(|_| elsewhere())?.components().collect();
        if below.as_os_str().is_empty() { Err(elsewhere()) } else { Ok(Self(below)) }
    }

    /// The path, relative to the kubelet's directory.
    pub fn relative_path(&self) -> &Path {
        &self.0
    }

    /// The parent directory, relative to the kubelet's (empty if it is the kubelet's), and the name in it.
    pub fn parent_and_name(&self) -> (&Path, &OsStr) {
        let parent = self.0.parent().unwrap_or(Path::new(""));
        (parent, self.0.file_name().unwrap_or_default())
    }
}

impl fmt::Display for TargetPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.display().fmt(f)
    }
}

impl fmt::Debug for TargetPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KUBELET: &str = "/var/lib/kubelet";

    fn parse_target(path: &str) -> Result<TargetPath, TargetError> {
        TargetPath::try_new(Path::new(KUBELET), path)
    }

    #[test]
    fn a_target_is_a_plain_path_below_the_kubelets_directory() {
        let pod = parse_target("/var/lib/kubelet/pods/u/volumes/d/pv/mount").expect("a target");
        assert_eq!(pod.parent_and_name(), (Path::new("pods/u/volumes/d/pv"), OsStr::new("mount")));
        assert_eq!(
            parse_target("/var/lib/kubelet//pods/./u/").map(|target| target.to_string()),
            Ok("pods/u".into())
        );
        assert_eq!(parse_target("/var/lib/kubelet/x").expect("a target").parent_and_name().0, Path::new(""));
        assert_eq!(parse_target(""), Err(TargetError::Missing));
        assert_eq!(parse_target(&format!("{KUBELET}/{}", "x".repeat(4096))), Err(TargetError::TooLong));
        for bad in
            ["x", "pods/u", "/var/lib/kubelet/../x", "/var/lib/kubelet/pods/..", "/var/lib/kubelet/a\0b"]
        {
            assert_eq!(parse_target(bad), Err(TargetError::Malformed), "{bad:?}");
        }
        for bad in ["/", "/var/lib/kubelet", "/var/lib/kubelet/", "/var/lib/kubelets/x", "/etc/x"] {
            assert!(matches!(parse_target(bad), Err(TargetError::OutsideKubelet { .. })), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn no_target_path_leaves_the_kubelets_directory(text in r"(/var/lib/kubelet)?[/.a\x00]{0,20}|.*") {
            if let Ok(target) = parse_target(&text) {
                let path = target.relative_path();
                prop_assert!(path.components().all(|part| matches!(part, Component::Normal(_))));
                let whole = Path::new(KUBELET).join(path);
                prop_assert_eq!(parse_target(whole.to_str().expect("text")), Ok(target));
            }
        }
    }
}
