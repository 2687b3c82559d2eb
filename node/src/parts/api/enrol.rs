//! Enrolment by a join ticket: how a new node calls a voter.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use nodekeel_cluster::consensus::PeerUrl;
use nodekeel_cluster::enrolment::{ClusterNode, EnrolCallError, Enroller};
use nodekeel_cluster::node::{
    EnrolRequest, InvalidJoinRole, JoinSecret, JoinTicketId, KnownNode, TicketVoter, VoterKeyDigest,
};
use nodekeel_localstorage::pki::Certificate;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::identities::Api;
use super::is_on;
use crate::access::{ClientTls, MismatchedKey, PrivateKey, PublicKey};
use crate::error_chain::error_chain;
use crate::node_v1;
use crate::node_v1::node_client::NodeClient;
use crate::running::RunningNode;

/// The time for a connection and a call: the voter writes to the store of its cluster.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// The most bytes of a request.
pub(crate) const MAX_REQUEST_BYTES: usize = 16 << 10;

/// Calls voters by the key of this node's API.
pub(crate) struct ApiEnroller(pub(crate) Arc<RunningNode>);

impl fmt::Debug for ApiEnroller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiEnroller").finish_non_exhaustive()
    }
}

impl ApiEnroller {
    /// The API; a reload may have switched it on or off.
    fn api(&self) -> Option<Arc<Api>> {
        self.0.extension::<Arc<Api>>().filter(|_| is_on(&self.0.plan().config))
    }
}

#[tonic::async_trait]
impl Enroller for ApiEnroller {
    fn caller(&self) -> Option<String> {
        self.api().map(|api| api.key.public_key().to_string())
    }

    async fn enrol(&self, voter: &TicketVoter, request: &EnrolRequest) -> Result<Vec<u8>, EnrolCallError> {
        let unavailable = |source| EnrolCallError::Unavailable { voter: voter.address, source };
        let api = self.api().ok_or_else(|| unavailable("the node has no API".into()))?;
        let called = timeout(CALL_TIMEOUT, call_voter(voter, &api.key, request)).await;
        let late = || format!("it does not answer within {} s", CALL_TIMEOUT.as_secs()).into();
        called.map_err(|_| unavailable(late()))?
    }
}

async fn call_voter(
    voter: &TicketVoter,
    key: &PrivateKey,
    request: &EnrolRequest,
) -> Result<Vec<u8>, EnrolCallError> {
    let unavailable = |source| EnrolCallError::Unavailable { voter: voter.address, source };
    let channel = connect(voter, key).await.map_err(|error| {
        unavailable(match MismatchedKey::of_error(&error) {
            Some(found) => {
                format!("it has another key than the ticket names, {found}: create another ticket").into()
            }
            None => error.into(),
        })
    })?;
    let answer = NodeClient::new(channel).enrol(to_message(request)).await;
    answer.map(|answer| answer.into_inner().enrolment).map_err(|status| match status.code() {
        Code::PermissionDenied | Code::InvalidArgument => {
            EnrolCallError::Refused(status.message().to_owned())
        }
        Code::Unavailable => unavailable("the connection was closed".into()),
        _ => unavailable(status.message().to_owned().into()),
    })
}

/// Connects to a voter. There is one attempt: another one follows with all voters.
async fn connect(voter: &TicketVoter, own_key: &PrivateKey) -> io::Result<Channel> {
    let expected = voter.key;
    let is_expected = move |key: &PublicKey| key_digest(*key) == expected;
    let tls = ClientTls::enrolling(own_key, is_expected).map_err(io::Error::other)?;
    let tcp = TcpStream::connect(voter.address).await?;
    // The key stands for itself: the name is not sent, and nothing is compared with it.
    let name = ServerName::try_from("node").expect("a name");
    let mut stream: Option<TlsStream<TcpStream>> =
        Some(TlsConnector::from(tls.config()).connect(name, tcp).await?);
    let connector = tower::service_fn(move |_| {
        let stream = stream.take();
        async move { stream.map(TokioIo::new).ok_or_else(|| io::Error::from(io::ErrorKind::ConnectionAborted)) }
    });
    Ok(Endpoint::from_static("http://node").connect_with_connector_lazy(connector))
}

/// The digest of a key, as tickets have it.
pub(crate) fn key_digest(key: PublicKey) -> VoterKeyDigest {
    VoterKeyDigest::of_spki(&key.to_spki())
}

fn to_message(request: &EnrolRequest) -> node_v1::EnrolRequest {
    node_v1::EnrolRequest {
        ticket: request.ticket.as_bytes().to_vec(),
        secret: request.secret.expose_bytes().to_vec(),
        role: request.role.to_string(),
        address: request.url.host().to_owned(),
        port: request.url.port().into(),
        node_certificate: request.node_certificate.der_bytes().to_vec(),
        member_certificate: request.member_certificate.der_bytes().to_vec(),
        node_signature: request.node_signature.clone(),
        member_signature: request.member_signature.clone(),
    }
}

