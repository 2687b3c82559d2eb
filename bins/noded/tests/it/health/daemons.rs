//! Daemons, API server and images.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testbed::ScratchDir;

use super::{wait_healthy, wait_problem};
use crate::harness::{EtcdPorts, NO_DAEMONS, NO_DISKS, NodedProcess, http_get};

/// A configuration with an etcd, with more sections.
fn etcd_config(ports: &EtcdPorts, sections: &str) -> String {
    let etcd = ports.section("");
    format!("services.containerd.enable = false\nkernel.log = false\n{NO_DISKS}{etcd}{sections}")
}

#[test]
fn a_node_without_a_ticket_says_where_to_put_it_and_what_to_type() {
    let ports = EtcdPorts::reserve();
    let config = etcd_config(&ports, "[cluster]\naddress = \"127.0.0.1\"\n");
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

#[test]
#[ignore = "sampled: needs etcd"]
fn a_frozen_etcd_is_not_ready_at_once_and_is_restarted_alone_and_in_a_cluster() {
    for cluster in ["", "[cluster]\naddress = \"127.0.0.1\"\nbootstrap = true\n"] {
        let ports = EtcdPorts::reserve();
        let noded = NodedProcess::start(&etcd_config(&ports, cluster));
        wait_healthy(&noded);
        let processes = testbed::leftovers::find_processes(&noded.data()).unwrap();
        let etcd =
            processes.iter().find(|process| process.command.contains("--data-dir")).expect("etcd runs");
        let etcd = Pid::from_raw(etcd.pid);
        kill(etcd, Signal::SIGSTOP).unwrap();
        let stopped = std::time::Instant::now();
        let dn = if cluster.is_empty() {
            wait_problem(&noded, "root.etcd", "is not ready: its liveness probe fails: no result within 2s");
            "root.etcd"
        } else {
            let found = wait_problem(&noded, "root.cluster", "can't take part in its cluster: its etcd");
            assert!(found["hint"].as_str().unwrap().contains("`nodectl cluster status`"), "{found}");
            "root.cluster.consensus.etcd"
        };
        // A liveness probe each 2 s waits for 2 s; the restart comes after 30 s and more. The rest is for a busy machine.
        assert!(stopped.elapsed() < Duration::from_secs(20), "reported after {:?}", stopped.elapsed());
        noded.wait_status(dn, |status| status["generation"] == 2);
        wait_healthy(&noded);
        println!("{dn} was restarted after {:?}", stopped.elapsed());
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
#[ignore = "sampled: needs root: the provisioner mounts volumes"]
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
#[ignore = "sampled: needs containerd and root"]
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
    let found = wait_problem(&noded, "images", "1 of 1 bundles are not imported: ");
    assert!(found["problem"].as_str().unwrap().contains("bad.tar"), "{found}");
    assert_eq!(found["part"], "containerd");
    let hint = format!("repair or delete the named bundles in {}", images.path().display());
    assert!(found["hint"].as_str().unwrap().starts_with(&hint), "{found}");
    let (_, text) = http_get(UnixStream::connect(&socket).unwrap(), "/metrics");
    for line in ["nodekeel_image_bundles{state=\"imported\"} 0", "nodekeel_image_bundles{state=\"failed\"} 1"]
    {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    // Both end with the import.
    noded.write_config(&config.replace(&format!("preseed = {:?}\n", images.path()), ""));
    noded.ask(&["reload"]);
    wait_healthy(&noded);
    let (_, text) = http_get(UnixStream::connect(&socket).unwrap(), "/metrics");
    assert!(text.contains("nodekeel_healthy 1\n") && !text.contains("nodekeel_image_bundles"), "{text}");
    noded.stop();
}
