//! The conditions that keep a member from taking part.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// The condition that keeps a member from taking part at present: a clause with the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemberCondition {
    /// Fewer voters answer than a majority, so nothing can be read or written.
    NoMajority(VoterReach),
    /// A majority of the voters answers, and has no leader: an election takes some seconds.
    NoLeader(VoterReach),
    /// The member is a learner. It takes part once it is in sync and promoted.
    Learner,
    /// The member receives the cluster's data.
    Receiving(DataTransfer),
    /// The member has not answered its own node.
    Silent,
    /// Its process has exited, and is started again.
    Restarting {
        /// The exit, with its cause as far as it is known.
        exit: Arc<str>,
    },
    /// Nothing that it proposes is committed, although a majority answers.
    NoProgress,
    /// Its process waits in the kernel for the disk with its data.
    DiskStalled {
        /// The directory of its data.
        data: PathBuf,
    },
    /// It can't reach the others for a reason that it has logged.
    Unconnected {
        /// The reason, with the remedy.
        reason: String,
    },
    /// Its data differs from that of other voters, and no majority has the same: one of them is wrong, and nobody knows
    /// which.
    Undecided,
    /// Alarms of the store, at least one: members that reject writes, or whose data is corrupt.
    Alarms(Vec<StoreAlarm>),
}

/// A transfer of the cluster's data to a member, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DataTransfer {
    /// What has arrived.
    pub received: u64,
    /// The size of the data, as far as a member has told it.
    pub total: Option<u64>,
}

/// The voters of a cluster, and those of them that do not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VoterReach {
    /// The number of voters, this member included.
    pub voters: usize,
    /// The addresses of those that do not answer.
    pub silent: Vec<String>,
}

/// An alarm of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreAlarm {
    /// The address of the member that raised it, or its id.
    pub member: String,
    /// The kind: `NOSPACE` or `CORRUPT`.
    ///
    /// *Source:* `AlarmType` in etcd's rpc.proto.
    pub kind: String,
}

impl VoterReach {
    /// Of this many voters, those at these addresses do not answer.
    pub fn new(voters: usize, silent: Vec<String>) -> VoterReach {
        VoterReach { voters, silent }
    }

    /// Returns whether the answering voters are a majority.
    pub fn is_majority(&self) -> bool {
        self.voters.saturating_sub(self.silent.len()) > self.voters / 2
    }
}

impl StoreAlarm {
    /// An alarm of this kind, raised by this member.
    pub fn new(member: impl Into<String>, kind: impl Into<String>) -> StoreAlarm {
        StoreAlarm { member: member.into(), kind: kind.into() }
    }
}

impl DataTransfer {
    /// This much of it, of a total that is not known.
    pub fn new(received: u64) -> DataTransfer {
        DataTransfer { received, total: None }
    }
}

impl fmt::Display for DataTransfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let megabytes = |bytes: u64| format!("{:.1} MB", bytes as f64 / 1e6);
        write!(f, "receives the data of the cluster: {}", megabytes(self.received))?;
        self.total.map_or(Ok(()), |total| write!(f, " of {}", megabytes(total)))
    }
}

impl fmt::Display for MemberCondition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoMajority(reach) => {
                write!(f, "waits for a majority: {reach}; start them, or restore the network to them")
            }
            Self::NoLeader(reach) => write!(f, "waits for a leader: {reach}"),
            Self::Learner => {
                f.write_str("waits for its vote: it is promoted once it is in sync with the leader")
            }
            Self::Receiving(transfer) => transfer.fmt(f),
            Self::Silent => f.write_str("its etcd does not answer: see its log, or restart it"),
            Self::Restarting { exit } => write!(f, "its etcd is down and is restarted: {exit}"),
            Self::NoProgress => {
                f.write_str("its etcd answers and commits nothing: see its log, and the load of this host")
            }
            Self::DiskStalled { data } => {
                let data = data.display();
                write!(
                    f,
                    "the disk of etcd stalls: writes to {data} do not return; check this disk (`dmesg`)"
                )
            }
            Self::Unconnected { reason } => write!(f, "its etcd reaches no other member: {reason}"),
            Self::Undecided => f.write_str(
                "its data differs from that of the other voters, and no majority has the same: compare a value that you \
                 know on each (`etcdctl get --consistency=s`), and remove the wrong member, reset its node, and join it again",
            ),
            Self::Alarms(alarms) => {
                let texts: Vec<String> = alarms.iter().map(StoreAlarm::to_string).collect();
                f.write_str(&texts.join("; "))
            }
        }
    }
}

impl fmt::Display for VoterReach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reachable = self.voters.saturating_sub(self.silent.len());
        write!(f, "{reachable} of {} members reachable", self.voters)?;
        match self.silent.as_slice() {
            [] => Ok(()),
            [one] => write!(f, " ({one} does not answer)"),
            several => write!(f, " ({} do not answer)", several.join(", ")),
        }
    }
}

impl fmt::Display for StoreAlarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { member, kind } = self;
        match kind.as_str() {
            "NOSPACE" => write!(
                f,
                "the store of {member} is full (alarm NOSPACE), and no member accepts writes: delete keys, \
                 then type `nodectl cluster defragment` and `nodectl cluster disarm`"
            ),
            "CORRUPT" => write!(
                f,
                "the data of {member} is corrupt (alarm CORRUPT): remove this member, reset its node, join it again, \
                 and then type `nodectl cluster disarm`"
            ),
            other => write!(
                f,
                "{member} has raised the alarm {other}: disarm it once its cause is gone: `nodectl cluster disarm`"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_names_who_does_not_answer_and_what_to_do() {
        let reach =
            |silent: &[&str]| VoterReach::new(3, silent.iter().map(|host| (*host).to_owned()).collect());
        let shown = |condition: MemberCondition| condition.to_string();
        assert_eq!(
            shown(MemberCondition::NoMajority(reach(&["10.0.0.8", "10.0.0.9"]))),
            "waits for a majority: 1 of 3 members reachable (10.0.0.8, 10.0.0.9 do not answer); start them, or \
             restore the network to them"
        );
        assert_eq!(
            shown(MemberCondition::NoLeader(reach(&["10.0.0.9"]))),
            "waits for a leader: 2 of 3 members reachable (10.0.0.9 does not answer)"
        );
        assert_eq!(
            shown(MemberCondition::NoLeader(reach(&[]))),
            "waits for a leader: 3 of 3 members reachable"
        );
        let alarms = ["NOSPACE", "CORRUPT", "NEWER"].map(|kind| StoreAlarm::new("10.0.0.8", kind));
        let text = shown(MemberCondition::Alarms(alarms.into()));
        for part in [
            "the store of 10.0.0.8 is full",
            "nodectl cluster disarm",
            "data of 10.0.0.8 is corrupt",
            "alarm NEWER",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_majority_is_more_than_half_of_the_voters() {
        for (voters, silent, is_majority) in [
            (1, 0, true),
            (1, 1, false),
            (2, 0, true),
            (2, 1, false),
            (3, 1, true),
            (3, 2, false),
            (5, 2, true),
            (5, 3, false),
        ] {
            let reach = VoterReach::new(voters, vec![String::new(); silent]);
            assert_eq!(reach.is_majority(), is_majority, "{silent} of {voters} silent");
        }
    }
}
