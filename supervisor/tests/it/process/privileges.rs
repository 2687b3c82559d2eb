//! The permissions of a process, as the kernel shows them.

use nodekeel_supervisor::process::{
    Capability, Privileges, Process, ProcessLimits, Readiness, Rlimit, RlimitResource,
};

use super::start::start_failure;
use super::{ProcessFixture, perl, sh};

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Nobody's ids.
fn as_nobody(process: Process) -> Process {
    process.uid(65534).gid(65534)
}

/// The lines of `/proc/self/status` that tell what a process may do.
const STATUS: &str = r#"while read line; do case $line in Cap*|NoNewPrivs*|Groups*) echo $line;; esac; done < /proc/self/status"#;

async fn output_of(process: Process) -> String {
    let fixture = ProcessFixture::run_once(process);
    fixture.wait_exit().await;
    let text = fixture.output.text();
    fixture.shutdown().await;
    text
}

#[tokio::test]
async fn a_process_has_its_limits_its_score_and_its_umask() {
    let script = "ulimit -Sn; ulimit -Hn; ulimit -c; ulimit -t; umask; cat /proc/self/oom_score_adj";
    let limits = ProcessLimits::default()
        .with_oom_score_adj(1000)
        .with_rlimit(Rlimit::new(RlimitResource::Nofile, Some(40), Some(50)))
        .with_rlimit(Rlimit::new(RlimitResource::Core, Some(0), Some(0)))
        .with_rlimit(Rlimit::new(RlimitResource::Cpu, Some(77), None));
    let process = sh(script).privileges(Privileges::default().with_umask(0o027)).limits(limits);
    assert_eq!(output_of(process).await, "40\n50\n0\n77\n0027\n1000\n");
    let own = std::fs::read_to_string("/proc/self/oom_score_adj").expect("proc is mounted");
    assert_ne!(own.trim(), "1000", "the child borrows this program's memory, not its score");
}

/// Whatever this program has: a session, a terminal, an umask.
#[tokio::test]
async fn a_process_and_its_helpers_have_a_session_of_their_own_and_the_usual_umask() {
    let dir = tempfile::tempdir().expect("a directory");
    let seen = dir.path().join("seen");
    // Session and terminal are fields 6 and 7 of proc_pid_stat(5).
    let look = format!(
        "read pid name state parent group session terminal rest < /proc/self/stat; echo $((pid == session)) $terminal $(umask) >> {}",
        seen.display()
    );
    let look = |then: &str| sh(&format!("{look}; {then}"));
    let process = look("exec sleep 100").ready_when(Readiness::on_command(look("true")));
    let handle = nodekeel_supervisor::process::ProcessHandle::default();
    let reload = nodekeel_supervisor::process::ReloadAction::Command(std::sync::Arc::new(look("true")));
    let fixture = ProcessFixture::run_once(process.handle(&handle).reload(reload));
    fixture.wait_for_state(nodekeel_supervisor::RunnableState::Ready).await;
    handle.reload().await.expect("it succeeds");
    let seen = std::fs::read_to_string(&seen).expect("it is there");
    assert_eq!(seen.lines().collect::<Vec<_>>(), ["1 0 0022"; 3]);
    fixture.shutdown().await;
}

#[tokio::test]
async fn the_setting_that_the_kernel_rejects_is_named() {
    let rejected = Rlimit::new(RlimitResource::Nofile, Some(20), Some(10));
    let accepted = Rlimit::new(RlimitResource::Core, Some(0), Some(0));
    let process = sh("true").limits(ProcessLimits::default().with_rlimit(accepted).with_rlimit(rejected));
    let error = start_failure(process).await;
    assert!(error.starts_with("can't start /bin/sh: can't set the resource limit nofile=20:10: "), "{error}");
    let process = sh("true").limits(ProcessLimits::default().with_oom_score_adj(2000));
    let error = start_failure(process).await;
    assert!(error.starts_with("can't start /bin/sh: can't set oom_score_adj"), "{error}");
    let read_only = Privileges::default().with_read_only_path("/usr").with_read_only_path("/no/such");
    let process = sh("true").privileges(read_only);
    let error = start_failure(process).await;
    let clause = if is_root() {
        "can't make /no/such read-only: it does not exist"
    } else {
        "can't set read_only_paths: only root may"
    };
    assert!(error.contains(clause), "{error}");
    if !is_root() {
        let process = sh("true").privileges(Privileges::default().with_groups([7]));
        let error = start_failure(process).await;
        assert!(error.contains("can't set the supplementary groups: only root may"), "{error}");
        let process = sh("true").privileges(Privileges::default().with_capabilities([]));
        let error = start_failure(process).await;
        assert!(error.contains("can't set the capabilities: only root may"), "{error}");
    }
}

