//! Enrolment by a join ticket: how a new node calls a voter.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use nodekeel_cluster::consensus::PeerUrl;
use nodekeel_cluster::enrolment::{ClusterNode, EnrolCallError, Enroller};
use nodekeel_cluster::node::{
    EnrolRequest, InvalidJoinRole, JoinRole, JoinSecret, JoinTicket, JoinTicketId, KnownNode, NodeApi,
    TicketVoter, VoterKeyDigest, WorkerRequest,
};
use nodekeel_localstorage::pki::Certificate;
use thiserror::Error;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

use super::shared::{Api, running_api};
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

#[tonic::async_trait]
impl Enroller for ApiEnroller {
    fn caller(&self) -> Option<String> {
        running_api(&self.0).map(|api| api.key.public_key().to_string())
    }

    async fn enrol(&self, voter: &TicketVoter, request: &EnrolRequest) -> Result<Vec<u8>, EnrolCallError> {
        let unavailable = |source| EnrolCallError::Unavailable { voter: voter.address, source };
        let api = running_api(&self.0).ok_or_else(|| unavailable("the node has no API".into()))?;
        Ok(call_voter(voter, &api.key, to_message(request)).await?.enrolment)
    }
}

/// Redeems a join ticket at this voter.
pub(crate) async fn call_voter(
    voter: &TicketVoter,
    key: &PrivateKey,
    request: node_v1::EnrolRequest,
) -> Result<node_v1::EnrolResponse, EnrolCallError> {
    let called = timeout(CALL_TIMEOUT, try_voter(voter, key, request)).await;
    let late = || format!("it does not answer within {} s", CALL_TIMEOUT.as_secs()).into();
    let unavailable = |source| EnrolCallError::Unavailable { voter: voter.address, source };
    called.map_err(|_| unavailable(late()))?
}

async fn try_voter(
    voter: &TicketVoter,
    key: &PrivateKey,
    request: node_v1::EnrolRequest,
) -> Result<node_v1::EnrolResponse, EnrolCallError> {
    let unavailable = |source| EnrolCallError::Unavailable { voter: voter.address, source };
    let expected = voter.key;
    let is_expected = move |key: &PublicKey| key_digest(*key) == expected;
    let channel = connect(voter.address, is_expected, key).await.map_err(|error| {
        unavailable(match MismatchedKey::of_error(&error) {
            Some(found) => {
                format!("it has another key than the ticket names, {found}: create another ticket").into()
            }
            None => error.into(),
        })
    })?;
    let answer = NodeClient::new(channel).enrol(request).await;
    answer.map(Response::into_inner).map_err(|status| match status.code() {
        Code::PermissionDenied | Code::InvalidArgument => {
            EnrolCallError::Refused(status.message().to_owned())
        }
        Code::Unavailable => unavailable("the connection was closed".into()),
        _ => unavailable(status.message().to_owned().into()),
    })
}

/// Connects to a voter whose key is expected, as a machine that may be in no record. There is one attempt: another one follows with
/// all voters.
pub(crate) async fn connect(
    voter: SocketAddr,
    is_expected: impl Fn(&PublicKey) -> bool + Send + Sync + 'static,
    own_key: &PrivateKey,
) -> io::Result<Channel> {
    let tls = ClientTls::enrolling(own_key, is_expected).map_err(io::Error::other)?;
    let mut stream = Some(tls.connect(voter).await?);
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
        role: JoinRole::Voter.to_string(),
        address: request.url.host().to_owned(),
        port: request.url.port().into(),
        node_certificate: request.node_certificate.der_bytes().to_vec(),
        member_certificate: request.member_certificate.der_bytes().to_vec(),
        node_signature: request.node_signature.clone(),
        member_signature: request.member_signature.clone(),
    }
}

