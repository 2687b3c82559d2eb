//! Copies the output of a process to its writers, and keeps the last lines.

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::buffer::spare_capacity;
use tokio::net::unix::pipe;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::output::{SinkWriter, printable_text};

/// The maximum number of output lines that a [`ProcessExit`](super::ProcessExit) keeps.
pub const MAX_TAIL_LINES: usize = 10;
/// The maximum length of each of these lines, in bytes.
pub const MAX_TAIL_LINE_BYTES: usize = 512;

/// The size of a read, the default capacity of a pipe.
const READ_SIZE: usize = 64 * 1024;
/// The number of reads of a task before it yields.
const READS_IN_A_ROW: usize = 16;
/// The number of bytes that are read after the exit if a survivor keeps writing: the maximum capacity of a pipe.
const MAX_FINAL_BYTES: usize = 1024 * 1024;
/// The destination of the output of a process.
pub(super) enum OutputTarget {
    /// The writers of each stream, each of which gets all of it.
    Sinks([Vec<SinkWriter>; 2]),
    /// Only its last lines are kept.
    Nowhere,
}

/// The tasks that read the output of a process, until this is dropped.
///
/// They read even if the writers fail, so that a process never blocks on a full pipe.
#[derive(Debug)]
pub(super) struct OutputReaders {
    /// Each returns how its writer panicked, if it did.
    tasks: Vec<AbortOnDropHandle<Option<String>>>,
    tail: Arc<Mutex<OutputTail>>,
    ended: CancellationToken,
}

impl OutputReaders {
    pub(super) fn start(readers: [OwnedFd; 2], target: OutputTarget) -> io::Result<Self> {
        let sinks = match target {
            OutputTarget::Sinks(sinks) => sinks,
            OutputTarget::Nowhere => [Vec::new(), Vec::new()],
        };
        let (tail, ended) = (Arc::<Mutex<OutputTail>>::default(), CancellationToken::new());
        let mut tasks = Vec::with_capacity(readers.len());
        for (index, (fd, sinks)) in readers.into_iter().zip(sinks).enumerate() {
            let source = pipe::Receiver::from_owned_fd(fd)?;
            let pump = StreamReader { source, sinks, index, tail: Arc::clone(&tail) };
            tasks.push(AbortOnDropHandle::new(tokio::spawn(pump.run(ended.clone()))));
        }
        Ok(Self { tasks, tail, ended })
    }

    /// Reads the remaining output, closes the writers, and returns the last lines, and the problem of a writer.
    pub(super) async fn finish(mut self) -> (Vec<String>, Option<Arc<str>>) {
        self.ended.cancel();
        let mut problem = None;
        for task in std::mem::take(&mut self.tasks) {
            let panic = task.await.unwrap_or_else(|error| Some(error.to_string()));
            problem = problem.or(panic.map(|panic| format!("the output sink panicked: {panic}")));
        }
        (self.last_lines(), problem.map(Arc::from))
    }

    pub(super) fn last_lines(&self) -> Vec<String> {
        self.tail.lock().unwrap_or_else(PoisonError::into_inner).lines()
    }
}

struct StreamReader {
    source: pipe::Receiver,
    sinks: Vec<SinkWriter>,
    index: usize,
    tail: Arc<Mutex<OutputTail>>,
}

impl StreamReader {
    /// Returns how the writer panicked, if it did.
    async fn run(mut self, ended: CancellationToken) -> Option<String> {
        loop {
            tokio::select! {
                readable = self.source.readable() => {
                    if readable.is_err() || self.read(READS_IN_A_ROW, pipe::Receiver::try_read_buf) {
                        break;
                    }
                    tokio::task::yield_now().await;
                }
                () = ended.cancelled() => {
                    // All that the process has written is in the pipe. A survivor that keeps writing must not hold up
                    // the exit.
                    self.read(MAX_FINAL_BYTES / READ_SIZE, read_now);
                    break;
                }
            }
        }
        self.sinks.iter().find_map(SinkWriter::panic).map(str::to_owned)
    }

    /// Returns whether the stream has ended. The buffer exists only while there is output: an idle process
    /// needs no memory for it.
    fn read(
        &mut self,
        times: usize,
        read: impl Fn(&pipe::Receiver, &mut Vec<u8>) -> io::Result<usize>,
    ) -> bool {
        let mut buffer = Vec::with_capacity(READ_SIZE);
        for _ in 0..times {
            buffer.clear();
            match read(&self.source, &mut buffer) {
                Ok(0) => return true,
                Ok(_) => {
                    // Bytes that the sink rejects are lost; the process continues.
                    self.sinks.iter_mut().for_each(|sink| _ = sink.write_all(&buffer));
                    self.tail
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .append_chunk(self.index, &buffer);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return true,
            }
        }
        false
    }
}

/// Reads what is in the pipe. tokio's own read finds nothing until the runtime has been told of it, which may be after the end of
/// the process.
fn read_now(source: &pipe::Receiver, buffer: &mut Vec<u8>) -> io::Result<usize> {
    Ok(rustix::io::read(source, spare_capacity(buffer))?)
}

/// The last lines of two streams, in the order of their completion.
#[derive(Debug, Default)]
struct OutputTail {
    lines: VecDeque<Vec<u8>>,
    /// The beginnings of incomplete lines.
    partial: [Vec<u8>; 2],
}

impl OutputTail {
    fn append_chunk(&mut self, stream: usize, chunk: &[u8]) {
        let Some(last_end) = last_newline(chunk) else {
            self.extend_partial(stream, chunk);
            return;
        };
        let mut rest = &chunk[..last_end];
        // Only the last lines of a long chunk are copied; later lines would evict the others.
        let mut found = Vec::with_capacity(MAX_TAIL_LINES);
        while found.len() < MAX_TAIL_LINES {
            match last_newline(rest) {
                Some(end) => {
                    found.push(&rest[end + 1..]);
                    rest = &rest[..end];
                }
                None => {
                    self.extend_partial(stream, rest);
                    let first = std::mem::take(&mut self.partial[stream]);
                    self.push_line(first);
                    break;
                }
            }
        }
        // Its line is complete now, or is older than the lines that the tail keeps.
        self.partial[stream].clear();
        for line in found.into_iter().rev() {
            self.push_line(line[..line.len().min(MAX_TAIL_LINE_BYTES)].to_vec());
        }
        self.extend_partial(stream, &chunk[last_end + 1..]);
    }

