//! TLS between an operator and a node: each proves its key, and knows the other's. There are no certificates: the keys stand for
//! themselves (RFC 7250).

use std::fmt;
use std::io;
use std::sync::Arc;

use thiserror::Error;
#[cfg(feature = "node")]
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use tokio_rustls::rustls::crypto::{WebPkiSupportedAlgorithms, ring, verify_tls13_signature_with_raw_key};
use tokio_rustls::rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{
    AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, Error, OtherError,
    PeerIncompatible, SignatureScheme,
};
#[cfg(feature = "node")]
use tokio_rustls::rustls::{
    DistinguishedName, ServerConfig,
    server::danger::{ClientCertVerified, ClientCertVerifier},
    server::{Acceptor, AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage},
};
#[cfg(feature = "node")]
use tokio_rustls::{LazyConfigAcceptor, server::TlsStream};
use tokio_rustls::{TlsConnector, client};

use super::{PrivateKey, PublicKey};

/// The protocol inside of TLS. *Source:* RFC 9113, section 3.2.
const HTTP2: &[u8] = b"h2";

/// HTTP/2 of a client whose key is in no record: a new node that redeems its ticket. Each key may finish such a handshake, and call
/// nothing else.
#[cfg(feature = "node")]
const ENROL: &[u8] = b"nodekeel-enrol";

/// A node on another machine, and the key by which an operator calls it.
#[derive(Debug)]
pub struct RemoteNode {
    /// `HOST:PORT` of its API.
    pub address: String,
    /// The public key of the node: another one is not called.
    pub node_key: PublicKey,
    /// The operator's key.
    pub operator_key: PrivateKey,
}

/// The other side has another key than one that is known here.
#[derive(Debug, Error)]
#[error("unknown key {0}")]
pub(crate) struct MismatchedKey(pub(crate) PublicKey);

impl MismatchedKey {
    /// The key in an error of a handshake, if it has failed for this reason.
    pub(crate) fn of_error(error: &io::Error) -> Option<PublicKey> {
        match error.get_ref()?.downcast_ref()? {
            Error::InvalidCertificate(CertificateError::Other(other)) => {
                other.0.downcast_ref().map(|Self(key)| *key)
            }
            _ => None,
        }
    }

    fn to_tls(key: PublicKey) -> Error {
        Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(Self(key)))))
    }
}

/// The operator's side.
#[derive(Clone)]
pub(crate) struct ClientTls(Arc<ClientConfig>);

impl ClientTls {
    /// Calls a node with this key, and proves the operator's.
    pub(crate) fn new(node_key: PublicKey, operator_key: &PrivateKey) -> Result<Self, Error> {
        Self::build(operator_key, HTTP2, move |key| *key == node_key)
    }

    /// Calls a node whose key is accepted, to enrol by `own_key`.
    #[cfg(feature = "node")]
    pub(crate) fn enrolling(
        own_key: &PrivateKey,
        is_accepted: impl Fn(&PublicKey) -> bool + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        Self::build(own_key, ENROL, is_accepted)
    }

    fn build(
        own_key: &PrivateKey,
        protocol: &[u8],
        is_known: impl Fn(&PublicKey) -> bool + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let provider = Arc::new(ring::default_provider());
        let known = KnownNode {
            is_known: Box::new(is_known),
            algorithms: provider.signature_verification_algorithms,
        };
        let identity = Arc::new(AlwaysResolvesClientRawPublicKeys::new(certified(own_key)?));
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(known))
            .with_client_cert_resolver(identity);
        config.alpn_protocols = vec![protocol.to_vec()];
        config.resumption = Resumption::disabled();
        config.enable_sni = false;
        Ok(Self(Arc::new(config)))
    }

    /// Connects to the node at this address.
    pub(crate) async fn connect(
        &self,
        address: impl ToSocketAddrs,
    ) -> io::Result<client::TlsStream<TcpStream>> {
        let tcp = TcpStream::connect(address).await?;
        // Messages are small, and most of them are waited for.
        let _ = tcp.set_nodelay(true);
        // The key stands for itself: the name is not sent, and nothing is compared with it.
        let name = ServerName::try_from("node").expect("a name");
        TlsConnector::from(Arc::clone(&self.0)).connect(name, tcp).await
    }

    /// Returns whether the node has answered that it does not know the operator's key.
    pub(crate) fn is_unknown_operator(error: &io::Error) -> bool {
        matches!(
            error.get_ref().and_then(|inner| inner.downcast_ref()),
            Some(Error::AlertReceived(AlertDescription::CertificateUnknown))
        )
    }
}

