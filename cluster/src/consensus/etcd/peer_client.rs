//! The answers of a member at its peer port, which it serves from its start on, also while it waits for a majority: all that
//! one member asks another.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use nodekeel_localstorage::pki::{Certificate, Credentials};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::Resumption;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};

use super::start_number::StartNumber;
use super::version::EtcdVersion;
use crate::consensus::{Member, MemberId, PeerUrl};
use crate::pki::has_peer_name;
#[cfg(any(test, feature = "testing"))]
use {
    super::join_verdict::Verdict, super::peer_server::PeerQuestion, crate::consensus::Peer,
    crate::pki::SubjectNames,
};

/// The timeout of a request: three round trips and an answer from memory.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(1500);

/// The header with the last start of the asked member that the asking one has seen: etcd ignores it, and a
/// [`witness`](super::witness) reads it.
pub(super) const SEEN_HEADER: &str = "X-Nodekeel-Start-Seen";

/// The longest answer that is read: a list of many more members than etcd supports.
const MAX_ANSWER: usize = 1 << 20;

/// A client of members' peer ports, with this member's credentials. Its copies have the same.
#[derive(Clone)]
pub(super) struct PeerClient {
    tls: Arc<RwLock<TlsConnector>>,
    /// The name that the certificate of each member must have, if it must.
    required_name: Option<String>,
}

/// A connection to a member, for short answers.
pub(super) struct PeerConnection {
    stream: TlsStream<TcpStream>,
    name: String,
}

/// The hash of a member's data at a revision, as etcd answers for it.
///
/// *Source:* `HashKVResponse` in etcd's `rpc.proto`, in the JSON of Go.
#[derive(Debug, Deserialize)]
pub(super) struct DataHashAnswer {
    #[serde(default)]
    pub(super) hash: u32,
    #[serde(default)]
    pub(super) compact_revision: i64,
}

/// *Source:* `Versions` in etcd's `api/version/version.go`.
#[derive(Deserialize)]
struct Versions {
    etcdserver: String,
    etcdcluster: String,
}

/// A member in the answer to `GET /members`, and in etcd's database.
///
/// *Source:* `membership.Member` in etcd's `server/etcdserver/api/membership/member.go`.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct ListedMember {
    id: u64,
    #[serde(default)]
    name: String,
    #[serde(default, rename = "peerURLs")]
    pub(super) peer_urls: Vec<String>,
    #[serde(default, rename = "clientURLs")]
    pub(super) client_urls: Vec<String>,
    #[serde(default, rename = "isLearner")]
    is_learner: bool,
}

impl PeerClient {
    /// A client with these credentials, which the members' CA has issued.
    ///
    /// # Errors
    /// The credentials are not valid for TLS.
    pub(super) fn new(credentials: &Credentials, required_name: Option<String>) -> io::Result<PeerClient> {
        let tls = Arc::new(RwLock::new(PeerClient::connector(credentials)?));
        Ok(PeerClient { tls, required_name })
    }

    /// Connects with these credentials from now on, in each copy.
    ///
    /// # Errors
    /// The credentials are not valid for TLS.
    pub(super) fn renew(&self, credentials: &Credentials) -> io::Result<()> {
        *self.tls.write().unwrap_or_else(PoisonError::into_inner) = PeerClient::connector(credentials)?;
        Ok(())
    }

    fn connector(credentials: &Credentials) -> io::Result<TlsConnector> {
        let roots = root_store(&credentials.ca)?;
        let (chain, key) = identity(credentials)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(io::Error::other)?;
        // A resumed session has the certificate that the member presented in the first one.
        config.resumption = Resumption::disabled();
        Ok(TlsConnector::from(Arc::new(config)))
    }

    /// Returns whether the member of this name answers at its peer URL.
    pub(super) async fn is_answering(&self, name: &str, url: &PeerUrl) -> bool {
        self.read_version(name, url).await.is_ok()
    }

    /// The release of the member of this name.
    ///
    /// # Errors
    /// It does not answer, or the answer has no version.
    pub(super) async fn read_version(&self, name: &str, url: &PeerUrl) -> io::Result<String> {
        let mut connection = timeout(REQUEST_TIMEOUT, self.connect(name, url)).await??;
        connection.read_version().await
    }

