//! What others try with a node's services: to speak for one, to have one ended, to have noded end their victim; and what a
//! service tries with its operator.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testbed::ScratchDir;

use crate::harness::{
    NO_DAEMONS, NodedProcess, PLAIN_UID, node_command, service_config, sleep_config, wait, wait_gone,
};

/// Reports readiness, and then to its watchdog; once more at each USR1.
const NOTIFIER: &str = r#"use Socket; $| = 1; (my $to = $ENV{NOTIFY_SOCKET}) =~ s/^@/\0/;
sub report { socket(my $s, AF_UNIX, SOCK_DGRAM, 0); send($s, $_[0], 0, pack_sockaddr_un($to)) }
$SIG{USR1} = sub { report("WATCHDOG=1"); print "signaled\n" };
report("READY=1");
while (1) { report("WATCHDOG=1"); select undef, undef, undef, 0.2 }
"#;

/// Sends a message to a notification socket, once and is still there, or from a hundred processes that exit at once.
const FORGER: &str = r#"use Socket; my ($to, $message, $rounds) = @ARGV; $to =~ s/^@/\0/;
for (1..$rounds) {
    socket(my $s, AF_UNIX, SOCK_DGRAM, 0);
    connect($s, pack_sockaddr_un($to)) or do { print "$!\n"; exit };
    if ($rounds == 1) { send($s, $message, 0); sleep 1 }
    elsif (!fork) { send($s, $message, 0); exit }
    else { wait }
}
print "sent\n";
"#;

/// A directory that every user can enter, with the programs above.
fn public_scratch() -> ScratchDir {
    let scratch = ScratchDir::new().unwrap();
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    write_programs(scratch.path());
    scratch
}

/// Writes the programs above into a directory.
pub(crate) fn write_programs(scratch: &Path) {
    for (name, text) in [("notifier.pl", NOTIFIER), ("forger.pl", FORGER)] {
        fs::write(scratch.join(name), text).unwrap();
    }
}

/// A service that reports by sd_notify.
pub(crate) fn notifier_config(scratch: &Path, keys: &str) -> String {
    let script = format!("exec /usr/bin/perl {}", scratch.join("notifier.pl").display());
    service_config("victim", &script, &format!("readiness = \"notify\"\n{keys}"))
}

pub(crate) const VICTIM: &str = "root.service.victim";

/// Its pid, and its `NOTIFY_SOCKET`.
fn victim(node: &NodedProcess) -> (i32, String) {
    node.wait_ready(VICTIM);
    let pid = node.status(VICTIM)["pid"].as_i64().unwrap().try_into().unwrap();
    let environment = fs::read_to_string(format!("/proc/{pid}/environ")).unwrap();
    let socket = environment.split('\0').find_map(|variable| variable.strip_prefix("NOTIFY_SOCKET="));
    (pid, socket.unwrap().to_owned())
}

/// The victim is still the same process, after everything that was sent to it before.
fn check_untouched(node: &NodedProcess, pid: i32, attack: &str) {
    // Its own message follows, and one more when noded has read that.
    for _ in 0..2 {
        let is_answer = |line: &&str| line.contains("signaled");
        let mut answers = node.ask(&["logs", "--raw", VICTIM]).lines().filter(is_answer).count();
        kill(Pid::from_raw(pid), Signal::SIGUSR1).unwrap_or_else(|error| panic!("{attack}: {error}"));
        node.follow(&["logs", "-f", "--raw", VICTIM]).find_value(|entry| {
            let is_old = entry["text"] == "signaled" && answers > 0;
            answers -= usize::from(is_old);
            entry["text"] == "signaled" && !is_old
        });
    }
    let status = node.status(VICTIM);
    assert_eq!((&status["pid"], &status["state"]), (&pid.into(), &"ready".into()), "{attack}: {status}");
    let ended = node.events().into_iter().find(|event| event["dn"] == VICTIM && event["change"] == "exited");
    assert_eq!(ended, None, "{attack}");
}

