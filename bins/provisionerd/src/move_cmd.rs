//! `provisionerd volumes move` and `drain`: volumes go to another node, from where kubectl runs.

use std::fmt;
use std::io::{self, Write as _};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use k8s_openapi::api::core::v1::{PersistentVolume, Pod};
use kube::api::ListParams;
use kube::{Api, Client};
use nodekeel_provisioner::{
    DriverName, ErrorSource, MoveDeps, MoveError, MoveOutcome, MoveRequest, NodeName, StoreId, VolumeCarrier,
    VolumeCopy, VolumeId, format_chain, list_moves, move_volume, node_of_volume,
};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::config::DaemonConfig;
use crate::import::ClaimName;
use crate::{api_server, print_stdout, run, start_runtime};

/// The least time that a node has to write what it was sent to its disk.
const SYNC_TIMEOUT: Duration = Duration::from_secs(600);

/// The claim and the node.
#[derive(Debug, Args)]
pub(crate) struct MoveFlags {
    /// Claim of the volume; no pod may use it
    #[arg(value_name = "NAMESPACE/NAME")]
    claim: ClaimName,
    /// Node that gets the volume
    #[arg(long, value_name = "NODE", required_unless_present = "cancel")]
    to: Option<NodeName>,
    /// Leave the volume where it was
    ///
    /// Also after a move was interrupted. One whose volume is already on the other node is completed instead.
    #[arg(long, conflicts_with = "to")]
    cancel: bool,
    /// Driver name
    #[arg(long, value_name = "NAME", default_value_t = DaemonConfig::default().driver)]
    driver: DriverName,
    #[command(flatten)]
    cluster: ClusterFlags,
}

/// The nodes.
#[derive(Debug, Args)]
pub(crate) struct DrainFlags {
    /// Node whose volumes are moved; cordon it first
    node: NodeName,
    /// Node that gets them; of several, the first one that has room
    #[arg(long, value_name = "NODE", required = true)]
    to: Vec<NodeName>,
    /// Driver name
    #[arg(long, value_name = "NAME", default_value_t = DaemonConfig::default().driver)]
    driver: DriverName,
    #[command(flatten)]
    cluster: ClusterFlags,
}

/// How to reach the cluster and the daemons on its nodes.
#[derive(Debug, Args)]
pub(crate) struct ClusterFlags {
    /// Namespace of provisionerd
    #[arg(long, value_name = "NAME", default_value = "nodekeel")]
    namespace: String,
    /// Labels of provisionerd's pods
    #[arg(long, value_name = "SELECTOR", default_value = "app.kubernetes.io/name=provisionerd")]
    selector: String,
    /// Kubeconfig file
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Time that a node has to answer
    ///
    /// A copy may take any time, while bytes arrive.
    #[arg(long, value_name = "SECONDS", default_value = "60")]
    timeout: NonZeroU32,
}

async fn deps(driver: DriverName, cluster: ClusterFlags) -> Result<MoveDeps> {
    let exec = PodExec::new(cluster).await?;
    let (client, namespace) = (exec.client.clone(), exec.namespace.clone());
    let carrier = Arc::new(PodCarrier { exec, driver: driver.clone() });
    Ok(MoveDeps { client, driver, namespace, carrier, hook: run::kill_hook()? })
}

pub(crate) fn run_move(flags: MoveFlags) -> Result<ExitCode> {
    let MoveFlags { claim, to, driver, cluster, .. } = flags;
    let request = MoveRequest {
        namespace: claim.namespace,
        claim: claim.name,
        target: to.map(|node| node.to_string()),
    };
    start_runtime()?.block_on(async {
        let deps = deps(driver, cluster).await?;
        Ok(print_stdout(&format!("{}\n", complete(&deps, &request).await?)))
    })
}

