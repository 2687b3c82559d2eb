//! A running process: waits for its exit, and stops it.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use rustix::process::{WaitId, WaitIdOptions, WaitIdStatus};
use tokio::time::{Instant, timeout_at};

use super::Process;
use super::descendants::{DescendantSet, has_exited};
use super::error::ProcessError;
use super::host::ProcessHost;
use super::notify::{NotifyListener, NotifySocket, SenderFilter};
use super::output::{OutputReaders, StreamSink};
use super::spawn::{self, KillScope, MainProcess};
use super::status::{ProcessExit, Signal};
use crate::sys::{ReadableFd, StartStep};

/// One start of a process. If it is dropped before the exit, everything that must stop with the process is
/// killed.
#[derive(Debug)]
pub(super) struct RunningProcess {
    host: Arc<ProcessHost>,
    /// The main process and its exit notification. `None` only in `drop`.
    main_process: Option<(MainProcess, ReadableFd)>,
    status: Option<WaitIdStatus>,
    output: Option<OutputReaders>,
    pub(super) listener: Option<NotifyListener>,
    /// Whether everything that must stop with the process has exited.
    all_ended: bool,
}

impl RunningProcess {
    /// Starts a process; its program is running when this returns.
    ///
    /// # Errors
    /// [`ProcessError::Start`] with a hint, or [`ProcessError::Watch`].
    pub(super) async fn start(
        host: Arc<ProcessHost>,
        process: &Process,
        [stdout, stderr]: [StreamSink; 2],
    ) -> Result<Self, ProcessError> {
        let mark = host.shared.marks.next_mark();
        let prepare = |error| spawn::start_error(process, StartStep::Setup, error);
        let socket = process.readiness.on_notify.then(NotifySocket::bind).transpose().map_err(prepare)?;
        let kill_scope = KillScope::from_kill_mode(process.kill_mode, mark, host.cgroup.as_ref());
        let (mut image, ends) =
            spawn::build_image(process, mark, socket.as_ref().map(NotifySocket::env_value))
                .map_err(prepare)?;
        image.cgroup = kill_scope.open_cgroup_dir().map_err(prepare)?;
        let started = host.spawner.spawn(image, mark, kill_scope, &host.shared).await;
        let main = started.map_err(|(step, error)| spawn::start_error(process, step, error))?;
        let ended = ReadableFd::new(Arc::clone(&main.pidfd)).map_err(ProcessError::Watch)?;
        let pumps = OutputReaders::start([(ends.stdout, stdout), (ends.stderr, stderr)])
            .map_err(ProcessError::Watch)?;
        let listener = socket.map(|socket| {
            let uid = process.uid.unwrap_or_else(|| rustix::process::geteuid().as_raw());
            socket.start_listening(SenderFilter { mark, main: main.pid, uid })
        });
        Ok(Self {
            host,
            main_process: Some((main, ended)),
            status: None,
            output: Some(pumps),
            listener,
            all_ended: false,
        })
    }

    /// Waits until the main process has exited. It can be dropped and called again at any time.
    pub(super) async fn wait_exit(&mut self) -> io::Result<()> {
        let (main, ended) = self.main_process.as_mut().expect("only drop takes it");
        while self.status.is_none() {
            let mut readable = ended.wait_readable().await?;
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            self.status = rustix::process::waitid(WaitId::PidFd(ended.fd()), options)?;
            readable.clear_ready();
        }
        main.mark_reaped();
        Ok(())
    }

