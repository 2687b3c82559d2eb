//! `reload`: of the node's configuration, or of a service by itself.

use std::time::Duration;

use nodekeel_node::v1::config_change::Effect;
use nodekeel_node::v1::{CheckConfigRequest, ConfigDifference, ReloadConfigRequest, ReloadRequest};

use crate::api_client::ApiClient;
use crate::completion::complete_dn;
use crate::error::CommandError;
use crate::output::{Printer, escape_control};

/// Timeout of a reload, as systemd's. The node may have to wait for the grace periods of services, and it kills the
/// reload command of a service when nodectl no longer waits.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(90);

/// Reload the node's configuration, or a service's
///
/// Without a DN, noded reads its file again and restarts only what has changed; exits with 1, and nothing changes,
/// if the file is invalid or if a change needs a restart of noded. With a DN, the service reloads by the signal or the
/// command of its key reload.
#[derive(Debug, clap::Args)]
pub(crate) struct ReloadArgs {
    /// Name in the tree, like root.service.web or web
    #[arg(add = complete_dn())]
    dn: Option<String>,
    /// Show the changes without making them
    #[arg(long, conflicts_with = "dn")]
    dry_run: bool,
}

impl ReloadArgs {
    pub(crate) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        api.raise_timeout(RELOAD_TIMEOUT);
        if let Some(dn) = self.dn {
            let dn = api.resolve_dn(dn).await?;
            let request = ReloadRequest { dn: dn.clone() };
            api.call(async |client| client.reload(request).await).await?;
            let text = format!("{dn} was asked to reload");
            return printer.print_result(&serde_json::json!({ "dn": dn }), &text);
        }
        let difference = if self.dry_run {
            api.call(async |client| client.check_config(CheckConfigRequest::default()).await).await?
        } else {
            api.call(async |client| client.reload_config(ReloadConfigRequest {}).await).await?
        };
        print_difference(printer, &difference, self.dry_run)
    }
}

fn print_difference(
    printer: &mut Printer,
    difference: &ConfigDifference,
    dry_run: bool,
) -> Result<(), CommandError> {
    if printer.is_json {
        return Ok(printer.print_json(&difference_json(difference))?);
    }
    let (nothing, heading) = if dry_run {
        ("a reload would change nothing", "a reload would:")
    } else {
        ("reloaded: nothing has changed", "reloaded:")
    };
    printer.print_line(if difference.changes.is_empty() { nothing } else { heading })?;
    for change in &difference.changes {
        printer.print_line(&format!("  {}", escape_control(&change.detail)))?;
    }
    Ok(())
}

fn difference_json(difference: &ConfigDifference) -> serde_json::Value {
    let effect = |effect| match effect {
        Effect::Add => "add",
        Effect::Restart => "restart",
        Effect::Reorder => "reorder",
        Effect::Remove => "remove",
        Effect::Apply => "apply",
        Effect::NodeRestart => "restart-noded",
        Effect::Unspecified => "unknown",
    };
    let changes = difference.changes.iter().map(|change| {
        serde_json::json!({ "effect": effect(change.effect()), "name": change.name, "keys": change.keys })
    });
    serde_json::json!({ "changes": changes.collect::<Vec<_>>() })
}
