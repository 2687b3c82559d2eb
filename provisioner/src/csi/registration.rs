//! Registration of the driver with the kubelet.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use tokio::sync::{oneshot, watch};
use tonic::{Request, Response, Status};

use super::proto::registration::registration_server::Registration;
use super::proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use crate::name::DriverName;

/// *Source:* k8s.io/kubelet, `pluginregistration/v1/constants.go`.
const CSI_PLUGIN: &str = "CSIPlugin";

/// The reported CSI version; the kubelet checks only the major version.
const CSI_VERSION: &str = "1.0.0";

/// The kubelet's reason to reject the driver.
#[derive(Debug, thiserror::Error)]
#[error("the kubelet rejected the registration of the CSI driver: {reason}")]
pub(super) struct RegistrationRejection {
    reason: String,
}

/// The registration service, which the kubelet calls when it sees the socket.
#[derive(Debug)]
pub(super) struct RegistrationService {
    info: PluginInfo,
    registered: watch::Sender<bool>,
    rejection: Mutex<Option<oneshot::Sender<RegistrationRejection>>>,
}

impl RegistrationService {
    /// `endpoint` is the socket of the node service. The state that the kubelet reports goes to `registered`;
    /// a rejection, once, to `rejected`.
    pub(super) fn new(
        driver: &DriverName,
        endpoint: &Path,
        registered: watch::Sender<bool>,
        rejected: oneshot::Sender<RegistrationRejection>,
    ) -> Self {
        let info = PluginInfo {
            r#type: CSI_PLUGIN.into(),
            name: driver.to_string(),
            endpoint: endpoint.display().to_string(),
            supported_versions: vec![CSI_VERSION.into()],
        };
        Self { info, registered, rejection: Mutex::new(Some(rejected)) }
    }
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus { plugin_registered, error } = request.into_inner();
        self.registered.send_replace(plugin_registered);
        if plugin_registered {
            tracing::info!(driver = self.info.name, "the kubelet has registered the driver");
        } else if let Some(sender) = self.rejection.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // The server may be shut down already.
            let _ = sender.send(RegistrationRejection { reason: error });
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
