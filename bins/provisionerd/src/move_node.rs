//! What a move does on a node: `provisionerd volumes send`, `receive` and `settle`, in the container of the daemon.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::num::NonZeroU64;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::csi::{BindMounter, VolumeMounter as _};
use nodekeel_provisioner::{
    DirStore, OrphanState, StoreName, StoredEntry, StoredId, StoredPlace, VolumeId, VolumeImporter,
    VolumeKind,
};
use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, ConfigFlags, DaemonConfig};
use crate::inventory::{NodeInventory, open_stored};
use crate::{print_stdout, run, start_runtime, volumes};

/// Maximum length of a header.
const MAX_HEADER_BYTES: usize = 4096;

/// The length of the hash that ends a stream.
const DIGEST_BYTES: usize = 32;

#[derive(Debug, Args)]
pub(crate) struct SendFlags {
    id: VolumeId,
    /// Write only the header
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    config: ConfigFlags,
}

#[derive(Debug, Args)]
pub(crate) struct ReceiveFlags {
    id: VolumeId,
    /// UID of the move
    #[arg(long)]
    owner: String,
    /// Store of the volume, if it has a name
    #[arg(long, value_name = "NAME")]
    store: Option<StoreName>,
    /// Check whether there is room
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    config: ConfigFlags,
}

#[derive(Debug, Args)]
pub(crate) struct SettleFlags {
    id: VolumeId,
    #[command(flatten)]
    config: ConfigFlags,
}

/// The first line of a stream, in JSON; the tree follows.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamHeader {
    /// The limit of the volume, without which none is sent.
    bytes: NonZeroU64,
    /// The other limit.
    inodes: Option<u64>,
}

