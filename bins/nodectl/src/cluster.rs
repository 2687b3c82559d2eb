//! `cluster`: the node's way into its cluster, its members, tickets for others.

use std::fs::File;
use std::io::Write as _;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use nodekeel_node::v1::{
    ClusterRequest, CreateGoldenTicketRequest, MembersRequest, WithdrawGoldenTicketRequest,
};
use zeroize::Zeroizing;

use crate::caller::Caller;
use crate::cli::{ClusterCommand, TicketArgs, TicketCommand, WithdrawArgs};
use crate::failure::Failure;
use crate::model::{Cluster, Member, Ticket, Withdrawn};
use crate::out::{Out, Tone, safe};

/// How long the cluster's answer may take: noded itself waits some seconds for each of it.
const CLUSTER: Duration = Duration::from_secs(20);

pub(crate) async fn run(caller: &mut Caller, command: ClusterCommand, out: &mut Out) -> Result<(), Failure> {
    if !matches!(command, ClusterCommand::Status) {
        caller.be_patient(CLUSTER);
    }
    match command {
        ClusterCommand::Status => status(caller, out).await,
        ClusterCommand::Members => members(caller, out).await,
        ClusterCommand::Ticket { command: TicketCommand::Create(args) } => create(caller, args, out).await,
        ClusterCommand::Ticket { command: TicketCommand::Withdraw(args) } => {
            withdraw(caller, args, out).await
        }
    }
}

async fn status(caller: &mut Caller, out: &mut Out) -> Result<(), Failure> {
    let answer = caller.ask(async |client| client.cluster(ClusterRequest {}).await).await?;
    let cluster = Cluster::from(answer);
    if out.json {
        return Ok(out.json(&cluster)?);
    }
    let tone = match &*cluster.state {
        "Running" => Tone::Good,
        "Failed" => Tone::Bad,
        _ => Tone::Pending,
    };
    let state = out.paint(tone, &safe(&cluster.state));
    let who = match (&cluster.node, &cluster.cluster) {
        (Some(node), Some(cluster)) => format!(": node {} of cluster {}", safe(node), safe(cluster)),
        (Some(node), None) => format!(": node {}", safe(node)),
        _ => String::new(),
    };
    out.line(&format!("{state}{who}"))?;
    if let Some(detail) = &cluster.detail {
        out.line(&format!("  {}", safe(detail)))?;
    }
    Ok(())
}

async fn members(caller: &mut Caller, out: &mut Out) -> Result<(), Failure> {
    let answer = caller.ask(async |client| client.members(MembersRequest {}).await).await?;
    let members: Vec<_> = answer.members.into_iter().map(Member::from).collect();
    if out.json {
        return Ok(out.json(&members)?);
    }
    let name = |member: &Member| member.name.as_deref().map_or_else(|| "(not started)".to_owned(), safe);
    let width = members.iter().map(|member| name(member).len()).max().unwrap_or_default().max(4);
    let header = out.paint(Tone::Strong, &format!("{:16}  {:width$}  {:7}  PEERS", "ID", "NAME", "VOTE"));
    out.line(&header)?;
    for member in &members {
        let vote = if member.learner { "learner" } else { "yes" };
        let this = if member.this { "  (this node)" } else { "" };
        let urls = safe(&member.peer_urls.join(","));
        out.line(&format!("{:16}  {:width$}  {vote:7}  {urls}{this}", safe(&member.id), name(member)))?;
    }
    Ok(())
}

async fn create(caller: &mut Caller, args: TicketArgs, out: &mut Out) -> Result<(), Failure> {
    let TicketArgs { golden: _, address, port, file } = args;
    // Before the cluster expects another member.
    let mut ticket = private(&file).map_err(|source| Failure::File { path: file.clone(), source })?;
    let made = make(caller, address, port).await;
    let written = made.and_then(|(node, enrolment)| {
        ticket.write_all(&enrolment).and_then(|()| ticket.sync_all())?;
        Ok(node)
    });
    let node = written.inspect_err(|_| _ = std::fs::remove_file(&file))?;
    let file = file.display().to_string();
    if out.json {
        return Ok(out.json(&Ticket { node, address: address.to_string(), file })?);
    }
    out.line(&format!("{file} makes its reader node {} at {address}; keep it secret", safe(&node)))?;
    let how = "give it to that node alone before its first start, as cluster/state/enrolment.pb below its data directory";
    Ok(out.line(how)?)
}

async fn withdraw(caller: &mut Caller, args: WithdrawArgs, out: &mut Out) -> Result<(), Failure> {
    let WithdrawArgs { address, port } = args;
    let request = WithdrawGoldenTicketRequest { address: address.to_string(), port: port.into() };
    let answer = caller.ask(async |client| client.withdraw_golden_ticket(request).await).await?;
    let withdrawn = Withdrawn { url: answer.url };
    if out.json {
        return Ok(out.json(&withdrawn)?);
    }
    Ok(out.line(&format!(
        "the ticket for {} is taken back: nobody joins by it any more",
        safe(&withdrawn.url)
    ))?)
}

async fn make(
    caller: &mut Caller,
    address: IpAddr,
    port: u16,
) -> Result<(String, Zeroizing<Vec<u8>>), Failure> {
    let request = CreateGoldenTicketRequest { address: address.to_string(), port: port.into() };
    let made = caller.ask(async |client| client.create_golden_ticket(request).await).await?;
    Ok((made.node, Zeroizing::new(made.enrolment)))
}

/// A new file for its owner alone.
fn private(path: &Path) -> std::io::Result<File> {
    File::options().write(true).create_new(true).mode(0o600).open(path)
}
