//! Kills provisionerd at each moment of a volume's lifecycle, on a real API server, and starts it again:
//! nothing leaks, and nothing is provisioned twice.

use std::fmt;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::ensure;
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::Client;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use nodekeel_provisioner::{DriverName, FINALIZER, SELECTED_NODE};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use testbed::{FakeNode, leftovers};
use tokio::process::Child;

use crate::cluster::{
    self, DRIVER, TIMEOUT, TestDaemon, claims_api, create_object, volumes_api, wait_object,
};

/// Maximum number of parallel runs.
const MAX_PARALLEL: usize = 4;

/// The variable with the number of passes of a stress run through all moments.
const ROUNDS_VARIABLE: &str = "NODEKEEL_VOLUME_KILLS";

/// The scenario of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClaimScenario {
    /// The claim is provisioned for a selected node, used, and deleted.
    Selected,
    /// The same, for the first node that selects itself.
    Immediate,
    /// The same, and another client removes the finalizer in between.
    FinalizerRemoved,
    /// The same, and its volume is given to a second claim.
    Rebound,
    /// The claim does not fit.
    TooLarge,
    /// The claim is expanded, once further than possible.
    Expanded,
}

/// The steps of each scenario.
const STEPS: [(ClaimScenario, &[&str]); 6] = [
    (
        ClaimScenario::Selected,
        &[
            "CreateDirectory",
            "SetLimits",
            "RenameIntoPlace",
            "CreatePersistentVolume",
            "CreateEvent",
            "CreateTrashEntry",
            "MoveToTrash",
            "DeletePersistentVolume",
            "RemoveFinalizer",
            "EraseContent",
            "ReleaseProject",
            "RemoveTrashEntry",
        ],
    ),
    (ClaimScenario::Immediate, &["SelectNode"]),
    (ClaimScenario::FinalizerRemoved, &["AddFinalizer"]),
    (ClaimScenario::Rebound, &["RecordClaim"]),
    (ClaimScenario::TooLarge, &["DeselectNode"]),
    (
        ClaimScenario::Expanded,
        &["MarkResize", "ResizeLimits", "UpdateVolume", "FinishResize", "MarkInfeasible"],
    ),
];

/// The moments of the kills: before and after each step.
fn kill_moments() -> Vec<(ClaimScenario, String)> {
    let steps = STEPS.iter().flat_map(|(scenario, steps)| steps.iter().map(|step| (*scenario, *step)));
    steps
        .flat_map(|(scenario, step)| ["Before", "After"].map(|side| (scenario, format!("{side} {step}"))))
        .collect()
}

/// Counts of kills and leaks after all runs.
#[derive(Debug, Default, PartialEq, Eq)]
struct LeakCounts {
    kills: usize,
    directories: usize,
    projects: usize,
    mounts: usize,
    volumes: usize,
    doubles: usize,
}

impl fmt::Display for LeakCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kills, directories, projects, mounts, volumes, doubles } = self;
        write!(
            f,
            "{kills} kills: {directories} directories, {projects} projects, {mounts} mounts and {volumes} \
             PersistentVolumes leaked, {doubles} provisioned twice"
        )
    }
}

impl LeakCounts {
    fn add(mut self, other: &Self) -> Self {
        self.kills += other.kills;
        self.directories += other.directories;
        self.projects += other.projects;
        self.mounts += other.mounts;
        self.volumes += other.volumes;
        self.doubles += other.doubles;
        self
    }
}

/// One claim's lifecycle with a kill of provisionerd in it.
struct CrashRun {
    name: String,
    client: Client,
    program: TestDaemon,
    child: Child,
    kills: usize,
}

impl CrashRun {
    /// Waits for a future, and restarts provisionerd if it is killed meanwhile.
    async fn wait_through_kill<T>(&mut self, what: impl Future<Output = T>) -> T {
        let mut what = std::pin::pin!(what);
        loop {
            tokio::select! {
                biased;
                status = self.child.wait() => self.restart_after_kill(status.expect("an exit status")),
                done = &mut what => return done,
            }
        }
    }

    /// Waits until provisionerd is killed, and restarts it.
    async fn wait_for_kill(&mut self) {
        let status = tokio::time::timeout(TIMEOUT, self.child.wait()).await;
        let status =
            status.unwrap_or_else(|_| panic!("{} is never reached: {}", self.name, self.program.log_text()));
        self.restart_after_kill(status.expect("an exit status"));
    }