    /// Sends the stop signal to every process, and kills them at the deadline. If that is necessary, it calls
    /// `report_kill` with whether the main process is still running.
    pub(super) async fn stop(
        &mut self,
        signal: Signal,
        deadline: Instant,
        report_kill: impl Fn(bool) + Sync,
    ) -> io::Result<()> {
        let mut descendants =
            self.main_process().descendants().map(|descendants| descendants.with_term_deadline(deadline));
        let host = Arc::clone(&self.host);
        match &mut descendants {
            Some(descendants) => {
                descendants.request_stop(&host.shared.snapshots, signal, || self.request_stop(signal))
            }
            None => self.request_stop(signal),
        }
        let mut is_reported = false;
        if let Ok(ended) = timeout_at(deadline, self.wait_exit()).await {
            ended?;
        } else {
            is_reported = !has_exited(self.main_process().pidfd.as_fd());
            if is_reported {
                report_kill(true);
            }
            if descendants.is_none()
                && let Err(error) = self.main_process().send_signal(Signal::KILL)
            {
                tracing::warn!(pid = self.main_process().pid, %error, "can't kill a process");
            }
            tokio::join!(
                self.wait_exit(),
                terminate_descendants(descendants.as_mut(), &host, signal, deadline)
            )
            .0?;
        }
        // Also what the main process forked while it was being killed.
        terminate_descendants(descendants.as_mut(), &host, signal, deadline).await;
        self.all_ended = true;
        if !is_reported && descendants.is_some_and(|descendants| descendants.needed_kill()) {
            report_kill(false);
        }
        Ok(())
    }

    /// Stops the descendants that the main process has left behind, if they must stop with it.
    /// If any of them had to be killed, it calls `report_kill` with false.
    pub(super) async fn stop_descendants(
        &mut self,
        signal: Signal,
        deadline: Instant,
        report_kill: impl Fn(bool) + Sync,
    ) {
        let mut descendants =
            self.main_process().descendants().map(|descendants| descendants.with_term_deadline(deadline));
        terminate_descendants(descendants.as_mut(), &self.host, signal, deadline).await;
        self.all_ended = true;
        if descendants.is_some_and(|descendants| descendants.needed_kill()) {
            report_kill(false);
        }
    }

    /// The exit to report, after all output that was written before it.
    pub(super) async fn into_exit(mut self) -> ProcessExit {
        let tail = match self.output.take() {
            Some(pumps) => pumps.finish().await,
            None => Vec::new(),
        };
        let status = self.status.as_ref().expect("called only after the exit");
        ProcessExit::new(self.main_process().pid, status, tail)
    }

    /// Sends the stop signal, then SIGCONT: a stopped process handles a signal only after it is continued.
    fn request_stop(&self, signal: Signal) {
        if self.status.is_some() {
            return;
        }
        for signal in [signal, Signal::CONT] {
            if let Err(error) = self.main_process().send_signal(signal) {
                tracing::warn!(pid = self.main_process().pid, %error, "can't send {signal} to a process");
            }
        }
    }

    fn main_process(&self) -> &MainProcess {
        let (main, _ended) = self.main_process.as_ref().expect("only drop takes it");
        main
    }
}

impl Drop for RunningProcess {
    /// A separate task waits for the killed processes, and keeps the host until then.
    fn drop(&mut self) {
        let Some((main, ended)) = self.main_process.take().filter(|_| !self.all_ended) else { return };
        main.kill();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            self.host.reap_tasks.spawn_on(reap_killed(Arc::clone(&self.host), main, ended), &runtime);
        }
    }
}

async fn terminate_descendants(
    descendants: Option<&mut DescendantSet>,
    host: &ProcessHost,
    signal: Signal,
    deadline: Instant,
) {
    if let Some(descendants) = descendants {
        descendants.terminate_all(&host.shared.snapshots, signal, deadline).await;
    }
}

/// Waits until a killed process and its descendants have exited.
async fn reap_killed(host: Arc<ProcessHost>, mut main: MainProcess, ended: ReadableFd) {
    drop(ended.wait_readable().await);
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    if let Ok(Some(_)) = rustix::process::waitid(WaitId::PidFd(ended.fd()), options) {
        main.mark_reaped();
    }
    terminate_descendants(main.descendants().as_mut(), &host, Signal::KILL, Instant::now()).await;
}
