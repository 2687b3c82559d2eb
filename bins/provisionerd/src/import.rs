//! `provisionerd import`: a directory becomes the volume of a claim.

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use clap::Args;
use nodekeel_provisioner::{
    CapacityPolicy, ImportDeps, ImportMode, ImportOutcome, ImportRequest, StoreName, VolumeId,
    VolumeImporter, import_directory,
};

use crate::config::{ConfigError, ConfigFlags, DaemonConfig};
use crate::{api_server, print_stdout, run, start_runtime, volumes};

/// The flags of `import`.
#[derive(Debug, Args)]
pub(crate) struct ImportFlags {
    /// Claim that gets the volume; no pod may use it yet
    #[arg(long, value_name = "NAMESPACE/NAME")]
    claim: ClaimName,
    /// Move SOURCE instead of copying it
    ///
    /// It must be on the file system of the volumes, and seen through the same mount.
    #[arg(long = "move")]
    is_move: bool,
    /// Import even if the node promises too much
    ///
    /// Without it, the limits of the claim must fit next to those of all volumes, as for a new volume.
    #[arg(long)]
    over_ceiling: bool,
    /// Store of the claim's class, if it names one
    #[arg(long, value_name = "NAME")]
    store: Option<StoreName>,
    /// Directory to import
    source: PathBuf,
    #[command(flatten)]
    config: ConfigFlags,
}

/// A claim, as `NAMESPACE/NAME`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClaimName {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl FromStr for ClaimName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text
            .split_once('/')
            .filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty() && !name.contains('/'));
        let (namespace, name) = parts.ok_or("use NAMESPACE/NAME, such as default/data")?;
        Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

pub(crate) fn run_import(flags: ImportFlags) -> Result<ExitCode> {
    let ImportFlags { claim, is_move, over_ceiling, store, source, config } = flags;
    let mode = if is_move { ImportMode::Move } else { ImportMode::Copy };
    let config = config.load_config()?;
    let config = match store {
        Some(name) => config.of_store(Some(&name)).ok_or(ConfigError::UnknownStore { name })?,
        None => config,
    };
    let source = std::path::absolute(&source)
        .with_context(|| format!("can't resolve the path {}", source.display()))?;
    let runtime = start_runtime()?;
    let request = ImportRequest { namespace: claim.namespace, claim: claim.name, source, mode };
    let ceiling = if over_ceiling { None } else { Some(config.capacity_policy()?) };
    runtime.block_on(import_volume(&config, &request, ceiling))
}

async fn import_volume(
    config: &DaemonConfig,
    request: &ImportRequest,
    ceiling: Option<CapacityPolicy>,
) -> Result<ExitCode> {
    let node = config.node_name()?;
    let hook = run::kill_hook()?;
    // Before the importer, which changes the directory.
    let client = api_server::api_client(config.kubeconfig.as_deref()).await?;
    let (base, quota) = volumes::open_with_warnings(config)?;
    let importer = VolumeImporter::open(base, quota, hook.clone())?;
    let importer = Arc::new(match ceiling {
        Some(ceiling) => importer.with_ceiling(ceiling),
        None => importer,
    });
    let identity = config.provisioner_identity(node);
    let (id, outcome) = import_directory(&identity, &ImportDeps { client, importer, hook }, request).await?;
    Ok(print_stdout(&format_outcome(request, &id, outcome)))
}

fn format_outcome(request: &ImportRequest, id: &VolumeId, outcome: ImportOutcome) -> String {
    let ImportRequest { namespace, claim, source, .. } = request;
    let mut text = match outcome {
        ImportOutcome::Imported { .. } => {
            format!("imported {} as volume {id} of claim {namespace}/{claim}\n", source.display())
        }
        ImportOutcome::AlreadyDone => {
            format!("{} is already volume {id} of claim {namespace}/{claim}\n", source.display())
        }
    };
    if let ImportOutcome::Imported { uncounted, devices } = outcome {
        if uncounted > 0 {
            text += &format!(
                "{uncounted} entries, such as symbolic links, do not count against the limits: list them with \
                 `dirquota audit`\n"
            );
        }
        if devices > 0 {
            text += &format!("{devices} device nodes were not copied\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_is_named_with_its_namespace() {
        let name = |namespace: &str, name: &str| ClaimName { namespace: namespace.into(), name: name.into() };
        assert_eq!("default/data".parse(), Ok(name("default", "data")));
        for bad in ["", "data", "/data", "default/", "a/b/c"] {
            assert!(bad.parse::<ClaimName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_output_names_what_does_not_count() {
        let request = ImportRequest {
            namespace: "default".into(),
            claim: "data".into(),
            source: "/srv/data".into(),
            mode: ImportMode::Move,
        };
        let id = VolumeId::from_uid("9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f").expect("a UUID");
        let text = format_outcome(&request, &id, ImportOutcome::Imported { uncounted: 2, devices: 0 });
        assert!(text.starts_with("imported /srv/data as volume pvc-9f0e5d3c"), "{text}");
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.contains("2 entries"), "{text}");
        let done = format_outcome(&request, &id, ImportOutcome::AlreadyDone);
        assert!(done.contains("already volume"), "{done}");
    }
}
