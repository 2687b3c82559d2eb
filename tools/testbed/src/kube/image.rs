//! Container images from files of this machine, without a container engine.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::gotool::go_architecture;
use crate::{command_output, tools};

/// The image of every node in a guest: busybox with its applets. It is the pause image too, so it sleeps
/// where a pod gives no command.
pub const BUSYBOX_IMAGE: &str = "localhost/busybox:1";

const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";

/// An image of one layer. The same files always give the same bytes: times and owners are left out.
#[derive(Clone, Debug)]
pub struct ContainerImage {
    name: String,
    /// The processor that its programs run on, as Go and OCI call it.
    architecture: &'static str,
    entries: Vec<(PathBuf, LayerEntry)>,
    entrypoint_words: Vec<String>,
    /// Stands behind the entrypoint unless the pod gives arguments.
    command: Vec<String>,
}

#[derive(Clone, Debug)]
enum LayerEntry {
    File(PathBuf),
    Text(&'static str),
    Link(PathBuf),
}

impl ContainerImage {
    /// An empty image for this machine's processor. A node finds it by its whole name, such as
    /// `localhost/tool:1`.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            architecture: go_architecture(),
            entries: Vec::new(),
            entrypoint_words: Vec::new(),
            command: Vec::new(),
        }
    }

    /// Sets the processor that its programs run on, such as `arm64`.
    ///
    /// *Source:* the OCI image specification 1.1, image index: the names are those of Go's `GOARCH`.
    #[must_use]
    pub fn for_architecture(mut self, architecture: &'static str) -> Self {
        self.architecture = architecture;
        self
    }

    /// Adds a file of this machine. A program should be static: the image has no libraries.
    #[must_use]
    pub fn add_file(mut self, at: impl Into<PathBuf>, source: impl Into<PathBuf>) -> Self {
        self.entries.push((at.into(), LayerEntry::File(source.into())));
        self
    }

    /// Adds a file with this text.
    #[must_use]
    pub fn add_text(mut self, at: impl Into<PathBuf>, text: &'static str) -> Self {
        self.entries.push((at.into(), LayerEntry::Text(text)));
        self
    }

    /// Sets the program that runs where the pod names none.
    #[must_use]
    pub fn with_entrypoint(mut self, words: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.entrypoint_words = words.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the arguments that follow the entrypoint where the pod gives none.
    #[must_use]
    pub fn with_command(mut self, words: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.command = words.into_iter().map(Into::into).collect();
        self
    }

    /// Changes its name.
    #[must_use]
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Busybox with its applets, as [`BUSYBOX_IMAGE`].
    ///
    /// # Errors
    /// [`tools::MissingTool`] where busybox isn't installed.
    pub fn busybox() -> Result<Self> {
        let busybox = tools::find_tool(tools::BUSYBOX)?;
        let applets = command_output(Command::new(&busybox).arg("--list"))?;
        let mut image = Self::new(BUSYBOX_IMAGE).add_file("bin/busybox", busybox);
        for applet in applets.lines().filter(|applet| *applet != "busybox") {
            image.entries.push((Path::new("bin").join(applet), LayerEntry::Link("busybox".into())));
        }
        image.command = ["/bin/busybox", "tail", "-f", "/dev/null"].map(String::from).to_vec();
        Ok(image)
    }

    /// Writes it as a tar of an OCI layout, which `ctr images import` reads, and gives the manifest's digest.
    ///
    /// # Errors
    /// A file can't be read, or the archive can't be written.
    ///
    /// *Source:* the OCI image specification 1.1, image layout, manifest and configuration; the annotation
    /// with the whole name is containerd's.
    pub fn write_archive(&self, archive: &Path) -> Result<String> {
        let (manifest, blobs) = self.manifest()?;
        write_layout(&self.name, manifest, &blobs, archive)
    }

    /// Writes one image for several processors, each of `images` for one, and gives the digest of its index.
    ///
    /// # Errors
    /// As [`write_archive`](Self::write_archive).
    ///
    /// # Panics
    /// Without an image.
    ///
    /// *Source:* the OCI image specification 1.1, image index. It is a blob that the layout's `index.json`
    /// names: containerd imports each entry of that file as an image, so that two with one name would replace
    /// each other.
    pub fn write_multi_platform(images: &[Self], archive: &Path) -> Result<String> {
        let (mut manifests, mut blobs) = (Vec::new(), Vec::new());
        for image in images {
            let (manifest, parts) = image.manifest()?;
            manifests.push(manifest);
            blobs.extend(parts);
        }
        let index = json!({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": manifests});
        let index = index.to_string().into_bytes();
        let entry = descriptor(INDEX_TYPE, &index);
        blobs.push(index);
        write_layout(&images[0].name, entry, &blobs, archive)
    }

    /// The descriptor of its manifest, and its blobs.
    fn manifest(&self) -> Result<(Value, Vec<Vec<u8>>)> {
        let layer = self.layer().with_context(|| format!("make the layer of {}", self.name))?;
        let config = self.config(&layer).to_string().into_bytes();
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST_TYPE,
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer)],
        });
        let manifest = manifest.to_string().into_bytes();
        let mut entry = descriptor(MANIFEST_TYPE, &manifest);
        entry["platform"] = json!({"architecture": self.architecture, "os": "linux"});
        Ok((entry, vec![layer, config, manifest]))
    }

    fn config(&self, layer: &[u8]) -> Value {
        json!({
            "architecture": self.architecture, "os": "linux",
            "config": {
                "Entrypoint": self.entrypoint_words, "Cmd": self.command, "WorkingDir": "/", "User": "0:0",
                "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],
            },
            "rootfs": {"type": "layers", "diff_ids": [sha256_digest(layer)]},
        })
    }

    fn layer(&self) -> Result<Vec<u8>> {
        let mut tar = tar::Builder::new(Vec::new());
        for (at, entry) in &self.entries {
            let at = at.strip_prefix("/").unwrap_or(at);
            match entry {
                LayerEntry::Text(text) => add_file(&mut tar, at, 0o644, text.as_bytes())?,
                LayerEntry::File(source) => {
                    let content = fs::read(source).with_context(|| format!("read {}", source.display()))?;
                    let stat = source.metadata().with_context(|| format!("stat {}", source.display()))?;
                    let is_program = stat.permissions().mode() & 0o111 != 0;
                    add_file(&mut tar, at, if is_program { 0o755 } else { 0o644 }, &content)?;
                }
                LayerEntry::Link(target) => {
                    let mut header = tar_header(tar::EntryType::Symlink, 0o777, 0);
                    tar.append_link(&mut header, at, target)
                        .with_context(|| format!("add {}", at.display()))?;
                }
            }
        }
        tar.into_inner().context("finish the layer")
    }
}