/// A request that is none.
#[derive(Debug, Error)]
pub(crate) enum InvalidRequest {
    #[error("invalid {0} in the request to enrol")]
    Field(&'static str),
    #[error(transparent)]
    Role(InvalidJoinRole),
}

pub(crate) fn parse_message(message: &node_v1::EnrolRequest) -> Result<EnrolRequest, InvalidRequest> {
    let field = InvalidRequest::Field;
    let ticket = message.ticket.as_slice().try_into().map_err(|_| field("id of the ticket"))?;
    let address: IpAddr = message.address.parse().map_err(|_| field("address"))?;
    let port = u16::try_from(message.port).ok().filter(|port| *port > 0).ok_or(field("port"))?;
    let certificate = |der: &[u8]| Certificate::from_der(der).map_err(|_| field("certificate"));
    Ok(EnrolRequest {
        ticket: JoinTicketId::from_bytes(ticket),
        secret: JoinSecret::from_bytes(&message.secret).ok_or(field("secret of the ticket"))?,
        url: PeerUrl::new(address, port),
        role: message.role.parse().map_err(InvalidRequest::Role)?,
        node_certificate: certificate(&message.node_certificate)?,
        member_certificate: certificate(&message.member_certificate)?,
        node_signature: message.node_signature.clone(),
        member_signature: message.member_signature.clone(),
    })
}

/// The voters that a new ticket of this node names: this one first.
pub(crate) async fn ticket_voters(api: &Api, cluster: &ClusterNode) -> Result<Vec<TicketVoter>, Status> {
    let nodes = cluster.node_store().map_err(|error| Status::failed_precondition(error_chain(&error)))?;
    let known = nodes.watch_nodes().next_nodes().await;
    let known = known.map_err(|error| Status::aborted(error_chain(&error)))?;
    let own = api.key.public_key().to_bytes();
    let (this, others): (Vec<_>, Vec<_>) = known.into_iter().partition(|node| node.api.key == own);
    if this.is_empty() {
        return Err(Status::aborted("this node has not recorded its API in the cluster yet: try again"));
    }
    let voter = |KnownNode { api, .. }: KnownNode| -> Option<TicketVoter> {
        Some(TicketVoter { address: api.address, key: key_digest(PublicKey::new(api.key).ok()?) })
    };
    Ok(this.into_iter().chain(others).filter_map(voter).collect())
}

/// Arbitrary bytes as a request to enrol: never panics, and a valid one survives a round trip.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_arbitrary_request(bytes: &[u8]) {
    use prost::Message as _;

    let Ok(message) = node_v1::EnrolRequest::decode(bytes) else { return };
    if let Ok(request) = parse_message(&message) {
        let again = to_message(&request);
        assert_eq!(to_message(&parse_message(&again).expect("a written request is valid")), again);
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_cluster::node::JoinRole;
    use nodekeel_localstorage::pki::CertificateTemplate;
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;

    fn request() -> EnrolRequest {
        let key = nodekeel_localstorage::pki::PrivateKey::generate().expect("a key");
        let certificate = || CertificateTemplate::default().self_sign(&key).expect("a certificate");
        let mut request = EnrolRequest {
            ticket: JoinTicketId::from_bytes(*b"12345678"),
            secret: JoinSecret::from_bytes(&[217; 16]).expect("16 bytes"),
            url: "https://[2001:db8::1]:7001".parse().expect("a URL"),
            role: JoinRole::Voter,
            node_certificate: certificate(),
            member_certificate: certificate(),
            node_signature: Vec::new(),
            member_signature: Vec::new(),
        };
        request.sign("ed25519:a", &key, &key);
        request
    }

    #[test]
    fn a_request_survives_a_round_trip_and_its_secret_is_not_printed() {
        let message = to_message(&request());
        check_arbitrary_request(&message.encode_to_vec());
        assert!(message.encoded_len() < MAX_REQUEST_BYTES / 4);
        assert!(!format!("{message:?}").contains("217"), "{message:?}");
        let wrong = |change: &dyn Fn(&mut node_v1::EnrolRequest)| {
            let mut message = message.clone();
            change(&mut message);
            parse_message(&message).expect_err("an invalid request").to_string()
        };
        assert_eq!(wrong(&|it| it.ticket = vec![0; 7]), "invalid id of the ticket in the request to enrol");
        assert_eq!(
            wrong(&|it| it.secret = vec![0; 15]),
            "invalid secret of the ticket in the request to enrol"
        );
        assert_eq!(wrong(&|it| it.address = "node-1".into()), "invalid address in the request to enrol");
        assert_eq!(wrong(&|it| it.port = 0), "invalid port in the request to enrol");
        assert_eq!(wrong(&|it| it.port = 65536), "invalid port in the request to enrol");
        assert_eq!(wrong(&|it| it.node_certificate.clear()), "invalid certificate in the request to enrol");
        assert_eq!(
            wrong(&|it| it.role = "worker".into()),
            "nodes of the role \"worker\" are not supported: use voter"
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_request_or_an_error(bytes: Vec<u8>, at in 0..400_usize, byte: u8) {
            check_arbitrary_request(&bytes);
            let mut request = to_message(&request()).encode_to_vec();
            request[at] = byte;
            check_arbitrary_request(&request);
        }
    }
}
