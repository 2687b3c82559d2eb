//! Audits the limits of the volumes in the background: the owner of a file can remove it from them.

use std::future::pending;

use nodekeel_fsquota::{AuditOptions, AuditSummary};
use tokio::time::sleep;

use crate::error_chain::format_chain;
use crate::limits::reconcile::LimitReconciler;
use crate::provisioner::ProvisionerConfig;
use crate::store::{LimitAudit, VolumeStore};

/// Compares the limits with the PersistentVolumes and audits the store, and again some time after each audit has ended.
/// Comparisons of some volumes don't wait for an audit. Never returns.
pub(crate) async fn run_auditor(
    store: &dyn VolumeStore,
    limits: &LimitReconciler,
    config: &ProvisionerConfig,
) {
    tokio::join!(run_audits(store, limits, config), limits.run());
}

async fn run_audits(store: &dyn VolumeStore, limits: &LimitReconciler, config: &ProvisionerConfig) {
    let mut options = AuditOptions::default();
    options.entries_per_second = Some(config.audit_rate);
    let (failures, mut last) = (&limits.failures, AuditSummary::default());
    loop {
        // First: what is set right is nothing that the audit finds.
        let has_limits = limits.reconcile_all().await;
        match store.audit_limits(options).await {
            // In this store no file can leave its limits, now or later, so there is nothing to audit again.
            Ok(None) if !has_limits => return pending().await,
            Ok(None) => {}
            Ok(Some(LimitAudit { summary, uncounted })) => {
                limits.set_uncounted(uncounted);
                failures.metrics.set_audit(&summary);
                log_changes(&last, &summary);
                last = summary;
            }
            // `last` stays: the next audit logs only findings that differ from those of the last complete one.
            Err(error) => {
                tracing::warn!("audit the limits of the volumes: {}", format_chain(&error));
                failures.store_failed.notify_one();
            }
        }
        sleep(config.audit_interval).await;
    }
}

/// Logs the findings that differ from those of the last audit.
fn log_changes(last: &AuditSummary, now: &AuditSummary) {
    for (what, last, now) in [
        ("left the limits of their volume", last.escaped, now.escaped),
        ("count for a volume in which they don't lie", last.outside, now.outside),
    ] {
        let (bytes, files) = (now.bytes.0, now.inodes.0);
        if files > 0 && last != now {
            tracing::warn!(
                bytes,
                files,
                "files and directories {what}: find them with `dirquota audit`, and repair them with --repair"
            );
        }
    }
    if now.over_limit > 0 && last.over_limit != now.over_limit {
        let volumes = now.over_limit;
        tracing::warn!(volumes, "volumes use more than their limits: find them with `provisionerd volumes`");
    }
}
