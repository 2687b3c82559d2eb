//! Keeps the CA's private key sealed to the voters of the cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;

use nodekeel_localstorage::pki::{Credentials, PrivateKey};
use nodekeel_supervisor::{Context, Failure};

use super::ca::ClusterCa;
use super::stored::{KeyState, StoredValues};
use super::voter::{Recipients, Voter, verify_record};
use super::{CA_CERT_PATH, CA_KEY_PATH, CRL_PATH, CaError, SEAL_PREFIX, SEALED_KEY_PATH};
use crate::age::Recipient;
use crate::consensus::kv::{Compare, KeyRange, KeyValue, KvStore, ListWatcher, Txn, TxnOp};
use crate::consensus::{ClusterMembers, MembershipError, StoreMaintenance};

/// Prefix of the records of the voters' keys, by the names of their members.
const VOTERS_PREFIX: &str = "/etcd-ca/seal/voters/";
/// Prefix of the names of voters whose database may contain a private key that was not sealed.
const ERASE_PREFIX: &str = "/etcd-ca/seal/erase/";
/// The number of times that a change is attempted. Each failed attempt is another voter's success.
const MAX_ATTEMPTS: usize = 100;

/// The CA's private key in a cluster, as one of the voters sees it.
///
/// Each voter publishes its key, signed by the key of its member's certificate. A voter that can open the CA's private key seals it
/// to those that can't, and leaves out those that are no voters any more. Once a key is in the list of the recipients, which is
/// sealed with the private key, another key of the same voter is not accepted.
#[derive(Clone, Debug)]
pub struct CaSealing {
    root: Arc<dyn KvStore>,
    members: Arc<dyn ClusterMembers>,
    voter: Arc<Voter>,
}

/// What is stored, at one moment.
struct SealState {
    values: StoredValues,
    records: Vec<KeyValue>,
}

impl CaSealing {
    /// The sealing by this voter, of the cluster with these root keys and members.
    pub fn new(root: Arc<dyn KvStore>, members: Arc<dyn ClusterMembers>, voter: Arc<Voter>) -> CaSealing {
        CaSealing { root, members, voter }
    }

    /// Publishes the voter's key, unless it is published already.
    ///
    /// # Errors
    /// [`CaError::Create`], [`CaError::Store`].
    pub async fn publish_key(&self, member: &Credentials) -> Result<(), CaError> {
        let (key, record) = (voter_path(self.voter.name().as_str()), self.voter.sign_record(member)?);
        let failed = CaError::store_error("publish the voter's key");
        let stored = self.root.get(key.as_bytes()).await;
        match stored {
            Ok(Some(stored)) if stored.value == record => Ok(()),
            Ok(_) => self.root.put(key.as_bytes(), &record).await.map(drop).map_err(failed),
            Err(error) => Err(failed(error)),
        }
    }

    /// Waits until the CA's private key is sealed to this voter, and loads the CA.
    ///
    /// # Errors
    /// Those of [`ClusterCa::load_ca`].
    pub async fn wait_sealed(&self) -> Result<ClusterCa, CaError> {
        let mut follow = ListWatcher::new(Arc::clone(&self.root), KeyRange::single_key(SEALED_KEY_PATH));
        loop {
            follow.next_update().await.map_err(CaError::store_error("watch the CA's private key"))?;
            let ca = ClusterCa::load_sealed(Arc::clone(&self.root), &self.voter).await?;
            if ca.can_sign() {
                return Ok(ca);
            }
        }
    }

    /// A runnable that keeps the private key sealed to the present voters. It acts when a voter publishes its key, and once at its
    /// start; then the recovery key of this voter's configuration takes the place of another one.
    ///
    /// A private key that an earlier release has stored is sealed once all voters have published their keys. Its history is erased
    /// then, by one voter after the other, since it would be in each snapshot.
    ///
    /// # Errors
    /// The cancellation of its context; [`CaError`].
    pub async fn keep_sealed(
        self,
        ctx: Context,
        maintenance: Arc<dyn StoreMaintenance>,
    ) -> Result<(), Failure> {
        ctx.signal_ready()?;
        tokio::select! {
            biased;
            canceled = ctx.canceled() => Err(canceled.into()),
            // Each change is one transaction, and can be repeated.
            failed = self.follow_voters(&*maintenance) => {
                Err(failed.map(|never| match never {}).unwrap_or_else(Failure::new))
            }
        }
    }

    /// Returns whether the private key stays open to a voter if this one leaves: it is sealed to the published key of another one.
    ///
    /// # Errors
    /// [`CaError::Store`], [`CaError::Members`]; an error that names an invalid stored value.
    pub(crate) async fn has_other_opener(&self, leaver: &str) -> Result<bool, CaError> {
        let state = self.read_state().await?;
        let (published, voters) = (state.published_keys()?, self.voter_names().await?);
        let stays = |(name, key): (&String, &Recipient)| {
            name != leaver && voters.contains(name) && published.get(name) == Some(key)
        };
        Ok(match state.values.key_state(Some(&self.voter))? {
            KeyState::Plain(_) => true,
            KeyState::Opened(sealed) => sealed.recipients.voters.iter().any(stays),
            KeyState::Closed => false,
        })
    }

