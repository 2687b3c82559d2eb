//! The audit of the limits in the background.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use nodekeel_fsquota::AuditSummary;
use nodekeel_provisioner::testing::MemStore;
use nodekeel_provisioner::testing::objects::sample_identity;
use nodekeel_provisioner::{LimitAudit, ProvisionerConfig, VolumeMetrics};

use super::harness::{TestNode, advance_time, test_api, test_deps};

/// Keeps the totals of each audit.
#[derive(Debug, Default)]
struct Audits(Mutex<Vec<AuditSummary>>);

impl Audits {
    fn escaped_files(&self) -> Vec<u64> {
        self.0.lock().expect("not poisoned").iter().map(|summary| summary.escaped.inodes.0).collect()
    }
}

impl VolumeMetrics for Audits {
    fn record_provision(&self, _: &str, _: Duration, _: bool) {}

    fn record_delete(&self, _: &str, _: Duration, _: bool) {}

    fn set_audit(&self, summary: &AuditSummary) {
        self.0.lock().expect("not poisoned").push(*summary);
    }
}

#[tokio::test(start_paused = true)]
async fn limits_are_audited_at_the_start_and_again_after_the_interval() {
    let (api, store, audits) = (test_api(), MemStore::default(), Arc::new(Audits::default()));
    let find = |files: u64| {
        let mut summary = AuditSummary::default();
        summary.escaped.inodes.0 = files;
        store.set_audit(LimitAudit { summary, ..LimitAudit::default() });
    };
    find(2);
    let deps = nodekeel_provisioner::Deps { metrics: Arc::clone(&audits) as _, ..test_deps(&api, &store) };
    let config = ProvisionerConfig::new(sample_identity("node-a"));
    let interval = config.audit_interval.as_secs();
    let node = TestNode::start_with(config, deps, Some(&store)).await;
    advance_time(60).await;
    assert_eq!(audits.escaped_files(), [2]);
    find(0);
    advance_time(interval).await;
    assert_eq!(audits.escaped_files(), [2, 0]);
    node.stop().await;
}
