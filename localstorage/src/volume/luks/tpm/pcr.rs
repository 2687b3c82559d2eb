//! Platform configuration registers: which of them a key is bound to, and their values.

use std::collections::BTreeMap;
use std::fmt;

use sha2::{Digest as _, Sha256};

use super::wire::{ALG_SHA256, CommandBytes};

/// The size of a digest of the bank SHA-256, in bytes.
pub(super) const DIGEST_BYTES: usize = 32;
/// A TPM of a PC has PCRs 0 to 23. *Source:* TCG PC Client Platform TPM Profile 1.05, 4.6.
const PCR_COUNT: u32 = 24;

/// PCRs of the bank SHA-256, as numbers from 0 to 23. An empty selection binds a key to the TPM alone.
///
/// PCR 7, which records the secure boot policy and the keys that signed what was booted, changes least; 0 and 2 change
/// with each update of the firmware, 4 and 11 with each update of the system.
///
/// *Source:* UAPI group, Linux TPM PCR Registry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PcrSelection(u32);

/// A PCR of this number does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown PCR {0}: PCRs are 0 to 23")]
pub struct InvalidPcr(pub u32);

impl PcrSelection {
    /// The PCRs with these numbers. Repeated ones count once.
    ///
    /// # Errors
    /// [`InvalidPcr`] for a number above 23.
    pub fn try_new(numbers: impl IntoIterator<Item = u32>) -> Result<PcrSelection, InvalidPcr> {
        let add = |PcrSelection(bits), number: u32| match number < PCR_COUNT {
            true => Ok(PcrSelection(bits | 1_u32 << number)),
            false => Err(InvalidPcr(number)),
        };
        numbers.into_iter().try_fold(PcrSelection::default(), add)
    }

    /// Returns whether it selects none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The numbers, in their order.
    pub fn numbers(self) -> impl Iterator<Item = u32> {
        (0..PCR_COUNT).filter(move |number| self.0 >> number & 1 == 1)
    }

    pub(super) fn without(self, other: PcrSelection) -> PcrSelection {
        PcrSelection(self.0 & !other.0)
    }

    /// As `TPML_PCR_SELECTION`.
    pub(super) fn to_wire(self) -> Vec<u8> {
        let mut bytes = CommandBytes::default();
        // One bank, with a bitmap of three bytes for 24 PCRs.
        bytes.u32(1).u16(ALG_SHA256).bytes(&[3]).bytes(&self.0.to_le_bytes()[..3]);
        bytes.into_vec()
    }

    /// From the bitmap of a `TPMS_PCR_SELECTION`.
    pub(super) fn from_bitmap(bitmap: &[u8]) -> PcrSelection {
        let byte = |at| u32::from(bitmap.get(at).copied().unwrap_or_default());
        PcrSelection(byte(0) | byte(1) << 8 | byte(2) << 16)
    }
}

/// The numbers, separated by commas; `none`.
impl fmt::Display for PcrSelection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        let numbers: Vec<String> = self.numbers().map(|number| number.to_string()).collect();
        f.write_str(&numbers.join(", "))
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PcrValues(pub(super) BTreeMap<u32, [u8; DIGEST_BYTES]>);

impl PcrValues {
    pub(super) fn selection(&self) -> PcrSelection {
        PcrSelection(self.0.keys().fold(0, |bits, number| bits | 1_u32 << number))
    }

    /// The PCRs whose values differ, or that the other one lacks.
    pub(super) fn changes_to(&self, other: &PcrValues) -> PcrSelection {
        let changed = self.0.iter().filter(|(number, value)| other.0.get(number) != Some(value));
        PcrSelection(changed.fold(0, |bits, (number, _)| bits | 1_u32 << number))
    }

    /// The digest of all values, which `TPM2_PolicyPCR` compares.
    pub(super) fn digest(&self) -> [u8; DIGEST_BYTES] {
        let hash = self.0.values().fold(Sha256::new(), |hash, value| hash.chain_update(value));
        hash.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selection_has_the_numbers_that_were_named() {
        let selection = PcrSelection::try_new([11, 7, 7, 0, 23]).unwrap();
        assert_eq!(selection.numbers().collect::<Vec<_>>(), [0, 7, 11, 23]);
        assert_eq!(
            (selection.to_string(), PcrSelection::default().to_string()),
            ("0, 7, 11, 23".into(), "none".into())
        );
        assert_eq!(selection.to_wire(), [0, 0, 0, 1, 0, 11, 3, 0x81, 0x08, 0x80]);
        assert_eq!(PcrSelection::from_bitmap(&[0x81, 0x08, 0x80]), selection);
        assert_eq!(PcrSelection::try_new([7, 24]), Err(InvalidPcr(24)));
    }

    #[test]
    fn changed_values_are_named() {
        let values = |seven: u8| PcrValues([(4, [1; 32]), (7, [seven; 32])].into());
        assert_eq!(values(2).changes_to(&values(2)), PcrSelection::default());
        assert_eq!(values(2).changes_to(&values(3)), PcrSelection::try_new([7]).unwrap());
        assert_eq!(values(2).changes_to(&PcrValues::default()), PcrSelection::try_new([4, 7]).unwrap());
    }
}
