//! Keys in the memory of noded and nodectl.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Stdio;

use anyhow::Context as _;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use nodekeel_cluster::node::GoldenTicket;
use testbed::ScratchDir;

use crate::cluster::{MemberFixture, create_ticket_args};
use crate::harness::{
    NO_DAEMONS, NO_DISKS, NodedProcess, PublicProgram, plain_user, service_config, sleep_config, wait,
    with_ulimit,
};

/// The service prints its soft and hard limits of cores.
const SHOW_LIMITS: &str = "ulimit -Sc; ulimit -Hc; exec sleep 1000";

#[test]
fn noded_and_nodectl_write_no_core_and_services_keep_the_limit_that_noded_had() {
    for keeps_cores in [false, true] {
        let own = service_config("own", SHOW_LIMITS, "limits = { rlimits = { core = \"4096:8192\" } }\n");
        let config = format!("{NO_DAEMONS}{NO_DISKS}{}{own}", service_config("a", SHOW_LIMITS, ""));
        let scratch = ScratchDir::new().unwrap();
        let directory = scratch.path().to_owned();
        let mut noded = NodedProcess::spawn(scratch, &config, &[], |command| {
            *command = with_ulimit("-c unlimited", command);
            // A core is written there.
            command.current_dir(directory);
            command.env("NODEKEEL_CORE_DUMPS", u8::from(keeps_cores).to_string());
        });
        noded.wait_for_line("control socket at");
        let limits = |service: &str| {
            wait("the limits of a service", || {
                let log = noded.ask(&["logs", service]);
                let limits: Vec<_> = log.lines().filter_map(|line| line.split(' ').next_back()).collect();
                anyhow::ensure!(limits.len() == 2, "{log}");
                Ok(limits.join(" "))
            })
        };
        assert_eq!(limits("root.service.a"), "unlimited unlimited");
        // In blocks of 512 bytes.
        assert_eq!(limits("root.service.own"), "8 16");
        let mut command = with_ulimit("-c unlimited", &noded.nodectl_command(&["events", "--follow"]));
        command
            .env("NODEKEEL_SOCKET", noded.socket())
            .env("NODEKEEL_CORE_DUMPS", u8::from(keeps_cores).to_string());
        let mut follower = command.current_dir(noded.scratch.path()).stdout(Stdio::piped()).spawn().unwrap();
        // Its first line tells that it runs.
        std::io::Read::read_exact(follower.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        abort(follower.id());
        let of_nodectl = follower.wait().unwrap();
        abort(noded.pid());
        let (of_noded, _) = noded.wait_end();
        for status in [of_nodectl, of_noded] {
            assert_eq!(status.signal(), Some(Signal::SIGABRT as i32));
            assert_eq!(status.core_dumped(), keeps_cores, "{status}");
        }
    }
}

fn abort(pid: u32) {
    kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGABRT).unwrap();
}

#[test]
fn a_plain_users_node_is_not_dumpable_and_sets_the_oom_scores_of_its_services() {
    let program = PublicProgram::noded();
    let scratch = ScratchDir::new().unwrap();
    std::os::unix::fs::chown(scratch.path(), plain_user(), None).unwrap();
    let service = sleep_config("a", "limits = { oom_score_adj = 700 }\n");
    let command = program.node_command("run", scratch.path(), &format!("{NO_DAEMONS}{NO_DISKS}{service}"));
    let noded = NodedProcess::start_command(scratch, command);
    noded.wait_ready("root.service.a");
    let pid = noded.status("root.service.a")["pid"].as_u64().unwrap();
    assert_eq!(fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap(), "700\n");
    // The kernel gives the files of a process that is not dumpable to root.
    assert_eq!(fs::metadata(format!("/proc/{}/mem", noded.pid())).unwrap().uid(), 0);
    noded.stop();
}

#[test]
#[ignore = "needs etcd and root: it reads another process' memory"]
fn the_memory_of_a_member_contains_no_pem_and_no_key_of_a_revoked_ticket() {
    let fixture = MemberFixture::new();
    let noded = fixture.start_new();
    let file = noded.scratch.path().join("ticket");
    noded.ask(&create_ticket_args("127.0.0.8", "7001", file.to_str().unwrap()));
    let ticket = fs::read(&file).unwrap();
    let credentials = GoldenTicket::from_config(&ticket).unwrap().member_credentials();
    noded.ask(&["cluster", "ticket", "revoke", "--address", "127.0.0.8", "--port", "7001"]);
    // The buffers of its connections to etcd end with them.
    noded.ask(&["restart", "--wait", "root.cluster"]);
    let seed = seed(credentials.key.expose_pkcs8());
    wait("the memory without keys", || {
        let memory = read_memory(noded.pid())?;
        let count = |text: &[u8]| memory.iter().map(|region| count_text(region, text)).sum::<usize>();
        anyhow::ensure!(count(b"\0\0\0\0") > 0, "it was read");
        let (pem, of_ticket) = (count(b"BEGIN PRIVATE KEY"), count(seed));
        anyhow::ensure!(
            (pem, of_ticket) == (0, 0),
            "{pem} keys in PEM, {of_ticket} times the key of the ticket"
        );
        Ok(())
    });
    noded.stop();
}

/// The secret of an Ed25519 key. *Source:* RFC 8410, section 7.
fn seed(pkcs8: &[u8]) -> &[u8] {
    &pkcs8[16..48]
}

fn count_text(region: &[u8], text: &[u8]) -> usize {
    region.windows(text.len()).filter(|window| window[0] == text[0] && *window == text).count()
}

/// All memory of a process that it can write to: more than a core contains.
fn read_memory(pid: u32) -> anyhow::Result<Vec<Vec<u8>>> {
    let process = Path::new("/proc").join(pid.to_string());
    let memory = File::open(process.join("mem"))?;
    let maps = fs::read_to_string(process.join("maps"))?;
    let writable =
        maps.lines().filter(|line| line.split(' ').nth(1).is_some_and(|mode| mode.starts_with("rw")));
    writable
        .map(|line| {
            let (start, end) =
                line.split(' ').next().and_then(|range| range.split_once('-')).context("a range")?;
            let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16));
            let (start, end) = (start?, end?);
            let mut bytes = vec![0; usize::try_from(end - start)?];
            memory.read_exact_at(&mut bytes, start)?;
            Ok(bytes)
        })
        .collect()
}
