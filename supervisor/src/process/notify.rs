//! The receiving end of `sd_notify(3)`.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::task::AbortOnDropHandle;

use super::mark::ProcessMark;
use super::procfs;
use crate::sys::{self, DatagramSender, ReadableFd};

/// systemd's limit.
const MAX_MESSAGE: usize = 4096;

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

/// A socket that is bound before its process starts.
#[derive(Debug)]
pub(super) struct NotifySocket {
    fd: ReadableFd,
    env_value: String,
}

impl NotifySocket {
    /// Binds it in the abstract namespace: it needs no directory and leaves nothing behind, but a process in
    /// another network namespace can't reach it. The kernel chooses a free name, so no other process can
    /// bind it before.
    pub(super) fn bind() -> io::Result<Self> {
        let fd = open_socket()?;
        rustix::net::bind(&fd, &SocketAddrUnix::new_unnamed())?;
        let bound = SocketAddrUnix::try_from(rustix::net::getsockname(&fd)?)?;
        let name = bound.abstract_name().and_then(|name| std::str::from_utf8(name).ok());
        let name =
            name.ok_or_else(|| io::Error::other("the kernel assigned no name to the notification socket"))?;
        Ok(Self { env_value: format!("@{name}"), fd: ReadableFd::new(Arc::new(fd))? })
    }

    /// Binds it to this name, by which a process that is kept finds it again.
    ///
    /// # Errors
    /// The failed system call: `EADDRINUSE` where another program has bound the name.
    pub(super) fn bind_to(name: &str) -> io::Result<Self> {
        let fd = open_socket()?;
        rustix::net::bind(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        Ok(Self { env_value: format!("@{name}"), fd: ReadableFd::new(Arc::new(fd))? })
    }

    /// The variables that the process needs: `NOTIFY_SOCKET`, and `WATCHDOG_USEC` for a watchdog. Without
    /// `WATCHDOG_PID`, sd_watchdog_enabled(3) means every process; the pid is not known before the start.
    pub(super) fn environment(&self, watchdog: Option<Duration>) -> Vec<(OsString, OsString)> {
        let micros =
            watchdog.map(|interval| ("WATCHDOG_USEC".into(), interval.as_micros().to_string().into()));
        [("NOTIFY_SOCKET".into(), self.env_value.clone().into())].into_iter().chain(micros).collect()
    }

    /// Starts to receive messages from the process and its descendants. `was_ready`: an earlier program has received
    /// `READY=1`. `on_ready` is called for each message of a process that is ready.
    pub(super) fn start_listening(
        self,
        senders: SenderFilter,
        was_ready: bool,
        on_ready: impl Fn() + Send + Sync + 'static,
    ) -> NotifyListener {
        let (state_sender, state) =
            watch::channel(NotifyState { ready: was_ready, ..NotifyState::default() });
        let receive = self.receive_messages(senders, state_sender, on_ready);
        NotifyListener { state, _task: AbortOnDropHandle::new(tokio::spawn(receive)) }
    }

    async fn receive_messages(
        self,
        senders: SenderFilter,
        state_sender: watch::Sender<NotifyState>,
        on_ready: impl Fn() + Send + Sync + 'static,
    ) {
        loop {
            let Ok(mut readable) = self.fd.wait_readable().await else { return };
            // Descriptors in a message are closed here; a sender of BARRIER=1 waits for that.
            match readable.try_io(|fd| receive_datagram(fd.get_ref().as_fd())) {
                Ok(Ok((text, Some(sender)))) if senders.accepts(sender) => {
                    let messages = parse_messages(&text, Instant::now());
                    state_sender
                        .send_modify(|state| messages.for_each(|message| state.apply_message(message)));
                    if state_sender.borrow().ready {
                        on_ready();
                    }
                }
                Ok(Ok((_, sender))) => {
                    tracing::debug!(?sender, "ignored a notification from an unrelated process")
                }
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(error)) => return tracing::error!(%error, "receive notifications"),
                Err(_would_block) => {}
            }
        }
    }
}

fn open_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    // With it, the kernel attaches the pid and uid of the sender to each message: see unix(7), SO_PASSCRED.
    set_socket_passcred(&fd, true)?;
    Ok(fd)
}

/// Receives the messages of a process until it is dropped.
#[derive(Debug)]
pub(super) struct NotifyListener {
    pub(super) state: watch::Receiver<NotifyState>,
    _task: AbortOnDropHandle<()>,
}

/// The senders that may report for a process.
#[derive(Debug)]
pub(super) struct SenderFilter {
    pub(super) mark: ProcessMark,
    pub(super) main: i32,
    /// The user as which the process was started.
    pub(super) uid: u32,
}

