//! `events`: starts, exits and other events of the tree.

use nodekeel_node::client::NodeClient;
use nodekeel_node::v1::EventsRequest;

use crate::api_client::ApiClient;
use crate::command_error::CommandError;
use crate::model::EventView;
use crate::output::{Printer, TextStyle, escape_control};
use crate::tree;

pub(crate) async fn show_events(
    api: &mut ApiClient,
    follow: bool,
    newest: Option<u64>,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    let request = EventsRequest { backlog: newest, follow };
    let call = async |client: &mut NodeClient| client.events(request).await;
    let mut chunks = if follow { api.follow_stream(call).await? } else { api.open_stream(call).await? };
    let mut last = None;
    while let Some(chunk) = chunks.next_message().await? {
        for event in chunk.events {
            let event = EventView::from(event);
            if let Some(missed) = last.replace(event.seq).and_then(|last| event.seq.checked_sub(last + 1))
                && missed > 0
                && !printer.is_json
            {
                let text =
                    printer.style_text(TextStyle::Bad, &format!("{missed} event(s) were dropped here"));
                printer.print_line(&text)?;
            }
            print_event(&event, printer)?;
        }
        printer.flush()?;
    }
    Ok(())
}

fn print_event(event: &EventView, printer: &mut Printer) -> Result<(), CommandError> {
    if printer.is_json {
        return Ok(printer.print_json(event)?);
    }
    let style = event.state.map_or(TextStyle::Faint, tree::state_style);
    let detail = printer.style_text(style, &escape_control(&event.detail));
    let at = event.at.as_deref().unwrap_or("?");
    Ok(printer.print_line(&format!("{at}  {:<32} run {:<4} {detail}", event.dn, event.generation))?)
}
