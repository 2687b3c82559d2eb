//! Runs the parts of a test run beside each other, where they don't disturb each other.

use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::report::Report;
use crate::run::Log;

/// What a part spends its time on. Of each lane one part runs at a time.
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
    let mut queues = BESIDE.map(|_| Vec::new());
    for job in beside {
        let lane = BESIDE.iter().position(|lane| *lane == job.lane).unwrap_or_default();
        queues[lane].push(job);
    }
    let shared = Mutex::new(&mut *report);
    thread::scope(|scope| {
        for queue in queues {
            scope.spawn(|| queue.into_iter().for_each(|job| run_job(job, &shared)));
        }
    });
    alone.into_iter().for_each(|job| run_job(job, &Mutex::new(&mut *report)));
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
    fn lanes_run_beside_each_other_and_what_measures_time_runs_alone_at_the_end() {
        let mut report = Report::new(Log::default());
        let (meeting, running, order) = (Barrier::new(3), AtomicUsize::new(0), Mutex::new(Vec::new()));
        let job = |name: &'static str, lane: Lane| {
            let (meeting, running, order) = (&meeting, &running, &order);
            Job::new(name, lane, move |report: &mut Report| {
                let beside = running.fetch_add(1, Ordering::SeqCst);
                if lane == Lane::Alone {
                    assert_eq!(beside, 0);
                } else {
                    // Passes once a part of each other lane has come here.
                    meeting.wait();
                }
                running.fetch_sub(1, Ordering::SeqCst);
                order.lock().unwrap().push(name);
                report.add_check(name, Duration::ZERO, None);
            })
        };
        let jobs = vec![
            job("alone", Lane::Alone),
            job("guest", Lane::Guest),
            job("waiting", Lane::Waiting),
            job("computing", Lane::Computing),
        ];
        run_jobs(jobs, &mut report);
        assert_eq!(order.lock().unwrap().last(), Some(&"alone"));
        assert!(report.to_string().ends_with("4 passed, 0 failed"));
    }
}