impl SenderFilter {
    /// Accepts the process and its descendants. The mark of a sender that has already exited, such as
    /// `systemd-notify`, can't be read: it must have run as the process' user, who controls the process
    /// anyway, or as this program's. A sender in a parent PID namespace is not a descendant.
    fn accepts(&self, DatagramSender { pid, uid }: DatagramSender) -> bool {
        if pid == 0 {
            return false;
        }
        match procfs::locks_limit(pid) {
            Ok(limit) => pid == self.main || ProcessMark::from_limit(limit) == Some(self.mark),
            Err(_) => uid == self.uid || uid == rustix::process::geteuid().as_raw(),
        }
    }
}

/// Receives one datagram and its sender. Closes the descriptors that came with it.
fn receive_datagram(fd: BorrowedFd<'_>) -> io::Result<(Vec<u8>, Option<DatagramSender>)> {
    let mut text = vec![0; MAX_MESSAGE];
    let (length, sender) = sys::receive_datagram(fd, &mut text)?;
    text.truncate(length);
    Ok((text, sender))
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
    pub(super) async fn wait_stopping(notify: Option<watch::Receiver<Self>>) {
        if let Some(mut notify) = notify
            && notify.wait_for(|state| state.stopping).await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }

    /// Resolves when a process that is ready has not reported to its watchdog for this long, or asks for it: with
    /// whether it asked. Without a listener or an interval, never.
    pub(super) async fn wait_watchdog(
        notify: Option<watch::Receiver<Self>>,
        interval: Option<Duration>,
    ) -> bool {
        let ready_at = Instant::now();
        let (Some(mut notify), Some(interval)) = (notify, interval) else {
            return std::future::pending().await;
        };
        loop {
            let (last, triggered) = {
                let state = notify.borrow_and_update();
                (state.last_watchdog, state.watchdog_triggered)
            };
            if triggered {
                return true;
            }
            // The first interval begins when the process is ready: its reports during the start do not count.
            let deadline = last.map_or(ready_at, |last| last.max(ready_at)) + interval;
            match timeout_at(deadline, notify.changed()).await {
                Err(_) => return false,
                Ok(Ok(())) => {}
                // No message can arrive any more.
                Ok(Err(_)) => {
                    sleep_until(deadline).await;
                    return false;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::mark::{MarkAllocator, ProgramId};
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    use std::io::{IoSlice, Read as _};
    use std::mem::MaybeUninit;

    fn mark() -> ProcessMark {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        MarkAllocator::new(ProgramId::current().expect("proc is mounted"), thread).next_mark(false)
    }

    #[tokio::test]
    async fn no_two_sockets_have_one_name() {
        let sockets = [NotifySocket::bind(), NotifySocket::bind()].map(|socket| socket.expect("it is bound"));
        assert_ne!(sockets[0].env_value, sockets[1].env_value);
        assert!(sockets[0].env_value.len() > 1, "{sockets:?}");
    }

    #[test]
    fn a_sender_from_a_parent_pid_namespace_is_rejected() {
        let uid = rustix::process::geteuid().as_raw();
        let senders = SenderFilter { mark: mark(), main: procfs::own_pid(), uid };
        assert!(senders.accepts(DatagramSender { pid: procfs::own_pid(), uid }));
        assert!(!senders.accepts(DatagramSender { pid: 0, uid }));
    }

    #[tokio::test]
    async fn a_barrier_is_released_after_all_earlier_messages() {
        let socket = NotifySocket::bind().expect("it is bound");
        let address = SocketAddrUnix::new_abstract_name(&socket.env_value.as_bytes()[1..]).expect("a name");
        let main = procfs::own_pid();
        let uid = rustix::process::getuid().as_raw();
        let listener = socket.start_listening(SenderFilter { mark: mark(), main, uid }, false, || ());
        let sender = rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None).expect("a socket");
        rustix::net::connect(&sender, &address).expect("it is there");
        rustix::net::send(&sender, b"READY=1", SendFlags::empty()).expect("it is sent");
        let (mut lifted, barrier) = io::pipe().expect("a pipe");
        let fds = [barrier.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
        rustix::net::sendmsg(&sender, &[IoSlice::new(b"BARRIER=1")], &mut ancillary, SendFlags::empty())
            .expect("it is sent");
        drop(barrier);
        let end = tokio::task::spawn_blocking(move || lifted.read(&mut [0])).await.expect("it reads");
        assert_eq!(end.expect("the other end is closed"), 0);
        assert!(listener.state.borrow().ready);
    }

    #[tokio::test(start_paused = true)]
    async fn a_watchdog_expires_an_interval_after_the_last_report() {
        let (sender, notify) = watch::channel(NotifyState::default());
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
        assert!(!NotifyState::wait_watchdog(Some(notify), Some(Duration::from_secs(5))).await);
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
