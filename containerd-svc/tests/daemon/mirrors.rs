//! Images of registries, through the mirrors of `certs.d`, beside preseeded ones.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use nodekeel_containerd_svc::testing::ArchiveBuilder;
use nodekeel_containerd_svc::{ConfigVersion, CriSettings};
use rstest::rstest;

use crate::cri::{CriClient, POD_IMAGE};
use crate::harness::Release::{self, Debian, Newest};
use crate::harness::{PRESEED, Setup, create_layer, pod_image};

/// A registry that serves the content of an archive.
///
/// *Source:* the OCI distribution specification, "Pulling manifests" and "Pulling blobs".
struct Registry {
    address: SocketAddr,
    /// The paths that were asked for, in their order.
    requests: Arc<Mutex<Vec<String>>>,
}

/// A media type, and bytes.
type Document = (String, Vec<u8>);

impl Registry {
    /// Serves `NAME:1`, the only image of the archive.
    fn start(name: &str, archive: &ArchiveBuilder) -> Self {
        let documents = Arc::new(list_documents(name, archive));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, requests) = (listener.local_addr().unwrap(), Arc::<Mutex<Vec<String>>>::default());
        let seen = Arc::clone(&requests);
        // It ends with the test.
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (documents, seen) = (Arc::clone(&documents), Arc::clone(&seen));
                std::thread::spawn(move || answer(&stream.unwrap(), &documents, &seen));
            }
        });
        Self { address, requests }
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

fn list_documents(name: &str, archive: &ArchiveBuilder) -> BTreeMap<String, Document> {
    let (mut documents, mut manifest) = (BTreeMap::new(), None);
    let tar = archive.to_tar();
    for entry in tar::Archive::new(&tar[..]).entries().unwrap() {
        let mut entry = entry.unwrap();
        let file = entry.path().unwrap().display().to_string();
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut entry, &mut bytes).unwrap();
        if let Some(hex) = file.strip_prefix("blobs/sha256/") {
            let path = format!("/v2/{name}/blobs/sha256:{hex}");
            documents.insert(path, ("application/octet-stream".to_owned(), bytes));
        } else if file == "index.json" {
            let index: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
            let of = |key: &str| index["manifests"][0][key].as_str().unwrap().to_owned();
            manifest = Some((of("digest"), of("mediaType")));
        }
    }
    let (digest, media_type) = manifest.unwrap();
    let (_, bytes) = documents.remove(&format!("/v2/{name}/blobs/{digest}")).unwrap();
    for reference in ["1", &digest] {
        documents.insert(format!("/v2/{name}/manifests/{reference}"), (media_type.clone(), bytes.clone()));
    }
    documents
}

/// Answers one request.
fn answer(stream: &TcpStream, documents: &BTreeMap<String, Document>, seen: &Mutex<Vec<String>>) {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let Some(request) = lines.next() else { return };
    lines.find(|line| line.is_empty());
    let mut words = request.split(' ');
    let (method, path) = (words.next().unwrap(), words.next().unwrap());
    let path = path.split('?').next().unwrap();
    seen.lock().unwrap().push(path.to_owned());
    let (status, media_type, bytes) = match documents.get(path) {
        Some((media_type, bytes)) => ("200 OK", media_type.as_str(), bytes.as_slice()),
        None if path == "/v2/" => ("200 OK", "application/json", b"{}".as_slice()),
        None => ("404 Not Found", "application/json", b"{}".as_slice()),
    };
    let digest = nodekeel_containerd_svc::Digest::of_content(bytes);
    let length = bytes.len();
    let mut stream = stream;
    // A client may go away.
    let _ = write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {media_type}\r\nContent-Length: {length}\r\nDocker-Content-Digest: {digest}\r\n\
         Connection: close\r\n\r\n"
    )
    .and_then(|()| if method == "HEAD" { Ok(()) } else { stream.write_all(bytes) });
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn an_image_that_is_not_preseeded_is_pulled_through_a_mirror_and_a_preseeded_one_is_not(
    #[values(Debian, Newest)] release: Release,
    #[values(ConfigVersion::V2, ConfigVersion::V3)] version: ConfigVersion,
) {
    if release == Debian && version == ConfigVersion::V3 {
        // 1.6 does not know it.
        return;
    }
    let layer = create_layer(&[("file", b"pulled")]);
    let image = |name: &str| {
        ArchiveBuilder::new(nodekeel_containerd_svc::testing::BuiltArchiveFormat::OciLayout)
            .with_image(&[name], &layer)
    };
    let registry = Registry::start("team/app", &image("registry.invalid/team/app:1"));
    let mut setup = Setup::new(release);
    let certs = setup.path("certs.d");
    std::fs::create_dir_all(certs.join("registry.invalid")).unwrap();
    let hosts = format!("[host.\"http://{}\"]\n  capabilities = [\"pull\", \"resolve\"]\n", registry.address);
    std::fs::write(certs.join("registry.invalid/hosts.toml"), hosts).unwrap();
    let cri = CriSettings { registries: Some(certs), ..setup.cri() };
    setup.enable_cri(version, cri);
    setup.put_bundle("pod.tar", &pod_image().to_tar());
    let first = create_layer(&[("file", b"preseeded")]);
    setup.put_image("first.tar", "registry.invalid/team/first:1", &first);
    setup.enable_preseed();
    let daemon = setup.start().await;
    daemon.wait_ready(PRESEED, 1).await;
    let cri = CriClient::connect(&daemon.layout.socket_path()).await;
    // What a kubelet asks before it pulls.
    for (name, is_known) in
        [(POD_IMAGE, true), ("registry.invalid/team/first:1", true), ("registry.invalid/team/app:1", false)]
    {
        assert_eq!(cri.knows_image(name).await, is_known, "{name}");
    }
    assert_eq!(registry.requests(), [""; 0], "nothing of a preseeded image is asked for");
    cri.pull_image("registry.invalid/team/app:1").await.unwrap();
    assert!(cri.knows_image("registry.invalid/team/app:1").await);
    let requests = registry.requests();
    assert!(requests.contains(&"/v2/team/app/manifests/1".to_owned()), "{requests:?}");
    // One that the mirror lacks is pulled from nowhere, and the preseeded one stays.
    cri.pull_image("registry.invalid/team/first:1").await.unwrap_err();
    assert!(cri.knows_image("registry.invalid/team/first:1").await);
    daemon.stop().await;
}
