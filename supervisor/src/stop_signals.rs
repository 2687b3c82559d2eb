//! The signals by which a program is asked to stop.

use std::io;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;

/// Signals so soon after the first are copies of it: sudo and timeout pass on what a terminal has sent to all already.
const ONE_SIGNAL: Duration = Duration::from_secs(1);

/// SIGTERM, SIGINT and SIGHUP, for the `main` of a program that [shuts down](crate::Supervisor::shutdown) on them.
///
/// SIGHUP is one of them: a closed terminal must not cut a tree off. From [`listen`](Self::listen) on, none of them ends
/// the process by itself any more, also after this value is gone.
///
/// *Source:* signal(7).
#[derive(Debug)]
pub struct StopSignals {
    signals: [Signal; 3],
    asked: Option<Instant>,
}

impl StopSignals {
    /// Listens from now on. A signal that comes before it is waited for is not lost.
    ///
    /// # Errors
    /// What the kernel said.
    ///
    /// # Panics
    /// Outside of a tokio runtime with IO.
    pub fn listen() -> io::Result<Self> {
        let [terminate, interrupt, hangup] =
            [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
        Ok(Self { signals: [terminate?, interrupt?, hangup?], asked: None })
    }

    /// Waits until somebody asks the program to stop.
    ///
    /// # Cancel safety
    /// No signal is lost.
    pub async fn asked(&mut self) {
        self.next().await;
        self.asked.get_or_insert_with(Instant::now);
    }

    /// Waits until somebody asks again, a second or more after the first time: to stop at once.
    ///
    /// # Cancel safety
    /// No signal is lost.
    pub async fn insisted(&mut self) {
        let asked = *self.asked.get_or_insert_with(Instant::now);
        loop {
            self.next().await;
            if asked.elapsed() >= ONE_SIGNAL {
                return;
            }
        }
    }

    async fn next(&mut self) {
        let [terminate, interrupt, hangup] = &mut self.signals;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{Signal, getpid, kill_process};

    use super::*;

    fn raise(signal: Signal) {
        kill_process(getpid(), signal).expect("a process may signal itself");
    }

    #[tokio::test(start_paused = true)]
    async fn copies_of_the_first_signal_do_not_insist_and_each_later_one_does() {
        let mut signals = StopSignals::listen().expect("signals can be had");
        for later in [Signal::TERM, Signal::INT, Signal::HUP] {
            signals.asked = None;
            raise(later);
            signals.asked().await;
            raise(Signal::INT);
            let soon = ONE_SIGNAL - Duration::from_millis(1);
            assert!(tokio::time::timeout(soon, signals.insisted()).await.is_err());
            tokio::time::advance(Duration::from_millis(1)).await;
            raise(later);
            signals.insisted().await;
        }
    }
}
