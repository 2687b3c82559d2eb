//! This node's member: its addresses, and the command line of its etcd.

use std::net::IpAddr;

use nodekeel_localstorage::tree::{EtcdDir, LayoutDir, PkiDir};
use nodekeel_supervisor::process::Process;

use super::config::EtcdConfig;
use super::files::{InitialCluster, PreparedFiles};
use super::start_number::StartNumber;
use super::version::EtcdVersion;
use crate::consensus::{MemberName, Peer, PeerUrl};

/// The variables of a flag that has one name until 3.5, and the other from 3.6 on: with it, a connecting member
/// needs no certificate for its address.
const SKIP_SAN_VARIABLES: [&str; 2] =
    ["ETCD_EXPERIMENTAL_PEER_SKIP_CLIENT_SAN_VERIFICATION", "ETCD_PEER_SKIP_CLIENT_SAN_VERIFICATION"];

/// The socket for clients, in the directory in which etcd runs. Before 3.5, etcd takes the URL of a socket with a host and a
/// port alone, which name a file in that directory.
pub(super) const CLIENT_SOCKET: &str = "etcd:0";
const CLIENT_URL: &str = "unix://etcd:0";

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

    /// etcd as a member.
    ///
    /// The number of this start is in the URL for clients, which etcd publishes in the list of members at each start.
    pub(super) fn member_process(
        &self,
        prepared: &PreparedFiles,
        version: Option<EtcdVersion>,
        start: StartNumber,
    ) -> Process {
        let PreparedFiles { client_dir, initial_cluster, required_name, .. } = prepared;
        let required = required_name.iter().flat_map(|name| ["--peer-cert-allowed-hostname", name]);
        self.process(&self.files.peer_pki, client_dir, initial_cluster, version)
            .args(["--advertise-client-urls", &start.mark_url(CLIENT_URL)])
            .arg("--peer-crl-file")
            .arg(self.files.peer_crl.path())
            // Of each certificate of the CA that connects, and of those to which it connects.
            .args(required)
            .args(&self.config.extra_args)
    }

    /// etcd with its data and these credentials, which talks to the holders of certificates by their CA alone, and checks no
    /// list of revoked ones.
    pub(super) fn isolated_process(
        &self,
        pki: &PkiDir,
        client: &LayoutDir,
        version: Option<EtcdVersion>,
    ) -> Process {
        let process = self.process(pki, client, &InitialCluster::FromData, version);
        process.args(["--advertise-client-urls", CLIENT_URL]).args(&self.config.extra_args)
    }

    fn process(
        &self,
        pki: &PkiDir,
        client: &LayoutDir,
        initial: &InitialCluster,
        version: Option<EtcdVersion>,
    ) -> Process {
        let LocalMember { config, files, name, .. } = self;
        let peer = self.peer_url();
        Process::new(&config.binary)
            .args(["--name", name.as_str()])
            .arg("--data-dir")
            .arg(files.data.path())
            // Its directory admits this node's user alone, so that it needs neither TLS nor credentials.
            .current_dir(client.path())
            .args(["--listen-client-urls", CLIENT_URL])
            .args(["--listen-peer-urls", peer.as_str(), "--initial-advertise-peer-urls", peer.as_str()])
            .arg("--peer-cert-file")
            .arg(pki.certificate.path())
            .arg("--peer-key-file")
            .arg(pki.key.path())
            .arg("--peer-trusted-ca-file")
            .arg(pki.ca.path())
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
