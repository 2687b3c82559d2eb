//! etcd's command line.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use nodekeel_localstorage::tree::Etcd;
use nodekeel_supervisor::process::{Process, Readiness};

use super::config::EtcdConfig;
use super::files::Initial;
use crate::consensus::{MemberName, PeerUrl};

/// etcd as a process. It tells that it is ready when it has joined its cluster, as a learner too.
pub(super) fn process(
    config: &EtcdConfig,
    files: &Etcd,
    name: &MemberName,
    address: IpAddr,
    initial: &Initial,
) -> Process {
    let peer = PeerUrl::new(address, config.peer_port);
    let client = format!("https://{}", SocketAddr::new(address, config.client_port));
    let (pki, list) = (&files.peer_pki, files.peer_crl.path());
    Process::new(&config.binary)
        .args(["--name", name.as_str()])
        .arg("--data-dir")
        .arg(files.data.path())
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", peer.as_str(), "--initial-advertise-peer-urls", peer.as_str()])
        .args(tls("--", pki.certificate.path(), pki.key.path(), pki.ca.path()))
        .args(["--client-cert-auth", "--client-crl-file"])
        .arg(list)
        .args(tls("--peer-", pki.certificate.path(), pki.key.path(), pki.ca.path()))
        .args(["--peer-client-cert-auth", "--peer-crl-file"])
        .arg(list)
        .args(initial_cluster(name, &peer, initial))
        // History is kept for an hour: what watches it goes on, and the disk does not fill up.
        .args(["--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"])
        // Who connects as a member has a certificate of this authority, and may have a new address: it can be certified for
        // that only once it takes part. The flag has one name until 3.5, and the other from 3.6 on; etcd warns of a variable
        // that it doesn't know, and ends because of such a flag.
        .env("ETCD_EXPERIMENTAL_PEER_SKIP_CLIENT_SAN_VERIFICATION", "true")
        .env("ETCD_PEER_SKIP_CLIENT_SAN_VERIFICATION", "true")
        // Nobody here speaks its HTTP.
        .arg("--enable-grpc-gateway=false")
        // JSON lines, which keep their levels and fields; 3.4 would write another format by itself.
        .args(["--logger", "zap", "--log-outputs", "stderr"])
        .args(&config.extra_args)
        .ready(Readiness::notify().within(config.ready_within))
        .grace(config.grace)
}

fn tls(prefix: &str, certificate: &Path, key: &Path, ca: &Path) -> [std::ffi::OsString; 6] {
    let flag = |name: &str| format!("{prefix}{name}-file").into();
    [flag("cert"), certificate.into(), flag("key"), key.into(), flag("trusted-ca"), ca.into()]
}

/// Who is expected to be there. etcd looks at it until it has data of its own.
fn initial_cluster(name: &MemberName, peer: &PeerUrl, initial: &Initial) -> Vec<String> {
    let this = format!("{name}={peer}");
    let (state, members, token) = match initial {
        Initial::New { token } => ("new", this, token.as_str()),
        Initial::Existing { peers } => {
            let others = peers.iter().map(|peer| format!("{}={}", peer.name, peer.url));
            ("existing", others.chain([this]).collect::<Vec<_>>().join(","), "")
        }
        Initial::Known => ("existing", this, ""),
    };
    let mut args = vec![format!("--initial-cluster={members}"), format!("--initial-cluster-state={state}")];
    if !token.is_empty() {
        args.push(format!("--initial-cluster-token={token}"));
    }
    args
}
