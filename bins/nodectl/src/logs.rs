//! `logs`: kept and new log entries.

use nodekeel_logtree::{EntryBody, Level, LogEntry, render};
use nodekeel_node::client::{NodeClient, level_to_wire};
use nodekeel_node::v1;

use crate::api_client::ApiClient;
use crate::cli::LogsArgs;
use crate::command_error::CommandError;
use crate::output::{Printer, TextStyle};
use crate::time::format_rfc3339;

pub(crate) async fn show_logs(
    api: &mut ApiClient,
    args: LogsArgs,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    let show_cursor = args.show_cursor;
    let request = logs_request(args);
    let mut cursor = request.cursor.clone();
    let follow = request.follow;
    let call = async |client: &mut NodeClient| client.logs(request).await;
    let mut chunks = if follow { api.follow_stream(call).await? } else { api.open_stream(call).await? };
    while let Some(chunk) = chunks.next_message().await? {
        for entry in chunk.entries {
            let entry = LogEntry::try_from(entry)?;
            if printer.is_json {
                printer.print_line(&render::json_object(&entry))?;
            } else {
                print_entry(&entry, printer)?;
            }
        }
        cursor = chunk.cursor;
        printer.flush()?;
    }
    match show_cursor && !cursor.is_empty() {
        true if printer.is_json => Ok(printer.print_json(&serde_json::json!({ "cursor": cursor }))?),
        true => Ok(printer.print_line(&format!("-- cursor: {cursor}"))?),
        false => Ok(()),
    }
}

fn logs_request(args: LogsArgs) -> v1::LogsRequest {
    let kind = match (args.raw, args.leveled) {
        (true, _) => v1::logs_request::Kind::Raw,
        (_, true) => v1::logs_request::Kind::Leveled,
        _ => v1::logs_request::Kind::Unspecified,
    };
    v1::LogsRequest {
        // Without a DN: everything, including the supervisor's log, which is not in the tree.
        children: args.children || args.dn.is_none(),
        dn: args.dn.unwrap_or_default(),
        backlog: args.newest,
        follow: args.follow,
        min_level: args.min_level.map_or(v1::Level::Unspecified, level_to_wire).into(),
        kind: kind.into(),
        since: args.since.map(Into::into),
        pattern: args.grep.unwrap_or_default(),
        fields: args.field.into_iter().map(|(name, value)| v1::FieldMatch { name, value }).collect(),
        cursor: args.cursor.map(|cursor| cursor.to_string()).unwrap_or_default(),
    }
}

/// Prints an entry for people.
pub(crate) fn print_entry(entry: &LogEntry, printer: &mut Printer) -> Result<(), CommandError> {
    let style = match &entry.body {
        EntryBody::Leveled(leveled) => match leveled.level {
            Level::Error | Level::Fatal => TextStyle::Bad,
            Level::Warn => TextStyle::Pending,
            Level::Trace | Level::Debug => TextStyle::Faint,
            Level::Info => TextStyle::Plain,
        },
        EntryBody::Dropped(_) => TextStyle::Bad,
        _ => TextStyle::Plain,
    };
    let at = format_rfc3339(entry.time);
    for (index, text) in entry_texts(entry).enumerate() {
        let letter = match &entry.body {
            _ if index > 0 => '|',
            EntryBody::Leveled(leveled) => leveled.level.letter(),
            EntryBody::Raw(_) => 'R',
            _ => '-',
        };
        let text = printer.style_text(style, &format!("{letter} {text}"));
        printer.print_line(&format!("{at}  {:<32}  {text}", entry.dn))?;
    }
    Ok(())
}

/// The lines of an entry without their prefixes.
pub(crate) fn entry_texts(entry: &LogEntry) -> impl Iterator<Item = String> {
    let before = format!("{:<32} ", entry.dn);
    let is_leveled = matches!(entry.body, EntryBody::Leveled(_));
    let full = render::full_text(entry);
    let lines: Vec<_> = full.lines().map(|line| line.strip_prefix(&before).unwrap_or(line)).collect();
    let text = |line: &str| match line.split_once(if is_leveled { "] " } else { " " }) {
        Some((_, text)) => text.to_owned(),
        None => String::new(),
    };
    lines.into_iter().map(text).collect::<Vec<_>>().into_iter()
}
