//! The plugin as a runnable: the node service and the registration with the kubelet.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use nodekeel_localstorage::DirLock;
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable, serve_grpc};
use thiserror::Error;
use tokio::sync::{oneshot, watch};
use tonic::transport::Server;

use super::guard::{InFlightCalls, MountGuard};
use super::identity::IdentityService;
use super::mounter::VolumeMounter;
use super::node::{NodeService, PluginStore};
use super::proto::csi::identity_server::IdentityServer;
use super::proto::csi::node_server::NodeServer;
use super::proto::registration::registration_server::RegistrationServer;
use super::registration::RegistrationService;
use super::socket::{self, SocketError};
use crate::deletion::reservation::VolumeGuard;
use crate::error_chain::format_chain;
use crate::name::{DriverName, NodeName, StoreName};
use crate::store::{VolumeOpener, VolumeStore};

/// Grace period of calls in flight when the plugin is stopped.
const SHUTDOWN_GRACE_PERIOD: Duration = Duration::from_secs(10);

/// Time for which the start waits for devices to be released.
const RELEASE_WITHIN: Duration = Duration::from_secs(5);

/// The dependencies of the plugin.
#[derive(Debug, Clone)]
pub struct PluginDeps {
    /// The driver's name, as in claims and in the kubelet.
    pub driver: DriverName,
    /// The node's name.
    pub node: NodeName,
    /// Reports the usage of volumes.
    pub store: Arc<dyn VolumeStore>,
    /// Opens volumes; usually the store itself.
    pub volumes: Arc<dyn VolumeOpener>,
    /// Mounts volumes at targets; usually [`BindMounter`](super::BindMounter), for the directory of the same
    /// kubelet.
    pub mounter: Arc<dyn VolumeMounter>,
}

