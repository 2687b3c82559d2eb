//! Checks deploy/agent against the program.

use std::collections::BTreeSet;

use clap::Parser as _;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use serde_json::Value;

use crate::cli::{Cli, Command};
use crate::config::DaemonConfig;

const DEPLOYMENT: &str = include_str!("../../../../deploy/agent/deployment.yaml");
const RBAC: &str = include_str!("../../../../deploy/agent/rbac.yaml");
const NODE_RBAC: &str = include_str!("../../../../deploy/rbac.yaml");
const NAMESPACE: &str = "nodekeel";

fn documents(yaml: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(yaml).expect("YAML")
}

#[test]
fn the_deployment_matches_the_programs_flags() {
    let [deployment, budget] = &documents(DEPLOYMENT)[..] else { panic!("a Deployment and its budget") };
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    let args = container["args"].as_array().expect("a list").iter().map(|arg| arg.as_str().expect("a text"));
    let args = args.map(|arg| arg.replace("$(POD_IP)", "fd00::7"));
    let cli =
        Cli::try_parse_from(std::iter::once("provisionerd".to_owned()).chain(args)).expect("valid arguments");
    let Some(Command::Agent { flags }) = cli.command else { panic!("not `agent`") };
    assert_eq!(flags.driver, DaemonConfig::default().driver);
    assert_eq!(flags.remove_volumes_of_gone_nodes, None, "only where asked");
    assert_eq!(container["ports"][0]["containerPort"], flags.listen.port());
    assert_eq!(flags.listen.to_string(), "[fd00::7]:9811", "the address that the kubelet's probes ask");
    assert_eq!(container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"], "status.podIP");
    let suggested = DEPLOYMENT.lines().find_map(|line| line.trim().strip_prefix("# - "));
    let cli = Cli::try_parse_from(["provisionerd", "agent", suggested.expect("a suggestion")]);
    assert!(cli.is_ok(), "{suggested:?}");
    let deployment: Deployment = serde_json::from_value(deployment.clone()).expect("a Deployment");
    let spec = deployment.spec.expect("a spec");
    let labels = spec.template.metadata.expect("metadata").labels.expect("labels");
    let selected = spec.selector.match_labels.expect("labels");
    assert!(selected.iter().all(|label| labels.iter().any(|other| other == label)));
    let budget: PodDisruptionBudget = serde_json::from_value(budget.clone()).expect("a budget");
    let selector = budget.spec.expect("a spec").selector.expect("a selector");
    assert_eq!(selector.match_labels, Some(selected));
}

#[test]
fn the_agents_pods_are_restricted_and_have_an_account_that_nodes_do_not() {
    let deployment = &documents(DEPLOYMENT)[0];
    let pod = &deployment["spec"]["template"]["spec"];
    let container = &pod["containers"][0]["securityContext"];
    // *Source:* Kubernetes, "Pod Security Standards", Restricted.
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    assert_eq!(container["allowPrivilegeEscalation"], false);
    assert_eq!(container["capabilities"]["drop"], serde_json::json!(["ALL"]));
    assert_eq!(container["readOnlyRootFilesystem"], true);
    assert!(pod["hostNetwork"].is_null() && pod["volumes"].is_null());
    let accounts = |yaml: &str| -> BTreeSet<String> {
        let documents = documents(yaml).into_iter();
        let accounts = documents.filter(|it| it["kind"] == "ServiceAccount");
        accounts.map(|it| it["metadata"]["name"].as_str().expect("a name").to_owned()).collect()
    };
    assert!(accounts(RBAC).contains(pod["serviceAccountName"].as_str().expect("an account")));
    assert!(accounts(RBAC).is_disjoint(&accounts(NODE_RBAC)));
    for binding in documents(RBAC).iter().filter(|it| !it["subjects"].is_null()) {
        let subjects = binding["subjects"].as_array().expect("a list");
        assert_eq!(subjects.len(), 1);
        assert_eq!(subjects[0]["name"], pod["serviceAccountName"]);
        assert_eq!(subjects[0]["namespace"], NAMESPACE);
    }
}
