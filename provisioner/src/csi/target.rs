//! The place at which a pod sees its volume.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Component, Path, PathBuf};

/// Longest path taken. *Source:* Linux' `PATH_MAX`, without its final NUL.
const MAX_PATH_BYTES: usize = 4095;

/// A place below the kubelet's directory, as a path relative to it: at least one component, each an ordinary name.
///
/// It can't leave the directory by its text; that it doesn't leave it by a symbolic link is the business of
/// [`Mounts`](super::Mounts).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target(PathBuf);

/// Why a path can't be a target.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TargetError {
    /// There is none.
    #[error("the path is missing")]
    Missing,
    /// It is longer than Linux takes.
    #[error("the path is longer than {MAX_PATH_BYTES} bytes")]
    TooLong,
    /// It isn't absolute, or has a `..` or a NUL in it.
    #[error("the path must be absolute, without `..` and NUL")]
    NotPlain,
    /// It isn't below the kubelet's directory.
    #[error("the path is not below the kubelet's directory {}", kubelet.display())]
    Elsewhere {
        /// The directory that it should be below.
        kubelet: PathBuf,
    },
}

impl Target {
    /// Reads an absolute path, which must lie below the kubelet's directory.
    ///
    /// # Errors
    /// See [`TargetError`].
    pub fn try_new(kubelet: &Path, path: &str) -> Result<Self, TargetError> {
        match path {
            "" => return Err(TargetError::Missing),
            path if path.len() > MAX_PATH_BYTES => return Err(TargetError::TooLong),
            path if path.contains('\0') => return Err(TargetError::NotPlain),
            _ => {}
        }
        let path = Path::new(path);
        let is_plain = |part: Component<'_>| matches!(part, Component::Normal(_) | Component::RootDir);
        if !path.is_absolute() || !path.components().all(is_plain) {
            return Err(TargetError::NotPlain);
        }
        let elsewhere = || TargetError::Elsewhere { kubelet: kubelet.to_owned() };
        // Components, so that `//` and `/./` are gone.
        let below: PathBuf = path.strip_prefix(kubelet).map_err(|_| elsewhere())?.components().collect();
        match below.as_os_str().is_empty() {
            true => Err(elsewhere()),
            false => Ok(Self(below)),
        }
    }

    /// The path, relative to the kubelet's directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The directory in which it is, relative to the kubelet's, empty where it is that itself; and its name there.
    pub fn split(&self) -> (&Path, &OsStr) {
        let parent = self.0.parent().unwrap_or(Path::new(""));
        (parent, self.0.file_name().unwrap_or_default())
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.display().fmt(f)
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KUBELET: &str = "/var/lib/kubelet";

    fn target(path: &str) -> Result<Target, TargetError> {
        Target::try_new(Path::new(KUBELET), path)
    }

    #[test]
    fn a_target_is_a_plain_path_below_the_kubelets_directory() {
        let pod = target("/var/lib/kubelet/pods/u/volumes/d/pv/mount").expect("a target");
        assert_eq!(pod.split(), (Path::new("pods/u/volumes/d/pv"), OsStr::new("mount")));
        assert_eq!(
            target("/var/lib/kubelet//pods/./u/").map(|target| target.to_string()),
            Ok("pods/u".into())
        );
        assert_eq!(target("/var/lib/kubelet/x").expect("a target").split().0, Path::new(""));
        assert_eq!(target(""), Err(TargetError::Missing));
        assert_eq!(target(&format!("{KUBELET}/{}", "x".repeat(4096))), Err(TargetError::TooLong));
        for bad in
            ["x", "pods/u", "/var/lib/kubelet/../x", "/var/lib/kubelet/pods/..", "/var/lib/kubelet/a\0b"]
        {
            assert_eq!(target(bad), Err(TargetError::NotPlain), "{bad:?}");
        }
        for bad in ["/", "/var/lib/kubelet", "/var/lib/kubelet/", "/var/lib/kubelets/x", "/etc/x"] {
            assert!(matches!(target(bad), Err(TargetError::Elsewhere { .. })), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn no_text_leaves_the_directory(text in r"(/var/lib/kubelet)?[/.a\x00]{0,20}|.*") {
            if let Ok(target) = target(&text) {
                prop_assert!(target.path().components().all(|part| matches!(part, Component::Normal(_))));
                let whole = Path::new(KUBELET).join(target.path());
                prop_assert_eq!(super::Target::try_new(Path::new(KUBELET), whole.to_str().expect("text")), Ok(target));
            }
        }
    }
}
