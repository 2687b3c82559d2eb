//! Strangers that hold the connections of a port, or open and close them.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The time that a stranger waits for a connection. The kernel drops those for which its queue has no room.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(100);

/// What the strangers do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stranger {
    /// They send nothing.
    Idle,
    /// They send the head of a request, byte by byte.
    SlowHead,
    /// They send the body of a request, byte by byte.
    SlowBody,
    /// They close the connection at once.
    Closing,
}

impl Stranger {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Idle, Self::SlowHead, Self::SlowBody, Self::Closing];

    fn first_bytes(self) -> &'static [u8] {
        match self {
            Self::Idle | Self::Closing => b"",
            Self::SlowHead => b"GET /healthz HTTP/1.1\r\nHost: node\r\nX: ",
            Self::SlowBody => b"POST /healthz HTTP/1.1\r\nHost: node\r\nContent-Length: 1000000\r\n\r\n",
        }
    }
}

/// The turns of the thread until each stranger has tried again, and their time.
const TURNS: usize = 400;
const TURN: Duration = Duration::from_millis(10);

/// The newest connections, of which slow strangers send a byte in each turn: a server has closed the others.
const SENDERS: usize = 100;

/// A thread that opens connections for many strangers, of whom each tries again every 4 s. It ends when the value is dropped.
#[derive(Debug)]
pub struct ConnectionFlood {
    address: SocketAddr,
    stranger: Stranger,
    /// Dropped to end the thread.
    running: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<usize>>,
}

impl ConnectionFlood {
    /// Starts so many strangers, fewer where this process may not open twice as many files.
    pub fn start(address: SocketAddr, stranger: Stranger, count: usize) -> Self {
        let count = count.min(raise_open_files());
        let (running, is_over) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let (mut connections, mut opened) = (VecDeque::new(), 0);
            while is_over.recv_timeout(TURN) == Err(RecvTimeoutError::Timeout) {
                for _ in 0..count.div_ceil(TURNS) {
                    let Ok(mut connection) = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) else {
                        continue;
                    };
                    opened += 1;
                    if stranger == Stranger::Closing {
                        continue;
                    }
                    // The server may have closed it already.
                    let _ = connection.write(stranger.first_bytes());
                    connections.push_back(connection);
                    if connections.len() > count {
                        connections.pop_front();
                    }
                }
                let goes_on = matches!(stranger, Stranger::SlowHead | Stranger::SlowBody);
                for connection in connections.iter_mut().rev().take(SENDERS).filter(|_| goes_on) {
                    let _ = connection.write(b"a");
                }
            }
            opened
        });
        Self { address, stranger, running: Some(running), thread: Some(thread) }
    }

    /// Asks the paths of the port in turn, and calls `check`, for a quarter of `NODEKEEL_FLOOD_SECONDS`, by default 8.
    ///
    /// # Panics
    /// A path is not answered within the timeout, or the strangers have had no connection.
    pub fn probe_meanwhile(mut self, paths: &[&str], timeout: Duration, mut check: impl FnMut()) {
        let seconds =
            std::env::var("NODEKEEL_FLOOD_SECONDS").map_or(8, |count| count.parse().expect("a number"));
        let end = Instant::now() + Duration::from_secs(seconds) / 4;
        let (mut probes, mut slowest) = (0, Duration::ZERO);
        while Instant::now() < end {
            for path in paths {
                let took = probe_http(self.address, path, timeout);
                let took = took.unwrap_or_else(|error| panic!("{path}, {:?}: {error:#}", self.stranger));
                (probes, slowest) = (probes + 1, slowest.max(took));
            }
            check();
        }
        let opened = self.end();
        assert!(opened > 0, "no stranger was connected");
        println!("{:?}: {opened} connections; {probes} probes, the slowest in {slowest:?}", self.stranger);
    }

    /// Ends the thread, and returns how many connections it has opened.
    fn end(&mut self) -> usize {
        self.running = None;
        self.thread.take().map_or(0, |thread| thread.join().unwrap_or(0))
    }
}

impl Drop for ConnectionFlood {
    fn drop(&mut self) {
        self.end();
    }
}

/// Lets this process open as many files as it may, and returns how many connections leave enough for all else.
fn raise_open_files() -> usize {
    let maximum = getrlimit(Resource::Nofile).maximum;
    // It can be raised to the hard limit.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    maximum.map_or(usize::MAX, |files| usize::try_from(files / 2).unwrap_or(usize::MAX))
}

/// Asks a path of a port as the kubelet's probe does: a new connection, and one timeout for all of it. Returns the time that the
/// answer took.
///
/// # Errors
/// There is no answer with status 200 within the timeout.
fn probe_http(address: SocketAddr, path: &str, timeout: Duration) -> Result<Duration> {
    let started = Instant::now();
    let left =
        || timeout.checked_sub(started.elapsed()).filter(|left| !left.is_zero()).context("no answer in time");
    let mut connection = TcpStream::connect_timeout(&address, timeout).context("connect")?;
    connection
        .write_all(format!("GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").as_bytes())?;
    let mut answer = Vec::new();
    loop {
        connection.set_read_timeout(Some(left()?))?;
        let mut bytes = [0; 4096];
        match connection.read(&mut bytes) {
            Ok(0) => break,
            Ok(count) => answer.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error).context("read"),
        }
    }
    let answer = String::from_utf8_lossy(&answer);
    ensure!(answer.starts_with("HTTP/1.1 200 "), "{answer:?}");
    Ok(started.elapsed())
}
