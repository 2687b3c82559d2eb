//! Recovers the cluster from this member, when a majority of its voters is lost for ever.
//!
//! ```text
//!  request ──▶ record "requested" ──▶ the member ends, and starts again:
//!     a majority answers ──▶ no record: it starts as before
//!     otherwise ──▶ member/wal.recovered ──▶ record "alone" ──▶ member/wal ──▶ etcd, as the only member
//!                   ──▶ the node removes what the store has of the others ──▶ no record
//! ```
//!
//! The log decides: see [`wal`](super::wal). The database has the same data, and etcd removes the others from its list of members
//! when it applies the log. The number of starts goes on, so that each older copy of this disk stays one; a former member is
//! rejected by its certificate, and by the cluster's id where this member does not know its certificate.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use async_trait::async_trait;
use nodekeel_localstorage::pki::Credentials;
use nodekeel_localstorage::tree::EtcdDir;
use nodekeel_localstorage::{Dir, DirLock, FileMode, RenameMode};
use nodekeel_supervisor::Failure;
use tokio::sync::watch;
use tokio::task::spawn_blocking;

use super::config::EtcdConfig;
use super::files;
use super::peer_client::{ListedMember, PeerClient};
use super::start_number::StartNumber;
use super::starts::{DiskFacts, NoAnswer, StartDecision, ask_once, decide_start, load_rejection, read_disk};
use super::wal::{LogError, rewrite_log};
use crate::consensus::recovery::{LostMember, MemberRecovery, RecoveryError, RecoveryPlan, RecoveryState};
use crate::consensus::{ConsensusError, MemberName, PeerUrl};
use crate::pki::{has_peer_name, peer_name};

/// etcd's log.
const LOG: &str = "member/wal";
/// The log of a cluster of one, until it takes the place of the other.
const RECOVERED_LOG: &str = "member/wal.recovered";

const REQUESTED: &[u8] = b"requested\n";
const ALONE: &[u8] = b"alone\n";

/// The recovery from a member.
#[derive(Debug)]
pub(super) struct EtcdRecovery {
    config: EtcdConfig,
    files: EtcdDir,
    name: MemberName,
    address: IpAddr,
    /// Changes when the member has to start again.
    requests: watch::Sender<()>,
}

/// What is known of the other members.
struct Survey {
    own: StartNumber,
    is_learner: bool,
    opens_ca_key: bool,
    /// Its certificate has the name of a member.
    is_named: bool,
    others: Vec<ListedMember>,
    seen: BTreeMap<String, StartNumber>,
    errors: BTreeMap<String, NoAnswer>,
    /// A member that has rejected this one before.
    rejected_by: Option<String>,
}

impl EtcdRecovery {
    pub(super) fn new(config: EtcdConfig, files: EtcdDir, name: MemberName, address: IpAddr) -> EtcdRecovery {
        EtcdRecovery { config, files, name, address, requests: watch::Sender::new(()) }
    }

    /// Notifies of requests from now on.
    pub(super) fn watch_requests(&self) -> watch::Receiver<()> {
        self.requests.subscribe()
    }

    /// Begins a recovery that was requested, before etcd starts. Returns whether the member starts as the only one of its cluster.
    pub(super) async fn resume(&self) -> Result<bool, ConsensusError> {
        match self.load_state().await? {
            RecoveryState::None => return Ok(false),
            RecoveryState::Alone => {
                // A run before, whose thread outlives it, may have recorded that since the files were prepared.
                let files = self.files.clone();
                let exchanged = spawn_blocking(move || exchange_logs(&files)).await;
                exchanged.map_err(ConsensusError::backend("recover the cluster"))??;
                return Ok(true);
            }
            RecoveryState::Requested => {}
        }
        let survey = self.survey().await?;
        if let Err(refusal) = survey.check(&self.name) {
            tracing::error!("the cluster is not recovered from this member: {}", Failure::new(refusal));
            self.remove_record().await?;
            return Ok(false);
        }
        self.rewrite(survey.member_ids()).await?;
        tracing::warn!("the cluster is recovered from this member: all others are taken out");
        Ok(true)
    }

