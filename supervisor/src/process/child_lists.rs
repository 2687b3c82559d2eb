//! The kernel's lists of this program's children, which show that the ended starts of a host have left nothing behind.
//!
//! Most processes leave no other behind. Without the lists, each exit would cost a scan of all processes of the host
//! to see that, which takes longer than the rest of a restart.
//!
//! *Source:* proc(5), `/proc/PID/task/TID/children` (Linux 4.2, `CONFIG_PROC_CHILDREN`); the kernel's
//! `fs/proc/array.c`, and `find_new_reaper` in `kernel/exit.c`.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The longest list that is read: with more children, a scan does not take much longer.
const MAX_LIST_BYTES: usize = 4096;
/// The maximum length of a pid in a list, with the space after it.
const MAX_PID_BYTES: usize = 11;

/// The lists of those threads whose children can be what a start has left behind.
#[derive(Debug)]
pub(super) struct ChildLists {
    /// Of the main thread, which gets all orphans. `None` if it can't be read, as on a kernel without the lists.
    orphans: Option<File>,
    /// Of the threads that start processes. These have the main processes, and what those have created as their
    /// siblings (`CLONE_PARENT`).
    starters: Mutex<Vec<Option<File>>>,
}

impl ChildLists {
    pub(super) fn new() -> Self {
        let main_thread = rustix::process::getpid().as_raw_nonzero().get();
        Self { orphans: open_list(main_thread), starters: Mutex::default() }
    }

    /// Adds a thread, before it starts the first process.
    pub(super) fn add_starter(&self, thread: i32) {
        self.lock_starters().push(open_list(thread));
    }

    /// Returns whether no main process that has ended has left anything behind, whatever it was. False if that can't
    /// be told.
    pub(super) fn show_nothing_left(&self, are_main: impl Fn(&[i32]) -> bool) -> bool {
        // The siblings before the orphans: a sibling that exits in between makes its children orphans.
        let no_siblings = |list: &Option<File>| read_list(list.as_ref()?).map(|pids| are_main(&pids));
        self.lock_starters().iter().all(|list| no_siblings(list) == Some(true))
            && self.orphans.as_ref().and_then(read_list).is_some_and(|orphans| orphans.is_empty())
    }

    fn lock_starters(&self) -> MutexGuard<'_, Vec<Option<File>>> {
        self.starters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn open_list(thread: i32) -> Option<File> {
    File::open(format!("/proc/self/task/{thread}/children")).ok()
}

/// The pids in a list; `None` if they can't be told.
fn read_list(list: &File) -> Option<Vec<i32>> {
    let read = || {
        let mut text = vec![0; MAX_LIST_BYTES];
        let length = list.read_at(&mut text, 0).ok()?;
        text.truncate(length);
        // The kernel writes whole pids.
        (length + MAX_PID_BYTES <= MAX_LIST_BYTES).then_some(text)
    };
    let text = read()?;
    // The kernel leaves out a child if the one before it is reaped in between. A child that is there again was not.
    if !text.is_empty() && read()? != text {
        return None;
    }
    str::from_utf8(&text).ok()?.split_ascii_whitespace().map(|pid| pid.parse().ok()).collect()
}
