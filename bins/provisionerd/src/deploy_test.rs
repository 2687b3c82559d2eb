//! Checks the manifests against the code.

use std::collections::BTreeSet;

use proptest::prelude::*;
use serde_json::Value;

use crate::cli::Cli;
use crate::config::DaemonConfig;

const CSI_DRIVER: &str = include_str!("../../../deploy/csidriver.yaml");
const CLASSES: &str = include_str!("../../../deploy/storageclass.yaml");
const DAEMON_SET: &str = include_str!("../../../deploy/daemonset.yaml");
const EXAMPLE: &str = include_str!("../../../deploy/examples/pod.yaml");
const BLOCK_EXAMPLE: &str = include_str!("../../../deploy/examples/block.yaml");
const STRICT_EXAMPLE: &str = include_str!("../../../deploy/examples/strict.yaml");
const IMPORT: &str = include_str!("../../../deploy/examples/import.yaml");
const NAMESPACE: &str = include_str!("../../../deploy/namespace.yaml");
const RBAC: &str = include_str!("../../../deploy/rbac.yaml");
const KUSTOMIZATION: &str = include_str!("../../../deploy/kustomization.yaml");
const PROFILE: &str = include_str!("../../../deploy/seccomp/nodekeel-limits.json");

fn parse_documents(yaml: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(yaml).expect("YAML")
}

fn parse_document(yaml: &str) -> Value {
    parse_documents(yaml).pop().expect("a document")
}

fn list_at<'a>(value: &'a Value, path: &str) -> &'a Vec<Value> {
    value.pointer(path).and_then(Value::as_array).unwrap_or_else(|| panic!("{path} is a list"))
}

fn text_at<'a>(value: &'a Value, path: &str) -> &'a str {
    value.pointer(path).and_then(Value::as_str).unwrap_or_else(|| panic!("{path} is a text"))
}

#[test]
fn all_objects_have_the_drivers_name() {
    let driver = DaemonConfig::default().driver;
    assert_eq!(text_at(&parse_document(CSI_DRIVER), "/metadata/name"), driver.as_str());
    for class in parse_documents(CLASSES) {
        assert_eq!(text_at(&class, "/provisioner"), driver.as_str());
    }
    let plugin = format!("/var/lib/kubelet/plugins/{driver}");
    assert_eq!(DAEMON_SET.matches(&plugin).count(), 2, "the plugin's directory, inside and outside");
}

