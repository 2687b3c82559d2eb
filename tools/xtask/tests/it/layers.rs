//! The allowed dependencies between members.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

const LEAVES: [&str; 4] = ["supervisor", "logtree", "localstorage", "fsquota"];
const SERVICES: [&str; 3] = ["provisioner", "containerd-svc", "cluster"];

/// Whether a member may depend on another, both by their directories below the workspace's root.
fn is_allowed(from: &str, to: &str) -> bool {
    let (is_leaf, is_service) = (LEAVES.contains(&to), SERVICES.contains(&to));
    match from {
        // It reads the mount table with localstorage's parser and walks trees with its walker.
        "fsquota" => to == "localstorage",
        leaf if LEAVES.contains(&leaf) => false,
        service if SERVICES.contains(&service) => is_leaf,
        // The library of the node program.
        "node" => is_leaf || is_service,
        // Tasks and tests must build where protoc isn't installed yet.
        "tools/testbed" => false,
        "tools/xtask" => to == "tools/testbed",
        program if program == "examples" || program.starts_with("bins/") => {
            is_leaf || is_service || to == "node" || to.starts_with("bins/") || to.starts_with("tools/")
        }
        _ => false,
    }
}

/// The dependencies that violate the layers; dev-dependencies reach no user and are free.
fn violations(metadata: &Value) -> Vec<String> {
    let mut found = Vec::new();
    for (name, directory, dependencies) in members(metadata) {
        let wrong = dependencies.into_iter().filter(|dependency| !is_allowed(&directory, dependency));
        found.extend(wrong.map(|dependency| format!("{name} depends on {dependency}")));
    }
    found
}

/// Each member's name, directory, and the directories of the members that it depends on.
fn members(metadata: &Value) -> Vec<(String, String, Vec<String>)> {
    let root = metadata["workspace_root"].as_str().expect("metadata has a root");
    let below = |path: &str| {
        let path = Path::new(path).strip_prefix(root).unwrap_or(Path::new(path));
        path.to_str().expect("members have UTF-8 paths").to_owned()
    };
    let packages = metadata["packages"].as_array().expect("metadata has packages");
    let read = |package: &Value| {
        let manifest = package["manifest_path"].as_str().expect("a package has a manifest");
        let directory = below(manifest.trim_end_matches("/Cargo.toml"));
        let dependencies = package["dependencies"].as_array().expect("a package has dependencies");
        let used = dependencies.iter().filter(|dependency| dependency["kind"] != "dev");
        let paths = used.filter_map(|dependency| dependency["path"].as_str());
        (package["name"].as_str().expect("a name").to_owned(), directory, paths.map(below).collect())
    };
    packages.iter().map(read).collect()
}

fn cargo(arguments: &[&str]) -> String {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(arguments).arg("--offline").current_dir(env!("CARGO_MANIFEST_DIR"));
    testbed::command_output(&mut cargo).expect("cargo runs")
}

