//! Requirements of `run` on the node.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use nodekeel_fsquota::ProjectQuota;
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::csi::BindMounter;
use nodekeel_provisioner::{DirStore, ImageFormat, StoreName, format_chain};

use crate::check::{CheckFinding, StoreIds};
use crate::config::DaemonConfig;
use crate::volumes;

/// Timeout of the metrics of a running instance on this machine.
const METRICS_TIMEOUT: Duration = Duration::from_secs(2);

/// The time within which a disk has to answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(20);

/// The time within which the process that checks a disk has to answer: it reports itself that the disk hangs while it is probed.
pub(super) const CHECK_TIMEOUT: Duration = Duration::from_secs(25);

/// Where the kubelet has the targets of block volumes, below its directory.
const BLOCK_TARGETS: &str = "plugins/kubernetes.io/csi/volumeDevices";

const LOOP_CONTROL: &str = "/dev/loop-control";

/// More than the metrics of an instance.
const MAX_METRICS_BYTES: u64 = 4 << 20;

/// The metrics of an instance that runs on this machine, if one answers.
#[derive(Debug)]
pub(super) struct RunningInstance(Option<String>);

impl RunningInstance {
    /// Asks at an address: `check` in the pod of provisionerd is not a second instance.
    pub(super) fn find(address: SocketAddr) -> Self {
        let ask = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect_timeout(&address, METRICS_TIMEOUT)?;
            stream.set_read_timeout(Some(METRICS_TIMEOUT))?;
            // One request needs no HTTP client.
            stream.write_all(
                format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").as_bytes(),
            )?;
            let mut answer = String::new();
            stream.take(MAX_METRICS_BYTES).read_to_string(&mut answer)?;
            Ok(answer)
        };
        Self(ask().ok().filter(|answer| answer.contains("provisionerd_build_info")))
    }

    pub(super) fn is_running(&self) -> bool {
        self.0.is_some()
    }

    /// What the instance says of its directory, which it probes itself.
    fn finding(&self, store: Option<&StoreName>) -> CheckFinding {
        let text = self.0.as_deref().unwrap_or_default();
        let sample = text.lines().find_map(|line| {
            let (cause, rest) = line.strip_prefix("provisionerd_store_able{cause=\"")?.split_once('"')?;
            let (labels, value) = rest.split_once("} ")?;
            let name = labels.strip_prefix(",store=\"").and_then(|name| name.strip_suffix('"'));
            (name == store.map(StoreName::as_str)).then_some((cause, value))
        });
        match sample {
            Some((cause, "0")) => CheckFinding::Failure(anyhow!(
                "provisionerd is running and can't create volumes ({cause}): ask its /readyz for the reason"
            )),
            _ => CheckFinding::Pass("provisionerd is running and uses the directory".into()),
        }
    }
}

pub(super) fn check_directory(config: &DaemonConfig, running: &RunningInstance) -> Vec<CheckFinding> {
    let is_running = running.is_running();
    let (base, quota) = match volumes::open_directory(config) {
        Ok(opened) => opened,
        Err(error) => return vec![CheckFinding::Failure(error.into())],
    };
    let mut findings = vec![CheckFinding::Pass(format!(
        "{} is on {} at {}, which enforces project quotas",
        config.directory.display(),
        quota.file_system().kind,
        quota.file_system().mount_point.display()
    ))];
    findings.extend(quota_warnings(&quota));
    if quota.file_system().mount_point == Path::new("/") {
        findings.push(CheckFinding::Warning(
            "volumes share the root file system: limits are not reservations, and full volumes fill it; use a \
             dedicated file system"
                .into(),
        ));
    }
    findings.push(check_writable(&base));
    match DirStore::is_in_use(&base) {
        Ok(false) => findings.push(check_probe(base, quota)),
        Ok(true) if is_running => findings.push(running.finding(config.store.as_ref())),
        Ok(true) => findings.push(CheckFinding::Warning("another instance is using the directory".into())),
        Err(error) => findings.push(CheckFinding::Failure(
            anyhow!(error).context("can't check whether another instance uses the directory"),
        )),
    }
    findings
}

