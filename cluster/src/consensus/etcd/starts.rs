//! The fence: a voter whose disk is an older copy does not start.
//!
//! A voter's vote stands for everything that it has acknowledged. A copy of its disk that is put back has forgotten
//! what it acknowledged since: with it, the cluster may elect a leader that lacks writes which a majority had. Raft
//! does not notice this, and neither does etcd. So a voter counts its starts:
//!
//! - on its disk, next to etcd's data, and in a file outside of the data volume, both before etcd starts;
//! - in its URL for clients, `unix://etcd:0?start=N`. etcd publishes that URL at each start in the list of members,
//!   so that each member keeps the last number that it has seen, and answers it from its own data at its peer port,
//!   also without a majority.
//!
//! Before it starts, a voter asks the others which of its starts they have seen. A higher number than its own proves
//! that its disk is older, and nothing is started. It starts once so many have answered that they are a majority with
//! it: fewer can't elect a leader with its vote, so that this wait costs nothing. Voters that all start at once answer
//! each other before they start: see [`witness`](super::witness).
//!
//! One that has revoked this voter's certificate answers nothing. It speaks for the whole cluster, which may be recovered from
//! it alone: the others that were lost would be a majority of the former one. So a single one of them suffices, and each that
//! can be reached is asked before the start; what it said once holds until it answers again.
//!
//! What this can't see: a start that every voter of the new majority has slept through; a copy of a running voter that
//! is put back before the voter starts again; and the copy of a lone voter together with the file outside. A copy is
//! therefore never put back: its node joins again, with another id.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use nodekeel_localstorage::tree::{EtcdDir, LayoutFile};
use nodekeel_localstorage::{Dir, Error, FileMode};
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

use super::backend::{DB_PATH, stored_members};
use super::files::{self, PreparedFiles};
use super::join_check::{explain_rejection, is_rejection};
use super::local_member::LocalMember;
use super::peer_client::{ListedMember, PeerClient, is_denial, is_unnamed};
use super::peer_server::PeerServer;
use super::retry_pause::RetryPause;
use super::start_number::StartNumber;
use super::witness::Witness;
use crate::consensus::{
    ConsensusError, MemberName, PeerUrl, REMOVED_NODE, StatusReporter, UNNAMED_CERTIFICATE, VoterReach,
};

/// The longest start record that is read: a name and a number.
const MAX_RECORD: u64 = 256;

/// The decision of a voter about its start.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum StartDecision {
    Start,
    /// Too few have answered.
    Wait,
    /// This voter has seen a later start.
    OlderDisk {
        witness: String,
        seen: StartNumber,
    },
}

/// Decides whether a voter with this last start may start. `others` are the other voters of its own list, and `seen` has
/// the last start of it that those who answered have seen.
pub(super) fn decide_start(
    own: StartNumber,
    others: &[String],
    seen: &BTreeMap<String, StartNumber>,
) -> StartDecision {
    // Any answer counts as evidence, also that of a learner, or of a voter that this one does not know yet.
    if let Some((witness, seen)) = seen.iter().find(|(_, seen)| **seen > own) {
        return StartDecision::OlderDisk { witness: witness.clone(), seen: *seen };
    }
    let answered = others.iter().filter(|other| seen.contains_key(*other)).count();
    // With this one they are a majority of `others.len() + 1`.
    let needed = others.len().div_ceil(2);
    if answered >= needed { StartDecision::Start } else { StartDecision::Wait }
}

/// The file outside of the data volume: the member's name, a space, the number, and a line feed.
struct OutsideRecord<'a> {
    path: &'a Path,
    name: &'a MemberName,
}

