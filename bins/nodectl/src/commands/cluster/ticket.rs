//! `cluster ticket`: how new nodes are let in.

use std::fs::File;
use std::io::Write as _;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use nodekeel_node::v1::{
    self, CreateGoldenTicketRequest, CreateJoinTicketRequest, JoinTicketsRequest, RevokeJoinTicketRequest,
    WithdrawGoldenTicketRequest,
};
use serde::Serialize;
use zeroize::Zeroizing;

use crate::api_client::ApiClient;
use crate::error::CommandError;
use crate::output::{Printer, TextStyle, escape_control};
use crate::time::parse_duration;
use crate::wire::{non_empty, time_text};

/// Where a new node finds its ticket.
const PLACE: &str = "esp/enrolment.pb below its data directory";

#[derive(Debug, Subcommand)]
pub(crate) enum TicketCommand {
    /// Create a join ticket, and print it
    ///
    /// A secret in a line: a new node with `[api]` redeems it once, and makes its own keys. With --golden: a file for one node, with
    /// its private keys; the unused one for the same address and port, if there is one.
    Create(CreateArgs),
    /// List join tickets, without their secrets
    List,
    /// Revoke a join ticket, or an unused place
    ///
    /// No node can join by it afterwards. A node that has joined stays.
    #[command(alias = "withdraw")]
    Revoke(RevokeArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// Golden ticket, which contains the node's private keys
    ///
    /// Bearer credential without an expiry: anyone who reads it can impersonate the node. This node must allow it
    /// (cluster.golden_tickets).
    #[arg(long, requires = "address", requires = "file", conflicts_with_all = ["expires", "uses", "role"])]
    golden: bool,
    /// Only address that may use it
    #[arg(long)]
    address: Option<IpAddr>,
    /// Peer port with --golden; default: this node's
    #[arg(long, requires = "golden", default_value_t = 0, hide_default_value = true)]
    port: u16,
    /// Time in which it can be used
    #[arg(long, value_name = "DURATION", value_parser = parse_lifetime, default_value = "24h")]
    expires: Duration,
    /// Number of nodes that may use it
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    uses: u16,
    /// What the node becomes: voter or worker
    #[arg(long, value_name = "ROLE", default_value = "voter")]
    role: String,
    /// Output file; must not exist
    #[arg(long)]
    file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct RevokeArgs {
    /// Id in `nodectl cluster ticket list`
    #[arg(required_unless_present = "address", conflicts_with = "address")]
    id: Option<String>,
    /// Address of the ticket or the place
    #[arg(long)]
    address: Option<IpAddr>,
    /// Peer port there; default: this node's
    #[arg(long, requires = "address", default_value_t = 0, hide_default_value = true)]
    port: u16,
}

/// A created golden ticket without its secrets.
#[derive(Debug, Serialize)]
struct GoldenTicketView {
    node: String,
    address: String,
    file: String,
}

/// A created join ticket.
#[derive(Debug, Serialize)]
struct NewTicketView<'a> {
    id: &'a str,
    expires: Option<String>,
    voters: &'a [String],
    /// Absent if it is in a file.
    ticket: Option<&'a str>,
    file: Option<String>,
}

#[derive(Debug, Serialize)]
struct TicketView {
    id: String,
    state: String,
    created: Option<String>,
    expires: Option<String>,
    uses: u32,
    address: Option<String>,
    /// What the nodes become.
    role: String,
    used_by: Vec<UseView>,
}

#[derive(Debug, Serialize)]
struct UseView {
    node: String,
    url: String,
    key: String,
    at: Option<String>,
}

#[derive(Debug, Serialize)]
struct RevokedTicketView {
    url: String,
}

#[derive(Debug, Serialize)]
struct RevokedJoinTicketView {
    revoked: String,
    /// Of nodes that had not joined.
    urls: Vec<String>,
}

impl TicketCommand {
    pub(super) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        match self {
            Self::Create(CreateArgs {
                golden: true, address: Some(address), port, file: Some(file), ..
            }) => create_golden(api, address, port, &file, printer).await,
            Self::Create(args) => create(api, args, printer).await,
            Self::List => list(api, printer).await,
            Self::Revoke(RevokeArgs { address: Some(address), port, .. }) => {
                revoke_place(api, address, port, printer).await
            }
            Self::Revoke(RevokeArgs { id, .. }) => revoke(api, id.unwrap_or_default(), printer).await,
        }
    }
}

