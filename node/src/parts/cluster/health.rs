//! Conditions that keep the node from taking part in its cluster, with what to type.

use std::path::{Path, PathBuf};

use nodekeel_cluster::consensus::REMOVED_NODE;
use nodekeel_cluster::enrolment::{ClusterNode, EnrolmentState, WaitCause};

use super::DN;
use super::warnings::present_warnings;
use crate::health::{HealthCondition, HealthSource, NodeSnapshot};
use crate::program_name::program_name;

/// The condition of root.cluster in the words of the cluster.
pub(super) fn health_source(cluster: ClusterNode, ticket: PathBuf) -> impl HealthSource {
    move |node: &NodeSnapshot| {
        let found = node.condition_of(DN).map(|found| {
            let clause = cluster.condition().map(|clause| clause.to_string()).unwrap_or_default();
            describe_condition(found, &cluster.current_state(), &clause, &ticket)
        });
        let warnings = present_warnings(&cluster);
        found.into_iter().chain(warnings).collect::<Vec<_>>()
    }
}

/// Adds the cluster's knowledge to the tree's condition of root.cluster. `clause` is the condition that the
/// cluster reports, empty if it reports none.
fn describe_condition(
    found: HealthCondition,
    state: &EnrolmentState,
    clause: &str,
    ticket: &Path,
) -> HealthCondition {
    let ticket = ticket.display();
    let (problem, waiting_for, hint) = match state {
        EnrolmentState::Waiting(WaitCause::NoInstruction) => (
            "is in no cluster yet".to_owned(),
            "a ticket".to_owned(),
            format!("copy a ticket of a member to {ticket}; for a new cluster: `nodectl cluster bootstrap`"),
        ),
        EnrolmentState::Waiting(WaitCause::DataLost { record }) => (
            format!("was in a cluster, as {} records, and its data is not here", record.display()),
            "its data, or a ticket".to_owned(),
            format!(
                "restore the data and restart {}, or copy a ticket of a member to {ticket}",
                program_name()
            ),
        ),
        EnrolmentState::Waiting(WaitCause::Redemption) if clause.is_empty() => (
            "is in no cluster yet".to_owned(),
            "a voter that redeems its join ticket".to_owned(),
            "`nodectl cluster status`".to_owned(),
        ),
        // Without a clause, the text of the tree is the best one.
        _ if clause.is_empty() => {
            let hint = "`nodectl cluster status`; `nodectl logs --children root.cluster`";
            return found.hint(hint);
        }
        _ if clause.contains(REMOVED_NODE) => {
            let hint = "`nodectl reset`, and join it by another ticket";
            ("was removed from its cluster".to_owned(), String::new(), hint.to_owned())
        }
        state => {
            let problem = match state {
                EnrolmentState::Running(_) => "can't take part in its cluster",
                _ => "is not in its cluster yet",
            };
            // The clauses of the cluster have the form "waits for WHAT; HINT", which fills both fields.
            match clause.strip_prefix("waits for ") {
                Some(awaited) => {
                    let (awaited, hint) =
                        awaited.split_once("; ").unwrap_or((awaited, "`nodectl cluster status`"));
                    (problem.to_owned(), awaited.to_owned(), hint.to_owned())
                }
                None => {
                    let hint = "`nodectl cluster status`; `nodectl logs --children root.cluster`";
                    (format!("{problem}: {clause}"), String::new(), hint.to_owned())
                }
            }
        }
    };
    HealthCondition { problem, waiting_for, hint, ..found }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn describe(state: &EnrolmentState, clause: &str) -> [String; 3] {
        let found = HealthCondition::problem(DN, "is not ready").hint("`nodectl status root.cluster`");
        let found = describe_condition(found, state, clause, Path::new("/data/enrolment.pb"));
        [found.problem, found.waiting_for, found.hint]
    }

    #[test]
    fn a_node_without_a_ticket_waits_for_one_and_says_where_to_put_it() {
        assert_eq!(
            describe(&EnrolmentState::Waiting(WaitCause::NoInstruction), "waits for a ticket: it has none"),
            [
                "is in no cluster yet",
                "a ticket",
                "copy a ticket of a member to /data/enrolment.pb; for a new cluster: `nodectl cluster bootstrap`"
            ]
        );
        let lost = WaitCause::DataLost { record: "/efi/record".into() };
        assert_eq!(
            describe(&EnrolmentState::Waiting(lost), "")[..2],
            ["was in a cluster, as /efi/record records, and its data is not here", "its data, or a ticket"]
        );
    }

    #[test]
    fn a_clause_of_the_cluster_says_for_whom_it_waits_and_what_to_do() {
        let majority =
            "waits for a majority: 1 of 3 members reachable (10.0.0.8 does not answer); start them";
        assert_eq!(
            describe(&EnrolmentState::New, majority),
            [
                "is not in its cluster yet",
                "a majority: 1 of 3 members reachable (10.0.0.8 does not answer)",
                "start them"
            ]
        );
        assert_eq!(
            describe(&EnrolmentState::New, "its etcd does not answer: see its log, or restart it"),
            [
                "is not in its cluster yet: its etcd does not answer: see its log, or restart it",
                "",
                "`nodectl cluster status`; `nodectl logs --children root.cluster`"
            ]
        );
        assert_eq!(
            describe(&EnrolmentState::New, &format!("the member failed: {REMOVED_NODE}")),
            ["was removed from its cluster", "", "`nodectl reset`, and join it by another ticket"]
        );
        assert_eq!(
            describe(&EnrolmentState::New, ""),
            ["is not ready", "", "`nodectl cluster status`; `nodectl logs --children root.cluster`"]
        );
    }
}
