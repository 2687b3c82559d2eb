//! Carries a process' output to its writers, and keeps the last lines.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::net::unix::pipe;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// How many lines of output the record of an end keeps.
pub const MAX_TAIL_LINES: usize = 10;
/// How many bytes of each of these lines it keeps.
pub const MAX_TAIL_LINE: usize = 512;

/// How much is read at once: as much as a pipe holds.
const READ: usize = 64 * 1024;
/// How many reads one task may do before others get their turn.
const READS_IN_A_ROW: usize = 16;
/// How much is read after the end, when somebody who lives on still writes: as much as a pipe can be made to hold.
const LAST_BYTES: usize = 1024 * 1024;

/// Where one stream goes.
pub(super) type Sink = Box<dyn io::Write + Send>;

/// The tasks that read what a process writes, for as long as this lives.
///
/// They read whatever happens, so that no process ever waits for room in its pipe.
#[derive(Debug)]
pub(super) struct Pumps {
    tasks: Vec<AbortOnDropHandle<()>>,
    tail: Arc<Mutex<Tail>>,
    ended: CancellationToken,
}

impl Pumps {
    /// Starts reading.
    pub(super) fn start(streams: [(OwnedFd, Sink); 2]) -> io::Result<Self> {
        let (tail, ended) = (Arc::<Mutex<Tail>>::default(), CancellationToken::new());
        let mut tasks = Vec::with_capacity(streams.len());
        for (index, (fd, sink)) in streams.into_iter().enumerate() {
            let source = pipe::Receiver::from_owned_fd(fd)?;
            let pump = Pump { source, sink, index, tail: Arc::clone(&tail) };
            tasks.push(AbortOnDropHandle::new(tokio::spawn(pump.run(ended.clone()))));
        }
        Ok(Self { tasks, tail, ended })
    }

    /// Reads what is there, closes the writers, and gives the last lines.
    pub(super) async fn finish(self) -> Vec<String> {
        self.ended.cancel();
        for task in self.tasks {
            // A panic of a writer ends its stream, not the process' supervision.
            let _ = task.await;
        }
        self.tail.lock().unwrap_or_else(PoisonError::into_inner).lines()
    }
}

struct Pump {
    source: pipe::Receiver,
    sink: Sink,
    index: usize,
    tail: Arc<Mutex<Tail>>,
}

impl Pump {
    async fn run(mut self, ended: CancellationToken) {
        loop {
            tokio::select! {
                readable = self.source.readable() => {
                    if readable.is_err() || self.read(READS_IN_A_ROW) {
                        return;
                    }
                    tokio::task::yield_now().await;
                }
                () = ended.cancelled() => {
                    self.read(LAST_BYTES / READ);
                    return;
                }
            }
        }
    }

    /// Whether this was the last of it. The buffer lives only while there is something to read: an idle process costs
    /// none.
    fn read(&mut self, times: usize) -> bool {
        let mut buffer = vec![0; READ];
        for _ in 0..times {
            match self.source.try_read(&mut buffer) {
                Ok(0) => return true,
                Ok(count) => {
                    // What the sink can't take is lost; the process goes on.
                    let _ = self.sink.write_all(&buffer[..count]);
                    self.tail
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .add(self.index, &buffer[..count]);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return true,
            }
        }
        false
    }
}

/// The last lines of two streams, in the order in which the lines ended.
#[derive(Debug, Default)]
struct Tail {
    lines: VecDeque<Vec<u8>>,
    /// The beginnings of lines that have not ended.
    partial: [Vec<u8>; 2],
}

impl Tail {
    fn add(&mut self, stream: usize, chunk: &[u8]) {
        let Some(last_end) = memrchr(chunk) else {
            self.extend(stream, chunk);
            return;
        };
        let mut rest = &chunk[..last_end];
        // Only the last lines of a long chunk are looked at; the others would be pushed out again.
        let mut found = Vec::with_capacity(MAX_TAIL_LINES);
        while found.len() < MAX_TAIL_LINES {
            match memrchr(rest) {
                Some(end) => {
                    found.push(&rest[end + 1..]);
                    rest = &rest[..end];
                }
                None => {
                    self.extend(stream, rest);
                    let first = std::mem::take(&mut self.partial[stream]);
                    self.push(first);
                    break;
                }
            }
        }
        self.partial[stream].clear();
        for line in found.into_iter().rev() {
            self.push(line[..line.len().min(MAX_TAIL_LINE)].to_vec());
        }
        self.extend(stream, &chunk[last_end + 1..]);
    }

    fn extend(&mut self, stream: usize, bytes: &[u8]) {
        let partial = &mut self.partial[stream];
        let room = MAX_TAIL_LINE.saturating_sub(partial.len());
        partial.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    fn push(&mut self, line: Vec<u8>) {
        if self.lines.len() == MAX_TAIL_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }

    fn lines(&self) -> Vec<String> {
        let partial = self.partial.iter().filter(|partial| !partial.is_empty());
        let all: Vec<_> = self.lines.iter().chain(partial).collect();
        all[all.len().saturating_sub(MAX_TAIL_LINES)..].iter().map(|line| printable(line)).collect()
    }
}

fn memrchr(bytes: &[u8]) -> Option<usize> {
    bytes.iter().rposition(|&byte| byte == b'\n')
}

/// Text that can go to any terminal.
fn printable(line: &[u8]) -> String {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let text = String::from_utf8_lossy(line);
    let mut safe = String::with_capacity(text.len());
    for char in text.chars() {
        let char = if char.is_control() && char != '\t' { char::REPLACEMENT_CHARACTER } else { char };
        if safe.len() + char.len_utf8() > MAX_TAIL_LINE {
            break;
        }
        safe.push(char);
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(chunks: &[(usize, &str)]) -> Vec<String> {
        let mut tail = Tail::default();
        for (stream, chunk) in chunks {
            tail.add(*stream, chunk.as_bytes());
        }
        tail.lines()
    }

    #[test]
    fn lines_are_put_together_per_stream_and_kept_as_they_end() {
        assert_eq!(
            lines(&[(0, "a"), (1, "x\n"), (0, "b\nc\n\nd"), (1, "y")]),
            ["x", "ab", "c", "", "d", "y"]
        );
    }

    #[test]
    fn however_it_is_cut_the_last_ten_are_the_same() {
        let text: String = (0..40).map(|number| format!("line {number}\n")).collect();
        let expected: Vec<_> = (30..40).map(|number| format!("line {number}")).collect();
        for size in 1..text.len() {
            let mut tail = Tail::default();
            text.as_bytes().chunks(size).for_each(|chunk| tail.add(0, chunk));
            assert_eq!(tail.lines(), expected, "in chunks of {size}");
        }
    }

    #[test]
    fn an_endless_line_keeps_its_beginning_and_no_more() {
        let mut tail = Tail::default();
        tail.add(0, b"start ");
        for _ in 0..100 {
            tail.add(0, &[b'x'; 4096]);
        }
        assert_eq!(tail.partial[0].len(), MAX_TAIL_LINE);
        assert!(tail.lines()[0].starts_with("start xxx"));
    }

    #[test]
    fn no_byte_can_harm_a_terminal_or_outgrow_its_room() {
        let mut tail = Tail::default();
        tail.add(0, b"\x1b[2Jred\tend\r\n");
        tail.add(0, &[0xff; 1000]);
        let lines = tail.lines();
        assert_eq!(lines[0], "\u{fffd}[2Jred\tend");
        assert!(lines[1].len() <= MAX_TAIL_LINE && lines[1].starts_with('\u{fffd}'));
    }
}
