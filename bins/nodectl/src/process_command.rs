//! `signal`: acts on the process of a service.

use nodekeel_node::v1::SignalRequest;

use crate::api_client::ApiClient;
use crate::command_error::CommandError;
use crate::output::Printer;

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

pub(crate) fn print_result(
    printer: &mut Printer,
    text: &str,
    json: serde_json::Value,
) -> Result<(), CommandError> {
    if printer.is_json { Ok(printer.print_json(&json)?) } else { Ok(printer.print_line(text)?) }
}