#[test]
fn manifests_parse_as_kubernetes_objects() {
    let driver: k8s_openapi::api::storage::v1::CSIDriver =
        serde_saphyr::from_str(CSI_DRIVER).expect("a CSIDriver");
    assert_eq!(driver.spec.attach_required, Some(false));
    assert_eq!(driver.spec.storage_capacity, Some(true));
    assert_eq!(driver.spec.fs_group_policy.as_deref(), Some("File"));
    assert_eq!(driver.spec.volume_lifecycle_modes, Some(vec!["Persistent".into()]));
    let classes: Vec<k8s_openapi::api::storage::v1::StorageClass> =
        serde_saphyr::from_multiple(CLASSES).expect("StorageClasses");
    assert!(classes.iter().all(|class| class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer")));
    let policies: Vec<_> = classes.iter().filter_map(|class| class.reclaim_policy.as_deref()).collect();
    assert_eq!(policies, ["Delete", "Retain"]);
    let set: k8s_openapi::api::apps::v1::DaemonSet = serde_saphyr::from_str(DAEMON_SET).expect("a DaemonSet");
    let labels = set.spec.as_ref().and_then(|spec| spec.selector.match_labels.clone()).expect("labels");
    let of_pods =
        set.spec.and_then(|spec| spec.template.metadata).and_then(|pods| pods.labels).expect("labels");
    assert!(labels.iter().all(|label| of_pods.iter().any(|other| other == label)));
    let _: k8s_openapi::api::core::v1::Namespace = serde_saphyr::from_str(NAMESPACE).expect("a Namespace");
}

/// The flags that the environment of a container stands for. Each command of an operator must have them, too: it runs in
/// the container of the daemon.
fn flags_of_environment(container: &Value) -> Vec<String> {
    let cli = <Cli as clap::CommandFactory>::command();
    let variables = list_at(container, "/env").iter().filter(|variable| !variable["value"].is_null());
    let flag = |variable: &Value| {
        let name = std::ffi::OsStr::new(text_at(variable, "/name"));
        let flag_of = |command: &clap::Command| {
            let found = command.get_arguments().find(|flag| flag.get_env() == Some(name));
            let found = found.unwrap_or_else(|| panic!("{} does not read {name:?}", command.get_name()));
            found.get_long().expect("a flag").to_owned()
        };
        let command = |name: &str| cli.find_subcommand(name).expect("a command");
        let commands = ["check", "volumes", "orphans"].map(command);
        let of_store = command("store").get_subcommands().filter(|command| command.get_name() != "help");
        commands.into_iter().chain(of_store).for_each(|command| drop(flag_of(command)));
        format!("--{}={}", flag_of(command("run")), text_at(variable, "/value"))
    };
    variables.map(flag).collect()
}

#[test]
fn the_daemon_set_matches_the_programs_configuration() {
    let set = parse_document(DAEMON_SET);
    let container = &list_at(&set, "/spec/template/spec/containers")[0];
    let args = list_at(container, "/args").iter().map(|arg| arg.as_str().expect("a text").to_owned());
    let line = std::iter::once("provisionerd".to_owned()).chain(args).chain(flags_of_environment(container));
    let cli = <Cli as clap::Parser>::try_parse_from(line).expect("valid arguments");
    let Some(crate::cli::Command::Run { flags }) = cli.command else { panic!("not `run`") };
    let config = flags.load_config().expect("a configuration");
    let port = i64::from(config.listen.port());
    assert_eq!(container.pointer("/ports/0/containerPort").and_then(Value::as_i64), Some(port));
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
        assert_eq!(text_at(container, &format!("/{probe}/httpGet/host")), config.listen.ip().to_string());
    }
    assert_eq!(text_at(container, "/readinessProbe/httpGet/path"), "/readyz");
    let timeout = container.pointer("/readinessProbe/timeoutSeconds").and_then(Value::as_i64);
    assert_eq!(timeout, Some(5), "longer than the answer of an API server that hangs takes");
    let inside: BTreeSet<_> =
        list_at(container, "/volumeMounts").iter().map(|it| text_at(it, "/mountPath")).collect();
    let kubelet = config.kubelet.display();
    let expected = BTreeSet::from([
        config.directory.parent().expect("a directory below another").display().to_string(),
        format!("{kubelet}/pods"),
        format!("{kubelet}/plugins/kubernetes.io/csi/volumeDevices"),
        "/dev".to_owned(),
        format!("{kubelet}/plugins/{}", config.driver),
        format!("{kubelet}/plugins_registry"),
    ]);
    assert_eq!(inside, expected.iter().map(String::as_str).collect(), "exactly the required mounts");
    let image = text_at(container, "/image");
    assert!(image.ends_with(&format!("nodekeel/provisionerd:{}", env!("CARGO_PKG_VERSION"))), "{image}");
}

#[test]
fn mount_paths_in_the_container_equal_those_on_the_host() {
    let set = parse_document(DAEMON_SET);
    let mounts = list_at(&set, "/spec/template/spec/containers/0/volumeMounts");
    let volumes = list_at(&set, "/spec/template/spec/volumes");
    assert_eq!(mounts.len(), volumes.len());
    for mount in mounts {
        let name = text_at(mount, "/name");
        let volume = volumes.iter().find(|volume| text_at(volume, "/name") == name).expect("a volume");
        assert_eq!(text_at(volume, "/hostPath/path"), text_at(mount, "/mountPath"));
        let propagation = mount.pointer("/mountPropagation").and_then(Value::as_str);
        let expected = match name {
            "pods" | "block-targets" => Some("Bidirectional"),
            // A disk that is mounted again on the node is served without a restart.
            "volumes" => Some("HostToContainer"),
            _ => None,
        };
        assert_eq!(propagation, expected, "{name}");
    }
}

#[test]
fn one_command_applies_every_manifest() {
    let listed: BTreeSet<_> = list_at(&parse_document(KUSTOMIZATION), "/resources")
        .iter()
        .map(|file| file.as_str().expect("a text").to_owned())
        .collect();
    let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    let files = std::fs::read_dir(directory).expect("list").map(|file| file.expect("a file").file_name());
    let manifests: BTreeSet<_> = files
        .filter_map(|name| name.into_string().ok())
        .filter(|name| name.ends_with(".yaml") && name != "kustomization.yaml")
        .collect();
    assert_eq!(listed, manifests);
}

/// The image that all manifests name.
fn assert_image(container: &Value) {
    let image = text_at(container, "/image");
    assert!(image.ends_with(&format!("nodekeel/provisionerd:{}", env!("CARGO_PKG_VERSION"))), "{image}");
}

fn parse_command(container: &Value) -> crate::cli::Command {
    let args = list_at(container, "/args").iter().map(|arg| arg.as_str().expect("a text"));
    let line: Vec<_> = std::iter::once("provisionerd").chain(args).collect();
    let cli = <Cli as clap::Parser>::try_parse_from(line).expect("valid arguments");
    cli.command.expect("a command")
}

#[test]
fn the_seccomp_component_installs_the_profile_where_the_kubelet_looks() {
    let patch = parse_document(include_str!("../../../deploy/seccomp/daemonset.yaml"));
    let set = parse_document(DAEMON_SET);
    assert_eq!(patch["metadata"]["name"], set["metadata"]["name"]);
    let container = &list_at(&patch, "/spec/template/spec/initContainers")[0];
    assert_image(container);
    assert!(matches!(parse_command(container), crate::cli::Command::InstallSeccomp { .. }));
    let directory = DaemonConfig::default().kubelet.join("seccomp").display().to_string();
    assert_eq!(text_at(container, "/volumeMounts/0/mountPath"), directory);
    assert_eq!(text_at(&patch, "/spec/template/spec/volumes/0/hostPath/path"), directory);
}

#[test]
fn the_examples_fit_the_classes_and_the_command_line() {
    let known: Vec<_> =
        parse_documents(CLASSES).iter().map(|class| class["metadata"]["name"].clone()).collect();
    for (example, mode) in [(EXAMPLE, None), (BLOCK_EXAMPLE, Some("Block")), (STRICT_EXAMPLE, None)] {
        let documents = parse_documents(example);
        let [classes @ .., claim, pod] = &documents[..] else { panic!("a claim and a pod") };
        let own = classes.iter().map(|class| class["metadata"]["name"].clone()).collect();
        let names: &Vec<Value> = if classes.is_empty() { &known } else { &own };
        assert!(names.contains(&claim["spec"]["storageClassName"]), "{example}");
        assert_eq!(claim["spec"]["volumeMode"].as_str(), mode);
        let volume = &pod["spec"]["volumes"][0];
        assert_eq!(volume["persistentVolumeClaim"]["claimName"], claim["metadata"]["name"]);
        if mode.is_some() {
            // A block volume is a device of its pod.
            assert_eq!(pod["spec"]["containers"][0]["volumeDevices"][0]["name"], volume["name"]);
        }
    }
    let import = parse_document(IMPORT);
    let container = &list_at(&import, "/spec/containers")[0];
    assert_image(container);
    assert!(matches!(parse_command(container), crate::cli::Command::Import { .. }));
    let source = list_at(container, "/args").last().and_then(Value::as_str).expect("a source");
    assert_eq!(text_at(container, "/volumeMounts/1/mountPath"), source, "the path of the node");
    assert_eq!(text_at(&import, "/spec/volumes/1/hostPath/path"), source);
    let account =
        parse_documents(RBAC).into_iter().find(|it| it["kind"] == "ServiceAccount").expect("it exists");
    assert_eq!(import["spec"]["serviceAccountName"], account["metadata"]["name"]);
    assert_eq!(import["metadata"]["namespace"], account["metadata"]["namespace"]);
}

/// The ioctls that remove a file from its limit. *Source:* linux/fs.h.
const DENIED: [u32; 3] = [0x401c_5820, 0x4008_6602, 0x4004_6602];

fn seccomp_profile() -> Value {
    serde_json::from_str(PROFILE).expect("JSON")
}

/// True if the profile allows an ioctl: one matching rule is enough.
fn allows_ioctl(profile: &Value, command: u64) -> bool {
    let rules = list_at(profile, "/syscalls").iter();
    let ioctls = rules.filter(|rule| list_at(rule, "/names").iter().any(|name| name == "ioctl"));
    ioctls.map(|rule| list_at(rule, "/args")).any(|args| {
        args.iter().all(|arg| {
            let number = |path: &str| arg.pointer(path).and_then(Value::as_u64).expect("a number");
            assert_eq!((number("/index"), text_at(arg, "/op")), (1, "SCMP_CMP_MASKED_EQ"));
            command & number("/value") == number("/valueTwo")
        })
    })
}

#[test]
fn the_seccomp_profile_denies_unknown_calls() {
    let profile = seccomp_profile();
    assert_eq!(profile["defaultAction"], "SCMP_ACT_ERRNO");
    let names: Vec<_> = list_at(&profile, "/syscalls")
        .iter()
        .flat_map(|rule| list_at(rule, "/names"))
        .filter_map(Value::as_str)
        .collect();
    assert!(!names.contains(&"file_setattr") && !names.contains(&"io_uring_setup"));
    assert!(names.contains(&"execve") && names.contains(&"openat"));
}

proptest! {
    #[test]
    fn the_seccomp_profile_denies_exactly_the_ioctls_that_evade_a_limit(high: u32, near in 0..32_u32, any: u32) {
        let profile = seccomp_profile();
        let command = |low: u32| u64::from(high) << 32 | u64::from(low);
        for denied in DENIED {
            prop_assert!(!allows_ioctl(&profile, command(denied)));
            let other = denied ^ (1 << near);
            prop_assert_eq!(allows_ioctl(&profile, command(other)), !DENIED.contains(&other));
        }
        prop_assert_eq!(allows_ioctl(&profile, command(any)), !DENIED.contains(&any));
    }
}

#[test]
fn uninstalling_names_what_is_applied_separately() {
    let readme = include_str!("../../../deploy/README.md");
    let (_, uninstall) = readme.split_once("\n## Uninstall\n").expect("a section");
    let uninstall = uninstall.split("\n## ").next().expect("its text");
    assert!(uninstall.contains("kubectl delete --ignore-not-found -f deploy/agent/remove-volumes.yaml"));
}
