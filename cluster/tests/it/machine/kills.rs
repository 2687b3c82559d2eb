//! Killed at each moment that a run has: the next one goes on, to the same cluster as the same node.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nodekeel_cluster::consensus::memory::MemoryNet;
use nodekeel_cluster::consensus::{PEER_PORT, PeerUrl};
use nodekeel_cluster::machine::{Cluster, Membership};

use super::bed::{Bed, Life, ip};

/// What is killed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Flow {
    Create,
    Join,
    Restart,
}

/// A cluster with at least what the flow needs, and the machine that is killed.
struct Scene {
    net: MemoryNet,
    victim: Bed,
    /// The member that is there before, where there is one.
    founder: Option<(Bed, Life)>,
    /// What the victim was before.
    before: Option<Membership>,
}

impl Scene {
    async fn of(flow: Flow) -> Self {
        let net = MemoryNet::new();
        let victim = Bed::on(&net, "192.0.2.2");
        let mut scene = Self { net, victim, founder: None, before: None };
        match flow {
            Flow::Create => {}
            Flow::Join => scene.invite().await,
            Flow::Restart => {
                let (life, membership) = scene.victim.runs().await;
                let kv = life.cluster.kv("test", "kills").expect("it runs");
                kv.put(b"/kept", b"yes").await.expect("it is put");
                scene.before = Some(membership);
                life.end().await;
            }
        }
        scene
    }

    async fn invite(&mut self) {
        let mut bed = Bed::on(&self.net, "192.0.2.1");
        bed.settings.golden_tickets = true;
        let (life, _) = bed.runs().await;
        let tickets = life.cluster.golden_tickets().expect("they are enabled");
        let url = PeerUrl::new(ip("192.0.2.2"), PEER_PORT);
        // Whoever asks twice gets the same.
        let ticket = tickets.issue(&url).await.expect("it is made");
        let again = tickets.issue(&url).await.expect("it is made");
        assert_eq!(ticket.digest(), again.digest());
        self.victim.enrolment().enrolment.write(&ticket.to_config()).expect("it is written");
        self.founder = Some((bed, life));
    }

    /// One life that ends at its `nth` moment, if it has as many; tells the moments it had.
    async fn life_until(&self, nth: usize) -> Vec<String> {
        let (points, count) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicUsize::new(0)));
        let seen = Arc::clone(&points);
        let hook = move |point: &str| {
            let now = count.fetch_add(1, Ordering::SeqCst);
            if now > nth {
                return;
            }
            seen.lock().unwrap_or_else(PoisonError::into_inner).push(point.to_owned());
            if now == nth {
                // Ends the run where it is, and says nothing, as a SIGKILL.
                std::panic::resume_unwind(Box::new("killed"));
            }
        };
        let life = Life::of(Cluster::with_points(self.victim.deps(), self.victim.settings.clone(), hook));
        let _ = life.finished().await;
        life.end().await;
        std::mem::take(&mut *points.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What must be so once the victim was started for the last time.
    async fn check(self, flow: Flow, killed_at: &str) -> Duration {
        let began = Instant::now();
        let life = self.victim.start();
        let membership = match life.finished().await {
            Ok(membership) => membership,
            Err(reason) => panic!("{flow:?}, killed {killed_at}: {}", super::bed::said(reason)),
        };
        let took = began.elapsed();
        assert_eq!(self.net.clusters(), 1, "{flow:?}, killed {killed_at}: a second cluster");
        let members = life.cluster.members().expect("it runs").list().await.expect("they are read");
        let nodes = life.cluster.nodes().expect("it runs").list().await.expect("they are read");
        let names: BTreeSet<_> = members.iter().filter_map(|member| member.name.clone()).collect();
        let ids: BTreeSet<_> = nodes.iter().map(|node| node.id.to_string()).collect();
        assert_eq!(names, ids, "{flow:?}, killed {killed_at}: a ghost");
        assert_eq!(names.len(), members.len(), "{flow:?}, killed {killed_at}: a member that never started");
        assert_eq!(members.len(), if flow == Flow::Join { 2 } else { 1 });
        assert!(
            members.iter().all(|member| !member.is_learner),
            "{flow:?}, killed {killed_at}: a stuck learner"
        );
        if let Some(before) = &self.before {
            assert_eq!(&membership, before, "{flow:?}, killed {killed_at}: another node");
            let kv = life.cluster.kv("test", "kills").expect("it runs");
            let kept = kv.get(b"/kept").await.expect("it is read");
            assert_eq!(
                kept.map(|kv| kv.value),
                Some(b"yes".to_vec()),
                "{flow:?}, killed {killed_at}: a lost key"
            );
        }
        life.end().await;
        // And it is the same ever after.
        let (life, again) = self.victim.runs().await;
        assert_eq!(again, membership, "{flow:?}, killed {killed_at}: not the same after another start");
        life.end().await;
        if let Some((_, founder)) = self.founder {
            founder.end().await;
        }
        took
    }
}

async fn points_of(flow: Flow) -> Vec<String> {
    let scene = Scene::of(flow).await;
    let points = scene.life_until(usize::MAX - 1).await;
    scene.check(flow, "never").await;
    points
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_killed_at_any_moment_goes_on_to_the_same_cluster_as_the_same_node() {
    let (mut kills, mut slowest) = (0, Duration::ZERO);
    for flow in [Flow::Create, Flow::Join, Flow::Restart] {
        let points = points_of(flow).await;
        for (nth, point) in points.iter().enumerate() {
            let scene = Scene::of(flow).await;
            let had = scene.life_until(nth).await;
            assert_eq!(had.last(), Some(point), "runs are the same until they are killed");
            let took = scene.check(flow, point).await;
            println!("{flow:?}: killed at point {nth}, {point}: Running after {took:.1?}");
            (kills, slowest) = (kills + 1, slowest.max(took));
        }
    }
    println!(
        "{kills} kill points: all Running, 0 second clusters, 0 ghosts, 0 lost keys; slowest {slowest:.1?}"
    );
    assert!(kills >= 30, "only {kills} points");
    assert!(slowest < Duration::from_secs(10));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_killed_in_each_of_its_lives_gets_there_in_the_first_that_is_let_live() {
    for flow in [Flow::Create, Flow::Join, Flow::Restart] {
        let scene = Scene::of(flow).await;
        let mut lives = 0;
        // Each life ends a moment later than the one before, and has to do again what was not recorded.
        for nth in 0.. {
            let had = scene.life_until(nth).await;
            lives += 1;
            if had.len() <= nth {
                break;
            }
        }
        println!("{flow:?}: {lives} lives");
        scene.check(flow, "in every life").await;
    }
}
