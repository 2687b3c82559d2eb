//! The steps of `deploy/README.md`, as its reader types them.

use anyhow::{Context as _, Result, ensure};
use testbed::BUSYBOX_IMAGE;

use crate::cluster::TestCluster;

const README: &str = include_str!("../../../../deploy/README.md");

/// The command of a step that starts so, such as `mkfs.xfs` of `File system`.
pub(crate) fn readme_command(step: &str, start: &str) -> Result<String> {
    let (_, text) =
        README.split_once(&format!(". **{step}.**")).with_context(|| format!("find step {step}"))?;
    // To the next step, or the section behind the last one.
    let text = text.split("**").next().unwrap_or(text).split("\n#").next().unwrap_or_default();
    let mut commands =
        text.split('`').skip(1).step_by(2).map(|span| span.split_whitespace().collect::<Vec<_>>().join(" "));
    commands
        .find(|command| command.starts_with(start))
        .with_context(|| format!("find `{start}` in step {step}"))
}

impl TestCluster {
    /// Runs a command of a step of the README with kubectl, from the directory of the repository.
    pub(crate) fn readme_kubectl(
        &self,
        step: &str,
        start: &str,
        replaced: &[(&str, &str)],
    ) -> Result<String> {
        let command =
            replaced.iter().fold(readme_command(step, start)?, |text, (from, to)| text.replace(from, to));
        let words: Vec<&str> = command.split(' ').skip(1).collect();
        self.kubectl(&words).with_context(|| command.clone())
    }

    /// The steps after the deployment: the check, and the example, whose image is on the node.
    pub(crate) fn check_and_use(&self) -> Result<()> {
        let pods = self.readme_kubectl("Check", "kubectl -n nodekeel get pods", &[])?;
        let pod = pods.lines().find_map(|line| {
            let name = line.split(' ').next()?;
            (name.starts_with("provisionerd-") && !name.starts_with("provisionerd-agent-")).then_some(name)
        });
        let pod = pod.with_context(|| format!("find the pod of provisionerd among {pods}"))?;
        self.readme_kubectl("Check", "kubectl -n nodekeel exec POD", &[("POD", pod)])?;
        self.run_ctr(&["tag", BUSYBOX_IMAGE, "docker.io/library/busybox:1.37"])?;
        self.readme_kubectl("Use", "kubectl apply", &[])?;
        self.wait_running("example")?;
        let seen = self.readme_kubectl("Use", "kubectl logs", &[])?;
        ensure!(seen.contains("1.0G"), "the pod of the example sees another disk: {seen}");
        self.readme_kubectl("Use", "kubectl delete", &[]).map(drop)
    }
}
