//! An image with one layer, as an OCI layout in a tar.
//!
//! The same program always gives the same bytes: no times, no names of users, everything in order.
//!
//! *Source:* the OCI image specification 1.1: `image-layout.md`, `manifest.md`, `config.md`, `layer.md`.

use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// What a program may look up: it runs as root, and nothing else is there.
const USERS: &[u8] = b"root:x:0:0:root:/:/\n";
const GROUPS: &[u8] = b"root:x:0:\n";

/// An image: blobs, of which one describes the others.
#[derive(Debug)]
pub(crate) struct Image {
    layer: Blob,
    config: Blob,
    manifest: Blob,
    index: Vec<u8>,
}

#[derive(Debug)]
struct Blob {
    kind: &'static str,
    bytes: Vec<u8>,
    digest: String,
}

impl Blob {
    fn new(kind: &'static str, bytes: Vec<u8>) -> Self {
        let digest = Sha256::digest(&bytes).iter().fold("sha256:".to_owned(), |mut text, byte| {
            // Writing into a text can't fail.
            let _ = write!(text, "{byte:02x}");
            text
        });
        Self { kind, bytes, digest }
    }

    fn json(kind: &'static str, value: &Value) -> Result<Self> {
        Ok(Self::new(kind, serde_json::to_vec(value).context("write JSON")?))
    }

    fn descriptor(&self) -> Value {
        json!({ "mediaType": self.kind, "digest": self.digest, "size": self.bytes.len() })
    }
}

impl Image {
    /// An image of this name that holds a static program and starts it.
    ///
    /// # Errors
    /// The program is too large for a tar.
    pub(crate) fn new(program: &str, bytes: &[u8], name: &str) -> Result<Self> {
        let layer = Blob::new(LAYER, layer(program, bytes)?);
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let config = Blob::json(
            CONFIG,
            &json!({
                "architecture": architecture,
                "os": "linux",
                "config": { "Entrypoint": [format!("/{program}")], "WorkingDir": "/", "User": "0:0" },
                "rootfs": { "type": "layers", "diff_ids": [layer.digest] },
            }),
        )?;
        let manifest = Blob::json(
            MANIFEST,
            &json!({
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": config.descriptor(),
                "layers": [layer.descriptor()],
            }),
        )?;
        let mut listed = manifest.descriptor();
        listed["platform"] = json!({ "architecture": architecture, "os": "linux" });
        listed["annotations"] = json!({
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rsplit_once(':').map_or(name, |(_, tag)| tag),
        });
        let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [listed] });
        Ok(Self { layer, config, manifest, index: serde_json::to_vec(&index).context("write JSON")? })
    }

    /// The digest of the manifest, by which the image is known.
    pub(crate) fn digest(&self) -> &str {
        &self.manifest.digest
    }

    /// The layout.
    ///
    /// # Errors
    /// A blob is too large for a tar.
    pub(crate) fn tar(&self) -> Result<Vec<u8>> {
        let mut tar = Builder::new(Vec::new());
        for directory in ["blobs/", "blobs/sha256/"] {
            add(&mut tar, directory, None)?;
        }
        for blob in [&self.config, &self.layer, &self.manifest] {
            let path = format!("blobs/{}", blob.digest.replace(':', "/"));
            add(&mut tar, &path, Some((0o644, &blob.bytes)))?;
        }
        add(&mut tar, "index.json", Some((0o644, &self.index)))?;
        add(&mut tar, "oci-layout", Some((0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)))?;
        tar.into_inner().context("end a tar")
    }
}

/// The files that a container sees.
fn layer(program: &str, bytes: &[u8]) -> Result<Vec<u8>> {
    let mut tar = Builder::new(Vec::new());
    add(&mut tar, "etc/", None)?;
    add(&mut tar, "etc/group", Some((0o644, GROUPS)))?;
    add(&mut tar, "etc/passwd", Some((0o644, USERS)))?;
    add(&mut tar, program, Some((0o755, bytes)))?;
    tar.into_inner().context("end a tar")
}

/// Adds a file with its mode, or a directory.
fn add(tar: &mut Builder<Vec<u8>>, path: &str, file: Option<(u32, &[u8])>) -> Result<()> {
    let (kind, mode, bytes) = match file {
        Some((mode, bytes)) => (EntryType::Regular, mode, bytes),
        None => (EntryType::Directory, 0o755, &[][..]),
    };
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(bytes.len() as u64);
    tar.append_data(&mut header, path, bytes).with_context(|| format!("add {path} to a tar"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read as _;

    use super::*;

    fn files(tar: &[u8]) -> BTreeMap<String, (u32, Vec<u8>)> {
        let mut archive = tar::Archive::new(tar);
        let read = |entry: std::io::Result<tar::Entry<'_, &[u8]>>| {
            let mut entry = entry.unwrap();
            assert_eq!((entry.header().mtime().unwrap(), entry.header().uid().unwrap()), (0, 0));
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            (entry.path().unwrap().display().to_string(), (entry.header().mode().unwrap(), bytes))
        };
        archive.entries().unwrap().map(read).collect()
    }

    fn image() -> Image {
        Image::new("program", b"\x7fELF", "docker.io/nodekeel/program:1.2.3").unwrap()
    }

    #[test]
    fn every_descriptor_leads_to_a_blob_of_its_size_and_digest() {
        let files = files(&image().tar().unwrap());
        assert_eq!(files["oci-layout"].1, br#"{"imageLayoutVersion":"1.0.0"}"#);
        let index: Value = serde_json::from_slice(&files["index.json"].1).unwrap();
        let follow = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap();
            let bytes = &files[&format!("blobs/{}", digest.replace(':', "/"))].1;
            assert_eq!(descriptor["size"], bytes.len());
            assert_eq!(Blob::new("", bytes.clone()).digest, digest);
            bytes.clone()
        };
        let manifest: Value = serde_json::from_slice(&follow(&index["manifests"][0])).unwrap();
        let config: Value = serde_json::from_slice(&follow(&manifest["config"])).unwrap();
        let layer = follow(&manifest["layers"][0]);
        assert_eq!(config["rootfs"]["diff_ids"][0], manifest["layers"][0]["digest"]);
        assert_eq!(config["config"]["Entrypoint"][0], "/program");
        let name = &index["manifests"][0]["annotations"]["io.containerd.image.name"];
        assert_eq!(name, "docker.io/nodekeel/program:1.2.3");
        let inside = self::files(&layer);
        assert_eq!(inside["program"], (0o755, b"\x7fELF".to_vec()));
        assert_eq!(
            inside.keys().map(String::as_str).collect::<Vec<_>>(),
            ["etc/", "etc/group", "etc/passwd", "program"]
        );
    }

    #[test]
    fn the_same_program_gives_the_same_image() {
        assert_eq!(image().tar().unwrap(), image().tar().unwrap());
        assert_ne!(image().digest(), Image::new("program", b"other", "a:b").unwrap().digest());
    }

    #[test]
    fn digests_are_sha256() {
        let digest = Blob::new("", Vec::new()).digest;
        assert_eq!(digest, "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }
}
