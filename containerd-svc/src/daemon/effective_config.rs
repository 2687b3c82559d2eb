//! The configuration that containerd uses: its file, with all that this imports.

use std::process::Stdio;
use std::time::Duration;

use nodekeel_supervisor::Failure;
use tokio::process::Command;
use tokio::time::timeout;
use toml::{Table, Value};

use super::{Containerd, ContainerdConfig};
use crate::ConfigVersion;
use crate::config::{CRI_IMAGES_PLUGIN, CRI_PLUGIN, CRI_RUNTIME_PLUGIN};

/// Maximum time for containerd to print its configuration, which takes it less than a second.
const DUMP_TIMEOUT: Duration = Duration::from_secs(30);

/// What the configuration results in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EffectiveConfig {
    pub(super) has_cri: bool,
    /// The snapshotter of the CRI; `None` for containerd's default.
    pub(super) snapshotter: Option<String>,
}

/// Finds whether the containerd will have a CRI, and with which snapshotter. It asks containerd itself, since a file that its configuration
/// imports can disable the CRI: also one of `/etc/containerd/conf.d`, which 2.2 and later import unasked.
///
/// # Errors
/// The settings ask for a CRI that an imported file disables.
pub(super) async fn read_effective_config(containerd: &Containerd) -> Result<EffectiveConfig, Failure> {
    let (is_required, is_configured) = match &containerd.config {
        ContainerdConfig::Settings(settings) => (true, settings.cri.is_some()),
        ContainerdConfig::Verbatim { text, .. } => (false, has_cri(text)),
    };
    if !is_configured {
        return Ok(EffectiveConfig { has_cri: false, snapshotter: None });
    }
    match dump_config(containerd).await {
        Ok(dumped) => judge_effective_config(&dumped, is_required),
        Err(reason) => {
            // Not a failure: if the configuration is invalid, the daemon itself reports that when it starts.
            tracing::warn!("containerd does not print its configuration, a CRI is expected: {reason}");
            Ok(EffectiveConfig { has_cri: true, snapshotter: None })
        }
    }
}

/// Finds the CRI of a printed configuration.
fn judge_effective_config(dumped: &str, is_required: bool) -> Result<EffectiveConfig, Failure> {
    let Some(plugin) = disabled_cri_plugin(dumped) else {
        return Ok(EffectiveConfig { has_cri: true, snapshotter: find_snapshotter(dumped) });
    };
    let imports = imported_files(dumped).join(", ");
    if is_required {
        return Err(Failure::new(format!(
            "can't start containerd with a CRI: an imported configuration disables {plugin}: remove it from \
             disabled_plugins in {imports}"
        )));
    }
    tracing::warn!("containerd has no CRI, and none is waited for: {imports} disables {plugin}");
    Ok(EffectiveConfig { has_cri: false, snapshotter: None })
}

/// The snapshotter into which the CRI unpacks images, of a configuration of version 2 or 3. A runtime may have another
/// one, for its pods alone.
fn find_snapshotter(text: &str) -> Option<String> {
    let table = text.parse::<Table>().ok()?;
    let plugin = |name| table.get("plugins")?.get(name);
    let three = || plugin(CRI_IMAGES_PLUGIN)?.get("snapshotter");
    let two = || plugin(CRI_PLUGIN)?.get("containerd")?.get("snapshotter");
    let name = three().or_else(two)?.as_str()?;
    (!name.is_empty()).then(|| name.to_owned())
}

/// The format that the program reads, by its release.
pub(super) async fn detect_config_version(containerd: &Containerd) -> ConfigVersion {
    let mut command = Command::new(&containerd.binary);
    command.arg("--version").env_clear().env("PATH", &containerd.search_path).stdin(Stdio::null());
    match run(command).await {
        // "containerd github.com/containerd/containerd/v2 v2.4.2 REVISION".
        Ok(text) => ConfigVersion::for_release(text.split_whitespace().nth(2).unwrap_or_default()),
        Err(reason) => {
            tracing::warn!(
                "containerd does not print its version, and gets a configuration of version 2: {reason}"
            );
            ConfigVersion::default()
        }
    }
}

/// Runs a command of containerd that ends by itself, and returns its output.
async fn run(mut command: Command) -> Result<String, String> {
    let ended = timeout(DUMP_TIMEOUT, command.kill_on_drop(true).output()).await;
    let output = ended.map_err(|_| "timed out".to_owned())?.map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim_end()));
    }
    String::from_utf8(output.stdout).map_err(|error| error.to_string())
}

