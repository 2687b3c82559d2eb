//! A cluster from a snapshot: etcd starts as a cluster of one with the keys of another, which is lost.
//!
//! Each step finds what an earlier run has done:
//!
//! 1. etcd's own tool makes the data directory of a member from the snapshot: the member's id is new, and so is etcd's id of
//!    the cluster, so that a member of the lost cluster that comes back is no member of this one;
//! 2. etcd starts with it alone, and trusts a CA that was made for this moment: the certificates of the lost cluster don't
//!    get in, and this member has none yet;
//! 3. a new CA takes the place of the cluster's, whose private key is sealed to voters that are lost, and certifies the member. Its
//!    credentials are stored last: with them, the next run starts the member from its data, as at any other start.
//!
//! etcd 3.4's tool leaves the list of members in the database. It is emptied before: the member would ask the voters of the lost
//! cluster about its starts, and etcd 3.6 would take them for its own.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use nodekeel_localstorage::RenameMode;
use nodekeel_localstorage::pki::{Credentials, RevocationList};
use nodekeel_localstorage::tree::{EtcdDir, LayoutDir};
use nodekeel_supervisor::Failure;
use tokio::task::spawn_blocking;

use super::MemberRun;
use super::backend::{clear_bucket, highest_version};
use super::client::{self, WithoutLeader};
use super::files::{self, PkiDirs};
use super::kv::EtcdKv;
use super::members::LEARNERS;
use super::version::{self, EtcdVersion};
use super::wait_serving;
use crate::consensus::kv::{KeyRange, KvStore};
use crate::consensus::{ConsensusError, MemberName, PeerUrl};
use crate::pki::{CertificateSpec, PendingCa, Voter};

/// The buckets with the members of a cluster, and with the ids of those that were removed.
const MEMBER_BUCKETS: [&[u8]; 2] = [b"members", b"members_removed"];
/// The prefix of the directory in which the tool works.
const WORK_PREFIX: &str = "restoring-";

/// The certificates of a member of the restored cluster.
struct RestoredPki {
    member: Credentials,
    revoked: RevocationList,
}

impl MemberRun<'_> {
    /// Makes this member the only one of the cluster in the snapshot, and ends the run: the next one starts it.
    pub(super) async fn restore_cluster(
        &self,
        snapshot: &Path,
        token: &str,
        version: Option<EtcdVersion>,
    ) -> Result<(), Failure> {
        tracing::warn!("restoring the cluster from {}", snapshot.display());
        let this = self.member;
        let place = DataPlacement {
            files: this.files.clone(),
            snapshot: snapshot.to_owned(),
            binary: this.config.binary.clone(),
            version,
            name: this.name.clone(),
            url: this.peer_url(),
            token: token.to_owned(),
        };
        let failed = "restore the snapshot";
        let placed = spawn_blocking(move || place.ensure_data()).await;
        placed.map_err(ConsensusError::backend(failed))??;
        // A CA for this run alone: its key is forgotten with this value.
        let mut moment = PendingCa::generate().map_err(ConsensusError::Ca)?;
        let spec = CertificateSpec::for_member(this.name.clone(), this.address);
        let server = moment.issue_credentials(&spec).map_err(ConsensusError::Ca)?;
        let PkiDirs { restore_pki: pki, client_dir, .. } = files::pki_dirs(this.files)?;
        let (stored, target) = (pki.clone(), server);
        let stored = spawn_blocking(move || stored.store_credentials(&target)).await;
        stored.map_err(ConsensusError::backend(failed))?.map_err(ConsensusError::Credentials)?;
        let voter = self.load_voter().await?;
        let mut exits = self.run_etcd(this.isolated_process(&pki, &client_dir, version), &client_dir)?;
        let restored = tokio::select! {
            biased;
            canceled = self.ctx.canceled() => return Err(canceled.into()),
            broken = exits.wait_broken() => return Err(self.process_error(broken).into()),
            restored = self.certify_restored(&client_dir, &voter) => restored?,
        };
        let files = this.files.clone();
        let stored = spawn_blocking(move || store_pki(&files, &restored)).await;
        stored.map_err(ConsensusError::backend(failed))??;
        Err(ConsensusError::ClusterRestored.into())
    }

    async fn certify_restored(
        &self,
        client_dir: &LayoutDir,
        voter: &Voter,
    ) -> Result<RestoredPki, ConsensusError> {
        let this = self.member;
        let connected = client::connect(client_dir, WithoutLeader::Fails).await?;
        let kv = EtcdKv::new(connected, self.reporter.stop_token());
        wait_serving(&kv).await?;
        let root: Arc<dyn KvStore> = Arc::new(kv);
        // Of learners of the lost cluster.
        let deleted = root.delete(KeyRange::prefix(LEARNERS)).await;
        deleted.map_err(|source| ConsensusError::Kv {
            operation: "delete the learners of the lost cluster",
            source,
        })?;
        // Nobody is left to whom the private key of the CA in the snapshot is sealed.
        let new = PendingCa::generate().map_err(ConsensusError::Ca)?;
        let cluster_ca = new.replace_in(root, voter).await.map_err(ConsensusError::Ca)?;
        // A run that was killed may have issued others: their keys no longer exist.
        let spec = CertificateSpec::for_member(this.name.clone(), this.address);
        let member = cluster_ca.issue_credentials(&spec).await.map_err(ConsensusError::Ca)?;
        let revoked = cluster_ca.revocation_list().await.map_err(ConsensusError::Ca)?;
        Ok(RestoredPki { member, revoked })
    }
}