    fn extend_partial(&mut self, stream: usize, bytes: &[u8]) {
        let partial = &mut self.partial[stream];
        let room = MAX_TAIL_LINE_BYTES.saturating_sub(partial.len());
        partial.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    fn push_line(&mut self, line: Vec<u8>) {
        if self.lines.len() == MAX_TAIL_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }

    fn lines(&self) -> Vec<String> {
        let partial = self.partial.iter().filter(|partial| !partial.is_empty());
        let all: Vec<_> = self.lines.iter().chain(partial).collect();
        all[all.len().saturating_sub(MAX_TAIL_LINES)..].iter().map(|line| sanitize_line(line)).collect()
    }
}

fn last_newline(bytes: &[u8]) -> Option<usize> {
    bytes.iter().rposition(|&byte| byte == b'\n')
}

/// Converts a line to text that is safe to print on any terminal, of at most [`MAX_TAIL_LINE_BYTES`].
pub(super) fn sanitize_line(line: &[u8]) -> String {
    let mut safe = printable_text(line);
    while safe.len() > MAX_TAIL_LINE_BYTES {
        safe.pop();
    }
    safe
}

#[cfg(test)]
mod tests {
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    fn lines(chunks: &[(usize, &str)]) -> Vec<String> {
        let mut tail = OutputTail::default();
        for (stream, chunk) in chunks {
            tail.append_chunk(*stream, chunk.as_bytes());
        }
        tail.lines()
    }

    /// The end of a process may be known before the runtime has looked at its pipes.
    #[tokio::test]
    async fn what_was_written_before_the_end_is_read_even_if_nothing_has_told_of_it() {
        let pipes = [(); 2].map(|()| pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap());
        let [(out, to_out), (err, to_err)] = pipes;
        let readers = OutputReaders::start([out, err], OutputTarget::Nowhere).unwrap();
        rustix::io::write(&to_out, b"stuck\n").unwrap();
        rustix::io::write(&to_err, b"why").unwrap();
        // A writer that survives does not hold it up.
        drop(to_err);
        assert_eq!(readers.finish().await.0, ["stuck", "why"]);
    }

    #[test]
    fn lines_are_assembled_per_stream_in_order_of_completion() {
        assert_eq!(
            lines(&[(0, "a"), (1, "x\n"), (0, "b\nc\n\nd"), (1, "y")]),
            ["x", "ab", "c", "", "d", "y"]
        );
    }

    #[test]
    fn the_last_ten_lines_do_not_depend_on_the_chunk_size() {
        let text: String = (0..40).map(|number| format!("line {number}\n")).collect();
        let expected: Vec<_> = (30..40).map(|number| format!("line {number}")).collect();
        for size in 1..text.len() {
            let mut tail = OutputTail::default();
            text.as_bytes().chunks(size).for_each(|chunk| tail.append_chunk(0, chunk));
            assert_eq!(tail.lines(), expected, "in chunks of {size}");
        }
    }

    #[test]
    fn an_endless_line_keeps_only_its_beginning() {
        let mut tail = OutputTail::default();
        tail.append_chunk(0, b"start ");
        for _ in 0..100 {
            tail.append_chunk(0, &[b'x'; 4096]);
        }
        assert_eq!(tail.partial[0].len(), MAX_TAIL_LINE_BYTES);
        assert!(tail.lines()[0].starts_with("start xxx"));
    }

    #[test]
    fn tail_lines_are_printable_and_bounded() {
        let mut tail = OutputTail::default();
        tail.append_chunk(0, b"\x1b[2Jred\tend\r\n");
        tail.append_chunk(0, "a\u{9b}b\u{7f}c\u{202e}d\u{61c}e\u{2066}f\u{2028}\n".as_bytes());
        tail.append_chunk(0, &[0xff; 1000]);
        let lines = tail.lines();
        let replaced = "\u{fffd}[2Jred\tend a\u{fffd}b\u{fffd}c\u{fffd}d\u{fffd}e\u{fffd}f\u{fffd}";
        assert_eq!(lines[..2].join(" "), replaced);
        assert!(lines[2].len() <= MAX_TAIL_LINE_BYTES && lines[2].starts_with('\u{fffd}'));
    }
}
