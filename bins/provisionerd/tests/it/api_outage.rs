//! An API server that is down for minutes.

use std::time::{Duration, Instant};

use nodekeel_provisioner::STORAGE_PROVISIONER;
use serde_json::json;
use testbed::KubeDaemon;

use crate::client_cluster::{
    self as cluster, TestDaemon, claim_manifest, create_claim, volumes_api, wait_bound, wait_objects,
};

/// Longer than each backoff of a client that starts at a second.
const OUTAGE: Duration = Duration::from_secs(150);

/// Within this a claim is bound that is created once the API server answers again.
const BOUND_WITHIN: Duration = Duration::from_secs(3);

#[test]
#[ignore = "soak: the API server is down for 150 s"]
fn a_claim_is_bound_at_once_after_an_outage_of_the_api_server() {
    let mut kube = cluster::start_control_plane();
    let runtime = cluster::test_runtime();
    let client = runtime.block_on(cluster::admin_client(&kube));
    let daemon = TestDaemon::new(&cluster::account_kubeconfig(&kube), "node-a".to_owned());
    // The controller-manager would add the provisioner, but it is stopped when the second claim is created.
    let create = async |name: &str| {
        let ours = json!({ "metadata": { "annotations": { STORAGE_PROVISIONER: cluster::DRIVER } } });
        create_claim(&client, claim_manifest(name, Some(&daemon.node), ours)).await;
    };
    let _running = runtime.block_on(async {
        let running = daemon.start(&[]);
        create("before").await;
        wait_bound(&client, "before").await;
        running
    });

    kube.kill_daemon(KubeDaemon::Apiserver);
    runtime.block_on(async { tokio::time::sleep(OUTAGE).await });
    // Without its Lease the controller-manager exits during an outage. Started again, it binds at once; one that stays, as
    // here without an election, waits up to a minute until it watches again.
    kube.stop_daemon(KubeDaemon::ControllerManager).expect("it stops");
    kube.launch_daemon(KubeDaemon::Apiserver).expect("it starts");
    let answers = Instant::now();
    runtime.block_on(create("during"));
    runtime.block_on(wait_objects(volumes_api(&client), "", |found| found.len() == 2));
    let provisioned = answers.elapsed();
    kube.launch_daemon(KubeDaemon::ControllerManager).expect("it starts");
    runtime.block_on(wait_bound(&client, "during"));

    runtime.block_on(create("after"));
    let created = Instant::now();
    runtime.block_on(wait_bound(&client, "after"));
    let bound = created.elapsed();
    println!(
        "volume provisioned {provisioned:?} after the API server answers, the next claim bound after {bound:?}"
    );
    assert!(provisioned <= BOUND_WITHIN && bound <= BOUND_WITHIN, "{}", daemon.log_text());
}
