//! A node with many services: health, tree, metrics and reload stay answerable, also while all of them start or fail at
//! once.

use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use testbed::ScratchDir;

use crate::harness::{NO_DAEMONS, NO_DISKS, NodedProcess, http_get, make_fifo, service_config};

/// The number of services, unless the environment has another.
const SERVICES: usize = 100;

/// An answer may take this long on a busy machine.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// The number of services: `NODEKEEL_SERVICES`, or [`SERVICES`].
fn count_services() -> usize {
    std::env::var("NODEKEEL_SERVICES").ok().and_then(|text| text.parse().ok()).unwrap_or(SERVICES)
}

/// The configuration of a node with services that all wait until a FIFO was opened and closed, and then fail once.
fn config(scratch: &Path, count: usize, keys: &str) -> String {
    let script = format!(
        "[ -e {failed}/$0 ] || {{ read line <{gate}; : >{failed}/$0; exit 3; }}; exec sleep 1000",
        failed = scratch.join("failed").display(),
        gate = scratch.join("gate").display()
    );
    let backoff = "backoff = { initial = \"200ms\", max = \"200ms\" }";
    let service = |n: usize| {
        let script = script.replace("$0", &format!("s{n}"));
        let keys = if n == 0 { keys } else { "" };
        service_config(&format!("s{n}"), &script, &format!("{backoff}\n{keys}"))
    };
    let services: String = (0..count).map(service).collect();
    format!("{NO_DAEMONS}{NO_DISKS}[metrics]\naddress = {:?}\n{services}", scratch.join("metrics.sock"))
}

/// The longest time of each question.
#[derive(Debug, Default)]
struct AnswerTimes {
    slowest: Vec<(&'static str, Duration)>,
}

impl AnswerTimes {
    fn measure<T>(&mut self, question: &'static str, ask: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let answer = ask();
        let took = started.elapsed();
        match self.slowest.iter_mut().find(|(known, _)| *known == question) {
            Some((_, slowest)) => *slowest = took.max(*slowest),
            None => self.slowest.push((question, took)),
        }
        answer
    }

    /// Asks everything once.
    fn ask_all(&mut self, node: &NodedProcess) {
        let answers = |command: &mut Command| matches!(command.output().unwrap().status.code(), Some(0 | 6));
        for question in ["health", "tree", "status"] {
            assert!(self.measure(question, || answers(&mut node.nodectl_command(&[question]))), "{question}");
        }
        let socket = node.scratch.path().join("metrics.sock");
        let (status, _) =
            self.measure("/metrics", || http_get(UnixStream::connect(&socket).unwrap(), "/metrics"));
        assert_eq!(status, "HTTP/1.1 200 OK");
    }

    fn check(&self) {
        for (question, took) in &self.slowest {
            assert!(*took < ANSWER_TIME, "{question} took {took:?}: {self:?}");
        }
    }
}

#[test]
fn a_node_with_many_services_answers_while_all_of_them_fail_at_once() {
    let count = count_services();
    let scratch = ScratchDir::new().unwrap();
    fs::create_dir(scratch.path().join("failed")).unwrap();
    make_fifo(scratch.path(), "gate");
    let text = config(scratch.path(), count, "");
    let started = Instant::now();
    let node = NodedProcess::start_in(scratch, &text, &[]);
    let mut starting = AnswerTimes::default();
    starting.ask_all(&node);
    println!("{count} services: answers while they start: {starting:?}");
    node.nodectl(&["health", "--wait", "2m"]);
    println!("{count} services: ready after {:?}", started.elapsed());
    let mut quiet = AnswerTimes::default();
    (0..3).for_each(|_| quiet.ask_all(&node));

    // Releases those that wait by now: again and again, since a service is ready before it waits.
    let gate = node.scratch.path().join("gate");
    let release = || drop(File::options().write(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(&gate));
    let (mut stormy, started) = (AnswerTimes::default(), Instant::now());
    let restarted = |node: &NodedProcess| {
        let tree = node.ask_json(&["tree"]);
        tree.as_array()
            .unwrap()
            .iter()
            .filter(|node| node["generation"] == 2 && node["state"] == "ready")
            .count()
    };
    while restarted(&node) < count {
        release();
        stormy.ask_all(&node);
        assert!(started.elapsed() < Duration::from_secs(120), "{stormy:?}");
    }
    println!("all of them failed at once, and run again after {:?}: {stormy:?}", started.elapsed());

    node.write_config(&config(node.scratch.path(), count, "grace = \"3s\""));
    let reloaded = quiet.measure("reload", || node.ask(&["reload"]));
    assert_eq!(reloaded, "reloaded:\n  restart root.service.s0: grace\n");
    println!("{count} services: {quiet:?}");
    starting.check();
    quiet.check();
    stormy.check();
    let started = Instant::now();
    node.stop();
    println!("{count} services: stopped after {:?}", started.elapsed());
}
