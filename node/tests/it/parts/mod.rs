//! A node of parts that are not shipped: one part is one file and one line, `.with(NtpPart)`.

mod configuration;
mod control_api;
mod dependencies;
mod health;
mod lifecycle;
mod panics;

use std::fmt;
use std::path::PathBuf;

use nodekeel_localstorage::tree::LayoutDir;
use nodekeel_node::config::{ConfigSection, ConfigViolation, NodedConfig};
use nodekeel_node::node::{BuildError, NodeBuilder};
use nodekeel_node::part::{
    NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable,
};
use nodekeel_node::plan::PartPlanner;
use nodekeel_node::v1::TreeRequest;
use nodekeel_supervisor::process::{Process, Readiness};
use serde::Deserialize;
use testbed::ScratchDir;

use crate::harness::{TestNode, node_builder, service_config};

nodekeel_localstorage::layout! {
    /// On the data volume: the part of ntp.
    struct NtpLayout {
        /// Its drift file.
        ntp: LayoutDir = "ntp", 0o700;
    }
}

/// `[ntp]`
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct NtpConfig {
    server: String,
    #[serde(default)]
    port: Option<u16>,
}

struct NtpPart;

impl Part for NtpPart {
    fn name(&self) -> &str {
        "ntp"
    }

    fn sections(&self) -> Vec<ConfigSection> {
        vec![ConfigSection::new::<NtpConfig>("ntp")]
    }

    fn check(&self, config: &NodedConfig) -> Result<(), ConfigViolation> {
        match config.section::<NtpConfig>("ntp") {
            Some(ntp) if ntp.server.is_empty() => {
                Err(ConfigViolation::new("ntp.server", "must name a server"))
            }
            _ => Ok(()),
        }
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let Some(config) = planner.config().section::<NtpConfig>("ntp").cloned() else { return };
        let (binary, skipped) = planner.find_program("ntp", Some("/bin/sh".as_ref()), "install a shell");
        let directory = planner.plan_layout::<NtpLayout>().unwrap().ntp.path().to_owned();
        let plan = NtpPlan { binary, directory, config };
        planner.add(PlannedService::new("root.ntp", plan).layout::<NtpLayout>().skip(skipped));
    }
}

#[derive(Debug)]
struct NtpPlan {
    binary: PathBuf,
    directory: PathBuf,
    config: NtpConfig,
}

impl fmt::Display for NtpPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the time of {}, drift in {}", self.config.server, self.directory.display())
    }
}

impl PlannedRunnable for NtpPlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        node.extensions().insert(self.config.clone());
        let binary = self.binary.clone();
        Ok(node.on_volume(move |volume| {
            let placed: NtpLayout = volume.create_layout()?;
            let script = format!("echo 1.5 > {}/drift && exec sleep 1000", placed.ntp.path().display());
            let process = Process::new(&binary).args(["-c", &script]).ready_when(Readiness::on_start());
            Ok(process.envs([("PATH", "/usr/bin:/bin")]))
        }))
    }
}

/// The builder of a node with `ntp` and without daemons.
fn ntp_node(config: &str) -> (ScratchDir, NodeBuilder) {
    let (scratch, builder) = node_builder(config);
    (scratch, builder.with(NtpPart))
}

const NTP: &str = "[ntp]\nserver = \"time.example\"\n";

#[tokio::test(flavor = "multi_thread")]
async fn a_part_of_the_program_is_planned_run_and_shown_like_a_shipped_one() {
    let (scratch, builder) = ntp_node(NTP);
    let shown = builder.plan().unwrap().to_string();
    assert!(shown.contains("root.ntp                 the time of time.example, drift in "), "{shown}");
    assert!(!scratch.path().join("data").exists(), "planning changes nothing");

    let (scratch, builder) =
        ntp_node(&format!("{NTP}{}", service_config("a", "sleep 1000", "depends_on = [\"ntp\"]")));
    let mut node = TestNode::start_in(scratch, builder).await;
    node.wait_ready("root.service.a").await;
    let tree = node.client.tree(TreeRequest {}).await.unwrap().into_inner();
    let names: Vec<_> = tree.nodes.iter().map(|node| node.dn.as_str()).collect();
    assert_eq!(names, ["root", "root.control", "root.storage", "root.ntp", "root.service", "root.service.a"]);
    assert!(node.scratch.path().join("data/data/ntp").is_dir());
    assert_eq!(node.node.extension::<NtpConfig>().unwrap().server, "time.example");
    node.node.shutdown().await;
}

#[track_caller]
fn assert_rejected(builder: NodeBuilder, says: &str) {
    let error = builder.plan().expect_err(says);
    assert!(matches!(error, BuildError::Config(_)), "{error:?}");
    assert!(error.to_string().contains(says), "\n is: {error}\nnot: {says}");
}
