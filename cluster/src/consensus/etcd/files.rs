//! A member's files on disk, and how it starts from them.

use std::net::IpAddr;
use std::path::Path;

use nodekeel_localstorage::pki::{Certificate, Credentials, PkiError, PrivateKey, RevocationList};
use nodekeel_localstorage::tree::{EtcdDir, LayoutDir, LayoutFile, PkiDir};

use zeroize::Zeroizing;

use super::backend::{DB_PATH, stored_value};
use super::join_claim::JoinClaim;
use super::peer_client::PeerClient;
use super::version::{self, EtcdVersion};
use crate::consensus::{ConsensusError, MemberName, Peer, StartMode, StartOptions};
use crate::pki::{
    CRL_PATH, CertificateSpec, PendingCa, SEALED_KEY_PATH, SubjectNames, Voter, has_peer_name, peer_name,
};

nodekeel_localstorage::layout! {
    /// The files next to the member's own directories.
    pub(super) struct PkiDirs {
        /// The CA of a new cluster, until its etcd stores it.
        pub(super) pending_ca: PkiDir = "new_authority", 0o700;
        /// The directory in which etcd runs, with its socket for this node's clients.
        pub(super) client_dir: LayoutDir = "client", 0o700;
        /// The credentials of this node's client, of a release whose etcd served clients on the network.
        pub(super) former_client: PkiDir = "client_pki", 0o700;
        /// The credentials with which etcd runs alone while a cluster is restored.
        pub(super) restore_pki: PkiDir = "restore_pki", 0o700;
        /// The key by which this voter opens the private key of the CA: an identity of age.
        pub(super) voter_key: LayoutFile = "voter_key", 0o400;
        /// This host's claim to the member as which it joins.
        pub(super) join_claim: LayoutFile = "join_claim", 0o400;
        /// The version of the etcd that was started last with the data: `3.4` and a line feed.
        pub(super) etcd_version: LayoutFile = "etcd_version", 0o400;
        /// Written when the data was found to differ from that of a majority: it must not be served.
        pub(super) data_differs: LayoutFile = "data_differs", 0o400;
        /// Written when etcd has found that its cluster has removed it: it is not started again.
        pub(super) removed: LayoutFile = "removed", 0o400;
        /// The name of a member that rejects this one's certificate, which does not start until that member answers it again.
        pub(super) rejected_by: LayoutFile = "rejected_by", 0o400;
        /// How far the recovery of the cluster from this member is: see [`recovery`](super::recovery).
        pub(super) recovery: LayoutFile = "recovery", 0o400;
        /// The name that the peer port requires of a certificate: see [`peer_name`](super::peer_name).
        pub(super) peer_name: LayoutFile = "peer_name", 0o400;
        /// The number of the member's last start: see [`starts`](super::starts).
        pub(super) start: LayoutFile = "start", 0o400;
    }
}

/// The cluster in which etcd starts.
#[derive(Debug)]
pub(super) enum InitialCluster {
    /// Creates a cluster; the token distinguishes it from all others.
    New { token: String },
    /// Joins a cluster with these members.
    Existing { peers: Vec<Peer> },
    /// Starts from its data, which lists the members.
    FromData,
}

/// A member that is ready to start.
#[derive(Debug)]
pub(super) struct PreparedFiles {
    pub(super) initial_cluster: InitialCluster,
    /// The member's credentials. Their certificate may be for a previous address.
    pub(super) credentials: Credentials,
    /// The directory with the socket for this node's clients.
    pub(super) client_dir: LayoutDir,
    /// The CA that is not saved yet.
    pub(super) pending_ca: Option<PendingCa>,
    /// True if etcd resumes from its log: the member has started before, and may have acknowledged writes.
    pub(super) has_log: bool,
    /// The claim by which the member asks its cluster before it starts, if it has to ask.
    pub(super) join_claim: Option<JoinClaim>,
    /// The name that the peer port requires of a certificate, if it does.
    pub(super) required_name: Option<String>,
}

