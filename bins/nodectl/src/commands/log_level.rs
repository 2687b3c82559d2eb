//! `log-level`: minimum levels of log entries.

use nodekeel_logtree::Level;
use nodekeel_node::client::{level_from_wire, level_to_wire};
use nodekeel_node::v1::{self, LogLevelsRequest, SetLogLevelRequest};
use serde::Serialize;

use crate::api_client::ApiClient;
use crate::completion::complete_dn;
use crate::error::CommandError;
use crate::output::{Printer, TextStyle, escape_control};

/// Show or set minimum levels of log entries
///
/// Without a DN, lists the levels that are set, and how many entries were not kept because of them. A level holds for
/// a DN and everything below it that has no other, until noded exits; the key `log.levels` lasts. Entries below it
/// are not kept. Raw lines have no level, and are kept.
#[derive(Debug, clap::Args)]
pub(crate) struct LogLevelArgs {
    /// Name in the tree, like root.etcd or etcd
    ///
    /// "" is the whole log.
    #[arg(add = complete_dn())]
    dn: Option<String>,
    /// Minimum level to keep
    #[arg(conflicts_with = "reset")]
    level: Option<Level>,
    /// Return to the level of the configuration
    ///
    /// Without a DN, for all.
    #[arg(long)]
    reset: bool,
}

/// The level of one DN.
#[derive(Debug, Serialize)]
struct LogLevelView {
    dn: String,
    /// Absent if none is set for it or above it.
    level: Option<&'static str>,
    /// The DN for which it is set.
    set_for: Option<String>,
    /// True if the configuration has this level for that DN.
    configured: bool,
    /// Entries that were not kept because of a level.
    suppressed: u64,
}

impl From<v1::LogLevel> for LogLevelView {
    fn from(row: v1::LogLevel) -> Self {
        Self {
            level: level_from_wire(row.level()).map(Level::as_str),
            dn: row.dn,
            set_for: row.set_for,
            configured: row.configured,
            suppressed: row.suppressed,
        }
    }
}

impl LogLevelView {
    /// The origin of the level, and the DN for which it is set if that is another one.
    fn source(&self) -> String {
        let source = if self.configured { "configuration" } else { "request" };
        match &self.set_for {
            None => "-".to_owned(),
            Some(dn) if *dn == self.dn => source.to_owned(),
            Some(dn) => format!("{source} for {}", shown_dn(dn)),
        }
    }

    fn sentence(&self) -> String {
        let dn = shown_dn(&self.dn);
        let kept = match self.level {
            None => format!("{dn}: no minimum level is set"),
            Some(level) => format!("{dn}: minimum level {level} ({})", self.source()),
        };
        match self.suppressed {
            0 => kept,
            1 => format!("{kept}; 1 entry was not kept"),
            count => format!("{kept}; {count} entries were not kept"),
        }
    }
}

fn shown_dn(dn: &str) -> String {
    if dn.is_empty() { "the whole log".to_owned() } else { escape_control(dn) }
}

impl LogLevelArgs {
    pub(crate) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        let Self { dn, level, reset } = self;
        let dn = api.resolve_optional(dn).await?;
        let answer = if reset || level.is_some() {
            // `Unspecified` asks for a reset.
            let level = level.map_or(v1::Level::Unspecified, level_to_wire).into();
            let request = SetLogLevelRequest { dn: dn.clone(), level };
            api.call(async |client| client.set_log_level(request).await).await?
        } else {
            let request = LogLevelsRequest { dn: dn.clone() };
            api.call(async |client| client.log_levels(request).await).await?
        };
        let rows: Vec<_> = answer.levels.into_iter().map(LogLevelView::from).collect();
        match (&rows[..], dn) {
            // A request for one DN is answered by one object or sentence, any other by a list.
            ([row], Some(_)) if printer.is_json => Ok(printer.print_json(row)?),
            ([row], Some(_)) => {
                printer.print_line(&row.sentence())?;
                match level {
                Some(_) => Ok(printer.print_line(
                    "  until noded exits; the key `log.levels` lasts. Raw lines have no level, and are kept",
                )?),
                None => Ok(()),
            }
            }
            _ if printer.is_json => Ok(printer.print_json(&rows)?),
            ([], _) => Ok(printer.print_line("no minimum levels are set")?),
            _ => print_table(&rows, printer),
        }
    }
}

fn print_table(rows: &[LogLevelView], printer: &mut Printer) -> Result<(), CommandError> {
    let cells = |row: &LogLevelView| {
        let level = row.level.unwrap_or("-").to_owned();
        [shown_dn(&row.dn), level, format!("{:>8}", row.suppressed), row.source()]
    };
    let rows: Vec<_> = rows.iter().map(|row| (TextStyle::Plain, cells(row))).collect();
    Ok(printer.print_table(["DN", "LEVEL", "NOT KEPT", "SET BY"], &rows)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(dn: &str, level: Option<Level>, set_for: Option<&str>, configured: bool) -> LogLevelView {
        LogLevelView::from(v1::LogLevel {
            dn: dn.into(),
            level: level.map_or(v1::Level::Unspecified, level_to_wire).into(),
            set_for: set_for.map(str::to_owned),
            configured,
            suppressed: 0,
        })
    }

    #[test]
    fn a_level_is_described_with_who_has_set_it_and_where() {
        for (view, suppressed, text) in [
            (view("a", None, None, false), 0, "a: no minimum level is set"),
            (view("a", Some(Level::Warn), Some("a"), true), 0, "a: minimum level warn (configuration)"),
            (
                view("a.b", Some(Level::Debug), Some("a"), false),
                1,
                "a.b: minimum level debug (request for a); 1 entry was not kept",
            ),
            (
                view("a.b", Some(Level::Fatal), Some(""), true),
                12,
                "a.b: minimum level fatal (configuration for the whole log); 12 entries were not kept",
            ),
        ] {
            assert_eq!(LogLevelView { suppressed, ..view }.sentence(), text);
        }
    }
}
