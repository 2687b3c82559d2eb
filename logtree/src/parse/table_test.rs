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
    let time = message.claimed_time.map(|time| Timestamp::try_from(time).expect("in range").to_string());
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
klog E1121 25:26:08.703131 1 a.go:1] there is no such hour
  = error | a.go:1 | there is no such hour
klog E1121 11:26:60.5 1 a.go:1] a leap second
  = error | 2026-11-21T11:26:59.5Z | a.go:1 | a leap second
klog E20261121 11:26:08.703131 12345 file.cc:12] glog in C++
  = error | 2026-11-21T11:26:08.703131Z | file.cc:12 | glog in C++
klog E0000 00:00:1795260368.703131 12345 file.cc:12] Abseil before its start
  = error | 2026-11-21T11:26:08.703131Z | file.cc:12 | Abseil before its start
klog panic: runtime error: index out of range [1] with length 1
  = fatal | panic: runtime error: index out of range [1] with length 1
klog fatal error: all goroutines are asleep - deadlock!
  = fatal | fatal error: all goroutines are asleep - deadlock!
logfmt SIGABRT: abort
  = fatal | SIGABRT: abort
logfmt containerd: open /nonexistent.toml: no such file or directory
  = error | containerd: open /nonexistent.toml: no such file or directory
etcd flag provided but not defined: -wrong
  = error | flag provided but not defined: -wrong
json Traceback (most recent call last):
  = error | Traceback (most recent call last):
json Exception in thread "main" java.lang.Error: main died
  = error | Exception in thread "main" java.lang.Error: main died
json # A fatal error has been detected by the Java Runtime Environment:
  = fatal | # A fatal error has been detected by the Java Runtime Environment:
json thread 'main' panicked at src/main.rs:1:5:
  = fatal | thread 'main' panicked at src/main.rs:1:5:
etcd 2026-11-21 11:26:09.110541 N | etcdserver/membership: set the version to 3.4
  = info | 2026-11-21T11:26:09.110541Z | set the version to 3.4 | package=etcdserver/membership
etcd raft2026/11/21 11:26:08 INFO: raft.node: 2e elected leader 2e at term 2
  = info | 2026-11-21T11:26:08Z | raft.node: 2e elected leader 2e at term 2 | package=raft
etcd {"level":"info","msg":"x"}
  = info | x
json {"level":"info","ts":"2026-11-21T11:26:12.708+0100","caller":"embed/etcd.go:117","msg":"up","b":[1,"x"],"a":1.5}
  = info | 2026-11-21T10:26:12.708Z | embed/etcd.go:117 | up | b=[1,"x"] | a=1.5
json {"level":"warn","msg":"x"}
  = warn | x
json {"level":"error","message":"x"}
  = error | x
json {"level":"info","ts":1.5,"msg":"x"}
  = info | 1970-01-01T00:00:01.5Z | x
json {"ts":1795381794526.75,"caller":"lease/controller.go:201","msg":"Failed","interval":"200ms","err":"not found"}
  = error | 2026-11-22T21:09:54.52675Z | lease/controller.go:201 | Failed | interval=200ms | err=not found
json {"ts":1.5,"caller":"app/server.go:545","msg":"Kubelet version\n","v":0}
  = info | 1970-01-01T00:00:00.0015Z | app/server.go:545 | Kubelet version
json {"ts":1.5,"msg":"Updated","v":4}
  = info | 1970-01-01T00:00:00.0015Z | Updated | v=4
json {"level":"warn","ts":1.5,"msg":"x"}
  = warn | 1970-01-01T00:00:01.5Z | x
json {"level":"warning","msg":"logrus","time":"2026-11-21T11:26:08+09:00"}
  = warn | 2026-11-21T02:26:08Z | logrus
json {"time":"2026-11-21T11:26:08.703Z","level":"WARN+1","source":{"function":"main","file":"/a/b.go","line":7},"msg":"slog"}
  = warn | 2026-11-21T11:26:08.703Z | /a/b.go:7 | slog
