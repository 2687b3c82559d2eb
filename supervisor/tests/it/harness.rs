//! Building blocks for the tests of the tree.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nodekeel_supervisor::testing::{EventRecorder, RemoteRunnable};
use nodekeel_supervisor::{
    AddChildError, ChildSpec, Context, Failure, RunFuture, Runnable, RunnableState, RunnableStatus,
    Supervisor,
};

/// A runnable that is ready at once and works until it is canceled.
pub(crate) async fn steady(ctx: Context) -> Result<(), Failure> {
    ctx.signal_ready()?;
    Err(ctx.canceled().await.into())
}

/// A runnable that adds its children, and then behaves like [`steady`].
pub(crate) fn parent_of(
    add_children: impl Fn(&Context) -> Result<(), AddChildError> + Send + Sync + 'static,
) -> impl Fn(Context) -> RunFuture + Send + Sync + 'static {
    move |ctx: Context| {
        let added = add_children(&ctx);
        Box::pin(async move {
            added?;
            steady(ctx).await
        })
    }
}

/// A runnable that adds a binary tree of this many levels below itself, and then behaves like [`steady`].
pub(crate) fn binary_tree(levels: u32) -> Box<dyn Fn(Context) -> RunFuture + Send + Sync> {
    Box::new(parent_of(move |ctx| {
        if levels > 0 {
            ctx.run_child("a", binary_tree(levels - 1))?;
            ctx.run_child("b", binary_tree(levels - 1))?;
        }
        Ok(())
    }))
}

/// A runnable that takes this long to stop.
pub(crate) fn slow_to_stop(takes: Duration) -> impl Fn(Context) -> RunFuture + Clone + Send + Sync + 'static {
    move |ctx: Context| {
        Box::pin(async move {
            ctx.signal_ready()?;
            let canceled = ctx.canceled().await;
            tokio::time::sleep(takes).await;
            Err(canceled.into())
        })
    }
}

/// A runnable that is ready, and ignores its cancellation.
pub(crate) async fn deaf(ctx: Context) -> Result<(), Failure> {
    ctx.signal_ready()?;
    std::future::pending().await
}

/// A runnable whose work is done.
pub(crate) async fn done(ctx: Context) -> Result<(), Failure> {
    ctx.signal_ready()?;
    ctx.signal_done()?;
    Ok(())
}

/// Counts the concurrent runs, and panics at the second one.
#[derive(Clone, Default)]
pub(crate) struct SingleRun(Arc<AtomicUsize>);

impl SingleRun {
    pub(crate) fn enter(&self) -> impl Drop + Send + use<> {
        struct Inside(Arc<AtomicUsize>);
        impl Drop for Inside {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::SeqCst);
            }
        }
        assert_eq!(self.0.fetch_add(1, Ordering::SeqCst), 0, "two runs at the same time");
        Inside(Arc::clone(&self.0))
    }
}

/// A supervisor with a recorder of its events.
pub(crate) struct TestTree {
    pub(crate) supervisor: Supervisor,
    pub(crate) recorder: EventRecorder,
}

impl TestTree {
    /// A tree with this root.
    pub(crate) fn with_root(root: impl Runnable) -> Self {
        let recorder = EventRecorder::default();
        Self { supervisor: Supervisor::builder().event_hook(recorder.clone()).start(root), recorder }
    }

    /// A tree whose root has these children, and works until it is canceled.
    pub(crate) fn with_children(
        add_children: impl Fn(&Context) -> Result<(), AddChildError> + Send + Sync + 'static,
    ) -> Self {
        Self::with_root(parent_of(add_children))
    }

    /// A tree with one group of remote-controlled children.
    pub(crate) fn with_group(children: &[(&'static str, &RemoteRunnable)]) -> Self {
        let children: Vec<_> = children.iter().map(|(name, remote)| (*name, (*remote).clone())).collect();
        Self::with_children(move |ctx| {
            ctx.run_group(children.iter().map(|(name, remote)| ChildSpec::new(*name, remote.clone())))
        })
    }

    /// A tree with a remote-controlled `root.parent`, which adds its children first.
    pub(crate) fn with_parent(
        parent: &RemoteRunnable,
        add_children: impl Fn(&Context) -> Result<(), AddChildError> + Clone + Send + Sync + 'static,
    ) -> Self {
        let parent = parent.clone();
        Self::with_children(move |ctx| {
            let (parent, add_children) = (parent.clone(), add_children.clone());
            ctx.run_child("parent", move |ctx: Context| {
                let (parent, added) = (parent.clone(), add_children(&ctx));
                async move {
                    added?;
                    parent.run(ctx).await
                }
            })
        })
    }

    /// The DNs of the runnables that stopped on request, in their order.
    pub(crate) fn stopped(&self) -> Vec<String> {
        let events = self.recorder.events().into_iter();
        let canceled = events.filter(|event| event.change.new_state() == Some(RunnableState::Canceled));
        canceled.map(|event| event.dn.to_string()).collect()
    }

    pub(crate) fn state(&self, dn: &str) -> Option<RunnableState> {
        self.status(dn).map(|node| node.state)
    }

    /// The state of a runnable, and how often it was started.
    pub(crate) fn latest_run(&self, dn: &str) -> (RunnableState, u64) {
        let status = self.status(dn).unwrap_or_else(|| panic!("{dn} is not in the tree"));
        (status.state, status.generation)
    }

    pub(crate) fn status(&self, dn: &str) -> Option<RunnableStatus> {
        self.supervisor.snapshot().into_iter().find(|node| &*node.dn == dn)
    }

    pub(crate) fn generation(&self, dn: &str) -> u64 {
        self.latest_run(dn).1
    }
}
