//! Generates valid and invalid archives.

use serde_json::{Value, json};

use crate::image::media;
use crate::{Digest, Platform};

/// The format of an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BuiltArchiveFormat {
    /// An OCI layout, `index.json` first.
    OciLayout,
    /// An OCI layout, `index.json` last, as `skopeo` and `tar` write it.
    OciLayoutIndexLast,
    /// A docker-archive, as `docker save` wrote it before it used OCI layouts.
    DockerArchive,
}

/// Builds an archive of images with one layer each.
#[derive(Debug, Clone)]
pub struct ArchiveBuilder {
    format: BuiltArchiveFormat,
    files: Vec<(String, Vec<u8>)>,
    index_entries: Vec<Value>,
    docker_entries: Vec<Value>,
    compresses_layers: bool,
}

fn descriptor_json(media_type: &str, bytes: &[u8]) -> Value {
    json!({ "mediaType": media_type, "digest": Digest::of_content(bytes).to_string(), "size": bytes.len() })
}

impl ArchiveBuilder {
    /// An empty archive.
    pub fn new(format: BuiltArchiveFormat) -> Self {
        let (files, index_entries, docker_entries) = (Vec::new(), Vec::new(), Vec::new());
        Self { format, files, index_entries, docker_entries, compresses_layers: false }
    }

    /// Compresses the layers of images that are added later with gzip. Default: they are not compressed.
    #[must_use]
    pub fn with_gzip_layers(mut self) -> Self {
        self.compresses_layers = true;
        self
    }

    /// Adds an image for this machine's platform with this tar as its layer; `names` may be empty.
    #[must_use]
    pub fn with_image(self, names: &[&str], layer: &[u8]) -> Self {
        self.with_image_for(&Platform::of_build_target(), names, layer)
    }

    /// Adds an image for a platform.
    #[must_use]
    pub fn with_image_for(mut self, platform: &Platform, names: &[&str], layer: &[u8]) -> Self {
        let config = json!({
            "os": platform.os, "architecture": platform.architecture,
            "config": { "Entrypoint": ["/entry"] },
            "rootfs": { "type": "layers", "diff_ids": [Digest::of_content(layer).to_string()] },
        });
        let config = config.to_string().into_bytes();
        let (layer, compression) = match self.compresses_layers {
            true => (&compress_gzip(layer)[..], "+gzip"),
            false => (layer, ""),
        };
        if self.format == BuiltArchiveFormat::DockerArchive {
            let (config_name, layer_name) = (
                Digest::of_content(&config).to_hex() + ".json",
                Digest::of_content(layer).to_hex() + "/layer.tar",
            );
            self.docker_entries
                .push(json!({ "Config": config_name, "RepoTags": names, "Layers": [layer_name] }));
            self.files.extend([(layer_name, layer.to_vec()), (config_name, config)]);
            return self;
        }
        let manifest = json!({
            "schemaVersion": 2, "mediaType": media::OCI_MANIFEST,
            "config": descriptor_json("application/vnd.oci.image.config.v1+json", &config),
            "layers": [descriptor_json(&format!("application/vnd.oci.image.layer.v1.tar{compression}"), layer)],
        });
        let manifest = manifest.to_string().into_bytes();
        self.index_entries.extend(self.new_index_entries(names, media::OCI_MANIFEST, &manifest));
        self.add_blob(layer).add_blob(&config).add_blob(&manifest)
    }

    /// Moves all entries so far into a nested index with these names.
    #[must_use]
    pub fn wrap_in_index(mut self, names: &[&str]) -> Self {
        for listed in &mut self.index_entries {
            listed.as_object_mut().map(|listed| listed.remove("annotations"));
        }
        let children = std::mem::take(&mut self.index_entries);
        let index = json!({ "schemaVersion": 2, "mediaType": media::OCI_INDEX, "manifests": children });
        let index = index.to_string().into_bytes();
        self.index_entries.extend(self.new_index_entries(names, media::OCI_INDEX, &index));
        self.add_blob(&index)
    }

