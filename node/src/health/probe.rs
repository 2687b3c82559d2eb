//! Asks a daemon that the tree takes for ready whether it still answers.

use std::time::Duration;

use nodekeel_supervisor::Failure;
use tokio::time::timeout;

use super::{ConditionsFuture, HealthCondition, HealthSource, NodeSnapshot};

/// Time for an answer of a daemon on this machine.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// A source that asks a daemon, when the health is asked for, whether it answers: a stopped process is still ready for
/// the tree. A daemon that is not ready in the tree is not asked.
#[derive(Debug, Clone)]
pub struct DaemonProbe<P> {
    dn: String,
    probe: P,
}

impl<P> DaemonProbe<P> {
    /// Asks the daemon of this DN by `probe`, which has two seconds. Its error is the end of the sentence "does not
    /// answer: ".
    pub fn new(dn: impl Into<String>, probe: P) -> Self {
        Self { dn: dn.into(), probe }
    }
}

impl<P, F> HealthSource for DaemonProbe<P>
where
    P: Fn() -> F + Send + Sync + 'static,
    F: Future<Output = Result<(), Failure>> + Send,
{
    fn conditions<'a>(&'a self, node: &'a NodeSnapshot) -> ConditionsFuture<'a> {
        Box::pin(async {
            let dn = &self.dn;
            // The tree reports such a runnable already, and a probe would only repeat it.
            if !node.runnable(dn).is_some_and(|runnable| runnable.is_healthy()) {
                return Vec::new();
            }
            let problem = match timeout(PROBE_TIMEOUT, (self.probe)()).await {
                Ok(Ok(())) => return Vec::new(),
                Ok(Err(failure)) => format!("does not answer: {failure}"),
                Err(_) => format!("does not answer within {PROBE_TIMEOUT:?}, and its process runs"),
            };
            let hint = format!("`nodectl logs {dn}`, then `nodectl restart {dn}`");
            vec![HealthCondition::problem(dn.as_str(), problem).hint(hint)]
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::v1::{Node, State};

    /// The conditions of a probe, of a runnable in this state.
    async fn ask<F>(state: State, probe: impl Fn() -> F + Send + Sync + 'static) -> Vec<String>
    where
        F: Future<Output = Result<(), Failure>> + Send + 'static,
    {
        let node = Node { dn: "root.etcd".into(), state: state.into(), ..Node::default() };
        let node = NodeSnapshot::new(SystemTime::UNIX_EPOCH, vec![node]);
        let source = DaemonProbe::new("root.etcd", probe);
        source.conditions(&node).await.iter().map(ToString::to_string).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_ready_daemon_that_does_not_answer_is_a_problem() {
        assert!(ask(State::Ready, || async { Ok(()) }).await.is_empty());
        assert_eq!(
            ask(State::Ready, || async { Err(Failure::new("refused")) }).await,
            ["root.etcd: does not answer: refused"]
        );
        assert_eq!(
            ask(State::Ready, std::future::pending).await,
            ["root.etcd: does not answer within 2s, and its process runs"]
        );
        assert!(ask(State::New, std::future::pending).await.is_empty(), "the tree reports it");
    }
}
