//! Watches whether the member makes progress, and who keeps it from that.
//!
//! etcd answers for its status from memory: while it commits nothing, with a disk that stands still, it still has a leader
//! and no error. So a member is well if its log grows. Where it does not, since nobody writes, the member proposes an
//! entry itself, which a majority has to write to its disks and this member has to apply. Its voters are asked for their
//! own reports in each check, so that one that does not answer is known while the others still are a majority.
//!
//! Nothing in etcd notifies a client in time: it ends watches that require a leader three to four seconds after
//! the leader is known to be lost, which itself takes two, and an alarm ends and starts nothing. Its exit is notified by
//! the supervisor.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use etcd_client as api;
use futures_util::future::join_all;
use nodekeel_supervisor::process::{Liveness, Readiness};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::client::{self, WithoutLeader};
use super::compare::{Comparison, LastComparison};
use super::convert::STATUS_TIMEOUT;
use super::etcd_child::ExitWatch;
use super::fault::EtcdFault;
use super::files::PreparedFiles;
use super::local_member::LocalMember;
use super::members::list_entry;
use super::peer_client::{PeerClient, PeerConnection};
use super::start_number::StartNumber;
use super::transfer::ReceivedData;
use crate::consensus::{
    ClusterReport, ConsensusError, DataTransfer, Member, MemberCondition, MemberFacts, MemberId,
    MemberReport, OpenPeerPort, Peer, PeerUrl, StatusReporter, StoreAlarm, StoreFacts, VoterReach,
};

/// The time in which a member that makes progress commits an entry.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(2);
/// The size at which etcd rejects writes by default.
///
/// *Source:* `DefaultQuotaBytes` in etcd's `quota.go`.
const DEFAULT_QUOTA: u64 = 2 << 30;
/// The key whose deletion is the entry. It never exists, so that neither a revision nor a watcher sees it.
const CANARY: &str = "/etcd-canary";
/// The age at which a fault of connections counts no more: etcd logs it again with each attempt.
const FAULT_AGE: Duration = Duration::from_secs(10);

/// The pause between two liveness probes of the process.
const LIVENESS_PERIOD: Duration = Duration::from_secs(2);
/// The failed probes in a row, half a minute, after which it is restarted.
const MAX_SILENT_PROBES: u32 = 10;

/// The findings of one check.
#[derive(Clone, Debug, Default)]
struct HealthCheck {
    /// The member's own status; `None` if it does not answer.
    status: Option<EtcdStatus>,
    /// The voters, and whether each answers; empty if they are unknown.
    voters: Vec<(Member, bool)>,
    /// True if it proposed an entry, and it was not committed.
    is_stuck: bool,
    /// True if a thread of the process waits in the kernel, and has for some time.
    waits_in_kernel: bool,
    /// The last exit of a process that is not ready again yet.
    exit: Option<Arc<str>>,
    /// The reason for which it reaches nobody.
    fault: Option<EtcdFault>,
    /// True if its data differs from that of others, and no majority tells who is wrong.
    is_undecided: bool,
    /// What a member that has not answered yet has received.
    transfer: Option<DataTransfer>,
}

#[derive(Clone, Debug, Default)]
struct EtcdStatus {
    has_leader: bool,
    is_learner: bool,
    /// The member that has raised it, and its kind.
    alarms: Vec<(MemberId, String)>,
    version: String,
    store: StoreFacts,
}

impl EtcdStatus {
    fn from_response(status: &api::StatusResponse, quota: u64) -> EtcdStatus {
        let bytes = |size: i64| u64::try_from(size).unwrap_or(0);
        EtcdStatus {
            has_leader: status.leader() != 0,
            is_learner: status.is_learner(),
            alarms: status.errors().iter().filter_map(|text| parse_alarm(text)).collect(),
            version: status.version().to_owned(),
            store: StoreFacts {
                applied_index: status.raft_applied_index(),
                store_bytes: bytes(status.db_size()),
                used_bytes: bytes(status.raft_used_db_size()),
                // 3.4 and 3.5 do not report it, and all members of a cluster should have the same.
                quota_bytes: Some(bytes(status.db_size_quota())).filter(|size| *size > 0).or(Some(quota)),
            },
        }
    }

