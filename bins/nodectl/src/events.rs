//! `events`: what happened in the tree.

use nodekeel_node::client::Client;
use nodekeel_node::v1::EventsRequest;

use crate::caller::Caller;
use crate::failure::Failure;
use crate::model::Event;
use crate::out::{Out, Tone, safe};
use crate::tree;

pub(crate) async fn run(
    caller: &mut Caller,
    follow: bool,
    newest: Option<u64>,
    out: &mut Out,
) -> Result<(), Failure> {
    let request = EventsRequest { backlog: newest, follow };
    let call = async |client: &mut Client| client.events(request).await;
    let mut chunks = if follow { caller.follow(call).await? } else { caller.read(call).await? };
    let mut last = None;
    while let Some(chunk) = chunks.next().await? {
        for event in chunk.events {
            let event = Event::from(event);
            if let Some(missed) = last.replace(event.seq).and_then(|last| event.seq.checked_sub(last + 1))
                && missed > 0
                && !out.json
            {
                let text = out.paint(Tone::Bad, &format!("{missed} events were dropped here"));
                out.line(&text)?;
            }
            show(&event, out)?;
        }
        out.flush()?;
    }
    Ok(())
}

fn show(event: &Event, out: &mut Out) -> Result<(), Failure> {
    if out.json {
        return Ok(out.json(event)?);
    }
    let tone = event.state.map_or(Tone::Faint, tree::tone);
    let detail = out.paint(tone, &safe(&event.detail));
    let at = event.at.as_deref().unwrap_or("?");
    Ok(out.line(&format!("{at}  {:<32} run {:<4} {detail}", event.dn, event.generation))?)
}