impl PreparedFiles {
    fn new(dirs: &PkiDirs, initial_cluster: InitialCluster, credentials: Credentials) -> PreparedFiles {
        PreparedFiles {
            initial_cluster,
            credentials,
            client_dir: dirs.client_dir.clone(),
            pending_ca: None,
            has_log: false,
            join_claim: None,
            required_name: None,
        }
    }

    /// Returns whether the member's certificate is for this address.
    pub(super) fn is_certified_at(&self, address: IpAddr) -> bool {
        is_certified_at(&self.credentials, address)
    }

    /// Returns whether the member's certificate has the name that peer ports require.
    pub(super) fn has_peer_name(&self) -> bool {
        has_peer_name(&self.credentials.certificate, &peer_name(&self.credentials.ca))
    }

    /// A client of the other members' peer ports.
    pub(super) fn peer_client(&self) -> Result<PeerClient, ConsensusError> {
        PeerClient::new(&self.credentials, self.required_name.clone())
            .map_err(ConsensusError::backend("use the member's credentials"))
    }

    /// The addresses that the member's certificate names.
    pub(super) fn certified_addresses(&self) -> Vec<IpAddr> {
        SubjectNames::from_certificate(&self.credentials.certificate).ip_addresses
    }
}

/// Inspects the files, and creates what this mode lacks. It can be killed at any step, and repeated.
pub(super) fn prepare_files(files: &EtcdDir, start: &StartOptions) -> Result<PreparedFiles, ConsensusError> {
    // 1. Load the files of an earlier start. Data without credentials is another member's, or a damaged disk.
    let dirs = pki_dirs(files)?;
    let has_data = has_data(files)?;
    let existing = files.peer_pki.load_credentials().map_err(ConsensusError::Credentials)?;
    if existing.is_none() && has_data {
        return Err(ConsensusError::CredentialsMissing { data: files.data.path().to_owned() });
    }
    let has_log = has_log(files)?;
    if let (Some(existing), true) = (&existing, has_log && !has_revocation_list(files)?) {
        restore_revocation_list(files, &existing.ca)?;
    }
    // 2. Create what the mode needs and does not find.
    let new = load_pending_ca(&dirs)?;
    let prepared = match &start.mode {
        StartMode::Restart if !has_data => {
            return Err(ConsensusError::NoMember { data: files.data.path().to_owned() });
        }
        // A CA that is still, or again, on the disk may be saved or not: saving it finds out.
        StartMode::Restart => resume_member(files, &dirs, existing, new, InitialCluster::FromData)?,
        // Restored: from now on its data is as that of any other member.
        StartMode::RestoredCluster { .. } => {
            resume_member(files, &dirs, existing, new, InitialCluster::FromData)?
        }
        StartMode::NewCluster => prepare_new_cluster(files, &dirs, start, existing, new, has_data)?,
        StartMode::ExistingCluster { peers, credentials, revoked } => {
            let credentials = store_join_credentials(files, start, existing, credentials)?;
            // A list on the disk is the ticket's, or a newer one of the cluster.
            if files.load_revocation_list(&credentials.ca).map_err(ConsensusError::Credentials)?.is_none() {
                files.store_revocation_list(revoked).map_err(ConsensusError::Credentials)?;
            }
            PreparedFiles::new(&dirs, InitialCluster::Existing { peers: peers.clone() }, credentials)
        }
    };
    // 3. Check everything before etcd starts with it.
    // Without the file etcd rejects every connection; without the option it would accept revoked certificates.
    if !has_revocation_list(files)? {
        return Err(ConsensusError::RevocationListMissing {
            name: start.name.clone(),
            list: files.peer_crl.path().to_owned(),
            data: files.data.path().to_owned(),
        });
    }
    let prepared = PreparedFiles { has_log, ..prepared };
    // Once it takes part, it has its key certified for another address.
    if !has_log {
        check_address(files, start, &prepared.credentials)?;
    }
    check_member_certificate(files, start, &prepared.credentials)?;
    finish_credentials_change(&files.peer_pki, &prepared.credentials)?;
    forget_former_client(&dirs)?;
    let join_claim = decide_join_claim(&dirs, &prepared, &start.name)?;
    let required_name = load_required_name(files, &prepared.credentials.ca)?;
    Ok(PreparedFiles { join_claim, required_name, ..prepared })
}