fn format_outcome(request: &MoveRequest, outcome: &MoveOutcome) -> String {
    let MoveRequest { namespace, claim, target } = request;
    match (outcome, target) {
        (MoveOutcome::Moved { source }, Some(target)) => format!(
            "moved claim {namespace}/{claim} from node {source} to node {target}; its snapshots stay on node {source}"
        ),
        (MoveOutcome::Moved { source }, None) => {
            format!("it was too late to cancel: claim {namespace}/{claim} was moved from node {source}")
        }
        (MoveOutcome::AlreadyThere, _) => format!("claim {namespace}/{claim} is already there"),
        (MoveOutcome::Stayed(_), _) => format!("claim {namespace}/{claim} was not moved"),
        (MoveOutcome::ClaimDeleted { id, copy: None }, _) => {
            format!("claim {namespace}/{claim} was deleted; no copy of volume {id} is left")
        }
        (MoveOutcome::ClaimDeleted { id, copy: Some(node) }, _) => format!(
            "claim {namespace}/{claim} was deleted; a copy of volume {id} may be left: `kubectl nodekeel orphans --node \
             {node}` names it, and what to type"
        ),
    }
}

pub(crate) fn run_drain(flags: DrainFlags) -> Result<ExitCode> {
    let DrainFlags { node, to, driver, cluster } = flags;
    ensure!(!to.contains(&node), "can't move the volumes of node {node} to itself: name another node");
    start_runtime()?.block_on(async {
        let deps = deps(driver, cluster).await?;
        let mut failed = 0;
        let mut show = |moved: Result<String>| match moved {
            Ok(text) => drop(print_stdout(&format!("{text}\n"))),
            // One that can't be moved does not keep the others there.
            Err(error) => {
                failed += 1;
                let _ = writeln!(std::io::stderr(), "provisionerd: {}", format_chain(&*error));
            }
        };
        // First those that were interrupted: they may have no PersistentVolume.
        for request in list_moves(&deps, node.as_str()).await? {
            match request {
                Ok(request) => show(complete(&deps, &request).await),
                Err(error) => show(Err(error.into())),
            }
        }
        for (namespace, claim) in list_claims(&deps, node.as_str()).await? {
            show(drain_claim(&deps, &namespace, &claim, &to).await);
        }
        ensure!(
            failed == 0,
            "{failed} volumes are left on node {node}, or may be: repeat the command once they can be moved"
        );
        Ok(ExitCode::SUCCESS)
    })
}

/// Moves a volume, or cancels its move; a volume that stays is an error.
async fn complete(deps: &MoveDeps, request: &MoveRequest) -> Result<String> {
    let outcome = move_volume(deps, request).await?;
    let text = format_outcome(request, &outcome);
    match (outcome, &request.target) {
        (MoveOutcome::Stayed(Some(reason)), Some(_)) => bail!("{text}: {reason}"),
        (MoveOutcome::ClaimDeleted { copy: Some(_), .. }, _)
        | (MoveOutcome::ClaimDeleted { .. }, Some(_)) => {
            bail!(text)
        }
        _ => Ok(text),
    }
}

/// Moves a volume to the first node that takes it.
async fn drain_claim(deps: &MoveDeps, namespace: &str, claim: &str, to: &[NodeName]) -> Result<String> {
    let mut last = anyhow::anyhow!("no node is named");
    for target in to {
        let target = Some(target.to_string());
        let request = MoveRequest { namespace: namespace.to_owned(), claim: claim.to_owned(), target };
        match complete(deps, &request).await {
            // Nothing was changed, so another node may take it.
            Err(error) if matches!(error.downcast_ref(), Some(MoveError::Check { .. })) => last = error,
            done => return done,
        }
    }
    Err(last)
}

/// The claims whose volumes are on a node.
async fn list_claims(deps: &MoveDeps, node: &str) -> Result<Vec<(String, String)>> {
    let volumes: Api<PersistentVolume> = Api::all(deps.client.clone());
    let listed = volumes.list(&ListParams::default()).await.context("can't list the PersistentVolumes")?;
    let claim = |volume: &PersistentVolume| {
        let spec = volume.spec.as_ref()?;
        let is_there = spec.csi.as_ref()?.driver == deps.driver.as_str() && node_of_volume(volume)? == node;
        let claim = spec.claim_ref.as_ref().filter(|_| is_there)?;
        let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref());
        (phase == Some("Bound")).then_some((claim.namespace.clone()?, claim.name.clone()?))
    };
    Ok(listed.items.iter().filter_map(claim).collect())
}

