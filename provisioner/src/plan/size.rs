//! Computes the limits of a claim's volume: bytes from the claim, inodes from the class or the bytes.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PersistentVolumeClaimSpec;
use k8s_openapi::api::storage::v1::StorageClass;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};

use crate::plan::{ClaimRejection, SizeError};
use crate::quantity;

/// The parameter of a class that sets the inode limit of each volume.
pub(super) const INODES_PARAMETER: &str = "inodes";

/// What is valid for it.
pub(super) const EXPECTED_INODES: &str = "use a number of inodes above 0, such as 100k";

/// Bytes of the volume per inode, unless the class sets `inodes`.
///
/// *Source:* Monogon's ratio: inodes of 512 bytes then take at most a quarter of the volume.
const BYTES_PER_INODE: u64 = 2048;

/// Minimum number of inodes, unless the class sets `inodes`: small volumes hold small files.
const MIN_INODES: u64 = 1024;

/// Prefix of parameters for Kubernetes components, such as the file system type.
const RESERVED_PREFIX: &str = "csi.storage.k8s.io/";

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

/// The limits of a volume of this capacity and class.
pub(super) fn volume_limits(capacity: Bytes, class: &StorageClass) -> Result<QuotaLimits, ClaimRejection> {
    let inodes = inodes_parameter(class.parameters.as_ref()).map_err(|parameter| {
        ClaimRejection::InvalidParameter {
            class: class.metadata.name.clone().unwrap_or_default(),
            name: parameter.name.to_owned(),
            value: parameter.value.to_owned(),
            expected: parameter.expected,
        }
    })?;
    let inodes = inodes.unwrap_or(Inodes((capacity.0 / BYTES_PER_INODE).max(MIN_INODES)));
    Ok(QuotaLimits { bytes: Some(capacity), inodes: Some(inodes) })
}

/// A parameter that is unknown or has an invalid value.
pub(super) struct InvalidParameter<'a> {
    pub(super) name: &'a str,
    pub(super) value: &'a str,
    pub(super) expected: &'static str,
}

/// The inode limit that the parameters of a class set, if any.
pub(super) fn inodes_parameter(
    parameters: Option<&BTreeMap<String, String>>,
) -> Result<Option<Inodes>, InvalidParameter<'_>> {
    let mut inodes = None;
    for (name, value) in
        parameters.into_iter().flatten().filter(|(name, _)| !name.starts_with(RESERVED_PREFIX))
    {
        let reject = |expected| InvalidParameter { name, value, expected };
        inodes = match (name.as_str(), quantity::parse_quantity(value)) {
            (INODES_PARAMETER, Ok(number)) if number > 0 => Some(Inodes(number)),
            (INODES_PARAMETER, _) => return Err(reject(EXPECTED_INODES)),
            _ => return Err(reject("unknown parameter; known: inodes")),
        };
    }
    Ok(inodes)
}
