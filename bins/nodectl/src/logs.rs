//! `logs`: log entries, as they were kept and as they come.

use nodekeel_logtree::{Body, Entry, Level, render};
use nodekeel_node::client::{Client, level_to_wire};
use nodekeel_node::v1;

use crate::cli::LogsArgs;
use crate::failure::Failure;
use crate::out::{Out, Tone};

pub(crate) async fn run(client: &mut Client, args: LogsArgs, out: &mut Out) -> Result<(), Failure> {
    let mut chunks = client.logs(request(args)).await?.into_inner();
    while let Some(chunk) = chunks.message().await? {
        for entry in chunk.entries {
            let entry = Entry::try_from(entry)?;
            if out.json {
                out.line(&render::json(&entry))?;
            } else {
                show(&entry, out)?;
            }
        }
        out.flush()?;
    }
    Ok(())
}

fn request(args: LogsArgs) -> v1::LogsRequest {
    let kind = match (args.raw, args.leveled) {
        (true, _) => v1::logs_request::Kind::Raw,
        (_, true) => v1::logs_request::Kind::Leveled,
        _ => v1::logs_request::Kind::Unspecified,
    };
    v1::LogsRequest {
        // Without a DN everything is meant, the supervisor's own log beside the tree too.
        children: args.children || args.dn.is_none(),
        dn: args.dn.unwrap_or_default(),
        backlog: args.newest,
        follow: args.follow,
        min_level: args.min_level.map_or(v1::Level::Unspecified, level_to_wire).into(),
        kind: kind.into(),
    }
}

/// Prints an entry for people.
pub(crate) fn show(entry: &Entry, out: &mut Out) -> Result<(), Failure> {
    let tone = match &entry.body {
        Body::Leveled(leveled) => match leveled.level {
            Level::Error | Level::Fatal => Tone::Bad,
            Level::Warn => Tone::Pending,
            Level::Trace | Level::Debug => Tone::Faint,
            Level::Info => Tone::Plain,
        },
        Body::Dropped(_) => Tone::Bad,
        _ => Tone::Plain,
    };
    let text = out.paint(tone, &render::full(entry));
    Ok(out.line(&text)?)
}
