//! A custom key seal: the node's half of the keys of its encrypted volume, kept by a program, and the conformance suite.
//!
//! `cargo run -p examples --example own_key_seal`
//!
//! The program here is a script that keeps keys in a directory. A real one would ask a key server or a security module.
//! An encrypted volume takes any seal: `LuksVolumeConfig { seal, .. }`.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nodekeel_localstorage::testing::key_seal_conformance;
use nodekeel_localstorage::volume::{KeySeal, SealError, SealId, UnlockKey};

/// Calls `PROGRAM seal|unseal|remove ID`: it reads and writes the key, 32 bytes, by standard input and output, and exits
/// with 3 where it has none.
#[derive(Debug)]
struct ProgramSeal {
    program: PathBuf,
}

/// The exit code of the program without such a key.
const NO_SUCH_KEY: i32 = 3;

impl ProgramSeal {
    /// Runs the program with the key as its input: other processes can read arguments and environment. Gives its output,
    /// or none if it has no such key.
    fn run(&self, verb: &str, id: SealId, input: &[u8]) -> std::io::Result<Option<Vec<u8>>> {
        let mut command = Command::new(&self.program);
        command.args([verb, &id.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(input)?;
        }
        let output = child.wait_with_output()?;
        match output.status.code() {
            Some(0) => Ok(Some(output.stdout)),
            Some(NO_SUCH_KEY) => Ok(None),
            _ => Err(std::io::Error::other(format!("{verb} ended with {}", output.status))),
        }
    }
}

fn store_error(id: SealId) -> impl FnOnce(std::io::Error) -> SealError {
    move |error| SealError::Store { id, source: error.into() }
}

impl KeySeal for ProgramSeal {
    fn seal_key(&self, id: SealId, key: &UnlockKey) -> Result<(), SealError> {
        self.run("seal", id, key.expose_bytes()).map(drop).map_err(store_error(id))
    }

    fn unseal_key(&self, id: SealId) -> Result<Option<UnlockKey>, SealError> {
        let Some(bytes) = self.run("unseal", id, b"").map_err(store_error(id))? else { return Ok(None) };
        // What is no key is an error: it never counts as absent.
        UnlockKey::from_bytes(&bytes).map(Some).map_err(|_| SealError::Damaged { id })
    }

    fn remove_key(&self, id: SealId) -> Result<(), SealError> {
        self.run("remove", id, b"").map(drop).map_err(store_error(id))
    }
}

/// Keeps each key in a file next to it; a key is durable before it is visible.
const SCRIPT: &str = r#"#!/bin/sh
set -eu
umask 077
key="${0%/*}/$2"
case $1 in
seal) cat >"$key.new" && sync "$key.new" && mv "$key.new" "$key" && sync "${0%/*}" ;;
unseal) [ -e "$key" ] || exit 3; cat "$key" ;;
remove) rm -f "$key" ;;
esac
"#;

fn write_script(directory: &Path) -> std::io::Result<PathBuf> {
    let path = directory.join("keys");
    let mut file = File::options().write(true).create_new(true).mode(0o700).open(&path)?;
    file.write_all(SCRIPT.as_bytes())?;
    Ok(path)
}

fn main() -> anyhow::Result<()> {
    let scratch = tempfile::tempdir()?;
    let seal = ProgramSeal { program: write_script(scratch.path())? };
    key_seal_conformance(&seal);
    println!("conformance suite passed");

    let (id, key) = (SealId::new([7; 16], 1), UnlockKey::generate()?);
    seal.seal_key(id, &key)?;
    let kept = seal.unseal_key(id)?.is_some_and(|kept| kept.expose_bytes() == key.expose_bytes());
    println!("key {id} is kept: {kept}");
    std::fs::write(scratch.path().join(id.to_string()), "not a key")?;
    let damaged = seal.unseal_key(id).map(|_| "a key".to_owned()).map_err(|error| error.to_string());
    println!("what is no key is an error: {}", damaged.unwrap_or_else(|error| error));
    Ok(())
}
