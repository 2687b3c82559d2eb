//! The receiving end of `sd_notify(3)`.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::procfs;
use super::tag::Tag;
use crate::sys::{self, Readable, Sender};

/// systemd takes as much.
const MAX_MESSAGE: usize = 4096;

/// What the process has said so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Said {
    pub(super) ready: bool,
    /// The last `STATUS=`.
    pub(super) status: Option<String>,
    /// Until when it asked to be waited for.
    pub(super) extended: Option<Instant>,
}

/// A socket that exists before the process that is told of it.
#[derive(Debug)]
pub(super) struct Socket {
    fd: Readable,
    address: String,
}

impl Socket {
    /// In the abstract namespace, so it needs no directory and leaves nothing behind; but a process in another network
    /// namespace does not reach it. The kernel chooses a name that is free, so nobody can take it before.
    pub(super) fn bind() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        set_socket_passcred(&fd, true)?;
        rustix::net::bind(&fd, &SocketAddrUnix::new_unnamed())?;
        let bound = SocketAddrUnix::try_from(rustix::net::getsockname(&fd)?)?;
        let name = bound.abstract_name().and_then(|name| std::str::from_utf8(name).ok());
        let name = name.ok_or_else(|| io::Error::other("the kernel gave the socket no name"))?;
        Ok(Self { address: format!("@{name}"), fd: Readable::new(Arc::new(fd))? })
    }

    /// The value for `NOTIFY_SOCKET`.
    pub(super) fn address(&self) -> String {
        self.address.clone()
    }

    /// Starts to listen to the process and its descendants.
    pub(super) fn listen(self, senders: Senders) -> Listener {
        let (say, said) = watch::channel(Said::default());
        Listener { said, _task: AbortOnDropHandle::new(tokio::spawn(self.run(senders, say))) }
    }

    async fn run(self, senders: Senders, say: watch::Sender<Said>) {
        loop {
            let Ok(mut readable) = self.fd.readable().await else { return };
            // The descriptors of a message are closed here, which is what a sender of BARRIER=1 waits for.
            match readable.try_io(|fd| receive(fd.get_ref().as_fd())) {
                Ok(Ok((text, Some(sender)))) if senders.accept(sender) => {
                    let messages = parse(&text, Instant::now());
                    say.send_modify(|said| messages.for_each(|message| said.hear(message)));
                }
                Ok(Ok((_, sender))) => tracing::debug!(?sender, "a notification from elsewhere is ignored"),
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(error)) => return tracing::error!(%error, "the notification socket is lost"),
                Err(_would_block) => {}
            }
        }
    }
}

/// Hears what the process says, for as long as it lives.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) said: watch::Receiver<Said>,
    _task: AbortOnDropHandle<()>,
}

/// Who may speak for a process.
#[derive(Debug)]
pub(super) struct Senders {
    pub(super) tag: Tag,
    pub(super) main: i32,
    /// The user that the process was started as.
    pub(super) uid: u32,
}

impl Senders {
    /// The process and its descendants. A sender that has ended meanwhile, as `systemd-notify` does, can't be asked for
    /// its mark: it must have been of the process' user, who could make the process say anything, or of this program's.
    /// One of a PID namespace above is no descendant.
    fn accept(&self, Sender { pid, uid }: Sender) -> bool {
        if pid == 0 {
            return false;
        }
        match procfs::locks_limit(pid) {
            Ok(limit) => pid == self.main || Tag::from_limit(limit) == Some(self.tag),
            Err(_) => uid == self.uid || uid == rustix::process::geteuid().as_raw(),
        }
    }
}

/// One datagram and who sent it. Descriptors that came with it are closed.
fn receive(fd: BorrowedFd<'_>) -> io::Result<(Vec<u8>, Option<Sender>)> {
    let mut text = vec![0; MAX_MESSAGE];
    let (length, sender) = sys::receive(fd, &mut text)?;
    text.truncate(length);
    Ok((text, sender))
}

/// What is acted upon of the protocol; `STOPPING=1`, `RELOADING=1`, `MAINPID=` and others change nothing here.
#[derive(Debug, PartialEq, Eq)]
enum Message {
    Ready,
    Status(String),
    Extend(Instant),
}

impl Said {
    fn hear(&mut self, message: Message) {
        match message {
            Message::Ready => self.ready = true,
            Message::Status(status) => {
                tracing::debug!(status, "the process tells its status");
                self.status = Some(status);
            }
            Message::Extend(until) => self.extended = Some(until),
        }
    }
}

fn parse(text: &[u8], now: Instant) -> impl Iterator<Item = Message> {
    text.split(|&byte| byte == b'\n').filter_map(move |line| {
        let line = std::str::from_utf8(line).ok()?;
        match line.split_once('=')? {
            ("READY", "1") => Some(Message::Ready),
            ("STATUS", status) => Some(Message::Status(status.to_owned())),
            ("EXTEND_TIMEOUT_USEC", micros) => {
                Some(Message::Extend(now.checked_add(Duration::from_micros(micros.parse().ok()?))?))
            }
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::tag::{Program, Tags};
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    use std::io::{IoSlice, Read as _};
    use std::mem::MaybeUninit;

    fn tag() -> Tag {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        Tags::new(Program::current().expect("proc is mounted"), thread).next()
    }

    #[tokio::test]
    async fn no_two_sockets_have_one_name() {
        let sockets = [Socket::bind(), Socket::bind()].map(|socket| socket.expect("it is bound"));
        assert_ne!(sockets[0].address(), sockets[1].address());
        assert!(sockets[0].address().len() > 1, "{sockets:?}");
    }

    #[test]
    fn a_sender_from_above_is_no_descendant() {
        let uid = rustix::process::geteuid().as_raw();
        let senders = Senders { tag: tag(), main: procfs::own_pid(), uid };
        assert!(senders.accept(Sender { pid: procfs::own_pid(), uid }));
        assert!(!senders.accept(Sender { pid: 0, uid }));
    }

    #[tokio::test]
    async fn a_barrier_is_lifted_once_all_before_it_is_heard() {
        let socket = Socket::bind().expect("it is bound");
        let address = SocketAddrUnix::new_abstract_name(&socket.address().as_bytes()[1..]).expect("a name");
        let main = procfs::own_pid();
        let uid = rustix::process::getuid().as_raw();
        let listener = socket.listen(Senders { tag: tag(), main, uid });
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
        assert!(listener.said.borrow().ready);
    }

    #[tokio::test]
    async fn lines_that_are_not_understood_are_passed_over() {
        let now = Instant::now();
        let text = b"MAINPID=1\nREADY=0\nSTATUS=50 % = half\nEXTEND_TIMEOUT_USEC=-1\n\xff=1\nREADY=1\nEXTEND_TIMEOUT_USEC=250\n";
        let extended = Message::Extend(now + Duration::from_micros(250));
        assert_eq!(
            parse(text, now).collect::<Vec<_>>(),
            [Message::Status("50 % = half".into()), Message::Ready, extended]
        );
    }
}