/// The plugin cannot be created.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PluginError {
    /// The kubelet's directory is not an absolute path.
    #[error("the kubelet's directory {} is not an absolute path: set its absolute path", path.display())]
    RelativePath {
        /// The path.
        path: PathBuf,
    },
    /// The path of a socket is invalid.
    #[error("can't use the paths of the CSI plugin's sockets")]
    InvalidSocket(#[source] SocketError),
    /// Another instance serves the same driver to the same kubelet, also from another directory.
    #[error("another instance serves this driver to the kubelet, in {}: stop it, or set another driver name", path.display())]
    InUse {
        /// The directory of the plugin's socket.
        path: PathBuf,
    },
    /// Locking the directory of the plugin's socket failed.
    #[error("can't lock {}, which keeps other instances of the CSI driver out", path.display())]
    Lock {
        /// The directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// The CSI node plugin, as a runnable.
///
/// Below it run `node` and `registration`, each restarted separately with a new socket. If the kubelet
/// rejects the driver, the registration fails: the kubelet retries when it sees the new socket, and calls in
/// flight continue.
///
/// Ready once both listen. [`registration_state`](Self::registration_state) reports whether the kubelet has
/// registered the driver.
#[derive(Debug)]
pub struct NodePlugin {
    deps: Arc<PluginDeps>,
    /// The store of the dependencies, and those that were added.
    stores: Vec<PluginStore>,
    kubelet_dir: PathBuf,
    sockets: SocketPaths,
    in_flight: InFlightCalls,
    registration_state: watch::Sender<bool>,
}

/// Reserves a driver at a kubelet until it is dropped.
#[derive(Debug)]
pub struct DriverLock {
    _dir: DirLock,
}

#[derive(Debug, Clone)]
struct SocketPaths {
    node: PathBuf,
    registration: PathBuf,
}

impl NodePlugin {
    /// A plugin for the kubelet with this root directory, usually `/var/lib/kubelet`. It must be the path
    /// that the kubelet itself uses.
    ///
    /// # Errors
    /// [`PluginError::RelativePath`], or [`PluginError::InvalidSocket`]: the path of a socket below this
    /// directory is too long.
    pub fn new(deps: PluginDeps, kubelet: &Path) -> Result<Self, PluginError> {
        if !kubelet.is_absolute() {
            return Err(PluginError::RelativePath { path: kubelet.to_owned() });
        }
        let sockets = SocketPaths {
            node: kubelet.join("plugins").join(deps.driver.as_str()).join("csi.sock"),
            registration: kubelet.join("plugins_registry").join(registration_name(&deps.driver)),
        };
        for path in [&sockets.node, &sockets.registration] {
            socket::check_path_length(path).map_err(PluginError::InvalidSocket)?;
        }
        let registered = watch::Sender::new(false);
        let (store, volumes) = (Arc::clone(&deps.store), Arc::clone(&deps.volumes));
        Ok(Self {
            deps: Arc::new(deps),
            stores: vec![PluginStore::new(None, store, volumes)],
            kubelet_dir: kubelet.to_owned(),
            sockets,
            in_flight: InFlightCalls::default(),
            registration_state: registered,
        })
    }

    /// Adds a store: that of the volumes whose PersistentVolumes have this name in their attributes.
    #[must_use]
    pub fn with_store(
        mut self,
        name: StoreName,
        store: Arc<dyn VolumeStore>,
        volumes: Arc<dyn VolumeOpener>,
    ) -> Self {
        self.stores.push(PluginStore::new(Some(name), store, volumes));
        self
    }

    /// Reserves the driver at this kubelet until the lock is dropped: two instances would both provision each
    /// claim. Creates the directory of the plugin's socket if it is missing.
    ///
    /// # Errors
    /// [`PluginError::InUse`], [`PluginError::InvalidSocket`] or [`PluginError::Lock`].
    pub fn lock_driver(&self) -> Result<DriverLock, PluginError> {
        let (dir, path) = socket::open_parent(&self.sockets.node).map_err(PluginError::InvalidSocket)?;
        match dir.try_lock() {
            Ok(Some(lock)) => Ok(DriverLock { _dir: lock }),
            Ok(None) => Err(PluginError::InUse { path }),
            Err(error) => Err(PluginError::Lock { path, source: error.into_cause() }),
        }
    }

    /// Returns whether the kubelet has registered the driver. False again while the plugin restarts.
    pub fn registration_state(&self) -> watch::Receiver<bool> {
        self.registration_state.subscribe()
    }

    /// Prevents the deletion of mounted volumes, and the mounting of volumes being deleted; for the
    /// [`Provisioner`](crate::Provisioner) of the same node.
    pub fn volume_guard(&self) -> Arc<dyn VolumeGuard> {
        self.guard_of(Arc::clone(&self.deps.volumes))
    }

    /// The same for the volumes of a store that was added.
    pub fn guard_of(&self, volumes: Arc<dyn VolumeOpener>) -> Arc<dyn VolumeGuard> {
        Arc::new(MountGuard {
            volumes,
            mounter: Arc::clone(&self.deps.mounter),
            in_flight: self.in_flight.clone(),
        })
    }

    /// The socket of the identity and node services.
    pub fn csi_socket(&self) -> &Path {
        &self.sockets.node
    }

    /// The socket of the registration service, which the kubelet watches for.
    pub fn registration_socket(&self) -> &Path {
        &self.sockets.registration
    }

    fn node_service(&self) -> NodeService {
        NodeService {
            deps: Arc::clone(&self.deps),
            stores: self.stores.clone(),
            kubelet_dir: self.kubelet_dir.clone(),
            in_flight: self.in_flight.clone(),
        }
    }

    fn node_server(&self) -> impl Runnable {
        let (path, deps) = (self.sockets.node.clone(), Arc::clone(&self.deps));
        let service = self.node_service();
        let router = move |_: &Context| {
            Server::builder()
                .add_service(IdentityServer::new(IdentityService { driver: deps.driver.clone() }))
                .add_service(NodeServer::new(service.clone()))
        };
        serve_grpc(listener_factory(path), router, SHUTDOWN_GRACE_PERIOD)
    }

    fn registration_server(&self) -> impl Runnable {
        let (deps, sockets, registered) =
            (Arc::clone(&self.deps), self.sockets.clone(), self.registration_state.clone());
        move |ctx: Context| serve_registration(ctx, Arc::clone(&deps), sockets.clone(), registered.clone())
    }

    /// Releases devices that an earlier process left attached and not mounted. A disk that hangs delays it, and the
    /// start only for a while: each device that is missed is released with its volume.
    fn release_unused(&self) -> BoxFuture<'static, ()> {
        let service = self.node_service();
        let volumes: Vec<_> = self.stores.iter().map(|store| service.volumes_of(store)).collect();
        let in_flight = self.in_flight.clone();
        Box::pin(async move {
            // All at once: a disk that hangs delays the devices of no other.
            let releases = volumes.into_iter().map(|volumes| {
                let in_flight = in_flight.clone();
                tokio::task::spawn_blocking(move || {
                    if let Err(error) = volumes.release_unused(&in_flight) {
                        tracing::warn!(
                            "can't release devices of unpublished volumes: {}",
                            format_chain(&error)
                        );
                    }
                })
            });
            let release = futures_util::future::join_all(releases);
            if tokio::time::timeout(RELEASE_WITHIN, release).await.is_err() {
                tracing::warn!(
                    "releasing devices of unpublished volumes takes long: is the disk overloaded?"
                );
            }
        })
    }
}

impl Runnable for NodePlugin {
    fn run(&self, ctx: Context) -> RunFuture {
        let (node, registration) = (self.node_server(), self.registration_server());
        let release_unused = self.release_unused();
        Box::pin(async move {
            // Before the kubelet calls: a call for a volume that is being released would be aborted.
            release_unused.await;
            ctx.run_child("node", node)?;
            ctx.run_child("registration", registration)?;
            for name in ["node", "registration"] {
                ctx.wait_ready(name).await?;
            }
            ctx.signal_ready()?;
            Err(ctx.canceled().await.into())
        })
    }
}

/// The name of the registration socket, with an `@`. As the HTTP authority, the kubelet sends the escaped
/// path of this socket (`%2Fvar%2Flib%2F…`), which the `http` crate rejects, because a host cannot contain
/// escapes. The part before an `@` is not the host, and may contain them. For the other socket, the kubelet
/// sends `localhost`.
///
/// *Source:* Kubernetes 1.36, `pluginmanager/operationexecutor/operation_generator.go`, `dial`; grpc-go,
/// `encodeAuthority`; <https://github.com/kubernetes/kubernetes/pull/112597>.
fn registration_name(driver: &DriverName) -> String {
    format!("{driver}@reg.sock")
}

/// Creates a new listener for each start of a server.
fn listener_factory(
    path: PathBuf,
) -> impl Fn() -> BoxFuture<'static, io::Result<socket::SocketListener>> + Send + Sync + 'static {
    move || {
        let path = path.clone();
        Box::pin(async move { socket::listen(&path).await.map_err(io::Error::other) })
    }
}

/// Serves the registration once the node service is ready. Fails if the kubelet rejects the driver: the
/// kubelet retries only when it sees a new socket.
async fn serve_registration(
    ctx: Context,
    deps: Arc<PluginDeps>,
    sockets: SocketPaths,
    registered: watch::Sender<bool>,
) -> Result<(), Failure> {
    // Dropped however this ends: without the server, the kubelet can't report the state any more.
    let _reset = ResetRegistration(registered.clone());
    let parent = ctx.dn().rsplit_once('.').map_or("", |(parent, _)| parent);
    // The kubelet calls the node service as soon as it has seen the socket of the registration.
    ctx.wait_ready(&format!("{parent}.node")).await?;
    let (reject, rejection) = oneshot::channel();
    let service = Arc::new(RegistrationService::new(&deps.driver, &sockets.node, registered, reject));
    let router =
        move |_: &Context| Server::builder().add_service(RegistrationServer::from_arc(Arc::clone(&service)));
    let server = serve_grpc(listener_factory(sockets.registration), router, SHUTDOWN_GRACE_PERIOD);
    tokio::select! {
        ended = server.run(ctx) => ended,
        // A sender that is dropped rejects nothing: then the pattern does not match, and the server goes on.
        Ok(rejection) = rejection => Err(rejection.into()),
    }
}

/// Marks the driver as not registered when dropped.
struct ResetRegistration(watch::Sender<bool>);

impl Drop for ResetRegistration {
    fn drop(&mut self) {
        self.0.send_replace(false);
    }
}
