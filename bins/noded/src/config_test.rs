use nodekeel_containerd_svc::{Cri, Runsc, Runtime};

use super::*;

fn parse(text: &str) -> Result<Config, String> {
    Config::parse(Path::new("noded.toml"), text).map_err(|error| error.to_string())
}

/// A minimal file with one service whose keys are these.
fn service(keys: &str) -> String {
    format!("[[service]]\nname = \"a\"\ncommand = [\"/bin/true\"]\n{keys}\n")
}

#[test]
fn the_shipped_file_is_the_defaults() {
    assert_eq!(parse(SHIPPED), Ok(Config::default()));
}

#[test]
fn the_shipped_file_shows_the_defaults_as_they_are() {
    let uncommented: Vec<_> = SHIPPED
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(key) if key.starts_with(|c: char| c.is_ascii_lowercase()) => key,
            _ => line,
        })
        .collect();
    let keys = uncommented.iter().filter(|line| line.contains(" = ") && !line.starts_with('#')).count();
    assert_eq!(keys, 13, "a key was added or lost: show it in noded.toml");
    assert_eq!(parse(&uncommented.join("\n")), Ok(Config::default()));
}

#[test]
fn the_shipped_example_of_a_service_parses_and_shows_every_key() {
    let example: Vec<_> = SHIPPED.lines().filter_map(|line| line.strip_prefix("#     ")).collect();
    let config = parse(&example.join("\n")).expect("the example parses");
    let [service] = &config.service[..] else { panic!("one service: {config:?}") };
    assert_eq!(
        (service.name.as_str(), service.depends_on.as_slice()),
        ("web", &["containerd".to_owned()][..])
    );
    let provisioner = config.provisioner.expect("it is shown");
    let bare = parse("provisioner.kubeconfig = \"/etc/kubernetes/provisioner.conf\"")
        .expect("it parses")
        .provisioner;
    let default = ProvisionerConfig {
        node: provisioner.node.clone(),
        directory: provisioner.directory.clone(),
        ..bare.expect("given")
    };
    assert_eq!(provisioner, default, "what has a default is shown at it");
    let cluster = parse("cluster.address = \"192.0.2.7\"").expect("it parses").cluster;
    assert_eq!(config.cluster, cluster, "what has a default is shown at it");
    let cri = config.services.containerd.cri.expect("it is shown");
    let default =
        Cri { sandbox_image: cri.sandbox_image.clone(), runsc: cri.runsc.clone(), ..Cri::default() };
    assert_eq!((&cri, &cri.runsc), (&default, &Some(Runsc::default())), "what has a default is shown at it");
    assert_eq!(service.backoff, Backoff::default());
    for key in [
        "name",
        "command",
        "environment",
        "user",
        "directory",
        "depends_on",
        "readiness",
        "restart",
        "backoff",
        "grace",
        "address",
        "deadline",
        "golden_tickets",
        "hostname",
        "kubeconfig",
        "node",
        "driver",
        "directory",
        "quota",
        "csi",
        "kubelet",
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
        let error = parse(text).expect_err(text);
        assert!(error.starts_with(says), "{text:?}\n is: {error}\nnot: {says}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn an_error_speaks_of_the_file_and_not_of_types() {
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
        ("[node]\nname = \"a\"\nname = \"b\"", ":3:1: the key name is given twice in the same table"),
        ("[service]\nname = \"a\"", "so each is written [[service]], in two brackets"),
        ("service = [1]", "so each is written [[service]], in two brackets"),
        (
            "[[services]]\nname = \"a\"",
            "services: must be a table, written [services]; a service of your own is a [[service]]",
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
        let error = parse(text).expect_err(text);
        assert!(error.contains(says) && !error.contains('\n'), "{text:?}\n is: {error}\nnot: {says}");
    }
}

#[test]
fn a_file_that_is_no_utf8_is_refused_at_its_line() {
    let scratch = tempfile::tempdir().expect("a directory");
    let file = scratch.path().join("noded.toml");
    std::fs::write(&file, b"[node]\nname = \"caf\xe9\"\n").expect("written");
    let error = Config::read(&file).expect_err("it is Latin-1").to_string();
    assert!(error.ends_with("noded.toml:2:12: is not UTF-8 here; save the file as UTF-8"), "{error}");
}

/// What each text is refused with.
fn refused<const N: usize>(cases: [(String, &str); N]) {
    for (text, says) in cases {
        let error = parse(&text).expect_err(&text);
        assert!(error.contains(says), "{text:?}\n is: {error}\nnot: {says}");
    }
}

#[test]
fn rules_between_services_name_the_field_too() {
    refused([
        (
            service("depends_on = [\"etcd\", \"b\"]"),
            ":4:23: service[0].depends_on[1]: a depends on \"b\", which is no service; there are etcd, cluster, containerd, provisioner, a",
        ),
        (
            service("depends_on = [\"a\"]"),
            ":4:14: service[0].depends_on: services wait for each other: a -> a",
        ),
        (
            format!(
                "{}{}",
                service("depends_on = [\"b\"]"),
                "[[service]]\nname = \"b\"\ncommand = [\"x\"]\ndepends_on = [\"a\"]"
            ),
            ": services wait for each other: a -> b -> a",
        ),
        (
            format!("{}{}", service(""), service("")),
            "service[1].name: \"a\" is the name of an earlier service",
        ),
        (
            "[[service]]\nname = \"A b\"\ncommand = [\"x\"]".into(),
            ":2:8: service[0].name: \"A b\" is no name: use 1 to 64 of",
        ),
        ("[[service]]\nname = \"etcd\"\ncommand = [\"x\"]".into(), "is a service of the node itself"),
        ("[[service]]\nname = \"b\"\ncommand = []".into(), "service[0].command: b has no program to run"),
    ]);
}

#[test]
fn rules_between_fields_name_the_field_too() {
    refused([
        (service("readiness = { probe = [] }"), "service[0].readiness: the probe of a has no program to run"),
        (service("readiness = \"soon\""), "must be \"started\", \"notify\", \"exit\" or { probe"),
        (
            service("readiness = \"exit\"\nrestart = \"always\""),
            ":5:11: service[0].restart: a is ready when it has exited",
        ),
        (service("backoff = { factor = 0.5 }"), "service[0].backoff.factor: 0.5 is less than 1"),
        (service("backoff = { jitter = 1.5 }"), "service[0].backoff.jitter: 1.5 is not between 0 and 1"),
        (service("backoff = { initial = \"2m\" }"), "service[0].backoff.initial: 120s is more than max, 60s"),
        (
            service("environment = { \"A=B\" = \"\" }"),
            "service[0].environment: \"A=B\" can't be a variable's name",
        ),
        (service("directory = \"srv\""), "service[0].directory: \"srv\" is not absolute"),
    ]);
}

#[test]
fn values_out_of_range_name_the_field_and_the_range() {
    refused([
        (
            "[services.etcd]\npeer_port = 2379".into(),
            ":2:13: services.etcd.peer_port: 2379 is the client port too",
        ),
        ("[log]\nbytes = 100000".into(), "log.bytes_per_dn: is more than log.bytes, 100000"),
        (
            "[log]\nbytes = 65535".into(),
            ":2:9: log.bytes: 65535 is too little for a log; give at least 65536",
        ),
        ("[events]\nkeep = 1000001".into(), "events.keep: 1000001 is too much to keep in memory"),
        ("[node]\ngrace = \"25h\"".into(), "node.grace: 90000s is more than a day; give at most \"24h\""),
        (service("grace = \"25h\""), "service[0].grace: 90000s is more than a day"),
        (service("backoff = { initial = \"0s\" }"), "service[0].backoff.initial: a service that can't start"),
        (
            service("depends_on = [\"etcd\", \"etcd\"]"),
            "depends_on[1]: a depends on etcd already; remove one",
        ),
        (service("environment = { A = \"\\u0000\" }"), "service[0].environment: holds a NUL character"),
        (
            "[[service]]\nname = \"a\"\ncommand = [\"x\", \"\\u0000\"]".into(),
            ":3:11: service[0].command: holds a NUL character",
        ),
        ("services.etcd.binary = \"\"".into(), "services.etcd.binary: must name a program, or be left out"),
        (
            format!("services.etcd.enable = false\n{}", service("depends_on = [\"etcd\"]")),
            "set services.etcd.enable = true",
        ),
    ]);
}

#[test]
fn services_come_after_what_they_depend_on_and_else_in_the_order_of_the_file() {
    let text = ["c:b", "a:", "b:d", "d:"].map(|entry| {
        let (name, dependency) = entry.split_once(':').expect("has one");
        let depends_on =
            if dependency.is_empty() { String::new() } else { format!("depends_on = [\"{dependency}\"]") };
        format!("[[service]]\nname = \"{name}\"\ncommand = [\"x\"]\n{depends_on}\n")
    });
    let config = parse(&text.concat()).expect("it is a graph");
    let names: Vec<_> = order(&config.service).expect("no cycle").iter().map(|s| s.name.as_str()).collect();
    assert_eq!(names, ["d", "b", "c", "a"]);
}

#[test]
fn containerd_is_configured_by_settings_or_by_a_file() {
    let cri = "[services.containerd.cri]\n";
    refused([
        (
            format!("{cri}default_runtime = \"crun\""),
            "2:19: services.containerd.cri.default_runtime: unknown variant `crun`",
        ),
        (
            format!("{cri}default_runtime = \"runsc\""),
            "2:19: services.containerd.cri.default_runtime: \"runsc\" is not among",
        ),
        (
            format!("{cri}cni_conf = \"net.d\""),
            "2:12: services.containerd.cri.cni_conf: \"net.d\" is not absolute",
        ),
        (format!("{cri}cni = \"/x\""), "2:1: services.containerd.cri.cni: unknown field"),
        ("services.containerd.cri = true".into(), "services.containerd.cri: must be a table"),
        (
            format!("services.containerd.config = \"/c\"\n{cri}"),
            "1:30: services.containerd.config: is used instead",
        ),
        ("services.containerd.config = \"c\"".into(), "services.containerd.config: \"c\" is not absolute"),
        ("services.containerd.unpack = true".into(), "services.containerd.unpack: is about the images of"),
    ]);
    let config = parse(&format!("{cri}default_runtime = \"runsc\"\n[services.containerd.cri.runsc]\n"))
        .expect("right");
    let expected = Cri { default_runtime: Runtime::Runsc, runsc: Some(Runsc::default()), ..Cri::default() };
    assert_eq!(config.services.containerd.cri, Some(expected));
}

#[test]
fn a_wrong_provisioner_is_refused_at_its_line_and_field() {
    let given = "[provisioner]\nkubeconfig = \"/k\"\n";
    refused([
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
        ("provisioner = \"k\"".into(), ":1:15: provisioner: must be a table, written [provisioner]"),
        (
            format!("node.name = \"My Node\"\n{given}"),
            "provisioner.node: a node of Kubernetes can't be called \"My Node\", which is node.name",
        ),
        (service("depends_on = [\"provisioner\"]"), "a depends on provisioner; give provisioner.kubeconfig"),
    ]);
    let config =
        parse(&format!("{given}{}", service("depends_on = [\"provisioner\"]"))).expect("it is there");
    let provisioner = config.provisioner.expect("given");
    assert_eq!(provisioner.quota, Quota::Require, "limits bind unless somebody has said that they need not");
    assert_eq!(provisioner.node_name("node").expect("the node's own").as_str(), "node");
}
