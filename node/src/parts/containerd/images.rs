//! Calls of the control API about the images of the node's containerd.

#![allow(clippy::result_large_err, reason = "tonic's services return its status")]

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::{Stream, stream};
use nodekeel_containerd_svc::{
    ContainerdImages, DamagedImage, Digest, DiskReserve, Image, ImageName, ImagePolicy, ImageProof,
    ImageStage, ImageState, ImageStore as _, ImageStoreError, ImportLimits, LeftOutImage, Namespace, Preseed,
    ProofKind, ReadPace, SkippedEntry, UncomparedImage,
};
use nodekeel_localstorage::Dir;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::error_chain::error_chain;
use crate::v1;

/// The time for a list, which ends before the timeout of a client does: it is not the node that does not answer.
const LIST_TIMEOUT: Duration = Duration::from_secs(4);

/// The pause between two lists of a client that watches.
const WATCH_PAUSE: Duration = Duration::from_millis(200);

/// The DN of the import of bundles.
pub(crate) const PRESEED_DN: &str = "root.containerd.preseed";

/// The namespace of the kubelet's images, which containerd creates with the first of them.
///
/// *Source:* containerd's `internal/cri/constants`.
const CRI_NAMESPACE: &str = "k8s.io";

/// The label of a pinned image.
///
/// *Source:* containerd 1.7 and later, `pkg/cri/labels`.
const PINNED_LABEL: &str = "io.cri-containerd.pinned";

/// The socket and the directory of the images, for the control API.
#[derive(Debug)]
pub(crate) struct ImageAccess {
    socket: PathBuf,
    /// The directory of the images on the data volume, once that was open.
    root: Mutex<Option<PathBuf>>,
    /// The reserve that images leave free on the disk.
    pub(super) reserve: DiskReserve,
    limits: ImportLimits,
    /// Decides which images an import may list.
    policy: Option<Arc<dyn ImagePolicy>>,
    /// The bundles, if there are any.
    preseed: Option<Preseed>,
}

impl ImageAccess {
    /// The images of the containerd with this socket, before it has started.
    pub(super) fn new(
        socket: PathBuf,
        reserve: DiskReserve,
        limits: ImportLimits,
        policy: Option<Arc<dyn ImagePolicy>>,
        preseed: Option<Preseed>,
    ) -> Self {
        Self { socket, root: Mutex::default(), reserve, limits, policy, preseed }
    }