/// The file system of the directory of a store.
pub(super) fn device(config: &DaemonConfig) -> Option<u64> {
    fs::metadata(&config.directory).ok().map(|found| found.dev())
}

/// The identity of a store and the names in its directory.
pub(super) fn read_ids(config: &DaemonConfig) -> StoreIds {
    let read = || -> Result<StoreIds> {
        let base = Dir::open(&config.directory)?;
        let store = DirStore::read_identity(&base)?.map(|store| store.to_string());
        // A new directory has no volumes yet.
        let volumes = base.open_dir("volumes").and_then(|volumes| volumes.list()).unwrap_or_default();
        let volumes = volumes.iter().filter_map(|entry| Some(entry.name.as_os_str().to_str()?.to_owned()));
        let snapshots = DirStore::list_stored_snapshots(&base)?;
        let snapshots = snapshots.iter().map(ToString::to_string).collect();
        Ok(StoreIds::Found { store, volumes: volumes.collect(), snapshots })
    };
    read().unwrap_or_else(|error| StoreIds::Unreadable(format_chain(&*error)))
}

/// Checks that no two stores are on one file system, each with its directory: each would promise what the other does.
pub(super) fn check_file_systems(devices: &[(u64, PathBuf)]) -> Option<CheckFinding> {
    devices.iter().enumerate().find_map(|(at, (device, directory))| {
        let (_, other) = devices[..at].iter().find(|(other, _)| other == device)?;
        Some(CheckFinding::Warning(format!(
            "{} and {} are stores on one file system, whose space both promise: give each store one of its own",
            other.display(),
            directory.display()
        )))
    })
}

fn quota_warnings(quota: &ProjectQuota) -> impl Iterator<Item = CheckFinding> {
    quota.enforcement_gaps().into_iter().map(|warning| CheckFinding::Warning(warning.to_string()))
}

/// Checks that volumes can be created: a directory with a limit is, and removed. Only where no instance runs, which
/// probes it itself.
fn check_probe(base: Dir, quota: ProjectQuota) -> CheckFinding {
    let path = base.path().to_owned();
    let (sender, answer) = mpsc::channel();
    // In a thread that is left behind if the disk hangs.
    std::thread::spawn(move || {
        // Fails only if this function has returned.
        let _ = sender.send(DirStore::probe_directory(&base, &quota));
    });
    let failed = || format!("can't create volumes in {}", path.display());
    let probed = match answer.recv_timeout(PROBE_TIMEOUT) {
        Ok(probed) => probed.map_err(anyhow::Error::from),
        Err(_) => Err(anyhow!("its disk has not answered within {} s: see `dmesg`", PROBE_TIMEOUT.as_secs())),
    };
    CheckFinding::from_result(
        probed.map(|()| "volumes can be created, and their limits bind").with_context(failed),
    )
}

fn check_writable(base: &Dir) -> CheckFinding {
    // AT_EACCESS asks for the effective user, who would write.
    let write =
        rustix::fs::accessat(base.as_fd(), ".", rustix::fs::Access::WRITE_OK, rustix::fs::AtFlags::EACCESS);
    CheckFinding::from_result(
        write
            .map(|()| "the directory is writable")
            .with_context(|| format!("can't write to {}: run as root", base.path().display())),
    )
}

pub(super) fn check_kubelet(config: &DaemonConfig) -> Vec<CheckFinding> {
    let mut findings: Vec<_> = ["pods", "plugins_registry"]
        .into_iter()
        .map(|below| check_kubelet_dir(&config.kubelet, below))
        .collect();
    // Without the directories, the further checks would fail as well.
    if findings.iter().any(CheckFinding::is_failure) {
        return findings;
    }
    findings.push(check_shared_mount(&config.kubelet.join("pods"), is_in_pod()));
    findings.extend(is_in_pod().then(|| check_block_targets(&config.kubelet)));
    findings.push(check_loop_devices(Path::new(LOOP_CONTROL)));
    findings.extend(check_formats(&[]));
    // The probe works with any directory.
    let probe = || -> Result<()> {
        let dir = Dir::open(&config.kubelet)?;
        Ok(BindMounter::probe_support(dir.as_fd())?)
    };
    let probed = probe().map(|()| "volumes can be mounted");
    findings.push(CheckFinding::from_result(
        probed.context("can't mount a volume: run as root, privileged, outside of user namespaces"),
    ));
    findings
}