    /// The release of the cluster of the member of this name; `None` until its etcd has decided it.
    ///
    /// # Errors
    /// Those of [`read_version`](Self::read_version).
    pub(super) async fn read_cluster_version(
        &self,
        name: &str,
        url: &PeerUrl,
    ) -> io::Result<Option<EtcdVersion>> {
        let mut connection = timeout(REQUEST_TIMEOUT, self.connect(name, url)).await??;
        Ok(EtcdVersion::parse_cluster(&connection.read_versions().await?.etcdcluster))
    }

    /// The certificate that the member of this name presents.
    ///
    /// # Errors
    /// It does not present one in time.
    pub(super) async fn read_certificate(&self, name: &str, url: &PeerUrl) -> io::Result<Certificate> {
        let connection = timeout(REQUEST_TIMEOUT, self.connect(name, url)).await??;
        connection.certificate().ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// A connection to the member of this name.
    ///
    /// # Errors
    /// It does not accept one, or is another.
    pub(super) async fn connect(&self, name: &str, url: &PeerUrl) -> io::Result<PeerConnection> {
        let server = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
        let tls = self.tls.read().unwrap_or_else(PoisonError::into_inner).clone();
        let stream = tls.connect(server, connect(url).await?).await?;
        let connection = PeerConnection { stream, name: name.to_owned() };
        let is_peer = |required: &String| {
            connection.certificate().is_some_and(|certificate| has_peer_name(&certificate, required))
        };
        match self.required_name.as_ref().is_none_or(is_peer) {
            true => Ok(connection),
            false => Err(io::Error::other(Unnamed)),
        }
    }

    /// The hash of the member's data at a revision.
    ///
    /// # Errors
    /// It does not answer in time, or has not applied the revision yet, or has deleted it.
    pub(super) async fn hash_data(
        &self,
        name: &str,
        url: &PeerUrl,
        revision: i64,
        within: Duration,
    ) -> io::Result<DataHashAnswer> {
        let body = format!("{{\"revision\":{revision}}}");
        let asked = async {
            let connection = self.connect(name, url).await?;
            connection.ask("GET /members/hashkv", "", body.as_bytes()).await
        };
        Ok(serde_json::from_slice(&timeout(within, asked).await??)?)
    }

    /// The members that the member of this name knows: its own copy of the list, which may be old.
    ///
    /// # Errors
    /// It does not answer, or the answer is not a list of members.
    pub(super) async fn list_members(&self, name: &str, url: &PeerUrl) -> io::Result<Vec<Member>> {
        Ok(self.list_entries(name, url).await?.iter().map(ListedMember::to_member).collect())
    }

    /// The same, with the starts of the members.
    ///
    /// # Errors
    /// Those of [`list_members`](Self::list_members).
    pub(super) async fn list_entries(&self, name: &str, url: &PeerUrl) -> io::Result<Vec<ListedMember>> {
        Ok(serde_json::from_slice(&self.ask(name, url, "GET /members", "", b"").await?)?)
    }

    /// The same, and tells the member the last start of it that this one has seen.
    ///
    /// # Errors
    /// Those of [`list_members`](Self::list_members).
    pub(super) async fn list_entries_telling(
        &self,
        name: &str,
        url: &PeerUrl,
        seen: StartNumber,
    ) -> io::Result<Vec<ListedMember>> {
        let header = format!("{SEEN_HEADER}: {}\r\n", seen.0);
        Ok(serde_json::from_slice(&self.ask(name, url, "GET /members", &header, b"").await?)?)
    }

    /// The body of the answer to one question.
    ///
    /// # Errors
    /// The member does not answer in time, or not with success.
    pub(super) async fn ask(
        &self,
        name: &str,
        url: &PeerUrl,
        question: &str,
        header: &str,
        body: &[u8],
    ) -> io::Result<Vec<u8>> {
        let asked = async { self.connect(name, url).await?.ask(question, header, body).await };
        timeout(REQUEST_TIMEOUT, asked).await?
    }
}

impl PeerConnection {
    /// The certificate of the member.
    pub(super) fn certificate(&self) -> Option<Certificate> {
        let chain = self.stream.get_ref().1.peer_certificates()?;
        Certificate::from_der(chain.first()?).ok()
    }

    /// The body of an answer. With HTTP/1.0 it is everything until the connection ends, or has the length that its
    /// head has.
    ///
    /// # Errors
    /// The member does not answer with success.
    pub(super) async fn ask(mut self, question: &str, header: &str, body: &[u8]) -> io::Result<Vec<u8>> {
        let length =
            if body.is_empty() { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
        let head = format!("{question} HTTP/1.0\r\nHost: {}\r\n{header}{length}\r\n", self.name);
        let mut answer = Vec::new();
        let read = self.read_answer(&[head.as_bytes(), body].concat(), &mut answer).await;
        // By the handshake, it is the member. It looks at the certificate of this one afterwards.
        if answer.is_empty() {
            let source = read.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into());
            return Err(io::Error::new(source.kind(), Denial(source)));
        }
        read?;
        parse_answer(answer)
    }