    fn into_facts(self) -> MemberFacts {
        MemberFacts { version: self.version, store: Some(self.store) }
    }
}

/// Decides when the member has to propose an entry: when its log has not grown since the check before. A check is made
/// twice in each period, so that the last growth is at most a period ago.
#[derive(Debug, Default)]
struct Progress {
    applied_index: Option<u64>,
    /// True if it has proposed an entry since, and that was not committed.
    is_stuck: bool,
}

impl Progress {
    /// Returns whether the member has to propose an entry, now that it has applied this one.
    fn is_due(&mut self, applied_index: u64) -> bool {
        self.applied_index.replace(applied_index) == Some(applied_index)
    }
}

/// What is remembered of the other members from one question to the next.
#[derive(Default)]
struct KnownMembers {
    /// Connections to those that answered last time.
    connections: BTreeMap<MemberId, PeerConnection>,
    silent: BTreeMap<MemberId, SystemTime>,
}

/// Watches one run of a member.
pub(super) struct HealthWatch {
    pub(super) peers: PeerClient,
    pub(super) client: api::Client,
    /// This member, as the others reach it.
    this: Peer,
    /// The members that a ticket lists, until the member has its own list.
    known_peers: Vec<Peer>,
    data: PathBuf,
    /// The pause between two checks.
    pause: Duration,
    /// The quota of this member, in bytes.
    quota: u64,
    /// What there was before this run.
    left_over: ReceivedData,
    /// The most that this run has received, in bytes.
    received: Arc<AtomicU64>,
    /// The size of the cluster's data when it admitted this member.
    total: Option<u64>,
    report: watch::Sender<ClusterReport>,
    /// Why the peer port admits each certificate of the CA, if it does.
    pub(super) open_peer_port: watch::Sender<Option<OpenPeerPort>>,
    /// The result of the last comparison.
    pub(super) comparison: watch::Sender<Comparison>,
    pub(super) last_comparison: watch::Sender<LastComparison>,
}

impl HealthWatch {
    pub(super) async fn new(
        member: LocalMember<'_>,
        prepared: &PreparedFiles,
        known_peers: Vec<Peer>,
        total: Option<u64>,
    ) -> Result<HealthWatch, ConsensusError> {
        let peers = prepared.peer_client()?;
        let client = client::connect(&prepared.client_dir, WithoutLeader::IsAnswered).await?;
        let (data, pause) = (member.files.data.path().to_owned(), member.config.progress_period / 2);
        let (this, report) = (member.peer(), watch::Sender::default());
        let quota = quota_bytes(&member.config.extra_args);
        let left_over = ReceivedData::read(&data).await;
        Ok(HealthWatch {
            peers,
            client,
            this,
            known_peers,
            data,
            pause,
            quota,
            left_over,
            received: Arc::default(),
            total,
            report,
            open_peer_port: watch::Sender::default(),
            comparison: watch::Sender::default(),
            last_comparison: watch::Sender::new(LastComparison::at_start()),
        })
    }

    /// The newest report of the members.
    pub(super) fn watch_report(&self) -> watch::Receiver<ClusterReport> {
        self.report.subscribe()
    }

    /// Reports the condition of the member, and each change of it, until it is dropped.
    pub(super) async fn report_conditions(
        &self,
        reporter: &StatusReporter<'_>,
        exits: ExitWatch,
    ) -> Infallible {
        // A member that does not answer takes longer to ask than a commit may take.
        tokio::select! {
            never = self.report_members() => never,
            never = self.report_progress(reporter, exits) => never,
        }
    }

