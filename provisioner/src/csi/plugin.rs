//! The plugin as a runnable: the node service, and beside it the registration with the kubelet.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable, serve};
use thiserror::Error;
use tokio::sync::{oneshot, watch};
use tonic::transport::Server;

use super::guard::MountGuard;
use super::identity::IdentityService;
use super::locks::Locks;
use super::mounts::Mounts;
use super::node::NodeService;
use super::proto::csi::identity_server::IdentityServer;
use super::proto::csi::node_server::NodeServer;
use super::proto::registration::registration_server::RegistrationServer;
use super::registration::RegistrationService;
use super::socket::{self, SocketError};
use crate::guard::VolumeGuard;
use crate::name::{DriverName, NodeName};
use crate::store::{OpenVolume, VolumeStore};

/// How long calls under way may take once the plugin is told to stop.
const GRACE: Duration = Duration::from_secs(10);

/// What the plugin needs.
#[derive(Debug, Clone)]
pub struct PluginDeps {
    /// The driver's name, as claims and the kubelet know it.
    pub driver: DriverName,
    /// The node's name.
    pub node: NodeName,
    /// Tells how full a volume is.
    pub store: Arc<dyn VolumeStore>,
    /// Opens a volume's directory; as a rule the store itself.
    pub volumes: Arc<dyn OpenVolume>,
    /// Mounts volumes at targets; [`OsMounts`](super::OsMounts), for the same kubelet's directory.
    pub mounts: Arc<dyn Mounts>,
}

/// Why there can be no plugin.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PluginError {
    /// The kubelet's directory isn't an absolute path.
    #[error("the kubelet's directory {} is no absolute path", path.display())]
    Relative {
        /// The path.
        path: PathBuf,
    },
    /// A socket can't be where it has to be.
    #[error("place the plugin's sockets")]
    Socket(#[source] SocketError),
}

/// The CSI node plugin, as something to supervise.
///
/// Below it run `node` and `registration`, each restarted by itself with a new socket. A refusal by the kubelet is a
/// failure of the registration: the kubelet asks again when it sees the new socket, and calls under way aren't disturbed.
///
/// It is ready once both listen. Whether the kubelet knows the driver, [`known`](Self::known) tells.
#[derive(Debug)]
pub struct Plugin {
    deps: Arc<PluginDeps>,
    kubelet: PathBuf,
    sockets: Sockets,
    locks: Locks,
    known: watch::Sender<bool>,
}

/// Where the two listen.
#[derive(Debug, Clone)]
struct Sockets {
    node: PathBuf,
    registration: PathBuf,
}

impl Plugin {
    /// A plugin for the kubelet with this directory, `/var/lib/kubelet` as a rule. It has to be the path that the kubelet
    /// itself uses.
    ///
    /// # Errors
    /// [`PluginError::Relative`], or [`PluginError::Socket`]: with this directory, a socket's path would be too long.
    pub fn new(deps: PluginDeps, kubelet: &Path) -> Result<Self, PluginError> {
        if !kubelet.is_absolute() {
            return Err(PluginError::Relative { path: kubelet.to_owned() });
        }
        let sockets = Sockets {
            node: kubelet.join("plugins").join(deps.driver.as_str()).join("csi.sock"),
            registration: kubelet.join("plugins_registry").join(registration_name(&deps.driver)),
        };
        for path in [&sockets.node, &sockets.registration] {
            socket::check(path).map_err(PluginError::Socket)?;
        }
        let known = watch::Sender::new(false);
        Ok(Self {
            deps: Arc::new(deps),
            kubelet: kubelet.to_owned(),
            sockets,
            locks: Locks::default(),
            known,
        })
    }

    /// Whether the kubelet has said that it knows the driver. False again while the plugin is restarted.
    pub fn known(&self) -> watch::Receiver<bool> {
        self.known.subscribe()
    }

