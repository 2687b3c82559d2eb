//! The agent over an API server in memory, in virtual time.

mod claims;
mod election;
mod leases;
mod pods;
mod volumes;

use std::sync::Arc;
use std::time::Duration;

use nodekeel_provisioner::agent::{Agent, AgentConfig, AgentDeps, AgentError, AgentState};
use nodekeel_provisioner::testing::objects::{DRIVER, sample_uid, sample_volume};
use nodekeel_provisioner::testing::{FakeApi, ObjectKind};
use nodekeel_provisioner::{DriverName, SELECTED_NODE};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::harness::test_api;

const LEASE: &str = "provisionerd-agent";

struct TestAgent {
    token: CancellationToken,
    state: watch::Receiver<AgentState>,
    run: JoinHandle<Result<std::convert::Infallible, AgentError>>,
}

impl TestAgent {
    fn start(api: &FakeApi, identity: &str) -> Self {
        Self::start_with(api.client(), test_config(identity), None)
    }

    fn start_with(
        client: kube::Client,
        config: AgentConfig,
        hook: Option<Arc<dyn nodekeel_provisioner::StepHook>>,
    ) -> Self {
        let agent = Agent::new(config, AgentDeps { client, metrics: Arc::new(()), hook });
        let (token, state) = (CancellationToken::new(), agent.watch_state());
        let canceled = token.clone();
        let run = tokio::spawn(async move { agent.run_until(canceled).await });
        Self { token, state, run }
    }

    async fn wait_leading(&mut self) {
        let leading = self.state.wait_for(|state| *state == AgentState::Leading);
        tokio::time::timeout(Duration::from_secs(60), leading).await.expect("in time").expect("it runs");
    }

    async fn crash(self) {
        self.run.abort();
        let _ = self.run.await;
    }

    async fn stop(self) {
        self.token.cancel();
        assert!(matches!(self.run.await.expect("no panic"), Err(AgentError::Canceled)));
    }
}

fn test_config(identity: &str) -> AgentConfig {
    AgentConfig::new(DriverName::try_new(DRIVER).expect("a driver name"), identity)
}

/// An API server whose nodes have the driver.
fn cluster_api() -> FakeApi {
    let api = test_api();
    for node in ["node-a", "node-b"] {
        api.create_object(ObjectKind::CsiNode, csi_node(node, DRIVER));
    }
    api
}

fn csi_node(name: &str, driver: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": { "drivers": [{ "name": driver, "nodeID": name, "topologyKeys": [] }] },
    })
}

fn selected_node(api: &FakeApi, claim: &str) -> Option<String> {
    let claim = api.get_object(ObjectKind::Claim, claim)?;
    claim["metadata"]["annotations"][SELECTED_NODE].as_str().map(str::to_owned)
}

fn select(api: &FakeApi, claim: &str, node: &str) {
    api.patch_object(
        ObjectKind::Claim,
        claim,
        json!({ "metadata": { "annotations": { SELECTED_NODE: node } } }),
    );
}

/// The volume of a deleted node, in this phase.
fn volume_of_gone_node(number: u32, phase: &str, policy: &str) -> impl serde::Serialize {
    let key = DriverName::try_new(DRIVER).expect("a driver name").topology_key();
    let label = json!({ "key": key, "operator": "In", "values": ["node-z"] });
    let affinity = json!({ "required": { "nodeSelectorTerms": [{ "matchExpressions": [label] }] } });
    let spec = json!({ "nodeAffinity": affinity, "persistentVolumeReclaimPolicy": policy });
    sample_volume(number, json!({ "spec": spec, "status": { "phase": phase } }))
}

fn volume_name(number: u32) -> String {
    format!("pvc-{}", sample_uid(number))
}

fn holder(api: &FakeApi) -> Option<String> {
    let lease = api.get_object(ObjectKind::Lease, LEASE)?;
    lease["spec"]["holderIdentity"].as_str().map(str::to_owned)
}