    async fn report_members(&self) -> Infallible {
        let mut known = KnownMembers::default();
        loop {
            let next = Instant::now() + self.pause;
            let report = self.ask_members(&mut known).await;
            // The facts change with each commit; those who wait need to know who answers.
            self.report.send_if_modified(|last| {
                let answers = |report: &ClusterReport| {
                    let silent = |report: &MemberReport| (report.member.id, report.silent_since);
                    report.members.iter().map(silent).collect::<Vec<_>>()
                };
                let is_other = answers(last) != answers(&report);
                *last = report;
                is_other
            });
            sleep_until(next).await;
        }
    }

    async fn report_progress(&self, reporter: &StatusReporter<'_>, mut exits: ExitWatch) -> Infallible {
        let (mut progress, mut report) = (Progress::default(), self.report.subscribe());
        let (mut next, mut received) = (Instant::now() + self.pause, ReceivedData::default());
        loop {
            let is_tick = tokio::select! {
                () = exits.changed() => {
                    if let Some(exit) = exits.last_exit() {
                        // At once: a check asks for some time.
                        reporter.report_condition(Some(&MemberCondition::Restarting { exit }));
                    }
                    false
                }
                _ = report.changed() => false,
                () = sleep_until(next) => true,
            };
            let has_served = reporter.is_serving();
            if is_tick {
                next = Instant::now() + self.pause;
            }
            let mut check = self.check(&mut progress, has_served && is_tick, &exits).await;
            if !has_served && check.status.is_none() {
                check.transfer = self.read_transfer(&mut received).await;
            }
            reporter.report_condition(assess(&check, has_served, &self.data).as_ref());
        }
    }

    /// The condition of a member that has just begun to serve: the alarms of its store.
    pub(super) async fn first_condition(&self) -> Option<MemberCondition> {
        let status = self.read_status().await;
        let voters = self.list_known_members().await.into_iter().map(|(member, _)| (member, true)).collect();
        let is_undecided = self.is_undecided();
        assess(&HealthCheck { status, voters, is_undecided, ..HealthCheck::default() }, true, &self.data)
    }

    /// The liveness of the process, by its own status: without a majority, or while its disk stands still, it is alive.
    pub(super) fn liveness(&self) -> Liveness {
        let client = self.client.clone();
        let probe = move || {
            let client = client.clone();
            async move { ask_status(&client).await.map(drop) }
        };
        let liveness = Liveness::probe(probe).with_period(LIVENESS_PERIOD).with_timeout(STATUS_TIMEOUT);
        liveness.with_failure_threshold(MAX_SILENT_PROBES)
    }

    /// The readiness of the process, which has joined its cluster then. The time does not count in which it receives data.
    pub(super) fn readiness(&self, within: Duration) -> Readiness {
        let (received, before) = (Arc::clone(&self.received), AtomicU64::new(0));
        Readiness::on_notify().with_timeout(within).with_progress(move || {
            let now = received.load(Ordering::Relaxed);
            now > before.swap(now, Ordering::Relaxed)
        })
    }

    /// What the member has received, at most; `None` before the first byte.
    async fn read_transfer(&self, most: &mut ReceivedData) -> Option<DataTransfer> {
        let joins = !self.known_peers.is_empty();
        *most = most.max(ReceivedData::read(&self.data).await.since(self.left_over, joins));
        let received = most.bytes();
        self.received.store(received, Ordering::Relaxed);
        if received == 0 {
            return None;
        }
        // How much of its log a leader sends is not known. Entries that came after the database may make it more.
        let total = self.total.filter(|total| most.is_database() && received <= *total);
        Some(DataTransfer { received, total })
    }

    fn is_undecided(&self) -> bool {
        *self.comparison.borrow() == Comparison::Undecided
    }