/// The configuration as containerd itself prints it, with all that it imports.
async fn dump_config(containerd: &Containerd) -> Result<String, String> {
    let mut command = Command::new(&containerd.binary);
    command.arg("--config").arg(containerd.layout.data().config.path());
    // They may name another configuration.
    command.args(&containerd.extra_args).args(["config", "dump"]);
    // The same variables as the daemon's, which may change what it reads.
    command.env_clear().env("PATH", &containerd.search_path).envs(&containerd.env);
    command.stdin(Stdio::null());
    run(command).await
}

/// Returns whether a configuration of an operator has a CRI, which is enabled by default. A text that is not TOML has
/// none: containerd rejects it itself.
///
/// *Source:* containerd-config.toml(5), `disabled_plugins`; version 1 has short names.
fn has_cri(text: &str) -> bool {
    text.parse::<Table>().is_ok() && disabled_cri_plugin(text).is_none()
}

/// The plugin of the CRI that a configuration disables.
fn disabled_cri_plugin(text: &str) -> Option<String> {
    let all = [CRI_PLUGIN, CRI_IMAGES_PLUGIN, CRI_RUNTIME_PLUGIN, "cri"];
    parse_string_list(text, "disabled_plugins").into_iter().find(|plugin| all.contains(&plugin.as_str()))
}

/// The files that a configuration imports, or their patterns.
fn imported_files(text: &str) -> Vec<String> {
    parse_string_list(text, "imports")
}

/// A list of strings at the top of a configuration; empty if it is missing or invalid.
fn parse_string_list(text: &str, key: &str) -> Vec<String> {
    let table = text.parse::<Table>().unwrap_or_default();
    let entries = table.get(key).and_then(Value::as_array).into_iter().flatten();
    entries.filter_map(Value::as_str).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ContainerdSettings, DirectoryLayout};

    #[test]
    fn an_operators_configuration_has_a_cri_unless_it_disables_one() {
        for text in [
            "",
            "version = 2\n",
            "disabled_plugins = []",
            "disabled_plugins = [\"io.containerd.nri.v1.nri\"]",
        ] {
            assert!(has_cri(text), "{text}");
        }
        let layout = DirectoryLayout::new("/data", "/run/c").expect("short");
        let rendered = ContainerdSettings::default().render_toml(&layout);
        for text in ["version = [", "disabled_plugins = [\"cri\"]", &rendered] {
            assert!(!has_cri(text), "{text}");
        }
    }

    #[test]
    fn the_snapshotter_is_that_of_the_images_in_both_versions() {
        for (text, found) in [
            ("[plugins.'io.containerd.grpc.v1.cri'.containerd]\nsnapshotter = 'native'", Some("native")),
            ("[plugins.'io.containerd.cri.v1.images']\nsnapshotter = 'native'", Some("native")),
            ("[plugins.'io.containerd.cri.v1.images']\nsnapshotter = ''", None),
            ("version = 3", None),
            ("[", None),
        ] {
            assert_eq!(find_snapshotter(text).as_deref(), found, "{text}");
        }
    }

    #[tokio::test]
    async fn the_configuration_is_printed_with_the_operators_arguments() {
        let layout = DirectoryLayout::new("/data", "/run/c").expect("short");
        let store = nodekeel_logtree::LogStore::default();
        let mut containerd = Containerd::new("/bin/echo", layout, "/bin", store);
        containerd.extra_args = vec!["--config".into(), "/etc/mine.toml".into()];
        let printed = dump_config(&containerd).await.expect("it runs");
        assert!(printed.ends_with("config.toml --config /etc/mine.toml config dump\n"), "{printed}");
    }

    #[test]
    fn a_cri_that_an_import_disables_is_not_expected_and_an_error_where_the_settings_ask_for_it() {
        let dumped =
            "disabled_plugins = ['io.containerd.grpc.v1.cri']\nimports = ['/etc/a.toml', '/b.toml']\n";
        assert!(!judge_effective_config(dumped, false).expect("it is not required").has_cri);
        let error = judge_effective_config(dumped, true).expect_err("it is required").to_string();
        assert!(error.contains("/etc/a.toml, /b.toml") && error.contains("grpc.v1.cri"), "{error}");
        for is_required in [false, true] {
            let dumped = "disabled_plugins = []\nimports = ['/etc/a.toml']\n";
            assert!(judge_effective_config(dumped, is_required).expect("nothing is disabled").has_cri);
        }
    }
}
