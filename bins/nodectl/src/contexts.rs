//! The nodes on other machines that an operator calls, by the names that they have in a file of the operator.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use nodekeel_node::access::{PublicKey, RemoteNode};
use nodekeel_node::client::DEFAULT_SOCKET;
use serde::{Deserialize, Serialize};

use crate::commands::key::read_private_key;
use crate::error::CommandError;
use crate::private_file::PrivateFile;

/// The name of the file in the directory of the operator's configuration.
const FILE: &str = "nodekeel/contexts.toml";

/// The contexts of an operator.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Contexts {
    /// The name of the one for commands that name none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) current: Option<String>,
    #[serde(default)]
    pub(crate) contexts: BTreeMap<String, Context>,
}

/// How to call one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Context {
    /// `HOST:PORT` of its API.
    pub(crate) address: String,
    /// The node's public key.
    #[serde(with = "key_text")]
    pub(crate) node_key: PublicKey,
    /// The file of the operator's private key.
    pub(crate) key_file: PathBuf,
}

mod key_text {
    use nodekeel_node::access::PublicKey;
    use serde::{Deserialize as _, Deserializer, Serializer, de};

    pub(super) fn serialize<S: Serializer>(key: &PublicKey, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(key)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PublicKey, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// The file of the contexts: `nodekeel/contexts.toml` in `$XDG_CONFIG_HOME`, or in `.config` of the home directory.
///
/// *Source:* XDG Base Directory Specification: a path that is not absolute is ignored.
pub(crate) fn contexts_file() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let directory = variable("XDG_CONFIG_HOME").or_else(|| Some(variable("HOME")?.join(".config")))?;
    Some(directory.join(FILE))
}

impl Contexts {
    /// Those of a file; none if it does not exist.
    pub(crate) fn read(file: &Path) -> Result<Self, CommandError> {
        let file_error = |source| CommandError::File { path: file.to_owned(), source };
        let text = match fs::read_to_string(file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(file_error(error)),
        };
        // Its error has the line and the column.
        toml::from_str(&text).map_err(|error| file_error(io::Error::new(io::ErrorKind::InvalidData, error)))
    }

    /// Changes the file. Of several programs that do so at once each waits for the one before.
    pub(crate) fn change<T>(
        path: &Path,
        change: impl FnOnce(&mut Self) -> Result<T, CommandError>,
    ) -> Result<T, CommandError> {
        let file_error = |source| CommandError::File { path: path.to_owned(), source };
        let directory = path.parent().unwrap_or(Path::new("/"));
        // The lock ends with the descriptor.
        let locked = fs::create_dir_all(directory).and_then(|()| {
            let directory = fs::File::open(directory)?;
            directory.lock().map(|()| directory)
        });
        let _locked = locked.map_err(file_error)?;
        let mut contexts = Self::read(path)?;
        let changed = change(&mut contexts)?;
        contexts.write(path)?;
        Ok(changed)
    }

    /// Replaces the file.
    fn write(&self, path: &Path) -> Result<(), CommandError> {
        let file_error = |source| CommandError::File { path: path.to_owned(), source };
        let text = toml::to_string(self).map_err(|error| file_error(io::Error::other(error)))?;
        let mut file = PrivateFile::create(path).map_err(file_error)?;
        file.write_all(text.as_bytes()).and_then(|()| file.commit()).map_err(file_error)
    }

    /// The context of this name.
    pub(crate) fn find(&self, name: &str) -> Result<&Context, CommandError> {
        self.contexts.get(name).ok_or_else(|| {
            let names: Vec<_> = self.contexts.keys().map(String::as_str).collect();
            let known = if names.is_empty() {
                "there are none".to_owned()
            } else {
                format!("known: {}", names.join(", "))
            };
            CommandError::UnknownContext { name: name.to_owned(), known }
        })
    }
}

/// The place of the node that a command calls.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    /// The control socket of this machine.
    Socket(PathBuf),
    /// The context of this name.
    Context(String),
}