    /// Keeps what is mounted from being destroyed, and what is being destroyed from being mounted; for the
    /// [`Provisioner`](crate::Provisioner) beside it.
    pub fn guard(&self) -> Arc<dyn VolumeGuard> {
        Arc::new(MountGuard {
            volumes: Arc::clone(&self.deps.volumes),
            mounts: Arc::clone(&self.deps.mounts),
            locks: self.locks.clone(),
        })
    }

    /// The socket of the identity and node services.
    pub fn socket(&self) -> &Path {
        &self.sockets.node
    }

    /// The socket of the registration, which the kubelet watches for.
    pub fn registration_socket(&self) -> &Path {
        &self.sockets.registration
    }

    fn node(&self) -> impl Runnable {
        let (path, deps) = (self.sockets.node.clone(), Arc::clone(&self.deps));
        let service = NodeService::new(Arc::clone(&deps), self.kubelet.clone(), self.locks.clone());
        let router = move |_: &Context| {
            Server::builder()
                .add_service(IdentityServer::new(IdentityService { driver: deps.driver.clone() }))
                .add_service(NodeServer::new(service.clone()))
        };
        serve(listening(path), router, GRACE)
    }

    fn registration(&self) -> impl Runnable {
        let (deps, sockets, known) = (Arc::clone(&self.deps), self.sockets.clone(), self.known.clone());
        move |ctx: Context| register(ctx, Arc::clone(&deps), sockets.clone(), known.clone())
    }
}

impl Runnable for Plugin {
    fn run(&self, ctx: Context) -> RunFuture {
        let (node, registration) = (self.node(), self.registration());
        Box::pin(async move {
            ctx.run("node", node)?;
            ctx.run("registration", registration)?;
            for name in ["node", "registration"] {
                ctx.wait_ready(&format!("{}.{name}", ctx.dn())).await?;
            }
            ctx.ready()?;
            Err(ctx.cancelled().await.into())
        })
    }
}

/// The name of the registration's socket, with an `@`. For the host that it calls, the kubelet gives the path of this
/// socket, escaped (`%2Fvar%2Flib%2F…`), which Rust's HTTP refuses: a host has no escapes. What stands before an `@` is
/// no part of the host, and may have some. At the other socket, the kubelet asks for `localhost`.
///
/// *Source:* Kubernetes 1.36, `pluginmanager/operationexecutor/operation_generator.go`, `dial`; grpc-go,
/// `encodeAuthority`; <https://github.com/kubernetes/kubernetes/pull/112597>.
fn registration_name(driver: &DriverName) -> String {
    format!("{driver}@reg.sock")
}

/// Makes the listener of a server, for each of its starts.
fn listening(
    path: PathBuf,
) -> impl Fn() -> BoxFuture<'static, io::Result<socket::Listening>> + Send + Sync + 'static {
    move || {
        let path = path.clone();
        Box::pin(async move { socket::listen(&path).await.map_err(io::Error::other) })
    }
}

/// Serves the registration as soon as the node service can be called. Fails where the kubelet refuses the driver: it
/// looks again only at a new socket.
async fn register(
    ctx: Context,
    deps: Arc<PluginDeps>,
    sockets: Sockets,
    known: watch::Sender<bool>,
) -> Result<(), Failure> {
    let _unknown_again = Unknown(known.clone());
    let parent = ctx.dn().rsplit_once('.').map_or("", |(parent, _)| parent);
    ctx.wait_ready(&format!("{parent}.node")).await?;
    let (refuse, refused) = oneshot::channel();
    let service = Arc::new(RegistrationService::new((&deps.driver, &sockets.node), known, refuse));
    let router =
        move |_: &Context| Server::builder().add_service(RegistrationServer::from_arc(Arc::clone(&service)));
    let server = serve(listening(sockets.registration), router, GRACE);
    tokio::select! {
        ended = server.run(ctx) => ended,
        Ok(refused) = refused => Err(refused.into()),
    }
}

/// Takes back that the kubelet knows the driver.
struct Unknown(watch::Sender<bool>);

impl Drop for Unknown {
    fn drop(&mut self) {
        self.0.send_replace(false);
    }
}
