//! What a member has on the disk, and how it starts with that.

use std::net::IpAddr;
use std::path::Path;

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::pki::{Certificate, Credentials, PkiError, PrivateKey};
use nodekeel_localstorage::tree::{Etcd, File, Pki};

use zeroize::Zeroizing;

use super::backend;
use crate::consensus::{ConsensusError, Mode, Peer, Start};
use crate::pki::{Leaf, NewAuthority, SubjectNames};

nodekeel_localstorage::layout! {
    /// What is beside the member's files.
    pub(super) struct Beside {
        /// The authority of a new cluster, until its etcd keeps it.
        pub(super) authority: Pki = "new_authority", 0o700;
        /// What this node's own client comes with.
        pub(super) client: Pki = "client_pki", 0o700;
    }
}

/// What etcd is told of its cluster.
#[derive(Debug)]
pub(super) enum Initial {
    /// It makes one, told apart from all others by this text.
    New { token: String },
    /// These are there already.
    Existing { peers: Vec<Peer> },
    /// Its data says who is there.
    Known,
}

/// A member that can start.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) initial: Initial,
    /// Those of the member. Their certificate may be of an address that it had before.
    pub(super) credentials: Credentials,
    /// Those of this node's own client, once there are some. They name no host, so etcd takes them wherever they come from:
    /// of a client that names its hosts, it wants to see that it comes from there.
    pub(super) client: Option<Credentials>,
    /// The authority that has to be saved.
    pub(super) new: Option<NewAuthority>,
}

impl Prepared {
    /// Whether the member's certificate is of this address.
    pub(super) fn is_certified_at(&self, address: IpAddr) -> bool {
        is_certified_at(&self.credentials, address)
    }
}

/// Looks at what is there, and makes what is missing for this mode. It can be killed at any step, and be called again.
pub(super) fn prepare(files: &Etcd, start: &Start) -> Result<Prepared, ConsensusError> {
    let beside = beside(files)?;
    let has_data = has_data(files)?;
    let there = files.peer_pki.load().map_err(ConsensusError::Credentials)?;
    if there.is_none() && has_data {
        return Err(ConsensusError::NoCredentials { data: files.data.path().to_owned() });
    }
    let new = load_new(&beside)?;
    let prepared = match &start.mode {
        Mode::Restart if !has_data => {
            return Err(ConsensusError::NoMember { data: files.data.path().to_owned() });
        }
        // An authority that is there still, or again, may be saved or not: saving it finds out.
        Mode::Restart => resume(files, there, new, Initial::Known)?,
        Mode::New => create(files, &beside, start, there, new, has_data)?,
        Mode::Existing { peers, credentials, revoked } => {
            let credentials = join(files, start, there, credentials)?;
            if files.load_revoked(&credentials.ca).map_err(ConsensusError::Credentials)?.is_none() {
                files.store_revoked(revoked).map_err(ConsensusError::Credentials)?;
            }
            let initial = Initial::Existing { peers: peers.clone() };
            Prepared { initial, credentials, client: None, new: None }
        }
    };
    let client = load_client(files, &beside, &prepared.credentials)?;
    let prepared = Prepared { client, ..prepared };
    // With a client of its own it can have itself certified anew.
    if prepared.client.is_none() {
        check_address(files, start, &prepared.credentials)?;
    }
    check(files, start, &prepared.credentials)?;
    settle(&files.peer_pki, &prepared.credentials)?;
    Ok(prepared)
}

/// Completes a change of the credentials that was cut off: what is read through their handles is right already, and etcd
/// reads the files themselves.
fn settle(pki: &Pki, credentials: &Credentials) -> Result<(), ConsensusError> {
    let Credentials { key, certificate, ca } = credentials;
    let holds = |file: &File, is_it: &dyn Fn(&[u8]) -> bool| {
        let read = file.read_if_present().map(|content| content.map(Zeroizing::new));
        let failed = |source| PkiError::Read { directory: pki.path().to_owned(), source };
        read.map_err(failed).map(|content| content.is_some_and(|content| is_it(&content)))
    };
    let is = |of: &Certificate, content: &[u8]| Certificate::from_pem(content).is_ok_and(|read| &read == of);
    let is_key =
        |content: &[u8]| PrivateKey::from_pem(content).is_ok_and(|read| read.public() == key.public());
    let is_settled = holds(&pki.ca, &|content| is(ca, content))
        .and_then(|ca| Ok(ca && holds(&pki.certificate, &|content| is(certificate, content))?))
        .and_then(|both| Ok(both && holds(&pki.key, &is_key)?));
    match is_settled.map_err(ConsensusError::Credentials)? {
        true => Ok(()),
        false => pki.store(credentials).map_err(ConsensusError::Credentials),
    }
}

