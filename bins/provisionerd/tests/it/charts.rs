//! The chart of `deploy/helm` gives the objects of `kubectl apply -k deploy/`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use testbed::{Kube, ScratchDir, command_output, gotool, wait_until};

const DEPLOY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy");

/// Objects by kind and name.
type Objects = BTreeMap<String, Value>;

fn chart() -> PathBuf {
    Path::new(DEPLOY).join("helm/nodekeel")
}

fn run_helm(home: &ScratchDir, arguments: &[&str]) -> anyhow::Result<String> {
    let program = gotool::HELM.program_path("helm").expect("helm");
    let mut command = Command::new(program);
    command.env_clear().env("HOME", home.path()).args(arguments).arg(chart());
    command_output(&mut command)
}

fn try_render(values: &str) -> anyhow::Result<String> {
    render_release("nodekeel", values)
}

/// The objects of a release in the namespace of its name.
fn render_release(name: &str, values: &str) -> anyhow::Result<String> {
    let home = ScratchDir::new().expect("a directory");
    let file = home.path().join("values.yaml");
    fs::write(&file, values).expect("write the values");
    let file = file.display().to_string();
    run_helm(&home, &["template", name, "--namespace", name, "--values", &file])
}

fn render_chart(values: &str) -> Objects {
    parse_objects(&try_render(values).expect("helm accepts the chart"))
}

fn kustomize(directory: &Path) -> Objects {
    let kubectl = gotool::KUBERNETES.program_path("kubectl").expect("kubectl");
    let mut command = Command::new(kubectl);
    command.arg("kustomize").arg("--load-restrictor=LoadRestrictionsNone").arg(directory);
    parse_objects(&command_output(&mut command).expect("kubectl accepts the manifests"))
}

fn parse_objects(yaml: &str) -> Objects {
    let documents: Vec<Value> = serde_saphyr::from_multiple(yaml).expect("YAML");
    let objects = documents.into_iter().filter(|object| !object.is_null());
    objects.map(|object| (format!("{} {}", object["kind"], object["metadata"]["name"]), object)).collect()
}

/// The chart lacks the namespace: its label has to be there before the release.
fn assert_same(chart: &Objects, mut kustomized: Objects) {
    kustomized.retain(|_, object| object["kind"] != "Namespace");
    assert_eq!(chart.keys().collect::<Vec<_>>(), kustomized.keys().collect::<Vec<_>>());
    for (name, object) in chart {
        assert_eq!(object, &kustomized[name], "{name}");
    }
}

#[test]
#[ignore = "needs helm, kubernetes"]
fn the_chart_gives_the_objects_of_the_manifests() {
    assert_same(&render_chart(""), kustomize(Path::new(DEPLOY)));
}

#[test]
#[ignore = "needs helm, kubernetes"]
fn the_chart_gives_the_objects_of_every_component() {
    let home = ScratchDir::new().expect("a directory");
    let base = fs::canonicalize(DEPLOY).expect("it exists").display().to_string();
    let relative = format!("{}{base}", "../".repeat(home.path().components().count() - 1));
    let overlay = format!(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [{relative}]\n\
         components: [{relative}/monitoring, {relative}/snapshots, {relative}/move]\n"
    );
    fs::write(home.path().join("kustomization.yaml"), overlay).expect("write the overlay");
    assert_same(
        &render_chart(
            "{ monitoring: { enabled: true }, snapshots: { enabled: true }, move: { enabled: true } }",
        ),
        kustomize(home.path()),
    );
}

#[test]
#[ignore = "needs kube"]
fn the_api_server_accepts_the_manifests_and_the_examples() {
    let kube = Kube::builder().with_service_accounts().start().expect("a control plane");
    let kubectl = |arguments: &[&str]| command_output(kube.kubectl_command().args(arguments));
    kubectl(&["apply", "--kustomize", DEPLOY]).expect("the objects");
    // kubectl runs diff(1).
    let mut diff = kube.kubectl_command();
    diff.env("PATH", "/usr/bin:/bin").args(["diff", "--kustomize", DEPLOY]);
    command_output(&mut diff).expect("nothing of them is dropped or changed");
    for example in ["pod.yaml", "block.yaml", "strict.yaml", "import.yaml"] {
        let file = format!("{DEPLOY}/examples/{example}");
        // The pods' account may not exist yet.
        wait_until(Duration::from_secs(60), example, || {
            kubectl(&["create", "--dry-run=server", "--filename", &file]).map(drop)
        })
        .expect("a valid example");
    }
}

