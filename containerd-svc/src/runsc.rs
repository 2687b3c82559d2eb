//! gVisor's log: a FIFO into the journal.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nodekeel_logtree::source::{Fifo, FifoError};
use nodekeel_logtree::{Dn, Journal, Level, LineWriter, Message, WriterOptions, parse};
use nodekeel_supervisor::{Context, Failure, Runnable};

/// Reads a FIFO into the journal, at the name that the runnable has in the tree. Lines of runsc and of its shim become
/// leveled entries.
///
/// Nothing wakes it up but a line. Something else in the FIFO's place is replaced by one where it is a regular file (a
/// writer that came first has made it), and is an error otherwise. Where the FIFO is removed it is made again, and those
/// who have the old one open are read until they are gone.
pub fn runsc_log(journal: Journal, fifo: PathBuf) -> impl Runnable {
    move |ctx: Context| {
        let (journal, path) = (journal.clone(), fifo.clone());
        async move {
            let dn: Dn = ctx.dn().parse()?;
            let writer =
                || journal.writer(&dn, WriterOptions::new("fifo").generation(ctx.generation()).parser(line));
            let mut fifo = open(&path)?;
            ctx.ready()?;
            loop {
                let mut lines = writer();
                let removed = fifo.removed()?;
                tokio::select! {
                    biased;
                    cancelled = ctx.cancelled() => return Err(Failure::from(cancelled)),
                    ended = fifo.pump(&mut lines) => match ended {
                        Err(error) => return Err(error.into()),
                    },
                    removed = removed => removed?,
                }
                tracing::warn!("{} was removed; it is made again", path.display());
                let old = std::mem::replace(&mut fifo, open(&path)?);
                ctx.spawn(rest(ctx.clone(), old, lines))?;
            }
        }
    }
}

/// What those write who have a FIFO open that has no name any more.
async fn rest(ctx: Context, fifo: Fifo, mut lines: LineWriter) {
    tokio::select! {
        biased;
        _ = ctx.cancelled() => {}
        drained = fifo.drain(&mut lines) => if let Err(error) = drained {
            tracing::warn!("what is written into a fifo that was removed can't be read: {error}");
        }
    }
}

/// runsc writes as glog does, with a severity more, and its shim as containerd does.
///
/// *Source:* gVisor's pkg/log/glog.go.
fn line(line: &str, now: SystemTime) -> Option<Message> {
    let debug = || {
        let message = parse::klog(&format!("I{}", line.strip_prefix('D')?), now)?;
        Some(Message { level: Level::Debug, ..message })
    };
    parse::klog(line, now).or_else(debug).or_else(|| parse::logfmt(line, now))
}

/// Opens the FIFO, which is made where it is not there.
pub(crate) fn open(path: &Path) -> Result<Fifo, FifoError> {
    match Fifo::open(path) {
        Err(FifoError::NotFifo { .. }) if is_file(path) => {
            tracing::warn!("{} is a file; it is replaced by a fifo", path.display());
            // Where it can't be removed, the next try says so.
            drop(fs::remove_file(path));
            Fifo::open(path)
        }
        opened => opened,
    }
}

fn is_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_runsc_and_of_its_shim_are_understood() {
        let now = SystemTime::now();
        let own = line("W1121 18:01:02.123456   12345 boot.go:52] sandbox started", now).expect("glog");
        assert_eq!((own.level, own.text.as_str()), (Level::Warn, "sandbox started"));
        let debug = line("D1121 18:01:02.123456       1 loader.go:9] args", now).expect("glog");
        assert_eq!((debug.level, debug.line, debug.text.as_str()), (Level::Debug, 9, "args"));
        assert!(line("Debugging is on", now).is_none());
        let shims =
            line(r#"time="2026-11-21T11:26:16.7Z" level=info msg="shim ready""#, now).expect("logfmt");
        assert_eq!(shims.text, "shim ready");
        assert!(line("panic: no such thing", now).is_none());
    }

    #[tokio::test]
    async fn a_file_in_its_place_is_replaced_and_a_directory_is_not() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("log.fifo");
        fs::write(&path, "an old log").expect("written");
        open(&path).expect("replaced");
        assert!(!is_file(&path));
        let directory = scratch.path().join("directory");
        fs::create_dir(&directory).expect("made");
        assert!(matches!(open(&directory), Err(FifoError::NotFifo { .. })));
    }
}
