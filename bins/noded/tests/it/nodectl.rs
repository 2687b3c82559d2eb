//! nodectl as its user sees it.

use std::fs;
use std::io::{Read as _, Write as _};
use std::process::Stdio;
use std::time::Instant;

use nix::sys::signal::Signal;
use testbed::ScratchDir;

use crate::harness::{
    Ended, NO_DAEMONS, NodedProcess, STUBBORN, TEST_TIMEOUT, service_config, sleep_config, wait,
};

#[test]
fn a_node_that_does_not_answer_times_out() {
    let node = NodedProcess::start(NO_DAEMONS);
    node.signal(Signal::SIGSTOP);
    for args in [
        &["tree"][..],
        &["tree", "--watch"],
        &["status", "root"],
        &["logs", "-f"],
        &["events"],
        &["restart", "--wait", "root.control"],
        &["version"],
    ] {
        let ended = node.nodectl(&[&["--timeout", "0.2"], args].concat());
        ended.assert_fails(3, "nodectl: noded does not answer");
    }
    node.signal(Signal::SIGCONT);
    node.stop();
}

#[test]
fn a_follower_exits_when_its_reader_closes_the_pipe() {
    let node = NodedProcess::start(NO_DAEMONS);
    for args in [&["logs", "-f", "root"][..], &["events", "-f"], &["tree", "--watch"]] {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut child = node.nodectl_command(args).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        if args[0] != "logs" {
            // The first output has arrived: from now on nothing happens.
            reader.read_exact(&mut [0]).unwrap();
        }
        drop(reader);
        let ended = || child.try_wait().unwrap().ok_or_else(|| anyhow::anyhow!("still running"));
        assert_eq!(wait("its exit", ended).code(), Some(0), "{args:?}");
    }
    node.stop();
}

#[test]
fn actions_report_state_and_generation_in_json() {
    let node = NodedProcess::start(&format!("{NO_DAEMONS}{}", sleep_config("a", "")));
    node.wait_ready("root.service.a");
    for (args, state, generation) in [
        (["restart", "--wait"], "ready", 2),
        (["stop", "--wait"], "stopped", 2),
        (["start", "--wait"], "ready", 3),
    ] {
        let output = node.ask_json(&[&args[..], &["root.service.a"]].concat());
        assert_eq!(output["dn"], "root.service.a", "{output}");
        assert_eq!(output["action"], args[0], "{output}");
        assert_eq!(
            (output["state"].as_str(), output["generation"].as_u64()),
            (Some(state), Some(generation))
        );
    }
    let output = node.ask_json(&["restart", "root.service.a"]);
    assert!(output["generation"].as_u64() >= Some(3) && output["state"].is_string(), "{output}");
    node.stop();
}

#[test]
fn the_control_api_can_be_restarted_through_itself_with_wait() {
    let node = NodedProcess::start(NO_DAEMONS);
    for (dn, generation) in [("root.control", 2), ("root.control", 3), ("root", 2)] {
        let output = node.ask_json(&["restart", "--wait", dn]);
        assert_eq!(output["state"], "ready", "{output}");
        assert_eq!(output["generation"].as_u64(), Some(generation), "{output}");
    }
    node.ask(&["restart", "root.control"]);
    node.ask(&["tree"]);
    node.stop();
}

#[test]
fn a_socket_that_was_removed_is_there_again_at_once() {
    let node = NodedProcess::start(NO_DAEMONS);
    let (socket, run) = (node.socket(), node.data().join("run"));
    let there = || if socket.exists() { Ok(()) } else { anyhow::bail!("not yet") };
    for gone in [&socket, &run] {
        if gone.is_dir() { fs::remove_dir_all(gone) } else { fs::remove_file(gone) }.unwrap();
        wait("the socket", there);
        node.ask(&["tree"]);
    }
    assert!(node.ask(&["logs", "control"]).contains("was gone: it was bound again"));
    node.stop();
}

#[test]
fn a_client_without_a_socket_is_told_which_process_runs_the_node() {
    let scratch = ScratchDir::new().unwrap();
    let elsewhere = scratch.path().join("s");
    let config = format!("{NO_DAEMONS}[control]\nsocket = {elsewhere:?}\n");
    let mut node = NodedProcess::start_in(scratch, &config, &[]);
    let says = format!("the socket does not exist, but process {} runs the node", node.pid());
    node.nodectl(&["tree"]).assert_fails_in_a_line(3, &says);
    node.stop_by(Signal::SIGTERM);
    node.nodectl(&["tree"]).assert_fails_in_a_line(3, "the socket does not exist; start noded");
}