    /// Rewrites the log. If it can't be, the request is dropped.
    async fn rewrite(&self, others: BTreeSet<u64>) -> Result<(), ConsensusError> {
        let files = self.files.clone();
        let rewritten = spawn_blocking(move || {
            let failed = "write etcd's log for a cluster of one";
            let data = files.data.open().map_err(ConsensusError::backend(failed))?;
            let _lock = lock(&data)?;
            if load_state(&files)? != RecoveryState::Requested {
                return Err(ConsensusError::backend(failed)("another run has changed it".to_owned()));
            }
            data.remove_tree(RECOVERED_LOG).map_err(ConsensusError::backend(failed))?;
            let log = data.open_dir(LOG).map_err(ConsensusError::backend(failed))?;
            let recovered = data.ensure_dir(RECOVERED_LOG, FileMode::PRIVATE_DIR);
            let recovered = recovered.map_err(ConsensusError::backend(failed))?;
            let record = files::pki_dirs(&files)?.recovery;
            if let Err(error) = rewrite_log(&log, &recovered, &others) {
                // The next start is one as before.
                data.remove_tree(RECOVERED_LOG).map_err(ConsensusError::backend(failed))?;
                record.remove().map_err(ConsensusError::backend("remove the record of a recovery"))?;
                return Err(match error {
                    LogError::Removed => ConsensusError::Removed,
                    error => ConsensusError::backend(failed)(error),
                });
            }
            // From here on there is no way back.
            let written = record.write(ALONE);
            written.map_err(ConsensusError::backend("record the recovery"))?;
            replace_log(&data)
        });
        rewritten.await.map_err(ConsensusError::backend("recover the cluster"))?
    }

    async fn load_state(&self) -> Result<RecoveryState, ConsensusError> {
        let files = self.files.clone();
        let read = spawn_blocking(move || load_state(&files)).await;
        read.map_err(ConsensusError::backend("read the record of a recovery"))?
    }

    async fn remove_record(&self) -> Result<(), ConsensusError> {
        let files = self.files.clone();
        let failed = "remove the record of a recovery";
        let removed = spawn_blocking(move || {
            files::pki_dirs(&files)?.recovery.remove().map_err(ConsensusError::backend(failed)).map(drop)
        });
        removed.await.map_err(ConsensusError::backend(failed))?
    }

    /// Asks each other member once.
    async fn survey(&self) -> Result<Survey, ConsensusError> {
        let (files, name) = (self.files.clone(), self.name.clone());
        let read = spawn_blocking(move || {
            let facts = read_disk(&files, &files::pki_dirs(&files)?.start, &name)?;
            let opens_ca_key = files::opens_ca_key(&files, &name)?;
            let credentials = load_credentials(&files)?;
            let required_name = files::load_required_name(&files, &credentials.ca)?;
            let client = PeerClient::new(&credentials, required_name)
                .map_err(ConsensusError::backend("use the member's credentials"))?;
            let is_named = has_peer_name(&credentials.certificate, &peer_name(&credentials.ca));
            Ok::<_, ConsensusError>((facts, client, opens_ca_key, is_named))
        });
        let read = read.await.map_err(ConsensusError::backend("read the member's data"))?;
        let (DiskFacts { start, members }, client, opens_ca_key, is_named) = read?;
        // A running etcd has written more than can be read next to it.
        let this = PeerUrl::new(self.address, self.config.peer_port);
        let members = client.list_entries(self.name.as_str(), &this).await.unwrap_or(members);
        let (own, others): (Vec<_>, Vec<_>) =
            members.into_iter().partition(|member| member.is_named(self.name.as_str()));
        let is_learner = own.iter().any(ListedMember::is_learner);
        let (seen, errors) = ask_once(&client, self.name.as_str(), &others).await;
        let rejected_by = load_rejection(&self.files).await?;
        Ok(Survey { own: start, is_learner, opens_ca_key, is_named, others, seen, errors, rejected_by })
    }

    async fn checked_survey(&self) -> Result<Survey, RecoveryError> {
        let survey = self.survey().await.map_err(RecoveryError::Failed)?;
        survey.check(&self.name).map(|()| survey)
    }
}

