//! Images that are there before anyone asks: a directory of bundles, imported.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tokio::task::spawn_blocking;

use crate::error::{ImageError, ImportError, Wrong};
use crate::image::{Image, Labels};
use crate::import::{self, Job, chain};
use crate::plan::{Action, Bundle, plan};
use crate::scan::{self, Found, Stray, repository};
use crate::store::{ImageStore, StoreError};
use crate::walk::{Place, is_whole};
use crate::{Digest, Limits, Namespace, Platform};

/// A directory of bundles: `NAMESPACE/NAME.tar`, also `.tar.gz`, `.tgz`, `.tar.zst` and `.tzst`.
///
/// A bundle is a tar of an OCI layout or a docker-archive, with one image or several. Whatever else lies there is told
/// and left alone. Of two bundles that give one name to different images, the first in the order of names has it.
#[derive(Debug, Clone)]
pub struct Preseed {
    directory: PathBuf,
    platform: Platform,
    limits: Limits,
    unpack: bool,
    pin: bool,
    /// What is known not to be importable, until it changes.
    bad: Arc<Mutex<BTreeMap<Bundle, Bad>>>,
}

/// What is wrong with a bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bad {
    /// It lacks something that another bundle may bring.
    Lacking,
    /// Whatever else there is, it can't be imported.
    Itself,
}

/// Why nothing can be said about any bundle.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PreseedError {
    /// The directory can't be listed: look at its mode.
    #[error("list the bundles")]
    Scan(#[source] nodekeel_localstorage::Error),
    /// The store doesn't tell its images; a retry can help.
    #[error("see which images are there")]
    Store(#[source] StoreError),
}

/// What became of a bundle.
#[derive(Debug)]
#[non_exhaustive]
pub enum Outcome {
    /// It was read, and these images are listed.
    Imported {
        /// Which file.
        bundle: Bundle,
        /// Their names.
        images: Vec<String>,
    },
    /// It is as it was, and all of it is there.
    Unchanged {
        /// Which file.
        bundle: Bundle,
        /// The names of its images.
        images: Vec<String>,
    },
    /// It was found to be bad in an earlier round, and has not changed.
    KnownBad {
        /// Which file.
        bundle: Bundle,
    },
    /// It was not imported; the others were.
    Failed(ImportError),
}

/// What became of a directory.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// A line for each bundle: those that can't be opened first, the others in their order, and last those that lack
    /// something.
    pub outcomes: Vec<Outcome>,
    /// What was left alone.
    pub strays: Vec<Stray>,
}

impl Report {
    /// How many bundles failed in a way that a later round may mend.
    pub fn retryable(&self) -> usize {
        let failed = |outcome: &&Outcome| matches!(outcome, Outcome::Failed(error) if error.is_retryable());
        self.outcomes.iter().filter(failed).count()
    }
}