/// Removes the data of a cluster that is being made, which nobody has seen yet: as long as its authority is not known to be
/// saved, nothing was written into it, and nobody can have joined it. An etcd that was killed while it began may not be
/// able to go on with it: it waits for ever for members that it has not written down.
pub(super) fn discard_unborn(files: &Etcd) -> Result<(), ConsensusError> {
    let discarded = Dir::open(files.data.path()).and_then(|data| data.remove_tree("member"));
    discarded.map(drop).map_err(|error| backend("remove the data of a cluster that was not made")(error))
}

/// Removes the authority that was saved. The key first: without it, the rest is known to be left over.
pub(super) fn forget_new(files: &Etcd) -> Result<(), ConsensusError> {
    let beside = beside(files)?;
    for file in [&beside.authority.key, &beside.authority.certificate, &beside.authority.ca] {
        remove(file)?;
    }
    Ok(())
}

/// Keeps what this node's own client comes with from now on.
pub(super) fn keep_client(files: &Etcd, client: &Credentials) -> Result<(), ConsensusError> {
    beside(files)?.client.store(client).map_err(ConsensusError::Credentials)
}

/// Puts another certificate in the place of the member's, which etcd reads for each new connection.
pub(super) fn keep_member(files: &Etcd, credentials: &Credentials) -> Result<(), ConsensusError> {
    files.peer_pki.store(credentials).map_err(ConsensusError::Credentials)
}

fn beside(files: &Etcd) -> Result<Beside, ConsensusError> {
    files.extend().map_err(backend("place the member's files"))
}

fn remove(file: &File) -> Result<(), ConsensusError> {
    file.remove().map(drop).map_err(|error| backend("remove the saved authority from the disk")(error))
}

/// The authority that is not known to be saved.
fn load_new(beside: &Beside) -> Result<Option<NewAuthority>, ConsensusError> {
    let presence = beside.authority.presence().map_err(ConsensusError::Credentials)?;
    if !presence.key {
        for file in [&beside.authority.certificate, &beside.authority.ca] {
            remove(file)?;
        }
        return Ok(None);
    }
    let credentials = beside.authority.load().map_err(ConsensusError::Credentials)?;
    let new = credentials.map(NewAuthority::from_credentials).transpose();
    new.map_err(ConsensusError::Authority)
}

/// What the client comes with, which has to be of the member's own authority.
fn load_client(
    files: &Etcd,
    beside: &Beside,
    member: &Credentials,
) -> Result<Option<Credentials>, ConsensusError> {
    let Some(client) = beside.client.load().map_err(ConsensusError::Credentials)? else { return Ok(None) };
    if client.ca != member.ca {
        return Err(ConsensusError::AnotherMember { directory: beside.client.path().to_owned() });
    }
    check_revoked(files, &beside.client, &client).map(|()| Some(client))
}

fn create(
    files: &Etcd,
    beside: &Beside,
    start: &Start,
    there: Option<Credentials>,
    new: Option<NewAuthority>,
    has_data: bool,
) -> Result<Prepared, ConsensusError> {
    if there.is_some() && new.is_none() {
        // It has made its cluster, or it has joined another and not started yet: then it has no data.
        return match has_data {
            true => resume(files, there, None, Initial::Known),
            false => Err(ConsensusError::AnotherMember { directory: files.peer_pki.path().to_owned() }),
        };
    }
    let mut new = match new {
        Some(new) => new,
        None => {
            let new = NewAuthority::generate().map_err(ConsensusError::Authority)?;
            let kept = new.to_credentials().map_err(ConsensusError::Authority)?;
            beside.authority.store(&kept).map_err(ConsensusError::Credentials)?;
            new
        }
    };
    let none = new.none_revoked().map_err(ConsensusError::Authority)?;
    if files.load_revoked(new.certificate()).map_err(ConsensusError::Credentials)?.is_none() {
        files.store_revoked(&none).map_err(ConsensusError::Credentials)?;
    }
    // Nobody knows the member yet: if it has another address meanwhile, it begins with that.
    let there = there.filter(|there| is_certified_at(there, start.address));
    if there.is_none() {
        let leaf = Leaf::member(start.name.clone(), start.address);
        let issued = new.issue(&leaf).map_err(ConsensusError::Authority)?;
        files.peer_pki.store(&issued).map_err(ConsensusError::Credentials)?;
        let token = token(&issued);
        return Ok(Prepared {
            initial: Initial::New { token },
            credentials: issued,
            client: None,
            new: Some(new),
        });
    }
    resume(files, there, Some(new), Initial::Known).map(|prepared| {
        let token = token(&prepared.credentials);
        Prepared { initial: Initial::New { token }, ..prepared }
    })
}

