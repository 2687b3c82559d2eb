use std::path::Path;

use super::*;
use crate::config::NodedConfig;

#[test]
fn a_limit_of_processes_is_one_number_or_two() {
    assert_eq!(parse_rlimit("20:unlimited"), Some((Some(20), None)));
    assert_eq!(parse_rlimit("unlimited"), Some((None, None)));
    assert_eq!((parse_rlimit("20:"), parse_rlimit("-1"), parse_rlimit("1:2:3")), (None, None, None));
}

fn parse_service(keys: &str) -> Result<UserService, String> {
    let text = format!("[[service]]\nname = \"a\"\ncommand = [\"/bin/true\"]\n{keys}\n");
    let config = NodedConfig::parse_toml(Path::new("noded.toml"), &text);
    config.map(|mut config| config.service.remove(0)).map_err(|error| error.to_string())
}

#[test]
fn a_task_that_ends_by_itself_is_not_kept() {
    assert!(parse_service("keep = true").expect("it parses").keep);
    let error = parse_service("keep = true\nreadiness = \"exit\"").expect_err("it is rejected");
    assert!(error.contains("service[0].keep") && error.contains("its exit code would be lost"), "{error}");
}

#[test]
fn every_setting_of_a_service_parses() {
    let keys = r#"limits = { memory_max = "64MiB", cpu_max = 0.5, rlimits = { nofile = 9, core = "0:unlimited" } }
        privileges = { capabilities = [], umask = "027" }
        user = "nobody"
        reload = ["/bin/kill"]
        stop_signal = "INT"
        liveness = { probe = ["/bin/true"] }
        log = "klog"
        log_zone = "JST-9""#;
    let service = parse_service(keys).expect("it parses");
    let (core, nofile) = (RlimitResource::Core, RlimitResource::Nofile);
    assert_eq!((service.limits.memory_max, service.limits.cpu_max), (Some(Bytes(64 << 20)), Some(0.5)));
    let rlimits = [Rlimit::new(core, Some(0), None), Rlimit::new(nofile, Some(9), Some(9))];
    assert_eq!(service.limits.rlimits, rlimits);
    assert_eq!((service.privileges.capabilities, service.privileges.umask), (Some(vec![]), Some(0o027)));
    assert_eq!(service.reload, Some(ReloadConfig::Command(vec!["/bin/kill".into()])));
    assert_eq!((service.stop_signal, service.log), (Some(Signal::INT), LogFormat::Klog));
    assert_eq!(service.log_zone, Some("JST-9".parse().unwrap()));
    let liveness = service.liveness.expect("it is given");
    let defaults = (Duration::from_secs(10), Duration::from_secs(5), 3);
    assert_eq!((liveness.period, liveness.timeout, liveness.failure_threshold), defaults);
    let service = parse_service("").expect("it parses");
    assert_eq!((service.log, service.limits), (LogFormat::Text, ServiceLimits::default()));
}