#[test]
fn a_stopping_node_answers_reads_and_rejects_actions() {
    let config = format!("{NO_DAEMONS}{}", service_config("a", STUBBORN, "grace = \"1h\""));
    let mut node = NodedProcess::start(&config);
    node.wait_for_output("root.service.a", "set");
    let watch = node.follow(&["tree", "--watch"]);
    watch.find_value(|_| true);
    let events = node.follow(&["events", "-f"]);
    node.signal(Signal::SIGTERM);
    events.find_value(|event| event["dn"] == "root.service.a" && event["change"] == "canceling");

    let nodes = node.ask_json(&["tree"]);
    assert!(nodes.as_array().unwrap().iter().any(|node| node["dn"] == "root.service.a"), "{nodes}");
    assert_eq!(node.status("root.service.a")["state"], "ready");
    assert!(node.ask(&["logs", "root.service.a"]).contains("set"));
    node.follow(&["tree", "--watch"]).find_value(|_| true);
    for action in ["start", "stop", "restart"] {
        let ended = node.nodectl(&[action, "root.service.a"]);
        assert_eq!((&*ended.stderr, ended.code), ("nodectl: the node is stopping", Some(3)), "{action}");
    }
    assert_eq!(node.force_exit(), Some(7));
}

#[test]
fn a_failed_service_shows_its_exit_in_the_tree_and_raw_lines_show_their_time() {
    let keys = "readiness = \"exit\"\nrestart = \"never\"";
    let node =
        NodedProcess::start(&format!("{NO_DAEMONS}{}", service_config("a", "echo last words; exit 3", keys)));
    node.wait_for_event("root.service.a", 1, "exited");
    let tree = node.ask(&["tree"]);
    assert!(tree.lines().any(|line| line.contains(" a ") && line.contains("exited with code 3")), "{tree}");
    node.wait_for_output("root.service.a", "last words");
    let log = node.ask(&["logs", "--raw", "root.service.a"]);
    let [line] = &log.lines().collect::<Vec<_>>()[..] else { panic!("one line: {log}") };
    let (time, rest) = line.split_once("  ").unwrap();
    assert!(time.ends_with('Z') && time.len() == 24, "{line}");
    assert_eq!(rest.split_whitespace().collect::<Vec<_>>(), ["root.service.a", "R", "last", "words"]);
    node.stop();
}

#[test]
fn status_names_a_crash_loop_and_fails_until_the_service_is_stable() {
    let scratch = ScratchDir::new().unwrap();
    let cured = scratch.path().join("cured");
    // It is ready as soon as it runs, and so between all its failures.
    let script = format!("[ -e {} ] && exec sleep 1000; exec sleep 0.05; exit 3", cured.display());
    let keys = "backoff = { initial = \"1ms\", max = \"1ms\" }";
    let config = format!("{NO_DAEMONS}{}", service_config("a", &script, keys));
    let node = NodedProcess::start_in(scratch, &config, &[]);
    node.wait_for_event("root.service.a", 3, "started");
    for _ in 0..20 {
        let Ended { stdout: text, code, .. } = node.nodectl(&["status"]);
        assert_eq!(code, Some(6), "{text}");
        assert!(
            text.contains("1 of 5 runnables is not healthy") && text.contains("root.service.a is "),
            "{text}"
        );
        assert!(text.contains("crash-loops: ") && text.contains(" consecutive failures"), "{text}");
    }
    let ended = node.nodectl(&["-o", "json", "status"]);
    let json = ended.json();
    assert_eq!((ended.code, &json["healthy"]), (Some(6), &serde_json::json!(false)), "{json}");
    let unhealthy = json["nodes"].as_array().unwrap().iter().filter(|node| node["healthy"] == false);
    let unhealthy: Vec<_> = unhealthy.map(|node| (&node["dn"], &node["crash_looping"])).collect();
    assert_eq!(unhealthy, [(&"root.service.a".into(), &true.into())], "{json}");
    let tree = node.ask(&["tree"]);
    assert!(tree.lines().last().unwrap().starts_with("1 of 5 runnables is not healthy"), "{tree}");
    assert!(tree.contains("crash-loops: "), "{tree}");
    assert_eq!(node.nodectl(&["status", "root.service.a"]).code, Some(6));
    assert_eq!(node.nodectl(&["status", "root.control"]).code, Some(0));

    let watch = node.follow(&["tree", "--watch"]);
    fs::write(&cured, "").unwrap();
    // Ready for ten seconds, the time that resets its backoff: nothing else happens then.
    watch.find_value(|tree| tree.as_array().unwrap().iter().all(|node| node["healthy"] == true));
    let Ended { stdout: text, code, .. } = node.nodectl(&["status"]);
    assert!(code == Some(0) && text.contains("all 5 runnables are ready"), "{code:?} {text}");
    node.ask(&["stop", "--wait", "root.service.a"]);
    let Ended { stdout: text, code, .. } = node.nodectl(&["status"]);
    assert!(code == Some(6) && text.contains("root.service.a is stopped"), "{code:?} {text}");
    node.stop();
}

