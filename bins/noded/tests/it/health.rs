//! What `nodectl health` says of what goes wrong, and its exit code; `nodectl status` agrees.

use std::fs;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MsFlags, mount, umount};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use testbed::{ScratchDir, reserve_port, wait_until};

use crate::harness::{NO_DAEMONS, NodedProcess, TEST_TIMEOUT, noded_command, service_config};

/// Without the disk of the machine that runs the tests, which may be full.
const NO_DISKS: &str = "[health]\nmin_free_percent = 0\nwarn_free_percent = 0\n";

const ENVIRONMENT: &str = "environment = { PATH = \"/usr/bin:/bin\" }";

/// The value of `nodectl -o json health`, and the exit codes of `health` and `status`.
fn ask_health(noded: &NodedProcess) -> (Value, Option<i32>, Option<i32>) {
    let output = noded.nodectl(&["-o", "json", "health"]);
    let health = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    (health, output.status.code(), noded.nodectl(&["status"]).status.code())
}

/// The problem of this object, once it is reported and contains this text; by then both commands exit with 6.
fn wait_problem(noded: &NodedProcess, object: &str, problem: &str) -> Value {
    wait_until(TEST_TIMEOUT, problem, || {
        let (health, code, status_code) = ask_health(noded);
        let mut conditions = health["conditions"].as_array().unwrap().iter();
        let found = conditions
            .find(|found| found["object"] == object && found["problem"].as_str().unwrap().contains(problem));
        let Some(found) = found else { anyhow::bail!("{health}") };
        assert_eq!((code, status_code, &health["healthy"]), (Some(6), Some(6), &false.into()), "{health}");
        assert_eq!(found["severity"], "problem", "{found}");
        Ok(found.clone())
    })
    .unwrap()
}

