//! Scheduled backups: each node with a directory for them saves its own snapshots of the cluster.
//!
//! The files of the directory are the schedule: the newest one of this node tells when the next one is due, so that a
//! restart changes nothing. Only files with this node's name are ever removed.

use std::convert::Infallible;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use futures_util::StreamExt as _;
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use nodekeel_cluster::backup::{Recipient, encrypt_snapshot};
use nodekeel_cluster::enrolment::{ClusterNode, EnrolmentPhase};
use nodekeel_localstorage::{Dir, FileMode};
use nodekeel_supervisor::{Context, RunFuture, Runnable};
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use super::config::BackupConfig;
use crate::error_chain::error_chain;
use crate::health::{HealthChanges, HealthCondition};

/// The pause after a failure, unless the schedule is denser.
const RETRY_PAUSE: Duration = Duration::from_secs(5 * 60);
/// The time in a file's name, in UTC.
const NAME_TIME: &str = "%Y%m%dT%H%M%SZ";
const SUFFIX: &str = ".age";

/// What is known of this node's backups.
#[derive(Debug)]
pub(super) struct BackupState {
    every: Duration,
    known: Mutex<Known>,
}

#[derive(Clone, Debug)]
struct Known {
    /// The time of the newest one, or that of the start while there is none.
    newest: SystemTime,
    failure: Option<Failure>,
}

#[derive(Clone, Debug)]
struct Failure {
    since: SystemTime,
    reason: String,
}

impl BackupState {
    pub(super) fn new(every: Duration, now: SystemTime) -> Self {
        Self { every, known: Mutex::new(Known { newest: now, failure: None }) }
    }

    /// The warning about backups that fail, or that are not made: while the node is not in its cluster, for example.
    pub(super) fn warning(&self, now: SystemTime) -> Option<HealthCondition> {
        let Known { newest, failure } = self.lock().clone();
        let overdue = now.duration_since(newest).is_ok_and(|age| age > self.every * 2).then_some(newest);
        let (problem, since) = match (failure, overdue) {
            (Some(Failure { since, reason }), _) => (format!("fails: {reason}"), since),
            (None, Some(newest)) => ("is overdue".to_owned(), newest),
            (None, None) => return None,
        };
        let hint =
            "`nodectl logs root.cluster.backup`; to save one elsewhere: `nodectl cluster snapshot FILE`";
        Some(HealthCondition::warning("the backup of the cluster", problem).since(Some(since)).hint(hint))
    }

