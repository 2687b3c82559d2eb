//! The names that an operating system puts into its paths.

use std::str::FromStr;

use thiserror::Error;

use super::shape::LayoutProblem;

/// What a system calls itself and its driver, wherever a path says so: the one value that a builder changes.
///
/// In the names of a [`layout!`](crate::layout), `{brand}`, `{driver}` and `{devices}` stand for them.
///
/// ```
/// use nodekeel_localstorage::tree::Names;
///
/// let names: Names = "acme".parse()?;
/// assert_eq!((names.brand(), names.driver(), names.devices()), ("acme", "acme.vfs", "acme.devices"));
/// let names = names.with_driver("volumes.acme.example")?;
/// assert_eq!(names.driver(), "volumes.acme.example");
/// # Ok::<(), nodekeel_localstorage::tree::NamesError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    brand: String,
    driver: String,
    devices: String,
}

/// A text that can't be part of the names of sockets and directories.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "name {text:?} is not 1 to {} of a-z, 0-9, dot and dash, with a letter or digit at both ends",
    Names::MAX_BYTES
)]
pub struct NamesError {
    /// The text given.
    pub text: String,
}

impl Names {
    /// Longest of each: that of a CSI driver's name.
    pub const MAX_BYTES: usize = 63;

    /// With another name of the driver that provisions volumes. It has to be the one the driver itself uses.
    ///
    /// # Errors
    /// It is no name of a driver.
    pub fn with_driver(self, driver: &str) -> Result<Names, NamesError> {
        Ok(Names { driver: check(driver)?, ..self })
    }

    /// With another prefix of the names of device plugins.
    ///
    /// # Errors
    /// It is no such name.
    pub fn with_devices(self, devices: &str) -> Result<Names, NamesError> {
        Ok(Names { devices: check(devices)?, ..self })
    }

    /// What the system calls itself.
    pub fn brand(&self) -> &str {
        &self.brand
    }

    /// The driver that provisions volumes.
    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// What the names of device plugins begin with.
    pub fn devices(&self) -> &str {
        &self.devices
    }

    /// Fills in the variables of a declared name.
    pub(super) fn fill(&self, declared: &str) -> Result<String, LayoutProblem> {
        let mut filled = String::with_capacity(declared.len());
        let mut rest = declared;
        while let Some((before, after)) = rest.split_once('{') {
            let (variable, behind) = after.split_once('}').ok_or(LayoutProblem::Variable)?;
            filled.push_str(before);
            filled.push_str(match variable {
                "brand" => &self.brand,
                "driver" => &self.driver,
                "devices" => &self.devices,
                _ => return Err(LayoutProblem::Variable),
            });
            rest = behind;
        }
        filled.push_str(rest);
        Ok(filled)
    }
}

/// `nodekeel`.
impl Default for Names {
    fn default() -> Names {
        Names { brand: "nodekeel".into(), driver: "nodekeel.vfs".into(), devices: "nodekeel.devices".into() }
    }
}

/// From the brand, which the other two are made of.
impl FromStr for Names {
    type Err = NamesError;

    fn from_str(brand: &str) -> Result<Names, NamesError> {
        Ok(Names {
            brand: check(brand)?,
            driver: check(&format!("{brand}.vfs"))?,
            devices: check(&format!("{brand}.devices"))?,
        })
    }
}

fn check(text: &str) -> Result<String, NamesError> {
    let is_inner =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'.' | b'-');
    let is_end = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let ends = (text.bytes().next(), text.bytes().next_back());
    match text.len() <= Names::MAX_BYTES && text.bytes().all(is_inner) && is_end(ends.0) && is_end(ends.1) {
        true => Ok(text.to_owned()),
        false => Err(NamesError { text: text.to_owned() }),
    }
}