impl OutsideRecord<'_> {
    fn dir(&self) -> Result<Dir, Error> {
        Dir::open(self.path.parent().unwrap_or(Path::new("/")))
    }

    fn file_name(&self) -> &Path {
        Path::new(self.path.file_name().unwrap_or_default())
    }

    fn load(&self) -> Result<StartNumber, Error> {
        match self.dir()?.read_at_most(self.file_name(), MAX_RECORD) {
            Ok(content) => Ok(self.parse(&content).unwrap_or_default()),
            Err(error) if error.is_not_found() => Ok(StartNumber::default()),
            Err(error) => Err(error),
        }
    }

    /// A member that joins again has another name: the count of the former one is not its own.
    fn parse(&self, content: &[u8]) -> Option<StartNumber> {
        let (name, number) = std::str::from_utf8(content).ok()?.trim_end().split_once(' ')?;
        (name == self.name.as_str()).then_some(StartNumber(number.parse().ok()?))
    }

    fn store(&self, start: StartNumber) -> Result<(), Error> {
        let content = format!("{} {}\n", self.name, start.0);
        self.dir()?.write(self.file_name(), content.as_bytes(), FileMode::new(0o400))
    }
}

/// The members that etcd's data lists, and the last start of this one that the disk proves.
#[derive(Debug)]
pub(super) struct DiskFacts {
    pub(super) start: StartNumber,
    pub(super) members: Vec<ListedMember>,
}

pub(super) fn read_disk(
    files: &EtcdDir,
    record: &LayoutFile,
    name: &MemberName,
) -> Result<DiskFacts, ConsensusError> {
    let failed = "read the number of the member's starts";
    let content = record.read_if_present().map_err(ConsensusError::backend(failed))?;
    let recorded = content.and_then(|content| std::str::from_utf8(&content).ok()?.trim_end().parse().ok());
    let failed = "read the members in etcd's data";
    let members = match files.data.open().and_then(|data| data.open_file(DB_PATH)) {
        Ok(file) => list_members(&file).map_err(ConsensusError::backend(failed))?,
        Err(error) if error.is_not_found() => Vec::new(),
        Err(error) => return Err(ConsensusError::backend(failed)(error)),
    };
    let listed = members.iter().find(|member| member.is_named(name.as_str())).map(ListedMember::start);
    let start = StartNumber(recorded.unwrap_or_default()).max(listed.unwrap_or_default());
    Ok(DiskFacts { start, members })
}

fn list_members(file: &File) -> io::Result<Vec<ListedMember>> {
    Ok(stored_members(file)?.iter().filter_map(|member| serde_json::from_slice(member).ok()).collect())
}

/// The start of a member.
pub(super) struct MemberStart<'a> {
    pub(super) member: LocalMember<'a>,
    pub(super) prepared: &'a PreparedFiles,
    /// The cluster is recovered from it: its database may still list the others.
    pub(super) is_alone: bool,
}

