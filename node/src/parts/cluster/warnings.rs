//! Warnings about a cluster in which the node takes part.

use std::collections::BTreeSet;

use nodekeel_cluster::consensus::{ClusterReport, Member, MemberId, OpenPeerPort, PeerUrl};
use nodekeel_cluster::enrolment::ClusterNode;
use prost_types::Timestamp;

use super::DN;
use crate::health::{HealthCondition, format_bytes};

/// The used part of the quota from which on there is a warning.
const FULL_PERCENT: u64 = 80;

/// The warnings about the cluster of a node that takes part in it; none for any other node.
pub(super) fn present_warnings(cluster: &ClusterNode) -> Vec<HealthCondition> {
    let access = cluster.cluster_access().ok().filter(|_| cluster.condition().is_none());
    access
        .map(|access| cluster_warnings(&access.cluster_report(), access.this_member().id))
        .unwrap_or_default()
}

/// The voters that do not answer while a majority does, and a store of this node's member that is nearly full.
fn cluster_warnings(report: &ClusterReport, this: MemberId) -> Vec<HealthCondition> {
    let (voters, silent) = (report.voter_count(), report.silent_voters().count());
    let mut found: Vec<_> = report
        .silent_voters()
        .map(|(member, since)| {
            let problem = format!("does not answer, and {} of {voters} voters do", voters - silent);
            let name = member.name.as_deref().unwrap_or("NODE");
            let hint = format!(
                "start its node, or restore the network to it; if it is lost: `nodectl cluster remove {name}`"
            );
            HealthCondition::warning(format!("voter {}", member_host(member)), problem)
                .since(Some(since))
                .hint(hint)
        })
        .collect();
    found.extend(report.members.iter().filter(|report| report.differs).map(|report| {
        let name = report.member.name.as_deref().unwrap_or("NODE");
        let problem = "has other data than a majority of the voters, and must not be read from";
        HealthCondition::warning(format!("voter {}", member_host(&report.member)), problem).hint(format!(
            "`nodectl cluster replace {name} --file FILE`, `nodectl reset` on its node, and join it by that ticket"
        ))
    }));
    found.extend(report.uncompared_since.map(|since| {
        HealthCondition::warning("etcd's data", "was compared with that of no other voter")
            .since(Some(since))
            .hint("start the other voters, and upgrade all to one release of etcd: until then nobody sees damage to it")
    }));
    found.extend(report.open_peer_port.as_ref().map(|open| peer_port_warning(open, report, this)));
    let own = report.members.iter().find(|report| report.member.id == this);
    let store = own.and_then(|own| own.facts.as_ref()?.store.as_ref());
    if let Some((store, quota)) = store.and_then(|store| Some((store, store.quota_bytes?)))
        && store.store_bytes >= quota / 100 * FULL_PERCENT
    {
        let [size, quota, used] = [store.store_bytes, quota, store.used_bytes].map(format_bytes);
        found.push(
            HealthCondition::warning(
                "etcd's store",
                format!("has {size} of {quota}, at which it rejects writes; {used} are in use"),
            )
            .hint("delete keys that are not needed, then `nodectl cluster defragment`"),
        );
    }
    found
}

/// The reason for which etcd's peer port admits certificates that are no member's.
fn peer_port_warning(open: &OpenPeerPort, report: &ClusterReport, this: MemberId) -> HealthCondition {
    let (reasons, hints) = match open {
        OpenPeerPort::Unnamed { members, silent, tickets } => {
            explain_unnamed(&MemberNames { report, this }, members, silent, tickets)
        }
        _ => {
            let hint = format!("`nodectl restart {DN}` here, while the other voters answer");
            (vec!["its etcd was started before all members had a name".to_owned()], vec![hint])
        }
    };
    let problem =
        format!("admits each certificate of the cluster, not members alone: {}", reasons.join(", and "));
    HealthCondition::warning("etcd's peer port", problem).hint(hints.join("; "))
}

