//! `[health]`

use serde::Deserialize;

use super::check::{ConfigViolation, reject_field};

/// `[health]`: what `nodectl health` reports.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HealthConfig {
    /// Percent of a disk's bytes, and of its inodes, below which the node is not healthy. 0: never. Default 5.
    pub min_free_percent: u8,
    /// Percent of both below which there is a warning. 0: never. Default 10.
    pub warn_free_percent: u8,
    /// Days before the end of a certificate from which on there is a warning. Default 30.
    pub warn_certificate_days: u16,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self { min_free_percent: 5, warn_free_percent: 10, warn_certificate_days: 30 }
    }
}

pub(super) fn check_health(health: &HealthConfig) -> Result<(), ConfigViolation> {
    for (field, percent) in [
        ("health.min_free_percent", health.min_free_percent),
        ("health.warn_free_percent", health.warn_free_percent),
    ] {
        if percent > 100 {
            return reject_field(field, format!("{percent} is more than 100 percent"));
        }
    }
    Ok(())
}
