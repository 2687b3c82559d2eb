//! `cluster`: the node's enrolment, the members of the cluster, join tickets.

mod ticket;

use std::fs::File;
use std::io::Read;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use futures_util::{Stream, stream};
use nodekeel_node::v1::{
    self, BootstrapRequest, ClusterRequest, DefragmentRequest, DisarmRequest, LeaveRequest, MembersRequest,
    RecoverClusterRequest, RemoveNodeRequest, ReplaceNodeRequest, RestoreClusterRequest,
    SnapshotClusterRequest, SnapshotClusterResponse,
};
use serde::Serialize;
use tokio::sync::mpsc;
use zeroize::Zeroizing;

use self::ticket::{TicketCommand, write_ticket};
use super::action::find_runnable;
use super::reset::ask;
use super::status::unhealthy_reason;
use crate::api_client::{ApiClient, MessageStream};
use crate::error::CommandError;
use crate::output::{Printer, ProgressLine, TextStyle, escape_control};
use crate::private_file::PrivateFile;
use crate::wire::{non_empty, time_text};

/// Timeout of calls to the cluster: noded itself waits some seconds for each of its answers.
pub(super) const CLUSTER_TIMEOUT: Duration = Duration::from_secs(20);

/// Timeout of the defragmentation of one member, which takes some seconds for each gigabyte.
const DEFRAGMENT_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// Timeout of each piece of a snapshot: noded itself waits for etcd.
const PIECE_TIMEOUT: Duration = Duration::from_secs(40);

/// Timeout of the upload of a snapshot, which a person may feed.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(3600);

/// The snapshot is sent in pieces of this size.
const PIECE_BYTES: usize = 64 << 10;

/// Timeout of the removal of a node: noded itself repeats its steps for 20 seconds.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(60);

/// Timeout of a recovery: etcd stops, and starts with the log that was rewritten.
const RECOVER_TIMEOUT: Duration = Duration::from_secs(120);

/// The runnable of the enrolment.
const CLUSTER_DN: &str = "root.cluster";

#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Show the node's enrolment, identity and health
    ///
    /// Exits with 6 unless the node is Running.
    Status,
    /// Bootstrap a new cluster on this node
    ///
    /// Works once, on a node that waits for a ticket: the node records it, and refuses a second time. Waits for a node that
    /// is still starting, within the timeout.
    Bootstrap,
    /// List the members and workers of the cluster
    Members,
    /// Free room in this node's store
    ///
    /// Deletes the history of all keys, then rewrites the database of this node's member without its free room. It serves
    /// nothing until then. Refuses while the cluster would lose its majority. Repeat it on each member.
    Defragment,
    /// End the alarms of the store
    ///
    /// Refuses while the cause of an alarm remains: a full store, or a member with corrupt data.
    Disarm,
    /// Save an encrypted snapshot of the cluster
    ///
    /// All keys of the store as of now, with the CA's private key, by this node's member. The file is whole and verified, or not
    /// written. A person opens it: `age -d -i KEY FILE` prints the snapshot as `etcdctl snapshot save` writes it.
    Snapshot(SnapshotArgs),
    /// Restore a lost cluster from its snapshot
    ///
    /// On a new node that waits for a ticket, at any address. It becomes the only node of that cluster, with every key of the
    /// snapshot; the others join it by tickets. The former nodes are refused from then on: none of them may run any more.
    /// `age -d -i KEY FILE | nodectl cluster restore - --yes`. Killed, it goes on, or is repeated.
    Restore(RestoreArgs),
    /// Remove another node from the cluster
    ///
    /// Also a node that is dead, or that leads. Removes its member, revokes its certificates, and deletes its record. Repeat it
    /// after an interruption. Refused where the others would lose quorum. Of a worker, it deletes all that the cluster has of it.
    Remove(RemoveArgs),
    /// Replace another node by a new one
    ///
    /// Removes the node as `remove` does, and writes the join ticket of its successor. Repeat it after an interruption: it writes
    /// the same ticket until the successor has joined. This node must allow tickets (cluster.golden_tickets).
    Replace(ReplaceArgs),
    /// Take this node out of its cluster
    ///
    /// Also the leader, which hands over first. The node has left when this ends. Refused for the last voter, and where the others
    /// would lose quorum.
    Leave,
    /// Recover the cluster from this node alone
    ///
    /// Where a majority of the voters is lost for ever. Shows what is taken out and lost, and asks. This node becomes the only member,
    /// with its data; the others can't come back. Refused where a majority answers. Repeat it after an interruption.
    Recover(RecoverArgs),
    /// Create, list or revoke join tickets
    #[command(subcommand)]
    Ticket(TicketCommand),
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    /// File to write; - for the standard output
    ///
    /// It replaces one of this name. Its owner alone reads it.
    file: PathBuf,
    /// Public key for it; default: the configured one
    ///
    /// `age-keygen -o KEY` on another machine makes a key and prints its recipient. Default: cluster.backup.recipient of the
    /// node.
    #[arg(long, value_name = "age1…")]
    recipient: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    /// Decrypted snapshot; - for the standard input
    file: PathBuf,
    /// The former nodes are lost for good
    #[arg(long)]
    yes: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveArgs {
    /// Name in `nodectl cluster members`
    node: String,
}

