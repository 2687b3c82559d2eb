//! Tang servers, which give the other half of the volume's key back while the node is in their network.
//!
//! ```text
//!  root.storage.keys  the key of this process ──▶ bound, read back and recovered ──▶ temporary slot removed
//!                                                      │ esp/VOLUME.KEY.BINDING.tang
//!  root.storage       locked ──▶ each binding ──▶ POST /rec ──▶ opens
//! ```
//!
//! A binding alone opens nothing, and a server learns nothing of the key. Any one of several servers suffices.

mod binding_files;
mod client;
mod error;
mod server;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures_util::StreamExt as _;
use futures_util::future::{join, join_all};
use futures_util::stream::FuturesUnordered;
use nodekeel_localstorage::Dir;
use nodekeel_localstorage::tang::{Advertisement, Binding, TangError, secret_id};
use nodekeel_localstorage::volume::UnlockKey;

use self::binding_files::BindingFile;
use super::opener::VolumeOpener;
use super::unlock::{ClusterKeySource, ClusterKeysFuture, VolumeUnlock};
use crate::blocking::run_blocking;
use crate::error_chain::error_chain;

pub(crate) use self::error::TangKeyError;
use self::error::{ServerProblem, TangServerError};
pub(crate) use self::server::{TangServer, TangUrl};

/// The file of a binding that a server opens, and the problem of the server.
type BoundServer = (Option<String>, Option<TangServerError>);

/// A new binding can't be made.
enum BindError {
    Server(TangServerError),
    Esp(TangKeyError),
}

impl From<TangServerError> for BindError {
    fn from(error: TangServerError) -> Self {
        Self::Server(error)
    }
}

impl From<TangKeyError> for BindError {
    fn from(error: TangKeyError) -> Self {
        Self::Esp(error)
    }
}

/// Keeps the other half of the volume's key by Tang servers: its bindings are in `esp/`.
#[derive(Debug)]
pub(crate) struct TangKeyStore {
    servers: Vec<TangServer>,
    opener: VolumeOpener,
    unlock: Arc<VolumeUnlock>,
}

impl TangKeyStore {
    pub(super) fn new(servers: Vec<TangServer>, opener: VolumeOpener, unlock: Arc<VolumeUnlock>) -> Self {
        Self { servers, opener, unlock }
    }

    /// The keys of a volume. One that may come back counts as unknown, and not as lost: nothing is decided without it.
    pub(super) async fn load(&self, volume: &str) -> Result<Vec<UnlockKey>, TangKeyError> {
        let (keys, mut failures) = self.recover_keys(volume).await?;
        failures.retain(|error| !error.problem.is_permanent());
        if failures.is_empty() { Ok(keys) } else { Err(TangKeyError::Servers(failures)) }
    }

    /// The keys of a volume that servers give back, and why others are not among them.
    async fn recover_keys(
        &self,
        volume: &str,
    ) -> Result<(Vec<UnlockKey>, Vec<TangServerError>), TangKeyError> {
        let mut by_key = BTreeMap::<String, Vec<Binding>>::new();
        for BindingFile { key, binding, .. } in self.read_files(volume).await? {
            by_key.entry(key).or_default().extend(binding);
        }
        let (mut keys, mut failures) = (Vec::new(), Vec::new());
        for recovered in join_all(by_key.values().map(|bindings| self.recover_one(bindings))).await {
            match recovered {
                Ok(key) => keys.push(key),
                Err(errors) => failures.extend(errors),
            }
        }
        Ok((keys, failures))
    }