/// Where a command calls its node: the options come before the variables, these before the current context, and that before the
/// default socket.
fn choose_place(
    socket: Option<PathBuf>,
    context: Option<String>,
    variable: impl Fn(&str) -> Option<String>,
    current: impl FnOnce() -> Result<Option<String>, CommandError>,
) -> Result<Place, CommandError> {
    let non_empty = |name| variable(name).filter(|value| !value.is_empty());
    if let Some(socket) = socket {
        return Ok(Place::Socket(socket));
    }
    if let Some(context) = context.or_else(|| non_empty("NODEKEEL_CONTEXT")) {
        return Ok(Place::Context(context));
    }
    if let Some(socket) = non_empty("NODEKEEL_SOCKET") {
        return Ok(Place::Socket(socket.into()));
    }
    // An error of the file is one of the command: it could reach another node than the operator means.
    Ok(current()?.map_or_else(|| Place::Socket(DEFAULT_SOCKET.into()), Place::Context))
}

/// How a command calls its node.
#[derive(Debug)]
pub(crate) enum NodeEndpoint {
    /// By the control socket of this machine.
    Socket(PathBuf),
    /// By the API of another machine.
    Remote(RemoteNode),
}

/// How a command with these options calls its node.
pub(crate) fn find_endpoint(
    socket: Option<PathBuf>,
    context: Option<String>,
) -> Result<NodeEndpoint, CommandError> {
    let read = || contexts_file().map_or_else(|| Ok(Contexts::default()), |file| Contexts::read(&file));
    let variable = |name: &str| std::env::var(name).ok();
    match choose_place(socket, context, variable, || Ok(read()?.current))? {
        Place::Socket(socket) => Ok(NodeEndpoint::Socket(socket)),
        Place::Context(name) => {
            let contexts = read()?;
            let Context { address, node_key, key_file } = contexts.find(&name)?;
            let operator_key = read_private_key(key_file)?;
            Ok(NodeEndpoint::Remote(RemoteNode {
                address: address.clone(),
                node_key: *node_key,
                operator_key,
            }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_are_read_as_they_were_written() {
        let directory = testbed::ScratchDir::new().unwrap();
        let file = directory.path().join("config/nodekeel/contexts.toml");
        assert_eq!(Contexts::read(&file).unwrap(), Contexts::default());
        let node_key = "ed25519:A6EHv_POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg".parse().unwrap();
        let context = Context { address: "[2001:db8::7]:7443".into(), node_key, key_file: "/k".into() };
        let add = |name: &str| {
            let change = |contexts: &mut Contexts| {
                contexts.current = Some(name.into());
                contexts.contexts.insert(name.into(), context.clone());
                Ok(contexts.clone())
            };
            Contexts::change(&file, change).unwrap()
        };
        let contexts = add("a");
        assert_eq!(Contexts::read(&file).unwrap(), contexts);
        assert!(contexts.find("a").is_ok());
        // Several at once lose none.
        std::thread::scope(|scope| {
            for number in 0..20 {
                let name = format!("a{number}");
                scope.spawn(move || add(&name));
            }
        });
        assert_eq!(Contexts::read(&file).unwrap().contexts.len(), 21);
        assert!(contexts.find("b").unwrap_err().to_string().contains("known: a"));
        for (text, why) in [
            ("current = 1", "invalid type"),
            ("[contexts.a]\naddress = \"a\"\nnode_key = \"x\"", "not a public key"),
        ] {
            fs::write(&file, text).unwrap();
            let error = nodekeel_node::client::format_chain(&Contexts::read(&file).unwrap_err());
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn the_nearest_word_of_the_operator_decides_about_the_place() {
        let context = |name: &str| Place::Context(name.into());
        let socket = |path: &str| Place::Socket(path.into());
        for (options, variables, current, place) in [
            ((None, None), (None, None), None, socket("/var/lib/nodekeel/run/control.sock")),
            ((None, None), (None, None), Some("c"), context("c")),
            ((None, None), (None, Some("/v")), Some("c"), socket("/v")),
            ((None, None), (Some("e"), Some("/v")), Some("c"), context("e")),
            ((None, None), (Some(""), Some("")), Some("c"), context("c")),
            ((None, Some("o")), (Some("e"), Some("/v")), Some("c"), context("o")),
            ((Some("/s"), None), (Some("e"), Some("/v")), Some("c"), socket("/s")),
        ] {
            let variable = |name: &str| {
                let value = if name == "NODEKEEL_CONTEXT" { variables.0 } else { variables.1 };
                value.map(str::to_owned)
            };
            let chosen =
                choose_place(options.0.map(PathBuf::from), options.1.map(str::to_owned), variable, || {
                    Ok(current.map(str::to_owned))
                });
            assert_eq!(chosen.unwrap(), place);
        }
    }
}