    /// The release of the member. The connection stays.
    ///
    /// # Errors
    /// It does not answer in time, or the answer has no version.
    pub(super) async fn read_version(&mut self) -> io::Result<String> {
        Ok(self.read_versions().await?.etcdserver)
    }

    async fn read_versions(&mut self) -> io::Result<Versions> {
        // The answer is so short that it has its length.
        let question = format!("GET /version HTTP/1.1\r\nHost: {}\r\n\r\n", self.name);
        let mut answer = Vec::new();
        timeout(REQUEST_TIMEOUT, self.read_answer(question.as_bytes(), &mut answer)).await??;
        Ok(serde_json::from_slice(&parse_answer(answer)?)?)
    }

    async fn read_answer(&mut self, question: &[u8], answer: &mut Vec<u8>) -> io::Result<()> {
        self.stream.write_all(question).await?;
        // etcd's server may take five seconds to close the connection: its timeout of a read.
        while answer.len() < MAX_ANSWER && !is_complete(answer, None) {
            match self.stream.read_buf(answer).await {
                Ok(0) => break,
                // Go's server may close the connection without closing TLS.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                Err(error) => return Err(error),
                Ok(_) => {}
            }
        }
        Ok(())
    }
}

/// A member has ended the connection without an answer after it had identified itself: as one does with a certificate that it
/// has revoked, or one that is stopped.
#[derive(Debug, Error)]
#[error("it ended the connection without an answer: {0}")]
struct Denial(io::Error);

/// A node of this cluster's CA has answered with a certificate that no member has, or one of an earlier release.
#[derive(Debug, Error)]
#[error("its certificate is not that of a member")]
struct Unnamed;

/// Returns whether the error is of one whose certificate has no name of a member.
pub(super) fn is_unnamed(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|source| source.is::<Unnamed>())
}

/// Returns whether the error is of a member that had identified itself.
pub(super) fn is_denial(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|source| source.is::<Denial>())
}

impl ListedMember {
    pub(super) fn to_member(&self) -> Member {
        let name = Some(self.name.clone()).filter(|name| !name.is_empty());
        Member::new(MemberId(self.id), name, self.peer_urls.clone(), self.is_learner)
    }

    /// The member's name; `None` until it has started for the first time.
    pub(super) fn name(&self) -> Option<&str> {
        Some(self.name.as_str()).filter(|name| !name.is_empty())
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn is_named(&self, name: &str) -> bool {
        self.name == name
    }

    pub(super) fn is_learner(&self) -> bool {
        self.is_learner
    }

    pub(super) fn peer_url(&self) -> Option<PeerUrl> {
        self.peer_urls.first()?.parse().ok()
    }

    /// The member's last start that this list has seen.
    pub(super) fn start(&self) -> StartNumber {
        StartNumber::from_urls(&self.client_urls)
    }
}

/// The trusted CA.
pub(super) fn root_store(ca: &Certificate) -> io::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    roots.add(parse_certificate(&ca.to_pem())?).map_err(io::Error::other)?;
    Ok(roots)
}

/// The certificate and the key with which a member identifies itself.
pub(super) fn identity(
    credentials: &Credentials,
) -> io::Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
    let key = PrivateKeyDer::from_pem_slice(credentials.key.to_pem().as_bytes()).map_err(io::Error::other)?;
    Ok((vec![parse_certificate(&credentials.certificate.to_pem())?], key))
}

async fn connect(url: &PeerUrl) -> io::Result<TcpStream> {
    match url.host().parse::<IpAddr>() {
        Ok(address) => TcpStream::connect(SocketAddr::new(address, url.port())).await,
        // A URL may have a host name in place of an address.
        Err(_) => TcpStream::connect((url.host(), url.port())).await,
    }
}

fn parse_certificate(pem: &str) -> io::Result<CertificateDer<'static>> {
    CertificateDer::from_pem_slice(pem.as_bytes()).map_err(io::Error::other)
}