/// The soft limit of file locks of a process, which everybody may read, and set for themselves.
fn locks_limit(pid: i32) -> String {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max file locks")).unwrap();
    line.split_whitespace().nth(3).unwrap().to_owned()
}

#[test]
#[ignore = "needs root: the attackers are other users"]
fn nobody_but_a_service_speaks_for_it() {
    let set_user = |uid: u32| format!("setpriv --reuid {uid} --regid {uid} --clear-groups");
    let without_capabilities =
        "unshare -pf --mount-proc setpriv --bounding-set=-all --inh-caps=-all --no-new-privs";
    for service_user in ["", "user = \"nobody\""] {
        let scratch = public_scratch();
        let config = format!(
            "{NO_DAEMONS}{}",
            notifier_config(scratch.path(), &format!("watchdog = \"60s\"\ngrace = \"1ms\"\n{service_user}"))
        );
        let node = NodedProcess::start_in(scratch, &config, &[]);
        let (pid, socket) = victim(&node);
        let forger = node.scratch.path().join("forger.pl");
        let copied_mark = format!("ulimit -S -x {}", locks_limit(pid));
        for (attacker, rounds) in [
            (set_user(1234), 1),
            (set_user(1234), 100),
            (set_user(PLAIN_UID), 1),
            (set_user(PLAIN_UID), 100),
            (without_capabilities.to_owned(), 1),
            (without_capabilities.to_owned(), 100),
        ] {
            for message in ["WATCHDOG=trigger", "STOPPING=1"] {
                let forger = forger.display();
                let script = format!(
                    "{copied_mark}; exec {attacker} /usr/bin/perl {forger} '{socket}' {message} {rounds}"
                );
                let sent = Command::new("/bin/bash").args(["-c", &script]).output().unwrap();
                let attack = format!("{message} by {attacker} to a service with {service_user:?}: {sent:?}");
                check_untouched(&node, pid, &attack);
            }
        }
        node.stop();
    }
}

#[test]
#[ignore = "needs root: the attacker is another user"]
fn a_socket_in_the_place_of_a_kept_services_prevents_no_adoption() {
    let scratch = public_scratch();
    let config = format!("{NO_DAEMONS}{}", notifier_config(scratch.path(), "keep = true"));
    let node = NodedProcess::start_in(scratch, &config, &[]);
    let (pid, socket) = victim(&node);
    let scratch = node.kill();
    let squatter = r#"use Socket; my $at = shift; $at =~ s/^@/\0/; $| = 1; unlink $at;
        socket(my $s, AF_UNIX, SOCK_DGRAM, 0); print bind($s, pack_sockaddr_un($at)) ? "bound\n" : "$!\n"; <STDIN>"#;
    let mut command = Command::new("setpriv");
    let user = PLAIN_UID.to_string();
    command.args([
        "--reuid",
        &user,
        "--regid",
        &user,
        "--clear-groups",
        "/usr/bin/perl",
        "-e",
        squatter,
        &socket,
    ]);
    let mut squatter = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut answer = String::new();
    let stdout = std::io::BufReader::new(squatter.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut { stdout }, &mut answer).unwrap();
    // What root itself leaves in its place prevents it neither.
    let path = Path::new(&socket);
    if path.is_absolute() {
        assert_ne!(answer.trim(), "bound");
        fs::remove_file(path).unwrap();
        fs::create_dir_all(path.join("foreign")).unwrap();
    }
    let node = NodedProcess::start_in(scratch, &config, &[]);
    node.wait_status(VICTIM, |status| status["state"] == "ready");
    assert_eq!(node.status(VICTIM)["pid"], pid, "it is adopted; the squatter: {answer}");
    squatter.kill().unwrap();
    squatter.wait().unwrap();
    node.stop();
    wait_gone(pid.try_into().unwrap());
}