    /// The directory of the images; `None` before containerd has started.
    pub(super) fn root_dir(&self) -> Option<PathBuf> {
        self.root.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Imports the bundles of other directories from now on.
    pub(super) fn set_directories(&self, directories: Vec<PathBuf>) {
        if let Some(preseed) = &self.preseed {
            preseed.set_directories(directories);
        }
    }

    pub(super) fn set_root_dir(&self, root: PathBuf) {
        *self.root.lock().unwrap_or_else(PoisonError::into_inner) = Some(root);
    }
}

pub(crate) async fn list_images(
    images: Option<Arc<ImageAccess>>,
    request: &v1::ImagesRequest,
) -> Result<v1::ImagesResponse, Status> {
    let namespace = parse_namespace(&request.namespace)?;
    let preseed = images.as_ref().and_then(|images| images.preseed.clone());
    let list = async {
        let store = connect_store(images).await?;
        let known = preseed.clone().unwrap_or_else(without_bundles);
        let listed = async {
            let images = store.list_images(&namespace).await?;
            let damaged = ImageProof::list_recorded(&store, &known, &namespace, &images).await?;
            Ok((images, damaged))
        };
        listed.await.map_err(|error: ImageStoreError| aborted_status(&error))
    };
    let Ok(listed) = timeout(LIST_TIMEOUT, list).await else {
        return Err(Status::aborted(format!(
            "containerd does not answer within {LIST_TIMEOUT:?}: see `nodectl status containerd`"
        )));
    };
    let (images, damaged) = listed?;
    let mut states = preseed.as_ref().map(Preseed::image_states).unwrap_or_default();
    states.retain(|state| state.namespace == namespace);
    let progress = preseed.as_ref().and_then(Preseed::proof_progress);
    let (verified_bytes, verify_bytes) = progress.unzip();
    let mut rows = merge_states(images, states, &damaged);
    if let Some(preseed) = &preseed {
        rows.extend(misplaced_rows(&preseed.misplaced_archives(), &preseed.directories(), &namespace));
    }
    let response = images_response(rows);
    Ok(v1::ImagesResponse { verified_bytes, verify_bytes, ..response })
}

/// What stands for the bundles of a node that has none.
fn without_bundles() -> Preseed {
    Preseed::new(PathBuf::new())
}

/// Streams the list: now, and again when a state of an image of a bundle has changed. An error ends it.
pub(crate) fn watch_images(
    images: Option<Arc<ImageAccess>>,
    request: v1::ImagesRequest,
) -> impl Stream<Item = Result<v1::ImagesResponse, Status>> + Send {
    let preseed = images.as_ref().and_then(|images| images.preseed.as_ref());
    let mut changes = preseed.map(Preseed::watch_states);
    if let Some(changes) = &mut changes {
        // So that the first list is sent at once.
        changes.mark_changed();
    }
    let is_first = changes.is_none();
    stream::unfold(Some((images, request, changes, is_first)), |state| async move {
        let (images, request, mut changes, is_first) = state?;
        match &mut changes {
            // Without bundles, no image has a state that changes.
            None if is_first => {}
            None => std::future::pending().await,
            // The preseed lives as long as the node's images.
            Some(changes) => changes.changed().await.ok()?,
        }
        let list = list_images(images.clone(), &request).await;
        let next = list.is_ok().then_some((images, request, changes, false));
        if next.is_some() {
            // What changes until then is one list.
            sleep(WATCH_PAUSE).await;
        }
        Some((list, next))
    })
}

/// The bundle that is being read, and how much of it is done; empty if there is none.
pub(crate) fn describe_progress(images: Option<Arc<ImageAccess>>) -> String {
    let states =
        images.and_then(|images| images.preseed.as_ref().map(Preseed::image_states)).unwrap_or_default();
    let reading = states.iter().find_map(|state| Some((state, state.progress?)));
    let describe = |(state, (done, total)): (&ImageState, (u64, u64))| {
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        let (file, done, total) = (&state.bundle, megabytes(done), megabytes(total));
        format!("imports {}/{file}: {done:.1} of {total:.1} MB", state.namespace)
    };
    reading.map(describe).unwrap_or_default()
}

/// Compares images with their digests, and repairs them on request. The reports end with the comparison, which ends with the
/// client.
pub(crate) async fn verify_images(
    images: Option<Arc<ImageAccess>>,
    request: v1::VerifyImagesRequest,
) -> Result<ReceiverStream<Result<v1::ImageVerification, Status>>, Status> {
    let namespace = parse_namespace(&request.namespace)?;
    let preseed = images.as_ref().and_then(|images| images.preseed.clone());
    let store = connect_store(images).await?;
    check_namespace(&store, preseed.as_ref(), &namespace).await?;
    let chosen = choose_images(&store, &namespace, &request.names).await?;
    let (to, reports) = mpsc::channel(1);
    let verification = Verification { store, preseed, reports: to.clone() };
    tokio::spawn(async move {
        tokio::select! {
            biased;
            () = to.closed() => {}
            done = verification.run(chosen, request.repair) => drop(to.send(done).await),
        }
    });
    Ok(ReceiverStream::new(reports))
}

/// Refuses a namespace that neither containerd nor a bundle has: nothing of a misspelt one is damaged.
async fn check_namespace(
    store: &ContainerdImages,
    preseed: Option<&Preseed>,
    namespace: &Namespace,
) -> Result<(), Status> {
    let listed = store.list_namespaces().await.map_err(|error| aborted_status(&error))?;
    let states = preseed.map(Preseed::image_states).unwrap_or_default();
    let mut known: BTreeSet<_> = listed.iter().map(Namespace::as_str).collect();
    known.extend(states.iter().map(|state| state.namespace.as_str()));
    known.insert(CRI_NAMESPACE);
    if known.contains(namespace.as_str()) {
        return Ok(());
    }
    let known: Vec<_> = known.into_iter().collect();
    Err(Status::not_found(format!(
        "there is no namespace {namespace} in containerd; known: {}",
        known.join(", ")
    )))
}

/// The images with these names, or all.
async fn choose_images(
    store: &ContainerdImages,
    namespace: &Namespace,
    names: &[String],
) -> Result<Vec<(Namespace, Image)>, Status> {
    let mut images = store.list_images(namespace).await.map_err(|error| aborted_status(&error))?;
    let mut wanted = BTreeSet::new();
    for name in names {
        // As they are listed, or as a kubelet completes them.
        let complete = name.parse::<ImageName>().map(|name| name.to_string());
        let complete = complete.unwrap_or_else(|_| name.clone());
        let listed = images.iter().find(|image| image.name == *name || image.name == complete);
        let unknown = || {
            let hint = "`nodectl images` lists those that are there";
            Status::not_found(format!("there is no image {name} in namespace {namespace}; {hint}"))
        };
        wanted.insert(listed.ok_or_else(unknown)?.name.clone());
    }
    images.retain(|image| names.is_empty() || wanted.contains(&image.name));
    Ok(images.into_iter().map(|image| (namespace.clone(), image)).collect())
}

struct Verification {
    store: ContainerdImages,
    preseed: Option<Preseed>,
    reports: mpsc::Sender<Result<v1::ImageVerification, Status>>,
}

impl Verification {
    async fn run(
        &self,
        chosen: Vec<(Namespace, Image)>,
        repair: bool,
    ) -> Result<v1::ImageVerification, Status> {
        let kind = if repair { ProofKind::Repair } else { ProofKind::Verify };
        let report = self.compare(&chosen, kind, "comparing").await?;
        let (Some(preseed), true) = (&self.preseed, repair && !report.damaged.is_empty()) else {
            return Ok(v1::ImageVerification {
                state: "complete".into(),
                damaged: unrepaired(report.damaged, repair),
                ..report
            });
        };
        let is_damaged = |(_, image): &&(Namespace, Image)| {
            report.damaged.iter().any(|damaged| damaged.name == image.name)
        };
        let again: Vec<_> = chosen.iter().filter(is_damaged).cloned().collect();
        let (mut left, mut not_compared) = (Vec::new(), Vec::new());
        // What is damaged does not exist for the next pass, which writes it again. Only then can the unpacked layers be compared, and
        // those that the comparison discards are unpacked by one more.
        for _ in 0..2 {
            if !preseed.request_pass().await {
                return Err(Status::aborted(
                    "images are damaged, and root.containerd.preseed, which writes them again, does not run: see \
                     `nodectl status root.containerd.preseed`, then repeat this",
                ));
            }
            let compared = self.compare(&again, kind, "repairing").await?;
            (left, not_compared) = (compared.damaged, compared.not_compared);
            if left.is_empty() {
                break;
            }
        }
        let (mut damaged, states) = (report.damaged, preseed.image_states());
        for image in &mut damaged {
            match left.iter().find(|left| left.name == image.name) {
                None => image.repaired = true,
                Some(left) => {
                    let of_bundle = states.iter().find(|state| state.name.as_ref() == Some(&image.name));
                    let problem = of_bundle.and_then(|state| state.problem.as_deref());
                    image.reason = match of_bundle {
                        Some(_) => problem.unwrap_or(&left.reason).to_owned(),
                        None => without_bundle(&left.reason),
                    };
                }
            }
        }
        // None of these was among the others before: it was damaged.
        let not_compared = [report.not_compared, not_compared].concat();
        Ok(v1::ImageVerification { state: "complete".into(), damaged, not_compared, ..report })
    }