    fn restart_after_kill(&mut self, status: ExitStatus) {
        assert_eq!(status.signal(), Some(9), "{}: {status}: {}", self.name, self.program.log_text());
        assert_eq!(self.kills, 0, "killed once");
        self.kills += 1;
        self.child = self.program.start(&[("PROVISIONERD_ROOM", MAX_BYTES)]);
    }

    async fn run_scenario(&mut self, scenario: ClaimScenario) -> LeakCounts {
        let claim = self.create_claim(scenario).await;
        let volume = format!("pvc-{}", claim.metadata.uid.as_deref().expect("a UID"));
        let doubles = match scenario {
            ClaimScenario::TooLarge => self.wait_rejected().await,
            _ => self.use_volume(scenario, &volume).await,
        };
        let (claims, volumes) = (claims_api(&self.client), volumes_api(&self.client));
        let last = match scenario {
            ClaimScenario::Rebound => self.rebind_volume(&volume).await,
            _ => self.name.clone(),
        };
        claims.delete(&last, &DeleteParams::default()).await.expect("the claim is deleted");
        self.wait_through_kill(wait_object(&volumes, &volume, |volume| volume.is_none())).await;
        if self.kills == 0 {
            self.wait_for_kill().await;
        }
        self.terminate().await;
        self.count_leftovers(doubles).await
    }

