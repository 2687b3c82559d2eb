//! An API server that is down for minutes.

use std::time::{Duration, Instant};

use nodekeel_provisioner::STORAGE_PROVISIONER;
use serde_json::json;
use testbed::KubeDaemon;

use crate::cluster::{DRIVER, TestDaemon, start_control_plane, wait_bound, wait_for};

/// Longer than each backoff of a client that starts at a second.
const OUTAGE: Duration = Duration::from_secs(150);

/// Within this a claim is bound that is created once the API server answers again.
const BOUND_WITHIN: Duration = Duration::from_secs(3);

#[test]
#[ignore = "soak: the API server is down for 150 s"]
fn a_claim_is_bound_at_once_after_an_outage_of_the_api_server() {
    let mut kube = start_control_plane();
    let daemon = TestDaemon::new(&kube, "node-a");
    let mut running = daemon.start(&[], &[]);
    // The controller-manager would add the provisioner, but it is stopped when the second claim is created.
    let ours = json!({ "metadata": { "annotations": { STORAGE_PROVISIONER: DRIVER } } });
    daemon.create_claim(&kube, "before", ours.clone());
    wait_bound(&kube, "before");

    kube.kill_daemon(KubeDaemon::Apiserver);
    assert_eq!(running.wait_for_exit(OUTAGE).expect("a status"), None, "it runs on");
    // Without its Lease the controller-manager exits during an outage. Started again, it binds at once; one that stays, as
    // here without an election, waits up to a minute until it watches again.
    kube.stop_daemon(KubeDaemon::ControllerManager).expect("it stops");
    kube.launch_daemon(KubeDaemon::Apiserver).expect("it starts");
    let answers = Instant::now();
    let volume = daemon.create_claim(&kube, "during", ours.clone());
    wait_for(&kube, "pv", &volume, |_| true);
    let provisioned = answers.elapsed();
    kube.launch_daemon(KubeDaemon::ControllerManager).expect("it starts");
    wait_bound(&kube, "during");

    daemon.create_claim(&kube, "after", ours);
    let created = Instant::now();
    wait_bound(&kube, "after");
    let bound = created.elapsed();
    assert!(provisioned <= BOUND_WITHIN && bound <= BOUND_WITHIN, "{provisioned:?}, {bound:?}");
}
