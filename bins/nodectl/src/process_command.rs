//! `signal` and `reload`: they act on the process of a service, and don't restart it.

use std::time::Duration;

use nodekeel_node::v1::{ReloadRequest, SignalRequest};

use crate::api_client::ApiClient;
use crate::command_error::CommandError;
use crate::output::Printer;

/// Timeout of a reload: its command is killed when nodectl does not wait any more. systemd's default too.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(90);

pub(crate) async fn send_signal(
    api: &mut ApiClient,
    (dn, signal): (String, String),
    printer: &mut Printer,
) -> Result<(), CommandError> {
    let request = SignalRequest { dn: dn.clone(), signal: signal.clone() };
    api.call(async |client| client.signal(request).await).await?;
    print_result(
        printer,
        &format!("{signal} was sent to {dn}"),
        serde_json::json!({ "dn": dn, "signal": signal }),
    )
}

pub(crate) async fn reload(
    api: &mut ApiClient,
    dn: String,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    api.raise_timeout(RELOAD_TIMEOUT);
    let request = ReloadRequest { dn: dn.clone() };
    api.call(async |client| client.reload(request).await).await?;
    print_result(printer, &format!("{dn} was asked to reload"), serde_json::json!({ "dn": dn }))
}

fn print_result(printer: &mut Printer, text: &str, json: serde_json::Value) -> Result<(), CommandError> {
    if printer.is_json { Ok(printer.print_json(&json)?) } else { Ok(printer.print_line(text)?) }
}