    async fn create_claim(&self, scenario: ClaimScenario) -> PersistentVolumeClaim {
        let annotations = match scenario {
            ClaimScenario::Immediate => json!({}),
            _ => json!({ SELECTED_NODE: self.program.node }),
        };
        let claim = json!({
            "metadata": { "name": self.name, "annotations": annotations },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": { "requests": { "storage": if scenario == ClaimScenario::TooLarge { "1Gi" } else { "1Mi" } } },
                "storageClassName": if scenario == ClaimScenario::Immediate { IMMEDIATE_CLASS } else { "nodekeel" },
            },
        });
        create_object(&claims_api(&self.client), claim).await
    }

    /// Waits until the node of the claim is deselected.
    async fn wait_rejected(&mut self) -> usize {
        let is_free = |claim: Option<&PersistentVolumeClaim>| {
            let annotations = claim.and_then(|claim| claim.metadata.annotations.as_ref());
            annotations.is_none_or(|all| !all.contains_key(SELECTED_NODE))
        };
        let (claims, name) = (claims_api(&self.client), self.name.clone());
        self.wait_through_kill(wait_object(&claims, &name, is_free)).await;
        self.program.list_names("volumes").len()
    }

    /// Waits until the claim is bound, uses its volume, and returns the number of surplus volumes.
    async fn use_volume(&mut self, scenario: ClaimScenario, volume: &str) -> usize {
        let is_bound = |claim: Option<&PersistentVolumeClaim>| {
            claim.and_then(|claim| claim.status.as_ref()?.phase.as_deref()) == Some("Bound")
        };
        let (claims, volumes, name) =
            (claims_api(&self.client), volumes_api(&self.client), self.name.clone());
        self.wait_through_kill(wait_object(&claims, &name, is_bound)).await;
        let file = self.program.base.path().join("volumes").join(volume).join("file");
        fs::write(&file, "data").expect("the volume is writable");
        if scenario == ClaimScenario::FinalizerRemoved {
            let strip = Patch::Merge(json!({ "metadata": { "finalizers": [] } }));
            volumes.patch(volume, &PatchParams::default(), &strip).await.expect("a patch");
            let is_protected = |volume: Option<&PersistentVolume>| {
                volume.is_some_and(|volume| {
                    volume.metadata.finalizers.iter().flatten().any(|it| it == FINALIZER)
                })
            };
            self.wait_through_kill(wait_object(&volumes, volume, is_protected)).await;
        }
        if scenario == ClaimScenario::Expanded {
            self.expand_volume(volume).await;
        }
        assert_eq!(fs::read_to_string(&file).expect("the file exists"), "data");
        let count = self.count_volumes().await;
        count.max(self.program.list_names("volumes").len()) - 1
    }

    /// Requests more than possible, and then less.
    async fn expand_volume(&mut self, volume: &str) {
        let (claims, name) = (claims_api(&self.client), self.name.clone());
        let request = async |size: &str| {
            let patch = json!({ "spec": { "resources": { "requests": { "storage": size } } } });
            claims.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await.expect("a patch");
        };
        request("1Gi").await;
        let is_infeasible = |claim: Option<&PersistentVolumeClaim>| {
            let status = claim.and_then(|claim| claim.status.as_ref());
            let states = status.and_then(|status| status.allocated_resource_statuses.as_ref());
            states.is_some_and(|states| states["storage"] == "ControllerResizeInfeasible")
        };
        self.wait_through_kill(wait_object(&claims, &name, is_infeasible)).await;
        request(MAX_BYTES).await;
        let is_expanded = |claim: Option<&PersistentVolumeClaim>| {
            let status = claim.and_then(|claim| claim.status.as_ref());
            status.is_some_and(|status| {
                status.capacity.as_ref().is_some_and(|capacity| capacity["storage"].0 == "2Mi")
                    && status.allocated_resource_statuses.is_none()
                    && status.conditions.is_none()
            })
        };
        self.wait_through_kill(wait_object(&claims, &name, is_expanded)).await;
        let volume = volumes_api(&self.client).get(volume).await.expect("the volume");
        let capacity = volume.spec.and_then(|spec| spec.capacity).expect("a capacity");
        assert_eq!(capacity["storage"].0, "2Mi");
        let limits: Vec<_> = self.program.project_names();
        assert_eq!(limits.len(), 1, "one volume has limits");
        let limits = fs::read_to_string(self.program.quota_dir.path().join(&limits[0])).expect("the limits");
        assert_eq!(limits, format!("{MAX_BYTES} 1024"));
    }

    /// Retains the volume for a second claim, which is returned, and has it deleted with that.
    async fn rebind_volume(&mut self, volume: &str) -> String {
        let (claims, volumes) = (claims_api(&self.client), volumes_api(&self.client));
        let patch = async |patch: Value| {
            volumes.patch(volume, &PatchParams::default(), &Patch::Merge(patch)).await.expect("a patch");
        };
        patch(json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } })).await;
        claims.delete(&self.name, &DeleteParams::default()).await.expect("the claim is deleted");
        let is_released = |volume: Option<&PersistentVolume>| {
            volume.and_then(|volume| volume.status.as_ref()?.phase.as_deref()) == Some("Released")
        };
        wait_object(&volumes, volume, is_released).await;
        patch(json!({ "spec": { "claimRef": null } })).await;
        let second = format!("{}-second", self.name);
        let claim = json!({
            "metadata": { "name": second },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": { "requests": { "storage": "1Mi" } },
                "storageClassName": "nodekeel",
                "volumeName": volume,
            },
        });
        let claim = create_object(&claims, claim).await;
        let annotation = DriverName::try_new(DRIVER).expect("a driver name").claim_annotation();
        let is_recorded = |volume: Option<&PersistentVolume>| {
            let annotations = volume.and_then(|volume| volume.metadata.annotations.as_ref());
            annotations.and_then(|all| all.get(&annotation)) == claim.metadata.uid.as_ref()
        };
        self.wait_through_kill(wait_object(&volumes, volume, is_recorded)).await;
        patch(json!({ "spec": { "persistentVolumeReclaimPolicy": "Delete" } })).await;
        second
    }

    async fn count_volumes(&self) -> usize {
        let all = volumes_api(&self.client).list(&ListParams::default()).await.expect("a list").items;
        let is_own = |volume: &PersistentVolume| {
            let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()?.name.as_deref());
            claim == Some(self.name.as_str())
        };
        all.iter().filter(|volume| is_own(volume)).count()
    }

    /// Waits until everything is erased, then stops provisionerd with SIGTERM.
    async fn terminate(&mut self) {
        let (trash, name) = (self.program.base.path().join(".trash"), self.name.clone());
        let erased = tokio::task::spawn_blocking(move || {
            testbed::wait_until(Duration::from_secs(60), &format!("the trash of {name} to be empty"), || {
                let left = cluster::list_names(&trash);
                ensure!(left.is_empty(), "{left:?} still exists");
                Ok(())
            })
        });
        // Content that was not erased counts as leaked.
        let _ = self.wait_through_kill(erased).await;
        let pid =
            self.child.id().and_then(|pid| Pid::from_raw(pid.cast_signed())).expect("a running process");
        kill_process(pid, Signal::TERM).expect("SIGTERM is sent");
        let status = self.child.wait().await.expect("an exit status");
        // A process that has just been restarted may not handle the signal yet.
        let is_ended = status.code() == Some(0) || status.signal() == Some(Signal::TERM.as_raw());
        assert!(is_ended, "{}: {status}: {}", self.name, self.program.log_text());
    }

    async fn count_leftovers(&self, doubles: usize) -> LeakCounts {
        let directories = ["volumes", ".new", ".trash"];
        let counts = LeakCounts {
            kills: self.kills,
            directories: directories.iter().map(|name| self.program.list_names(name).len()).sum(),
            projects: self.program.project_names().len(),
            mounts: leftovers::find_mounts(self.program.base.path()).expect("the mounts").len(),
            volumes: self.count_volumes().await,
            doubles,
        };
        if counts != (LeakCounts { kills: 1, ..LeakCounts::default() }) {
            println!("{}: {counts}\n{}", self.name, self.program.log_text());
        }
        counts
    }
}