/// A text that no other cluster has: etcd makes the cluster's number of it.
fn token(credentials: &Credentials) -> String {
    format!("nodekeel-{}", credentials.ca.public().short_id())
}

/// Goes on with the credentials that are there.
fn resume(
    files: &Etcd,
    there: Option<Credentials>,
    new: Option<NewAuthority>,
    initial: Initial,
) -> Result<Prepared, ConsensusError> {
    let none = || ConsensusError::NoCredentials { data: files.data.path().to_owned() };
    let credentials = there.ok_or_else(none)?;
    let new = new.map(|mut new| {
        new.issued_before(credentials.certificate.clone())?;
        Ok(new)
    });
    let new = new.transpose().map_err(ConsensusError::Authority)?;
    Ok(Prepared { initial, credentials, client: None, new })
}

/// Takes the credentials over, unless others are there.
fn join(
    files: &Etcd,
    start: &Start,
    there: Option<Credentials>,
    given: &Credentials,
) -> Result<Credentials, ConsensusError> {
    match there {
        Some(there) if there.certificate == given.certificate && there.ca == given.ca => Ok(there),
        Some(_) => Err(ConsensusError::AnotherMember { directory: files.peer_pki.path().to_owned() }),
        None => {
            // Before they are stored: credentials that don't fit this node would lock out the right ones.
            check_address(files, start, given)?;
            check(files, start, given)?;
            files.peer_pki.store(given).map_err(ConsensusError::Credentials)?;
            let stored = files.peer_pki.load().map_err(ConsensusError::Credentials)?;
            stored.ok_or_else(|| ConsensusError::NoCredentials { data: files.data.path().to_owned() })
        }
    }
}

/// That the certificate is this member's, and was not revoked.
fn check(files: &Etcd, start: &Start, credentials: &Credentials) -> Result<(), ConsensusError> {
    match SubjectNames::of(&credentials.certificate).is_named(start.name.as_str()) {
        true => check_revoked(files, &files.peer_pki, credentials),
        false => Err(not_certified(files, start)),
    }
}

/// That the certificate is of the member's address.
fn check_address(files: &Etcd, start: &Start, credentials: &Credentials) -> Result<(), ConsensusError> {
    match is_certified_at(credentials, start.address) {
        true => Ok(()),
        false => Err(not_certified(files, start)),
    }
}

fn is_certified_at(credentials: &Credentials, address: IpAddr) -> bool {
    SubjectNames::of(&credentials.certificate).addresses.contains(&address)
}

fn not_certified(files: &Etcd, start: &Start) -> ConsensusError {
    ConsensusError::NotCertified {
        certificate: Path::to_owned(files.peer_pki.certificate.path()),
        name: start.name.clone(),
        address: start.address,
    }
}

fn check_revoked(files: &Etcd, pki: &Pki, credentials: &Credentials) -> Result<(), ConsensusError> {
    let list = files.load_revoked(&credentials.ca).map_err(ConsensusError::Credentials)?;
    match list.is_some_and(|list| list.revokes(&credentials.certificate)) {
        true => Err(ConsensusError::Revoked { certificate: Path::to_owned(pki.certificate.path()) }),
        false => Ok(()),
    }
}

/// Whether etcd has ever begun to write here.
fn has_data(files: &Etcd) -> Result<bool, ConsensusError> {
    let listed = files.data.list().map_err(|source| {
        ConsensusError::Credentials(PkiError::Read { directory: files.data.path().to_owned(), source })
    })?;
    Ok(listed.iter().any(|entry| entry.name.as_os_str() == "member"))
}

#[cfg(test)]
#[path = "files_test.rs"]
mod tests;
