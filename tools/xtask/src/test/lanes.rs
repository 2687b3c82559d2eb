//! Runs the parts of a test run beside each other, where they don't disturb each other.

use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::report::Report;
use crate::run::Log;

/// The longest parts, in the order in which they start; the others follow.
const LONGEST: [&str; 10] = [
    "noded it in a guest",
    "nodekeel-localstorage it in a guest",
    "provisionerd node ignored, with guests",
    "nodekeel-cluster it ignored, with daemons",
    "provisionerd it ignored, with daemons",
    "nodekeel-provisioner it in a guest",
    "nodekeel-fsquota it in a guest",
    "noded it ignored, with daemons",
    "nodekeel-containerd-svc daemon ignored, with daemons",
    "nodekeel-localstorage it ignored, with daemons",
];

/// What a part spends its time on. Each lane has a worker, which takes its longest part first; one whose lane is empty
/// takes the longest of the others.
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

/// Runs all of them, the longest first. The output of each is shown as one block when it has ended.
pub(crate) fn run_jobs(jobs: Vec<Job<'_>>, report: &mut Report) {
    let (alone, mut beside): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| job.lane == Lane::Alone);
    beside.sort_by_key(|job| LONGEST.iter().position(|name| *name == job.name).unwrap_or(LONGEST.len()));
    let (jobs, report) = (&Mutex::new(beside), &Mutex::new(report));
    thread::scope(|scope| {
        for lane in BESIDE {
            scope.spawn(move || {
                while let Some(job) = take_job(jobs, lane) {
                    run_job(job, report);
                }
            });
        }
    });
    alone.into_iter().for_each(|job| run_job(job, report));
}

/// The longest job of a lane; where there are no more, of another lane. The waiting lane takes no guests: two emulate
/// their processors beside each other, and a third would slow them all down.
fn take_job<'a>(jobs: &Mutex<Vec<Job<'a>>>, lane: Lane) -> Option<Job<'a>> {
    let mut jobs = jobs.lock().unwrap_or_else(PoisonError::into_inner);
    let may_take = |job: &Job<'_>| lane != Lane::Waiting || job.lane != Lane::Guest;
    let place = jobs.iter().position(|job| job.lane == lane).or_else(|| jobs.iter().position(may_take))?;
    Some(jobs.remove(place))
}

/// Runs a job, and shows its output as one block when it has ended.
pub(crate) fn run_job(job: Job<'_>, report: &Mutex<&mut Report>) {
    let lock = || report.lock().unwrap_or_else(PoisonError::into_inner);
    let say = |report: &Report, text: &str| {
        println!("[{:5.1} min] {text}", report.elapsed().as_secs_f64() / 60.0);
    };
    say(&lock(), &format!("start {}", job.name));
    let log = Log::buffered();
    let mut part = Report::new(log.clone());
    (job.work)(&mut part);
    let mut report = lock();
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
        let jobs = lanes.map(|lane| job(if lane == Lane::Alone { "alone" } else { "beside" }, lane));
        run_jobs(jobs.into(), &mut report);
        assert_eq!(order.lock().unwrap().last(), Some(&"alone"));
        assert!(report.to_string().ends_with("7 passed, 0 failed"));
    }

    #[test]
    fn an_empty_lane_takes_the_longest_part_of_the_others_and_the_waiting_one_no_guest() {
        let job = |name: &str, lane| Job::new(name, lane, |_: &mut Report| ());
        let jobs = [
            job("a", Lane::Guest),
            job("b", Lane::Waiting),
            job("c", Lane::Guest),
            job("d", Lane::Computing),
        ];
        let jobs = Mutex::new(Vec::from(jobs));
        let lanes = [Lane::Waiting, Lane::Waiting, Lane::Waiting, Lane::Computing, Lane::Guest, Lane::Guest];
        let taken = lanes.map(|lane| take_job(&jobs, lane).map(|job| job.name));
        let names = ["b", "d", "", "a", "c", ""];
        assert_eq!(taken.map(Option::unwrap_or_default), names.map(str::to_owned));
    }
}
