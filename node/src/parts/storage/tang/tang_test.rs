//! Bindings of keys, with a server in this process that does what it should or anything else, and with Debian's.

use std::future::pending;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::testing::TangKeys;
use nodekeel_localstorage::volume::{DirectoryVolume, UnlockKey};
use testbed::TangServer as Tangd;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};

use super::{TangKeyStore, TangServer};
use crate::error_chain::error_chain;
use crate::parts::storage::opener::VolumeOpener;

const VOLUME: &str = "01234567-89ab-cdef-0123-456789abcdef";

/// What a server answers to a path and a body; nothing at all if it is `None`.
type Answers = Arc<Mutex<Box<dyn Fn(&str, &[u8]) -> Option<Vec<u8>> + Send>>>;

/// A server on a port of this machine.
struct FakeServer {
    answers: Answers,
    server: TangServer,
    task: tokio::task::JoinHandle<()>,
}

impl FakeServer {
    async fn start(keys: Arc<TangKeys>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let server = TangServer { url: url.parse().expect("a URL"), signer: keys.signer() };
        let answers: Answers = Arc::new(Mutex::new(Box::new(move |path, body| {
            let answer = match path.starts_with("/adv/") {
                true => Some(keys.advertise()),
                false => keys.recover(path, body),
            };
            Some(answer.map_or_else(|| status("404 Not Found"), |body| ok(&body)))
        })));
        let all = Arc::clone(&answers);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, Arc::clone(&all)));
            }
        });
        Self { answers, server, task }
    }

    fn set_answers(&self, answers: impl Fn(&str, &[u8]) -> Option<Vec<u8>> + Send + 'static) {
        *self.answers.lock().expect("no test has panicked") = Box::new(answers);
    }
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn answer(stream: TcpStream, answers: Answers) {
    let mut stream = BufReader::new(stream);
    let (mut path, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await.expect("a request");
        match line.trim_end().split_once(' ') {
            None => break,
            Some(("content-length:", number)) => length = number.parse().expect("a number"),
            Some(("GET" | "POST", rest)) => path = rest.split(' ').next().unwrap_or_default().to_owned(),
            Some(_) => {}
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.expect("a body");
    let answer = (answers.lock().expect("no test has panicked"))(&path, &body);
    let Some(answer) = answer else { return pending().await };
    let _ = stream.write_all(&answer).await;
}

fn ok(body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

fn status(text: &str) -> Vec<u8> {
    format!("HTTP/1.1 {text}\r\nContent-Length: 0\r\n\r\n").into_bytes()
}

fn store(esp: &Path, servers: &[&TangServer]) -> TangKeyStore {
    let volume = Arc::new(DirectoryVolume::new(Dir::open(esp).expect("a directory")));
    let esp = Arc::new(Dir::open(esp).expect("a directory"));
    let opener = VolumeOpener::Provided { volume, mounted_at: Arc::default(), esp };
    TangKeyStore::new(servers.iter().copied().cloned().collect(), opener, Arc::default())
}

/// The keys that the servers give back.
async fn load(store: &TangKeyStore) -> Result<Vec<u8>, String> {
    let loaded = store.load(VOLUME).await.map_err(|error| error_chain(&error));
    loaded.map(|keys| keys.iter().map(|key| key.expose_bytes()[0]).collect())
}

async fn replace(store: &TangKeyStore, keys: &[u8]) -> Result<(), String> {
    let keys: Vec<_> = keys.iter().map(|number| key(*number)).collect();
    store.replace(VOLUME, &keys).await.map_err(|error| error_chain(&error))
}

async fn complete(store: &TangKeyStore, number: u8) -> Result<Vec<String>, String> {
    store.complete(VOLUME, &key(number)).await.map_err(|error| error_chain(&error))
}

fn key(number: u8) -> UnlockKey {
    UnlockKey::from_bytes(&[number; 32]).expect("32 bytes")
}

fn files(esp: &Path) -> usize {
    let entries = esp.read_dir().expect("listed").map(|entry| entry.expect("listed"));
    entries
        .filter(|entry| {
            let mode = entry.metadata().expect("there").permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            entry.file_name().to_string_lossy().starts_with(VOLUME)
        })
        .count()
}

#[tokio::test]
async fn keys_are_bound_replaced_and_given_back_to_the_next_process() {
    let esp = tempfile::tempdir().expect("a directory");
    let fake = FakeServer::start(Arc::new(TangKeys::generate())).await;
    let bound = store(esp.path(), &[&fake.server]);
    assert_eq!(load(&bound).await, Ok(vec![]));
    replace(&bound, &[1]).await.expect("bound");
    assert_eq!(load(&store(esp.path(), &[&fake.server])).await, Ok(vec![1]));
    // A rotation: both keys are there until the older one is removed.
    replace(&bound, &[1, 2]).await.expect("bound");
    let mut both = load(&bound).await.expect("recovered");
    both.sort_unstable();
    assert_eq!((both, files(esp.path())), (vec![1, 2], 2));
    replace(&bound, &[2]).await.expect("bound");
    assert_eq!((load(&bound).await, complete(&bound, 2).await), (Ok(vec![2]), Ok(vec![])));
    assert_eq!(files(esp.path()), 1);
    // A file that was not written whole is none.
    std::fs::write(esp.path().join(format!("{VOLUME}.0badf11e.01234567.tang")), "").expect("written");
    assert_eq!(load(&bound).await, Ok(vec![2]));
}

#[tokio::test]
async fn one_of_several_servers_is_enough_and_the_other_one_is_named() {
    let esp = tempfile::tempdir().expect("a directory");
    let one = FakeServer::start(Arc::new(TangKeys::generate())).await;
    let two = FakeServer::start(Arc::new(TangKeys::generate())).await;
    let both = store(esp.path(), &[&one.server, &two.server]);
    one.set_answers(|_, _| Some(status("503 Service Unavailable")));
    replace(&both, &[1]).await.expect("one is enough");
    let problems = complete(&both, 1).await.expect("one is enough");
    assert!(problems.len() == 1 && problems[0].contains("answers with 503"), "{problems:?}");
    assert!(problems[0].starts_with(&format!("Tang server {}", one.server.url)), "{problems:?}");
    assert_eq!((load(&both).await, files(esp.path())), (Ok(vec![1]), 1));

    // Two servers are bound to at once, each by its own file.
    let other = tempfile::tempdir().expect("a directory");
    let fresh = FakeServer::start(Arc::new(TangKeys::generate())).await;
    replace(&store(other.path(), &[&two.server, &fresh.server]), &[1]).await.expect("bound");
    assert_eq!(files(other.path()), 2);

    // A server that was added later is bound to; then the other one may be gone.
    let three = FakeServer::start(Arc::new(TangKeys::generate())).await;
    let moved = store(esp.path(), &[&two.server, &three.server]);
    assert_eq!(complete(&moved, 1).await, Ok(vec![]));
    assert_eq!(files(esp.path()), 2);
    two.set_answers(|_, _| Some(Vec::new()));
    assert_eq!(load(&moved).await, Ok(vec![1]));
    let alone = store(esp.path(), &[&three.server]);
    assert_eq!((complete(&alone, 1).await, files(esp.path())), (Ok(vec![]), 1));
}

#[tokio::test]
async fn a_key_that_may_come_back_is_not_lost_and_one_that_is_gone_is() {
    let esp = tempfile::tempdir().expect("a directory");
    let keys = Arc::new(TangKeys::generate());
    let fake = FakeServer::start(Arc::clone(&keys)).await;
    let bound = store(esp.path(), &[&fake.server]);
    replace(&bound, &[1]).await.expect("bound");
    let large = String::from_utf8_lossy(&ok(&" ".repeat(70 << 10))).into_owned();
    for (text, says) in [
        ("", "sends no valid HTTP"),
        ("SSH-2.0-OpenSSH_9.2\r\n", "sends no valid HTTP"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "sends no valid HTTP"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "it is no point on P-521"),
        (&large, "answers with more than 65536 bytes"),
        ("HTTP/1.1 302 Found\r\nLocation: http://thief\r\nContent-Length: 0\r\n\r\n", "answers with 302"),
        ("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", "answers with 400"),
    ] {
        let answer = text.to_owned().into_bytes();
        fake.set_answers(move |_, _| Some(answer.clone()));
        let error = load(&bound).await.expect_err(text);
        assert!(error.contains(says), "{text:?}: {error}");
        assert!(replace(&bound, &[2]).await.is_err(), "{text:?}");
        assert_eq!(complete(&bound, 1).await.expect("problems").len(), 1, "{text:?}");
    }
    assert_eq!(files(esp.path()), 1, "nothing that a server answers removes a binding");
    fake.set_answers(|_, _| None);
    let error = load(&bound).await.expect_err("silence");
    assert!(error.contains("does not answer within 3 s"), "{error}");

    // Another server has its address: it has no such key, or answers with a point of its own.
    let other = TangKeys::generate();
    fake.set_answers(move |path, body| match path.starts_with("/adv/") {
        true => Some(ok(&other.advertise())),
        false => Some(ok(&String::from_utf8_lossy(body))),
    });
    assert_eq!(load(&bound).await, Ok(vec![]));
    let error = replace(&bound, &[2]).await.expect_err("another server");
    assert!(error.contains("no advertisement that key"), "{error}");
    fake.set_answers(|_, _| Some(status("404 Not Found")));
    assert_eq!(load(&bound).await, Ok(vec![]));
    let problems = complete(&bound, 1).await.expect("problems");
    assert!(problems[0].contains("compare storage.tang with the output of tang-show-keys"), "{problems:?}");
    assert_eq!(files(esp.path()), 1);
    let again = Arc::clone(&keys);
    fake.set_answers(move |path, body| Some(ok(&again.recover(path, body)?)));
    assert_eq!(load(&bound).await, Ok(vec![1]));
    drop(fake);
    let unreachable = load(&bound).await.expect_err("gone");
    assert!(unreachable.contains("can't be reached: "), "{unreachable}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs tang"]
async fn a_server_with_new_keys_is_bound_to_again_before_the_old_ones_are_removed() {
    let esp = tempfile::tempdir().expect("a directory");
    let tangd = Tangd::start().expect("started");
    let server = TangServer {
        url: tangd.url().parse().expect("a URL"),
        signer: tangd.thumbprint().expect("a key").parse().expect("a thumbprint"),
    };
    let bound = store(esp.path(), &[&server]);
    replace(&bound, &[1]).await.expect("bound");
    assert_eq!(complete(&bound, 1).await, Ok(vec![]));
    tangd.rotate_keys().expect("rotated");
    assert_eq!(load(&bound).await, Ok(vec![1]));
    assert_eq!((complete(&bound, 1).await, files(esp.path())), (Ok(vec![]), 1));
    tangd.remove_old_keys().expect("removed");
    assert_eq!(load(&bound).await, Ok(vec![1]), "it was bound to the new key");
    // The key that had signed is gone, too: the node names it until the configuration has the new one.
    let problems = complete(&bound, 1).await.expect("it opens the volume all the same");
    assert!(problems.len() == 1 && problems[0].contains(&server.signer.to_string()), "{problems:?}");
    let signer = tangd.thumbprint().expect("a key").parse().expect("a thumbprint");
    let newer = store(esp.path(), &[&TangServer { signer, ..server }]);
    assert_eq!(complete(&newer, 1).await, Ok(vec![]));
}
