//! The programs that Debian has not: built once, before anything needs them.

use anyhow::{Context as _, Result};
use testbed::gotool::{self, GoTools};

/// Builds what is not in the cache yet, with its progress on standard error.
///
/// # Errors
/// Which of them can't be built, and why.
pub(crate) fn build_missing() -> Result<()> {
    for tools in wanted_tools(std::env::var_os("NODEKEEL_KUBE_BIN").is_some_and(|own| !own.is_empty())) {
        tools.program_directory().with_context(|| format!("build {} {}", tools.name, tools.version))?;
    }
    Ok(())
}

/// Whoever brings a control plane of its own needs only what goes with it.
fn wanted_tools(has_own: bool) -> Vec<GoTools> {
    let is_own =
        |tools: &GoTools| has_own && [gotool::ETCD.name, gotool::KUBERNETES.name].contains(&tools.name);
    gotool::ALL.into_iter().filter(|tools| !is_own(tools)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_given_control_plane_is_not_built() {
        let names = |own| wanted_tools(own).iter().map(|tools| tools.name).collect::<Vec<_>>();
        assert_eq!(names(true), ["containerd", "gvisor", "csi-sanity"]);
        assert_eq!(names(false).len(), gotool::ALL.len());
    }
}
