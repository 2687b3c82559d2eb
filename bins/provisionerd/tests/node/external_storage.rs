//! Kubernetes' end-to-end tests of a CSI driver (`External.Storage`), against the image of provisionerd in a
//! cluster of one node.
//!
//! The node boots once. Several processes run the specs, a few each: pods mostly wait, so more than one spec fits
//! on an emulated node. The results are in `tmp/external-storage/results.json` of the target directory, so that an
//! interrupted run resumes where it ended; another image or definition, or a removed file, starts from the
//! beginning. A failed spec runs again; its log is next to the results. `NODEKEEL_EXTERNAL_STORAGE` limits a run to
//! the specs whose names contain it; `all` does not.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::{panic, thread};

use anyhow::{Result, ensure};
use testbed::gotool::{KUBERNETES_E2E, SNAPSHOT_CONTROLLER, SNAPSHOT_CRDS};
use testbed::guest::GuestBuilder;
use testbed::{BUSYBOX_IMAGE, ContainerImage, Daemon, Kube, ScratchDir};

use crate::deployment::{TIMEOUT, TestCluster, with_cluster_and};
use crate::disk::VolumeFileSystem;

mod definition;
mod results;
mod suite;

use results::{SpecResult, SpecResults};
use suite::Suite;

const FILTER: &str = "NODEKEEL_EXTERNAL_STORAGE";
const AGNHOST_AT: &str = "/usr/lib/agnhost.tar";
const AGNHOST_IMAGE: &str = "registry.k8s.io/e2e-test-images/agnhost:2.63.0";
/// Further names of busybox: those of the suite's pods.
const BUSYBOX_ALIASES: [&str; 3] = [
    "registry.k8s.io/e2e-test-images/busybox:1.36.1-1",
    "registry.k8s.io/e2e-test-images/busybox:1.37.0-1",
    "registry.k8s.io/pause:3.10.2",
];
/// With more, the emulated processor is the limit.
const PROCESSES: usize = 4;
/// An interrupted run loses the results of this many for each process.
const SPECS_OF_PROCESS: usize = 3;

#[test]
#[ignore = "soak"]
fn the_end_to_end_suite_of_csi_drivers_passes() {
    let add_images = |guest: GuestBuilder, scratch: &ScratchDir| {
        let archive = scratch.path().join("agnhost.tar");
        let program = KUBERNETES_E2E.program_path("agnhost")?;
        // Its pods run shell scripts, too.
        let image = ContainerImage::busybox()?.with_name(AGNHOST_IMAGE).add_file("agnhost", program);
        image.with_entrypoint(["/agnhost"]).with_command(["pause"]).write_archive(&archive)?;
        Ok(guest.with_memory(3 << 30).add_file(AGNHOST_AT, archive))
    };
    with_cluster_and(VolumeFileSystem::Xfs, add_images, |cluster| {
        import_images(cluster)?;
        let _controller = install_snapshot_api(&cluster.kube)?;
        cluster.kube.apply_manifests(definition::ATTRIBUTES_CLASS)?;
        let scratch = ScratchDir::new()?;
        run_suite(&Suite::new(&cluster.kube, scratch.path())?)
    });
}

fn import_images(cluster: &mut TestCluster) -> Result<()> {
    let ctr = |arguments: &[&str]| {
        let mut command = Command::new("ctr");
        command.args(["--namespace", "k8s.io", "images"]).args(arguments);
        cluster.node.guest().command_output(&command, TIMEOUT).map(drop)
    };
    ctr(&["import", AGNHOST_AT])?;
    BUSYBOX_ALIASES.iter().try_for_each(|alias| ctr(&["tag", BUSYBOX_IMAGE, alias]))?;
    cluster.times.log_step("images of the suite imported");
    Ok(())
}

