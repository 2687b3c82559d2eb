//! A member whose certificate is not the one that it needs: it restarts at another address, or was certified by a release that knew
//! no name for peer ports.

use nodekeel_localstorage::pki::Credentials;
use tokio::task::spawn_blocking;

use super::files::{self, PreparedFiles};
use super::local_member::LocalMember;
use super::members::EtcdMembers;
use crate::consensus::{ClusterMembers as _, ConsensusError, Member, MembershipError, PeerUrl};
use crate::pki::{CertificateSpec, ClusterCa};

/// Certifies the member's key for its address and for the peer ports, unless that was done before. Returns the new credentials. It
/// can be killed at any step: a certificate that was issued and not stored belongs to the member's own key.
pub(super) async fn ensure_certificate(
    cluster_ca: &ClusterCa,
    member: LocalMember<'_>,
    prepared: PreparedFiles,
) -> Result<Option<Credentials>, ConsensusError> {
    let LocalMember { files, name, address, .. } = member;
    // One that can't sign takes part without the name, as before: health names it.
    if prepared.is_certified_at(address) && (prepared.has_peer_name() || !cluster_ca.can_sign()) {
        return Ok(None);
    }
    let Credentials { key, ca, .. } = prepared.credentials;
    let spec = CertificateSpec::for_member(name.clone(), address);
    let certificate = cluster_ca.certify_key(key.public_key(), &spec).await.map_err(ConsensusError::Ca)?;
    // The old certificate stays valid: it belongs to the same key, which no other member has.
    let (files, credentials) = (files.clone(), Credentials { key, certificate, ca });
    let stored =
        spawn_blocking(move || files::store_member_credentials(&files, &credentials).map(|()| credentials));
    let credentials = stored.await.map_err(ConsensusError::backend("store credentials"))??;
    tracing::info!(%address, "the member has a new certificate");
    Ok(Some(credentials))
}

/// Refuses to start a member at another address while it still answers at the one of its certificate: this is a
/// copy of its data, and the two would divide its vote, or, where it is alone, its cluster. One that was moved
/// was stopped there before.
pub(super) async fn check_moved(
    prepared: &PreparedFiles,
    member: LocalMember<'_>,
) -> Result<(), ConsensusError> {
    if prepared.is_certified_at(member.address) {
        return Ok(());
    }
    let peers = prepared.peer_client()?;
    // The certificate names the addresses at which the member was last certified to run.
    for former in prepared.certified_addresses() {
        let url = PeerUrl::new(former, member.config.peer_port);
        if peers.is_answering(member.name.as_str(), &url).await {
            return Err(ConsensusError::RunsElsewhere { name: member.name.clone(), url });
        }
    }
    Ok(())
}

/// This member, listed at its present URL.
pub(super) async fn ensure_listed(members: &EtcdMembers, url: PeerUrl) -> Result<Member, ConsensusError> {
    let this = this_member(members).await?;
    if this.peer_urls == [url.as_str()] {
        return Ok(this);
    }
    // A repeated call sets the same URL, so that a lost answer does no harm.
    members.update_peer_url(this.id, &url).await.map_err(ConsensusError::Membership)?;
    tracing::info!(%url, "the member is listed at its new address");
    self::this_member(members).await
}

/// This member's entry in the list.
async fn this_member(members: &EtcdMembers) -> Result<Member, ConsensusError> {
    let source = |source| ConsensusError::Kv { operation: "read the member's id", source };
    let id = members.kv.member_id().await.map_err(source)?;
    let listed = members.list_members().await.map_err(ConsensusError::Membership)?;
    let this = listed.into_iter().find(|member| member.id == id);
    this.ok_or(ConsensusError::Membership(MembershipError::MemberNotFound { id }))
}
