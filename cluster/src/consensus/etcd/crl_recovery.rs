//! Reads a list of revoked certificates that is missing on the disk: from etcd's own data, or another member.
//!
//! Without the file etcd rejects every connection, also that which would fetch the list; without the option it
//! would accept revoked certificates. So it runs for a moment with one certificate as its only trusted one: that
//! of this node's client. No other member or client gets in, nor does it reach another member; but it answers
//! from its data.

use std::net::SocketAddr;
use std::time::Duration;

use etcd_client as api;
use nodekeel_localstorage::pki::{Credentials, RevocationList};
use tokio::time::timeout;

use super::client::{self, WithoutLeader};
use super::local_member::LocalMember;
use super::peer_client::PeerClient;
use super::retry_pause::RetryPause;
use crate::BoxError;
use crate::consensus::MemberName;
use crate::pki::CRL_PATH;

/// The timeout of a read, which a member answers from its own data.
const READ_TIMEOUT: Duration = Duration::from_secs(2);

/// This node's member, which runs alone.
pub(super) struct CrlRecovery<'a> {
    pub(super) member: LocalMember<'a>,
    pub(super) credentials: &'a Credentials,
}

impl CrlRecovery<'_> {
    /// Reads the list, once a member answers.
    pub(super) async fn read_list(&self) -> RevocationList {
        let mut pause = RetryPause::default();
        loop {
            match self.try_read().await {
                Ok(list) => return list,
                Err(error) => tracing::debug!("read the list of revoked certificates: {error}"),
            }
            // etcd serves before it reports that it is ready, which it does only with a majority; nothing else
            // notifies of that.
            pause.wait().await;
        }
    }

    async fn try_read(&self) -> Result<RevocationList, BoxError> {
        // The only voter serves its clients, and etcd 3.4 also serves its keys at its peer port.
        let LocalMember { config, name, address, .. } = self.member;
        for port in [config.client_port, config.peer_port] {
            let url = format!("https://{}", SocketAddr::new(address, port));
            if let Ok(list) = self.read_from(&url, name).await {
                return Ok(list);
            }
        }
        // One of several does not serve alone, but knows the others.
        let peers = PeerClient::new(self.credentials)?;
        let known = peers.list_entries(name.as_str(), &self.member.peer_url()).await?;
        let mut failed = BoxError::from("no other member is known");
        for member in known {
            let Some((url, name)) = member.client_urls.first().zip(member.to_member().name) else { continue };
            match self.read_from(url, &name.parse()?).await {
                Ok(list) => return Ok(list),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    async fn read_from(&self, url: &str, name: &MemberName) -> Result<RevocationList, BoxError> {
        let without_leader = WithoutLeader::IsAnswered;
        let client =
            client::connect_from(self.member.address, url, name, self.credentials, without_leader).await?;
        // As far as the member knows: this one can't ask another, and the next start brings the newest list.
        let options = api::GetOptions::new().with_serializable();
        let mut keys = client.kv_client();
        let read = timeout(READ_TIMEOUT, keys.get(CRL_PATH, Some(options))).await??;
        let stored = read.kvs().first().ok_or("the member has no list")?;
        Ok(RevocationList::from_der(stored.value(), &self.credentials.ca)?)
    }
}