impl MemberStart<'_> {
    /// Waits until the member may start, and counts the start.
    ///
    /// # Errors
    /// [`ConsensusError::OlderData`] and [`ConsensusError::OlderDisk`].
    pub(super) async fn wait_confirmed(
        &self,
        reporter: &StatusReporter<'_>,
    ) -> Result<StartNumber, ConsensusError> {
        let (facts, outside) = self.read_records().await?;
        let name = self.member.name;
        // A member without a log has acknowledged nothing; whether it may join is another question.
        if self.prepared.has_log {
            if outside > facts.start {
                return Err(ConsensusError::OlderData {
                    name: name.clone(),
                    own: facts.start.0,
                    seen: outside.0,
                    record: self.member.config.start_record.clone().unwrap_or_default(),
                });
            }
            if !self.is_alone && !self.is_forced_alone() {
                self.ask_others(&facts, reporter).await?;
            }
        }
        let next = StartNumber(facts.start.max(outside).0.saturating_add(1));
        self.count_start(next).await?;
        Ok(next)
    }

    /// An operator makes a cluster of one of it, since the others are lost.
    fn is_forced_alone(&self) -> bool {
        let is_force = |arg: &String| arg.trim_start_matches('-').starts_with("force-new-cluster");
        self.member.config.extra_args.iter().any(is_force)
    }

    async fn read_records(&self) -> Result<(DiskFacts, StartNumber), ConsensusError> {
        let (files, name) = (self.member.files.clone(), self.member.name.clone());
        let outside = self.member.config.start_record.clone();
        let read = spawn_blocking(move || {
            let facts = read_disk(&files, &files::pki_dirs(&files)?.start, &name)?;
            let record = outside.map(|path| OutsideRecord { path: &path, name: &name }.load()).transpose();
            let record = record.map_err(ConsensusError::backend("read the number of starts in esp/"))?;
            Ok((facts, record.unwrap_or_default()))
        });
        read.await.map_err(ConsensusError::backend("read the number of the member's starts"))?
    }

    /// Before etcd starts: a start that is not counted is one that a copy of the disk could repeat.
    async fn count_start(&self, start: StartNumber) -> Result<(), ConsensusError> {
        let (files, name) = (self.member.files.clone(), self.member.name.clone());
        let outside = self.member.config.start_record.clone();
        let failed = "count the member's start";
        let written = spawn_blocking(move || {
            let record = files::pki_dirs(&files)?.start;
            // First: the number outside is never above that on the disk.
            let written = record.write(format!("{}\n", start.0).as_bytes());
            written.map_err(ConsensusError::backend(failed))?;
            let outside = outside.map(|path| OutsideRecord { path: &path, name: &name }.store(start));
            outside.transpose().map(drop).map_err(ConsensusError::backend(failed))
        });
        written.await.map_err(ConsensusError::backend(failed))?
    }

    /// Asks the other voters, and answers those that ask, until the member may start.
    async fn ask_others(
        &self,
        facts: &DiskFacts,
        reporter: &StatusReporter<'_>,
    ) -> Result<(), ConsensusError> {
        let name = self.member.name.as_str();
        let others: Vec<_> = facts.members.iter().filter(|member| !member.is_named(name)).collect();
        let is_voter = |member: &&&ListedMember| !member.is_learner();
        let voters: Vec<_> = others.iter().filter(is_voter).filter_map(|member| member.name()).collect();
        let voters: Vec<String> = voters.into_iter().map(str::to_owned).collect();
        // One without a name has not started: it has seen nothing, and is not asked.
        let asked: Vec<_> = others.iter().filter_map(|member| member.name().zip(member.peer_url())).collect();
        let (mut seen, mut is_waiting) = (BTreeMap::new(), false);
        // The only voter asks nobody.
        if decide_start(facts.start, &voters, &seen) == StartDecision::Start {
            return Ok(());
        }
        let client = self.prepared.peer_client()?;
        let (sender, mut answers) = mpsc::unbounded_channel();
        let (required_name, is_named) = (self.prepared.required_name.clone(), self.prepared.has_peer_name());
        let server = PeerServer::new(self.member, &self.prepared.credentials, required_name)?;
        let witness = Witness::new(&facts.members)?;
        let asking = ask_all(&client, name, &others, &sender);
        let answering = server.serve(|question| witness.answer(question, &sender));
        let mut rejected_by = load_rejection(self.member.files).await?;
        rejected_by.take_if(|name| !asked.iter().any(|(asked, _)| name == asked));
        let deciding = async {
            let mut errors: BTreeMap<String, NoAnswer> = BTreeMap::new();
            loop {
                match answers.recv().await {
                    Some((voter, Ok(start))) => {
                        errors.remove(&voter);
                        if rejected_by.take_if(|name| *name == voter).is_some() {
                            store_rejection(self.member.files, None).await?;
                        }
                        seen.insert(voter, start);
                    }
                    Some((voter, Err(error))) => {
                        let is_denied = errors.get(&voter).is_some_and(|before| before.is_denial);
                        // Once may be the stop of that member. It counts on when that member is off, and when this one starts again.
                        if is_denied && error.is_denial && rejected_by.is_none() {
                            store_rejection(self.member.files, Some(voter.clone())).await?;
                            rejected_by = Some(voter.clone());
                        }
                        if !is_denied || error.is_denial {
                            errors.insert(voter, error);
                        }
                    }
                    // The senders live longer.
                    None => return std::future::pending().await,
                }
                // A cluster that was recovered from one member is a minority of the former one: only that member can say so.
                let is_known = |name: &str| seen.contains_key(name) || errors.contains_key(name);
                let are_asked = asked.iter().all(|(name, _)| is_known(name));
                let denial = errors.iter().find(|(_, error)| error.is_denial).map(|(name, _)| name);
                let denial = rejected_by.as_ref().or(denial);
                match decide_start(facts.start, &voters, &seen) {
                    StartDecision::Start if are_asked && denial.is_none() => return Ok(()),
                    StartDecision::OlderDisk { witness, seen } => {
                        let name = self.member.name.clone();
                        return Err(ConsensusError::OlderDisk {
                            name,
                            own: facts.start.0,
                            seen: seen.0,
                            witness,
                        });
                    }
                    // All have been asked, so that this is not the first moment of a start.
                    StartDecision::Start | StartDecision::Wait if is_waiting || are_asked => {
                        is_waiting = true;
                        reporter.report_waiting(&match denial {
                            Some(denial) if is_named => denial_reason(denial),
                            Some(denial) => {
                                let url =
                                    asked.iter().find(|(name, _)| name == denial).map(|(_, url)| url.host());
                                unnamed_reason(url.unwrap_or(denial))
                            }
                            None => waiting_reason(voters.len() + 1, &errors, is_named),
                        });
                    }
                    StartDecision::Start | StartDecision::Wait => {}
                }
            }
        };
        let decided = tokio::select! {
            biased;
            decided = deciding => decided,
            () = asking => return std::future::pending().await,
            () = answering => return std::future::pending().await,
        };
        if is_waiting && decided.is_ok() {
            reporter.report_starting_again();
        }
        decided
    }
}