/// What keeps the peer port open, and what to do about each kind of it.
fn explain_unnamed(
    names: &MemberNames<'_>,
    members: &BTreeSet<String>,
    silent: &BTreeSet<String>,
    tickets: &BTreeSet<PeerUrl>,
) -> (Vec<String>, Vec<String>) {
    let (own, others): (Vec<_>, Vec<_>) = members.iter().partition(|name| names.is_this(name));
    let (mut reasons, mut hints) = (Vec::new(), Vec::new());
    if let [own] = own[..] {
        reasons
            .push("the certificate of this node lacks the name of a member, since it can't sign".to_owned());
        hints.push(format!(
            "start the other voters, which seal the CA's private key to this one, and then `nodectl restart {DN}` here, or, if they \
             run, `nodectl cluster replace {own}` on another voter"
        ));
    }
    if !others.is_empty() {
        let (hosts, node) = (names.hosts(&others), one_or(&others, "NODE"));
        reasons.push(format!("the certificate of {hosts} lacks the name of a member"));
        hints.push(format!(
            "upgrade {hosts} and restart it, or, if `nodectl health` there says that it can't sign, `nodectl cluster replace {node}`"
        ));
    }
    if !silent.is_empty() {
        let silent: Vec<_> = silent.iter().collect();
        let (hosts, node) = (names.hosts(&silent), one_or(&silent, "NODE"));
        reasons.push(format!("{hosts} does not answer"));
        hints.push(format!("start {hosts}, or, if it is lost, `nodectl cluster remove {node}`"));
    }
    if !tickets.is_empty() {
        let urls: Vec<_> = tickets.iter().map(PeerUrl::as_str).collect();
        let commands: Vec<_> = tickets.iter().map(PeerUrl::revoke_command).collect();
        let any = "nodectl cluster ticket revoke --address ADDRESS --port PORT".to_owned();
        let command = one_or(&commands.iter().collect::<Vec<_>>(), &any).to_owned();
        reasons.push(format!("no node has joined by the ticket for {} yet", urls.join(", ")));
        hints.push(format!("let its node join, or revoke it with `{command}`"));
    }
    (reasons, hints)
}

/// Whose names the members have.
struct MemberNames<'a> {
    report: &'a ClusterReport,
    this: MemberId,
}

impl MemberNames<'_> {
    fn find(&self, name: &str) -> Option<&Member> {
        let mut members = self.report.members.iter().map(|report| &report.member);
        members.find(|member| member.name.as_deref() == Some(name))
    }

    fn is_this(&self, name: &str) -> bool {
        self.find(name).is_some_and(|member| member.id == self.this)
    }

    /// Their hosts, or the names of those that are not reported yet.
    fn hosts(&self, names: &[&String]) -> String {
        let hosts = names.iter().map(|name| self.find(name).map_or_else(|| (*name).clone(), member_host));
        hosts.collect::<Vec<_>>().join(", ")
    }
}

/// The only one of these, or the word for any of them.
fn one_or<'a>(all: &[&'a String], any: &'a str) -> &'a str {
    if let [one] = all { one } else { any }
}

/// A warning as a line.
pub(super) fn warning_text(warning: &HealthCondition) -> String {
    let HealthCondition { object, problem, hint, .. } = warning;
    let since = warning.since.map(|since| {
        // Of a warning, the second is enough.
        format!(", since {}", Timestamp { nanos: 0, ..Timestamp::from(since) })
    });
    let since = since.unwrap_or_default();
    format!("{object} {problem}{since}; {hint}")
}