    /// Records the result of an attempt: the time of the newest backup. A failure keeps the time of the first one.
    fn record(&self, result: Result<SystemTime, String>, now: SystemTime) {
        let mut known = self.lock();
        match result {
            Ok(newest) => *known = Known { newest, failure: None },
            Err(reason) => {
                let since = known.failure.take().map_or(now, |failure| failure.since);
                known.failure = Some(Failure { since, reason });
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where and when snapshots are saved.
#[derive(Clone, Debug)]
pub(super) struct Schedule {
    pub(super) directory: PathBuf,
    pub(super) every: Duration,
    /// How many files stay, the newest one included.
    pub(super) keep: usize,
    pub(super) recipient: Recipient,
}

impl Schedule {
    /// The schedule of this configuration, if it has one.
    pub(super) fn from_config(config: &BackupConfig) -> Option<Self> {
        let BackupConfig { directory, every, keep, recipient } = config.clone();
        Some(Self { directory: directory?, every, keep: keep.get().into(), recipient })
    }
}

/// Saves snapshots of the cluster by its schedule.
#[derive(Clone)]
pub(super) struct BackupService {
    pub(super) cluster: ClusterNode,
    pub(super) schedule: Schedule,
    pub(super) state: Arc<BackupState>,
    pub(super) health: HealthChanges,
}

impl Runnable for BackupService {
    fn run(&self, ctx: Context) -> RunFuture {
        let service = self.clone();
        Box::pin(async move {
            ctx.signal_ready()?;
            tokio::select! {
                biased;
                canceled = ctx.canceled() => Err(canceled.into()),
                never = service.keep_saving() => match never {},
            }
        })
    }
}

impl BackupService {
    async fn keep_saving(&self) -> Infallible {
        loop {
            let node = loop {
                match self.cluster.wait_finished().await {
                    Ok(membership) => break membership.node_id.to_string(),
                    Err(_) => drop(self.cluster.wait_phase_left(EnrolmentPhase::Failed).await),
                }
            };
            let pause = match self.save_if_due(&node).await {
                Ok(newest) => {
                    self.state.record(Ok(newest), SystemTime::now());
                    self.schedule.every.saturating_sub(age(newest, SystemTime::now()))
                }
                Err(reason) => {
                    tracing::warn!("can't save a snapshot of the cluster: {reason}");
                    self.state.record(Err(reason), SystemTime::now());
                    self.schedule.every.min(RETRY_PAUSE)
                }
            };
            self.health.announce();
            sleep(pause).await;
        }
    }

    /// Saves a snapshot if one is due. Returns the time of the newest one.
    async fn save_if_due(&self, node: &str) -> Result<SystemTime, String> {
        let Schedule { directory, every, keep, .. } = self.schedule.clone();
        let prefix = format!("{node}-");
        let listed = (directory.clone(), prefix.clone());
        let own = blocking(move || list_own(&listed.0, &listed.1)).await?;
        let now = SystemTime::now();
        let mut own: Vec<_> = own.into_iter().filter(|time| is_past(time, now)).collect();
        let newest = own.last().and_then(|time| parse_time(time)).filter(|newest| age(*newest, now) < every);
        if newest.is_none() {
            let time = format_time(now)?;
            let name = format!("{prefix}{time}{SUFFIX}");
            self.save(&directory, &name).await?;
            tracing::info!("saved a snapshot of the cluster: {}", directory.join(&name).display());
            own.push(time);
        }
        // Each time, so that a file that can't be removed stays a failure.
        blocking(move || clean(&directory, &prefix, superfluous(&own, keep))).await?;
        Ok(newest.unwrap_or(now))
    }

    /// Saves a snapshot. The file appears whole and verified, or not at all.
    async fn save(&self, directory: &Path, name: &str) -> Result<(), String> {
        let access = self.cluster.cluster_access().map_err(|error| error_chain(&error))?;
        let none = || "the cluster's store is in memory".to_owned();
        let maintenance = access.store_maintenance().ok_or_else(none)?;
        let snapshot = maintenance.snapshot().await.map_err(|error| error_chain(&error))?;
        let encrypted = encrypt_snapshot(snapshot, &self.schedule.recipient);
        let (sender, receiver) = mpsc::channel(8);
        let (directory, name) = (directory.to_owned(), name.to_owned());
        let writing = spawn_blocking(move || write_pieces(&directory, &name, receiver));
        let mut encrypted = std::pin::pin!(encrypted);
        let sent = loop {
            match encrypted.next().await {
                Some(Ok(piece)) => {
                    // A writer that has failed tells why.
                    if sender.send(Some(piece)).await.is_err() {
                        break Ok(());
                    }
                }
                Some(Err(error)) => break Err(error_chain(&error)),
                None => {
                    // The end is a piece of its own: without it, the writer discards the file.
                    let _ = sender.send(None).await;
                    break Ok(());
                }
            }
        };
        drop(sender);
        let written = writing.await.map_err(|error| error.to_string())?;
        sent.and(written)
    }
}

fn write_pieces(
    directory: &Path,
    name: &str,
    mut pieces: mpsc::Receiver<Option<Vec<u8>>>,
) -> Result<(), String> {
    let dir = Dir::open(directory).map_err(|error| error_chain(&error))?;
    let mut file = dir.replace_file(name, FileMode::PRIVATE_FILE).map_err(|error| error_chain(&error))?;
    loop {
        match pieces.blocking_recv() {
            Some(Some(piece)) => {
                let failed = |error| format!("write {}: {error}", directory.display());
                file.write_all(&piece).map_err(failed)?;
            }
            Some(None) => return file.commit().map_err(|error| error_chain(&error)),
            // The sender tells why.
            None => return Err("the snapshot ended early".to_owned()),
        }
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    spawn_blocking(work).await.map_err(|error| error.to_string())?
}

/// The times of this node's files, as their names have them, the oldest first.
fn list_own(directory: &Path, prefix: &str) -> Result<Vec<String>, String> {
    let entries = Dir::open(directory).and_then(|dir| dir.list()).map_err(|error| error_chain(&error))?;
    let time = |name: &str| {
        let time = name.strip_prefix(prefix)?.strip_suffix(SUFFIX)?;
        parse_time(time).map(|_| time.to_owned())
    };
    let mut own: Vec<_> = entries.iter().filter_map(|entry| time(entry.name.as_os_str().to_str()?)).collect();
    own.sort();
    Ok(own)
}

/// Removes as many of these files as it can, and what an interrupted write has left.
fn clean(directory: &Path, prefix: &str, superfluous: &[String]) -> Result<(), String> {
    let dir = Dir::open(directory).map_err(|error| error_chain(&error))?;
    let removed = superfluous.iter().map(|time| dir.remove_file(format!("{prefix}{time}{SUFFIX}")));
    let mut failed: Vec<_> = removed.filter_map(Result::err).collect();
    let cleaned = dir.remove_stale_files().err().or(failed.pop());
    cleaned.map_or(Ok(()), |error| Err(format!("{}; the snapshots are saved", error_chain(&error))))
}

/// A file that seems to be of the future was saved by another clock: it neither counts nor is removed.
fn is_past(time: &str, now: SystemTime) -> bool {
    parse_time(time).is_some_and(|time| time <= now)
}

fn age(of: SystemTime, now: SystemTime) -> Duration {
    now.duration_since(of).unwrap_or_default()
}

/// The files that go: all but the newest ones.
fn superfluous(own: &[String], keep: usize) -> &[String] {
    &own[..own.len().saturating_sub(keep.max(1))]
}

fn format_time(time: SystemTime) -> Result<String, String> {
    let time = Timestamp::try_from(time).map_err(|error| error.to_string())?;
    Ok(time.strftime(NAME_TIME).to_string())
}

fn parse_time(text: &str) -> Option<SystemTime> {
    let time = DateTime::strptime(NAME_TIME, text).ok()?.to_zoned(TimeZone::UTC).ok()?;
    Some(time.timestamp().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn times(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn files_of_the_future_neither_count_nor_go() {
        let now = parse_time("20260725T120000Z").unwrap();
        assert_eq!(format_time(now).unwrap(), "20260725T120000Z");
        for (time, is_counted) in [
            ("20260720T120000Z", true),
            ("20260725T120000Z", true),
            ("20990725T110000Z", false),
            ("x", false),
        ] {
            assert_eq!(is_past(time, now), is_counted, "{time}");
        }
        assert_eq!(age(parse_time("20260725T110000Z").unwrap(), now), Duration::from_secs(3600));
    }

    #[test]
    fn the_oldest_files_go_and_never_all_of_them() {
        let own = times(&["1", "2", "3"]);
        assert_eq!(superfluous(&own, 1), ["1", "2"]);
        assert_eq!(superfluous(&own, 2), ["1"]);
        assert!(superfluous(&own, 3).is_empty() && superfluous(&own, 100).is_empty());
    }

    #[test]
    fn what_can_be_removed_is_removed_and_the_rest_is_a_failure() {
        let scratch = tempfile::tempdir().unwrap();
        let at = |time: &str| scratch.path().join(format!("one-{time}.age"));
        std::fs::create_dir(at("1")).unwrap();
        std::fs::write(at("2"), b"").unwrap();
        let failed = clean(scratch.path(), "one-", &times(&["1", "2"])).unwrap_err();
        assert!(failed.contains("one-1.age") && !at("2").exists(), "{failed}");
        std::fs::remove_dir(at("1")).unwrap();
        std::fs::write(at("1"), b"").unwrap();
        assert_eq!(clean(scratch.path(), "one-", &times(&["1"])), Ok(()));
    }

    #[test]
    fn only_files_with_this_nodes_name_and_a_time_are_its_own() {
        let scratch = tempfile::tempdir().unwrap();
        for name in [
            "one-20260725T120000Z.age",
            "one-20260724T120000Z.age",
            "two-20260725T120000Z.age",
            "one-latest.age",
            "one-20260725T120000Z.age.old",
            "one-20261399T120000Z.age",
        ] {
            std::fs::write(scratch.path().join(name), b"").unwrap();
        }
        assert_eq!(list_own(scratch.path(), "one-").unwrap(), ["20260724T120000Z", "20260725T120000Z"]);
        assert!(list_own(&scratch.path().join("absent"), "one-").is_err());
    }

    #[test]
    fn a_failure_keeps_its_time_until_a_success_and_what_is_not_made_is_overdue() {
        let start = parse_time("20260725T120000Z").unwrap();
        let state = BackupState::new(DAY, start);
        let warning = |now| state.warning(now).map(|warning| (warning.problem, warning.since));
        assert_eq!(warning(start + DAY * 2), None);
        let late = start + DAY * 2 + Duration::from_secs(1);
        assert_eq!(warning(late), Some(("is overdue".to_owned(), Some(start))));
        state.record(Err("no room".into()), late);
        state.record(Err("no directory".into()), late + DAY);
        assert_eq!(warning(late + DAY), Some(("fails: no directory".to_owned(), Some(late))));
        state.record(Ok(late + DAY), late + DAY);
        assert_eq!(warning(late + DAY), None);
    }
}
