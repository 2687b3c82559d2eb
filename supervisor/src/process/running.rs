//! A process that runs: waiting for its end, and bringing it about.

use std::io;
use std::sync::Arc;

use rustix::process::{WaitId, WaitIdOptions, WaitIdStatus};
use tokio::time::{Instant, timeout_at};

use super::Process;
use super::descendants::Family;
use super::error::ProcessError;
use super::host::Host;
use super::notify::{Listener, Senders, Socket};
use super::output::{Pumps, Sink};
use super::spawn::{self, Main, Reach};
use super::status::{ProcessExit, Signal};
use crate::sys::{Readable, Step};

/// One start of a process. Dropped before its end, everything that it was to take with it is killed.
#[derive(Debug)]
pub(super) struct Running {
    host: Arc<Host>,
    /// With what tells its end. `None` only in `drop`.
    main: Option<(Main, Readable)>,
    status: Option<WaitIdStatus>,
    pumps: Option<Pumps>,
    pub(super) listener: Option<Listener>,
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
        let socket = process.readiness.notify.then(Socket::bind).transpose().map_err(prepare)?;
        let reach = Reach::of(process.kill, tag, host.home.as_ref());
        let (mut image, ends) =
            spawn::image(process, tag, socket.as_ref().map(Socket::address)).map_err(prepare)?;
        image.cgroup = reach.directory().map_err(prepare)?;
        let born = host.spawner.spawn(image, tag, reach, &host.shared).await;
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
            main: Some((main, ended)),
            status: None,
            pumps: Some(pumps),
            listener,
            settled: false,
        })
    }

    /// Waits until the main process has ended. It can be dropped and called again at any time.
    pub(super) async fn wait(&mut self) -> io::Result<()> {
        let (main, ended) = self.main.as_mut().expect("it is taken only by drop");
        while self.status.is_none() {
            let mut readable = ended.readable().await?;
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            self.status = rustix::process::waitid(WaitId::PidFd(ended.fd()), options)?;
            readable.clear_ready();
        }
        main.waited();
        Ok(())
    }

    /// Asks everything to end, and ends it when the deadline has come.
    pub(super) async fn stop(&mut self, signal: Signal, deadline: Instant) -> io::Result<()> {
        let mut family = self.main().family().map(|family| family.asking_until(deadline));
        let host = Arc::clone(&self.host);
        match &mut family {
            Some(family) => family.ask(&host.shared.snapshots, signal, || self.ask(signal)),
            None => self.ask(signal),
        }
        if let Ok(ended) = timeout_at(deadline, self.wait()).await {
            ended?;
        } else {
            if family.is_none()
                && let Err(error) = self.main().signal(Signal::KILL)
            {
                tracing::warn!(pid = self.main().pid, %error, "can't kill the process");
            }
            tokio::join!(self.wait(), end(family.as_mut(), &host, signal, deadline)).0?;
        }
        // Also what was forked by the main process while it was being killed.
        end(family.as_mut(), &host, signal, deadline).await;
        self.settled = true;
        Ok(())
    }

    /// Ends what the main process has left behind, where it is to go with it.
    pub(super) async fn end_rest(&mut self, signal: Signal, deadline: Instant) {
        let mut family = self.main().family().map(|family| family.asking_until(deadline));
        end(family.as_mut(), &self.host, signal, deadline).await;
        self.settled = true;
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

    /// A stopped process acts on a signal only when it goes on.
    fn ask(&self, signal: Signal) {
        if self.status.is_some() {
            return;
        }
        for signal in [signal, Signal::CONT] {
            if let Err(error) = self.main().signal(signal) {
                tracing::warn!(pid = self.main().pid, %error, "can't send {signal} to the process");
            }
        }
    }

    fn main(&self) -> &Main {
        let (main, _ended) = self.main.as_ref().expect("it is taken only by drop");
        main
    }
}

impl Drop for Running {
    /// What is killed by a drop is waited for by a task of its own, for which the host lives on.
    fn drop(&mut self) {
        let Some((main, ended)) = self.main.take().filter(|_| !self.settled) else { return };
        main.kill();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            self.host.burials.spawn_on(bury(Arc::clone(&self.host), main, ended), &runtime);
        }
    }
}

async fn end(family: Option<&mut Family>, host: &Host, signal: Signal, deadline: Instant) {
    if let Some(family) = family {
        family.end(&host.shared.snapshots, signal, deadline).await;
    }
}

/// Waits for the end of a process that has been killed, and of its descendants.
async fn bury(host: Arc<Host>, mut main: Main, ended: Readable) {
    drop(ended.readable().await);
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    if let Ok(Some(_)) = rustix::process::waitid(WaitId::PidFd(ended.fd()), options) {
        main.waited();
    }
    end(main.family().as_mut(), &host, Signal::KILL, Instant::now()).await;
}
