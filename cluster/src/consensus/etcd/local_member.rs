//! This node's member: its addresses, and the command line of its etcd.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use nodekeel_localstorage::tree::{EtcdDir, PkiDir};
use nodekeel_supervisor::process::Process;

use super::config::EtcdConfig;
use super::files::InitialCluster;
use super::start_number::StartNumber;
use super::version::EtcdVersion;
use crate::consensus::{MemberName, Peer, PeerUrl};

/// The variables of a flag that has one name until 3.5, and the other from 3.6 on: with it, a connecting member
/// needs no certificate for its address.
const SKIP_SAN_VARIABLES: [&str; 2] =
    ["ETCD_EXPERIMENTAL_PEER_SKIP_CLIENT_SAN_VERIFICATION", "ETCD_PEER_SKIP_CLIENT_SAN_VERIFICATION"];

/// This node's member, as one run of it starts.
#[derive(Clone, Copy, Debug)]
pub(super) struct LocalMember<'a> {
    pub(super) config: &'a EtcdConfig,
    pub(super) files: &'a EtcdDir,
    pub(super) name: &'a MemberName,
    pub(super) address: IpAddr,
}

impl LocalMember<'_> {
    /// The URL at which other members reach it.
    pub(super) fn peer_url(&self) -> PeerUrl {
        PeerUrl::new(self.address, self.config.peer_port)
    }

    /// The member as others list it.
    pub(super) fn peer(&self) -> Peer {
        Peer::new(self.name.clone(), self.peer_url())
    }

    /// The socket at which it serves its clients.
    pub(super) fn client_socket(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.config.client_port)
    }

    /// etcd as a member.
    ///
    /// The number of this start is in the URL for clients, which etcd publishes in the list of members at each start.
    pub(super) fn member_process(
        &self,
        initial: &InitialCluster,
        version: Option<EtcdVersion>,
        start: StartNumber,
    ) -> Process {
        let list = self.files.peer_crl.path();
        self.process(&self.files.peer_pki, initial, version)
            .args(["--advertise-client-urls", &start.mark_url(&self.client_url())])
            .arg("--client-crl-file")
            .arg(list)
            .arg("--peer-crl-file")
            .arg(list)
            .args(&self.config.extra_args)
    }

    /// etcd with its data and these credentials, which talks to the holders of certificates by their CA alone, and checks no
    /// list of revoked ones.
    pub(super) fn isolated_process(&self, pki: &PkiDir, version: Option<EtcdVersion>) -> Process {
        let process = self.process(pki, &InitialCluster::FromData, version);
        process.args(["--advertise-client-urls", &self.client_url()]).args(&self.config.extra_args)
    }

    fn client_url(&self) -> String {
        format!("https://{}", self.client_socket())
    }

    fn process(&self, pki: &PkiDir, initial: &InitialCluster, version: Option<EtcdVersion>) -> Process {
        let LocalMember { config, files, name, .. } = self;
        let (peer, client) = (self.peer_url(), self.client_url());
        let trusted = pki.ca.path();
        Process::new(&config.binary)
            .args(["--name", name.as_str()])
            .arg("--data-dir")
            .arg(files.data.path())
            .args(["--listen-client-urls", &client])
            .args(["--listen-peer-urls", peer.as_str(), "--initial-advertise-peer-urls", peer.as_str()])
            .args(tls_args("--", pki.certificate.path(), pki.key.path(), trusted))
            .arg("--client-cert-auth")
            .args(tls_args("--peer-", pki.certificate.path(), pki.key.path(), trusted))
            .arg("--peer-client-cert-auth")
            // An hour of history is kept: watches can resume, and the disk does not fill up.
            .args(["--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"])
            // A connecting member has a certificate of this CA, and may have a new address: it can be certified
            // for that only once it takes part. etcd exits on an unknown flag, but not on an unknown variable.
            .envs(skip_san_variables(version).iter().map(|variable| (variable, "true")))
            // From 3.5 on etcd finds data that differs before it serves any. 3.4 has the check, and does not find it.
            .envs(corrupt_check_variable(version))
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
        // etcd takes the members from its data, and ignores these.
        InitialCluster::FromData => ("existing", this, ""),
    };
    let mut args = vec![format!("--initial-cluster={members}"), format!("--initial-cluster-state={state}")];
    if !token.is_empty() {
        args.push(format!("--initial-cluster-token={token}"));
    }
    args
}

/// The variables to set for etcd of this version, so that it knows each of them: it warns about an unknown variable.
/// All of them if its version is unknown.
fn skip_san_variables(version: Option<EtcdVersion>) -> &'static [&'static str] {
    match version {
        Some(version) if version < (EtcdVersion { major: 3, minor: 6 }) => &SKIP_SAN_VARIABLES[..1],
        Some(_) => &SKIP_SAN_VARIABLES[1..],
        None => &SKIP_SAN_VARIABLES,
    }
}

/// The variable that makes etcd of this version compare its data with that of the other members before it serves.
fn corrupt_check_variable(version: Option<EtcdVersion>) -> Option<(&'static str, &'static str)> {
    let version = version?;
    let is_before = |minor| version < EtcdVersion { major: 3, minor };
    match () {
        () if is_before(5) => None,
        () if is_before(6) => Some(("ETCD_EXPERIMENTAL_INITIAL_CORRUPT_CHECK", "true")),
        () => Some(("ETCD_FEATURE_GATES", "InitialCorruptCheck=true")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_release_gets_the_variable_that_it_knows() {
        let variables = |version| skip_san_variables(EtcdVersion::parse(version));
        let [old, new] = SKIP_SAN_VARIABLES;
        assert_eq!(variables("3.4.23"), [old]);
        assert_eq!(variables("3.5.21"), [old]);
        assert_eq!(variables("3.6.0-rc.1"), [new]);
        assert_eq!(variables("3.7.3"), [new]);
        assert_eq!(variables("main"), [old, new]);
    }
}
