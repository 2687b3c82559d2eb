//! `version`: the versions of nodectl and of noded.

use nodekeel_node::v1::{VersionRequest, VersionResponse};
use serde::Serialize;

use crate::api_client::ApiClient;
use crate::error::CommandError;
use crate::output::Printer;
use crate::wire::time_text;

/// Print the versions of nodectl and of noded
#[derive(Debug, clap::Args)]
pub(crate) struct VersionArgs {}

/// Both programs, and what else the node is called and has.
#[derive(Debug, Serialize)]
pub(crate) struct VersionView {
    pub(crate) nodectl: &'static str,
    pub(crate) noded: String,
    pub(crate) name: String,
    pub(crate) pid: u32,
    pub(crate) started: Option<String>,
    pub(crate) data: String,
}

impl From<VersionResponse> for VersionView {
    fn from(version: VersionResponse) -> Self {
        Self {
            nodectl: env!("CARGO_PKG_VERSION"),
            noded: version.version,
            name: version.name,
            pid: version.pid,
            started: time_text(version.started),
            data: version.data,
        }
    }
}

impl VersionArgs {
    pub(crate) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        let answer = api.call(async |client| client.version(VersionRequest {}).await).await?;
        let version = VersionView::from(answer);
        let text = format!("nodectl {}, noded {} (pid {})", version.nodectl, version.noded, version.pid);
        printer.print_result(&version, &text)
    }
}