/// Without the program of a format, only strict volumes of that format can't be created.
fn check_formats(directories: &[PathBuf]) -> Vec<CheckFinding> {
    let formats = ImageFormat::ALL.into_iter().filter(|format| format.mkfs_program().is_some());
    let check = |format: ImageFormat| match format.check_program(directories) {
        Ok(()) => CheckFinding::Pass(format!("strict volumes of {format} can be created")),
        Err(error) => CheckFinding::Warning(format!(
            "strict volumes of {format} can't be created, and claims for them go to other nodes: {}",
            format_chain(&error)
        )),
    };
    formats.map(check).collect()
}

fn check_kubelet_dir(kubelet: &Path, below: &str) -> CheckFinding {
    let path = kubelet.join(below);
    // A symbolic link is not followed, and so is no directory here.
    let found = fs::symlink_metadata(&path).with_context(|| {
        format!("can't find {}: start the kubelet, or set --kubelet to its --root-dir", path.display())
    });
    let is_dir = found.and_then(|file| {
        ensure!(file.is_dir(), "{} is not a directory: replace it by its target", path.display());
        Ok(format!("the kubelet's {} exists", path.display()))
    });
    CheckFinding::from_result(is_dir)
}

/// Checks that the kubelet sees mounts below a directory: it does if that is a shared mount, or outside of a
/// container.
///
/// Otherwise publishing seems to work, but pods write into a plain directory without a limit.
pub(crate) fn check_shared_mount(path: &Path, is_pod: bool) -> CheckFinding {
    let advice = || {
        format!(
            "{} is not on a shared mount: in a container, set mountPropagation: Bidirectional, and make the \
             host's mount shared (`mount --make-rshared /`)",
            path.display()
        )
    };
    match BindMounter::is_shared(path) {
        Ok(true) => CheckFinding::Pass(format!("the kubelet sees mounts below {}", path.display())),
        Ok(false) if is_pod => CheckFinding::Failure(anyhow!(advice())),
        Ok(false) => CheckFinding::Warning(advice()),
        Err(error) => CheckFinding::Failure(
            anyhow!(error).context(format!("can't read the mounts of {}", path.display())),
        ),
    }
}

/// Checks in a container that the kubelet sees block volumes.
fn check_block_targets(kubelet: &Path) -> CheckFinding {
    let path = kubelet.join(BLOCK_TARGETS);
    match BindMounter::is_shared(&path) {
        Ok(true) => CheckFinding::Pass(format!("the kubelet sees block volumes below {}", path.display())),
        _ => CheckFinding::Warning(format!(
            "block volumes can't be published: mount {} of the host into the container, with mountPropagation: \
             Bidirectional",
            path.display()
        )),
    }
}

/// Checks that loop devices can be attached.
fn check_loop_devices(control: &Path) -> CheckFinding {
    if control.exists() {
        CheckFinding::Pass("loop devices are available, for block and strict volumes".into())
    } else {
        CheckFinding::Warning(format!(
            "block and strict volumes can't be published, without {}: load the module loop, and in a container, mount \
             the host's /dev",
            control.display()
        ))
    }
}

/// True in a container of a pod: the kubelet sets this variable in every one.
pub(crate) fn is_in_pod() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
}