#[tokio::test]
async fn only_root_can_gain_privileges_unless_its_settings_say_otherwise() {
    let no_new_privs = async |process: Process| {
        let text = output_of(process).await;
        text.lines().find_map(|line| line.strip_prefix("NoNewPrivs: ")).map(str::to_owned)
    };
    let default = if is_root() { "0" } else { "1" };
    assert_eq!(no_new_privs(sh(STATUS)).await.as_deref(), Some(default));
    for (setting, shown) in [(true, "1"), (false, "0")] {
        let process = sh(STATUS).privileges(Privileges::default().with_no_new_privs(setting));
        assert_eq!(no_new_privs(process).await.as_deref(), Some(shown));
    }
}

#[tokio::test]
#[ignore = "needs root"]
async fn another_user_keeps_exactly_the_given_groups_and_capabilities() {
    let bind: Capability = "net_bind_service".parse().expect("it is one");
    let privileges = Privileges::default().with_capabilities([bind]).with_groups([7, 70_000]);
    let process = as_nobody(sh(STATUS)).privileges(privileges);
    let text = output_of(process).await;
    for line in ["Groups: 7 70000", "NoNewPrivs: 1"] {
        assert!(text.lines().any(|of| of == line), "{line}: {text}");
    }
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert!(text.contains(&format!("{set}: 0000000000000400\n")), "{set}: {text}");
    }
    // It has none of the others, also where nothing but its user says so.
    let text = output_of(as_nobody(sh(STATUS))).await;
    assert!(text.contains("CapEff: 0000000000000000\n") && text.contains("NoNewPrivs: 1\n"), "{text}");
}

#[tokio::test]
#[ignore = "needs root"]
async fn root_can_lose_its_capabilities() {
    let none = Privileges::default().with_capabilities([]);
    let text = output_of(sh(STATUS).privileges(none)).await;
    for set in ["CapPrm", "CapEff", "CapBnd"] {
        assert!(text.contains(&format!("{set}: 0000000000000000\n")), "{set}: {text}");
    }
    assert!(text.contains("NoNewPrivs: 0\n"), "{text}");
}

/// Changes of ids and capabilities can clear the death signal.
#[cfg(target_arch = "x86_64")]
#[tokio::test]
#[ignore = "needs root"]
async fn a_process_with_kept_capabilities_still_dies_with_its_supervisor() {
    let script = r#"my ($prctl, $get_pdeathsig) = (157, 2); my $signal = pack("i", 0);
        syscall($prctl, $get_pdeathsig, $signal); print "dies by ", unpack("i", $signal), "\n""#;
    let bind: Capability = "net_bind_service".parse().expect("it is one");
    let kept = Privileges::default().with_capabilities([bind]);
    assert_eq!(output_of(as_nobody(perl(script)).privileges(kept)).await, "dies by 9\n");
}

#[tokio::test]
#[ignore = "needs root"]
async fn a_process_cannot_write_to_its_read_only_paths_and_all_others_can() {
    let dir = tempfile::tempdir().expect("a directory");
    let (protected, open) = (dir.path().join("protected"), dir.path().join("open"));
    for dir in [&protected, &open] {
        std::fs::create_dir(dir).expect("it is new");
    }
    let script = format!(
        "echo x > {0}/file && echo protected; echo x > {1}/file && echo open;",
        protected.display(),
        open.display()
    );
    let before = std::fs::read_to_string("/proc/self/mountinfo").expect("proc is mounted");
    let process = sh(&script).privileges(Privileges::default().with_read_only_path(&protected));
    let text = output_of(process).await;
    assert!(
        text.contains("Read-only file system") && text.contains("open\n") && !text.contains("protected\n"),
        "{text}"
    );
    assert_eq!(std::fs::read_to_string("/proc/self/mountinfo").expect("proc is mounted"), before);
    std::fs::write(protected.join("file"), "").expect("it is read-only for the process alone");
}

#[tokio::test]
#[ignore = "needs root"]
async fn a_process_that_starts_below_a_read_only_path_cannot_write_there_by_a_relative_path() {
    // Its working directory is this program's, that of the package.
    let here = std::env::current_dir().expect("it exists");
    let script = "echo x > ./written-by-a-test && rm ./written-by-a-test && echo written";
    let process = sh(script).privileges(Privileges::default().with_read_only_path(here));
    let text = output_of(process).await;
    assert!(text.contains("Read-only file system") && !text.contains("written\n"), "{text}");
}

#[tokio::test]
#[ignore = "needs root"]
async fn a_user_with_more_processes_than_its_limit_is_named_as_the_reason() {
    let other = ProcessFixture::run_once(as_nobody(sh("echo up; exec sleep 100")));
    other.output.wait_line("up").await;
    let none = Rlimit::new(RlimitResource::Nproc, Some(0), Some(0));
    let process = as_nobody(sh("true")).limits(ProcessLimits::default().with_rlimit(none));
    let error = start_failure(process).await;
    assert!(
        error.starts_with("can't start /bin/sh: its user runs more processes than its resource limit nproc"),
        "{error}"
    );
    other.shutdown().await;
}
