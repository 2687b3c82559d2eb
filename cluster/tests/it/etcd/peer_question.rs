//! A question at the peer port of an etcd, with any certificate.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_localstorage::pki::{Certificate, Credentials};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};

/// The longest wait for an answer; streams have no end.
const ANSWERS_WITHIN: Duration = Duration::from_secs(3);

/// The first bytes of the answer to a question of the holder of these credentials, or of none.
pub(crate) async fn ask_peer(
    at: SocketAddr,
    ca: &Certificate,
    with: Option<&Credentials>,
    path: &str,
) -> io::Result<String> {
    let certificate = |of: &Certificate| CertificateDer::from_pem_slice(of.to_pem().as_bytes()).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(certificate(ca)).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match with {
        None => config.with_no_client_auth(),
        Some(with) => {
            let key = PrivateKeyDer::from_pem_slice(with.key.to_pem().as_bytes()).unwrap();
            config.with_client_auth_cert(vec![certificate(&with.certificate)], key).unwrap()
        }
    };
    let ask = async {
        let stream = TcpStream::connect(at).await?;
        let mut stream = TlsConnector::from(Arc::new(config)).connect(at.ip().into(), stream).await?;
        stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: {at}\r\n\r\n").as_bytes()).await?;
        let mut answer = vec![0; 4096];
        match stream.read(&mut answer).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            length => Ok(String::from_utf8_lossy(&answer[..length]).into_owned()),
        }
    };
    timeout(ANSWERS_WITHIN, ask).await?
}