    async fn check(&self, progress: &mut Progress, may_propose: bool, exits: &ExitWatch) -> HealthCheck {
        let waited_before = exits.waits_in_kernel();
        let status = self.read_status().await;
        let (voters, is_stuck) = match &status {
            Some(status) if status.has_leader => {
                // A learner can't propose.
                if may_propose && !status.is_learner {
                    let is_due = progress.is_due(status.store.applied_index);
                    progress.is_stuck = is_due && !self.commits_entry().await;
                }
                let report = self.report.borrow();
                let voters = report.members.iter().filter(|report| !report.member.is_learner);
                let voters = voters.map(|report| (report.member.clone(), report.silent_since.is_none()));
                (voters.collect(), progress.is_stuck)
            }
            _ => (self.ask_voters(self.list_voters().await).await, false),
        };
        let exit = exits.last_exit();
        let fault = Instant::now().checked_sub(FAULT_AGE).and_then(|since| exits.connection_fault(since));
        // After an entry that was not committed, one look is enough. In an election, short waits for a disk are normal.
        let waits_in_kernel = exits.waits_in_kernel() && (is_stuck || waited_before);
        let is_undecided = self.is_undecided();
        HealthCheck { status, voters, is_stuck, waits_in_kernel, exit, fault, is_undecided, transfer: None }
    }

    async fn read_status(&self) -> Option<EtcdStatus> {
        let status = timeout(STATUS_TIMEOUT, ask_status(&self.client)).await.ok()?.ok()?;
        Some(EtcdStatus::from_response(&status, self.quota))
    }

    /// Returns whether an entry is committed in time. A rejection has been committed, too, or was decided without.
    async fn commits_entry(&self) -> bool {
        let mut keys = self.client.kv_client();
        let deleted = timeout(COMMIT_TIMEOUT, keys.delete(CANARY, None)).await;
        deleted.is_ok_and(|answer| match answer {
            Ok(_) => true,
            Err(api::Error::GRpcStatus(status)) => !matches!(
                status.code(),
                tonic::Code::Unavailable | tonic::Code::DeadlineExceeded | tonic::Code::Unknown
            ),
            Err(_) => false,
        })
    }

    /// Asks all members at the same time.
    async fn ask_members(&self, known: &mut KnownMembers) -> ClusterReport {
        let listed = self.list_known_members().await;
        let asked = join_all(listed.into_iter().map(|(member, start)| {
            // A connection on which there was no answer is made anew: it may be to a host that is gone.
            let mut connection = known.connections.remove(&member.id);
            async move {
                let facts = match self.is_this(&member) {
                    true => self.read_status().await.map(EtcdStatus::into_facts),
                    false => self
                        .read_version(&member, &mut connection)
                        .await
                        .map(|version| MemberFacts { version, store: None }),
                };
                // A member that has never started is not silent.
                let answers = self.is_this(&member) || facts.is_some() || member.name.is_none();
                if !answers {
                    self.tell_start(&member, start).await;
                }
                (member, facts, answers, connection)
            }
        }))
        .await;
        known.connections.clear();
        let mut silent = BTreeMap::new();
        let mut reports = Vec::new();
        for (member, facts, answers, connection) in asked {
            if let (Some(connection), Some(_)) = (connection, &facts) {
                known.connections.insert(member.id, connection);
            }
            reports.push(if answers {
                let differs = matches!(&*self.comparison.borrow(), Comparison::OthersDiffer(ids) if ids.contains(&member.id));
                MemberReport { differs, ..MemberReport::new(member, facts) }
            } else {
                let since = known.silent.get(&member.id).copied().unwrap_or_else(SystemTime::now);
                silent.insert(member.id, since);
                MemberReport::silent(member, since)
            });
        }
        known.silent = silent;
        let uncompared_since = self.last_comparison.borrow().uncompared_since();
        let open_peer_port = self.open_peer_port.borrow().clone();
        ClusterReport { uncompared_since, open_peer_port, ..ClusterReport::new(reports) }
    }

    /// The members that this one knows, with their starts. It may be behind.
    pub(super) async fn list_known_members(&self) -> Vec<(Member, StartNumber)> {
        let mut client = self.client.cluster_client();
        let Ok(Ok(listed)) = timeout(STATUS_TIMEOUT, client.member_list()).await else { return Vec::new() };
        let mut members: Vec<_> = listed
            .members()
            .iter()
            .map(|member| (list_entry(member), StartNumber::from_urls(member.client_urls())))
            .collect();
        members.sort_by_key(|(member, _)| member.id);
        members
    }

