//! Members of a cluster for tests that only read the list.

use std::sync::Mutex;

use async_trait::async_trait;

use super::{ClusterMembers, Member, MemberId, MembershipError, NewMember};

/// A list of voters, which can't be changed by a call.
#[derive(Debug, Default)]
pub(crate) struct ListedVoters(pub(crate) Mutex<Vec<&'static str>>);

#[async_trait]
impl ClusterMembers for ListedVoters {
    async fn list_members(&self) -> Result<Vec<Member>, MembershipError> {
        let names = self.0.lock().unwrap().clone();
        let member =
            |name: &str| Member::new(MemberId(name.len() as u64), Some(name.into()), Vec::new(), false);
        Ok(names.into_iter().map(member).collect())
    }

    async fn add_learner(&self, _: &NewMember) -> Result<Member, MembershipError> {
        Err(MembershipError::Stopped)
    }

    async fn promote_member(&self, _: MemberId) -> Result<(), MembershipError> {
        Err(MembershipError::Stopped)
    }

    async fn remove_member(&self, _: MemberId) -> Result<(), MembershipError> {
        Err(MembershipError::Stopped)
    }

    async fn prepare_leave(&self) -> Result<(), MembershipError> {
        Err(MembershipError::Stopped)
    }
}