#[test]
fn a_start_of_a_ready_runnable_says_that_it_is_ready_already() {
    let node = NodedProcess::start(&format!("{NO_DAEMONS}{}", sleep_config("a", "")));
    node.wait_ready("root.service.a");
    for args in [&["start", "root.service.a"][..], &["start", "--wait", "root.service.a"]] {
        assert_eq!(node.ask(args), "root.service.a is already ready\n");
    }
    node.ask(&["stop", "--wait", "root.service.a"]);
    assert_eq!(node.ask(&["start", "root.service.a"]), "root.service.a is being started\n");
    node.stop();
}

/// A terminal, and what nodectl draws on it.
struct TestTerminal {
    output: std::sync::mpsc::Receiver<String>,
    device: std::path::PathBuf,
    child: std::process::Child,
}

impl TestTerminal {
    fn start(node: &NodedProcess, columns: u16, rows: u16, args: &[&str]) -> Self {
        let size = nix::pty::Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let pair = nix::pty::openpty(Some(&size), None).unwrap();
        let device = nix::unistd::ttyname(&pair.slave).unwrap();
        // The terminal becomes the controlling one of nodectl, which is notified of its changes.
        let nodectl = node.nodectl_command(args);
        let mut command = std::process::Command::new("setsid");
        command.args(["--ctty", nodectl.get_program().to_str().unwrap()]).args(nodectl.get_args());
        command.env_clear().env("PATH", "/usr/bin:/bin").env("NODEKEEL_SOCKET", node.socket());
        let child = command.stdin(pair.slave.try_clone().unwrap()).stdout(pair.slave).spawn().unwrap();
        let (send, output) = std::sync::mpsc::channel();
        let mut screen = std::fs::File::from(pair.master);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(read) = screen.read(&mut buffer)
                && send.send(String::from_utf8_lossy(&buffer[..read]).into_owned()).is_ok()
            {}
        });
        Self { output, device, child }
    }

    fn resize(&self, columns: u16, rows: u16) {
        let (columns, rows) = (columns.to_string(), rows.to_string());
        let mut stty = std::process::Command::new("stty");
        stty.arg("-F").arg(&self.device).args(["cols", &columns, "rows", &rows]);
        assert!(stty.status().unwrap().success());
    }

    /// All that a command prints until it has ended.
    fn read_to_end(&mut self) -> String {
        let mut text = String::new();
        while let Ok(read) = self.output.recv_timeout(TEST_TIMEOUT) {
            text += &read;
        }
        plain_text(&text)
    }

    /// Reads until a frame has what is wanted of its lines.
    fn find_in_frame<T>(&self, wanted: impl Fn(&[&str]) -> Option<T>) -> T {
        let (started, mut text) = (Instant::now(), String::new());
        loop {
            text += &self.output.recv_timeout(TEST_TIMEOUT).unwrap();
            let plain = plain_text(&text);
            // A frame starts at the top left, and is complete when the next one starts.
            let mut frames: Vec<&str> = plain.split("\x1b[H").collect();
            frames.pop();
            if let Some(found) = frames.iter().find_map(|frame| wanted(&frame.lines().collect::<Vec<_>>())) {
                return found;
            }
            assert!(started.elapsed() < TEST_TIMEOUT, "{plain}");
        }
    }
}

impl Drop for TestTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Without colors and what erases; only the jumps to the top left remain.
fn plain_text(text: &str) -> String {
    let mut plain = text.replace('\r', "");
    while let Some((start, length)) = plain.match_indices("\x1b[").find_map(|(start, _)| {
        let length = plain[start + 2..].find(|c: char| c.is_ascii_alphabetic())? + 3;
        (plain[start..start + length] != *"\x1b[H").then_some((start, length))
    }) {
        plain.replace_range(start..start + length, "");
    }
    plain
}

