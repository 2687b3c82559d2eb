//! The command lines in the documents, and in the hints of errors, are understood by the programs.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use nodekeel_node::access::{Callers, METHODS, NODE_METHODS, Role};

use crate::harness::{noded_command, run_nodectl};

const A_KEY: &str = "ed25519:A6EHv_POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg";

/// Words that stand for a value.
const VALUES: [(&str, &str); 16] = [
    ("LEVEL", "warn"),
    ("DURATION", "30s"),
    ("SECONDS", "5"),
    ("N", "3"),
    ("TIME", "10m"),
    ("NAME=VALUE", "a=b"),
    ("RATE", "50MiB"),
    ("IP", "192.0.2.8"),
    ("ADDRESS", "192.0.2.8"),
    ("CURSOR", "1"),
    ("HOST:PORT", "192.0.2.8:7443"),
    ("KEY", A_KEY),
    ("ROLE", "reader"),
    ("SHELL", "bash"),
    ("SIGNAL", "SIGHUP"),
    ("COMMAND", ""),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The command lines of a Markdown text: in backticks, and those that begin a line of a code block.
fn commands_of_document(text: &str) -> Vec<String> {
    let mut is_code = false;
    let mut found = Vec::new();
    for line in text.lines() {
        let trimmed = line.trim_start();
        if trimmed.starts_with("```") {
            is_code = !is_code;
        } else if is_code {
            let line = trimmed.trim_start_matches("$ ").trim_start_matches("# ").trim_start_matches("sudo ");
            // A synopsis has its description after some spaces.
            found.push(line.split("   ").next().unwrap_or(line).to_owned());
        } else {
            found.extend(line.split('`').skip(1).step_by(2).map(str::to_owned));
        }
    }
    // A diagram has programs, too.
    found.retain(|line| !line.contains("──"));
    found.retain(|line| line.starts_with("noded ") || line.starts_with("nodectl "));
    found
}

/// The command lines in backticks of a source's texts.
fn commands_of_source(text: &str) -> Vec<String> {
    let spans = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    spans
        .filter(|span| span.starts_with("noded ") || span.starts_with("nodectl "))
        .map(str::to_owned)
        .collect()
}

/// The command lines that a line with alternatives, options in brackets and words for values stands for.
fn expand(line: &str) -> Vec<Vec<String>> {
    let end = ["…", " > ", " | ", ";", " && ", " & ", "  #"].iter().filter_map(|end| line.find(end)).min();
    // In brackets, a bar with spaces separates options; all of them are known.
    let line = if line.contains(" [") {
        line.replace(" | ", " ")
    } else {
        line[..end.unwrap_or(line.len())].to_owned()
    };
    let mut lines = vec![Vec::new()];
    let mut before = String::new();
    for word in line.split_whitespace() {
        let word = word.replace(['[', ']', '"', '\''], "");
        let words = word.split('|').map(|word| match VALUES.iter().find(|(name, _)| *name == word) {
            Some((_, value)) => (*value).to_owned(),
            None if word.contains('{') => match before.as_str() {
                "--address" => "192.0.2.8".to_owned(),
                "--port" => "2380".to_owned(),
                "--key" => A_KEY.to_owned(),
                _ => "root.a".to_owned(),
            },
            None => word.to_owned(),
        });
        lines = words
            .flat_map(|word| lines.iter().map(move |line| [&line[..], std::slice::from_ref(&word)].concat()))
            .collect();
        before = word.clone();
    }
    lines.iter_mut().for_each(|line| line.retain(|word| !word.is_empty()));
    lines
}

/// The error of a program that does not know a word of this line; `--help` keeps it from running.
fn refusal(line: &[String]) -> Option<String> {
    let args: Vec<&str> = line[1..].iter().map(String::as_str).chain(["--help"]).collect();
    let ended = match line[0].as_str() {
        "noded" => crate::harness::Ended::of(&mut noded_command(&args)),
        _ => run_nodectl(&args),
    };
    // An option that is named without its value is known.
    let is_known = ended.code == Some(0) || ended.stderr.contains("a value is required for");
    (!is_known).then_some(ended.stderr)
}

fn tracked_files(pattern: &str) -> Vec<PathBuf> {
    let listed = Command::new("git").args(["ls-files", pattern]).current_dir(root()).output().unwrap();
    String::from_utf8(listed.stdout).unwrap().lines().map(|path| root().join(path)).collect()
}

#[test]
fn every_command_in_a_document_or_a_hint_is_known_to_its_program() {
    let read = |path: &PathBuf| fs::read_to_string(path).unwrap_or_default();
    let documents =
        tracked_files("*.md").iter().flat_map(|path| commands_of_document(&read(path))).collect::<Vec<_>>();
    assert!(documents.len() > 100, "the documents were read: {documents:?}");
    let sources = ["node/src/*.rs", "cluster/src/*.rs", "bins/nodectl/src/*.rs"];
    let sources = sources.into_iter().flat_map(tracked_files);
    let hints: Vec<_> = sources.flat_map(|path| commands_of_source(&read(&path))).collect();
    assert!(hints.len() > 20, "the sources were read: {hints:?}");
    let lines: BTreeSet<_> = documents.iter().chain(&hints).flat_map(|line| expand(line)).collect();
    let refused = lines.iter().filter_map(|line| Some(format!("{}: {}", line.join(" "), refusal(line)?)));
    let refused: Vec<_> = refused.collect();
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

#[test]
fn the_roles_in_the_document_are_those_that_the_node_enforces() {
    let text = fs::read_to_string(root().join("docs/nodectl.md")).unwrap();
    let printed = |caller: &str| -> Vec<_> {
        let row = text.lines().find_map(|line| line.strip_prefix(&format!("| `{caller}` | "))).unwrap();
        row.split('`').skip(1).step_by(2).collect()
    };
    for role in Role::ALL {
        let of_role = METHODS.iter().filter(|(_, least)| *least == role);
        assert_eq!(printed(role.as_str()), of_role.map(|(method, _)| *method).collect::<Vec<_>>(), "{role}");
    }
    for (caller, callers) in [("node", Callers::Nodes), ("stranger", Callers::Strangers)] {
        let of_caller = NODE_METHODS.iter().filter(|(_, table)| *table == callers);
        assert_eq!(printed(caller), of_caller.map(|(method, _)| *method).collect::<Vec<_>>(), "{caller}");
    }
}

#[test]
fn an_unknown_command_option_or_value_is_found() {
    let text = "Type `nodectl dance` or\n```sh\n$ nodectl logs --loud\nnodectl logs [--raw | --leveled]    list\n```\n";
    let lines = commands_of_document(text);
    assert_eq!(lines, ["nodectl dance", "nodectl logs --loud", "nodectl logs [--raw | --leveled]"]);
    let refusals: Vec<_> = lines.iter().flat_map(|line| expand(line)).map(|line| refusal(&line)).collect();
    assert_eq!(refusals.iter().map(Option::is_some).collect::<Vec<_>>(), [true, true, false], "{refusals:?}");
    for bad in ["noded check --confg FILE", "nodectl health --wait soon", "nodectl log-level root loud"] {
        assert!(expand(bad).iter().all(|line| refusal(line).is_some()), "{bad}");
    }
    let shown = |line: &str| expand(line).iter().map(|line| line.join(" ")).collect::<Vec<_>>();
    assert_eq!(
        shown("nodectl restart|stop DN [--wait]"),
        ["nodectl restart DN --wait", "nodectl stop DN --wait"]
    );
    assert_eq!(shown("nodectl -o json logs -f > log"), ["nodectl -o json logs -f"]);
    assert_eq!(shown("nodectl status {dn}"), ["nodectl status root.a"]);
}