#[derive(Debug, Args)]
pub(crate) struct ReplaceArgs {
    /// Name in `nodectl cluster members`
    node: String,
    /// Address of the successor; default: the node's
    #[arg(long)]
    address: Option<IpAddr>,
    /// Peer port of the successor; default: this node's
    #[arg(long, requires = "address", default_value_t = 0, hide_default_value = true)]
    port: u16,
    /// Output file; must not exist
    #[arg(long)]
    file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct RecoverArgs {
    /// Name of this node in `nodectl cluster status`
    #[arg(long = "from")]
    node: String,
    /// Recover without asking
    #[arg(long)]
    yes: bool,
}

#[derive(Debug, Serialize)]
struct ClusterView {
    state: String,
    /// The awaited event, the step in progress, or the error; absent in state Running.
    detail: Option<String>,
    history: Vec<String>,
    node: Option<String>,
    cluster: Option<String>,
    /// What does not keep the node from taking part, with what to do.
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct BootstrapView {
    bootstrapping: bool,
}

impl From<v1::ClusterResponse> for ClusterView {
    fn from(cluster: v1::ClusterResponse) -> Self {
        Self {
            state: cluster.state,
            detail: non_empty(cluster.detail),
            history: cluster.history,
            node: non_empty(cluster.node),
            cluster: non_empty(cluster.cluster),
            warnings: cluster.warnings,
        }
    }
}

#[derive(Debug, Serialize)]
struct MemberView {
    id: String,
    /// Absent until the member has started for the first time.
    name: Option<String>,
    peer_urls: Vec<String>,
    learner: bool,
    this: bool,
    /// When it was first found not to answer; absent if it answers, or has not started.
    silent_since: Option<String>,
    /// What it answers; absent if it does not answer.
    facts: Option<FactsView>,
    /// Of this node's member: since when its data was compared with that of no other voter; absent if it was at last.
    uncompared_since: Option<String>,
}

/// What `members` prints as JSON: a worker has a name and an address alone.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum NodeView<'a> {
    Member(&'a MemberView),
    Worker { name: String, worker: bool, address: String },
}

#[derive(Debug, Serialize)]
struct FactsView {
    version: String,
    /// Absent, as all that follows, of the member of another node than the one that was asked.
    applied_index: Option<u64>,
    store_bytes: Option<u64>,
    used_bytes: Option<u64>,
    /// Absent, too, if it does not report it.
    quota_bytes: Option<u64>,
}

impl From<v1::MemberFacts> for FactsView {
    fn from(facts: v1::MemberFacts) -> Self {
        let reported = |value| Some(value).filter(|value| *value > 0);
        Self {
            version: facts.version,
            applied_index: reported(facts.applied_index),
            store_bytes: reported(facts.store_bytes),
            used_bytes: reported(facts.used_bytes),
            quota_bytes: reported(facts.quota_bytes),
        }
    }
}

impl From<v1::Member> for MemberView {
    fn from(member: v1::Member) -> Self {
        Self {
            id: member.id,
            name: non_empty(member.name),
            peer_urls: member.peer_urls,
            learner: member.is_learner,
            this: member.is_this,
            silent_since: time_text(member.silent_since),
            facts: member.facts.map(FactsView::from),
            uncompared_since: time_text(member.uncompared_since),
        }
    }
}

#[derive(Debug, Serialize)]
struct DefragmentView {
    /// The names of the members.
    defragmented: Vec<String>,
}

#[derive(Debug, Serialize)]
struct DisarmView {
    disarmed: Vec<String>,
}

#[derive(Debug, Serialize)]
struct SnapshotView {
    file: String,
    bytes: u64,
    recipient: String,
}

#[derive(Debug, Serialize)]
struct RestoreView {
    restoring: bool,
}

#[derive(Debug, Serialize)]
struct RemovedNodeView {
    removed: String,
}

#[derive(Debug, Serialize)]
struct LeftView {
    left: String,
}

#[derive(Debug, Serialize)]
struct RecoveryView {
    /// This node.
    node: String,
    lost: Vec<LostMemberView>,
    is_done: bool,
}

#[derive(Debug, Serialize)]
struct LostMemberView {
    /// Absent if it has never started.
    name: Option<String>,
    url: String,
    answers: bool,
}

#[derive(Debug, Serialize)]
struct ReplacedNodeView {
    removed: String,
    /// The successor.
    node: String,
    url: String,
    file: String,
}

impl ClusterCommand {
    pub(crate) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        // The status is known to the node itself. All other calls wait for the cluster.
        if !matches!(self, Self::Status) {
            api.raise_timeout(CLUSTER_TIMEOUT);
        }
        match self {
            Self::Status => show_status(api, printer).await,
            Self::Bootstrap => bootstrap(api, printer).await,
            Self::Members => show_members(api, printer).await,
            Self::Defragment => defragment(api, printer).await,
            Self::Disarm => disarm(api, printer).await,
            Self::Snapshot(args) => snapshot(api, args, printer).await,
            Self::Restore(args) => restore(api, &args, printer).await,
            Self::Remove(args) => remove_node(api, args, printer).await,
            Self::Replace(args) => replace_node(api, args, printer).await,
            Self::Leave => leave(api, printer).await,
            Self::Recover(args) => recover(api, args, printer).await,
            Self::Ticket(command) => command.run(api, printer).await,
        }
    }
}

async fn show_status(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    let answer = api.call(async |client| client.cluster(ClusterRequest {}).await).await?;
    let cluster = ClusterView::from(answer);
    if printer.is_json {
        printer.print_json(&cluster)?;
    } else {
        print_status(&cluster, printer)?;
    }
    if cluster.state == "Running" { Ok(()) } else { Err(CommandError::NotHealthy) }
}

fn print_status(cluster: &ClusterView, printer: &mut Printer) -> Result<(), CommandError> {
    let style = match &*cluster.state {
        "Running" => TextStyle::Good,
        "Failed" | "Unhealthy" => TextStyle::Bad,
        _ => TextStyle::Pending,
    };
    let state = printer.style_text(style, &escape_control(&cluster.state));
    let identity = match (&cluster.node, &cluster.cluster) {
        (Some(node), Some(cluster)) => {
            format!(": node {} of cluster {}", escape_control(node), escape_control(cluster))
        }
        (Some(node), None) => format!(": node {}", escape_control(node)),
        _ => String::new(),
    };
    printer.print_line(&format!("{state}{identity}"))?;
    if let Some(detail) = &cluster.detail {
        printer.print_line(&format!("  {}", escape_control(detail)))?;
    }
    for warning in &cluster.warnings {
        let label = printer.style_text(TextStyle::Pending, "warning");
        printer.print_line(&format!("  {label}: {}", escape_control(warning)))?;
    }
    Ok(())
}

async fn bootstrap(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    match api.call(async |client| client.bootstrap(BootstrapRequest {}).await).await {
        // The node waits until it has looked for a ticket, and knows what keeps it from that.
        Err(CommandError::Timeout { timeout: limit }) => {
            let why =
                find_runnable(api, CLUSTER_DN).await?.as_ref().map(unhealthy_reason).unwrap_or_default();
            let (dn, what) = (CLUSTER_DN.to_owned(), "has not looked for a ticket yet");
            return Err(CommandError::WaitEnded { dn, what, limit, why });
        }
        requested => requested?,
    };
    let text = "the node bootstraps a new cluster: `nodectl cluster status` shows its progress";
    printer.print_result(&BootstrapView { bootstrapping: true }, text)
}

async fn show_members(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    let (members, workers) = list_nodes(api).await?;
    if printer.is_json {
        let worker = |worker: &v1::Worker| {
            let (name, address) = (worker.name.clone(), worker.address.clone());
            NodeView::Worker { name, worker: true, address }
        };
        let nodes: Vec<_> = members.iter().map(NodeView::Member).chain(workers.iter().map(worker)).collect();
        return Ok(printer.print_json(&nodes)?);
    }
    let row = |member: &MemberView| {
        let name = member.name.as_deref().map_or_else(|| "(not started)".to_owned(), escape_control);
        let vote = if member.learner { "learner" } else { "yes" };
        let this = match &member.uncompared_since {
            Some(since) => format!("  (this node; not compared since {since})"),
            None if member.this => "  (this node)".to_owned(),
            None => String::new(),
        };
        let peers = format!("{}{this}", escape_control(&member.peer_urls.join(",")));
        let none = || "-".to_owned();
        let (answers, facts) = match (&member.silent_since, &member.facts) {
            (Some(since), _) => (format!("not since {since}"), None),
            (None, Some(facts)) => ("yes".to_owned(), Some(facts)),
            (None, None) => (none(), None),
        };
        let version = facts.map_or_else(none, |facts| escape_control(&facts.version));
        let index = facts.and_then(|facts| facts.applied_index).map_or_else(none, |index| index.to_string());
        let size = facts.and_then(|facts| facts.store_bytes);
        let size = size.map_or_else(none, |bytes| format!("{:.1} MB", bytes as f64 / 1e6));
        [escape_control(&member.id), name, vote.to_owned(), answers, version, index, size, peers]
    };
    let style = |member: &MemberView| match member.silent_since {
        Some(_) => TextStyle::Bad,
        None => TextStyle::Plain,
    };
    let worker_row = |worker: &v1::Worker| {
        let [name, address] = [&worker.name, &worker.address].map(|text| escape_control(text));
        let none = || "-".to_owned();
        (TextStyle::Plain, [none(), name, "worker".to_owned(), none(), none(), none(), none(), address])
    };
    let members = members.iter().map(|member| (style(member), row(member)));
    let rows: Vec<_> = members.chain(workers.iter().map(worker_row)).collect();
    let header = ["ID", "NAME", "VOTE", "ANSWERS", "VERSION", "INDEX", "SIZE", "PEERS"];
    Ok(printer.print_table(header, &rows)?)
}

async fn defragment(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    // The others admit their own nodes alone.
    let own = list_nodes(api).await?.0.into_iter().filter(|member| member.this);
    api.raise_timeout(DEFRAGMENT_TIMEOUT);
    let mut defragmented = Vec::new();
    for member in own {
        let request = DefragmentRequest { member: member.id, compact: true };
        api.call(async |client| client.defragment(request).await).await?;
        defragmented.push(member.name.unwrap_or_default());
    }
    let text = format!("defragmented {}", escape_control(&defragmented.join(", ")));
    printer.print_result(&DefragmentView { defragmented }, &text)
}

async fn disarm(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    let answer = api.call(async |client| client.disarm(DisarmRequest {}).await).await?;
    let text = match answer.alarms.as_slice() {
        [] => "the store has no alarms".to_owned(),
        alarms => format!("ended: {}", escape_control(&alarms.join(", "))),
    };
    printer.print_result(&DisarmView { disarmed: answer.alarms }, &text)
}

/// The members and the workers.
async fn list_nodes(api: &mut ApiClient) -> Result<(Vec<MemberView>, Vec<v1::Worker>), CommandError> {
    let answer = api.call(async |client| client.members(MembersRequest {}).await).await?;
    Ok((answer.members.into_iter().map(MemberView::from).collect(), answer.workers))
}

async fn snapshot(
    api: &mut ApiClient,
    args: SnapshotArgs,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    api.raise_timeout(PIECE_TIMEOUT);
    let request = SnapshotClusterRequest { recipient: args.recipient.unwrap_or_default() };
    let mut pieces = api.open_stream(async |client| client.snapshot_cluster(request).await).await?;
    let progress = printer.progress_line();
    if args.file == Path::new("-") {
        // age finds out about a file without its end.
        copy_pieces(&mut pieces, std::io::stdout().lock(), |source| source.into(), progress).await?;
        return Ok(());
    }
    let file_error = |source| CommandError::File { path: args.file.clone(), source };
    let mut file = PrivateFile::create(&args.file).map_err(file_error)?;
    let copied = copy_pieces(&mut pieces, &mut file, file_error, progress).await;
    progress.show("");
    let (bytes, recipient) = copied?;
    file.commit().map_err(file_error)?;
    let file = args.file.display().to_string();
    let text = format!(
        "wrote a snapshot of the cluster to {file}; `age -d -i KEY` opens it, with the key of {recipient}"
    );
    printer.print_result(&SnapshotView { file, bytes, recipient }, &text)
}

/// Writes the pieces of a file. Returns their size and the recipient, once the node has sent the whole file.
async fn copy_pieces(
    pieces: &mut MessageStream<SnapshotClusterResponse>,
    mut to: impl std::io::Write,
    write_error: impl Fn(std::io::Error) -> CommandError,
    progress: ProgressLine,
) -> Result<(u64, String), CommandError> {
    let (mut bytes, mut recipient) = (0, String::new());
    loop {
        let next = pieces.next_message().await?.ok_or(CommandError::ConnectionLost)?;
        if !next.recipient.is_empty() {
            recipient = next.recipient;
        }
        to.write_all(&next.piece).map_err(&write_error)?;
        let before = bytes;
        bytes += next.piece.len() as u64;
        progress.show_bytes(before, bytes, None);
        if next.is_complete {
            to.flush().map_err(&write_error)?;
            return Ok((bytes, recipient));
        }
    }
}

async fn restore(api: &mut ApiClient, args: &RestoreArgs, printer: &mut Printer) -> Result<(), CommandError> {
    // The standard input may be the snapshot, and so can't answer.
    if !args.yes {
        return Err(CommandError::NotAgreed);
    }
    let (input, total): (Box<dyn Read + Send>, _) = match args.file == Path::new("-") {
        true => (Box::new(std::io::stdin()), None),
        false => {
            let file_error = |source| CommandError::File { path: args.file.clone(), source };
            let file = File::open(&args.file).map_err(file_error)?;
            let size = file.metadata().map_err(file_error)?.len();
            (Box::new(file), Some(size))
        }
    };
    api.raise_timeout(RESTORE_TIMEOUT);
    let progress = printer.progress_line();
    let pieces = stream_pieces(input, total, progress);
    let restored = api.call(async |client| client.restore_cluster(pieces).await).await;
    progress.show("");
    restored?;
    let text = "the node restores the cluster: `nodectl cluster status` shows its progress";
    printer.print_result(&RestoreView { restoring: true }, text)
}

/// The content of a file that may have no end yet. noded finds one that can't be read to its end incomplete.
fn stream_pieces(
    mut input: Box<dyn Read + Send>,
    total: Option<u64>,
    progress: ProgressLine,
) -> impl Stream<Item = RestoreClusterRequest> + Send {
    let (sender, receiver) = mpsc::channel(8);
    // A thread that reads for ever ends with the process.
    std::thread::spawn(move || {
        let mut done = 0;
        loop {
            let mut piece = vec![0; PIECE_BYTES];
            match input.read(&mut piece) {
                Ok(0) => return,
                Ok(length) => piece.truncate(length),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => return,
            }
            let before = done;
            done += piece.len() as u64;
            if sender.blocking_send(RestoreClusterRequest { piece }).is_err() {
                return;
            }
            progress.show_bytes(before, done, total);
        }
    });
    stream::unfold(receiver, |mut receiver| async move {
        let piece = receiver.recv().await?;
        Some((piece, receiver))
    })
}

async fn remove_node(
    api: &mut ApiClient,
    args: RemoveArgs,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    api.raise_timeout(REMOVE_TIMEOUT);
    let request = RemoveNodeRequest { node: args.node.clone() };
    api.call(async |client| client.remove_node(request).await).await?;
    let text = format!(
        "node {} removed; if it is to join again, a worker needs another ticket alone, a voter `nodectl reset` on it",
        escape_control(&args.node)
    );
    printer.print_result(&RemovedNodeView { removed: args.node }, &text)
}

async fn leave(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    api.raise_timeout(REMOVE_TIMEOUT);
    let left = api.call(async |client| client.leave(LeaveRequest {}).await).await?.node;
    let text = format!(
        "node {} has left its cluster; `nodectl reset` makes it a new node, which joins by another ticket",
        escape_control(&left)
    );
    printer.print_result(&LeftView { left }, &text)
}

async fn recover(api: &mut ApiClient, args: RecoverArgs, printer: &mut Printer) -> Result<(), CommandError> {
    api.raise_timeout(RECOVER_TIMEOUT);
    let mut request = RecoverClusterRequest { node: args.node, is_agreed: false };
    if !args.yes {
        let planned = request.clone();
        let plan = api.call(async |client| client.recover_cluster(planned).await).await?;
        print_recovery(&RecoveryView::new(&request.node, plan), printer)?;
        if !ask("recover the cluster from this node")? {
            return Err(CommandError::NotAgreed);
        }
    }
    request.is_agreed = true;
    let agreed = request.clone();
    let done = api.call(async |client| client.recover_cluster(agreed).await).await?;
    print_recovery(&RecoveryView::new(&request.node, done), printer)
}

impl RecoveryView {
    fn new(node: &str, response: v1::RecoverClusterResponse) -> Self {
        let lost = response.lost.into_iter().map(|member| LostMemberView {
            name: non_empty(member.name),
            url: member.url,
            answers: member.is_answering,
        });
        Self { node: node.to_owned(), lost: lost.collect(), is_done: response.is_done }
    }
}

fn print_recovery(recovery: &RecoveryView, printer: &mut Printer) -> Result<(), CommandError> {
    if printer.is_json {
        return Ok(printer.print_json(recovery)?);
    }
    let node = escape_control(&recovery.node);
    for member in &recovery.lost {
        let name = member.name.as_deref().map_or_else(|| "(not started)".to_owned(), escape_control);
        let verb = if recovery.is_done { "took out" } else { "takes out" };
        let answers = match member.answers {
            true => ", which answers, and may have writes that this node lacks",
            false => ", which does not answer",
        };
        printer.print_line(&format!("{verb} {name} ({}){answers}", escape_control(&member.url)))?;
    }
    if recovery.is_done {
        let text = format!(
            "node {node} is the only member of the cluster; on each other node: `nodectl reset`, and another ticket of this one"
        );
        return Ok(printer.print_line(&text)?);
    }
    for line in [
        format!(
            "makes {node} the only member of the cluster, with the cluster's id, its CA and the data of this node"
        ),
        "loses each write that the others have acknowledged without this node".to_owned(),
        "do not do this where the others run and are only cut off: both would be the cluster".to_owned(),
    ] {
        printer.print_line(&line)?;
    }
    Ok(())
}

async fn replace_node(
    api: &mut ApiClient,
    args: ReplaceArgs,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    api.raise_timeout(REMOVE_TIMEOUT);
    let ReplaceArgs { node: removed, address, port, file } = args;
    let address = address.map(|address| address.to_string()).unwrap_or_default();
    let request = ReplaceNodeRequest { node: removed.clone(), address, port: port.into() };
    let (node, url) = write_ticket(&file, async || {
        let response = api.call(async |client| client.replace_node(request).await).await?;
        Ok(((response.node, response.url), Zeroizing::new(response.enrolment)))
    })
    .await?;
    let file = file.display().to_string();
    if printer.is_json {
        return Ok(printer.print_json(&ReplacedNodeView { removed, node, url, file })?);
    }
    printer.print_line(&format!(
        "node {} removed; wrote join ticket for its successor {} ({}) to {file}; it contains private keys",
        escape_control(&removed),
        escape_control(&node),
        escape_control(&url)
    ))?;
    let hint = "if the successor is the same machine: `nodectl reset` there first; then copy the ticket to it, as \
                esp/enrolment.pb below its data directory";
    Ok(printer.print_line(hint)?)
}
