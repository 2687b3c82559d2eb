use nodekeel_containerd_svc::{CriSettings, RunscSettings, RuntimeHandler};
use nodekeel_fsquota::Bytes;

use super::*;

fn parse_config(text: &str) -> Result<NodedConfig, String> {
    NodedConfig::parse_toml(Path::new("noded.toml"), text).map_err(|error| error.to_string())
}

/// A minimal file with one service whose keys are these.
fn service_config(keys: &str) -> String {
    format!("[[service]]\nname = \"a\"\ncommand = [\"/bin/true\"]\n{keys}\n")
}

#[test]
fn the_shipped_file_equals_the_defaults() {
    assert_eq!(parse_config(DEFAULT_CONFIG), Ok(NodedConfig::default()));
}

#[test]
fn the_shipped_file_shows_the_defaults_as_they_are() {
    let uncommented: Vec<_> = DEFAULT_CONFIG
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(key) if key.starts_with(|c: char| c.is_ascii_lowercase()) => key,
            _ => line,
        })
        .collect();
    let keys = uncommented.iter().filter(|line| line.contains(" = ") && !line.starts_with('#')).count();
    assert_eq!(keys, 24, "a key was added or lost: show it in noded.toml");
    assert_eq!(parse_config(&uncommented.join("\n")), Ok(NodedConfig::default()));
}

#[test]
fn the_shipped_example_of_a_service_parses_and_shows_every_key() {
    let example: Vec<_> = DEFAULT_CONFIG.lines().filter_map(|line| line.strip_prefix("#     ")).collect();
    let config = parse_config(&example.join("\n")).expect("the example parses");
    let [service] = &config.service[..] else { panic!("one service: {config:?}") };
    assert_eq!(
        (service.name.as_str(), service.depends_on.as_slice()),
        ("web", &["containerd".to_owned()][..])
    );
    let provisioner = config.provisioner.expect("the example shows it");
    let bare = parse_config("provisioner.kubeconfig = \"/etc/kubernetes/provisioner.conf\"")
        .expect("it parses")
        .provisioner;
    let default = ProvisionerConfig {
        node: provisioner.node.clone(),
        directory: provisioner.directory.clone(),
        ..bare.expect("given")
    };
    assert_eq!(provisioner, default, "the example shows the default");
    let cluster = config.cluster.expect("the example shows it");
    let bare = parse_config("cluster.address = \"192.0.2.7\"").expect("it parses").cluster;
    let default = ClusterConfig { backup: cluster.backup.clone(), ..bare.expect("given") };
    assert_eq!(cluster, default, "the example shows the default");
    let cri = config.services.containerd.cri.expect("the example shows it");
    let default = CriSettings {
        sandbox_image: cri.sandbox_image.clone(),
        runsc: cri.runsc.clone(),
        ..CriSettings::default()
    };
    assert_eq!(
        (&cri, &cri.runsc),
        (&default, &Some(RunscSettings::default())),
        "the example shows the default"
    );
    assert_eq!(service.backoff, BackoffConfig::default());
    for key in [
        "name",
        "command",
        "environment",
        "user",
        "directory",
        "depends_on",
        "restart_with_dependencies",
        "readiness",
        "restart",
        "backoff",
        "grace",
        "grace_max",
        "stop_signal",
        "watchdog",
        "liveness",
        "reload",
        "log",
        "limits",
        "privileges",
        "address",
        "deadline",
        "progress_period",
        "golden_tickets",
        "hostname",
        "recipient",
        "every",
        "keep",
        "kubeconfig",
        "node",
        "driver",
        "directory",
        "quota",
        "csi",
        "kubelet",
        "capacity",
        "audit",
    ] {
        assert!(example.iter().any(|line| line.starts_with(&format!("{key} ="))), "{key} is not shown");
    }
}

