//! A part that panics is an error with its name.

use std::fmt;
use std::fs;

use nodekeel_node::config::{ConfigSection, ConfigViolation, NodedConfig};
use nodekeel_node::node::NodeBuilder;
use nodekeel_node::part::{
    DependencyEntry, NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable,
};
use nodekeel_node::plan::PartPlanner;
use nodekeel_node::v1::{CheckConfigRequest, HealthRequest, ReloadConfigRequest};
use nodekeel_supervisor::Context;
use serde::Deserialize;
use testbed::ScratchDir;

use crate::harness::{NO_DAEMONS, TestNode};

/// Panics in the call that its section names.
struct WeatherPart;

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
struct WeatherConfig {
    panics_in: String,
    place: String,
}

impl WeatherConfig {
    fn of(config: &NodedConfig) -> Self {
        config.section::<Self>("weather").cloned().unwrap_or_default()
    }

    fn called(&self, call: &str) {
        assert!(self.panics_in != call, "a bug in {call}");
    }
}

impl Part for WeatherPart {
    fn name(&self) -> &str {
        "weather"
    }

    fn sections(&self) -> Vec<ConfigSection> {
        vec![ConfigSection::new::<WeatherConfig>("weather")]
    }

    fn check(&self, config: &NodedConfig) -> Result<(), ConfigViolation> {
        WeatherConfig::of(config).called("check");
        Ok(())
    }

    fn dependencies(&self, config: &NodedConfig) -> Vec<DependencyEntry> {
        WeatherConfig::of(config).called("dependencies");
        vec![DependencyEntry::of_part(self, config)]
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let config = WeatherConfig::of(planner.config());
        config.called("plan");
        planner.add(PlannedService::new("root.weather", config));
    }
}

impl fmt::Display for WeatherConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.called("fmt");
        f.write_str("a station")
    }
}

impl PlannedRunnable for WeatherConfig {
    fn prepare(&self, _: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        self.called("prepare");
        Ok(PreparedRunnable::new(|ctx: Context| async move {
            ctx.signal_ready()?;
            ctx.until_canceled().await
        }))
    }

    fn is_same(&self, new: &dyn PlannedRunnable) -> Option<bool> {
        self.called("is_same");
        nodekeel_node::part::is_equal(self, new)
    }
}

fn builder(scratch: &ScratchDir, weather: &str) -> NodeBuilder {
    let file = scratch.path().join("node.toml");
    fs::write(&file, format!("{NO_DAEMONS}[weather]\n{weather}\n")).unwrap();
    NodeBuilder::from_file(&file).unwrap().data(scratch.path().join("data")).with(WeatherPart)
}

#[tokio::test]
async fn a_part_that_panics_in_a_reload_is_named_and_the_node_stays_as_it_is() {
    let scratch = ScratchDir::new().unwrap();
    let first = builder(&scratch, "place = \"roof\"");
    let file = scratch.path().join("node.toml");
    let mut node = TestNode::start_in(scratch, first).await;
    node.wait_ready("root.weather").await;
    let text = |weather: &str| format!("{NO_DAEMONS}[weather]\n{weather}\n");
    for call in ["check", "dependencies", "plan", "is_same", "prepare"] {
        let says = format!("part weather panicked in {call}: a bug in {call}");
        let changed = text(&format!("panics_in = \"{call}\""));
        fs::write(&file, &changed).unwrap();
        let refused = node.client.reload_config(ReloadConfigRequest {}).await.unwrap_err();
        assert!(refused.message().contains(&says), "{call}: {refused}");
        let health = node.client.health(HealthRequest {}).await.unwrap().into_inner();
        let named = health.conditions.iter().find(|condition| condition.problem.contains(&says));
        assert!(named.is_some(), "{call}: {health:?}");
        // A check prepares nothing.
        if call != "prepare" {
            let request = CheckConfigRequest { file: "a".into(), text: Some(changed) };
            let refused = node.client.check_config(request).await.unwrap_err();
            assert!(refused.message().contains(&says), "{call}: {refused}");
        }
        node.wait_ready("root.weather").await;
    }
    fs::write(&file, text("place = \"cellar\"")).unwrap();
    let changes = node.client.reload_config(ReloadConfigRequest {}).await.unwrap().into_inner().changes;
    assert_eq!(changes.len(), 1, "{changes:?}");
    let health = node.client.health(HealthRequest {}).await.unwrap().into_inner();
    assert!(!health.conditions.iter().any(|condition| condition.problem.contains("panicked")), "{health:?}");
    node.node.shutdown().await;
}

#[tokio::test]
async fn a_part_that_panics_at_the_start_is_named_and_nothing_runs() {
    for call in ["check", "dependencies", "plan", "prepare"] {
        let scratch = ScratchDir::new().unwrap();
        let error = builder(&scratch, &format!("panics_in = \"{call}\"")).start().unwrap_err();
        assert_eq!(error.to_string(), format!("part weather panicked in {call}: a bug in {call}"));
        // Nothing holds the data directory.
        builder(&scratch, "").start().unwrap().shutdown().await;
    }
}
