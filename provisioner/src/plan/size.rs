//! How large a claim's volume is: bytes from the claim, inodes from the class or the bytes.

use k8s_openapi::api::core::v1::PersistentVolumeClaimSpec;
use k8s_openapi::api::storage::v1::StorageClass;
use nodekeel_fsquota::{Bytes, Inodes, Limits};

use crate::plan::{ClaimRefusal, SizeError};
use crate::quantity;

/// The class parameter that sets the inode limit of each volume.
const INODES: &str = "inodes";

/// Bytes of the volume for each inode where the class says nothing.
///
/// *Source:* Monogon's ratio: inodes of 512 bytes then take a quarter of the volume at most.
const BYTES_PER_INODE: u64 = 2048;

/// Fewest inodes where the class says nothing: a small volume is for small files.
const MIN_INODES: u64 = 1024;

/// Parameters with this prefix are for Kubernetes' own components, such as a file system type.
const RESERVED_PREFIX: &str = "csi.storage.k8s.io/";

/// What the claim asks for, in whole bytes.
pub(super) fn capacity(spec: &PersistentVolumeClaimSpec) -> Result<Bytes, ClaimRefusal> {
    let requests = spec.resources.as_ref().and_then(|resources| resources.requests.as_ref());
    let text = requests.and_then(|requests| requests.get("storage")).map(|quantity| quantity.0.as_str());
    let refuse = |reason| ClaimRefusal::Size { text: text.unwrap_or_default().to_owned(), reason };
    let text = text.ok_or_else(|| refuse(SizeError::Missing))?;
    match quantity::parse(text) {
        Ok(0) => Err(refuse(SizeError::Zero)),
        Ok(bytes) => Ok(Bytes(bytes)),
        Err(error) => Err(refuse(SizeError::Quantity(error))),
    }
}

/// The limits that a volume of this capacity and class has.
pub(super) fn limits(capacity: Bytes, class: &StorageClass) -> Result<Limits, ClaimRefusal> {
    let parameters = class.parameters.iter().flatten();
    let mut inodes = Inodes((capacity.0 / BYTES_PER_INODE).max(MIN_INODES));
    for (name, value) in parameters.filter(|(name, _)| !name.starts_with(RESERVED_PREFIX)) {
        let refuse = |expected| ClaimRefusal::Parameter {
            class: class.metadata.name.clone().unwrap_or_default(),
            name: name.clone(),
            value: value.clone(),
            expected,
        };
        inodes = match (name.as_str(), quantity::parse(value)) {
            (INODES, Ok(number)) if number > 0 => Inodes(number),
            (INODES, _) => return Err(refuse("a number of inodes above 0, such as 100k")),
            _ => return Err(refuse("the parameter is not known; known is inodes")),
        };
    }
    Ok(Limits { bytes: Some(capacity), inodes: Some(inodes) })
}
