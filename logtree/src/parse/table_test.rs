use std::time::SystemTime;

use jiff::Timestamp;

use super::*;
use crate::LogMessage;

const NOON: &str = "2026-11-21T12:00:00Z";

fn at(text: &str) -> SystemTime {
    text.parse::<Timestamp>().expect("a time").into()
}

/// The parts of a message that are not empty, in one line.
fn shown(message: &LogMessage) -> String {
    let time = message.time.map(|time| Timestamp::try_from(time).expect("in range").to_string());
    let position = (!message.file.is_empty()).then(|| format!("{}:{}", message.file, message.line));
    let fields = message.fields.iter().map(|field| format!("{}={}", field.name, field.value));
    let parts = [Some(message.level.to_string()), time, position, Some(message.text.clone())];
    parts.into_iter().flatten().chain(fields).collect::<Vec<_>>().join(" | ").replace('\n', "\\n")
}

/// A format and a line, then its message.
const MESSAGES: &str = r#"
klog E1121 11:26:08.703131   12345 reflector.go:127] list failed: timeout
  = error | 2026-11-21T11:26:08.703131Z | reflector.go:127 | list failed: timeout
klog W1121 11:26:08 1 a.go:1] x
  = warn | 2026-11-21T11:26:08Z | a.go:1 | x
klog F1121 11:26:08.5 1 a.go:1] x
  = fatal | 2026-11-21T11:26:08.5Z | a.go:1 | x
klog I1121 11:26:08.000000001 1 a.go:1] x
  = info | 2026-11-21T11:26:08.000000001Z | a.go:1 | x
klog I1121 11:26:08.1234567899999 1 a.go:1] digits beyond nanoseconds are dropped
  = info | 2026-11-21T11:26:08.123456789Z | a.go:1 | digits beyond nanoseconds are dropped
klog panic: runtime error: index out of range [1] with length 1
  = fatal | panic: runtime error: index out of range [1] with length 1
klog fatal error: all goroutines are asleep - deadlock!
  = fatal | fatal error: all goroutines are asleep - deadlock!
klog SIGABRT: abort
  = fatal | SIGABRT: abort
etcd 2026-11-21 11:26:09.110541 N | etcdserver/membership: set the version to 3.4
  = info | 2026-11-21T11:26:09.110541Z | set the version to 3.4 | package=etcdserver/membership
etcd raft2026/11/21 11:26:08 INFO: raft.node: 2e elected leader 2e at term 2
  = info | 2026-11-21T11:26:08Z | raft.node: 2e elected leader 2e at term 2 | package=raft
etcd {"level":"info","msg":"x"}
  = info | x
zap {"level":"info","ts":"2026-11-21T11:26:12.708+0100","caller":"embed/etcd.go:117","msg":"up","b":[1,"x"],"a":1.5}
  = info | 2026-11-21T10:26:12.708Z | embed/etcd.go:117 | up | a=1.5 | b=[1,"x"]
zap {"level":"warn","msg":"x"}
  = warn | x
zap {"level":"error","message":"x"}
  = error | x
zap {"level":"info","ts":1.5,"msg":"x"}
  = info | 1970-01-01T00:00:01.5Z | x
json {"ts":1795381794526.75,"caller":"lease/controller.go:201","msg":"Failed","interval":"200ms","err":"not found"}
  = error | 2026-11-22T21:09:54.52675Z | lease/controller.go:201 | Failed | err=not found | interval=200ms
json {"ts":1.5,"caller":"app/server.go:545","msg":"Kubelet version\n","v":0}
  = info | 1970-01-01T00:00:00.0015Z | app/server.go:545 | Kubelet version
json {"ts":1.5,"msg":"Updated","v":4}
  = info | 1970-01-01T00:00:00.0015Z | Updated | v=4
json {"level":"warn","ts":1.5,"msg":"x"}
  = warn | 1970-01-01T00:00:01.5Z | x
logfmt time="2026-11-21T11:26:16.759613664Z" level=warning msg="skip \"aufs\"" error="\xc3\xbc \u00fc\n" type=io.v1 empty=
  = warn | 2026-11-21T11:26:16.759613664Z | skip "aufs" | error=ü ü\n | type=io.v1 | empty=
logfmt level=panic msg=x
  = fatal | x
logfmt level=info level=again msg=x
  = info | x | level=again
"#;

/// A format, and a line that is not in it.
const OTHER_LINES: &str = r#"
klog just some text
klog D1121 11:26:08.703131 1 a.go:1] severity
klog I1121 25:26:08.703131 1 a.go:1] hour
klog I1121 11:26:08. 1 a.go:1] empty fraction
klog I1121 11:26:08.7 1 a.go:1]
klog I1121 11:26:08.7 x a.go:1] pid
klog I1121 11:26:08.7 1 a:b:1] file
klog SIGTERM: terminated
etcd raft
etcd 2026-11-21 11:26:09
etcd 2026-13-21 11:26:09.1 I | a: b
etcd 2026-11-21 11:26:09 X | a
zap {
zap []
zap {}
zap {"level":"info"}
zap {"msg":"x"}
zap {"level":"info","msg":1}
zap {"level":"info","ts":-1e300,"msg":"x"}
json {}
json []
json {"msg":"x"}
json {"ts":"now","msg":"x"}
json {"ts":1,"msg":2}
json {"ts":-1e300,"msg":"x"}
json {"ts":1,"msg":"x","level":1}
logfmt level=info
logfmt msg=x
logfmt level=loud msg=x
logfmt level=info msg=x y
logfmt level=info msg="x
logfmt level=info msg="x"y=z
logfmt level=info msg="\q"
logfmt level=info msg="\uD800"
logfmt time=yesterday level=info msg=x
"#;

fn parse_as(format_and_line: &str) -> Option<LogMessage> {
    let (format, line) = format_and_line.split_once(' ').expect("a format and a line");
    let format: LogFormat = format.parse().expect("a format");
    format.line_parser().expect("a parser")(line, at(NOON))
}

#[test]
fn lines_become_messages() {
    for case in MESSAGES.trim().split('\n').collect::<Vec<_>>().chunks(2) {
        let found = parse_as(case[0]).as_ref().map(shown);
        assert_eq!(found.as_deref(), case[1].strip_prefix("  = "), "{}", case[0]);
    }
}

#[test]
fn lines_of_another_format_are_rejected() {
    let empty = ["klog ", "etcd ", "zap ", "json ", "logfmt ", "klog I1121 11:26:08.7 1 a.go:1] "];
    for line in OTHER_LINES.trim().lines().chain(empty) {
        assert_eq!(parse_as(line), None, "{line}");
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
