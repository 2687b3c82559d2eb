//! `health`: what is not well, since when, waiting for whom, and what to type.

use std::time::{Duration, SystemTime};

use nodekeel_node::v1::health_condition::Severity;
use nodekeel_node::v1::{HealthCondition, HealthRequest, HealthResponse};
use serde::Serialize;
use tokio::time::timeout;
use unicode_width::UnicodeWidthStr as _;

use crate::api_client::{ApiClient, MessageStream};
use crate::cli::HealthArgs;
use crate::command_error::CommandError;
use crate::output::{Printer, TextStyle, escape_control};
use crate::time::{format_age, format_rfc3339};

/// Timeout of the question: noded waits 4.5 s for a part that hangs.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(10);

/// Longer cells of all columns but the last are not padded: they move the rest of their line to the right.
const MAX_PADDED_WIDTH: usize = 100;

/// The health of the node.
#[derive(Debug, Serialize)]
pub(crate) struct HealthView {
    pub(crate) healthy: bool,
    pub(crate) conditions: Vec<ConditionView>,
}

/// What is not well.
#[derive(Debug, Serialize)]
pub(crate) struct ConditionView {
    part: String,
    severity: &'static str,
    pub(crate) object: String,
    problem: String,
    since: Option<String>,
    waiting_for: Option<String>,
    hint: Option<String>,
    #[serde(skip)]
    since_time: Option<SystemTime>,
}

impl From<HealthResponse> for HealthView {
    fn from(health: HealthResponse) -> Self {
        let conditions = health.conditions.into_iter().map(ConditionView::from).collect();
        Self { healthy: health.healthy, conditions }
    }
}

impl From<HealthCondition> for ConditionView {
    fn from(condition: HealthCondition) -> Self {
        let since_time: Option<SystemTime> = condition.since.and_then(|time| time.try_into().ok());
        let non_empty = |text: String| Some(text).filter(|text| !text.is_empty());
        Self {
            severity: match condition.severity() {
                Severity::Warning => "warning",
                Severity::Problem | Severity::Unspecified => "problem",
            },
            part: condition.part,
            object: condition.object,
            problem: condition.problem,
            since: since_time.map(format_rfc3339),
            waiting_for: non_empty(condition.waiting_for),
            hint: non_empty(condition.hint),
            since_time,
        }
    }
}

impl ConditionView {
    /// What is wrong with what.
    pub(crate) fn text(&self) -> String {
        let severity = if self.severity == "warning" { "warning: " } else { "" };
        escape_control(&format!("{severity}{}: {}", self.object, self.problem))
    }

    pub(crate) fn hint(&self) -> Option<String> {
        self.hint.as_deref().map(escape_control)
    }

    pub(crate) fn style(&self) -> TextStyle {
        if self.severity == "warning" { TextStyle::Pending } else { TextStyle::Bad }
    }

    fn cells(&self) -> [String; 5] {
        let since = self.since_time.map_or_else(|| "-".to_owned(), format_age);
        let waiting_for = self.waiting_for.as_deref().map_or_else(|| "-".to_owned(), escape_control);
        [escape_control(&self.part), self.text(), since, waiting_for, self.hint().unwrap_or_default()]
    }
}

impl HealthView {
    /// A line about all conditions, and its style.
    fn summary(&self) -> (String, TextStyle) {
        let count = |severity: &str, name: &str| match self
            .conditions
            .iter()
            .filter(|condition| condition.severity == severity)
            .count()
        {
            0 => None,
            1 => Some(format!("1 {name}")),
            count => Some(format!("{count} {name}s")),
        };
        let counts: Vec<_> =
            [count("problem", "problem"), count("warning", "warning")].into_iter().flatten().collect();
        match (self.healthy, counts.is_empty()) {
            (true, true) => ("healthy".to_owned(), TextStyle::Good),
            (true, false) => (format!("healthy, with {}", counts.join(", ")), TextStyle::Good),
            (false, _) => (format!("not healthy: {}", counts.join(", ")), TextStyle::Bad),
        }
    }

    /// The error, and with it the exit code, of a node that is not healthy.
    pub(crate) fn to_result(&self) -> Result<(), CommandError> {
        if self.healthy { Ok(()) } else { Err(CommandError::NotHealthy) }
    }
}

pub(crate) async fn show_health(
    api: &mut ApiClient,
    args: HealthArgs,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    let health = match args.wait {
        None => read_health(api).await?,
        Some(limit) => wait_until_healthy(api, limit).await?,
    };
    print_health(&health, printer)?;
    health.to_result()
}

pub(crate) async fn read_health(api: &mut ApiClient) -> Result<HealthView, CommandError> {
    api.raise_timeout(HEALTH_TIMEOUT);
    Ok(api.call(async |client| client.health(HealthRequest {}).await).await?.into())
}

