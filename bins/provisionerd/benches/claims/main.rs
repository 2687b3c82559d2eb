//! What a claim costs from its POST to Bound on a real control plane, and what the program costs that serves it.
//!
//! `cargo xtask bench claims`. Beside ours works a null provisioner, which watches the same, makes exactly one
//! PersistentVolume and one event for each claim, and no volume at all. Both are processes of this program, run all the
//! time, and take turns; each serves the claims of its own class. The scheduler is left out (claims come with their node),
//! and the controller manager may make 2,000 requests a second: otherwise its 20 would be measured. Etcd syncs nothing: as
//! a rule it has another disk than volumes have, and here it would wait for theirs.
//!
//! This machine's kernel need not have quotas: ours keeps limits in a map, which what the kernel's calls cost (`cargo
//! xtask bench quota`) is to be added to. The memory is that of provisionerd itself, whose limits are then kept in files.

mod bursts;
mod footprint;
mod null;
mod ours;
mod requests;
mod scene;
mod side;
mod singles;
mod watches;

use std::path::Path;

use anyhow::{Result, bail};
use testbed::bench::Rows;

use crate::scene::Scene;
use crate::side::Side;

fn main() -> Result<()> {
    // Cargo calls with `--bench`.
    let given: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let given: Vec<&str> = given.iter().map(String::as_str).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        match given.as_slice() {
            [] => measure().await,
            ["ours", kubeconfig, directory] => ours::run(Path::new(kubeconfig), Path::new(directory)).await,
            ["null", kubeconfig] => null::run(Path::new(kubeconfig)).await,
            _ => bail!("it takes no arguments, but where it starts itself"),
        }
    })
}

/// Each part is written as soon as it is measured.
async fn measure() -> Result<()> {
    let mut scene = Scene::start().await?;
    let mut rows = Rows::new("claims");
    {
        let _sides = [Side::Ours.start(&scene)?, Side::Null.start(&scene)?];
        rows.add(singles::measure(&mut scene).await?)?;
        rows.add(bursts::measure(&mut scene).await?)?;
    }
    rows.add(footprint::measure(&mut scene).await?)?;
    rows.finish().map(drop)
}
