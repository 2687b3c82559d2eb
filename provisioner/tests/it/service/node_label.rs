//! The label that the affinity of volumes refers to, while the provisioner runs.

use std::time::Duration;

use nodekeel_provisioner::testing::objects::{DRIVER, NODE, sample_identity};
use nodekeel_provisioner::testing::{MemStore, ObjectKind};
use nodekeel_provisioner::{DriverName, Provisioner, ProvisionerConfig};
use serde_json::{Value, json};

use super::harness::{RunningProvisioner, test_api, test_deps};

async fn wait_reported(provisioner: &Provisioner, is_reported: bool) -> Option<String> {
    let wait = async {
        while provisioner.check_node().is_some() != is_reported {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait).await.expect("within the timeout");
    provisioner.check_node()
}

#[tokio::test(start_paused = true)]
async fn a_label_that_is_changed_is_reported_until_it_is_repaired() {
    let api = test_api();
    let mut deps = test_deps(&api, &MemStore::default());
    let (_registered, is_registered) = tokio::sync::watch::channel(true);
    deps.registered = Some(is_registered);
    let provisioner = Provisioner::new(ProvisionerConfig::new(sample_identity(NODE)), deps);
    let running = RunningProvisioner::spawn(provisioner.clone(), || {});
    let key = DriverName::try_new(DRIVER).expect("a driver name").topology_key();
    let label = |value: Value| {
        api.patch_object(ObjectKind::Node, NODE, json!({ "metadata": { "labels": { &key: value } } }));
    };
    label(json!(NODE));
    assert_eq!(wait_reported(&provisioner, false).await, None);
    label(json!("ip-10-0-0-1"));
    let text = wait_reported(&provisioner, true).await.expect("a mismatch");
    assert!(text.contains(&format!("{key}=ip-10-0-0-1")) && text.contains("kubectl label"), "{text}");
    label(Value::Null);
    wait_reported(&provisioner, true).await;
    label(json!(NODE));
    assert_eq!(wait_reported(&provisioner, false).await, None);
    running.stop().await;
}