/// Writes a layout whose only entry has this name, and gives the entry's digest.
fn write_layout(name: &str, mut entry: Value, blobs: &[Vec<u8>], archive: &Path) -> Result<String> {
    entry["annotations"] = json!({
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rsplit_once(':').map_or("latest", |(_, tag)| tag),
    });
    let index = json!({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]});
    let file = File::create(archive).with_context(|| format!("create {}", archive.display()))?;
    let mut tar = tar::Builder::new(file);
    add_file(&mut tar, Path::new("oci-layout"), 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    add_file(&mut tar, Path::new("index.json"), 0o644, index.to_string().as_bytes())?;
    for blob in blobs {
        add_file(&mut tar, &Path::new("blobs/sha256").join(hex_digest(blob)), 0o644, blob)?;
    }
    tar.finish().with_context(|| format!("write {}", archive.display()))?;
    Ok(entry["digest"].as_str().unwrap_or_default().to_owned())
}

/// Puts a directory with an OCI layout into one archive.
pub(super) fn archive_layout(layout: &Path, archive: &Path) -> Result<()> {
    let file = File::create(archive).with_context(|| format!("create {}", archive.display()))?;
    let mut tar = tar::Builder::new(file);
    tar.append_dir_all("", layout).with_context(|| format!("read {}", layout.display()))?;
    tar.finish().with_context(|| format!("write {}", archive.display()))
}

fn add_file(tar: &mut tar::Builder<impl Write>, at: &Path, mode: u32, content: &[u8]) -> Result<()> {
    let mut header = tar_header(tar::EntryType::Regular, mode, content.len() as u64);
    tar.append_data(&mut header, at, content).with_context(|| format!("add {}", at.display()))
}