    async fn follow_voters(&self, maintenance: &dyn StoreMaintenance) -> Result<Infallible, CaError> {
        let mut follow = ListWatcher::new(Arc::clone(&self.root), KeyRange::prefix(SEAL_PREFIX));
        let mut recovery = self.voter.recovery();
        loop {
            follow.next_update().await.map_err(CaError::store_error("watch the voters' keys"))?;
            self.seal(recovery).await?;
            // It had it when it joined: the others seal it to no other key of this voter, which health names.
            if !ClusterCa::load_sealed(Arc::clone(&self.root), &self.voter).await?.can_sign() {
                return Err(CaError::Sealed);
            }
            self.erase_history(maintenance).await?;
            // Voters with other configurations would replace each other's for ever.
            recovery = None;
        }
    }

    /// Seals the private key to the present voters, if this voter can open it, and if it is not sealed so already.
    async fn seal(&self, recovery: Option<&Recipient>) -> Result<(), CaError> {
        for _ in 0..MAX_ATTEMPTS {
            let state = self.read_state().await?;
            let voters = self.voter_names().await?;
            if !voters.contains(self.voter.name().as_str()) {
                return Ok(());
            }
            let published = state.published_keys()?;
            let (key, present) = match state.values.key_state(Some(&self.voter))? {
                KeyState::Plain(key) => (key, None),
                KeyState::Opened(sealed) => (sealed.key, Some(sealed.recipients)),
                KeyState::Closed => return Ok(()),
            };
            let Some(recipients) = choose_recipients(present.as_ref(), &published, &voters, recovery) else {
                return Ok(());
            };
            if self.replace(&state, &key, &recipients, Txn::new()).await? {
                let names: Vec<_> = recipients.voters.keys().collect();
                tracing::info!(?names, "the CA's private key is sealed to the voters");
                return Ok(());
            }
        }
        Err(CaError::Contended)
    }

    /// Leaves a voter out: its key does not open the private key any more. It can be repeated.
    ///
    /// # Errors
    /// [`CaError::Sealed`] if this voter can't open the private key; [`CaError::Contended`]; [`CaError::Store`],
    /// [`CaError::Members`].
    pub async fn exclude(&self, name: &str) -> Result<(), CaError> {
        for _ in 0..MAX_ATTEMPTS {
            let state = self.read_state().await?;
            let forget = [voter_path(name), erase_path(name)]
                .into_iter()
                .fold(Txn::new(), |txn, key| txn.then(TxnOp::Delete(KeyRange::single_key(key))));
            let sealed = match state.values.key_state(Some(&self.voter))? {
                KeyState::Opened(sealed) => {
                    Some(sealed).filter(|sealed| sealed.recipients.voters.contains_key(name))
                }
                KeyState::Plain(_) => None,
                // An earlier call has done it: the record goes with the seal.
                KeyState::Closed if !state.has_record(name) => return Ok(()),
                KeyState::Closed => return Err(CaError::Sealed),
            };
            let done = match sealed {
                Some(mut sealed) => {
                    sealed.recipients.voters.remove(name);
                    self.replace(&state, &sealed.key, &sealed.recipients, forget).await?
                }
                None => {
                    let done = self.root.txn(forget).await;
                    done.map(|_| true).map_err(CaError::store_error("delete the voter's key"))?
                }
            };
            if done {
                // It may have been the last one that had not published a key.
                return self.seal(None).await;
            }
        }
        Err(CaError::Contended)
    }

    /// Replaces the stored private key, unless another voter has; returns whether it did.
    async fn replace(
        &self,
        state: &SealState,
        key: &PrivateKey,
        recipients: &Recipients,
        also: Txn,
    ) -> Result<bool, CaError> {
        let unchanged = |kv: Option<&KeyValue>, path: &str| {
            kv.map_or_else(|| Compare::key_absent(path), Compare::key_unchanged)
        };
        let (sealed, plain) = (state.values.sealed.as_ref(), state.values.key.as_ref());
        let mut txn = also
            .when(unchanged(sealed, SEALED_KEY_PATH))
            .when(unchanged(plain, CA_KEY_PATH))
            .then(TxnOp::put(SEALED_KEY_PATH, recipients.seal(key)?));
        if plain.is_some() {
            txn = txn.then(TxnOp::Delete(KeyRange::single_key(CA_KEY_PATH)));
            for name in recipients.voters.keys() {
                txn = txn.then(TxnOp::put(erase_path(name), ""));
            }
        }
        let done = self.root.txn(txn).await.map_err(CaError::store_error("seal the CA's private key"))?;
        Ok(done.succeeded)
    }