json {"level":50,"time":1795260368703,"pid":1,"hostname":"h","msg":"pino"}
  = error | 2026-11-21T11:26:08.703Z | pino | pid=1 | hostname=h
json {"level":"error","time":1795260368,"caller":"m.go:7","message":"zerolog"}
  = error | 2026-11-21T11:26:08Z | m.go:7 | zerolog
json {"level":"info","ts":1795260368703131,"msg":"microseconds"}
  = info | 2026-11-21T11:26:08.703131Z | microseconds
json {"level":"info","ts":1795260368703131999,"msg":"nanoseconds"}
  = info | 2026-11-21T11:26:08.703131999Z | nanoseconds
json {"asctime":"2026-11-21 11:26:08,703","levelname":"CRITICAL","message":"python"}
  = fatal | 2026-11-21T11:26:08.703Z | python
json {"@timestamp":"2026-11-21T11:26:08.703Z","log.level":"SEVERE","message":"java"}
  = error | 2026-11-21T11:26:08.703Z | java
json {"severity":"ERROR","event":"structlog","timestamp":"2026-11-21T11:26:08Z"}
  = error | 2026-11-21T11:26:08Z | structlog
json {"level":3,"msg":"a severity of syslog"}
  = error | a severity of syslog
json {"level":"loud","msg":"an unknown level hides nothing, and is kept"}
  = warn | an unknown level hides nothing, and is kept | level=loud
json {"level":8000,"msg":"x"}
  = warn | x | level=8000
json {"level":"error","time":"yesterday","caller":"nowhere","msg":"a doubt costs only its field"}
  = error | a doubt costs only its field | time=yesterday | caller=nowhere
json {"level":"error","ts":-1.5,"msg":"x"}
  = error | x | ts=-1.5
json {"level":"info","msg":"x","a":1,"a":2}
  = info | x | a=1 | a=2
json {"level":"\u001b[31mERROR\u001b[0m","ts":1795260368703.274,"msg":"zap in color, a fraction of milliseconds"}
  = error | 2026-11-21T11:26:08.703274Z | zap in color, a fraction of milliseconds
json {"level":"error","time":5,"time":"2026-11-21T11:26:08+09:00","message":"a field of the program, in zerolog"}
  = error | 2026-11-21T02:26:08Z | a field of the program, in zerolog | time=5
json {"asctime":"2026-11-21 11:26:08,445","levelname":"ERROR","message":"python","level":6,"time":12.5,"x":NaN}
  = error | 2026-11-21T11:26:08.445Z | python | level=6 | time=12.5 | x=NaN
json {"a": -Infinity, "event": "structlog", "level_number": 40, "timestamp": 1795260368.442454}
  = error | 2026-11-21T11:26:08.442454Z | structlog | a=-Infinity
json {"text":"x","record":{"level":{"icon":"X","name":"ERROR","no":40},"message":"loguru","time":{"repr":"2026-11-21 11:26:08.5+09:00"}}}
  = error | 2026-11-21T02:26:08.5Z | loguru | text=x
json {"level":"50","msg":"a number in a text"}
  = error | a number in a text
json {"level":50.0,"msg":"x"}
  = error | x
json {"level":1000,"msg":"a number of Java"}
  = error | a number of Java
json {"level":8,"msg":"a number of slog"}
  = error | a number of slog
json {"level":null,"severity":"ERROR","msg":"the key that can be read"}
  = error | the key that can be read | level=null
json {"levelname":"Level 45","message":"a level of Python without a name"}
  = error | a level of Python without a name
json {"level":"error","ts":1e400,"n":99999999999999999999,"msg":"lone \ud83d"}
  = error | "lone \ud83d" | ts=1e400 | n=100000000000000000000
