//! Watches whether the member can take part, and who keeps it from that.
//!
//! Nothing in etcd notifies a client in time: it ends watches that require a leader three to four seconds after
//! the leader is known to be lost, which itself takes two, and an alarm ends and starts nothing. So the member is
//! asked for its status, which it answers from memory, without its log, its disk or the other members. The
//! others are asked only when something is wrong.

use std::convert::Infallible;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use etcd_client as api;
use futures_util::future::join_all;
use nodekeel_localstorage::pki::Credentials;
use nodekeel_supervisor::process::Liveness;
use tokio::time::{sleep, timeout};

use super::client::{self, WithoutLeader};
use super::local_member::LocalMember;
use super::peer_client::PeerClient;
use crate::consensus::{
    ConsensusError, Member, MemberCondition, MemberId, Peer, PeerUrl, StatusReporter, StoreAlarm, VoterReach,
};

/// The pause between two checks of a member that has others. Together with the two seconds in which etcd itself
/// notices a lost leader, and the time for the others to answer, it stays below five seconds.
const PAUSE: Duration = Duration::from_secs(1);
/// The pause between two checks of the only voter, which can lose no other: there are only alarms.
const LONE_PAUSE: Duration = Duration::from_secs(4);
/// The timeout of the status, which comes from the memory of a process on this host.
const STATUS_TIMEOUT: Duration = Duration::from_secs(1);

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
}

#[derive(Clone, Debug, Default)]
struct EtcdStatus {
    has_leader: bool,
    is_learner: bool,
    /// The member that has raised it, and its kind.
    alarms: Vec<(MemberId, String)>,
    /// Changes with each change of the members.
    applied_index: u64,
}

/// The voters in the last list of the member itself: a ticket may be old, and lists no joiner.
#[derive(Clone, Copy, Debug)]
struct KnownVoters {
    count: usize,
    /// The member's index before the list.
    applied_index: u64,
}

impl KnownVoters {
    /// The only voter, which can lose no other.
    fn is_lone(self) -> bool {
        self.count == 1
    }

    /// Returns whether a member that is well, with this index, need not list them again. Without this check, an idle
    /// member would list its only voter for ever, over a new connection each time.
    fn are_current(self, applied_index: u64) -> bool {
        self.count > 1 || self.applied_index == applied_index
    }
}

/// Watches one run of a member.
pub(super) struct HealthWatch {
    peers: PeerClient,
    client: api::Client,
    /// This member, as the others reach it.
    this: Peer,
    /// The members that a ticket lists, until the member has its own list.
    known_peers: Vec<Peer>,
    voters: Mutex<Option<KnownVoters>>,
}

impl HealthWatch {
    pub(super) async fn new(
        member: LocalMember<'_>,
        credentials: &Credentials,
        known_peers: Vec<Peer>,
    ) -> Result<HealthWatch, ConsensusError> {
        let peers =
            PeerClient::new(credentials).map_err(ConsensusError::backend("use the member's credentials"))?;
        let (name, socket) = (member.name, member.client_socket());
        let client = client::connect(name, socket, credentials, WithoutLeader::IsAnswered).await?;
        Ok(HealthWatch { peers, client, this: member.peer(), known_peers, voters: Mutex::default() })
    }

    /// Reports the condition of the member, and each change of it, until it is dropped.
    pub(super) async fn report_conditions(&self, reporter: &StatusReporter<'_>) -> Infallible {
        loop {
            sleep(self.pause()).await;
            let check = self.check().await;
            reporter.report_condition(assess(&check, reporter.is_serving()).as_ref());
        }
    }

    /// The liveness of the process, by its own status: without a majority, or while its disk stands still, it is alive.
    pub(super) fn liveness(&self) -> Liveness {
        let client = self.client.clone();
        let probe = move || {
            let mut member = client.maintenance_client();
            async move { member.status().await.map(drop) }
        };
        let liveness = Liveness::probe(probe).with_period(LIVENESS_PERIOD).with_timeout(STATUS_TIMEOUT);
        liveness.with_failure_threshold(MAX_SILENT_PROBES)
    }

    fn pause(&self) -> Duration {
        if self.known_voters().is_some_and(KnownVoters::is_lone) { LONE_PAUSE } else { PAUSE }
    }

