//! The allowed dependencies between members.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// The directories of the libraries: the leaves, then the services.
const LIBRARIES: [&str; 7] =
    ["supervisor", "logtree", "localstorage", "fsquota", "provisioner", "containerd-svc", "cluster"];
const LEAVES: usize = 4;
/// The leaves that use another leaf: fsquota reads the mount table with localstorage's parser and walks trees with its
/// walker, the only ones.
const LEAF_USES: [(&str, &str); 1] = [("fsquota", "localstorage")];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layer {
    /// Depends on no member, [`LEAF_USES`] excepted.
    Leaf,
    /// Depends on leaves.
    Service,
    /// The library of the node program: depends on leaves and services.
    Node,
    /// A program or a test tool: depends on anything.
    Bin,
    /// Examples: depend on anything, and nothing on them.
    Examples,
}

/// The layer of a member, by its directory below the workspace's root.
fn layer(directory: &str) -> Option<Layer> {
    match LIBRARIES.iter().position(|library| *library == directory) {
        Some(place) if place < LEAVES => Some(Layer::Leaf),
        Some(_) => Some(Layer::Service),
        None if directory == "node" => Some(Layer::Node),
        None if directory == "examples" => Some(Layer::Examples),
        None => ["bins/", "tools/"].iter().any(|top| directory.starts_with(top)).then_some(Layer::Bin),
    }
}

fn is_allowed(from: Layer, to: Layer) -> bool {
    matches!(
        (from, to),
        (Layer::Service | Layer::Node, Layer::Leaf)
            | (Layer::Node, Layer::Service)
            | (Layer::Bin | Layer::Examples, Layer::Leaf | Layer::Service | Layer::Node | Layer::Bin)
    )
}

/// The dependencies that violate the layers; dev-dependencies reach no user and are free.
fn violations(metadata: &Value) -> Vec<String> {
    let mut found = Vec::new();
    for (name, directory, dependencies) in members(metadata) {
        let Some(from) = layer(&directory) else {
            found.push(format!("{name}: the directory {directory} has no layer"));
            continue;
        };
        for dependency in dependencies {
            let to = layer(&dependency);
            let is_listed = LEAF_USES.contains(&(&*directory, &*dependency));
            if !is_listed && !to.is_some_and(|to| is_allowed(from, to)) {
                found.push(format!("{name} ({from:?}) depends on {dependency} ({to:?})"));
            }
            // Tasks and tests must build where protoc isn't installed yet.
            let is_foundation = directory == "tools/testbed" || directory == "tools/xtask";
            if is_foundation && dependency != "tools/testbed" {
                found.push(format!("{name} depends on {dependency}, though it must build before everything"));
            }
        }
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
        &["provisioner/src/dir_store/mount_table.rs", "node/src/parts/provisioner/kubelet_dir.rs"],
    ),
    (
        "Dir::read_from(",
        "localstorage/src/syscalls.rs",
        &["fsquota/src/engine.rs", "fsquota/src/testing/same_calls.rs"],
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