/// The name that the peer port requires, if it is one of this CA: a restored cluster has another one.
pub(super) fn load_required_name(
    files: &EtcdDir,
    ca: &Certificate,
) -> Result<Option<String>, ConsensusError> {
    let stored = pki_dirs(files)?.peer_name.read_if_present();
    let stored = stored.map_err(ConsensusError::backend("read which name the peer port requires"))?;
    let name = peer_name(ca);
    Ok(stored.is_some_and(|stored| stored == name.as_bytes()).then_some(name))
}

/// Has the peer port require the name of this CA, from the next start on.
pub(super) fn require_peer_name(files: &EtcdDir, ca: &Certificate) -> Result<(), ConsensusError> {
    let written = pki_dirs(files)?.peer_name.write(peer_name(ca).as_bytes());
    written.map_err(ConsensusError::backend("record which name the peer port requires"))
}

fn has_revocation_list(files: &EtcdDir) -> Result<bool, ConsensusError> {
    files.peer_crl.exists().map_err(|source| {
        ConsensusError::Credentials(PkiError::Read { directory: files.path().to_owned(), source })
    })
}

/// Writes the list that etcd's data has, if there is one.
///
/// It is no older than the file that is missing, which was written from the same data. Like that one, it may lack what was
/// revoked while the member was off: the member receives that with its first data.
fn restore_revocation_list(files: &EtcdDir, ca: &Certificate) -> Result<(), ConsensusError> {
    let stored = stored_key(files, CRL_PATH, "read the list of revoked certificates in etcd's data")?;
    // One that this CA has not signed is none.
    let Some(list) = stored.and_then(|stored| RevocationList::from_der(&stored, ca).ok()) else {
        return Ok(());
    };
    tracing::warn!("the list of revoked certificates was missing: restored it from etcd's data");
    files.store_revocation_list(&list).map_err(ConsensusError::Credentials)
}

