//! A process that runs: waiting for its end, and bringing it about.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use rustix::process::{WaitId, WaitIdOptions, WaitIdStatus};
use tokio::time::{Instant, timeout_at};

use super::descendants::Family;
use super::error::ProcessError;
use super::host::Host;
use super::notify::{Listener, Senders, Socket};
use super::output::{Pumps, Sink};
use super::spawn::{self, Main};
use super::status::{ProcessExit, Signal};
use super::{KillMode, Process};
use crate::sys::{self, Readable, Step};

/// One start of a process. Dropped before its end, everything that it was to take with it is killed.
#[derive(Debug)]
pub(super) struct Running {
    host: Arc<Host>,
    /// `None` only in `drop`.
    main: Option<Main>,
    ended: Readable,
    status: Option<WaitIdStatus>,
    pumps: Option<Pumps>,
    pub(super) listener: Option<Listener>,
    kill: KillMode,
    /// Whether everything that was to end with it has ended.
    settled: bool,
}

impl Running {
    /// Starts a process; its program runs when this returns.
    pub(super) async fn start(
        host: Arc<Host>,
        process: &Process,
        [stdout, stderr]: [Sink; 2],
    ) -> Result<Self, ProcessError> {
        let tag = host.shared.tags.next();
        let prepare = |error| spawn::failed(process, Step::Setup, error);
        let socket = process.readiness.notify.then(|| Socket::bind(tag)).transpose().map_err(prepare)?;
        let (image, ends) =
            spawn::image(process, tag, socket.as_ref().map(Socket::address)).map_err(prepare)?;
        let born = host.spawner.spawn(image, tag, process.kill, &host.shared).await;
        let main = born.map_err(|(step, error)| spawn::failed(process, step, error))?;
        let ended = Readable::new(Arc::clone(&main.pidfd)).map_err(ProcessError::Watch)?;
        let pumps =
            Pumps::start([(ends.stdout, stdout), (ends.stderr, stderr)]).map_err(ProcessError::Watch)?;
        let listener = socket.map(|socket| {
            let uid = process.uid.unwrap_or_else(|| rustix::process::geteuid().as_raw());
            socket.listen(Senders { tag, main: main.pid, uid })
        });
        Ok(Self {
            host,
            main: Some(main),
            ended,
            status: None,
            pumps: Some(pumps),
            listener,
            kill: process.kill,
            settled: false,
        })
    }

    /// Waits until the main process has ended. It can be dropped and called again at any time.
    pub(super) async fn wait(&mut self) -> io::Result<()> {
        while self.status.is_none() {
            let mut readable = self.ended.readable().await?;
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            self.status = rustix::process::waitid(WaitId::PidFd(self.ended.fd()), options)?;
            readable.clear_ready();
        }
        self.main_mut().waited();
        Ok(())
    }

    /// Asks everything to end, and ends it when the deadline has come.
    pub(super) async fn stop(&mut self, signal: Signal, deadline: Instant) -> io::Result<()> {
        let mut family = self.family();
        if let Some(family) = &mut family {
            family.learn(&self.host.shared.snapshots).await;
        }
        self.ask(signal);
        let host = Arc::clone(&self.host);
        if let Ok(ended) = timeout_at(deadline, self.wait()).await {
            ended?;
            end(family.as_mut(), &host, signal, deadline).await;
        } else {
            if let Err(error) = self.main().signal(Signal::KILL) {
                tracing::warn!(pid = self.main().pid, %error, "can't kill the process");
            }
            tokio::join!(self.wait(), end(family.as_mut(), &host, signal, deadline)).0?;
            // What was forked by the main process while it was being killed.
            end(family.as_mut(), &host, signal, deadline).await;
        }
        self.settled = true;
        Ok(())
    }

    /// Ends what the main process has left behind, where it is to go with it.
    pub(super) async fn end_rest(&mut self, signal: Signal, deadline: Instant) {
        end(self.family().as_mut(), &self.host, signal, deadline).await;
        self.settled = true;
    }

    fn family(&self) -> Option<Family> {
        let Main { tag, pid, .. } = *self.main();
        (self.kill == KillMode::Descendants).then(|| Family::new(tag, pid))
    }

    /// What is told of the end, with everything that was written before it.
    pub(super) async fn exit(mut self) -> ProcessExit {
        let tail = match self.pumps.take() {
            Some(pumps) => pumps.finish().await,
            None => Vec::new(),
        };
        let status = self.status.as_ref().expect("asked for only after its end");
        ProcessExit::new(self.main().pid, status, tail)
    }

    /// Its process group may be signalled as long as nobody has waited for it: until then nobody else gets its pid.
    fn ask(&self, signal: Signal) {
        if self.status.is_some() {
            return;
        }
        for signal in [signal, Signal::CONT] {
            let asked = match self.kill {
                KillMode::Descendants if self.leads_its_group() => {
                    sys::send_signal_to_group(self.main().pid, signal.number())
                }
                _ => self.main().signal(signal),
            };
            if let Err(error) = asked {
                tracing::warn!(pid = self.main().pid, %error, "can't send {signal} to the process");
            }
        }
    }

    /// It leads one from birth, but may go elsewhere.
    fn leads_its_group(&self) -> bool {
        let pid = self.main().pid;
        sys::group(pid).is_ok_and(|group| group == pid)
    }

    fn main(&self) -> &Main {
        self.main.as_ref().expect("it is taken only by drop")
    }

    fn main_mut(&mut self) -> &mut Main {
        self.main.as_mut().expect("it is taken only by drop")
    }
}

impl Drop for Running {
    /// What is killed by a drop is waited for by a task of its own, for which the host lives on.
    fn drop(&mut self) {
        let Some(main) = self.main.take().filter(|_| !self.settled) else { return };
        main.kill();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(bury(Arc::clone(&self.host), main, self.kill));
        }
    }
}

async fn end(family: Option<&mut Family>, host: &Host, signal: Signal, deadline: Instant) {
    if let Some(family) = family {
        family.end(&host.shared.snapshots, signal, deadline).await;
    }
}

/// Waits for the end of a process that has been killed, and of its descendants.
fn bury(host: Arc<Host>, mut main: Main, kill: KillMode) -> impl Future<Output = ()> + Send {
    let ended = Readable::new(Arc::clone(&main.pidfd));
    async move {
        if let Ok(ended) = ended {
            drop(ended.readable().await);
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        if let Ok(Some(_)) = rustix::process::waitid(WaitId::PidFd(main.pidfd.as_fd()), options) {
            main.waited();
        }
        let mut family = (kill == KillMode::Descendants).then(|| Family::new(main.tag, main.pid));
        end(family.as_mut(), &host, Signal::KILL, Instant::now()).await;
    }
}