fn certified(key: &PrivateKey) -> Result<Arc<CertifiedKey>, Error> {
    let signer = ring::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(key.pkcs8()))?;
    // In the place of a certificate, rustls takes the public key.
    Ok(Arc::new(CertifiedKey::new(vec![CertificateDer::from(key.public_key().to_spki())], signer)))
}

/// The key that the other side claims; it has not proved it yet.
fn claimed_key(entity: &CertificateDer<'_>) -> Result<PublicKey, Error> {
    PublicKey::from_spki(entity).map_err(|_| Error::InvalidCertificate(CertificateError::BadEncoding))
}

/// Verifies that the other side has the private half of the key that it claims.
fn verify_proof(
    message: &[u8],
    entity: &CertificateDer<'_>,
    proof: &DigitallySignedStruct,
    algorithms: &WebPkiSupportedAlgorithms,
) -> Result<HandshakeSignatureValid, Error> {
    verify_tls13_signature_with_raw_key(
        message,
        &SubjectPublicKeyInfoDer::from(entity.as_ref()),
        proof,
        algorithms,
    )
}

/// The node's key, as the operator knows it.
struct KnownNode {
    is_known: Box<dyn Fn(&PublicKey) -> bool + Send + Sync>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl fmt::Debug for KnownNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KnownNode").finish_non_exhaustive()
    }
}

