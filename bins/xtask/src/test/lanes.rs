//! Runs the parts of a test run beside each other, where they don't disturb each other.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::report::Report;
use crate::run::Log;

/// What a part spends its time on. Each lane has a worker; one whose lane is empty takes parts of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Lane {
    /// Computes: unit tests, compilers.
    Computing,
    /// Waits most of the time: for etcd, containerd, an API server.
    Waiting,
    /// Waits for a guest, whose processors are emulated.
    Guest,
    /// Measures time: runs when all others have ended.
    Alone,
}

impl Lane {
    /// Where the ignored tests of a lane run, for the names of parts.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Computing | Self::Alone => "",
            Self::Waiting => ", with daemons",
            Self::Guest => ", with guests",
        }
    }
}

/// The lanes whose parts run beside each other.
const BESIDE: [Lane; 3] = [Lane::Computing, Lane::Waiting, Lane::Guest];

/// A part of a test run.
pub(crate) struct Job<'a> {
    pub(crate) name: String,
    pub(crate) lane: Lane,
    pub(crate) work: Box<dyn FnOnce(&mut Report) + Send + 'a>,
}

impl<'a> Job<'a> {
    pub(crate) fn new(
        name: impl Into<String>,
        lane: Lane,
        work: impl FnOnce(&mut Report) + Send + 'a,
    ) -> Self {
        Self { name: name.into(), lane, work: Box::new(work) }
    }
}

/// Runs all of them. The output of each is shown as one block when it has ended.
pub(crate) fn run_jobs(jobs: Vec<Job<'_>>, report: &mut Report) {
    let (alone, beside): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| job.lane == Lane::Alone);
    let mut queues = BESIDE.map(|_| VecDeque::new());
    for job in beside {
        let lane = BESIDE.iter().position(|lane| *lane == job.lane).unwrap_or_default();
        queues[lane].push_back(job);
    }
    let (queues, shared) = (&Mutex::new(queues), &Mutex::new(&mut *report));
    thread::scope(|scope| {
        for lane in 0..BESIDE.len() {
            scope.spawn(move || {
                while let Some(job) = take_job(queues, lane) {
                    run_job(job, shared);
                }
            });
        }
    });
    alone.into_iter().for_each(|job| run_job(job, &Mutex::new(&mut *report)));
}

/// The next job of a lane; where there are no more, the last one of another lane, the slowest lane first. The waiting
/// lane takes no guests.
fn take_job<'a>(queues: &Mutex<[VecDeque<Job<'a>>; BESIDE.len()]>, lane: usize) -> Option<Job<'a>> {
    let mut queues = queues.lock().unwrap_or_else(PoisonError::into_inner);
    // Two guests emulate their processors beside each other; a third would slow them all down.
    let lanes = if BESIDE[lane] == Lane::Waiting { BESIDE.len() - 1 } else { BESIDE.len() };
    queues[lane].pop_front().or_else(|| queues[..lanes].iter_mut().rev().find_map(VecDeque::pop_back))
}

fn run_job(job: Job<'_>, report: &Mutex<&mut Report>) {
    let locked = || report.lock().unwrap_or_else(PoisonError::into_inner);
    let say = |report: &Report, text: &str| {
        println!("[{:5.1} min] {text}", report.elapsed().as_secs_f64() / 60.0);
    };
    say(&locked(), &format!("start {}", job.name));
    let log = Log::buffered();
    let mut part = Report::new(log.clone());
    (job.work)(&mut part);
    let mut report = locked();
    print!("{}", log.take());
    say(&report, &format!("end   {}: {}", job.name, part.counts()));
    report.merge(part);
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn lanes_run_beside_each_other_and_parts_that_measure_time_run_alone_at_the_end() {
        let mut report = Report::new(Log::default());
        let (meeting, running, order) = (Barrier::new(3), AtomicUsize::new(0), Mutex::new(Vec::new()));
        let job = |name: &'static str, lane: Lane| {
            let (meeting, running, order) = (&meeting, &running, &order);
            Job::new(name, lane, move |report: &mut Report| {
                let beside = running.fetch_add(1, Ordering::SeqCst);
                if lane == Lane::Alone {
                    assert_eq!(beside, 0);
                } else {
                    // Passes once three parts run.
                    meeting.wait();
                }
                running.fetch_sub(1, Ordering::SeqCst);
                order.lock().unwrap().push(name);
                report.add_check(name, Duration::ZERO, None);
            })
        };
        let (guest, waiting) = (Lane::Guest, Lane::Waiting);
        // The second three meet where the worker of an empty lane takes parts of another.
        let lanes = [Lane::Alone, guest, waiting, Lane::Computing, guest, guest, waiting];
        run_jobs(
            lanes.map(|lane| job(if lane == Lane::Alone { "alone" } else { "beside" }, lane)).into(),
            &mut report,
        );
        assert_eq!(order.lock().unwrap().last(), Some(&"alone"));
        assert!(report.to_string().ends_with("7 passed, 0 failed"));
    }
}