/// Runs provisionerd in its pods by `kubectl exec`: both ends are authenticated, and nothing listens.
pub(crate) struct PodExec {
    client: Client,
    namespace: String,
    selector: String,
    kubeconfig: Option<PathBuf>,
    /// The time after which a command that should be short is given up: `kubectl exec` itself waits for ever for a kubelet
    /// that hangs.
    timeout: Duration,
}

/// A pod of provisionerd.
pub(crate) struct NodePod {
    pub(crate) node: String,
    /// Its name, if it runs.
    pub(crate) running: Option<String>,
}

impl PodExec {
    pub(crate) async fn new(flags: ClusterFlags) -> Result<Self> {
        let ClusterFlags { namespace, selector, kubeconfig, timeout } = flags;
        let client = api_server::api_client(kubeconfig.as_deref()).await?;
        let timeout = Duration::from_secs(u64::from(timeout.get()));
        Ok(Self { client, namespace, selector, kubeconfig, timeout })
    }

    /// The pods of provisionerd on a node, or on all, sorted by node.
    pub(crate) async fn list_pods(&self, node: Option<&str>) -> Result<Vec<NodePod>> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let params = ListParams::default().labels(&self.selector);
        let listed = pods.list(&params).await.context("can't list the pods of provisionerd")?;
        let node_pod = |pod: Pod| {
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            let is_running = phase == Some("Running") && pod.metadata.deletion_timestamp.is_none();
            let running = pod.metadata.name.filter(|_| is_running);
            pod.spec.and_then(|spec| spec.node_name).map(|node| NodePod { node, running })
        };
        let mut found: Vec<_> = listed.items.into_iter().filter_map(node_pod).collect();
        found.retain(|pod| node.is_none_or(|node| pod.node == node));
        found.sort_by(|a, b| a.node.cmp(&b.node));
        Ok(found)
    }

    pub(crate) fn describe_absence(&self, node: Option<&str>) -> String {
        let place = node.map(|node| format!(" on node {node}")).unwrap_or_default();
        format!(
            "no pod {} runs{place} in namespace {}: start it, or set --namespace, --selector",
            self.selector, self.namespace
        )
    }

    /// A command of provisionerd in this pod.
    pub(crate) fn command(&self, pod: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("kubectl");
        command.args(self.kubeconfig.iter().flat_map(|path| ["--kubeconfig".as_ref(), path.as_os_str()]));
        command.args(["exec", "-i", "-n", &self.namespace, pod, "-c", "provisionerd", "--"]);
        command.arg("/provisionerd").args(arguments);
        command
    }

    /// Runs a command of a node that prints for the user. Returns whether it has succeeded.
    ///
    /// # Errors
    /// kubectl can't be run, or the node has not answered in time.
    pub(crate) async fn show(&self, node: &str, mut command: Command) -> Result<bool> {
        let mut child = spawn(command.stdin(Stdio::null()))?;
        let status = timeout(self.timeout, child.wait()).await.map_err(|_| self.hung(node))?;
        Ok(status.context("can't wait for kubectl")?.success())
    }

    /// The error of a node that does not answer. What was started there may still run.
    fn hung(&self, node: &str) -> anyhow::Error {
        hung(node, self.timeout)
    }
}

/// Moves volumes between provisionerd's pods.
struct PodCarrier {
    exec: PodExec,
    driver: DriverName,
}