#[test]
#[ignore = "needs root: its service is another user's"]
fn a_service_has_a_session_of_its_own_and_no_terminal() {
    let scratch = public_scratch();
    let try_terminal = "(exec 3<>/dev/tty) 2>/dev/null && echo opened || echo refused";
    let log = scratch.path().join("seen");
    fs::write(&log, "").unwrap();
    fs::set_permissions(&log, fs::Permissions::from_mode(0o666)).unwrap();
    let helper = format!("[\"/bin/sh\", \"-c\", \"{try_terminal} >> {}\"]", log.display());
    let config = format!(
        "{NO_DAEMONS}{}",
        service_config(
            "typist",
            &format!("{try_terminal}; exec sleep 1000"),
            &format!(
                "user = \"nobody\"\nreadiness = {{ probe = {helper} }}\nliveness = {{ probe = {helper}, period = \"100ms\" }}\nreload = {helper}"
            )
        )
    );
    // A shell on a terminal, as an operator has it.
    let noded = node_command("run", scratch.path(), &config);
    let words = std::iter::once(noded.get_program()).chain(noded.get_args());
    let line = words.map(|word| word.to_str().unwrap().to_owned()).collect::<Vec<_>>().join(" ");
    let mut command = Command::new("script");
    command.args(["--quiet", "--return", "--command", &format!("tty && exec {line}"), "/dev/null"]);
    command.env("SHELL", "/bin/sh").stdin(Stdio::null()).stdout(Stdio::null());
    let node = NodedProcess::spawn_command(scratch, command);
    let dn = "root.service.typist";
    node.wait_status(dn, |status| status["state"] == "ready");
    node.wait_for_output(dn, "refused");
    node.ask(&["reload", dn]);
    let seen = wait("three helpers", || {
        let seen = fs::read_to_string(node.scratch.path().join("seen"))?;
        anyhow::ensure!(seen.lines().count() > 2, "{seen:?}");
        Ok(seen)
    });
    assert!(seen.lines().all(|line| line == "refused"), "{seen:?}");
    let pid: i32 = fs::read_to_string(node.data().join("lock")).unwrap().trim().parse().unwrap();
    kill(Pid::from_raw(pid), Signal::SIGTERM).unwrap();
    wait_gone(pid.try_into().unwrap());
}

#[test]
fn a_service_has_the_usual_umask_whatever_that_of_noded_is() {
    let scratch = ScratchDir::new().unwrap();
    let config = format!("{NO_DAEMONS}{}", service_config("masked", "umask; exec sleep 1000", ""));
    let noded = node_command("run", scratch.path(), &config);
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "umask 0; exec \"$0\" \"$@\""]).arg(noded.get_program()).args(noded.get_args());
    command.env_clear().env("PATH", "/usr/bin:/bin").stdin(Stdio::null());
    let node = NodedProcess::start_command(scratch, command);
    node.follow(&["logs", "-f", "--raw", "root.service.masked"])
        .find_value(|entry| entry["text"].as_str().is_some_and(|text| text.ends_with("022")));
    node.stop();
}

#[test]
fn a_pause_of_noded_ends_no_healthy_service() {
    let scratch = public_scratch();
    let probed = "liveness = { probe = [\"/bin/sleep\", \"0.3\"], period = \"100ms\", timeout = \"1s\", failure_threshold = 1 }";
    let config = format!(
        "{NO_DAEMONS}{}{}",
        notifier_config(scratch.path(), "watchdog = \"1s\""),
        sleep_config("probed", probed)
    );
    let node = NodedProcess::start_in(scratch, &config, &[]);
    let (pid, _) = victim(&node);
    node.wait_ready("root.service.probed");
    for _ in 0..5 {
        node.signal(Signal::SIGSTOP);
        // Longer than the watchdog's interval and the probe's timeout: only time does that.
        #[expect(clippy::disallowed_methods, reason = "that time goes by is the event")]
        std::thread::sleep(Duration::from_secs(2));
        node.signal(Signal::SIGCONT);
        check_untouched(&node, pid, "a pause");
    }
    let ended = node.events().into_iter().find(|event| event["change"] == "exited");
    assert_eq!(ended, None);
    // A service that is silent itself is still ended.
    kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
    node.wait_for_event(VICTIM, 1, "exited");
    node.stop();
}

