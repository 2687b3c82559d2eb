//! The control socket: where it is, who may call, and which services it has.

pub(crate) mod callers;
pub(crate) mod socket;

use std::convert::Infallible;

use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::service::interceptor::InterceptedService;
use tonic::service::{Interceptor, Routes};
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Status};

use crate::caller::RemoteCaller;
use crate::node_v1::node_server;
use crate::part::PrepareError;
use crate::program_name::program_name;
use crate::v1::control_server;

/// The gRPC services on the control socket. Each call is admitted as those of the control API: from the user that
/// runs the node, from root, and with `[api]` from admins on other machines.
#[derive(Debug, Clone, Default)]
pub struct ControlServices {
    pub(crate) routes: Routes,
    /// The names of the added services, to refuse a second one of a name.
    names: Vec<&'static str>,
}

impl ControlServices {
    /// Adds a service, as tonic generates it.
    ///
    /// # Errors
    /// Another service has its name.
    pub fn add_service<S>(&mut self, service: S) -> Result<(), PrepareError>
    where
        S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
            + NamedService
            + Clone
            + Send
            + Sync
            + 'static,
        S::Future: Send + 'static,
    {
        // The router panics when a route is added twice. The node's own services are added later.
        let own = [control_server::SERVICE_NAME, node_server::SERVICE_NAME];
        if own.contains(&S::NAME) || self.names.contains(&S::NAME) {
            return Err(format!("duplicate gRPC service {}: only one part can add it", S::NAME).into());
        }
        self.names.push(S::NAME);
        // `Routes` is built by value, so it is moved out and back.
        self.routes = std::mem::take(&mut self.routes).add_service(require_admission(service));
        Ok(())
    }
}

/// The status of every call during shutdown.
pub(crate) fn stopping_status() -> Status {
    Status::unavailable("the node is stopping")
}

/// A service whose calls are admitted by [`authorize_peer`].
pub(crate) fn require_admission<S>(service: S) -> InterceptedService<S, impl Interceptor + Clone> {
    // The user of noded does not change while it runs: it is read once.
    let noded_uid = nix::unistd::geteuid().as_raw();
    InterceptedService::new(service, move |request| authorize_peer(noded_uid, request))
}

/// Admits the user that runs noded, root, and calls that the gate of the API for other machines has admitted.
#[allow(clippy::result_large_err, reason = "tonic's interceptors return its status")]
fn authorize_peer(noded_uid: u32, request: Request<()>) -> Result<Request<()>, Status> {
    // No client can add it: extensions are not in the request that it sends.
    if request.extensions().get::<RemoteCaller>().is_some() {
        return Ok(request);
    }
    let credentials = request.extensions().get::<UdsConnectInfo>().and_then(|peer| peer.peer_cred);
    match credentials {
        // The kernel reports the credentials of connect(2), which the caller can't choose.
        Some(peer) if peer.uid() == noded_uid || peer.uid() == 0 => Ok(request),
        Some(peer) => Err(Status::permission_denied(format!(
            "permission denied for uid {}: only uid {noded_uid}, which runs {}, and root may use this socket",
            peer.uid(),
            program_name()
        ))),
        // A connection that is not a unix socket has no credentials: it is refused.
        None => Err(Status::permission_denied("unknown uid of the caller")),
    }
}
