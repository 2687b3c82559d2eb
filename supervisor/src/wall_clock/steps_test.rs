//! A tree that works while the wall clock is set back and forth is the tree whose clock nobody touches.

use std::cell::Cell;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::time::{advance, timeout};

use super::time_at;
use crate::testing::{EventRecorder, RemoteRunnable, settle};
use crate::{Backoff, ChildPolicy, ChildSpec, Context, Failure, RunnableStatus, Supervisor, WaitReason};

const OPERATIONS: usize = 200;
const DAY: u64 = 86_400;
const STEPS: [u64; 3] = [DAY, 30 * DAY, 3 * 365 * DAY];
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

thread_local! {
    /// A moment and what this thread's wall clock shows then; nothing is the real clock.
    static WALL_CLOCK: Cell<Option<(Instant, SystemTime)>> = const { Cell::new(None) };
}

/// The wall clock of this thread at a moment.
pub(super) fn read_wall_clock(now: Instant) -> SystemTime {
    WALL_CLOCK.get().and_then(|same| time_at(same, now)).unwrap_or_else(SystemTime::now)
}

fn set_wall_clock(step: impl FnOnce(SystemTime) -> SystemTime) {
    let now = tokio::time::Instant::now().into_std();
    WALL_CLOCK.set(Some((now, step(read_wall_clock(now)))));
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (z ^ (z >> 27)) % below
    }
}

/// What an operator reads of a runnable, with ages instead of times.
fn describe(status: &RunnableStatus) -> impl Debug + use<> {
    let now = read_wall_clock(tokio::time::Instant::now().into_std());
    let age = move |at: SystemTime| now.duration_since(at).map_err(|error| error.duration());
    let waiting_for = match &status.waiting_for {
        WaitReason::Backoff(until) => format!("backoff, {:?}", age(*until)),
        other => other.to_string(),
    };
    let exits: Vec<_> = status.exits.iter().map(|exit| (age(exit.at), exit.generation, exit.state)).collect();
    (
        (Arc::clone(&status.dn), status.state, age(status.since), status.generation),
        (status.failures, status.failing_since.map(age), status.failures_clear_in),
        (exits, waiting_for, status.withheld.clone()),
    )
}

/// All that is seen of a tree in 200 operations: each line a status after one of them, or an event.
async fn run_operations(seed: u64, has_steps: bool) -> Vec<String> {
    set_wall_clock(|_| UNIX_EPOCH + Duration::from_secs(56 * 365 * DAY));
    let started = tokio::time::Instant::now().into_std();
    let (recorder, remotes) = (EventRecorder::default(), NAMES.map(|name| (name, RemoteRunnable::default())));
    let children = remotes.clone();
    let policy =
        ChildPolicy { backoff: Backoff { jitter: 0.0, ..Backoff::default() }, ..ChildPolicy::default() };
    let root = move |ctx: Context| {
        let children = children.clone();
        async move {
            for (name, remote) in children {
                ctx.run_child(name, remote)?;
            }
            ctx.signal_ready()?;
            Err::<(), Failure>(ctx.canceled().await.into())
        }
    };
    let supervisor = Supervisor::builder().event_hook(recorder.clone()).default_policy(policy).start(root);
    settle().await;
    let (mut random, mut clock_random, mut seen) = (Random(seed), Random(!seed), Vec::new());
    for _ in 0..OPERATIONS {
        let (name, remote) = &remotes[random.below(4) as usize];
        let dn = format!("root.{name}");
        // What can't be done in this state is refused, or given up, in both runs alike.
        let patience = Duration::from_secs(2);
        match random.below(10) {
            0 => drop(supervisor.stop_runnable(&dn)),
            1 | 2 => drop(supervisor.start_runnable(&dn)),
            3 => drop(supervisor.restart_runnable(&dn)),
            4 => drop(supervisor.withhold_ready(&dn, Some("its disk is full".into()))),
            5 => drop(supervisor.withhold_ready(&dn, None)),
            6 => drop(supervisor.replace_child("root", ChildSpec::new(*name, remote.clone()))),
            7 => drop(timeout(patience, remote.fail("gone")).await),
            _ => drop(timeout(patience, remote.signal_ready()).await),
        }
        if has_steps && clock_random.below(3) == 0 {
            let step = Duration::from_secs(STEPS[clock_random.below(3) as usize]);
            let is_forward = clock_random.below(2) == 0;
            set_wall_clock(|now| if is_forward { now + step } else { now - step });
        }
        advance(Duration::from_millis(random.below(15_000))).await;
        settle().await;
        seen.extend(supervisor.snapshot().iter().map(|status| format!("{:?}", describe(status))));
    }
    drop(supervisor.shutdown().await);
    let events = recorder.events().into_iter();
    seen.extend(events.map(|event| {
        format!("{} {:?} {} {} {}", event.seq, event.at - started, event.dn, event.generation, event.change)
    }));
    seen
}

#[tokio::test(start_paused = true)]
async fn steps_of_the_wall_clock_change_no_age_backoff_deadline_order_or_count() {
    for seed in 1..=20 {
        let undisturbed = run_operations(seed, false).await;
        let stepped = run_operations(seed, true).await;
        for (expected, seen) in undisturbed.iter().zip(&stepped) {
            assert_eq!(expected, seen, "seed {seed}");
        }
        assert_eq!(undisturbed.len(), stepped.len(), "seed {seed}");
    }
}