    /// The voters that this member knows, or its ticket, while it may not answer its own client.
    async fn list_voters(&self) -> Vec<Member> {
        // The peer port answers from the start on, also without a majority.
        let Ok(members) = self.peers.list_members(self.this.name.as_str(), &self.this.url).await else {
            // It does not answer there either. A joining member has its ticket's list; any other has none.
            return self.known_peers.iter().map(member_of_peer).collect();
        };
        members.into_iter().filter(|member| !member.is_learner).collect()
    }

    /// Asks all voters at the same time.
    async fn ask_voters(&self, voters: Vec<Member>) -> Vec<(Member, bool)> {
        let asked = voters.into_iter().map(async |voter| {
            // It has just listed the voters.
            let answers = self.is_this(&voter) || self.is_answering(&voter).await;
            (voter, answers)
        });
        join_all(asked).await
    }

    pub(super) fn is_this(&self, member: &Member) -> bool {
        member.name.as_deref() == Some(self.this.name.as_str())
    }

    /// The release of a member, over this connection or a new one; `None` if it does not answer.
    async fn read_version(&self, member: &Member, kept: &mut Option<PeerConnection>) -> Option<String> {
        if let Some(connection) = kept
            && let Ok(version) = connection.read_version().await
        {
            return Some(version);
        }
        let (name, url) = name_and_url(member)?;
        let mut connection = timeout(STATUS_TIMEOUT, self.peers.connect(&name, &url)).await.ok()?.ok()?;
        let version = connection.read_version().await.ok()?;
        *kept = Some(connection);
        Some(version)
    }

    /// Tells a voter its start that this member knows: it may wait for that, and know no present address of any other.
    async fn tell_start(&self, member: &Member, start: StartNumber) {
        if let Some((name, url)) = name_and_url(member) {
            // Its answer says nothing of its etcd.
            let _ = self.peers.list_entries_telling(&name, &url, start).await;
        }
    }

    /// Returns whether the member answers at its peer port.
    async fn is_answering(&self, member: &Member) -> bool {
        match name_and_url(member) {
            Some((name, url)) => self.peers.is_answering(&name, &url).await,
            None => false,
        }
    }
}

/// By what the others reach a member that has started.
pub(super) fn name_and_url(member: &Member) -> Option<(String, PeerUrl)> {
    Some((member.name.clone()?, member.peer_urls.first()?.parse().ok()?))
}

/// A member's status. It is asked again at once where the connection was lost, which says nothing of the member: a new one
/// is made.
async fn ask_status(client: &api::Client) -> Result<api::StatusResponse, api::Error> {
    let mut member = client.maintenance_client();
    match member.status().await {
        Err(_) => member.status().await,
        status => status,
    }
}

/// The quota that these arguments of etcd set.
fn quota_bytes(args: &[String]) -> u64 {
    let mut args = args.iter().map(|arg| arg.trim_start_matches('-'));
    let mut quota = None;
    while let Some(arg) = args.next() {
        let value = match arg.split_once('=') {
            Some(("quota-backend-bytes", value)) => Some(value),
            None if arg == "quota-backend-bytes" => args.next(),
            _ => None,
        };
        quota = value.and_then(|value| value.parse().ok()).or(quota);
    }
    quota.filter(|quota| *quota > 0).unwrap_or(DEFAULT_QUOTA)
}

fn member_of_peer(peer: &Peer) -> Member {
    Member::new(MemberId(0), Some(peer.name.to_string()), vec![peer.url.to_string()], false)
}

