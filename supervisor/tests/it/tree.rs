//! Building blocks for the tests of the tree.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nodekeel_supervisor::testing::{EventRecorder, RemoteRunnable};
use nodekeel_supervisor::{AddChildError, ChildSpec, Context, Failure, Runnable, RunnableState, Supervisor};

/// A runnable that is ready at once and works until it is canceled.
pub(crate) async fn steady(ctx: Context) -> Result<(), Failure> {
    ctx.signal_ready()?;
    Err(ctx.canceled().await.into())
}

/// A runnable that adds a binary tree of this many levels below itself, and then behaves like [`steady`].
pub(crate) fn binary_tree(
    levels: u32,
) -> Box<dyn Fn(Context) -> nodekeel_supervisor::RunFuture + Send + Sync> {
    Box::new(move |ctx: Context| {
        Box::pin(async move {
            if levels > 0 {
                ctx.run_child("a", binary_tree(levels - 1))?;
                ctx.run_child("b", binary_tree(levels - 1))?;
            }
            steady(ctx).await
        })
    })
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

    /// A tree with one group of remote-controlled children.
    pub(crate) fn with_group(children: &[(&'static str, &RemoteRunnable)]) -> Self {
        let children: Vec<(&'static str, RemoteRunnable)> =
            children.iter().map(|(name, remote)| (*name, (*remote).clone())).collect();
        Self::with_root(move |ctx: Context| {
            let children = children.clone();
            async move {
                ctx.run_group(children.into_iter().map(|(name, remote)| ChildSpec::new(name, remote)))?;
                steady(ctx).await
            }
        })
    }

    /// A tree with a remote-controlled `root.parent`, which adds its children first.
    pub(crate) fn with_parent(
        parent: &RemoteRunnable,
        add_children: impl Fn(&Context) -> Result<(), AddChildError> + Clone + Send + Sync + 'static,
    ) -> Self {
        let parent = parent.clone();
        Self::with_root(move |ctx: Context| {
            let (parent, add_children) = (parent.clone(), add_children.clone());
            async move {
                let parent = move |ctx: Context| {
                    let (parent, added) = (parent.clone(), add_children(&ctx));
                    async move {
                        added?;
                        parent.run(ctx).await
                    }
                };
                ctx.run_child("parent", parent)?;
                steady(ctx).await
            }
        })
    }

    pub(crate) fn state(&self, dn: &str) -> Option<RunnableState> {
        self.supervisor.snapshot().into_iter().find(|node| &*node.dn == dn).map(|node| node.state)
    }

    pub(crate) fn generation(&self, dn: &str) -> u64 {
        let node = self.supervisor.snapshot().into_iter().find(|node| &*node.dn == dn);
        node.unwrap_or_else(|| panic!("{dn} is not in the tree")).generation
    }
}