#[test]
#[ignore = "needs root: its service is another user's"]
fn a_probe_that_can_not_be_started_is_not_a_failure_of_its_service() {
    let scratch = public_scratch();
    // Its user has them before the first probe, which has noded's limit of processes and is not started at all.
    let mut processes: Vec<_> =
        (0..10).map(|_| Command::new("/bin/sleep").arg("1000").uid(PLAIN_UID).spawn().unwrap()).collect();
    let keys = "user = \"nobody\"\nlimits = { rlimits = { nproc = 200 } }\nliveness = { probe = [\"/bin/true\"], period = \"100ms\", failure_threshold = 2 }";
    let script = "echo running; exec sleep 1000";
    let config = format!("{NO_DAEMONS}{}", service_config("crowded", script, keys));
    let noded = node_command("run", scratch.path(), &config);
    let mut command = Command::new("/bin/bash");
    command
        .args(["-c", "ulimit -S -u 5; exec \"$0\" \"$@\""])
        .arg(noded.get_program())
        .args(noded.get_args());
    command.env_clear().env("PATH", "/usr/bin:/bin").stdin(Stdio::null());
    let node = NodedProcess::start_command(scratch, command);
    let dn = "root.service.crowded";
    node.wait_for_output(dn, "running");
    let found = wait("the condition", || {
        let conditions = node.nodectl(&["-o", "json", "health"]).json();
        let ended = node.events().into_iter().find(|event| event["dn"] == dn && event["change"] == "exited");
        assert_eq!(ended, None, "its failed starts count as failures of the service");
        let mut conditions = conditions["conditions"].as_array().unwrap().clone().into_iter();
        conditions
            .find(|found| {
                found["object"] == dn && found["problem"].as_str().unwrap().contains("could not ask")
            })
            .ok_or_else(|| anyhow::anyhow!("no condition"))
    });
    // It runs on; but it is not ready before a probe says so.
    assert_eq!(found["severity"], "problem", "{found}");
    assert!(found["problem"].as_str().unwrap().contains("/bin/true"), "{found}");
    let status = node.ask(&["status", dn]);
    assert!(status.contains("could not ask"), "{status}");
    node.stop();
    for process in &mut processes {
        process.kill().unwrap();
        process.wait().unwrap();
    }
}

/// A record by which the next noded would end a process: of a service that is gone.
fn write_forged_record(directory: &Path, pid: u32) -> PathBuf {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let start = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap();
    let mark = "2bffffffff800001";
    let text = format!(
        "nodekeel-record 1 kept\nboot {}\npidns {}\ndn root.service.gone\nmark {mark}\ndefinition 0000000000000001\nprocess {pid} {start}\n",
        boot.trim(),
        namespace.display()
    );
    let sum = text
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let path = directory.join(format!("kept-{mark}"));
    fs::write(&path, format!("{text}sum {sum:016x}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

#[test]
#[ignore = "needs root: the attacker is another user"]
fn a_record_ends_no_process_that_does_not_match_it() {
    for owner in [None, Some(PLAIN_UID)] {
        let scratch = ScratchDir::new().unwrap();
        let records = scratch.path().join("data/run/processes");
        fs::create_dir_all(&records).unwrap();
        let mut bystander = Command::new("/bin/sleep").arg("1000").spawn().unwrap();
        let record = write_forged_record(&records, bystander.id());
        std::os::unix::fs::chown(&record, owner, owner).unwrap();
        let node = NodedProcess::start_in(scratch, NO_DAEMONS, &[]);
        assert_eq!(bystander.try_wait().unwrap(), None, "it runs on: the record's owner is {owner:?}");
        if owner.is_some() {
            let health = node.nodectl(&["health"]).stdout;
            assert!(health.contains("run/processes") && health.contains("belongs to user 65534"), "{health}");
        }
        node.stop();
        assert_eq!(bystander.try_wait().unwrap(), None, "it runs on: the record's owner is {owner:?}");
        bystander.kill().unwrap();
        bystander.wait().unwrap();
    }
}