/// A duration of whole seconds, of which it has one at least.
fn parse_lifetime(text: &str) -> Result<Duration, String> {
    let lifetime = Duration::from_secs(parse_duration(text)?.as_secs());
    if lifetime.is_zero() { Err("use at least 1s".to_owned()) } else { Ok(lifetime) }
}

async fn create(api: &mut ApiClient, args: CreateArgs, printer: &mut Printer) -> Result<(), CommandError> {
    let CreateArgs { address, expires, uses, role, file, .. } = args;
    let is_worker = role == "worker";
    let request = CreateJoinTicketRequest {
        valid_for_seconds: expires.as_secs(),
        uses: uses.into(),
        role,
        address: address.map(|address| address.to_string()).unwrap_or_default(),
    };
    let mut ask = async || {
        let answer = api.call(async |client| client.create_join_ticket(request.clone()).await).await?;
        let mut text = Zeroizing::new(answer.ticket.clone().into_bytes());
        text.push(b'\n');
        Ok((answer, text))
    };
    let (mut answer, text) = match &file {
        Some(file) => (write_ticket(file, ask).await?, None),
        None => {
            let (answer, text) = ask().await?;
            (answer, Some(text))
        }
    };
    // The secret is cleared from memory when it is dropped.
    let ticket = Zeroizing::new(std::mem::take(&mut answer.ticket));
    let (id, expires) = (escape_control(&answer.id), time_text(answer.expires));
    if printer.is_json {
        return Ok(printer.print_json(&NewTicketView {
            id: &answer.id,
            expires,
            voters: &answer.voters,
            ticket: text.is_some().then_some(&ticket),
            file: file.map(|file| file.display().to_string()),
        })?);
    }
    let Some(file) = file else { return Ok(printer.print_line(&escape_control(&ticket))?) };
    let expires = expires.unwrap_or_default();
    printer.print_line(&format!(
        "wrote join ticket {id} to {}: a secret until it is used, or expires at {expires}",
        file.display()
    ))?;
    let sections = if is_worker { "[api] and [worker]" } else { "[api]" };
    let hint = format!("copy it to the new node, which needs {sections} in its configuration, as {PLACE}");
    Ok(printer.print_line(&hint)?)
}

async fn list(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    let answer = api.call(async |client| client.join_tickets(JoinTicketsRequest {}).await).await?;
    let tickets: Vec<_> = answer.tickets.into_iter().map(TicketView::from).collect();
    if printer.is_json {
        return Ok(printer.print_json(&tickets)?);
    }
    let row = |ticket: TicketView| {
        let style = if ticket.state == "open" { TextStyle::Good } else { TextStyle::Plain };
        let urls: Vec<_> = ticket.used_by.iter().map(|used| used.url.as_str()).collect();
        let cells = [
            ticket.id,
            ticket.role,
            ticket.state,
            ticket.expires.unwrap_or_default(),
            format!("{}/{}", ticket.used_by.len(), ticket.uses),
            ticket.address.unwrap_or_else(|| "any".to_owned()),
            urls.join(" "),
        ];
        (style, cells.map(|cell| escape_control(&cell).to_string()))
    };
    let rows: Vec<_> = tickets.into_iter().map(row).collect();
    Ok(printer.print_table(["ID", "ROLE", "STATE", "EXPIRES", "USED", "ADDRESS", "BY"], &rows)?)
}

