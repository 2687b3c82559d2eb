//! The kind and the limits of a claim's volume, by the claim and its class: bytes from the claim, inodes from the class or
//! the bytes.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PersistentVolumeClaimSpec;
use k8s_openapi::api::storage::v1::StorageClass;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};

use crate::claim::spec::{ClaimRejection, SizeError};
use crate::image::{ImageFormat, VolumeKind};
use crate::name::{InvalidObjectName, StoreName};
use crate::quantity;

/// The parameter of a class that sets the inode limit of each volume.
pub(crate) const INODES_PARAMETER: &str = "inodes";

/// The valid values of [`INODES_PARAMETER`].
pub(crate) const EXPECTED_INODES: &str = "use a number of inodes above 0, such as 100k";

/// Bytes of the volume per inode, unless the class sets `inodes`.
///
/// *Source:* Monogon's ratio: inodes of 512 bytes then take at most a quarter of the volume.
const BYTES_PER_INODE: u64 = 2048;

/// Minimum number of inodes, unless the class sets `inodes`: small volumes hold small files.
const MIN_INODES: u64 = 1024;

/// The parameter of a class whose volumes are file systems in a file: nothing in them can leave their limits.
const STRICT_PARAMETER: &str = "strict";

/// The file system of strict volumes. *Source:* Kubernetes CSI, "StorageClass parameters".
const FS_TYPE_PARAMETER: &str = "csi.storage.k8s.io/fstype";

/// The parameter of a class that names the store of its volumes, one of several on a node.
const STORE_PARAMETER: &str = "store";

/// The advice for a class that names a file system and is not strict.
const EXPECTED_STRICT: &str = "volumes are directories on the file system of the node: set strict: \"true\" for such a file system, or remove it";

/// The claim's request, in whole bytes.
pub(crate) fn requested_capacity(spec: &PersistentVolumeClaimSpec) -> Result<Bytes, ClaimRejection> {
    let requests = spec.resources.as_ref().and_then(|resources| resources.requests.as_ref());
    let text = requests.and_then(|requests| requests.get("storage")).map(|quantity| quantity.0.as_str());
    let reject = |reason| ClaimRejection::InvalidSize { text: text.unwrap_or_default().to_owned(), reason };
    let text = text.ok_or_else(|| reject(SizeError::Missing))?;
    match quantity::parse_quantity(text) {
        Ok(0) => Err(reject(SizeError::Zero)),
        Ok(bytes) => Ok(Bytes(bytes)),
        Err(error) => Err(reject(SizeError::Quantity(error))),
    }
}

/// The inode limit of a volume of this capacity that is a directory, of a class that sets none.
pub(crate) fn default_inodes(capacity: Bytes) -> Inodes {
    Inodes((capacity.0 / BYTES_PER_INODE).max(MIN_INODES))
}

/// The inode limit of a volume of this capacity and class that is a directory.
pub(crate) fn inode_limit(capacity: Bytes, class: &StorageClass) -> Result<Inodes, ClaimRejection> {
    let parameters = ClassParameters::read(class.parameters.as_ref());
    parameters.map(|found| found.inode_limit(capacity)).map_err(|parameter| parameter.rejection(class))
}

/// The format of the strict volumes of a class; `None` if its volumes are directories, or it is invalid.
pub(crate) fn strict_format(class: &StorageClass) -> Option<ImageFormat> {
    ClassParameters::read(class.parameters.as_ref()).ok()?.kind().ok()?.image_format()
}

/// The store that the volumes of a class are created in: the one without a name, or one of several.
///
/// # Errors
/// The name is not one that a store can have: claims of the class are rejected.
pub(crate) fn store_of_class(class: &StorageClass) -> Result<Option<StoreName>, InvalidObjectName> {
    let named = class.parameters.as_ref().and_then(|parameters| parameters.get(STORE_PARAMETER));
    named.filter(|name| !name.is_empty()).map(StoreName::try_new).transpose()
}

/// The kind and the limits of a volume of this capacity and class. The class does not change the kind of a block volume.
pub(crate) fn volume_shape(
    capacity: Bytes,
    class: &StorageClass,
    is_block: bool,
) -> Result<(VolumeKind, QuotaLimits), ClaimRejection> {
    let parameters = ClassParameters::read(class.parameters.as_ref());
    let parameters = parameters.map_err(|parameter| parameter.rejection(class))?;
    // The file system of a class does not apply to a block volume, so it is not even checked.
    let kind = if is_block {
        ImageFormat::Block.into()
    } else {
        parameters.kind().map_err(|parameter| parameter.rejection(class))?
    };
    let inodes = match kind {
        VolumeKind::Directory => Some(parameters.inode_limit(capacity)),
        // Rejected here, where the claim gets an event: creating the file system would fail again and again.
        VolumeKind::Image(format) if capacity < format.min_size() => {
            return Err(ClaimRejection::TooSmall { format, capacity });
        }
        VolumeKind::Image(_) => None,
    };
    Ok((kind, QuotaLimits { bytes: Some(capacity), inodes }))
}

