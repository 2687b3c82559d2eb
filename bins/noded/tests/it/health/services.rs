//! Services, and what an earlier noded has left behind.

use std::fs;

use testbed::ScratchDir;

use super::{ask_health, wait_healthy, wait_problem};
use crate::harness::{NO_DAEMONS, NO_DISKS, NodedProcess, make_fifo, service_config, sleep_config, wait};

#[test]
fn a_service_that_fails_is_stopped_or_hangs_is_a_problem_until_it_is_well() {
    let scratch = ScratchDir::new().unwrap();
    let cured = scratch.path().join("cured");
    let script = format!("[ -e {} ] && exec sleep 1000; exit 3", cured.display());
    let fast = "backoff = { initial = \"1ms\", max = \"100ms\" }";
    let liveness = "liveness = { probe = [\"/bin/false\"], period = \"100ms\", failure_threshold = 1 }";
    let config = format!(
        "{NO_DAEMONS}{NO_DISKS}{}{}{}{}{}",
        service_config("loops", &script, fast),
        sleep_config("hangs", &format!("{fast}\n{liveness}")),
        service_config("once", "exit 4", "readiness = \"exit\"\nrestart = \"never\""),
        service_config(
            "limited",
            "exit 5",
            &format!("{fast}\nrestart_limit = {{ restarts = 2, period = \"1h\" }}")
        ),
        sleep_config("after", "depends_on = [\"once\"]"),
    );
    let noded = NodedProcess::start_in(scratch, &config, &[]);
    let found = wait_problem(&noded, "root.service.loops", "consecutive failures, the last one: ");
    assert!(found["problem"].as_str().unwrap().contains("exited with code 3"), "{found}");
    assert_eq!(found["part"], "service");
    assert_eq!(found["hint"], "`nodectl status root.service.loops`");
    assert!(found["since"].is_string(), "{found}");
    wait_problem(
        &noded,
        "root.service.hangs",
        "failures, the last one: the process failed 1 liveness probes in a row",
    );
    let found = wait_problem(&noded, "root.service.once", "has failed, and is not restarted: ");
    assert_eq!(found["hint"], "`nodectl status root.service.once`, then `nodectl restart root.service.once`");
    let found = wait_problem(&noded, "root.service.limited", "has failed, and is not restarted: ");
    assert!(found["problem"].as_str().unwrap().contains("exited with code 5"), "{found}");
    let status = noded.ask(&["status", "root.service.limited"]);
    assert!(
        status.contains("none by itself") && status.contains("nodectl restart root.service.limited"),
        "{status}"
    );
    let found = wait_problem(&noded, "root.service.after", "is not ready");
    assert_eq!(found["waiting_for"], "root.service.once to become ready");
    assert_eq!(found["hint"], "`nodectl status root.service.once`");

    let table = noded.nodectl(&["health"]).stdout;
    let header = table.lines().nth(1).unwrap().split("  ").map(str::trim).filter(|cell| !cell.is_empty());
    assert_eq!(header.collect::<Vec<_>>(), ["PART", "PROBLEM", "SINCE", "WAITING FOR", "WHAT TO TYPE"]);
    assert!(table.starts_with("not healthy: "), "{table}");

    for service in ["hangs", "once", "limited", "after"] {
        noded.ask(&["stop", "--wait", &format!("root.service.{service}")]);
        let found = wait_problem(&noded, &format!("root.service.{service}"), "was stopped by an operator");
        assert_eq!(found["hint"], format!("`nodectl start root.service.{service}`"));
    }
    fs::write(&cured, "").unwrap();
    // It stays a problem until it has been ready for ten seconds, and then only the stopped ones are left.
    wait("the cure", || {
        let (health, ..) = ask_health(&noded);
        let mut conditions = health["conditions"].as_array().unwrap().iter();
        let is_well =
            conditions.all(|found| found["object"] != "root.service.loops" || found["severity"] == "warning");
        anyhow::ensure!(is_well, "{health}");
        Ok(())
    });
    noded.stop();
}

#[test]
fn a_record_of_processes_that_can_not_be_read_is_a_warning_until_it_is_removed() {
    let scratch = ScratchDir::new().unwrap();
    let processes = scratch.path().join("data/run/processes");
    fs::create_dir_all(&processes).unwrap();
    let record = processes.join("host-7-5");
    fs::write(&record, "scribble").unwrap();
    let noded = NodedProcess::start_in(scratch, &format!("{NO_DAEMONS}{NO_DISKS}"), &[]);
    wait_healthy(&noded);
    let of_record = || {
        let (health, code, status_code) = ask_health(&noded);
        assert_eq!((code, status_code), (Some(0), Some(0)), "{health}");
        let mut conditions = health["conditions"].as_array().unwrap().clone().into_iter();
        conditions.find(|found| found["object"] == record.to_str().unwrap())
    };
    let found = of_record().expect("a warning");
    assert_eq!((&found["severity"], &found["part"]), (&"warning".into(), &"node".into()), "{found}");
    let problem = found["problem"].as_str().unwrap();
    assert!(
        problem.starts_with("can't be read, so processes of an earlier noded may still run: "),
        "{found}"
    );
    assert!(found["hint"].as_str().unwrap().ends_with(&format!("`rm {}`", record.display())), "{found}");
    fs::remove_file(&record).unwrap();
    assert_eq!(of_record(), None);
    noded.stop();
}

#[test]
fn health_waits_until_the_node_is_healthy_or_for_its_duration() {
    let scratch = ScratchDir::new().unwrap();
    let gate = make_fifo(scratch.path(), "gate");
    let script = format!("read line < {}; exit 0", gate.display());
    let config = format!("{NO_DAEMONS}{NO_DISKS}{}", service_config("step", &script, "readiness = \"exit\""));
    let noded = NodedProcess::start_in(scratch, &config, &[]);
    let ended = noded.nodectl(&["health", "--wait", "100ms"]);
    let is_named = ended.stdout.contains("root.service.step: is not ready");
    assert!(ended.code == Some(6) && is_named, "{ended:#?}");
    let waiting = noded.nodectl_command(&["health", "--wait"]).stdout(std::process::Stdio::null()).spawn();
    fs::write(&gate, "go\n").unwrap();
    assert_eq!(waiting.unwrap().wait().unwrap().code(), Some(0));
    wait_healthy(&noded);
    noded.stop();
}
