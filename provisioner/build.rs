//! Compiles the CSI and kubelet plugin registration protocols with protox, a compiler written in Rust: no
//! protoc is needed.

#![allow(
    clippy::disallowed_methods,
    reason = "cargo passes the directories of a build script in the environment"
)]

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, EnumValueDescriptorProto, FieldDescriptorProto, FileDescriptorSet,
};
use protox::prost_reflect::{DescriptorPool, FieldDescriptor};

/// The option with which csi.proto marks fields that must not be logged.
const SECRET: &str = "csi.v1.csi_secret";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    if env::var_os("CARGO_FEATURE_CSI").is_none() {
        return Ok(());
    }
    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_source_info(true).include_imports(true);
    compiler.open_files(["csi/v1/csi.proto", "pluginregistration/v1/api.proto"])?;
    let secret_messages = find_secret_messages(&compiler.descriptor_pool())?;
    let out = env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?;
    fs::write(Path::new(&out).join("debug.rs"), generate_debug(&secret_messages)?)?;
    let mut files = compiler.file_descriptor_set();
    restore_volume_condition(&mut files)
        .ok_or("csi.proto has another shape: look at restore_volume_condition")?;
    // Only tests need clients: they act as the kubelet.
    let has_client = env::var_os("CARGO_FEATURE_TESTING").is_some();
    tonic_prost_build::configure()
        .build_client(has_client)
        .skip_debug(secret_messages.keys().map(|name| format!(".{name}")))
        .compile_fds(files)?;
    Ok(())
}

/// Adds the condition of a volume, which release 1.13 of the specification has removed and kubelets still read: with the
/// feature gate CSIVolumeHealth they export it as `kubelet_volume_stats_health_status_abnormal`.
///
/// *Source:* csi.proto of release 1.12; Kubernetes 1.36, `pkg/volume/csi/csi_client.go`.
fn restore_volume_condition(files: &mut FileDescriptorSet) -> Option<()> {
    let csi = files.file.iter_mut().find(|file| file.package() == "csi.v1")?;
    // The generator would look for what is added in the text of the file.
    csi.source_code_info = None;
    let field = |name: &str, number, (kind, type_name): (Type, Option<&str>)| FieldDescriptorProto {
        name: Some(name.to_owned()),
        number: Some(number),
        label: Some(Label::Optional.into()),
        r#type: Some(kind.into()),
        type_name: type_name.map(str::to_owned),
        ..FieldDescriptorProto::default()
    };
    csi.message_type.push(DescriptorProto {
        name: Some("VolumeCondition".to_owned()),
        field: vec![field("abnormal", 1, (Type::Bool, None)), field("message", 2, (Type::String, None))],
        ..DescriptorProto::default()
    });
    let messages = &mut csi.message_type;
    let response = messages.iter_mut().find(|message| message.name() == "NodeGetVolumeStatsResponse")?;
    response.reserved_range.clear();
    let condition = (Type::Message, Some(".csi.v1.VolumeCondition"));
    response.field.push(field("volume_condition", 2, condition));
    let capability = messages.iter_mut().find(|message| message.name() == "NodeServiceCapability")?;
    let call = capability.nested_type.iter_mut().find(|message| message.name() == "RPC")?;
    let kinds: &mut EnumDescriptorProto = call.enum_type.first_mut()?;
    kinds.reserved_range.clear();
    kinds.value.push(EnumValueDescriptorProto {
        name: Some("VOLUME_CONDITION".to_owned()),
        number: Some(4),
        ..EnumValueDescriptorProto::default()
    });
    Some(())
}

/// The messages with a secret field, and the fields of each that may be printed.
fn find_secret_messages(pool: &DescriptorPool) -> Result<BTreeMap<String, Vec<String>>, Box<dyn Error>> {
    let secret = pool.get_extension_by_name(SECRET).ok_or("csi.proto does not declare csi_secret")?;
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

/// Generates `Debug` implementations equal to the derived ones, without the secret fields.
fn generate_debug(messages: &BTreeMap<String, Vec<String>>) -> Result<String, Box<dyn Error>> {
    let mut text = String::new();
    for (name, fields) in messages {
        let name = name.strip_prefix("csi.v1.").filter(|name| !name.contains('.'));
        let name = name.ok_or("a nested message has a secret field: extend build.rs to name nested types")?;
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
