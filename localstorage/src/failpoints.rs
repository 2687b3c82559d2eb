//! Failpoints: a test hook runs before every system call, and may make it fail. Without the feature `testing`
//! they do nothing.

use rustix::io::Result;

#[cfg(any(test, feature = "testing"))]
pub use hook::{SyscallAction, with_failpoint_hook};

#[cfg(not(any(test, feature = "testing")))]
pub(crate) fn check_failpoint(_call: &'static str) -> Result<()> {
    Ok(())
}

/// The number of bytes to write at once.
pub(crate) fn check_write_failpoint(length: usize) -> Result<usize> {
    #[cfg(any(test, feature = "testing"))]
    if let SyscallAction::ShortWrite(most) = hook::consult_hook("pwrite")? {
        return Ok(length.min(most.max(1)));
    }
    Ok(length)
}

#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_failpoint(call: &'static str) -> Result<()> {
    hook::consult_hook(call).map(|_| ())
}

#[cfg(any(test, feature = "testing"))]
mod hook {
    use std::cell::RefCell;

    use rustix::io::{Errno, Result};

    type Hook = Box<dyn FnMut(&'static str) -> SyscallAction>;

    thread_local! {
        static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    }

    /// The effect on a system call.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum SyscallAction {
        /// The call is made.
        Proceed,
        /// The call is not made, and fails with this error number.
        Fail(i32),
        /// A write writes at most this many bytes, and at least one; any other call is made.
        ShortWrite(usize),
    }

    /// Runs `work` with a hook. The hook receives the name of each system call that the crate makes on this
    /// thread, and decides about it.
    pub fn with_failpoint_hook<R>(
        hook: impl FnMut(&'static str) -> SyscallAction + 'static,
        work: impl FnOnce() -> R,
    ) -> R {
        /// Restores the previous hook, also on panic.
        struct HookGuard(Option<Hook>);
        impl Drop for HookGuard {
            fn drop(&mut self) {
                HOOK.set(self.0.take());
            }
        }
        let _hooked = HookGuard(HOOK.replace(Some(Box::new(hook))));
        work()
    }

    pub(super) fn consult_hook(call: &'static str) -> Result<SyscallAction> {
        // The hook is removed while it runs, since it may use the crate itself.
        let Some(mut hook) = HOOK.take() else { return Ok(SyscallAction::Proceed) };
        let verdict = hook(call);
        HOOK.set(Some(hook));
        match verdict {
            SyscallAction::Fail(number) => Err(Errno::from_raw_os_error(number)),
            verdict => Ok(verdict),
        }
    }
}
