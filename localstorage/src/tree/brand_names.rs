//! Names of the operating system that appear in paths.

use std::str::FromStr;

use thiserror::Error;

use super::shape::LayoutProblem;

/// The names of the system and of its drivers in paths: the one value that a builder changes.
///
/// In the entry names of a [`layout!`](crate::layout), `{brand}`, `{driver}` and `{devices}` stand for them.
///
/// ```
/// use nodekeel_localstorage::tree::BrandNames;
///
/// let names: BrandNames = "acme".parse()?;
/// assert_eq!(names.brand_name(), "acme");
/// assert_eq!((names.driver_name(), names.device_prefix()), ("acme.vfs", "acme.devices"));
/// let names = names.with_driver_name("volumes.acme.example")?;
/// assert_eq!(names.driver_name(), "volumes.acme.example");
/// # Ok::<(), nodekeel_localstorage::tree::BrandNameError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrandNames {
    brand_name: String,
    driver_name: String,
    device_prefix: String,
}

/// A text that cannot be part of the names of sockets and directories.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "invalid name {text:?}: must be 1 to {} of a-z, 0-9, dot and dash, with a letter or digit at both ends",
    BrandNames::MAX_BYTES
)]
pub struct BrandNameError {
    /// The text given.
    pub text: String,
}

impl BrandNames {
    /// The longest of each name, in bytes: the limit of a CSI driver name.
    pub const MAX_BYTES: usize = 63;

    /// Sets the name of the CSI driver of the volume provisioner. It must be the name that the driver itself
    /// uses.
    ///
    /// # Errors
    /// [`BrandNameError`] if it is not a driver name.
    pub fn with_driver_name(self, driver: &str) -> Result<BrandNames, BrandNameError> {
        Ok(BrandNames { driver_name: check_name(driver)?, ..self })
    }

    /// Sets the prefix of the names of device plugins.
    ///
    /// # Errors
    /// [`BrandNameError`] if it is not a valid prefix.
    pub fn with_device_prefix(self, devices: &str) -> Result<BrandNames, BrandNameError> {
        Ok(BrandNames { device_prefix: check_name(devices)?, ..self })
    }

    /// The name of the system.
    pub fn brand_name(&self) -> &str {
        &self.brand_name
    }

    /// The name of the CSI driver of the volume provisioner.
    pub fn driver_name(&self) -> &str {
        &self.driver_name
    }

    /// The prefix of the names of device plugins.
    pub fn device_prefix(&self) -> &str {
        &self.device_prefix
    }

    /// Expands the variables of a declared name.
    pub(super) fn expand(&self, declared: &str) -> Result<String, LayoutProblem> {
        let mut expanded = String::with_capacity(declared.len());
        let mut rest = declared;
        while let Some((before, after)) = rest.split_once('{') {
            let (variable, behind) = after.split_once('}').ok_or(LayoutProblem::UnknownVariable)?;
            expanded.push_str(before);
            expanded.push_str(match variable {
                "brand" => &self.brand_name,
                "driver" => &self.driver_name,
                "devices" => &self.device_prefix,
                _ => return Err(LayoutProblem::UnknownVariable),
            });
            rest = behind;
        }
        expanded.push_str(rest);
        Ok(expanded)
    }
}

/// `nodekeel`.
impl Default for BrandNames {
    fn default() -> BrandNames {
        BrandNames {
            brand_name: "nodekeel".into(),
            driver_name: "nodekeel.vfs".into(),
            device_prefix: "nodekeel.devices".into(),
        }
    }
}

/// Parses the brand name, and derives the other two from it.
impl FromStr for BrandNames {
    type Err = BrandNameError;

    fn from_str(brand: &str) -> Result<BrandNames, BrandNameError> {
        Ok(BrandNames {
            brand_name: check_name(brand)?,
            // The derived names are longer, and may exceed the limit although the brand does not.
            driver_name: check_name(&format!("{brand}.vfs"))?,
            device_prefix: check_name(&format!("{brand}.devices"))?,
        })
    }
}

fn check_name(text: &str) -> Result<String, BrandNameError> {
    let is_inner =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'.' | b'-');
    let is_end = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let ends = (text.bytes().next(), text.bytes().next_back());
    match text.len() <= BrandNames::MAX_BYTES
        && text.bytes().all(is_inner)
        && is_end(ends.0)
        && is_end(ends.1)
    {
        true => Ok(text.to_owned()),
        false => Err(BrandNameError { text: text.to_owned() }),
    }
}
