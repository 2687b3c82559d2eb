//! Container images out of files of this machine, without a container engine.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::gotool::architecture;
use crate::{output, tools};

/// The image that every node in a guest has: busybox with its applets. It is what pods are begun with, too, so it
/// sleeps where it isn't told what to do.
pub const BUSYBOX_IMAGE: &str = "localhost/busybox:1";

/// An image of one layer.
#[derive(Clone, Debug)]
pub struct Image {
    name: String,
    files: Vec<(PathBuf, PathBuf)>,
    links: Vec<(PathBuf, PathBuf)>,
    entrypoint: Vec<String>,
    /// What stands behind the entrypoint unless the pod gives arguments.
    command: Vec<String>,
}

impl Image {
    /// An empty image. A node finds it by its whole name, such as `localhost/tool:1`.
    pub fn new(name: impl Into<String>) -> Self {
        let (files, links) = (Vec::new(), Vec::new());
        Self { name: name.into(), files, links, entrypoint: Vec::new(), command: Vec::new() }
    }

    /// Adds a file of this machine, with its mode. A program should be static: nothing else is in there.
    #[must_use]
    pub fn file(mut self, at: impl Into<PathBuf>, source: impl Into<PathBuf>) -> Self {
        self.files.push((at.into(), source.into()));
        self
    }

    /// Says what runs where the pod doesn't.
    #[must_use]
    pub fn entrypoint(mut self, words: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.entrypoint = words.into_iter().map(Into::into).collect();
        self
    }

    /// Busybox with its applets, as [`BUSYBOX_IMAGE`].
    ///
    /// # Errors
    /// [`tools::Missing`] where busybox isn't installed.
    pub fn busybox() -> Result<Self> {
        let busybox = tools::find(tools::BUSYBOX)?;
        let applets = output(Command::new(&busybox).arg("--list"))?;
        let mut image = Self::new(BUSYBOX_IMAGE).file("bin/busybox", busybox);
        for applet in applets.lines().filter(|applet| *applet != "busybox") {
            image.links.push((Path::new("bin").join(applet), "busybox".into()));
        }
        image.command = ["/bin/busybox", "tail", "-f", "/dev/null"].map(String::from).to_vec();
        Ok(image)
    }

    /// Writes it as a tar of an OCI layout, which `ctr images import` reads.
    ///
    /// # Errors
    /// When a file can't be read, or the archive not be written.
    ///
    /// *Source:* the OCI image specification 1.1, image layout, manifest and configuration; the annotation is
    /// containerd's.
    pub fn write(&self, archive: &Path) -> Result<()> {
        let layer = self.layer().with_context(|| format!("make the layer of {}", self.name))?;
        let config = json!({
            "architecture": architecture(), "os": "linux",
            "config": {
                "Entrypoint": self.entrypoint, "Cmd": self.command,
                "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],
            },
            "rootfs": {"type": "layers", "diff_ids": [digest(&layer)]},
        });
        let config = config.to_string().into_bytes();
        let manifest = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer)],
        });
        let manifest = manifest.to_string().into_bytes();
        let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
        entry["annotations"] = json!({"io.containerd.image.name": self.name});
        let index = json!({"schemaVersion": 2, "manifests": [entry]}).to_string();
        let file = File::create(archive).with_context(|| format!("create {}", archive.display()))?;
        let mut tar = tar::Builder::new(file);
        add(&mut tar, Path::new("oci-layout"), 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        add(&mut tar, Path::new("index.json"), 0o644, index.as_bytes())?;
        for blob in [&layer, &config, &manifest] {
            add(&mut tar, &Path::new("blobs/sha256").join(hex(blob)), 0o644, blob)?;
        }
        tar.finish().with_context(|| format!("write {}", archive.display()))
    }

    fn layer(&self) -> Result<Vec<u8>> {
        use std::os::unix::fs::PermissionsExt as _;
        let mut tar = tar::Builder::new(Vec::new());
        for (at, source) in &self.files {
            let content = fs::read(source).with_context(|| format!("read {}", source.display()))?;
            let mode = source.metadata().with_context(|| format!("stat {}", source.display()))?.permissions();
            add(&mut tar, at.strip_prefix("/").unwrap_or(at), mode.mode() & 0o7777, &content)?;
        }
        for (at, target) in &self.links {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_mode(0o777);
            header.set_size(0);
            tar.append_link(&mut header, at, target).with_context(|| format!("add {}", at.display()))?;
        }
        tar.into_inner().context("finish the layer")
    }
}

/// Puts a directory with an OCI layout into one archive.
pub(super) fn archive(layout: &Path, archive: &Path) -> Result<()> {
    let file = File::create(archive).with_context(|| format!("create {}", archive.display()))?;
    let mut tar = tar::Builder::new(file);
    tar.append_dir_all("", layout).with_context(|| format!("read {}", layout.display()))?;
    tar.finish().with_context(|| format!("write {}", archive.display()))
}

fn add(tar: &mut tar::Builder<impl Write>, at: &Path, mode: u32, content: &[u8]) -> Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_mode(mode);
    header.set_size(content.len() as u64);
    tar.append_data(&mut header, at, content).with_context(|| format!("add {}", at.display()))
}

fn descriptor(media_type: &str, content: &[u8]) -> Value {
    json!({"mediaType": media_type, "digest": digest(content), "size": content.len()})
}

fn digest(content: &[u8]) -> String {
    format!("sha256:{}", hex(content))
}

fn hex(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::io::Read as _;

    fn entries(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let mut tar = tar::Archive::new(archive);
        let read = |mut entry: tar::Entry<'_, &[u8]>| {
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            (entry.path().unwrap().display().to_string(), content)
        };
        tar.entries().unwrap().map(|entry| read(entry.unwrap())).collect()
    }

    #[test]
    fn every_descriptor_leads_to_a_blob_with_its_digest_and_size() {
        let directory = tempfile::tempdir().unwrap();
        let (program, archive) = (directory.path().join("tool"), directory.path().join("tool.tar"));
        fs::write(&program, "#!").unwrap();
        Image::new("localhost/tool:1").file("/bin/tool", &program).write(&archive).unwrap();
        let layout = entries(&fs::read(archive).unwrap());
        let follow = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
            let content = layout[&format!("blobs/sha256/{digest}")].clone();
            assert_eq!(content.len() as u64, descriptor["size"].as_u64().unwrap());
            content
        };
        let index: Value = serde_json::from_slice(&layout["index.json"]).unwrap();
        assert_eq!(index["manifests"][0]["annotations"]["io.containerd.image.name"], "localhost/tool:1");
        let manifest: Value = serde_json::from_slice(&follow(&index["manifests"][0])).unwrap();
        let config: Value = serde_json::from_slice(&follow(&manifest["config"])).unwrap();
        let layer = follow(&manifest["layers"][0]);
        assert_eq!(config["rootfs"]["diff_ids"][0], digest(&layer));
        assert_eq!(entries(&layer)["bin/tool"], b"#!");
    }
}