#[test]
fn a_watched_tree_fits_its_terminal_and_counts_down() {
    let mut config = NO_DAEMONS.to_owned();
    config.extend((0..12).map(|number| sleep_config(&format!("quiet-{number}"), "")));
    let keys = "backoff = { initial = \"1h\", max = \"1h\", jitter = 0.0 }";
    config += &service_config("fails", "exit 3", keys);
    let node = NodedProcess::start(&config);
    node.wait_for_event("root.service.fails", 1, "exited");
    (0..12).for_each(|number| node.wait_ready(&format!("root.service.quiet-{number}")));
    let terminal = TestTerminal::start(&node, 60, 10, &["tree", "--watch"]);
    let fits = |lines: &[&str], columns, rows| {
        assert!(
            lines.len() <= rows && lines.iter().all(|line| line.chars().count() <= columns),
            "{lines:#?}"
        );
        // The cursor stays in the last line.
        lines.len() == rows - 1
            && lines[0].starts_with("NAME")
            && lines.iter().any(|line| line.contains("fails") && line.contains("waiting"))
            && lines[rows - 2].contains("not healthy")
    };
    terminal.find_in_frame(|lines| fits(lines, 60, 10).then_some(()));
    // The wait of an hour moves on, although nothing happens.
    let left = |lines: &[&str]| {
        let after = lines.iter().find_map(|line| line.split_once("its backoff, "))?.1;
        Some(after.split_once(" more")?.0.to_owned())
    };
    let first = terminal.find_in_frame(left);
    terminal.find_in_frame(|lines| left(lines).filter(|left| *left != first));
    terminal.resize(90, 14);
    terminal.find_in_frame(|lines| {
        let is_wide = lines.iter().any(|line| line.chars().count() > 60);
        (lines.len() == 13 && is_wide).then_some(())
    });
    drop(terminal);
    node.stop();
}

#[test]
fn every_table_fits_a_terminal_of_80_columns() {
    let keys = "backoff = { initial = \"1h\", max = \"1h\", jitter = 0.0 }";
    let service = service_config("a-service-with-a-long-name", "echo failed; exit 3", keys);
    let node = NodedProcess::start(&format!("{NO_DAEMONS}{service}"));
    node.wait_for_event("root.service.a-service-with-a-long-name", 1, "exited");
    let wide = node.nodectl(&["health"]).stdout;
    assert!(wide.lines().any(|line| line.chars().count() > 80), "{wide}");
    for args in [&["health"][..], &["tree"], &["log-level"]] {
        let text = TestTerminal::start(&node, 80, 24, args).read_to_end();
        assert!(text.lines().count() > 0 && text.lines().all(|line| line.chars().count() <= 80), "{text}");
        if args == ["health"] {
            assert!(
                text.contains("\nWHAT TO TYPE  `nodectl status root.service.a-service-with-a-long-name`\n"),
                "{text}"
            );
        }
    }
    node.stop();
}

#[test]
fn storage_says_what_the_volume_is_and_reads_passphrases_from_files_and_pipes_alone() {
    let node = NodedProcess::start(NO_DAEMONS);
    node.wait_ready("root.storage");
    let path = node.data().join("data");
    let text = format!("open at {}: not encrypted by noded\n", path.display());
    assert_eq!(node.ask(&["storage", "status"]), text);
    let status = node.ask_json(&["storage", "status"]);
    assert_eq!((&status["state"], &status["encryption"]), (&"open".into(), &serde_json::Value::Null));

    let file = node.scratch.path().join("passphrase");
    let by_file = ["--passphrase-file", file.to_str().unwrap()];
    fs::write(&file, "00000-00000-00000-00000-00000-00000-00gkg\nmore\n").unwrap();
    for (args, says) in [
        (&["rotate"][..], "nodectl: the data volume is not encrypted"),
        (&["recovery"], "nodectl: the data volume is not encrypted"),
        // A directory is not trimmed, and nothing is to be erased.
        (&["trim"], "it is a directory"),
        (&["erase", "ext-1"], "nodectl storage status"),
        // The standard input is empty.
        (&["unlock"], "0 symbols"),
        (&[&["unlock"], &by_file[..]].concat(), "does not wait for a key"),
        (&[&["rotate"], &by_file[..]].concat(), "not encrypted"),
    ] {
        node.nodectl(&[&["storage"], args].concat()).assert_fails(1, says);
    }
    fs::write(&file, "00000-00000-00000-00000-00000-00000-00gkk\n").unwrap();
    let confirm = [&["storage", "recovery", "--confirm"], &by_file[..]].concat();
    node.nodectl(&confirm).assert_fails(1, "wrong checksum");

    let mut command = node.nodectl_command(&["storage", "unlock"]);
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"00000-00000-00000-00000-00000-00000-00GKG\n").unwrap();
    Ended::from(child.wait_with_output().unwrap()).assert_fails(1, "does not wait for a key");
    // A passphrase is no argument.
    assert_eq!(node.nodectl(&["storage", "unlock", "00000"]).code, Some(2));

    let events = node.ask(&["events"]);
    assert!(events.contains("unlock") && !events.contains("00000-00000"), "{events}");
    node.stop();
}