    /// Adds this platform to the last index entry.
    #[must_use]
    pub fn with_stated_platform(mut self, platform: &Platform) -> Self {
        if let Some(listed) = self.index_entries.last_mut() {
            listed["platform"] = json!({ "os": platform.os, "architecture": platform.architecture });
        }
        self
    }

    fn new_index_entries(&self, names: &[&str], media_type: &str, bytes: &[u8]) -> Vec<Value> {
        let named = names.iter().map(|name| {
            let mut entry = descriptor_json(media_type, bytes);
            entry["annotations"] = json!({ "org.opencontainers.image.ref.name": name });
            entry
        });
        let named: Vec<_> = named.collect();
        if named.is_empty() { vec![descriptor_json(media_type, bytes)] } else { named }
    }

    fn add_blob(mut self, bytes: &[u8]) -> Self {
        let name = format!("blobs/sha256/{}", Digest::of_content(bytes).to_hex());
        if !self.files.iter().any(|(known, _)| *known == name) {
            self.files.push((name, bytes.to_vec()));
        }
        self
    }

    /// Adds an entry to the index of an OCI layout, unchanged.
    #[must_use]
    pub fn with_index_entry(mut self, entry: Value) -> Self {
        self.index_entries.push(entry);
        self
    }

    /// Adds a file unchanged.
    #[must_use]
    pub fn with_file(mut self, name: &str, content: &[u8]) -> Self {
        self.files.push((name.to_owned(), content.to_vec()));
        self
    }

    /// Removes the files with this content.
    #[must_use]
    pub fn without_content(mut self, content: &[u8]) -> Self {
        self.files.retain(|(_, other)| other != content);
        self
    }

    /// Flips one bit in the files with this content.
    #[must_use]
    pub fn with_damaged_content(mut self, content: &[u8]) -> Self {
        for (_, other) in self.files.iter_mut().filter(|(_, other)| other == content) {
            if let Some(byte) = other.last_mut() {
                *byte ^= 1;
            }
        }
        self
    }

    /// The uncompressed archive.
    pub fn to_tar(&self) -> Vec<u8> {
        let mut files = self.files.clone();
        let index = json!({ "schemaVersion": 2, "manifests": self.index_entries }).to_string().into_bytes();
        let layout = ("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec());
        match self.format {
            BuiltArchiveFormat::OciLayout => {
                files.splice(0..0, [layout, ("index.json".to_owned(), index)]).for_each(drop)
            }
            BuiltArchiveFormat::OciLayoutIndexLast => {
                files.extend([("index.json".to_owned(), index), layout])
            }
            BuiltArchiveFormat::DockerArchive => {
                let saved = Value::from(self.docker_entries.clone()).to_string().into_bytes();
                files.extend([
                    ("manifest.json".to_owned(), saved),
                    ("repositories".to_owned(), b"{}".to_vec()),
                ]);
            }
        }
        write_tar(&files)
    }

    /// The archive, compressed with gzip.
    pub fn to_gzip(&self) -> Vec<u8> {
        compress_gzip(&self.to_tar())
    }

    /// The archive, compressed with zstd.
    pub fn to_zstd(&self) -> Vec<u8> {
        let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).expect("memory");
        encoder.include_checksum(true).expect("before its first byte");
        std::io::Write::write_all(&mut encoder, &self.to_tar()).expect("written to memory");
        encoder.finish().expect("written to memory")
    }
}

fn compress_gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).expect("written to memory");
    encoder.finish().expect("written to memory")
}

/// A ustar of these files, whose names have at most 100 bytes.
fn write_tar(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut tar = Vec::new();
    for (name, content) in files {
        let mut header = [0; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        let mut put = |at: usize, text: String| header[at..at + text.len()].copy_from_slice(text.as_bytes());
        put(100, "0000644\0".into());
        put(124, format!("{:011o}\0", content.len()));
        put(136, "00000000000\0".into());
        // The checksum counts its own field as spaces.
        put(148, " ".repeat(8));
        put(156, "0".into());
        put(257, "ustar\x0000".into());
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        tar.extend_from_slice(&header);
        tar.extend_from_slice(content);
        tar.resize(tar.len().next_multiple_of(512), 0);
    }
    tar.resize(tar.len() + 1024, 0);
    tar
}
