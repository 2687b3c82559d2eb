//! `context`: the nodes on other machines that this operator calls. No node is asked.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use nodekeel_node::access::PublicKey;
use serde::Serialize;

use super::key::read_private_key;
use crate::contexts::{Context, Contexts, contexts_file};
use crate::error::CommandError;
use crate::output::{Printer, TextStyle};

#[derive(Debug, Subcommand)]
pub(crate) enum ContextCommand {
    /// List contexts
    List,
    /// Add or replace a context, and use it
    Add(AddArgs),
    /// Use a context where none is named
    Use {
        /// Name of the context; default: the control socket
        name: Option<String>,
    },
    /// Remove a context
    Remove {
        /// Name of the context
        name: String,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct AddArgs {
    /// Name of the context
    name: String,
    /// Address of the node's API
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    address: String,
    /// Public key of the node
    ///
    /// `nodectl operator list` prints it on the node.
    #[arg(long, value_name = "KEY")]
    node_key: PublicKey,
    /// File of the operator's private key
    ///
    /// `nodectl key new FILE` makes it.
    #[arg(long, value_name = "FILE")]
    key_file: PathBuf,
}

#[derive(Debug, Serialize)]
struct ContextView {
    name: String,
    current: bool,
    address: String,
    node_key: String,
    key_file: String,
}

/// An address with a port; the name may be one of DNS.
fn parse_address(text: &str) -> Result<String, String> {
    let is_valid = text.rsplit_once(':').is_some_and(|(host, port)| {
        let is_host =
            !host.is_empty() && (!host.contains(':') || host.starts_with('[') && host.ends_with(']'));
        is_host && port.parse::<u16>().is_ok_and(|port| port > 0)
    });
    if is_valid { Ok(text.to_owned()) } else { Err("use HOST:PORT, like 192.0.2.7:7443".to_owned()) }
}

impl ContextCommand {
    pub(crate) fn run(self, printer: &mut Printer) -> Result<(), CommandError> {
        let file = contexts_file().ok_or(CommandError::NoContextsFile)?;
        match self {
            Self::List => list(&Contexts::read(&file)?, printer),
            Self::Add(args) => change(&file, printer, |contexts| add(contexts, args)),
            Self::Use { name } => change(&file, printer, |contexts| select(contexts, name)),
            Self::Remove { name } => change(&file, printer, |contexts| remove(contexts, &name)),
        }
    }
}

/// Applies a change, and prints how it describes itself.
fn change(
    file: &Path,
    printer: &mut Printer,
    apply: impl FnOnce(&mut Contexts) -> Result<String, CommandError>,
) -> Result<(), CommandError> {
    let (text, current) =
        Contexts::change(file, |contexts| Ok((apply(contexts)?, contexts.current.clone())))?;
    printer.print_result(&serde_json::json!({ "current": current }), &text)
}

fn select(contexts: &mut Contexts, name: Option<String>) -> Result<String, CommandError> {
    let text = match &name {
        Some(name) => format!("using {name}: {}", contexts.find(name)?.address),
        None => "using the control socket of this machine".to_owned(),
    };
    contexts.current = name;
    Ok(text)
}

fn remove(contexts: &mut Contexts, name: &str) -> Result<String, CommandError> {
    contexts.find(name)?;
    contexts.contexts.remove(name);
    contexts.current = contexts.current.take().filter(|current| current != name);
    Ok(format!("removed {name}"))
}

fn add(contexts: &mut Contexts, args: AddArgs) -> Result<String, CommandError> {
    // Found out now rather than at the first call.
    let operator = read_private_key(&args.key_file)?.public_key();
    let file_error = |source| CommandError::File { path: args.key_file.clone(), source };
    // Commands are typed in other directories, too.
    let key_file = Path::canonicalize(&args.key_file).map_err(file_error)?;
    let AddArgs { name, address, node_key, .. } = args;
    contexts.contexts.insert(name.clone(), Context { address, node_key, key_file });
    contexts.current = Some(name.clone());
    Ok(format!("using {name}, as the operator with {operator}"))
}

fn list(contexts: &Contexts, printer: &mut Printer) -> Result<(), CommandError> {
    let views: Vec<_> = contexts
        .contexts
        .iter()
        .map(|(name, context)| ContextView {
            name: name.clone(),
            current: contexts.current.as_ref() == Some(name),
            address: context.address.clone(),
            node_key: context.node_key.to_string(),
            key_file: context.key_file.display().to_string(),
        })
        .collect();
    if printer.is_json {
        return Ok(printer.print_json(&views)?);
    }
    let rows: Vec<_> = views
        .into_iter()
        .map(|view| {
            let (mark, style) = if view.current { ("*", TextStyle::Strong) } else { ("", TextStyle::Plain) };
            (style, [mark.to_owned(), view.name, view.address, view.node_key, view.key_file])
        })
        .collect();
    Ok(printer.print_table(["", "NAME", "ADDRESS", "NODE KEY", "KEY FILE"], &rows)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_and_a_port() {
        for text in ["192.0.2.7:7443", "node-a.example:1", "[2001:db8::7]:7443"] {
            assert_eq!(parse_address(text).as_deref(), Ok(text));
        }
        for text in ["", "192.0.2.7", ":7443", "a:0", "a:65536", "2001:db8::7:7443", "a:b"] {
            assert!(parse_address(text).is_err(), "{text}");
        }
    }
}
