//! `events`: starts, exits and other events of the tree.

use nodekeel_node::client::NodeClient;
use nodekeel_node::v1::{self, EventsRequest};
use serde::Serialize;

use crate::api_client::ApiClient;
use crate::completion::complete_dn;
use crate::error::CommandError;
use crate::output::{Printer, TextStyle, escape_control};
use crate::runnable::{state_name, state_style};
use crate::wire::{non_empty, time_text};

/// Show starts, exits and other events
#[derive(Debug, clap::Args)]
pub(crate) struct EventsArgs {
    /// Name in the tree, like root.etcd or etcd
    ///
    /// Default: all.
    #[arg(add = complete_dn())]
    dn: Option<String>,
    /// Include everything below the DN
    #[arg(short, long, requires = "dn")]
    children: bool,
    /// Wait for new events
    #[arg(short, long)]
    follow: bool,
    /// Only the newest N kept events
    #[arg(short = 'n', long, value_name = "N")]
    newest: Option<u64>,
}

#[derive(Debug, Serialize)]
struct EventView {
    seq: u64,
    at: Option<String>,
    dn: String,
    generation: u64,
    change: String,
    state: Option<&'static str>,
    detail: String,
    /// The request of a client; absent for a change of the tree.
    action: Option<String>,
    /// The client that has requested it.
    caller: Option<CallerView>,
}

#[derive(Debug, Serialize)]
struct CallerView {
    /// Absent for an operator of another machine.
    uid: Option<u32>,
    user: Option<String>,
    pid: Option<u32>,
    program: Option<String>,
    /// Absent for a process.
    operator: Option<String>,
    address: Option<String>,
}

impl From<v1::Event> for EventView {
    fn from(event: v1::Event) -> Self {
        Self {
            seq: event.seq,
            at: time_text(event.at),
            state: state_name(event.state()),
            dn: event.dn,
            generation: event.generation,
            change: event.change,
            detail: event.detail,
            action: non_empty(event.action),
            caller: event.caller.map(CallerView::from),
        }
    }
}

impl From<v1::Caller> for CallerView {
    fn from(caller: v1::Caller) -> Self {
        let operator = non_empty(caller.operator);
        Self {
            uid: Some(caller.uid).filter(|_| operator.is_none()),
            user: non_empty(caller.user),
            pid: caller.pid,
            program: non_empty(caller.program),
            operator,
            address: non_empty(caller.address),
        }
    }
}

impl EventsArgs {
    pub(crate) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        let Self { dn, children, follow, newest } = self;
        let dn = api.resolve_optional(dn).await?.unwrap_or_default();
        let is_whole = dn.is_empty();
        let request = EventsRequest { backlog: newest, follow, dn, children };
        let call = async |client: &mut NodeClient| client.events(request).await;
        // Without --follow, the node ends the stream after the kept events.
        let mut chunks = if follow { api.follow_stream(call).await? } else { api.open_stream(call).await? };
        let mut last = None;
        while let Some(chunk) = chunks.next_message().await? {
            for event in chunk.events {
                let event = EventView::from(event);
                // A gap in the numbers of all events means that the node has dropped some. Programs see it in `seq`.
                if let Some(missed) = last.replace(event.seq).and_then(|last| event.seq.checked_sub(last + 1))
                    && missed > 0
                    && is_whole
                    && !printer.is_json
                {
                    let text =
                        printer.style_text(TextStyle::Bad, &format!("{missed} event(s) were dropped here"));
                    printer.print_line(&text)?;
                }
                print_event(&event, printer)?;
            }
            // A follower sees each event at once, also through a pipe.
            printer.flush()?;
        }
        Ok(())
    }
}

fn print_event(event: &EventView, printer: &mut Printer) -> Result<(), CommandError> {
    if printer.is_json {
        return Ok(printer.print_json(event)?);
    }
    let style = event.state.map_or(TextStyle::Faint, state_style);
    let detail = printer.style_text(style, &escape_control(&event.detail));
    let at = event.at.as_deref().unwrap_or("?");
    Ok(printer.print_line(&format!("{at}  {:<32} run {:<4} {detail}", event.dn, event.generation))?)
}
