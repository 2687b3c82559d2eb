//! Waits for a kubelet that has not started yet, as on a node that runs its own kubelet as a service.

use std::path::{Path, PathBuf};

use nodekeel_supervisor::{Context, Failure};

use crate::directory_watch::{DirectoryWatch, nearest_directory};

/// The directories that a kubelet creates below its own when it starts, and that the CSI plugin needs.
///
/// *Source:* k8s.io/kubernetes, `pkg/kubelet/kubelet.go`, `setupDataDirs`.
const KUBELET_DIRECTORIES: [&str; 2] = ["pods", "plugins_registry"];

/// Waits until the kubelet has created its directories, and reports what is missing as the runnable's reason
/// not to be ready. Afterwards the reason is its ready signal, as without a wait.
///
/// # Errors
/// The runnable was canceled, or the directory can't be watched.
pub(crate) async fn wait_for_kubelet(kubelet: &Path, ctx: &Context) -> Result<(), Failure> {
    let mut has_waited = false;
    while let Some(missing) = missing_directory(kubelet) {
        // The directory was removed after it was found: the next round finds one above it.
        let Some(change) = DirectoryWatch::new(nearest_directory(&missing))? else { continue };
        // This look finds directories that were created before the watch began, and the watch reports later ones.
        if missing_directory(kubelet).as_ref() == Some(&missing)
            && nearest_directory(&missing) == change.path()
        {
            ctx.signal_not_ready(format!(
                "waits for the kubelet to create {}: start the kubelet, or correct provisioner.kubelet",
                missing.display()
            ))?;
            has_waited = true;
            tokio::select! {
                changed = change.wait() => changed?,
                canceled = ctx.canceled() => return Err(canceled.into()),
            }
        }
    }
    if has_waited {
        ctx.signal_not_ready("waits for its ready signal")?;
    }
    Ok(())
}

/// The first directory that a kubelet has not created yet.
fn missing_directory(kubelet: &Path) -> Option<PathBuf> {
    KUBELET_DIRECTORIES.map(|name| kubelet.join(name)).into_iter().find(|path| !path.is_dir())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_directory_that_is_missing_and_the_one_to_watch_are_found() {
        let scratch = tempfile::tempdir().expect("a directory");
        let kubelet = scratch.path().join("lib/kubelet");
        assert_eq!(missing_directory(&kubelet), Some(kubelet.join("pods")));
        assert_eq!(nearest_directory(&kubelet.join("pods")), scratch.path());
        fs::create_dir_all(kubelet.join("pods")).expect("created");
        assert_eq!(missing_directory(&kubelet), Some(kubelet.join("plugins_registry")));
        assert_eq!(nearest_directory(&kubelet.join("plugins_registry")), kubelet);
        fs::write(kubelet.join("plugins_registry"), "").expect("written");
        assert_eq!(missing_directory(&kubelet), Some(kubelet.join("plugins_registry")), "a file is none");
        fs::remove_file(kubelet.join("plugins_registry")).expect("removed");
        fs::create_dir(kubelet.join("plugins_registry")).expect("created");
        assert_eq!(missing_directory(&kubelet), None);
    }
}
