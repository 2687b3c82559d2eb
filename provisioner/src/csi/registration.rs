//! How the kubelet learns of the driver.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use tokio::sync::{oneshot, watch};
use tonic::{Request, Response, Status};

use super::proto::registration::registration_server::Registration;
use super::proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use crate::name::DriverName;

/// *Source:* k8s.io/kubelet, `pluginregistration/v1/constants.go`.
const CSI_PLUGIN: &str = "CSIPlugin";

/// The version of the CSI that the kubelet is told; it looks at the first number alone.
const VERSION: &str = "1.0.0";

/// Why the kubelet doesn't take the driver; it says so itself.
#[derive(Debug, thiserror::Error)]
#[error("the kubelet refuses the driver: {reason}")]
pub(super) struct Refused {
    reason: String,
}

/// Answers the kubelet, which calls as soon as it sees the socket.
#[derive(Debug)]
pub(super) struct RegistrationService {
    info: PluginInfo,
    known: watch::Sender<bool>,
    refused: Mutex<Option<oneshot::Sender<Refused>>>,
}

impl RegistrationService {
    /// `endpoint` is the socket of the node service. What the kubelet says goes to `known`; a refusal, once, to
    /// `refused`.
    pub(super) fn new(
        (driver, endpoint): (&DriverName, &Path),
        known: watch::Sender<bool>,
        refused: oneshot::Sender<Refused>,
    ) -> Self {
        let info = PluginInfo {
            r#type: CSI_PLUGIN.into(),
            name: driver.to_string(),
            endpoint: endpoint.display().to_string(),
            supported_versions: vec![VERSION.into()],
        };
        Self { info, known, refused: Mutex::new(Some(refused)) }
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
        self.known.send_replace(plugin_registered);
        if plugin_registered {
            tracing::info!(driver = self.info.name, "the kubelet knows the driver");
        } else if let Some(refused) = self.refused.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // Whoever serves this may be gone already.
            let _ = refused.send(Refused { reason: error });
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
