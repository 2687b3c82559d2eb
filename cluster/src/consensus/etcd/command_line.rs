//! etcd's command line.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use nodekeel_localstorage::tree::EtcdDir;
use nodekeel_supervisor::process::{Process, Readiness};

use super::config::EtcdConfig;
use super::files::InitialCluster;
use super::release::skip_san_variables;
use crate::consensus::{MemberName, PeerUrl};

/// The command line of this node's etcd.
pub(super) struct EtcdCommand<'a> {
    pub(super) config: &'a EtcdConfig,
    pub(super) files: &'a EtcdDir,
    pub(super) name: &'a MemberName,
    pub(super) address: IpAddr,
}

impl EtcdCommand<'_> {
    /// etcd as a member. It signals ready when it has joined its cluster, even as a learner.
    pub(super) async fn member_process(&self, initial: &InitialCluster) -> Process {
        let list = self.files.peer_crl.path();
        self.process(self.files.peer_pki.ca.path(), initial)
            .await
            .arg("--client-crl-file")
            .arg(list)
            .arg("--peer-crl-file")
            .arg(list)
            .args(&self.config.extra_args)
            .ready_when(Readiness::on_notify().with_timeout(self.config.ready_within))
    }

    /// etcd with its data, which talks to the holder of this certificate alone, and checks no list of revoked
    /// ones.
    pub(super) async fn isolated_process(&self, trusted: &Path) -> Process {
        self.process(trusted, &InitialCluster::FromData).await
    }

    /// What both have in common. It trusts those that this certificate has issued, or its holder.
    async fn process(&self, trusted: &Path, initial: &InitialCluster) -> Process {
        let EtcdCommand { config, files, name, address } = self;
        let peer = PeerUrl::new(*address, config.peer_port);
        let client = format!("https://{}", SocketAddr::new(*address, config.client_port));
        let pki = &files.peer_pki;
        Process::new(&config.binary)
            .args(["--name", name.as_str()])
            .arg("--data-dir")
            .arg(files.data.path())
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", peer.as_str(), "--initial-advertise-peer-urls", peer.as_str()])
            .args(tls_args("--", pki.certificate.path(), pki.key.path(), trusted))
            .arg("--client-cert-auth")
            .args(tls_args("--peer-", pki.certificate.path(), pki.key.path(), trusted))
            .arg("--peer-client-cert-auth")
            // An hour of history is kept: watches can resume, and the disk does not fill up.
            .args(["--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"])
            // A connecting member has a certificate of this CA, and may have a new address: it can be certified
            // for that only once it takes part. etcd exits on an unknown flag, but not on an unknown variable.
            .envs(skip_san_variables(&config.binary).await.iter().map(|variable| (variable, "true")))
            // A member that was cut off asks before it campaigns, so that its return deposes no leader. From 3.5
            // on this is the default.
            .arg("--pre-vote")
            // Nothing here uses its HTTP gateway.
            .arg("--enable-grpc-gateway=false")
            // JSON lines, which keep their levels and fields; 3.4 would write another format by default.
            .args(["--logger", "zap", "--log-outputs", "stderr"])
            .args(initial_cluster_args(name, &peer, initial))
            .grace_period(config.grace)
    }
}

fn tls_args(prefix: &str, certificate: &Path, key: &Path, ca: &Path) -> [std::ffi::OsString; 6] {
    let flag = |name: &str| format!("{prefix}{name}-file").into();
    [flag("cert"), certificate.into(), flag("key"), key.into(), flag("trusted-ca"), ca.into()]
}

/// The initial cluster. etcd evaluates it until it has data.
fn initial_cluster_args(name: &MemberName, peer: &PeerUrl, initial: &InitialCluster) -> Vec<String> {
    let this = format!("{name}={peer}");
    let (state, members, token) = match initial {
        InitialCluster::New { token } => ("new", this, token.as_str()),
        InitialCluster::Existing { peers } => {
            let others = peers.iter().map(|peer| format!("{}={}", peer.name, peer.url));
            ("existing", others.chain([this]).collect::<Vec<_>>().join(","), "")
        }
        InitialCluster::FromData => ("existing", this, ""),
    };
    let mut args = vec![format!("--initial-cluster={members}"), format!("--initial-cluster-state={state}")];
    if !token.is_empty() {
        args.push(format!("--initial-cluster-token={token}"));
    }
    args
}