impl PodCarrier {
    /// A command of a move on a node.
    async fn command_on(&self, node: &str, arguments: &[&str]) -> Result<Command> {
        let pods = self.exec.list_pods(Some(node)).await?;
        let pod = pods.into_iter().find_map(|pod| pod.running);
        let pod = pod.with_context(|| self.exec.describe_absence(Some(node)))?;
        let mut command = self.exec.command(&pod, &[&["volumes"][..], arguments].concat());
        command.args(["--expect-node", node, "--expect-driver", self.driver.as_str()]);
        Ok(command)
    }

    async fn send_command(&self, copy: &VolumeCopy) -> Result<Command> {
        let mut command = self.command_on(&copy.source, &["send", copy.id.as_str()]).await?;
        command.args(copy.store.iter().flat_map(|name| ["--store", name]));
        Ok(command)
    }

    async fn receive_command(&self, copy: &VolumeCopy) -> Result<Command> {
        let arguments = ["receive", copy.id.as_str(), "--owner", &copy.owner];
        let mut command = self.command_on(&copy.target, &arguments).await?;
        command.args(copy.store.iter().flat_map(|name| ["--store", name]));
        let limit = |name: &str, limit: Option<u64>| limit.map(|limit| format!("--{name}={limit}"));
        command.args(limit("bytes", copy.limits.bytes.map(|bytes| bytes.0)));
        command.args(limit("inodes", copy.limits.inodes.map(|inodes| inodes.0)));
        Ok(command)
    }

    async fn check_nodes(&self, copy: &VolumeCopy) -> Result<()> {
        let (mut send, mut receive) = (self.send_command(copy).await?, self.receive_command(copy).await?);
        send.arg("--check");
        receive.arg("--check");
        self.pipe(copy, send, receive, self.exec.timeout).await.map(drop)
    }

    async fn copy_volume(&self, copy: &VolumeCopy) -> Result<StoreId> {
        let (send, receive) = (self.send_command(copy).await?, self.receive_command(copy).await?);
        let store = self.pipe(copy, send, receive, self.exec.timeout.max(SYNC_TIMEOUT)).await?;
        store.trim().parse().with_context(|| format!("node {} did not name its store", copy.target))
    }

    /// Sends the output of a command on the source to one on the target, as long as bytes flow, and gives the output of that,
    /// which has a time of its own from the last byte on.
    async fn pipe(
        &self,
        copy: &VolumeCopy,
        mut from: Command,
        mut to: Command,
        end: Duration,
    ) -> Result<String> {
        let mut sender = start(from.stdin(Stdio::null()))?;
        let mut receiver = start(to.stdin(Stdio::piped()))?;
        let output = sender.stdout.take().context("kubectl has no output")?;
        let input = receiver.stdin.take().context("kubectl has no input")?;
        match relay(output, input, self.exec.timeout).await.context("can't read from kubectl")? {
            RelayEnd::Ended => {}
            RelayEnd::SenderStalled => return Err(self.exec.hung(&copy.source)),
            RelayEnd::ReceiverStalled => return Err(self.exec.hung(&copy.target)),
        }
        let ended = timeout(end, async { tokio::join!(finish(sender), finish(receiver)) }).await;
        let (sent, received) = ended.map_err(|_| hung(&copy.target, end))?;
        // A receiver that has succeeded has all of the stream, or needs none of it.
        received.or_else(|error| sent.and(Err(error)))
    }

    async fn settle_node(&self, node: &str, id: &VolumeId) -> Result<()> {
        let mut settle = self.command_on(node, &["settle", id.as_str()]).await?;
        let settled = finish(start(settle.stdin(Stdio::null()))?);
        timeout(self.exec.timeout, settled).await.map_err(|_| self.exec.hung(node))?.map(drop)
    }
}

#[async_trait::async_trait]
impl VolumeCarrier for PodCarrier {
    async fn check(&self, copy: &VolumeCopy) -> Result<(), ErrorSource> {
        self.check_nodes(copy).await.map_err(Into::into)
    }

    async fn copy(&self, copy: &VolumeCopy) -> Result<StoreId, ErrorSource> {
        self.copy_volume(copy).await.map_err(Into::into)
    }

