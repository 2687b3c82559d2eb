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
    assert_eq!(keys, 12, "a key was added or lost: show it in noded.toml");
    assert_eq!(parse(&uncommented.join("\n")), Ok(Config::default()));
}

#[test]
fn the_shipped_example_of_a_service_parses_and_shows_every_key() {
    let example: Vec<_> = SHIPPED.lines().filter_map(|line| line.strip_prefix("#     ")).collect();
    let config = parse(&example.join("\n")).expect("the example parses");
    let [service] = &config.service[..] else { panic!("one service: {config:?}") };
    assert_eq!((service.name.as_str(), service.depends_on.as_slice()), ("web", &["etcd".to_owned()][..]));
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
            "noded.toml:2:9: node.grace: invalid type: integer `10`, expected a duration with its unit",
        ),
        ("[[service]]\nname = \"a\"\n", "noded.toml:1:1: service[0]: missing field `command`"),
        (
            "[[service]]\nname = \"a\"\ncommand = [\"x\"]\n[[service]]\nname = \"b\"\ncommand = [1]\n",
            "noded.toml:6:12: service[1].command[0]: invalid type: integer `1`, expected a string",
        ),
        (
            "[node]\ngrace = \"10 parsecs\"\n",
            "noded.toml:2:9: node.grace: invalid value: string \"10 parsecs\"",
        ),
    ] {
        let error = parse(text).expect_err(text);
        assert!(error.starts_with(says), "{text:?}\n is: {error}\nnot: {says}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn rules_between_fields_name_the_field_too() {
    for (text, says) in [
        (
            service("depends_on = [\"etcd\", \"b\"]"),
            ":4:23: service[0].depends_on[1]: a depends on \"b\", which is no service; there are etcd, containerd, a",
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
        (service("readiness = { probe = [] }"), "service[0].readiness: the probe of a has no program to run"),
        (service("readiness = \"soon\""), "expected \"started\", \"notify\", \"exit\" or { probe"),
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
        (service("directory = \"srv\""), "service[0].directory: srv is not absolute"),
        (
            "[services.etcd]\npeer_port = 2379".into(),
            ":2:13: services.etcd.peer_port: 2379 is the client port too",
        ),
        ("[log]\nbytes = 1000".into(), "log.bytes_per_dn: is more than log.bytes, 1000"),
        (
            format!("services.etcd.enable = false\n{}", service("depends_on = [\"etcd\"]")),
            "set services.etcd.enable = true",
        ),
    ] {
        let error = parse(&text).expect_err(&text);
        assert!(error.contains(says), "{text:?}\n is: {error}\nnot: {says}");
    }
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