    async fn compare(
        &self,
        images: &[(Namespace, Image)],
        kind: ProofKind,
        state: &str,
    ) -> Result<v1::ImageVerification, Status> {
        let failed = |error: ImageStoreError| aborted_status(&error);
        let preseed = self.preseed.clone().unwrap_or_else(without_bundles);
        let mut proof = ImageProof::new(&self.store, &preseed, images, kind).await.map_err(failed)?;
        let pace = ReadPace::new(None);
        let report = |proof: &ImageProof| {
            // A client that does not keep up misses some.
            drop(self.reports.try_send(Ok(proof_message(proof, state))));
        };
        proof.run(&self.store, &preseed, &pace, report).await.map_err(failed)?;
        Ok(proof_message(&proof, state))
    }
}

fn proof_message(proof: &ImageProof, state: &str) -> v1::ImageVerification {
    let damaged = |image: &DamagedImage| v1::DamagedImage {
        name: image.name.clone(),
        reason: image.reason.clone(),
        repaired: false,
    };
    let not_compared = |image: &UncomparedImage| v1::UncomparedImage {
        name: image.name.clone(),
        reason: format!("its unpacked layers: {}", image.reason),
    };
    v1::ImageVerification {
        state: state.into(),
        images: proof.image_count() as u64,
        done_bytes: proof.done_bytes(),
        total_bytes: proof.total_bytes(),
        damaged: proof.damaged().iter().map(damaged).collect(),
        not_compared: proof.not_compared().iter().map(not_compared).collect(),
    }
}

/// A repair on a node without bundles has nothing to repair from.
fn unrepaired(mut damaged: Vec<v1::DamagedImage>, repair: bool) -> Vec<v1::DamagedImage> {
    for image in damaged.iter_mut().filter(|_| repair) {
        image.reason = without_bundle(&image.reason);
    }
    damaged
}

fn without_bundle(reason: &str) -> String {
    format!(
        "{reason}; no bundle brings the image: import its archive by `nodectl images --import FILE`, or remove it by \
         `crictl rmi` and let the kubelet pull it"
    )
}

pub(crate) async fn import_images(
    images: Option<Arc<ImageAccess>>,
    request: &v1::ImportImagesRequest,
) -> Result<v1::ImagesResponse, Status> {
    // The request is checked before the archive is opened and containerd is called.
    let namespace = parse_namespace(&request.namespace)?;
    let path = PathBuf::from(&request.path);
    let opened = path.clone();
    // A file on a slow disk would block the thread of all calls.
    let file = spawn_blocking(move || open_archive(&opened)).await;
    let file = file.map_err(|error| Status::internal(error_chain(&error)))??;
    // An operator may import an archive again because its image is damaged.
    let limits = images.as_ref().map(|images| images.limits.clone()).unwrap_or_default();
    let policy = images.as_ref().and_then(|images| images.policy.clone());
    let preseed = images.as_ref().and_then(|images| images.preseed.clone());
    let store = connect_store(images).await?.with_layer_verification();
    let imported =
        nodekeel_containerd_svc::import_archive(&store, &namespace, &path, file, &limits, policy.as_deref())
            .await;
    let imported = imported.map_err(|error| {
        // A retryable error is one of containerd. Any other is one of the archive, which the caller can correct.
        if error.is_retryable() {
            aborted_status(&error)
        } else {
            Status::invalid_argument(error_chain(&error))
        }
    })?;
    tracing::info!("imported {} into {namespace}: {} images", path.display(), imported.images.len());
    if let Some(preseed) = preseed {
        // It may have been damaged.
        preseed.refresh_damage(&store).await;
    }
    let wire = |image: LeftOutImage| v1::LeftOutImage {
        reason: error_chain(&image.reason),
        is_fault: !image.is_foreign(),
        name: image.name,
    };
    let left_out = imported.left_out.into_iter().map(wire).collect();
    let images = imported.images.into_iter().map(|image| image_message(image, None)).collect();
    Ok(v1::ImagesResponse { left_out, ..images_response(images) })
}

fn parse_namespace(text: &str) -> Result<Namespace, Status> {
    text.parse().map_err(|error| Status::invalid_argument(error_chain(&error)))
}

/// Opens the archive without following a symbolic link at its name.
fn open_archive(path: &Path) -> Result<File, Status> {
    let invalid = |reason: &str| Status::invalid_argument(format!("{}: {reason}", path.display()));
    // A relative path would depend on noded's working directory, which a client does not know.
    let (Some(parent), Some(name), true) = (path.parent(), path.file_name(), path.is_absolute()) else {
        return Err(invalid("use the absolute path of a file"));
    };
    Dir::open(parent).and_then(|dir| dir.open_file(name)).map_err(|error| invalid(&error_chain(&error)))
}

async fn connect_store(images: Option<Arc<ImageAccess>>) -> Result<ContainerdImages, Status> {
    let Some(images) = images else {
        return Err(Status::failed_precondition(
            "this node does not run containerd; see services.containerd",
        ));
    };
    let store = ContainerdImages::connect(&images.socket).await;
    let store = store.map_err(|error| aborted_status(&error))?;
    let store = match &images.preseed {
        Some(preseed) => preseed.set_up_store(store),
        None => store,
    };
    // The disk is known once containerd has started on the open volume. An import checks its free space first.
    match images.root_dir() {
        Some(root) => Ok(store.with_disk(root, images.reserve)),
        None => Err(Status::aborted("containerd has not started: see root.storage and root.containerd")),
    }
}

fn images_response(mut images: Vec<v1::Image>) -> v1::ImagesResponse {
    images.sort_by_cached_key(|image| {
        (image.name.is_empty(), image.name.clone(), image.bundle.clone(), image.directory.clone())
    });
    v1::ImagesResponse { images, ..v1::ImagesResponse::default() }
}

/// Adds the states of a namespace to the images that it lists now, and the images of bundles that it does not list: a
/// state that is not true any more is taken back. The targets that are known to be damaged are, also without a bundle.
fn merge_states(
    listed: Vec<Image>,
    states: Vec<ImageState>,
    damaged: &BTreeMap<Digest, String>,
) -> Vec<v1::Image> {
    let (mut by_name, mut unread) = (BTreeMap::new(), Vec::new());
    for state in states {
        match state.name.clone() {
            Some(name) => drop(by_name.insert(name, state)),
            None => unread.push(state),
        }
    }
    let mut images: Vec<_> = listed
        .into_iter()
        .map(|image| {
            let (state, target) = (by_name.remove(&image.name), image.target.digest);
            let mut message = image_message(image, state);
            if let Some(reason) = damaged.get(&target)
                && [ImageStage::Listed, ImageStage::Answered]
                    .iter()
                    .any(|stage| stage.as_str() == message.state)
            {
                (message.state, message.problem) = (ImageStage::Damaged.as_str().into(), reason.clone());
            }
            message
        })
        .collect();
    let absent = by_name.into_values().map(|mut state| {
        if !matches!(state.stage, ImageStage::Wanted | ImageStage::Refused) {
            state.stage = ImageStage::Wanted;
            state.problem = Some("containerd does not list it any more".into());
        }
        (state.target, state.bytes, state.is_unpacked) = (None, None, false);
        state
    });
    for state in absent.chain(unread) {
        let message = v1::Image { name: state.name.clone().unwrap_or_default(), ..v1::Image::default() };
        images.push(with_state(message, state));
    }
    images
}

/// What a pass has found where no bundle of the namespace can be. Where that is of no namespace, each has it.
fn misplaced_rows(
    misplaced: &[SkippedEntry],
    directories: &[PathBuf],
    namespace: &Namespace,
) -> Vec<v1::Image> {
    let row = |SkippedEntry { path, reason }: &SkippedEntry| {
        let directory = directories.iter().find(|directory| path.starts_with(directory))?;
        let within = path.strip_prefix(directory).ok()?;
        let of = within.parent().and_then(Path::to_str).filter(|of| !of.is_empty());
        of.is_none_or(|of| of == namespace.as_str()).then(|| v1::Image {
            bundle: within.display().to_string(),
            directory: directory.display().to_string(),
            state: ImageStage::Wanted.as_str().into(),
            problem: format!("it is not imported: {reason}"),
            ..v1::Image::default()
        })
    };
    misplaced.iter().filter_map(row).collect()
}

fn image_message(image: Image, state: Option<ImageState>) -> v1::Image {
    let target = image.target.digest;
    let message = v1::Image {
        name: image.name,
        digest: target.to_string(),
        media_type: image.target.media_type,
        pinned: image.labels.get(PINNED_LABEL).is_some_and(|value| value == "pinned"),
        state: ImageStage::Listed.as_str().into(),
        ..v1::Image::default()
    };
    match state {
        None => message,
        Some(state) if state.target.is_none_or(|wanted| wanted == target) => with_state(message, state),
        Some(state) => {
            let problem = "its name points to another image than its bundle's: `nodectl restart root.containerd.preseed` \
                           brings that back";
            let (stage, problem) = (ImageStage::Wanted, Some(problem.to_owned()));
            with_state(message, ImageState { stage, problem, bytes: None, is_unpacked: false, ..state })
        }
    }
}

fn with_state(message: v1::Image, state: ImageState) -> v1::Image {
    let (import_done_bytes, import_total_bytes) = state.progress.unzip();
    v1::Image {
        import_done_bytes,
        import_total_bytes,
        not_compared: state.not_compared.unwrap_or_default(),
        size_bytes: state.bytes,
        bundle: state.bundle,
        directory: state.directory.display().to_string(),
        state: state.stage.as_str().into(),
        since: Some(state.since.into()),
        unpacked: state.is_unpacked,
        problem: state.problem.unwrap_or_default(),
        ..message
    }
}

/// The status of a retryable error of containerd, or of its missing answer. The node itself was reached.
fn aborted_status(error: &dyn Error) -> Status {
    Status::aborted(error_chain(error))
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use nodekeel_containerd_svc::{Descriptor, Labels};

    use super::*;

    fn listed(name: &str, content: &[u8]) -> Image {
        let target = Descriptor {
            media_type: "application/vnd.oci.image.manifest.v1+json".into(),
            digest: Digest::of_content(content),
            size: 7,
        };
        let labels = Labels::from([(PINNED_LABEL.into(), "pinned".into())]);
        Image { name: name.into(), target, labels }
    }

    fn answered(name: &str, content: &[u8]) -> ImageState {
        ImageState {
            namespace: "k8s.io".parse().expect("a namespace"),
            name: Some(name.into()),
            bundle: "a.tar".into(),
            directory: "/images".into(),
            stage: ImageStage::Answered,
            since: SystemTime::now(),
            target: Some(Digest::of_content(content)),
            bytes: Some(7),
            is_unpacked: true,
            problem: None,
            not_compared: None,
            progress: None,
        }
    }

    #[test]
    fn a_state_that_is_not_true_any_more_is_taken_back() {
        let images = vec![listed("same:1", b"1"), listed("moved:1", b"other"), listed("foreign:1", b"3")];
        let unread = ImageState { name: None, stage: ImageStage::Wanted, target: None, ..answered("", b"") };
        let states =
            vec![answered("same:1", b"1"), answered("moved:1", b"2"), answered("gone:1", b"4"), unread];
        let merged = images_response(merge_states(images, states, &BTreeMap::new())).images;
        let rows: Vec<_> =
            merged.iter().map(|image| (&image.name[..], &image.state[..], &image.bundle[..])).collect();
        let expected = [
            ("foreign:1", "listed", ""),
            ("gone:1", "wanted", "a.tar"),
            ("moved:1", "wanted", "a.tar"),
            ("same:1", "answered", "a.tar"),
            ("", "wanted", "a.tar"),
        ];
        assert_eq!(rows, expected);
        assert!(merged[1].digest.is_empty() && !merged[1].problem.is_empty() && !merged[1].unpacked);
        assert!(merged[2].problem.contains("another image"), "{:?}", merged[2]);
        assert_eq!((merged[3].size_bytes, merged[3].pinned, &merged[3].problem[..]), (Some(7), true, ""));
    }

    #[test]
    fn a_misplaced_archive_is_a_row_of_its_namespace_or_of_each() {
        let entry = |path: &str| SkippedEntry { path: path.into(), reason: "move it" };
        let misplaced = [entry("/b/top.tar"), entry("/a/k8s.io/deep")];
        let rows = |namespace: &str| {
            let namespace = namespace.parse().expect("a namespace");
            let rows = misplaced_rows(&misplaced, &["/a".into(), "/b".into()], &namespace).into_iter();
            rows.map(|row| (row.bundle, row.directory)).collect::<Vec<_>>()
        };
        let (top, deep) =
            (("top.tar".to_owned(), "/b".to_owned()), ("k8s.io/deep".to_owned(), "/a".to_owned()));
        assert_eq!((rows("k8s.io"), rows("other")), (vec![top.clone(), deep], vec![top]));
    }

    #[test]
    fn an_image_that_is_known_to_be_damaged_is_that_with_and_without_a_bundle() {
        let images = vec![listed("alone:1", b"1"), listed("of-bundle:1", b"2"), listed("intact:1", b"3")];
        let damage = |content: &[u8]| (Digest::of_content(content), "its layer is damaged".to_owned());
        let damaged = BTreeMap::from([damage(b"1"), damage(b"2")]);
        let merged =
            images_response(merge_states(images, vec![answered("of-bundle:1", b"2")], &damaged)).images;
        let rows: Vec<_> = merged
            .iter()
            .map(|image| (&image.name[..], &image.state[..], image.problem.is_empty()))
            .collect();
        let expected =
            [("alone:1", "damaged", false), ("intact:1", "listed", true), ("of-bundle:1", "damaged", false)];
        assert_eq!(rows, expected);
    }
}