/// The member that has rejected this one's certificate, and has not answered it since.
pub(super) async fn load_rejection(files: &EtcdDir) -> Result<Option<String>, ConsensusError> {
    let (files, failed) = (files.clone(), "read which member rejects this one");
    let read = spawn_blocking(move || {
        let content = files::pki_dirs(&files)?.rejected_by.read_if_present();
        let content = content.map_err(ConsensusError::backend(failed))?;
        Ok(content.and_then(|content| Some(std::str::from_utf8(&content).ok()?.trim_end().to_owned())))
    });
    read.await.map_err(ConsensusError::backend(failed))?
}

async fn store_rejection(files: &EtcdDir, by: Option<String>) -> Result<(), ConsensusError> {
    let (files, failed) = (files.clone(), "record which member rejects this one");
    let stored = spawn_blocking(move || {
        let record = files::pki_dirs(&files)?.rejected_by;
        let stored = match by {
            Some(name) => record.write(format!("{name}\n").as_bytes()),
            None => record.remove().map(drop),
        };
        stored.map_err(ConsensusError::backend(failed))
    });
    stored.await.map_err(ConsensusError::backend(failed))?
}

/// The last start of the asking voter that a voter of this name has seen.
pub(super) type Answer = (String, Result<StartNumber, NoAnswer>);

/// A voter that has not answered.
pub(super) struct NoAnswer {
    pub(super) host: String,
    /// What it has against this node, if it is not just down.
    pub(super) rejection: Option<String>,
    /// True if it is this cluster's member, and has answered nothing: it has revoked this node's certificate, or was stopped.
    pub(super) is_denial: bool,
    /// True if its certificate has no name of a member.
    pub(super) is_unnamed: bool,
}

impl NoAnswer {
    fn new(url: &PeerUrl, error: io::Error) -> NoAnswer {
        let (host, is_denial, is_unnamed) = (url.host().to_owned(), is_denial(&error), is_unnamed(&error));
        let rejection = is_rejection(&error).then(|| explain_rejection(error).to_string());
        NoAnswer { host, rejection, is_denial, is_unnamed }
    }
}

/// Asks a member which start of this one it has seen, and tells it the same.
async fn ask_one(
    client: &PeerClient,
    this: &str,
    name: &str,
    url: &PeerUrl,
    seen: StartNumber,
) -> Result<StartNumber, NoAnswer> {
    let listed = client.list_entries_telling(name, url, seen).await;
    let listed = listed.map_err(|error| NoAnswer::new(url, error))?;
    let own = listed.iter().find(|member| member.is_named(this)).map(ListedMember::start);
    Ok(own.unwrap_or_default())
}

