//! Every example runs and prints the expected output.

use std::path::PathBuf;
use std::process::Command;

/// The directory of the programs that `cargo test` builds: `target/PROFILE`.
fn target_directory() -> PathBuf {
    let deps = std::env::current_exe().expect("the path of the test binary");
    let target = deps.parent().and_then(|deps| deps.parent()).expect("the binary is in target/PROFILE/deps");
    target.to_owned()
}

/// An example, which `cargo test` has built already.
fn example_command(name: &str) -> Command {
    Command::new(target_directory().join("examples").join(name))
}

fn example_output(name: &str) -> String {
    let output = example_command(name).output().expect("the example was built");
    let text = String::from_utf8(output.stdout).expect("UTF-8 output");
    assert!(
        output.status.success(),
        "{}\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

#[track_caller]
fn assert_in_order(text: &str, pieces: &[&str]) {
    let mut rest = text;
    for piece in pieces {
        let at =
            rest.find(piece).unwrap_or_else(|| panic!("{piece:?} is missing, or out of order, in:\n{text}"));
        rest = &rest[at + piece.len()..];
    }
}

#[test]
fn supervise_shows_a_service_failing_restarting_and_reporting() {
    let pieces = [
        "root.flaky run 1  started",
        "dead: the disk has failed",
        "scheduled with backoff",
        "2 restarts, 2 consecutive failures",
        "run 2 exited dead: the disk has failed",
        "stopped, 0 stragglers",
    ];
    let text = example_output("supervise");
    assert_in_order(&text, &pieces);
    // A separate task delivers events, so the last one may be printed after the output of main.
    assert!(text.contains("root.flaky run 3  ready"), "{text}");
}

#[test]
fn child_process_shows_output_and_how_processes_end() {
    let text = example_output("child_process");
    assert_in_order(&text, &["root.worker", "root.once", "stopped, 0 stragglers"]);
    for piece in
        ["root.worker stdout run 1  ready to work", "root.worker stderr run 1  with a warning", "code 3"]
    {
        assert!(text.contains(piece), "{piece:?} is missing in:\n{text}");
    }
}

#[test]
fn log_tree_shows_backlog_and_stream() {
    let pieces = [
        "# backlog: everything",
        "checked the disk",
        "# live stream",
        "the disk has failed",
        "\"message\":\"no certificate\"",
    ];
    assert_in_order(&example_output("log_tree"), &pieces);
}

#[test]
fn place_tree_shows_a_declaration_and_what_it_becomes() {
    let pieces = [
        "# declared layout",
        "0700 pki/",
        "0600   cert-key.pem",
        "0640 sensors.json",
        "# written and read: [\"roof\", \"cellar\"]",
        "an absent file is not an error: None",
        "# created directories and files",
        "0750 acme-station/",
        "0640   sensors.json",
        "# a second new volume is rejected: /data ",
        "# after a restart the node's role is worker",
    ];
    assert_in_order(&example_output("place_tree"), &pieces);
}

#[test]
fn own_quota_shows_a_rejection_and_conforms() {
    let pieces = [
        "first: 60Mi bytes reserved",
        "second: 60Mi rejected",
        "second: 40Mi reserved",
        "first: 99 more files allowed",
        "a limit of 0 is rejected: true",
        "second, without first: 100Mi reserved",
        "conformance suite passed",
    ];
    assert_in_order(&example_output("own_quota"), &pieces);
}

#[test]
fn own_volume_store_conforms_and_rejects_overbooking() {
    let pieces = [
        "conformance suite passed",
        "000000000001: created",
        "000000000002 on this node",
        ": the claim goes",
    ];
    assert_in_order(&example_output("own_volume_store"), &pieces);
}

#[test]
fn own_data_volume_conforms_and_keeps_what_it_erases() {
    let pieces = [
        "conformance suite passed",
        "not erased: ",
        "the new volume has the identity: false",
        "the erased one still has it: node-7",
    ];
    assert_in_order(&example_output("own_data_volume"), &pieces);
}

#[test]
fn own_key_seal_conforms_and_never_takes_damage_for_absence() {
    let pieces = [
        "conformance suite passed",
        "key 07070707-0707-0707-0707-070707070707.1 is kept: true",
        "what is no key is an error: node unlock key 07070707-0707-0707-0707-070707070707.1 is damaged",
    ];
    assert_in_order(&example_output("own_key_seal"), &pieces);
}

#[test]
fn own_network_shows_an_address_that_comes_and_changes() {
    let pieces = [
        "without an address: CreatingCluster",
        "with an address: Running",
        "address in its record: Some(192.0.2.8)",
    ];
    assert_in_order(&example_output("own_network"), &pieces);
}

#[test]
fn own_consensus_runs_and_conforms() {
    let pieces = ["member own-1", "conformance suite passed, calls were counted: true"];
    assert_in_order(&example_output("own_consensus"), &pieces);
}

#[cfg(feature = "node")]
mod programs {
    //! The programs around a node answer `nodectl`, and stop by a signal.

    use std::fs;
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::process::{Child, Command, Output};
    use std::sync::LazyLock;

    use super::*;

    /// A configuration of what runs on every machine.
    const CONFIG: &str = "kernel.log = false\n[health]\nmin_free_percent = 0\nwarn_free_percent = 0\n\
        [[service]]\nname = \"sleep\"\ncommand = [\"/bin/sleep\", \"1000\"]\n";

    /// The path of nodectl: `NODEKEEL_NODECTL`, or built at the first use, since it is in another package.
    fn nodectl() -> Command {
        static BUILT: LazyLock<PathBuf> = LazyLock::new(|| {
            if let Some(path) = std::env::var_os("NODEKEEL_NODECTL") {
                return path.into();
            }
            let profile = target_directory();
            let target = profile.parent().expect("target");
            let mut build = Command::new(env!("CARGO"));
            build.args(["build", "--quiet", "--package", "nodectl", "--target-dir"]).arg(target);
            if profile.ends_with("release") {
                build.arg("--release");
            }
            assert!(build.status().expect("cargo").success(), "nodectl does not build");
            profile.join("nodectl")
        });
        Command::new(&*BUILT)
    }

    fn text_of(output: &Output) -> String {
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
    }

    /// A program that runs, ended with the value.
    struct Running(Child);

    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// Checks and runs a program with a configuration in a directory, asks it by nodectl, and stops it.
    fn run_program(example: &str, name: &str, config: &str, dns: &[&str], while_ready: impl FnOnce(&Path)) {
        let scratch = tempfile::tempdir().expect("a directory");
        let (file, data) = (scratch.path().join("node.toml"), scratch.path().join("data"));
        let metrics = scratch.path().join("metrics.sock");
        fs::write(&file, format!("{config}{CONFIG}[metrics]\naddress = {metrics:?}\n")).expect("written");
        let command = |verb: &str| {
            let mut command = example_command(example);
            command.arg(verb).arg("--config").arg(&file).arg("--data").arg(&data);
            command
        };
        let check = text_of(&command("check").output().expect("it runs"));
        let mut program = Running(command("run").spawn().expect("it runs"));
        let ask = |words: &[&str]| {
            let output = nodectl().arg("--socket").arg(data.join("run/control.sock")).args(words).output();
            let output = output.expect("nodectl runs");
            let text = text_of(&output);
            assert!(output.status.success(), "{words:?}: {} {text}", output.status);
            text
        };
        // It waits for a socket that does not exist yet, too.
        let health = ask(&["health", "--wait", "60s"]);
        assert!(health.contains("healthy"), "{health}");
        let tree = ask(&["tree"]);
        for dn in dns {
            assert!(check.contains(dn), "{dn}: {check}");
            let short = dn.rsplit('.').next().unwrap_or(dn);
            assert!(tree.contains(short), "{dn}: {tree}");
            let status = ask(&["status", dn]);
            assert!(status.contains("ready"), "{dn}: {status}");
        }
        assert!(!tree.contains("etcd") && !tree.contains("containerd"), "{tree}");
        while_ready(&data);
        // A reload, and a second program on the directory, tell its own name.
        ask(&["reload"]);
        let second = command("run").output().expect("it runs");
        let text = text_of(&second);
        assert_eq!(second.status.code(), Some(5), "{text}");
        assert!(
            text.starts_with(&format!("{name}: ")) && text.contains(&format!("another {name} (pid ")),
            "{text}"
        );
        assert!(!text.contains("noded"), "{text}");
        let pid = program.0.id().to_string();
        assert!(Command::new("kill").arg(pid).status().expect("kill runs").success());
        assert_eq!(program.0.wait().expect("it ends").code(), Some(0));
    }

    #[test]
    fn own_program_is_a_node_without_etcd_and_kubernetes_under_its_own_name() {
        run_program("own_program", "stationd", "", &["root.sky", "root.service.sleep"], |_| {});
        let text = |verb: &str| text_of(&example_command("own_program").arg(verb).output().expect("it runs"));
        let config = text("config");
        assert!(config.contains("/var/lib/stationd") && !config.contains("noded"), "{config}");
        for table in ["\n[services.etcd]\n", "\n#     [cluster]\n", "\n#     [provisioner]\n"] {
            assert!(!config.contains(table), "{table}: {config}");
        }
        assert!(text("--version").starts_with("stationd "), "{}", text("--version"));
    }

    #[test]
    fn own_part_runs_next_to_the_shipped_parts() {
        let config =
            "services.etcd.enable = false\nservices.containerd.enable = false\nweather.place = \"roof\"\n";
        let dns = ["root.weather", "root.storage", "root.service.sleep"];
        run_program("own_part", "weatherd", config, &dns, |data| {
            let mut answer = String::new();
            let mut station = UnixStream::connect(data.join("run/weather.sock")).expect("it listens");
            station.read_to_string(&mut answer).expect("it answers");
            assert_eq!(answer, "sunny\n");
            let metrics = data.with_file_name("metrics.sock");
            let mut metrics = UnixStream::connect(metrics).expect("it listens");
            metrics.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("it reads");
            let mut text = String::new();
            metrics.read_to_string(&mut text).expect("it answers");
            assert!(text.contains("\nweatherd_healthy 1\n") && !text.contains("nodekeel_"), "{text}");
        });
    }
}

#[cfg(feature = "node")]
#[test]
fn own_node_runs_its_own_parts_and_rejoins_its_cluster_at_the_second_boot() {
    let ready = [
        "root.control             Ready",
        "root.lease               Ready",
        "root.cluster             Ready",
        "root.greeter             Ready",
        "root.service.listener    Ready",
        "the log of root.greeter: 1 line",
    ];
    let first = [
        "first boot",
        "volume: created",
        "cluster: New → CreatingCluster → Running",
        "boots in the cluster: 1",
    ];
    let second =
        ["second boot", "volume: mounted", "cluster: New → Restarting → Running", "boots in the cluster: 2"];
    let stopped = ["stopped, 0 stragglers"];
    let text = example_output("own_node");
    assert_in_order(&text, &[&first[..], &ready, &stopped, &second, &ready, &stopped].concat());
}

#[cfg(feature = "node")]
#[test]
fn three_nodes_are_a_cluster_whose_worker_serves_an_operator_without_any_voter() {
    let text = example_output("three_nodes");
    assert_in_order(
        &text,
        &[
            "the first voter has made a cluster",
            "the second voter has joined",
            "the worker has joined",
            "the cluster has 2 voters and 1 worker",
            "alice asks the worker: Running",
            "no voter is left",
            "alice asks the worker: Unhealthy",
            "is cut off from its cluster, and serves what it knew since 20",
        ],
    );
}