fn wait_healthy(noded: &NodedProcess) {
    let output = noded.nodectl(&["health", "--wait", "2m"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.code() == Some(0) && text.starts_with("healthy"), "{output:?}");
}

#[test]
fn a_service_that_fails_is_stopped_or_hangs_is_a_problem_until_it_is_well() {
    let scratch = ScratchDir::new().unwrap();
    let cured = scratch.path().join("cured");
    let script = format!("[ -e {} ] && exec sleep 1000; exit 3", cured.display());
    let fast = "backoff = { initial = \"1ms\", max = \"100ms\" }";
    let liveness = "liveness = { probe = [\"/bin/false\"], period = \"100ms\", failure_threshold = 1 }";
    let config = format!(
        "{NO_DAEMONS}{NO_DISKS}{}{}{}{}{}",
        service_config("loops", &script, &format!("{fast}\n{ENVIRONMENT}")),
        service_config("hangs", "exec sleep 1000", &format!("{fast}\n{ENVIRONMENT}\n{liveness}")),
        service_config("once", "exit 4", "readiness = \"exit\"\nrestart = \"never\""),
        service_config(
            "limited",
            "exit 5",
            &format!("{fast}\nrestart_limit = {{ restarts = 2, period = \"1h\" }}")
        ),
        service_config("after", "exec sleep 1000", &format!("depends_on = [\"once\"]\n{ENVIRONMENT}")),
    );
    let noded = NodedProcess::start_in(scratch, &config, &[]);
    let found = wait_problem(&noded, "root.service.loops", "consecutive failures, the last one: ");
    assert!(found["problem"].as_str().unwrap().contains("exited with code 3"), "{found}");
    assert_eq!(found["part"], "service");
    assert_eq!(found["hint"], "`nodectl status root.service.loops`");
    assert!(found["since"].is_string(), "{found}");
    wait_problem(&noded, "root.service.hangs", "failed 1 liveness probes in a row");
    let found = wait_problem(&noded, "root.service.once", "has failed, and is not restarted: ");
    assert_eq!(found["hint"], "`nodectl status root.service.once`, then `nodectl restart root.service.once`");
    let found = wait_problem(&noded, "root.service.limited", "has failed, and is not restarted: ");
    assert!(found["problem"].as_str().unwrap().contains("exited with code 5"), "{found}");
    let found = wait_problem(&noded, "root.service.after", "is not ready");
    assert_eq!(found["waiting_for"], "root.service.once to become ready");
    assert_eq!(found["hint"], "`nodectl status root.service.once`");

    let table = String::from_utf8(noded.nodectl(&["health"]).stdout).unwrap();
    let header = table.lines().nth(1).unwrap().split("  ").map(str::trim).filter(|cell| !cell.is_empty());
    assert_eq!(header.collect::<Vec<_>>(), ["PART", "PROBLEM", "SINCE", "WAITING FOR", "WHAT TO TYPE"]);
    assert!(table.starts_with("not healthy: "), "{table}");

    for service in ["hangs", "once", "limited", "after"] {
        noded.ask(&["stop", "--wait", &format!("root.service.{service}")]);
        let found = wait_problem(&noded, &format!("root.service.{service}"), "was stopped by an operator");
        assert_eq!(found["hint"], format!("`nodectl start root.service.{service}`"));
    }
    fs::write(&cured, "").unwrap();
    // It stays a problem until it has been ready for ten seconds, and then only the stopped ones are left.
    wait_until(TEST_TIMEOUT, "the cure", || {
        let (health, ..) = ask_health(&noded);
        let mut conditions = health["conditions"].as_array().unwrap().iter();
        let is_well =
            conditions.all(|found| found["object"] != "root.service.loops" || found["severity"] == "warning");
        anyhow::ensure!(is_well, "{health}");
        Ok(())
    })
    .unwrap();
    noded.stop();
}

#[test]
fn health_waits_until_the_node_is_healthy_or_for_its_duration() {
    let scratch = ScratchDir::new().unwrap();
    let gate = scratch.path().join("gate");
    nix::unistd::mkfifo(&gate, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR).unwrap();
    let script = format!("read line < {}; exit 0", gate.display());
    let config = format!("{NO_DAEMONS}{NO_DISKS}{}", service_config("step", &script, "readiness = \"exit\""));
    let noded = NodedProcess::start_in(scratch, &config, &[]);
    let output = noded.nodectl(&["health", "--wait", "100ms"]);
    assert_eq!(output.status.code(), Some(6), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("root.service.step: is not ready"), "{text}");
    let waiting = noded.nodectl_command(&["health", "--wait"]).stdout(std::process::Stdio::null()).spawn();
    fs::write(&gate, "go\n").unwrap();
    assert_eq!(waiting.unwrap().wait().unwrap().code(), Some(0));
    wait_healthy(&noded);
    noded.stop();
}

#[test]
fn a_full_disk_is_a_problem_and_a_threshold_of_zero_is_none() {
    let noded = NodedProcess::start(&format!("{NO_DAEMONS}[health]\nmin_free_percent = 100\n"));
    noded.ask(&["start", "--wait", "root.storage"]);
    let data = noded.data().display().to_string();
    let found = wait_problem(&noded, &data, "its disk is almost full: ");
    assert_eq!(found["part"], "node");
    assert!(found["hint"].as_str().unwrap().contains(&format!("`du -xh -d 2 {data}`")), "{found}");
    let status = noded.ask(&["status"]);
    assert!(
        status.contains("runnables are ready\n") && status.contains("its disk is almost full"),
        "{status}"
    );
    noded.stop();
    let noded = NodedProcess::start(&format!("{NO_DAEMONS}{NO_DISKS}"));
    wait_healthy(&noded);
    assert_eq!(ask_health(&noded).1, Some(0));
    noded.stop();
}

/// A small file system, as long as it exists.
struct SmallDisk {
    _scratch: ScratchDir,
    mount_point: PathBuf,
}

impl SmallDisk {
    fn mount() -> Self {
        let scratch = ScratchDir::new().unwrap();
        let mount_point = scratch.path().join("disk");
        fs::create_dir(&mount_point).unwrap();
        mount(Some("none"), &mount_point, Some("tmpfs"), MsFlags::empty(), Some("size=256M")).unwrap();
        Self { _scratch: scratch, mount_point }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = umount(&self.mount_point);
    }
}

#[test]
#[ignore = "needs root: it mounts a small file system"]
fn a_disk_that_fills_up_and_has_room_again_changes_the_health() {
    let disk = SmallDisk::mount();
    let data = disk.mount_point.join("data");
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.path().join("noded.toml");
    fs::write(&file, NO_DAEMONS).unwrap();
    let [file, data_argument] = [&file, &data].map(|path| path.to_str().unwrap());
    let mut command = noded_command(&["run", "--config", file, "--data", data_argument]);
    command.stderr(std::process::Stdio::piped());
    let mut noded = NodedProcess::spawn_command(scratch, command);
    noded.wait_for_line("control socket at");
    let socket = data.join("run/control.sock");
    let ask = |args: &[&str]| noded.nodectl(&[&["--socket", socket.to_str().unwrap()], args].concat());
    assert_eq!(ask(&["health", "--wait", "2m"]).status.code(), Some(0));
    let filler = disk.mount_point.join("filler");
    let mut dd = Command::new("dd");
    dd.args(["if=/dev/zero", "bs=1M", "count=300", "status=none"]).arg(format!("of={}", filler.display()));
    assert!(!dd.stderr(std::process::Stdio::null()).status().unwrap().success(), "the disk is full");
    let output = ask(&["health"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(6), "{text}");
    assert!(
        text.contains(&format!("{}: its disk is almost full: 0 bytes of 256.0 MiB free", data.display())),
        "{text}"
    );
    fs::remove_file(filler).unwrap();
    assert_eq!(ask(&["health"]).status.code(), Some(0));
    noded.stop();
}

#[test]
fn a_node_without_a_ticket_says_where_to_put_it_and_what_to_type() {
    let (client, peer) = (reserve_port().unwrap(), reserve_port().unwrap());
    let config = format!(
        "services.containerd.enable = false\nkernel.log = false\n{NO_DISKS}[services.etcd]\nclient_port = {}\n\
         peer_port = {}\n[cluster]\naddress = \"127.0.0.1\"\n",
        client.number(),
        peer.number()
    );
    let noded = NodedProcess::start_in(ScratchDir::new().unwrap(), &config, &["--dev"]);
    let found = wait_problem(&noded, "root.cluster", "is in no cluster yet");
    assert_eq!(found["waiting_for"], "a ticket");
    let hint = found["hint"].as_str().unwrap();
    assert!(hint.starts_with("copy a ticket of a member to ") && hint.contains("enrolment.pb"), "{hint}");
    assert!(hint.ends_with("`nodectl cluster bootstrap`"), "{hint}");
    noded.ask(&["cluster", "bootstrap"]);
    wait_healthy(&noded);
    noded.stop();
}

/// The pid of an etcd whose arguments contain this path.
fn etcd_pid(data: &Path) -> Pid {
    let data = data.to_str().unwrap();
    let process = fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let arguments = String::from_utf8_lossy(&fs::read(entry.path().join("cmdline")).ok()?).into_owned();
        (arguments.contains("--data-dir") && arguments.contains(data)).then_some(pid)
    });
    Pid::from_raw(process.expect("etcd runs"))
}