    async fn settle(&self, node: &str, id: &VolumeId) -> Result<(), ErrorSource> {
        self.settle_node(node, id).await.map_err(Into::into)
    }
}

/// Runs kubectl, which is killed once it is dropped.
fn spawn(command: &mut Command) -> Result<Child> {
    command.kill_on_drop(true).spawn().context("can't run kubectl: install it, and put it on the PATH")
}

fn start(command: &mut Command) -> Result<Child> {
    spawn(command.stdout(Stdio::piped()))
}

/// The output of a command that has succeeded; its messages go to our stderr.
async fn finish(child: Child) -> Result<String> {
    let output = child.wait_with_output().await.context("can't wait for kubectl")?;
    ensure!(
        output.status.success(),
        "the command on the node has failed ({}): its message is above",
        output.status
    );
    String::from_utf8(output.stdout).context("can't read from kubectl")
}

fn hung(node: &str, time: Duration) -> anyhow::Error {
    let seconds = time.as_secs();
    anyhow::anyhow!(
        "node {node} has not answered within {seconds} s: its kubelet may hang, or a disk; see `kubectl describe node {node}`, or \
         give it more time with --timeout"
    )
}

/// The end of a stream between two commands.
#[derive(Debug, PartialEq, Eq)]
enum RelayEnd {
    /// The first one has sent all, or the second one needs no more.
    Ended,
    SenderStalled,
    ReceiverStalled,
}

/// Copies a stream, until it ends or no byte has passed for this time.
async fn relay(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    stall: Duration,
) -> io::Result<RelayEnd> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let Ok(read) = timeout(stall, from.read(&mut buffer)).await else {
            return Ok(RelayEnd::SenderStalled);
        };
        let mut rest = &buffer[..read?];
        if rest.is_empty() {
            return Ok(RelayEnd::Ended);
        }
        while !rest.is_empty() {
            match timeout(stall, to.write(rest)).await {
                Ok(Ok(written)) => rest = &rest[written..],
                // Its exit status says why it has ended.
                Ok(Err(_)) => return Ok(RelayEnd::Ended),
                Err(_) => return Ok(RelayEnd::ReceiverStalled),
            }
        }
    }
}

impl fmt::Debug for PodCarrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PodCarrier").field("namespace", &self.exec.namespace).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    const STALL: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn a_stream_may_take_any_time_while_bytes_flow_and_a_stall_has_a_side() {
        // Small pipes: each side waits for the other.
        let pipes = || (duplex(1), duplex(1));
        let ((mut source, from), (to, mut target)) = pipes();
        let slow = async {
            let mut received = Vec::new();
            for byte in 0..10 {
                tokio::time::sleep(STALL * 9 / 10).await;
                source.write_all(&[byte]).await.expect("taken");
                received.push(target.read_u8().await.expect("read"));
            }
            drop(source);
            received
        };
        let (ended, received) = tokio::join!(relay(from, to, STALL), slow);
        assert_eq!((ended.expect("relayed"), received), (RelayEnd::Ended, (0..10).collect()));

        let ((mut source, from), (to, _target)) = pipes();
        source.write_all(&[1]).await.expect("taken");
        assert_eq!(relay(from, to, STALL).await.expect("relayed"), RelayEnd::SenderStalled);

        let ((mut source, from), (to, _target)) = pipes();
        // The target has room for one byte, the relay holds one, and the pipe to it another.
        let send = source.write_all(&[1, 2, 3, 4]);
        let ended = tokio::select! {
            ended = relay(from, to, STALL) => ended,
            sent = send => panic!("{sent:?}"),
        };
        assert_eq!(ended.expect("relayed"), RelayEnd::ReceiverStalled);

        let ((mut source, from), (to, target)) = pipes();
        drop(target);
        source.write_all(&[1]).await.expect("taken");
        assert_eq!(relay(from, to, STALL).await.expect("relayed"), RelayEnd::Ended);
    }
}
