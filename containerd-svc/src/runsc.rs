//! Reads gVisor's log from a file into the journal.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use nodekeel_logtree::parse::{self, LineContext};
use nodekeel_logtree::source::{FileError, FileSource};
use nodekeel_logtree::{Dn, Level, LogMessage, LogStore, WriterOptions};
use nodekeel_supervisor::{Context, Failure, Runnable};

/// Creates a runnable that reads a file into the journal, under the runnable's DN, and gives what it has read back to the
/// file system. Lines of runsc become leveled entries.
///
/// runsc never waits for this reader, also in the time in which this program does not run: the file then keeps its lines.
/// Only a line wakes the reader up. A removed file is created again.
pub fn runsc_log_reader(journal: LogStore, file: PathBuf) -> impl Runnable {
    move |ctx: Context| {
        let (journal, path) = (journal.clone(), file.clone());
        async move {
            let dn: Dn = ctx.dn().parse()?;
            let options = || WriterOptions::new("file").generation(ctx.generation()).line_parser(parse_line);
            let mut file = open_log(&path)?;
            ctx.signal_ready()?;
            loop {
                let mut lines = journal.line_writer(&dn, options());
                tokio::select! {
                    biased;
                    cancelled = ctx.canceled() => return Err(Failure::from(cancelled)),
                    removed = file.copy_lines(&mut lines) => removed?,
                }
                tracing::warn!("{} was removed; creating it again", path.display());
                file = open_log(&path)?;
            }
        }
    }
}

/// Opens the file. A FIFO of an earlier release next to it becomes a link to it: the runsc of containers that were created
/// with that path opens it in every command, and would wait for a reader.
fn open_log(path: &Path) -> Result<FileSource, FileError> {
    let file = FileSource::open(path)?;
    let fifo = path.with_extension("fifo");
    if fs::symlink_metadata(&fifo).is_ok_and(|found| found.file_type().is_fifo())
        && let Err(error) = fs::remove_file(&fifo).and_then(|()| std::os::unix::fs::symlink(path, &fifo))
    {
        tracing::warn!(
            "commands of older containers in gVisor wait: can't replace {}: {error}",
            fifo.display()
        );
    }
    Ok(file)
}

/// runsc logs in the format of glog with an additional severity.
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
    message.or_else(|| parse::failure_line(line))
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn lines_of_runsc_are_parsed() {
        let context = &LineContext::new(SystemTime::now());
        let runsc =
            parse_line("W1121 18:01:02.123456   12345 boot.go:52] sandbox started", context).expect("glog");
        assert_eq!((runsc.level, runsc.text.as_str()), (Level::Warn, "sandbox started"));
        let debug = parse_line("D1121 18:01:02.123456       1 loader.go:9] args", context).expect("glog");
        assert_eq!((debug.level, debug.line, debug.text.as_str()), (Level::Debug, 9, "args"));
        assert!(parse_line("Debugging is on", context).is_none());
        let crash = parse_line("panic: no such thing", context).expect("a crash of a Go program");
        assert_eq!(crash.level, Level::Fatal);
    }

    #[tokio::test]
    async fn a_fifo_of_an_earlier_release_becomes_a_link_to_the_file() {
        let scratch = tempfile::tempdir().expect("a directory");
        let (path, fifo) = (scratch.path().join("log"), scratch.path().join("log.fifo"));
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).expect("created");
        open_log(&path).expect("opened");
        // It would wait for ever.
        fs::File::options().append(true).open(&fifo).expect("opened");
        assert_eq!(fs::read_link(&fifo).expect("a link"), path);
    }
}
