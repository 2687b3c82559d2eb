use std::time::SystemTime;

use jiff::Timestamp;

use super::*;
use crate::LogMessage;

const NOON: &str = "2026-11-21T12:00:00Z";

fn at(text: &str) -> SystemTime {
    text.parse::<Timestamp>().expect("a time").into()
}

/// The parts of a message that are not empty.
fn shown(message: &LogMessage) -> String {
    let time = message.time.map(|time| Timestamp::try_from(time).expect("in range").to_string());
    let position = (!message.file.is_empty()).then(|| format!("{}:{}", message.file, message.line));
    let fields = message.fields.iter().map(|field| format!("{}={}", field.name, field.value));
    let parts = [Some(message.level.to_string()), time, position, Some(message.text.clone())];
    parts.into_iter().flatten().chain(fields).collect::<Vec<_>>().join(" | ")
}

#[test]
fn lines_become_messages() {
    let cases: [(LineParser, &str, &str); 22] = [
        (
            klog_line,
            "E1121 11:26:08.703131   12345 reflector.go:127] list failed: timeout",
            "error | 2026-11-21T11:26:08.703131Z | reflector.go:127 | list failed: timeout",
        ),
        (klog_line, "W1121 11:26:08 1 a.go:1] x", "warn | 2026-11-21T11:26:08Z | a.go:1 | x"),
        // A fraction of any length; digits beyond nanoseconds are dropped.
        (klog_line, "F1121 11:26:08.5 1 a.go:1] x", "fatal | 2026-11-21T11:26:08.5Z | a.go:1 | x"),
        (
            klog_line,
            "I1121 11:26:08.000000001 1 a.go:1] x",
            "info | 2026-11-21T11:26:08.000000001Z | a.go:1 | x",
        ),
        (
            klog_line,
            "I1121 11:26:08.1234567899999 1 a.go:1] x",
            "info | 2026-11-21T11:26:08.123456789Z | a.go:1 | x",
        ),
        // The crash of a Go program, also one that the watchdog of its supervisor has aborted.
        (
            klog_line,
            "panic: runtime error: index out of range [1] with length 1",
            "fatal | panic: runtime error: index out of range [1] with length 1",
        ),
        (
            klog_line,
            "fatal error: all goroutines are asleep - deadlock!",
            "fatal | fatal error: all goroutines are asleep - deadlock!",
        ),
        (klog_line, "SIGABRT: abort", "fatal | SIGABRT: abort"),
        // Both text formats of etcd.
        (
            capnslog_line,
            "2026-11-21 11:26:09.110541 N | etcdserver/membership: set the version to 3.4",
            "info | 2026-11-21T11:26:09.110541Z | set the version to 3.4 | package=etcdserver/membership",
        ),
        (
            capnslog_line,
            "raft2026/11/21 11:26:08 INFO: raft.node: 2e elected leader 2e at term 2",
            "info | 2026-11-21T11:26:08Z | raft.node: 2e elected leader 2e at term 2 | package=raft",
        ),
        // Reference case 16: three levels, the fields by key.
        (
            zap_line,
            r#"{"level":"info","ts":"2026-11-21T11:26:12.708+0100","caller":"embed/etcd.go:117","msg":"up","b":[1,"x"],"a":1.5}"#,
            r#"info | 2026-11-21T10:26:12.708Z | embed/etcd.go:117 | up | a=1.5 | b=[1,"x"]"#,
        ),
        (zap_line, r#"{"level":"warn","msg":"x"}"#, "warn | x"),
        (zap_line, r#"{"level":"error","message":"x"}"#, "error | x"),
        (zap_line, r#"{"level":"info","ts":1.5,"msg":"x"}"#, "info | 1970-01-01T00:00:01.5Z | x"),
        (etcd_line, r#"{"level":"info","msg":"x"}"#, "info | x"),
        // Kubernetes: a message without a verbosity is an error.
        (
            json_line,
            r#"{"ts":1795381794526.75,"caller":"lease/controller.go:201","msg":"Failed to ensure lease exists, will retry","interval":"200ms","err":"not found"}"#,
            "error | 2026-11-22T21:09:54.52675Z | lease/controller.go:201 | Failed to ensure lease exists, will retry | err=not found | interval=200ms",
        ),
        (
            json_line,
            r#"{"ts":1.5,"caller":"app/server.go:545","msg":"Kubelet version\n","v":0}"#,
            "info | 1970-01-01T00:00:00.0015Z | app/server.go:545 | Kubelet version",
        ),
        (
            json_line,
            r#"{"ts":1.5,"msg":"Updated","v":4}"#,
            "info | 1970-01-01T00:00:00.0015Z | Updated | v=4",
        ),
        (json_line, r#"{"level":"warn","ts":1.5,"msg":"x"}"#, "warn | 1970-01-01T00:00:01.5Z | x"),
        (
            logfmt_line,
            r#"time="2026-11-21T11:26:16.759613664Z" level=warning msg="skip plugin \"aufs\"" error="\xc3\xbc \u00fc\n" type=io.v1 empty="#,
            "warn | 2026-11-21T11:26:16.759613664Z | skip plugin \"aufs\" | error=ü ü\n | type=io.v1 | empty=",
        ),
        (logfmt_line, "level=panic msg=x", "fatal | x"),
        (logfmt_line, "level=info level=again msg=x", "info | x | level=again"),
    ];
    for (parser, line, message) in cases {
        assert_eq!(parser(line, at(NOON)).as_ref().map(shown).as_deref(), Some(message), "{line}");
    }
}

#[test]
fn lines_of_another_format_are_rejected() {
    let cases: [(LineParser, &[&str]); 5] = [
        (
            klog_line,
            &[
                "just some text",
                "",
                "D1121 11:26:08.703131 1 a.go:1] severity",
                "I1121 25:26:08.703131 1 a.go:1] hour",
                "I1121 11:26:08. 1 a.go:1] empty fraction",
                "I1121 11:26:08.7 1 a.go:1] ",
                "I1121 11:26:08.7 x a.go:1] pid",
                "I1121 11:26:08.7 1 a:b:1] file",
                // It ends no Go program with a dump.
                "SIGTERM: terminated",
            ],
        ),
        (
            capnslog_line,
            &[
                "",
                "raft",
                "2026-11-21 11:26:09",
                "2026-13-21 11:26:09.1 I | a: b",
                "2026-11-21 11:26:09 X | a",
            ],
        ),
        (
            zap_line,
            &[
                "",
                "{",
                "[]",
                "{}",
                r#"{"level":"info"}"#,
                r#"{"msg":"x"}"#,
                r#"{"level":"info","msg":1}"#,
                r#"{"level":"info","ts":-1e300,"msg":"x"}"#,
            ],
        ),
        (
            json_line,
            &[
                "",
                "{}",
                "[]",
                r#"{"msg":"x"}"#,
                r#"{"ts":"now","msg":"x"}"#,
                r#"{"ts":1,"msg":2}"#,
                r#"{"ts":-1e300,"msg":"x"}"#,
                r#"{"ts":1,"msg":"x","level":1}"#,
            ],
        ),
        (
            logfmt_line,
            &[
                "",
                "level=info",
                "msg=x",
                "level=loud msg=x",
                "level=info msg=x y",
                r#"level=info msg="x"#,
                r#"level=info msg="x"y=z"#,
                r#"level=info msg="\q""#,
                r#"level=info msg="\uD800""#,
                "time=yesterday level=info msg=x",
            ],
        ),
    ];
    for (parser, lines) in cases {
        for line in lines {
            assert_eq!(parser(line, at(NOON)), None, "{line}");
        }
    }
}

#[test]
fn the_year_of_a_klog_line_is_the_latest_that_is_not_in_the_future() {
    for (day, now, time) in [
        ("1224 00:00:00.000000", "2021-03-01T00:00:00Z", None),
        ("1231 23:59:43.123456", "2000-01-01T00:00:01Z", Some("1999-12-31T23:59:43.123456Z")),
        // A leap day, in its year and just after.
        ("0229 23:30:00.000000", "2024-02-29T23:31:00Z", Some("2024-02-29T23:30:00Z")),
        ("0229 23:30:00.000000", "2024-12-31T00:00:00Z", Some("2024-02-29T23:30:00Z")),
        ("0229 23:30:00.000000", "2026-01-01T00:00:00Z", None),
        // A clock slightly ahead of ours at New Year is in the next year.
        ("0101 00:00:05.0", "2026-12-31T23:59:58Z", Some("2027-01-01T00:00:05Z")),
    ] {
        let message = klog_line(&format!("I{day} 1 a.go:1] x"), at(now));
        assert_eq!(message.and_then(|message| message.time), time.map(at), "{day} at {now}");
    }
}

#[test]
fn a_structured_message_of_klog_has_fields() {
    let parse = |text: &str| {
        let message = klog_line(&format!("I1121 11:26:08.703131 1 a.go:1] {text}"), at(NOON));
        shown(&message.expect("it is klog")).split_off("info | 2026-11-21T11:26:08.703131Z | a.go:1 | ".len())
    };
    for (fields, expected) in [
        (
            r#" pod="kube-system/a" err="no \"x\"" attempt=3"#,
            r#" | pod=kube-system/a | err=no "x" | attempt=3"#,
        ),
        (
            r#" gates={"A":"b c"} list=["a b"] none=<nil>"#,
            r#" | gates={"A":"b c"} | list=["a b"] | none=<nil>"#,
        ),
        (" err=<", " | err=<"),
        ("", ""),
    ] {
        assert_eq!(parse(&format!(r#""Pod \"a\" failed"{fields}"#)), format!(r#"Pod "a" failed{expected}"#));
    }
    for text in ["FLAG: --a=\"b\"", "\"x\" and more", "\"x\" a=b  c=d", "\"x\" a={b", "\"open", "x a=b"] {
        assert_eq!(parse(text), text, "it has no structure");
    }
}
