//! `noded check --running`: asks the node that runs what a reload would change.

use anyhow::{Context as _, anyhow};

use super::cli::NodeArgs;
use crate::client;
use crate::config::NodedConfig;
use crate::v1::{CheckConfigRequest, ConfigDifference};

/// The changes of a reload, as lines.
///
/// # Errors
/// The configuration is invalid, no node runs, or the node could not run it.
pub(crate) fn compare_with_running(args: &NodeArgs) -> anyhow::Result<String> {
    let (mut config, request) = match &args.config {
        None => (
            NodedConfig::default(),
            CheckConfigRequest { file: "the defaults".into(), text: Some(String::new()) },
        ),
        Some(file) => {
            let config = NodedConfig::read_file(file)?;
            let text = std::fs::read_to_string(file);
            let text = text.with_context(|| format!("can't read {}", file.display()))?;
            (config, CheckConfigRequest { file: file.display().to_string(), text: Some(text) })
        }
    };
    // The directory decides where the socket of the node is.
    if let Some(data) = &args.data {
        config.node.data.clone_from(data);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let difference = runtime.context("can't start the async runtime")?.block_on(async {
        let mut node = client::connect(&config.control_socket()).await?;
        // The message of the node tells what to do.
        node.check_config(request).await.map_err(|status| anyhow!("{}", status.message()))
    })?;
    Ok(describe(difference.get_ref()))
}

fn describe(difference: &ConfigDifference) -> String {
    if difference.changes.is_empty() {
        return "a reload would change nothing\n".to_owned();
    }
    let lines = difference.changes.iter().map(|change| format!("  {}\n", change.detail));
    std::iter::once("a reload would:\n".to_owned()).chain(lines).collect()
}
