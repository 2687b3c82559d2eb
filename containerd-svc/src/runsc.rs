//! Reads gVisor's log from a FIFO into the journal.

use std::fs;
use std::path::{Path, PathBuf};

use nodekeel_logtree::parse::{self, LineContext};
use nodekeel_logtree::source::{FifoError, FifoSource};
use nodekeel_logtree::{Dn, Level, LineWriter, LogMessage, LogStore, WriterOptions};
use nodekeel_supervisor::{Context, Failure, Runnable};

/// Creates a runnable that reads a FIFO into the journal, under the runnable's DN. Lines of runsc and of its
/// shim become leveled entries.
///
/// Only a line wakes it up. A regular file at the FIFO's path (created by a writer that opened it first) is
/// replaced by a FIFO; any other file there is an error. A removed FIFO is created again, and writers that
/// still have the old one open are read until they close it.
pub fn runsc_log_reader(journal: LogStore, fifo: PathBuf) -> impl Runnable {
    move |ctx: Context| {
        let (journal, path) = (journal.clone(), fifo.clone());
        async move {
            let dn: Dn = ctx.dn().parse()?;
            // A writer for each FIFO: lines of an old one and of its successor must not mix.
            let writer = || {
                journal.line_writer(
                    &dn,
                    WriterOptions::new("fifo").generation(ctx.generation()).line_parser(parse_line),
                )
            };
            let mut fifo = open_fifo(&path)?;
            ctx.signal_ready()?;
            loop {
                let mut lines = writer();
                let removed = fifo.watch_removal()?;
                tokio::select! {
                    biased;
                    cancelled = ctx.canceled() => return Err(Failure::from(cancelled)),
                    ended = fifo.copy_lines(&mut lines) => match ended {
                        Err(error) => return Err(error.into()),
                    },
                    removed = removed => removed?,
                }
                tracing::warn!("fifo {} was removed; creating it again", path.display());
                // The new FIFO first: writers that open the path from now on find it.
                let old = std::mem::replace(&mut fifo, open_fifo(&path)?);
                ctx.spawn_joined(drain_removed_fifo(ctx.clone(), old, lines))?;
            }
        }
    }
}

/// Reads the lines that writers still write into a removed FIFO.
async fn drain_removed_fifo(ctx: Context, fifo: FifoSource, mut lines: LineWriter) {
    tokio::select! {
        biased;
        _ = ctx.canceled() => {}
        drained = fifo.copy_to_end(&mut lines) => if let Err(error) = drained {
            tracing::warn!("read from a removed fifo: {error}");
        }
    }
}

/// runsc logs in the format of glog with an additional severity, its shim in that of containerd.
///
/// *Source:* gVisor's pkg/log/glog.go.
fn parse_line(line: &str, context: &LineContext) -> Option<LogMessage> {
    let debug = || {
        // klog has no debug lines, so it is parsed as an informational one, and gets its level back.
        let mut message = parse::klog_line(&format!("I{}", line.strip_prefix('D')?), context)?;
        message.level = Level::Debug;
        Some(message)
    };
    let message = parse::klog_line(line, context).or_else(debug);
    message.or_else(|| parse::logfmt_line(line, context)).or_else(|| parse::failure_line(line))
}

/// Opens the FIFO, and creates it if it is missing.
pub(crate) fn open_fifo(path: &Path) -> Result<FifoSource, FifoError> {
    match FifoSource::open(path) {
        Err(FifoError::NotFifo { .. }) if is_file(path) => {
            tracing::warn!("{} is a regular file; replacing it by a fifo", path.display());
            // If the removal fails, the next open reports it.
            drop(fs::remove_file(path));
            FifoSource::open(path)
        }
        opened => opened,
    }
}

fn is_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file())
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn lines_of_runsc_and_of_its_shim_are_parsed() {
        let context = &LineContext::new(SystemTime::now());
        let runsc =
            parse_line("W1121 18:01:02.123456   12345 boot.go:52] sandbox started", context).expect("glog");
        assert_eq!((runsc.level, runsc.text.as_str()), (Level::Warn, "sandbox started"));
        let debug = parse_line("D1121 18:01:02.123456       1 loader.go:9] args", context).expect("glog");
        assert_eq!((debug.level, debug.line, debug.text.as_str()), (Level::Debug, 9, "args"));
        assert!(parse_line("Debugging is on", context).is_none());
        let shims = parse_line(r#"time="2026-11-21T11:26:16.7Z" level=info msg="shim ready""#, context)
            .expect("logfmt");
        assert_eq!(shims.text, "shim ready");
        let crash = parse_line("panic: no such thing", context).expect("a crash of a Go program");
        assert_eq!(crash.level, Level::Fatal);
    }

    #[tokio::test]
    async fn a_file_at_the_fifo_path_is_replaced_and_a_directory_is_not() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("log.fifo");
        fs::write(&path, "an old log").expect("written");
        open_fifo(&path).expect("replaced");
        assert!(!is_file(&path));
        let directory = scratch.path().join("directory");
        fs::create_dir(&directory).expect("created");
        assert!(matches!(open_fifo(&directory), Err(FifoError::NotFifo { .. })));
    }
}
