//! Answers other voters before etcd starts.
//!
//! Voters that all start at once ask each other which of their starts they have seen, and none has started its etcd
//! yet. So the member itself answers at its peer port until then, as etcd does: `GET /members` returns the members in its
//! data. The question has what the asking voter has seen of this one, which is an answer, too.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use nodekeel_localstorage::pki::{Certificate, Credentials, RevocationList};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{self, ServerConfig};

use super::local_member::LocalMember;
use super::peer_client::{ListedMember, SEEN_HEADER, identity, root_store};
use super::retry_pause::RetryPause;
use super::start_number::StartNumber;
use super::starts::Answer;
use crate::consensus::ConsensusError;
use crate::pki::SubjectNames;

/// The timeout of a connection: a handshake and one question.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest question that is read.
const MAX_QUESTION: usize = 4096;
/// The connections that are answered at the same time; more wait.
const MAX_CONNECTIONS: usize = 16;

/// Answers at the peer port of a member whose etcd does not run.
pub(super) struct Witness<'a> {
    socket: SocketAddr,
    tls: TlsAcceptor,
    revoked: Option<RevocationList>,
    members: &'a [ListedMember],
    answer: Vec<u8>,
}

impl<'a> Witness<'a> {
    pub(super) fn new(
        member: LocalMember<'_>,
        credentials: &Credentials,
        members: &'a [ListedMember],
    ) -> Result<Witness<'a>, ConsensusError> {
        let tls = server_config(credentials)
            .map_err(ConsensusError::backend("answer other members with the member's credentials"))?;
        // etcd checks the same list for each connection.
        let revoked =
            member.files.load_revocation_list(&credentials.ca).map_err(ConsensusError::Credentials)?;
        let body = serde_json::to_vec(members).map_err(ConsensusError::backend("list the members"))?;
        let head = format!("HTTP/1.0 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
        Ok(Witness {
            socket: SocketAddr::new(member.address, member.config.peer_port),
            tls: TlsAcceptor::from(Arc::new(tls)),
            revoked,
            members,
            answer: [head.into_bytes(), body].concat(),
        })
    }

    /// Answers until it is dropped, and sends what those who ask have seen of this member.
    pub(super) async fn answer(&self, seen: &mpsc::UnboundedSender<Answer>) {
        let mut pause = RetryPause::default();
        let listener = loop {
            match TcpListener::bind(self.socket).await {
                Ok(listener) => break listener,
                // Still the etcd of a run before. Without this answer, the others start first.
                Err(error) => tracing::debug!("can't answer at {} yet: {error}", self.socket),
            }
            pause.wait().await;
        };
        let mut connections = FuturesUnordered::new();
        loop {
            tokio::select! {
                accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                    Ok((stream, _)) => connections.push(timeout(CONNECTION_TIMEOUT, self.answer_one(stream))),
                    // For example no free file descriptor: without a pause, this would be a busy loop.
                    Err(_) => pause.wait().await,
                },
                Some(answered) = connections.next() => {
                    if let Ok(Ok(Some((name, start)))) = answered {
                        let _ = seen.send((name, Ok(start)));
                    }
                }
            }
        }
    }

    /// Answers one question. Returns who has asked, and what it has seen.
    async fn answer_one(&self, stream: TcpStream) -> io::Result<Option<(String, StartNumber)>> {
        let mut stream = self.tls.accept(stream).await?;
        let peer = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let peer = peer.and_then(|peer| Certificate::from_der(peer).ok());
        let Some(peer) = peer.filter(|peer| self.revoked.as_ref().is_some_and(|list| !list.is_revoked(peer)))
        else {
            return Ok(None);
        };
        let mut question = Vec::new();
        while !question.ends_with(b"\r\n\r\n") && question.len() < MAX_QUESTION {
            if stream.read_buf(&mut question).await? == 0 {
                break;
            }
        }
        let question = String::from_utf8_lossy(&question);
        if !question.starts_with("GET /members ") {
            stream.write_all(b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n").await?;
            stream.shutdown().await?;
            return Ok(None);
        }
        stream.write_all(&self.answer).await?;
        stream.shutdown().await?;
        let names = SubjectNames::from_certificate(&peer);
        let asking = self.members.iter().filter_map(ListedMember::name).find(|name| names.is_named(name));
        Ok(asking.map(str::to_owned).zip(parse_seen(&question)))
    }
}

/// What the asking voter has seen. etcd sends none.
fn parse_seen(question: &str) -> Option<StartNumber> {
    let value = question.lines().find_map(|line| line.strip_prefix(SEEN_HEADER)?.strip_prefix(": "));
    Some(StartNumber(value?.trim().parse().ok()?))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_question_has_what_the_asking_voter_has_seen() {
        let question = |header: &str| format!("GET /members HTTP/1.0\r\nHost: one\r\n{header}\r\n");
        assert_eq!(parse_seen(&question(&format!("{SEEN_HEADER}: 7\r\n"))), Some(StartNumber(7)));
        for other in ["", "X-Server-From: 7\r\n", &format!("{SEEN_HEADER}: x\r\n")] {
            assert_eq!(parse_seen(&question(other)), None);
        }
    }
}
