//! The commands of `docs/operations.md` for a cluster on one machine, as its reader types them.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use testbed::{ScratchDir, leftovers, wait_until};

use crate::sources;

const SECTION: &str = "## Practise on one machine\n";
/// Many times what an election and a join take.
const WITHIN: Duration = Duration::from_secs(60);

/// The commands of the section, each with the text that it prints at last, if the section has one.
fn commands(document: &str) -> Vec<(&str, Option<&str>)> {
    let (_, section) = document.split_once(SECTION).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let blocks = section.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let lines = blocks.flat_map(str::lines).filter(|line| !line.is_empty());
    let commands = lines.map(|line| {
        let (command, comment) = line.split_once(" # ").unwrap_or((line, ""));
        (command.trim(), comment.strip_prefix("prints "))
    });
    commands.collect()
}

/// A cluster with a private state directory, which is removed also where the test fails.
struct Cluster(PathBuf);

impl Cluster {
    /// `cargo xtask cluster` with these words, on the programs that the tests were built with.
    fn command(&self, words: &str) -> Command {
        let program = Path::new(env!("CARGO_BIN_EXE_xtask"));
        let mut command = Command::new(program);
        command.args(["cluster", "--state"]).arg(&self.0).args(words.split(' ')).stdin(Stdio::null());
        if words.starts_with("up") {
            command.arg("--programs").arg(program.parent().unwrap());
        }
        command
    }

    /// Whether it succeeded, and all that it printed.
    fn run(&self, words: &str) -> (bool, String) {
        let output = self.command(words).output().unwrap();
        let printed = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&printed).into_owned())
    }

    /// Runs `up`, and kills it when half of it is there.
    fn start_half(&self) {
        let mut up = self.command("up").stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(up.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("n2 starts")), "n2 starts");
        up.kill().unwrap();
        up.wait().unwrap();
    }

    fn assert_nothing_left(&self) {
        let name = self.0.file_name().unwrap().to_str().unwrap();
        let namespaces = fs::read_dir("/run/netns").into_iter().flatten().flatten();
        let namespaces: Vec<_> = namespaces.map(|entry| entry.file_name().into_string().unwrap()).collect();
        assert!(!namespaces.iter().any(|namespace| namespace.contains(name)), "{namespaces:?}");
        assert_eq!(leftovers::find_processes(&self.0).unwrap(), []);
        assert!(leftovers::find_mounts(&self.0).unwrap().is_empty());
        assert!(leftovers::find_loop_devices(&self.0).unwrap().is_empty());
        assert!(!self.0.exists());
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let (_, printed) = self.run("down");
        eprintln!("{printed}");
    }
}

#[test]
#[ignore = "needs etcd, ip and root: it runs a cluster in network namespaces"]
fn the_practice_cluster_does_what_the_operations_guide_says() {
    let document = fs::read_to_string(sources::root().join("docs/operations.md")).unwrap();
    let scratch = ScratchDir::new().unwrap();
    let cluster = Cluster(scratch.path().join(format!("practice-{}", std::process::id())));
    cluster.start_half();
    for (command, printed) in commands(&document) {
        let words = command.strip_prefix("cargo xtask cluster ").unwrap();
        let Some(expected) = printed else {
            let (is_success, output) = cluster.run(words);
            assert!(is_success, "{command}: {output}");
            continue;
        };
        // A cluster needs a moment to notice.
        let met = wait_until(WITHIN, command, || {
            let (_, output) = cluster.run(words);
            anyhow::ensure!(output.contains(expected), "it prints no {expected:?}: {output}");
            Ok(())
        });
        met.unwrap();
    }
    cluster.assert_nothing_left();
    assert!(cluster.run("down").0, "down is repeated");
}

#[test]
#[ignore = "needs etcd, ip and root: it runs a cluster in network namespaces"]
fn a_removed_node_is_not_waited_for_and_joins_again_after_its_reset() {
    let scratch = ScratchDir::new().unwrap();
    let cluster = Cluster(scratch.path().join(format!("removal-{}", std::process::id())));
    let up = || {
        let (is_success, printed) = cluster.run("up --nodes 3");
        assert!(is_success, "{printed}");
        printed
    };
    up();
    let (_, members) = cluster.run("shell n1 nodectl -o json cluster members");
    let members: serde_json::Value = serde_json::from_str(&members).unwrap();
    let is_n2 = |member: &&serde_json::Value| member["peer_urls"][0].as_str().unwrap().contains("10.91.0.2:");
    let n2 = members.as_array().unwrap().iter().find(is_n2).unwrap()["name"].as_str().unwrap();
    let (is_success, printed) = cluster.run(&format!("shell n1 nodectl cluster remove {n2}"));
    assert!(is_success, "{printed}");
    let printed = up();
    let (_, rest) =
        printed.split_once("n2 was removed from the cluster: `cargo xtask cluster ").expect(&printed);
    let reset = rest.split('`').next().unwrap();
    assert!(printed.contains("every node is Running, and votes"), "{printed}");
    let (is_success, printed) = cluster.run(reset);
    assert!(is_success, "{printed}");
    let printed = up();
    assert!(printed.contains("n2 has joined"), "{printed}");
}

#[test]
fn commands_are_read_with_what_they_print() {
    let text = "## Practise on one machine\nText.\n\n```sh\na b   # why\n\nc  # prints d e\nf\n```\n\n## Next\n```sh\ng\n```\n";
    assert_eq!(commands(text), [("a b", None), ("c", Some("d e")), ("f", None)]);
}