/// The condition that a check shows. A member that has not served yet may just be starting.
fn assess(check: &HealthCheck, has_served: bool, data: &Path) -> Option<MemberCondition> {
    let HealthCheck { status, voters, .. } = check;
    let silent = voters.iter().filter(|(_, answers)| !answers).map(|(voter, _)| voter_address(voter, voters));
    let mut silent: Vec<String> = silent.collect();
    // etcd lists them in any order.
    silent.sort();
    let reach = VoterReach::new(voters.len(), silent);
    let has_majority = voters.is_empty() || reach.is_majority();
    let stalled = || MemberCondition::DiskStalled { data: data.to_owned() };
    let leading = status.as_ref().filter(|status| status.has_leader);
    if let Some(status) = leading {
        // An alarm goes before the wait for a vote: it stops the writes of the whole cluster.
        if !status.alarms.is_empty() {
            let alarm = |(id, kind): &(MemberId, String)| StoreAlarm::new(name_member(*id, voters), kind);
            return Some(MemberCondition::Alarms(status.alarms.iter().map(alarm).collect()));
        }
        return match () {
            () if status.is_learner => Some(MemberCondition::Learner),
            // etcd itself takes two seconds to give up its leader.
            () if !has_majority => Some(MemberCondition::NoMajority(reach)),
            () if !check.is_stuck => check.is_undecided.then_some(MemberCondition::Undecided),
            () if check.waits_in_kernel => Some(stalled()),
            () => Some(MemberCondition::NoProgress),
        };
    }
    if let Some(transfer) = check.transfer {
        return Some(MemberCondition::Receiving(transfer));
    }
    if let Some(fault) = check.fault.as_ref().filter(|_| !voters.is_empty()) {
        return Some(MemberCondition::Unconnected { reason: fault.to_string() });
    }
    let silent = || match &check.exit {
        Some(exit) => MemberCondition::Restarting { exit: Arc::clone(exit) },
        None => MemberCondition::Silent,
    };
    match status {
        _ if has_served && has_majority && check.waits_in_kernel => Some(stalled()),
        // Nothing is known of the others. A member that has neither served nor answered may just be starting.
        _ if voters.is_empty() => (has_served || status.is_some()).then(silent),
        _ if !reach.is_majority() => Some(MemberCondition::NoMajority(reach)),
        Some(_) => Some(MemberCondition::NoLeader(reach)),
        // The others form a majority: it is this member that does not answer.
        None => has_served.then(silent),
    }
}

/// The address of the member, if it is among the voters; else its id.
fn name_member(id: MemberId, voters: &[(Member, bool)]) -> String {
    let voter = voters.iter().map(|(voter, _)| voter).find(|voter| voter.id == id);
    voter.map_or_else(|| format!("member {id}"), |voter| voter_address(voter, voters))
}

/// The host of a voter, with its port if another voter has the same host.
fn voter_address(voter: &Member, voters: &[(Member, bool)]) -> String {
    let url_of = |voter: &Member| voter.peer_urls.first().and_then(|url| url.parse::<PeerUrl>().ok());
    let Some(url) = url_of(voter) else { return format!("member {}", voter.id) };
    let is_same_host =
        |(other, _): &&(Member, bool)| url_of(other).is_some_and(|other| other.host() == url.host());
    match voters.iter().filter(is_same_host).count() {
        0 | 1 => url.host().to_owned(),
        _ => url.as_str().trim_start_matches("https://").to_owned(),
    }
}