/// The parameters of a class.
#[derive(Debug, Default)]
struct ClassParameters<'a> {
    inodes: Option<Inodes>,
    is_strict: bool,
    /// Unchecked: it does not apply to block volumes.
    fs_type: Option<&'a str>,
}

impl<'a> ClassParameters<'a> {
    fn read(parameters: Option<&'a BTreeMap<String, String>>) -> Result<Self, InvalidParameter<'a>> {
        let mut found = Self::default();
        for (name, value) in parameters.into_iter().flatten() {
            let reject = |expected| Err(InvalidParameter { name, value, expected });
            match (name.as_str(), value.as_str()) {
                (INODES_PARAMETER, _) => found.inodes = Some(parse_inodes(name, value)?),
                (STRICT_PARAMETER, "true" | "false") => found.is_strict = value == "true",
                (STRICT_PARAMETER, _) => return reject("use \"true\" or \"false\""),
                // Which one it is does not concern the shape of the volume.
                (STORE_PARAMETER, "") => {}
                (STORE_PARAMETER, _) if StoreName::try_new(value).is_err() => {
                    return reject("use the name of a store of the nodes, such as fast");
                }
                (STORE_PARAMETER, _) => {}
                (FS_TYPE_PARAMETER, fs_type) => found.fs_type = Some(fs_type).filter(|it| !it.is_empty()),
                // A misspelled parameter must not silently give a volume other limits, and one that other drivers
                // implement, such as the name of a secret, must not promise what this one does not do.
                _ => {
                    return reject(
                        "unknown parameter; known: inodes, store, strict, csi.storage.k8s.io/fstype",
                    );
                }
            }
        }
        Ok(found)
    }

    fn inode_limit(&self, capacity: Bytes) -> Inodes {
        self.inodes.unwrap_or_else(|| default_inodes(capacity))
    }

    /// The kind of a volume with a file system.
    fn kind(&self) -> Result<VolumeKind, InvalidParameter<'a>> {
        let reject = |name, value, expected| Err(InvalidParameter { name, value, expected });
        let format = match self.fs_type {
            Some(name) if !self.is_strict => return reject(FS_TYPE_PARAMETER, name, EXPECTED_STRICT),
            None if !self.is_strict => return Ok(VolumeKind::Directory),
            Some("ext4") | None => ImageFormat::Ext4,
            Some("xfs") => ImageFormat::Xfs,
            Some(other) => return reject(FS_TYPE_PARAMETER, other, "use ext4 or xfs"),
        };
        match self.inodes {
            None => Ok(format.into()),
            Some(_) => reject(INODES_PARAMETER, "", "a strict volume has no inode limit: remove it"),
        }
    }
}

/// A parameter that is unknown or has an invalid value.
pub(crate) struct InvalidParameter<'a> {
    pub(crate) name: &'a str,
    pub(crate) value: &'a str,
    pub(crate) expected: &'static str,
}

impl InvalidParameter<'_> {
    /// The rejection of a claim of this class.
    fn rejection(self, class: &StorageClass) -> ClaimRejection {
        ClaimRejection::InvalidParameter {
            class: class.metadata.name.clone().unwrap_or_default(),
            name: self.name.to_owned(),
            value: self.value.to_owned(),
            expected: self.expected,
        }
    }
}

fn parse_inodes<'a>(name: &'a str, value: &'a str) -> Result<Inodes, InvalidParameter<'a>> {
    match quantity::parse_quantity(value) {
        Ok(number) if number > 0 => Ok(Inodes(number)),
        _ => Err(InvalidParameter { name, value, expected: EXPECTED_INODES }),
    }
}

/// The inode limit that the parameters of a VolumeAttributesClass set, if any.
pub(crate) fn inodes_parameter(
    parameters: Option<&BTreeMap<String, String>>,
) -> Result<Option<Inodes>, InvalidParameter<'_>> {
    let mut inodes = None;
    for (name, value) in parameters.into_iter().flatten() {
        inodes = match name.as_str() {
            INODES_PARAMETER => Some(parse_inodes(name, value)?),
            _ => {
                let expected = "unknown parameter; known: inodes";
                return Err(InvalidParameter { name, value, expected });
            }
        };
    }
    Ok(inodes)
}
