//! `cluster`: the node's enrolment, the members of the cluster, join tickets.

use std::fs::File;
use std::io::Write as _;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use nodekeel_node::v1::{
    BootstrapRequest, ClusterRequest, CreateGoldenTicketRequest, MembersRequest, WithdrawGoldenTicketRequest,
};
use zeroize::Zeroizing;

use crate::api_client::ApiClient;
use crate::cli::{ClusterCommand, CreateTicketArgs, RevokeTicketArgs, TicketCommand};
use crate::command_error::CommandError;
use crate::model::{BootstrapView, ClusterView, MemberView, RevokedTicketView, TicketView};
use crate::output::{Printer, TextStyle, escape_control};

/// Timeout of calls to the cluster: noded itself waits some seconds for each of its answers.
const CLUSTER_TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) async fn run_cluster(
    api: &mut ApiClient,
    command: ClusterCommand,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    if !matches!(command, ClusterCommand::Status) {
        api.raise_timeout(CLUSTER_TIMEOUT);
    }
    match command {
        ClusterCommand::Status => show_status(api, printer).await,
        ClusterCommand::Bootstrap => bootstrap(api, printer).await,
        ClusterCommand::Members => show_members(api, printer).await,
        ClusterCommand::Ticket { command: TicketCommand::Create(args) } => {
            create_ticket(api, args, printer).await
        }
        ClusterCommand::Ticket { command: TicketCommand::Withdraw(args) } => {
            revoke_ticket(api, args, printer).await
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
    match &*cluster.state {
        "Running" => Ok(()),
        _ => Err(CommandError::NotHealthy),
    }
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
    Ok(())
}

async fn bootstrap(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    api.call(async |client| client.bootstrap(BootstrapRequest {}).await).await?;
    if printer.is_json {
        return Ok(printer.print_json(&BootstrapView { bootstrapping: true })?);
    }
    Ok(printer
        .print_line("the node bootstraps a new cluster: `nodectl cluster status` shows how far it is")?)
}

async fn show_members(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    let answer = api.call(async |client| client.members(MembersRequest {}).await).await?;
    let members: Vec<_> = answer.members.into_iter().map(MemberView::from).collect();
    if printer.is_json {
        return Ok(printer.print_json(&members)?);
    }
    let name = |member: &MemberView| {
        member.name.as_deref().map_or_else(|| "(not started)".to_owned(), escape_control)
    };
    let width = members.iter().map(|member| name(member).len()).max().unwrap_or_default().max(4);
    let header = printer
        .style_text(TextStyle::Strong, &format!("{:16}  {:width$}  {:7}  PEERS", "ID", "NAME", "VOTE"));
    printer.print_line(&header)?;
    for member in &members {
        let vote = if member.learner { "learner" } else { "yes" };
        let this = if member.this { "  (this node)" } else { "" };
        let urls = escape_control(&member.peer_urls.join(","));
        printer.print_line(&format!(
            "{:16}  {:width$}  {vote:7}  {urls}{this}",
            escape_control(&member.id),
            name(member)
        ))?;
    }
    Ok(())
}

async fn create_ticket(
    api: &mut ApiClient,
    args: CreateTicketArgs,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    let CreateTicketArgs { golden: _, address, port, file } = args;
    // Create the file before the cluster reserves a place for the member.
    let mut ticket =
        create_private_file(&file).map_err(|source| CommandError::File { path: file.clone(), source })?;
    let response = request_ticket(api, address, port).await;
    let written = response.and_then(|(node, enrolment)| {
        ticket.write_all(&enrolment).and_then(|()| ticket.sync_all())?;
        Ok(node)
    });
    let node = written.inspect_err(|_| _ = std::fs::remove_file(&file))?;
    let file = file.display().to_string();
    if printer.is_json {
        return Ok(printer.print_json(&TicketView { node, address: address.to_string(), file })?);
    }
    printer.print_line(&format!(
        "wrote join ticket for node {} ({address}) to {file}; it contains private keys",
        escape_control(&node)
    ))?;
    let hint =
        "copy it to that node only, before its first start, as esp/enrolment.pb below its data directory";
    Ok(printer.print_line(hint)?)
}

async fn revoke_ticket(
    api: &mut ApiClient,
    args: RevokeTicketArgs,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    let RevokeTicketArgs { address, port } = args;
    let request = WithdrawGoldenTicketRequest { address: address.to_string(), port: port.into() };
    let answer = api.call(async |client| client.withdraw_golden_ticket(request).await).await?;
    let revoked = RevokedTicketView { url: answer.url };
    if printer.is_json {
        return Ok(printer.print_json(&revoked)?);
    }
    Ok(printer.print_line(&format!("join ticket for {} revoked", escape_control(&revoked.url)))?)
}

async fn request_ticket(
    api: &mut ApiClient,
    address: IpAddr,
    port: u16,
) -> Result<(String, Zeroizing<Vec<u8>>), CommandError> {
    let request = CreateGoldenTicketRequest { address: address.to_string(), port: port.into() };
    let response = api.call(async |client| client.create_golden_ticket(request).await).await?;
    Ok((response.node, Zeroizing::new(response.enrolment)))
}

/// Creates a file that only its owner can read and write.
fn create_private_file(path: &Path) -> std::io::Result<File> {
    File::options().write(true).create_new(true).mode(0o600).open(path)
}
