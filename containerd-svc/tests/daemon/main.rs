//! The real containerds: Debian's, and the newest, built from its Go module. The same tests on both.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod archives;
mod cri;
mod fakes;
mod full;
mod gvisor;
mod harness;
mod images;
mod killed;
mod pods;
mod process;

/// Runs tests on each release.
macro_rules! on_both {
    ($($name:ident),* $(,)?) => {
        mod debian {
            $(#[test]
            #[ignore = "needs containerd, runc, skopeo, umoci, busybox and root"]
            fn $name() {
                $crate::harness::run(super::$name($crate::harness::Release::Debian));
            })*
        }
        mod newest {
            $(#[test]
            #[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
            fn $name() {
                $crate::harness::run(super::$name($crate::harness::Release::Newest));
            })*
        }
    };
}
pub(crate) use on_both;