    /// Recovers a key by the first binding that a server opens.
    async fn recover_one(&self, bindings: &[Binding]) -> Result<UnlockKey, Vec<TangServerError>> {
        let mut answers = FuturesUnordered::new();
        for binding in bindings {
            let is_named = |server: &&TangServer| server.url.as_str() == binding.url();
            // A server whose URL was changed still has its keys. Only configured servers are asked.
            let is_known = self.servers.iter().any(|server| is_named(&server));
            let asked = self.servers.iter().filter(|server| !is_known || is_named(server));
            answers.extend(asked.map(|server| server.recover(binding)));
        }
        let mut errors = Vec::new();
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(key) => return Ok(key),
                Err(error) => errors.push(error),
            }
        }
        Err(errors)
    }

    /// Makes each server open the volume by this key, and removes the bindings that are not needed then. Returns the problems
    /// of servers, which don't keep the others from it.
    pub(super) async fn complete(&self, volume: &str, key: &UnlockKey) -> Result<Vec<String>, TangKeyError> {
        let name = secret_id(key.expose_bytes());
        let files = self.read_files(volume).await?;
        let (needed, problems) = self.bind_all(volume, key, &files).await?;
        // The other bindings of the key stay until all servers of this configuration can open the volume.
        if problems.is_empty() {
            let is_left = |file: &BindingFile| file.key == name && !needed.contains(&file.name);
            self.remove_files(files.into_iter().filter(is_left).collect()).await?;
        }
        Ok(problems.iter().map(|error| error_chain(error)).collect())
    }

    /// Binds each key to one server at least, and then removes the bindings of all other keys.
    pub(super) async fn replace(&self, volume: &str, keys: &[UnlockKey]) -> Result<(), TangKeyError> {
        let files = self.read_files(volume).await?;
        let names: BTreeSet<_> = keys.iter().map(|key| secret_id(key.expose_bytes())).collect();
        for key in keys {
            let (bound, problems) = self.bind_all(volume, key, &files).await?;
            if bound.is_empty() {
                return Err(TangKeyError::Servers(problems));
            }
        }
        self.remove_files(files.into_iter().filter(|file| !names.contains(&file.key)).collect()).await
    }

    /// Binds a key to all servers. Returns the files by which they give it back, and their problems.
    async fn bind_all(
        &self,
        volume: &str,
        key: &UnlockKey,
        files: &[BindingFile],
    ) -> Result<(BTreeSet<String>, Vec<TangServerError>), TangKeyError> {
        let asked = self.servers.iter().map(|server| self.bind_server(server, volume, key, files));
        let (mut bound, mut problems) = (BTreeSet::new(), Vec::new());
        for answer in join_all(asked).await {
            let (file, problem) = answer?;
            bound.extend(file);
            problems.extend(problem);
        }
        Ok((bound, problems))
    }

    /// Finds a binding by which a server gives the key back, to a key that it advertises; otherwise binds again. A server
    /// may give the key back, and have a problem.
    async fn bind_server(
        &self,
        server: &TangServer,
        volume: &str,
        key: &UnlockKey,
        files: &[BindingFile],
    ) -> Result<BoundServer, TangKeyError> {
        let name = secret_id(key.expose_bytes());
        let known: Vec<_> = files.iter().filter_map(|file| file.binding.clone()).collect();
        let own = files.iter().filter(|file| file.is_of(&name, server));
        let own: Vec<_> = own.filter_map(|file| Some((file, file.binding.as_ref()?))).collect();
        let recovered = join_all(own.iter().map(|(_, binding)| server.recover(binding)));
        let (recovered, advertisement) = join(recovered, server.advertisement(&known)).await;
        let (mut working, mut unknown) = (Vec::new(), None);
        for ((file, binding), given) in own.into_iter().zip(recovered) {
            match given {
                Ok(given) if is_same(&given, key) => working.push((file, binding)),
                Err(error) if !error.problem.is_permanent() => unknown = Some(error),
                _ => tracing::warn!(
                    "Tang server {} does not open its binding {} any more",
                    server.url,
                    file.name
                ),
            }
        }
        let bound = match (advertisement, unknown) {
            (Ok(advertisement), unknown) => {
                let is_advertised = |(_, binding): &&(_, &Binding)| advertisement.has_key_of(binding);
                if let Some((file, _)) = working.iter().find(is_advertised) {
                    return Ok((Some(file.name.clone()), None));
                }
                for (_, binding) in &working {
                    tracing::warn!("Tang server {} has replaced its key {}", server.url, binding.key_id());
                }
                match unknown {
                    Some(error) => Err(error.into()),
                    None => self.bind(server, &advertisement, volume, key).await,
                }
            }
            (Err(error), unknown) => Err(unknown.unwrap_or(error).into()),
        };
        match bound {
            Ok(file) => Ok((Some(file), None)),
            Err(BindError::Server(error)) => {
                Ok((working.first().map(|(file, _)| file.name.clone()), Some(error)))
            }
            Err(BindError::Esp(error)) => Err(error),
        }
    }

    /// Binds a key to a server, reads the binding back, and recovers the key by it: only then does it count.
    async fn bind(
        &self,
        server: &TangServer,
        advertisement: &Advertisement,
        volume: &str,
        key: &UnlockKey,
    ) -> Result<String, BindError> {
        let binding = advertisement.bind(server.url.as_str(), key.expose_bytes());
        let binding = binding.map_err(|error| server.error(ServerProblem::Protocol(error)))?;
        let (volume, name) = (volume.to_owned(), secret_id(key.expose_bytes()));
        let file = self.with_esp(move |esp| BindingFile::write(esp, &volume, &name, &binding)).await?;
        let given = match &file.binding {
            Some(written) => server.recover(written).await,
            None => Err(server.error(ServerProblem::Protocol(TangError::Binding("it was not written")))),
        };
        match given {
            Ok(given) if is_same(&given, key) => {
                tracing::info!("bound the other half of the data volume's key to Tang server {}", server.url);
                Ok(file.name)
            }
            given => {
                self.remove_files(vec![file]).await?;
                Err(given.map_or_else(|error| error, |_| server.error(ServerProblem::OtherKey)).into())
            }
        }
    }

    async fn read_files(&self, volume: &str) -> Result<Vec<BindingFile>, TangKeyError> {
        let volume = volume.to_owned();
        self.with_esp(move |esp| BindingFile::read_all(esp, &volume)).await
    }

    async fn remove_files(&self, files: Vec<BindingFile>) -> Result<(), TangKeyError> {
        self.with_esp(move |esp| files.iter().try_for_each(|file| file.remove(esp))).await
    }

    /// Works on `esp/`, on a thread.
    async fn with_esp<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Dir) -> Result<T, nodekeel_localstorage::Error> + Send + 'static,
    ) -> Result<T, TangKeyError> {
        let opener = self.opener.clone();
        run_blocking(move || match opener.esp() {
            Ok(esp) => work(esp).map_err(TangKeyError::File),
            Err(error) => Err(TangKeyError::Esp(error.into())),
        })
        .await
    }
}

fn is_same(one: &UnlockKey, other: &UnlockKey) -> bool {
    one.expose_bytes() == other.expose_bytes()
}

impl ClusterKeySource for TangKeyStore {
    fn cluster_keys(&self) -> ClusterKeysFuture<'_> {
        Box::pin(async {
            let volume = self.unlock.encrypted_volume().ok_or(TangKeyError::NotEncrypted)?;
            let status = run_blocking(move || volume.encryption_status()).await;
            let volume = status.map_err(TangKeyError::Volume)?.volume;
            let (keys, failures) = self.recover_keys(&volume).await?;
            match (keys.is_empty(), failures.is_empty()) {
                (false, _) => Ok(keys),
                (true, false) => Err(TangKeyError::Servers(failures).into()),
                (true, true) => Err(TangKeyError::Unbound { volume }.into()),
            }
        })
    }
}

#[cfg(test)]
mod tang_test;