/// The member's credentials last: they are the record that the rest is there.
fn store_pki(files: &EtcdDir, restored: &RestoredPki) -> Result<(), ConsensusError> {
    files.store_revocation_list(&restored.revoked).map_err(ConsensusError::Credentials)?;
    files::remove_restore_pki(files)?;
    files::require_peer_name(files, &restored.member.ca)?;
    files::store_member_credentials(files, &restored.member)
}

/// Makes the data directory of a member from a snapshot.
struct DataPlacement {
    files: EtcdDir,
    snapshot: PathBuf,
    binary: PathBuf,
    version: Option<EtcdVersion>,
    name: MemberName,
    url: PeerUrl,
    token: String,
}

impl DataPlacement {
    /// It blocks, and can be repeated.
    fn ensure_data(&self) -> Result<(), ConsensusError> {
        self.remove_works()?;
        if !files::has_data(&self.files)? {
            self.place_data()?;
        }
        files::check_version(&self.files, &self.binary, self.version)
    }

    fn place_data(&self) -> Result<(), ConsensusError> {
        self.prepare_snapshot()?;
        let root = self.files.open().map_err(ConsensusError::backend("open the member's directory"))?;
        let failed = "restore the snapshot";
        // The tool of a run that was killed may still work in its own.
        let work = format!("{WORK_PREFIX}{}", std::process::id());
        self.run_tool(&root.path().join(&work))?;
        // etcd's tool syncs its files, but not their directories.
        let made = root.open_dir(&work).map_err(ConsensusError::backend(failed))?;
        rustix::fs::syncfs(&made).map_err(ConsensusError::backend(failed))?;
        let data = self.files.data.open().map_err(ConsensusError::backend("open etcd's data"))?;
        let made = Path::new(&work).join("member");
        root.rename(made, &data, "member", RenameMode::NoReplace).map_err(ConsensusError::backend(failed))?;
        root.remove_tree(&work).map(drop).map_err(ConsensusError::backend(failed))
    }

    /// Removes the directories of tools whose run was killed.
    fn remove_works(&self) -> Result<(), ConsensusError> {
        let failed = || ConsensusError::backend("remove an unfinished restore");
        let root = self.files.open().map_err(failed())?;
        for entry in root.list().map_err(failed())? {
            if entry.name.as_os_str().as_encoded_bytes().starts_with(WORK_PREFIX.as_bytes()) {
                root.remove_tree(&entry.name).map_err(failed())?;
            }
        }
        Ok(())
    }

    /// Checks the version of the snapshot, and empties its list of members where the tool leaves it.
    fn prepare_snapshot(&self) -> Result<(), ConsensusError> {
        let failed = || ConsensusError::backend("prepare the snapshot");
        let file = File::options().read(true).write(true).open(&self.snapshot).map_err(failed())?;
        let written = highest_version(&file).map_err(failed())?;
        version::check_may_start(&self.binary, self.version, &self.snapshot, written)?;
        if !self.is_old() {
            return Ok(());
        }
        for bucket in MEMBER_BUCKETS {
            clear_bucket(&file, bucket).map_err(failed())?;
        }
        file.sync_all().map_err(failed())
    }

    /// True for the releases whose tool is etcdctl, and leaves the members of the lost cluster in the database.
    fn is_old(&self) -> bool {
        self.version.is_some_and(|version| version < EtcdVersion { major: 3, minor: 5 })
    }

    /// The tool of etcd's release, beside it.
    fn tool(&self) -> PathBuf {
        self.binary.with_file_name(if self.is_old() { "etcdctl" } else { "etcdutl" })
    }

    fn run_tool(&self, target: &Path) -> Result<(), ConsensusError> {
        let tool = self.tool();
        let mut command = Command::new(&tool);
        // Until 3.5, etcdctl speaks an older protocol by default.
        command.env_clear().env("ETCDCTL_API", "3").args(["snapshot", "restore"]).arg(&self.snapshot);
        command.args(["--name", self.name.as_str(), "--initial-advertise-peer-urls", self.url.as_str()]);
        command.arg("--initial-cluster").arg(format!("{}={}", self.name, self.url));
        // etcd derives the new ids from it.
        command.args(["--initial-cluster-token", &self.token, "--data-dir"]).arg(target);
        if self.is_old() {
            // It was compared when the snapshot was staged, before the list of members was emptied.
            command.arg("--skip-hash-check");
        }
        match command.stdin(Stdio::null()).output() {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stderr);
                let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
                let failure = io::Error::other(format!("{}: {}: {last}", tool.display(), output.status));
                Err(ConsensusError::backend("restore the snapshot by etcd's tool")(failure))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(ConsensusError::NoRestoreTool { tool, binary: self.binary.clone() })
            }
            Err(error) => Err(ConsensusError::backend("run etcd's tool")(error)),
        }
    }
}