#[test]
fn an_error_names_file_line_column_and_field() {
    for (text, says) in [
        (
            "[node]\nnam = \"x\"\n",
            "noded.toml:2:1: node.nam: unknown field `nam`, expected one of `name`, `data`, `grace`",
        ),
        ("[node\n", "noded.toml:1:6: "),
        ("[services.etcd]\nenable = true\nclient_port = 0\n", "noded.toml:3:15: services.etcd.client_port: "),
        ("[services.etcd]\nclient_port = 70000\n", "noded.toml:2:15: services.etcd.client_port: "),
        (
            "[node]\ngrace = 10\n",
            "noded.toml:2:9: node.grace: must be a duration with its unit in quotes, like \"500ms\"",
        ),
        ("[[service]]\nname = \"a\"\n", "noded.toml:1:1: service[0]: missing field `command`"),
        (
            "[[service]]\nname = \"a\"\ncommand = [\"x\"]\n[[service]]\nname = \"b\"\ncommand = [1]\n",
            "noded.toml:6:12: service[1].command[0]: must be text in quotes, not 1",
        ),
        (
            "[node]\ngrace = \"10 parsecs\"\n",
            "noded.toml:2:9: node.grace: must be a duration with its unit in quotes",
        ),
    ] {
        let error = parse_config(text).expect_err(text);
        assert!(error.starts_with(says), "{text:?}\n is: {error}\nnot: {says}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn an_error_describes_the_file_and_not_rust_types() {
    for (text, says) in [
        (
            "services.etcd.client_port = \"2379\"",
            "services.etcd.client_port: must be a whole number from 1 to 65535, without quotes, not \"2379\"",
        ),
        ("services.etcd.client_port = 0", "must be a whole number from 1 to 65535, without quotes, not 0"),
        ("events.keep = -1", "events.keep: must be a whole number above 0, without quotes, not -1"),
        ("services.etcd.enable = \"yes\"", "must be true or false, without quotes, not \"yes\""),
        (
            "services.etcd.extra_args = \"--x\"",
            "must be a list in brackets, like [\"a\", \"b\"], not \"--x\"",
        ),
        ("node.data = 3", "node.data: must be text in quotes, not 3"),
        ("[node]\nname = \"a\"\nname = \"b\"", ":3:1: duplicate key name; remove one of the two"),
        ("[service]\nname = \"a\"", "must be an array of tables, each written [[service]]"),
        ("service = [1]", "must be an array of tables, each written [[service]]"),
        (
            "[[services]]\nname = \"a\"",
            "services: must be a table, written [services]; your services are [[service]]",
        ),
        (
            "[[service]]\nname = \"a\"\ncommand = [\"x\"]\nrestart = 3",
            ":4:11: service[0].restart: must be text in quotes",
        ),
        (
            "[[service]]\nname = \"a\"\ncommand = [\"x\"]\nbackoff = [\"1s\", 2.0, \"1s\", 0.5]",
            ":4:11: service[0].backoff: must be a table in braces, like { initial",
        ),
        ("node = [\"a\"]", ":1:8: node: must be a table, written [node]"),
    ] {
        let error = parse_config(text).expect_err(text);
        assert!(error.contains(says) && !error.contains('\n'), "{text:?}\n is: {error}\nnot: {says}");
    }
}

#[test]
fn a_file_that_is_not_utf8_is_rejected_at_its_line() {
    let scratch = tempfile::tempdir().expect("a directory");
    let file = scratch.path().join("noded.toml");
    std::fs::write(&file, b"[node]\nname = \"caf\xe9\"\n").expect("written");
    let error = NodedConfig::read_file(&file).expect_err("Latin-1 is not UTF-8").to_string();
    assert!(error.ends_with("noded.toml:2:12: is not UTF-8 here; save the file as UTF-8"), "{error}");
}

/// Asserts the error of each text.
fn assert_rejected<const N: usize>(cases: [(String, &str); N]) {
    for (text, says) in cases {
        let error = parse_config(&text).expect_err(&text);
        assert!(error.contains(says), "{text:?}\n is: {error}\nnot: {says}");
    }
}

#[test]
fn rules_between_services_name_the_field_too() {
    assert_rejected([
        (
            service_config("depends_on = [\"etcd\", \"b\"]"),
            ":4:23: service[0].depends_on[1]: unknown service \"b\" in depends_on; known: api, metrics, ",
        ),
        (
            service_config("restart_with_dependencies = true"),
            ":4:29: service[0].restart_with_dependencies: a depends on nothing; name it in depends_on",
        ),
        (service_config("depends_on = [\"a\"]"), ":4:14: service[0].depends_on: dependency cycle: a -> a"),
        (
            format!(
                "{}{}",
                service_config("depends_on = [\"b\"]"),
                "[[service]]\nname = \"b\"\ncommand = [\"x\"]\ndepends_on = [\"a\"]"
            ),
            ": dependency cycle: a -> b -> a",
        ),
        (
            format!("{}{}", service_config(""), service_config("")),
            "service[1].name: duplicate service name \"a\"",
        ),
        (
            "[[service]]\nname = \"A b\"\ncommand = [\"x\"]".into(),
            ":2:8: service[0].name: \"A b\" is not a valid name; use 1 to 64 of",
        ),
        ("[[service]]\nname = \"etcd\"\ncommand = [\"x\"]".into(), "is a part of this node"),
        ("[[service]]\nname = \"b\"\ncommand = []".into(), "service[0].command: b has no command"),
    ]);
}

#[test]
fn rules_between_fields_name_the_field_too() {
    assert_rejected([
        (service_config("readiness = { probe = [] }"), "service[0].readiness: the probe of a has no command"),
        (service_config("readiness = \"soon\""), "must be \"started\", \"notify\", \"exit\" or { probe"),
        (
            service_config("readiness = \"exit\"\nrestart = \"always\""),
            ":5:11: service[0].restart: readiness \"exit\" of a conflicts",
        ),
        (service_config("backoff = { factor = 0.5 }"), "service[0].backoff.factor: 0.5 is less than 1"),
        (
            service_config("backoff = { jitter = 1.5 }"),
            "service[0].backoff.jitter: 1.5 is not between 0 and 1",
        ),
        (
            service_config("backoff = { initial = \"2m\" }"),
            "service[0].backoff.initial: 120s exceeds max, 60s",
        ),
        (
            service_config("environment = { \"A=B\" = \"\" }"),
            "service[0].environment: \"A=B\" is not a valid variable name",
        ),
        (service_config("directory = \"srv\""), "service[0].directory: \"srv\" is not absolute"),
    ]);
}

#[test]
fn a_size_is_text_or_a_number_for_every_key() {
    for value in ["\"10Gi\"", "\"10GiB\"", "\"10737418240\"", "10737418240"] {
        let text = format!(
            "log.bytes = {value}\nlog.bytes_per_dn = {value}\nservices.containerd.reserve = {value}\n\
             [provisioner]\nkubeconfig = \"/k\"\ncapacity.reserve = {value}\n\
             [[service]]\nname = \"a\"\ncommand = [\"/bin/true\"]\nlimits.memory_max = {value}\n"
        );
        let config = parse_config(&text).expect(value);
        let sizes = [
            Some(config.log.bytes),
            Some(config.log.bytes_per_dn),
            config.services.containerd.reserve,
            config.provisioner.map(|provisioner| provisioner.capacity.reserve),
            config.service[0].limits.memory_max,
        ];
        assert_eq!(sizes, [Some(Bytes(10 << 30)); 5], "{value}");
    }
    assert_rejected([
        ("log.bytes = -1".into(), "log.bytes: must be bytes, like \"10Gi\" or 10737418240, not -1"),
        (
            "services.containerd.reserve = \"1Xi\"".into(),
            "services.containerd.reserve: unknown suffix \"Xi\"",
        ),
    ]);
}

#[test]
fn values_out_of_range_name_the_field_and_the_range() {
    assert_rejected([
        (
            "[services.etcd]\npeer_port = 2379".into(),
            ":2:13: services.etcd.peer_port: 2379 is already client_port",
        ),
        ("[log]\nbytes = 100000".into(), "log.bytes_per_dn: exceeds log.bytes, 100k"),
        ("[log]\nbytes = 65535".into(), ":2:9: log.bytes: 65535 is too small for a log; use at least 64Ki"),
        ("[events]\nkeep = 1000001".into(), "events.keep: 1000001 events are too many to keep in memory"),
        ("[node]\ngrace = \"25h\"".into(), "node.grace: 90000s is more than a day; use at most \"24h\""),
        (service_config("grace = \"25h\""), "service[0].grace: 90000s is more than a day"),
        (
            service_config("backoff = { initial = \"0s\" }"),
            "service[0].backoff.initial: must be at least \"1ms\"",
        ),
        (
            service_config("depends_on = [\"etcd\", \"etcd\"]"),
            "depends_on[1]: duplicate dependency \"etcd\"; remove one",
        ),
        (
            service_config("environment = { A = \"\\u0000\" }"),
            "service[0].environment: contains a NUL character",
        ),
        (
            "[[service]]\nname = \"a\"\ncommand = [\"x\", \"\\u0000\"]".into(),
            ":3:11: service[0].command: contains a NUL character",
        ),
        ("services.etcd.binary = \"\"".into(), "services.etcd.binary: must name a program; remove this key"),
        (
            format!("services.etcd.enable = false\n{}", service_config("depends_on = [\"etcd\"]")),
            "set services.etcd.enable = true",
        ),
    ]);
}

#[test]
fn a_service_can_depend_on_the_images() {
    let service = service_config("depends_on = [\"containerd.preseed\"]");
    assert_rejected([
        (
            service.clone(),
            "a depends on containerd.preseed, which is disabled; set services.containerd.preseed",
        ),
        (
            format!("services.containerd.enable = false\n{service}"),
            "a depends on containerd.preseed, which is disabled; set services.containerd.enable = true",
        ),
        ("services.containerd.reserve = -1".into(), "services.containerd.reserve"),
    ]);
    let config = format!("services.containerd = {{ preseed = \"/images\", reserve = 0 }}\n{service}");
    let config = parse_config(&config).expect("it is enabled");
    assert_eq!(config.services.containerd.reserve, Some(Bytes(0)));
    assert_eq!(config.services.containerd.preseed, [Path::new("/images")]);
    let several = parse_config("services.containerd.preseed = [\"/b\", \"/a\"]").expect("a list");
    assert_eq!(several.services.containerd.preseed, [Path::new("/b"), Path::new("/a")]);
    assert_rejected([
        ("services.containerd.preseed = [\"/a\", \"/a/\"]".into(), "has /a/ twice"),
        ("services.containerd.preseed = [\"a\"]".into(), "services.containerd.preseed"),
        ("services.containerd.preseed = 1".into(), "a list like"),
    ]);
}

#[test]
fn keys_that_a_cluster_shares_require_a_cluster() {
    let storage = "[storage]\nkind = \"disk\"\ndevice = \"/dev/sdb\"\nencryption = \"encrypted\"\n\
                   keys = \"split\"\ncold_start = \"local\"\n";
    assert_rejected([(storage.to_owned(), ":5:8: storage.keys: \"split\" requires [cluster]")]);
    parse_config(&format!("{storage}[cluster]\naddress = \"192.0.2.7\"\n"))
        .expect("a cluster keeps the half");
}

#[test]
fn containerd_is_configured_by_settings_or_by_a_file() {
    let cri = "[services.containerd.cri]\n";
    assert_rejected([
        (
            format!("{cri}default_runtime = \"crun\""),
            "2:19: services.containerd.cri.default_runtime: unknown variant `crun`",
        ),
        (
            format!("{cri}default_runtime = \"runsc\""),
            "2:19: services.containerd.cri.default_runtime: runtime \"runsc\" is not configured",
        ),
        (
            format!("{cri}cni_conf = \"net.d\""),
            "2:12: services.containerd.cri.cni_conf: \"net.d\" is not absolute",
        ),
        (format!("{cri}cni = \"/x\""), "2:1: services.containerd.cri.cni: unknown field"),
        ("services.containerd.cri = true".into(), "services.containerd.cri: must be a table"),
        (
            format!("services.containerd.config = \"/c\"\n{cri}"),
            "1:30: services.containerd.config: conflicts with",
        ),
        ("services.containerd.config = \"c\"".into(), "services.containerd.config: \"c\" is not absolute"),
        (
            "services.containerd.unpack = true".into(),
            "services.containerd.unpack: requires services.containerd.preseed",
        ),
        (
            "services.containerd.required = [\"pause.tar\"]".into(),
            "services.containerd.required: requires services.containerd.preseed",
        ),
        (
            "services.containerd = { preseed = \"/i\", required = [\"pause.tar\", \"Pause:1\"] }".into(),
            "services.containerd.required: invalid image name \"Pause:1\"",
        ),
        (
            "services.containerd.allow = [\"pause:3.10\"]".into(),
            "services.containerd.allow: invalid image \"pause:3.10\": expected sha256:DIGEST",
        ),
    ]);
    let config =
        parse_config(&format!("{cri}default_runtime = \"runsc\"\n[services.containerd.cri.runsc]\n"))
            .expect("right");
    let expected = CriSettings {
        default_runtime: RuntimeHandler::Runsc,
        runsc: Some(RunscSettings::default()),
        ..CriSettings::default()
    };
    assert_eq!(config.services.containerd.cri, Some(expected));
}

#[test]
fn an_invalid_provisioner_section_is_rejected_at_its_line_and_field() {
    let given = "[provisioner]\nkubeconfig = \"/k\"\n";
    assert_rejected([
        ("[provisioner]\ncsi = false".into(), ":1:1: provisioner: missing field `kubeconfig`"),
        ("[provisioner]\nkubeconfig = \"k\"".into(), ":2:14: provisioner.kubeconfig: \"k\" is not absolute"),
        (format!("{given}quotas = \"none\""), ":3:1: provisioner.quotas: unknown field `quotas`"),
        (
            format!("{given}quota = \"off\""),
            ":3:9: provisioner.quota: unknown variant `off`, expected `require` or `none`",
        ),
        (format!("{given}driver = \"Not A Name\""), ":3:10: provisioner.driver: "),
        (format!("{given}node = \"a_b\""), ":3:8: provisioner.node: "),
        (format!("{given}csi = \"no\""), ":3:7: provisioner.csi: must be true or false, without quotes"),
        (format!("{given}directory = \"v\""), ":3:13: provisioner.directory: \"v\" is not absolute"),
        (
            format!("{given}stores = {{ a = \"/v\", b = \"/v\" }}"),
            "store a has the directory /v, which is that of store b",
        ),
        (format!("{given}stores = {{ \"../a\" = \"/v\" }}"), "invalid store name \"../a\""),
        (
            format!("{given}capacity.ratio = 0.0"),
            "provisioner.capacity.ratio: invalid capacity ratio 0: use a number from 0.001 to 1000, such as 1.0",
        ),
        (
            format!("{given}audit.interval = \"500ms\""),
            "provisioner.audit.interval: invalid interval \"500ms\": use a duration of at least a second, such as \"30m\"",
        ),
        (
            format!("{given}audit.rate = 0"),
            "provisioner.audit.rate: must be a whole number above 0, without quotes, not 0",
        ),
        ("provisioner = \"k\"".into(), ":1:15: provisioner: must be a table, written [provisioner]"),
        (
            format!("node.name = \"My Node\"\n{given}"),
            "provisioner.node: node.name \"My Node\" is not a valid Kubernetes node name",
        ),
        (
            service_config("depends_on = [\"provisioner\"]"),
            "a depends on provisioner, which is disabled; set provisioner.kubeconfig",
        ),
    ]);
    let config = parse_config(&format!("{given}{}", service_config("depends_on = [\"provisioner\"]")))
        .expect("the provisioner is configured");
    let provisioner = config.provisioner.expect("given");
    assert_eq!(provisioner.quota, QuotaMode::Require, "quotas are required by default");
    assert_eq!(provisioner.node_name_or("node").expect("the name of the node").as_str(), "node");
}
