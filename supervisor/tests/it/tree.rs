//! What the tests of the tree build it of.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nodekeel_supervisor::testing::{Recorder, Remote};
use nodekeel_supervisor::{Child, Context, Failure, Runnable, State, Supervisor};

/// A runnable that is ready at once and works until it is cancelled.
pub(crate) async fn steady(ctx: Context) -> Result<(), Failure> {
    ctx.ready()?;
    Err(ctx.cancelled().await.into())
}

/// A runnable that adds a binary tree of this many levels below itself, and is steady then.
pub(crate) fn binary_tree(
    levels: u32,
) -> Box<dyn Fn(Context) -> nodekeel_supervisor::RunFuture + Send + Sync> {
    Box::new(move |ctx: Context| {
        Box::pin(async move {
            if levels > 0 {
                ctx.run("a", binary_tree(levels - 1))?;
                ctx.run("b", binary_tree(levels - 1))?;
            }
            steady(ctx).await
        })
    })
}

/// Counts its runs that are alive, and panics where two are at the same time.
#[derive(Clone, Default)]
pub(crate) struct Alone(Arc<AtomicUsize>);

impl Alone {
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

/// A supervisor whose root adds groups of children and is steady, and what happened in it.
pub(crate) struct Tree {
    pub(crate) supervisor: Supervisor,
    pub(crate) recorder: Recorder,
}

impl Tree {
    /// A tree under a root of the test's own.
    pub(crate) fn of(root: impl Runnable) -> Self {
        let recorder = Recorder::default();
        Self { supervisor: Supervisor::builder().hook(recorder.clone()).start(root), recorder }
    }

    /// A tree with one group of remote-controlled children.
    pub(crate) fn of_group(children: &[(&'static str, &Remote)]) -> Self {
        let children: Vec<(&'static str, Remote)> =
            children.iter().map(|(name, remote)| (*name, (*remote).clone())).collect();
        Self::of(move |ctx: Context| {
            let children = children.clone();
            async move {
                ctx.run_group(children.into_iter().map(|(name, remote)| Child::new(name, remote)))?;
                steady(ctx).await
            }
        })
    }

    pub(crate) fn state(&self, dn: &str) -> Option<State> {
        self.supervisor.snapshot().into_iter().find(|node| &*node.dn == dn).map(|node| node.state)
    }

    pub(crate) fn generation(&self, dn: &str) -> u64 {
        let node = self.supervisor.snapshot().into_iter().find(|node| &*node.dn == dn);
        node.unwrap_or_else(|| panic!("{dn} is not in the tree")).generation
    }
}
