//! The ticket in an enrolment configuration.

use std::sync::Arc;

use nodekeel_localstorage::pki::{CertificateTemplate, PkiError};
use prost::Message as _;
use zeroize::Zeroizing;

use super::admission::{Admission, JoinKeys};
use super::{EnrolRequest, GoldenTicket, JoinTicket, TicketError, TicketId, wire};
use crate::consensus::PeerUrl;

/// The ticket in an enrolment configuration.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum EnrolmentTicket {
    /// It has everything that the node needs.
    Golden(Arc<GoldenTicket>),
    /// The node redeems it first.
    Join(Arc<PendingJoin>),
}

impl EnrolmentTicket {
    /// Parses an enrolment configuration: a message, or the text of a join ticket.
    ///
    /// # Errors
    /// [`TicketError`].
    pub fn from_config(content: &[u8]) -> Result<Self, TicketError> {
        if JoinTicket::is_text(content) {
            return Ok(Self::Join(Arc::new(PendingJoin { ticket: parse_text(content)?, keys: None })));
        }
        let config = wire::EnrolmentConfig::decode(content).map_err(|_| TicketError::Malformed)?;
        if config.join_ticket.is_empty() {
            return GoldenTicket::from_config(content).map(|ticket| Self::Golden(Arc::new(ticket)));
        }
        let keys = config.golden_ticket.as_ref().map(JoinKeys::from_message).transpose()?;
        Ok(Self::Join(Arc::new(PendingJoin { ticket: parse_text(config.join_ticket.as_bytes())?, keys })))
    }

    /// The digest of a golden ticket, or the id of a join ticket with zeros behind it.
    pub(crate) fn id(&self) -> TicketId {
        match self {
            Self::Golden(ticket) => ticket.digest(),
            Self::Join(pending) => {
                let mut id = [0; 32];
                id[..8].copy_from_slice(pending.ticket.id().as_bytes());
                TicketId::from_bytes(id)
            }
        }
    }
}

fn parse_text(content: &[u8]) -> Result<JoinTicket, TicketError> {
    std::str::from_utf8(content).map_err(|_| TicketError::Malformed)?.parse().map_err(TicketError::JoinTicket)
}

/// A join ticket that is not redeemed yet, and the keys that the node has made to redeem it.
#[derive(Debug)]
pub struct PendingJoin {
    ticket: JoinTicket,
    keys: Option<JoinKeys>,
}

impl PendingJoin {
    /// The ticket.
    pub fn ticket(&self) -> &JoinTicket {
        &self.ticket
    }

    pub(crate) fn has_keys(&self) -> bool {
        self.keys.is_some()
    }

    /// The same ticket, with new keys.
    pub(crate) fn with_new_keys(&self, prefix: &str) -> Result<Self, PkiError> {
        Ok(Self { ticket: self.ticket.clone(), keys: Some(JoinKeys::generate(prefix)?) })
    }

    /// The enrolment configuration that holds it: a secret.
    pub(crate) fn to_config(&self) -> Zeroizing<Vec<u8>> {
        let config = wire::EnrolmentConfig {
            golden_ticket: self.keys.as_ref().map(JoinKeys::to_message),
            join_ticket: self.ticket.to_text().to_string(),
            node_id: String::new(),
        };
        Zeroizing::new(config.encode_to_vec())
    }

    /// The request to the voters, for calls by this key; `None` without keys.
    pub(crate) fn request(&self, url: PeerUrl, caller: &str) -> Result<Option<EnrolRequest>, PkiError> {
        let Some(keys) = &self.keys else { return Ok(None) };
        let mut request = EnrolRequest {
            ticket: self.ticket.id(),
            secret: self.ticket.secret().clone(),
            url,
            node_certificate: keys.node_certificate.clone(),
            member_certificate: CertificateTemplate::default().self_sign(&keys.member)?,
            node_signature: Vec::new(),
            member_signature: Vec::new(),
        };
        request.sign(caller, &keys.node, &keys.member);
        Ok(Some(request))
    }

    /// The golden ticket that the answer of a voter and the node's keys make.
    pub(crate) fn accept(&self, answer: &[u8]) -> Result<GoldenTicket, TicketError> {
        let keys = self.keys.as_ref().ok_or(TicketError::MissingField("node's key"))?;
        Admission::from_config(answer)?.into_ticket(keys)
    }
}

/// Arbitrary bytes as an enrolment configuration, and as the answer of a voter: never panics, and a valid ticket survives a
/// round trip.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_arbitrary_ticket(bytes: &[u8]) {
    super::join_ticket::check_arbitrary_join_ticket(bytes);
    let _ = Admission::from_config(bytes);
    match EnrolmentTicket::from_config(bytes) {
        Ok(EnrolmentTicket::Join(pending)) => {
            let Ok(EnrolmentTicket::Join(again)) = EnrolmentTicket::from_config(&pending.to_config()) else {
                panic!("a written ticket is valid")
            };
            assert_eq!(again.to_config(), pending.to_config());
        }
        Ok(EnrolmentTicket::Golden(_)) => super::golden_ticket::check_arbitrary_ticket(bytes),
        Err(_) => {}
    }
}