json {"level":"error","msg":"cut","stack":"a, \"b\" {c
  = error | cut | stack="a, \"b\" {c
json {"level":"error","ts":"9999-12-31T23:59:59Z","msg":"no entry has such a time"}
  = error | no entry has such a time | ts=9999-12-31T23:59:59Z
json {"level":"error","ts":"0001-01-01T00:00:00Z","msg":"Go's zero time"}
  = error | Go's zero time | ts=0001-01-01T00:00:00Z
json {"level":"error","time":"2026-11-21","msg":"a date is no time"}
  = error | a date is no time | time=2026-11-21
json {"level":"error","time":"1795260368703","msg":"a number in a text"}
  = error | 2026-11-21T11:26:08.703Z | a number in a text
json {"level":"error","err":"no message"}
  = error |  | err=no message
json {"level":"error","msg":{"a":1}}
  = error | {"a":1}
logfmt time="2026-11-21T11:26:16.759613664Z" level=warning msg="skip \"aufs\"" error="\xc3\xbc \u00fc\n" type=io.v1 empty=
  = warn | 2026-11-21T11:26:16.759613664Z | skip "aufs" | error=ü ü\n | type=io.v1 | empty=
logfmt level=panic msg=x
  = fatal | x
logfmt level=info level=again msg=x
  = info | x | level=again
logfmt ts=2026-11-21T11:26:16Z caller=main.go:7 level=error err="go-kit writes no message"
  = error | 2026-11-21T11:26:16Z |  | caller=main.go:7 | err=go-kit writes no message
logfmt time=2026-11-21T11:26:08.703+01:00 level=DEBUG-4 msg=slog
  = trace | 2026-11-21T10:26:08.703Z | slog
logfmt level=loud msg=x
  = warn | x | level=loud
logfmt time="2026-11-28T07:39:13+09:00" level=error msg="logrus text" a b=1 error="boom \"q\""
  = error | 2026-11-27T22:39:13Z | logrus text a | b=1 | error=boom "q"
logfmt time=2026-11-28T07:39:13.668+09:00 level=ERROR msg="slog text" "a b"="c=d" ""=1
  = error | 2026-11-27T22:39:13.668Z | slog text | a b=c=d | =1
logfmt level=error event="structlog in logfmt" timestamp=1795260368.5
  = error | 2026-11-21T11:26:08.5Z | structlog in logfmt
logfmt level=error msg=x y
  = error | x y
logfmt level=error msg="a cut value
  = error | msg="a cut value
logfmt level=50 msg=x
  = error | x
logfmt time=yesterday level=error msg=x
  = error | x | time=yesterday
klog E1121 11:26:08.703131   12345 b.go:22] 
  = error | 2026-11-21T11:26:08.703131Z | b.go:22 | 
klog E1121 23:26:08.703131   12345 b.go:22] from a zone ahead of ours
  = error | b.go:22 | from a zone ahead of ours
etcd 2026-13-21 11:26:09.1 E | a: there is no such month
  = error | there is no such month | package=a
level-prefix [ERROR] plugin/errors: 2 example.org. A: read udp: i/o timeout
  = error | plugin/errors: 2 example.org. A: read udp: i/o timeout
level-prefix ERROR:root:failed
  = error | root:failed
level-prefix 2026-11-21 11:26:08,703 - app - WARNING - slow
  = warn | 2026-11-21T11:26:08.703Z | app - WARNING - slow
level-prefix [2026-11-21 11:26:08 +0000] [4711] [CRITICAL] worker timeout
  = fatal | 2026-11-21T11:26:08Z | [4711] [CRITICAL] worker timeout
level-prefix SEVERE: failed
  = error | failed
level-prefix 2026-11-21T11:26:08.703Z ERROR 1 --- [main] a.B : spring
  = error | 2026-11-21T11:26:08.703Z | 1 --- [main] a.B : spring
level-prefix 11:26:08.703 [main] WARN a.B - logback
  = warn | 11:26:08.703 [main] WARN a.B - logback
level-prefix error: can't open a
  = error | can't open a
level-prefix <3>an error of sd-daemon
  = error | an error of sd-daemon
level-prefix <27>logger with its facility
  = error | logger with its facility
level-prefix Level 45:app:a level without a name
  = error | app:a level without a name
level-prefix [2026-11-21 11:26:08,317: ERROR/MainProcess] celery
  = error | 2026-11-21T11:26:08.317Z | celery
