//! The bindings of a volume's keys in `esp/`: `VOLUME.KEY.BINDING.tang`, by the names of the key and of the binding.
//!
//! Each file is written once, since vfat can't replace one atomically, and has the JWE alone: `clevis decrypt` reads it.

use nodekeel_localstorage::tang::{Binding, secret_id};
use nodekeel_localstorage::{Dir, Error, FileMode};

use super::server::TangServer;

/// The largest file, in bytes: that of clevis has the whole advertisement.
const FILE_LIMIT: u64 = 256 << 10;

/// A binding in `esp/`.
#[derive(Debug, Clone)]
pub(super) struct BindingFile {
    pub(super) name: String,
    /// The name of the key.
    pub(super) key: String,
    /// `None` if the file is damaged, as one that was not written whole is.
    pub(super) binding: Option<Binding>,
}

impl BindingFile {
    /// Reads the bindings of a volume.
    pub(super) fn read_all(esp: &Dir, volume: &str) -> Result<Vec<Self>, Error> {
        let mut found = Vec::new();
        for entry in esp.list()? {
            let name = entry.name.to_string();
            let Some(key) = parse_name(volume, &name) else {
                continue;
            };
            let content = esp.read_at_most(&name, FILE_LIMIT)?;
            let text = std::str::from_utf8(&content).ok();
            let binding = text.and_then(|text| Binding::parse(text).ok());
            found.push(Self { key: key.to_owned(), name, binding });
        }
        found.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(found)
    }

    /// Writes a new binding, and reads it back.
    pub(super) fn write(esp: &Dir, volume: &str, key: &str, binding: &Binding) -> Result<Self, Error> {
        let name = format!("{volume}.{key}.{}.tang", secret_id(binding.as_str().as_bytes()));
        // Without a newline, which clevis 19 takes for a part of the JWE.
        esp.write(&name, binding.as_str().as_bytes(), FileMode::PRIVATE_FILE)?;
        let written = esp.read_at_most(&name, FILE_LIMIT)?;
        let binding = std::str::from_utf8(&written).ok().and_then(|text| Binding::parse(text).ok());
        Ok(Self { name, key: key.to_owned(), binding })
    }

    /// Returns whether it binds the key with this name to a server.
    pub(super) fn is_of(&self, key: &str, server: &TangServer) -> bool {
        self.key == key && self.binding.as_ref().is_some_and(|binding| binding.url() == server.url.as_str())
    }

    /// Removes it.
    pub(super) fn remove(&self, esp: &Dir) -> Result<(), Error> {
        esp.remove_file(&self.name).map(drop)
    }
}

/// The name of the key in that of a file.
fn parse_name<'a>(volume: &str, name: &'a str) -> Option<&'a str> {
    let rest = name.strip_prefix(volume)?.strip_prefix('.')?.strip_suffix(".tang")?;
    let (key, binding) = rest.split_once('.')?;
    let is_name = |name: &str| name.len() == 8 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_name(key) && is_name(binding)).then_some(key)
}
