//! The import of images from files. It runs below containerd, and restarts with it.

use std::fmt;
use std::path::{Path, PathBuf};

use nodekeel_containerd_svc::{
    DamagedImage, ImageStage, ImageState, Preseed, RequiredImage, SkippedEntry, find_misplaced_archives,
};
use nodekeel_localstorage::Dir;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::config::ContainerdConfig;
use crate::error_chain::error_chain;
use crate::health::{HealthCondition, NodeSnapshot};
use crate::part::{DependencyEntry, NodePreparation};
use crate::program_name::metric_prefix;

/// The DN of the import.
const DN: &str = "root.containerd.preseed";
/// The object of problems with bundles and their images.
const IMAGES: &str = "images";
/// The object of the problem that content of an image is damaged.
const CONTENT: &str = "image content";
const DAMAGE_HINT: &str = "`nodectl images` names all of them; `nodectl images repair` writes them again, where the archive is there";
const ABSENT_BUNDLE_HINT: &str = "mount the disk of its bundle, then `nodectl images repair`; or `nodectl images --import FILE` with its archive; `nodectl images` \
                                  names all of them";
/// The object of the warning that archives lie where they are not imported.
const MISPLACED: &str = "misplaced archives";
/// The name of the import below `root`, in `depends_on`, health and metrics.
const NAME: &str = "containerd.preseed";

/// Names the import in the dependency graph: its dependents wait until the images are there.
pub(super) fn dependency_entry(containerd: &DependencyEntry, config: &ContainerdConfig) -> DependencyEntry {
    let unset =
        config.preseed.is_empty().then(|| "which is disabled; set services.containerd.preseed".to_owned());
    // A disabled containerd disables the import as well, and is the better reason.
    let why = containerd.unavailable.clone().or(unset);
    containerd.child("preseed").unavailable(why)
}

/// The reason why the bundles of an existing directory are not imported: others could have put them there.
pub(super) fn check_owner(images: &Path) -> Option<String> {
    // A directory that is missing may be mounted later: the import reports it.
    let checked = Dir::open(images).ok()?.check_owner_and_parents();
    Some(format!("services.containerd.preseed: {}", error_chain(&checked.err()?)))
}

/// The reason why no bundle can be imported at present: the directory is missing, unreadable or empty, as the mount point of a
/// disk that is not mounted. It may be mounted later.
pub(super) fn find_missing(images: &Path) -> Option<String> {
    let why = match std::fs::read_dir(images).map(|mut entries| entries.next().is_some()) {
        Ok(true) => return None,
        Ok(false) => "is empty".to_owned(),
        Err(error) => format!("can't be read: {error}"),
    };
    Some(format!("containerd: the preseed directory {} {why}; {}", images.display(), directory_hint(images)))
}

/// The required archives that are in none of the directories at present.
pub(super) fn find_absent_files(directories: &[PathBuf], required: &[String]) -> Vec<String> {
    let is_absent = |text: &&String| match text.parse() {
        Ok(RequiredImage::Bundle { namespace: Some(namespace), file }) => {
            directories.iter().all(|images| !images.join(namespace.as_str()).join(&file).exists())
        }
        Ok(RequiredImage::Bundle { namespace: None, file }) => {
            let mut namespaces = directories.iter().filter_map(|images| std::fs::read_dir(images).ok());
            !namespaces.any(|mut of| {
                of.any(|namespace| namespace.is_ok_and(|namespace| namespace.path().join(&file).exists()))
            })
        }
        _ => false,
    };
    let say = |text: &String| {
        format!("containerd: the required archive {text} is not in {}", name_directories(directories))
    };
    required.iter().filter(is_absent).map(say).collect()
}

/// The archives of a directory that lie where they are not imported.
pub(super) fn find_misplaced(images: &Path) -> Vec<String> {
    let say = |entry: &SkippedEntry| format!("containerd: {}", describe_misplaced(entry));
    find_misplaced_archives(images).iter().map(say).collect()
}

fn describe_misplaced(SkippedEntry { path, reason }: &SkippedEntry) -> String {
    format!("{} is not imported: {reason}", path.display())
}

/// Names the first of the archives that are not imported for their place.
fn misplaced_condition(misplaced: &[SkippedEntry]) -> Option<HealthCondition> {
    let mut text = describe_misplaced(misplaced.first()?);
    if misplaced.len() > 1 {
        text += &format!("; and {} more", misplaced.len() - 1);
    }
    let hint = "`nodectl images` names all of them; the directory is watched";
    Some(HealthCondition::warning(MISPLACED, text).hint(hint))
}