impl ServerCertVerifier for KnownNode {
    fn verify_server_cert(
        &self,
        entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        // A key has no dates.
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match claimed_key(entity)? {
            key if (self.is_known)(&key) => Ok(ServerCertVerified::assertion()),
            other => Err(MismatchedKey::to_tls(other)),
        }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        entity: &CertificateDer<'_>,
        proof: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_proof(message, entity, proof, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// The keys that a node admits, at the time of the question.
#[cfg(feature = "node")]
pub(crate) trait AdmittedKeys: fmt::Debug + Send + Sync {
    /// Returns whether this key is one of them.
    fn is_admitted(&self, key: &PublicKey) -> bool;
}

/// The node's side: it proves its key, and ends the handshake of every key that is not admitted, unless it comes to enrol.
#[cfg(feature = "node")]
#[derive(Clone, Debug)]
pub(crate) struct ServerTls {
    known: Arc<ServerConfig>,
    /// None if no node can enrol.
    enrolling: Option<Arc<ServerConfig>>,
}

#[cfg(feature = "node")]
impl ServerTls {
    pub(crate) fn new(
        node_key: &PrivateKey,
        admitted: Arc<dyn AdmittedKeys>,
        can_enrol: bool,
    ) -> Result<Self, Error> {
        let enrolling = can_enrol.then(|| server_config(node_key, Arc::new(AnyKey), ENROL)).transpose()?;
        Ok(Self { known: server_config(node_key, admitted, HTTP2)?, enrolling })
    }

    /// Accepts a connection of a client with a key that is admitted.
    pub(crate) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> io::Result<TlsStream<S>> {
        let start = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
        let enrols =
            start.client_hello().alpn().is_some_and(|mut protocols| protocols.any(|name| name == ENROL));
        let enrolling = self.enrolling.as_ref().filter(|_| enrols);
        start.into_stream(Arc::clone(enrolling.unwrap_or(&self.known))).await
    }
}

/// Admits each key.
#[cfg(feature = "node")]
#[derive(Debug)]
struct AnyKey;

#[cfg(feature = "node")]
impl AdmittedKeys for AnyKey {
    fn is_admitted(&self, _: &PublicKey) -> bool {
        true
    }
}

#[cfg(feature = "node")]
fn server_config(
    node_key: &PrivateKey,
    admitted: Arc<dyn AdmittedKeys>,
    protocol: &[u8],
) -> Result<Arc<ServerConfig>, Error> {
    let provider = Arc::new(ring::default_provider());
    let operators = KnownOperators { admitted, algorithms: provider.signature_verification_algorithms };
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(Arc::new(operators))
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(certified(node_key)?)));
    config.alpn_protocols = vec![protocol.to_vec()];
    // A resumed session would ask nobody whether the key is still admitted.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

#[cfg(feature = "node")]
#[derive(Debug)]
struct KnownOperators {
    admitted: Arc<dyn AdmittedKeys>,
    algorithms: WebPkiSupportedAlgorithms,
}

#[cfg(feature = "node")]
impl ClientCertVerifier for KnownOperators {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        // A key has no dates.
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        match claimed_key(entity)? {
            key if self.admitted.is_admitted(&key) => Ok(ClientCertVerified::assertion()),
            unknown => Err(MismatchedKey::to_tls(unknown)),
        }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        entity: &CertificateDer<'_>,
        proof: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_proof(message, entity, proof, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// Returns whether the client of a connection came to enrol: its key may be that of anyone.
#[cfg(feature = "node")]
pub(crate) fn is_enrolling(connection: &tokio_rustls::rustls::ServerConnection) -> bool {
    connection.alpn_protocol() == Some(ENROL)
}

/// The key that the client of a connection has proved.
#[cfg(feature = "node")]
pub(crate) fn proved_key(connection: &tokio_rustls::rustls::ServerConnection) -> Option<PublicKey> {
    PublicKey::from_spki(connection.peer_certificates()?.first()?).ok()
}

#[cfg(all(test, feature = "node"))]
mod tests {
    use rcgen::{CertificateParams, KeyPair};
    use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _};
    use tokio_rustls::rustls::RootCertStore;
    use tokio_rustls::rustls::client::ResolvesClientCert;
    use tokio_rustls::rustls::pki_types::PrivateKeyDer;
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use super::*;

    #[derive(Debug)]
    struct Only(PublicKey);

    impl AdmittedKeys for Only {
        fn is_admitted(&self, key: &PublicKey) -> bool {
            *key == self.0
        }
    }

    fn key() -> PrivateKey {
        PrivateKey::generate().expect("random numbers")
    }

    /// What the client and the node see of a connection: the proved key of the client and whether it came to enrol, and the first
    /// byte of the node.
    async fn connect(
        node: &PrivateKey,
        admitted: PublicKey,
        client: Arc<ClientConfig>,
    ) -> (io::Result<(Option<PublicKey>, bool)>, io::Result<bool>) {
        let tls = ServerTls::new(node, Arc::new(Only(admitted)), true).expect("valid");
        let (near, far) = tokio::io::duplex(1 << 16);
        let serve = async {
            let mut stream = tls.accept(far).await?;
            let key = (proved_key(stream.get_ref().1), is_enrolling(stream.get_ref().1));
            stream.write_all(b"!").await?;
            stream.shutdown().await?;
            Ok(key)
        };
        let call = async {
            let name = ServerName::try_from("node").expect("a name");
            let mut stream = TlsConnector::from(client).connect(name, near).await?;
            Ok(!stream.fill_buf().await?.is_empty())
        };
        tokio::join!(serve, call)
    }

    #[tokio::test]
    async fn each_side_proves_its_key_and_knows_the_others() {
        let (node, alice, mallory) = (key(), key(), key());
        let client = |operator: &PrivateKey| ClientTls::new(node.public_key(), operator).expect("valid").0;
        let (served, called) = connect(&node, alice.public_key(), client(&alice)).await;
        assert_eq!(served.expect("a connection"), (Some(alice.public_key()), false));
        assert!(called.expect("a connection"));

        let (served, called) = connect(&node, alice.public_key(), client(&mallory)).await;
        assert_eq!(MismatchedKey::of_error(&served.expect_err("unknown")), Some(mallory.public_key()));
        assert!(ClientTls::is_unknown_operator(&called.expect_err("refused")));

        // Another node answers.
        let (served, called) = connect(&mallory, alice.public_key(), client(&alice)).await;
        assert_eq!(MismatchedKey::of_error(&called.expect_err("another node")), Some(mallory.public_key()));
        served.expect_err("the operator's key was not even shown");
    }

    #[tokio::test]
    async fn a_stranger_finishes_a_handshake_only_to_enrol() {
        let (node, alice, stranger) = (key(), key(), key());
        let expected = node.public_key();
        let enrolling =
            |own: &PrivateKey| ClientTls::enrolling(own, move |key| *key == expected).expect("valid").0;
        for own in [&stranger, &alice] {
            let (served, called) = connect(&node, alice.public_key(), enrolling(own)).await;
            assert_eq!(served.expect("a connection"), (Some(own.public_key()), true));
            assert!(called.expect("a connection"));
        }
        // Another node answers.
        let (_, called) = connect(&stranger, alice.public_key(), enrolling(&alice)).await;
        assert_eq!(MismatchedKey::of_error(&called.expect_err("another node")), Some(stranger.public_key()));
        // Nothing can enrol at a node without a cluster.
        let tls = ServerTls::new(&node, Arc::new(Only(alice.public_key())), false).expect("valid");
        let (near, far) = tokio::io::duplex(1 << 16);
        let name = ServerName::try_from("node").expect("a name");
        let connector = TlsConnector::from(enrolling(&stranger));
        let (served, _) = tokio::join!(tls.accept(far), connector.connect(name, near));
        served.expect_err("it does not speak the protocol");
    }

    /// A public key is no secret: who has only that is refused, on both sides.
    #[tokio::test]
    async fn the_public_key_of_another_opens_nothing() {
        let (node, alice, mallory) = (key(), key(), key());
        let forged = |claimed: PublicKey| {
            let signer =
                ring::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(mallory.pkcs8())).expect("a key");
            Arc::new(CertifiedKey::new(vec![CertificateDer::from(claimed.to_spki())], signer))
        };
        let mut client = (*ClientTls::new(node.public_key(), &mallory).expect("valid").0).clone();
        client.client_auth_cert_resolver =
            Arc::new(AlwaysResolvesClientRawPublicKeys::new(forged(alice.public_key())));
        let (served, called) = connect(&node, alice.public_key(), Arc::new(client)).await;
        let error = served.expect_err("no proof");
        assert!(error.to_string().contains("BadSignature"), "{error}");
        assert!(!ClientTls::is_unknown_operator(&called.expect_err("refused")));

        let mut server =
            (*server_config(&mallory, Arc::new(Only(alice.public_key())), HTTP2).expect("valid")).clone();
        server.cert_resolver = Arc::new(AlwaysResolvesServerRawPublicKeys::new(forged(node.public_key())));
        let (near, far) = tokio::io::duplex(1 << 16);
        let config = ClientTls::new(node.public_key(), &alice).expect("valid").0;
        let name = ServerName::try_from("node").expect("a name");
        let (_, called) = tokio::join!(
            TlsAcceptor::from(Arc::new(server)).accept(far),
            TlsConnector::from(config).connect(name, near)
        );
        let error = called.expect_err("no proof");
        assert!(error.to_string().contains("BadSignature"), "{error}");
    }

    /// Not even a certificate of the operator's own key.
    #[tokio::test]
    async fn a_client_with_a_certificate_or_with_nothing_is_refused() {
        let (node, alice) = (key(), key());
        let pair = KeyPair::from_pem(&alice.to_pem()).expect("a key");
        let certificate = CertificateParams::default().self_signed(&pair).expect("a certificate");
        let signer = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(alice.pkcs8().to_vec()));
        let builder = || {
            let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
            builder
                .with_protocol_versions(&[&TLS13])
                .expect("valid")
                .with_root_certificates(RootCertStore::empty())
        };
        let with_certificate =
            builder().with_client_auth_cert(vec![certificate.der().clone()], signer).expect("valid");
        for client in [with_certificate, builder().with_no_client_auth()] {
            let (served, called) = connect(&node, alice.public_key(), Arc::new(client)).await;
            assert!(served.is_err() && called.is_err());
        }
        // One that shows the node's key type, and no key of its own.
        #[derive(Debug)]
        struct NoKey;
        impl ResolvesClientCert for NoKey {
            fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
                None
            }
            fn has_certs(&self) -> bool {
                true
            }
            fn only_raw_public_keys(&self) -> bool {
                true
            }
        }
        let mut client = (*ClientTls::new(node.public_key(), &alice).expect("valid").0).clone();
        client.client_auth_cert_resolver = Arc::new(NoKey);
        let (served, called) = connect(&node, alice.public_key(), Arc::new(client)).await;
        assert!(served.is_err() && called.is_err());
    }
}
