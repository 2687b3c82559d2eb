//! Being written.
pub(crate) fn run() -> anyhow::Result<()> {
    anyhow::bail!("being written")
}