fn tar_header(kind: tar::EntryType, mode: u32, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

fn descriptor(media_type: &str, content: &[u8]) -> Value {
    json!({"mediaType": media_type, "digest": sha256_digest(content), "size": content.len()})
}

fn sha256_digest(content: &[u8]) -> String {
    format!("sha256:{}", hex_digest(content))
}

fn hex_digest(content: &[u8]) -> String {
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

    /// The archive of an image with a program, and the digest of its manifest.
    fn write(content: &str) -> (BTreeMap<String, Vec<u8>>, String) {
        let directory = tempfile::tempdir().unwrap();
        let (program, archive) = (directory.path().join("tool"), directory.path().join("tool.tar"));
        fs::write(&program, content).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
        let image = ContainerImage::new("localhost/tool:1")
            .add_text("etc/group", "root:x:0:\n")
            .add_file("/bin/tool", program);
        let digest = image.with_entrypoint(["/bin/tool"]).write_archive(&archive).unwrap();
        (entries(&fs::read(archive).unwrap()), digest)
    }

    #[test]
    fn every_descriptor_leads_to_a_blob_with_its_digest_and_size() {
        let (layout, manifest_digest) = write("#!");
        let follow = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
            let content = layout[&format!("blobs/sha256/{digest}")].clone();
            assert_eq!(content.len() as u64, descriptor["size"].as_u64().unwrap());
            assert_eq!(hex_digest(&content), digest);
            content
        };
        let index: Value = serde_json::from_slice(&layout["index.json"]).unwrap();
        assert_eq!(index["manifests"][0]["annotations"]["io.containerd.image.name"], "localhost/tool:1");
        assert_eq!(index["manifests"][0]["digest"], manifest_digest);
        let manifest: Value = serde_json::from_slice(&follow(&index["manifests"][0])).unwrap();
        let config: Value = serde_json::from_slice(&follow(&manifest["config"])).unwrap();
        let layer = follow(&manifest["layers"][0]);
        assert_eq!(
            (&config["rootfs"]["diff_ids"][0], &config["config"]["Entrypoint"][0]),
            (&json!(sha256_digest(&layer)), &json!("/bin/tool"))
        );
        let inside = entries(&layer);
        assert_eq!((&*inside["bin/tool"], &*inside["etc/group"]), (&b"#!"[..], &b"root:x:0:\n"[..]));
        let mut archive = tar::Archive::new(&*layer);
        let modes: Vec<u32> =
            archive.entries().unwrap().map(|entry| entry.unwrap().header().mode().unwrap()).collect();
        assert_eq!(modes, [0o644, 0o755]);
    }

    #[test]
    fn an_image_for_two_processors_is_one_name_that_leads_to_both() {
        let directory = tempfile::tempdir().unwrap();
        let archive = directory.path().join("tool.tar");
        let images = ["amd64", "arm64"].map(|architecture| {
            let program = directory.path().join(architecture);
            fs::write(&program, architecture).unwrap();
            ContainerImage::new("localhost/tool:1").for_architecture(architecture).add_file("tool", program)
        });
        let digest = ContainerImage::write_multi_platform(&images, &archive).unwrap();
        let layout = entries(&fs::read(archive).unwrap());
        let read = |descriptor: &Value| -> Value {
            let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
            serde_json::from_slice(&layout[&format!("blobs/sha256/{digest}")]).unwrap()
        };
        let outer: Value = serde_json::from_slice(&layout["index.json"]).unwrap();
        let named = outer["manifests"].as_array().unwrap();
        assert_eq!((named.len(), named[0]["digest"].as_str()), (1, Some(&*digest)));
        assert_eq!(named[0]["annotations"]["io.containerd.image.name"], "localhost/tool:1");
        let index = read(&named[0]);
        for (manifest, architecture) in index["manifests"].as_array().unwrap().iter().zip(["amd64", "arm64"])
        {
            assert_eq!(manifest["platform"], json!({"architecture": architecture, "os": "linux"}));
            let manifest = read(manifest);
            assert_eq!(read(&manifest["config"])["architecture"], architecture);
            let digest = manifest["layers"][0]["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
            let layer = entries(&layout[&format!("blobs/sha256/{digest}")]);
            assert_eq!(layer["tool"], architecture.as_bytes());
        }
    }

    #[test]
    fn the_same_program_gives_the_same_image() {
        assert_eq!(write("#!"), write("#!"));
        assert_ne!(write("#!").1, write("other").1);
    }
}
