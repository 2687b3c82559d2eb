//! Bindings of this crate and of clevis, with Debian's Tang server.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use nodekeel_localstorage::tang::{Advertisement, Binding, Recovery, TangError};
use testbed::TangServer;

/// Sends a request to tangd, which answers one request of a connection; the body of the answer, if it is found.
fn ask(server: &TangServer, method: &str, path: &str, body: &str) -> Option<String> {
    let host = server.url().strip_prefix("http://").unwrap().to_owned();
    let mut stream = TcpStream::connect(&host).unwrap();
    let (kind, length) = (Recovery::CONTENT_TYPE, body.len());
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: {kind}\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    head.starts_with("HTTP/1.1 200").then(|| body.to_owned())
}

fn advertisement(
    server: &TangServer,
    signer: &str,
    bindings: &[&Binding],
) -> Result<Advertisement, TangError> {
    let signer = signer.parse().unwrap();
    let answer = ask(server, "GET", &Advertisement::path(&signer), "").unwrap_or_default();
    Advertisement::verify(answer.as_bytes(), &signer, bindings.iter().copied())
}

fn recover(server: &TangServer, binding: &Binding) -> Option<Vec<u8>> {
    let recovery = binding.start_recovery().unwrap();
    let answer = ask(server, "POST", &recovery.path(), &recovery.request())?;
    Some(recovery.finish(answer.as_bytes()).unwrap().to_vec())
}

fn clevis(arguments: &[&str], input: &[u8]) -> Vec<u8> {
    let mut command = Command::new("clevis");
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    let done = child.wait_with_output().unwrap();
    assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    done.stdout
}

#[test]
#[ignore = "needs tang, clevis and jose"]
fn clevis_and_this_crate_open_what_the_other_has_bound() {
    let server = TangServer::start().unwrap();
    let (url, signer) = (server.url(), server.thumbprint().unwrap());
    let binding = advertisement(&server, &signer, &[]).unwrap().bind(&url, b"a secret of ours").unwrap();
    assert_eq!(recover(&server, &binding).unwrap(), b"a secret of ours");
    assert_eq!(clevis(&["decrypt"], binding.as_str().as_bytes()), b"a secret of ours");

    let config = format!(r#"{{"url": "{url}", "thp": "{signer}"}}"#);
    let theirs = clevis(&["encrypt", "tang", &config], b"a secret of theirs");
    let theirs = Binding::parse(std::str::from_utf8(&theirs).unwrap()).unwrap();
    assert_eq!(theirs.url(), url);
    assert_eq!(recover(&server, &theirs).unwrap(), b"a secret of theirs");
}

#[test]
#[ignore = "needs tang"]
fn keys_that_a_server_has_replaced_recover_until_they_are_removed() {
    let server = TangServer::start().unwrap();
    let (url, signer) = (server.url(), server.thumbprint().unwrap());
    let binding = advertisement(&server, &signer, &[]).unwrap().bind(&url, b"secret").unwrap();
    server.rotate_keys().unwrap();
    let newer = advertisement(&server, &signer, &[&binding]).unwrap();
    assert!(!newer.has_key_of(&binding));
    assert_eq!(recover(&server, &binding).unwrap(), b"secret");
    let again = newer.bind(&url, b"secret").unwrap();
    server.remove_old_keys().unwrap();
    assert_eq!(recover(&server, &binding), None);
    assert_eq!(recover(&server, &again).unwrap(), b"secret");
    let gone = advertisement(&server, &signer, &[&again]).unwrap_err();
    assert!(matches!(gone, TangError::Answer(_)), "{gone:?}");
}