/// The first health without a problem; after this time the last one.
async fn wait_until_healthy(
    api: &mut ApiClient,
    limit: Option<Duration>,
) -> Result<HealthView, CommandError> {
    let mut stream = api.follow_stream(async |client| client.watch_health(HealthRequest {}).await).await?;
    let mut last = None;
    match limit {
        None => follow_health(&mut stream, &mut last).await?,
        Some(limit) => match timeout(limit, follow_health(&mut stream, &mut last)).await {
            Ok(ended) => ended?,
            Err(_) if last.is_none() => return Err(CommandError::Timeout { timeout: limit }),
            Err(_) => {}
        },
    }
    last.ok_or(CommandError::ConnectionLost)
}

async fn follow_health(
    stream: &mut MessageStream<HealthResponse>,
    last: &mut Option<HealthView>,
) -> Result<(), CommandError> {
    while !last.as_ref().is_some_and(|health| health.healthy) {
        match stream.next_message().await? {
            Some(health) => *last = Some(health.into()),
            None => return Err(CommandError::ConnectionLost),
        }
    }
    Ok(())
}

fn print_health(health: &HealthView, printer: &mut Printer) -> Result<(), CommandError> {
    if printer.is_json {
        return Ok(printer.print_json(health)?);
    }
    let (summary, style) = health.summary();
    printer.print_line(&printer.style_text(style, &summary))?;
    if health.conditions.is_empty() {
        return Ok(());
    }
    let header = ["PART", "PROBLEM", "SINCE", "WAITING FOR", "WHAT TO TYPE"].map(str::to_owned);
    let rows: Vec<_> = health.conditions.iter().map(ConditionView::cells).collect();
    let widths = column_widths(&header, &rows);
    printer.print_line(&printer.style_text(TextStyle::Strong, &format_row(&header, &widths)))?;
    for (condition, cells) in health.conditions.iter().zip(&rows) {
        printer.print_line(&printer.style_text(condition.style(), &format_row(cells, &widths)))?;
    }
    Ok(())
}

fn column_widths(header: &[String; 5], rows: &[[String; 5]]) -> [usize; 5] {
    std::array::from_fn(|column| {
        let cells = rows.iter().chain(std::iter::once(header)).map(|row| row[column].width());
        cells.max().unwrap_or_default().min(MAX_PADDED_WIDTH)
    })
}

fn format_row(cells: &[String; 5], widths: &[usize; 5]) -> String {
    let padded = cells.iter().zip(widths).map(|(cell, width)| {
        let padding = width.saturating_sub(cell.width());
        format!("{cell}{:padding$}", "")
    });
    padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn condition(severity: Severity, object: &str, hint: &str) -> HealthCondition {
        HealthCondition {
            part: "service".into(),
            severity: severity.into(),
            object: object.into(),
            problem: "is not ready".into(),
            hint: hint.into(),
            ..HealthCondition::default()
        }
    }

    fn view(healthy: bool, conditions: Vec<HealthCondition>) -> HealthView {
        HealthResponse { healthy, conditions }.into()
    }

    #[test]
    fn the_summary_counts_problems_and_warnings() {
        let problem = || condition(Severity::Problem, "root.a", "");
        let warning = || condition(Severity::Warning, "clock", "");
        for (health, summary) in [
            (view(true, vec![]), "healthy"),
            (view(true, vec![warning()]), "healthy, with 1 warning"),
            (view(false, vec![problem()]), "not healthy: 1 problem"),
            (
                view(false, vec![problem(), problem(), warning(), warning()]),
                "not healthy: 2 problems, 2 warnings",
            ),
        ] {
            assert_eq!(health.summary().0, summary);
            assert_eq!(health.to_result().is_ok(), health.healthy);
        }
    }

    #[test]
    fn the_table_is_aligned_and_has_no_control_characters() {
        let health = view(
            false,
            vec![
                condition(Severity::Problem, "root.service.日本", "`nodectl status root.service.日本`"),
                condition(Severity::Warning, "a\u{9b}", ""),
            ],
        );
        let rows: Vec<_> = health.conditions.iter().map(ConditionView::cells).collect();
        let widths = column_widths(&["", "", "", "", ""].map(str::to_owned), &rows);
        let lines: Vec<_> = rows.iter().map(|row| format_row(row, &widths)).collect();
        assert_eq!(
            lines,
            [
                "service  root.service.日本: is not ready  -  -  `nodectl status root.service.日本`",
                "service  warning: a\\u{9b}: is not ready   -  -",
            ]
        );
    }

    #[test]
    fn json_has_null_for_what_is_unknown() {
        let json = serde_json::to_value(view(true, vec![condition(Severity::Warning, "clock", "")]));
        assert_eq!(
            json.expect("serializable"),
            serde_json::json!({ "healthy": true, "conditions": [{
                "part": "service", "severity": "warning", "object": "clock", "problem": "is not ready",
                "since": null, "waiting_for": null, "hint": null,
            }] })
        );
    }
}
