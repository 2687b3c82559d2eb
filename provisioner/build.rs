//! Compiles the protocols of the CSI and of the kubelet's plugin registration, with a compiler written in Rust: no protoc.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use protox::prost_reflect::{DescriptorPool, FieldDescriptor};

/// The option by which csi.proto marks what must not be logged.
const SECRET: &str = "csi.v1.csi_secret";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    if env::var_os("CARGO_FEATURE_CSI").is_none() {
        return Ok(());
    }
    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_source_info(true).include_imports(true);
    compiler.open_files(["csi/v1/csi.proto", "pluginregistration/v1/api.proto"])?;
    let secretive = with_secrets(&compiler.descriptor_pool())?;
    let out = env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?;
    fs::write(Path::new(&out).join("debug.rs"), debug_of(&secretive)?)?;
    // The kubelet's part is played by tests only.
    let has_client = env::var_os("CARGO_FEATURE_TESTING").is_some();
    tonic_prost_build::configure()
        .build_client(has_client)
        .skip_debug(secretive.keys().map(|name| format!(".{name}")))
        .compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}

/// The messages with a secret field, and what may be printed of each.
fn with_secrets(pool: &DescriptorPool) -> Result<BTreeMap<String, Vec<String>>, Box<dyn Error>> {
    let secret = pool.get_extension_by_name(SECRET).ok_or("csi.proto declares csi_secret")?;
    let is_secret = |field: &FieldDescriptor| field.options().has_extension(&secret);
    let mut found = BTreeMap::new();
    for message in pool.all_messages() {
        let (hidden, shown): (Vec<_>, Vec<_>) = message.fields().partition(is_secret);
        if hidden.is_empty() {
            continue;
        }
        let plain = shown.iter().filter(|field| field.containing_oneof().is_none());
        let names = plain.map(|field| field.name().to_owned()).collect();
        found.insert(message.full_name().to_owned(), names);
    }
    Ok(found)
}

/// Writes what the derived `Debug` would have been, without the secrets.
fn debug_of(messages: &BTreeMap<String, Vec<String>>) -> Result<String, Box<dyn Error>> {
    let mut text = String::new();
    for (name, fields) in messages {
        let name = name.strip_prefix("csi.v1.").filter(|name| !name.contains('.'));
        let name = name.ok_or("a secret is in a nested message: teach build.rs to name it")?;
        writeln!(text, "impl ::core::fmt::Debug for {name} {{")?;
        writeln!(text, "    fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {{")?;
        write!(text, "        f.debug_struct({name:?})")?;
        for field in fields {
            write!(text, ".field({field:?}, &self.{field})")?;
        }
        writeln!(text, ".finish_non_exhaustive()\n    }}\n}}")?;
    }
    Ok(text)
}