#[test]
fn an_invalid_setting_is_named_with_what_is_valid() {
    for (keys, says) in [
        (
            "log = \"xml\"",
            "noded.toml:4:7: service[0].log: unknown log format \"xml\"; known: text, klog, json",
        ),
        (
            "log_zone = \"Tokio\"",
            "noded.toml:4:12: service[0].log_zone: unknown time zone \"Tokio\": use a name from /usr/share/zoneinfo",
        ),
        (
            "limits = { memory_max = \"64MX\" }",
            "service[0].limits.memory_max: unknown suffix \"MX\": use Ki, Mi",
        ),
        (
            "limits = { memory_max = 1.5 }",
            "service[0].limits.memory_max: must be bytes, like \"10Gi\" or 10737418240, not 1.5",
        ),
        (
            "limits = { rlimits = { nofile = -1 } }",
            "must be a whole number, without quotes, or text in quotes",
        ),
        (
            "limits = { memory = 1 }",
            "service[0].limits.memory: unknown field `memory`, expected one of `memory_max`",
        ),
        ("limits = { rlimits = { files = 1 } }", "unknown resource limit \"files\"; known: as, core"),
        ("limits = { rlimits = { nofile = \"9:1\" } }", "the soft limit of nofile=9:1 exceeds the hard one"),
        (
            "limits = { rlimits = { nofile = \"many\" } }",
            "must be a number, \"unlimited\", or a soft and a hard limit",
        ),
        (
            "limits = { cpu_max = 0.001 }",
            "service[0].limits.cpu_max: 0.001 is not between 0.01 and 4096 CPUs",
        ),
        ("limits = { io_weight = 0 }", "service[0].limits.io_weight: 0 is not between 1 and 10000"),
        ("limits = { pids_max = 0 }", "service[0].limits.pids_max: must be at least 1"),
        ("limits = { oom_score_adj = 1001 }", "service[0].limits.oom_score_adj: 1001 is not between"),
        (
            "privileges = { capabilities = [\"root\"] }",
            "unknown capability \"root\": use a name of capabilities(7)",
        ),
        (
            "privileges = { capabilities = [\"net_admin\"] }",
            "service[0].privileges.capabilities: a would run as root, which owns the node's files and its control socket, with or without capabilities: add `user = \"...\"`",
        ),
        (
            "user = \"root\"\nprivileges = { capabilities = [] }",
            "service[0].privileges.capabilities: a would run as root",
        ),
        ("privileges = { umask = \"999\" }", "must be an octal number, like \"022\""),
        (
            "privileges = { read_only_paths = [\"usr\"] }",
            "service[0].privileges.read_only_paths: \"usr\" is not absolute",
        ),
        ("reload = \"SIGNAL\"", "unknown signal \"SIGNAL\": use a name of signal(7), like \"SIGHUP\""),
        ("reload = []", "service[0].reload: has no command"),
        ("stop_signal = \"99\"", "service[0].stop_signal: unknown signal \"99\""),
        ("watchdog = \"0s\"", "service[0].watchdog: the interval must be above 0"),
        ("watchdog = \"25h\"", "service[0].watchdog: "),
        ("liveness = { probe = [] }", "service[0].liveness: has no command"),
        ("liveness = { probe = [\"x\"], period = \"0s\" }", "service[0].liveness.period: must be above 0"),
        (
            "liveness = { probe = [\"x\"], failure_threshold = 0 }",
            "service[0].liveness.failure_threshold: must be at least 1",
        ),
    ] {
        let error = parse_service(keys).expect_err(keys);
        assert!(error.contains(says), "{keys}\n is: {error}\nnot: {says}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn a_restart_limit_that_is_never_reached_is_rejected() {
    let service = parse_service("restart_limit = { restarts = 5, period = \"10m\" }").expect("it parses");
    let limit = service.restart_limit.expect("it is given");
    assert_eq!((limit.restarts, limit.period), (5, Duration::from_secs(600)));
    for (keys, says) in [
        ("restart_limit = 5", "service[0].restart_limit: must be a table"),
        ("restart_limit = { restarts = 5 }", "missing field `period`"),
        (
            "restart_limit = { restarts = -1, period = \"1m\" }",
            "must be a whole number from 0 to 4294967295, without quotes, not -1",
        ),
        (
            "restart_limit = { restarts = 1001, period = \"1h\" }",
            "service[0].restart_limit.restarts: 1001 restarts",
        ),
        ("restart_limit = { restarts = 5, period = \"25h\" }", "service[0].restart_limit.period: "),
        (
            "restart_limit = { restarts = 5, period = \"3s\" }",
            "is too short: by its backoff, 5 restarts take at least 3.",
        ),
        ("restart_limit = { restarts = 0, period = \"0s\" }", "service[0].restart_limit.period: "),
        (
            "restart = \"never\"\nrestart_limit = { restarts = 5, period = \"1h\" }",
            "conflicts with restart \"never\"",
        ),
    ] {
        let error = parse_service(keys).expect_err(keys);
        assert!(error.contains(says), "{error}\nnot: {says}");
    }
}