/// The value of a key in etcd's data, as far as its database has it.
fn stored_key(files: &EtcdDir, key: &str, failed: &'static str) -> Result<Option<Vec<u8>>, ConsensusError> {
    match files.data.open().and_then(|data| data.open_file(DB_PATH)) {
        Ok(file) => stored_value(&file, key.as_bytes()).map_err(ConsensusError::backend(failed)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(ConsensusError::backend(failed)(error)),
    }
}

/// Returns whether this voter can open the CA's private key as etcd's data has it, or it is not sealed there.
pub(super) fn opens_ca_key(files: &EtcdDir, name: &MemberName) -> Result<bool, ConsensusError> {
    let sealed = stored_key(files, SEALED_KEY_PATH, "read the CA's private key in etcd's data")?;
    let Some(sealed) = sealed else { return Ok(true) };
    let opened = ensure_voter(files, name)?.open(&sealed).map_err(ConsensusError::Ca)?;
    Ok(opened.is_some())
}

/// The claim of a member that joins, before it starts: see [`join_claim`](super::join_claim).
fn decide_join_claim(
    dirs: &PkiDirs,
    prepared: &PreparedFiles,
    name: &MemberName,
) -> Result<Option<JoinClaim>, ConsensusError> {
    // Only a member that was started to join asks: any other has created its cluster, or has been in it.
    if !matches!(prepared.initial_cluster, InitialCluster::Existing { .. }) {
        return Ok(None);
    }
    // etcd would start with an empty log: that is allowed once in a member's life.
    if !prepared.has_log {
        return JoinClaim::load_or_create(&dirs.join_claim).map(Some);
    }
    match dirs.join_claim.exists().map_err(ConsensusError::backend("look for the join claim"))? {
        true => Ok(None),
        false => {
            let (name, claim) = (name.clone(), dirs.join_claim.path().to_owned());
            Err(ConsensusError::Unclaimed { name, claim })
        }
    }
}

/// Removes the credentials of this node's client, which an earlier release has stored. A member has served when it has
/// them, so that no other host can have started it since: that is from now on recorded as a claim.
fn forget_former_client(dirs: &PkiDirs) -> Result<(), ConsensusError> {
    let client = &dirs.former_client;
    if client.credential_presence().map_err(ConsensusError::Credentials)?.is_absent() {
        return Ok(());
    }
    JoinClaim::load_or_create(&dirs.join_claim)?;
    // The certificate last: with it, a removal that was interrupted is completed by the next start.
    let removed = [&client.key, &client.ca, &client.certificate]
        .into_iter()
        .try_for_each(|file| file.remove().map(drop));
    removed.map_err(ConsensusError::backend("remove the former credentials of this node's client"))
}

/// Completes an interrupted change of the credentials: their handles already return the right content, but
/// etcd reads the files themselves.
fn finish_credentials_change(pki: &PkiDir, credentials: &Credentials) -> Result<(), ConsensusError> {
    let Credentials { key, certificate, ca } = credentials;
    let holds = |file: &LayoutFile, matches: &dyn Fn(&[u8]) -> bool| {
        let read = file.read_if_present().map(|content| content.map(Zeroizing::new));
        let failed = |source| PkiError::Read { directory: pki.path().to_owned(), source };
        read.map_err(failed).map(|content| content.is_some_and(|content| matches(&content)))
    };
    let is = |of: &Certificate, content: &[u8]| Certificate::from_pem(content).is_ok_and(|read| &read == of);
    let is_key = |content: &[u8]| {
        PrivateKey::from_pem(content).is_ok_and(|read| read.public_key() == key.public_key())
    };
    let is_settled = holds(&pki.ca, &|content| is(ca, content))
        .and_then(|ca| Ok(ca && holds(&pki.certificate, &|content| is(certificate, content))?))
        .and_then(|both| Ok(both && holds(&pki.key, &is_key)?));
    if is_settled.map_err(ConsensusError::Credentials)? {
        Ok(())
    } else {
        pki.store_credentials(credentials).map_err(ConsensusError::Credentials)
    }
}

/// Removes the data of a cluster that is being created, and that no other node has seen: until its CA is
/// known to be saved, nothing was written into it, and no node can have joined it. An etcd that was killed
/// during its first start may be unable to resume from it: it waits for ever for members that it has not
/// recorded.
pub(super) fn discard_unsaved_cluster(files: &EtcdDir) -> Result<(), ConsensusError> {
    let discarded = files.data.open().and_then(|data| data.remove_tree("member"));
    discarded
        .map(drop)
        .map_err(|error| ConsensusError::backend("remove the data of an unfinished cluster")(error))
}

/// Checks that etcd of this version may start with the data, and records it.
pub(super) fn check_version(
    files: &EtcdDir,
    binary: &Path,
    version: Option<EtcdVersion>,
) -> Result<(), ConsensusError> {
    let record = pki_dirs(files)?.etcd_version;
    version::check_version(files, &record, binary, version, has_data(files)?)
}

/// Records that the data differs from that of a majority, and returns the error of each start from now on.
pub(super) fn record_difference(files: &EtcdDir) -> Result<ConsensusError, ConsensusError> {
    let record = pki_dirs(files)?.data_differs;
    let written = record.write(b"The data of this member differs from that of a majority of the voters.\n");
    written.map_err(ConsensusError::backend("record that the data differs"))?;
    Ok(data_differs(files, &record))
}

/// Records that the cluster has removed the member, and returns the error of each start from now on.
pub(super) fn record_removal(files: &EtcdDir) -> Result<ConsensusError, ConsensusError> {
    let written = pki_dirs(files)?.removed.write(b"The cluster has removed this member.\n");
    written.map_err(ConsensusError::backend("record that the cluster has removed this member"))?;
    Ok(ConsensusError::Removed)
}

/// Rejects a member that its cluster has removed.
pub(super) fn check_removal(files: &EtcdDir) -> Result<(), ConsensusError> {
    let failed = ConsensusError::backend("look for the record of a removal");
    if pki_dirs(files)?.removed.exists().map_err(failed)? { Err(ConsensusError::Removed) } else { Ok(()) }
}

/// Rejects data that differs from that of a majority. A member without data has none that could.
pub(super) fn check_difference(files: &EtcdDir) -> Result<(), ConsensusError> {
    let record = pki_dirs(files)?.data_differs;
    let is_recorded =
        record.exists().map_err(ConsensusError::backend("look for the record of a difference"))?;
    if is_recorded && has_data(files)? { Err(data_differs(files, &record)) } else { Ok(()) }
}

fn data_differs(files: &EtcdDir, record: &LayoutFile) -> ConsensusError {
    let (data, record) = (files.data.path().to_owned(), record.path().to_owned());
    ConsensusError::DataDiffers { data, record }
}

/// Removes the saved CA from the disk. The key first: without it, the rest is known to be left over.
pub(super) fn remove_pending_ca(files: &EtcdDir) -> Result<(), ConsensusError> {
    let dirs = pki_dirs(files)?;
    for file in [&dirs.pending_ca.key, &dirs.pending_ca.certificate, &dirs.pending_ca.ca] {
        remove_file(file)?;
    }
    Ok(())
}

/// Removes the credentials with which etcd ran alone. The key first, as in [`remove_pending_ca`].
pub(super) fn remove_restore_pki(files: &EtcdDir) -> Result<(), ConsensusError> {
    let pki = pki_dirs(files)?.restore_pki;
    let removed =
        [&pki.key, &pki.certificate, &pki.ca].into_iter().try_for_each(|file| file.remove().map(drop));
    removed.map_err(ConsensusError::backend("remove the credentials of the restore from the disk"))
}

/// This voter with its key, which is made before the member's first start.
pub(super) fn ensure_voter(files: &EtcdDir, name: &MemberName) -> Result<Voter, ConsensusError> {
    let file = pki_dirs(files)?.voter_key;
    let failed = ConsensusError::backend("read the voter's key");
    if let Some(content) = file.read_if_present().map_err(failed)? {
        let content = Zeroizing::new(content);
        return Voter::from_file(name.clone(), &content).map_err(ConsensusError::Ca);
    }
    let voter = Voter::generate(name.clone()).map_err(ConsensusError::Ca)?;
    file.write(&voter.to_file()).map_err(ConsensusError::backend("store the voter's key"))?;
    Ok(voter)
}

/// Replaces the member's credentials, which etcd reads for each new connection.
pub(super) fn store_member_credentials(
    files: &EtcdDir,
    credentials: &Credentials,
) -> Result<(), ConsensusError> {
    files.peer_pki.store_credentials(credentials).map_err(ConsensusError::Credentials)
}

pub(super) fn pki_dirs(files: &EtcdDir) -> Result<PkiDirs, ConsensusError> {
    files.add_layout().map_err(ConsensusError::backend("place the member's files"))
}

fn remove_file(file: &LayoutFile) -> Result<(), ConsensusError> {
    file.remove()
        .map(drop)
        .map_err(|error| ConsensusError::backend("remove the saved CA from the disk")(error))
}

/// The CA that is not known to be saved.
fn load_pending_ca(dirs: &PkiDirs) -> Result<Option<PendingCa>, ConsensusError> {
    let presence = dirs.pending_ca.credential_presence().map_err(ConsensusError::Credentials)?;
    // Without its key the CA can't be used: a removal was interrupted, and is completed now.
    if !presence.key {
        for file in [&dirs.pending_ca.certificate, &dirs.pending_ca.ca] {
            remove_file(file)?;
        }
        return Ok(None);
    }
    let credentials = dirs.pending_ca.load_credentials().map_err(ConsensusError::Credentials)?;
    let new = credentials.map(PendingCa::from_credentials).transpose();
    new.map_err(ConsensusError::Ca)
}

fn prepare_new_cluster(
    files: &EtcdDir,
    dirs: &PkiDirs,
    start: &StartOptions,
    existing: Option<Credentials>,
    new: Option<PendingCa>,
    has_data: bool,
) -> Result<PreparedFiles, ConsensusError> {
    // No CA is pending, so this member is past its bootstrap, or never was in one.
    if existing.is_some() && new.is_none() {
        // It has created its cluster, or has joined another and not started yet: then it has no data.
        return if has_data {
            resume_member(files, dirs, existing, None, InitialCluster::FromData)
        } else {
            Err(ConsensusError::ForeignCredentials { directory: files.peer_pki.path().to_owned() })
        };
    }
    let mut new = match new {
        Some(new) => new,
        None => {
            let new = PendingCa::generate().map_err(ConsensusError::Ca)?;
            // On the disk before it signs anything: a kill must not leave credentials of a CA that no longer
            // exists.
            let kept = new.to_credentials().map_err(ConsensusError::Ca)?;
            dirs.pending_ca.store_credentials(&kept).map_err(ConsensusError::Credentials)?;
            new
        }
    };
    // etcd rejects every connection without this file.
    let none = new.empty_revocation_list().map_err(ConsensusError::Ca)?;
    if files.load_revocation_list(new.ca_certificate()).map_err(ConsensusError::Credentials)?.is_none() {
        files.store_revocation_list(&none).map_err(ConsensusError::Credentials)?;
    }
    require_peer_name(files, new.ca_certificate())?;
    // No other node knows the member yet: if its address has changed since, it starts with the new one. An earlier release gave
    // its certificate no name.
    let name = peer_name(new.ca_certificate());
    let existing = existing.filter(|existing| {
        is_certified_at(existing, start.address) && has_peer_name(&existing.certificate, &name)
    });
    if existing.is_none() {
        let spec = CertificateSpec::for_member(start.name.clone(), start.address);
        let issued = new.issue_credentials(&spec).map_err(ConsensusError::Ca)?;
        files.peer_pki.store_credentials(&issued).map_err(ConsensusError::Credentials)?;
        let token = cluster_token(&issued);
        let prepared = PreparedFiles::new(dirs, InitialCluster::New { token }, issued);
        return Ok(PreparedFiles { pending_ca: Some(new), ..prepared });
    }
    // The credentials of an earlier run stay, and etcd starts anew with them: its data is discarded.
    resume_member(files, dirs, existing, Some(new), InitialCluster::FromData).map(|prepared| {
        let token = cluster_token(&prepared.credentials);
        PreparedFiles { initial_cluster: InitialCluster::New { token }, ..prepared }
    })
}

/// A text unique to this cluster: etcd derives the cluster's id from it.
fn cluster_token(credentials: &Credentials) -> String {
    format!("nodekeel-{}", credentials.ca.public_key().short_id())
}

/// Resumes with the stored credentials.
fn resume_member(
    files: &EtcdDir,
    dirs: &PkiDirs,
    existing: Option<Credentials>,
    new: Option<PendingCa>,
    initial: InitialCluster,
) -> Result<PreparedFiles, ConsensusError> {
    let none = || ConsensusError::CredentialsMissing { data: files.data.path().to_owned() };
    let credentials = existing.ok_or_else(none)?;
    let new = new.map(|mut new| {
        new.add_issued(credentials.certificate.clone())?;
        Ok(new)
    });
    let pending_ca = new.transpose().map_err(ConsensusError::Ca)?;
    Ok(PreparedFiles { pending_ca, ..PreparedFiles::new(dirs, initial, credentials) })
}

/// Stores the given credentials, unless others are present.
fn store_join_credentials(
    files: &EtcdDir,
    start: &StartOptions,
    existing: Option<Credentials>,
    given: &Credentials,
) -> Result<Credentials, ConsensusError> {
    match existing {
        Some(existing) if existing.certificate == given.certificate && existing.ca == given.ca => {
            Ok(existing)
        }
        Some(_) => Err(ConsensusError::ForeignCredentials { directory: files.peer_pki.path().to_owned() }),
        None => {
            // Check before storing: credentials that don't match this node would lock out the right ones.
            check_address(files, start, given)?;
            check_member_certificate(files, start, given)?;
            files.peer_pki.store_credentials(given).map_err(ConsensusError::Credentials)?;
            // Read back, as every later start reads them.
            let stored = files.peer_pki.load_credentials().map_err(ConsensusError::Credentials)?;
            stored.ok_or_else(|| ConsensusError::CredentialsMissing { data: files.data.path().to_owned() })
        }
    }
}

/// Checks that the certificate is this member's, and is not revoked.
fn check_member_certificate(
    files: &EtcdDir,
    start: &StartOptions,
    credentials: &Credentials,
) -> Result<(), ConsensusError> {
    if SubjectNames::from_certificate(&credentials.certificate).is_named(start.name.as_str()) {
        check_revoked(files, &files.peer_pki, credentials)
    } else {
        Err(certificate_mismatch(files, start))
    }
}

/// Checks that the certificate is for the member's address.
fn check_address(
    files: &EtcdDir,
    start: &StartOptions,
    credentials: &Credentials,
) -> Result<(), ConsensusError> {
    if is_certified_at(credentials, start.address) { Ok(()) } else { Err(certificate_mismatch(files, start)) }
}

fn is_certified_at(credentials: &Credentials, address: IpAddr) -> bool {
    SubjectNames::from_certificate(&credentials.certificate).ip_addresses.contains(&address)
}

fn certificate_mismatch(files: &EtcdDir, start: &StartOptions) -> ConsensusError {
    ConsensusError::CertificateMismatch {
        certificate: Path::to_owned(files.peer_pki.certificate.path()),
        name: start.name.clone(),
        address: start.address,
    }
}

fn check_revoked(files: &EtcdDir, pki: &PkiDir, credentials: &Credentials) -> Result<(), ConsensusError> {
    let list = files.load_revocation_list(&credentials.ca).map_err(ConsensusError::Credentials)?;
    if list.is_some_and(|list| list.is_revoked(&credentials.certificate)) {
        Err(ConsensusError::CertificateRevoked { certificate: Path::to_owned(pki.certificate.path()) })
    } else {
        Ok(())
    }
}

/// Returns whether etcd has ever started to write here.
pub(super) fn has_data(files: &EtcdDir) -> Result<bool, ConsensusError> {
    let listed = files.data.list().map_err(|source| {
        ConsensusError::Credentials(PkiError::Read { directory: files.data.path().to_owned(), source })
    })?;
    Ok(listed.iter().any(|entry| entry.name.as_os_str() == "member"))
}

/// Returns whether etcd resumes from its log here. Without one it starts anew, even if other files are present.
///
/// *Source:* `Exist` in etcd's `wal/util.go`.
fn has_log(files: &EtcdDir) -> Result<bool, ConsensusError> {
    let failed = |error| ConsensusError::backend("look for etcd's log")(error);
    // Not in the layout: the directory is etcd's own, and may not exist yet.
    match files.data.list_below("member/wal") {
        Ok(entries) => {
            Ok(entries.iter().any(|entry| entry.name.as_os_str().as_encoded_bytes().ends_with(b".wal")))
        }
        Err(error) if error.is_not_found() => Ok(false),
        Err(error) => Err(failed(error)),
    }
}

#[cfg(test)]
#[path = "files_test.rs"]
mod tests;
