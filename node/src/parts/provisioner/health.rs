//! Health of the provisioner: the API server, the client certificate of its kubeconfig, and the store. A missing kubelet
//! directory is a reason of the runnable itself (`kubelet_dir.rs`).

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kube::config::{AuthInfo, Kubeconfig};
use nodekeel_provisioner::{Ability, ImageFormat, InabilityCause, Provisioner, StoreHealth};
use tokio::task::spawn_blocking;

use super::DN;
use crate::health::{CertificateValidity, ConditionsFuture, HealthCondition, HealthSource, NodeSnapshot};

/// The provisioner of the present incarnation, which knows whether the API server answers.
#[derive(Debug, Clone, Default)]
pub(super) struct CurrentProvisioner(Arc<Mutex<Option<Provisioner>>>);

/// Takes the provisioner back when its incarnation ends in any way.
pub(super) struct PublishedProvisioner<'a>(&'a CurrentProvisioner);

impl CurrentProvisioner {
    pub(super) fn publish(&self, provisioner: Provisioner) -> PublishedProvisioner<'_> {
        *self.lock() = Some(provisioner);
        PublishedProvisioner(self)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Provisioner>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PublishedProvisioner<'_> {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}

/// Asks the API server.
pub(super) struct ApiHealth {
    pub(super) current: CurrentProvisioner,
    pub(super) kubeconfig: PathBuf,
}

impl HealthSource for ApiHealth {
    fn conditions<'a>(&'a self, node: &'a NodeSnapshot) -> ConditionsFuture<'a> {
        Box::pin(async {
            // Neither the lock nor the provisioner is held over an await: its next incarnation opens the store again.
            let asked = {
                let current = self.current.lock();
                let ask = |it: &Provisioner| (it.stores(), it.check_lease(), it.check_api());
                current.as_ref().map(ask)
            };
            // Without a provisioner, the tree has the reason: root.provisioner waits for its kubelet, or for its
            // store.
            let Some((stores, lease, api)) = asked else { return Vec::new() };
            let since = node.condition_of(DN).and_then(|found| found.since);
            let mut conditions: Vec<_> = stores.iter().filter_map(store_condition).collect();
            // The programs are those of the node: what one store lacks, all do.
            let missing =
                stores.iter().map(|store| &store.missing_formats).find(|missing| !missing.is_empty());
            conditions
                .extend(missing.into_iter().flatten().map(|(format, why)| format_condition(*format, why)));
            let Some(error) = api.await else {
                conditions.extend(lease.as_deref().map(lease_condition));
                return conditions;
            };
            let hint = format!(
                "start the API server, or correct {}; `nodectl logs --children {DN}`",
                self.kubeconfig.display()
            );
            let found = HealthCondition::problem(DN, format!("can't use the API server: {error}"));
            conditions.push(found.since(since).waiting_for("the API server").hint(hint));
            conditions
        })
    }
}

/// The condition of a store that is not served, or in which no volume can be created.
fn store_condition(store: &StoreHealth) -> Option<HealthCondition> {
    let Ability::Unable { cause, why } = &store.ability else { return None };
    let name = store.name.as_ref().map(|name| format!("store {name}: ")).unwrap_or_default();
    let (what, hint) = match cause {
        InabilityCause::Unserved => {
            ("the volumes are not served", "mount the disk; the volumes are served again by themselves")
        }
        _ => (
            "no volumes can be created",
            "repair the disk or its file system; the volumes that exist are served, and others again by themselves",
        ),
    };
    let found = HealthCondition::problem(DN, format!("{name}{what}: {why}"));
    Some(found.waiting_for("the disk of the volumes").hint(hint))
}

/// The condition of a node without the program that makes the file system of strict volumes. All other volumes can be
/// created.
fn format_condition(format: ImageFormat, why: &str) -> HealthCondition {
    let what =
        format!("strict volumes of {format} can't be created, and claims for them go to other nodes: {why}");
    HealthCondition::warning(DN, what)
        .waiting_for(format!("the program that makes {format}"))
        .hint("install it: it is noticed within a minute")
}

/// The condition of a node whose Lease is not renewed although the API server answers.
fn lease_condition(why: &str) -> HealthCondition {
    let found = HealthCondition::problem(DN, format!("new claims go to other nodes: {why}"));
    found
        .waiting_for("the Lease of the node")
        .hint("grant the rules of deploy/rbac.yaml of this release in its namespace")
}

/// Reads the client certificate of a kubeconfig, and compares it with the time.
pub(super) struct CertificateHealth {
    pub(super) kubeconfig: PathBuf,
}

impl HealthSource for CertificateHealth {
    fn conditions<'a>(&'a self, node: &'a NodeSnapshot) -> ConditionsFuture<'a> {
        Box::pin(async {
            let path = self.kubeconfig.clone();
            let read = spawn_blocking(move || client_certificate(&path)).await.ok().flatten();
            // A certificate that can't be read or parsed is an error of the provisioner, which reports it.
            let Some(validity) = read.and_then(|pem| CertificateValidity::from_pem(&pem).ok()) else {
                return Vec::new();
            };
            let object = self.kubeconfig.display().to_string();
            let found = node.certificate_condition(&object, &validity);
            let hint = format!("renew it there, then `nodectl restart {DN}`");
            found.map(|found| found.hint(hint)).into_iter().collect()
        })
    }
}

/// The client certificate of the current context in PEM; `None` if it authenticates otherwise.
fn client_certificate(kubeconfig: &Path) -> Option<Vec<u8>> {
    let file = Kubeconfig::read_from(kubeconfig).ok()?;
    let current = file.current_context?;
    let context = file.contexts.into_iter().find(|context| context.name == current)?.context?;
    let user = context.user?;
    let auth = file.auth_infos.into_iter().find(|known| known.name == user)?.auth_info?;
    match auth {
        // Data in the file take precedence over a path, as in client-go.
        AuthInfo { client_certificate_data: Some(data), .. } => STANDARD.decode(data.trim()).ok(),
        AuthInfo { client_certificate: Some(path), .. } => std::fs::read(path).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::time::{Duration, SystemTime};

    use nodekeel_provisioner::StoreStatus;

    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    /// A kubeconfig whose user has these fields.
    fn kubeconfig(directory: &Path, user: &str) -> PathBuf {
        let file = directory.join("provisioner.conf");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             contexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
             clusters: [{{name: k, cluster: {{server: \"https://127.0.0.1:1\"}}}}]\n\
             users: [{{name: u, user: {{{user}}}}}]\n"
        );
        fs::write(&file, text).expect("written");
        file
    }

    #[tokio::test]
    async fn a_client_certificate_that_expires_is_reported_in_time_from_data_and_from_a_file() {
        let scratch = tempfile::tempdir().expect("a directory");
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).expect("a key");
        let mut params = rcgen::CertificateParams::default();
        params.not_before = rcgen::date_time_ymd(2026, 1, 1);
        params.not_after = rcgen::date_time_ymd(2027, 1, 1);
        let pem = params.self_signed(&key).expect("signed").pem();
        let certificate = scratch.path().join("client.pem");
        fs::write(&certificate, &pem).expect("written");
        // 2027-01-01T00:00:00Z
        let end = SystemTime::UNIX_EPOCH + Duration::from_secs(1_798_761_600);
        for user in [
            format!("client-certificate-data: {}", STANDARD.encode(&pem)),
            format!("client-certificate: {}", certificate.display()),
        ] {
            let kubeconfig = kubeconfig(scratch.path(), &user);
            let source = CertificateHealth { kubeconfig };
            let ask = async |now: SystemTime| {
                let node = NodeSnapshot::new(now, Vec::new());
                let found = source.conditions(&node).await;
                found.into_iter().map(|found| (found.problem, found.hint)).collect::<Vec<_>>()
            };
            assert_eq!(ask(end - 31 * DAY).await, []);
            let hint = "renew it there, then `nodectl restart root.provisioner`".to_owned();
            let expires = "its certificate expires in 29 days".to_owned();
            assert_eq!(ask(end - 29 * DAY - DAY / 2).await, [(expires, hint.clone())]);
            assert_eq!(
                ask(end + 3 * DAY).await,
                [("its certificate expired 3 days ago".into(), hint.clone())]
            );
            let early = "its certificate is not valid for another 1 day".to_owned();
            assert_eq!(ask(end - 366 * DAY).await, [(early, hint)]);
        }
    }

    #[test]
    fn a_store_that_can_not_be_used_is_a_condition_that_names_why() {
        let store = |name: Option<&str>, ability| StoreHealth {
            name: name.map(|name| name.parse().expect("a name")),
            status: StoreStatus::Unknown,
            ability,
            missing_formats: BTreeMap::new(),
        };
        let unable = |cause, why: &str| Ability::Unable { cause, why: why.to_owned() };
        let condition = |cause, why: &str| {
            let found = store_condition(&store(None, unable(cause, why))).expect("a condition");
            (found.problem, found.hint)
        };
        let fast = store_condition(&store(Some("fast"), unable(InabilityCause::Hung, "hung")));
        let fast = fast.expect("a condition").problem;
        assert!(fast.starts_with("store fast: no volumes can be created: hung"), "{fast}");
        let (problem, hint) = condition(InabilityCause::Unserved, "the volumes are no longer at /v");
        assert!(problem.contains("not served: the volumes are no longer at /v"), "{problem}");
        assert!(hint.contains("mount the disk"), "{hint}");
        let (problem, hint) = condition(InabilityCause::ReadOnly, "read-only");
        assert!(problem.contains("no volumes can be created: read-only"), "{problem}");
        assert!(hint.contains("repair the disk"), "{hint}");
        for ability in [Ability::Unknown, Ability::Able] {
            assert_eq!(store_condition(&store(None, ability)), None);
        }
    }

    #[test]
    fn a_missing_program_of_strict_volumes_is_a_warning_that_names_it() {
        let found = format_condition(ImageFormat::Xfs, "mkfs.xfs is missing on this node");
        assert!(!found.is_problem(), "all other volumes can be created: {found:?}");
        assert!(found.problem.starts_with("strict volumes of xfs can't be created"), "{found:?}");
        assert!(found.problem.ends_with(": mkfs.xfs is missing on this node"), "{found:?}");
    }

    #[tokio::test]
    async fn a_kubeconfig_without_a_client_certificate_has_no_condition() {
        let scratch = tempfile::tempdir().expect("a directory");
        for user in ["token: secret", "client-certificate-data: '%'", "client-certificate: /absent"] {
            let kubeconfig = kubeconfig(scratch.path(), user);
            let source = CertificateHealth { kubeconfig };
            let node = NodeSnapshot::new(SystemTime::now(), Vec::new());
            assert_eq!(source.conditions(&node).await, [], "{user}");
        }
    }
}