    /// Erases the history of this voter's database, if the private key may be in it, and it is this voter's turn: a database serves
    /// nothing while it is written anew.
    async fn erase_history(&self, maintenance: &dyn StoreMaintenance) -> Result<(), CaError> {
        let read = self.root.range(KeyRange::prefix(ERASE_PREFIX)).await;
        let read = read.map_err(CaError::store_error("read which voters have a history to erase"))?;
        if read.kvs.is_empty() {
            return Ok(());
        }
        let voters = self.voter_names().await?;
        let mut names = read.kvs.iter().filter_map(|kv| name_below(ERASE_PREFIX, &kv.key));
        if names.find(|name| voters.contains(*name)) != Some(self.voter.name().as_str()) {
            return Ok(());
        }
        maintenance.compact().await.map_err(members_error)?;
        maintenance.defragment().await.map_err(members_error)?;
        let key = erase_path(self.voter.name().as_str());
        let deleted = self.root.delete(KeyRange::single_key(key)).await;
        deleted.map_err(CaError::store_error("record that the history is erased"))?;
        tracing::info!("the private key of the CA is erased from the history of this member's database");
        Ok(())
    }

    async fn read_state(&self) -> Result<SealState, CaError> {
        let read = Txn::new()
            .then(TxnOp::get(CA_CERT_PATH))
            .then(TxnOp::get(CA_KEY_PATH))
            .then(TxnOp::get(CRL_PATH))
            .then(TxnOp::Range(KeyRange::prefix(SEAL_PREFIX)));
        let done = self.root.txn(read).await.map_err(CaError::store_error("read the voters' keys"))?;
        let is_record = |kv: &KeyValue| name_below(VOTERS_PREFIX, &kv.key).is_some();
        let (records, values) = done.kvs.into_iter().partition::<Vec<_>, _>(is_record);
        Ok(SealState { values: StoredValues::from_key_values(values), records })
    }

    async fn voter_names(&self) -> Result<BTreeSet<String>, CaError> {
        let members = self.members.list_members().await.map_err(members_error)?;
        // One without a name has never started.
        let voters = members.into_iter().filter(|member| !member.is_learner);
        Ok(voters.map(|member| member.name.unwrap_or_default()).collect())
    }
}

impl SealState {
    fn has_record(&self, name: &str) -> bool {
        self.named_records().any(|(recorded, _)| recorded == name)
    }

    /// The keys that voters have published.
    fn published_keys(&self) -> Result<BTreeMap<String, Recipient>, CaError> {
        let ca = self.values.certificate()?;
        let revoked = self.values.revocation_list(&ca)?;
        let mut keys = BTreeMap::new();
        for (name, record) in self.named_records() {
            match verify_record(name, &record.value, &ca, &revoked) {
                Ok((key, _)) => drop(keys.insert(name.to_owned(), key)),
                Err(problem) => {
                    tracing::warn!(
                        "the CA's private key is not sealed to the published key of {name}: {problem}"
                    );
                }
            }
        }
        Ok(keys)
    }

    fn named_records(&self) -> impl Iterator<Item = (&str, &KeyValue)> {
        self.records.iter().filter_map(|record| Some((name_below(VOTERS_PREFIX, &record.key)?, record)))
    }
}

/// Decides to whom the private key is sealed: `None` if nothing is to be changed.
fn choose_recipients(
    present: Option<&Recipients>,
    published: &BTreeMap<String, Recipient>,
    voters: &BTreeSet<String>,
    recovery: Option<&Recipient>,
) -> Option<Recipients> {
    let is_voter = |entry: &(&String, &Recipient)| voters.contains(entry.0);
    let owned = |(name, key): (&String, &Recipient)| (name.clone(), key.clone());
    let mut chosen: BTreeMap<_, _> = published.iter().filter(is_voter).map(owned).collect();
    match present {
        // Voters of an earlier release still need the private key as it is.
        None if chosen.len() < voters.len() => {
            let missing: Vec<_> = voters.iter().filter(|name| !chosen.contains_key(*name)).collect();
            tracing::warn!(
                "the private key of the CA is not sealed yet, and each certificate of the cluster reads it: upgrade the \
                 other voters, or remove those that are lost: {missing:?}"
            );
            return None;
        }
        None => {}
        Some(present) => {
            for (name, key) in present.voters.iter().filter(is_voter) {
                if chosen.insert(name.clone(), key.clone()).is_some_and(|other| other != *key) {
                    tracing::warn!(
                        "voter {name} has published another key than the one to which the CA's private key is \
                         sealed, which stays: replace that node"
                    );
                }
            }
        }
    }
    let recovery = recovery.or(present.and_then(|present| present.recovery.as_ref())).cloned();
    let chosen = Recipients { voters: chosen, recovery };
    (present != Some(&chosen) && !chosen.voters.is_empty()).then_some(chosen)
}

fn members_error(source: MembershipError) -> CaError {
    CaError::Members { is_retryable: source.is_retryable(), source: source.into() }
}

fn voter_path(name: &str) -> String {
    format!("{VOTERS_PREFIX}{name}")
}

fn erase_path(name: &str) -> String {
    format!("{ERASE_PREFIX}{name}")
}

fn name_below<'a>(prefix: &str, key: &'a [u8]) -> Option<&'a str> {
    std::str::from_utf8(key).ok()?.strip_prefix(prefix)
}

#[cfg(test)]
#[path = "sealing_test.rs"]
mod tests;
