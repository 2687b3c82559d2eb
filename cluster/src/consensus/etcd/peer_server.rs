//! Answers at the peer port of a member whose etcd does not run: questions of other members, over mutual TLS, with the list of
//! revoked certificates and the name that a certificate must have, as etcd serves them there.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use nodekeel_localstorage::pki::{Certificate, Credentials, RevocationList};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{self, ServerConfig};

use super::local_member::LocalMember;
use super::peer_client::{identity, is_complete, root_store, split_message};
use super::retry_pause::RetryPause;
use crate::consensus::ConsensusError;
use crate::pki::{SubjectNames, has_peer_name};

/// The timeout of a connection: a handshake and one question.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest question that is read: a list of many more members than etcd supports.
const MAX_QUESTION: usize = 64 * 1024;
/// The connections that are answered at the same time; more wait.
const MAX_CONNECTIONS: usize = 256;

/// Answers at the peer port of a member whose etcd does not run.
pub(super) struct PeerServer {
    socket: SocketAddr,
    tls: TlsAcceptor,
    revoked: Option<RevocationList>,
    /// The name that a certificate must have, if it must.
    required_name: Option<String>,
}

/// A question, and who asks.
pub(super) struct PeerQuestion {
    pub(super) names: SubjectNames,
    pub(super) head: String,
    pub(super) body: Vec<u8>,
}

impl PeerQuestion {
    /// Returns whether it is this one: a method and a path.
    pub(super) fn is(&self, question: &str) -> bool {
        self.head.strip_prefix(question).is_some_and(|rest| rest.starts_with(' '))
    }

    /// Of a message; `None` if it has no head.
    pub(super) fn parse(names: SubjectNames, message: &[u8]) -> Option<PeerQuestion> {
        let (head, body) = split_message(message)?;
        Some(PeerQuestion { names, head: String::from_utf8_lossy(head).into_owned(), body: body.to_vec() })
    }
}

impl PeerServer {
    pub(super) fn new(
        member: LocalMember<'_>,
        credentials: &Credentials,
        required_name: Option<String>,
    ) -> Result<PeerServer, ConsensusError> {
        let tls = server_config(credentials)
            .map_err(ConsensusError::backend("answer other members with the member's credentials"))?;
        // etcd checks the same list for each connection.
        let revoked =
            member.files.load_revocation_list(&credentials.ca).map_err(ConsensusError::Credentials)?;
        let socket = SocketAddr::new(member.address, member.config.peer_port);
        Ok(PeerServer { socket, tls: TlsAcceptor::from(Arc::new(tls)), revoked, required_name })
    }

    /// Answers until it is dropped. A question without an answer gets an error.
    pub(super) async fn serve(&self, answer: impl Fn(&PeerQuestion) -> Option<Vec<u8>>) {
        let mut pause = RetryPause::default();
        let listener = loop {
            match TcpListener::bind(self.socket).await {
                Ok(listener) => break listener,
                // Still the etcd of a run before.
                Err(error) => tracing::debug!("can't answer at {} yet: {error}", self.socket),
            }
            pause.wait().await;
        };
        let mut connections = FuturesUnordered::new();
        loop {
            tokio::select! {
                accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                    Ok((stream, _)) => {
                        connections.push(timeout(CONNECTION_TIMEOUT, self.answer_one(stream, &answer)));
                    }
                    // For example no free file descriptor: without a pause, this would be a busy loop.
                    Err(_) => pause.wait().await,
                },
                Some(_) = connections.next() => {}
            }
        }
    }

    fn admits(&self, peer: &Certificate) -> bool {
        self.revoked.as_ref().is_some_and(|list| !list.is_revoked(peer))
            && self.required_name.as_ref().is_none_or(|name| has_peer_name(peer, name))
    }

    async fn answer_one(
        &self,
        stream: TcpStream,
        answer: impl Fn(&PeerQuestion) -> Option<Vec<u8>>,
    ) -> io::Result<()> {
        let mut stream = self.tls.accept(stream).await?;
        let peer = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let peer = peer.and_then(|peer| Certificate::from_der(peer).ok());
        let Some(peer) = peer.filter(|peer| self.admits(peer)) else { return Ok(()) };
        let mut message = Vec::new();
        while !is_complete(&message, Some(0)) && message.len() < MAX_QUESTION {
            if stream.read_buf(&mut message).await? == 0 {
                break;
            }
        }
        let question = PeerQuestion::parse(SubjectNames::from_certificate(&peer), &message);
        let (status, body) = match question.and_then(|question| answer(&question)) {
            Some(body) => ("200 OK", body),
            None => ("503 Service Unavailable", Vec::new()),
        };
        let head = format!("HTTP/1.0 {status}\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(&[head.into_bytes(), body].concat()).await?;
        stream.shutdown().await
    }
}

fn server_config(credentials: &Credentials) -> io::Result<ServerConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let roots = Arc::new(root_store(&credentials.ca)?);
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider));
    let verifier = verifier.build().map_err(io::Error::other)?;
    let (chain, key) = identity(credentials)?;
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(io::Error::other)?.with_client_cert_verifier(verifier);
    config.with_single_cert(chain, key).map_err(io::Error::other)
}