/// Returns whether a message has the length in its head, or this one if the head has none.
pub(super) fn is_complete(message: &[u8], without: Option<usize>) -> bool {
    let Some((head, body)) = split_message(message) else { return false };
    let head = String::from_utf8_lossy(head).to_ascii_lowercase();
    // Names of header fields are case-insensitive, hence the lower case. *Source:* RFC 9110, section 5.1.
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
    length.or(without).is_some_and(|length: usize| body.len() >= length)
}

/// The head and the body.
pub(super) fn split_message(message: &[u8]) -> Option<(&[u8], &[u8])> {
    const END_OF_HEAD: &[u8] = b"\r\n\r\n";
    let end = message.windows(END_OF_HEAD.len()).position(|bytes| bytes == END_OF_HEAD)?;
    Some((&message[..end], &message[end + END_OF_HEAD.len()..]))
}

/// The body of an HTTP answer whose status is 200.
fn parse_answer(answer: Vec<u8>) -> io::Result<Vec<u8>> {
    let status = answer.split(|byte| *byte == b' ').nth(1);
    match (split_message(&answer), status) {
        // An error status has a body, too, which is not an answer.
        (Some((_, body)), Some(b"200")) if answer.starts_with(b"HTTP/1.") => Ok(body.to_vec()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not an answer of etcd")),
    }
}

/// Arbitrary bytes as an answer, read in two parts, and as a question with a verdict.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_arbitrary_answer(bytes: &[u8]) {
    let (first, _) = bytes.split_at(bytes.len() / 2);
    assert!(!is_complete(first, None) || is_complete(bytes, None), "a complete answer stays complete");
    let question = PeerQuestion::parse(SubjectNames::default(), bytes);
    if let Some(verdict) =
        question.and_then(|question| serde_json::from_slice::<Verdict>(&question.body).ok())
    {
        let this = Peer::new("one".parse().expect("a name"), PeerUrl::new([192, 0, 2, 1].into(), 1));
        let _ = verdict.into_answer(&this);
    }
    let Ok(body) = parse_answer(bytes.to_vec()) else { return };
    assert!(bytes.ends_with(&body), "the body is the end of the answer");
    if let Ok(listed) = serde_json::from_slice::<Vec<ListedMember>>(&body) {
        assert!(listed.iter().map(ListedMember::to_member).all(|member| member.name.as_deref() != Some("")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_the_body_of_status_200() {
        let body = |text: &str| parse_answer(text.as_bytes().to_vec()).ok();
        assert_eq!(body("HTTP/1.0 200 OK\r\nX: y\r\n\r\n[1]\r\n\r\n"), Some(b"[1]\r\n\r\n".to_vec()));
        for bad in ["", "HTTP/1.0 200 OK\r\n", "HTTP/1.0 403 Forbidden\r\n\r\n[]", "SSH-2.0 200 x\r\n\r\n"] {
            assert_eq!(body(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn an_answer_of_known_length_is_complete_without_the_end_of_the_connection() {
        let answer = b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\n[1]";
        for end in 0..=answer.len() {
            assert_eq!(is_complete(&answer[..end], None), end == answer.len(), "{end}");
        }
        assert!(!is_complete(b"HTTP/1.0 200 OK\r\n\r\n[1]", None));
    }

    #[test]
    fn an_answer_cut_or_changed_anywhere_is_no_panic() {
        let answer = b"HTTP/1.0 200 OK\r\nContent-Length: 26\r\n\r\n[{\"id\":2,\"isLearner\":true}]";
        for at in 0..answer.len() {
            check_arbitrary_answer(&answer[..at]);
            for byte in [0, b' ', b'\n', 0xff] {
                let mut changed = answer.to_vec();
                changed[at] = byte;
                check_arbitrary_answer(&changed);
            }
        }
    }

    #[test]
    fn members_are_read_as_etcd_writes_them() {
        let listed = r#"[{"id":10276657743932975437,"peerURLs":["https://10.0.0.8:2380"],"name":"one",
            "clientURLs":["https://10.0.0.8:2379"]},{"id":2,"peerURLs":["https://10.0.0.9:2380"],"isLearner":true}]"#;
        let members: Vec<ListedMember> = serde_json::from_str(listed).unwrap();
        let members: Vec<Member> = members.iter().map(ListedMember::to_member).collect();
        assert_eq!(
            members,
            [
                Member::new(
                    MemberId(10_276_657_743_932_975_437),
                    Some("one".into()),
                    vec!["https://10.0.0.8:2380".into()],
                    false
                ),
                Member::new(MemberId(2), None, vec!["https://10.0.0.9:2380".into()], true),
            ]
        );
    }
}