#[test]
#[ignore = "needs etcd"]
fn a_stopped_etcd_is_a_problem_alone_and_in_a_cluster() {
    for cluster in ["", "[cluster]\naddress = \"127.0.0.1\"\nbootstrap = true\n"] {
        let (client, peer) = (reserve_port().unwrap(), reserve_port().unwrap());
        let config = format!(
            "services.containerd.enable = false\nkernel.log = false\n{NO_DISKS}[services.etcd]\nclient_port = {}\n\
             peer_port = {}\n{cluster}",
            client.number(),
            peer.number()
        );
        let noded = NodedProcess::start(&config);
        wait_healthy(&noded);
        let etcd = etcd_pid(&noded.data());
        kill(etcd, Signal::SIGSTOP).unwrap();
        let stopped = std::time::Instant::now();
        match cluster {
            "" => {
                let found =
                    wait_problem(&noded, "root.etcd", "does not answer within 2s, and its process runs");
                assert_eq!(found["hint"], "`nodectl logs root.etcd`, then `nodectl restart root.etcd`");
            }
            _ => {
                let found = wait_problem(&noded, "root.cluster", "can't take part in its cluster: its etcd");
                assert!(found["hint"].as_str().unwrap().contains("`nodectl cluster status`"), "{found}");
            }
        }
        println!("{cluster:?} reported after {:?}", stopped.elapsed());
        kill(etcd, Signal::SIGCONT).unwrap();
        wait_healthy(&noded);
        noded.stop();
    }
}

