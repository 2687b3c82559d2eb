//! The program killed at each moment of a volume's life, on a real API server, and started again: nothing leaks, and nothing is
//! made twice.

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
use nodekeel_provisioner::{FINALIZER, SELECTED_NODE};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use testbed::leftovers;
use tokio::process::Child;

use crate::cluster::{self, DRIVER, PATIENCE, Program, claims, create, until, volumes};

/// How many rounds go on at the same time.
const AT_ONCE: usize = 4;

/// How often a soak goes through all moments.
const ROUNDS: &str = "NODEKEEL_VOLUME_KILLS";

/// What a round's claim lives through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    /// It is made for a selected node, used, and deleted.
    Selected,
    /// The same for the first node that takes it.
    Immediate,
    /// The same, and somebody takes the finalizer off in between.
    Stripped,
    /// There is no room for it.
    TooLarge,
}

/// Each step of each life.
const STEPS: [(Life, &[&str]); 4] = [
    (
        Life::Selected,
        &[
            "MakeDirectory",
            "Limit",
            "Publish",
            "PostVolume",
            "PostEvent",
            "Dig",
            "Bury",
            "DeleteVolume",
            "Unprotect",
            "Erase",
            "Release",
            "Level",
        ],
    ),
    (Life::Immediate, &["TakeNode"]),
    (Life::Stripped, &["Protect"]),
    (Life::TooLarge, &["GiveUpNode"]),
];

/// The moments at which the program is killed: before and after each step.
fn moments() -> Vec<(Life, String)> {
    let steps = STEPS.iter().flat_map(|(life, steps)| steps.iter().map(|step| (*life, *step)));
    steps.flat_map(|(life, step)| ["Before", "After"].map(|side| (life, format!("{side} {step}")))).collect()
}

/// What was found after all rounds.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    kills: usize,
    directories: usize,
    projects: usize,
    mounts: usize,
    volumes: usize,
    doubles: usize,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kills, directories, projects, mounts, volumes, doubles } = self;
        write!(
            f,
            "{kills} kills: {directories} directories, {projects} projects, {mounts} mounts and {volumes} \
             PersistentVolumes leaked, {doubles} provisioned twice"
        )
    }
}

impl Counts {
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

/// One claim's life and the program's deaths in it.
struct Round {
    name: String,
    client: Client,
    program: Program,
    child: Child,
    kills: usize,
}

impl Round {
    /// Waits for something; where the program is killed meanwhile, starts it again and goes on waiting.
    async fn outlive<T>(&mut self, what: impl Future<Output = T>) -> T {
        let mut what = std::pin::pin!(what);
        loop {
            tokio::select! {
                biased;
                status = self.child.wait() => self.bury(status.expect("it can be waited for")),
                done = &mut what => return done,
            }
        }
    }

    /// Waits until the program has been killed, and starts it again.
    async fn die(&mut self) {
        let status = tokio::time::timeout(PATIENCE, self.child.wait()).await;
        let status = status.unwrap_or_else(|_| panic!("{} never comes: {}", self.name, self.program.said()));
        self.bury(status.expect("it can be waited for"));
    }

    fn bury(&mut self, status: ExitStatus) {
        assert_eq!(status.signal(), Some(9), "{}: {status}: {}", self.name, self.program.said());
        assert_eq!(self.kills, 0, "it is killed once");
        self.kills += 1;
        self.child = self.program.start(&[("PROVISIONERD_ROOM", ROOM)]);
    }

    async fn live(&mut self, life: Life) -> Counts {
        let claim = self.claim(life).await;
        let volume = format!("pvc-{}", claim.metadata.uid.as_deref().expect("a UID"));
        let doubles = match life {
            Life::TooLarge => self.refused().await,
            _ => self.used(life, &volume).await,
        };
        let (claims, volumes) = (claims(&self.client), volumes(&self.client));
        claims.delete(&self.name, &DeleteParams::default()).await.expect("it is deleted");
        self.outlive(until(&volumes, &volume, |volume| volume.is_none())).await;
        if self.kills == 0 {
            self.die().await;
        }
        self.end().await;
        self.leftovers(doubles).await
    }

    async fn claim(&self, life: Life) -> PersistentVolumeClaim {
        let annotations = match life {
            Life::Immediate => json!({}),
            _ => json!({ SELECTED_NODE: self.program.node }),
        };
        let claim = json!({
            "metadata": { "name": self.name, "annotations": annotations },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": { "requests": { "storage": if life == Life::TooLarge { "1Gi" } else { "1Mi" } } },
                "storageClassName": if life == Life::Immediate { IMMEDIATE } else { "nodekeel" },
            },
        });
        create(&claims(&self.client), claim).await
    }

    /// Waits until the claim has been given up.
    async fn refused(&mut self) -> usize {
        let is_free = |claim: Option<&PersistentVolumeClaim>| {
            let annotations = claim.and_then(|claim| claim.metadata.annotations.as_ref());
            annotations.is_none_or(|all| !all.contains_key(SELECTED_NODE))
        };
        let (claims, name) = (claims(&self.client), self.name.clone());
        self.outlive(until(&claims, &name, is_free)).await;
        self.program.names("volumes").len()
    }

