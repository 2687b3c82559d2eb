//! The messages of `sd_notify(3)`: who may send them, and what they mean.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::cgroup::RunCgroup;
use super::descendants::has_exited;
use super::notify_socket::{NotifySocket, SocketFile};
use super::pause::PausableDeadline;
use super::procfs;
use crate::sys::{self, DatagramSender, ReadableFd};

/// systemd's limit.
const MAX_MESSAGE: usize = 4096;
/// The number of messages that are read in a row before others get their turn: their sender may not stop.
const MAX_MESSAGES_IN_A_ROW: usize = 256;

/// The reports of the process so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NotifyState {
    pub(super) ready: bool,
    /// The last `STATUS=`.
    pub(super) status: Option<String>,
    /// The time to which it has extended its timeout.
    pub(super) extended_deadline: Option<Instant>,
    /// The process has begun to stop by itself.
    pub(super) stopping: bool,
    /// When it last reported to its watchdog.
    pub(super) last_watchdog: Option<Instant>,
    /// The process asks to be handled as if its watchdog had expired.
    pub(super) watchdog_triggered: bool,
}

/// Receives the messages of a process until it is dropped.
#[derive(Debug)]
pub(super) struct NotifyListener {
    reports: NotifyReports,
    _task: AbortOnDropHandle<()>,
    _file: SocketFile,
}

impl NotifyListener {
    /// Starts to receive messages from the process and its descendants. `was_ready`: an earlier program has received
    /// `READY=1`. `on_ready` is called for each message of a process that is ready.
    ///
    /// # Errors
    /// The socket can't be watched.
    pub(super) fn start(
        socket: NotifySocket,
        senders: MessageSenders,
        was_ready: bool,
        on_ready: impl Fn() + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let NotifySocket { fd, has_pidfds, file, .. } = socket;
        let fd = Arc::new(fd);
        let readable = ReadableFd::new(Arc::clone(&fd))?;
        let (sender, state) = watch::channel(NotifyState { ready: was_ready, ..NotifyState::default() });
        let on_ready = Box::new(on_ready);
        let inbox = Arc::new(Inbox { fd, has_pidfds, senders, state: Mutex::new(sender), on_ready });
        let receive = Arc::clone(&inbox).receive_messages(readable);
        let reports = NotifyReports { state, inbox: Some(inbox) };
        Ok(Self { reports, _task: AbortOnDropHandle::new(tokio::spawn(receive)), _file: file })
    }

    pub(super) fn reports(&self) -> NotifyReports {
        self.reports.clone()
    }
}

/// The reports of a process, and the messages that are still queued.
#[derive(Debug, Clone)]
pub(super) struct NotifyReports {
    state: watch::Receiver<NotifyState>,
    /// `None` in tests.
    inbox: Option<Arc<Inbox>>,
}

impl NotifyReports {
    /// The reports up to now, those included that are queued: a verdict must not depend on whether this program had the
    /// time to read them.
    pub(super) fn read_all(&mut self) -> NotifyState {
        if let Some(inbox) = &self.inbox {
            inbox.read_queued();
        }
        self.state.borrow_and_update().clone()
    }

    /// The reports, as far as they have been read.
    pub(super) fn last(&mut self) -> NotifyState {
        self.state.borrow_and_update().clone()
    }

    /// Waits for new reports; for ever where none can arrive any more.
    pub(super) async fn next(&mut self) -> NotifyState {
        if self.state.changed().await.is_err() {
            return std::future::pending().await;
        }
        self.last()
    }
}

/// The receiving end of a socket.
struct Inbox {
    fd: Arc<OwnedFd>,
    has_pidfds: bool,
    senders: MessageSenders,
    /// Locked while messages are read, which keeps them in order.
    state: Mutex<watch::Sender<NotifyState>>,
    on_ready: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inbox").field("fd", &self.fd).field("senders", &self.senders).finish_non_exhaustive()
    }
}

impl Inbox {
    async fn receive_messages(self: Arc<Self>, readable: ReadableFd) {
        loop {
            let Ok(mut ready) = readable.wait_readable().await else { return };
            if self.read_queued() {
                ready.clear_ready();
            } else {
                tokio::task::yield_now().await;
            }
        }
    }