impl Preseed {
    /// The bundles below a directory, for this machine's platform, not unpacked, and pinned.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
            platform: Platform::of_this_machine(),
            limits: Limits::default(),
            unpack: false,
            pin: true,
            bad: Arc::default(),
        }
    }

    /// For another platform. Default: [`Platform::of_this_machine`].
    #[must_use]
    pub fn platform(mut self, platform: Platform) -> Self {
        self.platform = platform;
        self
    }

    /// How much a bundle may hold.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Whether layers are unpacked at once, so that the first container needn't wait for it. Default: no. Where it is set
    /// later, what was imported without is read again; what is unpacked stays so.
    #[must_use]
    pub fn unpack(mut self, unpack: bool) -> Self {
        self.unpack = unpack;
        self
    }

    /// Whether the kubelet is told to keep the images however full the disk is. Default: yes.
    ///
    /// *Source:* the label `io.cri-containerd.pinned`, containerd 1.7 and later; older ones pass over it.
    #[must_use]
    pub fn pin(mut self, pin: bool) -> Self {
        self.pin = pin;
        self
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Goes through all bundles once, one at a time; the log gets a line for each. What one of them is worth doesn't
    /// touch the others.
    ///
    /// # Errors
    /// [`PreseedError`], where it can't even begin. What is wrong with a bundle is in the report.
    ///
    /// # Cancel safety
    /// A bundle that is being read when this is dropped is not listed, and read again by the next round.
    pub async fn run(&self, store: &dyn ImageStore) -> Result<Report, PreseedError> {
        let Found { bundles, strays, failed } = self.scan().await?;
        for Stray { path, why } in &strays {
            tracing::warn!("{} is no bundle and left alone: {why}", path.display());
        }
        let mut report = Report { strays, ..Report::default() };
        let mut told = |outcome: Outcome| {
            tell(&outcome);
            report.outcomes.push(outcome);
        };
        failed.into_iter().map(Outcome::Failed).for_each(&mut told);
        let listed = list(store, &bundles).await.map_err(PreseedError::Store)?;
        let (mut claims, mut left) = (Claims::default(), plan(bundles, &listed, self.unpack));
        // What one bundle lacks, a later one may have brought: then that one is looked at again.
        loop {
            let (mut lacking, mut is_more_there) = (Vec::new(), false);
            for (bundle, action) in left {
                let outcome = self.one(store, bundle.clone(), action.clone(), &mut claims).await;
                is_more_there |= matches!(outcome, Outcome::Imported { .. });
                match self.bad().get(&bundle) {
                    Some(Bad::Lacking) => lacking.push((bundle, action, outcome)),
                    _ => told(outcome),
                }
            }
            if lacking.is_empty() || !is_more_there {
                lacking.into_iter().for_each(|(.., outcome)| told(outcome));
                return Ok(report);
            }
            let again = |(bundle, action, _): (Bundle, Action, Outcome)| {
                self.bad().remove(&bundle);
                (bundle, action)
            };
            left = lacking.into_iter().map(again).collect();
        }
    }

    async fn scan(&self) -> Result<Found, PreseedError> {
        let directory = self.directory.clone();
        let scanned = spawn_blocking(move || scan::scan(&directory)).await;
        scanned
            .unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()))
            .map_err(PreseedError::Scan)
    }

    async fn one(
        &self,
        store: &dyn ImageStore,
        bundle: Bundle,
        action: Action,
        claims: &mut Claims,
    ) -> Outcome {
        if self.bad().contains_key(&bundle) {
            return Outcome::KnownBad { bundle };
        }
        match self.imported(store, &bundle, action, claims).await {
            Ok((images, is_new)) => {
                claims.add(&bundle.namespace, &images);
                let images = images.into_iter().map(|image| image.name).collect();
                match is_new {
                    true => Outcome::Imported { bundle, images },
                    false => Outcome::Unchanged { bundle, images },
                }
            }
            Err(error) => {
                if !error.is_retryable() {
                    let lacks =
                        matches!(&error, ImportError::Image { source: ImageError::Missing { .. }, .. });
                    self.bad().insert(bundle, if lacks { Bad::Lacking } else { Bad::Itself });
                }
                Outcome::Failed(error)
            }
        }
    }

    /// The images of a bundle, and whether it had to be read for them.
    async fn imported(
        &self,
        store: &dyn ImageStore,
        bundle: &Bundle,
        action: Action,
        claims: &Claims,
    ) -> Result<(Vec<Image>, bool), ImportError> {
        let path = self.directory.join(bundle.namespace.as_str()).join(&bundle.file);
        let wrong = |wrong: Wrong| wrong.of(path.clone());
        let (namespace, platform, limits) = (&bundle.namespace, &self.platform, &self.limits);
        let place = Place { store, namespace, platform, limits };
        if let Action::Verify(images) = action
            && all_whole(place, &images).await.map_err(wrong)?
        {
            return Ok((images, false));
        }
        let (directory, opened) = (self.directory.clone(), bundle.clone());
        let file = spawn_blocking(move || scan::open(&directory, &opened)).await;
        let file = file.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
        let file = file.map_err(|source| ImportError::Open { path: path.clone(), source })?;
        let job =
            Job { place, repository: repository(&bundle.file).unwrap_or_default(), unpack: self.unpack };
        let begun = Instant::now();
        let images = import::import(job, file, &mut |targets| self.images(bundle, targets, claims)).await;
        tracing::debug!(took = ?begun.elapsed(), "read {}", path.display());
        Ok((images.map_err(wrong)?, true))
    }

    /// How the images of a bundle are listed. A name that an earlier bundle has stays with what that says.
    fn images(
        &self,
        bundle: &Bundle,
        targets: &[(crate::ImageName, crate::Descriptor)],
        claims: &Claims,
    ) -> Vec<Image> {
        let mut own = Labels::new();
        if self.pin {
            own.insert("io.cri-containerd.pinned".into(), "pinned".into());
        }
        let image = |(name, target): &(crate::ImageName, crate::Descriptor)| {
            let taken = claims.of(&bundle.namespace, name.as_str());
            if taken.is_some_and(|image| image.target.digest != target.digest) {
                tracing::warn!(
                    "{} names {name} another image than an earlier bundle; that one keeps the name",
                    bundle.file
                );
            }
            let (target, before) = match taken {
                Some(image) => (image.target.clone(), image.labels.clone()),
                None => (target.clone(), Labels::new()),
            };
            let mut labels: Labels = before.into_iter().chain(own.clone()).collect();
            labels.extend(bundle.mark(targets.len(), target.digest, self.unpack));
            Image { name: name.to_string(), target, labels }
        };
        targets.iter().map(image).collect()
    }

    fn bad(&self) -> std::sync::MutexGuard<'_, BTreeMap<Bundle, Bad>> {
        self.bad.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn list(
    store: &dyn ImageStore,
    bundles: &[Bundle],
) -> Result<BTreeMap<Namespace, Vec<Image>>, StoreError> {
    let mut listed = BTreeMap::new();
    for Bundle { namespace, .. } in bundles {
        if !listed.contains_key(namespace) {
            listed.insert(namespace.clone(), store.images(namespace).await?);
        }
    }
    Ok(listed)
}

async fn all_whole(place: Place<'_>, images: &[Image]) -> Result<bool, Wrong> {
    let mut seen: BTreeSet<Digest> = BTreeSet::new();
    for image in images {
        if seen.insert(image.target.digest) && !is_whole(place, &image.target).await? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn tell(outcome: &Outcome) {
    match outcome {
        Outcome::Imported { bundle, images } => {
            tracing::info!("preseeded {} into {}: {}", bundle.file, bundle.namespace, images.join(","));
        }
        Outcome::Unchanged { bundle, images } => {
            tracing::info!("{} is in {} as it was: {}", bundle.file, bundle.namespace, images.join(","));
        }
        Outcome::KnownBad { bundle } => {
            tracing::warn!("{} for {} is as bad as it was", bundle.file, bundle.namespace);
        }
        Outcome::Failed(error) => tracing::error!("{}", chain(error)),
    }
}

/// Which names earlier bundles of the round have.
#[derive(Debug, Default)]
struct Claims(BTreeMap<(Namespace, String), Image>);

impl Claims {
    fn of(&self, namespace: &Namespace, name: &str) -> Option<&Image> {
        self.0.get(&(namespace.clone(), name.to_owned()))
    }

    fn add(&mut self, namespace: &Namespace, images: &[Image]) {
        for image in images {
            self.0.insert((namespace.clone(), image.name.clone()), image.clone());
        }
    }
}
