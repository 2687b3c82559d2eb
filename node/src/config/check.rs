//! Checks of single fields, shared by all sections.

use std::fmt;
use std::path::Path;
use std::time::Duration;

/// Maximum of any duration: a longer one is a mistake.
const MAX_DURATION: Duration = Duration::from_secs(24 * 60 * 60);

/// An invalid field and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigViolation {
    pub(crate) field: String,
    pub(crate) message: String,
}

impl ConfigViolation {
    /// The field, as `section.key` or `section.key[0]`, and the reason with what to do, as a clause. An empty field is
    /// the whole configuration.
    pub fn new(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: field.into(), message: message.into() }
    }
}

impl fmt::Display for ConfigViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.field.as_str() {
            "" => f.write_str(&self.message),
            field => write!(f, "{field}: {}", self.message),
        }
    }
}

impl std::error::Error for ConfigViolation {}

/// Rejects a field.
pub(crate) fn reject_field(
    field: impl Into<String>,
    message: impl Into<String>,
) -> Result<(), ConfigViolation> {
    Err(ConfigViolation::new(field, message))
}

/// Checks program and arguments of a built-in daemon.
pub(crate) fn check_program(
    table: &str,
    binary: Option<&Path>,
    extra_args: &[String],
) -> Result<(), ConfigViolation> {
    if binary.is_some_and(|path| path.as_os_str().is_empty()) {
        return reject_field(
            format!("{table}.binary"),
            "must name a program; remove this key to search for it",
        );
    }
    // execve(2) takes NUL-terminated strings: an argument with a NUL would let each start fail.
    check_no_nul(&format!("{table}.binary"), binary.and_then(Path::to_str))?;
    check_no_nul(&format!("{table}.extra_args"), extra_args)
}

/// Checks that a path is absolute: it must not depend on noded's working directory.
pub(crate) fn check_absolute_path(field: &str, path: &Path) -> Result<(), ConfigViolation> {
    check_no_nul(field, path.to_str())?;
    if path.is_absolute() {
        Ok(())
    } else {
        reject_field(field, format!("{:?} is not absolute", path.display().to_string()))
    }
}

/// Checks that texts contain no NUL, which the kernel rejects.
pub(crate) fn check_no_nul<'a, T: AsRef<str> + ?Sized + 'a>(
    field: &str,
    texts: impl IntoIterator<Item = &'a T>,
) -> Result<(), ConfigViolation> {
    if texts.into_iter().any(|text| text.as_ref().contains('\0')) {
        reject_field(field, "contains a NUL character; remove it")
    } else {
        Ok(())
    }
}

/// Checks that a duration is at most a day.
pub(crate) fn check_duration(field: &str, duration: Option<Duration>) -> Result<(), ConfigViolation> {
    match duration.filter(|duration| *duration > MAX_DURATION) {
        Some(duration) => {
            reject_field(field, format!("{duration:?} is more than a day; use at most \"24h\""))
        }
        None => Ok(()),
    }
}