pub(crate) fn run_send(flags: SendFlags) -> Result<ExitCode> {
    let (config, id) = (flags.config.load_config()?, flags.id);
    let entry = find_volume(&config, &id)?;
    let kind = entry.kind.with_context(|| format!("can't read the kind of volume {id}"))?;
    ensure!(kind == VolumeKind::Directory, "can't send volume {id}: it is a {kind} volume, and no directory");
    check_unmounted(&config, &entry)?;
    let limits = entry.usage.map(|usage| usage.limits).unwrap_or_default();
    let bytes = limits.bytes.and_then(|bytes| NonZeroU64::new(bytes.0)).with_context(|| {
        format!("volume {id} has no limit, or it can't be read: `provisionerd check` says why")
    })?;
    let header = StreamHeader { bytes, inodes: limits.inodes.map(|inodes| inodes.0) };
    let mut header = serde_json::to_string(&header).context("can't format the header")?;
    header.push('\n');
    if flags.check {
        return Ok(print_stdout(&header));
    }
    let mut stdout = io::stdout().lock();
    stdout.write_all(header.as_bytes()).context("can't write the volume")?;
    let dir = Dir::open(&entry.path).with_context(|| format!("can't open volume {id}"))?;
    let mut held = HeldTail { inner: stdout, tail: Vec::new() };
    dir.send_tree(&mut held).with_context(|| format!("can't send volume {id}"))?;
    // Before the hash: a tree that a pod may have changed is never complete.
    check_unmounted(&config, &entry)?;
    held.release().context("can't write the volume")?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn run_receive(flags: ReceiveFlags) -> Result<ExitCode> {
    let ReceiveFlags { id, owner, store, check, config } = flags;
    let config = config.load_config()?;
    let config = match store {
        Some(name) => config.of_store(Some(&name)).ok_or(ConfigError::UnknownStore { name })?,
        None => config,
    };
    let importer = open_importer(&config)?.with_ceiling(config.capacity_policy()?);
    let mut stdin = io::stdin().lock();
    let header = read_header(&mut stdin).context("can't read the volume: the other node did not send it")?;
    let limits = QuotaLimits { bytes: Some(Bytes(header.bytes.get())), inodes: header.inodes.map(Inodes) };
    if check {
        importer.check_arrival(&id, &owner, limits)?;
    } else {
        importer.receive(&id, &owner, limits, &mut stdin)?;
    }
    Ok(print_stdout(&format!("{}\n", importer.identity())))
}

pub(crate) fn run_settle(flags: SettleFlags) -> Result<ExitCode> {
    let (config, id) = (flags.config.load_config()?, flags.id);
    let identity = config.provisioner_identity(config.node_name()?);
    // Locked before the PersistentVolume is read: until the end, no move makes the volume one of this node again.
    let mut stores = Vec::new();
    for config in config.of_stores() {
        let importer = open_importer(&config)?;
        if let Some(entry) = list_volume(&config, &id)? {
            stores.push((config, importer, entry));
        }
    }
    let owners = start_runtime()?.block_on(async {
        let recovery = NodeInventory::recovery_of(&config).await?;
        anyhow::Ok(recovery.read_owners(&BTreeSet::from([id.clone()])).await?)
    })?;
    match owners.orphan_state(&identity, &id) {
        OrphanState::Owned => {
            ensure!(!stores.is_empty(), "volume {id} is missing on node {}", identity.node);
            stores.iter().try_for_each(|(_, importer, _)| importer.finish(&id))?;
        }
        OrphanState::OnOtherNode { .. } => {
            for (config, importer, entry) in &stores {
                check_unmounted(config, entry)?;
                importer.discard(&id)?;
            }
        }
        _ => bail!("volume {id} has no PersistentVolume, so it is not known which node has it"),
    }
    Ok(ExitCode::SUCCESS)
}

fn open_importer(config: &DaemonConfig) -> Result<VolumeImporter> {
    let (base, quota) = volumes::open_with_warnings(config)?;
    Ok(VolumeImporter::open(base, quota, run::kill_hook()?)?)
}

/// The volume, in whichever store has it.
fn find_volume(config: &DaemonConfig, id: &VolumeId) -> Result<StoredEntry> {
    let mut failed = None;
    for config in config.of_stores() {
        match list_volume(&config, id) {
            Ok(Some(entry)) => return Ok(entry),
            Ok(None) => {}
            // A store that can't be read does not hide the others.
            Err(error) => failed = Some(error),
        }
    }
    Err(failed.unwrap_or_else(|| anyhow::anyhow!("volume {id} is not on this node")))
}

fn list_volume(config: &DaemonConfig, id: &VolumeId) -> Result<Option<StoredEntry>> {
    let (base, quota) = volumes::open_for_reading(config)?;
    let stored = DirStore::list_stored(&base, &*quota)
        .with_context(|| format!("can't list the volumes in {}", config.directory.display()))?;
    let wanted = StoredId::Volume(id.clone());
    Ok(stored.into_iter().find(|entry| entry.place == StoredPlace::Volume && entry.id == wanted))
}

fn check_unmounted(config: &DaemonConfig, entry: &StoredEntry) -> Result<()> {
    let id = entry.id.as_str();
    let volume = open_stored(entry).with_context(|| format!("can't open volume {id}"))?;
    let targets = BindMounter::new(&config.kubelet).list_targets(&volume);
    let targets = targets.with_context(|| format!("can't see where volume {id} is mounted"))?;
    match targets.first() {
        None => Ok(()),
        Some(target) => bail!("volume {id} is mounted at {target}: wait until its pod has ended"),
    }
}

/// Reads a header, and nothing after it.
fn read_header(from: &mut dyn Read) -> io::Result<StreamHeader> {
    let (mut line, mut byte) = (Vec::new(), [0]);
    loop {
        from.read_exact(&mut byte)?;
        match byte {
            [b'\n'] => return Ok(serde_json::from_slice(&line)?),
            _ if line.len() >= MAX_HEADER_BYTES => return Err(io::ErrorKind::InvalidData.into()),
            [byte] => line.push(byte),
        }
    }
}

/// Writes all but the hash at the end, without which a stream is not complete.
struct HeldTail<W> {
    inner: W,
    tail: Vec<u8>,
}

impl<W: Write> HeldTail<W> {
    fn release(mut self) -> io::Result<()> {
        self.inner.write_all(&self.tail)?;
        self.inner.flush()
    }
}

impl<W: Write> Write for HeldTail<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.tail.extend_from_slice(bytes);
        let ready = self.tail.len().saturating_sub(DIGEST_BYTES);
        self.inner.write_all(&self.tail[..ready])?;
        self.tail.drain(..ready);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_written_last_and_on_release_alone() {
        let mut written = Vec::new();
        let mut held = HeldTail { inner: &mut written, tail: Vec::new() };
        for part in [&[1; 10][..], &[2; 100], &[3; 1]] {
            held.write_all(part).expect("written");
        }
        assert_eq!(held.tail.len(), DIGEST_BYTES);
        assert_eq!(held.inner.len(), 111 - DIGEST_BYTES);
        held.release().expect("written");
        assert_eq!(written, [&[1; 10][..], &[2; 100], &[3; 1]].concat());
    }

    #[test]
    fn a_header_is_one_short_line() {
        let mut stream = &b"{\"bytes\":5,\"inodes\":null}\nrest"[..];
        let header = read_header(&mut stream).expect("a header");
        assert_eq!(
            (header, stream),
            (StreamHeader { bytes: NonZeroU64::new(5).unwrap(), inodes: None }, &b"rest"[..])
        );
        let unlimited = [&b"{}\n"[..], b"{\"bytes\":null}\n", b"{\"bytes\":0,\"inodes\":5}\n"];
        for bad in
            [&b""[..], b"{\"bytes\":5", b"{}x\n", &[b'x'; 2 * MAX_HEADER_BYTES]].into_iter().chain(unlimited)
        {
            read_header(&mut { bad }).expect_err("no header");
        }
    }
}