impl From<v1::JoinTicket> for TicketView {
    fn from(ticket: v1::JoinTicket) -> Self {
        let used_by = |used: v1::JoinTicketUse| UseView {
            node: used.node,
            url: used.url,
            key: used.key,
            at: time_text(used.at),
        };
        Self {
            id: ticket.id,
            state: ticket.state,
            created: time_text(ticket.created),
            expires: time_text(ticket.expires),
            uses: ticket.uses,
            address: non_empty(ticket.address),
            role: ticket.role,
            used_by: ticket.used_by.into_iter().map(used_by).collect(),
        }
    }
}

async fn revoke(api: &mut ApiClient, id: String, printer: &mut Printer) -> Result<(), CommandError> {
    let request = RevokeJoinTicketRequest { id: id.clone() };
    let urls = api.call(async |client| client.revoke_join_ticket(request).await).await?.urls;
    let mut text = format!("join ticket {} revoked", escape_control(&id));
    for url in &urls {
        text += &format!("\nthe node at {} had redeemed it, and can't join any more", escape_control(url));
    }
    printer.print_result(&RevokedJoinTicketView { revoked: id, urls }, &text)
}

async fn create_golden(
    api: &mut ApiClient,
    address: IpAddr,
    port: u16,
    file: &Path,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    let node = write_ticket(file, async || request_golden(api, address, port).await).await?;
    let file = file.display().to_string();
    if printer.is_json {
        return Ok(printer.print_json(&GoldenTicketView { node, address: address.to_string(), file })?);
    }
    printer.print_line(&format!(
        "wrote golden ticket for node {} ({address}) to {file}: a bearer secret with the node's private keys, which does not expire",
        escape_control(&node)
    ))?;
    let hint = format!("copy it to that node only, before its first start, as {PLACE}");
    Ok(printer.print_line(&hint)?)
}

/// Writes a ticket to a new file, and returns the rest of the answer.
pub(super) async fn write_ticket<T>(
    file: &Path,
    request: impl AsyncFnOnce() -> Result<(T, Zeroizing<Vec<u8>>), CommandError>,
) -> Result<T, CommandError> {
    // Create the file before the cluster changes anything.
    let mut ticket =
        create_private_file(file).map_err(|source| CommandError::File { path: file.to_owned(), source })?;
    let written = request().await.and_then(|(answer, enrolment)| {
        ticket.write_all(&enrolment).and_then(|()| ticket.sync_all())?;
        Ok(answer)
    });
    // A file without a ticket is removed: the next attempt needs its name.
    written.inspect_err(|_| _ = std::fs::remove_file(file))
}

async fn revoke_place(
    api: &mut ApiClient,
    address: IpAddr,
    port: u16,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    let request = WithdrawGoldenTicketRequest { address: address.to_string(), port: port.into() };
    let answer = api.call(async |client| client.withdraw_golden_ticket(request).await).await?;
    let revoked = RevokedTicketView { url: answer.url };
    let text = format!("ticket for {} revoked", escape_control(&revoked.url));
    printer.print_result(&revoked, &text)
}

async fn request_golden(
    api: &mut ApiClient,
    address: IpAddr,
    port: u16,
) -> Result<(String, Zeroizing<Vec<u8>>), CommandError> {
    let request = CreateGoldenTicketRequest { address: address.to_string(), port: port.into() };
    let response = api.call(async |client| client.create_golden_ticket(request).await).await?;
    // The private keys are cleared from memory when the value is dropped.
    Ok((response.node, Zeroizing::new(response.enrolment)))
}

/// Creates a file that only its owner can read and write.
fn create_private_file(path: &Path) -> std::io::Result<File> {
    // `create_new` follows no symbolic link (open(2), O_EXCL), and the mode applies from the creation on.
    File::options().write(true).create_new(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_lives_for_a_second_at_least() {
        assert_eq!(parse_lifetime("1500ms"), Ok(Duration::from_secs(1)));
        for text in ["0s", "1ms", "999ms", "-1s", "soon"] {
            parse_lifetime(text).expect_err(text);
        }
    }
}
