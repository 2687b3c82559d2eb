//! `[services.containerd]`: a private containerd of the node.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use nodekeel_containerd_svc::{
    AllowList, AllowedImage, CriSettings, ImagePolicy, ImportLimits, RequiredImage, RuntimeHandler,
};
use nodekeel_fsquota::Bytes;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::config::check::{ConfigViolation, check_absolute_path, check_program, reject_field};

/// `[services.containerd]`: a private containerd, separate from any other on the machine.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ContainerdConfig {
    /// True if the node runs it.
    pub enable: bool,
    /// The program; `None` searches for `containerd`.
    pub binary: Option<PathBuf>,
    /// Directories of images, `NAMESPACE/NAME.tar`: one as text, several as a list. An image that two bring belongs to the first.
    #[serde(deserialize_with = "deserialize_directories")]
    pub preseed: Vec<PathBuf>,
    /// The archives or images of it that are imported first, and make `root.containerd.preseed` ready: `NAME.tar`,
    /// `NAMESPACE/NAME.tar`, or the name of an image. Empty: all of them.
    pub required: Vec<String>,
    /// The images that archives may bring, as `sha256:DIGEST` or `REPOSITORY@sha256:DIGEST`; `None` allows all of them. It
    /// binds `nodectl images --import`, too, but not a kubelet's pulls.
    pub allow: Option<Vec<String>>,
    /// Bytes that images leave free on the disk, by a project limit of containerd's root on an XFS with project quotas,
    /// elsewhere by a check before those images and `nodectl images --import` are written; `None` is 5 % of the disk or
    /// 1 GiB, whichever is larger, but at most 20 % of the disk. 0: without a reserve.
    pub reserve: Option<Bytes>,
    /// Bytes of the largest window of a zstd archive.
    pub zstd_window: Bytes,
    /// True if the layers of those images are unpacked at import, so that the first container starts without
    /// that delay.
    pub unpack: bool,
    /// The CRI, which a kubelet of this machine needs; `None` disables it.
    pub cri: Option<CriSettings>,
    /// A containerd configuration that replaces noded's, except for root, state and address.
    pub config: Option<PathBuf>,
    /// Parts of a containerd configuration that are merged over noded's, in this order.
    pub fragments: Vec<PathBuf>,
    /// Arguments after noded's.
    pub extra_args: Vec<String>,
}

impl ContainerdConfig {
    /// The limits of an archive.
    pub(super) fn import_limits(&self) -> ImportLimits {
        let mut limits = ImportLimits::default();
        limits.zstd_window = self.zstd_window.0;
        limits
    }

    /// The policy of what archives may bring, if there is one.
    pub(super) fn image_policy(&self) -> Option<Arc<dyn ImagePolicy>> {
        // The check of the configuration has refused what is no entry.
        let allowed = self.allow.as_ref()?.iter().filter_map(|text| text.parse().ok());
        Some(Arc::new(AllowList::new(format!("{TABLE}.allow"), allowed)))
    }
}

impl Default for ContainerdConfig {
    fn default() -> Self {
        Self {
            enable: true,
            binary: None,
            preseed: Vec::new(),
            required: Vec::new(),
            allow: None,
            reserve: None,
            zstd_window: Bytes(ImportLimits::default().zstd_window),
            unpack: false,
            cri: None,
            config: None,
            fragments: Vec::new(),
            extra_args: Vec::new(),
        }
    }
}

const TABLE: &str = "services.containerd";

/// Checks the rules between fields.
pub(crate) fn check_containerd(containerd: &ContainerdConfig) -> Result<(), ConfigViolation> {
    check_program(TABLE, containerd.binary.as_deref(), &containerd.extra_args)?;
    let cri = containerd.cri.as_ref();
    for (field, path) in [
        ("config", containerd.config.as_ref()),
        ("cri.cni_bin", cri.map(|cri| &cri.cni_bin)),
        ("cri.cni_conf", cri.map(|cri| &cri.cni_conf)),
        ("cri.registries", cri.and_then(|cri| cri.registries.as_ref())),
    ] {
        path.map_or(Ok(()), |path| check_absolute_path(&format!("{TABLE}.{field}"), path))?;
    }
    for (rank, path) in containerd.preseed.iter().enumerate() {
        check_absolute_path(&format!("{TABLE}.preseed"), path)?;
        if containerd.preseed[..rank].contains(path) {
            return reject_field(format!("{TABLE}.preseed"), format!("has {} twice", path.display()));
        }
    }
    for path in &containerd.fragments {
        check_absolute_path(&format!("{TABLE}.fragments"), path)?;
    }
    // The keys only concern preseeded images.
    for (field, is_set) in [("unpack", containerd.unpack), ("required", !containerd.required.is_empty())] {
        if is_set && containerd.preseed.is_empty() {
            return reject_field(format!("{TABLE}.{field}"), format!("requires {TABLE}.preseed"));
        }
    }
    for text in &containerd.required {
        if let Err(error) = text.parse::<RequiredImage>() {
            return reject_field(
                format!("{TABLE}.required"),
                format!("{error}, or the file name of an archive"),
            );
        }
    }
    for text in containerd.allow.iter().flatten() {
        if let Err(error) = text.parse::<AllowedImage>() {
            return reject_field(format!("{TABLE}.allow"), error.to_string());
        }
    }
    // A file of the operator replaces noded's settings, of which the CRI is one.
    if containerd.config.is_some() && cri.is_some() {
        return reject_field(
            format!("{TABLE}.config"),
            format!("conflicts with [{TABLE}.cri]; set only one of the two"),
        );
    }
    if containerd.config.is_some() && !containerd.fragments.is_empty() {
        return reject_field(
            format!("{TABLE}.fragments"),
            format!("conflicts with {TABLE}.config, which is complete; set only one of the two"),
        );
    }
    if cri.is_some_and(|cri| cri.default_runtime == RuntimeHandler::Runsc && cri.runsc.is_none()) {
        return reject_field(
            format!("{TABLE}.cri.default_runtime"),
            format!("runtime \"runsc\" is not configured; add [{TABLE}.cri.runsc]"),
        );
    }
    Ok(())
}

/// One path, or a list of them.
fn deserialize_directories<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<PathBuf>, D::Error> {
    struct DirectoriesVisitor;

    impl<'de> Visitor<'de> for DirectoriesVisitor {
        type Value = Vec<PathBuf>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(r#"a directory like "/images", or a list like ["/images", "/more"]"#)
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<Vec<PathBuf>, E> {
            Ok(vec![text.into()])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<PathBuf>, A::Error> {
            let mut directories = Vec::new();
            while let Some(directory) = items.next_element()? {
                directories.push(directory);
            }
            Ok(directories)
        }
    }
    deserializer.deserialize_any(DirectoriesVisitor)
}