/// The packages that a build of this one with these features contains.
fn built_packages(package: &str, features: &str) -> Vec<String> {
    let asked = ["tree", "--package", package, "--features", features, "--edges", "normal,build"];
    let tree = cargo(&[&asked[..], &["--prefix", "none", "--format", "{p}"]].concat());
    tree.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

/// A build of one part of such a crate needs neither protoc nor an etcd's or a containerd's client.
#[test]
fn optional_dependencies_are_built_with_their_feature_alone() {
    for (package, feature, brought) in [
        ("nodekeel-cluster", "etcd", "etcd-client"),
        ("nodekeel-cluster", "etcd", "prost-build"),
        ("nodekeel-cluster", "netlink", "rtnetlink"),
        ("nodekeel-containerd-svc", "client", "containerd-client"),
        ("nodekeel-containerd-svc", "client", "prost-build"),
    ] {
        let has = |features| built_packages(package, features).iter().any(|built| built == brought);
        assert!(has(feature), "{package} with {feature} is built with {brought}");
        assert!(!has(""), "{package} is built without {brought}");
    }
}

#[test]
fn layers_point_down() {
    let text = cargo(&["metadata", "--no-deps", "--format-version", "1"]);
    let metadata: Value = serde_json::from_str(&text).unwrap();
    assert!(members(&metadata).len() > 5, "the members were read");
    assert_eq!(violations(&metadata), Vec::<String>::new());
}

/// What only one source does, by a text that all others would need, and the sources that have it for another purpose: they
/// wait for changes of the mount table and read nothing, or list one directory and none below it.
const ONLY_SOURCES: [(&str, &str, &[&str]); 2] = [
    (
        "self/mountinfo\"",
        "localstorage/src/mount/table.rs",
        &[
            "provisioner/src/dir_store/mount_table.rs",
            "node/src/directory_watch.rs",
            "containerd-svc/src/daemon/bundle_watch.rs",
        ],
    ),
    (
        "Dir::read_from(",
        "localstorage/src/syscalls.rs",
        &[
            "fsquota/src/engine.rs",
            "fsquota/src/testing/same_calls.rs",
            // Each lists one directory of its own.
            "supervisor/src/process/notify_socket.rs",
            "supervisor/src/process/records.rs",
        ],
    ),
];

/// The sources of programs and libraries that contain a text, except these.
fn sources_with(text: &str, except: &[&str], (root, members): (&Path, &[String])) -> Vec<String> {
    let mut found = Vec::new();
    let mut left: Vec<_> = members.iter().map(|member| root.join(member).join("src")).collect();
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(&directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                left.push(path);
            } else if std::fs::read_to_string(&path).is_ok_and(|source| source.contains(text)) {
                let name = path.strip_prefix(root).unwrap_or(&path).display().to_string();
                found.extend((!except.contains(&&*name)).then_some(name));
            }
        }
    }
    found
}

#[test]
fn one_crate_parses_the_mount_table_and_walks_trees() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let metadata: Value =
        serde_json::from_str(&cargo(&["metadata", "--no-deps", "--format-version", "1"])).unwrap();
    let members = members(&metadata).into_iter().map(|(_, directory, _)| directory);
    // These two can't depend on localstorage: they build before everything.
    let members: Vec<_> =
        members.filter(|directory| !["tools/testbed", "tools/xtask"].contains(&&**directory)).collect();
    for (text, only, except) in ONLY_SOURCES {
        assert_eq!(sources_with(text, except, (&root, &members)), [only]);
        let planted = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(planted.path().join("a/src/b")).unwrap();
        std::fs::write(planted.path().join("a/src/b/c.rs"), text).unwrap();
        assert_eq!(sources_with(text, except, (planted.path(), &["a".to_owned()])), ["a/src/b/c.rs"]);
    }
}

fn planted(directory: &str, dependency: &str, kind: Value) -> Vec<String> {
    violations(&serde_json::json!({"workspace_root": "/w", "packages": [{
        "name": "planted", "manifest_path": format!("/w/{directory}/Cargo.toml"),
        "dependencies": [{"kind": kind, "path": format!("/w/{dependency}")}],
    }]}))
}

#[test]
fn planted_violations_are_found() {
    assert_eq!(planted("supervisor", "logtree", Value::Null).len(), 1);
    assert_eq!(planted("localstorage", "fsquota", Value::Null).len(), 1);
    assert_eq!(planted("supervisor", "tools/testbed", "build".into()).len(), 1);
    assert_eq!(planted("cluster", "provisioner", Value::Null).len(), 1);
    assert_eq!(planted("cluster", "node", Value::Null).len(), 1);
    assert_eq!(planted("node", "bins/noded", Value::Null).len(), 1);
    assert_eq!(planted("bins/noded", "examples", Value::Null).len(), 1);
    assert_eq!(planted("tools/xtask", "supervisor", Value::Null).len(), 1);
    assert_eq!(planted("common", "supervisor", Value::Null).len(), 1);
}

#[test]
fn allowed_dependencies_are_not_reported() {
    assert_eq!(planted("cluster", "supervisor", Value::Null), Vec::<String>::new());
    assert_eq!(planted("fsquota", "localstorage", Value::Null), Vec::<String>::new());
    assert_eq!(planted("bins/nodectl", "node", Value::Null), Vec::<String>::new());
    assert_eq!(planted("logtree", "tools/testbed", "dev".into()), Vec::<String>::new());
}