    /// Reads what is queued. Returns whether that was all.
    fn read_queued(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..MAX_MESSAGES_IN_A_ROW {
            let mut text = [0; MAX_MESSAGE];
            // Descriptors in a message are closed here; a sender of BARRIER=1 waits for that.
            let (length, sender) = match sys::receive_datagram(self.fd.as_fd(), &mut text) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(error) => {
                    tracing::error!(%error, "receive notifications");
                    return true;
                }
            };
            if !sender.as_ref().is_some_and(|sender| self.senders.accepts(sender, self.has_pidfds)) {
                tracing::debug!(?sender, "ignored a notification from an unrelated process");
                continue;
            }
            let now = Instant::now();
            state.send_modify(|state| {
                parse_messages(&text[..length], now).for_each(|message| state.apply_message(message));
            });
            if state.borrow().ready {
                (self.on_ready)();
            }
        }
        false
    }
}

/// The processes that may report for a process: itself, and its living descendants.
#[derive(Debug)]
pub(super) struct MessageSenders {
    pub(super) main: i32,
    pub(super) main_pidfd: Arc<OwnedFd>,
    /// Contains its descendants. Without it, they are identified by their parents.
    pub(super) cgroup: Option<Arc<RunCgroup>>,
}

impl MessageSenders {
    /// What is read of a pid is true of the sender if that is still running afterwards: so nothing is accepted from one
    /// that has gone, nor from one in a PID namespace above, whose pid is 0.
    fn accepts(&self, sender: &DatagramSender, has_pidfds: bool) -> bool {
        let pid = sender.pid;
        let opened;
        let pidfd = match (&sender.pidfd, Pid::from_raw(pid)) {
            (_, None) => return false,
            (Some(pidfd), _) => pidfd,
            (None, Some(_)) if has_pidfds => return false,
            (None, Some(pid)) => match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
                Ok(pidfd) => {
                    opened = pidfd;
                    &opened
                }
                Err(_) => return false,
            },
        };
        let is_related = pid == self.main
            || match &self.cgroup {
                Some(cgroup) => cgroup.contains(pid),
                None => procfs::descends_from(pid, self.main).unwrap_or(false),
            };
        // The main process, too: once it has been reaped, its pid may be that of another one.
        let main_counts = self.cgroup.is_some() && pid != self.main || !has_exited(self.main_pidfd.as_fd());
        is_related && main_counts && !has_exited(pidfd.as_fd())
    }
}

/// The supported messages of the protocol. `RELOADING=1`, `MAINPID=`, `WATCHDOG_USEC=` and others have no effect.
#[derive(Debug, PartialEq, Eq)]
enum NotifyMessage {
    Ready,
    Status(String),
    ExtendTimeout(Instant),
    Stopping,
    Watchdog(Instant),
    WatchdogTrigger,
}

impl NotifyState {
    /// Resolves when the process has begun to stop by itself; without a listener, never.
    pub(super) async fn wait_stopping(reports: Option<NotifyReports>) {
        let Some(mut reports) = reports else { return std::future::pending().await };
        let mut state = reports.last();
        while !state.stopping {
            state = reports.next().await;
        }
    }

    /// Resolves when a process that is ready has not reported to its watchdog for this long, or asks for it: with
    /// whether it asked. Without a listener or an interval, never.
    pub(super) async fn wait_watchdog(reports: Option<NotifyReports>, interval: Option<Duration>) -> bool {
        let (Some(mut reports), Some(interval)) = (reports, interval) else {
            return std::future::pending().await;
        };
        let mut state = reports.last();
        let mut reported = None;
        // The first interval begins when the process is ready: its reports during the start do not count.
        let mut deadline = PausableDeadline::after(interval);
        let ready_at = Instant::now();
        loop {
            if state.watchdog_triggered {
                return true;
            }
            let last = state.last_watchdog.filter(|last| *last >= ready_at);
            if last != reported {
                reported = last;
                deadline = last.map_or(deadline, |last| PausableDeadline::since(last, interval));
            }
            tokio::select! {
                biased;
                next = reports.next() => state = next,
                () = deadline.wait() => {
                    state = reports.read_all();
                    let last = state.last_watchdog.filter(|last| *last >= ready_at);
                    if last == reported && !state.watchdog_triggered {
                        return false;
                    }
                }
            }
        }
    }