level-prefix 2026-11-21 11:26:08 [error    ] structlog                      a=1
  = error | 2026-11-21T11:26:08Z | structlog                      a=1
level-prefix ERRO[0000] logrus on a terminal
  = error | [0000] logrus on a terminal
level-prefix 2026-11-21 11:26:08,703 - app - NOTICE - x
  = info | 2026-11-21T11:26:08.703Z | app - NOTICE - x
level-prefix 27-Nov-2026 22:29:27.123 CONFIG [main] a.B tomcat
  = info | 27-Nov-2026 22:29:27.123 CONFIG [main] a.B tomcat
level-prefix 7:39AM FTL zerolog on a terminal
  = fatal | 7:39AM FTL zerolog on a terminal
level-prefix 2026-11-21T11:26:08.669+0900	ERROR	g/main.go:71	zap in development
  = error | 2026-11-21T02:26:08.669Z | g/main.go:71	zap in development
level-prefix 2026/11/21 11:26:08 [error] 123#0: nginx
  = error | 2026-11-21T11:26:08Z | 123#0: nginx
level-prefix 2026-11-21 11:26:08.123:WARN:oejs.Server:main: jetty
  = warn | 2026-11-21T11:26:08.123Z | oejs.Server:main: jetty
level-prefix ERROR 2026-11-21 11:26:08,318 the level first
  = error | 2026-11-21T11:26:08.318Z | the level first
level-prefix Traceback (most recent call last):
  = error | Traceback (most recent call last):
"#;