/// Installs the kinds of the snapshot API and starts the snapshot-controller, as the README of `deploy/` asks for.
fn install_snapshot_api(kube: &Kube) -> Result<Daemon> {
    SNAPSHOT_CRDS.iter().try_for_each(|manifest| kube.apply_manifests(manifest))?;
    for kind in ["volumesnapshotclasses", "volumesnapshotcontents", "volumesnapshots"] {
        let name = format!("{kind}.snapshot.storage.k8s.io");
        kube.wait_for_condition("customresourcedefinition", &name, "condition=Established")?;
    }
    kube.apply_manifests(include_str!("../../../../deploy/snapshots/snapshotclass.yaml"))?;
    kube.apply_manifests(definition::SNAPSHOT_LABEL)?;
    let mut command = Command::new(SNAPSHOT_CONTROLLER.program_path("snapshot-controller")?);
    command.arg(format!("--kubeconfig={}", kube.kubeconfig_file("admin")?.display()));
    command.args(["--enable-distributed-snapshotting=true", "--leader-election=false"]);
    Daemon::start(command, ScratchDir::new()?, || Ok(()))
}

fn run_suite(suite: &Suite<'_>) -> Result<()> {
    let filter = std::env::var(FILTER).unwrap_or_else(|_| "all".into());
    let mut specs = suite.list_specs()?;
    specs.retain(|spec| filter == "all" || spec.contains(&filter));
    ensure!(!specs.is_empty(), "no spec contains {filter:?}, the value of {FILTER}");
    // The fast ones first.
    specs.sort_by_key(|spec| (spec.contains("[Slow]"), spec.clone()));
    let mut results = SpecResults::load(&suite.definition)?;
    for spec in &specs {
        if let Some(reason) = definition::exclusion(spec) {
            results.specs.insert(spec.clone(), SpecResult::Skipped { reason: reason.to_owned() });
        }
    }
    let pending: Vec<String> = specs.iter().filter(|spec| results.is_pending(spec)).cloned().collect();
    println!("{} specs, of which {} have not passed", specs.len(), pending.len());
    let (alone, together): (Vec<_>, Vec<_>) = pending.into_iter().partition(|spec| runs_alone(spec));
    let results = Mutex::new(results);
    run_batches(suite, &results, together.chunks(SPECS_OF_PROCESS), PROCESSES)?;
    run_batches(suite, &results, alone.chunks(1), 1)?;
    report_results(&results.into_inner().unwrap_or_else(PoisonError::into_inner), &specs)
}

/// True if a spec disturbs others, by the tags that Kubernetes gives it.
fn runs_alone(spec: &str) -> bool {
    spec.contains("[Serial]") || spec.contains("[Disruptive]")
}

/// Runs each batch in a process, of which so many run at a time.
fn run_batches<'a>(
    suite: &Suite<'_>,
    results: &Mutex<SpecResults>,
    batches: impl Iterator<Item = &'a [String]> + Send,
    processes: usize,
) -> Result<()> {
    let batches = Mutex::new(batches);
    let next = || batches.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || -> Result<()> {
        while let Some(batch) = next() {
            let runs = suite.run_specs(batch)?;
            results.lock().unwrap_or_else(PoisonError::into_inner).record_runs(runs)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..processes).map(|_| scope.spawn(work)).collect();
        let mut ended = workers.into_iter().map(|worker| worker.join());
        ended.try_for_each(|done| done.unwrap_or_else(|error| panic::resume_unwind(error)))
    })
}

/// Prints the totals, and fails unless each of these specs has passed or does not apply.
fn report_results(results: &SpecResults, specs: &[String]) -> Result<()> {
    let (mut passed, mut skipped, mut failed) = (0, BTreeMap::<&str, usize>::new(), Vec::new());
    for spec in specs {
        match results.specs.get(spec) {
            Some(SpecResult::Passed) => passed += 1,
            Some(SpecResult::Skipped { reason }) => *skipped.entry(reason).or_default() += 1,
            Some(SpecResult::Failed { reason }) => failed.push(format!("{spec}: {reason}")),
            None => failed.push(format!("{spec}: it did not run")),
        }
    }
    println!("{passed} specs passed");
    for (reason, count) in &skipped {
        println!("{count} skipped: {reason}");
    }
    ensure!(failed.is_empty(), "{} specs failed:\n{}", failed.len(), failed.join("\n"));
    Ok(())
}