/// The paths, with commas between them.
fn name_directories(directories: &[PathBuf]) -> String {
    let names: Vec<_> = directories.iter().map(|path| path.display().to_string()).collect();
    names.join(", ")
}

fn directory_hint(images: &Path) -> String {
    let path = images.display();
    // The first part of the path that is something else than a directory: nothing can be created below it.
    let mut parts: Vec<_> = images.ancestors().filter(|part| !part.as_os_str().is_empty()).collect();
    parts.reverse();
    let wrong = parts.into_iter().find(|part| part.symlink_metadata().is_ok() && !part.is_dir());
    match wrong {
        Some(link) if link.is_symlink() => format!(
            "mount the disk that the link {} leads to, or correct the link, or services.containerd.preseed",
            link.display()
        ),
        Some(file) => format!(
            "{} is no directory: correct services.containerd.preseed, or move it away and create the directory",
            file.display()
        ),
        None => format!("mount its disk, or, if no archives are wanted, `mkdir -p {path}/k8s.io`"),
    }
}

/// The import for containerd, with its health and its metrics; `None` if none is configured.
pub(super) fn prepare_preseed(config: &ContainerdConfig, node: &mut NodePreparation<'_>) -> Option<Preseed> {
    let (first, others) = config.preseed.split_first()?;
    // The check of the configuration has refused what is neither a file nor an image.
    let required = config.required.iter().filter_map(|text| text.parse().ok());
    let preseed = others.iter().fold(Preseed::new(first), Preseed::with_directory);
    let preseed = preseed.with_unpacking(config.unpack).with_required(required);
    let preseed = preseed.with_limits(config.import_limits());
    let preseed = match config.image_policy() {
        Some(policy) => preseed.with_policy(policy),
        None => preseed,
    };
    // A configuration of the operator has a CRI unless it disables that.
    let preseed = preseed.with_digest_names(config.cri.is_some() || config.config.is_some());
    let mut registry = Registry::with_prefix(metric_prefix());
    registry.register_collector(Box::new(BundleCollector(preseed.clone())));
    node.metrics().add(NAME, registry);
    let counted = preseed.clone();
    node.health_sources().add(NAME, move |node: &NodeSnapshot| {
        let has_failed_bundles = counted.bundle_counts().is_some_and(|counts| counts.failed > 0);
        let states = counted.image_states();
        let damaged = states.iter().find(|state| state.stage == ImageStage::Damaged);
        let directories = counted.directories();
        let hint = || match has_failed_bundles {
            true => bundles_hint(&directories),
            false => import_hint(&directories),
        };
        // What else is wrong hides no damage.
        let damage = node.runnable(DN).and(damaged).map(describe_damaged);
        // The required images may be there, and others not.
        let problem = node
            .runnable(DN)
            .and_then(|_| counted.problem())
            .filter(|problem| damage.as_ref() != Some(problem));
        // Not of the runnable, whose readiness a problem would withhold from those who need the required images alone.
        let problem = problem.map(|problem| HealthCondition::problem(IMAGES, problem));
        let problem = node.condition_of(DN).or(problem).map(|found| found.hint(hint()));
        let damage = damage.map(|damage| HealthCondition::problem(CONTENT, damage).hint(DAMAGE_HINT));
        let damage = damage.or_else(|| counted.damaged_without_bundle().first().map(damage_condition));
        let misplaced = misplaced_condition(&counted.misplaced_archives());
        problem.into_iter().chain(damage).chain(misplaced).collect()
    });
    Some(preseed)
}

fn describe_damaged(state: &ImageState) -> String {
    let (name, problem) = (state.name.as_deref().unwrap_or(&state.bundle), state.problem.as_deref());
    format!("image {name} is damaged: {}", problem.unwrap_or("see `nodectl images`"))
}

/// Names an image that is known to be damaged and that no bundle can repair at present.
fn damage_condition(DamagedImage { namespace, name, reason }: &DamagedImage) -> HealthCondition {
    let text =
        format!("image {name} in {namespace} is damaged, and no bundle that is there has it: {reason}");
    HealthCondition::problem(CONTENT, text).hint(ABSENT_BUNDLE_HINT)
}

/// Reads at each scrape how many bundles are imported, and the states of their images.
#[derive(Debug)]
struct BundleCollector(Preseed);

