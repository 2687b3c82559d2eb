//! `logs`: log entries, as they were kept and as they come.

use nodekeel_logtree::{Body, Entry, Level, render};
use nodekeel_node::client::{Client, level_to_wire};
use nodekeel_node::v1;

use crate::caller::Caller;
use crate::cli::LogsArgs;
use crate::failure::Failure;
use crate::out::{Out, Tone};
use crate::time::rfc3339;

pub(crate) async fn run(caller: &mut Caller, args: LogsArgs, out: &mut Out) -> Result<(), Failure> {
    let request = request(args);
    let follow = request.follow;
    let call = async |client: &mut Client| client.logs(request).await;
    let mut chunks = if follow { caller.follow(call).await? } else { caller.read(call).await? };
    while let Some(chunk) = chunks.next().await? {
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
    let at = rfc3339(entry.time);
    for (index, text) in texts(entry).enumerate() {
        let letter = match &entry.body {
            _ if index > 0 => '|',
            Body::Leveled(leveled) => leveled.level.letter(),
            Body::Raw(_) => 'R',
            _ => '-',
        };
        let text = out.paint(tone, &format!("{letter} {text}"));
        out.line(&format!("{at}  {:<32}  {text}", entry.dn))?;
    }
    Ok(())
}

/// The lines of an entry without what stands before them.
pub(crate) fn texts(entry: &Entry) -> impl Iterator<Item = String> {
    let before = format!("{:<32} ", entry.dn);
    let is_leveled = matches!(entry.body, Body::Leveled(_));
    let full = render::full(entry);
    let lines: Vec<_> = full.lines().map(|line| line.strip_prefix(&before).unwrap_or(line)).collect();
    let text = |line: &str| match line.split_once(if is_leveled { "] " } else { " " }) {
        Some((_, text)) => text.to_owned(),
        None => String::new(),
    };
    lines.into_iter().map(text).collect::<Vec<_>>().into_iter()
}