#[test]
#[ignore = "needs helm"]
fn helm_finds_no_fault_in_the_chart() {
    let home = ScratchDir::new().expect("a directory");
    let report = run_helm(&home, &["lint", "--strict"]).expect("helm accepts the chart");
    assert!(report.contains("0 chart(s) failed"), "{report}");
}

#[test]
#[ignore = "needs helm"]
fn every_value_of_the_chart_reaches_the_objects() {
    let values = r#"
image: { repository: registry.example/provisionerd, tag: "9.9", pullPolicy: Always }
driver: volumes.example.org
directory: /srv/volumes
stores: { bulk: /mnt/disks/bulk, fast: /srv/fast }
kubelet: /srv/kubelet
config: |
  concurrency = 4
nodeSelector: { example.org/disk: "yes" }
tolerations: []
resources: { requests: { memory: 64Mi } }
classes:
  - { name: fast, reclaimPolicy: Retain, isDefault: true, parameters: { inodes: "5000", store: fast }, mountOptions: [noexec] }
policy: { enabled: false }
seccomp: { enabled: false }
monitoring: { enabled: true, listen: "$(POD_IP):9999" }
"#;
    let objects = render_chart(values);
    let text = serde_json::to_string(&objects).expect("JSON");
    for old in
        ["volumes.nodekeel", "/var/lib/", "nodekeel/provisionerd:", "AdmissionPolicy", "install-seccomp"]
    {
        assert!(!text.contains(old), "{old} is left in {text}");
    }
    let at = |object: &str, path: &str| objects[object].pointer(path).cloned().unwrap_or_default();
    let set = r#""DaemonSet" "provisionerd""#;
    let pod = "/spec/template/spec";
    assert_eq!(at(set, &format!("{pod}/containers/0/image")), "registry.example/provisionerd:9.9");
    assert_eq!(at(set, &format!("{pod}/containers/0/imagePullPolicy")), "Always");
    assert_eq!(at(set, &format!("{pod}/nodeSelector/example.org~1disk")), "yes");
    assert_eq!(at(set, &format!("{pod}/containers/0/resources/requests/memory")), "64Mi");
    let environment = at(set, &format!("{pod}/containers/0/env"));
    for (name, value) in [
        ("PROVISIONERD_DIRECTORY", "/srv/volumes"),
        ("PROVISIONERD_STORES", "bulk=/mnt/disks/bulk,fast=/srv/fast"),
        ("PROVISIONERD_DRIVER", "volumes.example.org"),
        ("PROVISIONERD_KUBELET", "/srv/kubelet"),
        ("PROVISIONERD_CONFIG", "/etc/nodekeel/provisionerd.toml"),
        ("PROVISIONERD_LISTEN", "$(POD_IP):9999"),
    ] {
        let variable = json!({ "name": name, "value": value });
        assert!(environment.as_array().expect("a list").contains(&variable), "{name}: {environment}");
    }
    assert_eq!(at(set, &format!("{pod}/containers/0/ports/0/containerPort")), 9999, "what the probes ask");
    let host = at(set, &format!("{pod}/containers/0/livenessProbe/httpGet/host"));
    assert_eq!(host, serde_json::Value::Null, "at the pod's address");
    // A disk that is mounted on the node is so in the pod; that of the directory has its mount already.
    let mounts = at(set, &format!("{pod}/containers/0/volumeMounts"));
    let stores: Vec<_> = mounts
        .as_array()
        .expect("a list")
        .iter()
        .filter(|it| it["mountPropagation"] == "HostToContainer")
        .collect();
    let paths: Vec<_> = stores.iter().map(|mount| &mount["mountPath"]).collect();
    assert_eq!(paths, ["/srv", "/mnt/disks"]);
    let config = at(r#""ConfigMap" "provisionerd""#, "/data/provisionerd.toml");
    assert_eq!(config, "concurrency = 4\n");
    let class = r#""StorageClass" "fast""#;
    assert_eq!(at(class, "/provisioner"), "volumes.example.org");
    assert_eq!(at(class, "/parameters"), json!({ "inodes": "5000", "store": "fast" }));
    assert_eq!(at(class, "/metadata/annotations/storageclass.kubernetes.io~1is-default-class"), "true");
    assert_eq!(at(class, "/volumeBindingMode"), "WaitForFirstConsumer", "as in deploy/storageclass.yaml");
}

#[test]
#[ignore = "needs helm"]
fn two_releases_have_no_object_and_no_port_in_common() {
    const SECOND: &str = r#"
driver: fast.example.org
directory: /srv/fast
listen: 127.0.0.1:9811
classes: [{ name: fast }]
snapshots: { enabled: true }
move: { enabled: true }
agent: { removeVolumesOfGoneNodes: 24h }
"#;
    let parse = |name: &str, values: &str| -> Vec<Value> {
        let documents: Vec<Value> =
            serde_saphyr::from_multiple(&render_release(name, values).expect("helm accepts the chart"))
                .expect("YAML");
        documents.into_iter().filter(|object| !object.is_null()).collect()
    };
    let first = parse("nodekeel", "{ snapshots: { enabled: true }, move: { enabled: true } }");
    let second = parse("fast", SECOND);
    let name = |object: &Value| {
        let metadata = &object["metadata"];
        (object["kind"].to_string(), metadata["namespace"].to_string(), metadata["name"].to_string())
    };
    let names: BTreeSet<_> = first.iter().map(name).collect();
    let common: Vec<_> = second.iter().map(name).filter(|name| names.contains(name)).collect();
    assert!(common.is_empty(), "{common:?}");
    // What an object refers to is in its own release.
    let of_kind = |kind: &str| second.iter().filter(|object| object["kind"] == kind).collect::<Vec<_>>();
    for (binding, target, path) in [
        ("ValidatingAdmissionPolicyBinding", "ValidatingAdmissionPolicy", "/spec/policyName"),
        ("ClusterRoleBinding", "ClusterRole", "/roleRef/name"),
        ("RoleBinding", "Role", "/roleRef/name"),
    ] {
        let there: Vec<_> = of_kind(target).into_iter().map(|object| &object["metadata"]["name"]).collect();
        let bindings = of_kind(binding);
        assert!(!bindings.is_empty());
        for binding in bindings {
            assert!(there.contains(&binding.pointer(path).expect(path)), "{binding}");
            for account in binding["subjects"].as_array().into_iter().flatten() {
                let is_there = |object: &&Value| object["metadata"]["name"] == account["name"];
                assert!(
                    account["namespace"] == "fast" && of_kind("ServiceAccount").iter().any(is_there),
                    "{binding}"
                );
            }
        }
    }
    let set = of_kind("DaemonSet")[0].to_string();
    assert!(set.contains("127.0.0.1:9811") && !set.contains("9810"), "{set}");
}

#[test]
#[ignore = "needs helm"]
fn stores_that_provisionerd_would_refuse_are_refused_by_name() {
    for (values, text) in [
        ("stores: { Fast: /srv/fast }", "stores.Fast: invalid name"),
        ("stores: { fast-: /srv/fast }", "stores.fast-: invalid name"),
        ("stores: { a.b: /srv/fast }", "stores.a.b: invalid name"),
        ("stores: { fast: srv/fast }", "stores.fast: use an absolute path"),
        ("stores: { fast: '/srv/a,bulk=/srv/b' }", "stores.fast: use an absolute path"),
        ("stores: { fast: /srv/fast/../bulk }", "stores.fast: use an absolute path"),
        ("stores: { bulk: /srv/a, fast: /srv/a/ }", "is that of stores."),
        (
            "stores: { bulk: /srv/a, fast: /srv/a/b }",
            "stores.fast: /srv/a/b is that of stores.bulk, or below it",
        ),
        ("stores: { fast: /var/lib/nodekeel/fast }", "is that of directory, or below it"),
        (
            "{ directory: /srv/a/b, stores: { fast: /srv/a } }",
            "directory: /srv/a/b is below that of stores.fast",
        ),
        ("classes: [{ name: fast, parameters: { store: fast } }]", "there is no store \"fast\""),
    ] {
        let error = format!("{:#}", try_render(values).expect_err(values));
        assert!(error.contains(text), "{values}: {error}");
    }
    try_render("stores: { bulk: /srv/a, fast: /srv/ab }").expect("they are beside each other");
}

#[test]
#[ignore = "needs helm"]
fn values_that_no_probe_would_reach_are_refused() {
    for (values, text) in [
        (r#"config: 'listen = "127.0.0.1:1234"'"#, "monitoring.listen"),
        (r#"config: 'driver = "volumes.example.org"'"#, "values of these names"),
        ("config: '[stores]'", "values of these names"),
        ("stores: { fast: /fast }", "below another one"),
        (r#"monitoring: { enabled: true, listen: "10.0.0.1:9810" }"#, "127.0.0.1"),
        (r#"listen: "10.0.0.1:9810""#, "127.0.0.1"),
    ] {
        let error = try_render(values).expect_err(values);
        assert!(format!("{error:#}").contains(text), "{error:#}");
    }
}
