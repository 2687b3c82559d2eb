//! What can be done where a member takes part.

use std::sync::Arc;

use super::kv::{KvStore, Namespaced};
use super::{InvalidName, Member, Membership};

/// A member that takes part. It is cheap to clone; once the run that it is of has ended, its calls are errors.
#[derive(Clone, Debug)]
pub struct Running {
    this: Member,
    root: Arc<dyn KvStore>,
    members: Arc<dyn Membership>,
}

impl Running {
    /// A member with its keys and the list of members: for implementations.
    pub fn new(this: Member, root: Arc<dyn KvStore>, members: Arc<dyn Membership>) -> Running {
        Running { this, root, members }
    }

    /// This node's member, as it was listed when it began to take part.
    pub fn this(&self) -> &Member {
        &self.this
    }

    /// All keys of the cluster, those of all modules among them.
    pub fn root(&self) -> Arc<dyn KvStore> {
        Arc::clone(&self.root)
    }

    /// The keys of one module's space. They lie below `MODULE:SPACE`, and begin with a slash: `cluster:enrolment/nodes/x`.
    ///
    /// # Errors
    /// [`InvalidName::Namespace`].
    pub fn kv(&self, module: &str, space: &str) -> Result<Arc<dyn KvStore>, InvalidName> {
        Ok(Arc::new(Namespaced::new(self.root(), module, space)?))
    }

    /// The list of members.
    pub fn members(&self) -> Arc<dyn Membership> {
        Arc::clone(&self.members)
    }
}