/// A format, and a line that is not in it.
const OTHER_LINES: &str = r#"
klog just some text
klog D1121 11:26:08.703131 1 a.go:1] severity
klog I1121 11:26:08. 1 a.go:1] empty fraction
klog I1121 11:26:08.7 1 a.go:1]
klog I1121 11:26:08.7 x a.go:1] pid
klog I1121 11:26:08.7 1 a:b:1] file
klog SIGTERM: terminated
etcd raft
etcd 2026-11-21 11:26:09
etcd 2026-11-21 11:26:09 X | a
etcd {
etcd []
json {
json {}
json []
json {"msg":"x"}
json {"ts":"now","msg":"x"}
json {"ts":1,"msg":2}
json {"ts":-1e300,"msg":"x"}
logfmt msg=x
level-prefix all is well
level-prefix this was no error at all
level-prefix <192>x
level-prefix     logging.basicConfig(level=DEBUG)
level-prefix ValueError: CONFIG missing
level-prefix the file /etc/CONFIG is not fine, which a FINE wants
level-prefix hint: run it with DEBUG=1
level-prefix Caused by: java.lang.RuntimeException: INFO inner
logfmt the level=error is set
logfmt msg="x level=error
logfmt msg="\q"
logfmt msg="\uD800"
"#;

fn parse_as(format_and_line: &str) -> Option<LogMessage> {
    let (format, line) = format_and_line.split_once(' ').expect("a format and a line");
    let format: LogFormat = format.parse().expect("a format");
    format.line_parser().expect("a parser")(line, &LineContext::new(at(NOON))).or_else(|| failure_line(line))
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
    let empty = ["klog ", "etcd ", "level-prefix ", "json ", "logfmt "];
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
        let message = klog_line(&format!("I{day} 1 a.go:1] x"), &LineContext::new(at(now)));
        assert_eq!(message.expect("it is klog").claimed_time, time.map(at), "{day} at {now}");
    }
}

#[test]
fn a_structured_message_of_klog_has_fields() {
    let parse = |text: &str| {
        let message =
            klog_line(&format!("I1121 11:26:08.703131 1 a.go:1] {text}"), &LineContext::new(at(NOON)));
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

#[test]
fn a_time_without_a_zone_is_in_that_of_its_program() {
    for (format, line) in [
        (LogFormat::Klog, "E1121 20:26:08.703 1 a.go:1] x"),
        (LogFormat::Etcd, "2026-11-21 20:26:08.703 E | a: x"),
        (LogFormat::Json, r#"{"level":"error","time":"2026-11-21 20:26:08.703","msg":"x"}"#),
        (LogFormat::LevelPrefix, "2026-11-21 20:26:08,703 ERROR x"),
    ] {
        for zone in ["JST-9", "<+09>-9"] {
            let context = LineContext::new(at(NOON)).zone(zone.parse().expect("a zone"));
            let message =
                format.line_parser().expect("a parser")(line, &context).expect("it is in the format");
            assert_eq!(message.claimed_time, Some(at("2026-11-21T11:26:08.703Z")), "{line}");
        }
    }
}

#[test]
fn an_hour_that_a_clock_shows_twice_is_the_last_one_before_the_receipt() {
    let berlin: LogZone = "CET-1CEST,M3.5.0,M10.5.0/3".parse().expect("a zone");
    for (format, line) in [
        (LogFormat::Klog, "E1025 02:30:00.5 1 a.go:1] x"),
        (LogFormat::Etcd, "2026-10-25 02:30:00.5 E | a: x"),
        (LogFormat::Json, r#"{"level":"error","time":"2026-10-25 02:30:00.5","msg":"x"}"#),
        (LogFormat::LevelPrefix, "2026-10-25 02:30:00,5 ERROR x"),
    ] {
        for (received, claimed) in [
            ("2026-10-25T00:30:01Z", "2026-10-25T00:30:00.5Z"),
            ("2026-10-25T01:30:01Z", "2026-10-25T01:30:00.5Z"),
        ] {
            let context = LineContext::new(at(received)).zone(berlin.clone());
            let message =
                format.line_parser().expect("a parser")(line, &context).expect("it is in the format");
            assert_eq!(message.claimed_time, Some(at(claimed)), "{line} at {received}");
        }
    }
    // Nor does a zone hide one that is named.
    let context = LineContext::new(at(NOON)).zone(berlin);
    let message = level_prefix_line("2026-11-21 11:26:08.703 UTC [1] ERROR:  x", &context).expect("a level");
    assert_eq!(message.claimed_time, Some(at("2026-11-21T11:26:08.703Z")));
    let skipped = level_prefix_line("2026-03-29 02:30:00 ERROR x", &context).expect("a level");
    assert_eq!(skipped.claimed_time, None, "the clock never showed it");
}

/// As kubelet 1.36.3 does with `TZ=JST-9`, where programs of the C library are nine hours ahead.
#[test]
fn a_program_in_go_knows_no_rules_and_is_in_utc() {
    for (zone, ahead) in [("JST-9", "E1121 20:26:08 1 a.go:1] x"), ("EST5", "E1121 06:26:08 1 a.go:1] x")] {
        let context = LineContext::new(at("2026-11-21T11:26:09Z")).zone(zone.parse().expect("a zone"));
        for line in [ahead, "E1121 11:26:08 1 a.go:1] x"] {
            let message = klog_line(line, &context).expect("it is klog");
            assert_eq!(message.claimed_time, Some(at("2026-11-21T11:26:08Z")), "{line} in {zone}");
        }
    }
    let context = LineContext::new(at(NOON)).zone("Asia/Tokyo".parse().expect("a zone"));
    let message = klog_line("E1121 11:26:08 1 a.go:1] x", &context).expect("it is klog");
    assert_eq!(message.claimed_time, Some(at("2026-11-21T02:26:08Z")), "a name is one");
}

#[test]
fn a_zone_is_a_value_of_tz() {
    assert_eq!("".parse(), Ok(LogZone::default()));
    assert_eq!(LogZone::of_program(Some("no/where")), LogZone::default(), "as for the program itself");
    for unknown in ["no/where", "asia/tokyo", "/etc/hostname", "../etc/passwd"] {
        assert_eq!(unknown.parse::<LogZone>(), Err(UnknownZone(unknown.to_owned())));
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("zone");
    std::fs::write(&path, b"no zone").unwrap();
    assert!(path.to_str().unwrap().parse::<LogZone>().is_err());
}
