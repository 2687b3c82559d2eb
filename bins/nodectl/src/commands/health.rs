//! `health`: the problems of the node, since when they exist, what they wait for, and how to fix them.

use std::time::{Duration, SystemTime};

use nodekeel_node::v1::health_condition::Severity;
use nodekeel_node::v1::{HealthCondition, HealthRequest, HealthResponse};
use serde::Serialize;
use tokio::time::timeout;

use crate::api_client::{ApiClient, MessageStream};
use crate::error::CommandError;
use crate::output::{Printer, TextStyle, escape_control};
use crate::time::{format_age, format_rfc3339, parse_duration};
use crate::wire::{non_empty, system_time};

/// Timeout of the question: noded waits 4.5 s for a part that hangs.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(10);

/// Show problems and how to fix them
///
/// Every part of the node answers: what is wrong, since when, waiting for whom. Exits with 6 if something is a
/// problem; warnings alone are healthy.
#[derive(Debug, clap::Args)]
pub(crate) struct HealthArgs {
    /// Wait until the node is healthy
    ///
    /// At most this long, like 30s or 5m; without a duration, as long as it takes.
    #[arg(short, long, value_name = "DURATION", value_parser = parse_duration, num_args = 0..=1)]
    wait: Option<Option<Duration>>,
}

#[derive(Debug, Serialize)]
pub(crate) struct HealthView {
    pub(crate) healthy: bool,
    pub(crate) conditions: Vec<ConditionView>,
}

/// A problem, or a warning.
#[derive(Debug, Serialize)]
pub(crate) struct ConditionView {
    part: String,
    severity: &'static str,
    pub(crate) object: String,
    problem: String,
    since: Option<String>,
    /// How often it has begun; `null` from a node that does not count.
    count: Option<u32>,
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
        let since_time = system_time(condition.since);
        Self {
            severity: match condition.severity() {
                Severity::Warning => "warning",
                // The severity of a newer node that this nodectl does not know counts as the worse one.
                Severity::Problem | Severity::Unspecified => "problem",
            },
            part: condition.part,
            object: condition.object,
            problem: condition.problem,
            since: since_time.map(format_rfc3339),
            count: Some(condition.count).filter(|count| *count > 0),
            waiting_for: non_empty(condition.waiting_for),
            hint: non_empty(condition.hint),
            since_time,
        }
    }
}

impl ConditionView {
    /// The object and its problem.
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

impl HealthArgs {
    pub(crate) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        let health = match self.wait {
            None => read_health(api).await?,
            Some(limit) => wait_until_healthy(api, limit).await?,
        };
        print_health(&health, printer)?;
        health.to_result()
    }
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
            // Its first assessment takes longer, as while a disk hangs.
            Err(_) if last.is_none() => {
                drop(stream);
                return read_health(api).await;
            }
            // The last health before the time was up is the result.
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
    let header = ["PART", "PROBLEM", "SINCE", "WAITING FOR", "WHAT TO TYPE"];
    let rows: Vec<_> =
        health.conditions.iter().map(|condition| (condition.style(), condition.cells())).collect();
    Ok(printer.print_table(header, &rows)?)
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
    fn a_row_has_no_control_characters_and_a_dash_for_what_is_unknown() {
        let health = view(false, vec![condition(Severity::Warning, "a\u{9b}", "")]);
        assert_eq!(
            health.conditions[0].cells(),
            ["service", "warning: a\\u{9b}: is not ready", "-", "-", ""]
        );
    }

    #[test]
    fn health_waits_for_a_duration_or_without_a_limit() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: HealthArgs,
        }
        let wait = |args: &[&str]| {
            <Line as clap::Parser>::try_parse_from([&["health"], args].concat()).unwrap().args.wait
        };
        assert_eq!(wait(&[]), None);
        assert_eq!(wait(&["--wait"]), Some(None));
        assert_eq!(wait(&["--wait", "90s"]), Some(Some(Duration::from_secs(90))));
        assert_eq!(wait(&["-w", "2m"]), Some(Some(Duration::from_secs(120))));
        assert!(parse_duration("-1s").is_err() && parse_duration("soon").is_err());
    }

    #[test]
    fn json_has_null_for_what_is_unknown() {
        let json = serde_json::to_value(view(true, vec![condition(Severity::Warning, "clock", "")]));
        assert_eq!(
            json.expect("serializable"),
            serde_json::json!({ "healthy": true, "conditions": [{
                "part": "service", "severity": "warning", "object": "clock", "problem": "is not ready",
                "since": null, "count": null, "waiting_for": null, "hint": null,
            }] })
        );
    }
}