pub(super) fn check_address(config: &DaemonConfig, is_running: bool) -> CheckFinding {
    match TcpListener::bind(config.listen) {
        Err(_) if is_running => {
            CheckFinding::Pass(format!("provisionerd is running and serves {}", config.listen))
        }
        Ok(_) => CheckFinding::Pass(format!("{} is available to listen on", config.listen)),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => CheckFinding::Warning(format!(
            "{} is in use: stop the process that listens there, or set another --listen",
            config.listen
        )),
        Err(error) => CheckFinding::Failure(
            anyhow!(error).context(format!("can't listen on {}: set another --listen", config.listen)),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_without_its_program_is_a_warning() {
        let directory = tempfile::tempdir().expect("a directory");
        std::os::unix::fs::symlink("/bin/false", directory.path().join("mkfs.xfs")).expect("a link");
        let texts: Vec<_> =
            check_formats(&[directory.path().to_owned()]).iter().map(ToString::to_string).collect();
        let xfs = texts.iter().find(|text| text.contains("xfs")).expect("a finding");
        assert!(xfs.starts_with("warn") && xfs.contains("go to other nodes"), "{texts:?}");
        assert_eq!(texts.len(), 2, "{texts:?}");
    }

    #[test]
    fn a_check_beside_the_running_instance_does_not_warn_of_it() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let config =
            DaemonConfig { listen: listener.local_addr().expect("bound"), ..DaemonConfig::default() };
        let serve = |body: &'static str| {
            let listener = listener.try_clone().expect("a descriptor");
            std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().expect("a connection");
                let _ = stream.read(&mut [0; 1024]);
                let _ = write!(stream, "HTTP/1.1 200 OK\r\n\r\n{body}");
            })
        };
        for (body, is_ours) in [("provisionerd_build_info{version=\"0.1.0\"} 1\n", true), ("ok\n", false)] {
            let server = serve(body);
            let running = RunningInstance::find(config.listen);
            let found = running.is_running();
            server.join().expect("no panic");
            assert_eq!(found, is_ours, "{body}");
            let finding = check_address(&config, found);
            assert_eq!(matches!(finding, CheckFinding::Pass(_)), is_ours, "{finding}");
        }
    }

    #[test]
    fn a_running_instance_that_can_not_create_volumes_fails_the_check() {
        let finding = |able: &str| RunningInstance(Some(able.to_owned())).finding(None);
        let unable = finding("# TYPE x gauge\nprovisionerd_store_able{cause=\"read_only\"} 0\n").to_string();
        assert!(unable.starts_with("FAIL") && unable.contains("read_only"), "{unable}");
        let fast = StoreName::try_new("fast").expect("a name");
        let other = "provisionerd_store_able{cause=\"hung\",store=\"fast\"} 0\n";
        for able in ["provisionerd_store_able{cause=\"\"} 1\n", other, ""] {
            assert!(matches!(finding(able), CheckFinding::Pass(_)), "{able}");
        }
        assert!(RunningInstance(Some(other.to_owned())).finding(Some(&fast)).is_failure());
    }

    #[test]
    fn what_block_volumes_lack_is_a_warning() {
        let directory = tempfile::tempdir().expect("a directory");
        for finding in [
            check_block_targets(directory.path()),
            check_loop_devices(&directory.path().join("loop-control")),
        ] {
            assert!(matches!(finding, CheckFinding::Warning(_)), "{finding}");
        }
        assert!(matches!(check_loop_devices(directory.path()), CheckFinding::Pass(_)));
    }

    #[test]
    fn in_a_pod_a_mount_hidden_from_the_kubelet_fails_the_check() {
        // The result depends on the environment of the test.
        let path = Path::new("/proc");
        let is_shared = BindMounter::is_shared(path).expect("procfs is a mount");
        assert_eq!(check_shared_mount(path, true).is_failure(), !is_shared);
        assert!(!check_shared_mount(path, false).is_failure());
        assert!(check_shared_mount(Path::new("/nowhere/at/all"), false).is_failure());
    }

    #[test]
    fn a_missing_kubelet_directory_fails_the_check() {
        let directory = tempfile::tempdir().expect("a directory");
        let config = DaemonConfig { kubelet: directory.path().to_owned(), ..DaemonConfig::default() };
        let findings = check_kubelet(&config);
        assert!(findings.iter().all(CheckFinding::is_failure) && findings.len() == 2);
        assert!(findings[0].to_string().contains("--kubelet"), "{}", findings[0]);
        std::os::unix::fs::symlink("/tmp", directory.path().join("pods")).expect("link");
        assert!(check_kubelet_dir(directory.path(), "pods").to_string().contains("not a directory"));
    }
}