/// The configuration of a provisioner whose API server does not answer, and whose certificate is valid in this year.
fn provisioner_config(scratch: &Path, year: i32, keys: &str) -> String {
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.not_before = rcgen::date_time_ymd(year, 1, 1);
    params.not_after = rcgen::date_time_ymd(year, 12, 31);
    let (certificate, private) = (scratch.join("client.pem"), scratch.join("client.key"));
    fs::write(&certificate, params.self_signed(&key).unwrap().pem()).unwrap();
    fs::write(&private, key.serialize_pem()).unwrap();
    let kubeconfig = scratch.join("provisioner.conf");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
         clusters: [{{name: k, cluster: {{server: \"https://127.0.0.1:1\", certificate-authority: {certificate:?}}}}}]\n\
         users: [{{name: u, user: {{client-certificate: {certificate:?}, client-key: {private:?}}}}}]\n"
    );
    fs::write(&kubeconfig, text).unwrap();
    format!("{NO_DAEMONS}{NO_DISKS}[provisioner]\nkubeconfig = {kubeconfig:?}\nquota = \"none\"\n{keys}\n")
}

#[test]
fn an_api_server_that_is_gone_and_an_expired_certificate_are_problems() {
    let scratch = ScratchDir::new().unwrap();
    let config = provisioner_config(scratch.path(), 2001, "csi = false");
    let kubeconfig = scratch.path().join("provisioner.conf").display().to_string();
    let noded = NodedProcess::start_in(scratch, &config, &[]);
    let found = wait_problem(&noded, "root.provisioner", "can't use the API server: ");
    assert_eq!(found["waiting_for"], "the API server");
    assert!(found["hint"].as_str().unwrap().contains(&kubeconfig), "{found}");
    let found = wait_problem(&noded, &kubeconfig, "its certificate expired ");
    assert_eq!(found["hint"], "renew it there, then `nodectl restart root.provisioner`");
    assert_eq!(found["since"], "2001-12-31T00:00:00.000Z");
    noded.stop();
}

#[test]
#[ignore = "needs root: the provisioner mounts volumes"]
fn a_missing_kubelet_is_a_problem_that_names_its_directory() {
    let scratch = ScratchDir::new().unwrap();
    let kubelet = scratch.path().join("kubelet");
    let config = provisioner_config(scratch.path(), 2999, &format!("kubelet = {kubelet:?}"));
    let noded = NodedProcess::start_in(scratch, &config, &[]);
    let says = format!("is not ready: waits for the kubelet to create {}/pods", kubelet.display());
    let found = wait_problem(&noded, "root.provisioner", &says);
    assert!(found["problem"].as_str().unwrap().ends_with("or correct provisioner.kubelet"), "{found}");
    noded.stop();
}

#[test]
#[ignore = "needs containerd and root"]
fn a_broken_bundle_is_a_problem_that_names_it_and_what_to_do() {
    let images = ScratchDir::new().unwrap();
    fs::create_dir(images.path().join("k8s.io")).unwrap();
    fs::write(images.path().join("k8s.io/bad.tar"), "scribble").unwrap();
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.path().join("metrics.sock");
    let config = format!(
        "services.etcd.enable = false\nkernel.log = false\n{NO_DISKS}[services.containerd]\npreseed = {:?}\n\
         [metrics]\naddress = {:?}\n",
        images.path(),
        socket
    );
    let noded = NodedProcess::start(&config);
    let found = wait_problem(&noded, "root.containerd.preseed", "1 of 1 bundles are not imported: ");
    assert!(found["problem"].as_str().unwrap().contains("bad.tar"), "{found}");
    assert_eq!(found["part"], "containerd");
    let hint = format!("repair or delete the named bundles in {}", images.path().display());
    assert!(found["hint"].as_str().unwrap().starts_with(&hint), "{found}");
    let (_, text) = http_get(UnixStream::connect(&socket).unwrap(), "/metrics");
    for line in ["nodekeel_image_bundles{state=\"imported\"} 0", "nodekeel_image_bundles{state=\"failed\"} 1"]
    {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    noded.stop();
}

/// What an HTTP server answers to a GET: the status line, and the body.
fn http_get(mut stream: impl std::io::Read + std::io::Write, path: &str) -> (String, String) {
    write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

#[test]
fn metrics_and_health_are_served_on_a_port_or_a_socket_and_not_by_default() {
    let scratch = ScratchDir::new().unwrap();
    let port = reserve_port().unwrap();
    let socket = scratch.path().join("metrics.sock");
    let tcp = format!("127.0.0.1:{}", port.number());
    for address in [tcp.clone(), socket.display().to_string()] {
        let service = service_config("a", "exec sleep 1000", ENVIRONMENT);
        let config = format!("{NO_DAEMONS}{NO_DISKS}[metrics]\naddress = {address:?}\n{service}");
        let noded = NodedProcess::start(&config);
        wait_healthy(&noded);
        let get = |path: &str| match address.starts_with('/') {
            true => http_get(UnixStream::connect(&address).unwrap(), path),
            false => http_get(TcpStream::connect(&address).unwrap(), path),
        };
        let (status, text) = get("/metrics");
        assert_eq!(status, "HTTP/1.1 200 OK");
        for line in [
            "nodekeel_healthy 1".to_owned(),
            "nodekeel_runnables{state=\"dead\"} 0".to_owned(),
            "nodekeel_restarts_total{dn=\"root.service.a\"} 0".to_owned(),
            "nodekeel_crash_loops 0".to_owned(),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(
            text.contains(&format!("nodekeel_disk_size_bytes{{path=\"{}\"}}", noded.data().display())),
            "{text}"
        );
        assert!(text.ends_with("# EOF\n"), "{text}");
        assert_eq!(get("/healthz"), ("HTTP/1.1 200 OK".into(), "ok\n".into()));
        let (status, text) = get("/readyz");
        assert!(status == "HTTP/1.1 200 OK" && text.starts_with("ready\n"), "{status} {text}");
        noded.ask(&["stop", "--wait", "root.service.a"]);
        let (status, text) = get("/readyz");
        assert_eq!(status, "HTTP/1.1 503 Service Unavailable");
        assert!(text.contains("problem: root.service.a: was stopped by an operator\n"), "{text}");
        assert!(get("/metrics").1.contains("\nnodekeel_healthy 0\n"));
        noded.ask(&["restart", "--wait", "root.metrics"]);
        assert_eq!(get("/healthz").0, "HTTP/1.1 200 OK");
        noded.stop();
    }
    assert!(!socket.exists());
    let noded = NodedProcess::start(NO_DAEMONS);
    assert!(!noded.ask(&["tree"]).contains("metrics"));
    assert!(TcpStream::connect(tcp).is_err());
    noded.stop();
}

#[test]
fn a_reload_moves_the_metrics_to_another_address_with_their_port() {
    let port = reserve_port().unwrap();
    let config = |ip: &str| format!("{NO_DAEMONS}[metrics]\naddress = \"{ip}:{}\"\n", port.number());
    let noded = NodedProcess::start(&config("127.0.0.1"));
    noded.ask(&["start", "--wait", "root.metrics"]);
    fs::write(noded.scratch.path().join("noded.toml"), config("0.0.0.0")).unwrap();
    assert_eq!(noded.ask(&["reload"]), "reloaded:\n  restart root.metrics: metrics.address\n");
    noded.ask(&["start", "--wait", "root.metrics"]);
    let (status, _) = http_get(TcpStream::connect(("127.0.0.1", port.number())).unwrap(), "/healthz");
    assert_eq!(status, "HTTP/1.1 200 OK");
    noded.stop();
}