/// An alarm in the errors of a status: `memberID:1 alarm:NOSPACE`.
///
/// *Source:* `AlarmMember` in etcd's rpc.proto, in the text format of protobuf.
fn parse_alarm(text: &str) -> Option<(MemberId, String)> {
    let field =
        |name: &str| text.split_whitespace().find_map(|part| part.strip_prefix(name)?.strip_prefix(':'));
    let kind = field("alarm")?;
    let id = field("memberID").and_then(|id| id.parse().ok()).unwrap_or_default();
    Some((MemberId(id), kind.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn voters(answers: &[bool]) -> Vec<(Member, bool)> {
        let voter = |(index, answers): (usize, &bool)| {
            let (id, url) = (index as u64 + 1, format!("https://10.0.0.{}:2380", index + 1));
            (Member::new(MemberId(id), Some(format!("n{id}")), vec![url], false), *answers)
        };
        answers.iter().enumerate().map(voter).collect()
    }

    fn status(has_leader: bool) -> EtcdStatus {
        EtcdStatus { has_leader, ..EtcdStatus::default() }
    }

    fn found(status: Option<EtcdStatus>, answers: &[bool], has_served: bool) -> Option<MemberCondition> {
        let check = HealthCheck { status, voters: voters(answers), ..HealthCheck::default() };
        assess(&check, has_served, Path::new("/data"))
    }

    fn reach(voters: usize, silent: &[&str]) -> VoterReach {
        VoterReach::new(voters, silent.iter().map(|host| (*host).to_owned()).collect())
    }

    #[test]
    fn a_member_without_a_leader_is_not_well_and_names_who_does_not_answer() {
        let cut_off = found(Some(status(false)), &[true, false, false], true);
        assert_eq!(cut_off, Some(MemberCondition::NoMajority(reach(3, &["10.0.0.2", "10.0.0.3"]))));
        let electing = found(Some(status(false)), &[true, true, false], true);
        assert_eq!(electing, Some(MemberCondition::NoLeader(reach(3, &["10.0.0.3"]))));
        // At a cold start only the peer ports answer.
        let waiting = found(None, &[true, false, false], false);
        assert_eq!(waiting, Some(MemberCondition::NoMajority(reach(3, &["10.0.0.2", "10.0.0.3"]))));
        assert_eq!(found(None, &[true, true, false], false), None, "it is starting");
        assert_eq!(found(None, &[], false), None, "it is starting");
    }

    #[test]
    fn a_member_that_served_and_does_not_answer_any_more_is_not_well() {
        for answers in [&[][..], &[true, true, true]] {
            assert_eq!(found(None, answers, true), Some(MemberCondition::Silent));
        }
    }

    #[test]
    fn a_member_with_a_leader_is_well_unless_there_is_an_alarm() {
        assert_eq!(found(Some(status(true)), &[], true), None);
        let texts = ["memberID:2 alarm:NOSPACE ", "memberID:9  alarm:CORRUPT", "etcdserver: no leader", ""];
        let alarms: Vec<_> = texts.into_iter().filter_map(parse_alarm).collect();
        let alarmed = EtcdStatus { alarms, ..status(true) };
        let expected = [StoreAlarm::new("10.0.0.2", "NOSPACE"), StoreAlarm::new("member 9", "CORRUPT")];
        assert_eq!(found(Some(alarmed), &[true; 3], true), Some(MemberCondition::Alarms(expected.into())));
    }

    #[test]
    fn a_member_proposes_an_entry_only_where_its_log_stands_still() {
        let mut progress = Progress::default();
        let due = [7, 8, 9, 9, 10, 10, 10].map(|index| progress.is_due(index));
        assert_eq!(due, [false, false, false, true, false, true, true]);
    }

    #[test]
    fn a_member_whose_log_stands_still_is_not_well_and_names_the_disk_it_waits_for() {
        let stuck = |answers: &[bool], waits_in_kernel| {
            let status = Some(status(true));
            let check = HealthCheck {
                status,
                voters: voters(answers),
                is_stuck: true,
                waits_in_kernel,
                ..HealthCheck::default()
            };
            assess(&check, true, Path::new("/data")).unwrap()
        };
        let disk = MemberCondition::DiskStalled { data: "/data".into() };
        assert_eq!(stuck(&[true; 3], true), disk);
        assert_eq!(stuck(&[true], true), disk);
        assert_eq!(stuck(&[true, true, false], false), MemberCondition::NoProgress);
        let lost = MemberCondition::NoMajority(reach(3, &["10.0.0.2", "10.0.0.3"]));
        assert_eq!(stuck(&[true, false, false], true), lost, "its disk may be busy");
        // A leader whose disk stands still loses its lead.
        let without_leader = |has_served, answers: &[bool]| {
            let (status, voters) = (Some(status(false)), voters(answers));
            let check = HealthCheck { status, voters, waits_in_kernel: true, ..HealthCheck::default() };
            assess(&check, has_served, Path::new("/data")).unwrap()
        };
        assert_eq!(without_leader(true, &[true; 3]), disk);
        assert_eq!(without_leader(true, &[true, false, false]), lost);
        assert_eq!(without_leader(false, &[true; 3]), MemberCondition::NoLeader(reach(3, &[])), "it starts");
    }

    #[test]
    fn a_member_whose_data_may_be_wrong_says_so_as_long_as_it_commits() {
        let check = HealthCheck { status: Some(status(true)), is_undecided: true, ..HealthCheck::default() };
        assert_eq!(assess(&check, true, Path::new("/data")), Some(MemberCondition::Undecided));
        let stuck = HealthCheck { is_stuck: true, ..check };
        assert_eq!(assess(&stuck, true, Path::new("/data")), Some(MemberCondition::NoProgress));
    }

    #[test]
    fn a_member_whose_process_is_down_says_why() {
        let exit: Arc<str> = "killed by SIGKILL".into();
        let down = |answers: &[bool]| {
            let check = HealthCheck {
                voters: voters(answers),
                exit: Some(Arc::clone(&exit)),
                ..HealthCheck::default()
            };
            assess(&check, true, Path::new("/data")).unwrap()
        };
        for answers in [&[][..], &[true, true, true]] {
            assert_eq!(down(answers), MemberCondition::Restarting { exit: Arc::clone(&exit) });
        }
        let lost = MemberCondition::NoMajority(reach(3, &["10.0.0.2", "10.0.0.3"]));
        assert_eq!(down(&[true, false, false]), lost, "it is ready only with a majority");
    }

    #[test]
    fn a_member_without_a_leader_says_what_its_log_says_of_its_connections() {
        let fault = Some(EtcdFault::OtherCluster);
        let cut_off = HealthCheck {
            status: Some(status(false)),
            voters: voters(&[true; 3]),
            fault,
            ..HealthCheck::default()
        };
        let text = assess(&cut_off, true, Path::new("/data")).unwrap().to_string();
        assert!(text.contains("of another cluster") && text.contains("nodectl cluster replace"), "{text}");
        let well = HealthCheck { status: Some(status(true)), ..cut_off };
        assert_eq!(assess(&well, true, Path::new("/data")), None, "another host called it");
    }

    #[test]
    fn the_quota_is_the_last_that_the_arguments_set() {
        let quota =
            |args: &[&str]| quota_bytes(&args.iter().map(|arg| (*arg).to_owned()).collect::<Vec<_>>());
        assert_eq!(quota(&["--snapshot-count=9"]), DEFAULT_QUOTA);
        assert_eq!(quota(&["--quota-backend-bytes=5", "-quota-backend-bytes", "7"]), 7);
        assert_eq!(quota(&["--quota-backend-bytes=0"]), DEFAULT_QUOTA);
    }

    #[test]
    fn a_learner_waits_for_its_vote() {
        let learner = EtcdStatus { is_learner: true, ..status(true) };
        assert_eq!(found(Some(learner), &[true; 2], false), Some(MemberCondition::Learner));
    }

    #[test]
    fn voters_on_one_host_are_told_apart_by_their_ports() {
        let mut both = voters(&[false, false]);
        both[1].0.peer_urls = vec!["https://10.0.0.1:2390".into()];
        let reach = match assess(
            &HealthCheck { voters: both, ..HealthCheck::default() },
            false,
            Path::new("/data"),
        ) {
            Some(MemberCondition::NoMajority(reach)) => reach,
            other => panic!("{other:?}"),
        };
        assert_eq!(reach.silent, ["10.0.0.1:2380", "10.0.0.1:2390"]);
    }
}
