//! Failpoints: tests hear of every system call before it is made, and may let it fail. Nothing where the feature
//! `testing` is off.

use rustix::io::Result;

#[cfg(any(test, feature = "testing"))]
pub use hooked::{Verdict, with_hook};

#[cfg(not(any(test, feature = "testing")))]
pub(crate) fn before(_call: &'static str) -> Result<()> {
    Ok(())
}

/// How many of the bytes to write at once.
pub(crate) fn before_write(length: usize) -> Result<usize> {
    #[cfg(any(test, feature = "testing"))]
    if let Verdict::Short(most) = hooked::ask("pwrite")? {
        return Ok(length.min(most.max(1)));
    }
    Ok(length)
}

#[cfg(any(test, feature = "testing"))]
pub(crate) fn before(call: &'static str) -> Result<()> {
    hooked::ask(call).map(|_| ())
}

#[cfg(any(test, feature = "testing"))]
mod hooked {
    use std::cell::RefCell;

    use rustix::io::{Errno, Result};

    type Hook = Box<dyn FnMut(&'static str) -> Verdict>;

    thread_local! {
        static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    }

    /// What becomes of a system call.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum Verdict {
        /// It is made.
        Go,
        /// It is not made, and fails with this error number.
        Fail(i32),
        /// A write writes no more bytes than this (but one); any other call is made.
        Short(usize),
    }

    /// Does the work with a hook that is asked before each system call that the crate makes on this thread, by the
    /// call's name.
    pub fn with_hook<R>(hook: impl FnMut(&'static str) -> Verdict + 'static, work: impl FnOnce() -> R) -> R {
        /// Takes the hook away, also when the work panics.
        struct Hooked(Option<Hook>);
        impl Drop for Hooked {
            fn drop(&mut self) {
                HOOK.set(self.0.take());
            }
        }
        let _hooked = Hooked(HOOK.replace(Some(Box::new(hook))));
        work()
    }

    pub(super) fn ask(call: &'static str) -> Result<Verdict> {
        // Taken out meanwhile: a hook may use the crate itself.
        let Some(mut hook) = HOOK.take() else { return Ok(Verdict::Go) };
        let verdict = hook(call);
        HOOK.set(Some(hook));
        match verdict {
            Verdict::Fail(number) => Err(Errno::from_raw_os_error(number)),
            verdict => Ok(verdict),
        }
    }
}
