//! The programs that Debian lacks: built once, before tests need them.

use anyhow::{Context as _, Result};
use testbed::gotool::{self, GoTools};

/// Builds those that the cache lacks, with the progress on standard error.
///
/// # Errors
/// One of them can't be built.
pub(crate) fn build_missing() -> Result<()> {
    for tools in wanted_tools(std::env::var_os("NODEKEEL_KUBE_BIN").is_some_and(|own| !own.is_empty())) {
        tools.program_directory().with_context(|| format!("build {} {}", tools.name, tools.version))?;
    }
    Ok(())
}

/// A caller with a control plane in `NODEKEEL_KUBE_BIN` needs only the other tools.
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
        assert_eq!(names(true), ["containerd", "gvisor", "csi-sanity", "helm", "snapshot-controller"]);
        assert_eq!(names(false).len(), gotool::ALL.len());
    }
}
