//! `reload`: of the node's configuration, or of a service by itself.

use std::time::Duration;

use nodekeel_node::v1::config_change::Effect;
use nodekeel_node::v1::{CheckConfigRequest, ConfigDifference, ReloadConfigRequest, ReloadRequest};

use crate::api_client::ApiClient;
use crate::cli::ReloadArgs;
use crate::command_error::CommandError;
use crate::output::{Printer, escape_control};
use crate::process_command::print_result;

/// Timeout of a reload: the command of a service is killed when nodectl does not wait any more, and what the node stops may
/// take its grace periods. systemd's default too.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(90);

pub(crate) async fn run_reload(
    api: &mut ApiClient,
    args: ReloadArgs,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    api.raise_timeout(RELOAD_TIMEOUT);
    if let Some(dn) = args.dn {
        let request = ReloadRequest { dn: dn.clone() };
        api.call(async |client| client.reload(request).await).await?;
        return print_result(printer, &format!("{dn} was asked to reload"), serde_json::json!({ "dn": dn }));
    }
    let difference = match args.dry_run {
        true => api.call(async |client| client.check_config(CheckConfigRequest::default()).await).await?,
        false => api.call(async |client| client.reload_config(ReloadConfigRequest {}).await).await?,
    };
    print_difference(printer, &difference, args.dry_run)
}

fn print_difference(
    printer: &mut Printer,
    difference: &ConfigDifference,
    dry_run: bool,
) -> Result<(), CommandError> {
    if printer.is_json {
        return Ok(printer.print_json(&difference_json(difference))?);
    }
    let (nothing, heading) = match dry_run {
        true => ("a reload would change nothing", "a reload would:"),
        false => ("reloaded: nothing has changed", "reloaded:"),
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