impl Survey {
    /// Refuses a recovery of what is not lost.
    fn check(&self, name: &MemberName) -> Result<(), RecoveryError> {
        if self.is_learner {
            return Err(RecoveryError::Learner);
        }
        let voters = self.others.iter().filter(|member| !member.is_learner());
        let voters: Vec<_> = voters.filter_map(|member| member.name().map(str::to_owned)).collect();
        if voters.is_empty() {
            return Err(RecoveryError::OnlyVoter);
        }
        let denial = self.errors.iter().find(|(_, error)| error.is_denial).map(|(name, _)| name);
        if let Some(witness) = denial.or(self.rejected_by.as_ref()) {
            let witness = witness.clone();
            return Err(match self.is_named {
                true => RecoveryError::Removed { witness },
                false => RecoveryError::Unnamed { witness },
            });
        }
        match decide_start(self.own, &voters, &self.seen) {
            // The others are removed with their certificates, for which it has to sign.
            StartDecision::Wait if !self.opens_ca_key => Err(RecoveryError::Sealed),
            StartDecision::Wait => Ok(()),
            StartDecision::Start => {
                let answering = self.seen.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
                Err(RecoveryError::MajorityAnswers { answering })
            }
            StartDecision::OlderDisk { witness, seen } => {
                let (name, own, seen) = (name.clone(), self.own.0, seen.0);
                Err(RecoveryError::Failed(ConsensusError::OlderDisk { name, own, seen, witness }))
            }
        }
    }

    fn member_ids(&self) -> BTreeSet<u64> {
        self.others.iter().map(ListedMember::id).collect()
    }

    fn plan(&self) -> RecoveryPlan {
        let lost = self.others.iter().map(|member| {
            let name = member.name().map(str::to_owned);
            let is_answering = name.as_ref().is_some_and(|name| self.seen.contains_key(name));
            LostMember::new(name, member.peer_urls.first().cloned(), is_answering)
        });
        RecoveryPlan::new(lost.collect())
    }
}

#[async_trait]
impl MemberRecovery for EtcdRecovery {
    async fn plan(&self) -> Result<RecoveryPlan, RecoveryError> {
        Ok(self.checked_survey().await?.plan())
    }

    async fn request(&self) -> Result<RecoveryPlan, RecoveryError> {
        let plan = self.plan().await?;
        let files = self.files.clone();
        let failed = "record the request of a recovery";
        let written = spawn_blocking(move || {
            let record = files::pki_dirs(&files)?.recovery;
            record.write(REQUESTED).map_err(ConsensusError::backend(failed))
        });
        let written = written.await.map_err(ConsensusError::backend(failed)).and_then(|written| written);
        written.map_err(RecoveryError::Failed)?;
        self.requests.send_replace(());
        Ok(plan)
    }

    async fn state(&self) -> Result<RecoveryState, RecoveryError> {
        self.load_state().await.map_err(RecoveryError::Failed)
    }

    async fn complete(&self) -> Result<(), RecoveryError> {
        self.remove_record().await.map_err(RecoveryError::Failed)
    }
}

/// Completes an exchange of the logs that was interrupted.
pub(super) fn exchange_logs(files: &EtcdDir) -> Result<(), ConsensusError> {
    if load_state(files)? != RecoveryState::Alone {
        return Ok(());
    }
    let data = files.data.open().map_err(ConsensusError::backend("open etcd's data"))?;
    let _lock = lock(&data)?;
    replace_log(&data)
}

/// Keeps the other runs of this member out: the thread of one that was canceled goes on until it has ended.
fn lock(data: &Dir) -> Result<DirLock, ConsensusError> {
    let failed = "lock etcd's data to recover the cluster";
    let locked = data.try_lock().map_err(ConsensusError::backend(failed))?;
    locked.ok_or_else(|| ConsensusError::backend(failed)("a run before has not ended yet".to_owned()))
}

/// Puts the new log in the place of the other, under the lock.
fn replace_log(data: &Dir) -> Result<(), ConsensusError> {
    let failed = "put etcd's log for a cluster of one in its place";
    if !data.exists(RECOVERED_LOG).map_err(ConsensusError::backend(failed))? {
        return Ok(());
    }
    // All that it has is in the new one.
    data.remove_tree(LOG).map_err(ConsensusError::backend(failed))?;
    let renamed = data.rename(RECOVERED_LOG, data, LOG, RenameMode::NoReplace);
    renamed.map_err(ConsensusError::backend(failed))
}

