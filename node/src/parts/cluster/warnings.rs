//! Warnings about a cluster in which the node takes part.

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
    found.extend(report.open_peer_port.as_ref().map(peer_port_warning));
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
fn peer_port_warning(open: &OpenPeerPort) -> HealthCondition {
    let (reason, hint) = match open {
        OpenPeerPort::Unnamed { members, tickets } => {
            let members = members.iter().map(|name| {
                let reason = format!("{name} has published none with the name of a member");
                (
                    reason,
                    format!("upgrade and start {name}, or, if it is lost, `nodectl cluster remove {name}`"),
                )
            });
            let tickets = tickets.iter().map(|url| {
                let hint = format!("let its node join, or revoke it with `{}`", url.revoke_command());
                (format!("no node has joined by the ticket for {url} yet"), hint)
            });
            let (reasons, hints): (Vec<_>, Vec<_>) = members.chain(tickets).unzip();
            (reasons.join(", and "), hints.join("; "))
        }
        _ => {
            let hint = format!("`nodectl restart {DN}` here, while the other voters answer");
            ("its etcd was started before all members had a name".to_owned(), hint)
        }
    };
    let problem = format!("admits each certificate of the cluster, not members alone: {reason}");
    HealthCondition::warning("etcd's peer port", problem).hint(hint)
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
    fn an_open_peer_port_is_a_warning_with_its_reason_and_a_command() {
        let line = |open| {
            let mut report = ClusterReport::default();
            report.open_peer_port = Some(open);
            cluster_warnings(&report, MemberId(1)).iter().map(warning_text).collect::<Vec<_>>().join("|")
        };
        let tickets = ["https://10.0.0.9:7834".parse().unwrap()].into();
        assert_eq!(
            line(OpenPeerPort::Unnamed { members: ["n2".to_owned()].into(), tickets }),
            "etcd's peer port admits each certificate of the cluster, not members alone: n2 has published none with the name of a \
             member, and no node has joined by the ticket for https://10.0.0.9:7834 yet; upgrade and start n2, or, if it is lost, \
             `nodectl cluster remove n2`; let its node join, or revoke it with `nodectl cluster ticket revoke --address 10.0.0.9 \
             --port 7834`"
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
