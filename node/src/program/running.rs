//! `check --running`: asks the node that runs what a reload would change.

use std::path::Path;

use anyhow::{Context as _, anyhow};

use super::cli::NodeArgs;
use crate::client;
use crate::v1::{CheckConfigRequest, ConfigDifference};

/// The changes of a reload, as lines, of the node with this socket; `defaults` apply without a file.
///
/// # Errors
/// The file can't be read, no node runs, or the node could not run it.
pub(crate) fn compare_with_running(
    socket: &Path,
    args: &NodeArgs,
    defaults: String,
) -> anyhow::Result<String> {
    let request = match &args.config {
        None => CheckConfigRequest { file: "the defaults".into(), text: Some(defaults) },
        Some(file) => {
            let text = std::fs::read_to_string(file);
            let text = text.with_context(|| format!("can't read {}", file.display()))?;
            CheckConfigRequest { file: file.display().to_string(), text: Some(text) }
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let difference = runtime.context("can't start the async runtime")?.block_on(async {
        let mut node = client::connect(socket).await?;
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