fn load_state(files: &EtcdDir) -> Result<RecoveryState, ConsensusError> {
    let failed = "read the record of a recovery";
    let content = files::pki_dirs(files)?.recovery.read_if_present();
    match content.map_err(ConsensusError::backend(failed))?.as_deref() {
        None => Ok(RecoveryState::None),
        Some(REQUESTED) => Ok(RecoveryState::Requested),
        Some(ALONE) => Ok(RecoveryState::Alone),
        Some(_) => Err(ConsensusError::backend(failed)("its content is unknown".to_owned())),
    }
}

/// The credentials with which this member asks the others.
fn load_credentials(files: &EtcdDir) -> Result<Credentials, ConsensusError> {
    let own = files.peer_pki.load_credentials().map_err(ConsensusError::Credentials)?;
    own.ok_or_else(|| ConsensusError::NoMember { data: files.data.path().to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, is_learner: bool) -> ListedMember {
        let json = format!(
            r#"{{"id":{},"name":"{name}","peerURLs":["https://{name}:2380"],"isLearner":{is_learner}}}"#,
            name.len()
        );
        serde_json::from_str(&json).unwrap()
    }

    fn survey(others: &[&str], seen: &[(&str, u64)], denied: &[&str]) -> Survey {
        let seen = seen.iter().map(|(name, start)| ((*name).to_owned(), StartNumber(*start)));
        let denial = |name: &&str| {
            let host = (*name).to_owned();
            (host.clone(), NoAnswer { host, rejection: None, is_denial: true, is_unnamed: false })
        };
        Survey {
            own: StartNumber(4),
            is_learner: false,
            opens_ca_key: true,
            is_named: true,
            others: others.iter().map(|name| member(name, false)).collect(),
            seen: seen.collect(),
            errors: denied.iter().map(denial).collect(),
            rejected_by: None,
        }
    }

    fn refusal(survey: &Survey) -> Option<RecoveryError> {
        survey.check(&"one".parse().unwrap()).err()
    }

    #[test]
    fn a_cluster_is_recovered_only_where_no_majority_answers() {
        let others = ["two", "three", "four", "five"];
        assert!(refusal(&survey(&others, &[], &[])).is_none());
        assert!(refusal(&survey(&others, &[("two", 4)], &[])).is_none(), "two of five");
        let answers = [("two", 4), ("three", 0)];
        let refused = refusal(&survey(&others, &answers, &[])).unwrap();
        assert!(refused.to_string().contains("(three, two)"), "{refused}");
        assert!(matches!(
            refusal(&survey(&["two"], &[("two", 4)], &[])),
            Some(RecoveryError::MajorityAnswers { .. })
        ));
        assert!(matches!(refusal(&survey(&[], &[], &[])), Some(RecoveryError::OnlyVoter)));
    }

    #[test]
    fn an_older_copy_a_removed_member_a_learner_and_one_that_can_not_sign_recover_nothing() {
        let others = ["two", "three", "four", "five"];
        let refused = refusal(&survey(&others, &[("two", 5)], &[])).unwrap();
        assert!(
            matches!(&refused, RecoveryError::Failed(ConsensusError::OlderDisk { seen: 5, .. })),
            "{refused:?}"
        );
        let refused = refusal(&survey(&others, &[], &["five"])).unwrap();
        assert!(refused.to_string().contains(crate::consensus::REMOVED_NODE), "{refused}");
        let unnamed = Survey { is_named: false, ..survey(&others, &[], &["five"]) };
        assert!(matches!(refusal(&unnamed), Some(RecoveryError::Unnamed { witness }) if witness == "five"));
        let learner = Survey { is_learner: true, ..survey(&others, &[], &[]) };
        assert!(matches!(refusal(&learner), Some(RecoveryError::Learner)));
        let closed = Survey { opens_ca_key: false, ..survey(&others, &[], &[]) };
        assert!(matches!(refusal(&closed), Some(RecoveryError::Sealed)));
    }
}