    /// Waits until the claim is bound, uses its volume, and tells how many there are too many.
    async fn used(&mut self, life: Life, volume: &str) -> usize {
        let is_bound = |claim: Option<&PersistentVolumeClaim>| {
            claim.and_then(|claim| claim.status.as_ref()?.phase.as_deref()) == Some("Bound")
        };
        let (claims, volumes, name) = (claims(&self.client), volumes(&self.client), self.name.clone());
        self.outlive(until(&claims, &name, is_bound)).await;
        let file = self.program.base.path().join("volumes").join(volume).join("file");
        fs::write(&file, "data").expect("a volume can be written to");
        if life == Life::Stripped {
            let strip = Patch::Merge(json!({ "metadata": { "finalizers": [] } }));
            volumes.patch(volume, &PatchParams::default(), &strip).await.expect("a patch");
            let is_protected = |volume: Option<&PersistentVolume>| {
                volume.is_some_and(|volume| {
                    volume.metadata.finalizers.iter().flatten().any(|it| it == FINALIZER)
                })
            };
            self.outlive(until(&volumes, volume, is_protected)).await;
        }
        assert_eq!(fs::read_to_string(&file).expect("it is there"), "data");
        let made = self.own_volumes().await;
        made.max(self.program.names("volumes").len()) - 1
    }

    async fn own_volumes(&self) -> usize {
        let all = volumes(&self.client).list(&ListParams::default()).await.expect("a list").items;
        let is_own = |volume: &PersistentVolume| {
            let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()?.name.as_deref());
            claim == Some(self.name.as_str())
        };
        all.iter().filter(|volume| is_own(volume)).count()
    }

    /// Waits until everything is erased, then ends the program as people do.
    async fn end(&mut self) {
        let (trash, name) = (self.program.base.path().join(".trash"), self.name.clone());
        let erased = tokio::task::spawn_blocking(move || {
            testbed::wait_until(Duration::from_secs(60), &format!("the end of {name}"), || {
                let left = cluster::names(&trash);
                ensure!(left.is_empty(), "{left:?} is still there");
                Ok(())
            })
        });
        // What could not be erased is counted as leaked.
        let _ = self.outlive(erased).await;
        let pid = self.child.id().and_then(|pid| Pid::from_raw(pid.cast_signed())).expect("it runs");
        kill_process(pid, Signal::TERM).expect("it can be ended");
        let status = self.child.wait().await.expect("it can be waited for");
        // One that has only just been started again doesn't listen for it yet.
        let is_ended = status.code() == Some(0) || status.signal() == Some(Signal::TERM.as_raw());
        assert!(is_ended, "{}: {status}: {}", self.name, self.program.said());
    }

    async fn leftovers(&self, doubles: usize) -> Counts {
        let places = ["volumes", ".new", ".trash"];
        let counts = Counts {
            kills: self.kills,
            directories: places.iter().map(|place| self.program.names(place).len()).sum(),
            projects: self.program.projects().len(),
            mounts: leftovers::mounts(self.program.base.path()).expect("the mounts").len(),
            volumes: self.own_volumes().await,
            doubles,
        };
        if counts != (Counts { kills: 1, ..Counts::default() }) {
            println!("{}: {counts}\n{}", self.name, self.program.said());
        }
        counts
    }
}

const IMMEDIATE: &str = "immediate";

/// Every claim but the one that is too large fits.
const ROOM: &str = "1048576";

/// Goes through all moments so many times.
fn kill_everywhere(rounds: usize) -> Counts {
    let kube = cluster::start();
    let class = format!(
        "{{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {{name: {IMMEDIATE}}}, provisioner: {DRIVER}}}"
    );
    kube.apply(&class).expect("a class");
    let kubeconfig = cluster::account(&kube);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let client = cluster::admin(&kube).await;
        let all = (0..rounds).flat_map(|round| moments().into_iter().map(move |moment| (round, moment)));
        let round = |(round, (life, moment)): (usize, (Life, String))| {
            let (client, kubeconfig) = (client.clone(), kubeconfig.clone());
            async move {
                let name = format!("{}-{round}", moment.replace(' ', "-").to_lowercase());
                let program = Program::new(&kubeconfig, name.clone());
                let child = program.start(&[("PROVISIONERD_KILL_AT", &moment), ("PROVISIONERD_ROOM", ROOM)]);
                Round { name, client, program, child, kills: 0 }.live(life).await
            }
        };
        // One that takes claims without a node must be alone with them.
        let (alone, together): (Vec<_>, Vec<_>) = all.partition(|(_, (life, _))| *life == Life::Immediate);
        let counts = futures_util::stream::iter(together).map(round).buffer_unordered(AT_ONCE);
        let counts = counts.fold(Counts::default(), async |sum, counts| sum.add(&counts)).await;
        let rest = futures_util::stream::iter(alone).then(round);
        rest.fold(counts, async |sum, counts| sum.add(&counts)).await
    })
}

fn check(rounds: usize) {
    let counts = kill_everywhere(rounds);
    println!("{counts}");
    assert_eq!(counts, Counts { kills: rounds * moments().len(), ..Counts::default() });
}

#[test]
#[ignore = "needs kube"]
fn killed_at_each_moment_it_leaks_nothing_and_makes_nothing_twice() {
    check(1);
}

#[test]
#[ignore = "soak: NODEKEEL_VOLUME_KILLS times through all moments"]
fn killed_again_and_again_it_leaks_nothing_and_makes_nothing_twice() {
    check(std::env::var(ROUNDS).map_or(2, |count| count.parse().expect("a number")));
}
