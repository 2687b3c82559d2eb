//! The configuration of gVisor's shim.

use serde::Deserialize;
use toml::{Table, Value};

use super::{path_value, toml_table};
use crate::layout::DirectoryLayout;

/// Settings of gVisor.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunscSettings {
    /// The way in which gVisor intercepts system calls. Default: `systrap`, which needs no virtualization.
    pub platform: String,
    /// True if gVisor logs debug output, several hundred lines for a container and more while it runs.
    /// Default: no. While this program does not run, nothing reads the file, which grows with it.
    pub debug: bool,
}

impl Default for RunscSettings {
    fn default() -> Self {
        Self { platform: "systrap".into(), debug: false }
    }
}

impl RunscSettings {
    /// The configuration of the shim as TOML. runsc appends its log to the file, except for its `log`, which the shim
    /// reads to report why a container could not be started. The shim itself logs to containerd: it would truncate the file.
    ///
    /// *Source:* gvisor.dev/docs/user_guide/containerd/configuration, and `runsc flags`.
    pub fn render_toml(&self, layout: &DirectoryLayout) -> String {
        let log = || path_value(&layout.runsc_log_path());
        // All of these are flags, so their values are strings.
        let flags = toml_table([
            ("platform", Value::from(self.platform.clone())),
            ("debug", Value::from(self.debug.to_string())),
            ("debug-log", log()),
            ("panic-log", log()),
        ]);
        let level = if self.debug { "debug" } else { "info" };
        let config = Table::from_iter([
            ("root".to_owned(), path_value(&layout.run().runsc.path().join("root"))),
            ("log_level".to_owned(), Value::from(level)),
            ("runsc_config".to_owned(), flags),
        ]);
        format!("# Generated at each start; edits are lost.\n{config}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runsc_logs_into_the_file_except_what_its_shim_reads() {
        let layout = DirectoryLayout::new("/tmp/data", "/run/c").expect("short");
        let text = RunscSettings { debug: true, ..RunscSettings::default() }.render_toml(&layout);
        let table: Table = text.parse().expect("valid TOML");
        let log = Some("/run/c/runsc/log");
        assert!(table.get("log_path").is_none());
        for flag in ["debug-log", "panic-log"] {
            assert_eq!(table["runsc_config"][flag].as_str(), log);
        }
        assert!(table["runsc_config"].get("log").is_none());
        assert_eq!(table["runsc_config"]["debug"].as_str(), Some("true"));
    }
}