/// The request of a worker by this ticket.
pub(crate) fn worker_message(
    ticket: &JoinTicket,
    certificate: &Certificate,
    address: SocketAddr,
) -> node_v1::EnrolRequest {
    node_v1::EnrolRequest {
        ticket: ticket.id().as_bytes().to_vec(),
        secret: ticket.secret().expose_bytes().to_vec(),
        role: JoinRole::Worker.to_string(),
        address: address.ip().to_string(),
        port: address.port().into(),
        node_certificate: certificate.der_bytes().to_vec(),
        ..Default::default()
    }
}

/// A request to enrol, by what the node becomes.
#[derive(Debug)]
pub(crate) enum ParsedRequest {
    Voter(EnrolRequest),
    Worker(WorkerRequest),
}

/// A request that is none.
#[derive(Debug, Error)]
pub(crate) enum InvalidRequest {
    #[error("invalid {0} in the request to enrol")]
    Field(&'static str),
    #[error(transparent)]
    Role(InvalidJoinRole),
}

/// Parses the request of who calls by this key.
pub(crate) fn parse_message(
    message: &node_v1::EnrolRequest,
    caller: PublicKey,
) -> Result<ParsedRequest, InvalidRequest> {
    let field = InvalidRequest::Field;
    let ticket = message.ticket.as_slice().try_into().map_err(|_| field("id of the ticket"))?;
    let address: IpAddr = message.address.parse().map_err(|_| field("address"))?;
    let port = u16::try_from(message.port).ok().filter(|port| *port > 0).ok_or(field("port"))?;
    let certificate = |der: &[u8]| Certificate::from_der(der).map_err(|_| field("certificate"));
    let ticket = JoinTicketId::from_bytes(ticket);
    let secret = JoinSecret::from_bytes(&message.secret).ok_or(field("secret of the ticket"))?;
    let node_certificate = certificate(&message.node_certificate)?;
    match message.role.parse().map_err(InvalidRequest::Role)? {
        JoinRole::Worker => Ok(ParsedRequest::Worker(WorkerRequest {
            ticket,
            secret,
            certificate: node_certificate,
            api: NodeApi { key: caller.to_bytes(), address: SocketAddr::new(address, port) },
        })),
        _ => Ok(ParsedRequest::Voter(EnrolRequest {
            ticket,
            secret,
            url: PeerUrl::new(address, port),
            node_certificate,
            member_certificate: certificate(&message.member_certificate)?,
            node_signature: message.node_signature.clone(),
            member_signature: message.member_signature.clone(),
        })),
    }
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
    let others = others.into_iter().filter(|node| !node.is_worker);
    let voter = |KnownNode { api, .. }: KnownNode| -> Option<TicketVoter> {
        Some(TicketVoter { address: api.address, key: key_digest(PublicKey::new(api.key).ok()?) })
    };
    Ok(this.into_iter().chain(others).filter_map(voter).collect())
}

/// Arbitrary bytes as a request to enrol: never panics, and a valid one survives a round trip.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_arbitrary_request(bytes: &[u8]) {
    use prost::Message as _;

    let caller = PublicKey::new([b'k'; 32]).expect("a key");
    let Ok(message) = node_v1::EnrolRequest::decode(bytes) else { return };
    if let Ok(ParsedRequest::Voter(request)) = parse_message(&message, caller) {
        let written = to_message(&request);
        match parse_message(&written, caller).expect("a written request is valid") {
            ParsedRequest::Voter(again) => assert_eq!(to_message(&again), written),
            ParsedRequest::Worker(again) => panic!("of a voter: {again:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
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
        let (message, caller) = (to_message(&request()), PublicKey::new([b'k'; 32]).expect("a key"));
        check_arbitrary_request(&message.encode_to_vec());
        assert!(message.encoded_len() < MAX_REQUEST_BYTES / 4);
        assert!(!format!("{message:?}").contains("217"), "{message:?}");
        let wrong = |change: &dyn Fn(&mut node_v1::EnrolRequest)| {
            let mut message = message.clone();
            change(&mut message);
            parse_message(&message, caller).expect_err("an invalid request").to_string()
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
            wrong(&|it| it.role = "witness".into()),
            "nodes of the role \"witness\" are not supported: use voter or worker"
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
