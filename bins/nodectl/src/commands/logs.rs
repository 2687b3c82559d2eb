//! `logs`: kept and new log entries.

use std::time::{Duration, SystemTime};

use nodekeel_logtree::{EntryBody, Level, LogCursor, LogEntry, render};
use nodekeel_node::client::{NodeClient, level_to_wire};
use nodekeel_node::v1;

use crate::api_client::ApiClient;
use crate::completion::complete_dn;
use crate::error::CommandError;
use crate::output::{Printer, TextStyle};
use crate::time::format_rfc3339;

/// Show log entries
#[derive(Debug, clap::Args)]
pub(crate) struct LogsArgs {
    /// Name in the tree, like root.etcd or etcd
    ///
    /// Default: the whole log.
    #[arg(add = complete_dn())]
    dn: Option<String>,
    /// Wait for new entries
    #[arg(short, long)]
    follow: bool,
    /// Include everything below the DN
    #[arg(short, long)]
    children: bool,
    /// Only the newest N kept entries
    ///
    /// 0 with -f shows only new entries.
    #[arg(short = 'n', long, value_name = "N")]
    newest: Option<u64>,
    /// Minimum level (hides raw lines)
    #[arg(long, value_name = "LEVEL", conflicts_with = "raw")]
    min_level: Option<Level>,
    /// Only raw lines
    #[arg(long, conflicts_with = "leveled")]
    raw: bool,
    /// Only entries with a level
    #[arg(long)]
    leveled: bool,
    /// Only entries since a time or duration ago
    ///
    /// RFC 3339 like 2026-11-21T11:23:42Z, or like 10m or 2h30m.
    #[arg(short, long, value_name = "TIME", value_parser = parse_since)]
    since: Option<SystemTime>,
    /// Only entries that match a regular expression
    ///
    /// In the message or raw line, or in a field, as name=value.
    #[arg(short, long, value_name = "PATTERN")]
    grep: Option<String>,
    /// Only entries with this field (repeatable)
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_field)]
    field: Vec<(String, String)>,
    /// Only entries after a cursor
    #[arg(long, value_name = "CURSOR")]
    cursor: Option<LogCursor>,
    /// Print the cursor after the last entry
    #[arg(long, conflicts_with = "follow")]
    show_cursor: bool,
}

fn parse_since(text: &str) -> Result<SystemTime, String> {
    if let Ok(time) = text.parse::<jiff::Timestamp>() {
        return Ok(time.into());
    }
    let ago = text.parse::<jiff::SignedDuration>().ok().and_then(|ago| Duration::try_from(ago).ok());
    ago.and_then(|ago| SystemTime::now().checked_sub(ago))
        .ok_or_else(|| "use a time like 2026-11-21T11:23:42Z or a duration like 10m".to_owned())
}

fn parse_field(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("use NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

impl LogsArgs {
    pub(crate) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        let show_cursor = self.show_cursor;
        let dn = api.resolve_optional(self.dn.clone()).await?;
        let request = logs_request(Self { dn, ..self });
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
            // A later call with the last cursor continues where this output ends.
            cursor = chunk.cursor;
            printer.flush()?;
        }
        if show_cursor && !cursor.is_empty() {
            let text = format!("-- cursor: {cursor}");
            printer.print_result(&serde_json::json!({ "cursor": cursor }), &text)?;
        }
        Ok(())
    }
}

fn logs_request(args: LogsArgs) -> v1::LogsRequest {
    // clap lets at most one of the two through.
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
            // The further lines of an entry have no level of their own.
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
    // The rendered lines start with the DN, for which the caller has a column.
    let before = format!("{:<32} ", entry.dn);
    let is_leveled = matches!(entry.body, EntryBody::Leveled(_));
    let full = render::full_text(entry);
    let lines: Vec<_> = full.lines().map(|line| line.strip_prefix(&before).unwrap_or(line)).collect();
    // The header of a leveled line ends with `] `. A raw line has a single letter in its place.
    let text = |line: &str| match line.split_once(if is_leveled { "] " } else { " " }) {
        Some((_, text)) => text.to_owned(),
        None => String::new(),
    };
    lines.into_iter().map(text).collect::<Vec<_>>().into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_selected_since_a_time_or_for_a_duration() {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_259_022);
        assert_eq!(parse_since("2026-11-21T11:03:42Z"), Ok(time));
        let before = SystemTime::now();
        let ago = |text: &str| before.duration_since(parse_since(text).unwrap()).unwrap().as_secs();
        assert!((599..=600).contains(&ago("10m")) && (8999..=9000).contains(&ago("2h30m")));
        for text in ["", "10", "-10m", "yesterday", "2026-11-21"] {
            assert!(parse_since(text).is_err(), "{text}");
        }
        assert_eq!(parse_field("a=b=c"), Ok(("a".to_owned(), "b=c".to_owned())));
        assert!(parse_field("a").is_err());
    }
}