    fn apply_message(&mut self, message: NotifyMessage) {
        match message {
            NotifyMessage::Ready => self.ready = true,
            NotifyMessage::Status(status) => {
                tracing::debug!(status, "process status");
                self.status = Some(status);
            }
            NotifyMessage::ExtendTimeout(until) => self.extended_deadline = Some(until),
            NotifyMessage::Stopping => self.stopping = true,
            NotifyMessage::Watchdog(at) => self.last_watchdog = Some(at),
            NotifyMessage::WatchdogTrigger => self.watchdog_triggered = true,
        }
    }
}

fn parse_messages(text: &[u8], now: Instant) -> impl Iterator<Item = NotifyMessage> {
    text.split(|&byte| byte == b'\n').filter_map(move |line| {
        let line = std::str::from_utf8(line).ok()?;
        match line.split_once('=')? {
            ("READY", "1") => Some(NotifyMessage::Ready),
            ("STOPPING", "1") => Some(NotifyMessage::Stopping),
            ("WATCHDOG", "1") => Some(NotifyMessage::Watchdog(now)),
            ("WATCHDOG", "trigger") => Some(NotifyMessage::WatchdogTrigger),
            ("STATUS", status) => Some(NotifyMessage::Status(status.to_owned())),
            ("EXTEND_TIMEOUT_USEC", micros) => Some(NotifyMessage::ExtendTimeout(
                now.checked_add(Duration::from_micros(micros.parse().ok()?))?,
            )),
            _ => None,
        }
    })
}

/// Reads the messages of a datagram. Any text has at most one for each line.
#[cfg(feature = "testing")]
pub(crate) fn count_messages(datagram: &[u8]) -> usize {
    let mut state = NotifyState::default();
    let messages = parse_messages(datagram, Instant::now());
    messages.map(|message| state.apply_message(message)).count()
}