    fn known_voters(&self) -> Option<KnownVoters> {
        *self.voters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn check(&self) -> HealthCheck {
        // First the member itself: if it is well, no other member is asked.
        let status = timeout(STATUS_TIMEOUT, self.read_status()).await.ok().flatten();
        if let Some(status) = &status
            && status.has_leader
            && status.alarms.is_empty()
            && self.known_voters().is_some_and(|known| known.are_current(status.applied_index))
        {
            return HealthCheck { status: Some(status.clone()), voters: Vec::new() };
        }
        let voters = self.list_voters(status.as_ref().map_or(0, |status| status.applied_index)).await;
        // With a leader a majority answers: the list is only needed to name the members in alarms, and to count
        // the voters.
        let voters = match &status {
            Some(status) if status.has_leader => voters.into_iter().map(|voter| (voter, true)).collect(),
            _ => self.ask_voters(voters).await,
        };
        HealthCheck { status, voters }
    }

    async fn read_status(&self) -> Option<EtcdStatus> {
        let status = self.client.maintenance_client().status().await.ok()?;
        Some(EtcdStatus {
            has_leader: status.leader() != 0,
            is_learner: status.is_learner(),
            alarms: status.errors().iter().filter_map(|text| parse_alarm(text)).collect(),
            applied_index: status.raft_applied_index(),
        })
    }

    /// The voters that this member knows, which had this index before, or its ticket.
    async fn list_voters(&self, applied_index: u64) -> Vec<Member> {
        // The peer port answers from the start on, also without a majority.
        let Ok(members) = self.peers.list_members(self.this.name.as_str(), &self.this.url).await else {
            // It does not answer there either. A joining member has its ticket's list; any other has none.
            return self.known_peers.iter().map(member_of_peer).collect();
        };
        let voters: Vec<_> = members.into_iter().filter(|member| !member.is_learner).collect();
        let known = KnownVoters { count: voters.len(), applied_index };
        *self.voters.lock().unwrap_or_else(PoisonError::into_inner) = Some(known);
        voters
    }

    /// Asks all voters at the same time.
    async fn ask_voters(&self, voters: Vec<Member>) -> Vec<(Member, bool)> {
        let asked = voters.into_iter().map(async |voter| {
            let url = voter.peer_urls.first().and_then(|url| url.parse::<PeerUrl>().ok());
            let answers = match (&voter.name, url) {
                // It has just listed the voters.
                (Some(name), _) if name == self.this.name.as_str() => true,
                (Some(name), Some(url)) => self.peers.is_answering(name, &url).await,
                _ => false,
            };
            (voter, answers)
        });
        join_all(asked).await
    }
}

fn member_of_peer(peer: &Peer) -> Member {
    Member::new(MemberId(0), Some(peer.name.to_string()), vec![peer.url.to_string()], false)
}

/// The condition that a check shows. A member that has not served yet may just be starting.
fn assess(check: &HealthCheck, has_served: bool) -> Option<MemberCondition> {
    let HealthCheck { status, voters } = check;
    if let Some(status) = status.as_ref().filter(|status| status.has_leader) {
        // An alarm goes before the wait for a vote: it stops the writes of the whole cluster.
        if !status.alarms.is_empty() {
            let alarm = |(id, kind): &(MemberId, String)| StoreAlarm::new(name_member(*id, voters), kind);
            return Some(MemberCondition::Alarms(status.alarms.iter().map(alarm).collect()));
        }
        return status.is_learner.then_some(MemberCondition::Learner);
    }
    let silent = voters.iter().filter(|(_, answers)| !answers).map(|(voter, _)| voter_address(voter, voters));
    let mut silent: Vec<String> = silent.collect();
    // etcd lists them in any order.
    silent.sort();
    let reach = VoterReach::new(voters.len(), silent);
    match status {
        // Nothing is known of the others. A member that has neither served nor answered may just be starting.
        _ if voters.is_empty() => (has_served || status.is_some()).then_some(MemberCondition::Silent),
        _ if !reach.is_majority() => Some(MemberCondition::NoMajority(reach)),
        Some(_) => Some(MemberCondition::NoLeader(reach)),
        // The others form a majority: it is this member that does not answer.
        None => has_served.then_some(MemberCondition::Silent),
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
        assess(&HealthCheck { status, voters: voters(answers) }, has_served)
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
    fn a_lone_member_lists_its_voters_again_when_its_index_has_changed() {
        let known = |count| KnownVoters { count, applied_index: 7 };
        assert!(known(1).are_current(7) && !known(1).are_current(8));
        assert!(!known(0).are_current(8), "a member that starts may list none");
        assert!(known(3).are_current(8), "its status says when one of them is lost");
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
        let reach = match assess(&HealthCheck { status: None, voters: both }, false) {
            Some(MemberCondition::NoMajority(reach)) => reach,
            other => panic!("{other:?}"),
        };
        assert_eq!(reach.silent, ["10.0.0.1:2380", "10.0.0.1:2390"]);
    }
}