impl Collector for BundleCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let gauge = |count| ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX));
        let states = self.0.image_states();
        if !states.is_empty() {
            let help =
                "Images of bundles, by state: wanted, refused, damaged, listed, or answered by the CRI";
            let mut images = encoder.encode_descriptor("images", help, None, MetricType::Gauge)?;
            for stage in ImageStage::ALL {
                let count = states.iter().filter(|state| state.stage == stage).count();
                gauge(count).encode(images.encode_family(&[("state", stage.as_str())])?)?;
            }
        }
        // Before the first import, the number of bundles is not known.
        let Some(counts) = self.0.bundle_counts() else { return Ok(()) };
        let help = "Bundles of images, by whether they are imported";
        let mut bundles = encoder.encode_descriptor("image_bundles", help, None, MetricType::Gauge)?;
        for (state, count) in [("imported", counts.imported), ("failed", counts.failed)] {
            gauge(count).encode(bundles.encode_family(&[("state", state)])?)?;
        }
        Ok(())
    }
}

/// The hint about an import that has found no bundle yet, or can't look for any.
fn import_hint(directories: &[PathBuf]) -> String {
    // Each that is missing is named by the problem.
    let first = directories.first().map(|images| directory_hint(images)).unwrap_or_default();
    let hint = match directories.len() {
        1 => first,
        _ => "mount its disk, or, if no archives are wanted, create `k8s.io` in it".to_owned(),
    };
    format!("`nodectl status {DN}`; if a directory is missing or empty: {hint}")
}

/// The hint about bundles that are not imported.
fn bundles_hint(directories: &[PathBuf]) -> String {
    let images = name_directories(directories);
    format!(
        "repair or delete the named bundles in {images}, or free space; then `nodectl restart {DN}` imports at once"
    )
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_or_a_dangling_link_in_the_place_of_a_directory_is_not_to_be_created() {
        let scratch = tempfile::tempdir().expect("a directory");
        let (file, link) = (scratch.path().join("file"), scratch.path().join("link"));
        fs::write(&file, "").expect("written");
        std::os::unix::fs::symlink("nowhere", &link).expect("linked");
        for (images, wrong, what) in [
            (file.clone(), &file, "is no directory"),
            (file.join("images"), &file, "is no directory"),
            (link.clone(), &link, "the link"),
            (link.join("images"), &link, "the link"),
        ] {
            let found = find_missing(&images).expect("missing");
            let names = found.contains(&wrong.display().to_string()) && found.contains(what);
            assert!(names && !found.contains("mkdir"), "{found}");
        }
    }

    #[test]
    fn archives_at_a_wrong_depth_are_a_warning_with_their_number() {
        let scratch = tempfile::tempdir().expect("a directory");
        assert!(misplaced_condition(&[]).is_none() && find_misplaced(scratch.path()).is_empty());
        for file in ["a.tar", "b.tar"] {
            fs::write(scratch.path().join(file), "").expect("written");
        }
        let found = find_misplaced(scratch.path());
        assert!(found.len() == 2 && found[0].contains("a.tar is not imported: move it into"), "{found:?}");
        let condition = misplaced_condition(&find_misplaced_archives(scratch.path())).expect("there are two");
        let text = condition.problem.clone();
        assert!(
            !condition.is_problem() && text.contains("a.tar is not") && text.ends_with("and 1 more"),
            "{text}"
        );
    }

    #[test]
    fn a_preseed_directory_without_bundles_is_named_with_the_reason() {
        let scratch = tempfile::tempdir().expect("a directory");
        let images = scratch.path().join("images");
        let found = find_missing(&images).expect("missing");
        let hint = format!("or, if no archives are wanted, `mkdir -p {}/k8s.io`", images.display());
        assert!(found.contains("can't be read: No such file") && found.ends_with(&hint), "{found}");
        fs::create_dir(&images).expect("created");
        assert!(find_missing(&images).expect("empty").contains("images is empty; mount its disk"));
        fs::create_dir(images.join("k8s.io")).expect("created");
        assert_eq!(find_missing(&images), None);
        fs::write(images.join("k8s.io/a.tar"), "").expect("written");
        let required = ["a.tar", "k8s.io/a.tar", "other/a.tar", "b.tar", "localhost/c:1"].map(str::to_owned);
        let absent = find_absent_files(&[scratch.path().join("missing"), images], &required);
        assert_eq!(absent.len(), 2, "{absent:?}");
        assert!(absent[0].contains("archive other/a.tar is not in /") && absent[1].contains("archive b.tar"));
    }
}