/// Reports without a socket.
#[cfg(test)]
pub(super) fn reports_of(state: watch::Receiver<NotifyState>) -> NotifyReports {
    NotifyReports { state, inbox: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::notify_socket::NotifyDir;
    use crate::process::settings::Process;
    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType,
    };
    use std::io::{IoSlice, Read as _};
    use std::mem::MaybeUninit;
    use tokio::time::sleep_until;

    fn pidfd_of(pid: i32) -> OwnedFd {
        let pid = Pid::from_raw(pid).expect("a pid");
        rustix::process::pidfd_open(pid, PidfdFlags::empty()).expect("it is running")
    }

    fn senders(main: i32) -> MessageSenders {
        MessageSenders { main, main_pidfd: Arc::new(pidfd_of(main)), cgroup: None }
    }

    #[test]
    fn only_a_living_process_and_its_descendants_are_senders() {
        let own = procfs::own_pid();
        let from = |pid, pidfd| DatagramSender { pid, pidfd };
        assert!(senders(own).accepts(&from(own, Some(pidfd_of(own))), true));
        assert!(!senders(own).accepts(&from(0, None), true), "of a PID namespace above");
        assert!(!senders(own).accepts(&from(own, None), true), "it has gone, so its pid tells nothing");
        assert!(senders(own).accepts(&from(own, None), false), "on a kernel before 6.5");
        let mut child = std::process::Command::new("/bin/sleep").arg("1000").spawn().expect("it starts");
        let pid = i32::try_from(child.id()).expect("a pid");
        assert!(senders(own).accepts(&from(pid, Some(pidfd_of(pid))), true), "a descendant");
        assert!(!senders(pid).accepts(&from(own, Some(pidfd_of(own))), true), "not the other way round");
        child.kill().expect("it is running");
        let of_child = pidfd_of(pid);
        while !has_exited(of_child.as_fd()) {
            std::thread::yield_now();
        }
        assert!(!senders(own).accepts(&from(pid, Some(of_child)), true), "it has exited");
        child.wait().expect("it has exited");
    }

    #[tokio::test]
    async fn a_barrier_is_released_after_all_earlier_messages() {
        let scratch = tempfile::tempdir().expect("a directory");
        let dir = Arc::new(NotifyDir::open(scratch.path()).expect("it is private"));
        let socket = dir.bind("1", &Process::new("/bin/true")).expect("it is bound");
        let listener =
            NotifyListener::start(socket, senders(procfs::own_pid()), false, || ()).expect("it listens");
        let sender = rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None).expect("a socket");
        let address = SocketAddrUnix::new(scratch.path().join("1")).expect("a short path");
        rustix::net::connect(&sender, &address).expect("it is there");
        rustix::net::send(&sender, b"READY=1", SendFlags::empty()).expect("it is sent");
        assert!(listener.reports().read_all().ready, "it is read although no task had the time");
        let (mut lifted, barrier) = io::pipe().expect("a pipe");
        let fds = [barrier.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
        rustix::net::sendmsg(
            &sender,
            &[IoSlice::new(b"STOPPING=1\nBARRIER=1")],
            &mut ancillary,
            SendFlags::empty(),
        )
        .expect("it is sent");
        drop(barrier);
        let end = tokio::task::spawn_blocking(move || lifted.read(&mut [0])).await.expect("it reads");
        assert_eq!(end.expect("the other end is closed"), 0);
        assert!(listener.reports().last().stopping);
    }

    #[tokio::test(start_paused = true)]
    async fn a_watchdog_expires_an_interval_after_the_last_report() {
        let (sender, notify) = watch::channel(NotifyState::default());
        let notify = reports_of(notify);
        let (started, interval) = (Instant::now(), Duration::from_secs(5));
        // A report before the process is ready.
        sender.send_modify(|state| state.last_watchdog = started.checked_sub(Duration::from_secs(4)));
        let expired = NotifyState::wait_watchdog(Some(notify.clone()), Some(interval));
        let reports = async {
            for _ in 0..3 {
                sleep_until(Instant::now() + Duration::from_secs(4)).await;
                sender.send_modify(|state| state.last_watchdog = Some(Instant::now()));
            }
            std::future::pending::<()>().await;
        };
        let triggered = tokio::select! { triggered = expired => triggered, () = reports => true };
        assert_eq!((triggered, started.elapsed().as_secs()), (false, 3 * 4 + 5));
        sender.send_modify(|state| state.watchdog_triggered = true);
        assert!(NotifyState::wait_watchdog(Some(notify), Some(interval)).await);
        assert_eq!(started.elapsed().as_secs(), 17, "at once");
    }

    #[tokio::test(start_paused = true)]
    async fn a_watchdog_expires_although_no_message_can_arrive_any_more() {
        let (sender, notify) = watch::channel(NotifyState::default());
        drop(sender);
        let started = Instant::now();
        assert!(!NotifyState::wait_watchdog(Some(reports_of(notify)), Some(Duration::from_secs(5))).await);
        assert_eq!(started.elapsed().as_secs(), 5);
    }

    #[tokio::test]
    async fn unknown_lines_are_skipped() {
        let now = Instant::now();
        let text = b"MAINPID=1\nWATCHDOG=2\nSTOPPING=0\nREADY=0\nSTATUS=50 % = half\nEXTEND_TIMEOUT_USEC=-1\n\xff=1\nREADY=1\nEXTEND_TIMEOUT_USEC=250\n";
        let extended = NotifyMessage::ExtendTimeout(now + Duration::from_micros(250));
        assert_eq!(
            parse_messages(text, now).collect::<Vec<_>>(),
            [NotifyMessage::Status("50 % = half".into()), NotifyMessage::Ready, extended]
        );
        assert_eq!(
            parse_messages(b"STOPPING=1\nWATCHDOG=1\nWATCHDOG=trigger", now).collect::<Vec<_>>(),
            [NotifyMessage::Stopping, NotifyMessage::Watchdog(now), NotifyMessage::WatchdogTrigger]
        );
    }
}