/// Asks each of the others once.
pub(super) async fn ask_once(
    client: &PeerClient,
    this: &str,
    others: &[ListedMember],
) -> (BTreeMap<String, StartNumber>, BTreeMap<String, NoAnswer>) {
    let asked = others.iter().filter_map(|other| {
        let (name, url) = other.name().zip(other.peer_url())?;
        Some(async move { (name, ask_one(client, this, name, &url, other.start()).await) })
    });
    let (mut seen, mut errors) = (BTreeMap::new(), BTreeMap::new());
    let mut asking: FuturesUnordered<_> = asked.collect();
    while let Some((name, answer)) = asking.next().await {
        match answer {
            Ok(start) => _ = seen.insert(name.to_owned(), start),
            Err(error) => _ = errors.insert(name.to_owned(), error),
        }
    }
    (seen, errors)
}

/// Asks each of the others until it answers.
async fn ask_all(
    client: &PeerClient,
    this: &str,
    others: &[&ListedMember],
    answers: &mpsc::UnboundedSender<Answer>,
) {
    let ask = |other: &&ListedMember| {
        let (name, url) = (other.name().map(str::to_owned), other.peer_url());
        let seen = other.start();
        async move {
            // One without a name has not started: it has seen nothing.
            let (Some(name), Some(url)) = (name, url) else { return };
            let mut pause = RetryPause::default();
            loop {
                let start = ask_one(client, this, &name, &url, seen).await;
                let is_answer = start.is_ok();
                // The receiver ends with the decision, and then this future, too.
                let _ = answers.send((name.clone(), start));
                if is_answer {
                    return;
                }
                // Nothing notifies of a voter that starts.
                pause.wait().await;
            }
        }
    };
    let mut asked: FuturesUnordered<_> = others.iter().map(ask).collect();
    while asked.next().await.is_some() {}
    std::future::pending().await
}

/// A member that has revoked this one's certificate speaks for its cluster, also where that is recovered from it alone.
fn denial_reason(denial: &str) -> String {
    format!(
        "member {denial} of its cluster rejects its certificate; {REMOVED_NODE}; if it was not, restart member {denial}"
    )
}

/// A member without a name is rejected by one that requires it, also if it was not removed.
fn unnamed_reason(by: &str) -> String {
    format!("waits for {by}, which rejects its certificate: {UNNAMED_CERTIFICATE}")
}

fn waiting_reason(voters: usize, errors: &BTreeMap<String, NoAnswer>, is_named: bool) -> String {
    let mut silent: Vec<_> = errors.values().map(|voter| voter.host.clone()).collect();
    silent.sort();
    let reach = VoterReach::new(voters, silent);
    let rejected = errors.values().filter_map(|voter| Some((&voter.host, voter.rejection.as_ref()?)));
    let rejected: Vec<_> = rejected.map(|(host, reason)| format!("; {host}: {reason}")).collect();
    // One that lacks its list of revoked certificates rejects everyone; so many do not.
    let is_removed = rejected.len() > (voters - 1) / 2;
    let rejected = rejected.concat();
    if is_removed && !is_named {
        return unnamed_reason(&format!("a majority{rejected}"));
    }
    if is_removed {
        return format!("waits for a majority, which rejects its certificate{rejected}; {REMOVED_NODE}");
    }
    let unnamed = errors.values().filter(|voter| voter.is_unnamed).map(|voter| voter.host.as_str());
    let unnamed = unnamed.collect::<Vec<_>>().join(", ");
    if !unnamed.is_empty() {
        return format!(
            "waits for a majority: {reach}{rejected}; an earlier release issued the certificate of {unnamed}, without the name of a \
             member: if it was not removed, delete `data/cluster/etcd/peer_name` in the data directory here, and restart this node"
        );
    }
    format!(
        "waits for a majority: {reach}{rejected}; start them; if this node was removed from its cluster, or the others \
         were: `nodectl reset`, and another ticket"
    )
}

#[cfg(test)]
#[path = "starts_test.rs"]
mod tests;
