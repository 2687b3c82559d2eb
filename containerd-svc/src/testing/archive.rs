//! Archives made by hand, right and wrong.

use serde_json::{Value, json};

use crate::image::media;
use crate::{Digest, Platform};

/// How an archive is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Shape {
    /// An OCI layout, `index.json` first.
    Layout,
    /// An OCI layout, `index.json` last, as `skopeo` and `tar` write it.
    LayoutLast,
    /// A docker-archive, as `docker save` wrote it before it knew layouts.
    Docker,
}

/// An archive in the making: images of one layer.
#[derive(Debug, Clone)]
pub struct Archive {
    shape: Shape,
    files: Vec<(String, Vec<u8>)>,
    listed: Vec<Value>,
    saved: Vec<Value>,
}

fn descriptor(media_type: &str, bytes: &[u8]) -> Value {
    json!({ "mediaType": media_type, "digest": Digest::of(bytes).to_string(), "size": bytes.len() })
}

impl Archive {
    /// An empty one.
    pub fn new(shape: Shape) -> Self {
        Self { shape, files: Vec::new(), listed: Vec::new(), saved: Vec::new() }
    }

    /// Adds an image for this machine, whose one layer is this tar; without names it has none.
    #[must_use]
    pub fn image(self, names: &[&str], layer: &[u8]) -> Self {
        self.image_for(&Platform::of_this_machine(), names, layer)
    }

    /// Adds an image for a platform.
    #[must_use]
    pub fn image_for(mut self, platform: &Platform, names: &[&str], layer: &[u8]) -> Self {
        let config = json!({
            "os": platform.os, "architecture": platform.architecture,
            "config": { "Entrypoint": ["/entry"] },
            "rootfs": { "type": "layers", "diff_ids": [Digest::of(layer).to_string()] },
        });
        let config = config.to_string().into_bytes();
        if self.shape == Shape::Docker {
            let (config_name, layer_name) =
                (Digest::of(&config).hex() + ".json", Digest::of(layer).hex() + "/layer.tar");
            self.saved.push(json!({ "Config": config_name, "RepoTags": names, "Layers": [layer_name] }));
            self.files.extend([(layer_name, layer.to_vec()), (config_name, config)]);
            return self;
        }
        let manifest = json!({
            "schemaVersion": 2, "mediaType": media::OCI_MANIFEST,
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", layer)],
        });
        let manifest = manifest.to_string().into_bytes();
        self.listed.extend(self.entries(names, media::OCI_MANIFEST, &manifest));
        self.blob(layer).blob(&config).blob(&manifest)
    }

    /// Puts everything that is listed so far into an index of its own, which then has these names.
    #[must_use]
    pub fn into_index(mut self, names: &[&str]) -> Self {
        for listed in &mut self.listed {
            listed.as_object_mut().map(|listed| listed.remove("annotations"));
        }
        let children = std::mem::take(&mut self.listed);
        let index = json!({ "schemaVersion": 2, "mediaType": media::OCI_INDEX, "manifests": children });
        let index = index.to_string().into_bytes();
        self.listed.extend(self.entries(names, media::OCI_INDEX, &index));
        self.blob(&index)
    }

    /// Says for which platform the last listed image is.
    #[must_use]
    pub fn stated(mut self, platform: &Platform) -> Self {
        if let Some(listed) = self.listed.last_mut() {
            listed["platform"] = json!({ "os": platform.os, "architecture": platform.architecture });
        }
        self
    }

    fn entries(&self, names: &[&str], media_type: &str, bytes: &[u8]) -> Vec<Value> {
        let named = names.iter().map(|name| {
            let mut entry = descriptor(media_type, bytes);
            entry["annotations"] = json!({ "org.opencontainers.image.ref.name": name });
            entry
        });
        let named: Vec<_> = named.collect();
        if named.is_empty() { vec![descriptor(media_type, bytes)] } else { named }
    }

    fn blob(mut self, bytes: &[u8]) -> Self {
        let name = format!("blobs/sha256/{}", Digest::of(bytes).hex());
        if !self.files.iter().any(|(known, _)| *known == name) {
            self.files.push((name, bytes.to_vec()));
        }
        self
    }

    /// Adds a file as it is.
    #[must_use]
    pub fn file(mut self, name: &str, content: &[u8]) -> Self {
        self.files.push((name.to_owned(), content.to_vec()));
        self
    }

    /// Leaves out the files whose content is this.
    #[must_use]
    pub fn without(mut self, content: &[u8]) -> Self {
        self.files.retain(|(_, other)| other != content);
        self
    }

    /// Damages the files whose content is this: one bit of them.
    #[must_use]
    pub fn damaged(mut self, content: &[u8]) -> Self {
        for (_, other) in self.files.iter_mut().filter(|(_, other)| other == content) {
            if let Some(byte) = other.last_mut() {
                *byte ^= 1;
            }
        }
        self
    }

    /// The archive, not compressed.
    pub fn tar(&self) -> Vec<u8> {
        let mut files = self.files.clone();
        let index = json!({ "schemaVersion": 2, "manifests": self.listed }).to_string().into_bytes();
        let layout = ("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec());
        match self.shape {
            Shape::Layout => files.splice(0..0, [layout, ("index.json".to_owned(), index)]).for_each(drop),
            Shape::LayoutLast => files.extend([("index.json".to_owned(), index), layout]),
            Shape::Docker => {
                let saved = Value::from(self.saved.clone()).to_string().into_bytes();
                files.extend([
                    ("manifest.json".to_owned(), saved),
                    ("repositories".to_owned(), b"{}".to_vec()),
                ]);
            }
        }
        tar(&files)
    }

    /// The archive by gzip.
    pub fn gzip(&self) -> Vec<u8> {
        use std::io::Write as _;
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(&self.tar()).expect("written to memory");
        encoder.finish().expect("written to memory")
    }

    /// The archive by zstd.
    pub fn zstd(&self) -> Vec<u8> {
        let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).expect("memory");
        encoder.include_checksum(true).expect("before its first byte");
        std::io::Write::write_all(&mut encoder, &self.tar()).expect("written to memory");
        encoder.finish().expect("written to memory")
    }
}

/// A ustar of these files; their names have at most 100 bytes.
fn tar(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut tar = Vec::new();
    for (name, content) in files {
        let mut header = [0; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        let mut put = |at: usize, text: String| header[at..at + text.len()].copy_from_slice(text.as_bytes());
        put(100, "0000644\0".into());
        put(124, format!("{:011o}\0", content.len()));
        put(136, "00000000000\0".into());
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