const IMMEDIATE_CLASS: &str = "immediate";

/// Every claim fits, except for the one of `TooLarge`.
const MAX_BYTES: &str = "2097152";

/// The name of the node and the claim of a run.
fn node_name(moment: &str, pass: usize) -> String {
    format!("{}-{pass}", moment.replace(' ', "-").to_lowercase())
}

/// Kills provisionerd at every moment, this many times.
fn kill_at_each_moment(rounds: usize) -> LeakCounts {
    let kube = cluster::start_control_plane();
    let class = format!(
        "{{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {{name: {IMMEDIATE_CLASS}}}, provisioner: {DRIVER}}}"
    );
    kube.apply_manifests(&class).expect("a class");
    let kubeconfig = cluster::account_kubeconfig(&kube);
    // Only a schedulable node selects itself.
    for pass in 0..rounds {
        for (scenario, moment) in kill_moments() {
            if scenario == ClaimScenario::Immediate {
                kube.create_fake_node(&FakeNode::new(node_name(&moment, pass))).expect("a node");
            }
        }
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let client = cluster::admin_client(&kube).await;
        let all = (0..rounds).flat_map(|pass| kill_moments().into_iter().map(move |moment| (pass, moment)));
        let pass = |(pass, (scenario, moment)): (usize, (ClaimScenario, String))| {
            let (client, kubeconfig) = (client.clone(), kubeconfig.clone());
            async move {
                let name = node_name(&moment, pass);
                let program = TestDaemon::new(&kubeconfig, name.clone());
                let child =
                    program.start(&[("PROVISIONERD_KILL_AT", &moment), ("PROVISIONERD_ROOM", MAX_BYTES)]);
                CrashRun { name, client, program, child, kills: 0 }.run_scenario(scenario).await
            }
        };
        // An instance that selects its node for claims must run alone.
        let (alone, together): (Vec<_>, Vec<_>) =
            all.partition(|(_, (scenario, _))| *scenario == ClaimScenario::Immediate);
        let counts = futures_util::stream::iter(together).map(pass).buffer_unordered(MAX_PARALLEL);
        let counts = counts.fold(LeakCounts::default(), async |sum, counts| sum.add(&counts)).await;
        let rest = futures_util::stream::iter(alone).then(pass);
        rest.fold(counts, async |sum, counts| sum.add(&counts)).await
    })
}

fn assert_no_leaks(rounds: usize) {
    let counts = kill_at_each_moment(rounds);
    println!("{counts}");
    assert_eq!(counts, LeakCounts { kills: rounds * kill_moments().len(), ..LeakCounts::default() });
}

#[test]
#[ignore = "needs kube"]
fn a_daemon_killed_at_each_moment_leaks_nothing_and_provisions_nothing_twice() {
    assert_no_leaks(1);
}

#[test]
#[ignore = "soak: NODEKEEL_VOLUME_KILLS times through all moments"]
fn a_daemon_killed_repeatedly_leaks_nothing_and_provisions_nothing_twice() {
    assert_no_leaks(std::env::var(ROUNDS_VARIABLE).map_or(2, |count| count.parse().expect("a number")));
}
