//! `signal`: a signal to the process of a service.

use nodekeel_node::v1::SignalRequest;

use crate::api_client::ApiClient;
use crate::completion::complete_dn;
use crate::error::CommandError;
use crate::output::Printer;

/// Send a signal to a service's main process
#[derive(Debug, clap::Args)]
pub(crate) struct SignalArgs {
    /// Name in the tree, like root.service.web or web
    #[arg(add = complete_dn())]
    dn: String,
    /// Name or number, like SIGHUP
    signal: String,
}

impl SignalArgs {
    pub(crate) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        let Self { dn, signal } = self;
        let dn = api.resolve_dn(dn).await?;
        let request = SignalRequest { dn: dn.clone(), signal: signal.clone() };
        api.call(async |client| client.signal(request).await).await?;
        let text = format!("{signal} was sent to {dn}");
        printer.print_result(&serde_json::json!({ "dn": dn, "signal": signal }), &text)
    }
}
