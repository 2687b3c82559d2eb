//! The signals that ask a program to stop.

use std::io;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;

/// Signals this soon after the first are duplicates: sudo and timeout forward what a terminal has already
/// sent to all.
const DUPLICATE_WINDOW: Duration = Duration::from_secs(1);

/// SIGTERM, SIGINT and SIGHUP, for the `main` of a program that [shuts down](crate::Supervisor::shutdown) on
/// them.
///
/// SIGHUP is included: a closed terminal must not kill the tree. A program that
/// [reloads](Self::listen_without_hangup) on SIGHUP handles it by itself. From [`listen`](Self::listen) on, none of
/// these signals terminates the process by default any more, also after this value is dropped.
///
/// *Source:* signal(7).
#[derive(Debug)]
pub struct StopSignals {
    signals: [Signal; 2],
    hangup: Option<Signal>,
    first_at: Option<Instant>,
}

impl StopSignals {
    /// Listens from now on. A signal that arrives before the first wait is not lost.
    ///
    /// # Errors
    /// The kernel's error when a handler can't be installed.
    ///
    /// # Panics
    /// Outside of a tokio runtime with IO.
    pub fn listen() -> io::Result<Self> {
        Ok(Self { hangup: Some(signal(SignalKind::hangup())?), ..Self::listen_without_hangup()? })
    }

    /// Listens like [`listen`](Self::listen), to SIGTERM and SIGINT alone. The program handles SIGHUP: one that does
    /// not is killed by it.
    ///
    /// # Errors
    /// The kernel's error when a handler can't be installed.
    ///
    /// # Panics
    /// Outside of a tokio runtime with IO.
    pub fn listen_without_hangup() -> io::Result<Self> {
        let signals = [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?];
        Ok(Self { signals, hangup: None, first_at: None })
    }

    /// Waits for the first signal, which asks the program to stop.
    ///
    /// # Cancel safety
    /// No signal is lost.
    pub async fn wait_for_stop(&mut self) {
        self.receive_any().await;
        self.first_at.get_or_insert_with(Instant::now);
    }

    /// Waits for a signal at least a second after the first one, which asks the program to stop at once.
    ///
    /// # Cancel safety
    /// No signal is lost.
    pub async fn wait_for_forced_stop(&mut self) {
        let first_at = *self.first_at.get_or_insert_with(Instant::now);
        loop {
            self.receive_any().await;
            if first_at.elapsed() >= DUPLICATE_WINDOW {
                return;
            }
        }
    }

    async fn receive_any(&mut self) {
        let ([terminate, interrupt], hangup) = (&mut self.signals, &mut self.hangup);
        let hung_up = async {
            match hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hung_up => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{Signal, getpid, kill_process};

    use super::*;

    fn raise_signal(signal: Signal) {
        kill_process(getpid(), signal).expect("a process may signal itself");
    }

    #[tokio::test(start_paused = true)]
    async fn duplicates_of_the_first_signal_are_ignored_and_each_later_signal_forces_the_stop() {
        let mut signals = StopSignals::listen().expect("the handlers are installed");
        let soon = DUPLICATE_WINDOW - Duration::from_millis(1);
        for later in [Signal::TERM, Signal::INT, Signal::HUP] {
            signals.first_at = None;
            raise_signal(later);
            signals.wait_for_stop().await;
            raise_signal(Signal::INT);
            assert!(tokio::time::timeout(soon, signals.wait_for_forced_stop()).await.is_err());
            tokio::time::advance(Duration::from_millis(1)).await;
            raise_signal(later);
            signals.wait_for_forced_stop().await;
        }
        let mut signals = StopSignals::listen_without_hangup().expect("the handlers are installed");
        raise_signal(Signal::HUP);
        assert!(tokio::time::timeout(soon, signals.wait_for_stop()).await.is_err());
    }
}