/// The host at which the others reach a member, or its id.
fn member_host(member: &Member) -> String {
    let url = member.peer_urls.first().and_then(|url| url.parse::<PeerUrl>().ok());
    url.map_or_else(|| member.id.to_string(), |url| url.host().to_owned())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use nodekeel_cluster::consensus::{MemberFacts, MemberReport, StoreFacts};

    use super::*;

    fn member(id: u64, is_learner: bool) -> Member {
        Member::new(
            MemberId(id),
            Some(format!("n{id}")),
            vec![format!("https://10.0.0.{id}:7834")],
            is_learner,
        )
    }

    fn lines(members: Vec<MemberReport>) -> Vec<String> {
        cluster_warnings(&ClusterReport::new(members), MemberId(1)).iter().map(warning_text).collect()
    }

    #[test]
    fn a_silent_voter_is_named_with_since_and_a_silent_learner_is_not() {
        let since = SystemTime::UNIX_EPOCH + Duration::from_millis(1_785_000_000_500);
        let answers = |id| MemberReport::new(member(id, false), None);
        let silent = |id, is_learner| MemberReport::silent(member(id, is_learner), since);
        assert_eq!(
            lines(vec![answers(1), answers(2), silent(3, false), silent(4, true)]),
            [
                "voter 10.0.0.3 does not answer, and 2 of 3 voters do, since 2026-07-25T17:20:00Z; start its node, or restore the \
              network to it; if it is lost: `nodectl cluster remove n3`"
            ]
        );
        assert_eq!(lines(vec![answers(1), answers(2), answers(3)]), [""; 0]);
    }

    #[test]
    fn data_that_is_not_compared_is_a_warning_with_since() {
        let mut report = ClusterReport::new(vec![MemberReport::new(member(1, false), None)]);
        report.uncompared_since = Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1_785_000_000));
        let warnings = cluster_warnings(&report, MemberId(1));
        assert_eq!(
            warnings.iter().map(warning_text).collect::<Vec<_>>(),
            [
                "etcd's data was compared with that of no other voter, since 2026-07-25T17:20:00Z; start the other voters, and \
              upgrade all to one release of etcd: until then nobody sees damage to it"
            ]
        );
    }

    #[test]
    fn an_open_peer_port_is_a_warning_with_its_reasons_and_a_command_for_each_kind() {
        let line = |open| {
            let members = [1, 2, 3].map(|id| MemberReport::new(member(id, false), None));
            let mut report = ClusterReport::new(members.into());
            report.open_peer_port = Some(open);
            cluster_warnings(&report, MemberId(1)).iter().map(warning_text).collect::<Vec<_>>().join("|")
        };
        let unnamed = |members: &[&str], silent: &[&str], tickets: &[&str]| {
            let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
            let tickets = tickets.iter().map(|url| url.parse().unwrap()).collect();
            let found =
                line(OpenPeerPort::Unnamed { members: names(members), silent: names(silent), tickets });
            let start = "etcd's peer port admits each certificate of the cluster, not members alone: ";
            found.strip_prefix(start).unwrap().to_owned()
        };
        assert_eq!(
            unnamed(&["n2"], &["n3"], &["https://10.0.0.9:7834"]),
            "the certificate of 10.0.0.2 lacks the name of a member, and 10.0.0.3 does not answer, and no node has joined by the \
             ticket for https://10.0.0.9:7834 yet; upgrade 10.0.0.2 and restart it, or, if `nodectl health` there says that it \
             can't sign, `nodectl cluster replace n2`; start 10.0.0.3, or, if it is lost, `nodectl cluster remove n3`; let its node \
             join, or revoke it with `nodectl cluster ticket revoke --address 10.0.0.9 --port 7834`"
        );
        // One command for all of a kind.
        let many = unnamed(&["n2", "n3"], &[], &["https://10.0.0.8:7834", "https://10.0.0.9:7834"]);
        assert!(many.contains("10.0.0.2, 10.0.0.3 lacks") && many.contains("replace NODE`"), "{many}");
        assert_eq!(many.matches("ticket revoke --address ADDRESS --port PORT`").count(), 1, "{many}");
        assert_eq!(
            unnamed(&["n1"], &[], &[]),
            "the certificate of this node lacks the name of a member, since it can't sign; start the other voters, which seal the \
             CA's private key to this one, and then `nodectl restart root.cluster` here, or, if they run, `nodectl cluster replace \
             n1` on another voter"
        );
        let restart = line(OpenPeerPort::Restart);
        assert!(
            restart
                .contains("was started before all members had a name; `nodectl restart root.cluster` here"),
            "{restart}"
        );
    }

    #[test]
    fn the_own_store_that_is_nearly_full_is_a_warning() {
        let with = |id, store_bytes| {
            let (mut facts, mut store) = (MemberFacts::default(), StoreFacts::default());
            (store.store_bytes, store.used_bytes, store.quota_bytes) =
                (store_bytes, 1 << 20, Some(100 << 20));
            facts.store = Some(store);
            MemberReport::new(member(id, false), Some(facts))
        };
        assert_eq!(lines(vec![with(1, 79 << 20), with(2, 99 << 20)]), [""; 0]);
        let text = "etcd's store has 80.0 MiB of 100.0 MiB, at which it rejects writes; 1.0 MiB are in use; delete keys \
                    that are not needed, then `nodectl cluster defragment`";
        assert_eq!(lines(vec![with(1, 80 << 20)]), [text]);
    }
}
